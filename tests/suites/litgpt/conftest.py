"""The model, and eyes on the optimizer."""

import pytest

from suites.litgpt.tuning import write_model
from suites.watching import steps

__all__ = ["steps"]  # a fixture


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder
