"""Curvature factors by name. A new factor is one file here and one row in ``FACTORS``."""

from __future__ import annotations

from .base import Factor, Refreshed, State, tiny
from .blocked import Blocked
from .dense import Dense
from .diagonal import Diagonal
from .spiked import Spiked

FACTORS: dict[str, type[Factor]] = {cls.name: cls for cls in (Dense, Spiked, Blocked, Diagonal)}

__all__ = ["FACTORS", "Blocked", "Dense", "Diagonal", "Factor", "Refreshed", "Spiked", "State", "tiny"]
