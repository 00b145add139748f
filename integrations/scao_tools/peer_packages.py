"""Optimizers of other projects that cannot be installed next to ours, because they have our package's name.

Such a package goes into a folder of its own under the user's cache, and is used by a process of its own that finds this
folder first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from scao_tools.errors import MissingPackageError


def peer_path(requirement: str) -> Path:
    """The folder of a pinned requirement such as ``scao==0.2.4``, whether it exists yet or not."""
    if not requirement or Path(requirement).name != requirement or requirement.startswith("."):
        raise ValueError(f"{requirement!r} must be a plain requirement like 'scao==0.2.4'")
    # An empty XDG_CACHE_HOME counts as unset, as its specification says.
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "scao" / "peers" / requirement


def peer_folder(requirement: str) -> Path:
    """Install the requirement, without its dependencies, unless that is done already; returns its folder.

    Two processes may do this at the same time: each installs into a fresh folder beside the final one, and the first
    to rename it wins, so the final folder is never half full.

    Raises:
        MissingPackageError: it could not be installed.
    """
    target = peer_path(requirement)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".installing-", dir=target.parent))
    except OSError as error:
        raise MissingPackageError(
            f"{requirement} could not be installed into {target} ({error.strerror}); set XDG_CACHE_HOME to a folder "
            "that can be written"
        ) from error
    try:
        _install(requirement, fresh)
        try:
            fresh.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, and what it installed is the same
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _install(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--target", str(folder), requirement]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit code {done.returncode}"]
        raise MissingPackageError(
            f"{requirement} could not be installed: {errors[-1].removeprefix('ERROR: ').rstrip('.')}; "
            f"try: pip download --no-deps {requirement}"
        )
    # mkdtemp makes folders that only their owner may read, which is not what pip would have made.
    folder.chmod(0o755)


def peer_environment(requirement: str) -> dict[str, str]:
    """Environment of a process that finds the requirement first, and everything else where this process finds it."""
    path = [str(peer_folder(requirement)), *(entry for entry in sys.path if entry)]
    # PYTHONSAFEPATH: else the folder of the script, or the current one, would come before the requirement.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "PYTHONSAFEPATH": "1"}


def runs_isolated(requirement: str) -> bool:
    """Whether this process was started with `peer_environment`."""
    return str(peer_path(requirement)) in sys.path
