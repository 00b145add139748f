"""The standard-library data set and the held-out split."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scao_tools.data.rows import Row, row_from_mapping
from scao_tools.data.sources import load_data, rows_digest, split_rows
from scao_tools.data.stdlib_docs import stdlib_rows
from scao_tools.errors import DataError

DOC = (
    "Return the sum of both numbers, which may be of any type that knows how to add, and nothing else at all. {}"
    + "." * 30
)


def function(name: str, doc: str, body: str = "return a + b") -> str:
    return f'def {name}(a, b):\n    """{doc}"""\n    {body}\n\n\n'


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "package" / "test").mkdir(parents=True)
    (tmp_path / "package" / "one.py").write_text(function("one", DOC.format(1)) + function("two", DOC.format(2)))
    (tmp_path / "package" / "test" / "three.py").write_text(function("three", DOC.format(3)))
    (tmp_path / "other.py").write_text("\f\n" + function("four", DOC.format(4)) + function("copied", DOC.format(1)))
    (tmp_path / "broken.py").write_text("def broken(:\n")
    (tmp_path / "short.py").write_text(function("short", "Too short."))
    (tmp_path / "single.py").write_text(f'def single(): """{DOC}"""\n')
    return tmp_path


def test_docstrings_are_cut_out_of_the_source(library: Path) -> None:
    rows = {row.prompt: row for row in stdlib_rows(library)}
    assert rows["def four(a, b):\n    return a + b"].answer == DOC.format(4)
    assert rows["def four(a, b):\n    return a + b"].group == "other"


def test_tests_copies_and_unusable_functions_are_left_out(library: Path) -> None:
    names = [row.prompt.split("(")[0] for row in stdlib_rows(library)]
    # "copied" comes first in file order and has the docstring of "one".
    assert names == ["def four", "def copied", "def two"]


def test_a_directory_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data"):
        stdlib_rows(tmp_path)


def test_real_standard_library_is_split_by_module_and_repeatable() -> None:
    data = load_data("stdlib", held_out=32, seed=0)
    assert len(data.held_out) == 32
    assert len(data.train) > 300
    assert len({row.group for row in data.held_out}) >= 4
    assert not {row.group for row in data.train} & {row.group for row in data.held_out}
    assert not {row.answer for row in data.train} & {row.answer for row in data.held_out}
    # Another process has another hash seed: sets and dicts of strings would come out in another order.
    code = (
        "from scao_tools.data.sources import load_data, rows_digest; d = load_data('stdlib', held_out=32, seed=0); "
        "print(rows_digest(d.train), rows_digest(d.held_out))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.split() == [rows_digest(data.train), rows_digest(data.held_out)]


def rows(count: int) -> list[Row]:
    return [row_from_mapping({"prompt": f"p{i}", "completion": f"c{i}"}) for i in range(count)]


def test_split_depends_on_the_seed_but_not_on_the_order_of_the_rows() -> None:
    train, held = split_rows(rows(100), held_out=10, seed=1)
    assert (len(train), len(held)) == (90, 10)
    assert set(split_rows(rows(100)[::-1], held_out=10, seed=1)[1]) == set(held)
    assert set(split_rows(rows(100), held_out=10, seed=2)[1]) != set(held)


def test_equal_prompts_stay_together_and_equal_rows_count_once() -> None:
    many = [row_from_mapping({"prompt": f"p{i % 6}", "completion": f"c{i}"}) for i in range(60)]
    train, held = split_rows(many + many, held_out=4, seed=0)
    assert not {row.group for row in train} & {row.group for row in held}
    assert len(train) + len(held) <= 60


def test_two_prompts_are_the_least() -> None:
    train, held = split_rows(rows(2), held_out=10, seed=0)
    assert (len(train), len(held)) == (1, 1)
    with pytest.raises(DataError, match="at least 2"):
        split_rows(rows(1), held_out=10, seed=0)
