"""The diagonal factor: one second moment per coordinate, as in Adafactor (Shazeer and Stern 2018)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Factor, State, damped_root


@dataclass(frozen=True)
class Diagonal(Factor):
    """diag(C) (d), 4 d bytes."""

    name: ClassVar[str] = "diagonal"

    def slots(self) -> dict[str, tuple[int, ...]]:
        return {"energy": (self.dim,)}

    def accumulate(self, state: State, x: Tensor, rate: float, turn: float) -> tuple[State, State]:
        # c <- (1 - rate) c + rate mean_k(x²)
        return {**state, "energy": state["energy"].lerp(x.square().mean(-2), rate)}, {}

    def mean(self, state: State) -> Tensor:
        return state["energy"].mean(-1)

    def diagonal(self, state: State) -> Tensor:
        return state["energy"]

    def whitener(self, state: State, damping: float, unit: bool = False) -> Callable[[Tensor], Tensor]:
        root = damped_root(state["energy"], self.mean(state), damping, unit)[..., None, :]
        return lambda x: x * root

    def rotate(self, state: State, x: Tensor) -> Tensor:
        return x

    def unrotate(self, state: State, y: Tensor) -> Tensor:
        return y
