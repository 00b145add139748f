"""What the suites of Axolotl share: a small config, the command line in a process of its own, and runs in this process.

Both versions run the same tests, of `axolotl_cases` and `axolotl_refusals`. Before 0.21 each config names the plugin, which
0.21 finds by its entry point.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml

from scao_integrations.requirements import version as parsed

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

MATERIAL = Path(os.environ["SCAO_MATERIAL"])
PLUGIN = "scao_integrations.axolotl_plugin.ScaoPlugin"
FOUND = parsed(version("axolotl")) >= [0, 21]  # by its entry point
LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_linear": True,
    "lora_mlp_kernel": False,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
}
FULL = dict.fromkeys(LORA)
CHAT = {"path": str(MATERIAL / "chat.jsonl"), "ds_type": "json", "type": "chat_template"}
PREFERENCE = {
    "path": str(MATERIAL / "preference.jsonl"),
    "ds_type": "json",
    "split": "train",
    "type": {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"},
}
DPO = {"rl": "dpo", "datasets": [PREFERENCE]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One folder for all runs of a suite, so that they share the prepared data sets."""
    return tmp_path_factory.mktemp("axolotl")


def config(folder, **changes):
    """A run of a few steps on the small model as a YAML file in ``folder``; a change to None takes a key out."""
    plugins = {} if FOUND else {"plugins": [PLUGIN]}
    settings = {
        "base_model": str(MATERIAL / "small"),
        "datasets": [{"path": str(MATERIAL / "alpaca.json"), "ds_type": "json", "type": "alpaca"}],
        "dataset_prepared_path": str(folder.parent / "prepared"),  # once for all
        "dataset_num_proc": 1,
        "val_set_size": 0.0,
        "sequence_len": 128,
        **LORA,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "num_epochs": 1,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": "2e-3",  # text, as PyYAML reads 2e-3
        "weight_decay": 0.1,
        "lr_scheduler": "constant",
        "optimizer": "scao",
        "bf16": False,
        "fp16": False,
        "seed": 1,
        "output_dir": str(folder / "out"),
        **plugins,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
    return path


def command(path, *arguments, **environment):
    """``axolotl train`` as a user types it."""
    program = [str(Path(sys.executable).parent / "axolotl"), "train", str(path), "--launcher", "python", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment}  # for `axolotl_kill`
    return subprocess.run(program, env=environment, capture_output=True, text=True, cwd=path.parent)


def loaded(path):
    """The config as the command line reads and checks it."""
    from axolotl.cli.config import load_cfg

    return load_cfg(str(path))


def datasets(cfg):
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.common.datasets import load_datasets, load_preference_datasets

    return (load_preference_datasets if cfg.rl else load_datasets)(cfg=cfg, cli_args=TrainerCliArgs())


def train(path):
    """Train as the command line does, here; returns the trainer."""
    from axolotl.train import train as run

    cfg = loaded(path)
    torch.manual_seed(0)  # of the adapter's start: 0.19 seeds later
    return run(cfg=cfg, dataset_meta=datasets(cfg))[2]


def train_directly(path, **kwargs):
    """The same trainer without the plugin, given the class: what Axolotl's own optimizers of this kind get."""
    from axolotl.train import setup_model_and_trainer

    from scao import SCAO

    cfg = loaded(path)
    torch.manual_seed(0)
    trainer = setup_model_and_trainer(cfg, datasets(cfg))[0]
    assert trainer.optimizer_cls_and_kwargs is None
    trainer.optimizer_cls_and_kwargs = (SCAO, kwargs)
    trainer.train()
    return trainer


def inner(trainer):
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def losses(trainer_or_folder):
    """Of each logged step."""
    if isinstance(trainer_or_folder, Path):
        history = json.loads((trainer_or_folder / "trainer_state.json").read_text())["log_history"]
    else:
        history = trainer_or_folder.state.log_history
    return [entry["loss"] for entry in history if "loss" in entry]


def trained(trainer):
    return {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_same(one, other):
    """The same losses, and the same weights bit for bit."""
    assert losses(one) == losses(other)
    a, b = trained(one), trained(other)
    assert a.keys() == b.keys()
    assert a
    assert all(torch.equal(a[name], b[name]) for name in a)
