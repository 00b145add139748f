"""The benchmark's data: fixed order, no text on both sides of the split, no text in the small model's pretraining."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from scao_tools.data.aws_docs import aws_rows
from scao_tools.data.sources import SOURCES, load_data
from scao_tools.data.stdlib_docs import stdlib_rows
from scao_tools.data.texts import WINDOW, pydoc_topic_rows, python_source_rows
from scao_tools.errors import DataError


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"aws-docs"}))
def test_named_data_splits_by_group(name: str) -> None:
    data = load_data(name, held_out=32, seed=0)
    assert len(data.held_out) == 32
    assert not {row.group for row in data.train} & {row.group for row in data.held_out}
    assert not set(data.train) & set(data.held_out)
    assert data == load_data(name, held_out=32, seed=0)


def test_pretraining_text_holds_nothing_of_the_reference_that_is_learned_later() -> None:
    pretraining = {row.text for row in python_source_rows()}
    assert not any(row.group == "pydoc_data" for row in python_source_rows())
    assert not pretraining & {row.text for row in pydoc_topic_rows()}


def test_windows_have_one_length_and_cover_the_text(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("x = 1\n" * 100)
    rows = python_source_rows(tmp_path)
    assert [len(row.text or "") for row in rows] == [WINDOW] * (600 // WINDOW)
    assert "".join(row.text or "" for row in rows) == ("x = 1\n" * 100)[: WINDOW * len(rows)]
    with pytest.raises(DataError, match="no Python sources"):
        python_source_rows(tmp_path / "nothing")


def test_a_signature_prompt_is_the_def_line_without_decorators(tmp_path: Path) -> None:
    doc = "Add two numbers and return the sum of both, however large they are, as an exact integer. " * 2
    (tmp_path / "m.py").write_text(
        f'@wraps\n@cache(\n    size=3)\nasync def add(a, b):\n    """{doc}"""\n' + "    a += 0\n" * 200
    )
    (row,) = stdlib_rows(tmp_path, signature_only=True)
    assert row.prompt == "async def add(a, b):"
    assert row.answer == doc.strip()


def service(root: Path, name: str, date: str, operations: dict[str, Any], packed: bool) -> None:
    folder = root / name / date
    folder.mkdir(parents=True)
    text = json.dumps({"operations": operations, "shapes": {"In": {"members": {"Bucket": {}, "Key": {}}}}})
    if packed:
        (folder / "service-2.json.gz").write_bytes(gzip.compress(text.encode()))
    else:
        (folder / "service-2.json").write_text(text)


def test_service_descriptions_lose_their_markup_and_the_newest_version_counts(tmp_path: Path) -> None:
    long = "<p>Deletes the <code>object</code> &amp; its versions , then returns the number of what was deleted to you.</p>"
    old = {
        "Delete": {
            "documentation": "<p>Old words about deleting objects from a bucket, which nobody should see now.</p>"
        }
    }
    new = {"Delete": {"documentation": long, "input": {"shape": "In"}}, "Short": {"documentation": "<p>Too short.</p>"}}
    service(tmp_path, "store", "2006-01-01", old, packed=False)
    service(tmp_path, "store", "2020-01-01", new, packed=True)
    service(tmp_path, "twin", "2020-01-01", {"Remove": {"documentation": long}}, packed=False)
    (row,) = aws_rows(tmp_path)
    assert row.group == "store"
    assert row.prompt == "store.Delete(Bucket, Key)"
    assert row.answer == "Deletes the object & its versions, then returns the number of what was deleted to you."
    with pytest.raises(DataError, match="botocore"):
        aws_rows(tmp_path / "nothing")
