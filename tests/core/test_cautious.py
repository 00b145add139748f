"""``cautious``: no entry moves against its gradient, and what still moves makes up for what does not."""

from __future__ import annotations

import copy

import pytest
import torch

from scao import SCAO
from scao_core.update import cautious_


def noisy(shape, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(*shape, generator=generator)
    return [0.2 * common + torch.randn(*shape, generator=generator) for _ in range(steps)]


@pytest.mark.parametrize("engine", ["kl", "soap", "spectral"])
@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (3, 8, 40), (600, 300)])
def test_no_entry_moves_against_its_gradient(engine, shape):
    param = torch.nn.Parameter(torch.zeros(shape))
    optimizer = SCAO([param], lr=1e-2, weight_decay=0.0, engine=engine)
    held = 0
    for g in noisy(shape, 4):
        before = param.detach().clone()
        param.grad = g
        optimizer.step()
        moved = before - param.detach()
        assert (moved * g >= 0).all()
        held += int((moved == 0).sum())
    assert held > 0


def test_a_gradient_that_is_zero_somewhere_moves_nothing_there():
    param = torch.nn.Parameter(torch.zeros(8, 40))
    optimizer = SCAO([param], lr=1e-2, weight_decay=0.0)
    for g in noisy((8, 40), 3):
        g[:, 7] = 0
        param.grad = g
        optimizer.step()
    assert (param[:, 7] == 0).all()


def test_entries_without_a_gradient_change_nothing_for_the_others():
    generator = torch.Generator().manual_seed(0)
    u, g = torch.randn(2, 6, 50, generator=generator), torch.randn(2, 6, 50, generator=generator)
    g[:, :, 5:] = 0  # a batch that used a tenth of an embedding's rows
    assert torch.equal(cautious_(u.clone(), g)[..., :5], cautious_(u[..., :5].clone(), g[..., :5]))
    assert not cautious_(u.clone(), g)[..., 5:].any()


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e20])
def test_what_agrees_does_not_depend_on_the_size_of_the_gradient(size):
    generator = torch.Generator().manual_seed(0)
    u, g = torch.randn(2, 5, 9, generator=generator), torch.randn(2, 5, 9, generator=generator)
    torch.testing.assert_close(cautious_(u.clone(), g * size), cautious_(u.clone(), g), rtol=0, atol=0)


def test_entries_grow_by_the_share_that_agrees_and_at_most_tenfold():
    u, g = torch.ones(1, 4, 10), torch.ones(1, 4, 10)
    g[0, :, :5] = -1
    assert torch.equal(cautious_(u.clone(), g)[0, :, 5:], torch.full((4, 5), 2.0))
    g[0] = -1
    g[0, 0, 0] = 1
    assert cautious_(u.clone(), g).sum() == 10.0
    g[0] = -1
    assert not cautious_(u.clone(), g).any()


def test_each_matrix_of_a_stack_has_its_own_share():
    generator = torch.Generator().manual_seed(0)
    u, g = torch.randn(3, 4, 10, generator=generator), torch.randn(3, 4, 10, generator=generator)
    g[0] = u[0]
    whole = cautious_(u.clone(), g)
    for i in range(3):
        assert torch.equal(whole[i], cautious_(u[i : i + 1].clone(), g[i : i + 1])[0])
    assert torch.equal(whole[0], u[0])


def test_vectors_are_adams_with_and_without():
    results = []
    for cautious in (True, False):
        param = torch.nn.Parameter(torch.zeros(40))
        optimizer = SCAO([param], lr=1e-2, cautious=cautious)
        for g in noisy((40,), 5):
            param.grad = g
            optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results)


def test_a_state_saved_before_the_option_existed_goes_on_as_it_was():
    def run(optimizer, param, grads):
        for g in grads:
            param.grad = g.clone()
            optimizer.step()
        return param.detach()

    grads = noisy((8, 40), 8)
    param = torch.nn.Parameter(torch.zeros(8, 40))
    first = SCAO([param], lr=1e-2, cautious=False, nesterov=False)
    run(first, param, grads[:4])
    saved = copy.deepcopy(first.state_dict())
    del saved["param_groups"][0]["cautious"], saved["param_groups"][0]["nesterov"]
    other = torch.nn.Parameter(param.detach().clone())
    second = SCAO([other], lr=1e-2)
    second.load_state_dict(saved)
    assert not second.param_groups[0]["cautious"]
    assert not second.param_groups[0]["nesterov"]
    assert torch.equal(run(first, param, grads[4:]), run(second, other, grads[4:]))
