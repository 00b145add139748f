"""Adam (Kingma and Ba 2015), for vectors, scalars and tables that get no curvature factor."""

from __future__ import annotations

from typing import ClassVar

from ..curvature import State
from .base import Batch, Context, Direction, Engine, Sides, adam_direction, rate


class Adam(Engine):
    """The only difference to torch.optim.AdamW: eps is relative to the size of the tensor's first gradient."""

    name: ClassVar[str] = "adam"
    uses_factors: ClassVar[bool] = False

    def slots(self, shape: tuple[int, ...], sides: Sides) -> dict[str, tuple[int, ...]]:
        return {"exp_avg_sq": shape}

    def direction(self, state: State, batch: Batch, sides: Sides, context: Context) -> tuple[State, Direction]:
        g, m = batch.stack
        # v <- b2 v + (1-b2) g²;  U = m / (√v + eps)
        v = state["exp_avg_sq"].lerp(g.square(), rate(context.betas[1], context.t))
        return {"exp_avg_sq": v}, adam_direction(m, v, context)
