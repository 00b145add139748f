"""Which device and number format a run computes in, and how much memory it needed."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import time
from pathlib import Path
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# bf16 must pay for its lower precision. Chips without bf16 units emulate it at a third of the fp32 speed, those with
# them are 3-6 times faster, so the exact number is not critical.
_WORTHWHILE_SPEEDUP = 1.2
_TURNS = 20  # 0.1 to 0.3 s on two cores


def pick_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(device: torch.device) -> str:
    """The format for the frozen weights and matrix products: bf16 where the chip has units for it."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    seconds = _product_seconds(("fp32", "bf16"))
    return "bf16" if seconds["fp32"] > _WORTHWHILE_SPEEDUP * seconds["bf16"] else "fp32"


def _product_seconds(names: tuple[str, ...]) -> dict[str, float]:
    factors = {n: (torch.ones(512, 576, dtype=DTYPES[n]), torch.ones(576, 1536, dtype=DTYPES[n])) for n in names}
    best = dict.fromkeys(names, float("inf"))
    # The best of many, in turns: the first call compiles a kernel, and other programs take the processor for some
    # hundredths of a second, which must not meet all calls of one format.
    for _ in range(_TURNS):
        for name, (left, right) in factors.items():
            start = time.perf_counter()
            torch.mm(left, right)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


class PeakMemory:
    """Peak memory of one phase: allocated bytes on a GPU, resident bytes of the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = 0

    def start(self, earlier_peak: int = 0) -> None:
        """Begin a phase; a resumed phase starts from the peak that it had reached."""
        self._peak = earlier_peak
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        _release_freed_heap()
        # Linux: restart the high-water mark. Other systems have no such file: `read` then samples the current size.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """The peak so far."""
        if self._device.type == "cuda":
            now = int(torch.cuda.max_memory_allocated(self._device))
        else:
            now = _resident_peak()
        self._peak = max(self._peak, now)
        return self._peak


def _resident_peak() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return _resident_now()
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return _resident_now()


def _resident_now() -> int:
    if importlib.util.find_spec("psutil") is None:
        return 0
    psutil: Any = importlib.import_module("psutil")
    return int(psutil.Process().memory_info().rss)


def _release_freed_heap() -> None:
    # glibc keeps freed memory; without this the second optimizer's peak would include leftovers of the first.
    # Another C library has no such function.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
