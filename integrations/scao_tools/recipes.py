"""The files of ``configs/``, from the installed package or from a checkout: benchmark workloads, and recipes by framework."""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scao_tools.errors import MissingPackageError, OptionError, OutputError

_NAME = re.compile(r"(?P<base>.+_(?:qlora|lora|full|dpo))_(?P<optimizer>scao|adamw)\.(?:yaml|yml|py)")
_OTHER = {"scao": "adamw", "adamw": "scao"}


def config_folder() -> Path:
    """The folder that holds one sub-folder per framework, and ``bench``."""
    package = Path(__file__).parent
    for folder in (package / "_configs", package.parent.parent / "configs"):
        if folder.is_dir():
            return folder
    raise MissingPackageError("the installed scao holds no configs; run: pip install --force-reinstall scao")


@dataclass(frozen=True)
class Recipe:
    """``configs/<framework>/<model>_<method>_<optimizer>.yaml``."""

    framework: str
    path: Path
    optimizer: str

    @property
    def name(self) -> str:
        """``axolotl/qwen2.5-3b_qlora_scao``."""
        return f"{self.framework}/{self.path.stem}"

    @property
    def twin(self) -> Path:
        """The same run with the other optimizer."""
        return self.path.with_name(self.path.name.replace(f"_{self.optimizer}.", f"_{_OTHER[self.optimizer]}."))

    @property
    def header(self) -> list[str]:
        """The comment at its head, without the number signs."""
        lines: list[str] = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            lines.append(line.removeprefix("#").removeprefix(" "))
        return lines

    def text(self) -> str:
        """The file."""
        return self.path.read_text(encoding="utf-8")


def all_recipes() -> list[Recipe]:
    """Every recipe, by framework and name."""
    found = []
    for path in sorted(config_folder().glob("*/*")):
        if path.parent.name != "bench" and (match := _NAME.fullmatch(path.name)):
            found.append(Recipe(path.parent.name, path, match["optimizer"]))
    return found


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; the framework may be left out where one name is enough.

    Raises:
        OptionError: there is none, or there are several (the message names them, or the nearest).
    """
    wanted = re.sub(r"\.(yaml|yml|py)$", "", name.strip())
    everything = all_recipes()
    matching = [recipe for recipe in everything if wanted in (recipe.name, recipe.path.stem)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise OptionError(
            f"{name!r} is a recipe of several frameworks; say which: {', '.join(r.name for r in matching)}"
        )
    near = difflib.get_close_matches(wanted, [r.name for r in everything] + [r.path.stem for r in everything], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`scao recipe list` shows all"
    raise OptionError(f"there is no recipe {name!r}; {hint}")


def select(framework: str | None) -> list[Recipe]:
    """All recipes, or those of one framework.

    Raises:
        OptionError: no recipe is for this framework.
    """
    everything = all_recipes()
    frameworks = sorted({recipe.framework for recipe in everything})
    if framework is None:
        return everything
    if framework not in frameworks:
        raise OptionError(f"no recipes for {framework!r}; there are some for {', '.join(frameworks)}")
    return [recipe for recipe in everything if recipe.framework == framework]


def copy_recipe(recipe: Recipe, folder: Path, overwrite: bool) -> list[Path]:
    """Write a recipe, its twin, and what the framework's recipes need beside them, and return what was written.

    Raises:
        OutputError: one of the files is there and ``overwrite`` is false; nothing was written.
    """
    source = recipe.path.parent
    beside = [p for p in sorted(source.rglob("*")) if p.is_file() and not _NAME.fullmatch(p.name)]
    files = [recipe.path, *([recipe.twin] if recipe.twin.exists() else []), *beside]
    targets = [folder / path.relative_to(source) for path in files]
    present = [path for path in targets if path.exists()]
    if present and not overwrite:
        raise OutputError(f"{_listed(present)} exists; choose another folder, or give --overwrite")
    try:
        for path, target in zip(files, targets, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    except (FileExistsError, NotADirectoryError) as error:
        raise OutputError(f"{folder} is not a folder; choose another one") from error
    return targets


def _listed(paths: Sequence[Path]) -> str:
    return str(paths[0]) + (f" (and {len(paths) - 1} more)" if len(paths) > 1 else "")
