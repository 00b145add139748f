"""The KL rule: two factors that whiten the gradient, and no second-moment buffer.

L and R are the maximum-likelihood factors of a Gaussian gradient with covariance L ⊗ R, that is the minimizers of the KL
divergence to it (Lin et al. 2025, "Understanding and improving Shampoo and SOAP via Kullback-Leibler minimization"): each
is the second moment of the gradient after the other side has been whitened. A factor's scale is measured at every step, along
a basis that may be older, so no grafting is needed.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..curvature import State
from .base import PREFIXES, Context, Engine, Sides, first_direction, join, rate, split


class KL(Engine):
    """U = L^-1/2 M R^-1/2. L has mean eigenvalue 1 where it is used, so R alone carries the size of the gradient."""

    name: ClassVar[str] = "kl"

    def direction(self, state: State, g: Tensor, sides: Sides, context: Context) -> tuple[State, Tensor]:
        (left, right), damping, first = sides, context.damping, context.t == 1
        lhs, rhs = split(state, PREFIXES[0]), split(state, PREFIXES[1])
        if first:
            lhs, rhs = left.start(lhs, g.mT), right.start(rhs, g)
        decay = rate(context.curvature_beta, context.t)
        # M <- b M + (1-b) G
        m = state["exp_avg"].lerp(g, rate(context.betas[0], context.t))
        # R <- b R + (1-b) Gᵀ L^-1 G / r
        rhs, rhs_next = right.accumulate(rhs, g if first else left.whiten(lhs, g.mT, damping, unit=True).mT, decay)
        # L <- b L + (1-b) G R^-1 Gᵀ / n
        lhs, lhs_next = left.accumulate(lhs, right.whiten(rhs, g, damping).mT, decay)
        # U = L^-1/2 M R^-1/2
        u = first_direction(g, context.eps) if first else self._whiten(sides, (lhs, rhs), m, damping)
        return {"exp_avg": m, **join(PREFIXES[0], lhs | lhs_next), **join(PREFIXES[1], rhs | rhs_next)}, u

    @staticmethod
    def _whiten(sides: Sides, states: tuple[State, State], m: Tensor, damping: float) -> Tensor:
        return sides[1].whiten(states[1], sides[0].whiten(states[0], m.mT, damping, unit=True).mT, damping)
