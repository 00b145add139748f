"""Deep comparison, for tests of state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def equal(a: Any, b: Any) -> bool:
    """Deep equality, with tensors compared in dtype, shape and bits."""
    if isinstance(a, Tensor):
        same = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return bool(same and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(type(a) is type(b) and a == b)


class Tokens(torch.utils.data.Dataset):
    """Random sequences for a Trainer, the same in every run."""

    def __len__(self):
        return 32

    def __getitem__(self, i):
        ids = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}
