"""Find the rows that ``--data`` names, and split off the rows that training must never see."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scao_tools.data.aws_docs import aws_rows
from scao_tools.data.rows import Row, read_jsonl, row_from_mapping
from scao_tools.data.stdlib_docs import stdlib_rows
from scao_tools.data.texts import pydoc_topic_rows, python_source_rows
from scao_tools.errors import DataError
from scao_tools.requirements import require

STDLIB = "stdlib"
# Chosen: at most a fifth of the groups is held out, and one group gives at most a quarter of the held-out rows.
_HELD_OUT_GROUPS = 5
_GROUP_SHARE = 4
_HUB_ROW_LIMIT = 20_000


@dataclass(frozen=True)
class DataSet:
    """Rows for training and held-out rows, whose groups do not overlap, and what they were made from."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    description: str
    digest: str


@dataclass(frozen=True)
class NamedSource:
    """Data that comes with Python or with a package: its rows, what they are, and what a group of them is."""

    load: Callable[[], list[Row]]
    kind: str
    unit: str


SOURCES = {
    STDLIB: NamedSource(
        stdlib_rows, "functions of the standard library (prompt: source, answer: docstring)", "modules"
    ),
    "stdlib-signatures": NamedSource(
        functools.partial(stdlib_rows, signature_only=True),
        "functions of the standard library (prompt: signature, answer: docstring)",
        "modules",
    ),
    "aws-docs": NamedSource(
        aws_rows, "operations of web services (prompt: name and parameters, answer: description)", "services"
    ),
    "pydoc-topics": NamedSource(pydoc_topic_rows, "windows of the Python language reference", "topics"),
    "python-source": NamedSource(python_source_rows, "windows of the standard library's sources", "modules"),
}


def load_data(name: str, *, held_out: int, seed: int) -> DataSet:
    """Load one of `SOURCES`, a JSONL file, or a Hugging Face data set, and split it."""
    unit = "prompts"
    if name in SOURCES:
        rows, kind, unit = SOURCES[name].load(), SOURCES[name].kind, SOURCES[name].unit
    elif _looks_like_path(name):
        rows, kind = read_jsonl(_existing_file(name)), f"rows of {Path(name).name}"
    else:
        rows, kind = _hub_rows(name), f"rows of the data set {name} (split train)"
    train, held = split_rows(rows, held_out=held_out, seed=seed)
    groups = len({row.group for row in held})
    description = (
        f"{kind}: {len(train)} for training, {len(held)} held out from {groups} {unit} that training never sees"
    )
    return DataSet(tuple(train), tuple(held), description, rows_digest(rows))


def rows_digest(rows: Sequence[Row]) -> str:
    """SHA-256 over all rows: a resumed run must see the same data in the same order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode())
    return digest.hexdigest()


def split_rows(rows: Sequence[Row], *, held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Split by group. Held-out groups are drawn by a private random generator and vanish from training entirely."""
    unique = list(dict.fromkeys(rows))
    groups = list(dict.fromkeys(row.group for row in unique))
    if len(groups) < 2:
        raise DataError(
            f"the data holds {len(groups)} distinct prompt(s); at least 2 are needed, one to train on and one held out"
        )
    rng = random.Random(f"split:{seed}")
    by_group: dict[str, list[Row]] = {group: [] for group in groups}
    for row in unique:
        by_group[row.group].append(row)
    order = sorted(groups)  # independent of the order in the file
    rng.shuffle(order)
    chosen: list[str] = []
    held: list[Row] = []
    for group in order[: max(1, len(order) // _HELD_OUT_GROUPS)]:
        if len(held) >= held_out:
            break
        members = by_group[group]
        share = max(1, held_out // _GROUP_SHARE)
        held.extend(rng.sample(members, share) if len(members) > share else members)
        chosen.append(group)
    held = held[:held_out]
    excluded = set(chosen)
    train = [row for row in unique if row.group not in excluded]
    return train, held


def _looks_like_path(name: str) -> bool:
    path = Path(name).expanduser()
    return path.exists() or path.suffix.lower() in {".jsonl", ".json", ".txt"} or name.startswith((".", "~", "/", "\\"))


def _existing_file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        raise DataError(f"--data {name} is a directory; give a JSONL file or the name of a Hugging Face data set")
    if not path.exists():
        raise DataError(f"--data {name} does not exist; give a JSONL file or the name of a Hugging Face data set")
    return path


def _hub_rows(name: str) -> list[Row]:
    require(["datasets"], "demo", "reading a Hugging Face data set")
    import datasets

    try:
        table = datasets.load_dataset(name, split="train")
    except Exception as error:  # datasets raises dozens of types: network, gating, missing split, bad name
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"--data {name}: no such file, and it could not be loaded as a Hugging Face data set ({reason})"
        ) from error
    rows = []
    for index, value in enumerate(table):
        if index >= _HUB_ROW_LIMIT:
            break
        try:
            rows.append(row_from_mapping(value))
        except DataError as error:
            raise DataError(f"--data {name}, row {index}: {error}") from error
    if not rows:
        raise DataError(f"--data {name}: the split 'train' holds no rows")
    return rows
