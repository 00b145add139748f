"""Refresh schedules by name. A new one is one file here and one row in ``RUNTIMES``."""

from __future__ import annotations

from .base import Runtime, Ticket, balanced_turns
from .inline import Inline
from .staggered import Staggered

RUNTIMES: dict[str, Runtime] = {runtime.name: runtime for runtime in (Staggered(), Inline())}

__all__ = ["RUNTIMES", "Inline", "Runtime", "Staggered", "Ticket", "balanced_turns"]
