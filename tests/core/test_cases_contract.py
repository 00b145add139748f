"""What training loops, schedulers, scalers and frameworks expect of a ``torch.optim.Optimizer``."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import lr_scheduler

from comparing import equal
from scao import SCAO, ConfigError, GradientError, ParameterError, StepReport

ENGINES = ("kl", "soap", "spectral")


def make(shape: tuple[int, ...] = (8, 40), dtype: torch.dtype = torch.float32, seed: int = 0) -> Parameter:
    return Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def noise(p: Tensor, seed: int) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)


def train(opt: torch.optim.Optimizer, params: list[Parameter], steps: range) -> None:
    for t in steps:
        for i, p in enumerate(params):
            p.grad = noise(p, 31 * t + i)
        opt.step()


def model_and_data(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4))
    x = torch.randn(64, 10)
    return model, x, (x @ torch.randn(10, 4)).tanh()


# --- the pitch ----------------


@pytest.mark.parametrize("engine", ENGINES)
def test_the_plain_loop(engine: str) -> None:
    model, x, y = model_and_data()
    optimizer = SCAO(model.parameters(), lr=2e-4, betas=(0.9, 0.999), weight_decay=0.01, engine=engine)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # At an lr of 2e-4 a convex-like toy improves steadily: each quarter is below the one before.
    quarters = [sum(losses[i : i + 10]) for i in range(0, 40, 10)]
    assert quarters == sorted(quarters, reverse=True)
    assert optimizer.report().steps == 40
    assert optimizer.precond_stats()["layers"] == 2
    assert "steps taken" in str(optimizer.report())
    repr(optimizer)


def test_it_is_an_optimizer() -> None:
    opt = SCAO([make()])
    assert isinstance(opt, torch.optim.Optimizer)
    assert set(opt.defaults) <= set(opt.param_groups[0])
    p = opt.param_groups[0]["params"][0]
    p.grad = torch.ones_like(p)
    opt.zero_grad()
    assert p.grad is None
    p.grad = torch.ones_like(p)
    opt.zero_grad(set_to_none=False)
    assert not p.grad.any()
    assert opt.step() is None


def test_step_hooks_of_torch_are_called() -> None:
    opt, calls = SCAO([make()]), []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    train(opt, opt.param_groups[0]["params"], range(2))
    assert calls == ["pre", "post"] * 2


# --- case 39, 40: closures ----------------


@pytest.mark.parametrize("engine", ENGINES)
def test_closure_is_called_once_with_gradients_and_its_loss_returned(engine: str) -> None:
    model, x, y = model_and_data()
    twin = copy.deepcopy(model)
    opt, plain = (SCAO(m.parameters(), lr=1e-3, engine=engine) for m in (model, twin))
    calls = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        calls.append(loss.item())
        return loss

    for t in range(5):
        with torch.set_grad_enabled(t % 2 == 0):
            result = opt.step(closure)
            assert torch.is_grad_enabled() == (t % 2 == 0)
        plain.zero_grad()
        nn.functional.mse_loss(twin(x), y).backward()
        plain.step(None)
        assert result is not None
        assert result.item() == calls[-1]
        assert len(calls) == t + 1
    assert equal(list(model.parameters()), list(twin.parameters()))


def test_an_error_in_the_closure_changes_nothing() -> None:
    p = make()
    opt = SCAO([p])
    train(opt, [p], range(2))
    before = p.detach().clone(), copy.deepcopy(opt.state_dict())

    def closure() -> float:
        raise RuntimeError("out of data")

    with pytest.raises(RuntimeError, match="out of data"):
        opt.step(closure)
    assert equal((p.detach(), opt.state_dict()), before)


# --- learning rates and schedulers (case 44) ----------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tensor_lr_is_kept_and_in_place_changes_are_used(engine: str) -> None:
    lr = torch.tensor(1e-2)
    p, q = make(), make()
    opt, plain = SCAO([p], lr=lr, engine=engine), SCAO([q], lr=1e-2, engine=engine)
    for t in range(4):
        value = 1e-2 / (t + 1)
        lr.fill_(value)
        plain.param_groups[0]["lr"] = float(lr)
        train(opt, [p], range(t, t + 1))
        train(plain, [q], range(t, t + 1))
        assert opt.param_groups[0]["lr"] is lr
    assert torch.equal(p, q)
    assert lr.item() == pytest.approx(1e-2 / 4)  # and never written to


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=3, cycle_momentum=True),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 8)], [3]
    ),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_schedulers_set_what_the_steps_use(engine: str, name: str, tensor_lr: bool) -> None:
    """The same run with a float set by hand each step; a tensor lr is fp32, so it is compared with that value."""
    p, q = make(), make()
    opt = SCAO([p], lr=torch.tensor(1e-3) if tensor_lr else 1e-3, engine=engine, refresh_every=3)
    plain = SCAO([q], lr=1.0, engine=engine, refresh_every=3)
    scheduler = SCHEDULERS[name](opt)
    lrs, betas = set(), set()
    for t in range(10):
        group = opt.param_groups[0]
        lrs.add(float(group["lr"]))
        betas.add(group["betas"])
        plain.param_groups[0].update(lr=float(group["lr"]), betas=group["betas"])
        train(opt, [p], range(t, t + 1))
        train(plain, [q], range(t, t + 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", message="The epoch parameter")
            scheduler.step()
    assert torch.equal(p, q)
    assert torch.isfinite(p).all()
    assert len(lrs) > 2
    if name in ("one cycle", "cyclic"):
        assert len({b[0] for b in betas}) > 2
        assert {b[1] for b in betas} == {0.999}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_step_is_proportional_to_the_learning_rate(engine: str) -> None:
    """Gradients do not depend on the weights here, so displacements add up to lr times something fixed (fp64)."""
    ends = []
    for lr in (1e-3, 4e-3):
        p = Parameter(torch.zeros(8, 40, dtype=torch.float64))
        train(SCAO([p], lr=lr, weight_decay=0.0, engine=engine, refresh_every=3), [p], range(7))
        ends.append(p.detach())
    assert torch.allclose(4 * ends[0], ends[1], rtol=1e-9, atol=0)


# --- groups (cases 42, 46, 47) ----------------


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_are_independent_optimizers(engine: str) -> None:
    """Each group's options act on its parameters alone."""
    kinds: list[dict[str, Any]] = [
        {"lr": 1e-2, "weight_decay": 0.0},
        {"lr": 16e-2, "weight_decay": 0.1},
        {"betas": (0.5, 0.9), "engine": "soap"},
        {"engine": "spectral", "maximize": True},
        {"refresh_every": 2, "runtime": "inline", "damping": 0.1},
        {"factors": "diagonal,diagonal", "momentum_dtype": "bf16"},
    ]
    together = [make((8, 40), torch.float64, i) for i in range(len(kinds))]
    alone = [Parameter(p.detach().clone()) for p in together]
    common = {"lr": 1e-3, "engine": engine, "runtime": "inline", "refresh_every": 3}
    opt = SCAO([{"params": [p], **kind} for p, kind in zip(together, kinds, strict=True)], **common)
    train(opt, together, range(7))
    for i, (p, kind) in enumerate(zip(alone, kinds, strict=True)):
        single = SCAO([p], **{**common, **kind})
        for t in range(7):
            p.grad = noise(p, 31 * t + i)
            single.step()
        assert torch.allclose(together[i], p, rtol=1e-12, atol=1e-14), kind
        assert opt.param_groups[i]["lr"] == kind.get("lr", 1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_group_added_later_starts_like_new_and_disturbs_nobody(engine: str) -> None:
    p, q, alone_p, alone_q = make(), make((12, 30), seed=1), make(), make((12, 30), seed=1)
    options: dict[str, Any] = {"lr": 1e-2, "engine": engine, "refresh_every": 3, "runtime": "inline"}
    opt, old, new = SCAO([p], **options), SCAO([alone_p], **options), SCAO([alone_q], **{**options, "lr": 1e-3})
    scheduler = lr_scheduler.LambdaLR(opt, lambda t: 1.0)
    for t in range(10):
        if t == 4:
            opt.add_param_group({"params": [q], "lr": 1e-3})
            scheduler.base_lrs.append(1e-3)
            scheduler.lr_lambdas.append(lambda t: 1.0)
        p.grad = noise(p, t)
        alone_p.grad = p.grad.clone()
        old.step()
        if t >= 4:
            q.grad = noise(q, 100 + t)
            alone_q.grad = q.grad.clone()
            new.step()
        opt.step()
        scheduler.step()
    assert torch.equal(p, alone_p)
    assert torch.equal(q, alone_q)
    assert opt.state[q]["step"].item() == 6


def test_adding_a_group_keeps_the_schedule_of_staggered_refreshes() -> None:
    def run(add: bool) -> list[Tensor]:
        params = [make((8, 40), seed=i) for i in range(5)]
        opt = SCAO(params, lr=1e-2, refresh_every=3)
        for t in range(9):
            if add and t == 4:
                opt.add_param_group({"params": [make((16, 50))]})
            train(opt, params, range(t, t + 1))
        return [p.detach() for p in params]

    assert equal(run(True), run(False))


def test_named_parameters_keep_their_names() -> None:
    model, _, _ = model_and_data()
    opt = SCAO(model.named_parameters(), lr=1e-3)
    names = [name for name, _ in model.named_parameters()]
    assert opt.param_groups[0]["param_names"] == names
    assert opt.state_dict()["param_groups"][0]["param_names"] == names
    opt = SCAO(
        [
            {"params": [(n, p) for n, p in model.named_parameters() if p.dim() == 2], "weight_decay": 0.1},
            {"params": [(n, p) for n, p in model.named_parameters() if p.dim() < 2], "weight_decay": 0},
        ]
    )
    assert [g["weight_decay"] for g in opt.param_groups] == [0.1, 0.0]
    train(opt, [p for g in opt.param_groups for p in g["params"]], range(3))


def test_decoupled_decay_per_group() -> None:
    """A group with weight_decay=0 keeps a parameter without gradient signal as it is; another shrinks exactly."""
    p, q = make((30,)), make((30,))
    start = p.detach().clone()
    opt = SCAO([{"params": [p], "weight_decay": 0}, {"params": [q], "weight_decay": 0.1}], lr=1e-2)
    for _ in range(5):
        p.grad, q.grad = torch.zeros_like(p), torch.zeros_like(q)
        opt.step()
    assert torch.equal(p, start)
    assert torch.allclose(q, start * (1 - 1e-3) ** 5, rtol=1e-6, atol=0)  # five fp32 multiplications


# --- parameters without gradients ----------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_without_gradient_is_not_touched_and_not_counted(engine: str) -> None:
    """The others go on as if it did not exist; it goes on later as if the steps between had not been."""
    p, q = make(seed=0), make((12, 12), seed=1)
    alone_p, alone_q = make(seed=0), make((12, 12), seed=1)
    options: dict[str, Any] = {"lr": 1e-2, "engine": engine, "refresh_every": 3, "runtime": "inline"}
    opt, only_p, only_q = SCAO([p, q], **options), SCAO([alone_p], **options), SCAO([alone_q], **options)
    for t in range(12):
        p.grad = alone_p.grad = noise(p, t)
        q.grad = alone_q.grad = noise(q, 50 + t) if t % 3 == 2 else None
        before = q.detach().clone()
        opt.step()
        only_p.step()
        only_q.step()
        assert q.grad is not None or torch.equal(q, before)
    assert torch.equal(p, alone_p)
    assert torch.equal(q, alone_q)


def test_a_step_without_any_gradient() -> None:
    p = make()
    opt = SCAO([p])
    start = p.detach().clone()
    opt.step()
    assert torch.equal(p, start)
    assert not opt.state_dict()["state"]


def test_frozen_parameters_are_left_alone_and_may_thaw() -> None:
    p, q = make(), make(seed=1)
    q.requires_grad_(False)
    opt = SCAO([p, q])
    for t in range(3):
        p.grad = noise(p, t)
        opt.step()
    assert q not in opt.state
    assert opt.precond_stats()["layers"] == 1
    q.requires_grad_(True)
    train(opt, [p, q], range(3, 6))
    assert opt.precond_stats()["layers"] == 2
    assert opt.state[q]["step"].item() == 3


def test_gradients_are_left_as_they_were() -> None:
    """Loggers read the gradient norm after the step, too."""
    params = [make(s) for s in ((8, 40), (40, 8), (7,), (), (3, 4, 5))]
    opt = SCAO(params, maximize=True)
    for t in range(3):
        for i, p in enumerate(params):
            p.grad = noise(p, 31 * t + i)
        kept = [p.grad.clone() for p in params]
        opt.step()
        assert equal([p.grad for p in params], kept)


# --- cases 22, 23, 50, 51: what is refused ----------------


def refused_unchanged(opt: SCAO, params: list[Parameter], error: type[Exception], match: str) -> None:
    before = [p.detach().clone() for p in params], copy.deepcopy(opt.state_dict())
    with pytest.raises(error, match=match) as caught:
        opt.step()
    assert "\n" not in str(caught.value)
    assert equal(([p.detach() for p in params], opt.state_dict()), before)


@pytest.mark.parametrize("first", [True, False])
def test_sparse_gradients_are_refused_before_anything_changes(first: bool) -> None:
    table = nn.Embedding(20, 6, sparse=True)
    p = make()
    params = [p, table.weight]
    opt = SCAO(params)
    if not first:
        train(opt, params, range(2))
    for q in params:
        q.grad = None
    p.grad = noise(p, 9)
    table(torch.tensor([1, 3])).sum().backward()
    refused_unchanged(opt, params, GradientError, "SCAO does not support sparse")


@pytest.mark.parametrize("first", [True, False])
def test_complex_parameters_are_refused_before_anything_changes(first: bool) -> None:
    p, c = make(), Parameter(torch.randn(4, 4, dtype=torch.complex64))
    opt = SCAO([p, c])
    if not first:
        train(opt, [p], range(2))
    p.grad, c.grad = noise(p, 9), torch.ones_like(c)
    refused_unchanged(opt, [p, c], GradientError, "complex")


@pytest.mark.parametrize("mark", ["_is_flat", "_is_flat_param", "is_flat", "ds_id", "ds_tensor"])
def test_flat_shards_are_refused_at_construction(mark: str) -> None:
    p = Parameter(torch.zeros(64))
    setattr(p, mark, torch.zeros(2) if mark == "ds_tensor" else 0 if mark == "ds_id" else True)
    with pytest.raises(ParameterError, match="flat"):
        SCAO([make(), p])
    opt = SCAO([make()])
    with pytest.raises(ParameterError, match="flat"):
        opt.add_param_group({"params": [p]})
    assert len(opt.param_groups) == 1
    plain = Parameter(torch.zeros(64))
    setattr(plain, "is_flat", False)  # noqa: B010
    SCAO([plain])


def test_flat_parameter_class_is_refused() -> None:
    class FlatParameter(Parameter):
        pass

    with pytest.raises(ParameterError, match="flat"):
        SCAO([FlatParameter(torch.zeros(64))])


# --- what happened ----------------


def test_reports_and_callbacks() -> None:
    params = [make(), make((3, 6, 20)), make((7,)), make((5,))]
    opt = SCAO(params, refresh_every=2)
    seen: list[StepReport] = []
    stop = opt.on_step(seen.append)
    train(opt, params[:3], range(4))
    assert [r.step for r in seen] == [1, 2, 3, 4]
    assert all((r.preconditioned, r.adam, r.idle) == (4, 1, 0) for r in seen)
    assert sum(r.refreshed for r in seen) == opt.report().refreshed > 0
    stop()
    stop()
    train(opt, params, range(4, 5))
    assert len(seen) == 4
    assert opt.report().last is not None
    assert opt.report().last.adam == 2
    assert opt.report().matrices == 4
    assert opt.report().adam_tensors == 2


def test_two_callbacks_may_stop_in_any_order() -> None:
    p = make()
    opt, calls = SCAO([p]), []
    stops = [opt.on_step(lambda r, k=k: calls.append(k)) for k in range(3)]
    train(opt, [p], range(1))
    stops[1]()
    train(opt, [p], range(1))
    opt.on_step(lambda r: calls.append(9))
    stops[2]()
    train(opt, [p], range(1))
    assert calls == [0, 1, 2, 0, 2, 0, 9]


def test_reporting_changes_nothing() -> None:
    def run(ask: bool) -> tuple[Tensor, Any]:
        p = make()
        opt = SCAO([p], refresh_every=2)
        for t in range(5):
            train(opt, [p], range(t, t + 1))
            if ask:
                opt.plans(), opt.precond_stats(), str(opt.report()), repr(opt), opt.state_dict(), opt.skipped_steps
        return p.detach(), opt.state_dict()

    assert equal(run(True), run(False))


def test_nothing_keeps_parameters_alive() -> None:
    p = make()
    opt = SCAO([p])
    train(opt, [p], range(2))
    dead = weakref.ref(p)
    del opt, p
    gc.collect()
    assert dead() is None


# --- modes of torch ----------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_in_inference_mode_is_the_same_step(engine: str) -> None:
    """As torch.optim allows for ordinary parameters, when all steps are inside."""

    def run(mode: Any) -> Tensor:
        p = make()
        opt = SCAO([p], lr=1e-2, engine=engine, refresh_every=2)
        grads = [noise(p, t) for t in range(5)]
        for g in grads:
            p.grad = g
            with mode():
                opt.step()
        return p.detach()

    assert torch.equal(run(torch.inference_mode), run(torch.enable_grad))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_torch_does_not_matter(default: torch.dtype) -> None:
    def run() -> tuple[list[Tensor], Any]:
        params = [make((8, 40), torch.float32), make((7,), torch.float32), make((12, 12), torch.bfloat16)]
        grads = [[noise(p, t) for p in params] for t in range(5)]
        opt = SCAO(params, lr=1e-2, refresh_every=2)
        torch.set_default_dtype(default if changed else torch.float32)
        for row in grads:
            for p, g in zip(params, row, strict=True):
                p.grad = g
            opt.step()
        torch.set_default_dtype(torch.float32)
        return [p.detach() for p in params], opt.state_dict()

    try:
        changed = False
        expected = run()
        changed = True
        assert equal(run(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_deterministic_mode_of_torch_is_supported() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for engine in ENGINES:
            params = [make(), make((3, 6, 20)), make((7,))]
            train(SCAO(params, engine=engine, refresh_every=2), params, range(4))
    finally:
        torch.use_deterministic_algorithms(False)


def test_clipping_and_tied_weights() -> None:
    """Tied weights are one parameter; the same list twice is refused or warned of by torch itself."""
    table = nn.Embedding(20, 8)
    head = nn.Linear(8, 20, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    opt = SCAO(model.parameters(), lr=1e-2)
    assert len(opt.param_groups[0]["params"]) == 1
    for t in range(3):
        opt.zero_grad()
        model(torch.tensor([t, t + 1])).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    assert torch.isfinite(table.weight).all()


def test_stochastic_weight_averaging_and_foreach_of_torch_work() -> None:
    model, x, y = model_and_data()
    opt = SCAO(model.parameters(), lr=1e-3)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    swa = torch.optim.swa_utils.SWALR(opt, swa_lr=1e-4, anneal_epochs=2)
    for _ in range(4):
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
        swa.step()
        averaged.update_parameters(model)
    assert math.isclose(float(opt.param_groups[0]["lr"]), 1e-4)


def test_a_compiled_step_is_the_plain_step() -> None:
    """Compiled with a backend that adds no rounding of its own; that it falls back to plain Python is fine."""

    def run(compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        params = [make(), make((7,))]
        opt = SCAO(params, lr=torch.tensor(1e-2), refresh_every=2)
        step = torch.compile(opt.step, backend="eager") if compiled else opt.step
        scheduler = lr_scheduler.LambdaLR(opt, lambda t: 1 / (t + 1))
        for t in range(5):
            for i, p in enumerate(params):
                p.grad = noise(p, 31 * t + i)
            step()
            scheduler.step()
        assert opt.report().steps == 5
        return [p.detach() for p in params]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert equal(run(True), run(False))


@pytest.mark.parametrize("change", [{"spike_rank": 5}, {"momentum_dtype": "bfloat16"}, {"engine": "soap"}], ids=str)
def test_an_option_that_shapes_the_state_cannot_change_under_it(change: dict[str, Any]) -> None:
    """Refused before anything moves, the parameters that come first included."""
    params = [Parameter(torch.zeros(8, 64)), Parameter(torch.zeros(16, 4096))]
    opt = SCAO([{"params": params[:1]}, {"params": params[1:]}])
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    before = [p.detach().clone() for p in params]
    opt.param_groups[1].update(change)
    if change == {"momentum_dtype": "bfloat16"}:
        opt.step()  # only its dtype: the momentum is converted, and planned bytes stay true
        assert opt.precond_stats()["planned_bytes"] == opt.precond_stats()["state_bytes"]
        return
    with pytest.raises(ConfigError, match="new optimizer"):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def test_amsgrad_may_be_given_as_off() -> None:
    SCAO([Parameter(torch.zeros(2, 2))], amsgrad=False)
    with pytest.raises(ConfigError, match="amsgrad"):
        SCAO([Parameter(torch.zeros(2, 2))], amsgrad=True)


def test_keys_of_other_tools_are_kept_in_groups() -> None:
    extra = {"weight_decay_mult": 1.0, "base_weight_decay": 0.1, "lr_scale": 0.5, "initial_lr": 1e-3}
    opt = SCAO([{"params": [Parameter(torch.zeros(2, 2))], **extra}])
    assert extra.items() <= opt.param_groups[0].items()
