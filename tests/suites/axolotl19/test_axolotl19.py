"""Axolotl 0.19.0, which needs the plugin in the YAML: the tests that it shares with 0.21."""

from importlib.metadata import version

import pytest

from suites.axolotl_cases import TestCommandLine, TestMethods, TestRecipes
from suites.axolotl_refusals import TestInert, TestRefusals
from suites.axolotl_runs import config, loaded, train

__all__ = ["TestCommandLine", "TestInert", "TestMethods", "TestRecipes", "TestRefusals"]


def test_version():
    assert version("axolotl") == "0.19.0"


def test_without_the_plugin_transformers_refuses_the_name(place):
    """The reason for the plugin; the docs say what to add."""
    with pytest.raises(ValueError, match="scao is not a valid OptimizerNames"):
        train(config(place / "without", plugins=None))
    assert loaded(config(place / "with")).optimizer == "scao"
