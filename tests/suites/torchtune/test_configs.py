"""The recipes in configs/torchtune: torchtune finds them well-formed, a twin differs in its optimizer, the small ones run."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from torchtune import config
from torchtune.modules.peft import LoRALinear

from scao import SCAO
from suites.recipes import assert_header, names, twin
from suites.torchtune import tuning
from suites.torchtune.tuning import MATERIAL, losses, tune, weights

CONFIGS = Path(tuning.__file__).parents[3] / "configs" / "torchtune"
SCAO_CONFIGS = sorted(CONFIGS.glob("*_scao.yaml"))
BOTH = sorted(CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("path", BOTH, ids=names(BOTH))
def test_torchtune_finds_it_well_formed(path, capsys):
    tune("validate", path)
    assert "Config is well-formed!" in capsys.readouterr().out
    loaded = OmegaConf.load(path)
    optimizer = config.instantiate(loaded.optimizer, [torch.nn.Parameter(torch.zeros(4, 4))])
    assert isinstance(optimizer, SCAO) == path.stem.endswith("_scao")
    assert isinstance(loaded.optimizer.lr, float)


@pytest.mark.parametrize("path", SCAO_CONFIGS, ids=names(SCAO_CONFIGS))
def test_its_model_is_built_by_those_arguments(path):
    loaded = OmegaConf.load(path).model
    quantized = loaded.pop("quantize_base", False)
    with torch.device("meta"):
        model = config.instantiate(loaded)
    adapted = [module for module in model.modules() if isinstance(module, LoRALinear)]
    assert bool(adapted) == ("lora" in path.stem)
    assert quantized == ("qlora" in path.stem)
    # what NF4 asks of a weight; quantizing here takes longer than all the rest
    assert all(module.weight.numel() % (64 * 256) == 0 for module in adapted if quantized)


@pytest.mark.parametrize("path", SCAO_CONFIGS, ids=names(SCAO_CONFIGS))
def test_the_twin_differs_in_its_optimizer_alone(path):
    ours, theirs = OmegaConf.load(path), OmegaConf.load(twin(path))
    assert theirs.optimizer["_component_"] == "torch.optim.AdamW"
    assert (ours.optimizer.lr, ours.optimizer.weight_decay) == (theirs.optimizer.lr, theirs.optimizer.weight_decay)
    del ours["optimizer"], theirs["optimizer"]
    assert ours == theirs


@pytest.mark.parametrize("path", BOTH, ids=names(BOTH))
def test_its_header_says_how_to_run_it(path):
    assert_header(path, "output_dir", f"--config {path.name}")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the headers say to write, and where they say to be."""
    model = tmp_path / "smollm2"
    model.mkdir()
    for file in (MATERIAL / "smollm2").iterdir():
        if file.suffix == ".safetensors":
            (model / file.name).symlink_to(file)
        else:
            shutil.copy(file, model)
    (tmp_path / "data").mkdir()
    shutil.copy(MATERIAL / "alpaca.json", tmp_path / "data")
    Tokenizer.from_file(str(model / "tokenizer.json")).model.save(str(model))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_smollm2_is_the_model_that_transformers_knows(folder):
    """Built from torchtune's parts as the recipe says, it computes what transformers' own class computes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = OmegaConf.load(CONFIGS / "smollm2-135m_full_scao.yaml")
    text = "def area(radius):\n    return 3 * radius ** 2"
    ours, theirs = config.instantiate(loaded.tokenizer), AutoTokenizer.from_pretrained("smollm2")
    words = "Return the area of a circle."
    assert ours.encode(words, add_bos=False, add_eos=False) == theirs(words)["input_ids"]
    assert ours.eos_id == theirs.eos_token_id
    ids = torch.tensor([ours.encode(text, add_bos=False, add_eos=False)])
    model = config.instantiate(loaded.model)
    loaded.checkpointer.output_dir = "out"
    checkpoint = config.instantiate(loaded.checkpointer).load_checkpoint()
    model.load_state_dict(checkpoint["model"])
    with torch.no_grad():
        got = model(ids)
        wanted = AutoModelForCausalLM.from_pretrained("smollm2", dtype=torch.float32)(ids).logits
    assert (got - wanted).abs().max() <= 1e-3 * wanted.abs().max()  # in fp32: they differ in the order of sums


@pytest.mark.parametrize("name", ["lora", "full"])
def test_the_offline_recipes_run_shortened(folder, steps, name):
    recipe = f"{name}_finetune_single_device"
    path = CONFIGS / f"smollm2-135m_{name}_scao.yaml"
    tune("run", recipe, "--config", path, "max_steps_per_epoch=1", "tokenizer.max_seq_len=16", "batch_size=1")
    (optimizer,) = set(steps.optimizers)
    assert type(optimizer) is SCAO
    assert optimizer.report().matrices == (420 if name == "lora" else 210)
    out = folder / "out" / f"smollm2-135m_{name}" / "scao.SCAO"
    assert all(map(math.isfinite, losses(out)))
    saved = next((out / "epoch_0").glob("*.safetensors"))
    assert weights(saved)
