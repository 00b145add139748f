"""The recipes in configs/trl: TRL's own parser takes them, a twin differs in its optimizer, the small ones run."""

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scao_core import UnknownOptionError
from scao_integrations.hf_trainer import registered
from suites.recipes import assert_header, names, twin
from suites.trl import tuning
from suites.trl.tuning import MATERIAL

CONFIGS = Path(tuning.__file__).parents[3] / "configs" / "trl"
BOTH = sorted(CONFIGS.glob("*.yaml"))
SCAO_CONFIGS = sorted(CONFIGS.glob("*_scao.yaml"))


def kind(path):
    return "dpo" if "_dpo_" in path.name else "sft"


def parse(path, *further):
    script = importlib.import_module(f"trl.scripts.{kind(path)}")
    return script.make_parser().parse_args_and_config(["--config", str(path), "--output_dir", "out", *further])


@pytest.fixture
def named():
    with registered():
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the headers say to write, and where they say to be."""
    (tmp_path / "smollm2").symlink_to(MATERIAL / "smollm2")
    (tmp_path / "data").mkdir()
    for file in MATERIAL.glob("*.jsonl"):
        shutil.copy(file, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", BOTH, ids=names(BOTH))
def test_trls_parser_takes_every_key(tmp_path, monkeypatch, named, path):
    monkeypatch.chdir(tmp_path)
    cpu = [] if "smollm2" in path.name else ["--use_cpu", "true", "--bf16", "false"]
    script, training, model, data = parse(path, *cpu)
    ours = path.stem.endswith("_scao")
    assert training.optim == ("scao" if ours else "adamw_torch")
    assert isinstance(yaml.safe_load(path.read_text())["learning_rate"], float)
    assert model.load_in_4bit == ("qlora" in path.stem)
    assert bool(script.dataset_name) != bool(data.datasets)


@pytest.mark.parametrize("path", SCAO_CONFIGS, ids=names(SCAO_CONFIGS))
def test_the_twin_differs_in_its_optimizer_alone(path):
    ours, theirs = yaml.safe_load(path.read_text()), yaml.safe_load(twin(path).read_text())
    assert (ours.pop("optim"), theirs.pop("optim")) == ("scao", "adamw_torch")
    half = ours["dtype"] == "bfloat16"
    assert ours.pop("optim_args", None) == ("momentum_dtype=bfloat16" if half else None)
    assert ours == theirs


@pytest.mark.parametrize("path", BOTH, ids=names(BOTH))
def test_its_header_says_how_to_run_it(path):
    command = f"python {kind(path)}.py --config {path.name} --output_dir out/{path.stem}"
    assert_header(path, "model_name_or_path", command)


def script(name, config, *further):
    command = [sys.executable, CONFIGS / f"{name}.py", "--config", config, *further]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, env=os.environ)


def history(folder):
    return json.loads((folder / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]


def test_the_offline_recipe_runs_shortened(folder):
    """As the header says, but one step of short chats."""
    path = CONFIGS / "smollm2-135m_lora_scao.yaml"
    short = ("--max_steps", 1, "--max_length", 24, "--save_steps", 1, "--output_dir", "out")
    ran = script("sft", path, *short, "--optim_args", "spike_rank=2")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert math.isfinite(history(Path("out"))[0]["loss"])
    import torch

    state = torch.load("out/checkpoint-1/optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["spike_rank"] == 2
    assert len(state["state"]) == 2 * 210
    assert all({key.partition("_")[0] for key in entry} >= {"left", "right"} for entry in state["state"].values())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("optim_args: spike_rnk=8", "unknown option 'spike_rnk'; did you mean 'spike_rank'"),
        ("optim_agrs: spike_rank=8", "Unknown arguments from config file: .*optim_agrs"),
    ],
    ids=["option", "key"],
)
def test_a_wrong_line_in_the_yaml_is_refused(folder, named, line, sentence):
    path = folder / "wrong.yaml"
    path.write_text((CONFIGS / "smollm2-135m_lora_scao.yaml").read_text() + line + "\n")
    with pytest.raises((UnknownOptionError, ValueError), match=sentence):
        parse(path)


def test_trl_itself_does_not_know_the_name(folder):
    """Why there is a script: ``trl sft`` says so before it loads anything."""
    with pytest.raises(ValueError, match="scao is not a valid OptimizerNames"):
        parse(CONFIGS / "smollm2-135m_lora_scao.yaml")
