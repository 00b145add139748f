"""TRL's trainers with SCAO, by its class and by its name."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from comparing import equal
from scao import SCAO
from scao_core import ConfigError, UnknownOptionError
from scao_integrations.hf_trainer import ScaoCallback, registered, scao_trainer_kwargs
from suites.trl.tuning import SMALL, build, data, inner, losses, settings, train, weights

OPTIONS = {"spike_rank": 2, "damping": 1e-2, "refresh_every": 2}
AS_TEXT = "spike_rank=2,damping=1e-2,refresh_every=2"


@pytest.fixture
def named():
    with registered():
        yield


@pytest.fixture(scope="module")
def by_class(tmp_path_factory):
    """Four steps of full fine-tuning, four chats each."""
    return train(tmp_path_factory.mktemp("by_class"), scao_trainer_kwargs(**OPTIONS))


def lora(**changes):
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], **changes)


def assert_preconditioned(optimizer, matrices):
    """Every adapter matrix has curvature on both sides, and nothing that is frozen has any state."""
    planned = optimizer.plans()
    assert sum(plan.is_matrix for _, plan in planned) == matrices
    for param, plan in planned:
        sides = {key.partition("_")[0] for key in optimizer.state[param]} & {"left", "right"}
        assert sides == ({"left", "right"} if plan.is_matrix else set())
    assert len(optimizer.state) == len(planned)


def test_sft_by_the_class(by_class):
    optimizer = inner(by_class)
    assert type(optimizer) is SCAO
    assert optimizer.report().steps == 4
    assert optimizer.report().matrices == 2 * 7  # the embedding is larger than max_dim
    wanted = {"lr": 2e-3, "betas": (0.9, 0.99), **OPTIONS}
    assert {name: optimizer.defaults[name] for name in wanted} == wanted
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(map(math.isfinite, losses(by_class).values()))
    assert len(losses(by_class)) == 4


def test_the_callbacks_values_are_in_the_log_history(by_class):
    entries = [entry for entry in by_class.state.log_history if "loss" in entry]
    assert [entry["scao/skipped_steps"] for entry in entries] == [0] * 4
    assert [entry["scao/failed_refreshes"] for entry in entries] == [0] * 4
    assert all(entry["scao/refresh_age"] <= 2 for entry in entries)
    assert [entry["scao/lr_0"] for entry in entries] == pytest.approx([2e-3, 1.5e-3, 1e-3, 5e-4])


def test_sft_by_the_name_is_the_same_bit_for_bit(tmp_path, named, by_class):
    by_name = train(tmp_path, {"callbacks": [ScaoCallback()]}, optim="scao", optim_args=AS_TEXT)
    assert type(inner(by_name)) is SCAO
    assert inner(by_name).defaults == inner(by_class).defaults
    assert equal(weights(by_name), weights(by_class))
    assert losses(by_name) == losses(by_class)
    assert by_name.state.log_history[-2]["scao/lr_0"] == by_class.state.log_history[-2]["scao/lr_0"]


def test_the_bare_class_and_its_arguments(tmp_path, by_class):
    """What TRL and transformers document, without this package's door."""
    arguments = {"lr": 2e-3, "betas": (0.9, 0.99), "eps": 1e-8, **OPTIONS}
    bare = train(tmp_path, {"optimizer_cls_and_kwargs": (SCAO, arguments)})
    assert equal(weights(bare), weights(by_class))
    assert "scao/lr_0" not in bare.state.log_history[0]


def test_sft_is_what_scao_alone_makes_of_the_same_gradients(tmp_path, by_class):
    """The same run by the plain Trainer's loop written out: batches of SFTTrainer, autograd, SCAO."""
    trainer = build(tmp_path, scao_trainer_kwargs(**OPTIONS), max_grad_norm=0.0)
    trainer.train()
    again = build(tmp_path, max_grad_norm=0.0)
    model = again.model
    decayed = set(again.get_decay_parameter_names(model))
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n not in decayed], "weight_decay": 0.0},
    ]
    optimizer = SCAO(groups, lr=2e-3, betas=(0.9, 0.99), **OPTIONS)
    set_seed(again.args.seed)
    for step, batch in zip(range(4), again.get_train_dataloader(), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (4 - step) / 4
        model.train()
        again.compute_loss(model, dict(batch), num_items_in_batch=(batch["labels"][:, 1:] != -100).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    start = dict(build(tmp_path).model.named_parameters())
    for name, param in weights(trainer).items():
        moved = (param - start[name]).norm()
        assert moved > 0
        # the same but for a sum of tokens that is taken in another order
        assert (param - dict(model.named_parameters())[name]).norm() <= 1e-3 * moved


def test_two_half_batches_are_one(tmp_path, by_class):
    """The same gradient but for the order of its sums, so the same step but for rounding.

    Rounding is magnified where the mask decides by a sign, and by eigenvectors whose eigenvalues are nearly equal: 1e-2.
    """
    halves = train(
        tmp_path, scao_trainer_kwargs(**OPTIONS), per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    assert inner(halves).report().steps == 4
    assert losses(halves) == pytest.approx(losses(by_class), rel=1e-3)  # they are logged with four digits
    start = dict(build(tmp_path).model.named_parameters())
    whole = weights(by_class)
    for name, param in weights(halves).items():
        assert (param - whole[name]).norm() <= 1e-2 * (whole[name] - start[name]).norm()


@pytest.mark.parametrize(
    "config",
    [{}, {"use_dora": True}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 4}}],
    ids=["lora", "dora", "rslora", "patterns"],
)
def test_adapters(tmp_path, config):
    trainer = build(tmp_path, scao_trainer_kwargs(**OPTIONS), peft=lora(**config), max_steps=3)
    before = weights(trainer)
    trainer.train()
    assert_preconditioned(inner(trainer), matrices=2 * 2 * 3)
    assert all(not torch.equal(before[name], after) for name, after in weights(trainer).items())
    assert all(map(math.isfinite, losses(trainer).values()))
    if "rank_pattern" in config:
        assert {min(p.shape) for p in before.values()} == {2, 4}


def test_qlora(tmp_path):
    """4-bit weights through bitsandbytes; TRL turns the adapters into bf16, and SCAO's curvature stays in fp32."""
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    trainer = build(tmp_path, {**scao_trainer_kwargs(**OPTIONS), "quantization_config": four}, peft=lora())
    before = weights(trainer)
    trainer.train()
    assert trainer.model.is_loaded_in_4bit
    assert {param.dtype for param in before.values()} == {torch.bfloat16}
    assert_preconditioned(inner(trainer), matrices=12)
    kept = [item for entry in inner(trainer).state.values() for item in entry.items() if item[1].is_floating_point()]
    assert {tensor.dtype for key, tensor in kept if key != "exp_avg"} == {torch.float32}
    assert {tensor.dtype for key, tensor in kept if key == "exp_avg"} == {torch.bfloat16}  # as AdamW's
    assert all(not torch.equal(before[name], after) for name, after in weights(trainer).items())
    assert all(map(math.isfinite, losses(trainer).values()))


def test_lora_plus(tmp_path):
    """It makes the groups, so it makes the optimizer; 16 times the rate for B, and the decay stays."""
    set_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(SMALL, dtype=torch.float32), lora())
    optimizer = create_loraplus_optimizer(
        model, SCAO, lr=1e-3, loraplus_lr_ratio=16, loraplus_weight_decay=0.1, **OPTIONS
    )
    kwargs = {"optimizers": (optimizer, None), "callbacks": [ScaoCallback()]}
    trainer = train(tmp_path, kwargs, model=model, lr_scheduler_type="constant")
    assert inner(trainer) is optimizer
    assert_preconditioned(optimizer, matrices=12)
    names = {param: name for name, param in model.named_parameters()}
    rates = {names[param]: group["lr"] for group in optimizer.param_groups for param in group["params"]}
    assert {rate for name, rate in rates.items() if "lora_A" in name} == {1e-3}
    assert {rate for name, rate in rates.items() if "lora_B" in name} == {16e-3}
    assert {group["weight_decay"] for group in optimizer.param_groups if group["params"]} == {0.1}
    logged = {trainer.state.log_history[0][f"scao/lr_{i}"] for i in range(len(optimizer.param_groups))}
    assert logged >= {1e-3, 16e-3}


def dpo(folder, **changes):
    kwargs = changes.pop("kwargs", {})
    set_seed(0)
    args = DPOConfig(str(folder), **settings(max_steps=2, **changes))
    return DPOTrainer(SMALL, args=args, train_dataset=data("preference"), peft_config=lora(), **kwargs)


def test_dpo_by_the_name(tmp_path, named):
    trainer = dpo(tmp_path, optim="scao", optim_args=AS_TEXT, kwargs={"callbacks": [ScaoCallback()]})
    trainer.train()
    assert type(inner(trainer)) is SCAO
    assert_preconditioned(inner(trainer), matrices=12)
    assert inner(trainer).report().steps == 2
    assert losses(trainer)[1] == pytest.approx(math.log(2), rel=1e-3)  # before the first step both policies are one
    assert math.isfinite(losses(trainer)[2])
    assert trainer.state.log_history[0]["scao/lr_0"] == 2e-3


def test_dpo_takes_no_class(tmp_path):
    """TRL 1.16 passes it on in SFTTrainer and RewardTrainer; the others say so before anything happens."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'optimizer_cls_and_kwargs'"):
        dpo(tmp_path, kwargs=scao_trainer_kwargs())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"optim_args": "spike_rnk=8"}, UnknownOptionError, "did you mean 'spike_rank'"),
        ({"optim_args": "damping=much"}, ConfigError, "damping: expected a number"),
        ({"optim_args": "spike_rank"}, ConfigError, "expected name=value"),
        ({"optim_target_modules": ["q_proj"]}, ConfigError, "would have no effect"),
    ],
)
def test_wrong_settings_are_refused_with_the_arguments(tmp_path, named, changes, error, message):
    for kind in (SFTConfig, DPOConfig):
        with pytest.raises(error, match=message):
            kind(str(tmp_path), **settings(optim="scao", **changes))


def test_text_is_a_number(tmp_path, named):
    """As YAML gives 2e-4."""
    args = SFTConfig(str(tmp_path), **settings(optim="scao", optim_args="lr=2e-4,eps=1e-7"))
    trainer = SFTTrainer(SMALL, args=args, train_dataset=data())
    defaults = trainer.create_optimizer().defaults
    assert (defaults["lr"], defaults["eps"]) == (2e-4, 1e-7)
    assert scao_trainer_kwargs(lr="2e-4")["optimizer_cls_and_kwargs"][1]["lr"] == 2e-4


def test_without_registration_transformers_knows_no_scao(tmp_path):
    with pytest.raises(ValueError, match="scao is not a valid OptimizerNames"):
        SFTConfig(str(tmp_path), **settings(optim="scao"))
    assert issubclass(SFTTrainer, Trainer)
