"""A LoRA run that is killed (-9) right after its fifth step: ``python killed.py <model> <out> <changes as JSON>``."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
from suites.killing import kill_after
from suites.torchtune.tuning import lora

kill_after(5)
lora(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))
