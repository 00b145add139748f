"""``benchmarks/gpu_runtime.py`` on a CPU: the checks of bits are real, and it says when there is no GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from scao_core.runtime import Thread

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_runtime.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_runtime", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script, monkeypatch, out):
    small = ["--device", "cpu", "--width", "16", "--layers", "1", "--steps", "16", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *small])
    return script.main()


def test_all_bits_are_equal(script, monkeypatch, tmp_path):
    out = tmp_path / "deep" / "figures.json"
    assert run(script, monkeypatch, out) == 0
    figures = json.loads(out.read_text())
    assert len(figures["hazards"]) == 12
    assert all(figures["hazards"].values())
    rows = figures["tiers"]
    assert rows["device"]["tiers"]["host"] == 0
    assert 0 < rows["half"]["tiers"]["host"] < rows["host"]["tiers"]["host"]
    assert set(figures["times"]) == {"adamw", "burst", "staggered", "thread", "stream"}


def test_a_schedule_that_computes_something_else_is_found(script, monkeypatch, tmp_path):
    """Negative control: bases that came from a later state of the memory, as of a copy that was not waited for."""

    def late(self, compute, reads):
        def run():
            for tensor in reads:
                tensor.mul_(1 + torch.arange(tensor.shape[-1]))
            return compute()

        return run

    monkeypatch.setattr(Thread, "beside", late)
    out = tmp_path / "figures.json"
    assert run(script, monkeypatch, out) == 1
    found = json.loads(out.read_text())["hazards"]
    assert not found["thread, delay 2"]
    assert found["thread, delay 0"]  # nothing is computed beside the training


@pytest.mark.parametrize("wrong", [["--steps", "3"], ["--width", "0"], ["--device", "tpu"]])
def test_what_would_compare_nothing_is_refused(script, monkeypatch, capsys, wrong):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", *wrong])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the script itself")
def test_without_a_gpu_it_says_so(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err
