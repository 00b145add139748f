"""Refresh schedules by name. A new one is one file here and one row in ``RUNTIMES``."""

from __future__ import annotations

from .auto import Auto
from .base import Runtime, balanced_turns
from .copies import Copies, is_apart, settle
from .inline import Inline
from .staggered import Staggered
from .stream import Stream
from .thread import Thread
from .tiers import TIERS, Block, Disk, assign
from .workers import Job, Workers, one_thread, spare_cores

RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime for runtime in (Staggered(), Inline(), Thread(), Stream(), Auto())
}

__all__ = [
    "RUNTIMES",
    "TIERS",
    "Auto",
    "Block",
    "Copies",
    "Disk",
    "Inline",
    "Job",
    "Runtime",
    "Staggered",
    "Stream",
    "Thread",
    "Workers",
    "assign",
    "balanced_turns",
    "is_apart",
    "one_thread",
    "settle",
    "spare_cores",
]
