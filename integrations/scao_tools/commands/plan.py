"""``scao plan``: what a fine-tune will keep in memory."""

from __future__ import annotations

from typing import Annotated

import typer

_DTYPES = ("fp32", "bf16", "fp16")


def plan(
    *,
    model: Annotated[
        str,
        typer.Argument(
            help="smollm2-135m, qwen2.5-0.5b, qwen2.5-3b, qwen3-4b, llama3.1-8b, a model's folder, or a name on the Hub."
        ),
    ] = "qwen2.5-3b",
    rank: Annotated[int, typer.Option(help="Rank of LoRA on all linear layers.")] = 16,
    bits: Annotated[int, typer.Option(help="Base weights: 4 (NF4, QLoRA) or 16.")] = 4,
    full: Annotated[bool, typer.Option("--full", help="Train the model itself.")] = False,
    dtype: Annotated[str, typer.Option(help="Of what is trained: fp32, bf16 or fp16.")] = "fp32",
    options: Annotated[
        list[str] | None, typer.Option("--set", help="An option of SCAO, e.g. momentum_dtype=bfloat16.")
    ] = None,
) -> None:
    """Show what a fine-tune keeps in memory: weights, gradients, and the optimizer's state by matrix, exactly."""
    from scao_tools.errors import OptionError

    if bits not in (4, 16):
        raise OptionError(f"--bits must be 4 (NF4) or 16, got {bits}")
    if rank < 1:
        raise OptionError(f"--rank must be at least 1, got {rank}")
    if dtype not in _DTYPES:
        raise OptionError(f"--dtype must be {', '.join(_DTYPES)}, got {dtype!r}")
    given = [item.partition("=") for item in options or []]
    if bad := [name for name, equals, _ in given if not equals]:
        raise OptionError(f"--set {bad[0]}: expected name=value, e.g. momentum_dtype=bfloat16")
    _show(model, rank, bits, full, dtype, {name.strip(): value for name, _, value in given})


def _show(model: str, rank: int, bits: int, full: bool, dtype: str, options: dict[str, str]) -> None:
    import torch

    from scao_core import ConfigError
    from scao_tools.errors import OptionError
    from scao_tools.planning import memory
    from scao_tools.shapes import decoder

    shapes = decoder(model)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    try:
        result = memory(shapes, rank, bits, full, kind, options)
    except ConfigError as error:
        raise OptionError(f"--set: {error}") from error
    method = "full fine-tune" if full else f"LoRA r={rank} on all linear layers, base in {bits} bits"
    typer.echo(f"{model}, {method}: {result.trained:,} trained parameters in {dtype}\n")
    typer.echo(f"{'matrices':>9}  {'shape':<16}{'factors of SCAO':<44}{'bytes/param':>11}")
    for group in result.groups:
        shape, numel = " x ".join(map(str, group.shape)), torch.Size(group.shape).numel()
        typer.echo(f"{group.count:>9}  {shape:<16}{group.factors:<44}{group.bytes / numel:>11.2f}")
    typer.echo(
        f"\nstate: SCAO {result.scao / result.trained:.2f} bytes a parameter, AdamW {result.adamw / result.trained:.2f}"
    )
    typer.echo(result.sentence())
