"""What becomes of a matrix whose covariance or basis is found damaged."""

from __future__ import annotations

from torch import Tensor

from .curvature import Refreshed, State
from .engines import PREFIXES
from .plan import Plan
from .stacks import Unit


def is_recomputable(plan: Plan, key: str) -> bool:
    """Whether it is a basis that follows from its factor, and that only a refresh changes."""
    side = plan.sides[PREFIXES.index(key.removesuffix("basis").removesuffix("cov"))]
    return key.endswith("basis") and isinstance(side, Refreshed)


def recomputed(plan: Plan, state: State, key: str) -> Tensor:
    """The basis from what its factor has accumulated; the diagonal one where that fails."""
    prefix = key.removesuffix("basis")
    factor = plan.sides[PREFIXES.index(prefix)]
    if not isinstance(factor, Refreshed):
        raise TypeError(f"{factor.name} has nothing to refresh")
    own = {name.removeprefix(prefix): value.unsqueeze(0) for name, value in state.items() if name.startswith(prefix)}
    return factor.refresh(factor.snapshot(own))[0].squeeze(0)


def forget(plan: Plan, state: State) -> None:
    """Make the state of one matrix that of a new one, in place; its scale, and the counter, which lies elsewhere, stay."""
    for key, value in state.items():
        if key not in ("scale", "step"):
            value.zero_()
    for prefix, factor in zip(PREFIXES, plan.sides, strict=False):
        if isinstance(factor, Refreshed):
            state[prefix + "basis"].copy_(factor.diagonal_basis(state[prefix + "basis"]))


def restart(unit: Unit) -> None:
    """Forget all that is known of a matrix in the middle of a step, which becomes its first."""
    forget(unit.job.plan, unit.state)
    step = unit.job.state["step"]
    (step[unit.part] if step.dim() else step).fill_(1)
    unit.t = 1


def repaired_copy(plan: Plan, state: State, gone: list[tuple[str, int]]) -> State:
    """A copy of a parameter's state in which the damaged tensors of its matrices, by key and matrix, are made anew."""
    copy = {key: value.clone() for key, value in state.items()}
    for part in {part for _, part in gone}:
        own = {key: value[part] if plan.batch else value for key, value in copy.items()}
        keys = [key for key, damaged in gone if damaged == part]
        if all(is_recomputable(plan, key) for key in keys):
            for key in keys:
                own[key].copy_(recomputed(plan, own, key))
        else:
            forget(plan, own)
            own["step"].zero_()
    return copy
