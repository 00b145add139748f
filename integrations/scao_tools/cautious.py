"""AdamW with the cautious mask, so that a comparison can tell what the mask gives and what the curvature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SMALLEST_SHARE = 0.1  # as in SCAO


class CautiousAdamW(torch.optim.AdamW):
    """torch's AdamW, whose step moves only the entries that agree in sign with the gradient, enlarged by their share.

    The weight decay acts on all. Source: Liang et al. 2024, "Cautious optimizers".
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the mask is applied to what AdamW has moved."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * decay)
            group["weight_decay"] = 0.0
        before = [p.clone() for p in params]
        super().step()
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        for p, old in zip(params, before, strict=True):
            moved = p - old
            agree = (moved.sign() * p.grad.sign() < 0).to(moved.dtype)
            p.copy_(old + moved * agree / agree.mean().clamp_min(_SMALLEST_SHARE))
        return loss
