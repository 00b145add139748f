"""From parameters to stacks of equal matrices and back.

A *unit* is one matrix (or vector) of one parameter: a 3-D parameter of E experts is E units. Units with the same plan,
step count and group are handled in one call, as a stack or as a list of views. The state of a
parameter stays in its own tensors under ``optimizer.state[p]``, which is what makes saving, copying and moving it an
ordinary matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .curvature import Refreshed, State
from .engines import PREFIXES, Batch
from .engines.base import Direction
from .errors import ConfigError
from .plan import Plan
from .update import LARGEST, momentum_

# Elements handled at once: on a CPU enough matrices to share the cost of a call, and few enough for the temporaries to
# stay small (chosen with `make bench-step` on one CPU); on an accelerator only launches count (chosen, not measured).
_PIECE = {"cpu": 2**22}
_PIECE_ELSEWHERE = 2**25
SLICE = 262144  # elements of a piece of a large tensor on the Adam path (chosen by measurement on one CPU)
# From this many elements on, a matrix is read where it lies: copying it into a stack costs more than a call for each
# (chosen by measurement on one CPU).
_LARGE = 2**16
# Gradients and scales between the reciprocal and this may be squared and summed as they are (chosen: its square times a
# sum of 10^7 elements stays far inside fp32).
_MODERATE = 2.0**40


@dataclass(slots=True)
class Job:
    """One parameter in one step."""

    param: Tensor
    grad: Tensor
    plan: Plan
    group: dict[str, Any]
    turns: tuple[tuple[int, ...], ...]
    """For each unit, the turn of each of its sides in the refresh schedule."""
    name: str
    number: int
    """Position among all parameters of the optimizer."""
    peaks: list[float] = field(default_factory=list)
    """Largest absolute entry of the gradient of each unit."""
    state: State = field(default_factory=dict)


@dataclass(slots=True)
class Unit:
    """One matrix of one parameter: views, so that writing to them writes to the parameter and to its state."""

    job: Job
    param: Tensor
    grad: Tensor
    state: State
    t: int
    turns: tuple[int, ...]
    part: int = 0
    """Which matrix of the parameter it is, or which piece of a large vector."""

    @property
    def label(self) -> str:
        """Name of its parameter, with the number of the matrix where that holds several."""
        return f"{self.job.name}[{self.part}]" if self.job.plan.batch else self.job.name

    @property
    def seed(self) -> int:
        """A number of its own for each unit and step, for stochastic rounding."""
        return (self.job.number << 64) | (self.part << 32) | self.t


Home = Callable[[Tensor, str], torch.device]
"""The device of a state tensor, by parameter and key."""


def create_state(plan: Plan, param: Tensor, device: Home) -> State:
    """All state tensors of a parameter, as the plan lists them."""
    state: State = {}
    for key, slot in plan.slots:
        state[key] = torch.zeros(slot.shape, dtype=slot.dtype, device=device(param, key))
    for prefix, factor in zip(PREFIXES, plan.sides, strict=False):
        if isinstance(factor, Refreshed):
            state[prefix + "basis"] = factor.diagonal_basis(state[prefix + "basis"], plan.batch)
    return state


def conformed(state: State, job: Job, device: Home) -> State:
    """The state, moved and cast if the parameter has moved or changed its dtype since (``model.to(…)``).

    Args:
        device: where each tensor belongs.

    Raises:
        ConfigError: an option that shapes the state, or the parameter's shape, was changed while there was a state.
    """
    plan, param = job.plan, job.param
    if {key: tuple(value.shape) for key, value in state.items()} != {key: slot.shape for key, slot in plan.slots}:
        raise ConfigError(
            f"parameter {job.name}: its state was made for other options or another shape than {plan.describe()} of "
            f"{plan.shape}; change the engine, the factors or the shape only with a new optimizer"
        )
    return {k: state[k].to(device(param, k), slot.dtype) for k, slot in plan.slots}


def settled(job: Job) -> bool:
    """Whether the state is where the parameter is and in its dtype: what may change from one step to the next."""
    state, device = job.state, job.param.device
    here = state["exp_avg"].device == device and state["step"].device.type == "cpu"
    return here and state["scale"].dtype == job.plan.compute


def has_scale(job: Job) -> bool:
    """Whether each unit of the parameter has had its first gradient."""
    if not job.state:
        return False
    step = job.state["step"]
    return bool((step > 0).all()) if step.dim() else step.item() > 0


def advance(job: Job) -> list[Unit]:
    """Count one step for each unit of a parameter that has a gradient, and return those units.

    A unit whose gradient is exactly zero keeps its state and its counter. The first gradient fixes the unit's scale.
    """
    step = job.state["step"]
    counts = [int(t) for t in (step.tolist() if step.dim() else [step.item()])]
    active = [e for e, peak in enumerate(job.peaks) if peak > 0]
    if not active:
        return []
    _set_scale(job, [e for e in active if counts[e] == 0])
    if step.dim():
        step[active] += 1
    else:
        step.fill_(counts[0] + 1)
    return [_unit(job, e, counts[e] + 1) for e in active]


def _set_scale(job: Job, first: list[int]) -> None:
    """The power of two at or below the peak of a unit's first gradient, within 2^±100, so that its reciprocal is finite."""
    if not first:
        return
    powers = [2.0 ** max(-100, min(100, math.frexp(job.peaks[e])[1] - 1)) for e in first]
    flat = job.state["scale"].view(-1)
    if flat.numel() == 1:
        flat.fill_(powers[0])
    else:
        flat[first] = torch.tensor(powers, dtype=flat.dtype, device=flat.device)


def _unit(job: Job, e: int, t: int) -> Unit:
    plan, grad = job.plan, job.grad
    state = {key: value for key, value in job.state.items() if key != "step"}
    if plan.shape != plan.batch + plan.matrix:
        # What has the parameter's shape is seen as the matrix; Adam's second moment too, not that of a rotated basis.
        grad = grad.reshape(plan.batch + plan.matrix)
        for key in ("exp_avg",) if plan.is_matrix else ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].view(plan.batch + plan.matrix)
    if not plan.batch:
        return Unit(job, job.param, grad, state, t, job.turns[0] if job.turns else ())
    state = {key: value[e] for key, value in state.items()}
    return Unit(job, job.param[e], grad[e], state, t, job.turns[e] if job.turns else (), e)


def stacks(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    """Units that are handled in one call, in a fixed order."""
    equal: dict[tuple[object, ...], list[Unit]] = {}
    for unit in units:
        job = unit.job
        key = (id(job.group), id(job.plan), unit.t, job.param.dtype, job.param.device, job.grad.dtype)
        equal.setdefault(key, []).append(unit)
    for group in equal.values():
        job = group[0].job
        size = 1 if job.group["foreach"] is False else _piece(job.param.device)
        count = max(1, size // max(1, math.prod(job.plan.matrix)))
        for start in range(0, len(group), count):
            yield from slices(group[start : start + count])


def _piece(device: torch.device) -> int:
    return _PIECE.get(device.type, _PIECE_ELSEWHERE)


def slices(units: list[Unit]) -> Iterator[list[Unit]]:
    """A large tensor on the Adam path is cut into pieces, since its rule is element-wise; all else stays as it is."""
    unit = units[0]
    numel, size = unit.param.numel(), SLICE if unit.param.device.type == "cpu" else _PIECE_ELSEWHERE
    if len(units) > 1 or unit.job.plan.is_matrix or numel <= size or not unit.param.is_contiguous():
        yield units
        return
    param, grad = unit.param.view(-1), unit.grad.view(-1) if unit.grad.is_contiguous() else unit.grad.reshape(-1)
    for start in range(0, numel, size):
        part = slice(start, start + size)
        state = {key: value.view(1, -1)[:, part] if value.dim() else value for key, value in unit.state.items()}
        yield [Unit(unit.job, param[part], grad[part].view(1, -1), state, unit.t, (), start // size)]


def in_place(units: list[Unit]) -> bool:
    """Whether it is a piece of a large tensor that one in-place rule can take: all in one dtype, nothing negated or rounded."""
    unit = units[0]
    if len(units) > 1 or unit.job.plan.is_matrix or unit.param.numel() == unit.job.param.numel():
        return False
    dtypes = {unit.param.dtype, unit.grad.dtype, unit.state["exp_avg"].dtype, unit.state["exp_avg_sq"].dtype}
    return len(dtypes) == 1 and not unit.job.group["maximize"]


def stack(tensors: list[Tensor], device: torch.device | None = None) -> Tensor:
    """(N, …), on a device where one is named; a view where there is only one and it is there."""
    result = tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)
    return result if device is None else result.to(device, non_blocking=True)


def load(units: list[Unit]) -> State:
    """The stacked state without momentum and counters, where the parameters are."""
    keys = [key for key in units[0].state if key != "exp_avg" and not key.endswith("failures")]
    return {key: stack([u.state[key] for u in units], units[0].param.device) for key in keys}


def take_in(units: list[Unit], scale: Tensor, rate: float) -> Batch:
    """M <- (1 - rate) M + rate G in the state, and both as a batch; ``scale`` is (N)."""
    job = units[0].job
    grads = limited(units)
    averages = [u.state["exp_avg"] for u in units]
    if job.group["maximize"] or grads[0].dtype != job.plan.compute:
        grads = [(-g if job.group["maximize"] else g).to(job.plan.compute) for g in grads]
    if averages[0].dtype == job.plan.compute:
        momentum_(averages, grads, rate)
    else:
        exact = [m.to(job.plan.compute) for m in averages]
        momentum_(exact, grads, rate)
        largest = min(torch.finfo(averages[0].dtype).max, torch.finfo(job.plan.compute).max)
        torch._foreach_copy_(averages, [m.clamp_(-largest, largest) for m in exact])
        averages = exact
    if job.group["nesterov"] and job.plan.is_matrix:
        averages = list(torch._foreach_lerp(averages, grads, rate))
    unit = scale.reciprocal().reshape(-1, 1, 1)
    grads, averages = [orient(g, job.plan) for g in grads], [orient(m, job.plan) for m in averages]
    # On an accelerator launches count, and a stack is better than a call for each matrix.
    views = job.param.device.type == "cpu" and (len(units) == 1 or grads[0].numel() >= _LARGE)
    return Batch(grads, averages, unit, _sizes(units)[0], views)


def limited(units: list[Unit]) -> list[Tensor]:
    """The gradients, cut off at 2^50 times the tensor's first one where they may be larger.

    Sums of squares then stay finite, and so does the momentum in units of the scale, for good.
    """
    if _sizes(units)[1]:
        return [u.grad for u in units]
    bounds = [(u.state["scale"] * LARGEST).to(u.grad.dtype) for u in units]
    return [u.grad.clamp(-bound, bound) for u, bound in zip(units, bounds, strict=True)]


def _sizes(units: list[Unit]) -> tuple[bool, bool]:
    """Whether gradients and scales are of moderate size, and whether no gradient is far larger than the first one.

    On a CPU the scale can be read at no cost; elsewhere a pass over the gradients is cheaper than waiting for it.
    """
    if units[0].param.device.type != "cpu":
        return False, False
    scales = [u.state["scale"].item() for u in units]
    peaks = [u.job.peaks[u.part] if u.job.plan.batch else max(u.job.peaks) for u in units]
    within = all(p <= LARGEST * s for p, s in zip(peaks, scales, strict=True))
    return within and all(1 / _MODERATE < x < _MODERATE for x in (*scales, *peaks)), within


def parts(units: list[Unit], batch: Batch, direction: Direction) -> Iterator[tuple[list[Unit], list[Tensor], Tensor]]:
    """Units with their gradients and directions (N, r, n): all at once for a stack, else one by one."""
    if isinstance(direction, Tensor):
        yield units, batch.grads, direction
        return
    for unit, g, u in zip(units, batch.grads, direction, strict=True):
        yield [unit], [g], u.unsqueeze(0)


def store(units: list[Unit], changed: State) -> None:
    """Write changed entries of the stacked state back."""
    for key, value in changed.items():
        torch._foreach_copy_([u.state[key] for u in units], list(value.unbind(0)))


def orient(x: Tensor, plan: Plan) -> Tensor:
    """Rows × columns to r × n and back, as a view."""
    return x.mT if plan.transposed else x
