"""One stack of equal matrices moves: momentum, direction, parameters, state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from . import stacks
from .engines import ENGINES, Context, adam_step_, default_damping, rate
from .update import apply_, cautious_, decay_, limited_


def move(units: list[stacks.Unit]) -> int:
    """Take the step of one stack. Returns how many decompositions failed in the rule itself."""
    job, t = units[0].job, units[0].t
    group, engine = job.group, ENGINES[job.plan.engine]
    beta = group["betas"][1] if group["curvature_beta"] is None else group["curvature_beta"]
    damping = default_damping(min(job.plan.matrix)) if group["damping"] is None else group["damping"]
    lr, weight_decay = float(group["lr"]), group["weight_decay"]
    length = max(job.plan.matrix)
    context = Context(t, tuple(group["betas"]), beta, group["eps"], damping, group["norm_rule"], lr, length)
    if stacks.in_place(units):
        adam_step_(units[0].param, units[0].state, stacks.limited(units)[0], context, lr, weight_decay)
        return 0
    state = stacks.load(units)
    # M <- b M + (1-b) G
    batch = stacks.take_in(units, state.pop("scale"), rate(context.betas[0], t))
    # U <- the rule's direction;  W <- (1 - lr wd) W - lr U
    changed, direction = engine.direction(state, batch, job.plan.sides, context)
    for part, grads, u in stacks.parts(units, batch, direction):
        if job.plan.is_matrix:
            u = limited_(cautious_(u, stacks.stack(grads)) if group["cautious"] else u, engine.farthest(context))
        moved = stacks.orient(u, job.plan)
        noise = [unit.seed for unit in part] if group["stochastic_rounding"] else None
        apply_([unit.param for unit in part], moved, lr, weight_decay, noise)
    # What a rule hands back as it was, such as a basis between two refreshes, is not written.
    stacks.store(units, {key: value for key, value in changed.items() if value is not state[key]})
    return sum(context.failed)


def decay_idle(job: stacks.Job, active: list[stacks.Unit]) -> None:
    """A gradient that is exactly zero says nothing: only the weight decay acts."""
    lr, weight_decay = float(job.group["lr"]), job.group["weight_decay"]
    if not active:
        decay_([job.param], lr, weight_decay)
    elif len(active) < len(job.peaks):
        decay_([job.param[e] for e, peak in enumerate(job.peaks) if peak == 0], lr, weight_decay)


@contextmanager
def full_precision(devices: set[str]) -> Iterator[None]:
    """Autocast off: a step inside an autocast region must not round its statistics to bf16."""
    with ExitStack() as stack:
        for device in sorted(devices):
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
