"""The JSON shapes of training rows, and what is said about a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from scao_tools.data.rows import read_jsonl, row_from_mapping
from scao_tools.errors import DataError


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("value", "prompt", "answer"),
    [
        ({"prompt": "p", "completion": "c"}, "p", "c"),
        ({"instruction": "i", "output": "o"}, "i", "o"),
        ({"instruction": "i", "input": "x", "output": "o"}, "i\n\nx", "o"),
        ({"instruction": "i", "input": None, "output": "o"}, "i", "o"),
        ({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}, "u", "a"),
        ({"text": "just text"}, "", "just text"),
    ],
)
def test_every_shape_is_read(value: dict[str, object], prompt: str, answer: str) -> None:
    row = row_from_mapping(value)
    assert (row.prompt, row.answer) == (prompt, answer)


def test_turns_after_the_last_answer_are_cut() -> None:
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    assert [message.role for message in row_from_mapping({"messages": messages}).messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "p", "completion": "c"', "not valid JSON"),
        ("[1, 2]", "expected a JSON object, got list"),
        ('{"question": "q"}', "no known shape (keys: question)"),
        ('{"prompt": 3, "completion": "c"}', "'prompt' must be a string, got int"),
        ('{"prompt": "p", "completion": "  "}', "'completion' is empty"),
        ('{"messages": []}', "non-empty list"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "role 'robot' is unknown"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no assistant turn"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "'content' must be a string, got NoneType"),
        ('{"messages": ["hello"]}', "messages[0] must be an object"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path, '{"text": "fine"}', "", line)
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    assert "rows.jsonl, line 3" in str(caught.value)
    assert reason in str(caught.value)


def test_blank_lines_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    assert [row.answer for row in read_jsonl(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "holds no rows"), (b"\n\n", "holds no rows"), (b"\xff\xfe{", "UTF-8")]
)
def test_unusable_files(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        read_jsonl(path)
