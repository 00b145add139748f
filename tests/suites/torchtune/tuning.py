"""A small Llama that NF4 can hold, a tokenizer of bytes, and torchtune's own command line, run in this process."""

import json
import os
import runpy
import sys
from pathlib import Path

import torch
import torchtune
from safetensors.torch import save_file

MATERIAL = Path(os.environ["SCAO_MATERIAL"])
PACKAGE = Path(torchtune.__file__).parent
STOCK = PACKAGE.parent / "recipes" / "configs"
SCAO_CHOSEN = "optimizer._component_=scao.SCAO"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BUILDER = "torchtune.models.llama3_2.llama3_2"
LORA_BUILDER = "torchtune.models.llama3_2.lora_llama3_2"
# NF4 takes weights whose number of elements is a multiple of 64 * 256.
EMBED, KV, INNER = 256, 128, 512
SIZES = {
    "vocab_size": 272,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": EMBED,
    "max_seq_len": 96,
    "intermediate_dim": INNER,
}


def write_model(folder):
    """The model as Hugging Face writes a Llama: random weights, one file, tied embeddings."""
    shapes = {"self_attn.q_proj": (EMBED, EMBED), "self_attn.k_proj": (KV, EMBED), "self_attn.v_proj": (KV, EMBED)}
    shapes |= {"self_attn.o_proj": (EMBED, EMBED), "mlp.down_proj": (EMBED, INNER)}
    shapes |= {"mlp.gate_proj": (INNER, EMBED), "mlp.up_proj": (INNER, EMBED)}
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.norm.weight": torch.ones(EMBED)}
    tensors["model.embed_tokens.weight"] = 0.05 * torch.randn(SIZES["vocab_size"], EMBED, generator=generator)
    for layer in range(SIZES["num_layers"]):
        place = f"model.layers.{layer}."
        tensors |= {f"{place}{name}_layernorm.weight": torch.ones(EMBED) for name in ("input", "post_attention")}
        for name, shape in shapes.items():
            tensors[f"{place}{name}.weight"] = 0.05 * torch.randn(*shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"hidden_size": EMBED, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 272}
    (folder / "config.json").write_text(json.dumps(config))


def write_tokenizer(folder):
    """A byte a token: what torchtune's tokenizer of Qwen reads, without merges."""
    from torchtune.models.qwen2._tokenizer import bytes_to_unicode

    (folder / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(bytes_to_unicode().values())}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    added = [{"id": 256 + i, "content": token} for i, token in enumerate(SPECIAL)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))


def replaced(model, out, builder=LORA_BUILDER, **changes):
    """What has to change in a stock config: model, tokenizer and data are local and small, and there is no GPU."""
    settings = {
        "model": builder,
        **{f"model.{name}": value for name, value in SIZES.items()},
        "tokenizer": "torchtune.models.qwen2.qwen2_tokenizer",
        "tokenizer.path": model / "vocab.json",
        "tokenizer.merges_file": model / "merges.txt",
        "tokenizer.special_tokens_path": model / "tokenizer.json",
        "tokenizer.max_seq_len": 96,
        "checkpointer.checkpoint_dir": model,
        "checkpointer.checkpoint_files": "[model.safetensors]",
        "dataset.source": "json",
        "dataset.data_files": MATERIAL / "alpaca.json",
        "output_dir": out,
        "metric_logger.filename": f"log_{len(logs(out))}.txt",  # its own name is the second of the start: two runs share it
        "device": "cpu",
        "dtype": "fp32",
        "seed": 1,
        "batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps_per_epoch": 3,
        "epochs": 1,
        "log_peak_memory_stats": False,
        **changes,
    }
    return [f"{name}={value}" for name, value in settings.items()]


def lora(model, out, *further, config="llama3_2/1B_lora_single_device", **changes):
    """``tune run lora_finetune_single_device`` on a stock config with SCAO."""
    changes = {"model.lora_rank": 4, "lr_scheduler.num_warmup_steps": 2, "save_adapter_weights_only": True, **changes}
    arguments = replaced(model, out, **changes)
    tune("run", "lora_finetune_single_device", "--config", config, SCAO_CHOSEN, *arguments, *further)


def full(model, out, *further, config="llama3_2/1B_full_single_device", **changes):
    """``tune run full_finetune_single_device`` on a stock config with SCAO."""
    arguments = replaced(model, out, BUILDER, **changes)
    tune("run", "full_finetune_single_device", "--config", config, SCAO_CHOSEN, *arguments, *further)


def tune(*arguments):
    """``tune ...`` as its console script does it, in this process: importing torchtune takes longer than the runs."""
    before = sys.argv
    sys.argv = ["tune", *map(str, arguments)]
    try:
        runpy.run_path(str(PACKAGE / "_cli" / "tune.py"), run_name="__main__")
    except SystemExit as end:  # a recipe ends so
        if end.code:
            raise
    finally:
        sys.argv = before


def logs(out):
    """The logs that runs left there, the oldest first."""
    return sorted((out / "logs").glob("log_*.txt"), key=lambda path: path.stat().st_mtime_ns)


def losses(out):
    """The losses of the last run there."""
    lines = logs(out)[-1].read_text().splitlines()
    return [float(line.split("loss:")[1].split()[0]) for line in lines if "loss:" in line]


def weights(path):
    """The tensors of a file that torchtune wrote."""
    from torchtune.training.checkpointing._utils import safe_torch_load

    return safe_torch_load(path)


def recipe_state(out):
    """What torchtune keeps of the last epoch but the last, for a resume."""
    return torch.load(out / "recipe_state" / "recipe_state.pt", weights_only=True)
