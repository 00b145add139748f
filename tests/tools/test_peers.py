"""The optimizers that ours is compared with: each trains, has the options it says, and is measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scao_tools.bench.workload import Entry
from scao_tools.combined import CombinedOptimizer
from scao_tools.errors import MissingPackageError, OptionError
from scao_tools.models import LoraSettings, add_lora, trainable
from scao_tools.optimizers import REGISTRY, build_optimizer, check_grid, check_optimizer, parse_optimizers, state_bytes

HERE = [name for name, spec in REGISTRY.items() if spec.isolated is None]
IDS = torch.arange(48).reshape(3, 16) % 19


@pytest.fixture
def adapted(tiny_llama: Callable[..., Any]) -> Any:
    return add_lora(tiny_llama(1), LoraSettings(rank=4), seed=0)


def loss_of(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
    return result


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def mixed() -> dict[str, torch.nn.Parameter]:
    """What a model trained whole has: tables, matrices, vectors, and an adapter on the head."""
    shapes = {
        "model.embed_tokens.weight": (9, 4),
        "transformer.wte.weight": (9, 4),
        "model.layers.0.mlp.up_proj.weight": (6, 4),
        "model.layers.0.mlp.up_proj.bias": (6,),
        "model.norm.weight": (4,),
        "lm_head.weight": (9, 4),
        "lm_head.lora_A.default.weight": (2, 4),
        "lora_embedding_A.default": (2, 9),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def with_gradients(named: dict[str, torch.nn.Parameter]) -> None:
    for parameter in named.values():
        parameter.grad = torch.sin(parameter.detach())


@pytest.mark.parametrize("name", HERE)
def test_each_lowers_the_loss_of_a_lora_model(name: str, adapted: Any) -> None:
    named = trainable(adapted)
    optimizer = build_optimizer(name, named, 1e-2, {}, 0.01)
    before = loss_of(adapted).item()
    train(adapted, optimizer, 12)
    assert loss_of(adapted).item() < before - 0.05
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in named.values()}
    # The least that any of them keeps is bytes of 8 bits for two moments, or one momentum in 32.
    assert state_bytes(optimizer) >= 2 * sum(p.numel() for p in named.values())


@pytest.mark.parametrize("name", HERE)
def test_a_learning_rate_set_from_outside_is_the_one_used(name: str, adapted: Any) -> None:
    optimizer = build_optimizer(name, trainable(adapted), 1e-2)
    train(adapted, optimizer, 2)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in trainable(adapted).values()]
    train(adapted, optimizer, 1)
    # Schedule-free AdamW still moves towards its average.
    if name != "schedulefree":
        assert all(torch.equal(left, right) for left, right in zip(before, trainable(adapted).values(), strict=True))


@pytest.mark.parametrize("name", list(REGISTRY))
def test_names_are_parsed_and_schedules_are_known(name: str) -> None:
    assert parse_optimizers(f" {name.upper()},", REGISTRY) == (name,)
    assert REGISTRY[name].schedule in ("linear", "constant")
    assert REGISTRY[name].name == name


def test_the_demo_knows_its_own_only() -> None:
    with pytest.raises(OptionError, match=r"known: adamw, scao$"):
        parse_optimizers("muon")


@pytest.mark.parametrize(
    ("name", "option", "nearest"),
    [
        ("adamw", "beta", "betas"),
        ("adamw-fused", "ep", "eps"),
        ("adamw8bit", "min_8bit", "min_8bit_size"),
        ("loraplus", "ratoi", "ratio"),
        ("riemannian", "regs", "reg"),
        ("muon", "momentun", "momentum"),
        ("soap", "max_precond_dim", "max_precondition_dim"),
        ("shampoo", "blocksize", "block_size"),
        ("schedulefree", "warmup", "warmup_steps"),
        ("scao", "spikerank", "spike_rank"),
    ],
)
def test_unknown_options_are_refused_with_the_nearest(name: str, option: str, nearest: str) -> None:
    with pytest.raises(OptionError, match=f"^{name}: unknown option '{option}'.*did you mean '{nearest}'"):
        check_optimizer(name, 1e-3, {option: 1})


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_what_the_comparison_sets_is_no_option(name: str, option: str) -> None:
    with pytest.raises(OptionError, match=f"'{option}' is set for all optimizers together"):
        check_optimizer(name, 1e-3, {option: 0.1})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamw", {"betas": [0.9, 1.5]}, "adamw: Invalid beta"),
        ("adamw", {"fused": True}, "adamw: .*cannot be"),
        ("scao", {"engine": "kll"}, "scao: engine"),
        ("muon", {"adjust_lr_fn": "orig"}, "muon: Adjust learning rate"),
        ("muon", {"ns_steps": 200}, "muon cannot take a step on cpu: ValueError"),
        ("loraplus", {"ratio": 0}, "ratio=0 must be above 0"),
        ("loraplus", {"ratio": "fast"}, "ratio='fast' must be a number"),
        ("riemannian", {"reg": float("nan")}, "reg=nan must be a number"),
    ],
)
def test_wrong_values_are_refused_in_a_sentence(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_optimizer(name, 1e-3, options)


def test_values_may_be_text_and_lists() -> None:
    named = mixed()
    group = build_optimizer(
        "adamw", named, 1e-3, {"betas": ["0.8", 0.99], "eps": "1e-7", "amsgrad": "true"}
    ).param_groups[0]
    assert (group["betas"], group["eps"], group["amsgrad"]) == ((0.8, 0.99), 1e-7, True)
    assert build_optimizer("soap", named, 1e-3, {"max_precondition_dim": "64"}).defaults["max_precondition_dim"] == 64
    assert build_optimizer("muon", named, 1e-3, {}).param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"


def test_a_check_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    for name in HERE:
        check_optimizer(name, 1e-3)
    assert torch.equal(torch.rand(1), expected)


def test_lora_only_is_refused_elsewhere() -> None:
    for name in ("loraplus", "riemannian"):
        assert REGISTRY[name].lora_only
        with pytest.raises(OptionError, match="is for LoRA only"):
            build_optimizer(name, {"weight": torch.nn.Parameter(torch.ones(2, 2))}, 1e-3)
        with pytest.raises(OptionError, match="is for LoRA only"):
            check_grid([Entry(name, {}, (1e-3,))], full=True)
        check_grid([Entry(name, {}, (1e-3,))])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scao_tools.requirements.is_installed", lambda module: module != "schedulefree")
    with pytest.raises(MissingPackageError, match=r"'schedulefree' needs schedulefree.*scao\[bench\]"):
        check_optimizer("schedulefree", 1e-3)


def test_loraplus_has_the_groups_of_peft(adapted: Any) -> None:
    from peft.optimizers import create_loraplus_optimizer

    def settings(optimizer: torch.optim.Optimizer) -> dict[int, tuple[float, float]]:
        groups = optimizer.param_groups
        return {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}

    named = trainable(adapted)
    ours = settings(build_optimizer("loraplus", named, 2e-3, {"ratio": "8"}, 0.1))
    theirs = create_loraplus_optimizer(
        adapted, torch.optim.AdamW, lr=2e-3, loraplus_lr_ratio=8.0, loraplus_weight_decay=0.1
    )
    assert ours == settings(theirs)
    for name, parameter in named.items():
        assert ours[id(parameter)][0] == (8 if "lora_B" in name else 1) * 2e-3
    default = settings(build_optimizer("loraplus", named, 1e-3))
    assert max(default.values())[0] == 16 * min(default.values())[0]


def test_muon_takes_hidden_matrices_and_every_parameter_is_taken_once() -> None:
    named = mixed()
    optimizer = build_optimizer("muon", named, 1e-2)
    assert isinstance(optimizer, CombinedOptimizer)
    taken = [[id(p) for group in part.param_groups for p in group["params"]] for part in optimizer.parts]
    names = [[name for name, p in named.items() if id(p) in part] for part in taken]
    assert names[0] == ["model.layers.0.mlp.up_proj.weight", "lm_head.lora_A.default.weight"]
    assert sorted(taken[0] + taken[1]) == sorted(id(p) for p in named.values())
    only = build_optimizer("muon", {"a.weight": torch.nn.Parameter(torch.ones(3, 3))}, 1e-2)
    assert len(only.param_groups) == 1
    only = build_optimizer("muon", {"a.bias": torch.nn.Parameter(torch.ones(3))}, 1e-2)
    assert len(only.param_groups) == 1


def test_the_combination_steps_as_its_parts_do() -> None:
    together, apart = mixed(), mixed()
    optimizer = build_optimizer("muon", together, 1e-2)
    matrices = [p for name, p in apart.items() if "up_proj.weight" in name or ".lora_A." in name]
    others = [p for p in apart.values() if all(p is not m for m in matrices)]
    parts = (
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-2, weight_decay=0.0, foreach=True),
    )
    for lr in (1e-2, 5e-3, 1e-3):
        for group in (*optimizer.param_groups, *parts[0].param_groups, *parts[1].param_groups):
            group["lr"] = lr
        with_gradients(together)
        with_gradients(apart)
        optimizer.step()
        parts[0].step()
        parts[1].step()
    for name in together:
        assert torch.equal(together[name], apart[name]), name
    assert state_bytes(optimizer) == state_bytes(parts[0]) + state_bytes(parts[1])


def test_the_state_of_the_combination_goes_into_another(tmp_path: Path) -> None:
    first, second = mixed(), mixed()
    one, other = build_optimizer("muon", first, 1e-2), build_optimizer("muon", second, 5e-3)
    for _ in range(3):
        with_gradients(first)
        one.step()
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    with torch.no_grad():
        for name, parameter in second.items():
            parameter.copy_(first[name])
    for _ in range(2):
        with_gradients(first)
        with_gradients(second)
        one.step()
        other.step()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    other.zero_grad()
    assert all(p.grad is None for p in second.values())
    assert len(other.state_dict()["state"]) == len(second)


def test_only_fresh_optimizers_are_combined() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    used = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    used.step()
    with pytest.raises(ValueError, match="before their first step"):
        CombinedOptimizer([used])


def test_schedulefree_evaluates_other_weights_than_it_trains(adapted: Any) -> None:
    optimizer: Any = build_optimizer("schedulefree", trainable(adapted), 1e-2)
    assert REGISTRY["schedulefree"].schedule == "constant"
    train(adapted, optimizer, 4)

    def weights() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in trainable(adapted).values()])

    trained = weights()
    optimizer.eval()
    assert (weights() - trained).abs().max() > 1e-4
    optimizer.train()
    torch.testing.assert_close(weights(), trained)


def test_state_is_counted_inside_objects_and_once() -> None:
    parameter = torch.nn.Parameter(torch.ones(10))
    shared = torch.zeros(4)
    inner = SimpleNamespace(moments=[torch.zeros(2), shared], parameter=parameter)
    inner.itself = inner
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"inner": inner, "shared": shared, "step": 3}
    assert state_bytes(optimizer) == (2 + 4) * 4


def test_building_the_registry_does_not_import_torch() -> None:
    code = "import sys, scao_tools.optimizers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cautious_adamw_is_adamw_but_for_the_entries_that_disagree() -> None:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(6, 10)) for _ in range(2)]
    plain = build_optimizer("adamw", params[:1], 1e-2)
    masked = build_optimizer("adamw-cautious", params[1:], 1e-2)
    for step in range(4):
        g = torch.randn(6, 10, generator=generator)
        before = [p.detach().clone() for p in params]
        for p, optimizer in zip(params, (plain, masked), strict=True):
            p.grad = g.clone()
            optimizer.step()
        moved, wanted = params[1].detach() - before[1], params[0].detach() - before[0]
        agree = wanted * g < 0
        assert agree.all() == (step == 0)
        # the moments are the same, since they do not depend on where the weights are
        torch.testing.assert_close(moved, wanted * agree / agree.float().mean(), rtol=1e-3, atol=1e-6)
