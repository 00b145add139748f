"""torchtune's single-device recipes on its stock configs, with nothing changed in them but the optimizer's component."""

import math
import warnings

import pytest
import torch
from omegaconf import OmegaConf
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import config
from torchtune.config._utils import _get_component_from_path

from scao import SCAO
from suites.torchtune.tuning import STOCK, full, lora, losses, recipe_state, weights
from suites.watching import assert_replayed

QLORA = {"config": "llama3_2/1B_qlora_single_device", "model.quantize_base": True}


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def assert_states(optimizer, matrices):
    """State where there is a gradient and nowhere else, with curvature for the matrices."""
    trained = {param for param in params_of(optimizer) if param.requires_grad}
    assert set(optimizer.state) == trained
    sides = [{key.partition("_")[0] for key in entry} >= {"left", "right"} for entry in optimizer.state.values()]
    assert sum(sides) == matrices == optimizer.report().matrices


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "without fused"])
def test_stock_qlora(tmp_path, model, steps, fused):
    """Every parameter is passed, the frozen NF4 weights too; the stock config's ``fused: True`` is no obstacle."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lora(model, tmp_path, *([] if fused else ["~optimizer.fused"]), **QLORA)
    assert sum("SCAO has no fused kernel" in str(w.message) for w in caught) == fused
    (optimizer,) = set(steps.optimizers)
    assert type(optimizer) is SCAO
    frozen = [param for param in params_of(optimizer) if not param.requires_grad]
    assert sum(isinstance(param, NF4Tensor) for param in frozen) == 14
    assert_states(optimizer, matrices=2 * 2 * 6)  # layers, A and B, q v o and the three of the MLP
    assert len(losses(tmp_path)) == len(steps.rates) == 3
    assert all(map(math.isfinite, losses(tmp_path)))
    assert steps.rates == [0.0, 1.5e-4, 3e-4]  # torchtune's warm-up starts at zero
    assert_replayed(steps, weight_decay=0.01)
    saved = weights(tmp_path / "epoch_0" / "adapter_model.pt").values()
    trained = {tuple(t.flatten().tolist()) for t in steps.start}
    assert {tuple(t.flatten().tolist()) for t in saved} == trained


def test_stock_lora_in_bf16_keeps_its_curvature_in_fp32(tmp_path, model, steps):
    lora(model, tmp_path, dtype="bf16")
    (optimizer,) = set(steps.optimizers)
    assert {param.dtype for param in steps.start} == {torch.bfloat16}
    assert_states(optimizer, matrices=24)
    kept = [item for entry in optimizer.state.values() for item in entry.items() if item[1].is_floating_point()]
    assert {tensor.dtype for key, tensor in kept if key != "exp_avg"} == {torch.float32}
    assert {tensor.dtype for key, tensor in kept if key == "exp_avg"} == {torch.bfloat16}  # as AdamW's
    assert_replayed(steps)


def test_dora_with_gradient_accumulation(tmp_path, model, steps):
    lora(model, tmp_path, **{"model.use_dora": True, "gradient_accumulation_steps": 2, "clip_grad_norm": 1.0})
    (optimizer,) = set(steps.optimizers)
    assert_states(optimizer, matrices=24)
    assert len(optimizer.state) == 24 + 12  # and the magnitudes
    assert_replayed(steps)


def test_two_half_batches_are_one(tmp_path, model, steps):
    """torchtune weighs by tokens, so the sums differ in their order alone; so do the losses and the steps."""
    lora(model, tmp_path / "whole", batch_size=4)
    whole, steps.start = steps.start, {}
    lora(model, tmp_path / "halves", batch_size=2, gradient_accumulation_steps=2)
    assert losses(tmp_path / "halves") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    for (a, start), b in zip(whole.items(), steps.start, strict=True):
        moved = (a - start).norm()
        assert moved > 0
        assert (a - b).norm() <= 1e-3 * moved


def test_full_fine_tune_by_a_paged_adamw_config(tmp_path, model, steps):
    full(model, tmp_path, optimizer_in_bwd=False)
    (optimizer,) = set(steps.optimizers)
    assert_states(optimizer, matrices=2 * 7 + 1)  # a table of 272 tokens is no larger than the other matrices
    assert steps.rates == [2e-5] * 3
    assert all(map(math.isfinite, losses(tmp_path)))
    assert_replayed(steps)
    saved = weights(tmp_path / "epoch_0" / "model-00001-of-00001.safetensors")
    tied = next(param for param in steps.start if len(param) == 272)
    assert torch.equal(saved["model.embed_tokens.weight"], tied)


def test_optimizer_in_backward_is_one_optimizer_a_parameter(tmp_path, model, steps):
    """As the stock config has it; each is stepped as soon as its gradient is there, and equals SCAO on that parameter."""
    full(model, tmp_path, epochs=2)
    optimizers = {params_of(optimizer)[0]: optimizer for optimizer in steps.optimizers}
    assert len(optimizers) == 2 * 9 + 2
    assert {type(optimizer) for optimizer in optimizers.values()} == {SCAO}
    assert {optimizer.report().steps for optimizer in optimizers.values()} == {6}
    steps.watching = False
    for param, optimizer in optimizers.items():
        assert param.grad is None
        copy = torch.nn.Parameter(steps.start[param].clone())
        alone = SCAO([copy], lr=2e-5)
        for stepped, grads in zip(steps.optimizers, steps.grads, strict=True):
            if stepped is optimizer:
                copy.grad = grads[param]
                alone.step()
        assert torch.equal(copy, param)
    saved = recipe_state(tmp_path)["optimizer"]
    assert all(entry["param_groups"][0]["scao_schema"] == 1 and len(entry["state"]) == 1 for entry in saved.values())


def test_options_from_the_command_line(tmp_path, model, steps):
    """A list becomes a tuple, text a number, and what is saved is plain, so that a safe load takes it."""
    options = {
        "betas": "[0.9,0.95]",
        "lr": "'2e-4'",
        "eps": "'1e-7'",
        "spike_rank": "'8'",
        "momentum_dtype": "bfloat16",
    }
    options |= {"factors": "[dense,spiked]", "damping": "1e-2", "fused": "None"}
    lora(model, tmp_path, epochs=2, **{f"optimizer.{name}": value for name, value in options.items()})
    (group,) = recipe_state(tmp_path)["optimizer"]["param_groups"]
    wanted = {"betas": (0.9, 0.95), "initial_lr": 2e-4, "eps": 1e-7, "spike_rank": 8, "damping": 1e-2}
    assert {name: group[name] for name in wanted} == wanted
    assert type(group["betas"]) is tuple
    assert {entry["exp_avg"].dtype for entry in steps.optimizers[0].state.values()} == {torch.bfloat16}


def stock_configs():
    found = {path: OmegaConf.load(path) for path in sorted(STOCK.glob("*/*.yaml"))}
    return {path: loaded for path, loaded in found.items() if "optimizer" in loaded}


@pytest.mark.filterwarnings("ignore:SCAO has no fused kernel")
def test_every_stock_config_takes_scao_for_its_optimizer():
    """What they carry besides the component (lr, weight_decay, fused, ...) means the same to SCAO."""
    configs = stock_configs()
    assert len(configs) > 100
    for path, loaded in configs.items():
        loaded.optimizer["_component_"] = "scao.SCAO"
        config.validate(OmegaConf.create({"optimizer": loaded.optimizer}))
        optimizer = config.instantiate(loaded.optimizer, [torch.nn.Parameter(torch.zeros(4, 4))])
        given = {key: value for key, value in loaded.optimizer.items() if key not in ("_component_", "fused")}
        assert {key: optimizer.defaults[key] for key in given} == given, path
    assert _get_component_from_path("scao.SCAO") is SCAO
