"""The name in every recipe: ``from scao import SCAO``."""

from scao_core import *
