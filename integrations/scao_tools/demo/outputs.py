"""The output directory of a demo run: choosing it, protecting what is in it, and the names of its files."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scao_tools.checkpointing import write_text_atomically
from scao_tools.errors import OutputError, ResumeError

DEFAULT = Path("demo-output")


@dataclass(frozen=True)
class RunFiles:
    """Where everything of a run lies."""

    root: Path

    @property
    def config(self) -> Path:
        """The options and what was found out at the start."""
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        """One line per step and evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def base(self) -> Path:
        """The model before training: held-out losses and a sample."""
        return self.root / "base.json"

    @property
    def report(self) -> Path:
        """The report for people."""
        return self.root / "report.md"

    @property
    def plot(self) -> Path:
        """The loss curves."""
        return self.root / "loss.png"

    def optimizer(self, name: str) -> Path:
        """The directory of one optimizer's run."""
        return self.root / name

    def adapter(self, name: str) -> Path:
        """The trained adapter, in PEFT's format."""
        return self.root / name / "adapter"

    def result(self, name: str) -> Path:
        """Written last: an optimizer that has it is done."""
        return self.root / name / "result.json"

    def finished(self) -> bool:
        """Whether all optimizers of the stored configuration are done."""
        try:
            names = json.loads(self.config.read_text(encoding="utf-8"))["options"]["optimizers"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return all(self.result(name).is_file() for name in names)


def read_json(path: Path) -> dict[str, Any] | None:
    """Content of a JSON file that is written atomically; None where it was not written yet."""
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ResumeError(f"{path} cannot be read ({error}); start again with --overwrite") from error
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that a kill leaves either old or new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def choose_new(out: Path | None, overwrite: bool) -> RunFiles:
    """The directory for a new run. Nothing is created or deleted yet."""
    if out is None:
        if overwrite:
            return RunFiles(DEFAULT)
        number = 1
        while not _is_free(_numbered(number)):
            number += 1
        return RunFiles(_numbered(number))
    if out.exists() and not out.is_dir():
        raise OutputError(f"--out {out} is a file; give a directory")
    if _is_free(out):
        return RunFiles(out)
    if not (out / "config.json").is_file():
        raise OutputError(f"--out {out} holds files that are not a demo run's; give another directory")
    if not overwrite:
        raise OutputError(
            f"--out {out} holds an earlier run; continue it with --resume, replace it with --overwrite, or give "
            "another --out"
        )
    return RunFiles(out)


def choose_existing(out: Path | None) -> RunFiles:
    """The run that ``--resume`` continues: the given one, or the newest unfinished one at the default places."""
    if out is not None:
        if not (out / "config.json").is_file():
            raise ResumeError(f"--resume: {out} holds no demo run (no config.json); start one without --resume")
        return RunFiles(out)
    found = [RunFiles(path) for path in _default_directories() if (path / "config.json").is_file()]
    if not found:
        raise ResumeError(f"--resume: there is no run in {DEFAULT} or {DEFAULT}-N here; give its directory with --out")
    unfinished = [files for files in found if not files.finished()]
    return max(unfinished or found, key=lambda files: files.config.stat().st_mtime_ns)


def prepare(files: RunFiles, optimizers: tuple[str, ...]) -> None:
    """Create the directory, and empty it of an earlier run's own files; other files stay."""
    try:
        files.root.mkdir(parents=True, exist_ok=True)
        stored = read_json(files.config)
        earlier = stored["options"]["optimizers"] if stored else ()
        # In this order a kill in between leaves a directory that --resume or --overwrite still understands.
        for name in {*earlier, *optimizers}:
            if files.optimizer(name).exists():
                shutil.rmtree(files.optimizer(name))
        for path in (files.report, files.plot, files.base, files.metrics, files.config):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{files.root} cannot be written: {error.strerror or error}") from error


def _numbered(number: int) -> Path:
    return DEFAULT if number == 1 else Path(f"{DEFAULT}-{number}")


def _default_directories() -> list[Path]:
    named = re.compile(rf"{re.escape(DEFAULT.name)}(-\d+)?")
    return [path for path in Path().iterdir() if path.is_dir() and named.fullmatch(path.name)]


def _is_free(path: Path) -> bool:
    if not path.exists():
        return True
    # A temporary file is what a kill in the very first write leaves.
    return path.is_dir() and all(item.name.startswith(".") and item.name.endswith(".tmp") for item in path.iterdir())
