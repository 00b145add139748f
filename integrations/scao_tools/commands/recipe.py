"""``scao recipe``: the configurations of the frameworks, each beside its AdamW twin, from the installed package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Recipes for Axolotl, LLaMA-Factory, torchtune, TRL and LitGPT, each beside its AdamW twin.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
def list_recipes(
    framework: Annotated[str | None, typer.Argument(help="Only those of one framework.")] = None,
) -> None:
    """Name every recipe, with its first line."""
    from scao_tools.recipes import select

    rows = [(recipe.name, (recipe.header or [""])[0]) for recipe in select(framework)]
    width = max((len(name) for name, _ in rows), default=0)
    for name, about in rows:
        typer.echo(f"{name:<{width}}  {about}")


@app.command()
def show(name: Annotated[str, typer.Argument(help="E.g. axolotl/qwen2.5-3b_qlora_scao.")]) -> None:
    """Print a recipe."""
    from scao_tools.recipes import find_recipe

    typer.echo(find_recipe(name).text(), nl=False)


@app.command()
def copy(
    *,
    name: Annotated[str, typer.Argument(help="E.g. axolotl/qwen2.5-3b_qlora_scao.")],
    folder: Annotated[Path, typer.Argument(help="Where to.")] = Path(),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Write a recipe, its twin and what they need beside them."""
    from scao_tools.recipes import copy_recipe, find_recipe

    for path in copy_recipe(find_recipe(name), folder, overwrite):
        typer.echo(path)


@app.command()
def material(
    folder: Annotated[Path, typer.Argument(help="Where to.")] = Path(),
) -> None:
    """Write SmolLM2-135M and small data sets, so that the recipes marked offline run without a download."""
    from scao_tools.environment import prepare_environment
    from scao_tools.requirements import DEMO_MODULES, require

    require(DEMO_MODULES, "demo", "scao recipe material")
    prepare_environment()
    from scao_tools.material import write_material

    for path in write_material(folder):
        typer.echo(path)
