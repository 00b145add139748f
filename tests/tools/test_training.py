"""The loop itself: schedule, loss on label positions, exact resume, and non-finite losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from scao_tools.checkpointing import load_checkpoint, restore, save_checkpoint
from scao_tools.data.encoding import IGNORED, Encoded, plan_batches
from scao_tools.losses import AnswerLoss, collate
from scao_tools.models import LoraSettings, add_lora, trainable
from scao_tools.optimizers import build_optimizer
from scao_tools.training import (
    Diverged,
    EvalDone,
    Evaluator,
    StepDone,
    Trainer,
    TrainSettings,
    even_eval_steps,
    lr_at,
)

Make = Callable[..., tuple[Trainer, list[list[Encoded]]]]


def examples(count: int = 24) -> list[Encoded]:
    generator = torch.Generator().manual_seed(1)
    result = []
    for index in range(count):
        ids = torch.randint(0, 250, (8 + index % 9,), generator=generator).tolist()
        result.append(Encoded(tuple(ids), tuple([IGNORED] * 4 + ids[4:])))
    return result


@pytest.fixture
def make(tiny_llama: Callable[..., Any]) -> Make:
    def build(optimizer: str = "adamw", steps: int = 6, lr: float = 1e-2) -> tuple[Trainer, list[list[Encoded]]]:
        data = examples()
        model = add_lora(tiny_llama(), LoraSettings(), seed=3)
        loss = AnswerLoss(model, torch.float32)
        settings = TrainSettings(steps=steps, lr=lr, eval_steps=(0, 3, steps), micro_tokens=40)
        torch.manual_seed(0)
        trainer = Trainer(
            model,
            build_optimizer(optimizer, list(trainable(model).values()), lr),
            loss,
            Evaluator(model, loss, data[:5], pad_id=257),
            settings,
            pad_id=257,
        )
        plan = plan_batches(len(data), steps=steps, batch_size=4, seed=0)
        return trainer, [[data[index] for index in batch] for batch in plan]

    return build


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainable(trainer.model).items()}


def test_schedule_warms_up_decays_and_ends_above_zero() -> None:
    settings = TrainSettings(steps=100, lr=2.0, eval_steps=())
    rates = [lr_at(step, settings) for step in range(100)]
    assert rates[:6] == pytest.approx([2 * (i + 1) / 6 for i in range(6)])
    assert max(rates) == 2.0
    assert all(a > b for a, b in itertools.pairwise(rates[6:]))
    assert 0 < rates[-1] < 0.03
    assert lr_at(0, TrainSettings(steps=1, lr=2.0, eval_steps=())) == 2.0


def test_evaluations_are_at_both_ends_and_in_between() -> None:
    assert even_eval_steps(30) == (0, 10, 20, 30)
    assert even_eval_steps(4) == (0, 4)
    assert even_eval_steps(1) == (0, 1)


def test_loss_equals_the_models_own_and_only_labels_count(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama().eval()
    batch = collate(examples(5), 257, torch.device("cpu"))
    expected = model(input_ids=batch.ids, attention_mask=batch.mask, labels=batch.labels).loss
    loss = AnswerLoss(model, torch.float32)
    values, rows = loss.per_token(batch)
    assert values.mean().item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(torch.bincount(rows), (batch.labels[:, 1:] != IGNORED).sum(1))
    loss.close()
    logits = model(input_ids=batch.ids, attention_mask=batch.mask).logits
    by_hand = functional.cross_entropy(logits[0, 3:7], batch.labels[0, 4:8], reduction="none")
    torch.testing.assert_close(values[rows == 0][:4], by_hand, rtol=1e-4, atol=1e-5)


def test_micro_batches_do_not_change_the_gradient(make: Make) -> None:
    gradients = []
    for limit in (20, 10_000):
        trainer, batches = make()
        trainer.settings = TrainSettings(steps=6, lr=0.1, eval_steps=(), micro_tokens=limit)
        trainer._backward(batches[0])
        gradients.append([parameter.grad.clone() for parameter in trainable(trainer.model).values()])  # type: ignore[union-attr]
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "scao"])
@pytest.mark.parametrize("cut", [0, 1, 3, 5, 6])
def test_resume_is_bit_exact(make: Make, tmp_path: Path, optimizer: str, cut: int) -> None:
    whole, batches = make(optimizer)
    expected = list(whole.run(batches))
    first, _ = make(optimizer)
    before = list(first.run(batches, should_stop=lambda: first.steps_done >= cut))
    save_checkpoint(tmp_path, first, run="r", peak_memory=5)
    second, _ = make(optimizer)
    payload = load_checkpoint(tmp_path, "r")
    assert payload is not None
    restore(second, payload)
    done = frozenset(event.step for event in before if isinstance(event, EvalDone))
    after = list(second.run(batches, done))
    assert [event.loss for event in before + after] == [event.loss for event in expected]  # type: ignore[union-attr]
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name


def test_training_learns(make: Make) -> None:
    trainer, batches = make(steps=30)
    losses = [event.loss for event in trainer.run(batches) if isinstance(event, EvalDone)]
    assert losses[-1] < losses[0] - 0.02


def test_a_loss_that_is_not_finite_is_yielded_and_ends_the_run(make: Make) -> None:
    trainer, batches = make()
    with torch.no_grad():
        next(iter(trainable(trainer.model).values())).fill_(math.nan)
    events = list(trainer.run(batches))
    steps = [event for event in events if isinstance(event, StepDone)]
    assert len(steps) == 3
    assert all(math.isnan(event.loss) for event in steps)
    assert isinstance(events[-1], Diverged)


def test_evaluation_ignores_batching_and_leaves_the_mode(make: Make) -> None:
    trainer, _ = make()
    trainer.model.train()
    results = [trainer._evaluator(0, limit, lambda: False) for limit in (20, 10_000)]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert trainer.model.training
