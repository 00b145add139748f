"""Adam (Kingma and Ba 2015), for vectors, scalars and tables that get no curvature factor."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

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


def adam_step_(param: Tensor, state: State, grad: Tensor, context: Context, lr: float, weight_decay: float) -> None:
    """The same for a piece of one large tensor, in place, with one temporary: such a tensor costs memory traffic only.

    Args:
        state: ``exp_avg``, ``exp_avg_sq`` and ``scale`` of the piece; param, grad and these in one dtype.
    """
    m, v, scale = state["exp_avg"], state["exp_avg_sq"], state["scale"]
    m.lerp_(grad, rate(context.betas[0], context.t))
    x = grad / scale
    v.lerp_(x.square_(), rate(context.betas[1], context.t))
    # U = m / (√v + eps) in the memory of x;  p <- (1 - lr wd) p - lr U
    torch.sqrt(v, out=x).add_(context.eps).clamp_min_(torch.finfo(v.dtype).tiny)
    torch.div(m, x, out=x).div_(scale)
    param.mul_(1 - lr * weight_decay).sub_(x.view_as(param), alpha=lr)
