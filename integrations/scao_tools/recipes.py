"""Where the files of ``configs/`` lie: inside the installed package, or at the top of a checkout."""

from __future__ import annotations

from pathlib import Path

from scao_tools.errors import MissingPackageError


def config_folder() -> Path:
    """The folder that holds one sub-folder per framework, and ``bench``."""
    package = Path(__file__).parent
    for folder in (package / "_configs", package.parent.parent / "configs"):
        if folder.is_dir():
            return folder
    raise MissingPackageError("the installed scao holds no configs; run: pip install --force-reinstall scao")
