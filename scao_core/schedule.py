"""When a basis is refreshed: a function of counters, shapes and options alone, so that all ranks and resumed runs agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .curvature import Blocked, Factor, Refreshed
from .groups import Plans
from .plan import Plan
from .runtime import RUNTIMES, balanced_turns

Turns = tuple[tuple[int, ...], ...]
"""For each unit of a parameter, the turn of each of its sides."""

# While a factor is young its directions change with every gradient. The short side of a matrix, if it is no longer than
# this, is also refreshed after its 1st, 2nd, 4th, 8th, … gradient: that costs next to nothing, and one gradient has
# something to say on each of its directions. A longer one waits for its turn, so that no step pays for all (both chosen).
_SHORT = 64


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
    return float(factor.side**3) if isinstance(factor, Refreshed) else 0.0


def is_due(factor: Factor, runtime: str, t: int, turn: int, every: int) -> bool:
    """Whether the basis of a factor is recomputed at the end of the step in which its matrix gets its t-th gradient."""
    if not isinstance(factor, Refreshed):
        return False
    early = is_young(factor, t, every) and t & (t - 1) == 0
    return early or RUNTIMES[runtime].due(t, turn, every)


def is_young(factor: Factor, t: int, every: int) -> bool:
    """Whether it is a short side before its first turn: its refreshes are early, and not worth a delay."""
    return isinstance(factor, Refreshed) and factor.side <= min(_SHORT, factor.samples) and t < every


def last_snapshot(factor: Factor, group: Mapping[str, Any], t: int, turn: int, failures: int = 0) -> int:
    """The count of its matrix at which the basis was taken that is in use after its t-th gradient; 0 before the first.

    Args:
        failures: refreshes that failed in a row until now.
    """
    every = group["refresh_every"]
    for taken in range(t, 0, -1):
        delay = 0 if is_young(factor, taken, every) else delay_of(group)
        if taken + delay <= t and is_due(factor, group["runtime"], taken, turn, every):
            if failures == 0:
                return taken
            failures -= 1
    return 0


def delay_of(group: Mapping[str, Any]) -> int:
    """Steps from a snapshot to its installation: the user's number or the runtime's own, less than the interval."""
    named = group["refresh_delay"]
    wanted: int = RUNTIMES[group["runtime"]].delay if named is None else named
    return min(wanted, int(group["refresh_every"]) - 1)
