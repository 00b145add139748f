"""Checkpoints that survive a kill at any moment, and that ``torch.load(weights_only=True)`` reads.

A checkpoint is written to a temporary file, flushed to the disk, and renamed. The one before it is kept until the next,
so there is always a complete one once the first was written.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scao_tools.errors import ResumeError
from scao_tools.models import trainable
from scao_tools.training import Trainer

FORMAT = 1
CURRENT = "checkpoint.pt"
PREVIOUS = "checkpoint.previous.pt"


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in place: readers see the old or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    write(temporary)
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """`write_atomically` for a text file."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write)


def sync_directory(path: Path) -> None:
    """Make a rename durable where the system lets one open directories (not on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_checkpoint(directory: Path, trainer: Trainer, *, run: str, peak_memory: int) -> None:
    """Save all that continuing needs; ``run`` identifies the configuration it belongs to."""
    directory.mkdir(parents=True, exist_ok=True)
    payload = {
        "format": FORMAT,
        "run": run,
        "step": trainer.steps_done,
        "nonfinite_streak": trainer.nonfinite_streak,
        "peak_memory": peak_memory,
        "adapter": {name: parameter.detach() for name, parameter in trainable(trainer.model).items()},
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "random": random_states(),
    }
    if (directory / CURRENT).exists():
        os.replace(directory / CURRENT, directory / PREVIOUS)
    write_atomically(directory / CURRENT, lambda path: torch.save(payload, path))


def load_checkpoint(directory: Path, run: str) -> dict[str, Any] | None:
    """The newest complete checkpoint, or None where there is none; one of another run is refused."""
    found = None
    for name in (CURRENT, PREVIOUS):
        found = _read(directory / name)
        if found is not None:
            break
    if found is None:
        return None
    if found["run"] != run:
        raise ResumeError(f"{directory} holds a checkpoint of another run; give another --out, or --overwrite")
    return found


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a torn file raises many types (zip, pickle, EOF); the one before it is used
        return None
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        return None
    return payload


def restore(trainer: Trainer, payload: dict[str, Any]) -> None:
    """Put a trainer into the state in which `save_checkpoint` saw it."""
    parameters = trainable(trainer.model)
    if set(parameters) != set(payload["adapter"]):
        raise ResumeError("the checkpoint holds other adapter weights than this model; was the model replaced?")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(payload["adapter"][name])
    trainer.optimizer.load_state_dict(payload["optimizer"])
    trainer.scaler.load_state_dict(payload["scaler"])
    trainer.steps_done = int(payload["step"])
    trainer.nonfinite_streak = int(payload["nonfinite_streak"])
    restore_random_states(payload["random"])


def remove_checkpoints(directory: Path) -> None:
    """Delete a finished phase's checkpoints: two to three times the size of the adapter each."""
    for name in (CURRENT, PREVIOUS, f".{CURRENT}.tmp"):
        (directory / name).unlink(missing_ok=True)


def random_states() -> dict[str, Any]:
    """The states of the generators that training may use (dropout of the base model)."""
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, list(words), gauss],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Undo of `random_states`."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
