"""LLaMA-Factory's commands as a user types them: each in processes of its own, where nothing of the tests is."""

import math
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from suites.llamafactory.running import losses, ran, started, written

REGISTERED = '"optim: scao" (by '


def same_tensors(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def leaves(tree, path=""):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if items is None:
        return {path: tree}
    return {name: leaf for key, value in items for name, leaf in leaves(value, f"{path}/{key}").items()}


def same_files(a, b):
    a, b = (leaves(torch.load(path, weights_only=True)) for path in (a, b))
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]) if torch.is_tensor(value) else value == b[name], name


@pytest.fixture(scope="module")
def uninterrupted(folder):
    """Eight steps with LLaMA-Factory's own command and the variable."""
    return ran(folder, "llamafactory-cli", "train", written(folder, "whole"), SCAO_AUTOLOAD="1")


def test_the_variable_registers_once_and_says_so(uninterrupted):
    assert uninterrupted.count(REGISTERED) == 1
    assert REGISTERED + "SCAO_AUTOLOAD=1)" in uninterrupted


def test_the_saved_optimizer_is_scao_with_its_state(folder, uninterrupted):
    saved = torch.load(folder / "whole" / "checkpoint-8" / "optimizer.pt", weights_only=True)
    group = saved["param_groups"][0]
    assert (group["spike_rank"], group["refresh_every"], group["weight_decay"]) == (2, 3, 0.1)
    assert group["initial_lr"] == 2.0e-3
    names = {name for state in saved["state"].values() for name in state}
    assert len(names - {"step", "exp_avg", "exp_avg_sq"}) > 2, names  # factors, beyond what Adam has
    found = losses(folder, "whole")
    assert sorted(found) == list(range(1, 9))
    assert all(map(math.isfinite, found.values()))
    assert min(found[7], found[8]) < found[1]


def test_a_killed_run_resumes_bit_for_bit(folder, uninterrupted):
    """scao-llamafactory, ended by SIGKILL in the step after its first checkpoint, then started anew with the same file."""
    file = written(folder, "killed")
    process, log = started(folder, "scao-llamafactory", "train", file), folder / "killed" / "trainer_log.jsonl"
    deadline = time.monotonic() + 300
    while not (log.exists() and '"current_steps": 5' in log.read_text()):  # so checkpoint-4 is written to its end
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (folder / "killed" / "adapter_model.safetensors").exists()
    output = ran(folder, "scao-llamafactory", "train", file)
    assert "Resuming training from killed/checkpoint-4" in output
    assert output.count(REGISTERED + "scao-llamafactory)") == 1
    same_tensors(*(load_file(folder / name / "adapter_model.safetensors") for name in ("whole", "killed")))
    same_files(*(folder / name / "checkpoint-8" / "optimizer.pt" for name in ("whole", "killed")))
    whole, resumed = losses(folder, "whole"), losses(folder, "killed")
    assert all(resumed[step] == whole[step] for step in range(5, 9))


def test_two_processes_are_one_with_the_joined_batch(folder, uninterrupted):
    """torchrun's fresh interpreters register too; DistributedDataParallel (gloo) averages the gradients."""
    pair = written(folder, "pair", per_device_train_batch_size=1, max_steps=4)
    launch = {"SCAO_AUTOLOAD": "1", "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}
    output = ran(folder, "llamafactory-cli", "train", pair, **launch)
    assert output.count(REGISTERED) == 1  # by rank 0: LLaMA-Factory's other ranks do not log such lines
    assert "world size: 2" in output
    saved = torch.load(folder / "pair" / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert saved["param_groups"][0]["spike_rank"] == 2
    whole, halves = losses(folder, "whole"), losses(folder, "pair")
    assert halves[1] == pytest.approx(whole[1], rel=1e-5)  # the same examples; sums are taken in another order


def test_where_torch_calls_no_entry_point_the_children_register_all_the_same(folder):
    """With TORCH_DEVICE_BACKEND_AUTOLOAD=0 torchrun starts our script; wrong options stop it before training."""
    file = written(folder, "wrong", optim_args="spike_rnk=8")
    launch = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "1"}
    output = ran(folder, "scao-llamafactory", "train", file, code=1, **launch)
    assert "did you mean 'spike_rank'" in output
    assert not (folder / "wrong").exists()


def test_without_the_variable_llamafactory_is_as_it_was(folder):
    output = ran(folder, "llamafactory-cli", "train", written(folder, "absent"), code=1)
    assert "scao is not a valid OptimizerNames" in output
    assert "registered" not in output
