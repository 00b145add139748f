"""Checkpoints survive torn writes, and are read without trusting pickle."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scao_tools import checkpointing
from scao_tools.checkpointing import (
    CURRENT,
    PREVIOUS,
    load_checkpoint,
    random_states,
    restore,
    restore_random_states,
    save_checkpoint,
    write_text_atomically,
)
from scao_tools.errors import ResumeError
from scao_tools.optimizers import OPTIMIZERS, build_optimizer, state_bytes


def trainer(optimizer: str = "adamw", step: int = 1) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    made = build_optimizer(optimizer, list(model.parameters()), 1e-2)
    for _ in range(step):
        model(torch.ones(2, 4)).sum().backward()
        made.step()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return SimpleNamespace(model=model, optimizer=made, scaler=scaler, steps_done=step, nonfinite_streak=0)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_optimizer_round_trips_through_a_safe_load(tmp_path: Path, optimizer: str) -> None:
    first = trainer(optimizer, step=4)
    save_checkpoint(tmp_path, first, run="r", peak_memory=1)
    assert torch.load(tmp_path / CURRENT, weights_only=True)["step"] == 4
    second = trainer(optimizer, step=1)
    payload = load_checkpoint(tmp_path, "r")
    assert payload is not None
    restore(second, payload)
    for left, right in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert state_bytes(first.optimizer) == state_bytes(second.optimizer) > 0


def test_the_one_before_is_kept_and_used_when_the_newest_is_torn(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, trainer(step=step), run="r", peak_memory=0)
    assert torch.load(tmp_path / PREVIOUS, weights_only=True)["step"] == 2
    (tmp_path / CURRENT).write_bytes((tmp_path / CURRENT).read_bytes()[:100])
    payload = load_checkpoint(tmp_path, "r")
    assert payload is not None
    assert payload["step"] == 2


def test_a_failed_write_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, trainer(step=1), run="r", peak_memory=0)

    def full_disk(_payload: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpointing.torch, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, trainer(step=2), run="r", peak_memory=0)
    payload = load_checkpoint(tmp_path, "r")
    assert payload is not None
    assert payload["step"] == 1


def test_no_checkpoint_is_none_and_another_runs_is_refused(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path, "r") is None
    save_checkpoint(tmp_path, trainer(), run="r", peak_memory=0)
    with pytest.raises(ResumeError, match="another run"):
        load_checkpoint(tmp_path, "other")


def test_random_states_continue() -> None:
    random.seed(5)
    torch.manual_seed(5)
    states = random_states()
    expected = (random.random(), torch.rand(2).tolist())
    restore_random_states(states)
    assert (random.random(), torch.rand(2).tolist()) == expected


def test_text_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text_atomically(path, "one")
    write_text_atomically(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["a.json"]
