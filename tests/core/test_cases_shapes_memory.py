"""Every shape trains, experts are independent matrices, and the planned bytes are the real ones."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from scao import SCAO, plan, plan_key

ENGINES = ("kl", "soap", "spectral")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = (
    (),
    (1,),
    (7,),
    (1, 1),
    (1, 9),
    (9, 1),
    (2, 2),
    (2, 3),
    (5, 3),
    (12, 12),
    (16, 130),
    (130, 16),
    (40, 300),
    (3, 5, 6),
    (1, 6, 5),
    (4, 1, 7),
    (4, 7, 1),
    (3, 8, 40),
    (8, 3, 3, 3),
    (64, 2, 2, 1),
    (2, 3, 4, 5, 2),
    (0, 10),
    (10, 0),
    (4, 0, 3),
    (0,),
    (0, 3, 4),
)


def grad_like(p: Tensor, seed: int) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(p.dtype)


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Parameter:
    return Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype))


def measured(opt: SCAO, param: Tensor) -> int:
    return sum(v.numel() * v.element_size() for v in opt.state[param].values())


# --- cases 19, 31: shapes and dtypes ----------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_trains_and_moves(shape: tuple[int, ...], engine: str) -> None:
    p = make(shape)
    start = p.detach().clone()
    opt = SCAO([p], lr=1e-2, weight_decay=0.0, engine=engine, refresh_every=3)
    for t in range(8):
        p.grad = grad_like(p, t)
        opt.step()
    assert torch.isfinite(p).all()
    assert p.numel() == 0 or bool((p != start).any())
    assert opt.report().steps == 8
    # A step is of the size of the learning rate: 8 steps go no further than 8 · lr in root mean square, with a factor
    # of two for rules that are normalized as a whole and not per element.
    if p.numel():
        assert (p - start).square().mean().sqrt() <= 2 * 8 * 1e-2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_trains_with_statistics_in_full_precision(dtype: torch.dtype, engine: str) -> None:
    params = [make(s, dtype, i) for i, s in enumerate(SHAPES)]
    opt = SCAO(params, lr=1e-2, engine=engine, refresh_every=3)
    for t in range(8):
        for i, p in enumerate(params):
            p.grad = grad_like(p, 100 * t + i)
        opt.step()
    full = torch.float64 if dtype == torch.float64 else torch.float32
    momentum = dtype if dtype == torch.bfloat16 else full  # as AdamW stores it
    for p in params:
        assert p.dtype == dtype
        assert torch.isfinite(p).all()
        for key, value in opt.state[p].items():
            if key != "step" and value.is_floating_point():
                assert value.dtype == (momentum if key == "exp_avg" else full)
            assert torch.isfinite(value).all()


def test_steps_of_half_precision_follow_those_of_single_precision() -> None:
    """bf16 and fp16 parameters take the fp32 steps up to their own rounding, since all statistics are fp32."""
    for engine in ENGINES:
        single = make((12, 40))
        for dtype, digits in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
            half = Parameter(single.detach().to(dtype))
            full = Parameter(half.detach().float())
            opts = [SCAO([q], lr=0.1, engine=engine, refresh_every=3) for q in (half, full)]
            for t in range(6):
                half.grad = grad_like(half, t)
                full.grad = half.grad.float()
                for opt in opts:
                    opt.step()
            # six roundings of values of at most about 4, and the rule for gradients that do not depend on the weights
            assert (half.float() - full).abs().max() <= 6 * 4 * digits


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_in_another_dtype_than_the_parameter(engine: str) -> None:
    p = make((6, 20), torch.bfloat16)
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch has gradients in the parameter's dtype only")
    p.grad_dtype = torch.float32
    opt = SCAO([p], lr=1e-2, engine=engine, refresh_every=2)
    for t in range(4):
        p.grad = torch.randn(6, 20, generator=torch.Generator().manual_seed(t))
        opt.step()
    assert torch.isfinite(p).all()


# --- case 19: experts ----------------


@pytest.mark.parametrize("idle", [lambda e, t: False, lambda e, t: (e + t) % 3 == 0, lambda e, t: e == 1 or t < 2])
@pytest.mark.parametrize("runtime", ["staggered", "inline"])
@pytest.mark.parametrize("shape", [(4, 6, 20), (4, 20, 6), (3, 8, 8), (1, 6, 20)], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_experts_equal_independent_matrices(
    engine: str, shape: tuple[int, ...], runtime: str, idle: Callable[[int, int], bool]
) -> None:
    """fp64: the two ways differ by rounding only; 1e-6 relative leaves room for the order of sums."""
    stacked = make(shape, torch.float64)
    alone = [Parameter(stacked[e].detach().clone()) for e in range(shape[0])]
    options: dict[str, Any] = {"lr": 1e-2, "engine": engine, "runtime": runtime, "refresh_every": 3}
    opt, opts = SCAO([stacked], **options), SCAO(alone, **options)
    for t in range(10):
        grad = grad_like(stacked, t)
        for e in range(shape[0]):
            grad[e] *= 10.0 ** (-2 * e)  # experts of very different size do not see each other
            if idle(e, t):
                grad[e] = 0
        stacked.grad = grad
        for e, p in enumerate(alone):
            p.grad = grad[e].clone()
        opt.step()
        opts.step()
    assert torch.allclose(stacked, torch.stack(list(alone)), rtol=1e-6, atol=1e-8)
    for key in opt.state[stacked]:
        own = torch.stack([opts.state[p][key] for p in alone])
        assert torch.equal(opt.state[stacked]["step"], torch.stack([opts.state[p]["step"] for p in alone]))
        assert own.shape == opt.state[stacked][key].shape


@pytest.mark.parametrize("engine", ENGINES)
def test_experts_in_single_precision(engine: str) -> None:
    stacked = make((3, 6, 20))
    alone = [Parameter(stacked[e].detach().clone()) for e in range(3)]
    opt, opts = SCAO([stacked], lr=1e-3, engine=engine), SCAO(alone, lr=1e-3, engine=engine)
    for t in range(6):
        stacked.grad = grad_like(stacked, t)
        for e, p in enumerate(alone):
            p.grad = stacked.grad[e].clone()
        opt.step()
        opts.step()
    # 1e-6 relative to the size of the values, which are of order one
    assert (stacked - torch.stack(list(alone))).abs().max() <= 1e-6 * 4


# --- case 20: empty tensors ----------------


@pytest.mark.parametrize("empty", [(0, 10), (4, 0, 3), (0,), (0, 3, 3, 3)], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_empty_parameters_change_nothing_for_others(engine: str, empty: tuple[int, ...]) -> None:
    def run(where: str) -> Tensor:
        p, q = make((4, 4)), make(empty)
        params = {"first": [q, p], "last": [p, q], "without": [p]}[where]
        opt = SCAO(params, lr=1e-2, engine=engine, refresh_every=2)
        for t in range(8):
            p.grad, q.grad = grad_like(p, t), grad_like(q, t)
            opt.step()
        opt.state_dict()
        return p.detach()

    expected = run("without")
    assert torch.equal(run("first"), expected)
    assert torch.equal(run("last"), expected)


def test_only_empty_parameters() -> None:
    p = make((0, 10))
    opt = SCAO([p])
    p.grad = torch.zeros_like(p)
    opt.step()
    assert opt.report().skipped_steps == 0


# --- memory layouts ----------------


def layouts(p: Tensor) -> dict[str, Tensor]:
    """The same values in every memory layout that models use."""
    result = {"contiguous": p.clone()}
    if p.dim() == 4:
        result["channels_last"] = p.clone(memory_format=torch.channels_last)
    if p.dim() >= 2:
        result["transposed"] = p.transpose(-1, -2).contiguous().transpose(-1, -2)
        result["first dims swapped"] = p.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.zeros((*p.shape[:-1], 2 * p.shape[-1]), dtype=p.dtype)
    result["strided view"] = wide[..., ::2].copy_(p)
    return result


@pytest.mark.parametrize(
    "shape", [(6, 20), (20, 6), (9, 9), (3, 6, 20), (3, 20, 6), (8, 3, 3, 3), (64, 2, 2, 1), (7,)], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_memory_layout_does_not_matter(engine: str, shape: tuple[int, ...]) -> None:
    results, kinds = {}, layouts(make(shape, torch.float64).detach())
    for name, start in kinds.items():
        for grads in ("like the parameter", "contiguous"):
            p = Parameter(start.clone(memory_format=torch.preserve_format) if name != "strided view" else start)
            strides = p.stride()
            opt = SCAO([p], lr=1e-2, engine=engine, refresh_every=2)
            for t in range(6):
                g = grad_like(p, t)
                p.grad = torch.empty_like(p).copy_(g) if grads == "like the parameter" else g.contiguous()
                opt.step()
            assert p.stride() == strides
            results[name, grads] = p.detach().contiguous().clone()
            if name == "strided view":
                break  # written through a view of shared memory: once
    first = results["contiguous", "contiguous"]
    for result in results.values():
        # fp64: products in another order, nothing more
        assert torch.allclose(result, first, rtol=1e-9, atol=1e-11)


def test_a_view_of_larger_memory_writes_only_itself() -> None:
    memory = torch.full((6, 40), 3.0)
    p = Parameter(memory[:, ::2])
    opt = SCAO([p], lr=1e-2)
    for t in range(3):
        p.grad = grad_like(p, t)
        opt.step()
    assert torch.equal(memory[:, 1::2], torch.full((6, 20), 3.0))
    assert bool((memory[:, ::2] != 3.0).all())


@pytest.mark.parametrize("dim", [2**20 + 3, 2**21])
def test_long_tensors_that_are_handled_in_pieces_equal_the_same_in_parts(dim: int) -> None:
    """The Adam path is element-wise, so one long vector is many short ones (which start with another eps scale)."""
    whole = make((dim,))
    parts = [Parameter(c.detach().clone()) for c in whole.detach().chunk(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a model without matrices
        opt, opts = SCAO([whole], lr=1e-2, eps=1e-12), SCAO(parts, lr=1e-2, eps=1e-12)
    for t in range(3):
        whole.grad = grad_like(whole, t)
        for p, g in zip(parts, whole.grad.chunk(3), strict=True):
            p.grad = g.clone()
        opt.step()
        opts.step()
    assert torch.allclose(whole, torch.cat(list(parts)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_stacking_equal_shapes_is_only_a_speedup(engine: str) -> None:
    def run(foreach: bool | None) -> list[Tensor]:
        params = [make(s, torch.float64, i) for i, s in enumerate([(6, 20)] * 3 + [(20, 6)] * 2 + [(7,)] * 3)]
        opt = SCAO(params, lr=1e-2, engine=engine, foreach=foreach, refresh_every=3)
        for t in range(7):
            for i, p in enumerate(params):
                p.grad = grad_like(p, 50 * t + i)
            opt.step()
        return [p.detach() for p in params]

    alone = run(False)
    for foreach in (None, True):
        for a, b in zip(run(foreach), alone, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)  # fp64, order of sums only


# --- planned bytes ----------------


@pytest.mark.parametrize("momentum", [None, torch.bfloat16, "bf16", "float64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_planned_bytes_are_the_measured_bytes(engine: str, dtype: torch.dtype, momentum: Any) -> None:
    params = [make(s, dtype, i) for i, s in enumerate(SHAPES)]
    opt = SCAO(params, engine=engine, momentum_dtype=momentum, refresh_every=2)
    planned = opt.plans()
    assert [p is q for (p, _), q in zip(planned, params, strict=True)] == [True] * len(params)
    assert not opt.state  # planning allocates nothing
    for t in range(3):
        for p in params:
            p.grad = grad_like(p, t)
        opt.step()
        for p, what in planned:
            assert measured(opt, p) == what.bytes, (p.shape, what.describe())
            assert {k: (tuple(v.shape), v.dtype) for k, v in opt.state[p].items()} == {
                k: (slot.shape, slot.dtype) for k, slot in what.slots
            }
    stats = opt.precond_stats()
    assert stats["state_bytes"] == stats["planned_bytes"] == sum(what.bytes for _, what in planned)
    assert opt.report().state_bytes == stats["state_bytes"]


FACTORS = st.sampled_from(
    [
        "auto",
        *(
            f"{a},{b}"
            for a in ("dense", "spiked", "blocked", "diagonal")
            for b in ("dense", "spiked", "blocked", "diagonal")
        ),
    ]
)
DIMS = st.integers(0, 24)
ANY_SHAPE = st.one_of(
    st.just(()),
    st.tuples(DIMS),
    st.tuples(DIMS, DIMS),
    st.tuples(st.integers(1, 3), st.integers(25, 90)),
    st.tuples(st.integers(25, 90), st.integers(1, 9)),
    st.tuples(st.integers(0, 4), DIMS, DIMS),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(*[st.integers(1, 3)] * 5),
)


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    shape=ANY_SHAPE,
    dtype=st.sampled_from(DTYPES),
    engine=st.sampled_from(ENGINES),
    factors=FACTORS,
    momentum=st.sampled_from([None, "bfloat16", "float32"]),
    spike_rank=st.integers(1, 8),
    block_size=st.integers(1, 40),
    max_dense_dim=st.sampled_from([1, 8, 256]),
    max_dim=st.sampled_from([16, 32768]),
    budget=st.sampled_from([None, 0.0, 5.0, 20.0, 1e6]),
    exponent=st.integers(-12, 12),
    seed=st.integers(0, 1000),
)
def test_any_shape_with_any_options(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    engine: str,
    factors: str,
    momentum: str | None,
    spike_rank: int,
    block_size: int,
    max_dense_dim: int,
    max_dim: int,
    budget: float | None,
    exponent: int,
    seed: int,
) -> None:
    p = make(shape, dtype, seed)
    opt = SCAO(
        [p],
        lr=1e-2,
        engine=engine,
        factors=factors,
        momentum_dtype=momentum,
        spike_rank=spike_rank,
        block_size=block_size,
        max_dense_dim=max_dense_dim,
        max_dim=max_dim,
        bytes_per_param=budget,
        refresh_every=2,
    )
    ((_, what),) = opt.plans()
    scale = 10.0**exponent if dtype != torch.float16 else 1.0  # fp16 holds 6e-8 to 65504
    start = p.detach().double().clone()
    for t in range(4):
        p.grad = (grad_like(p, seed + t).double() * scale).to(dtype)
        opt.step()
        assert torch.isfinite(p).all()
    assert opt.skipped_steps == 0
    assert measured(opt, p) == what.bytes
    assert all(torch.isfinite(v).all() for v in opt.state[p].values())
    # No element can run away in four steps: the largest whitened step is bounded by the root of the matrix's size over
    # the damping (1e-3), far above which only a fault can get.
    if p.numel():
        reach = 4e-2 * math.sqrt(p.numel()) / 1e-3**0.5 + 4e-2
        assert (p.detach().double() - start).abs().max() <= reach + 0.02 * start.abs().max()


@pytest.mark.parametrize("shape", [(16, 4096), (4096, 16), (4096, 4096), (2048, 11008), (8, 1024, 512), (64, 3, 7, 7)])
def test_default_state_is_within_the_documented_budget(shape: tuple[int, ...]) -> None:
    for engine, budget in (("kl", 8.0), ("spectral", 8.0), ("soap", 12.0)):
        key = plan_key({"engine": engine})
        what = plan(shape, torch.float32, key)
        counters = 16 * math.prod(what.batch)  # step, scale and two failure counts, which the budget leaves out
        assert what.bytes <= budget * math.prod(shape) + counters
        assert what.is_matrix
        # the choice does not depend on the dtype of the parameter
        assert plan(shape, torch.bfloat16, key).describe() == what.describe()
        assert plan(shape, torch.float64, key).describe() == what.describe()


def test_more_budget_never_gives_less_and_half_momentum_gives_less() -> None:
    for shape in ((16, 1024), (256, 256), (4, 64, 64)):
        bytes_ = [
            plan(shape, torch.float32, plan_key({"bytes_per_param": b})).bytes for b in (8.0, 12.0, 16.0, 64.0, 1e4)
        ]
        assert bytes_ == sorted(bytes_)
        assert (
            plan(shape, torch.float32, plan_key({"momentum_dtype": "bfloat16"})).bytes
            < plan(shape, torch.float32, plan_key({})).bytes
        )


# --- cases 16, 17: large tables and LoRA ----------------


@pytest.mark.parametrize("shape", [(50_000, 32), (32, 50_000)], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_vocabulary_gets_no_large_factor(engine: str, shape: tuple[int, ...]) -> None:
    p = Parameter(torch.zeros(shape))
    opt = SCAO([p], engine=engine)
    slowest = 0.0
    for t in range(3):
        p.grad = grad_like(p, t)
        start = time.perf_counter()
        opt.step()
        slowest = max(slowest, time.perf_counter() - start)
    assert slowest < 2.0
    assert measured(opt, p) <= 3 * p.numel() * 4
    for value in opt.state[p].values():
        assert tuple(value.shape) in ((), shape)  # nothing but element-wise statistics
    assert opt.precond_stats()["layers"] == 0


def test_the_largest_vocabularies_are_planned_without_a_factor() -> None:
    for engine in ENGINES:
        for shape in ((152_064, 2048), (2048, 152_064), (256_000, 4096)):
            what = plan(shape, torch.bfloat16, plan_key({"engine": engine}))
            assert what.engine == "adam"
            assert what.bytes == (2 + 4) * math.prod(shape) + 8  # momentum in bf16, second moments in fp32


def test_two_real_steps_of_a_large_vocabulary() -> None:
    p = Parameter(torch.zeros(152_064, 2048))
    opt = SCAO([p], lr=1e-3, weight_decay=0.0)
    ((_, what),) = opt.plans()
    p.grad = torch.full_like(p, 1e-4)
    for _ in range(2):
        opt.step()
    assert measured(opt, p) == what.bytes
    assert torch.isfinite(p[::1000]).all()
    # a constant gradient moves every element by lr a step
    assert torch.allclose(p[::1000], torch.tensor(-2e-3), rtol=1e-3)


@pytest.mark.parametrize("rank", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("engine", ENGINES)
def test_lora_state_is_small(engine: str, rank: int) -> None:
    params = [make((rank, 4096)), make((4096, rank))]
    theirs = [Parameter(p.detach().clone()) for p in params]
    opt, adamw = SCAO(params, engine=engine), torch.optim.AdamW(theirs)
    for t in range(2):
        for p, q in zip(params, theirs, strict=True):
            p.grad = grad_like(p, t)
            q.grad = p.grad.clone()
        opt.step()
        adamw.step()
    ours = opt.precond_stats()["state_bytes"]
    reference = sum(v.numel() * v.element_size() for s in adamw.state.values() for v in s.values())
    assert ours <= (1.5 if engine == "soap" else 1.0) * reference + 64
    assert opt.precond_stats()["layers"] == 2


# --- case 74: the step of a refresh ----------------


@pytest.mark.parametrize("engine", ["kl", "soap"])
def test_a_refresh_decomposes_short_sides_only(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what keeps the step of a refresh near the others; `make bench-step` shows its time (max ms)."""
    original, sides = torch.linalg.eigh, list[int]()

    def eigh(a: Tensor, *args: Any, **kwargs: Any) -> Any:
        sides.append(a.shape[-1])
        return original(a, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    params = [make(s) for s in ((16, 1024), (1024, 16))]
    opt = SCAO(params, engine=engine, refresh_every=4, runtime="inline")
    for t in range(24):
        for p in params:
            p.grad = grad_like(p, t)
        opt.step()
    assert set(sides) == {16}
    assert opt.report().refreshed == 2 * (6 + 2)  # each interval, and after the 1st and 2nd gradient


# --- case 51: flattened models ----------------


@pytest.mark.parametrize("numel", [2**20, 3 * 2**20])
def test_one_huge_vector_warns_that_nothing_is_preconditioned(numel: int) -> None:
    with pytest.warns(UserWarning, match="preconditioning is off") as seen:
        opt = SCAO([Parameter(torch.zeros(numel)), Parameter(torch.zeros(3))])
    assert len([w for w in seen if "preconditioning" in str(w.message)]) == 1
    assert opt.precond_stats()["layers"] == 0


@pytest.mark.parametrize(
    "shapes",
    [[(2**20,), (8, 8)], [(1000,), (30,)], [(4, 6)], [(3, 4, 5), (2**20,)]],
    ids=["with-matrix", "small", "m", "moe"],
)
def test_ordinary_models_do_not_warn(shapes: Sequence[tuple[int, ...]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SCAO([Parameter(torch.zeros(s)) for s in shapes])
