"""Refreshes as jobs, timed by the step counter. This package knows nothing of curvature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from torch import Tensor

Result = TypeVar("Result")


class Runtime(ABC):
    """When a refresh runs. The clock is a matrix's own step counter, so a resumed run refreshes at the same steps."""

    name: ClassVar[str]
    delay: ClassVar[int] = 0
    """Steps between the snapshot and the installation of its result where the user names no number."""

    @abstractmethod
    def phase(self, turn: int, every: int) -> int:
        """Offset within the interval of the ``turn``-th slot of a balanced assignment (0 <= turn < every)."""

    def background(self) -> bool:
        """Whether a refresh that is due later is computed beside the training."""
        return False

    def beside(self, compute: Callable[[], Result], reads: Sequence[Tensor]) -> Callable[[], Result]:
        """The computation as another thread is to run it.

        Args:
            reads: the tensors that it reads, which the calling thread has just written.
        """
        return compute

    def due(self, t: int, turn: int, every: int) -> bool:
        """True if a snapshot of a matrix whose counter reads t after this step is taken at the end of it."""
        return (t + self.phase(turn, every)) % every == 0


def balanced_turns(costs: list[float], every: int, loads: list[float]) -> list[int]:
    """Spread jobs over ``every`` turns, the largest first, each on the turn with the least load so far.

    Longest processing time first; ties go to the lower index, so that all ranks and all runs agree.

    Args:
        loads: cost already on each turn (length ``every``); updated.
    """
    turns = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        turns[i] = min(range(every), key=lambda turn: (loads[turn], turn))
        loads[turns[i]] += costs[i]
    return turns
