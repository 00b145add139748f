"""A folder as a user has it, with models and data, and LLaMA-Factory's WebUI started in it."""

import os
import shutil
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from scao_integrations import llamafactory_hook as door
from suites.llamafactory.running import RECIPES, started


@pytest.fixture(scope="session")
def material():
    """What `material.py` wrote."""
    return Path(os.environ["SCAO_MATERIAL"])


@pytest.fixture(scope="session")
def folder(tmp_path_factory, material):
    """``./smollm2``, ``./small`` and ``./data``, as the recipes name them."""
    place = tmp_path_factory.mktemp("llamafactory")
    for model in ("smollm2", "small"):
        (place / model).symlink_to(material / model)
    shutil.copytree(RECIPES / "data", place / "data")
    shutil.copy(material / "alpaca.json", place / "data")
    shutil.copytree(RECIPES / "llamaboard_config", place / "llamaboard_config")
    os.environ["HF_DATASETS_CACHE"] = str(place / "cache")
    return place


@pytest.fixture
def registered():
    """``optim: scao`` in this process."""
    door.register()
    yield
    door.unregister()


@pytest.fixture(scope="session")
def webui(folder):
    """The address of the WebUI, which all tests of it share."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # BROWSER: what LLaMA-Factory opens the page with when it starts
    environment = {"GRADIO_SERVER_PORT": port, "GRADIO_SERVER_NAME": "127.0.0.1", "BROWSER": "true"}
    address, log = f"http://127.0.0.1:{port}", folder / "webui.log"
    with log.open("w") as output:
        process = started(folder, "scao-llamafactory", "webui", output=output, **environment)
    try:
        deadline = time.monotonic() + 200
        while not answers(address):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # and a training that it may have started
        process.wait()


def answers(address):
    """Whether a page is there."""
    try:
        with urllib.request.urlopen(address, timeout=30):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False
