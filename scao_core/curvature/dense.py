"""The dense factor: all of C (d × d), for short sides such as the rank side of LoRA."""

from __future__ import annotations

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

    def accumulate(self, state: State, x: Tensor, rate: float) -> tuple[State, State]:
        # C <- (1 - rate) C + rate xᵀx / k
        cov = state["cov"].lerp((x.mT @ x) / self.samples, rate)
        return {**state, "cov": cov}, {}

    def mean(self, state: State) -> Tensor:
        return torch.diagonal(state["cov"], dim1=-2, dim2=-1).mean(-1)

    def whiten(self, state: State, x: Tensor, damping: float, unit: bool = False) -> Tensor:
        # Q (Λ + δ mean)^-1/2 Qᵀ
        basis = state["basis"]
        root = damped_root(spectrum(state["cov"], basis), self.mean(state)[..., None], damping, unit)
        return times(x, (basis * root[..., None, :]) @ basis.mT)

    def rotate(self, state: State, x: Tensor) -> Tensor:
        return times(x, state["basis"])

    def unrotate(self, state: State, y: Tensor) -> Tensor:
        return times(y, state["basis"].mT)

    def refresh(self, snapshot: State) -> tuple[Tensor, Tensor]:
        return eigenbasis(snapshot["cov"])

    def carry(self, old: Tensor, new: Tensor, moment: Tensor) -> Tensor:
        # v' = v (QᵀQ')∘², the diagonal of the rotated second moment, cross terms unknown
        return times(moment, (old.mT @ new).square())
