"""Resuming, after a kill too, and two processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comparing import equal
from scao_core import CheckpointError
from scao_integrations.hf_trainer import scao_trainer_kwargs
from suites.trl import tuning
from suites.trl.tuning import build, inner, losses, train, weights

SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
HERE = Path(tuning.__file__).parent


def scao():
    return scao_trainer_kwargs(refresh_every=2)


def script(*command):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=os.environ)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"), scao(), **SAVING)


def test_resume_equals_the_uninterrupted_run_bit_for_bit(tmp_path, whole):
    checkpoint = Path(whole.args.output_dir) / "checkpoint-2"
    resumed = train(tmp_path, scao(), resume=str(checkpoint), **SAVING)
    assert equal(weights(resumed), weights(whole))
    assert equal(inner(resumed).state_dict(), inner(whole).state_dict())
    assert losses(resumed) == losses(whole)
    assert inner(resumed).report().steps == 2


def test_a_kill_loses_nothing_that_was_saved(tmp_path, whole):
    died = script(HERE / "killed.py", tmp_path, json.dumps(SAVING))
    assert died.returncode == -signal.SIGKILL, died.stderr[-3000:]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = train(tmp_path, scao(), resume=True, **SAVING)
    assert equal(weights(resumed), weights(whole))
    assert equal(inner(resumed).state_dict()["state"], inner(whole).state_dict()["state"])


def test_the_state_of_another_optimizer_is_refused_before_training(tmp_path, whole):
    train(tmp_path, optim="adamw_torch", **SAVING)
    trainer = build(tmp_path, scao(), **SAVING)
    with pytest.raises(CheckpointError, match=r"written by torch\.optim\.AdamW or Adam, not by SCAO"):
        trainer.train(resume_from_checkpoint=True)
    assert inner(trainer).report().steps == 0


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """Two processes by torchrun, DistributedDataParallel on gloo, gradient accumulation: what each ends with."""
    folder = tmp_path_factory.mktemp("replicas")
    return launched(folder, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)


def launched(folder, *launcher):
    ran = script(*launcher, HERE / "ranks.py", folder)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("?.pt"))]


def test_two_processes_are_one_with_the_joint_batch(tmp_path, replicas):
    """The replicas are one bit for bit, and the single process that takes four chats at once but for the order of sums."""
    first, second = replicas
    assert (first["processes"], first["wrapped"]) == (2, "DistributedDataParallel")
    assert first["steps"] == second["steps"] == 3
    assert equal(first["weights"], second["weights"])
    assert equal(first["state"], second["state"])
    alone = train(tmp_path, scao(), per_device_train_batch_size=4, max_steps=3)
    assert first["losses"] == pytest.approx(losses(alone), rel=1e-3)  # they are logged with four digits
    start = weights(build(tmp_path))
    for name, param in weights(alone).items():
        moved = (param - start[name]).norm()
        assert moved > 0
        assert (param - first["weights"][name]).norm() <= 1e-2 * moved  # see test_two_half_batches_are_one


def test_accelerate_launch_is_torchrun_bit_for_bit(tmp_path, replicas):
    """Its flag for several processes is --multi_gpu, without a GPU too: --cpu starts one, whatever --num_processes says."""
    launcher = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--main_process_port", 0)
    assert equal(launched(tmp_path, *launcher), replicas)
