"""The tiers in a step: what a stack needs is brought, checked, and put away; what is damaged on a disk is made anew."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .curvature import State
from .distributed import any_ranks, is_alone
from .engines import PREFIXES
from .homes import Homes
from .placement import movable
from .plan import Plan
from .repair import is_recomputable, recomputed, repaired_copy, restart
from .runtime import is_apart, settle
from .stacks import Unit
from .staging import Fetched, Losses

Where = tuple[int, str, int]
"""A parameter, by its identity, the key of a state tensor, and one of its matrices."""


class Offload(Homes):
    """Where the state of one optimizer lies, and how it comes to hand in a step.

    Args, raises: those of `Homes`.
    """

    def __init__(self, options: Mapping[str, Any], warn: Callable[[str, str], None]) -> None:
        super().__init__(options, warn)
        self._unfinished: Generator[list[Unit]] | None = None

    def repaired(self, param: Tensor, plan: Plan, state: State) -> State:
        """A parameter's state for a checkpoint or a copy: what is damaged is made anew there, as the next step will do here."""
        self._finish()
        blocks = self._blocks.get(param, {})
        here = {key: block for key, block in blocks.items() if state[key] is block.tensor}
        gone = [(key, part) for key, block in here.items() for part in range(block.parts) if not block.intact(part)]
        if not gone:
            return state
        self._warn_of_damage(len(gone))
        return repaired_copy(plan, state, gone)

    def staged(self, groups: Iterable[list[Unit]], losses: Losses) -> Iterator[list[Unit]]:
        """Stacks, each with its state at hand and intact before it moves, and put away after it has; the next is fetched.

        A basis that is damaged is computed anew from its factor; a matrix whose factor is damaged starts over, as a new
        one. All ranks do the same.
        """
        self._finish()
        self._unfinished = self._staged(list(groups), losses)
        return self._unfinished

    def _finish(self) -> None:
        """Put away what a step that raised had at hand: whoever holds the traceback keeps it from ending by itself."""
        if self._unfinished is not None:
            self._unfinished.close()

    def _staged(self, waiting: list[list[Unit]], losses: Losses) -> Generator[list[Unit]]:
        damaged = self._agreed(waiting)
        if not self.places:
            yield from waiting
            return
        fetched = self._fetched(waiting[0]) if waiting else None
        for here, ahead in zip(waiting, [*waiting, None][1:], strict=True):
            coming = self._fetched(ahead) if ahead else None
            for part in self._verified(here, damaged, losses):
                if part is not here or fetched is None:  # what was damaged has been written anew since it was fetched
                    fetched = self._fetched(part)
                try:
                    with fetched.in_place():
                        yield part
                finally:
                    self._seal(part)
            fetched = coming
        for device in {unit.param.device for here in waiting for unit in here}:
            settle(device)

    def _fetched(self, units: list[Unit]) -> Fetched:
        for block in [block for unit in units for block in self._blocks.get(unit.job.param, {}).values()]:
            block.hint()
        places = self.places
        on_host = [(u, key) for u in units for key, tier in places.get(u.job.param, {}).items() if tier == "host"]
        return Fetched(on_host if is_apart(units[0].param.device) else [], units[0].param.device)

    def _agreed(self, waiting: list[list[Unit]]) -> set[Where] | None:
        """What is damaged on any rank; None in a single process, which looks at each stack when it comes to it.

        Ranks may have gradients for different parameters, and so different stacks, but must ask each other equally often.
        """
        if self._folder is None or is_alone():
            return None
        own = {where for units in waiting for unit in units for where in self._damaged(unit)}
        device = waiting[0][0].param.device if waiting else torch.device("cpu")
        if not any_ranks([bool(own)], device)[0]:
            return set()
        known = [
            (id(param), key, part)
            for param, places in self.places.items()
            for key, tier in places.items()
            if tier == "nvme"
            for part in range(self._parts[param])
        ]
        shapes = [(tuple(param.shape), places) for param, places in self.places.items()]
        digest = zlib.crc32(repr(shapes).encode())
        bits = [bool(digest >> i & 1) for i in range(32)]
        seen = any_ranks([*bits, *(not bit for bit in bits)], device)
        if any(one and other for one, other in zip(seen, seen[32:], strict=False)):
            return own  # ranks with parameters of their own, as in ZeroRedundancyOptimizer
        return {where for where, bad in zip(known, any_ranks([w in own for w in known], device), strict=True) if bad}

    def _verified(self, units: list[Unit], damaged: set[Where] | None, losses: Losses) -> list[list[Unit]]:
        found = [
            self._damaged(unit)
            if damaged is None
            else [where for key in movable(unit.job.plan) if (where := (id(unit.job.param), key, unit.part)) in damaged]
            for unit in units
        ]
        if not any(found):
            return [units]
        mine = any(self._damaged(unit) for unit in units)
        kept, again = [], []
        for unit, wheres in zip(units, found, strict=True):
            gone = [key for _, key, _ in wheres]
            if all(is_recomputable(unit.job.plan, key) for key in gone):
                kept.append(unit)
                for key in gone:
                    unit.state[key].copy_(recomputed(unit.job.plan, unit.state, key))
                    losses.bases += 1
            else:
                again.append(unit)
                restart(unit)
                losses.restarted.append(unit)
            self._seal([unit], all_keys=True)
        self._warn_of_damage(sum(map(len, found)), mine)
        return [part for part in (kept, again) if part]

    def _warn_of_damage(self, count: int, mine: bool = True) -> None:
        where = self._disk.path if self._disk and mine else "offload_dir of another rank"
        self._warn(
            "lost" if mine else "lost elsewhere",
            f"{where}: the checksums of {count} blocks are not "
            "those of what was written. Bases are computed anew from their factors, matrices whose factors are damaged "
            "start over; later ones are counted in optimizer.report(). Look after this disk",
        )

    def _damaged(self, unit: Unit) -> list[Where]:
        param, part = unit.job.param, unit.part
        return [(id(param), key, part) for key, block in self._blocks.get(param, {}).items() if not block.intact(part)]

    def _seal(self, units: Iterable[Unit], all_keys: bool = False) -> None:
        for unit in units:
            for key, block in self._blocks.get(unit.job.param, {}).items():
                if all_keys or not is_recomputable(unit.job.plan, key):
                    block.seal(unit.part)
                block.release()

    def seal_bases(self, rebased: Iterable[tuple[Unit, int]]) -> None:
        """After a refresh has written bases: by unit and side."""
        for unit, side in rebased:
            block = self._blocks.get(unit.job.param, {}).get(PREFIXES[side] + "basis")
            if block is not None:
                block.seal(unit.part)
                block.release()
