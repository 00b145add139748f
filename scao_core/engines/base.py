"""What an engine is: a rule that turns momentum and curvature into a direction, for a stack of equal matrices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..curvature import Factor, State
from ..linalg import Matrices

Direction = Tensor | Iterable[Tensor]
"""U of N matrices: a stack (N, r, n), or one by one."""
Sides = tuple[Factor, ...]
_TURN_FIRST, _TURN_EVERY = 8, 4  # chosen
PREFIXES = ("left_", "right_")
FARTHEST = 10.0  # chosen: just above Adam's own bound for betas (0.9, 0.999)
_HARMLESS = 0.1  # chosen, as a part of the largest entry that LoRA's A begins with
_OVERFLOWS = 700.0  # e to this power is near fp64's largest number


# Chosen by comparison (docs/evidence.md): on the short sides of LoRA the little that one batch says is not to be trusted far; a
# wide spectrum has most of its eigenvalues far below their mean, and more damping would leave them as they are.
_DAMPING, _DAMPING_WIDE, _SHORT = 0.1, 1e-3, 64


def default_damping(short: int) -> float:
    """Relative damping of a matrix whose shorter side has this length."""
    return _DAMPING if short <= _SHORT else _DAMPING_WIDE


@dataclass(frozen=True)
class Context:
    """The scalars of one step of one stack.

    Args:
        t: 1 at the first step at which these matrices have a gradient, then 2, 3, …
        betas: decay of momentum and of second moments.
        curvature_beta: decay of the factors.
        eps: added to square roots; gradients arrive divided by the size of the first one, so it is relative to that.
        damping: relative to a factor's mean eigenvalue.
        norm_rule: ``"decrease"`` or ``"none"``, for rules that know it.
        lr: the learning rate of this step.
        length: n, the longer side of a matrix.
        failed: numbers of decompositions that failed in this step; rules append to it.
    """

    t: int
    betas: tuple[float, float]
    curvature_beta: float
    eps: float
    damping: float
    norm_rule: str = "none"
    lr: float = 0.0
    length: int = 1
    failed: list[int] = field(default_factory=list)


@dataclass
class Batch:
    """Gradients G and momentum M of N equal matrices, oriented r × n, and the unit that they are measured in.

    Args:
        grads, averages: the matrices as they are, where they lie, in the compute dtype.
        unit: (N, 1, 1), the reciprocal of each matrix's scale.
        moderate: whether the matrices may be squared and summed in their own unit; else only in units of the scale.
        views: whether they are best read where they lie, not as a stack.
    """

    grads: list[Tensor]
    averages: list[Tensor]
    unit: Tensor
    moderate: bool
    views: bool

    @cached_property
    def stack(self) -> tuple[Tensor, Tensor]:
        """G and M as stacks (N, r, n) in units of their scale; new memory."""
        return self._stacked(self.grads), self._stacked(self.averages)

    def _stacked(self, matrices: list[Tensor]) -> Tensor:
        return matrices[0].unsqueeze(0) * self.unit if len(matrices) == 1 else _stack(matrices).mul_(self.unit)

    def read(self) -> tuple[Matrices, Matrices, Tensor]:
        """G, M and the unit that products with them are still to be multiplied by."""
        if self.views and self.moderate:
            return self.grads, self.averages, self.unit
        if self.moderate:
            return _stack(self.grads), _stack(self.averages), self.unit
        g, m = self.stack
        one = torch.ones_like(self.unit)
        return (list(g.unbind(0)), list(m.unbind(0)), one) if self.views else (g, m, one)


def _stack(matrices: list[Tensor]) -> Tensor:
    """(N, r, n) in the matrices' own layout; new memory."""
    if matrices[0].stride(-1) == 1:
        return torch.stack(matrices)
    return torch.stack([x.mT for x in matrices]).mT


def rate(beta: float, t: int) -> float:
    """(1 - β) / (1 - βᵗ): the weight of the t-th sample in an average that is unbiased from the first step on."""
    return (1 - beta) / (1 - beta**t)


def turn_rate(beta: float, t: int) -> float:
    """The weight of the t-th gradient in the directions of a wide side, 0 where they are left as they are.

    They move slowly, so after the first steps they are turned at every fourth gradient, by four times as much.
    """
    if t <= _TURN_FIRST:
        return rate(beta, t)
    return min(1.0, _TURN_EVERY * rate(beta, t)) if t % _TURN_EVERY == 0 else 0.0


def split(state: State, prefix: str) -> State:
    """The entries of one side's factor, without their prefix."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def join(prefix: str, state: State) -> State:
    """The inverse of ``split``."""
    return {prefix + key: value for key, value in state.items()}


def first_direction(g: Tensor, eps: float) -> Tensor:
    """g / (|g| + eps): AdamW's first step, and SCAO's, while nothing is known of the curvature."""
    return g / g.abs().add_(eps).clamp_min_(torch.finfo(g.dtype).tiny)


def adam_bound(betas: tuple[float, float], t: float = math.inf) -> float:
    """The largest |m| / √v that averages m and v of the same t samples can have.

    By Cauchy and Schwarz it is (Σ w_i² / u_i)^1/2 for their weights w and u. For betas (0.9, 0.999) it is 1 at t = 1, 1.04
    at 10, 2.24 at 100 and 7.27 in the end: while v is young, no entry can stand out from its own past.
    """
    b1, b2 = betas
    if b1 == 0 or b2 == 0:
        terms = 1.0 if b1 == 0 or t == 1 else math.inf
    else:
        log = 2 * math.log(b1) - math.log(b2)
        terms = t if log == 0 else math.inf if t * log > _OVERFLOWS else math.expm1(t * log) / math.expm1(log)
    return max(1.0, (1 - b1) / (1 - math.pow(b1, t)) * math.sqrt(terms * (1 - math.pow(b2, t)) / (1 - b2)))


def harmless(lr: float, length: int) -> float:
    """0.1 / √n in units of lr: as far as one step may move any entry of a matrix of this longer side without harm.

    PEFT begins A with entries within ± 1 / √n (Kaiming's uniform distribution), so this is a tenth of the largest.
    """
    return _HARMLESS / math.sqrt(length) / lr if lr > 0 else math.inf


def adam_direction(m: Tensor, v: Tensor, context: Context) -> Tensor:
    """m / (√v + eps) within its bound, which Adam never reaches; a rule whose coordinates turn between two steps can."""
    bound = adam_bound(context.betas)
    u = m / v.sqrt().add_(context.eps).clamp_min_(torch.finfo(v.dtype).tiny)
    return u.clamp_(-bound, bound)


class Engine(ABC):
    """A rule over (…, r, n) stacks, r <= n, whose left factor sees the shorter side and whose right the longer one."""

    name: ClassVar[str]
    uses_factors: ClassVar[bool] = True

    def slots(self, shape: tuple[int, ...], sides: Sides) -> dict[str, tuple[int, ...]]:
        """Shapes of the engine's own statistics for one tensor of this (oriented) shape, besides momentum and factors."""
        return {}

    @abstractmethod
    def direction(self, state: State, batch: Batch, sides: Sides, context: Context) -> tuple[State, Direction]:
        """One step.

        Args:
            state: the engine's slots, and the sides' entries with their prefixes; not written to.
            batch: gradients and momentum, this gradient included; not written to.

        Returns:
            the changed entries of the state, and the direction U (the parameter moves by -lr · U).
        """

    def farthest(self, context: Context) -> float:
        """How far one step may move an entry, in units of lr. The first step is AdamW's, also where most gradients are zero."""
        return FARTHEST if context.t > 1 else 1.0

    def rebase(self, state: State, side: int, sides: Sides, basis: Tensor) -> State:
        """Entries that change when the side's refreshed factor gets a new basis, the basis among them."""
        return {PREFIXES[side] + "basis": basis}
