"""The spiked factor: a few dominant directions over a flat rest, for the wide side of LoRA. The "sparse curvature"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..linalg import orthonormalize
from .base import Factor, State, damped_root, tiny

_START_ROUNDS = 2  # chosen: rounds of subspace iteration on the first gradient


@dataclass(frozen=True)
class Spiked(Factor):
    """C = V diag(μ) Vᵀ + τ (I - V Vᵀ), with V (d × ρ) orthonormal: 4 (d ρ + ρ + 1) bytes.

    V follows the dominant eigenvectors by one step of orthogonal iteration on each gradient (Oja 1982; Gram-Schmidt keeps
    the columns in order of dominance, so μ needs no rotation). μ and τ are measured along the current V at every step.

    Args:
        rank: ρ, the number of directions; smaller than d and at most k.
    """

    rank: int = 4

    name: ClassVar[str] = "spiked"

    def slots(self) -> dict[str, tuple[int, ...]]:
        return {"basis": (self.dim, self.rank), "energy": (self.rank,), "tail": ()}

    def start(self, state: State, x: Tensor) -> State:
        # V <- orth(xᵀΩ), then orth(xᵀx V): a range finder with smooth columns (discrete cosines) in place of random ones
        rows = torch.arange(self.samples, dtype=x.dtype, device=x.device)[:, None]
        columns = torch.arange(self.rank, dtype=x.dtype, device=x.device)
        basis = orthonormalize(x.mT @ torch.cos(math.pi / self.samples * (rows + 0.5) * columns))
        for _ in range(_START_ROUNDS):
            basis = orthonormalize(x.mT @ (x @ basis))
        return {**state, "basis": basis}

    def accumulate(self, state: State, x: Tensor, rate: float) -> tuple[State, State]:
        # μ <- (1 - rate) μ + rate mean_k((xV)²);  τ likewise from what is left of the energy of x
        along = x @ state["basis"]
        spikes = along.square().mean(-2)
        total = torch.linalg.vector_norm(x, dim=(-2, -1)).square() / self.samples
        rest = ((total - spikes.sum(-1)) / (self.dim - self.rank)).clamp_min(0)
        energy, tail = state["energy"].lerp(spikes, rate), state["tail"].lerp(rest, rate)
        return {**state, "energy": energy, "tail": tail}, {"basis": self._follow(state["basis"], x, along, energy, tail, rate)}

    def _follow(self, basis: Tensor, x: Tensor, along: Tensor, energy: Tensor, tail: Tensor, rate: float) -> Tensor:
        """orth((1 - rate) V + rate C_t V / μ) with C_t = xᵀx / k: V where nothing new came, turned towards what did."""
        scale = torch.maximum(energy, tail[..., None]).clamp_min(tiny(x))
        target = basis.lerp(x.mT @ (along / scale[..., None, :]) / self.samples, rate)
        # A direction that collapsed (the gradients so far had a lower rank than ρ) starts again from a row of x.
        lost = torch.linalg.vector_norm(basis, dim=-2, keepdim=True) < 0.5
        return orthonormalize(torch.where(lost, x[..., : self.rank, :].mT, target))

    def mean(self, state: State) -> Tensor:
        return (state["energy"].sum(-1) + (self.dim - self.rank) * state["tail"]) / self.dim

    def whiten(self, state: State, x: Tensor, damping: float, unit: bool = False) -> Tensor:
        # x C^-1/2 = τ^-1/2 x + (xV) diag(μ^-1/2 - τ^-1/2) Vᵀ
        mean, basis = self.mean(state), state["basis"]
        tail = damped_root(state["tail"], mean, damping, unit)[..., None, None]
        gain = damped_root(state["energy"], mean[..., None], damping, unit)[..., None, :] - tail
        return tail * x + self._spread((x @ basis) * gain, basis, x)

    @staticmethod
    def _spread(along: Tensor, basis: Tensor, like: Tensor) -> Tensor:
        """along Vᵀ (…, k, d) in the memory layout of ``like``."""
        return along @ basis.mT if like.stride(-1) == 1 else (basis @ along.mT).mT

    @property
    def rotated_dim(self) -> int:
        return self.rank + self.dim

    def rotate(self, state: State, x: Tensor) -> Tensor:
        # W = [V, I - V Vᵀ], a Parseval frame: W Wᵀ = V Vᵀ + (I - V Vᵀ)² = I
        along = x @ state["basis"]
        return torch.cat([along, x - along @ state["basis"].mT], dim=-1)

    def unrotate(self, state: State, y: Tensor) -> Tensor:
        along, rest = y[..., : self.rank], y[..., self.rank :]
        return rest + (along - rest @ state["basis"]) @ state["basis"].mT
