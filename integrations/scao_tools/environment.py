"""Settings of native libraries that must be in the environment before torch is imported."""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """Set defaults; what the user has set stays.

    GNU OpenMP's threads wait for each other in a busy loop. When another program uses a core, a thread spins for the
    whole time slice in which its partner does not run, tens of thousands of times per step: 20 s instead of 5 s were
    measured on two cores. A short loop before sleeping costs nothing on an idle machine.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # The tokenizers library warns about forks when its threads are on.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
