"""Tiers of memory for blocks of bytes: which block lies where, and the file behind the slowest tier.

This module knows names, shapes and bytes, not curvature.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

TIERS = ("device", "host", "nvme")
_PAGE = mmap.ALLOCATIONGRANULARITY
_PREFIX = "scao-"


def assign(sizes: Iterable[int], budgets: Sequence[int | None]) -> list[int]:
    """For each block, the number of the first tier that has room for it; what fits none goes to the last tier.

    Args:
        sizes: bytes of the blocks, those first that should lie closest.
        budgets: bytes of each tier, None for no limit.
    """
    room = [math.inf if budget is None else budget for budget in budgets]
    chosen = []
    for size in sizes:
        tier = next((i for i, left in enumerate(room) if size <= left), len(room) - 1)
        room[tier] -= size
        chosen.append(tier)
    return chosen


@dataclass
class Block:
    """A tensor whose memory is part of the file.

    Args:
        name: in the manifest.
        tensor: reads and writes the file.
        segment: the mapped piece of the file.
        start: of the segment in the file, in bytes.
        offset: in the segment, in bytes; a multiple of the page size.
        parts: along the first dimension, each with a checksum of its own.
        checksums: CRC-32 of what was last written to each part.
    """

    name: str
    tensor: Tensor
    segment: mmap.mmap
    start: int
    offset: int
    parts: int
    checksums: list[int] = field(default_factory=list)

    def seal(self, part: int = 0) -> None:
        """Remember the checksum of what a part holds now."""
        self.checksums[part] = self._checksum(part)

    def intact(self, part: int = 0) -> bool:
        """Whether a part still holds what it was sealed with."""
        return self.checksums[part] == self._checksum(part)

    def hint(self) -> None:
        """Let the system read the block ahead; nothing waits for it."""
        self._advise("MADV_WILLNEED")

    def release(self) -> None:
        """Let the system take the block's memory; what was written stays in the file."""
        self._advise("MADV_DONTNEED")

    def _checksum(self, part: int) -> int:
        size = self.tensor.numel() * self.tensor.element_size() // self.parts
        start = self.offset + part * size
        with memoryview(self.segment) as whole, whole[start : start + size] as data:
            return zlib.crc32(data)

    def _advise(self, what: str) -> None:
        if (advice := getattr(mmap, what, None)) is not None:
            with contextlib.suppress(OSError):  # a hint
                self.segment.madvise(advice, self.offset, self.tensor.numel() * self.tensor.element_size())


class Disk:
    """Blocks in one file of a folder, which lives as long as this object; of one process.

    The file is scratch: checkpoints never refer to it. Its owner holds a lock on it, so the file of a process that was
    killed is recognized, and removed by the next one that uses the folder. A manifest beside it (JSON, replaced in one
    piece) says which block lies where.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        _sweep(folder)
        number, path = tempfile.mkstemp(prefix=_PREFIX, suffix=".bin", dir=folder)
        self.process, self.path, self._file = os.getpid(), Path(path), number
        _lock(number)
        self.blocks: list[Block] = []
        self._length = 0
        self._finalizer = weakref.finalize(self, _remove, self.process, self.path, number)
        self._write_manifest([], 0)  # before there is anything in the file: one without a manifest is empty

    def reserve(self, wanted: Mapping[str, tuple[torch.Size, torch.dtype, int]]) -> list[Block]:
        """Blocks of zeros by name, shape, dtype and number of parts. The space is taken at once, so no later write fails.

        Raises:
            OSError: there is not enough space; nothing has changed.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in wanted.values()]
        offsets = [0, *itertools.accumulate(-(-size // _PAGE) * _PAGE for size in sizes)]
        if not offsets[-1]:
            return []
        new = []
        try:
            _allocate(self._file, self._length, offsets[-1])
            segment = mmap.mmap(self._file, offsets[-1], offset=self._length)
            for (name, (shape, dtype, parts)), offset in zip(wanted.items(), offsets, strict=False):
                tensor = torch.frombuffer(segment, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
                new.append(Block(name, tensor, segment, self._length, offset, parts, [0] * parts))
            self._write_manifest([*self.blocks, *new], self._length + offsets[-1])
        except OSError:
            os.ftruncate(self._file, self._length)
            raise
        self.blocks += new
        self._length += offsets[-1]
        return new

    @property
    def bytes(self) -> int:
        """Length of the file: the blocks, each rounded up to whole pages."""
        return self._length

    @property
    def closed(self) -> bool:
        """Whether the file was removed; it takes no more blocks then."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Remove the file; tensors in it stay valid as long as somebody holds them."""
        self._finalizer()

    def _write_manifest(self, blocks: Iterable[Block], length: int) -> None:
        listed = [
            {
                "name": block.name,
                "offset": block.start + block.offset,
                "shape": list(block.tensor.shape),
                "dtype": str(block.tensor.dtype).removeprefix("torch."),
            }
            for block in blocks
        ]
        manifest = self.path.with_suffix(".json")
        part = manifest.with_suffix(".part")
        part.write_text(json.dumps({"format": 1, "file": self.path.name, "bytes": length, "blocks": listed}))
        part.replace(manifest)


def _allocate(file: int, offset: int, length: int) -> None:
    """Take the space now: writing to a mapped file on a full disk would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, offset, length)
        return
    zeros = bytes(2**20)
    for start in range(offset, offset + length, len(zeros)):
        os.pwrite(file, zeros[: offset + length - start], start)


def _lock(file: int) -> bool:
    """Hold the file until this process ends; False if another one holds it."""
    try:
        import fcntl
    except ImportError:  # not on this system: leftovers stay
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sweep(folder: Path) -> None:
    """Remove the files of processes that ended without doing it; a file of that name that is no scratch file stays."""
    for path in [path for path in folder.glob(f"{_PREFIX}*.bin") if path.is_file() and not path.is_symlink()]:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR)
            try:
                if _lock(file) and _is_scratch(path, os.fstat(file).st_size):
                    _unlink(path)
            finally:
                os.close(file)


def _is_scratch(path: Path, size: int) -> bool:
    """Whether the file has a manifest of ours, or is one that was killed before it had any: then it is empty."""
    try:
        manifest = json.loads(path.with_suffix(".json").read_text())
    except FileNotFoundError:
        return size == 0
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("file") == path.name and "blocks" in manifest


def _remove(process: int, path: Path, file: int) -> None:
    if process == os.getpid():  # not in a child that was forked
        _unlink(path)
    with contextlib.suppress(OSError):
        os.close(file)


def _unlink(path: Path) -> None:
    for name in (path.with_suffix(".json"), path.with_suffix(".part"), path):
        name.unlink(missing_ok=True)
