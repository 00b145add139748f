"""Refreshes spread over the interval: each step pays its share, and no step pays for all."""

from __future__ import annotations

from typing import ClassVar

from .base import Runtime


class Staggered(Runtime):
    """A matrix is refreshed on its turn of the interval."""

    name: ClassVar[str] = "staggered"

    def phase(self, turn: int, every: int) -> int:
        return turn
