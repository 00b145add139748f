"""Which tier each covariance and basis is to lie on: a function of plans and budgets. Nothing is allocated here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .engines import PREFIXES
from .errors import ConfigError
from .plan import Plan
from .runtime import TIERS, assign

Planned = Sequence[tuple[Tensor, Plan]]
_KEYS = tuple(prefix + name for name in ("cov", "basis") for prefix in PREFIXES)


def movable(plan: Plan) -> list[str]:
    """The state tensors that may lie elsewhere than the parameter, covariances first."""
    slots = dict(plan.slots)
    return [key for key in _KEYS if key in slots]


def placed(plans: Planned, budgets: Sequence[int | None]) -> dict[Tensor, dict[str, str]]:
    """For each parameter, the tier of each of its tensors that does not lie on the device."""
    wanted = [
        (param, key, dict(plan.slots)[key].bytes)
        for name in ("cov", "basis")
        for param, plan in plans
        for key in movable(plan)
        if key.endswith(name)
    ]
    places: dict[Tensor, dict[str, str]] = {}
    for (param, key, _), tier in zip(wanted, assign([size for _, _, size in wanted], budgets), strict=True):
        if tier:
            places.setdefault(param, {})[key] = TIERS[tier]
    return places


def planned_bytes(plans: Planned, options: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of state on each tier under these options; nothing is allocated."""
    places, result = placed(plans, budgets_of(options)), dict.fromkeys(TIERS, 0)
    for param, plan in plans:
        for key, slot in plan.slots:
            result[places.get(param, {}).get(key, "device")] += slot.bytes
    return result


def budgets_of(options: Mapping[str, Any]) -> list[int | None]:
    """Bytes of each tier that there is, None for no limit."""
    if options.get("memory_budget") is None:
        return [None]
    if options["offload_dir"] is None:
        return [options["memory_budget"], None]
    return [options["memory_budget"], options["host_budget"] or 0, None]


def check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"offload_dir={str(folder)!r} cannot be used: {error}; name another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"offload_dir={str(folder)!r} cannot be written to; name a folder that can")
