"""A loaded workload: base weights, adapters and token batches, reused by all of its runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from scao_tools.bench.tiny import TinyRecipe, byte_tokenizer, pretrained_folder, tiny_model
from scao_tools.bench.workload import TINY_PRETRAINED, TINY_RANDOM, Workload
from scao_tools.compute import DTYPES, pick_device, pick_dtype
from scao_tools.data import DataSet, Encoded, encode_rows, load_data
from scao_tools.data.encoding import plan_batches
from scao_tools.losses import AnswerLoss
from scao_tools.models import (
    LoraSettings,
    add_lora,
    check_model,
    gguf_parsed_once,
    load_base_model,
    load_tokenizer,
    quiet_libraries,
    reset_lora,
    resolve_model,
    trainable,
)
from scao_tools.quantize import quantize_base
from scao_tools.training import EvalDone, Evaluator, StepDone

MICRO_TOKENS = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class Place:
    """Device and number format that a workload runs in."""

    device: torch.device
    dtype: str

    @classmethod
    def here(cls, dtype: str | None = None) -> Place:
        """The first GPU or the CPU, in this format; None: bf16 where the chip has units for it."""
        device = pick_device()
        return cls(device, dtype or pick_dtype(device))


def workload_digest(workload: Workload, data: DataSet, place: Place) -> str:
    """Runs may be compared if this is equal: model, data, split, schedule and number format."""
    parts = [workload.shared(), data.digest, place.device.type, place.dtype]
    if workload.model in (TINY_PRETRAINED, TINY_RANDOM):
        parts.append(repr(TinyRecipe()))
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass
class BenchSession:
    """What the runs of one workload share."""

    workload: Workload
    place: Place
    digest: str
    model: Any
    loss: AnswerLoss
    evaluator: Evaluator
    train: list[Encoded]
    held_out: list[Encoded]
    pad_id: int
    initial: dict[str, torch.Tensor]
    _first_eval: dict[int, EvalDone] = field(default_factory=dict)

    @property
    def micro_tokens(self) -> int:
        """Tokens of one forward pass."""
        return MICRO_TOKENS[self.place.device.type]

    def batches(self, batch: int, seed: int) -> list[list[Encoded]]:
        """The examples of every step: the same for all optimizers with this seed."""
        plan = plan_batches(len(self.train), steps=self.workload.steps, batch_size=batch, seed=seed)
        return [[self.train[index] for index in step] for step in plan]

    def reset(self, seed: int) -> None:
        """Give the model the trainable weights that every optimizer starts from at this seed."""
        if self.workload.train == "lora":
            reset_lora(self.model, seed)
        elif self.workload.model == TINY_RANDOM:
            self.model.load_state_dict(tiny_model(TinyRecipe(), seed).state_dict())
        else:
            with torch.no_grad():
                for name, parameter in trainable(self.model).items():
                    parameter.copy_(self.initial[name])
        for parameter in self.model.parameters():
            parameter.grad = None

    def first_evaluation(self, seed: int, should_stop: Callable[[], bool]) -> EvalDone:
        """The held-out loss before training. Adapters start at zero, so it does not depend on the seed there."""
        key = seed if self.workload.model == TINY_RANDOM else 0
        if key not in self._first_eval:
            self._first_eval[key] = self.evaluator(0, self.micro_tokens, should_stop)
        return self._first_eval[key]


def read_data(workload: Workload) -> DataSet:
    """Rows for training and the held-out ones."""
    return load_data(workload.data, held_out=workload.held_out, seed=workload.split_seed)


def load_session(
    workload: Workload, data: DataSet, place: Place, pretraining: Callable[[StepDone], None] = lambda _: None
) -> BenchSession:
    """Load the model (making the tiny one first where it is not cached), quantize and adapt it, and encode the data."""
    dtype = DTYPES[place.dtype]
    with gguf_parsed_once():
        base, tokenizer = _base(workload, dtype, pretraining)
        train = encode_rows(data.train, tokenizer, workload.max_length)
        held_out = encode_rows(data.held_out, tokenizer, workload.max_length)
    if workload.train == "full":
        model = base.float().to(place.device)
    else:
        base = quantize_base(base, place.device, dtype) if workload.bits == 4 else base.to(place.device)
        model = add_lora(base, LoraSettings(workload.rank, workload.alpha), seed=0)
    pad = next(int(t) for t in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if t is not None)
    loss = AnswerLoss(model, dtype)
    keep = workload.train == "full" and workload.model != TINY_RANDOM
    return BenchSession(
        workload=workload,
        place=place,
        digest=workload_digest(workload, data, place),
        model=model,
        loss=loss,
        evaluator=Evaluator(model, loss, held_out, pad),
        train=train,
        held_out=held_out,
        pad_id=pad,
        initial={name: p.detach().clone() for name, p in trainable(model).items()} if keep else {},
    )


def _base(workload: Workload, dtype: torch.dtype, pretraining: Callable[[StepDone], None]) -> tuple[Any, Any]:
    if workload.model == TINY_RANDOM:
        return tiny_model(TinyRecipe(), seed=0), byte_tokenizer()
    name = workload.model
    if name == TINY_PRETRAINED:
        name = str(pretrained_folder(TinyRecipe(), pretraining))
    source = resolve_model(name)
    quiet_libraries(source)
    check_model(source)
    return load_base_model(source, dtype), load_tokenizer(source)
