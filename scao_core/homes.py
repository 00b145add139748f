"""The books of the tiers: where the covariances and bases of each parameter lie, and whether they are still what was written.

What fits ``memory_budget`` lies with the parameter, the next on the host, the rest in a file. Only places differ: results
are the same to the bit. The order is fixed, so what is streamed is always the same, which for a loop that needs
everything once a step is better than keeping what was used last: first all covariances, which every step reads and
writes, then the bases, which a step only reads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .placement import Planned, budgets_of, check_folder, placed
from .runtime import TIERS, Block, Disk

_HOST = torch.device("cpu")


class Homes:
    """Where the state of one optimizer lies.

    Args:
        options: ``memory_budget``, ``host_budget`` and ``offload_dir``.
        warn: called with the name of a remark and its text.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """

    def __init__(self, options: Mapping[str, Any], warn: Callable[[str, str], None]) -> None:
        self._budgets, self._warn = budgets_of(options), warn
        self.active = len(self._budgets) > 1
        self._folder = Path(options["offload_dir"]).absolute() if len(self._budgets) > 2 else None
        if self._folder is not None:
            check_folder(self._folder)
        self.places: dict[Tensor, dict[str, str]] = {}
        self._disk: Disk | None = None
        self._blocks: dict[Tensor, dict[str, Block]] = {}
        self._spare: dict[Tensor, dict[str, Block]] = {}
        """Of tensors that lie elsewhere for now."""
        self._foreign: dict[Tensor, dict[str, Block]] = {}
        """In a forked child: its parent's blocks, until their content has been copied."""
        self._arranged: object = None
        self._measured: tuple[int, dict[str, int]] | None = None
        self._full = False
        self._reserved = 0
        self._parts: dict[Tensor, int] = {}

    def arrange(self, plans: Planned) -> None:
        """Decide for these parameters, unless it was decided for them before."""
        now = ([(id(param), id(plan)) for param, plan in plans], os.getpid())
        if not self.active or self._arranged == now:
            return
        self._arranged, self.places = now, placed(plans, self._budgets)
        if self._disk is not None and self._disk.process != os.getpid():
            self._disk, self._blocks, self._spare, self._foreign = None, {}, {}, self._blocks
        here = {param for param, _ in plans}
        for blocks in (self._blocks, self._spare):
            # What is trainable and not here was replaced; what is frozen may come back.
            for param in [param for param in blocks if param not in here and param.requires_grad]:
                del blocks[param]
        self._parts = {param: math.prod(plan.batch) for param, plan in plans}
        self._reserve(plans)

    def _reserve(self, plans: Planned) -> None:
        wanted, again = {}, f".{self._reserved}" if self._reserved else ""
        for number, (param, plan) in enumerate(plans):
            slots, known, spare = dict(plan.slots), self._blocks.setdefault(param, {}), self._spare.get(param, {})
            for key in [key for key, tier in self.places.get(param, {}).items() if tier == "nvme"]:
                if key not in known and key in spare:
                    known[key] = spare.pop(key)
                if key in known and known[key].tensor.dtype != slots[key].dtype:  # the parameter's has changed
                    del known[key]
                if key not in known and not self._full:
                    wanted[param, key] = f"{number}.{key}{again}", slots[key], self._parts[param]
        if wanted and self._folder is not None:
            try:
                if self._disk is None or self._disk.closed:
                    self._disk = Disk(self._folder)
                blocks = self._disk.reserve({n: (torch.Size(s.shape), s.dtype, b) for n, s, b in wanted.values()})
            except OSError as error:
                self._full = True
                needed = sum(slot.bytes for _, slot, _ in wanted.values())
                self._warn(
                    "disk", f"offload_dir={str(self._folder)!r}: {error}; {needed:,} bytes stay on the host instead"
                )
            else:
                self._reserved += 1
                for (param, key), block in zip(wanted, blocks, strict=True):
                    self._blocks[param][key] = block

    def device(self, param: Tensor, key: str) -> torch.device:
        """Where a state tensor lies; what lies in the file counts as on the host."""
        return _HOST if key == "step" or key in self.places.get(param, ()) else param.device

    def settled(self, param: Tensor, state: Mapping[str, Tensor]) -> bool:
        """Whether each tensor lies where it was decided."""
        if not self.active:
            return True
        blocks, places = self._blocks.get(param, {}), self.places.get(param, {})
        return (
            param not in self._foreign
            and all(places.get(key) == "nvme" and state[key] is block.tensor for key, block in blocks.items())
            and all(_is_at_hand(state[key], param.device) for key in places.keys() - blocks.keys())
        )

    def settle(self, param: Tensor, state: dict[str, Tensor]) -> None:
        """Put a parameter's state where it was decided; its bits do not change."""
        if self.settled(param, state):
            return
        self.moved()
        foreign, blocks, places = self._foreign.pop(param, {}), self._blocks.get(param, {}), self.places.get(param, {})
        for key in [key for key in blocks if places.get(key) != "nvme"]:
            self._spare.setdefault(param, {})[key] = blocks.pop(key)
            state[key] = state[key].to(self.device(param, key), copy=True)
        for key in places:
            before, block = foreign.get(key), blocks.get(key)
            before = before if before and state[key] is before.tensor else None
            if block is None:
                state[key] = state[key].clone() if before else state[key].cpu()
                if param.device.type == "cuda":
                    state[key] = state[key].pin_memory()
            elif state[key] is not block.tensor:
                state[key] = block.tensor.copy_(state[key])
                for part in range(block.parts):
                    block.seal(part)
                block.checksums = list(before.checksums) if before else block.checksums
                block.release()

    def bytes(self, state: Mapping[Tensor, Mapping[str, Tensor]]) -> dict[str, int]:
        """Bytes of state on each tier, measured when something has come or moved."""
        if self._measured is None or self._measured[0] != len(state):
            self._measured = len(state), self._bytes(state)
        return self._measured[1]

    def moved(self) -> None:
        """State has moved or changed its dtype: it is measured again."""
        self._measured = None

    def _bytes(self, state: Mapping[Tensor, Mapping[str, Tensor]]) -> dict[str, int]:
        result = dict.fromkeys(TIERS, 0)
        for param, entry in state.items():
            for key, value in entry.items():
                block = self._blocks.get(param, {}).get(key)
                tier = "nvme" if block is not None and value is block.tensor else None
                tier = tier or ("host" if key in self.places.get(param, ()) else "device")
                result[tier] += value.numel() * value.element_size()
        return result

    def close(self) -> None:
        """Give the file back; what lies in it stays valid while the optimizer holds it."""
        if self._disk is not None:
            self._disk.close()


def _is_at_hand(host: Tensor, device: torch.device) -> bool:
    """Whether it lies on the host, and where a GPU reads it, in memory that can be copied beside the training."""
    return host.device.type == "cpu" and (device.type != "cuda" or host.is_pinned())
