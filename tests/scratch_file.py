"""The scratch file of ``offload_dir`` as somebody sees it who is not the optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def the_file(folder: str | Path) -> Path:
    """The one file of blocks in a folder."""
    (path,) = Path(folder).glob("scao-*.bin")
    return path


def manifest(folder: str | Path) -> dict[str, Any]:
    """What lies where in it."""
    found: dict[str, Any] = json.loads(the_file(folder).with_suffix(".json").read_text())
    return found


def damage(folder: str | Path, name: str, part: int = 0, parts: int = 1) -> None:
    """Flip a few bytes of one part of a block, found by its name, as a bad disk would."""
    (block,) = [block for block in manifest(folder)["blocks"] if block["name"] == name]
    size = torch.Size(block["shape"]).numel() * getattr(torch, block["dtype"]).itemsize // parts
    with the_file(folder).open("r+b") as file:
        file.seek(block["offset"] + part * size + size // 2)
        old = file.read(4)
        file.seek(-len(old), 1)
        file.write(bytes(255 - b for b in old))
