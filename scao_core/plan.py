"""Shape and byte budget in; engine, curvature factors and exact bytes of state out.

Nothing here allocates. The sum of the planned bytes equals the measured bytes of ``optimizer.state``, to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .config import Options
from .curvature import Blocked, Dense, Diagonal, Factor, Refreshed, Spiked
from .engines import ENGINES, PREFIXES, Sides

Shape = tuple[int, ...]
# Default bytes per parameter: what AdamW keeps; SOAP has momentum and second moment before any factor.
_BUDGET = {"kl": 8.0, "soap": 12.0}
_SMALLEST_BLOCK = 8  # chosen: below it a block factor is hardly more than a diagonal one


@dataclass(frozen=True)
class Slot:
    """One state tensor of one parameter."""

    shape: Shape
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Exact size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """What SCAO does with one parameter and what it keeps for it.

    Args:
        shape: of the parameter.
        batch: leading dimensions that hold independent matrices: (E,) for MoE experts (E, m, n), else ().
        matrix: shape of one such matrix as (rows, columns); one row for a tensor on the Adam path.
        engine: name of the rule.
        sides: factors of the shorter and the longer side; empty for rules without factors.
        slots: every state tensor by its key in ``optimizer.state[p]``.
        compute: dtype of the arithmetic.
    """

    shape: Shape
    batch: Shape
    matrix: tuple[int, int]
    engine: str
    sides: Sides
    slots: tuple[tuple[str, Slot], ...]
    compute: torch.dtype

    @property
    def bytes(self) -> int:
        """Exact bytes of state."""
        return sum(slot.bytes for _, slot in self.slots)

    @property
    def is_matrix(self) -> bool:
        """True if the parameter is preconditioned, False on the Adam path."""
        return self.engine != "adam"

    @property
    def transposed(self) -> bool:
        """True if the matrix is taller than wide; the maths then works on its transpose."""
        return self.is_matrix and self.matrix[0] > self.matrix[1]

    def describe(self) -> str:
        """``dense(16) x spiked(2048, 4)``, or the name of the rule where it has no factors."""
        words = {"spiked": "rank", "blocked": "side"}
        parts = []
        for factor in self.sides:
            extra = words.get(factor.name)
            parts.append(f"{factor.name}({factor.dim}{f', {getattr(factor, extra)}' if extra else ''})")
        return " x ".join(parts) or self.engine


def as_matrices(shape: Shape) -> tuple[Shape, tuple[int, int]] | None:
    """The (batch, matrix) view of a parameter, or None if it has no matrix in it.

    2-D (m, n) is itself; 3-D (E, m, n) is E independent matrices, as MoE layers store their experts; from 4-D on, as in
    convolutions, the first dimension is kept and the others are flattened.
    """
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    if len(shape) == 3:
        return shape[:1], (shape[1], shape[2])
    return (), (shape[0], math.prod(shape[1:]))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 parameters, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def momentum_dtype(dtype: torch.dtype, options: Options) -> torch.dtype:
    """What the momentum is stored in: as named, else bf16 for bf16 parameters, as AdamW does it, else as computed."""
    if options.momentum_dtype:
        named: torch.dtype = getattr(torch, options.momentum_dtype)
        return named
    return torch.bfloat16 if dtype == torch.bfloat16 else compute_dtype(dtype)


@lru_cache(maxsize=4096)
def plan(shape: Shape, dtype: torch.dtype, options: Options) -> Plan:
    """Choose how to treat a parameter, with options made by ``plan_key``.

    The first pair of factors, best first, that fits ``options.bytes_per_param`` is taken; the Adam path if none does,
    and for vectors, scalars, empty tensors and sides longer than ``options.max_dim``. Factors that are named in the
    options are taken whatever they cost.
    """
    dtypes = compute_dtype(dtype), momentum_dtype(dtype, options)
    found = as_matrices(shape)
    if found is None or max(found[1]) > options.max_dim:
        return _build(shape, (), (1, math.prod(shape)), "adam", (), dtypes)
    batch, matrix = found
    r, n = sorted(matrix)
    if not ENGINES[options.engine].uses_factors:
        return _build(shape, batch, matrix, options.engine, (), dtypes)
    if options.factors != "auto":
        left, right = options.factors.split(",")
        named = (_named(left, r, n, options), _named(right, n, r, options))
        return _build(shape, batch, matrix, options.engine, named, dtypes)
    budget = _BUDGET[options.engine] if options.bytes_per_param is None else options.bytes_per_param
    allowed = budget * r * n * math.prod(batch)
    for sides in _candidates(r, n, options):
        candidate = _build(shape, batch, matrix, options.engine, sides, dtypes)
        if _in_fp32(candidate, options) <= allowed + _counters(candidate):
            return candidate
    return _build(shape, (), (1, math.prod(shape)), "adam", (), dtypes)


_SHAPING = (
    "engine",
    "factors",
    "spike_rank",
    "block_size",
    "max_dense_dim",
    "max_dim",
    "bytes_per_param",
    "momentum_dtype",
)


def plan_key(options: Mapping[str, Any]) -> Options:
    """The options that shape the state, all others at their defaults, so that equal plans are computed once."""
    return Options(**{name: options[name] for name in _SHAPING if name in options})


def _candidates(r: int, n: int, options: Options) -> Iterator[Sides]:
    """Pairs for r × n, r <= n, best first (docs/maths.md says why)."""
    rank = min(options.spike_rank, r, n - 1)
    if r <= options.max_dense_dim:
        if rank >= 1:
            yield Dense(r, n), Spiked(n, r, rank)
        yield Dense(r, n), Diagonal(n, r)
    block = options.block_size
    while block >= _SMALLEST_BLOCK:
        yield Blocked(r, n, block), Blocked(n, r, block)
        block //= 2
    if rank >= 1:
        yield Diagonal(r, n), Spiked(n, r, rank)
    yield Diagonal(r, n), Diagonal(n, r)


def _named(name: str, dim: int, samples: int, options: Options) -> Factor:
    if name == "dense":
        return Dense(dim, samples)
    if name == "blocked":
        return Blocked(dim, samples, options.block_size)
    rank = min(options.spike_rank, samples, dim - 1)
    if name == "spiked" and rank >= 1:
        return Spiked(dim, samples, rank)
    return Diagonal(dim, samples)  # also a side of length one, which has no direction to choose


def _build(
    shape: Shape,
    batch: Shape,
    matrix: tuple[int, int],
    engine: str,
    sides: Sides,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Plan:
    """With the dtypes of the arithmetic and of the momentum."""
    compute, momentum = dtypes
    oriented = shape if engine == "adam" else tuple(sorted(matrix))
    slots = {
        "step": Slot(batch, torch.float32),
        "scale": Slot(batch, compute),
        "exp_avg": Slot(shape, momentum),
    }
    for key, own in ENGINES[engine].slots(oriented, sides).items():
        slots[key] = Slot(batch + own, compute)
    for prefix, factor in zip(PREFIXES, sides, strict=False):
        for key, own in factor.slots().items():
            slots[prefix + key] = Slot(batch + own, compute)
        if isinstance(factor, Refreshed):
            slots[prefix + "failures"] = Slot(batch, torch.int32)
    return Plan(shape, batch, matrix, engine, sides, tuple(slots.items()), compute)


def _in_fp32(candidate: Plan, options: Options) -> int:
    """Bytes if the parameter were fp32: the budget is a choice of factors, which must not change with the dtype."""
    sizes = {key: min(slot.dtype.itemsize, 4) for key, slot in candidate.slots}
    if not options.momentum_dtype:
        sizes["exp_avg"] = 4
    return sum(math.prod(slot.shape) * sizes[key] for key, slot in candidate.slots)


def _counters(candidate: Plan) -> int:
    """Bytes of the per-matrix counters, which the budget does not count."""
    scalars = ("step", "scale", "gain", PREFIXES[0] + "failures", PREFIXES[1] + "failures")
    return 4 * sum(math.prod(candidate.batch) for key, _ in candidate.slots if key in scalars)
