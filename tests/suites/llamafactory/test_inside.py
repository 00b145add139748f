"""``register()`` in a script: what reaches SCAO, and what is refused before a model is loaded."""

import inspect
import types

import pytest
import torch
import transformers
from llamafactory.hparams import get_train_args, parser
from llamafactory.train import tuner
from llamafactory.train.ppo.trainer import CustomPPOTrainer
from llamafactory.train.sft import workflow

from scao_core import SCAO, ConfigError, UnknownOptionError
from scao_integrations import llamafactory_hook as door
from suites.llamafactory.inside import trained
from suites.llamafactory.running import settings


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")  # `fsdp:` sets it, and this takes it back


def test_the_name_is_the_class_in_the_same_trainer_bit_for_bit(tmp_path, monkeypatch):
    door.register()
    by_name = trained(tmp_path)
    door.unregister()
    build, options = workflow.CustomSeq2SeqTrainer, {"spike_rank": 2, "refresh_every": 3}

    def with_the_class(**arguments):
        trainer = build(**arguments)
        trainer.optimizer_cls_and_kwargs = SCAO, {"lr": 2.0e-3, "betas": (0.9, 0.999), "eps": 1e-8, **options}
        return trainer

    monkeypatch.setattr(workflow, "CustomSeq2SeqTrainer", with_the_class)
    by_class = trained(tmp_path, optim="adamw_torch", optim_args=None)
    assert type(by_name.optimizer) is type(by_class.optimizer) is SCAO
    assert by_name.optimizer.report().steps == 4
    assert by_name.optimizer.report().matrices > 0
    assert len(by_name.losses) == 4
    assert by_name.losses == by_class.losses
    assert all(torch.equal(value, by_class.weights[name]) for name, value in by_name.weights.items())
    assert [g["weight_decay"] for g in by_name.optimizer.param_groups] == [0.1, 0.0]


def test_other_optimizers_do_what_they_did(tmp_path, registered):
    watch = trained(tmp_path, optim="adamw_torch", optim_args=None, max_steps=1)
    assert type(watch.optimizer) is torch.optim.AdamW


def test_lora_plus_sets_its_learning_rates(tmp_path, registered):
    watch = trained(tmp_path, loraplus_lr_ratio=16.0, lr_scheduler_type="constant", max_steps=2)
    assert type(watch.optimizer) is SCAO
    groups = [(g["lr"], g["weight_decay"]) for g in watch.optimizer.param_groups if g["params"]]
    assert groups == [(2.0e-3, 0.1), (32.0e-3, 0.1)]


def test_text_of_the_options_becomes_numbers(registered, tmp_path):
    text = "damping=1e-2, betas=0.8,0.95,cautious=false,factors=dense,spiked"
    _, _, training, _, _ = get_train_args(settings(output_dir=str(tmp_path / "x"), optim_args=text))
    kind, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(training)  # as LoRA+ calls it: without a model
    assert kind is SCAO
    assert (kwargs["damping"], kwargs["betas"], kwargs["cautious"]) == (1e-2, (0.8, 0.95), False)
    assert kwargs["lr"] == 2.0e-3


@pytest.mark.parametrize(
    "given", [{"damping": "1e-2", "betas": [0.8, 0.95], "cautious": False}, ["damping=1e-2", "cautious=no"]]
)
def test_a_mapping_or_a_list_of_options_is_understood(registered, tmp_path, given):
    _, _, training, _, _ = get_train_args(settings(output_dir=str(tmp_path / "x"), optim_args=given))
    _, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(training)
    assert (kwargs["damping"], kwargs["cautious"]) == (1e-2, False)
    assert kwargs["betas"] == ((0.8, 0.95) if "betas" in given else (0.9, 0.999))


def test_the_command_line_knows_the_name(registered, tmp_path):
    flags = {**settings(output_dir=str(tmp_path / "x")), "learning_rate": "2e-3"}
    line = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    _, _, training, _, _ = get_train_args(line)
    assert training.optim == "scao"
    with pytest.raises(SystemExit):
        get_train_args([*line, "--optim", "scoa"])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"optim_args": "spike_rnk=8"}, UnknownOptionError, "did you mean 'spike_rank'"),
        ({"optim_args": "spike_rank"}, ConfigError, "expected name=value"),
        ({"optim_args": {"spike_rnk": 8}}, UnknownOptionError, "did you mean 'spike_rank'"),
        ({"optim_args": 8}, ConfigError, "optim_args=8: expected name=value"),
        ({"optim_args": "damping=much"}, ConfigError, "damping: expected a number, got 'much'"),
        ({"optim_args": "weight_decay=0.3"}, ConfigError, r"set TrainingArguments.weight_decay \(here 0.1\)"),
        ({"use_galore": True}, ConfigError, "use_galore: true trains with GaLore, and optim: scao would have no"),
        ({"use_apollo": True}, ConfigError, "use_apollo: true trains with APOLLO"),
        ({"use_badam": True}, ConfigError, "use_badam: true trains with BAdam"),
        ({"use_adam_mini": True}, ConfigError, "use_adam_mini: true trains with Adam-mini"),
        ({"use_muon": True}, ConfigError, "use_muon: true trains with Muon"),
        ({"use_hyper_parallel": True}, ConfigError, "use_hyper_parallel: true shards"),
        ({"fsdp": "full_shard"}, ConfigError, "FSDP shards the matrices"),
    ],
)
def test_what_would_not_train_with_scao_is_refused(registered, tmp_path, changes, error, message):
    given = {"finetuning_type": "full"} if {"use_galore", "use_apollo", "use_badam"} & set(changes) else {}
    run = settings(output_dir=str(tmp_path / "x"), **given, **changes)
    with pytest.raises(error, match=message):
        tuner.run_exp(run)
    assert not (tmp_path / "x").exists()


def test_the_other_optimizers_are_not_refused_without_scao(registered, tmp_path):
    _, _, training, finetuning, _ = get_train_args(
        settings(output_dir=str(tmp_path / "x"), use_muon=True, optim="adamw_torch", optim_args=None)
    )
    assert finetuning.use_muon
    assert training.optim == "adamw_torch"


def test_norms_and_biases_do_not_decay_in_ppo(registered, tmp_path):
    """Its group of them names no weight decay, and SCAO's own default is not 0. (PPO itself wants a TRL < 0.10.)"""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    for text in (None, "weight_decay=0.1"):
        _, _, training, finetuning, _ = get_train_args(settings(output_dir=str(tmp_path / "x"), optim_args=text))
        stand_in = types.SimpleNamespace(get_decay_parameter_names=lambda model: ["0.weight"])
        optimizer = CustomPPOTrainer.create_optimizer(stand_in, model, training, finetuning)
        assert type(optimizer) is SCAO
        assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [(3, 0.0), (1, 0.1)]


def test_registering_twice_is_registering_once_and_unregister_restores(tmp_path):
    def parts():
        return [
            inspect.getattr_static(transformers.Trainer, "get_optimizer_cls_and_kwargs"),
            inspect.getattr_static(transformers.TrainingArguments, "__post_init__"),
            parser.TrainingArguments.__post_init__,
            parser._parse_train_args,
            parser._parse_train_mca_args,
        ]

    before = parts()
    door.register()
    during = parts()
    door.register()
    assert parts() == during
    assert not any(a is b for a, b in zip(before, during, strict=True))
    door.unregister()
    door.unregister()
    assert all(a is b for a, b in zip(before, parts(), strict=True))
    assert "scao" not in list(transformers.training_args.OptimizerNames)


def test_a_foreign_scao_is_left_alone(monkeypatch):
    names = transformers.training_args.OptimizerNames
    monkeypatch.setitem(names._value2member_map_, "scao", names.ADAMW_TORCH)
    with pytest.raises(ConfigError, match="already means something else"):
        door.register()
    assert not door._patches


def test_a_later_change_by_others_is_not_undone(registered, monkeypatch):
    with monkeypatch.context() as other:
        other.setattr(parser, "_parse_train_args", len)
        with pytest.raises(ConfigError, match="_parse_train_args was replaced after SCAO was registered"):
            door.unregister()


@pytest.mark.parametrize(("found", "fits"), [("0.9.4", False), ("0.9.5", True), ("0.9.6.dev0", True), ("1.0", True)])
def test_an_old_llamafactory_is_refused_with_the_command(monkeypatch, found, fits):
    monkeypatch.setattr("llamafactory.__version__", found)
    if fits:
        door.require_llamafactory()
        return
    with pytest.raises(door.FrameworkError, match=r'needs llamafactory >= 0.9.5, found 0.9.4; run: pip install "llama'):
        door.register()


def test_a_llamafactory_of_another_shape_is_refused_and_nothing_stays(monkeypatch):
    before = inspect.getattr_static(transformers.Trainer, "get_optimizer_cls_and_kwargs")
    monkeypatch.delattr(parser, "_parse_train_args")
    with pytest.raises(door.FrameworkError, match=r"has no llamafactory.hparams.parser._parse_train_args"):
        door.register()
    assert inspect.getattr_static(transformers.Trainer, "get_optimizer_cls_and_kwargs") is before
    assert "scao" not in list(transformers.training_args.OptimizerNames)
