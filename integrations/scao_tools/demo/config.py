"""What a demo run is made of. Stored as ``config.json``, so that a resumed run is the same run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scao_tools.data.sources import STDLIB
from scao_tools.errors import OptionError, ResumeError
from scao_tools.optimizers import parse_optimizers

FORMAT = 1
_MAX_SEED = 2**63 - 1  # torch takes larger ones only modulo 2**64


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of the command, checked. Everything that can change a result is here."""

    steps: int = 30
    lr: float = 2e-3
    optimizers: tuple[str, ...] = ("adamw", "scao")
    seed: int = 0
    model: str = "smollm2-135m"
    data: str = STDLIB
    bits: int = 4
    batch_size: int = 8
    max_length: int = 512
    save_every: int = 5
    dtype: str = "auto"

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for name in ("steps", "batch_size", "save_every"):
            if getattr(self, name) < 1:
                raise OptionError(f"{flag(name)} must be at least 1, got {getattr(self, name)}")
        if self.max_length < 16:
            raise OptionError(f"--max-length must be at least 16 tokens, got {self.max_length}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise OptionError(f"--lr must be a finite number above 0, got {self.lr}")
        if not 0 <= self.seed <= _MAX_SEED:
            raise OptionError(f"--seed must be between 0 and {_MAX_SEED}, got {self.seed}")
        if self.bits not in (4, 16):
            raise OptionError(f"--bits must be 4 (QLoRA) or 16 (plain LoRA), got {self.bits}")
        if self.dtype not in ("auto", "bf16", "fp16", "fp32"):
            raise OptionError(f"--dtype must be auto, bf16, fp16 or fp32, got {self.dtype!r}")
        parse_optimizers(",".join(self.optimizers))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options plus what was found out at the start: the format computed in, the data, the versions."""

    options: DemoOptions
    dtype: str
    device: str
    data_description: str
    data_digest: str
    command: str
    versions: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """Identifies the run that a checkpoint belongs to; versions are reported but may change."""
        parts = [self.options, self.dtype, self.device, self.data_digest]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        """Read ``config.json``; a file of another program or version is refused."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise ResumeError(f"{path} was written by another version of scao; start again with --overwrite")
            stored = content.pop("options")
            stored["optimizers"] = tuple(stored["optimizers"])
            return cls(options=DemoOptions(**stored), **content)
        except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise ResumeError(
                f"{path} is not the config.json of a demo run ({error!r}); start without --resume"
            ) from error


def flag(name: str) -> str:
    """The command-line spelling of an option's name."""
    return "--" + name.replace("_", "-")


def absolute_if_exists(name: str) -> str:
    """Make the path of a file or directory absolute; the name of something else stays as it is."""
    path = os.path.expanduser(name)
    return os.path.abspath(path) if os.path.exists(path) else name


def refuse_contradictions(stored: DemoOptions, given: Mapping[str, Any]) -> None:
    """Options given together with ``--resume`` must equal the stored ones."""
    for name, value in given.items():
        before = getattr(stored, name)
        if before != value:
            shown = [",".join(item) if isinstance(item, tuple) else item for item in (before, value)]
            raise OptionError(
                f"{flag(name)}: the interrupted run used {shown[0]}, but {shown[1]} was given; leave the option out to "
                "continue that run, or start a new one without --resume"
            )
