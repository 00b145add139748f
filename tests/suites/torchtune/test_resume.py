"""Resuming by torchtune's own checkpoints, after a kill too, and what SCAO refuses to resume from."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from comparing import equal
from scao_core import CheckpointError
from suites.torchtune import tuning
from suites.torchtune.tuning import SCAO_CHOSEN, full, lora, losses, recipe_state, replaced, tune, weights

# Three epochs of three steps, a refresh of the bases every second step; torchtune saves after each epoch.
SAVED = "model-00001-of-00001.safetensors"
EPOCHS = {"epochs": 3, "optimizer.refresh_every": 2, "optimizer.spike_rank": 2}


def assert_same_files(a, b, name):
    a, b = weights(a / "epoch_2" / name), weights(b / "epoch_2" / name)
    assert a
    assert equal(a, b)


def states(steps):
    """What each optimizer held at the end."""
    return [optimizer.state_dict()["state"] for optimizer in dict.fromkeys(steps.optimizers)]


def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(tmp_path, model, steps):
    """Killed (-9) in the second epoch: resumed from the first, the end is that of the run that was left alone."""
    lora(model, tmp_path / "whole", **EPOCHS)
    whole, steps.optimizers = states(steps), []
    killed = tmp_path / "killed"
    script = Path(tuning.__file__).with_name("killed.py")
    died = subprocess.run([sys.executable, script, model, killed, json.dumps(EPOCHS)], capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr[-3000:]
    assert not (killed / "epoch_1").exists()
    assert recipe_state(killed)["epochs_run"] == 1
    lora(model, killed, **EPOCHS, resume_from_checkpoint=True)
    assert losses(killed) == losses(tmp_path / "whole")[3:]
    assert_same_files(tmp_path / "whole", killed, "adapter_model.pt")
    (resumed,) = states(steps)
    assert equal([resumed], whole)


class CutError(Exception):
    """Ends a run in the middle of a step."""


@pytest.mark.parametrize("in_backward", [True, False], ids=["in backward", "one optimizer"])
def test_full_fine_tuning_resumes_bit_for_bit(tmp_path, model, steps, monkeypatch, in_backward):
    settings = {**EPOCHS, "optimizer_in_bwd": in_backward}
    full(model, tmp_path / "whole", **settings)
    whole, steps.optimizers = states(steps), []
    note = steps.note

    def stops(optimizer):
        note(optimizer)
        if optimizer.report().steps == 4:
            raise CutError

    monkeypatch.setattr(steps, "note", stops)
    with pytest.raises(CutError):
        full(model, tmp_path / "cut", **settings)
    monkeypatch.setattr(steps, "note", note)
    steps.optimizers = []
    saved = {"checkpointer.checkpoint_files": f"[epoch_0/{SAVED}]"}  # in the output folder
    full(model, tmp_path / "cut", **settings, **saved, resume_from_checkpoint=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")[3:]
    assert_same_files(tmp_path / "whole", tmp_path / "cut", SAVED)
    # each run makes its optimizers in the order of the model, and steps them in that of its backward pass
    assert equal(states(steps), whole)


def test_the_state_of_another_optimizer_is_refused_before_training(tmp_path, model, steps):
    arguments = replaced(model, tmp_path, **{"model.lora_rank": 4, "save_adapter_weights_only": True, "epochs": 2})
    recipe = ("run", "lora_finetune_single_device", "--config", "llama3_2/1B_lora_single_device")
    tune(*recipe, "~optimizer.fused", *arguments)
    with pytest.raises(CheckpointError, match=r"written by torch\.optim\.AdamW or Adam, not by SCAO"):
        tune(*recipe, SCAO_CHOSEN, *arguments, "resume_from_checkpoint=True")
    assert steps.optimizers == []
