"""Options: strict at the border, plain values inside.

:class:`Options` is the one list of what a parameter group can carry. Values may come from Python, YAML or a command
line, so numbers may be text (PyYAML reads ``2e-4`` as text) and sequences may be of any kind; what leaves this module
is ``float``, ``int``, ``bool``, ``str`` and ``tuple`` only, so a checkpoint stays loadable with ``weights_only=True``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ConfigError, UnknownOptionError

ENGINES = ("kl", "soap", "spectral")
FACTOR_NAMES = ("dense", "spiked", "blocked", "diagonal")
RUNTIME_NAMES = ("staggered", "inline")
DTYPE_NAMES = ("float32", "bfloat16", "float64")  # not float16: small gradients would vanish in it
NORM_RULES = ("decrease", "none")
NONFINITE = ("skip", "raise")


def _shown(value: object) -> str:
    return repr(value)[:80]


def number(low: float = -math.inf, high: float = math.inf, *, open_high: bool = False) -> Callable[[str, Any], float]:
    """A finite number in [low, high], or in [low, high) with ``open_high``; text is converted."""

    def convert(name: str, value: Any) -> float:
        got = _shown(value)
        try:
            if isinstance(value, (bool, bytes)) or value is None:
                raise TypeError
            result = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"{name}: expected a number, got {got}") from None
        if not (math.isfinite(result) and low <= result <= high) or (open_high and result == high):
            upper = "" if high == math.inf else f" and {'<' if open_high else '<='} {high:g}"
            raise ConfigError(f"{name}={got} must be a finite number >= {low:g}{upper}")
        return result

    return convert


def integer(low: int) -> Callable[[str, Any], int]:
    """A whole number >= low; ``"10"`` and ``10.0`` are converted, ``2.5`` and ``True`` are refused."""

    def convert(name: str, value: Any) -> int:
        try:
            if isinstance(value, (bool, bytes)) or value is None:
                raise TypeError
            as_float = float(value)
            if as_float != int(as_float) or as_float < low:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{name}={_shown(value)} must be an integer >= {low}") from None
        return int(as_float)

    return convert


def flag(name: str, value: Any) -> bool:
    """A bool; the words that YAML and command lines use for one are converted."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ConfigError(f"{name}={_shown(value)} must be true or false")


def optional(convert: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """``None`` (also as the words none, null and the empty text) stays ``None``, everything else is converted."""

    def convert_or_none(name: str, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none", "null")):
            return None
        return convert(name, value)

    return convert_or_none


def choice(*allowed: str) -> Callable[[str, Any], str]:
    """One of a few words."""

    def convert(name: str, value: Any) -> str:
        word = str(value).strip().lower()
        if word not in allowed:
            raise ConfigError(f"{name}={_shown(value)} must be one of {', '.join(allowed)}{_hint(word, allowed)}")
        return word

    return convert


def dtype_name(name: str, value: Any) -> str:
    """A floating dtype, as ``torch.bfloat16``, ``"bfloat16"`` or ``"bf16"``; kept as its name, which any loader can read."""
    short = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
    word = str(value).strip().lower().removeprefix("torch.")
    return choice(*DTYPE_NAMES)(name, short.get(word, word))


def _items(value: Any) -> list[Any]:
    """The items of any sequence, or of text such as ``"0.9,0.95"`` and ``"[0.9, 0.95]"``."""
    if isinstance(value, str):
        return [part.strip().strip("'\"") for part in value.strip().strip("()[]").split(",") if part.strip()]
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise TypeError
    return list(value)


def betas_pair(name: str, value: Any) -> tuple[float, float]:
    """Two decay rates in [0, 1)."""
    try:
        items = _items(value)
    except TypeError:
        items = []
    if len(items) != 2:
        raise ConfigError(f"{name}={_shown(value)} must be two numbers in [0, 1), e.g. (0.9, 0.999)")
    rate = number(0.0, 1.0, open_high=True)
    return rate(f"{name}[0]", items[0]), rate(f"{name}[1]", items[1])


def factor_pair(name: str, value: Any) -> str:
    """``"auto"`` or two factor names for the shorter and the longer side; kept as text, ``"dense,spiked"``."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    try:
        items = [str(item).strip().lower() for item in _items(value)]
    except TypeError:
        items = []
    unknown = [item for item in items if item not in FACTOR_NAMES]
    if len(items) != 2 or unknown:
        hint = _hint(unknown[0], FACTOR_NAMES) if unknown else ""
        raise ConfigError(
            f"{name}={_shown(value)} must be 'auto' or two of {', '.join(FACTOR_NAMES)} for the shorter and the longer "
            f"side, e.g. 'dense,spiked'{hint}"
        )
    return ",".join(items)


def learning_rate(name: str, value: Any) -> Any:
    """A number >= 0, or a one-element tensor that is kept as it is, so that in-place changes are seen."""
    if hasattr(value, "is_floating_point") and hasattr(value, "numel"):
        if value.numel() != 1:
            raise ConfigError(f"{name}: expected a number or a 0-d tensor, got a tensor of shape {tuple(value.shape)}")
        if value.device.type != "meta":
            number(0.0)(name, value.item())
        return value
    return number(0.0)(name, value)


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
    spike_rank: int = _option(4, integer(1), "Dominant directions kept on a wide side by the spiked factor.")
    block_size: int = _option(256, integer(1), "Largest block of the blocked factor.")
    max_dense_dim: int = _option(256, integer(1), "Largest side that gets one dense factor.")
    max_dim: int = _option(32768, integer(1), "A matrix with a longer side (a vocabulary) takes the Adam path.")
    bytes_per_param: float | None = _option(
        None,
        optional(number(0.0)),
        "State per matrix parameter that its factors may take it to, in bytes; None: 8 (soap: 12).",
    )
    refresh_every: int = _option(10, integer(1), "Steps between two refreshes of an eigenbasis.")
    runtime: str = _option(
        "staggered", choice(*RUNTIME_NAMES), "When refreshes run: spread over steps, or all at once."
    )
    damping: float = _option(1e-3, number(0.0), "Added to eigenvalues, relative to their mean.")
    norm_rule: str = _option(
        "decrease", choice(*NORM_RULES), "Size of a KL step: the first-order decrease of Adam's, or as whitened."
    )
    cautious: bool = _option(True, flag, "Move entries of a matrix only where the step's sign is the gradient's.")
    nesterov: bool = _option(True, flag, "Let the gradient count once more in a matrix's momentum.")
    curvature_beta: float | None = _option(
        None, optional(number(0.0, 1.0, open_high=True)), "Decay of the curvature factors; None: the second of betas."
    )
    momentum_dtype: str | None = _option(None, optional(dtype_name), "Storage of the momentum; None: as computed.")
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
        return cls(**(merged | values))

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, as a parameter group holds them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


OPTION_NAMES = tuple(f.name for f in fields(Options))
DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Options)}


def _hint(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.lower(), [str(k) for k in known], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def near_miss(name: str) -> bool:
    """True if a key of a parameter group is so close to an option that it must be a typing error."""
    near = difflib.get_close_matches(name, [*OPTION_NAMES, *LEGACY], n=1, cutoff=0.8)
    return bool(near) and abs(len(near[0]) - len(name)) <= 2


def unknown_option(name: str, known: Iterable[str]) -> UnknownOptionError:
    """The error for an option that does not exist."""
    names = [*known, *LEGACY]
    hint = _hint(name, names) or "."
    return UnknownOptionError(f"unknown option {name!r}{hint} Options of SCAO: {', '.join(OPTION_NAMES)}")


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
