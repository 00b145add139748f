"""Parameter groups: from what a user gives to plain, checked values; and the plans of their parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from . import gather
from .checkpoint import SCHEMA, SCHEMA_KEY
from .config import OPTION_NAMES, PLACEMENT, Options, near_miss, unknown_option
from .errors import ConfigError
from .plan import Plan, plan, plan_key


def prepared(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A group with every option converted and filled in, and its parameters checked; other keys stay, as torch keeps them.

    Raises:
        ConfigError: an option is wrong, or a key is so close to an option that it must be a typing error.
        ParameterError: a parameter is a DTensor or a flat shard.
    """
    for name in group:
        if name not in OPTION_NAMES and near_miss(name):
            raise unknown_option(name, OPTION_NAMES)
    for name in PLACEMENT:
        if name in group and Options.convert(name, group[name]) != defaults[name]:
            raise ConfigError(
                f"{name}={group[name]!r} in a parameter group: it is one for all groups ({defaults[name]!r} here); give it to "
                "the optimizer itself"
            )
    given = {name: value for name, value in group.items() if name in OPTION_NAMES}
    options = Options.from_mapping(given, base=Options(**{name: defaults[name] for name in OPTION_NAMES}))
    params, names = split_names(group.get("params"))
    for param in params:
        gather.check_parameter(param)
    named = {"param_names": names} if names else {}
    return {**group, **options.as_dict(), SCHEMA_KEY: SCHEMA, "params": params, **named}


def ordered(params: Any) -> list[Any]:
    """The items of an ordered collection; a checkpoint knows parameters by their position."""
    if isinstance(params, (set, frozenset)) or not isinstance(params, Iterable):
        raise ConfigError(
            f"params must be an ordered collection of tensors or of (name, tensor), got {type(params).__name__}"
        )
    return list(params)


def split_names(params: Any) -> tuple[list[Tensor], list[str]]:
    """Tensors and, for ``named_parameters()``, their names; torch before 2.6 does not take names itself."""
    if isinstance(params, Tensor):
        return [params], []
    items = ordered(params)
    if items and all(isinstance(item, tuple) and len(item) == 2 for item in items):
        return [tensor for _, tensor in items], [str(name) for name, _ in items]
    return items, []


class Plans:
    """Plans of one group's parameters, computed once per shape."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._key = plan_key(group)
        self._known: dict[tuple[tuple[int, ...], torch.dtype], Plan] = {}

    def __getitem__(self, param: Tensor) -> Plan:
        what = (tuple(param.shape), param.dtype)
        if what not in self._known:
            self._known[what] = plan(*what, self._key)
        return self._known[what]


def planned(groups: Iterable[Mapping[str, Any]], frozen: bool = False) -> list[tuple[Tensor, Plan]]:
    """The trainable parameters with their plans, with ``frozen`` all of them."""
    pairs = ((param, plans) for group in groups for plans in [Plans(group)] for param in group["params"])
    return [(param, plans[param]) for param, plans in pairs if frozen or param.requires_grad]


def statistics(groups: Iterable[Mapping[str, Any]], state: Mapping[Any, Mapping[str, Tensor]]) -> dict[str, Any]:
    """Counts of parameters (``layers``) and matrices that are preconditioned, of tensors on the Adam path, and bytes."""
    plans = [p for _, p in planned(groups)]
    matrix = [p for p in plans if p.is_matrix]
    factors: dict[str, int] = {}
    for p in matrix:
        factors[p.describe()] = factors.get(p.describe(), 0) + 1
    return {
        "layers": len(matrix),
        "matrices": sum(math.prod(p.batch) for p in matrix),
        "adam_tensors": len(plans) - len(matrix),
        "planned_bytes": sum(p.bytes for p in plans),
        "state_bytes": sum(v.numel() * v.element_size() for entry in state.values() for v in entry.values()),
        "factors": factors,
    }


def only_large_vectors(groups: Iterable[Mapping[str, Any]]) -> int:
    """Elements of the largest vector if there is no matrix and that vector is the size of one, else 0."""
    params = [p for group in groups for p in group["params"] if not isinstance(p, UninitializedParameter)]
    largest = max((p.numel() for p in params if p.dim() == 1), default=0)
    return largest if largest >= 2**20 and all(p.dim() <= 1 for p in params) else 0
