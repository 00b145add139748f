"""The SOAP rule: Adam in the factors' eigenbases (Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam")."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..curvature import Refreshed, State
from .base import (
    PREFIXES,
    Batch,
    Context,
    Direction,
    Engine,
    Sides,
    adam_direction,
    first_direction,
    join,
    rate,
    split,
    turn_rate,
)


def rotate(sides: Sides, states: tuple[State, State], x: Tensor) -> Tensor:
    """W_Lᵀ x W_R, the coordinates of (…, r, n) in both bases."""
    return sides[1].rotate(states[1], sides[0].rotate(states[0], x.mT).mT)


def unrotate(sides: Sides, states: tuple[State, State], y: Tensor) -> Tensor:
    """W_L y W_Rᵀ, the inverse of ``rotate``."""
    return sides[1].unrotate(states[1], sides[0].unrotate(states[0], y.mT).mT)


class Soap(Engine):
    """U = W_L [(W_Lᵀ M W_R) / (√v + eps)] W_Rᵀ, with v the second moment of the rotated gradient."""

    name: ClassVar[str] = "soap"

    def slots(self, shape: tuple[int, ...], sides: Sides) -> dict[str, tuple[int, ...]]:
        return {"exp_avg_sq": (sides[0].rotated_dim, sides[1].rotated_dim)}

    def direction(self, state: State, batch: Batch, sides: Sides, context: Context) -> tuple[State, Direction]:
        g, m = batch.stack
        (left, right), first = sides, context.t == 1
        lhs, rhs = split(state, PREFIXES[0]), split(state, PREFIXES[1])
        if first:
            lhs, rhs = left.start(lhs, g.mT), right.start(rhs, g)
        # v <- b2 v + (1-b2) (W_LᵀGW_R)²;  U = W_L [(W_LᵀMW_R) / (√v + eps)] W_Rᵀ
        v = state["exp_avg_sq"].lerp(rotate(sides, (lhs, rhs), g).square(), rate(context.betas[1], context.t))
        if first:
            u = first_direction(g, context.eps)
        else:
            u = unrotate(sides, (lhs, rhs), adam_direction(rotate(sides, (lhs, rhs), m), v, context))
        # L <- b L + (1-b) G Gᵀ / n;  R <- b R + (1-b) GᵀG / r
        decay = rate(context.curvature_beta, context.t)
        turn = turn_rate(context.curvature_beta, context.t)
        lhs, lhs_next = left.accumulate(lhs, g.mT, decay, turn)
        rhs, rhs_next = right.accumulate(rhs, g, decay, turn)
        new = {**join(PREFIXES[0], lhs | lhs_next), **join(PREFIXES[1], rhs | rhs_next)}
        return {"exp_avg_sq": v, **new}, u

    def rebase(self, state: State, side: int, sides: Sides, basis: Tensor) -> State:
        key, factor, v = PREFIXES[side] + "basis", sides[side], state["exp_avg_sq"]
        if isinstance(factor, Refreshed):
            v = factor.carry(state[key], basis, v.mT if side == 0 else v)
            v = v.mT if side == 0 else v
        return {key: basis, "exp_avg_sq": v}
