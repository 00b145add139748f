"""TRL's other trainers, a few steps each: the reward model by the class, those that take no class by the name."""

import math

import pytest
from peft import LoraConfig
from transformers import set_seed
from trl import (
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from scao import SCAO
from scao_integrations.hf_trainer import registered, scao_trainer_kwargs
from suites.trl.tuning import SMALL, build, data, inner, losses, settings

NAMED = {"optim": "scao", "optim_args": "refresh_every=2", "max_steps": 2}


def lora(task="CAUSAL_LM"):
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type=task)


def assert_trained(trainer):
    trainer.train()
    assert type(inner(trainer)) is SCAO
    assert inner(trainer).report().steps == 2
    assert inner(trainer).report().matrices == 2 * 2 * 3  # A and B of three layers in two blocks
    assert sorted(losses(trainer)) == [1, 2]
    assert all(map(math.isfinite, losses(trainer).values()))


def labeled():
    """Each answer of a pair by itself, with what it is worth."""
    return data("preference").map(
        lambda row, i: {"completion": row["chosen" if i % 2 else "rejected"], "label": bool(i % 2)},
        with_indices=True,
        remove_columns=["chosen", "rejected"],
    )


def length(completions, **_):
    """A reward that every model can earn."""
    return [float(len(completion)) for completion in completions]


def test_the_reward_trainer_takes_the_class(tmp_path):
    set_seed(0)
    args = RewardConfig(str(tmp_path), **settings(max_steps=2))
    kwargs = scao_trainer_kwargs(refresh_every=2)
    trainer = RewardTrainer(SMALL, args=args, train_dataset=data("preference"), peft_config=lora("SEQ_CLS"), **kwargs)
    assert_trained(trainer)


def test_kto_by_the_name(tmp_path):
    with registered():
        args = KTOConfig(str(tmp_path), **settings(**NAMED))
        assert_trained(KTOTrainer(SMALL, args=args, train_dataset=labeled(), peft_config=lora()))


@pytest.mark.parametrize(("config", "kind"), [(GRPOConfig, GRPOTrainer), (RLOOConfig, RLOOTrainer)])
def test_generating_trainers_by_the_name(tmp_path, config, kind):
    """Two answers of eight tokens to a prompt."""
    changes = settings(**NAMED, num_generations=2, max_completion_length=8)
    del changes["max_length"], changes["dataset_num_proc"]
    with registered():
        args = config(str(tmp_path), **changes)
        prompts = data("preference").select_columns(["prompt"])
        trainer = kind(SMALL, reward_funcs=length, args=args, train_dataset=prompts, peft_config=lora())
        assert_trained(trainer)


def test_packing(tmp_path):
    trainer = build(tmp_path, scao_trainer_kwargs(refresh_every=2), peft=lora(), packing=True, max_steps=2)
    assert_trained(trainer)
