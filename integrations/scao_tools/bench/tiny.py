"""The small model for screening: a byte-level Llama of five million parameters, pretrained once on Python source.

It is made, not downloaded: the recipe is below, the text is the standard library's, and the result is cached under a
hash of both.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scao_tools.data import encode_rows
from scao_tools.data.encoding import plan_batches
from scao_tools.data.rows import Row
from scao_tools.data.sources import rows_digest
from scao_tools.data.texts import python_source_rows
from scao_tools.losses import AnswerLoss
from scao_tools.models import ModelSource, quiet_libraries
from scao_tools.training import Evaluator, StepDone, Trainer, TrainSettings

_END, _PAD = 256, 257  # ids after the 256 bytes


@dataclass(frozen=True)
class TinyRecipe:
    """The model and how it is pretrained. About 15 minutes on two CPU cores of 2023."""

    hidden: int = 256
    intermediate: int = 704
    layers: int = 6
    heads: int = 8
    positions: int = 256
    steps: int = 1500
    batch: int = 16
    lr: float = 2e-3
    weight_decay: float = 0.1
    seed: int = 0


def byte_tokenizer() -> Any:
    """A tokenizer whose 256 tokens are bytes, and two marks: the end of a text, and padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    fast: Any = importlib.import_module("transformers").PreTrainedTokenizerFast
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return fast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


def tiny_model(recipe: TinyRecipe, seed: int) -> Any:
    """The model before any training, in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=_PAD + 1,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=recipe.positions,
        bos_token_id=None,
        eos_token_id=_END,
        pad_token_id=_PAD,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def pretrained_folder(recipe: TinyRecipe, progress: Callable[[StepDone], None]) -> Path:
    """Where the pretrained model lies; trains it first where it is not cached yet. Readable by ``from_pretrained``."""
    rows = python_source_rows()
    key = hashlib.sha256(f"{json.dumps(dataclasses.asdict(recipe))}{rows_digest(rows)}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "scao" / "tiny"
    folder = cache / key
    cache.mkdir(parents=True, exist_ok=True)
    quiet_libraries(ModelSource("tiny", str(cache), "tiny"))
    if not folder.is_dir():
        fresh = Path(tempfile.mkdtemp(dir=cache, prefix=f"{key}-"))
        tokenizer = byte_tokenizer()
        _pretrain(recipe, rows, tokenizer, progress).save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        try:
            os.replace(fresh, folder)
        except OSError:  # another process was faster
            shutil.rmtree(fresh)
    return folder


def _pretrain(recipe: TinyRecipe, rows: list[Row], tokenizer: Any, progress: Callable[[StepDone], None]) -> Any:
    model = tiny_model(recipe, recipe.seed)
    plan = plan_batches(len(rows), steps=recipe.steps, batch_size=recipe.batch, seed=recipe.seed)
    loss = AnswerLoss(model, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    settings = TrainSettings(recipe.steps, recipe.lr, eval_steps=(), micro_tokens=2**20)
    trainer = Trainer(model, optimizer, loss, Evaluator(model, loss, [], _PAD), settings, pad_id=_PAD)
    width = recipe.positions
    while trainer.steps_done < recipe.steps:
        batch = encode_rows([rows[i] for i in plan[trainer.steps_done]], tokenizer, width)
        progress(trainer.step(batch))
        trainer.steps_done += 1
    loss.close()
    return model
