"""Axolotl 0.21.0, which knows ``optimizer: scao``: the tests that it shares with 0.19, and that its own way gives the same."""

from importlib.metadata import version

from suites import axolotl_runs as runs
from suites.axolotl_cases import (
    TEXT,
    TestCommandLine,
    TestMethods,
    TestRecipes,
    assert_stepped,
    assert_stepped_without_logs,
)
from suites.axolotl_refusals import TestInert, TestRefusals
from suites.axolotl_runs import config, train

__all__ = ["TestCommandLine", "TestInert", "TestMethods", "TestRecipes", "TestRefusals"]


def test_version():
    assert version("axolotl") == "0.21.0"


def test_axolotls_own_way_is_the_same(place, monkeypatch):
    """Its import of ``scao.SCAO`` alone, as where entry points are not seen; and the plugin named twice is one."""
    from axolotl.integrations import base

    settings = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    settings["optim_args"] = {"precond_freq": 2, "k_max": 64, "spike_rank": 2}
    plugin = train(config(place / "plugin", plugins=[runs.PLUGIN], **settings))
    assert_stepped(plugin, 3)
    assert [name for name in base.PluginManager.get_instance().plugins if "Scao" in name] == [runs.PLUGIN]
    assert sum(type(c).__name__ == "ScaoCallback" for c in plugin.callback_handler.callbacks) == 1

    monkeypatch.setattr(base, "entry_points", lambda group: ())
    monkeypatch.delitem(base.PluginManager.get_instance().plugins, runs.PLUGIN)
    native = train(config(place / "native", **settings))
    assert runs.PLUGIN not in base.PluginManager.get_instance().plugins
    assert_stepped_without_logs(native, 3)
    runs.assert_same(plugin, native)


def test_text_with_commas_in_a_value(place):
    """Axolotl cuts text at every comma; the plugin has read it by then."""
    trainer = train(config(place / "commas", optim_args=TEXT + ",factors=dense,spiked"))
    assert runs.inner(trainer).defaults["factors"] == "dense,spiked"
