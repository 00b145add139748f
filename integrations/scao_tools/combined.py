"""Several optimizers that look like one, each for parameters of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class CombinedOptimizer(torch.optim.Optimizer):
    """One ``param_groups``, one ``state`` and one state dict over optimizers that share no parameter.

    A group stays the same dict in its part, so a learning rate that is set here holds there. Groups cannot be added.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        # Parts that have state already are refused: it would have to be moved.
        if any(part.state for part in self.parts):
            raise ValueError("optimizers can be combined only before their first step")
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share()
        for part in self.parts:
            part.step()
        return loss

    def _share(self) -> None:
        # In every step, since load_state_dict puts new objects into place.
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[first:last], self.state
            first = last
