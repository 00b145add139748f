"""Eyes on each step of SCAO in a framework, and the same steps once more without it."""

from dataclasses import dataclass, field

import pytest
import torch

from scao import SCAO


@dataclass
class Steps:
    """Each step of the instances of SCAO, with the gradients and rates that it got."""

    optimizers: list = field(default_factory=list)
    rates: list = field(default_factory=list)
    grads: list = field(default_factory=list)
    start: dict = field(default_factory=dict)
    watching: bool = True

    def note(self, optimizer):
        """Before a step."""
        if not self.watching:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if optimizer not in self.optimizers:
            self.start |= {param: param.detach().clone() for param in params if param.requires_grad}
        self.optimizers.append(optimizer)
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.grads.append({param: param.grad.clone() for param in params if param.grad is not None})


@pytest.fixture
def steps(monkeypatch):
    """Watch ``SCAO.step``; what it does stays as it is."""
    seen, step = Steps(), SCAO.step

    def watched(self, *arguments):
        seen.note(self)
        return step(self, *arguments)

    monkeypatch.setattr(SCAO, "step", watched)
    return seen


def assert_replayed(steps, **options):
    """The same gradients and rates make the same weights with SCAO alone, bit for bit: the framework takes or adds nothing."""
    steps.watching, trained = False, list(steps.start)
    copies = {param: torch.nn.Parameter(start.clone()) for param, start in steps.start.items()}
    (optimizer,) = set(steps.optimizers)  # whose turns to refresh go by all its parameters, frozen ones too
    alone = SCAO([copies.get(p, p) for group in optimizer.param_groups for p in group["params"]], **options)
    for rate, grads in zip(steps.rates, steps.grads, strict=True):
        alone.param_groups[0]["lr"] = rate
        for param in trained:
            copies[param].grad = grads.get(param)
        alone.step()
    assert trained
    for param in trained:
        assert torch.equal(param, copies[param])
        assert not torch.equal(param, steps.start[param])
