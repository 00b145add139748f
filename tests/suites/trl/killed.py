"""An SFT run that is killed (-9) right after its third step: ``python killed.py <folder> <settings as JSON>``."""

import json
import sys
from pathlib import Path

from scao_integrations.hf_trainer import scao_trainer_kwargs

sys.path.append(str(Path(__file__).parents[2]))
from suites.killing import kill_after
from suites.trl.tuning import train

kill_after(3)
train(sys.argv[1], scao_trainer_kwargs(refresh_every=2), **json.loads(sys.argv[2]))
