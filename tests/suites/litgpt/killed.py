"""A full fine-tune that is killed (-9) right after its third step: ``python killed.py <arguments of litgpt>``."""

import os
import signal
import sys
from pathlib import Path

from scao import SCAO

sys.path.append(str(Path(__file__).parents[2]))
from suites.litgpt.tuning import litgpt

step, taken = SCAO.step, []


def dies(self, *arguments):
    """The step, and after the third the end."""
    taken.append(step(self, *arguments))
    if len(taken) == 3:
        os.kill(os.getpid(), signal.SIGKILL)


SCAO.step = dies
litgpt(*sys.argv[1:])
