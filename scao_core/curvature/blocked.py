"""The blocked factor: C restricted to diagonal blocks (b × b), for the long sides of full matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..linalg import eigenbasis
from .base import Refreshed, State, damped_root
from .dense import spectrum


@dataclass(frozen=True)
class Blocked(Refreshed):
    """⌈d/b⌉ blocks of equal size, each with its basis: 8 b² bytes a block. The last block may be padded with zeros.

    Args:
        block: largest block side; the blocks are made as equal as they can be.
    """

    block: int = 256

    name: ClassVar[str] = "blocked"

    @property
    def count(self) -> int:
        """Number of blocks."""
        return -(-self.dim // self.block)

    @property
    def side(self) -> int:
        """Side b of a block."""
        return -(-self.dim // self.count)

    def slots(self) -> dict[str, tuple[int, ...]]:
        shape = (self.count, self.side, self.side)
        return {"cov": shape, "basis": shape}

    def diagonal_basis(self, like: Tensor, batch: tuple[int, ...] = ()) -> Tensor:
        eye = torch.eye(self.side, dtype=like.dtype, device=like.device)
        return eye.expand(*batch, self.count, -1, -1).contiguous()

    def _split(self, x: Tensor) -> Tensor:
        """(…, k, d) -> (…, blocks, k, b)."""
        x = pad(x, (0, self.count * self.side - self.dim)) if self.count * self.side != self.dim else x
        return self._blocks(x)

    def _blocks(self, x: Tensor) -> Tensor:
        """(…, k, blocks · b) -> (…, blocks, k, b)."""
        return x.reshape(*x.shape[:-1], self.count, self.side).movedim(-2, -3)

    def _join(self, y: Tensor) -> Tensor:
        """(…, blocks, k, b) -> (…, k, d)."""
        return y.movedim(-3, -2).flatten(-2)[..., : self.dim]

    def accumulate(self, state: State, x: Tensor, rate: float, turn: float) -> tuple[State, State]:
        # C_j <- (1 - rate) C_j + rate x_jᵀx_j / k  for each block j
        x = self._split(x)
        return {**state, "cov": state["cov"].lerp((x.mT @ x) / self.samples, rate)}, {}

    def mean(self, state: State) -> Tensor:
        return torch.diagonal(state["cov"], dim1=-2, dim2=-1).sum((-2, -1)) / self.dim

    def diagonal(self, state: State) -> Tensor:
        return torch.diagonal(state["cov"], dim1=-2, dim2=-1).flatten(-2)[..., : self.dim]

    def whitener(self, state: State, damping: float, unit: bool = False) -> Callable[[Tensor], Tensor]:
        basis = state["basis"]
        # The damping follows the mean of the whole side: a block that has had no gradient has no mean of its own.
        scale = damped_root(spectrum(state["cov"], basis), self.mean(state), damping, unit)
        root = (basis * scale[..., None, :]) @ basis.mT
        return lambda x: self._join(self._split(x) @ root)

    @property
    def rotated_dim(self) -> int:
        return self.count * self.side

    def rotate(self, state: State, x: Tensor) -> Tensor:
        return (self._split(x) @ state["basis"]).movedim(-3, -2).flatten(-2)

    def unrotate(self, state: State, y: Tensor) -> Tensor:
        return self._join(self._blocks(y) @ state["basis"].mT)

    def refresh(self, snapshot: State) -> tuple[Tensor, Tensor]:
        cov = snapshot["cov"]
        basis, good = eigenbasis(cov)
        # A block without any gradient keeps the identity; that is no failure.
        empty = (cov == 0).all(-1).all(-1)
        return basis, (good | empty).all(-1)

    def carry(self, old: Tensor, new: Tensor, moment: Tensor) -> Tensor:
        blocks = self._blocks(moment)
        return (blocks @ (old.mT @ new).square()).movedim(-3, -2).flatten(-2)
