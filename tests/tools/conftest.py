"""A tiny model with its own tokenizer and a few rows of data, so that whole runs take about a second."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scao_tools.environment import prepare_environment

prepare_environment()
os.environ["HF_HUB_OFFLINE"] = "1"

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")


def byte_tokenizer() -> Any:
    """A tokenizer whose tokens are bytes; no merges, so encoding concatenated texts concatenates their tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


def tiny_llama(layers: int = 2) -> Any:
    """A randomly initialized two-layer Llama, the same in every call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=257,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="session", name="tiny_llama")
def tiny_llama_fixture() -> Callable[..., Any]:
    return tiny_llama


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [{"prompt": f"count to {n}", "completion": " ".join(str(i) for i in range(n % 13))} for n in range(2, 60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["completion"]), encoding="utf-8")
    return path


@pytest.fixture
def screen() -> Any:
    from scao_tools.console import Screen

    return Screen(Console(file=io.StringIO(), width=100))


@pytest.fixture
def options(model_dir: Path, rows_file: Path) -> dict[str, Any]:
    """Options of a run of 7 steps whose checkpoints (every 2) do not fall on its end."""
    return {
        "steps": 7,
        "lr": 1e-2,
        "optimizers": ("adamw", "scao"),
        "model": str(model_dir),
        "data": str(rows_file),
        "batch_size": 4,
        "max_length": 64,
        "save_every": 2,
        "dtype": "fp32",
    }
