"""The books of basis refreshes: what is snapshot, computed and installed, and what is kept when it fails."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .curvature import Refreshed
from .engines import ENGINES, PREFIXES
from .runtime import RUNTIMES, Job, Workers, one_thread
from .schedule import delay_of, is_due, is_young, last_snapshot
from .stacks import Unit, stack, store

_SIDES = ("left", "right")
_GIVE_UP = 3  # failures in a row after which a basis falls back to the diagonal (chosen)


@dataclass
class Tally:
    """What the refreshes of one step came to."""

    refreshed: int = 0
    failed: int = 0
    degraded: int = 0
    queued: int = 0
    waited: float = 0.0
    rebased: list[tuple[Unit, int]] = field(default_factory=list)
    """What got a new basis: a matrix and one of its sides."""
    ages: dict[str, int] = field(default_factory=dict)
    """By basis: steps of its matrix since the snapshot that it was computed from."""


@dataclass
class Computed:
    """Bases that a job computes for several matrices."""

    job: Job[tuple[Tensor, list[bool]]]

    def result(self) -> tuple[Tensor | None, list[bool]]:
        """The bases (N, …), and which of them are good; None where the decomposition itself broke."""
        try:
            return self.job.result()
        except (RuntimeError, MemoryError):  # of a broken LAPACK, or no memory: the last good bases stay
            return None, []


@dataclass(frozen=True)
class Pending:
    """The basis of one side of one matrix, to be installed when its counter reads ``due``."""

    due: int
    index: int
    """Its place in what was computed."""
    computed: Computed

    def basis(self) -> Tensor | None:
        """The new basis, or None if the decomposition failed."""
        bases, good = self.computed.result()
        return bases[self.index] if bases is not None and good[self.index] else None


Key = tuple[int, int]
"""Which matrix of a parameter, and which of its sides."""


class Refreshes:
    """What was snapshot and is not installed yet, by parameter; and the workers that compute it."""

    def __init__(self) -> None:
        self.pending: dict[Tensor, dict[Key, Pending]] = {}
        self.workers: Workers | None = None
        self._taken_at: dict[Tensor, dict[Key, int]] = {}
        """The count at which the basis in use was taken, where that is known; else it follows from the schedule."""

    def run(self, units: Sequence[Unit]) -> Tally:
        """At the end of a step: install what is due, take the snapshots that are due, compute or have them computed."""
        tally = Tally()
        ready = [taken for unit in units for taken in self._taken(unit)]
        self._install(ready, tally)
        now: list[tuple[Unit, int, Pending]] = []
        for (side, delay), members in _due(units).items():
            for group in members.values():
                computed = self._computed(group, side, delay)
                for i, unit in enumerate(group):
                    pending = Pending(unit.t + delay, i, computed)
                    if delay == 0:
                        now.append((unit, side, pending))
                    else:
                        self.pending.setdefault(unit.job.param, {})[unit.part, side] = pending
        self._install(now, tally)
        waiting = {id(p.computed): p.computed for entry in self.pending.values() for p in entry.values()}
        tally.queued = sum(not computed.job.ready for computed in waiting.values())
        tally.ages = {label: age for unit in units for label, age in self._ages(unit)}
        return tally

    def _ages(self, unit: Unit) -> Iterator[tuple[str, int]]:
        known = self._taken_at.setdefault(unit.job.param, {})
        for side, factor in enumerate(unit.job.plan.sides):
            if isinstance(factor, Refreshed):
                if (unit.part, side) not in known:  # of a new matrix, or of one whose state was loaded
                    failures = int(unit.state[PREFIXES[side] + "failures"])
                    known[unit.part, side] = _taken_at(unit, side, failures)
                yield f"{unit.label}.{_SIDES[side]}", unit.t - known[unit.part, side]

    def _taken(self, unit: Unit) -> list[tuple[Unit, int, Pending]]:
        entry = self.pending.get(unit.job.param)
        if not entry:
            return []
        keys = [key for key, pending in entry.items() if key[0] == unit.part and pending.due <= unit.t]
        return [(unit, key[1], entry.pop(key)) for key in keys]

    def _computed(self, units: list[Unit], side: int, delay: int) -> Computed:
        factor, prefix = units[0].job.plan.sides[side], PREFIXES[side]
        if not isinstance(factor, Refreshed):
            raise TypeError(f"{factor.name} has nothing to refresh")
        own = {key.removeprefix(prefix) for key in units[0].state if key.startswith(prefix)}
        snapshot = factor.snapshot({key: stack([u.state[prefix + key] for u in units]) for key in own})

        def compute() -> tuple[Tensor, list[bool]]:
            # Where a result is due later a worker may compute it, or the step: the bits must not tell.
            with one_thread() if delay else nullcontext():
                basis, good = factor.refresh(snapshot)
            return basis, good.tolist()

        runtime = RUNTIMES[units[0].job.group["runtime"]]
        if delay and runtime.background():
            if self.workers is None or (self.workers.closed and not self.workers.broken):
                self.workers = Workers()
            return Computed(self.workers.submit(runtime.beside(compute, list(snapshot.values()))))
        job = Job(compute)
        job.run()
        return Computed(job)

    def _install(self, taken: list[tuple[Unit, int, Pending]], tally: Tally) -> None:
        equal: dict[tuple[object, ...], list[tuple[Unit, int, Pending]]] = {}
        for unit, side, pending in taken:
            equal.setdefault((id(unit.job.plan), side, unit.job.param.device), []).append((unit, side, pending))
        # The left side first, whatever else is installed: the order of two rebases is that of their roundings.
        for members in sorted(equal.values(), key=lambda members: members[0][1]):
            side = members[0][1]
            start = time.perf_counter()
            bases = [(unit, pending.basis()) for unit, _, pending in members]
            tally.waited += time.perf_counter() - start
            good = [(unit, basis) for unit, basis in bases if basis is not None]
            if good:
                key, chosen = PREFIXES[side] + "basis", [unit for unit, _ in good]
                _rebase(chosen, side, stack([basis.to(unit.state[key]) for unit, basis in good]))
                torch._foreach_zero_([unit.state[PREFIXES[side] + "failures"] for unit in chosen])
                tally.rebased += [(unit, side) for unit in chosen]
            tally.refreshed += len(good)
            for unit, _ in good:
                self._taken_at.setdefault(unit.job.param, {})[unit.part, side] = _taken_at(unit, side)
            for unit, basis in bases:
                if basis is None:
                    _failed(unit, side, tally)

    def forget(self, units: Iterable[Unit]) -> None:
        """Drop what is pending for matrices that start over."""
        for unit in units:
            entry = self.pending.get(unit.job.param, {})
            for key in [key for key in entry if key[0] == unit.part]:
                del entry[key]
            self._taken_at.pop(unit.job.param, None)

    def close(self) -> None:
        """End the workers; what they have not computed is computed where it is needed."""
        if self.workers is not None:
            self.workers.close()

    # --- copies and checkpoints: results in place of jobs -------------------------------------------------------

    def drained(self) -> dict[Tensor, dict[Key, tuple[int, Tensor | None]]]:
        """What is pending with its result, None where it failed; waits for all jobs."""
        return {p: {k: (x.due, x.basis()) for k, x in entry.items()} for p, entry in self.pending.items() if entry}

    def put(self, drained: Mapping[Tensor, Mapping[Key, tuple[int, Tensor | None]]]) -> None:
        """The inverse of ``drained``."""
        self.pending, self._taken_at = {}, {}
        for param, entry in drained.items():
            for key, (due, basis) in entry.items():
                result = (torch.empty(0) if basis is None else basis.unsqueeze(0), [basis is not None])
                job = Job(functools.partial(_same, result))
                job.run()
                self.pending.setdefault(param, {})[key] = Pending(due, 0, Computed(job))


def _taken_at(unit: Unit, side: int, failures: int = 0) -> int:
    return last_snapshot(unit.job.plan.sides[side], unit.job.group, unit.t, unit.turns[side], failures)


def _same(result: tuple[Tensor, list[bool]]) -> tuple[Tensor, list[bool]]:
    return result


def _due(units: Sequence[Unit]) -> dict[tuple[int, int], dict[tuple[object, ...], list[Unit]]]:
    """The matrices whose snapshot is due, by side and delay, and among these the equal ones."""
    due: dict[tuple[int, int], dict[tuple[object, ...], list[Unit]]] = {}
    for unit in units:
        group = unit.job.group
        for side, factor in enumerate(unit.job.plan.sides):
            if is_due(factor, group["runtime"], unit.t, unit.turns[side], group["refresh_every"]):
                delay = 0 if is_young(factor, unit.t, group["refresh_every"]) else delay_of(group)
                key = (id(group), id(unit.job.plan), unit.job.param.device)
                due.setdefault((side, delay), {}).setdefault(key, []).append(unit)
    return due


def _failed(unit: Unit, side: int, tally: Tally) -> None:
    factor = unit.job.plan.sides[side]
    if not isinstance(factor, Refreshed):
        raise TypeError(f"{factor.name} has nothing to refresh")
    tally.failed += 1
    failures = unit.state[PREFIXES[side] + "failures"].add_(1)
    if int(failures) == _GIVE_UP:
        tally.degraded += 1
        like = unit.state[PREFIXES[side] + "basis"]
        _rebase([unit], side, factor.diagonal_basis(like, (1,)))
        tally.rebased.append((unit, side))


def _rebase(units: list[Unit], side: int, basis: Tensor) -> None:
    """Install new bases; rules that keep moments in the basis re-express them at the same time."""
    plan = units[0].job.plan
    keys = [key for key in units[0].state if key.endswith("basis") or key == "exp_avg_sq"]
    device = units[0].param.device
    state = {key: stack([u.state[key] for u in units], device) for key in keys}
    store(units, ENGINES[plan.engine].rebase(state, side, plan.sides, basis.to(device)))
