"""The exceptions of SCAO.

::

    ScaoError
    ├── ConfigError (ValueError)            an option has a wrong type or value
    │   └── UnknownOptionError (TypeError)  an option that does not exist
    ├── ParameterError (TypeError)          a parameter that cannot be optimized here (DTensor, flat shard)
    ├── GradientError (RuntimeError)        a gradient that no rule can use (sparse, complex)
    │   └── NonFiniteGradientError          NaN or infinity, with on_nonfinite="raise"
    └── CheckpointError (ValueError)        a state dict that does not belong to this optimizer

Every message says what is wrong, what was got, what is allowed and the way out.
"""

from __future__ import annotations


class ScaoError(Exception):
    """Base of every error that SCAO raises on purpose."""


class ConfigError(ScaoError, ValueError):
    """An option has a wrong type or a value outside its range."""


class UnknownOptionError(ConfigError, TypeError):
    """An option that does not exist; the message names the nearest one."""


class ParameterError(ScaoError, TypeError):
    """A parameter that SCAO cannot optimize."""


class GradientError(ScaoError, RuntimeError):
    """A gradient that SCAO cannot use."""


class NonFiniteGradientError(GradientError):
    """A gradient holds NaN or infinity and ``on_nonfinite="raise"``."""


class CheckpointError(ScaoError, ValueError):
    """A state dict that this optimizer must not load."""
