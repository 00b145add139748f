"""A callback with which SCAO's counters and learning rates reach the logs of a transformers ``Trainer``."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from scao_core import SCAO, ConfigError, Report, StepReport

from .transformers_names import of_arguments, refuse_conflicts, require_transformers

LATER = "the TrainingArguments' value: give the Trainer the callbacks too"  # SCAO's refusal of it shows this


class _Reporting:
    """SCAO's counters and learning rates in the Trainer's logs, for every ``report_to``; warns once without SCAO."""

    def __init__(self, kwargs: dict[str, Any] | None = None) -> None:
        self._kwargs = kwargs
        self._awaited = [name for name, value in (kwargs or {}).items() if value is LATER]
        self._scao: Any = None  # while it trains
        self._totals, self._rates = Report(), list[float]()

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Fill in what comes from the TrainingArguments; refuse what would drop SCAO."""
        if self._kwargs is not None:
            refuse_conflicts(args, self._kwargs)
            self._kwargs.update({name: of_arguments(args)[name] for name in self._awaited})

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Start to listen, or warn that there is nothing to hear."""
        self.on_train_end(args, state, control)
        scao = optimizer
        while scao is not None and not isinstance(scao, SCAO):
            scao = getattr(scao, "optimizer", None)  # what accelerate wrapped
        if scao is None:
            got = type(getattr(optimizer, "optimizer", optimizer)).__name__
            warnings.warn(f"ScaoCallback has nothing to report: the optimizer is {got}, not SCAO", stacklevel=2)
            return
        for name in self._awaited:
            if (now := of_arguments(args)[name]) != scao.defaults[name]:
                raise ConfigError(
                    f"{name} is {now} in the TrainingArguments but {scao.defaults[name]} in SCAO: it changed after the "
                    'Trainer was built. Use optim="scao", or call scao_trainer_kwargs() anew for each Trainer'
                )
        self._totals = Report()
        self._scao, self._stop = scao, scao.on_step(self._count)
        _go_first(self)

    def _count(self, report: StepReport) -> None:
        self._totals.add(report)
        self._rates = [float(group["lr"]) for group in self._scao.param_groups]  # before the schedule moves on

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add SCAO's values to a log of training: to what the loggers get, and to ``state.log_history``."""
        if self._scao is None or not logs or "loss" not in logs:
            return
        totals, last = self._totals, self._totals.last or StepReport(0)
        values = {
            "scao/skipped_steps": totals.skipped_steps,
            "scao/refresh_age": last.oldest,
            "scao/failed_refreshes": totals.failed_refreshes,
            "scao/degraded_bases": totals.degraded,
            "scao/queued_refreshes": last.queued,
            "scao/waited_seconds": round(totals.waited, 3),
            "scao/lost_blocks": totals.lost_bases + totals.restarted,
            **{f"scao/{tier}_bytes": count for tier, count in last.tiers.items() if count},
            **{f"scao/lr_{i}": rate for i, rate in enumerate(self._rates)},
        }
        logs.update(values)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop to listen."""
        if self._scao is not None:
            self._stop()
            self._scao = None


def _go_first(callback: Any) -> None:
    """Move a callback before the loggers, which the Trainer puts first, so that they get what it adds to a log."""
    from transformers.trainer_callback import CallbackHandler

    for caller in inspect.stack(0):  # no event names the handler that calls it, so it is looked for among the callers
        handler = caller.frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            handler.callbacks.insert(0, handler.callbacks.pop(handler.callbacks.index(callback)))


def __getattr__(name: str) -> Any:
    """``ScaoCallback`` derives from a class of transformers, so it is made when it is first asked for."""
    if name != "ScaoCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_transformers()
    from transformers import TrainerCallback

    members = {"__module__": __name__, "__doc__": _Reporting.__doc__}
    return globals().setdefault(name, type(name, (_Reporting, TrainerCallback), members))
