"""The model, and eyes on the optimizer."""

import pytest

from suites.torchtune.tuning import write_model, write_tokenizer
from suites.watching import steps

__all__ = ["steps"]  # a fixture


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    write_tokenizer(folder)
    return folder
