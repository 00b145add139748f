"""Instruction data from botocore: the operations of a few hundred web services, described in English (Apache-2.0).

Read from the package's JSON files; botocore itself is never imported.
"""

from __future__ import annotations

import gzip
import html
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scao_tools.data.rows import Message, Row
from scao_tools.errors import DataError, MissingPackageError

INSTRUCTION = "Describe this web service operation in one paragraph."
REQUIREMENT = "botocore==1.44.8"

_DOC_LENGTHS = range(80, 501)  # characters, chosen as for docstrings: most tokens of an example are answer
_MEMBERS = 8  # names of parameters in a prompt, chosen: enough to tell what the operation takes


def aws_rows(root: Path | None = None) -> list[Row]:
    """(operation and its parameters, description) in a fixed order; a description seen before is left out.

    The group of a row is its service.
    """
    root = _data_directory() if root is None else root
    rows: list[Row] = []
    seen: set[str] = set()
    for service, model in _services(root):
        for name, operation in sorted(model.get("operations", {}).items()):
            doc = _plain(operation.get("documentation", ""))
            if len(doc) not in _DOC_LENGTHS or doc in seen:
                continue
            seen.add(doc)
            prompt = f"{service}.{name}({', '.join(_parameters(model, operation))})"
            rows.append(
                Row(service, (Message("system", INSTRUCTION), Message("user", prompt), Message("assistant", doc)))
            )
    if not rows:
        raise DataError(f"{root} holds no service descriptions; run: pip install --no-deps {REQUIREMENT}")
    return rows


def _data_directory() -> Path:
    spec = importlib.util.find_spec("botocore")
    if spec is None or spec.origin is None:
        raise MissingPackageError(
            f"the data set aws-docs comes in the package botocore, which is missing; run: pip install --no-deps {REQUIREMENT}"
        )
    return Path(spec.origin).parent / "data"


def _services(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The newest description of each service: folders are named service/date."""
    newest: dict[str, Path] = {}
    for path in sorted(root.glob("*/*/service-2.json*")):
        newest[path.parent.parent.name] = path
    for service, path in sorted(newest.items()):
        raw = path.read_bytes()
        yield service, json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


def _parameters(model: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    shape = operation.get("input", {}).get("shape")
    return list(model.get("shapes", {}).get(shape, {}).get("members", {}))[:_MEMBERS]


def _plain(documentation: str) -> str:
    """Text without markup, in one line."""
    text = html.unescape(re.sub(r"<[^>]+>", " ", documentation))
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r" ([.,;:)])", r"\1", text)
