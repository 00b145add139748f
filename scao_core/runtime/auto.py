"""As ``thread`` where a core is spare; else what the threads would compute is computed by the step."""

from __future__ import annotations

from typing import ClassVar

from .stream import Stream
from .workers import spare_cores


class Auto(Stream):
    """The turns and the delay are those of ``thread`` in either case, so that machines with other numbers of cores agree."""

    name: ClassVar[str] = "auto"

    def background(self) -> bool:
        return spare_cores() > 0
