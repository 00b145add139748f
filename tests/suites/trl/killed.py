"""An SFT run that is killed (-9) right after its third step: ``python killed.py <folder> <settings as JSON>``."""

import json
import os
import signal
import sys
from pathlib import Path

from scao import SCAO
from scao_integrations.hf_trainer import scao_trainer_kwargs

sys.path.append(str(Path(__file__).parents[2]))
from suites.trl.tuning import train

step, taken = SCAO.step, []


def dies(self, *arguments):
    """The step, and after the third the end."""
    taken.append(step(self, *arguments))
    if len(taken) == 3:
        os.kill(os.getpid(), signal.SIGKILL)


SCAO.step = dies
train(sys.argv[1], scao_trainer_kwargs(refresh_every=2), **json.loads(sys.argv[2]))
