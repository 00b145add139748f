"""Options: strict at the border, plain values inside.

:class:`Options` is the one list of what a parameter group can carry. Values may come from Python, YAML or a command
line, so numbers may be text (PyYAML reads ``2e-4`` as text) and sequences may be of any kind; what leaves this module
is ``float``, ``int``, ``bool``, ``str`` and ``tuple`` only, so a checkpoint stays loadable with ``weights_only=True``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .converters import (
    betas_pair,
    byte_count,
    choice,
    dtype_name,
    factor_pair,
    flag,
    folder,
    hint,
    integer,
    learning_rate,
    number,
    optional,
)
from .errors import ConfigError, UnknownOptionError

ENGINES = ("kl", "soap", "spectral")
RUNTIME_NAMES = ("staggered", "inline", "thread", "stream", "auto")
NORM_RULES = ("decrease", "none")
NONFINITE = ("skip", "raise")


def _option(default: Any, convert: Callable[[str, Any], Any], doc: str) -> Any:
    return field(default=default, metadata={"convert": convert, "doc": doc})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every parameter group can set. The documentation's option table is generated from these fields."""

    lr: Any = _option(1e-3, learning_rate, "Learning rate: start from AdamW's. A 0-d tensor is kept.")
    betas: tuple[float, float] = _option((0.9, 0.999), betas_pair, "Decay of the momentum and of the second moments.")
    eps: float = _option(1e-8, number(0.0), "Added to square roots, relative to the tensor's first gradient.")
    weight_decay: float = _option(1e-2, number(0.0), "Decoupled weight decay, as in AdamW.")
    engine: str = _option("kl", choice(*ENGINES), "Update rule for matrices: kl, soap or spectral.")
    factors: str = _option("auto", factor_pair, "Curvature factors of the shorter and longer side, or auto.")
    spike_rank: int = _option(3, integer(1), "Dominant directions kept on a wide side by the spiked factor.")
    block_size: int = _option(256, integer(1), "Largest block of the blocked factor.")
    max_dense_dim: int = _option(256, integer(1), "Largest side that gets one dense factor.")
    max_dim: int = _option(32768, integer(1), "A matrix with a longer side (a vocabulary) takes the Adam path.")
    bytes_per_param: float | None = _option(
        None,
        optional(number(0.0)),
        "State per matrix parameter that its factors may take it to, in bytes; None: 8 (soap: 12).",
    )
    refresh_every: int = _option(
        10, integer(1), "Steps between two refreshes of an eigenbasis; a short side has early ones too."
    )
    refresh_delay: int | None = _option(
        None, optional(integer(0)), "Steps from a snapshot to its installation; None: 0, or 3 with threads."
    )
    runtime: str = _option(
        "staggered",
        choice(*RUNTIME_NAMES),
        "Refreshes spread over steps, all at once (inline), or by threads (thread, stream; auto: where a core is spare).",
    )
    memory_budget: int | None = _option(
        None, optional(byte_count), "Bytes (2GiB) of curvature on the device; the rest lies on the host. None: all."
    )
    host_budget: int | None = _option(
        None,
        optional(byte_count),
        "Bytes of curvature on the host, with an offload_dir; None: 0, all the rest on disk.",
    )
    offload_dir: str | None = _option(None, optional(folder), "Folder on a fast disk for what fits no budget.")
    damping: float | None = _option(
        None,
        optional(number(0.0)),
        "Added to eigenvalues, relative to their mean; None: 0.1, and 1e-3 where the short side is over 64.",
    )
    norm_rule: str = _option(
        "decrease", choice(*NORM_RULES), "Size of a KL step: the first-order decrease of Adam's, or as whitened."
    )
    cautious: bool = _option(True, flag, "Move entries of a matrix only where the step's sign is the gradient's.")
    nesterov: bool = _option(True, flag, "Let the gradient count once more in a matrix's momentum.")
    curvature_beta: float | None = _option(
        None, optional(number(0.0, 1.0, open_high=True)), "Decay of the curvature factors; None: the second of betas."
    )
    momentum_dtype: str | None = _option(
        None, optional(dtype_name), "Its storage; None: bfloat16 for parameters in it, else as computed."
    )
    stochastic_rounding: bool = _option(False, flag, "Round bf16 parameters at random when written, without bias.")
    on_nonfinite: str = _option(
        "skip", choice(*NONFINITE), "A NaN or infinite gradient skips the whole step, or raises."
    )
    maximize: bool = _option(False, flag, "Ascend instead of descend.")
    foreach: bool | None = _option(
        None, optional(flag), "False: one tensor at a time. None and True: stacks of equal shapes."
    )
    fused: bool | None = _option(None, optional(flag), "Accepted for compatibility; True is ignored with a warning.")
    capturable: bool = _option(False, flag, "Only False: a step reads one flag on the host.")
    differentiable: bool = _option(False, flag, "Only False.")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], base: Options | None = None) -> Options:
        """Convert and check every value; refuse unknown names with the nearest known one.

        Args:
            mapping: option name -> value, of whatever type YAML or a command line gave.
            base: what is not named in ``mapping``; the defaults if None.
        """
        known = {f.name: f for f in fields(cls)}
        for name in mapping:
            if name not in known:
                raise unknown_option(str(name), known)
        values = {name: known[name].metadata["convert"](name, value) for name, value in mapping.items()}
        for name in ("capturable", "differentiable"):
            if values.get(name):
                raise ConfigError(f"{name}=True is not supported by SCAO; allowed: {name}=False (leave it out)")
        merged = {f.name: getattr(base, f.name) for f in fields(cls)} if base is not None else {}
        result = cls(**(merged | values))
        if result.refresh_delay is not None and result.refresh_delay >= result.refresh_every:
            raise ConfigError(
                f"refresh_delay={result.refresh_delay} must be at most refresh_every - 1 = {result.refresh_every - 1}: "
                "a basis must be installed before the next snapshot is taken"
            )
        result._check_placement()
        return result

    def _check_placement(self) -> None:
        if self.offload_dir is not None and self.memory_budget is None:
            raise ConfigError(
                f"offload_dir={self.offload_dir!r} has no effect without memory_budget, the bytes that may stay on the "
                "device; set it too (0 is allowed)"
            )
        if self.host_budget is not None and self.offload_dir is None:
            raise ConfigError(f"host_budget={self.host_budget} needs offload_dir, the folder for what does not fit")

    @classmethod
    def convert(cls, name: str, value: Any) -> Any:
        """The plain value of one option."""
        (option,) = [f for f in fields(cls) if f.name == name]
        return option.metadata["convert"](name, value)

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, as a parameter group holds them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


# Where state lies is a matter of the machine, not of a parameter group, and not of a checkpoint.
PLACEMENT = ("memory_budget", "host_budget", "offload_dir")
OPTION_NAMES = tuple(f.name for f in fields(Options))
DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Options)}


def near_miss(name: str) -> bool:
    """True if a key of a parameter group is so close to an option that it must be a typing error."""
    near = difflib.get_close_matches(name, [*OPTION_NAMES, *LEGACY], n=1, cutoff=0.8)
    return bool(near) and abs(len(near[0]) - len(name)) <= 2


def unknown_option(name: str, known: Iterable[str]) -> UnknownOptionError:
    """The error for an option that does not exist."""
    names = [*known, *LEGACY]
    near = hint(name, names) or "."
    return UnknownOptionError(f"unknown option {name!r}{near} Options of SCAO: {', '.join(OPTION_NAMES)}")


# Options of older code under the name SCAO that frameworks still document: name -> (check, the option it becomes or
# None, what a user should do). Those that become an option keep their meaning; the others had none here.
LEGACY: dict[str, tuple[Callable[[str, Any], Any], str | None, str]] = {
    "precond_freq": (integer(1), "refresh_every", ""),
    "max_precond_dim": (
        integer(1),
        None,
        "sides up to max_dense_dim get a dense factor; set max_dense_dim or max_dim instead",
    ),
    "k_min": (integer(1), None, "the number of directions is fixed; set spike_rank instead"),
    "k_max": (integer(1), None, "the number of directions is fixed; set spike_rank instead"),
    "sparsity": (
        number(0.0, 1.0),
        None,
        "a wide side keeps its spike_rank dominant directions; set spike_rank instead",
    ),
    "use_int8_ema": (flag, None, "set momentum_dtype=bfloat16 instead"),
    "warmup_steps": (integer(0), None, "use the warmup of your learning-rate schedule instead"),
    "min_precond_updates": (integer(0), None, "the first step of a tensor is always AdamW's, no option is needed"),
    "factor_mode": (lambda name, value: str(value), None, "set factors instead, e.g. factors='dense,spiked'"),
}


def translate_legacy(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Split off the options of older SCAO code, and AdamW's ``amsgrad``, which may be given as off.

    Returns:
        the options with the mapped ones renamed, and one sentence for each that has no meaning here.
    """
    result = {name: value for name, value in options.items() if name not in LEGACY and name != "amsgrad"}
    if options.get("amsgrad") not in (None, False):
        raise ConfigError("amsgrad=True is not supported by SCAO; allowed: amsgrad=False (leave it out)")
    remarks = []
    old = {
        name: LEGACY[name][0](name, value) for name, value in options.items() if name in LEGACY and value is not None
    }
    if "k_min" in old and "k_max" in old and old["k_min"] > old["k_max"]:
        raise ConfigError(f"k_min={old['k_min']} must be <= k_max={old['k_max']}")
    for name, value in old.items():
        _, target, advice = LEGACY[name]
        if target is None:
            remarks.append(f"{name} has no effect: {advice}")
        elif target in result:
            raise ConfigError(f"{name} is the older name of {target}: give one of them, got both")
        else:
            result[target] = value
    return result, remarks
