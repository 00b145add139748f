"""No step moves an entry far in weights: not farther than Adam's could by then, or than a tenth of their scale at the start."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scao import SCAO
from scao_core.engines.base import adam_bound, harmless

BETAS = [(0.9, 0.999), (0.9, 0.99), (0.95, 0.95), (0.95, 0.9025), (0.9, 0.5), (0.0, 0.999), (0.0, 0.0), (0.9, 0.0)]


def averages(samples, betas):
    """Adam's m and √v of these numbers, bias-corrected."""
    m = v = 0.0
    for g in samples:
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    t = len(samples)
    return m / (1 - betas[0] ** t), math.sqrt(v / (1 - betas[1] ** t))


@given(st.sampled_from(BETAS), st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_adam_never_exceeds_its_bound(betas, samples):
    m, root = averages(samples, betas)
    bound = adam_bound(betas, len(samples))
    # Squares below 1e-300 lose digits: a mean below 1e-150 says nothing.
    assert abs(m) <= max(root, 1e-150) * bound * (1 + 1e-9)


@pytest.mark.parametrize("betas", [b for b in BETAS if b[1] > 0])
@pytest.mark.parametrize("t", [1, 2, 7, 40])
def test_adam_reaches_its_bound(betas, t):
    # Equality in Cauchy and Schwarz: samples in proportion to the ratio of both weights.
    samples = [(betas[0] / betas[1]) ** k for k in reversed(range(t))]
    m, root = averages(samples, betas)
    assert m / root == pytest.approx(adam_bound(betas, t), rel=1e-9)


@pytest.mark.parametrize("betas", BETAS)
def test_the_bound_grows_to_its_limit(betas):
    bounds = [adam_bound(betas, t) for t in (1, 2, 5, 10, 100, 10_000, 10**9, math.inf)]
    assert bounds[0] == 1
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(bounds))  # but for rounding


def test_figures_that_the_documentation_names():
    assert [round(adam_bound((0.9, 0.999), t), 2) for t in (1, 10, 100, math.inf)] == [1, 1.04, 2.24, 7.27]


def surprising(shape, t, generator):
    """Few directions, others at each step, of sizes that jump: what the factors of the past say least about."""
    column, row = torch.randn(shape[0], 1, generator=generator), torch.randn(1, shape[1], generator=generator)
    column[torch.rand(shape[0], 1, generator=generator) < 0.7] = 0
    return (column @ row + 0.01 * torch.randn(*shape, generator=generator)) * 3.0 ** (t % 3)


@pytest.mark.parametrize("lr", [1.0, 5e-3, 1e-5])
@pytest.mark.parametrize("shape", [(16, 96), (96, 16), (300, 200)])
@pytest.mark.parametrize("options", [{}, {"cautious": False}, {"damping": 1e-4}, {"betas": (0.8, 0.95)}], ids=str)
def test_no_entry_moves_farther_than_adams_could_or_a_tenth_of_its_scale(shape, options, lr):
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = SCAO([param], lr=lr, weight_decay=0.0, **options)
    moves, bounds = [], []
    for t in range(1, 31):
        before = param.detach().clone()
        param.grad = surprising(shape, t, generator).double()
        optimizer.step()
        moves.append(float((param.detach() - before).abs().max()))
        bounds.append(lr * adam_bound(options.get("betas", (0.9, 0.999)), t))
        if t > 1:
            bounds[-1] = max(bounds[-1], min(10 * lr, 0.1 / max(shape) ** 0.5))
    # p is of order ten here at lr 1, so its change is known to 1e-14
    assert all(move <= bound + 1e-12 for move, bound in zip(moves, bounds, strict=True))
    # These gradients press against Adam's bound, and where more is harmless they go farther.
    assert max(moves[:10]) > lr * (0.99 if lr == 1 else 1.15)


@pytest.mark.parametrize(("lr", "farthest"), [(0.0, math.inf), (1e-4, 100.0), (2e-3, 5.0), (1e-2, 1.0)])
def test_harmless_is_a_length_in_weights_not_in_learning_rates(lr, farthest):
    assert harmless(lr, 100) == pytest.approx(farthest)
    assert harmless(lr, 400) == pytest.approx(farthest / 2)


def test_a_low_learning_rate_shortens_the_step_and_not_its_entries():
    """Far below the best rate nothing is cut off, so U does not depend on lr."""
    steps = []
    for lr in (1e-6, 1e-5, 1e-4):
        generator = torch.Generator().manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(16, 96, dtype=torch.float64))
        optimizer = SCAO([param], lr=lr, weight_decay=0.0)
        for t in range(1, 6):
            param.grad = surprising((16, 96), t, generator).double()
            optimizer.step()
        steps.append(param.detach() / lr)
    torch.testing.assert_close(steps[0], steps[1], rtol=0, atol=1e-9)
    torch.testing.assert_close(steps[0], steps[2], rtol=0, atol=1e-9)
    assert steps[0].abs().max() > 1 + 4 * adam_bound((0.9, 0.999), 5)  # farther than Adam's could have come


@pytest.mark.parametrize("engine", ["kl", "soap", "spectral"])
def test_the_first_step_is_adamws_where_most_gradients_are_zero(engine):
    param = torch.nn.Parameter(torch.zeros(40, 60))
    other = torch.nn.Parameter(torch.zeros(40, 60))
    grad = torch.zeros(40, 60)
    grad[3] = torch.randn(60, generator=torch.Generator().manual_seed(0))
    param.grad, other.grad = grad.clone(), grad.clone()
    SCAO([param], lr=1e-2, weight_decay=0.0, engine=engine).step()
    torch.optim.AdamW([other], lr=1e-2, weight_decay=0.0).step()
    # eps: AdamW's is absolute, ours relative to the largest gradient; 1e-8 of entries of order one in both
    torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("shape", [(16, 300), (300, 16), (4, 40)])
def test_a_gradient_in_one_coordinate_of_the_wide_side_moves_it(shape):
    """Its direction then holds all there is, and the profile beside it is rounding, which must not become a size."""
    param = torch.nn.Parameter(torch.zeros(shape))
    optimizer = SCAO([param], lr=1.0, factors="dense,spiked", cautious=False, weight_decay=0.0)
    for t in range(12):
        gradient = torch.zeros(shape)
        column = gradient[:, 0] if shape[0] < shape[1] else gradient[0]
        column.copy_(torch.randn(len(column), generator=torch.Generator().manual_seed(t)))
        before = param.detach().clone()
        param.grad = gradient
        optimizer.step()
        # Adam's is near 1 at first and 0.2 to 0.3 on noise later on.
        assert (param.detach() - before).square().sum().div(len(column)).sqrt() > 0.05, t
