"""The spiked factor: a few dominant directions over a diagonal rest, for the wide side of LoRA. The "sparse curvature"."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..linalg import along_rows, deflated, orthonormal_rows
from .base import Factor, State, damped_root, tiny

_LOST = 1e-6  # chosen: share of a gradient's energy below which a direction holds almost nothing of it
_EARLY = 0.3  # chosen: weight of one gradient above which a basis is orthonormalized with care
_START_ROUNDS = 2  # chosen: rounds of subspace iteration on the first gradient


@dataclass(frozen=True)
class Spiked(Factor):
    """C = Vᵀ diag(μ) V + P diag(τ s) P with P = I - VᵀV and the rows of V (ρ × d) orthonormal: 4 (d (ρ + 1) + ρ + 1) bytes.

    V follows the dominant eigenvectors by steps of orthogonal iteration on the gradients (Oja 1982; Gram-Schmidt
    keeps the rows in order of dominance, so μ needs no rotation). μ and τ, the size of the rest, are measured along the
    current V at every step; the profile s of the rest over the coordinates, when V turns. Roots and inverses are taken
    of the two parts, Vᵀ diag(f(μ)) V + P diag(f(τ s)) P: exact where s is constant, positive definite for all s.

    Args:
        rank: ρ, the number of directions; smaller than d and at most k.
    """

    rank: int = 3

    name: ClassVar[str] = "spiked"

    def slots(self) -> dict[str, tuple[int, ...]]:
        return {"basis": (self.rank, self.dim), "energy": (self.rank,), "tail": (), "rest": (self.dim,)}

    def start(self, state: State, x: Tensor) -> State:
        # V <- orth(Ωᵀx), then orth(orth(V xᵀ) x): a range finder with smooth rows (discrete cosines) in place of random
        # ones
        columns = torch.arange(self.samples, dtype=x.dtype, device=x.device)
        rows = torch.arange(self.rank, dtype=x.dtype, device=x.device)[:, None]
        basis = orthonormal_rows(torch.cos(math.pi / self.samples * (columns + 0.5) * rows) @ x, careful=True)
        for _ in range(_START_ROUNDS):
            basis = orthonormal_rows(orthonormal_rows(along_rows(x, basis).mT, careful=True) @ x, careful=True)
        return {**state, "basis": basis}

    def accumulate(self, state: State, x: Tensor, rate: float, turn: float) -> tuple[State, State]:
        along = along_rows(x, state["basis"])
        norms = torch.linalg.vector_norm(x, dim=-1).square()
        new = self.measure(state, along, norms, rate)
        if turn == 0:
            return new, {}
        new["rest"] = state["rest"].lerp(deflated(x, along, state["basis"]).square().mean(-2), turn)
        return new, {"basis": self.follow(new, self.pull(new, along, norms).mT @ x, turn)}

    def measure(self, state: State, along: Tensor, norms: Tensor, rate: float) -> State:
        """μ and τ from x Vᵀ (…, k, ρ) and the squared norms of the rows of x (…, k).

        μ <- (1 - rate) μ + rate mean_k((x Vᵀ)²), and τ likewise from the energy that is left for the d - ρ other
        directions.
        """
        spikes = along.square().mean(-2)
        rest = ((norms.mean(-1) - spikes.sum(-1)) / (self.dim - self.rank)).clamp_min(0)
        return {**state, "energy": state["energy"].lerp(spikes, rate), "tail": state["tail"].lerp(rest, rate)}

    def pull(self, state: State, along: Tensor, norms: Tensor) -> Tensor:
        """Weights (…, k, ρ) of the rows of x in what each direction is drawn to: those of V C_t / μ with C_t = xᵀx / k.

        A direction that holds almost nothing of x is also drawn to one row of x: one that has collapsed, since all
            gradients so far had a lower rank than ρ, starts again there.
        """
        energy = torch.maximum(state["energy"], state["tail"][..., None]).clamp_min(tiny(along))
        lost = along.square().sum(-2) <= _LOST * norms.sum(-1, keepdim=True)
        row = norms[..., : self.rank].clamp_min(tiny(along)).rsqrt() * lost
        weights = along / (self.samples * energy[..., None, :])
        weights[..., : self.rank, :] += torch.diag_embed(row)
        return weights

    def follow(self, state: State, drawn: Tensor, turn: float) -> Tensor:
        """orth((1 - w) V + w · drawn), w = turn: V where nothing new came, turned towards what did."""
        # Early on, when one gradient weighs much, the rows may turn far enough to be nearly dependent.
        return orthonormal_rows(state["basis"].lerp(drawn, turn), careful=turn > _EARLY)

    def mean(self, state: State) -> Tensor:
        return (state["energy"].sum(-1) + (self.dim - self.rank) * state["tail"]) / self.dim

    def diagonal(self, state: State) -> Tensor:
        # diag(P T P)_j = t_j (1 - 2 q_j) + Σ_ab V_aj (V T Vᵀ)_ab V_bj, with q = diag(VᵀV)
        basis, rest = state["basis"], self.rests(state)
        inner = (basis * rest[..., None, :]) @ basis.mT
        inner = inner + torch.diag_embed(state["energy"])
        return rest * (1 - 2 * basis.square().sum(-2)) + ((inner @ basis) * basis).sum(-2)

    def rests(self, state: State) -> Tensor:
        """τ s (…, d), with a trace of P diag(τ s) P of (d - ρ) τ."""
        rest = state["rest"]
        share = (rest * (1 - state["basis"].square().sum(-2))).sum(-1, keepdim=True)
        # Where the directions hold all there is, what is left of a coordinate is rounding, and so is its share.
        least = torch.finfo(rest.dtype).eps * rest.sum(-1, keepdim=True)
        trace = (self.dim - self.rank) * state["tail"][..., None]
        return rest / torch.maximum(share, least).clamp_min(tiny(rest)) * trace

    def roots(self, state: State, damping: float, unit: bool = False) -> tuple[Tensor, Tensor]:
        """(τ s + δ mean)^-1/2 (…, 1, d) of the rest, and (μ + δ mean)^-1/2 (…, 1, ρ) of the directions."""
        eigenvalues = torch.cat([state["energy"], self.rests(state)], dim=-1)
        root = damped_root(eigenvalues, self.mean(state), damping, unit)[..., None, :]
        return root[..., self.rank :], root[..., : self.rank]

    def whitener(self, state: State, damping: float, unit: bool = False) -> Callable[[Tensor], Tensor]:
        rest, spikes = self.roots(state, damping, unit)
        basis = state["basis"]

        def whitened(x: Tensor) -> Tensor:
            # x C^-1/2 = x P diag((τ s)^-1/2) P + x Vᵀ diag(μ^-1/2) V
            along = along_rows(x, basis)
            y = deflated(x, along, basis).mul_(rest)
            return deflated(y, along_rows(y, basis) - along * spikes, basis)

        return whitened

    @property
    def rotated_dim(self) -> int:
        return self.rank + self.dim

    def rotate(self, state: State, x: Tensor) -> Tensor:
        # W = [Vᵀ, I - VᵀV], a Parseval frame: W Wᵀ = VᵀV + (I - VᵀV)² = I
        along = along_rows(x, state["basis"])
        return torch.cat([along, x - along @ state["basis"]], dim=-1)

    def unrotate(self, state: State, y: Tensor) -> Tensor:
        along, rest = y[..., : self.rank], y[..., self.rank :]
        return rest + (along - rest @ state["basis"].mT) @ state["basis"]
