"""One flag, agreed by all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on every rank if the flag is true on any; the flag itself outside a process group.

    Ranks that decided alone whether to skip a step would drift apart without an error. Every rank must call this once a
    step.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return flag
    on_device = "nccl" in str(dist.get_backend()) and device.type == "cuda"
    shared = torch.tensor(float(flag), device=device if on_device else "cpu")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return bool(shared.item())
