"""What a run cost and which code it was: CPU seconds, joules where the machine can tell, and the commit."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

_RAPL = Path("/sys/class/powercap")


class Meter:
    """CPU seconds and joules between ``resume`` and ``pause``, summed over all such spans."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zones = _rapl_zones()
        self.cpu_seconds = 0.0
        self.joules: float | None = 0.0
        self._start: tuple[float, float | None] | None = None

    def resume(self) -> None:
        """Begin a span."""
        if self._start is None:
            self._start = (time.process_time(), self._energy())

    def pause(self) -> None:
        """End a span."""
        if self._start is None:
            return
        cpu, energy = self._start
        self._start = None
        self.cpu_seconds += time.process_time() - cpu
        now = self._energy()
        if energy is None or now is None or self.joules is None or now < energy:  # a counter that wrapped around
            self.joules = None
        else:
            self.joules += now - energy

    def _energy(self) -> float | None:
        """Joules since some start; None where this machine does not tell."""
        if self._device.type == "cuda":
            return _gpu_joules(self._device)
        readings = [_read_microjoules(zone) for zone in self._zones]
        known = [value for value in readings if value is not None]
        return sum(known) / 1e6 if known and len(known) == len(readings) else None


def _rapl_zones() -> list[Path]:
    """Energy counters of whole packages (Linux, Intel and AMD); usually readable by root only."""
    return sorted(_RAPL.glob("intel-rapl:[0-9]/energy_uj"))


def _read_microjoules(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _gpu_joules(device: torch.device) -> float | None:
    if importlib.util.find_spec("pynvml") is None:
        return None
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(device.index or 0)
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except nvml.NVMLError:
        return None


@functools.cache
def commit() -> str:
    """The checkout's commit, ``-dirty`` if the code differs from it; ``unknown`` for an installed wheel.

    Looked up once: files that change while a grid runs are not what it runs.
    """
    root = Path(__file__).resolve().parents[3]
    revision = _git(root, "rev-parse", "--short=12", "HEAD")
    if revision is None or not (root / "scao_core").is_dir():
        return "unknown"
    changed = _git(root, "status", "--porcelain", "--", "scao_core", "integrations", "configs/bench")
    return f"{revision}-dirty" if changed else revision


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
