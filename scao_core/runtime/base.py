"""Refreshes as tickets, timed by the step counter. This package knows nothing of curvature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ticket(Generic[Result]):
    """One job: ``compute`` works on copies only and touches no shared state."""

    compute: Callable[[], Result]
    install: Callable[[Result], None]


class Runtime(ABC):
    """When a refresh runs. The clock is a matrix's own step counter, so a resumed run refreshes at the same steps."""

    name: ClassVar[str]

    @abstractmethod
    def phase(self, turn: int, every: int) -> int:
        """Offset within the interval of the ``turn``-th slot of a balanced assignment (0 <= turn < every)."""

    def due(self, t: int, turn: int, every: int) -> bool:
        """True if a matrix whose counter reads t after this step is refreshed at the end of it."""
        return (t + self.phase(turn, every)) % every == 0

    def run(self, tickets: Iterable[Ticket[Result]]) -> None:
        """Compute and install, in order, before the next step."""
        for ticket in tickets:
            ticket.install(ticket.compute())


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
