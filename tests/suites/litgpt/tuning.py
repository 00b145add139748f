"""A small GPT as LitGPT keeps it, and LitGPT's own command line, run in this process."""

import csv
import os
import shutil
import sys
from pathlib import Path

import torch
from litgpt import GPT, Config
from litgpt.__main__ import main
from litgpt.utils import save_config

MATERIAL = Path(os.environ["SCAO_MATERIAL"])


def write_model(folder):
    """Random weights for the tokenizer of the material."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MATERIAL / "small" / name, folder)
    config = Config(
        name="small",
        block_size=128,
        vocab_size=49152,
        padded_vocab_size=49152,
        n_layer=2,
        n_head=4,
        n_embd=64,
        n_query_groups=2,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=128,
    )
    save_config(config, folder)
    torch.manual_seed(0)
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")


def settings(out, **changes):
    """The options that all runs here share, as text."""
    options = {
        "out_dir": out,
        "data": "JSON",
        "data.json_path": MATERIAL / "alpaca.json",
        "data.val_split_fraction": 0.1,
        "data.num_workers": 0,
        "precision": "32-true",
        "train.max_steps": 4,
        "train.global_batch_size": 4,
        "train.micro_batch_size": 2,
        "train.max_seq_length": 48,
        "train.lr_warmup_steps": 2,
        "train.save_interval": 2,
        "eval.max_iters": 1,
        "eval.max_new_tokens": 1,
        "eval.final_validation": "false",
        **changes,
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def litgpt(*arguments):
    """``litgpt ...`` as its console script does it, in this process: importing takes longer than the runs."""
    before = sys.argv
    sys.argv = ["litgpt", *map(str, arguments)]
    try:
        main()
    finally:
        sys.argv = before


def losses(out):
    """The training losses that LitGPT logged last."""
    last = max((out / "logs" / "csv").glob("version_*/metrics.csv"), key=lambda path: path.stat().st_mtime_ns)
    with last.open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
