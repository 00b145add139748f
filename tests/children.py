"""Processes that a test starts."""

from __future__ import annotations

import os
import sys


def environment(**more: str) -> dict[str, str]:
    """What a child needs to import all that this process can, the test helpers included, on one thread."""
    paths = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths, **more}
