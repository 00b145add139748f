"""The dense factor: all of C (d × d), for short sides such as the rank side of LoRA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..linalg import eigenbasis, times
from .base import Refreshed, State, damped_root


def spectrum(cov: Tensor, basis: Tensor) -> Tensor:
    """diag(Qᵀ C Q) (…, d): the fresh second moments along a basis that may be stale.

    This is the eigenvalue correction of Eschenhagen et al. 2025, "Purifying Shampoo".
    """
    return (basis * (cov @ basis)).sum(-2).clamp_min(0)


@dataclass(frozen=True)
class Dense(Refreshed):
    """C (d × d) and an orthogonal basis Q (d × d) of it, 8 d² bytes; Q is refreshed at intervals, its scale never stale."""

    name: ClassVar[str] = "dense"

    def slots(self) -> dict[str, tuple[int, ...]]:
        return {"cov": (self.dim, self.dim), "basis": (self.dim, self.dim)}

    def diagonal_basis(self, like: Tensor, batch: tuple[int, ...] = ()) -> Tensor:
        return torch.eye(self.dim, dtype=like.dtype, device=like.device).expand(*batch, -1, -1).contiguous()

    def accumulate(self, state: State, x: Tensor, rate: float, turn: float) -> tuple[State, State]:
        return self.accumulate_gram(state, x.mT @ x, rate), {}

    def accumulate_gram(self, state: State, gram: Tensor, rate: float) -> State:
        """C <- (1 - rate) C + rate xᵀx / k, from xᵀx (…, d, d)."""
        return {**state, "cov": state["cov"].lerp(gram / self.samples, rate)}

    def mean(self, state: State) -> Tensor:
        return torch.diagonal(state["cov"], dim1=-2, dim2=-1).mean(-1)

    def diagonal(self, state: State) -> Tensor:
        return torch.diagonal(state["cov"], dim1=-2, dim2=-1)

    def root(self, state: State, damping: float, unit: bool = False) -> Tensor:
        """(C + δ mean)^-1/2 = Q (Λ + δ mean)^-1/2 Qᵀ (…, d, d)."""
        basis = state["basis"]
        root = damped_root(spectrum(state["cov"], basis), self.mean(state), damping, unit)
        return (basis * root[..., None, :]) @ basis.mT

    def whitener(self, state: State, damping: float, unit: bool = False) -> Callable[[Tensor], Tensor]:
        root = self.root(state, damping, unit)
        return lambda x: times(x, root)

    def rotate(self, state: State, x: Tensor) -> Tensor:
        return times(x, state["basis"])

    def unrotate(self, state: State, y: Tensor) -> Tensor:
        return times(y, state["basis"].mT)

    def refresh(self, snapshot: State) -> tuple[Tensor, Tensor]:
        return eigenbasis(snapshot["cov"])

    def carry(self, old: Tensor, new: Tensor, moment: Tensor) -> Tensor:
        # v' = v (QᵀQ')∘², the diagonal of the rotated second moment, cross terms unknown
        return times(moment, (old.mT @ new).square())
