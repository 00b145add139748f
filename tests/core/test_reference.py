"""Every engine over every pair of factors against ``scao_core/reference.py``: parameters and state, in fp64."""

import pytest
import torch

from scao import SCAO
from scao_core import reference
from scao_core.engines import kl
from scao_core.groups import Plans
from scao_core.schedule import is_due

# fp64 products of this size agree to about 1e-13. The largest difference comes from the first directions of a spiked
# factor: they are nearly dependent (condition up to 1e3 here), and Cholesky QR squares that where the reference's
# Gram-Schmidt does not.
TOLERANCE = 2e-8

PAIRS = [
    "dense,spiked",
    "dense,diagonal",
    "dense,dense",
    "diagonal,diagonal",
    "diagonal,spiked",
    "blocked,blocked",
    "spiked,spiked",
    "blocked,spiked",
]


def kind(factor):
    if factor.name == "blocked":
        return ("blocked", factor.count)
    return ("spiked", factor.rank) if factor.name == "spiked" else (factor.name,)


def gradients(shape, steps, seed):
    """Gradients with a few dominant directions, as LoRA's have, and a scale that changes."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(*shape, generator=generator, dtype=torch.float64)
    wide = torch.linspace(3, 0.1, shape[1], dtype=torch.float64)
    return [
        (0.3 * common + torch.randn(*shape, generator=generator, dtype=torch.float64)) * wide * 1e-4 * (1 + i % 3)
        for i in range(steps)
    ]


def run_both(shape, steps=24, seed=0, **options):
    start = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    fast = torch.nn.Parameter(start.clone())
    options = {"lr": 1e-2, "weight_decay": 0.1} | options
    optimizer = SCAO([fast], refresh_every=4, block_size=3, spike_rank=3, **options)
    plan = Plans(optimizer.param_groups[0])[fast]
    turns = optimizer._schedule()[0][0][0]
    slow = start.T.clone() if plan.transposed else start.clone()
    state, names, waiting = None, optimizer.param_groups[0], [(0, None), (0, None)]
    told = ("lr", "betas", "eps", "weight_decay", "damping", "norm_rule", "cautious", "nesterov", "engine")
    o = {k: names[k] for k in told}
    o["curvature_beta"] = names["betas"][1] if names["curvature_beta"] is None else names["curvature_beta"]
    for g in gradients(shape, steps, seed):
        fast.grad = g.clone()
        optimizer.step()
        if state is None:
            state = initial(optimizer.state[fast], plan)
        t = int(state["step"]) + 1
        pairs = zip(plan.sides, turns, strict=True)
        due = [is_due(side, names["runtime"], t, turn, 4) for side, turn in pairs] or [False, False]
        if names["refresh_delay"]:
            due = delayed(waiting, due, t, names["refresh_delay"])
        sides = [kind(f) for f in plan.sides] or [("diagonal",)] * 2
        slow = reference.step(slow, g.T if plan.transposed else g, state, *sides, due, o)
        for i, (when, basis) in enumerate(waiting):
            if when > t and basis is None:  # the snapshot of this step
                prefix = ("left_", "right_")[i]
                entries = {"cov": state[prefix + "cov"], "basis": state[prefix + "basis"]}
                waiting[i] = (when, reference.eigenbasis(entries))
    return plan, fast.detach(), slow.T if plan.transposed else slow, optimizer.state[fast], state


def delayed(waiting, due, t, delay):
    """What the reference installs after step t; takes a note of snapshots that are due and of those that are early."""
    result = []
    for i, snapshot in enumerate(due):
        install = waiting[i][1] if waiting[i][0] == t else False
        if snapshot and t < 4:
            install = True
        elif snapshot:
            waiting[i] = (t + delay, None)
        result.append(install)
    return result


def initial(like, plan):
    state = {key: torch.zeros_like(value) for key, value in like.items()}
    for key in state:
        if key.endswith("basis") and "spiked" not in plan.sides[key.startswith("right")].name:
            state[key] = torch.eye(state[key].shape[-1], dtype=torch.float64).expand(state[key].shape).clone()
    if plan.transposed:
        state["exp_avg"] = state["exp_avg"].T
    return state


def assert_same_state(fast, slow, transposed):
    for key, value in fast.items():
        if key.endswith("failures"):
            assert not value.any()
            continue
        got, want = value, slow[key]
        if key == "exp_avg" and transposed:
            want = want.T
        if key.endswith("basis") and got.shape[-1] == got.shape[-2]:
            # An eigenvector is known up to its sign.
            got = got * (got * want).sum(-2, keepdim=True).sign()
        torch.testing.assert_close(
            got, want.to(got.dtype), rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("runtime", ["staggered", "inline"])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)], ids=["wide", "tall"])
@pytest.mark.parametrize("factors", PAIRS)
@pytest.mark.parametrize("engine", ["kl", "soap"])
def test_rule_equals_reference(engine, factors, shape, runtime):
    plan, fast, slow, state, wanted = run_both(shape, engine=engine, factors=factors, runtime=runtime)
    assert plan.engine == engine
    torch.testing.assert_close(fast, slow, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same_state(state, wanted, plan.transposed)


@pytest.mark.parametrize("runtime", ["staggered", "inline", "thread"])
@pytest.mark.parametrize("engine", ["kl", "soap"])
def test_a_late_basis_equals_reference(engine, runtime):
    """Refreshes before the first interval is over do not wait: these factors are short."""
    plan, fast, slow, state, wanted = run_both(
        (6, 10), engine=engine, factors="dense,blocked", runtime=runtime, refresh_delay=2
    )
    torch.testing.assert_close(fast, slow, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same_state(state, wanted, plan.transposed)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_spectral_equals_reference(shape):
    plan, fast, slow, state, wanted = run_both(shape, engine="spectral")
    torch.testing.assert_close(fast, slow, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same_state(state, wanted, plan.transposed)


@pytest.mark.parametrize(
    "options",
    [
        {"betas": (0.8, 0.95)},
        {"damping": 0.1},
        {"damping": 1e-6},
        {"lr": 0.0},
        {"lr": 1e-5},  # every entry may move ten times lr,
        {"lr": 0.1},  # and as far as Adam's could
        {"curvature_beta": 0.9},
        {"norm_rule": "none"},
        {"cautious": False},
        {"nesterov": True},
        {"nesterov": False},
        {"cautious": False, "nesterov": False, "norm_rule": "none"},
    ],
)
def test_options_reach_the_rule(options):
    plan, fast, slow, state, wanted = run_both((6, 12), factors="dense,spiked", **options)
    torch.testing.assert_close(fast, slow, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same_state(state, wanted, plan.transposed)


@pytest.mark.parametrize(("shape", "damping"), [((64, 70), 0.1), ((70, 64), 0.1), ((65, 70), 1e-3), ((70, 65), 1e-3)])
def test_the_default_damping_follows_from_the_short_side(shape, damping):
    plan, fast, slow, state, wanted = run_both(shape, steps=8, factors="diagonal,diagonal")
    torch.testing.assert_close(fast, slow, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same_state(state, wanted, plan.transposed)
    for named in (0.1, 1e-3):
        same = torch.equal(run_both(shape, steps=8, factors="diagonal,diagonal", damping=named)[1], fast)
        assert same == (named == damping)


@pytest.mark.parametrize("shape", [(6, 12), (12, 6)])
def test_thin_path_equals_general_rule(shape, monkeypatch):
    """The fast path for dense × spiked and the rule for any two factors are one rule."""
    results = [run_both(shape, factors="dense,spiked")[1]]
    monkeypatch.setattr("scao_core.engines.kl.thin", kl.general)
    results.append(run_both(shape, factors="dense,spiked")[1])
    torch.testing.assert_close(*results, rtol=TOLERANCE, atol=TOLERANCE)


def test_vectors_equal_adam():
    """On the Adam path SCAO is torch's AdamW, up to eps, which is relative here (its effect is below 1e-4 at this size)."""
    start = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    a = SCAO([ours], lr=1e-2, weight_decay=0.1)
    b = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, eps=0)
    for g in gradients((1, 7), 20, 3):
        ours.grad, theirs.grad = g[0].clone(), g[0].clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("numel", [1000, 1001])
def test_large_tensors_are_cut_into_equal_work(numel, monkeypatch):
    """The in-place path for pieces of a large tensor and the rule for whole ones are one rule."""
    results = []
    for size in (10**6, 64):
        monkeypatch.setattr("scao_core.stacks.SLICE", size)
        param = torch.nn.Parameter(torch.linspace(-1, 1, numel, dtype=torch.float64))
        optimizer = SCAO([param], lr=1e-2, weight_decay=0.1)
        for g in gradients((1, numel), 8, 5):
            param.grad = g[0].clone()
            optimizer.step()
        results.append((param.detach(), optimizer.state[param]["exp_avg_sq"], optimizer.state[param]["exp_avg"]))
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(whole, cut, rtol=1e-12, atol=1e-12)
