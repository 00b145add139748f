"""From what Python, YAML or a command line gives to a plain value, or an error that says what is allowed."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import ConfigError

FACTOR_NAMES = ("dense", "spiked", "blocked", "diagonal")
DTYPE_NAMES = ("float32", "bfloat16", "float64")  # not float16: small gradients would vanish in it


def shown(value: object) -> str:
    return repr(value)[:80]


def number(low: float = -math.inf, high: float = math.inf, *, open_high: bool = False) -> Callable[[str, Any], float]:
    """A finite number in [low, high], or in [low, high) with ``open_high``; text is converted."""

    def convert(name: str, value: Any) -> float:
        got = shown(value)
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
            raise ConfigError(f"{name}={shown(value)} must be an integer >= {low}") from None
        return int(as_float)

    return convert


_UNITS = {"": 1, **{f"{c}B": 1000**k for k, c in enumerate("KMGT", 1)}}
_UNITS |= {unit: 1024**k for k, c in enumerate("KMGT", 1) for unit in (c, f"{c}IB")} | {"B": 1}


def byte_count(name: str, value: Any) -> int:
    """A number of bytes, as a number or as text: ``"2GiB"`` and ``"2G"`` are 2 · 1024³, ``"2GB"`` is 2 · 1000³."""
    found = re.fullmatch(r"([0-9.]+(?:e\+?\d+)?)\s*([a-z]*)", str(value).strip(), re.IGNORECASE)
    try:
        if found is None or isinstance(value, (bool, bytes)):
            raise ValueError
        count = float(found[1]) * _UNITS[found[2].upper()]
        return integer(0)(name, round(count) if found[2] else count)
    except (KeyError, ValueError, OverflowError, ConfigError):
        raise ConfigError(f"{name}={shown(value)} must be a number of bytes >= 0, e.g. 2GiB, 512MiB or 1e9") from None


def folder(name: str, value: Any) -> str:
    """A path, kept as text."""
    try:
        path = os.fspath(value)
    except TypeError:
        path = b""
    if not isinstance(path, str) or "\0" in path:
        raise ConfigError(f"{name}={shown(value)} must be the path of a folder")
    return os.path.expanduser(path)


def flag(name: str, value: Any) -> bool:
    """A bool; the words that YAML and command lines use for one are converted."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ConfigError(f"{name}={shown(value)} must be true or false")


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
            raise ConfigError(f"{name}={shown(value)} must be one of {', '.join(allowed)}{hint(word, allowed)}")
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
        raise ConfigError(f"{name}={shown(value)} must be two numbers in [0, 1), e.g. (0.9, 0.999)")
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
        near = hint(unknown[0], FACTOR_NAMES) if unknown else ""
        raise ConfigError(
            f"{name}={shown(value)} must be 'auto' or two of {', '.join(FACTOR_NAMES)} for the shorter and the longer "
            f"side, e.g. 'dense,spiked'{near}"
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


def hint(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.lower(), [str(k) for k in known], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
