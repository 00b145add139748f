"""The spectral rule: the orthogonal polar factor of the momentum (Jordan et al. 2024, Muon; Liu et al. 2025, Moonlight)."""

from __future__ import annotations

from typing import ClassVar

from ..curvature import State
from ..linalg import polar
from .base import Batch, Context, Direction, Engine, Sides, first_direction

# Moonlight (arXiv 2502.16982): 0.2 √max(r, n) gives the step AdamW's typical root mean square, so AdamW's lr carries
# over.
_RMS = 0.2


class Spectral(Engine):
    """U = 0.2 √n · polar(M). No factors: the r × r root is taken from the momentum itself at every step."""

    name: ClassVar[str] = "spectral"
    uses_factors: ClassVar[bool] = False

    def direction(self, state: State, batch: Batch, sides: Sides, context: Context) -> tuple[State, Direction]:
        g, m = batch.stack
        if context.t == 1:
            return {}, first_direction(g, context.eps)
        u, solved = polar(m)
        if unsolved := int((~solved & (m != 0).flatten(-2).any(-1)).sum()):
            context.failed.append(unsolved)
        return {}, _RMS * m.shape[-1] ** 0.5 * u
