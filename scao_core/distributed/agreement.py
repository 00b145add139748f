"""Flags, agreed by all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def is_alone() -> bool:
    """Whether there is no other rank."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on every rank if the flag is true on any; the flag itself outside a process group.

    Ranks that decided alone whether to skip a step would drift apart without an error. Every rank must call this once a
    step.
    """
    return any_ranks([flag], device)[0]


def any_ranks(flags: list[bool], device: torch.device) -> list[bool]:
    """The same for several flags at once; every rank must call it with as many."""
    if is_alone() or not flags:
        return flags
    # A backend of an accelerator takes no host tensor, even from a rank whose parameters have no gradient in this step.
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    elif "cpu" in str(dist.get_backend()) or dist.get_backend() == "gloo":
        device = torch.device("cpu")
    shared = torch.tensor([float(flag) for flag in flags], device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [flag > 0 for flag in shared.tolist()]
