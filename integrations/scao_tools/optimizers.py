"""The optimizers that the command line can compare. To add one, add a row to `OPTIMIZERS`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scao_tools.errors import MissingPackageError, OptionError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimizerSpec:
    """How an optimizer is called in options and reports, and how it is built for a list of parameters."""

    name: str
    label: str
    build: Callable[[list[torch.nn.Parameter], float], torch.optim.Optimizer]


def _adamw(params: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.999), weight_decay=0.0)


def _scao(params: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    try:
        from scao import SCAO
    except ImportError as error:
        raise MissingPackageError(
            f"the optimizer 'scao' could not be imported ({error}); run: pip install --upgrade scao"
        ) from error
    optimizer: torch.optim.Optimizer = SCAO(params, lr=lr, betas=(0.9, 0.999), weight_decay=0.0)
    return optimizer


OPTIMIZERS: dict[str, OptimizerSpec] = {
    spec.name: spec
    for spec in (
        OptimizerSpec("adamw", "AdamW", _adamw),
        OptimizerSpec("scao", "SCAO", _scao),
    )
}


def parse_optimizers(text: str) -> tuple[str, ...]:
    """Turn ``"adamw,scao"`` into names, refusing unknown, repeated, and no names."""
    names = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    known = ", ".join(OPTIMIZERS)
    if not names:
        raise OptionError(f"--optimizers is empty; name at least one of: {known}")
    for name in names:
        if name not in OPTIMIZERS:
            close = difflib.get_close_matches(name, OPTIMIZERS, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? (known: {known})" if close else f"known: {known}"
            raise OptionError(f"--optimizers: unknown optimizer {name!r}; {hint}")
        if names.count(name) > 1:
            raise OptionError(f"--optimizers names {name!r} more than once; name each optimizer once")
    return names


def build_optimizer(name: str, params: Sequence[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Build a registered optimizer with the settings that every comparison shares."""
    return OPTIMIZERS[name].build(list(params), lr)


def check_optimizers(names: Sequence[str], lr: float) -> None:
    """Build each optimizer on a 2x2 parameter, so that one that cannot be built fails before any long work."""
    import torch

    for name in names:
        build_optimizer(name, [torch.nn.Parameter(torch.zeros(2, 2))], lr)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in ``optimizer.state``, nested containers included, shared tensors counted once."""
    import torch

    seen: set[int] = set()

    def size(value: object) -> int:
        if isinstance(value, torch.Tensor):
            if id(value) in seen:
                return 0
            seen.add(id(value))
            return value.numel() * value.element_size()
        if isinstance(value, dict):
            return sum(size(item) for item in value.values())
        if isinstance(value, (list, tuple)):
            return sum(size(item) for item in value)
        return 0

    return sum(size(entry) for entry in optimizer.state.values())
