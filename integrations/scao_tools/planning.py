"""What a fine-tune will keep in memory, exactly where the optimizer is concerned, before anything is loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scao_core import SCAO
from scao_core.config import PLACEMENT, Options
from scao_core.placement import planned_bytes
from scao_tools.shapes import Decoder

ADAMW_MOMENTS = 2  # in the dtype of the parameter, as torch.optim.AdamW keeps them


@dataclass(frozen=True)
class Group:
    """Equal matrices, and what SCAO keeps for each."""

    count: int
    shape: tuple[int, ...]
    factors: str
    bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one fine-tune. Activations, the CUDA context and fragmentation come on top: they depend on batch and length."""

    weights: float
    """The base as it is loaded; 0 if it is what is trained."""
    trained: int
    """Number of parameters that are trained."""
    parameter_bytes: int
    gradient_bytes: int
    scao: int
    adamw: int
    groups: tuple[Group, ...]
    tiers: Mapping[str, int]
    """SCAO's bytes on the device, on the host and in the file."""

    @property
    def total(self) -> float:
        """All that lies on the device, with SCAO."""
        return self.weights + self.parameter_bytes + self.gradient_bytes + self.tiers["device"]

    def sentence(self) -> str:
        """One line, as in the head of a recipe."""
        base = f"base {size(self.weights)} + " if self.weights else ""
        what = "adapters" if self.weights else "weights"
        return (
            f"{base}{what} and gradients {size(self.parameter_bytes + self.gradient_bytes)} + optimizer state "
            f"{size(self.tiers['device'])} (AdamW: {size(self.adamw)}) = {size(self.total)}; activations come on top"
            f"{self._elsewhere()}"
        )

    def _elsewhere(self) -> str:
        words = {"host": "on the host", "nvme": "in the file of offload_dir"}
        places = [f"{size(self.tiers[tier])} {where}" for tier, where in words.items() if self.tiers[tier]]
        return f". More of SCAO's state: {', '.join(places)}" if places else ""


def size(count: float) -> str:
    """``1_932_735_283`` -> ``1.80 GiB``."""
    unit = "GiB" if count >= 2**30 else "MiB"
    return f"{count / (2**30 if unit == 'GiB' else 2**20):.{2 if unit == 'GiB' else 1}f} {unit}"


def memory(model: Decoder, rank: int, bits: int, full: bool, dtype: torch.dtype, options: Mapping[str, Any]) -> Memory:
    """The plan of a LoRA fine-tune, or of a full one.

    Args:
        rank: of LoRA on all linear layers.
        bits: 4 for a base in NF4 (QLoRA), 16 for one in 16 bits.
        full: train the model itself instead.
        dtype: of the trained parameters and their gradients.
        options: SCAO's.

    Raises:
        ConfigError: an option is wrong or does not exist.
    """
    shapes: Sequence[tuple[int, ...]] = model.whole() if full else model.lora(rank)
    counts = Counter(shapes)
    params = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes]
    placing = Options.from_mapping({name: options[name] for name in PLACEMENT if name in options}).as_dict()
    kept = {name: value for name, value in options.items() if name not in PLACEMENT}  # the plan makes no folder
    plans = {shape: SCAO([_first(params, shape)], **kept).precond_stats() for shape in counts}
    groups = tuple(Group(n, s, _factors(plans[s]), int(plans[s]["planned_bytes"])) for s, n in counts.items())
    trained = sum(n * math.prod(shape) for shape, n in counts.items())
    return Memory(
        weights=0.0 if full else model.weight_bytes(bits),
        trained=trained,
        parameter_bytes=trained * dtype.itemsize,
        gradient_bytes=trained * dtype.itemsize,
        scao=sum(group.count * group.bytes for group in groups),
        adamw=trained * ADAMW_MOMENTS * dtype.itemsize,
        groups=groups,
        tiers=planned_bytes(SCAO(params, **kept).plans(), placing),
    )


def _first(params: Sequence[torch.nn.Parameter], shape: tuple[int, ...]) -> torch.nn.Parameter:
    return next(param for param in params if tuple(param.shape) == tuple(shape))


def _factors(stats: Mapping[str, Any]) -> str:
    return next(iter(stats["factors"]), "Adam")
