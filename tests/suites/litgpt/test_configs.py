"""The recipes in configs/litgpt: LitGPT's own parser takes them, a twin differs in its optimizer, a small one runs."""

import functools
import math
from pathlib import Path

import litgpt.__main__ as cli
import pytest
import torch
import yaml
from litgpt.args import EvalArgs, TrainArgs
from litgpt.utils import instantiate_torch_optimizer

from scao import SCAO
from suites.litgpt import tuning
from suites.litgpt.tuning import MATERIAL, litgpt, losses
from suites.recipes import assert_header, names, twin

CONFIGS = Path(tuning.__file__).parents[3] / "configs" / "litgpt"
BOTH = sorted(CONFIGS.glob("*.yaml"))
SCAO_CONFIGS = sorted(CONFIGS.glob("*_scao.yaml"))


def command(path):
    return "finetune_full" if "_full_" in path.name else "finetune_lora"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the headers say to write, and where they say to be."""
    (tmp_path / "smollm2").mkdir()
    for file in (MATERIAL / "smollm2").iterdir():
        (tmp_path / "smollm2" / file.name).symlink_to(file)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "alpaca.json").symlink_to(MATERIAL / "alpaca.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", BOTH, ids=names(BOTH))
def test_litgpts_parser_takes_every_key(folder, monkeypatch, path):
    """The command line is parsed as always, into what the command would get."""
    got = {}
    before = cli.PARSER_DATA[command(path)]
    stub = functools.wraps(before)(lambda **arguments: got.update(arguments))
    monkeypatch.setitem(cli.PARSER_DATA, command(path), stub)
    litgpt(command(path), "--config", path, "--out_dir", "out")
    assert isinstance(got["train"], TrainArgs)
    assert isinstance(got["eval"], EvalArgs)
    assert str(got["data"].json_path) == "data/alpaca.json"
    optimizer = instantiate_torch_optimizer(got["optimizer"], [torch.nn.Parameter(torch.zeros(4, 4))])
    assert isinstance(optimizer, SCAO) == path.stem.endswith("_scao")
    assert isinstance(got["optimizer"]["init_args"]["lr"], float)


@pytest.mark.parametrize("path", SCAO_CONFIGS, ids=names(SCAO_CONFIGS))
def test_the_twin_differs_in_its_optimizer_alone(path):
    ours, theirs = yaml.safe_load(path.read_text()), yaml.safe_load(twin(path).read_text())
    assert ours["optimizer"].pop("class_path") == "scao.SCAO"
    assert theirs["optimizer"].pop("class_path") == "torch.optim.AdamW"
    half = ours["precision"] == "bf16-true"
    assert ours["optimizer"]["init_args"].pop("momentum_dtype", None) == ("bfloat16" if half else None)
    assert ours == theirs


@pytest.mark.parametrize("path", BOTH, ids=names(BOTH))
def test_its_header_says_how_to_run_it(path):
    assert_header(path, "checkpoint_dir", f"litgpt {command(path)} --config {path.name} --out_dir out/{path.stem}")


def test_an_unknown_key_is_litgpts_own_error(folder, capsys):
    path = folder / "wrong.yaml"
    path.write_text((CONFIGS / "smollm2-135m_lora_scao.yaml").read_text() + "optimiser: scao.SCAO\n")
    with pytest.raises(SystemExit):
        litgpt("finetune_lora", "--config", path)
    assert "optimiser" in capsys.readouterr().err


def test_the_offline_recipe_runs_shortened(folder, steps):
    """A real model, by LitGPT's own converter: its first loss is that of a model that knows the language."""
    litgpt("convert_to_litgpt", "./smollm2", "--model_name", "SmolLM2-135M-Instruct")
    path = CONFIGS / "smollm2-135m_lora_scao.yaml"
    short = ("--train.max_steps", 2, "--train.lr_warmup_steps", 1, "--train.max_seq_length", 24)
    litgpt("finetune_lora", "--config", path, "--out_dir", "out", *short)
    (optimizer,) = set(steps.optimizers)
    assert type(optimizer) is SCAO
    assert optimizer.report().matrices == 30 * 2 * 5  # layers, A and B, attention's two and the three of the MLP
    assert steps.rates == [0.0, 2e-4]
    assert losses(Path("out"))[0] < 6.0  # an untrained one has ln 49152 = 10.8
    assert all(map(math.isfinite, losses(Path("out"))))
    saved = torch.load("out/final/lit_model.pth.lora", weights_only=True)["model"]
    assert any(value.abs().max() > 0 for name, value in saved.items() if "lora_B" in name)
