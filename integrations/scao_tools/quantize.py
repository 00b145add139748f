"""NF4 base weights with bitsandbytes: real 4-bit layers on a GPU, their dequantized values on a CPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from scao_tools.models import linear_layers


def quantize_base(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Give every adapted linear layer NF4 weights (double quantization, as in QLoRA) and move the model to ``device``.

    bitsandbytes dequantizes a weight again in each forward and backward pass. On a CPU that costs from a tenth of a
    step (fp32) to more than the products themselves (chips with bf16 units), so there the weights are dequantized once
    and kept: the values are those of QLoRA, the memory is that of LoRA.
    """
    if device.type == "cpu":
        return _round_to_nf4(model).to(device)
    return _replace_with_4bit(model, dtype).to(device)


def _round_to_nf4(model: Any) -> Any:
    from bitsandbytes import functional

    for name in linear_layers(model):
        layer = model.get_submodule(name)
        codes, state = functional.quantize_4bit(_out_by_in(layer), quant_type="nf4", compress_statistics=True)
        values = functional.dequantize_4bit(codes, state).to(layer.weight.dtype)
        layer.weight.data = values if isinstance(layer, torch.nn.Linear) else values.T.contiguous()
    return model


def _out_by_in(layer: Any) -> torch.Tensor:
    # GPT-2's Conv1D stores its weight transposed; scales are shared along rows, so the layout changes the values.
    weight: torch.Tensor = layer.weight.data
    return weight.contiguous() if isinstance(layer, torch.nn.Linear) else weight.T.contiguous()


def _replace_with_4bit(model: Any, dtype: torch.dtype) -> Any:
    layers: Any = importlib.import_module("bitsandbytes.nn")
    for name in linear_layers(model):
        old = model.get_submodule(name)
        weight = _out_by_in(old)
        new = layers.Linear4bit(
            weight.shape[1],
            weight.shape[0],
            bias=old.bias is not None,
            compute_dtype=dtype,
            compress_statistics=True,
            quant_type="nf4",
        )
        new.weight = layers.Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4")
        if old.bias is not None:
            new.bias = torch.nn.Parameter(old.bias.data, requires_grad=False)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    # PEFT picks its 4-bit layer by this mark, which transformers sets when it quantizes by itself.
    model.is_loaded_in_4bit = True
    return model
