"""Each recipe through LLaMA-Factory's own parser, with its twin; the one for CPUs is run."""

import math

import pytest
import torch
import yaml
from llamafactory.data.template import TEMPLATES
from llamafactory.hparams import get_train_args
from llamafactory.webui import manager
from llamafactory.webui.interface import create_ui

from scao_integrations import llamafactory_hook as door
from suites.llamafactory.running import RECIPES, losses, ran

FILES = sorted(path.name for path in RECIPES.glob("*.yaml"))
OURS = {"optim", "optim_args", "output_dir"}  # a twin in the same folder would resume from SCAO's checkpoint


def read(name):
    return yaml.safe_load((RECIPES / name).read_text())


@pytest.mark.parametrize("name", FILES)
def test_the_parser_takes_every_key_and_the_header_names_the_twin(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    head, given = (RECIPES / name).read_text().splitlines()[:6], read(name)
    twin = name.replace("scao", "TWIN").replace("adamw", "scao").replace("TWIN", "adamw")
    assert head[0].startswith("# SCAO on " if "scao" in name else "# AdamW on ")
    assert head[1].endswith(f"train {name}")
    assert head[2].startswith("# Memory: ")
    assert head[4].startswith("# Run: ")
    assert head[5] == f"# Twin: {twin}"
    assert twin in FILES
    assert {k: v for k, v in given.items() if k not in OURS} == {k: v for k, v in read(twin).items() if k not in OURS}
    assert all(type(given[key]) is float for key in ("learning_rate", "num_train_epochs"))
    assert given["template"] in TEMPLATES
    on_cpu = {"use_cpu": True, "output_dir": str(folder / "parsed")}  # bf16 on a GPU is asked of the GPU
    door.register()
    try:
        model, data, training, finetuning, _ = get_train_args({**given, **on_cpu})
    finally:
        door.unregister()
    assert training.optim == ("scao" if "scao" in name else "adamw_torch")
    assert training.learning_rate == given["learning_rate"]
    if "qlora" in name:
        assert (model.quantization_bit, finetuning.lora_rank, finetuning.lora_alpha) == (4, 16, 32)
    assert data.dataset == ["stdlib_docs"]


def test_the_recipe_for_cpus_trains_the_real_model(folder):
    (folder / "recipe.yaml").write_text((RECIPES / "smollm2-135m_lora_scao.yaml").read_text())
    short = ["max_steps=2", "save_steps=2", "cutoff_len=64", "gradient_accumulation_steps=1", "output_dir=recipe"]
    ran(folder, "scao-llamafactory", "train", "recipe.yaml", *short)
    found = losses(folder, "recipe")
    assert all(map(math.isfinite, found.values()))
    assert 1 < found[1] < 6  # a trained model: 10.8 is chance
    saved = torch.load(folder / "recipe" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert "refresh_every" in saved["param_groups"][0]
    assert len(saved["state"]) == 420  # two matrices for each of 7 linear layers in 30 blocks


@pytest.mark.parametrize("path", sorted((RECIPES / "llamaboard_config").glob("*.yaml")), ids=lambda p: p.name)
def test_the_webui_has_every_element_that_its_files_set(path, monkeypatch, folder):
    monkeypatch.chdir(folder)
    managers = []
    start = manager.Manager.__init__
    monkeypatch.setattr(manager.Manager, "__init__", lambda self: (start(self), managers.append(self))[0])
    create_ui()
    given = yaml.safe_load(path.read_text())
    for name, value in given.items():
        element = managers[0].get_elem_by_id(name)
        allowed = [choice[1] for choice in getattr(element, "choices", None) or []]
        assert not allowed or value in allowed or isinstance(value, list), name
