"""The training loop: no files, no screen; it yields what happened and can be left and entered at any step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scao_tools.data.encoding import Encoded, micro_batches
from scao_tools.losses import AnswerLoss, collate
from scao_tools.models import trainable

NONFINITE_LIMIT = 3  # chosen: after so many non-finite losses in a row a run does not recover


class StopRequested(Exception):  # noqa: N818 - not an error: the user asked for it
    """Raised out of a long evaluation when the user asked to stop."""


@dataclass(frozen=True)
class TrainSettings:
    """What all optimizers of a comparison share.

    ``schedule`` is ``"linear"``, or ``"constant"`` after the warmup for an optimizer that averages instead of decaying.
    """

    steps: int
    lr: float
    eval_steps: tuple[int, ...]
    warmup_share: float = 0.06
    max_grad_norm: float = 1.0
    micro_tokens: int = 1024
    schedule: str = "linear"


@dataclass(frozen=True)
class StepDone:
    """One optimizer step. ``loss`` is the mean over the step's label tokens, before the update."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    optimizer_ms: float
    tokens: int
    label_tokens: int


@dataclass(frozen=True)
class EvalDone:
    """One pass over the held-out set; ``example_losses`` holds the summed loss of each example."""

    step: int
    loss: float
    seconds: float
    tokens: int
    label_tokens: int
    example_losses: tuple[float, ...]


@dataclass(frozen=True)
class Diverged:
    """Training gave up: the loss was not finite for `NONFINITE_LIMIT` steps in a row."""

    step: int


Event = StepDone | EvalDone | Diverged


def lr_at(step: int, settings: TrainSettings) -> float:
    """Learning rate of a 0-based step: linear warmup, then linear decay that would reach 0 one step after the last,
    or no decay.
    """
    warmup = max(1, round(settings.warmup_share * settings.steps))
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    if settings.schedule == "constant":
        return settings.lr
    return settings.lr * (settings.steps - step) / (settings.steps - warmup + 1)


def even_eval_steps(steps: int, between: int = 2) -> tuple[int, ...]:
    """Start, end, and ``between`` evenly spaced steps (none in very short runs)."""
    inner = [round(steps * (i + 1) / (between + 1)) for i in range(between)] if steps >= 10 else []
    return tuple(sorted({0, *inner, steps}))


class Evaluator:
    """Held-out loss on a fixed set."""

    def __init__(self, model: Any, loss: AnswerLoss, examples: Sequence[Encoded], pad_id: int) -> None:
        self._model = model
        self._loss = loss
        self._examples = list(examples)
        self._pad_id = pad_id

    def __call__(self, step: int, micro_tokens: int, should_stop: Callable[[], bool]) -> EvalDone:
        """Evaluate; raises `StopRequested` between two batches when the user asks to stop."""
        start = time.perf_counter()
        device = next(self._model.parameters()).device
        sums = [0.0] * len(self._examples)
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                for group in micro_batches(self._examples, micro_tokens):
                    if should_stop():
                        raise StopRequested
                    batch = collate([self._examples[i] for i in group], self._pad_id, device)
                    losses, rows = self._loss.per_token(batch)
                    per_row = torch.zeros(len(group), dtype=torch.float64, device=device)
                    per_row.index_add_(0, rows, losses.double())
                    for index, value in zip(group, per_row.tolist(), strict=True):
                        sums[index] = value
        finally:
            self._model.train(was_training)
        labels = sum(example.label_tokens for example in self._examples)
        tokens = sum(len(example.ids) for example in self._examples)
        # math.fsum: the sum must not depend on the order of the batches.
        return EvalDone(step, math.fsum(sums) / labels, time.perf_counter() - start, tokens, labels, tuple(sums))


class Trainer:
    """Runs one optimizer over a planned sequence of batches.

    ``steps_done`` is all that a checkpoint needs besides the adapter, the optimizer, the scaler, and the random
    states: the batches of a step depend on its number alone.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        loss: AnswerLoss,
        evaluator: Evaluator,
        settings: TrainSettings,
        *,
        pad_id: int,
        fp16: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.settings = settings
        self.steps_done = 0
        self.nonfinite_streak = 0
        self._loss = loss
        self._evaluator = evaluator
        self._pad_id = pad_id
        self._params = list(trainable(model).values())
        self._device = self._params[0].device
        # fp16 gradients underflow without a scale; bf16 and fp32 have the range.
        self.scaler = torch.amp.GradScaler(self._device.type, enabled=fp16)
        # Groups may have been built with learning rates of their own, as LoRA+ does: the schedule keeps the ratios.
        self._ratios = [group["lr"] / settings.lr for group in optimizer.param_groups]

    def run(
        self,
        batches: Sequence[Sequence[Encoded]],
        evaluated: frozenset[int] = frozenset(),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Event]:
        """Train from ``steps_done`` on; ``evaluated`` are the steps whose evaluation already is on record."""
        settings = self.settings
        self.model.train()
        while True:
            if self.nonfinite_streak >= NONFINITE_LIMIT:
                yield Diverged(self.steps_done)
                return
            if self.steps_done in settings.eval_steps and self.steps_done not in evaluated:
                try:
                    evaluated_now = self._evaluate(should_stop)
                except StopRequested:
                    return
                yield evaluated_now
            if self.steps_done >= settings.steps or should_stop():
                return
            event = self.step(batches[self.steps_done])
            self.steps_done += 1
            self.nonfinite_streak = 0 if math.isfinite(event.loss) else self.nonfinite_streak + 1
            yield event

    def _evaluate(self, should_stop: Callable[[], bool]) -> EvalDone:
        """Evaluate the weights that the optimizer would hand over: one that averages them shows them by ``eval()``."""
        to_eval, to_train = (getattr(self.optimizer, name, lambda: None) for name in ("eval", "train"))
        to_eval()
        try:
            return self._evaluator(self.steps_done, self.settings.micro_tokens, should_stop)
        finally:
            to_train()

    def step(self, examples: Sequence[Encoded]) -> StepDone:
        """One update: gradients of the mean loss over the step's label tokens, clipped, then the optimizer."""
        start = time.perf_counter()
        lr = lr_at(self.steps_done, self.settings)
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = lr * ratio
        loss = self._backward(examples)
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._params, self.settings.max_grad_norm)
        self._synchronize()
        before = time.perf_counter()
        self.scaler.step(self.optimizer)
        self._synchronize()
        optimizer_ms = (time.perf_counter() - before) * 1e3
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return StepDone(
            step=self.steps_done + 1,
            loss=loss,
            lr=lr,
            grad_norm=float(norm),
            seconds=time.perf_counter() - start,
            optimizer_ms=optimizer_ms,
            tokens=sum(len(example.ids) for example in examples),
            label_tokens=sum(example.label_tokens for example in examples),
        )

    def _backward(self, examples: Sequence[Encoded]) -> float:
        labels = sum(example.label_tokens for example in examples)
        total = 0.0
        for group in micro_batches(examples, self.settings.micro_tokens):
            batch = collate([examples[i] for i in group], self._pad_id, self._device)
            losses, _ = self._loss.per_token(batch)
            loss = losses.sum() / labels
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
