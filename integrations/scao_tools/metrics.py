"""``metrics.jsonl``: one line per step and per evaluation, in an order that a resumed run continues exactly."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scao_tools.checkpointing import write_text_atomically
from scao_tools.errors import ResumeError

Line = dict[str, Any]


class MetricsLog:
    """Appends lines; each reaches the file as a whole or, after a kill, as a torn last line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, line: Line) -> None:
        """Write one line and hand it to the operating system."""
        self._file.write(json.dumps(finite(line), allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until the lines are on the disk; called before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity: replace them by the strings "nan", "inf", "-inf", which `number` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def number(value: Any) -> float:
    """Read a number that `finite` may have turned into a string."""
    return float(value)


def read_metrics(path: Path) -> list[Line]:
    """Read all lines; a torn last line is left out, damage anywhere else is refused."""
    if not path.exists():
        return []
    # errors="replace": a line torn inside a character must not hide the lines before it.
    raw = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines: list[Line] = []
    for index, text in enumerate(raw[:-1]):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            if not any(part.strip() for part in raw[index + 1 :]):
                break
            raise ResumeError(
                f"{path}, line {index + 1} is damaged ({error.msg}); start again with --overwrite"
            ) from error
        lines.append(line)
    return lines


def rewrite_metrics(path: Path, keep: Callable[[Line], bool]) -> list[Line]:
    """Drop the torn last line and all lines that ``keep`` refuses; returns what stayed."""
    lines = [line for line in read_metrics(path) if keep(line)]
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != text:
        write_text_atomically(path, text)
    return lines
