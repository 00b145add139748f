"""The matrices of a language model, from its configuration alone: what LoRA adds to them, and what all of it weighs.

Weights of the base in NF4 take half a byte, one byte of scale a block of 64, and a float a 256 of those (Dettmers et al.
2023, "QLoRA", double quantization); embeddings, norms and an output head of its own stay in 16 bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scao_tools.errors import ModelError

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class Decoder:
    """A Llama-like decoder. The numbers of `KNOWN` are those of the models' config.json."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each linear layer of one block; "all-linear" in LoRA."""
        query, value = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        return {
            "q_proj": (query, self.hidden),
            "k_proj": (value, self.hidden),
            "v_proj": (value, self.hidden),
            "o_proj": (self.hidden, query),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }

    def lora(self, rank: int) -> list[tuple[int, int]]:
        """The shapes of all A (rank × in) and B (out × rank)."""
        pairs = [((rank, fan_in), (out, rank)) for out, fan_in in self.linear.values()]
        return [shape for pair in pairs for shape in pair] * self.layers

    def whole(self) -> list[tuple[int, ...]]:
        """The shapes of all parameters, for a full fine-tune: two norms a block and one at the end."""
        block: list[tuple[int, ...]] = [*self.linear.values(), (self.hidden,), (self.hidden,)]
        tables = [(self.vocabulary, self.hidden)] * (1 if self.tied else 2)
        return block * self.layers + [*tables, (self.hidden,)]

    def weight_bytes(self, bits: int) -> float:
        """The frozen base: its linear layers in NF4 for ``bits=4``, all else in 16 bits."""
        inner = sum(out * fan_in for out, fan_in in self.linear.values()) * self.layers
        outer = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden * (2 * self.layers + 1)
        return inner * (NF4_BYTES if bits == 4 else 2) + outer * 2


KNOWN = {
    "smollm2-135m": Decoder(576, 30, 9, 3, 64, 1536, 49152, True),
    "qwen2.5-0.5b": Decoder(896, 24, 14, 2, 64, 4864, 151936, True),
    "qwen2.5-3b": Decoder(2048, 36, 16, 2, 128, 11008, 151936, True),
    "qwen3-4b": Decoder(2560, 36, 32, 8, 128, 9728, 151936, True),
    "llama3.1-8b": Decoder(4096, 32, 32, 8, 128, 14336, 128256, False),
}


def decoder(name: str) -> Decoder:
    """A known model by its name, or one by its folder (config.json) or by a name on the Hugging Face hub.

    Raises:
        ModelError: there is no such model, or it is not a Llama-like decoder.
    """
    if name.lower() in KNOWN:
        return KNOWN[name.lower()]
    known = ", ".join(KNOWN)
    if not name.strip():
        raise ModelError(f"the model's name is empty; give a model's folder, a name on the hub, or one of {known}")
    if name.startswith((".", "/", "~")) and not (Path(name).expanduser() / "config.json").is_file():
        raise ModelError(f"{name} holds no config.json; give a model's folder, a name on the hub, or one of {known}")
    from scao_tools.requirements import require

    require(("transformers",), "demo", f"reading the configuration of {name}")
    transformers: Any = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(str(Path(name).expanduser()))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelError(
            f"{name} cannot be read ({reason}); give a folder, a name on the hub, or one of {known}"
        ) from error
    return _from_config(name, config.to_dict())


def _from_config(name: str, config: Mapping[str, Any]) -> Decoder:
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    config = config.get("text_config") or config
    if missing := [key for key in needed if not isinstance(config.get(key), int)]:
        raise ModelError(f"{name} is not a Llama-like decoder: its configuration has no {', '.join(missing)}")
    hidden, layers, heads, intermediate, vocabulary = (int(config[key]) for key in needed)
    key_value = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    return Decoder(
        hidden, layers, heads, key_value, head_dim, intermediate, vocabulary, bool(config.get("tie_word_embeddings"))
    )
