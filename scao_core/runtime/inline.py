"""All matrices at the same step: the plain algorithm, with a burst every interval."""

from __future__ import annotations

from typing import ClassVar

from .base import Runtime


class Inline(Runtime):
    """Every matrix is refreshed when its own counter is a multiple of the interval."""

    name: ClassVar[str] = "inline"

    def phase(self, turn: int, every: int) -> int:
        return 0
