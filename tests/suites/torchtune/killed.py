"""A LoRA run that is killed (-9) right after its fifth step: ``python killed.py <model> <out> <changes as JSON>``."""

import json
import os
import signal
import sys
from pathlib import Path

from scao import SCAO

sys.path.append(str(Path(__file__).parents[2]))
from suites.torchtune.tuning import lora

step, taken = SCAO.step, []


def dies(self, *arguments):
    """The step, and after the fifth the end."""
    taken.append(step(self, *arguments))
    if len(taken) == 5:
        os.kill(os.getpid(), signal.SIGKILL)


SCAO.step = dies
lora(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))
