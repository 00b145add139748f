"""Ctrl-C as a request that is honored at the next safe point."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """While active, the first SIGINT or SIGTERM sets a flag; a second one interrupts at once.

    A step that is cut in half would leave weights and optimizer state of different steps, so the loop asks the flag
    between steps.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, Any] = {}

    def requested(self) -> bool:
        """Whether to stop at the next safe point."""
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """The shell's convention for a program ended by a signal: 130 for Ctrl-C."""
        return 128 + (self._received or signal.SIGINT)

    def __enter__(self) -> StopSignals:
        """Install the handlers; only the main thread may, elsewhere signals do what they did."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Put the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._received is not None:
            raise KeyboardInterrupt
        self._received = number
        # Not print: the signal may have come in the middle of one, which refuses to be entered again.
        os.write(2, b"\nStopping after this step; press Ctrl-C again to stop at once.\n")
