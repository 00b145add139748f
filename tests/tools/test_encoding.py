"""Labels sit on answers only, whatever the template; batches are planned."""

from __future__ import annotations

from typing import Any

import pytest

from scao_tools.data.encoding import (
    IGNORED,
    Encoded,
    encode_row,
    encode_rows,
    micro_batches,
    plan_batches,
    prompt_ids,
    segments,
)
from scao_tools.data.rows import row_from_mapping
from scao_tools.errors import DataError

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT
FORGETS = (  # as templates of reasoning models: earlier answers are shortened once another turn follows
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' and not loop.last %}…{% else %}"
    "{{ m['content'] }}{% endif %}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = {
    "messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U1"},
        {"role": "assistant", "content": "A1"},
        {"role": "user", "content": "U2"},
        {"role": "assistant", "content": "A2"},
    ]
}


@pytest.fixture
def chat(tokenizer: Any) -> Any:
    import copy

    return copy.deepcopy(tokenizer)


def learned(row: Any, tokenizer: Any) -> list[str]:
    return [text for text, label in segments(row, tokenizer) if label]


def whole(row: Any, tokenizer: Any) -> str:
    return "".join(text for text, _ in segments(row, tokenizer))


def test_all_answers_of_a_conversation_are_learned(chat: Any) -> None:
    chat.chat_template = CHAT
    row = row_from_mapping(TALK)
    assert learned(row, chat) == ["A1</>", "A2</>"]
    assert whole(row, chat) == "<system>S</><user>U1</><assistant>A1</><user>U2</><assistant>A2</>"


def test_a_template_without_system_role_gets_it_in_the_question(chat: Any) -> None:
    chat.chat_template = NO_SYSTEM
    assert whole(row_from_mapping(TALK), chat).startswith("<user>S\n\nU1</>")


def test_a_template_that_rewrites_history_learns_the_last_answer(chat: Any) -> None:
    chat.chat_template = FORGETS
    row = row_from_mapping(TALK)
    assert learned(row, chat) == ["A2</>"]
    assert whole(row, chat) == "<system>S</><user>U1</><assistant>…</><user>U2</><assistant>A2</>"


def test_without_template_the_answer_ends_with_the_end_token(tokenizer: Any) -> None:
    row = row_from_mapping({"prompt": "Q", "completion": "A"})
    assert whole(row, tokenizer).strip() == "### Question:\nQ\n\n### Answer:\nA<|end|>"
    encoded = encode_row(row, tokenizer, 100)
    assert len(encoded.ids) == len(encoded.labels)
    assert [label for label in encoded.labels if label != IGNORED] == list(encoded.ids[-encoded.label_tokens :])
    assert tokenizer.decode(prompt_ids(row, tokenizer, 100)).endswith("### Answer:\n")


def test_plain_text_is_learned_as_a_whole(tokenizer: Any) -> None:
    encoded = encode_row(row_from_mapping({"text": "abc"}), tokenizer, 100)
    assert encoded.ids == encoded.labels
    assert encoded.label_tokens == len(encoded.ids) - 1


def test_rows_without_answer_within_the_limit_are_dropped(tokenizer: Any) -> None:
    long, short = ({"prompt": "x" * n, "completion": "A"} for n in (200, 5))
    assert len(encode_rows([row_from_mapping(long), row_from_mapping(short)], tokenizer, 60)) == 1
    with pytest.raises(DataError, match="--max-length"):
        encode_rows([row_from_mapping(long)], tokenizer, 60)


def test_batches_are_planned_ahead_and_cover_the_data() -> None:
    plan = plan_batches(10, steps=5, batch_size=4, seed=0)
    assert plan == plan_batches(10, steps=5, batch_size=4, seed=0) != plan_batches(10, steps=5, batch_size=4, seed=1)
    flat = [index for batch in plan for index in batch]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))


def test_micro_batches_hold_each_example_once_within_the_limit() -> None:
    examples = [Encoded((0,) * n, (0,) * n) for n in (5, 30, 7, 6, 29, 100)]
    groups = micro_batches(examples, 60)
    assert sorted(index for group in groups for index in group) == list(range(6))
    assert all(len(group) * max(len(examples[i].ids) for i in group) <= 60 or len(group) == 1 for group in groups)
    assert len(groups) == 3
