"""``report.md`` and what is printed at the end of a demo run, both made from the files of the run alone."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from scao_tools.checkpointing import write_text_atomically
from scao_tools.console import Screen
from scao_tools.demo.config import RunConfig
from scao_tools.demo.outputs import RunFiles, read_json
from scao_tools.metrics import read_metrics
from scao_tools.plotting import plot_losses
from scao_tools.reporting import HEADER, SHORT_HEADER, OptimizerRecord, collect, markdown_table, table_rows, verdict


@dataclass(frozen=True)
class RunRecord:
    """All that is known about a run."""

    config: RunConfig
    files: RunFiles
    base: dict[str, Any] | None
    optimizers: list[OptimizerRecord]

    @property
    def finished(self) -> bool:
        """Whether every optimizer is done."""
        return self.files.finished()

    @property
    def label_tokens(self) -> list[int]:
        """Answer tokens of each held-out example."""
        return list(self.base["example_label_tokens"]) if self.base else []


def load_record(files: RunFiles) -> RunRecord:
    """Read a run, finished or not."""
    config = RunConfig.load(files.config)
    lines = read_metrics(files.metrics)
    records = []
    for name in config.options.optimizers:
        record = collect(name, config.options.steps, lines)
        result = read_json(files.result(name))
        record.sample = result["sample"] if result else None
        records.append(record)
    return RunRecord(config, files, read_json(files.base), records)


def resume_command(files: RunFiles) -> str:
    """What to type to continue a run."""
    return shlex.join(["scao", "demo", "--resume", "--out", str(files.root)])


def publish(files: RunFiles, screen: Screen) -> None:
    """Write the report and the picture, and print the table and the verdict."""
    record = load_record(files)
    title = f"{record.config.options.model}, {_method(record.config)}, held-out and training loss"
    plot_losses(record.optimizers, title, files.plot)
    write_text_atomically(files.report, report_text(record))
    show(record, screen)


def show(record: RunRecord, screen: Screen) -> None:
    """Print the table, the verdict, the samples, and where the files are."""
    table = Table(title="Held-out loss before and after, speed, memory")
    for index, name in enumerate(SHORT_HEADER):
        table.add_column(name, justify="right" if index else "left")
    for row in table_rows(record.optimizers):
        table.add_row(*row)
    screen.console.print(table)
    for sentence in verdict(record.optimizers, record.label_tokens):
        screen.say(sentence)
    if record.base:
        screen.say(f"\nSample, a held-out prompt:\n{record.base['sample']['prompt']}")
        screen.say(f"\nBefore training:\n{record.base['sample']['text']}")
        for item in record.optimizers:
            if item.sample is not None:
                screen.say(f"\nAfter {item.label}:\n{item.sample}")
    screen.say(f"\nReport: {record.files.report}   Curves: {record.files.plot}   Steps: {record.files.metrics}")


def report_text(record: RunRecord) -> str:
    """The whole ``report.md``."""
    options = record.config.options
    parts = ["# SCAO demo: held-out loss of a fine-tuned model, by optimizer", ""]
    if not record.finished:
        parts += [f"**This run is not finished.** Continue it with `{resume_command(record.files)}`.", ""]
    parts += verdict(record.optimizers, record.label_tokens)
    parts += ["", markdown_table(HEADER, table_rows(record.optimizers)), ""]
    parts += [
        "Losses are nats per answer token. The optimizer step is the time in `step()` alone, the mean over all steps; "
        "steps/s leaves evaluations and checkpoints out. MB is 10⁶ bytes. Peak memory is "
        + ("what the GPU allocated" if record.config.device == "cuda" else "the resident size of the whole process")
        + " during the optimizer's phase.",
        "",
        f"![Loss curves]({record.files.plot.name})",
        "",
        "## What was run",
        "",
        *_setup_lines(record),
        "",
        *_sample_lines(record),
        "## Reproduce",
        "",
        f"    {record.config.command}",
        "",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in record.config.versions.items()) + ".",
        f"The adapters are in `{options.optimizers[0]}/adapter` and so on; load one with `PeftModel.from_pretrained`.",
        "Every step is a line of `metrics.jsonl`.",
    ]
    return "\n".join(parts) + "\n"


def _method(config: RunConfig) -> str:
    return "QLoRA (4-bit NF4)" if config.options.bits == 4 else "LoRA"


def _setup_lines(record: RunRecord) -> list[str]:
    config, options = record.config, record.config.options
    lines = [
        f"- Model: {options.model}, {_method(config)}, rank 16, alpha 32, all linear layers; adapters in fp32, "
        f"matrix products in {config.dtype} on {config.device}.",
        f"- Data: {config.data_description}.",
        f"- Training: {options.steps} steps of {options.batch_size} examples{_label_note(record)}, peak learning rate "
        f"{options.lr:g} for every optimizer, linear warmup over 6 % of the steps, linear decay, gradients clipped at "
        "norm 1, no weight decay; loss on answer tokens only.",
        f"- One seed ({options.seed}): same initial adapters, same batches in the same order, same schedule.",
    ]
    if options.bits == 4 and config.device == "cpu":
        lines.append(
            "- On this CPU the base weights were rounded to NF4 by bitsandbytes and dequantized once, not in every "
            "product: the same values as QLoRA, faster, without its memory saving."
        )
    return lines


def _label_note(record: RunRecord) -> str:
    labels = [line["label_tokens"] for line in read_metrics(record.files.metrics) if line["event"] == "train"]
    return f" (about {sum(labels) / len(labels):.0f} answer tokens)" if labels else ""


def _sample_lines(record: RunRecord) -> list[str]:
    if record.base is None:
        return []
    sample = record.base["sample"]
    lines = ["## A sample from a held-out prompt (greedy)", "", "Prompt:", "", *_quote(sample["prompt"])]
    lines += ["Reference answer:", "", *_quote(sample["reference"]), "Before training:", "", *_quote(sample["text"])]
    for item in record.optimizers:
        if item.sample is not None:
            lines += [f"After {item.label}:", "", *_quote(item.sample)]
    return lines


def _quote(text: str) -> list[str]:
    # Indented code: a sample may itself contain code fences.
    return ["    " + line for line in text.splitlines() or [""]] + [""]
