"""A loaded demo: the model with its adapter, the encoded data, and what every optimizer starts from."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Any

import torch

from scao_tools.compute import DTYPES
from scao_tools.data import DataSet, Encoded, Row, encode_rows
from scao_tools.data.encoding import plan_batches, prompt_ids
from scao_tools.demo.config import DemoOptions, RunConfig
from scao_tools.demo.outputs import RunFiles
from scao_tools.losses import AnswerLoss
from scao_tools.models import (
    LoraSettings,
    ModelSource,
    add_lora,
    gguf_parsed_once,
    load_base_model,
    load_tokenizer,
    trainable,
)
from scao_tools.quantize import quantize_base
from scao_tools.training import Evaluator, TrainSettings, even_eval_steps

SAMPLE_TOKENS = 32
MICRO_TOKENS = {"cpu": 1024, "cuda": 8192}  # chosen: large enough to keep the units busy, small enough for memory


def held_out_count(options: DemoOptions) -> int:
    """Held-out examples; a very short run gets a smaller set, since evaluating would take most of its time."""
    return 32 if options.steps >= 10 else 16


@dataclass
class Session:
    """Everything that the optimizers of one run share."""

    config: RunConfig
    model: Any
    tokenizer: Any
    loss: AnswerLoss
    evaluator: Evaluator
    settings: TrainSettings
    train: list[Encoded]
    held_out: list[Encoded]
    sample_row: Row
    initial: dict[str, torch.Tensor]

    @property
    def pad_id(self) -> int:
        """The token that fills short rows; it is masked, so any will do."""
        return pad_token(self.tokenizer)

    def batches(self) -> list[list[Encoded]]:
        """The examples of every step."""
        options = self.config.options
        plan = plan_batches(len(self.train), steps=options.steps, batch_size=options.batch_size, seed=options.seed)
        return [[self.train[index] for index in step] for step in plan]

    def reset_adapter(self) -> None:
        """Give the model the adapter that every optimizer starts from."""
        with torch.no_grad():
            for name, parameter in trainable(self.model).items():
                parameter.copy_(self.initial[name])
                parameter.grad = None

    def generate(self) -> str:
        """Answer the sample prompt greedily."""
        ids = prompt_ids(self.sample_row, self.tokenizer, self.config.options.max_length)
        device = next(self.model.parameters()).device
        tokens = torch.tensor([ids], device=device)
        dtype = DTYPES[self.config.dtype]
        self.model.eval()
        with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            output = self.model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=SAMPLE_TOKENS,
                do_sample=False,
                pad_token_id=self.pad_id,
            )
        text: str = self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
        return text.strip()

    def save_adapter(self, files: RunFiles, name: str) -> None:
        """Save the adapter with PEFT; the directory appears complete or not at all."""
        target = files.adapter(name)
        temporary = target.with_name("adapter.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        # save_embedding_layers: "auto" would ask the hub whether the vocabulary was changed.
        self.model.save_pretrained(str(temporary), safe_serialization=True, save_embedding_layers=False)
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)


def pad_token(tokenizer: Any) -> int:
    """The padding token's id, or another that exists."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def load_session(config: RunConfig, source: ModelSource, data: DataSet) -> Session:
    """Load, quantize, and adapt the model, and encode the data."""
    options, dtype, device = config.options, DTYPES[config.dtype], torch.device(config.device)
    with gguf_parsed_once():
        tokenizer = load_tokenizer(source)
        train = encode_rows(data.train, tokenizer, options.max_length)
        held_out = encode_rows(data.held_out, tokenizer, options.max_length)
        base = load_base_model(source, dtype)
    base = quantize_base(base, device, dtype) if options.bits == 4 else base.to(device)
    model = add_lora(base, LoraSettings(), options.seed)
    for settings in model.peft_config.values():
        settings.base_model_name_or_path = source.hub_name
    loss = AnswerLoss(model, dtype)
    return Session(
        config=config,
        model=model,
        tokenizer=tokenizer,
        loss=loss,
        evaluator=Evaluator(model, loss, held_out, pad_token(tokenizer)),
        settings=TrainSettings(
            steps=options.steps,
            lr=options.lr,
            eval_steps=even_eval_steps(options.steps),
            micro_tokens=MICRO_TOKENS[device.type],
        ),
        train=train,
        held_out=held_out,
        # The longest prompt of a few tells a reader the most.
        sample_row=max(data.held_out[:8], key=lambda row: len(row.prompt)),
        initial={name: parameter.detach().clone() for name, parameter in trainable(model).items()},
    )
