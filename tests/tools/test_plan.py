"""``scao plan``: shapes as the models have them, bytes as the optimizer allocates them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scao import SCAO
from scao_tools import shapes
from scao_tools.cli import build_app, run
from scao_tools.planning import memory

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def built(model: shapes.Decoder) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        head_dim=model.head_dim,
        tie_word_embeddings=model.tied,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("name", sorted(shapes.KNOWN))
def test_shapes_are_those_of_the_library(name: str) -> None:
    model = shapes.KNOWN[name]
    real = built(model)
    assert sorted(model.whole()) == sorted(tuple(p.shape) for p in real.parameters())
    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        adapted = peft.get_peft_model(real, config)
    wanted = [tuple(p.shape) for n, p in adapted.named_parameters() if "lora_" in n]
    assert sorted(model.lora(16)) == sorted(wanted)


@pytest.mark.parametrize("full", [False, True])
def test_bytes_are_those_that_the_optimizer_allocates(full: bool) -> None:
    model = shapes.Decoder(64, 2, 4, 2, 16, 96, 300, True)
    planned = memory(model, 8, 4, full, torch.float32, {"momentum_dtype": "bfloat16"})
    params = [torch.nn.Parameter(torch.zeros(s)) for s in (model.whole() if full else model.lora(8))]
    optimizer = SCAO(params, lr=1e-3, momentum_dtype="bfloat16")
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    assert planned.scao == optimizer.precond_stats()["state_bytes"]
    assert planned.trained == sum(p.numel() for p in params)
    assert planned.adamw == 8 * planned.trained


def test_budgets_split_the_state_as_the_optimizer_does(tmp_path: Path) -> None:
    model = shapes.Decoder(96, 2, 4, 2, 24, 160, 300, True)
    budgets = {
        "memory_budget": "100KiB",
        "host_budget": "200KiB",
        "offload_dir": str(tmp_path / "new"),
        "max_dense_dim": "64",
    }
    planned = memory(model, 8, 4, True, torch.float32, budgets)
    assert not (tmp_path / "new").exists()
    params = [torch.nn.Parameter(torch.zeros(s)) for s in model.whole()]
    optimizer = SCAO(params, lr=1e-3, **budgets)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    assert planned.tiers == optimizer.report().last.tiers
    assert 0 < planned.tiers["host"] <= 200 * 1024
    assert planned.tiers["nvme"] > 0
    assert planned.scao == sum(planned.tiers.values())
    assert "in the file of offload_dir" in planned.sentence()


def test_a_folder_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    assert run(build_app(), ["plan", str(tmp_path), "--rank", "4"]) == 0
    assert "4 x 64 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([""], "the model's name is empty"),
        (["./nothing"], "./nothing holds no config.json"),
        (["qwen2.5-3b", "--bits", "8"], "--bits must be 4 (NF4) or 16, got 8"),
        (["qwen2.5-3b", "--rank", "0"], "--rank must be at least 1, got 0"),
        (["qwen2.5-3b", "--dtype", "int8"], "--dtype must be fp32, bf16, fp16, got 'int8'"),
        (["qwen2.5-3b", "--set", "spike_rnak=4"], "spike_rank"),
        (["qwen2.5-3b", "--set", "spike_rank"], "expected name=value"),
    ],
)
def test_wrong_input_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert run(build_app(), ["plan", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert sentence in line
