"""Engines by name. A new rule is one file here and one row in ``ENGINES``."""

from __future__ import annotations

from .adam import Adam, adam_step_
from .base import PREFIXES, Batch, Context, Engine, Sides, default_damping, rate
from .kl import KL
from .soap import Soap
from .spectral import Spectral

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (KL(), Soap(), Spectral(), Adam())}

__all__ = [
    "ENGINES",
    "KL",
    "PREFIXES",
    "Adam",
    "Batch",
    "Context",
    "Engine",
    "Sides",
    "Soap",
    "Spectral",
    "adam_step_",
    "default_damping",
    "rate",
]
