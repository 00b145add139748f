"""Rows to token ids with labels on the answers only, and the order in which training sees them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scao_tools.data.rows import Message, Row
from scao_tools.errors import DataError

IGNORED = -100  # the label that torch's cross entropy skips


@dataclass(frozen=True)
class Encoded:
    """Token ids of one row; ``labels`` equals ``ids`` on answer tokens and is `IGNORED` elsewhere."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def label_tokens(self) -> int:
        """How many tokens the loss sees. The first token has no predecessor that could predict it."""
        return sum(label != IGNORED for label in self.labels[1:])


def encode_rows(rows: Sequence[Row], tokenizer: Any, max_length: int) -> list[Encoded]:
    """Encode rows and cut them at ``max_length``; rows whose answer is cut off entirely are dropped."""
    encoded = [example for row in rows if (example := encode_row(row, tokenizer, max_length)).label_tokens]
    if not encoded:
        raise DataError(
            f"none of the {len(rows)} rows has an answer token within the first {max_length} tokens; "
            "raise --max-length or shorten the prompts"
        )
    return encoded


def encode_row(row: Row, tokenizer: Any, max_length: int) -> Encoded:
    """Encode one row; each segment is tokenized on its own, so a label never straddles prompt and answer."""
    ids: list[int] = []
    labels: list[int] = []
    for text, learned in segments(row, tokenizer):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(tokens)
        labels.extend(tokens if learned else [IGNORED] * len(tokens))
    return Encoded(tuple(ids[:max_length]), tuple(labels[:max_length]))


def segments(row: Row, tokenizer: Any) -> list[tuple[str, bool]]:
    """Cut the rendered row into (text, whether the loss sees it)."""
    if row.text is not None:
        return [(row.text + (tokenizer.eos_token or ""), True)]
    parts: list[tuple[str, bool]] = []
    done = ""
    for index, message in enumerate(row.messages):
        if message.role != "assistant":
            continue
        before = render(row.messages[:index], tokenizer, open_answer=True)
        after = render(row.messages[: index + 1], tokenizer, open_answer=False)
        # Some templates rewrite earlier turns (they drop old reasoning); then only the last answer can be located.
        if not (before.startswith(done) and after.startswith(before)):
            parts, done = [], ""
        if not after.startswith(before):
            before = after[: after.rfind(message.content)]
        parts += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    return parts


def prompt_ids(row: Row, tokenizer: Any, max_length: int) -> list[int]:
    """Token ids of the row up to the place where the last answer begins (for plain text: its first words)."""
    if row.text is not None:
        text = " ".join(row.text.split()[:16])
    else:
        text = render(row.messages[:-1], tokenizer, open_answer=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[-max_length:]


def render(messages: Sequence[Message], tokenizer: Any, *, open_answer: bool) -> str:
    """Apply the model's chat template, or a plain one where the model has none."""
    if not getattr(tokenizer, "chat_template", None):
        return _plain(messages, tokenizer, open_answer)
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=open_answer)
    except Exception as error:  # templates raise jinja2's own error type, which need not be installed here
        if not any(message.role == "system" for message in messages):
            raise DataError(f"the model's chat template refuses a row: {error}") from error
        return render(_without_system(messages), tokenizer, open_answer=open_answer)
    return text


def _without_system(messages: Sequence[Message]) -> list[Message]:
    # Gemma-like templates know no system role: its text then opens the first question.
    system = "\n\n".join(message.content for message in messages if message.role == "system")
    rest = [message for message in messages if message.role != "system"]
    if rest and rest[0].role == "user":
        rest[0] = Message("user", f"{system}\n\n{rest[0].content}")
    return rest


def _plain(messages: Sequence[Message], tokenizer: Any, open_answer: bool) -> str:
    titles = {"system": "", "user": "### Question:\n", "tool": "### Tool:\n", "assistant": "### Answer:\n"}
    text = ""
    for message in messages:
        end = tokenizer.eos_token or "" if message.role == "assistant" else ""
        text += f"{titles[message.role]}{message.content}{end}\n\n"
    return text + titles["assistant"] if open_answer else text


def plan_batches(count: int, *, steps: int, batch_size: int, seed: int) -> list[list[int]]:
    """Which examples each step sees: shuffled passes over the data, the same for every optimizer and after a resume."""
    rng = random.Random(f"order:{seed}")
    queue: list[int] = []
    while len(queue) < steps * batch_size:
        epoch = list(range(count))
        rng.shuffle(epoch)
        queue.extend(epoch)
    return [queue[step * batch_size : (step + 1) * batch_size] for step in range(steps)]


def micro_batches(examples: Sequence[Encoded], token_limit: int) -> list[list[int]]:
    """Group indices of similar length so that each padded group stays within ``token_limit`` tokens."""
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].ids))
    groups: list[list[int]] = []
    for index in order:
        width = len(examples[index].ids)  # the widest so far, because of the order
        if groups and (len(groups[-1]) + 1) * width <= token_limit:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
