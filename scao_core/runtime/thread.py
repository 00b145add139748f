"""Refreshes beside the training: spread over steps, computed by host threads, installed at a fixed later step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .base import Result
from .staggered import Staggered


class Thread(Staggered):
    """The result of a snapshot of step t is installed at the end of step t + delay, however early or late it is ready.

    So a run does not depend on the speed of the workers: replicas stay equal, and the same delay without threads gives the
    same bits.
    """

    name: ClassVar[str] = "thread"
    delay: ClassVar[int] = 3  # Asteria (2026): the time that is saved no longer grows from about 3 on

    def background(self) -> bool:
        return True

    def beside(self, compute: Callable[[], Result], reads: Sequence[Tensor]) -> Callable[[], Result]:
        if reads[0].device.type != "cuda":
            return compute
        # A new thread starts on the default stream; the snapshot was written on this one.
        training = torch.cuda.current_stream(reads[0].device)

        def run() -> Result:
            with torch.cuda.stream(training):
                return compute()

        return run
