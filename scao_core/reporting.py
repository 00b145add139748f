"""The part of the optimizer that tells what it does; nothing here changes a result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import groups
from .plan import Plan
from .telemetry import Report, StepCallback, Telemetry


class ReportingOptimizer(torch.optim.Optimizer):
    """Plans, counters, reports and warnings of SCAO."""

    _telemetry: Telemetry

    @property
    def skipped_steps(self) -> int:
        """Steps left out because a gradient was not finite, since this optimizer was made."""
        return self._telemetry.totals.skipped_steps

    def report(self) -> Report:
        """Totals since this optimizer was made, with the last step's report; ``print`` shows a table."""
        stats = self.precond_stats()
        return replace(
            self._telemetry.totals,
            matrices=stats["matrices"],
            adam_tensors=stats["adam_tensors"],
            state_bytes=stats["state_bytes"],
        )

    def on_step(self, callback: StepCallback) -> Callable[[], None]:
        """Call ``callback(step_report)`` after every step; returns a function that stops it."""
        callbacks = self._telemetry.callbacks
        key = max(callbacks, default=-1) + 1
        callbacks[key] = callback

        def stop() -> None:
            callbacks.pop(key, None)

        return stop

    def plans(self) -> list[tuple[Tensor, Plan]]:
        """What is kept for each trainable parameter, and its exact bytes; allocates nothing."""
        return groups.planned(self.param_groups)

    def precond_stats(self) -> dict[str, Any]:
        """Counts of parameters (``layers``) and matrices that are preconditioned, of Adam tensors, and bytes."""
        return groups.statistics(self.param_groups, self.state)

    def _warn_once(self, what: str, message: str) -> None:
        if self._telemetry.first(what):
            warnings.warn(message, UserWarning, stacklevel=5)
