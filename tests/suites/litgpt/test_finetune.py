"""LitGPT's fine-tuning commands with ``--optimizer scao.SCAO``, unmodified."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from litgpt.utils import instantiate_bnb_optimizer, instantiate_torch_optimizer

from comparing import equal
from scao import SCAO
from scao_core import CheckpointError, ConfigError, UnknownOptionError
from suites.litgpt import tuning
from suites.litgpt.tuning import litgpt, losses, settings
from suites.watching import assert_replayed


def chosen(**options):
    """The optimizer with options, as the command line takes it."""
    return ("--optimizer", json.dumps({"class_path": "scao.SCAO", "init_args": options}))


def assert_states(optimizer, matrices):
    """State where there is a gradient and nowhere else, with curvature for the matrices."""
    trained = {param for group in optimizer.param_groups for param in group["params"] if param.requires_grad}
    assert set(optimizer.state) == trained
    sides = [{key.partition("_")[0] for key in entry} >= {"left", "right"} for entry in optimizer.state.values()]
    assert sum(sides) == matrices == optimizer.report().matrices


def test_lora_by_the_name_alone(tmp_path, model, steps):
    """All options are SCAO's defaults then, the learning rate too: LitGPT has no setting of its own for it."""
    everywhere = {f"lora_{part}": "true" for part in ("key", "projection", "mlp")}
    litgpt("finetune_lora", model, *settings(tmp_path, **everywhere), "--optimizer", "scao.SCAO")
    (optimizer,) = set(steps.optimizers)
    assert type(optimizer) is SCAO
    assert optimizer.defaults == {**SCAO([torch.nn.Parameter(torch.zeros(1))]).defaults, "lr": 1e-3}
    assert_states(optimizer, matrices=2 * 2 * 5)  # layers, A and B, attention's two and the three of the MLP
    assert steps.rates == pytest.approx([0.0, 5e-4, 1e-3, 5e-4])  # LitGPT's warm-up starts at zero
    assert len(losses(tmp_path)) == 8  # two micro-batches a step
    assert all(map(math.isfinite, losses(tmp_path)))
    assert_replayed(steps)
    saved = torch.load(tmp_path / "final" / "lit_model.pth.lora", weights_only=True)
    trained = {tuple(param.flatten().tolist()) for param in steps.start}
    assert {tuple(value.flatten().tolist()) for value in saved["model"].values()} == trained


def test_lora_saves_the_adapters_and_no_optimizer(tmp_path, model, steps, capsys):
    """So there is nothing to resume from, with any optimizer, and the command has no such option."""
    litgpt("finetune_lora", model, *settings(tmp_path), *chosen(lr=1e-3))
    saved = torch.load(tmp_path / "step-000002" / "lit_model.pth.lora", weights_only=True)
    assert list(saved) == ["model"]
    assert all("lora_" in name for name in saved["model"])
    with pytest.raises(SystemExit):
        litgpt("finetune_lora", model, *settings(tmp_path), *chosen(lr=1e-3), "--resume", "true")
    assert "Unrecognized arguments: --resume true" in capsys.readouterr().err


def test_options_from_the_command_line(tmp_path, model, steps):
    """Text is a number, a list a tuple."""
    options = {"lr": "2e-4", "betas": [0.9, 0.95], "eps": "1e-7", "spike_rank": "2", "momentum_dtype": "bfloat16"}
    litgpt("finetune_lora", model, *settings(tmp_path), *chosen(**options))
    (optimizer,) = set(steps.optimizers)
    wanted = {"lr": 2e-4, "betas": (0.9, 0.95), "eps": 1e-7, "spike_rank": 2}
    assert {name: optimizer.defaults[name] for name in wanted} == wanted
    assert {entry["exp_avg"].dtype for entry in optimizer.state.values()} == {torch.bfloat16}


def test_options_in_a_config_and_in_two_arguments(tmp_path, model, steps):
    path = tmp_path / "config.yaml"
    path.write_text("optimizer: {class_path: scao.SCAO, init_args: {lr: 2.0e-4, spike_rank: 2}}\n")
    litgpt("finetune_lora", model, *settings(tmp_path / "a"), "--config", path)
    both = ("--optimizer.class_path", "scao.SCAO", "--optimizer.init_args", "{lr: 2e-4, spike_rank: 2}")
    litgpt("finetune_lora", model, *settings(tmp_path / "b"), *both)
    first, second = dict.fromkeys(steps.optimizers)
    assert first.defaults == second.defaults
    assert (first.defaults["lr"], first.defaults["spike_rank"]) == (2e-4, 2)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"spike_rnk": 8}, UnknownOptionError, "unknown option 'spike_rnk'; did you mean 'spike_rank'"),
        ({"lr": "fast"}, ConfigError, "lr: expected a number, got 'fast'"),
        ({"betas": [0.9]}, ConfigError, "betas"),
        ({"spike_rank": [1, 2]}, ConfigError, "spike_rank"),
        ({"damping": -1}, ConfigError, "damping"),
    ],
)
def test_wrong_options_stop_before_training(tmp_path, model, steps, options, error, message):
    with pytest.raises(error, match=message):
        litgpt("finetune_lora", model, *settings(tmp_path), *chosen(**options))
    assert steps.optimizers == []
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize(
    "wrong", [("--optimizer.init_args.lr", "2e-4"), ("--optimizer.lr", "2e-4")], ids=["init_args.lr", "lr"]
)
def test_dotted_options_are_litgpts_own_error(tmp_path, model, steps, wrong):
    """Its parser drops a level, with any optimizer; it stops before training, if not in a sentence."""
    with pytest.raises(KeyError):
        litgpt("finetune_lora", model, *settings(tmp_path), "--optimizer.class_path", "scao.SCAO", *wrong)
    assert steps.optimizers == []


def test_full_fine_tuning(tmp_path, model, steps):
    litgpt("finetune_full", model, *settings(tmp_path), *chosen(lr=1e-3))
    (optimizer,) = set(steps.optimizers)
    assert_states(optimizer, matrices=2 * 5)  # the two vocabulary-sized tables take the Adam path
    assert_replayed(steps)
    saved = torch.load(tmp_path / "step-000002" / "lit_model.pth", weights_only=True)
    assert saved["optimizer"]["param_groups"][0]["scao_schema"] == 1


def test_full_fine_tuning_goes_on_after_a_kill_bit_for_bit(tmp_path, model, steps):
    """Killed (-9) after the third step, resumed from the second."""
    scao = chosen(lr=1e-3, refresh_every=2, spike_rank=2)
    litgpt("finetune_full", model, *settings(tmp_path / "whole"), *scao)
    command = ["finetune_full", str(model), *settings(tmp_path / "killed"), *scao]
    script = Path(tuning.__file__).with_name("killed.py")
    died = subprocess.run([sys.executable, script, *command], capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr[-3000:]
    assert [path.name for path in (tmp_path / "killed").glob("step-*")] == ["step-000002"]
    litgpt(*command, "--resume", "true")
    whole, resumed = dict.fromkeys(steps.optimizers)
    assert (whole.report().steps, resumed.report().steps) == (4, 2)
    assert equal(resumed.state_dict()["state"], whole.state_dict()["state"])
    ends = [torch.load(tmp_path / run / "final" / "lit_model.pth", weights_only=True) for run in ("whole", "killed")]
    assert equal(*ends)


def test_the_state_of_another_optimizer_is_refused_before_training(tmp_path, model, steps):
    litgpt("finetune_full", model, *settings(tmp_path), "--optimizer", "AdamW")
    with pytest.raises(CheckpointError, match=r"written by torch\.optim\.AdamW or Adam, not by SCAO"):
        litgpt("finetune_full", model, *settings(tmp_path), "--optimizer", "scao.SCAO", "--resume", "true")
    assert steps.optimizers == []


def test_quantized_training_is_adamws_in_litgpt():
    """``--quantize``: LitGPT itself takes no other optimizer there, and says so before training."""
    with pytest.raises(ValueError, match="only supports the AdamW optimizer"):
        instantiate_bnb_optimizer("scao.SCAO", [])
    with pytest.raises(ValueError, match="only supports the AdamW optimizer"):
        instantiate_bnb_optimizer({"class_path": "scao.SCAO", "init_args": {}}, [])


def test_pretraining_passes_fused():
    params = [torch.nn.Parameter(torch.zeros(4, 4))]
    assert type(instantiate_torch_optimizer("scao.SCAO", params, fused=False)) is SCAO
    with pytest.warns(UserWarning, match="SCAO has no fused kernel: fused=True is ignored"):
        instantiate_torch_optimizer("scao.SCAO", params, fused=True)


@pytest.mark.parametrize("optimizer", ["scao.SCAO", "AdamW"])
def test_two_devices_are_refused_where_adamw_would_train(tmp_path, model, optimizer):
    """LitGPT shards LoRA with FSDP2, on gloo here."""
    command = [Path(sys.executable).with_name("litgpt"), "finetune_lora", model]
    short = {"devices": 2, "train.max_steps": 1, "train.save_interval": 100}
    command += [*settings(tmp_path, **short), "--optimizer", optimizer]
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True, env=os.environ)
    if optimizer == "AdamW":
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert "step 1" in ran.stdout
    else:
        assert ran.returncode != 0
        assert "ParameterError: got a DTensor parameter (FSDP2 or tensor parallel)" in ran.stderr
        assert "step 1" not in ran.stdout
