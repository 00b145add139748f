"""A real model and small data sets in the formats of the frameworks, without a download.

``smollm2/`` is SmolLM2-135M-Instruct, read from the package that carries it; ``data/`` holds questions about functions of
Python's standard library, with their docstrings as answers: ``alpaca.json``, ``chat.jsonl``, ``preference.jsonl``,
``text.jsonl``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scao_tools.errors import OutputError

_ROWS, _LONGEST = 96, 400  # pairs, and characters of one
MODEL, DATA = "smollm2", "data"


def write_material(folder: Path) -> list[Path]:
    """Write the model and the data under a folder, and return the two folders; what is there is written again.

    Raises:
        MissingPackageError: the package with the model is not installed.
        OutputError: the folder cannot be used.
    """
    for place in (folder, folder / MODEL, folder / DATA):
        if place.exists() and not place.is_dir():
            raise OutputError(f"{place} exists and is not a folder; choose another folder")
    write_model(folder / MODEL)
    write_data(folder / DATA)
    return [folder / MODEL, folder / DATA]


def write_model(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct in bf16 as ``save_pretrained`` does."""
    import torch

    from scao_tools.models import PACKAGED, load_base_model, load_tokenizer, resolve_model

    source = resolve_model(PACKAGED)
    save(load_base_model(source, torch.bfloat16), load_tokenizer(source), folder)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """``save_pretrained`` of both, so that transformers 4 can read the tokenizer too: it does not know the class name of 5."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def write_data(folder: Path) -> None:
    """Write the same pairs of question and answer in four formats."""
    from scao_tools.data.stdlib_docs import stdlib_rows

    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(row.prompt, row.answer) for row in stdlib_rows() if len(row.prompt) + len(row.answer) < _LONGEST]
    pairs = pairs[:: max(1, len(pairs) // _ROWS)][:_ROWS]
    others = [answer for _, answer in pairs[1:] + pairs[:1]]
    rows = [{"instruction": q, "input": "", "output": a} for q, a in pairs]
    (folder / "alpaca.json").write_text(json.dumps(rows, indent=1))
    _lines(folder / "chat.jsonl", ({"messages": [_turn("user", q), _turn("assistant", a)]} for q, a in pairs))
    _lines(folder / "text.jsonl", ({"text": f"{q}\n{a}"} for q, a in pairs))
    chosen = zip(pairs, others, strict=True)
    _lines(folder / "preference.jsonl", ({"prompt": q, "chosen": a, "rejected": b} for (q, a), b in chosen))


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
