"""The contract of a curvature factor, for every row of ``FACTORS``: a new factor is tested without an edit here."""

import math

import pytest
import torch

from scao_core.config import Options
from scao_core.curvature import FACTORS, Refreshed
from scao_core.plan import _named

D, K = 12, 7


def build(name, d=D, k=K):
    return _named(name, d, k, Options(spike_rank=3, block_size=5))


def samples(d=D, k=K, seed=0, scale=1.0):
    x = torch.randn(k, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return scale * x * torch.linspace(2, 0.2, d, dtype=torch.float64)


def fed(factor, xs, rate=0.3):
    """A factor that has seen these samples, its basis refreshed where it has one to refresh."""
    state = factor.start(factor.initial(xs[0]), xs[0])
    for i, x in enumerate(xs):
        state, later = factor.accumulate(state, x, *(2 * [1.0 if i == 0 else rate]))
        state = {**state, **later}
    if isinstance(factor, Refreshed):
        state = {**state, "basis": factor.refresh(factor.snapshot(state))[0]}
    return state


@pytest.fixture(params=sorted(FACTORS))
def factor(request):
    return build(request.param)


def test_slots_are_what_is_kept(factor):
    state = fed(factor, [samples()])
    assert {key: tuple(value.shape) for key, value in state.items()} == factor.slots()


def test_batches_are_independent(factor):
    xs = torch.stack([samples(seed=s, scale=10.0**s) for s in range(3)])
    together = fed(factor, [xs])
    for i, x in enumerate(xs):
        alone = fed(factor, [x])
        white = factor.whiten({k: v[i] for k, v in together.items()}, x, 1e-3)
        # Two orders of summation in fp64, through a root.
        torch.testing.assert_close(white, factor.whiten(alone, x, 1e-3), rtol=1e-9, atol=1e-9)


def test_inverse_root_is_positive_definite_and_symmetric(factor):
    state = fed(factor, [samples(seed=s) for s in range(4)])
    root = factor.whiten(state, torch.eye(D, dtype=torch.float64), 1e-3)
    torch.testing.assert_close(root, root.T, rtol=0, atol=1e-10)
    assert torch.linalg.eigvalsh(root).min() > 0


def test_scale_equivariance(factor):
    """Samples twice as large: half the root, the same unit root, a mean four times as large."""
    one, two = (fed(factor, [samples(seed=s, scale=f) for s in range(4)]) for f in (1.0, 2.0))
    x = samples(seed=9)
    torch.testing.assert_close(factor.whiten(one, x, 1e-3), 2 * factor.whiten(two, x, 1e-3), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        factor.whiten(one, x, 1e-3, unit=True), factor.whiten(two, x, 1e-3, unit=True), rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(4 * factor.mean(one), factor.mean(two))


def test_mean_is_the_mean_energy(factor):
    xs = [samples(seed=s) for s in range(5)]
    state, energy = factor.start(factor.initial(xs[0]), xs[0]), 0.0
    for i, x in enumerate(xs):
        rate = 1.0 if i == 0 else 0.3
        state, later = factor.accumulate(state, x, rate, rate)
        energy = (1 - rate) * energy + rate * float(x.square().sum()) / K / D
        torch.testing.assert_close(float(factor.mean(state)), energy)
        state = {**state, **later}


def test_rotation_is_undone(factor):
    """W Wᵀ = I: what is rotated and rotated back is what it was."""
    state = fed(factor, [samples(seed=s) for s in range(4)])
    x = samples(seed=9)
    rotated = factor.rotate(state, x)
    assert rotated.shape == (K, factor.rotated_dim)
    torch.testing.assert_close(factor.unrotate(state, rotated), x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rotated.square().sum(), x.square().sum())


def test_nothing_given_is_written_to(factor):
    state = fed(factor, [samples()])
    before = {key: value.clone() for key, value in state.items()}
    x = samples(seed=5)
    kept = x.clone()
    (
        factor.accumulate(state, x, 0.5, 0.5),
        factor.whiten(state, x, 1e-3),
        factor.rotate(state, x),
        factor.start(state, x),
    )
    assert torch.equal(x, kept)
    assert all(torch.equal(state[key], before[key]) for key in state)


def test_dtype_is_kept(factor):
    state = fed(factor, [samples().float()])
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert factor.whiten(state, samples().float(), 1e-3).dtype == torch.float32


def test_transposed_view_gives_the_same(factor):
    """Layout is a matter of speed only."""
    state = fed(factor, [samples(seed=s) for s in range(3)])
    x = samples(seed=9)
    view = x.T.contiguous().T
    torch.testing.assert_close(factor.whiten(state, x, 1e-3), factor.whiten(state, view, 1e-3), rtol=1e-10, atol=1e-12)
    for a, b in zip(factor.accumulate(state, x, 0.5, 0.5), factor.accumulate(state, view, 0.5, 0.5), strict=True):
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", sorted(n for n, f in FACTORS.items() if issubclass(f, Refreshed)))
def test_snapshot_is_a_copy(name):
    factor = build(name)
    state = fed(factor, [samples()])
    snapshot = factor.snapshot(state)
    state["cov"].zero_()
    assert all(value.any() for value in snapshot.values())


@pytest.mark.parametrize("name", sorted(n for n, f in FACTORS.items() if issubclass(f, Refreshed)))
def test_carried_moments_keep_their_sum(name):
    """A rotation moves second moments between coordinates and loses none."""
    factor = build(name)
    old, new = (fed(factor, [samples(seed=s)])["basis"] for s in (0, 1))
    moment = samples(seed=3, d=factor.rotated_dim).square()
    carried = factor.carry(old, new, moment)
    assert carried.min() >= 0
    torch.testing.assert_close(carried.sum(-1), moment.sum(-1))
    torch.testing.assert_close(factor.carry(old, old, moment), moment, rtol=1e-9, atol=1e-9)


class TestSpiked:
    def test_finds_the_dominant_directions(self):
        """Samples with three strong directions over noise: after 300 of them V spans these, in order of strength."""
        factor, generator = build("spiked", d=40, k=8), torch.Generator().manual_seed(0)
        truth = torch.linalg.qr(torch.randn(40, 3, dtype=torch.float64, generator=generator))[0].T
        strength = torch.tensor([10.0, 6.0, 3.0], dtype=torch.float64)

        def draw():
            noise = 0.3 * torch.randn(8, 40, dtype=torch.float64, generator=generator)
            return torch.randn(8, 3, dtype=torch.float64, generator=generator) * strength @ truth + noise

        x = draw()
        state = factor.start(factor.initial(x), x)
        for t in range(1, 301):
            state, later = factor.accumulate(state, draw(), 1 / t, 1 / t)
            state = {**state, **later}
        overlap = (state["basis"] @ truth.T).abs()
        # A sampling error of 1/√2400 and a lag of the running average.
        assert overlap.diagonal().min() > 0.98
        torch.testing.assert_close(state["energy"].sqrt(), (strength**2 + 0.09).sqrt(), rtol=0.05, atol=0)
        torch.testing.assert_close(float(state["tail"]), 0.09, rtol=0.05, atol=0)

    def test_whitens_both_parts(self):
        """Two strong directions over coordinates of sizes from 0.2 to 2: second moments of whitened samples are near one."""
        d, k, generator = 40, 8, torch.Generator().manual_seed(5)
        factor = _named("spiked", d, k, Options(spike_rank=2))
        truth = torch.linalg.qr(torch.randn(d, 2, dtype=torch.float64, generator=generator))[0].T
        sizes = torch.linspace(0.2, 2, d, dtype=torch.float64)

        def draw(count):
            common = 20 * torch.randn(count, 2, dtype=torch.float64, generator=generator)
            return common @ truth + sizes * torch.randn(count, d, dtype=torch.float64, generator=generator)

        x = draw(k)
        state = factor.start(factor.initial(x), x)
        for t in range(1, 301):
            state, later = factor.accumulate(state, draw(k), 1 / t, 1 / t)
            state = {**state, **later}
        white = factor.whiten(state, draw(4000), 0.0)
        moments = white.square().mean(0)
        # A diagonal alone leaves the common directions, a flat rest sizes that differ a hundredfold. What is left: sampling
        # (2400 samples), and the directions' own share of the coordinates.
        assert moments.min() > 0.5
        assert moments.max() < 2
        assert (white @ truth.T).square().mean(0).max() < 2

    def test_rows_stay_orthonormal_in_fp32(self):
        factor = build("spiked", d=60, k=8)
        generator = torch.Generator().manual_seed(1)
        state = factor.initial(torch.zeros(()))
        for t in range(1, 60):
            x = torch.randn(8, 60, generator=generator) * 10 ** torch.randn(1, generator=generator)
            state = factor.start(state, x) if t == 1 else state
            state, later = factor.accumulate(state, x, 1 / t, 1 / t)
            state = {**state, **later}
            error = (state["basis"] @ state["basis"].T - torch.eye(3)).abs().max()
            # One round of Cholesky QR in fp32, on rows whose condition stays below about 1e2.
            assert error < 2e-3, t

    def test_a_collapsed_direction_starts_again(self):
        """The first gradient has rank one, so two directions are lost; the second brings them back."""
        factor = build("spiked", d=20, k=6)
        generator = torch.Generator().manual_seed(2)
        one = torch.outer(torch.ones(6), torch.randn(20, generator=generator)).double()
        state = factor.start(factor.initial(one), one)
        for t in range(1, 30):
            x = one if t == 1 else torch.randn(6, 20, dtype=torch.float64, generator=generator)
            state, later = factor.accumulate(state, x, 1 / t, 1 / t)
            state = {**state, **later}
        torch.testing.assert_close(
            state["basis"] @ state["basis"].T, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-6
        )


class TestBlocked:
    def test_one_block_is_dense(self):
        x = samples()
        dense, blocked = build("dense"), _named("blocked", D, K, Options(block_size=D))
        a, b = fed(dense, [x]), fed(blocked, [x])
        torch.testing.assert_close(dense.whiten(a, x, 1e-3), blocked.whiten(b, x, 1e-3))

    def test_a_block_without_gradient_stays_finite(self):
        x = samples()
        x[:, 8:] = 0
        factor = build("blocked")
        state = fed(factor, [x])
        white = factor.whiten(state, x, 1e-3)
        assert torch.isfinite(white).all()
        assert not white[:, 8:].any()
        assert bool(factor.refresh(factor.snapshot(state))[1])

    def test_blocks_cover_the_side(self):
        for d in range(1, 40):
            factor = build("blocked", d=d)
            assert factor.count * factor.side >= d > (factor.count - 1) * factor.side
            assert math.prod(factor.slots()["cov"]) == factor.count * factor.side**2
