"""The KL rule: two factors that whiten the gradient, and no second-moment buffer.

L and R are the maximum-likelihood factors of a Gaussian gradient with covariance L ⊗ R, that is the minimizers of the
KL divergence to it (Lin et al. 2025, "Understanding and improving Shampoo and SOAP via Kullback-Leibler minimization"):
each is the second moment of the gradient after the other side has been whitened. A factor's scale is measured at every
step, along a basis that may be older, so no grafting is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..curvature import Dense, Factor, Spiked, State, tiny
from ..linalg import along_rows, column_squares, gram, weighted_gram, weighted_rest, weighted_rows, weighted_squares
from .base import (
    FARTHEST,
    PREFIXES,
    Batch,
    Context,
    Direction,
    Engine,
    Sides,
    adam_bound,
    first_direction,
    harmless,
    join,
    rate,
    split,
    turn_rate,
)

# The gain is measured at each of the first steps and then at every few: it moves slowly (both chosen).
_GAIN_FIRST, _GAIN_EVERY = 4, 4
_GAIN_RANGE = (0.5, 8.0)  # chosen


class KL(Engine):
    """U = α L^-1/2 M R^-1/2. L has mean eigenvalue 1 where it is used, so R alone carries the size of the gradient.

    Whitening takes the energy out of the dominant directions, in which most of the loss would fall, so a step of the
    same size as Adam's does less at the same learning rate. With ``norm_rule="decrease"`` α makes up for it: the
    decrease of the loss to first order, ⟨M, U⟩, is that of Adam's step with factored second moments, M / √(diag(L)
    diag(R)ᵀ).
    """

    name: ClassVar[str] = "kl"

    def slots(self, shape: tuple[int, ...], sides: Sides) -> dict[str, tuple[int, ...]]:
        return {"gain": ()}

    def direction(self, state: State, batch: Batch, sides: Sides, context: Context) -> tuple[State, Direction]:
        left, right = sides
        lhs, rhs = split(state, PREFIXES[0]), split(state, PREFIXES[1])
        first = context.t == 1
        if first:
            lhs, rhs = left.start(lhs, batch.stack[0].mT), right.start(rhs, batch.stack[0])
        if isinstance(left, Dense) and isinstance(right, Spiked):
            lhs, rhs, gain, u = thin((left, right), (lhs, rhs), state["gain"], batch, context)
        else:
            lhs, rhs, gain, u = general(sides, (lhs, rhs), state["gain"], batch, context)
        if first:
            u = first_direction(batch.stack[0], context.eps)
        return {"gain": gain, **join(PREFIXES[0], lhs), **join(PREFIXES[1], rhs)}, u

    def farthest(self, context: Context) -> float:
        """As far as Adam's step could by this t, or farther where that is little for the matrix. The factors of few gradients
        say little about a single entry, and unlike the coordinates of SOAP or a polar factor, whitened ones have no bound of
        their own.
        """
        bound = adam_bound(context.betas, context.t)
        return min(FARTHEST, max(bound, harmless(context.lr, context.length))) if context.t > 1 else bound


Stepped = tuple[State, State, Tensor, Direction]
"""Both factors' states after the step, α and U."""


def gain_due(context: Context) -> bool:
    """Whether α is measured in this step."""
    return context.norm_rule == "decrease" and (
        context.t <= _GAIN_FIRST or context.t % _GAIN_EVERY == 2
    )  # not the steps at which directions turn


def gain_of(squares: Tensor, decrease: Tensor, left: Factor, lhs: State) -> Tensor:
    """α (…): ⟨M, M / √(l rᵀ)⟩ / ⟨M, U⟩, with l and r the diagonals of both factors, L of mean eigenvalue 1.

    Args:
        squares: Σ_j M_ij² / √r_j (…, r).
        decrease: ⟨M, U⟩ (…) of the step without gain.
    """
    rows = (left.diagonal(lhs) / left.mean(lhs)[..., None]).clamp_min(tiny(squares)).rsqrt()
    ratio = (rows * squares).sum(-1) / decrease
    return torch.where((decrease > 0) & torch.isfinite(ratio), ratio, 1.0).clamp(*_GAIN_RANGE)


def column_weights(right: Factor, rhs: State) -> Tensor:
    """1 / √r (…, n), r the diagonal of the wide side's factor."""
    diagonal = right.diagonal(rhs)
    return diagonal.clamp_min(tiny(diagonal)).rsqrt()


def general(sides: Sides, states: Sequence[State], gain: Tensor, batch: Batch, context: Context) -> Stepped:
    """The rule for any two factors. At the first gradient L is taken for the identity."""
    (left, right), (lhs, rhs), damping = sides, states, context.damping
    g, m = batch.stack
    decay, turn = rate(context.curvature_beta, context.t), turn_rate(context.curvature_beta, context.t)
    # R <- b R + (1-b) Gᵀ L^-1 G / r
    white = g if context.t == 1 else left.whiten(lhs, g.mT, damping, unit=True).mT
    rhs, rhs_next = right.accumulate(rhs, white, decay, turn)
    # L <- b L + (1-b) G R^-1 Gᵀ / n
    by_right = right.whitener(rhs, damping)
    lhs, lhs_next = left.accumulate(lhs, by_right(g).mT, decay, turn)
    # U = α L^-1/2 M R^-1/2
    u = by_right(left.whiten(lhs, m.mT, damping, unit=True).mT)
    if context.t == 1:
        gain = torch.ones_like(gain)
    elif gain_due(context):
        gain = gain_of(weighted_squares(m, column_weights(right, rhs)), (m * u).sum((-2, -1)), left, lhs)
    return lhs | lhs_next, rhs | rhs_next, gain, u * gain[..., None, None]


def thin(sides: tuple[Dense, Spiked], states: Sequence[State], gain: Tensor, batch: Batch, context: Context) -> Stepped:
    """The same for dense × spiked: G is read where it lies, one matrix after the other, and only U is written for all.

    The factors need small products of G alone, G Gᵀ (r × r) and G Vᵀ (r × ρ) above all; ``batch.unit`` turns these
    into units of the scale.
    """
    (left, right), (lhs, rhs), damping = sides, states, context.damping
    g, m, unit = batch.read()
    decay, turn = rate(context.curvature_beta, context.t), turn_rate(context.curvature_beta, context.t)
    basis, size = rhs["basis"], unit.square()
    products, along = gram(g) * size, along_rows(g, basis)
    # R <- b R + (1-b) Gᵀ L^-1 G / r, from W G Vᵀ and the norms of the rows of W G, with W = L^-1/2
    identity = torch.eye(left.dim, dtype=unit.dtype, device=unit.device)
    w = identity.expand_as(products) if context.t == 1 else left.root(lhs, damping, unit=True)
    white = w @ along * unit
    norms = (w * (w @ products)).sum(-1)
    rhs = right.measure(rhs, white, norms, decay)
    rhs_next: State = {}
    if turn:
        rhs["rest"] = rhs["rest"].lerp(column_squares(w * unit, g, white, basis), turn)
        weights = right.pull(rhs, white, norms) * unit
        rhs_next["basis"] = right.follow(rhs, weighted_rows(g, w @ weights), turn)
    # L <- b L + (1-b) G R^-1 Gᵀ / n, with G R^-1/2 = Y P + G Vᵀ diag(μ^-1/2) V and Y = G P diag((τ s)^-1/2)
    rest, spikes = right.roots(rhs, damping)
    inner, across = weighted_gram(g, along, basis, rest)
    spread = along * spikes
    lhs = left.accumulate_gram(lhs, (inner - across @ across.mT + spread @ spread.mT) * size, decay)
    # U = α W M R^-1/2
    w = left.root(lhs, damping, unit=True)
    coordinates = along_rows(m, basis)
    if context.t == 1:
        gain = torch.ones_like(gain)
    elif gain_due(context):
        # <M, U> = <W, M R^-1/2 Mᵀ>
        inner, _ = weighted_gram(m, coordinates, basis, rest.sqrt())
        decrease = (w * (inner + (coordinates * spikes) @ coordinates.mT) * size).sum((-2, -1))
        gain = gain_of(weighted_squares(m, column_weights(right, rhs)) * size.squeeze(-1), decrease, left, lhs)
    w = gain[..., None, None] * unit * w
    return lhs, rhs | rhs_next, gain, weighted_rest(w, m, w @ coordinates, basis, rest, spikes)
