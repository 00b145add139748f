"""What the suites train on, written once: SmolLM2-135M with data (as ``scao recipe material`` writes them), and a small model.

``small/`` is a Llama of 3.6 M random parameters with the same tokenizer, for what does not depend on a trained model. The data
lie beside the models.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_FORM = "2"  # changes when what is written changes


def made(place: Path) -> Path:
    """The folder with all of it, written if it is not there."""
    place = place / _FORM
    if not (place / "complete").exists():
        from scao_tools.material import MODEL, write_data, write_model

        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        write_model(place / MODEL)
        write_data(place)
        _write_small(place / MODEL, place / "small")
        (place / "complete").touch()
    return place


def _write_small(like: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from scao_tools.material import save

    config, tokenizer = AutoConfig.from_pretrained(like), AutoTokenizer.from_pretrained(like)
    torch.manual_seed(0)
    small = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    save(LlamaForCausalLM(small).to(torch.bfloat16), tokenizer, folder)
