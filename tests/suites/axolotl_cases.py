"""Axolotl with ``optimizer: scao``: the tests that both versions run; the suites import them."""

import json
import math
import signal
from types import SimpleNamespace

import pytest
import torch
import yaml

from scao import SCAO
from scao_core import Options
from scao_tools.recipes import config_folder
from suites import axolotl_runs as runs
from suites.axolotl_runs import DPO, FULL, MATERIAL, config, inner, loaded, losses, train, trained

TEXT = "spike_rank=2, betas=0.8,0.95, damping=1e-2, precond_freq=2, k_min=8,k_max=128,sparsity=0.7"
OPTIONS = {"spike_rank": 2, "betas": (0.8, 0.95), "damping": 1e-2, "refresh_every": 2}  # what it means
INTERRUPTIBLE = {
    "optim_args": TEXT,
    "plugins": [*([] if runs.FOUND else [runs.PLUGIN]), "suites.axolotl_kill.KillPlugin"],
    "save_strategy": None,
    "save_steps": 3,
    "max_steps": 6,
    "lr_scheduler": "cosine",
}


def assert_stepped(trainer, steps, *, curved=True):
    """SCAO took the steps, and every matrix has state of its own."""
    optimizer = inner(trainer)
    assert type(optimizer) is SCAO
    assert optimizer.report().steps == steps == len(losses(trainer))
    assert optimizer.report().skipped_steps == 0
    assert all(math.isfinite(loss) for loss in losses(trainer))
    assert set(optimizer.state) == set(trained(trainer).values())
    matrices = [p for p, plan in optimizer.plans() if plan.is_matrix]
    assert len(matrices) > 0 or not curved
    assert all({"left", "right"} <= {key.partition("_")[0] for key in optimizer.state[p]} for p in matrices)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["scao/skipped_steps"] == 0 for entry in logged)


def groups(trainer):
    """Learning rate, weight decay and names of each group."""
    names = {id(p): name for name, p in trained(trainer).items()}
    return [(g["lr"], g["weight_decay"], [names[id(p)] for p in g["params"]]) for g in inner(trainer).param_groups]


class TestCommandLine:
    """``axolotl train`` in a process of its own."""

    @pytest.fixture(scope="class")
    def whole(self, place):
        ran = runs.command(config(place / "whole", **INTERRUPTIBLE))
        assert ran.returncode == 0, ran.stderr[-3000:]
        return SimpleNamespace(out=place / "whole" / "out", text=ran.stdout + ran.stderr)

    @pytest.fixture(scope="class")
    def killed(self, place, whole):
        path = config(place / "killed", **INTERRUPTIBLE)
        ran = runs.command(path, KILL_AFTER_STEP="5")
        assert ran.returncode == -signal.SIGKILL, ran.stderr[-3000:]
        return SimpleNamespace(path=path, out=place / "killed" / "out")

    def test_scao_trains_with_the_options_of_the_config(self, whole):
        saved = torch.load(whole.out / "checkpoint-6" / "optimizer.pt", weights_only=True)
        (group,) = saved["param_groups"]  # LoRA has no norms or biases
        wanted = {**Options().as_dict(), **OPTIONS, "weight_decay": 0.1}
        assert {name: group[name] for name in wanted if name != "lr"} == {n: v for n, v in wanted.items() if n != "lr"}
        assert group["initial_lr"] == 2e-3
        assert len(saved["state"]) == 2 * 7 * 2  # layers, linear modules, A and B
        for entry in saved["state"].values():
            assert {"left", "right"} <= {key.partition("_")[0] for key in entry}

    def test_scaos_counters_are_in_the_logs(self, whole):
        state = json.loads((whole.out / "checkpoint-6" / "trainer_state.json").read_text())
        logged = [entry for entry in state["log_history"] if "loss" in entry]
        assert [entry["step"] for entry in logged] == [1, 2, 3, 4, 5, 6]
        assert all(math.isfinite(entry["loss"]) for entry in logged)
        assert all(entry["scao/skipped_steps"] == 0 and entry["scao/refresh_age"] <= 2 for entry in logged)
        assert "'scao/lr_0'" in whole.text
        assert whole.text.count("the optimizer is SCAO with") == 1

    def test_documented_options_of_older_code_are_taken_with_one_warning(self, whole):
        assert whole.text.count("options of older SCAO code:") == 1
        assert all(f"{name} has no effect" in whole.text for name in ("k_min", "k_max", "sparsity"))

    def test_a_killed_run_resumes_bit_for_bit(self, whole, killed):
        assert not (killed.out / "adapter_model.safetensors").exists()
        assert [path.name for path in killed.out.glob("checkpoint-*")] == ["checkpoint-3"]
        ran = runs.command(killed.path, "--resume-from-checkpoint", str(killed.out / "checkpoint-3"))
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert_saved_the_same(whole.out, killed.out)

    def test_a_wrong_option_stops_it_before_a_model_is_loaded(self, place):
        ran = runs.command(config(place / "wrong", optim_args={"spike_rnk": 2}))
        assert ran.returncode != 0
        assert (
            "UnknownOptionError: unknown option 'spike_rnk'; did you mean 'spike_rank'?" in ran.stderr.splitlines()[-1]
        )
        assert "Loading weights" not in ran.stdout + ran.stderr
        assert not (place / "wrong" / "out").exists()


def assert_saved_the_same(one, other):
    """Adapter, optimizer and losses of two runs that saved at step 6."""
    from safetensors.torch import load_file

    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    a, b = (torch.load(folder / "checkpoint-6" / "optimizer.pt", weights_only=True) for folder in (one, other))
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for index, entry in a["state"].items():
        assert entry.keys() == b["state"][index].keys()
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["state"][index][key])), (index, key)
    assert losses(one / "checkpoint-6") == losses(other / "checkpoint-6")


class TestMethods:
    """What Axolotl trains, with SCAO; in this process."""

    def test_mapping_and_text_are_the_same_and_equal_the_class_given_directly(self, place):
        mapping = {"spike_rank": "2", "betas": [0.8, "0.95"], "damping": "1e-2", "refresh_every": 2.0}
        by_mapping = train(config(place / "mapping", optim_args=mapping))
        assert_stepped(by_mapping, 3)
        runs.assert_same(by_mapping, train(config(place / "text", optim_args=TEXT)))
        plain = config(place / "direct", optimizer="adamw_torch", plugins=None)
        directly = runs.train_directly(plain, lr=2e-3, weight_decay=0.1, **OPTIONS)
        assert_stepped_without_logs(directly, 3)
        runs.assert_same(by_mapping, directly)

    def test_settings_of_axolotl_reach_scao(self, place):
        """Also one rate alone, which Axolotl's own code would drop."""
        trainer = train(config(place / "settings", adam_beta2=0.95, adam_epsilon="1e-6", weight_decay="2e-2"))
        (group,) = inner(trainer).param_groups
        wanted = {"lr": 2e-3, "betas": (Options().betas[0], 0.95), "eps": 1e-6, "weight_decay": 0.02}
        assert {name: group[name] for name in wanted} == wanted
        assert_stepped(trainer, 3)

    def test_full_fine_tuning_with_rates_by_group(self, place):
        lr_groups = [{"name": "mlp", "modules": ["gate_proj", "up_proj"], "lr": 3e-4}]
        path = config(place / "full", **FULL, embedding_lr=5e-4, lr_groups=lr_groups, adam_beta1=0.8, adam_beta2=0.9)
        trainer = train(path)
        assert_stepped(trainer, 3)
        decayed, embedding, plain, mlp = groups(trainer)
        assert decayed[:2] == (2e-3, 0.1)
        assert {name.split(".")[-2] for name in decayed[2]} == {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}
        assert embedding == (5e-4, 0.0, ["model.embed_tokens.weight"])
        assert plain[:2] == (2e-3, 0.0)
        assert all("norm" in name for name in plain[2])
        assert len(plain[2]) == 5
        assert mlp[:2] == (3e-4, 0.1)
        assert {name.split(".")[-2] for name in mlp[2]} == {"gate_proj", "up_proj"}
        assert {group["betas"] for group in inner(trainer).param_groups} == {(0.8, 0.9)}

    def test_scale_of_the_embeddings_rate_on_a_rate_of_optim_args(self, place):
        path = config(place / "scale", **FULL, embedding_lr_scale=0.5, optim_args="lr=1e-3,eps=1e-7", max_steps=1)
        trainer = train(path)
        rates = {tuple(names): lr for lr, _, names in groups(trainer)}
        assert rates.pop(("model.embed_tokens.weight",)) == 5e-4
        assert set(rates.values()) == {1e-3}
        assert_stepped(trainer, 1)

    def test_lora_plus(self, place):
        """Its groups decay, too, and the rate of B is a multiple of that of A."""
        trainer = train(config(place / "plus", loraplus_lr_ratio=16, optim_args={"spike_rank": 2}))
        a, b = (group for group in groups(trainer) if group[2])
        assert a[:2] == (2e-3, 0.1)
        assert b[:2] == (pytest.approx(32e-3), 0.1)
        assert all("lora_A" in name for name in a[2])
        assert all("lora_B" in name for name in b[2])
        assert_stepped(trainer, 3)
        assert inner(trainer).param_groups[0]["spike_rank"] == 2

    def test_dpo(self, place):
        trainer = train(config(place / "dpo", **DPO, optim_args=TEXT, sequence_len=256))
        assert type(trainer).__name__ == "AxolotlDPOTrainer"
        assert_stepped(trainer, 3)
        assert losses(trainer)[0] == pytest.approx(math.log(2))  # both models are the same at first
        assert {n: inner(trainer).defaults[n] for n in OPTIONS} == OPTIONS


def assert_stepped_without_logs(trainer, steps):
    assert type(inner(trainer)) is SCAO
    assert inner(trainer).report().steps == steps


def recipes():
    """Ours, from the installed package."""
    return sorted((config_folder() / "axolotl").glob("*.yaml"))


def localized(path, folder, **changes):
    """A recipe with the model and the data that are here."""
    settings = yaml.safe_load(path.read_text()) | {"base_model": str(MATERIAL / "smollm2"), "datasets": [runs.CHAT]}
    settings |= {"special_tokens": None, "output_dir": str(folder / "out")}
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / path.name
    settings |= {"dataset_prepared_path": str(folder.parent / "prepared"), **changes}
    copy.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
    return copy


class TestRecipes:
    def test_there_are_pairs(self):
        names = {path.name for path in recipes()}
        assert len(names) == 10
        assert names == {name.replace("_adamw", "_scao") for name in names} | {
            n.replace("_scao", "_adamw") for n in names
        }

    @pytest.mark.parametrize("path", recipes(), ids=lambda path: path.stem)
    def test_recipe_is_valid(self, path, place):
        from axolotl.utils.schemas.config import AxolotlInputConfig

        settings = yaml.safe_load(path.read_text())
        assert set(settings) <= set(AxolotlInputConfig.model_fields)
        assert type(settings["learning_rate"]) is float
        cfg = loaded(localized(path, place / "recipes"))
        assert cfg.optimizer == settings["optimizer"] == ("scao" if "_scao" in path.name else "adamw_torch")
        assert (cfg.adapter, bool(cfg.load_in_4bit)) == (("qlora", True) if "qlora" in path.name else (None, False))

    @pytest.mark.parametrize("path", [p for p in recipes() if "_scao" in p.name], ids=lambda path: path.stem)
    def test_twin_differs_in_the_optimizer_alone(self, path):
        ours, twin = (yaml.safe_load(p.read_text()) for p in (path, path.with_name(path.name.replace("scao", "adamw"))))
        assert {key for key in {*ours, *twin} if ours.get(key) != twin.get(key)} == {"optimizer", "plugins"}

    def test_qlora_pair_runs_on_a_real_model(self, place):
        """Shortened: two steps of one row; 4-bit weights stay as they are, and AdamW's first loss is SCAO's."""
        short = {"max_steps": 2, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "sequence_len": 128}
        short |= {"save_steps": None, "save_strategy": "no"}
        first = {}
        for path in recipes():
            if "smollm2-135m_qlora" in path.name:
                trainer = train(localized(path, place / path.stem, **short))
                first[path.stem.rpartition("_")[2]] = losses(trainer)
                frozen = [p for name, p in trainer.model.named_parameters() if "base_layer" in name]
                assert len(frozen) == 30 * 7  # layers and linear modules
                assert {type(p).__name__ for p in frozen} == {"Params4bit"}
                assert not any(p.requires_grad for p in frozen)
                if "_scao" in path.name:
                    assert_stepped(trainer, 2)
                else:
                    assert type(inner(trainer)) is torch.optim.AdamW
        assert first["scao"][0] == first["adamw"][0] < 5
