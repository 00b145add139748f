"""SFT of a small Llama on chats, as the tests of this folder and the scripts that they start do it."""

import os
from pathlib import Path

from datasets import load_dataset
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

MATERIAL = Path(os.environ["SCAO_MATERIAL"])
SMALL = str(MATERIAL / "small")


def data(name="chat"):
    """A data set of the material."""
    return load_dataset("json", data_files=str(MATERIAL / f"{name}.jsonl"), split="train")


def settings(**changes):
    """What all runs here share."""
    return {
        "max_steps": 4,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 2e-3,
        "weight_decay": 0.1,
        "adam_beta2": 0.99,
        "max_length": 48,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "dataset_num_proc": None,
        "model_init_kwargs": {"dtype": "float32"},
        **changes,
    }


def build(folder, kwargs=None, model=SMALL, peft=None, **changes):
    """A trainer; ``kwargs`` are further arguments of it."""
    set_seed(0)
    if not isinstance(model, str):
        changes["model_init_kwargs"] = None
    args = SFTConfig(str(folder), **settings(**changes))
    return SFTTrainer(model, args=args, train_dataset=data(), peft_config=peft, **(kwargs or {}))


def train(folder, kwargs=None, model=SMALL, peft=None, resume=None, **changes):
    """A trainer that has trained."""
    trainer = build(folder, kwargs, model, peft, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def inner(trainer):
    """The optimizer in accelerate's wrapper."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def weights(trainer):
    """Copies of what was trained."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def losses(trainer):
    """The logged losses, by step."""
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
