"""SCAO, the Sparse Curvature-Aware Adaptive Optimizer."""

from .config import Options
from .errors import (
    CheckpointError,
    ConfigError,
    GradientError,
    NonFiniteGradientError,
    ParameterError,
    ScaoError,
    UnknownOptionError,
)
from .optimizer import SCAO
from .plan import Plan, plan, plan_key
from .telemetry import Report, StepReport

__version__ = "1.0.0.dev0"

__all__ = [
    "SCAO",
    "CheckpointError",
    "ConfigError",
    "GradientError",
    "NonFiniteGradientError",
    "Options",
    "ParameterError",
    "Plan",
    "Report",
    "ScaoError",
    "StepReport",
    "UnknownOptionError",
    "__version__",
    "plan",
    "plan_key",
]
