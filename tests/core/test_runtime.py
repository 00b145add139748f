"""Refresh schedules: every matrix once an interval, no burst, the same on every rank and after every resume."""

import pytest
import torch

from scao import SCAO
from scao_core.runtime import RUNTIMES, balanced_turns


@pytest.mark.parametrize("name", sorted(RUNTIMES))
@pytest.mark.parametrize("every", [1, 4, 10])
def test_once_an_interval(name, every):
    for turn in range(every):
        due = [RUNTIMES[name].due(t, turn, every) for t in range(1, 5 * every + 1)]
        assert sum(due) == 5
        assert [i for i, d in enumerate(due) if d] == list(range(due.index(True), 5 * every, every))


def test_staggered_spreads_the_cost():
    costs = [float(c) for c in (16**3,) * 100 + (64**3,) * 20 + (256**3,) * 10]
    loads = [0.0] * 10
    turns = balanced_turns(costs, 10, loads)
    assert max(loads) <= 1.01 * sum(costs) / 10
    assert sorted(set(turns)) == list(range(10))
    assert turns == balanced_turns(costs, 10, [0.0] * 10)


def refreshes(runtime, steps=20, every=5, count=10, shape=(80, 90)):
    params = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(count)]
    optimizer = SCAO(params, runtime=runtime, refresh_every=every, factors="dense,diagonal", bytes_per_param=20)
    generator, reports = torch.Generator().manual_seed(0), []
    optimizer.on_step(reports.append)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    return [report.refreshed for report in reports]


def test_no_burst_by_default():
    assert refreshes("staggered") == [2] * 20
    assert refreshes("inline") == ([0] * 4 + [10]) * 4


def test_a_short_side_is_refreshed_early_and_then_in_its_turn():
    assert refreshes("inline", steps=10, shape=(6, 200)) == [10, 10, 0, 10, 10, 0, 0, 0, 0, 10]
    assert refreshes("staggered", steps=10, shape=(6, 200))[4:] == [2] * 6


def test_a_group_added_later_leaves_the_turns_as_they_were():
    params = [torch.nn.Parameter(torch.zeros(6, 40)) for _ in range(7)]
    optimizer = SCAO(params[:4])
    before = optimizer._schedule()[0]
    optimizer.add_param_group({"params": params[4:]})
    assert optimizer._schedule()[0] == before


def test_both_schedules_learn_the_same_problem():
    """They differ in when a basis turns, not in what it turns to: the losses agree to a few percent."""
    losses = []
    for runtime in RUNTIMES:
        torch.manual_seed(0)
        model, x = torch.nn.Linear(40, 8), torch.randn(200, 40)
        y = torch.randn(40, 8)
        optimizer = SCAO(model.parameters(), lr=2e-2, weight_decay=0, runtime=runtime)
        for _ in range(150):
            loss = (model(x) - x @ y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.25)
