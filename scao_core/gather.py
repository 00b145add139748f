"""What the optimizer is given: parameters and gradients, looked at before anything changes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .errors import GradientError, ParameterError

# What FSDP1 (its flat parameter, and the originals it cut) and DeepSpeed ZeRO write on parameters.
_FLAT_MARKS = ("_is_flat", "_is_flat_param", "is_flat", "_fsdp_flattened", "ds_id", "ds_tensor")
_USE_INSTEAD = (
    "SCAO needs whole matrices on each rank: use DistributedDataParallel or one process, or another optimizer here"
)


def check_parameter(param: Any) -> None:
    """Refuse, when the optimizer is built, parameters whose matrix it could not see; looks at types and marks only.

    Raises:
        ParameterError: a DTensor (FSDP2, tensor parallel), or a flat shard (FSDP1, DeepSpeed ZeRO).
    """
    kind = type(param).__name__
    if kind == "DTensor" and param.requires_grad:
        raise ParameterError(
            f"got a DTensor parameter (FSDP2 or tensor parallel), which is not supported yet. {_USE_INSTEAD}"
        )
    values = {mark: getattr(param, mark, None) for mark in _FLAT_MARKS}
    marks = [mark for mark, value in values.items() if value is not None and value is not False]
    if kind == "FlatParameter" or marks:
        raise ParameterError(
            f"got a flat shard ({marks[0] if marks else kind}) of shape {tuple(param.shape)} from FSDP1 or DeepSpeed ZeRO: its "
            f"matrices cannot be seen, and training would silently fall back to a diagonal method. {_USE_INSTEAD}"
        )


def check_gradient(param: Tensor, grad: Tensor, name: str) -> None:
    """Refuse a gradient that no rule here can use.

    Raises:
        GradientError: sparse layout, or complex.
        ParameterError: a DTensor that came in after the optimizer was built.
    """
    if grad.layout != torch.strided:
        raise GradientError(
            f"SCAO does not support sparse gradients (parameter {name}, layout {grad.layout}): use sparse=False in "
            "the embedding, or torch.optim.SparseAdam for it"
        )
    if param.is_complex() or grad.is_complex():
        raise GradientError(
            f"SCAO does not support complex parameters (parameter {name}, {param.dtype}): optimize "
            "torch.view_as_real(p) instead"
        )
    if type(param).__name__ == "DTensor":
        check_parameter(param)


def peaks(grads: list[Tensor], units: Iterable[int], rough: Iterable[bool]) -> list[list[float]]:
    """Largest absolute entry of each gradient, one per matrix in it, on the host (NaN and infinity included).

    Args:
        units: for each gradient, how many matrices its first dimension holds; 1 for one that is a single matrix or
            vector.
        rough: for each gradient, whether an upper bound will do: its Euclidean norm, which takes less than half the
            time.

    One transfer per device and dtype.
    """
    result: list[list[float]] = [[0.0] * count for count in units]
    exact: list[int] = []
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (grad, bound_will_do) in enumerate(zip(grads, rough, strict=True)):
        if grad.numel() and bound_will_do and len(result[i]) == 1 and grad.dtype in _DOT and grad.is_contiguous():
            alike.setdefault((grad.device, grad.dtype), []).append(i)
        elif grad.numel():
            exact.append(i)
    for members in alike.values():
        flat = [grads[i].view(-1) for i in members]
        squares = torch.stack([torch.dot(x, x) for x in flat]).cpu().double().tolist()
        for i, square in zip(members, squares, strict=True):
            if _SMALLEST < square < _LARGEST:
                result[i] = [math.sqrt(square)]
            else:  # zero, or not finite, or so small or large that the sum does not tell
                exact.append(i)
    _exact_peaks(grads, exact, result)
    return result


# Kinds of gradients whose squares may be summed, and the sums that tell that every entry is finite and some is not zero
# (chosen).
_DOT = (torch.float32, torch.float64)
_SMALLEST, _LARGEST = 1e-30, 1e30
_CACHED = 2**20  # elements (chosen)


def _exact_peaks(grads: list[Tensor], members: list[int], result: list[list[float]]) -> None:
    alike: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
    for i in members:
        alike.setdefault((grads[i].device, grads[i].dtype, len(result[i]) > 1), []).append(i)
    for (_, _, several), same in alike.items():
        if several:
            rows = [grads[i].reshape(len(result[i]), -1) for i in same]
            low, high = torch.cat([r.amin(-1) for r in rows]), torch.cat([r.amax(-1) for r in rows])
        else:
            # Two passes of amin and amax are faster than one of aminmax while they are in the cache (measured on one
            # CPU).
            bounds = [
                (g.amin(), g.amax()) if g.numel() < _CACHED else torch.aminmax(g) for g in (grads[i] for i in same)
            ]
            low, high = (torch.stack(ends) for ends in zip(*bounds, strict=True))
        values = iter(torch.maximum(high, -low).cpu().double().tolist())
        for i in same:
            result[i] = [next(values) for _ in result[i]]
