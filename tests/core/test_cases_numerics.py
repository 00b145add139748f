"""Bad batches, bad matrices, extreme scales: training goes on, finite, and says what happened."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from comparing import equal
from scao import SCAO, NonFiniteGradientError

ENGINES = ("kl", "soap", "spectral")
SHAPES = ((7,), (), (8, 40), (40, 8), (12, 12), (3, 6, 20), (6, 3, 3, 3), (0, 4))
KINDS = {
    "vector": (30,),
    "wide": (8, 40),
    "tall": (40, 8),
    "square": (12, 12),
    "experts": (3, 6, 20),
    "conv": (6, 3, 3, 3),
}


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Parameter:
    return Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def noise(p: Tensor, seed: int) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)


def low_rank(shape: tuple[int, ...], t: int) -> Tensor:
    """A gradient with strong directions and noise, as real ones have."""
    generator = torch.Generator().manual_seed(t)
    if len(shape) < 2:
        return torch.randn(shape, generator=generator)
    left = torch.randn(*shape[:-1], 2, generator=generator)
    right = torch.randn(2, shape[-1], generator=torch.Generator().manual_seed(99))
    return left @ right + 0.1 * torch.randn(shape, generator=generator)


def snapshot(opt: SCAO, params: list[Parameter]) -> tuple[list[Tensor], dict[str, Any]]:
    return [p.detach().clone() for p in params], copy.deepcopy(opt.state_dict())


def finite(opt: SCAO, params: list[Parameter]) -> bool:
    state = [v for entry in opt.state.values() for v in entry.values()]
    return all(bool(torch.isfinite(x).all()) for x in [*params, *state])


# --- case 27: a bad batch ----------------

BAD = {"nan": float("nan"), "+inf": float("inf"), "-inf": float("-inf")}


@pytest.mark.parametrize(
    ("victim", "bad"), [(i, list(BAD)[i % 3]) for i in range(len(SHAPES) - 1)], ids=lambda v: str(v)
)
@pytest.mark.parametrize("engine", ENGINES)
def test_one_bad_element_skips_the_whole_step(engine: str, bad: str, victim: int) -> None:
    params = [make(s, seed=i) for i, s in enumerate(SHAPES)]
    clean = [Parameter(p.detach().clone()) for p in params]
    options: dict[str, Any] = {"lr": 1e-2, "engine": engine, "refresh_every": 3}
    opt, reference = SCAO(params, **options), SCAO(clean, **options)
    reports = []
    opt.on_step(reports.append)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for t in range(9):
            for i, p in enumerate(params):
                p.grad = noise(p, 31 * t + i)
                clean[i].grad = p.grad.clone()
            if t in (4, 6):
                flat = params[victim].grad.view(-1)
                flat[(flat.numel() - 1) * (t == 6)] = BAD[bad]  # first or last element
                before = snapshot(opt, params)
                opt.step()
                assert equal(snapshot(opt, params), before)
            else:
                opt.step()
                reference.step()
    # the run is the run without the bad batches
    assert equal([p.detach() for p in params], [p.detach() for p in clean])
    assert equal(opt.state_dict(), reference.state_dict())
    assert opt.skipped_steps == opt.report().skipped_steps == 2
    assert opt.report().steps == 7
    assert [r.skipped for r in reports] == [t in (4, 6) for t in range(9)]
    assert all(len(r.nonfinite) == 1 for r in reports if r.skipped)
    assert len([w for w in seen if "skipped" in str(w.message)]) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bad_first_step_leaves_a_fresh_optimizer(engine: str) -> None:
    p = make((8, 40))
    opt = SCAO([p], engine=engine)
    p.grad = torch.full_like(p, float("nan"))
    before = snapshot(opt, [p])
    with pytest.warns(UserWarning, match="skipped"):
        opt.step()
    assert equal(snapshot(opt, [p]), before)
    assert not opt.state_dict()["state"]
    p.grad = noise(p, 0)
    opt.step()
    assert opt.state[p]["step"].item() == 1


def test_named_parameters_are_named_in_the_warning_and_report() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    opt = SCAO(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[1].bias.grad[0] = float("nan")
    with pytest.warns(UserWarning, match=r"1\.bias"):
        opt.step()
    assert opt.report().last is not None
    assert opt.report().last.nonfinite == ("1.bias",)


@pytest.mark.parametrize("bad", BAD)
def test_raise_instead_of_skip(bad: str) -> None:
    params = [make(s, seed=i) for i, s in enumerate(SHAPES)]
    opt = SCAO(params, on_nonfinite="raise")
    for t in range(2):
        for i, p in enumerate(params):
            p.grad = noise(p, 31 * t + i)
        if t == 0:
            opt.step()
    params[3].grad[0, 0] = BAD[bad]
    before = snapshot(opt, params)
    with pytest.raises(NonFiniteGradientError, match="nothing was changed"):
        opt.step()
    assert equal(snapshot(opt, params), before)
    params[3].grad = noise(params[3], 5)
    opt.step()
    assert opt.state[params[0]]["step"].item() == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_bad_values_are_seen_in_every_dtype(dtype: torch.dtype) -> None:
    for bad in BAD.values():
        p = make((8, 40), dtype)
        opt = SCAO([p])
        p.grad = noise(p, 0)
        p.grad[3, 5] = bad
        start = p.detach().clone()
        with pytest.warns(UserWarning, match="skipped"):
            opt.step()
        assert torch.equal(p, start)


# --- case 28: GradScaler ----------------


@pytest.mark.parametrize("engine", ENGINES)
def test_grad_scaler_skips_and_goes_on(engine: str) -> None:
    p, q = make((8, 40)), make((8, 40))
    opt, plain = SCAO([p], engine=engine, lr=1e-2), SCAO([q], engine=engine, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for t in range(6):
        before = snapshot(opt, [p])
        opt.zero_grad()
        scaler.scale((p * noise(p, t)).sum() * (float("inf") if t in (0, 3) else 1.0)).backward()
        scaler.step(opt)
        scaler.update()
        if t in (0, 3):
            assert equal(snapshot(opt, [p]), before)
        else:
            q.grad = noise(q, t)
            plain.step()
    assert scaler.get_scale() == 2.0**8  # halved twice
    # the loss scale is a power of two, so the unscaled gradients are the plain ones to the bit
    assert torch.equal(p, q)
    assert opt.state[p]["step"].item() == 4


# --- case 26, 29: decompositions that fail ----------------


def broken(mode: str, good_after: int | None = None) -> Callable[..., Any]:
    original, calls = torch.linalg.eigh, [0]

    def eigh(a: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if good_after is not None and calls[0] > good_after:
            return original(a, *args, **kwargs)
        if mode == "raise":
            raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")
        values, vectors = original(a, *args, **kwargs)
        return values, torch.full_like(vectors, float("nan"))

    return eigh


def train_low_rank(opt: SCAO, params: list[Parameter], steps: int) -> None:
    for t in range(steps):
        for i, p in enumerate(params):
            p.grad = low_rank(tuple(p.shape), 31 * t + i)
        opt.step()


@pytest.mark.parametrize("mode", ["raise", "nan"])
@pytest.mark.parametrize("engine", ENGINES)
def test_eigh_fails_once(engine: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The retry gives a good basis: no failure to report, and the run is that of a working decomposition."""

    def run() -> tuple[SCAO, list[Parameter]]:
        params = [make((8, 40)), make((12, 12))]
        opt = SCAO(params, lr=1e-2, engine=engine, refresh_every=2)
        train_low_rank(opt, params, 8)
        return opt, params

    _, expected = run()
    monkeypatch.setattr(torch.linalg, "eigh", broken(mode, good_after=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt, params = run()
    assert finite(opt, params)
    assert opt.report().failed_refreshes == 0
    for p, q in zip(params, expected, strict=True):
        # the retry is in fp64 as the first try is, up to jitter of 1e-10
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shapes", [[(8, 40)], [(12, 12), (40, 8)], [(3, 6, 20)], [(80, 300)]], ids=str)
@pytest.mark.parametrize("mode", ["raise", "nan"])
@pytest.mark.parametrize("engine", ENGINES)
def test_eigh_fails_always(
    engine: str, mode: str, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", broken(mode))
    params = [make(s, seed=i) for i, s in enumerate(shapes)]
    start = [p.detach().clone() for p in params]
    opt = SCAO(params, lr=1e-2, weight_decay=0.0, engine=engine, refresh_every=2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train_low_rank(opt, params, 12)
    assert finite(opt, params)
    assert all(bool((p != q).any()) for p, q in zip(params, start, strict=True))
    # twelve steps of about lr each, with a factor for rules that are normalized as a whole
    assert all((p - q).square().mean().sqrt() < 3 * 12e-2 for p, q in zip(params, start, strict=True))
    assert len(seen) == 1, [str(w.message) for w in seen]
    assert "failed" in str(seen[0].message)
    report = opt.report()
    assert report.failed_refreshes > 0
    assert report.steps == 12
    assert str(report.failed_refreshes) in str(report)


@pytest.mark.parametrize("engine", ["kl", "soap"])
def test_a_basis_is_given_up_after_three_failures_and_taken_again(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = make((8, 40))
    opt = SCAO([p], lr=1e-2, engine=engine, refresh_every=2, runtime="inline")
    train_low_rank(opt, [p], 4)
    assert opt.report().refreshed == 3  # after the first gradient too
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch.linalg, "eigh", broken("raise"))
        train_low_rank(opt, [p], 10)
        assert opt.report().failed_refreshes == 5
        assert opt.report().degraded == 1
        assert finite(opt, [p])
    train_low_rank(opt, [p], 4)
    assert opt.report().refreshed == 5
    assert opt.report().degraded == 1
    assert finite(opt, [p])
    assert opt.report().last is not None
    assert opt.report().last.failed == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_matrix_that_fails_suffers(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batched decomposition one matrix that does not converge must not spoil the others."""
    original = torch.linalg.eigh

    def eigh(a: Tensor, *args: Any, **kwargs: Any) -> Any:
        if a.dim() > 2 and a.shape[0] > 1:
            raise torch.linalg.LinAlgError("(Batch element 1): the algorithm failed to converge")
        return original(a, *args, **kwargs)

    def run() -> list[Tensor]:
        params = [make((8, 40), seed=i) for i in range(3)]
        opt = SCAO(params, lr=1e-2, engine=engine, refresh_every=2, runtime="inline")
        train_low_rank(opt, params, 6)
        assert opt.report().failed_refreshes == 0
        return [p.detach() for p in params]

    expected = run()
    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    for p, q in zip(run(), expected, strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-5)


# --- degenerate gradients ----------------


def degenerate(kind: str, p: Tensor, t: int) -> Tensor:
    g = noise(p, t)
    if kind == "constant":
        return torch.ones_like(p)
    if kind == "the same at every step":
        return noise(p, 0)
    if kind == "one element":
        g.zero_().view(-1)[p.numel() // 2] = 1.0
        return g
    if kind == "rank one" and p.dim() >= 2:
        return g[..., :1] * noise(p, 7)[..., :1, :]
    if kind == "fixed rank one" and p.dim() >= 2:
        return noise(p, 3)[..., :1] * noise(p, 7)[..., :1, :]
    if kind == "zero rows" and p.dim() >= 2:
        g[..., ::2, :] = 0
    if kind == "zero columns":
        g[..., ::2] = 0
    if kind == "another row at each step" and p.dim() >= 2:
        keep = t % p.shape[-2]
        g[..., torch.arange(p.shape[-2]) != keep, :] = 0
    if kind == "columns of very different size":
        g *= torch.logspace(-18, 18, p.shape[-1])
    if kind == "rows of very different size" and p.dim() >= 2:
        g *= torch.logspace(-18, 18, p.shape[-2])[:, None]
    if kind == "subnormal":
        g *= 1e-41
    if kind == "alternating sign":
        g = noise(p, 0) * (-1) ** t
    if kind == "zero at most steps" and t % 4:
        g.zero_()
    return g


DEGENERATE = (
    "constant",
    "the same at every step",
    "one element",
    "rank one",
    "fixed rank one",
    "zero rows",
    "zero columns",
    "another row at each step",
    "columns of very different size",
    "rows of very different size",
    "subnormal",
    "alternating sign",
    "zero at most steps",
)


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("engine", ENGINES)
def test_degenerate_gradients_stay_finite_and_bounded(engine: str, kind: str) -> None:
    for factors in ("auto", "blocked,blocked"):
        params = [make(s, seed=i) for i, s in enumerate(SHAPES) if s != (0, 4)]
        start = [p.detach().clone() for p in params]
        opt = SCAO(params, lr=1e-3, weight_decay=0.0, engine=engine, factors=factors, block_size=6, refresh_every=3)
        for t in range(10):
            for p in params:
                p.grad = degenerate(kind, p, t) if p.dim() else noise(p, t)
            opt.step()
            assert finite(opt, params), (factors, t)
        assert opt.skipped_steps == 0
        assert opt.report().failed_refreshes == 0
        for p, q in zip(params, start, strict=True):
            # Gradients in one direction only may use the whole norm for it: lr · sqrt(size) a step is the most that a rule
            # normalized as a whole can do, and a damping of 1e-3 can stretch a whitened one by its inverse root.
            reach = 10 * 1e-3 * max(1.0, math.sqrt(p.numel())) / math.sqrt(1e-3)
            assert (p - q).abs().max() <= reach, (factors, tuple(p.shape))


@pytest.mark.parametrize("options", [{"eps": 0}, {"damping": 0}, {"eps": 0, "damping": 0}, {"betas": (0, 0)}], ids=str)
@pytest.mark.parametrize("kind", ["zero rows", "zero columns", "one element", "fixed rank one", "random"])
@pytest.mark.parametrize("engine", ENGINES)
def test_allowed_options_at_their_limits_stay_finite(engine: str, kind: str, options: dict[str, Any]) -> None:
    """What the options accept must not write NaN into the weights."""
    params = [make(s, seed=i) for i, s in enumerate(SHAPES)]
    opt = SCAO(params, lr=1e-3, engine=engine, refresh_every=3, **options)
    for t in range(8):
        for p in params:
            p.grad = degenerate(kind, p, t) if p.dim() and p.numel() else noise(p, t)
        opt.step()
    assert all(bool(torch.isfinite(p).all()) for p in params)


# --- scales ----------------


def displacement(engine: str, shape: tuple[int, ...], scale: float, factors: str = "auto", **options: bool) -> Tensor:
    p = Parameter(torch.zeros(shape))
    opt = SCAO([p], lr=1e-3, weight_decay=0.0, engine=engine, factors=factors, refresh_every=3, **options)
    for t in range(8):
        p.grad = (low_rank(shape, t).double() * scale).float()
        opt.step()
        assert torch.isfinite(p).all()
    return p.detach()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_direction_does_not_depend_on_the_scale_of_the_loss(engine: str, kind: str) -> None:
    """1e-2 relative: gradients that are multiples of each other by no power of two differ by their fp32 rounding.

    A polar factor magnifies that by the condition of the momentum, about 1e4 here, and an eigenbasis by how close its
    eigenvalues are: the noise around the two strong directions has nearly equal ones. Without ``cautious``, which decides
    by the sign of an entry that rounding may flip.
    """
    tolerance = 1e-2
    expected = displacement(engine, KINDS[kind], 1.0, cautious=False)
    for scale in (1e-12, 3e-9, 1e-6, 1e-3, 7.0, 1e3, 1e6, 1e12):
        got = displacement(engine, KINDS[kind], scale, cautious=False)
        assert (got - expected).norm() <= tolerance * expected.norm(), scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_powers_of_two_do_not_change_a_single_bit(engine: str, kind: str) -> None:
    """Such scalings round nothing, so that also bases of factors without full rank, which rounding decides, agree."""
    for factors in ("auto", "blocked,dense"):
        expected = displacement(engine, KINDS[kind], 1.0, factors)
        for exponent in (-60, -7, 1, 40):
            assert torch.equal(displacement(engine, KINDS[kind], 2.0**exponent, factors), expected), (factors, exponent)


def sparse(kind: str, shape: tuple[int, ...], t: int) -> Tensor:
    """Gradients of wide LoRA matrices that are far from the average one: few tokens, few experts, a constant."""
    generator = torch.Generator().manual_seed(t)
    rows, columns = shape
    if kind == "constant":
        return torch.ones(shape)
    if kind == "rank one":
        return torch.randn(rows, 1, generator=generator) @ torch.randn(1, columns, generator=generator)
    if kind == "fixed rank one":
        return sparse("rank one", shape, 0)
    g, mask = torch.randn(shape, generator=generator), torch.zeros(shape)
    if kind == "one row":
        mask[t % rows] = 1
    elif kind == "one column":
        mask[:, 7 * t % columns] = 1
    elif kind == "one element":
        mask[t % rows, 7 * t % columns] = 1
    elif kind == "blocks of rows":
        mask[rows // 4 * (t % 4) : rows // 4 * (t % 4 + 1)] = 1
    return g * mask


SPARSE = ("constant", "rank one", "fixed rank one", "one row", "one column", "one element", "blocks of rows")


@pytest.mark.parametrize("shape", [(12, 12), (16, 64), (64, 16), (16, 2048), (4096, 8)], ids=str)
@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("engine", ENGINES)
def test_no_step_is_far_larger_than_the_learning_rate(engine: str, kind: str, shape: tuple[int, int]) -> None:
    """With default options. A second moment of decay b2 holds at least (1 - b2) of each squared gradient, so that a
    normalized step has a root mean square of at most (1 - b2)^-1/2 = 32 lr; Adam's is below 4 lr."""
    p = Parameter(torch.zeros(shape))
    opt = SCAO([p], lr=1e-3, weight_decay=0.0, engine=engine)
    worst = 0.0
    for t in range(25):
        p.grad = sparse(kind, shape, t)
        start = p.detach().clone()
        opt.step()
        assert finite(opt, [p]), t
        worst = max(worst, (p.detach() - start).square().mean().sqrt().item() / 1e-3)
    assert worst <= 32


@pytest.mark.parametrize("damping", [0.3, 1e-3, 1e-5, 1e-6, 1e-8, 0])
@pytest.mark.parametrize("kind", ["constant", "fixed rank one", "rank one", "one column"])
@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (16, 4096)], ids=str)
def test_any_allowed_damping_stays_finite(shape: tuple[int, int], kind: str, damping: float) -> None:
    for factors in ("auto", "blocked,blocked", "diagonal,spiked"):
        p = Parameter(torch.zeros(shape))
        opt = SCAO([p], lr=1e-3, damping=damping, factors=factors, block_size=64, refresh_every=2)
        for t in range(5):
            p.grad = sparse(kind, shape, t)
            opt.step()
            assert finite(opt, [p]), (factors, t)


@pytest.mark.parametrize("scale", [1e-43, 1e-37, 1e-30, 1e-25, 1e25, 1e30, 1e36])
@pytest.mark.parametrize("engine", ENGINES)
def test_extreme_scales_stay_finite(engine: str, scale: float) -> None:
    for shape in KINDS.values():
        assert displacement(engine, shape, scale).abs().max() < 1.0


@pytest.mark.parametrize(
    "scales",
    [
        (1, 1e12, 1, 1e-12, 1),
        (1e-25, 1e25, 1e-25, 1e25),
        (1e25, 1e-25, 1e25),
        (1e-30, 1, 1, 1, 1),
        (1e30, 1, 1, 1, 1),
        (1e-38, 1e38, 1e-38, 1),
        (1, 0, 1e8, 0, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_jumps_of_the_gradient_scale_stay_finite(engine: str, scales: tuple[float, ...]) -> None:
    for factors in ("auto", "blocked,diagonal"):
        params = [Parameter(torch.zeros(shape)) for shape in KINDS.values()]
        opt = SCAO(params, lr=1e-3, weight_decay=0.0, engine=engine, factors=factors, block_size=6, refresh_every=2)
        for t in range(2 * len(scales)):
            for p in params:
                p.grad = (low_rank(tuple(p.shape), t).clamp(-2, 2).double() * scales[t % len(scales)]).float()
            opt.step()
            assert finite(opt, params), (factors, t)
        assert opt.report().failed_refreshes == 0


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    engine=st.sampled_from(ENGINES),
    shape=st.sampled_from(list(KINDS.values())),
    exponents=st.lists(st.one_of(st.none(), st.integers(-37, 37)), min_size=2, max_size=9),
    kinds=st.lists(st.sampled_from(DEGENERATE), min_size=9, max_size=9),
    betas=st.tuples(st.sampled_from([0.0, 0.9]), st.sampled_from([0.0, 0.5, 0.999])),
    damping=st.sampled_from([1e-6, 1e-3, 0.3]),
)
def test_any_sequence_of_gradients_stays_finite(
    engine: str,
    shape: tuple[int, ...],
    exponents: list[int | None],
    kinds: list[str],
    betas: tuple[float, float],
    damping: float,
) -> None:
    p = make(shape)
    opt = SCAO([p], lr=1e-3, engine=engine, betas=betas, damping=damping, refresh_every=2)
    for t, exponent in enumerate(exponents):
        if exponent is None:
            p.grad = None
        else:
            g = degenerate(kinds[t % len(kinds)], p, t).double() * 10.0**exponent
            p.grad = g.clamp(-1e38, 1e38).float()
        opt.step()
        assert finite(opt, [p])
    assert opt.skipped_steps == 0


# --- case 34: the learning rate of AdamW ----------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_first_step_is_as_large_as_adamws(engine: str, kind: str, dtype: torch.dtype) -> None:
    for lr in (1e-5, 2e-4, 1e-2):
        for scale in (1e-8, 1.0, 1e4):
            p = Parameter(torch.zeros(KINDS[kind], dtype=dtype))
            opt = SCAO([p], lr=lr, weight_decay=0.0, engine=engine)
            p.grad = low_rank(KINDS[kind], 0).to(dtype) * scale
            opt.step()
            assert p.detach().abs().max().item() == pytest.approx(lr, rel=0.05)


@pytest.mark.parametrize("engine", ENGINES)
def test_adamws_learning_rate_works_and_three_times_it_stays_finite(engine: str) -> None:
    """A convex toy and a LoRA toy: the loss falls at the lr, and 200 steps at 3 · lr do not blow up."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 24, generator=generator)
    y = x @ torch.randn(24, 10, generator=generator)

    def convex(lr: float) -> float:
        w = Parameter(torch.zeros(24, 10))
        return fit([w], lambda: (x @ w - y).square().mean(), lr)

    def lora(lr: float) -> float:
        a = Parameter(0.2 * torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))
        b = Parameter(torch.zeros(4, 10))
        return fit([a, b], lambda: (x @ a @ b - y).square().mean(), lr)

    def fit(params: list[Parameter], loss_of: Callable[[], Tensor], lr: float) -> float:
        opt = SCAO(params, lr=lr, engine=engine)
        for _ in range(200):
            opt.zero_grad()
            loss = loss_of()
            loss.backward()
            opt.step()
        assert finite(opt, params)
        return loss_of().item()

    start = y.square().mean().item()
    for toy in (convex, lora):
        assert toy(1e-2) < 0.7 * start
        assert toy(3e-2) < start


# --- weight decay and zeros ----------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_zero_gradient_shrinks_by_the_weight_decay_alone(engine: str, kind: str) -> None:
    for warm in (0, 3):
        p = make(KINDS[kind], torch.float64)
        opt = SCAO([p], lr=1e-2, weight_decay=0.1, engine=engine, refresh_every=2)
        for t in range(warm):
            p.grad = noise(p, t)
            opt.step()
        start, state = p.detach().clone(), copy.deepcopy(opt.state_dict()["state"])
        for _ in range(10):
            p.grad = torch.zeros_like(p)
            opt.step()
        # ten multiplications in fp64
        assert torch.allclose(p, start * (1 - 1e-2 * 0.1) ** 10, rtol=1e-14, atol=0)
        if warm:
            assert equal(opt.state_dict()["state"], state)
        assert opt.report().last is not None
        assert opt.report().last.idle == (3 if kind == "experts" else 1)


def test_weight_decay_is_decoupled_and_per_group() -> None:
    """The decay multiplies the weights before the step, whatever the gradient."""
    for engine in ENGINES:
        moved = {}
        for wd in (0.0, 0.5):
            p = make((8, 40), torch.float64)
            opt = SCAO([{"params": [p], "weight_decay": wd}], lr=1e-2, weight_decay=9.0, engine=engine)
            p.grad = noise(p, 0)
            opt.step()
            moved[wd] = p.detach().clone()
        start = make((8, 40), torch.float64).detach()
        assert torch.allclose(moved[0.0] - moved[0.5], start * (1e-2 * 0.5), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("gradient", ["zero", "random"])
@pytest.mark.parametrize("engine", ENGINES)
def test_lr_zero_changes_nothing_but_creates_the_whole_state(engine: str, gradient: str, wd: float) -> None:
    params = [make(s, seed=i) for i, s in enumerate(SHAPES)]
    start = [p.detach().clone() for p in params]
    opt = SCAO(params, lr=0.0, weight_decay=wd, engine=engine)
    for p in params:
        p.grad = torch.zeros_like(p) if gradient == "zero" else noise(p, 1)
    opt.step()
    assert equal([p.detach() for p in params], start)
    assert set(opt.state) == set(params)
    for p, what in opt.plans():
        assert set(opt.state[p]) == {key for key, _ in what.slots}


@pytest.mark.parametrize("engine", ENGINES)
def test_zero_first_gradient_creates_state_and_is_no_step(engine: str) -> None:
    """As torch's FSDP does before loading; afterwards the run is the run without it."""

    def run(touched: bool) -> list[Tensor]:
        params = [make(s, seed=i) for i, s in enumerate(SHAPES)]
        start = [p.detach().clone() for p in params]
        opt = SCAO(params, lr=1e-2, weight_decay=0.0, engine=engine, refresh_every=3)
        if touched:
            for p in params:
                p.grad = torch.zeros_like(p)
            opt.step()
            assert equal([p.detach() for p in params], start)
            assert all(set(opt.state[p]) == {key for key, _ in what.slots} for p, what in opt.plans())
            assert all(opt.state[p]["step"].sum() == 0 for p in params)
        for t in range(7):
            for i, p in enumerate(params):
                p.grad = noise(p, 31 * t + i)
            opt.step()
        return [p.detach() for p in params]

    assert equal(run(True), run(False))


# --- stochastic rounding ----------------


@pytest.mark.parametrize("shape", [(64, 64), (4096,), (4, 32, 32)], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_stochastic_rounding_is_unbiased(engine: str, shape: tuple[int, ...]) -> None:
    """Steps far below the spacing of bf16 are lost by rounding to nearest and kept, on average, by rounding at random."""
    steps, lr = 60, 2e-5
    ends = {}
    for name, dtype, noisy in (
        ("exact", torch.float32, False),
        ("nearest", torch.bfloat16, False),
        ("random", torch.bfloat16, True),
    ):
        p = Parameter(torch.ones(shape, dtype=dtype))
        opt = SCAO([p], lr=lr, weight_decay=0.0, engine=engine, stochastic_rounding=noisy)
        for t in range(steps):
            p.grad = (low_rank(shape, t).abs() + 0.1).to(torch.bfloat16).to(dtype)
            opt.step()
        ends[name] = (p.detach().double() - 1).mean().item()
        spread = (p.detach().double() - 1).std().item()
    assert ends["exact"] < 0
    assert ends["nearest"] == 0.0  # bf16 has a spacing of 2^-8 below one: every step is lost
    # Standard error of the mean of 4096 elements, each a sum of independent roundings; five of them.
    assert abs(ends["random"] - ends["exact"]) <= 5 * spread / math.sqrt(4096)


def test_stochastic_rounding_of_weight_decay_is_unbiased() -> None:
    """A decay far below the spacing of bf16 acts on average. (Without any gradient it rounds to nearest, as torch's does.)"""
    p = Parameter(torch.ones(4096, dtype=torch.bfloat16))
    opt = SCAO([p], lr=1e-3, weight_decay=0.1, betas=(0.0, 0.999), eps=1e-8, stochastic_rounding=True)
    signs = torch.tensor([1.0, -1.0]).repeat(2048).to(torch.bfloat16)
    for _ in range(100):
        p.grad = 1e-20 * signs
        opt.step()
    expected = (1 - 1e-4) ** 100 - 1  # steps of ± lr cancel on average over the elements
    spread = p.detach().double().std().item() + 2.0**-9
    assert (p.detach().double() - 1).mean().item() == pytest.approx(expected, abs=5 * spread / 64)


def test_noise_is_not_shared_between_parameters_elements_or_steps() -> None:
    params = [Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(2)]
    params += [Parameter(torch.ones(64, 65, dtype=torch.bfloat16)), Parameter(torch.ones(65, 64, dtype=torch.bfloat16))]
    opt = SCAO(params, lr=1e-3, weight_decay=0.0, stochastic_rounding=True)
    moves = []
    for _ in range(2):
        for p in params:
            with torch.no_grad():
                p.fill_(1)
            p.grad = torch.ones_like(p)
        opt.step()
        moves += [(p.detach().float().reshape(-1)[:4096] != 1).float() for p in params]
    table = torch.corrcoef(torch.stack(moves))
    off = table - torch.eye(len(moves))
    # Independent: correlations of 4096 pairs are within 5 / sqrt(4096) of zero.
    assert off.abs().max() <= 5 / 64


def test_special_values_survive_stochastic_rounding() -> None:
    """Zeros stay zeros, the largest values do not become infinite."""
    largest = torch.finfo(torch.bfloat16).max
    p = Parameter(torch.tensor([0.0, largest, -largest, 1.0], dtype=torch.bfloat16))
    opt = SCAO([p], lr=0.0, stochastic_rounding=True)
    for t in range(20):
        p.grad = noise(p, t)
        opt.step()
    assert p.tolist() == [0.0, largest, -largest, 1.0]


# --- case 37, 45: reproducible ----------------


@pytest.mark.parametrize(
    "options", [{}, {"stochastic_rounding": True}, {"runtime": "inline"}, {"foreach": False}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ENGINES)
def test_two_runs_are_bit_equal_and_random_states_untouched(
    engine: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), random.getstate()
        params = [Parameter(make(s, seed=i).detach().to(dtype)) for i, s in enumerate(SHAPES)]
        opt = SCAO(params, lr=1e-2, engine=engine, refresh_every=3, **options)
        for t in range(7):
            for i, p in enumerate(params):
                p.grad = noise(p, 31 * t + i)
            opt.step()
        opt.report(), opt.state_dict()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        return [p.detach() for p in params]

    assert equal(run(1), run(2))


@pytest.mark.parametrize("engine", ENGINES)
def test_number_of_threads_is_left_alone(engine: str) -> None:
    before = torch.get_num_threads()
    p = make((80, 300))
    opt = SCAO([p], engine=engine, refresh_every=1)
    train_low_rank(opt, [p], 3)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("engine", ENGINES)
def test_four_microbatches_equal_one_batch(engine: str, dtype: torch.dtype, tolerance: float) -> None:
    """The sums differ by rounding: 1e-5 absolute in fp32 at lr 1e-4, with nothing left in fp64."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3)).to(dtype)
    twin = copy.deepcopy(model)
    opts = [SCAO(m.parameters(), lr=1e-4, engine=engine, refresh_every=3) for m in (model, twin)]
    for t in range(8):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(t), dtype=dtype)
        for opt in opts:
            opt.zero_grad()
        model(x).square().mean().backward()
        for part in x.chunk(4):
            (twin(part).square().mean() / 4).backward()
        for opt in opts:
            opt.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p - q).abs().max() < tolerance
    assert all(opts[1].state[p]["step"].item() == 8 for p in twin.parameters())


# --- autocast ----------------


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_around_the_step_changes_nothing(engine: str, low: torch.dtype) -> None:
    def run(autocast: bool) -> tuple[list[Tensor], Any]:
        params = [make(s, seed=i) for i, s in enumerate(SHAPES)]
        opt = SCAO(params, lr=1e-2, engine=engine, refresh_every=3)
        with torch.autocast("cpu", dtype=low, enabled=autocast):
            for t in range(7):
                for i, p in enumerate(params):
                    p.grad = noise(p, 31 * t + i)
                opt.step()
            assert torch.is_autocast_enabled("cpu") == autocast
        return [p.detach() for p in params], opt.state_dict()["state"]

    assert equal(run(True), run(False))


def test_maximize_is_the_mirror_of_minimize() -> None:
    for engine in ENGINES:
        ends = []
        for maximize in (False, True):
            p = make((8, 40))
            opt = SCAO([p], lr=1e-2, engine=engine, maximize=maximize, refresh_every=3)
            for t in range(7):
                p.grad = noise(p, t) * (-1 if maximize else 1)
                opt.step()
            ends.append(p.detach())
        # a sign change is exact in floating point
        assert torch.equal(*ends)


def test_damping_and_eps_are_relative() -> None:
    """Gradients of 1e-9, as LoRA has, are not drowned in an absolute constant: they move the weights as any other."""
    for engine in ENGINES:
        p = Parameter(torch.zeros(8, 40))
        opt = SCAO([p], lr=1e-3, weight_decay=0.0, engine=engine)
        for t in range(5):
            p.grad = 1e-9 * low_rank((8, 40), t)
            opt.step()
        assert p.detach().square().mean().sqrt() > 1e-3 * math.sqrt(5) * 0.2


@pytest.mark.parametrize("shape", [(16, 5000), (8, 32), (1000,), (300_000,)], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_spike_leaves_no_trace_that_is_not_finite(engine: str, shape: tuple[int, ...]) -> None:
    """Also a jump that is larger than 2^50 while both gradients are of a moderate size, and one that comes late."""
    generator = torch.Generator().manual_seed(0)
    for scales in ([1e-12, 1e9, 1e9], [1e-20, 1.0], [1, 1, 1, 1, 1e28, 1, 1, 1, 1]):
        p = Parameter(torch.zeros(shape))
        opt = SCAO([p], lr=1e-3, weight_decay=0.0, engine=engine)
        for scale in scales:
            p.grad = torch.randn(shape, generator=generator) * scale
            opt.step()
        assert torch.isfinite(p).all(), scales
        # Nine steps, each entry within ten times lr.
        assert p.abs().max() <= 9 * 1e-2, scales
        assert opt.report().failed_refreshes == 0


def test_untouched_entries_of_a_large_table_stay_without_eps() -> None:
    p = Parameter(torch.zeros(300_000))
    opt = SCAO([p], lr=1e-3, eps=0.0)
    p.grad = torch.randn(300_000, generator=torch.Generator().manual_seed(0)) * 1e-8
    p.grad[:10] = 0
    opt.step()
    assert not p[:10].any()
    assert torch.isfinite(p).all()
