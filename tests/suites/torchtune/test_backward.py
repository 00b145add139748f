"""The properties that torchtune's own tests ask of an optimizer in its in-backward wrapper, asked of SCAO."""

import pytest
import torch
from torchtune.training import create_optim_in_bwd_wrapper, register_optim_in_bwd_hooks
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

from comparing import equal
from scao import SCAO


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(10, 6)


def wrapped(module):
    by_param = {param: SCAO([param], lr=1e-2) for param in module.parameters()}
    return create_optim_in_bwd_wrapper(module, by_param), by_param


def stepped(module):
    wrapper, by_param = wrapped(module)
    register_optim_in_bwd_hooks(module, by_param)
    for _ in range(3):
        module(torch.ones(2, 10)).square().sum().backward()
    return wrapper


def test_a_backward_pass_moves_and_leaves_no_gradient(linear):
    before = [param.detach().clone() for param in linear.parameters()]
    stepped(linear)
    for param, start in zip(linear.parameters(), before, strict=True):
        assert param.grad is None
        assert not torch.equal(param, start)


def test_the_state_comes_back(linear):
    saved = stepped(linear).state_dict()
    fresh, _ = wrapped(linear)
    assert not equal(fresh.state_dict(), saved)
    fresh.load_state_dict(saved)
    assert equal(fresh.state_dict(), saved)


def test_missing_and_unexpected_parameters_are_refused(linear):
    saved = stepped(linear).state_dict()
    fresh, _ = wrapped(linear)
    with pytest.raises(RuntimeError, match="unexpected param other"):
        fresh.load_state_dict({**saved, "other": saved["weight"]})
    with pytest.raises(RuntimeError, match="Expected to load optimizer state for params"):
        fresh.load_state_dict({"weight": saved["weight"]})


def test_a_schedule_reaches_each_of_them(linear):
    wrapper, _ = wrapped(linear)
    first = next(iter(wrapper.optim_map.values()))
    wrapper.set_lr_scheduler(get_cosine_schedule_with_warmup(first, num_warmup_steps=4, num_training_steps=8))
    for _ in range(2):
        wrapper.step_lr_scheduler()
    assert {group["lr"] for one in wrapper.optim_map.values() for group in one.param_groups} == {5e-3}
    assert wrapper.get_optim_key("lr") == wrapper.get_last_lr() == 5e-3
