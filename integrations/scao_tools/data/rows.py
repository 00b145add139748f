"""One row of instruction data, and the JSON shapes that it can come in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scao_tools.errors import DataError

_ROLES = ("system", "user", "assistant", "tool")
_SHAPES = (
    '{"prompt", "completion"}, {"instruction", "input" (optional), "output"}, {"messages": [{"role", "content"}, …]} '
    'or {"text"}'
)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Row:
    """A conversation, or plain text. Rows of one group never end up on both sides of the held-out split."""

    group: str
    messages: tuple[Message, ...] = ()
    text: str | None = None

    @property
    def prompt(self) -> str:
        """What the model is asked in the last exchange (empty for plain text)."""
        return next((message.content for message in reversed(self.messages[:-1]) if message.role == "user"), "")

    @property
    def answer(self) -> str:
        """The last answer, or the plain text itself."""
        return self.text if self.text is not None else self.messages[-1].content


def read_jsonl(path: Path) -> list[Row]:
    """Read a JSON Lines file; a bad line is refused with the file name and the line number."""
    rows: list[Row] = []
    try:
        # utf-8-sig: files saved on Windows often start with a byte-order mark, which json refuses.
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_parse_line(line, f"{path}, line {number}"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}); save the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if not rows:
        raise DataError(f"{path} holds no rows; write one JSON object per line: {_SHAPES}")
    return rows


def _parse_line(line: str, where: str) -> Row:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not valid JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply to be a training row") from error
    try:
        return row_from_mapping(value)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def row_from_mapping(value: object) -> Row:
    """Turn one decoded JSON object into a `Row`; `DataError` says which key is missing or has the wrong type."""
    if not isinstance(value, Mapping):
        raise DataError(f"expected a JSON object, got {type(value).__name__}; allowed: {_SHAPES}")
    if "messages" in value:
        messages = _messages(value["messages"])
        return Row(group=_group(messages), messages=messages)
    if "prompt" in value and "completion" in value:
        return _exchange(_text(value, "prompt"), _text(value, "completion"))
    if "instruction" in value and "output" in value:
        extra = _text(value, "input", required=False)
        prompt = _text(value, "instruction")
        return _exchange(f"{prompt}\n\n{extra}" if extra else prompt, _text(value, "output"))
    if "text" in value:
        text = _text(value, "text")
        return Row(group=text, text=text)
    keys = ", ".join(sorted(str(key) for key in value)) or "none"
    raise DataError(f"no known shape (keys: {keys}); allowed: {_SHAPES}")


def _exchange(prompt: str, answer: str) -> Row:
    messages = (Message("user", prompt), Message("assistant", answer))
    return Row(group=_group(messages), messages=messages)


def _group(messages: tuple[Message, ...]) -> str:
    # Equal questions share a group: with other answers on the two sides they would leak through the split.
    return "\n".join(message.content for message in messages if message.role == "user")


def _text(value: Mapping[str, Any], key: str, required: bool = True) -> str:
    text = value.get(key)
    if text is None and not required:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{key!r} must be a string, got {type(text).__name__}")
    if required and not text.strip():
        raise DataError(f"{key!r} is empty")
    return text


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError('\'messages\' must be a non-empty list of {"role", "content"} objects')
    messages = []
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise DataError(f"messages[{index}] must be an object, got {type(item).__name__}")
        role = item.get("role")
        if role not in _ROLES:
            raise DataError(f"messages[{index}]: role {role!r} is unknown; allowed: {', '.join(_ROLES)}")
        content = item.get("content")
        if not isinstance(content, str):
            raise DataError(f"messages[{index}]: 'content' must be a string, got {type(content).__name__}")
        messages.append(Message(role, content))
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
    if last < 0 or not messages[last].content.strip():
        raise DataError("'messages' has no assistant turn with text, so there is nothing to learn")
    # Turns after the last answer carry no label.
    return tuple(messages[: last + 1])
