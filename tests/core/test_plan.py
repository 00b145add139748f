"""The planner: exact bytes without allocating, the budget kept, shapes seen as they should be."""

import math

import pytest
import torch

from scao import SCAO
from scao_core import Options, plan, plan_key

SHAPES = [
    (),
    (7,),
    (0, 10),
    (4, 0, 3),
    (1, 1),
    (1, 9),
    (9, 1),
    (2, 2),
    (16, 48),
    (48, 16),
    (16, 300),
    (64, 64),
    (260, 70),
    (300, 280),
    (3, 5, 6),
    (2, 16, 64),
    (8, 3, 3, 3),
    (2, 3, 4, 5, 2),
]
QWEN = [((16, 2048), 216), ((2048, 16), 108), ((16, 11008), 36), ((11008, 16), 72), ((256, 16), 72)]


def planned(shape, dtype=torch.float32, **options):
    return plan(shape, dtype, plan_key(Options.from_mapping(options).as_dict()))


@pytest.mark.parametrize("momentum", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("engine", ["kl", "soap", "spectral"])
def test_planned_bytes_are_measured_bytes(engine, dtype, momentum):
    for shape in SHAPES:
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        optimizer = SCAO([param], engine=engine, momentum_dtype=momentum, block_size=32)
        param.grad = torch.ones_like(param)
        optimizer.step()
        expected = planned(shape, dtype, engine=engine, momentum_dtype=momentum, block_size=32)
        state = optimizer.state[param]
        assert {k: (tuple(v.shape), v.dtype) for k, v in state.items()} == {
            k: (s.shape, s.dtype) for k, s in expected.slots
        }
        assert sum(v.untyped_storage().nbytes() for v in state.values()) == expected.bytes, shape


@pytest.mark.parametrize(("momentum", "limit"), [(None, 5.2), ("bfloat16", 3.2)])
def test_bytes_on_the_lora_matrices_of_qwen(momentum, limit):
    total = sum(planned(shape, momentum_dtype=momentum).bytes * count for shape, count in QWEN)
    count = sum(math.prod(shape) * count for shape, count in QWEN)
    assert count == 29_933_568
    assert total / count <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_take_less_than_adamw_in_any_dtype(dtype):
    """AdamW keeps two moments in the dtype of the parameter."""
    for shape, _ in QWEN:
        assert planned(shape, dtype).bytes < 2 * dtype.itemsize * math.prod(shape)


def test_the_factors_do_not_depend_on_the_dtype():
    for shape in (*SHAPES, (4096, 4096), (1000, 20)):
        assert planned(shape, torch.bfloat16).sides == planned(shape).sides


@pytest.mark.parametrize(
    "shape", [s for s in SHAPES if math.prod(s)] + [s for s, _ in QWEN] + [(4096, 4096), (1000, 20)]
)
def test_never_more_than_adamw(shape):
    """AdamW keeps 8 bytes a parameter and a step counter; ours are up to five scalars a matrix."""
    scalars = 20 * (shape[0] if len(shape) == 3 else 1)
    assert planned(shape).bytes <= 8 * math.prod(shape) + scalars


@pytest.mark.parametrize("budget", [4.5, 5.0, 6.0, 8.0, 20.0])
def test_a_budget_is_kept_by_the_factors(budget):
    """Whatever does not fit takes Adam's 8 bytes, which is the least that path can do."""
    for shape in SHAPES:
        p = planned(shape, bytes_per_param=budget)
        if p.is_matrix:
            assert p.bytes <= budget * math.prod(shape) + 20 * math.prod(p.batch)


def test_choices():
    assert planned((16, 2048)).describe() == "dense(16) x spiked(2048, 3)"
    assert planned((2048, 16)).describe() == "dense(16) x spiked(2048, 3)"
    assert planned((4096, 4096)).describe() == "blocked(4096, 256) x blocked(4096, 256)"
    assert planned((4096, 4096)).bytes / 4096**2 <= 5.01


@pytest.mark.parametrize("shape", [(50_000, 32), (152_064, 2048), (32, 50_000), (40_000, 40_000)])
@pytest.mark.parametrize("engine", ["kl", "soap", "spectral"])
def test_vocabularies_take_the_adam_path(shape, engine):
    assert not planned(shape, engine=engine).is_matrix


def test_no_factor_above_the_cap():
    for shape in [(300, 5000), (8000, 8000), (16, 30_000), (256, 257), (257, 258)]:
        for key, slot in planned(shape).slots:
            if key.endswith(("cov", "basis")) and slot.shape[-1] == slot.shape[-2]:
                assert slot.shape[-1] <= 256, (shape, key)


def test_experts_are_planned_as_one_expert():
    one, many = planned((16, 64)), planned((5, 16, 64))
    assert many.bytes == 5 * one.bytes
    assert many.describe() == one.describe()


def test_dtype_does_not_change_the_choice():
    for shape in SHAPES:
        choices = {planned(shape, dtype).describe() for dtype in (torch.float32, torch.bfloat16, torch.float64)}
        assert len(choices) == 1, shape


def test_plans_of_an_optimizer_allocate_nothing():
    params = [torch.nn.Parameter(torch.empty(s, device="meta")) for s in [(16, 2048), (152_064, 2048)]]
    optimizer = SCAO(params)
    assert sum(p.bytes for _, p in optimizer.plans()) == optimizer.precond_stats()["planned_bytes"] > 0
    assert not optimizer.state
