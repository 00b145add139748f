"""What a stack of matrices needs at hand while it moves, and what was found damaged on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .repair import is_recomputable
from .runtime import Copies
from .stacks import Unit


@dataclass
class Losses:
    """What was found damaged in a step."""

    bases: int = 0
    restarted: list[Unit] = field(default_factory=list)


class Fetched:
    """Copies of what lies on the host, for one stack."""

    def __init__(self, on_host: list[tuple[Unit, str]], device: torch.device) -> None:
        self._on_host = on_host
        self._hosts = [unit.state[key] for unit, key in on_host]
        self._copies = Copies(self._hosts, device) if on_host else None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The units' states are the copies; afterwards they are the originals again, with what has changed."""
        if self._copies is None:
            yield
            return
        for (unit, key), copy in zip(self._on_host, self._copies.arrived(), strict=True):
            unit.state[key] = copy
        try:
            yield
        finally:
            for (unit, key), host in zip(self._on_host, self._hosts, strict=True):
                unit.state[key] = host
            changed = [i for i, (unit, key) in enumerate(self._on_host) if not is_recomputable(unit.job.plan, key)]
            self._copies.write_back(changed)
