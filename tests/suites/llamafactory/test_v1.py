"""LLaMA-Factory's second generation (``USE_V1=1``): its own registry of optimizers, its own trainer."""

import math

import pytest
import torch
import yaml
from llamafactory.v1.config.training_args import TrainingArguments
from llamafactory.v1.plugins.trainer_plugins.optimizer import OptimizerPlugin
from llamafactory.v1.trainers.sft_trainer import run_sft

from scao_core import SCAO, ConfigError, UnknownOptionError
from scao_integrations import llamafactory_hook as door
from suites.llamafactory.running import losses, ran


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setenv("USE_V1", "1")
    door.register()
    yield
    door.unregister()


def arguments(dist_config=None, **options):
    return TrainingArguments(learning_rate=3e-4, optim_config={"name": "scao", **options}, dist_config=dist_config)


def test_it_trains_and_resumes_bit_for_bit(folder, registered, monkeypatch):
    data = {"stdlib": {"path": "data/alpaca.json", "source": "local", "converter": "alpaca"}}
    (folder / "v1_data.yaml").write_text(yaml.safe_dump(data))
    given = {
        "model": "./small",
        "train_dataset": "v1_data.yaml",
        "output_dir": "v1",
        "cutoff_len": 64,
        "batching_workers": 0,
        "bf16": False,
        "enable_activation_checkpointing": False,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 2.0e-3,
        "optim_config": {"name": "scao", "spike_rank": 2, "refresh_every": 3},
        "peft_config": {"name": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all"},
    }
    (folder / "v1.yaml").write_text(yaml.safe_dump(given))
    output = ran(folder, "scao-llamafactory", "sft", "v1.yaml", USE_V1="1")
    assert output.count('is registered: "optim_config: {name: scao}" (by scao-llamafactory)') == 1
    found = losses(folder, "v1")
    assert sorted(found) == [1, 2, 3, 4]
    assert all(map(math.isfinite, found.values()))
    whole = torch.load(folder / "v1" / "checkpoint-4" / "optimizer" / "state_dict.pt", weights_only=True)
    assert (whole["param_groups"][0]["spike_rank"], whole["param_groups"][0]["lr"]) == (2, 2.0e-3)
    monkeypatch.chdir(folder)
    run_sft(given | {"output_dir": "v1_resumed", "resume_from_checkpoint": "v1/checkpoint-2"})
    resumed = torch.load(folder / "v1_resumed" / "checkpoint-4" / "optimizer" / "state_dict.pt", weights_only=True)
    for index, state in whole["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(resumed["state"][index][name])), name
    assert losses(folder, "v1_resumed") == {step: found[step] for step in (3, 4)}


def test_the_plugin_builds_scao_with_the_trainers_learning_rate(registered):
    config = arguments(damping="1e-2", weight_decay="0.1").optim_config
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = OptimizerPlugin("scao")(model, config)
    assert type(optimizer) is SCAO
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (1, 3e-4, 0.1),
        (3, 3e-4, 0.0),
    ]
    assert optimizer.defaults["damping"] == 1e-2


def test_text_is_a_number_and_a_given_learning_rate_wins(registered):
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = OptimizerPlugin("scao")(model, arguments(lr="2e-4", betas=[0.8, 0.95]).optim_config)
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"]) == (2e-4, (0.8, 0.95))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"spike_rnk": 8}, UnknownOptionError, "did you mean 'spike_rank'"),
        ({"lr": "fast"}, ConfigError, "lr: expected a number, got 'fast'"),
        ({"dist_config": {"name": "fsdp2"}}, ConfigError, "name: fsdp2} shards the matrices.*leave dist_config out"),
        ({"dist_config": {"name": "deepspeed"}}, ConfigError, "name: deepspeed} shards"),
    ],
)
def test_wrong_options_and_sharding_are_refused_with_the_arguments(registered, options, error, message):
    with pytest.raises(error, match=message):
        arguments(**options)


def test_other_optimizers_are_not_looked_at(registered):
    assert TrainingArguments(optim_config={"name": "adamw", "spike_rnk": 8}).optim_config["spike_rnk"] == 8


def test_a_foreign_plugin_is_left_alone_and_unregister_leaves_none(monkeypatch):
    monkeypatch.setenv("USE_V1", "1")
    door.register()
    door.unregister()
    assert not OptimizerPlugin._registry["scao"]
    before = TrainingArguments.__post_init__
    monkeypatch.setitem(OptimizerPlugin._registry["scao"], "__call__", len)
    with pytest.raises(ConfigError, match="already means something else in LLaMA-Factory's plugins"):
        door.register()
    assert TrainingArguments.__post_init__ is before
    assert OptimizerPlugin._registry["scao"] == {"__call__": len}
