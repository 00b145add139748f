"""Plain text that every Python has, cut into windows of equal length: for models that read bytes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scao_tools.data.rows import Row
from scao_tools.data.stdlib_docs import source_files, stdlib_directory
from scao_tools.errors import DataError

WINDOW = 128  # characters, chosen: nearly all of this text is ASCII, so it is also about the number of bytes


def python_source_rows(root: Path | None = None) -> list[Row]:
    """The standard library's sources; a window's group is its top-level module or package.

    Without ``pydoc_data``, whose text is the data set of `pydoc_topic_rows`.
    """
    root = stdlib_directory() if root is None else root
    rows: list[Row] = []
    for path in source_files(root):
        if path.relative_to(root).parts[0] == "pydoc_data":
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a few files are in other encodings on purpose
        rows += _windows(path.relative_to(root).parts[0].removesuffix(".py"), text)
    if not rows:
        raise DataError(f"{root} holds no Python sources; give your own rows with --data FILE.jsonl")
    return rows


def pydoc_topic_rows() -> list[Row]:
    """The language reference as ``help()`` shows it, in English; a window's group is its topic."""
    try:
        module: Any = importlib.import_module("pydoc_data.topics")
    except ImportError as error:
        raise DataError(
            "this Python has no pydoc_data.topics; install its documentation, or give your own rows with --data FILE.jsonl"
        ) from error
    return [row for topic, text in sorted(module.topics.items()) for row in _windows(topic, text)]


def _windows(group: str, text: str) -> Iterator[Row]:
    for start in range(0, len(text) - WINDOW + 1, WINDOW):
        window = text[start : start + WINDOW]
        if window.strip():
            yield Row(group, text=window)
