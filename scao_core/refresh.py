"""The books of basis refreshes: whose turn it is, what is computed, what is kept when it fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .curvature import Blocked, Factor, Refreshed
from .engines import ENGINES, PREFIXES
from .groups import Plans
from .plan import Plan
from .runtime import RUNTIMES, Ticket, balanced_turns
from .stacks import Unit, stack, store

Turns = tuple[tuple[int, ...], ...]
"""For each unit of a parameter, the turn of each of its sides."""

_GIVE_UP = 3  # failures in a row after which a basis falls back to the diagonal (chosen)


@dataclass
class Tally:
    """What the refreshes of one step came to."""

    refreshed: int = 0
    failed: int = 0
    degraded: int = 0


def assign_turns(groups: Sequence[Mapping[str, Any]], plans: Sequence[Plans]) -> list[list[Turns]]:
    """For each group, parameter, unit and side: its turn in the refresh interval.

    A function of shapes and order alone, so a resumed run and every rank come to the same; a group that is added later
    leaves the turns before it as they were.
    """
    loads: dict[int, list[float]] = {}
    result = []
    for group, planned in zip(groups, plans, strict=True):
        every = group["refresh_every"]
        here = [planned[param] for param in group["params"]]
        costs = [_cost(side) for p in here for _ in range(_units(p)) for side in p.sides]
        turns = iter(balanced_turns(costs, every, loads.setdefault(every, [0.0] * every)))
        result.append([tuple(tuple(next(turns) for _ in p.sides) for _ in range(_units(p))) for p in here])
    return result


def _units(plan: Plan) -> int:
    return plan.batch[0] if plan.batch else 1


def _cost(factor: Factor) -> float:
    """Work of one eigendecomposition, in multiplications."""
    if isinstance(factor, Blocked):
        return float(factor.count * factor.side**3)
    return float(factor.dim**3) if isinstance(factor, Refreshed) else 0.0


def refresh(units: Sequence[Unit]) -> Tally:
    """Recompute the bases whose turn it is and install them, in the same step."""
    due: dict[tuple[object, ...], tuple[int, list[Unit]]] = {}
    for unit in units:
        group = unit.job.group
        for side, factor in enumerate(unit.job.plan.sides):
            if not isinstance(factor, Refreshed):
                continue
            if RUNTIMES[group["runtime"]].due(unit.t, unit.turns[side], group["refresh_every"]):
                key = (id(group), side, id(unit.job.plan), unit.job.param.device)
                due.setdefault(key, (side, []))[1].append(unit)
    tally = Tally()
    for side, members in due.values():
        RUNTIMES[members[0].job.group["runtime"]].run([_ticket(members, side, tally)])
    return tally


def _ticket(units: list[Unit], side: int, tally: Tally) -> Ticket[tuple[Tensor, list[bool]]]:
    plan, prefix = units[0].job.plan, PREFIXES[side]
    factor = plan.sides[side]
    if not isinstance(factor, Refreshed):
        raise TypeError(f"{factor.name} has nothing to refresh")
    own = {key.removeprefix(prefix) for key in units[0].state if key.startswith(prefix)}
    snapshot = factor.snapshot({key: stack([u.state[prefix + key] for u in units]) for key in own})

    def compute() -> tuple[Tensor, list[bool]]:
        basis, good = factor.refresh(snapshot)
        return basis, good.tolist()

    def install(result: tuple[Tensor, list[bool]]) -> None:
        basis, good = result
        chosen = [i for i, ok in enumerate(good) if ok]
        if chosen:
            _rebase([units[i] for i in chosen], side, basis if len(chosen) == len(units) else basis[chosen])
            torch._foreach_zero_([units[i].state[prefix + "failures"] for i in chosen])
        tally.refreshed += len(chosen)
        for i, ok in enumerate(good):
            if not ok:
                _failed(units[i], side, factor, tally)

    return Ticket(compute, install)


def _failed(unit: Unit, side: int, factor: Refreshed, tally: Tally) -> None:
    tally.failed += 1
    failures = unit.state[PREFIXES[side] + "failures"].add_(1)
    if int(failures) == _GIVE_UP:
        tally.degraded += 1
        like = unit.state[PREFIXES[side] + "basis"]
        _rebase([unit], side, factor.diagonal_basis(like, (1,)))


def _rebase(units: list[Unit], side: int, basis: Tensor) -> None:
    """Install new bases; rules that keep moments in the basis re-express them at the same time."""
    plan = units[0].job.plan
    keys = [key for key in units[0].state if key.endswith("basis") or key == "exp_avg_sq"]
    state = {key: stack([u.state[key] for u in units]) for key in keys}
    store(units, ENGINES[plan.engine].rebase(state, side, plan.sides, basis))
