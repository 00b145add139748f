"""What a curvature factor is: the second moment of a gradient along one side of a matrix, kept in some compressed form.

A gradient enters as *samples* x of shape (…, k, d): k rows, each a sample of a d-dimensional vector. For a matrix
gradient G (r × n) the n-side factor sees G itself (r samples of length n) and the r-side factor sees Gᵀ. The factor
models C = E[xᵀx] / k, a (d × d) matrix that only the dense factor stores.

A factor object is geometry and maths only. Its numbers live in a ``State``, a dict of tensors with leading batch
dimensions, so that equal matrices are handled in one call. No method writes into a tensor that it was given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

State = dict[str, Tensor]

_ROUNDING_ULPS = 32.0  # chosen: the condition of a factor is kept below 1 / (32 ulp), 2.6e5 in fp32


@dataclass(frozen=True)
class Factor(ABC):
    """One side of a matrix.

    Args:
        dim: d, the length of this side.
        samples: k, the length of the other side.
    """

    dim: int
    samples: int

    name: ClassVar[str]

    @abstractmethod
    def slots(self) -> dict[str, tuple[int, ...]]:
        """Shape of each state tensor of one matrix; their dtype is that of the computation (fp32, or fp64 for fp64)."""

    def initial(self, like: Tensor, batch: tuple[int, ...] = ()) -> State:
        """State before the first gradient, in the dtype and on the device of ``like``."""
        return {key: like.new_zeros(batch + shape) for key, shape in self.slots().items()}

    def start(self, state: State, x: Tensor) -> State:
        """Choose the first basis from the first samples; before any ``accumulate``."""
        return state

    @abstractmethod
    def accumulate(self, state: State, x: Tensor, rate: float, turn: float) -> tuple[State, State]:
        """C <- (1 - rate) C + rate xᵀx / k.

        Args:
            turn: the weight of x in the directions of a factor that follows them, 0 to leave them as they are.

        Returns:
            the state for use in this step, and the entries that replace their namesakes from the next step on, so that
            a direction is never chosen by the very gradient that it scales.
        """

    @abstractmethod
    def mean(self, state: State) -> Tensor:
        """Mean eigenvalue of C (…)."""

    @abstractmethod
    def diagonal(self, state: State) -> Tensor:
        """diag(C) (…, d): the second moment of each coordinate."""

    @abstractmethod
    def whitener(self, state: State, damping: float, unit: bool = False) -> Callable[[Tensor], Tensor]:
        """x -> x (C + damping · mean(C) · I)^-1/2 for (…, k, d); with ``unit``, C is first divided by its mean eigenvalue."""

    def whiten(self, state: State, x: Tensor, damping: float, unit: bool = False) -> Tensor:
        """The whitened x, where only one is needed."""
        return self.whitener(state, damping, unit)(x)

    @property
    def rotated_dim(self) -> int:
        """Number of coordinates of ``rotate``."""
        return self.dim

    @abstractmethod
    def rotate(self, state: State, x: Tensor) -> Tensor:
        """x W (…, k, rotated_dim), the coordinates in the factor's basis; W Wᵀ = I."""

    @abstractmethod
    def unrotate(self, state: State, y: Tensor) -> Tensor:
        """y Wᵀ (…, k, d), back from the factor's basis."""


class Refreshed(Factor):
    """A factor whose basis is recomputed at intervals, by a runtime, from a snapshot of what it has accumulated."""

    @property
    def side(self) -> int:
        """Side of the matrices whose eigenvectors are computed."""
        return self.dim

    def snapshot(self, state: State) -> State:
        """A copy of what ``refresh`` needs; later changes of the state do not reach it."""
        return {"cov": state["cov"].clone()}

    @abstractmethod
    def refresh(self, snapshot: State) -> tuple[Tensor, Tensor]:
        """The new basis, and a bool tensor (batch) that says for which matrices it is good."""

    @abstractmethod
    def diagonal_basis(self, like: Tensor, batch: tuple[int, ...] = ()) -> Tensor:
        """The basis before the first refresh: the identity, under which the factor is a diagonal one."""

    @abstractmethod
    def carry(self, old: Tensor, new: Tensor, moment: Tensor) -> Tensor:
        """Second moments (…, k, rotated_dim) in the basis ``old``, re-expressed in the basis ``new``."""

    def initial(self, like: Tensor, batch: tuple[int, ...] = ()) -> State:
        return {**super().initial(like, batch), "basis": self.diagonal_basis(like, batch)}


def tiny(x: Tensor) -> float:
    """Smallest normal number of the dtype: keeps a root finite where a whole side has had no gradient."""
    return torch.finfo(x.dtype).tiny


def damped_root(eigenvalues: Tensor, mean: Tensor, damping: float, unit: bool) -> Tensor:
    """(λ + damping · mean)^-1/2 (…, d), or (λ / mean + damping)^-1/2 with ``unit``; ``mean`` (…).

    Eigenvalues below rounding of the largest are unknown, so that much is always added: a gradient whose rank is lower
    than its side would otherwise be divided by noise.
    """
    mean = mean.reshape(*mean.shape, *[1] * (eigenvalues.dim() - mean.dim()))
    floor = _ROUNDING_ULPS * torch.finfo(eigenvalues.dtype).eps * eigenvalues.amax(-1, keepdim=True)
    root = (eigenvalues + damping * mean + floor).clamp_min(tiny(eigenvalues)).rsqrt()
    return root * mean.sqrt() if unit else root
