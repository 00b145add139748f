"""Axolotl with ``optimizer: scao``: what the plugin refuses, and that it is inert for another optimizer; for both suites."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from scao_core import ConfigError, UnknownOptionError
from scao_integrations import axolotl_plugin
from scao_integrations.requirements import FrameworkError
from suites import axolotl_runs as runs
from suites.axolotl_runs import config, loaded


class TestRefusals:
    """Before a model is loaded, with a sentence; nothing of it for another optimizer."""

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"optim_args": "spike_rnk=8"}, UnknownOptionError, "did you mean 'spike_rank'"),
            ({"optim_args": {"precond_frq": 8}}, UnknownOptionError, "did you mean 'precond_freq'"),
            ({"optim_args": "spike_rank"}, ConfigError, "expected name=value"),
            ({"optim_args": {"spike_rank": "many"}}, ConfigError, "spike_rank='many' must be an integer"),
            ({"optim_args": ["spike_rank=8"]}, ConfigError, "expected a mapping, or text"),
            ({"optim_args": {"params": 1}}, ConfigError, "unknown option 'params'"),
            ({"optim_args": {8: 1}}, ConfigError, "unknown option '8'"),
            ({"optim_args": "weight_decay=0.3"}, ConfigError, r"no effect.*\(here 0\.1\): set weight_decay"),
            ({"adam_beta2": 1.0}, ConfigError, r"betas\[1\]"),
            ({"learning_rate": "fast"}, ConfigError, "lr: expected a number, got 'fast'"),
            ({"optimizer": "SCAO"}, ConfigError, "did you mean 'scao'"),
            ({"spike_rank": 8}, ConfigError, "spike_rank is no key of Axolotl.*under optim_args"),
            ({"scao_precond_freq": 8}, ConfigError, "write precond_freq under optim_args"),
            ({"optim_target_modules": ["q_proj"]}, ConfigError, "optim_target_modules=.* would have no effect"),
            ({"relora": True, "jagged_restart_steps": 2}, ConfigError, "relora: true resets .* delete relora"),
            ({"fsdp_config": {"fsdp_version": 2}}, ConfigError, "fsdp_config hides .* DistributedDataParallel"),
            ({"fsdp": ["full_shard"]}, ConfigError, "fsdp hides the matrices"),
            ({"dp_shard_size": 2}, ConfigError, "dp_shard_size: 2 hides the matrices"),
            ({"tensor_parallel_size": "2"}, ConfigError, "tensor_parallel_size: 2 hides the matrices"),
            ({"deepspeed": {"optimizer": {"type": "AdamW"}}}, ConfigError, '"optimizer" block .* delete it'),
            ({"deepspeed": {"zero_optimization": {"stage": 1}}}, ConfigError, r"ZeRO \(stage 1\) hides"),
        ],
        ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
    )
    def test_what_is_wrong_or_would_drop_scao(self, place, changes, error, message):
        with pytest.raises(error, match=message):
            loaded(config(place / "refused", **changes))

    def test_code_that_validates_without_the_command_line(self):
        """Nothing is registered there, so the last moment before the model is loaded counts."""
        with pytest.raises(UnknownOptionError, match="did you mean 'spike_rank'"):
            axolotl_plugin.ScaoPlugin().pre_model_load({"optimizer": "scao", "optim_args": "spike_rnk=8"})

    def test_a_deepspeed_config_in_a_file(self, place):
        path = place / "zero.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}))
        with pytest.raises(ConfigError, match=r"ZeRO-Offload replaces it by DeepSpeedCPUAdam.*\{\"stage\": 0\}"):
            loaded(config(place / "refused", deepspeed=str(path)))

    def test_what_the_launcher_brought(self, place):
        """`accelerate launch --use_fsdp` and `--use_deepspeed` leave no trace in the config."""
        cfg, plugin = loaded(config(place / "launched")), axolotl_plugin.ScaoPlugin()
        args = SimpleNamespace(weight_decay=0.1, learning_rate=1e-3)
        with pytest.raises(ConfigError, match="FSDP from the launcher hides"):
            plugin.post_trainer_create(cfg, SimpleNamespace(args=args, is_fsdp_enabled=True))
        args.deepspeed_plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config={"optimizer": {"type": "Adam"}}))
        with pytest.raises(ConfigError, match='"optimizer" block'):
            plugin.post_trainer_create(cfg, SimpleNamespace(args=args))

    def test_wrong_version(self, place, monkeypatch):
        import axolotl

        monkeypatch.setattr(axolotl, "__version__", "0.18.0")
        with pytest.raises(
            FrameworkError, match=r'needs axolotl >= 0\.19, found 0\.18\.0; run: pip install "axolotl>='
        ):
            loaded(config(place / "old"))
        loaded(config(place / "old", optimizer="adamw_torch"))

    def test_no_axolotl(self, monkeypatch):
        monkeypatch.delattr(axolotl_plugin, "ScaoPlugin", raising=False)
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(FrameworkError, match=r"needs axolotl >= 0\.19, which does not import"):
            _ = axolotl_plugin.ScaoPlugin
        assert not hasattr(axolotl_plugin, "Scao")


class TestInert:
    """With another optimizer."""

    def test_training_does_not_touch_scao(self, place):
        """Even where ``scao_core`` could not be imported."""
        path = config(place / "inert", optimizer="adamw_torch", optim_args="eps=1e-7", plugins=[runs.PLUGIN])
        code = (
            "import sys; sys.modules.update(dict.fromkeys(('scao_core', 'scao'))); "
            "from axolotl.cli.main import cli; from axolotl.integrations.base import PluginManager; "
            f"cli(['train', {str(path)!r}, '--launcher', 'python', '--save-strategy', 'epoch'], standalone_mode=False); "
            f"print('plugins:', [name for name in PluginManager.get_instance().plugins if 'scao' in name])"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=place)
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert f"plugins: ['{runs.PLUGIN}']" in ran.stdout
        saved = torch.load(place / "inert" / "out" / "checkpoint-3" / "optimizer.pt", weights_only=True)
        assert {key for entry in saved["state"].values() for key in entry} == {"step", "exp_avg", "exp_avg_sq"}
        assert "scao" not in (place / "inert" / "out" / "checkpoint-3" / "trainer_state.json").read_text()

    def test_hooks_change_nothing(self):
        plugin = axolotl_plugin.ScaoPlugin()
        for cfg in ({"optimizer": "adamw_torch", "spike_rank": 8}, {"optimizer": None}, {}):
            before, trainer = dict(cfg), SimpleNamespace()
            plugin.register(cfg)
            plugin.pre_model_load(cfg)
            plugin.post_trainer_create(cfg, trainer)
            assert plugin.get_training_args(cfg) is None
            assert plugin.add_callbacks_pre_trainer(cfg, None) == []
            assert cfg == before
            assert not vars(trainer)
