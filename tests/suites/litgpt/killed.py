"""A full fine-tune that is killed (-9) right after its third step: ``python killed.py <arguments of litgpt>``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
from suites.killing import kill_after
from suites.litgpt.tuning import litgpt

kill_after(3)
litgpt(*sys.argv[1:])
