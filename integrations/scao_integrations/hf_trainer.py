"""SCAO in the Hugging Face Trainer, and in those of TRL, which derive from it.

::

    Trainer(model, args, ..., **scao_trainer_kwargs(spike_rank=8))                # by its class: patches nothing
    register(); TrainingArguments(..., optim="scao", optim_args="spike_rank=8")   # by its name: opt-in, can be undone
    Trainer(..., callbacks=[ScaoCallback()])                                      # what it did, in the Trainer's logs

Learning rate, betas and eps are those of the ``TrainingArguments`` unless they are given here. Weight decay is always
theirs, because the Trainer writes it into the groups. transformers is imported when one of these is used.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from scao_core import SCAO, ConfigError, Options, Report, ScaoError, StepReport

NAME, _MEMBER = "scao", "SCAO"
_OLDEST = "4.48"  # what the extra "hf" in pyproject.toml asks for
_LATER = "the TrainingArguments' value: give the Trainer the callbacks too"  # SCAO's refusal of it shows this


class FrameworkError(ScaoError, ImportError):
    """transformers is missing or too old; the message has the command that brings it."""


def _require_transformers() -> None:
    wanted = f"SCAO's Hugging Face door needs transformers >= {_OLDEST}"
    install = f'run: pip install "transformers>={_OLDEST}" accelerate'
    try:
        import transformers
    except ImportError as error:
        raise FrameworkError(f"{wanted}, which does not import ({error}); {install}") from error
    found, oldest = ([int(n) for n in re.findall(r"\d+", v)[:2]] for v in (transformers.__version__, _OLDEST))
    if found < oldest:
        raise FrameworkError(f"{wanted}, found {transformers.__version__}; {install}")


def scao_trainer_kwargs(**options: Any) -> dict[str, Any]:
    """Arguments that make a ``Trainer``, or one that derives from it, use SCAO: ``Trainer(model, args, **these)``.

    The Trainer hands ``optimizer_cls_and_kwargs`` to the class as it is; of its arguments only the weight decay gets
    there, in its two groups. So the callback that comes along fills in ``lr`` (``learning_rate``), ``betas``
    (``adam_beta1``, ``adam_beta2``) and ``eps`` (``adam_epsilon``) when the Trainer is built, where no option gives them;
    ``weight_decay`` may only repeat that of the arguments. Without the callback SCAO refuses to start. Callbacks of your
    own go into the list ``these["callbacks"]``.

    Raises:
        ConfigError: an option is wrong or does not exist (the message names the nearest one).
        FrameworkError: transformers is missing or too old.
    """
    _require_transformers()
    kwargs: dict[str, Any] = {**dict.fromkeys(("lr", "betas", "eps"), _LATER), **_checked(options)}
    return {"optimizer_cls_and_kwargs": (SCAO, kwargs), "callbacks": [__getattr__("ScaoCallback")(kwargs)]}


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as SCAO takes them, converted, those of older code translated; a wrong one raises now."""
    if "params" in options:
        Options.from_mapping({"params": None})  # not an option, and the error says so
    plain, probe = Options().as_dict(), SCAO([torch.nn.Parameter(torch.zeros(1))], **options)
    return {name: value for name, value in probe.defaults.items() if name in options or value != plain[name]}


def _of_arguments(args: Any) -> dict[str, Any]:
    return {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def _optim_args(text: str | None) -> dict[str, str]:
    """``"spike_rank=8,betas=0.9,0.99"`` by name; an item without ``=`` belongs to the value before it."""
    items = [item.partition("=") for item in re.split(r",(?=[^,=]*=)", text or "") if item.strip()]
    if not all(equals for _, equals, _ in items):
        raise ConfigError(f"optim_args={text!r}: expected name=value pairs, e.g. 'spike_rank=8,damping=1e-3'")
    return {name.strip(): value.strip(" ,") for name, _, value in items}


def _kwargs_by_name(args: Any) -> dict[str, Any]:
    """What SCAO gets from TrainingArguments with ``optim="scao"``; raises on anything that would not work."""
    options = _checked(_optim_args(args.optim_args))
    _refuse_conflicts(args, options)
    return {**_of_arguments(args), **options}


def _refuse_conflicts(args: Any, options: Mapping[str, Any]) -> None:
    """Raise if a setting of the TrainingArguments would drop SCAO, or be dropped, without a word."""
    if (decay := options.get("weight_decay", args.weight_decay)) != args.weight_decay:
        raise ConfigError(
            f"weight_decay={decay} would have no effect: set TrainingArguments.weight_decay (here {args.weight_decay})"
        )
    if targets := getattr(args, "optim_target_modules", None):
        raise ConfigError(
            f"optim_target_modules={targets!r} would have no effect: SCAO preconditions every matrix; leave it out"
        )
    launched = getattr(getattr(args, "deepspeed_plugin", None), "hf_ds_config", None)  # by `accelerate launch`
    config: Mapping[str, Any] = getattr(getattr(args, "hf_deepspeed_config", None) or launched, "config", {})
    if block := config.get("optimizer"):
        raise ConfigError(f'the "optimizer" block of the DeepSpeed config ({block}) would replace SCAO: delete it')
    zero = config.get("zero_optimization") or {}
    offload = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if offload or str(zero.get("stage", 0)) != "0":
        raise ConfigError(
            f"DeepSpeed ZeRO (stage {zero.get('stage')}) hides the matrices from SCAO in flat shards"
            f"{', and ZeRO-Offload replaces it by DeepSpeedCPUAdam' if offload else ''}: set zero_optimization to "
            '{"stage": 0} without offload, or use DistributedDataParallel'
        )


_patches: list[tuple[type, str, Any, Any]] = []  # while registered: class, attribute, what was there before, and ours


def register() -> None:
    """Let ``TrainingArguments(optim="scao", optim_args="name=value,...")`` mean SCAO, in this process.

    Adds a member to transformers' ``OptimizerNames``, which command lines list, and wraps two functions, which do for
    every other name what they did: ``TrainingArguments.__post_init__``, which then checks the options at once, and
    ``Trainer.get_optimizer_cls_and_kwargs``. Registering again does nothing; `unregister` undoes it.

    Raises:
        ConfigError: this transformers has a "scao" that is not ours; nothing has changed.
        FrameworkError: transformers is missing or too old.
    """
    _require_transformers()
    from transformers import Trainer, TrainingArguments
    from transformers.training_args import OptimizerNames

    if _patches:
        return
    if NAME in OptimizerNames._value2member_map_ or _MEMBER in OptimizerNames.__members__:
        raise ConfigError(
            f'optim="{NAME}" already means something else in this process, so it was left as it is: use '
            "Trainer(..., **scao_trainer_kwargs()), which needs no registration"
        )
    _patch(TrainingArguments, "__post_init__", _checking)
    _patch(Trainer, "get_optimizer_cls_and_kwargs", _dispatching)
    _set_member(OptimizerNames, True)


def unregister() -> None:
    """Undo `register`: the very objects that were there before are back.

    Raises:
        ConfigError: somebody replaced the same functions later; nothing has changed.
    """
    for owner, name, _, ours in _patches:
        if inspect.getattr_static(owner, name) is not ours:
            raise ConfigError(f"{owner.__name__}.{name} was replaced after SCAO was registered: undo that first")
    if _patches:
        from transformers.training_args import OptimizerNames

        _set_member(OptimizerNames, False)
    while _patches:
        owner, name, before, _ = _patches.pop()
        setattr(owner, name, before)


def _patch(owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
    before = inspect.getattr_static(owner, name)
    _patches.append((owner, name, before, wrap(before)))
    setattr(owner, name, _patches[-1][3])


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """``with registered(): ...``; a registration that was there before stays."""
    before = bool(_patches)
    register()
    try:
        yield
    finally:
        if not before:
            unregister()


def _checking(before: Any) -> Any:
    @functools.wraps(before)
    def post_init(self: Any) -> None:
        before(self)
        if self.optim == NAME:
            _kwargs_by_name(self)

    return post_init


def _dispatching(before: Any) -> Any:
    @functools.wraps(before.__func__)
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        return (SCAO, _kwargs_by_name(args)) if args.optim == NAME else before.__func__(args, model)

    return staticmethod(get_optimizer_cls_and_kwargs)


def _set_member(names: Any, present: bool) -> None:
    """Add our member to an enum of text, as its class body would, or take it out (Python 3.10 to 3.13)."""
    ordered = [(names._member_names_, _MEMBER), (getattr(names, "_hashable_values_", []), NAME)]
    if not present:
        del names._member_map_[_MEMBER], names._value2member_map_[NAME]
        type.__delattr__(names, _MEMBER)
        for entries, entry in ordered:
            entries[:] = [kept for kept in entries if kept != entry]
        return
    member = str.__new__(names, NAME)
    member._name_, member._value_, member._sort_order_ = _MEMBER, NAME, len(names._member_names_)
    member.__objclass__ = names
    type.__setattr__(names, _MEMBER, member)
    names._member_map_[_MEMBER] = names._value2member_map_[NAME] = member
    for entries, entry in ordered:
        entries.append(entry)


class _Reporting:
    """SCAO's counters and learning rates in the Trainer's logs, for every ``report_to``; warns once without SCAO."""

    def __init__(self, kwargs: dict[str, Any] | None = None) -> None:
        self._kwargs = kwargs
        self._awaited = [name for name, value in (kwargs or {}).items() if value is _LATER]
        self._scao: Any = None  # while it trains
        self._totals, self._age, self._rates = Report(), 0, list[float]()

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Fill in what comes from the TrainingArguments; refuse what would drop SCAO."""
        if self._kwargs is not None:
            _refuse_conflicts(args, self._kwargs)
            self._kwargs.update({name: _of_arguments(args)[name] for name in self._awaited})

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
            if (now := _of_arguments(args)[name]) != scao.defaults[name]:
                raise ConfigError(
                    f"{name} is {now} in the TrainingArguments but {scao.defaults[name]} in SCAO: it changed after the "
                    'Trainer was built. Use optim="scao", or call scao_trainer_kwargs() anew for each Trainer'
                )
        self._totals, self._age = Report(), 0
        self._scao, self._stop = scao, scao.on_step(self._count)
        _go_first(self)

    def _count(self, report: StepReport) -> None:
        self._totals.add(report)
        self._rates = [float(group["lr"]) for group in self._scao.param_groups]  # before the schedule moves on
        self._age = 0 if report.refreshed else self._age + (not report.skipped)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add SCAO's values to a log of training: to what the loggers get, and to ``state.log_history``."""
        if self._scao is None or not logs or "loss" not in logs:
            return
        values = {
            "scao/skipped_steps": self._totals.skipped_steps,
            "scao/steps_since_refresh": self._age,
            "scao/failed_refreshes": self._totals.failed_refreshes,
            "scao/degraded_bases": self._totals.degraded,
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
    _require_transformers()
    from transformers import TrainerCallback

    members = {"__module__": __name__, "__doc__": _Reporting.__doc__}
    return globals().setdefault(name, type(name, (_Reporting, TrainerCallback), members))
