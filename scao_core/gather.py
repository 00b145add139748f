"""What the optimizer is given: parameters and gradients, looked at before anything changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .errors import GradientError, ParameterError

_FLAT_MARKS = ("_is_flat", "_is_flat_param", "is_flat", "ds_id", "ds_tensor")
_USE_INSTEAD = "SCAO needs whole matrices on each rank: use DistributedDataParallel (or one process), or another optimizer for this setup"


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
    marks = [mark for mark in _FLAT_MARKS if getattr(param, mark, False) not in (False, None)]
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


def peaks(grads: list[Tensor], batches: Iterable[int]) -> tuple[list[Tensor], list[list[float]]]:
    """Largest absolute entry of each gradient, one per matrix in it.

    Args:
        batches: for each gradient the number of matrices stacked in its first dimension; 0 for one that is a single
            unit.

    Returns:
        the peaks on the device, and the same on the host (NaN and infinity included). One transfer per device.
    """
    on_device = [_peak(grad, batch) for grad, batch in zip(grads, batches, strict=True)]
    by_device: dict[torch.device, list[int]] = {}
    for i, peak in enumerate(on_device):
        by_device.setdefault(peak.device, []).append(i)
    on_host: list[list[float]] = [[] for _ in grads]
    for indices in by_device.values():
        values = iter(torch.cat([on_device[i].reshape(-1).double() for i in indices]).tolist())
        for i in indices:
            on_host[i] = [next(values) for _ in range(on_device[i].numel())]
    return on_device, on_host


def _peak(grad: Tensor, batch: int) -> Tensor:
    if grad.numel() == 0:
        return grad.new_zeros(max(batch, 1))
    if batch:
        low, high = torch.aminmax(grad.reshape(batch, -1), dim=1)
    else:
        low, high = torch.aminmax(grad)
    return torch.maximum(high, -low)
