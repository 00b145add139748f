"""NF4 base weights with bitsandbytes: real 4-bit layers on a GPU, their dequantized values on a CPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from scao_tools.models import linear_layers


def quantize_base(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Give every adapted linear layer NF4 weights (double quantization, as in QLoRA) and move the model to ``device``.

    bitsandbytes dequantizes a weight again in each forward and backward pass. On a CPU that is most of the time, so
    there the weights are dequantized once and kept: the values, and so the losses, are those of QLoRA.
    """
    if device.type == "cpu":
        return _round_to_nf4(model).to(device)
    return _replace_with_4bit(model, dtype).to(device)


def _round_to_nf4(model: Any) -> Any:
    from bitsandbytes import functional

    for name in linear_layers(model):
        weight = model.get_submodule(name).weight
        codes, state = functional.quantize_4bit(weight.data.contiguous(), quant_type="nf4", compress_statistics=True)
        weight.data = functional.dequantize_4bit(codes, state).to(weight.dtype)
    return model


def _replace_with_4bit(model: Any, dtype: torch.dtype) -> Any:
    layers: Any = importlib.import_module("bitsandbytes.nn")
    for name in linear_layers(model):
        old = model.get_submodule(name)
        # GPT-2's Conv1D stores its weight transposed.
        weight = old.weight.data if isinstance(old, torch.nn.Linear) else old.weight.data.T.contiguous()
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
