"""Whole demo runs on a tiny model: outputs, directories, interruption, and resuming after a kill at any moment."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from scao_tools.demo import runner
from scao_tools.demo.config import DemoOptions
from scao_tools.errors import OptionError, OutputError, ResumeError

NAMES = ("adamw", "scao")

# Runs the demo in a process of its own and kills it (as kill -9 does) at the n-th call of a function, after letting
# the call do part of its work.
DRIVER = """
import json, os, pathlib, signal, sys
from scao_tools.environment import prepare_environment
prepare_environment()
from scao_tools import checkpointing, metrics
from scao_tools.demo import runner, session
from scao_tools.demo.config import DemoOptions
from scao_tools.console import Screen

options, out, where, count = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
left = [count]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def arm(owner, name, partly):
    original = getattr(owner, name)
    def wrapped(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            partly(*args, **kwargs)
            die()
        return original(*args, **kwargs)
    setattr(owner, name, wrapped)

if where == "in-checkpoint":
    arm(checkpointing.torch, "save", lambda payload, path: path.write_bytes(b"PK half a file"))
elif where == "between-renames":
    arm(checkpointing, "write_atomically", lambda *_: None)
elif where == "in-metrics":
    arm(metrics.MetricsLog, "append", lambda log, line: (log._file.write('{"optimizer": "ad'), log._file.flush()))
elif where == "in-adapter":
    arm(session.Session, "save_adapter", lambda s, files, name: (files.optimizer(name) / "adapter.tmp").mkdir())
elif where == "before-cleanup":
    arm(runner, "remove_checkpoints", lambda *_: None)
elif where == "before-base":
    arm(runner, "_ensure_base", lambda *_: None)
elif where == "in-report":
    arm(runner, "publish", lambda files, screen: files.report.write_text("half"))
runner.start(DemoOptions(**{**options, "optimizers": tuple(options["optimizers"])}), out, False, "scao demo", Screen())
raise SystemExit("was not killed")
"""


def adapters(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        f"{name}/{key}": value
        for name in NAMES
        for key, value in load_file(out / name / "adapter" / "adapter_model.safetensors").items()
    }


def losses(out: Path) -> list[tuple[str, str, int, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["optimizer"], line["event"], line["step"], line["loss"]) for line in lines]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Filled by the first test that needs an uninterrupted run."""
    return {"out": tmp_path_factory.mktemp("reference") / "run"}


@pytest.fixture
def whole(reference: dict[str, Path], options: dict[str, Any], screen: Any) -> Path:
    out = reference["out"]
    if not out.exists():
        assert runner.start(DemoOptions(**options), out, False, "scao demo", screen) == 0
    return out


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_leaves_everything_that_is_promised(whole: Path, options: dict[str, Any], tiny_llama: Any) -> None:
    assert {path.name for path in whole.iterdir()} == {
        "config.json", "base.json", "metrics.jsonl", "report.md", "loss.png", *NAMES,
    }  # fmt: skip
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    for name in NAMES:
        mine = [line for line in lines if line["optimizer"] == name]
        assert [line["step"] for line in mine if line["event"] == "train"] == list(range(1, options["steps"] + 1))
        assert [line["step"] for line in mine if line["event"] == "eval"] == [0, options["steps"]]
        assert {path.name for path in (whole / name).iterdir()} == {"adapter", "result.json"}
    for line in lines:
        assert {"optimizer", "event", "step", "loss", "lr", "seconds", "tokens"} <= set(line)
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    report = (whole / "report.md").read_text()
    for text in ("held-out loss", "| AdamW |", "| SCAO |", "One seed (0)", "scao demo", "torch 2", "After SCAO:"):
        assert text in report
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(tiny_llama(), str(whole / "scao" / "adapter"))
    assert any("lora_B" in name and value.abs().sum() > 0 for name, value in loaded.named_parameters())


def test_both_optimizers_start_from_the_same_place(whole: Path) -> None:
    first = {name: loss for name, event, step, loss in losses(whole) if (event, step) == ("eval", 0)}
    assert first["adamw"] == first["scao"]
    step_one = {name: loss for name, event, step, loss in losses(whole) if (event, step) == ("train", 1)}
    assert step_one["adamw"] == step_one["scao"]


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("before-base", 1),
        ("in-metrics", 6),
        ("in-checkpoint", 2),
        ("between-renames", 6),
        ("in-adapter", 1),
        ("before-cleanup", 1),
        ("in-checkpoint", 6),
        ("in-report", 1),
    ],
)
def test_a_killed_run_resumes_bit_for_bit(
    whole: Path, options: dict[str, Any], screen: Any, tmp_path: Path, where: str, count: int
) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", DRIVER, json.dumps(options), str(out), where, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert runner.resume(out, {}, screen) == 0
    assert losses(out) == losses(whole)
    expected, found = adapters(whole), adapters(out)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert not list(out.rglob("*.tmp"))


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGINT) -> None:
    original = runner.OptimizerRun._step_line

    def line(self: Any, event: Any, trainer: Any) -> dict[str, Any]:
        if event.step == step and self.name == "adamw":
            os.kill(os.getpid(), number)
        return original(self, event, trainer)

    monkeypatch.setattr(runner.OptimizerRun, "_step_line", line)


def test_ctrl_c_saves_reports_and_resumes(
    whole: Path, options: dict[str, Any], screen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert threading.current_thread() is threading.main_thread()
    out = tmp_path / "my run"
    with monkeypatch.context() as patch:
        interrupt_at(3, patch)
        assert runner.start(DemoOptions(**options), out, False, "scao demo", screen) == 130
    assert f"scao demo --resume --out '{out}'" in capsys.readouterr().out
    assert torch.load(out / "adamw" / "checkpoint.pt", weights_only=True)["step"] == 3
    report = (out / "report.md").read_text()
    assert "not finished" in report
    assert "(step 3/7)" in report
    assert (out / "loss.png").is_file()
    assert runner.resume(out, {"steps": 7, "optimizers": NAMES}, screen) == 0
    assert losses(out) == losses(whole)
    assert "not finished" not in (out / "report.md").read_text()


def test_resume_refuses_contradictions_and_changed_data(
    options: dict[str, Any], screen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(Path(options["data"]).read_text())
    interrupt_at(1, monkeypatch, signal.SIGTERM)
    out = tmp_path / "run"
    assert runner.start(DemoOptions(**{**options, "data": str(rows)}), out, False, "scao demo", screen) == 143
    with pytest.raises(OptionError, match=r"--steps: the interrupted run used 7, but 9 was given"):
        runner.resume(out, {"steps": 9}, screen)
    with pytest.raises(OptionError, match=r"--optimizers: the interrupted run used adamw,scao, but adamw was given"):
        runner.resume(out, {"optimizers": ("adamw",)}, screen)
    rows.write_text(rows.read_text() + '{"prompt": "new", "completion": "row"}\n')
    with pytest.raises(ResumeError, match="has changed"):
        runner.resume(out, {}, screen)


def test_resuming_a_finished_run_prints_its_report_again(whole: Path, screen: Any) -> None:
    before = losses(whole)
    assert runner.resume(whole, {}, screen) == 0
    assert losses(whole) == before
    assert "SCAO" in screen.console.file.getvalue()


def test_an_earlier_run_is_protected(whole: Path, options: dict[str, Any], screen: Any, tmp_path: Path) -> None:
    checked = DemoOptions(**options)
    with pytest.raises(OutputError, match=r"--resume.*--overwrite.*--out"):
        runner.start(checked, whole, False, "", screen)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(OutputError, match="not a demo run's"):
        runner.start(checked, tmp_path / "mine", True, "", screen)
    with pytest.raises(OutputError, match="is a file"):
        runner.start(checked, tmp_path / "mine" / "notes.txt", False, "", screen)


def test_default_directories_are_numbered_and_the_newest_unfinished_is_resumed(
    elsewhere: Path, options: dict[str, Any], screen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = DemoOptions(**{**options, "steps": 2, "optimizers": ("adamw",)})
    assert runner.start(short, None, False, "scao demo", screen) == 0
    with monkeypatch.context() as patch:
        interrupt_at(1, patch)
        assert runner.start(short, None, False, "scao demo", screen) == 130
    assert sorted(path.name for path in elsewhere.iterdir()) == ["demo-output", "demo-output-2"]
    assert runner.resume(None, {}, screen) == 0
    assert (elsewhere / "demo-output-2" / "adamw" / "result.json").is_file()
    other = elsewhere / "demo-output" / "notes.txt"
    other.write_text("keep")
    assert runner.start(short, Path("demo-output"), True, "scao demo", screen) == 0
    assert other.read_text() == "keep"
    assert [step for _, event, step, _ in losses(elsewhere / "demo-output") if event == "train"] == [1, 2]


def test_sixteen_bits_and_bf16(options: dict[str, Any], screen: Any, tmp_path: Path, whole: Path) -> None:
    chosen = {**options, "bits": 16, "dtype": "bf16", "steps": 3}
    assert runner.start(DemoOptions(**chosen), tmp_path / "run", False, "scao demo", screen) == 0
    report = (tmp_path / "run" / "report.md").read_text()
    assert "LoRA, rank 16" in report
    assert "bf16 on cpu" in report
    assert "NF4" not in report
    assert "NF4" in (whole / "report.md").read_text()


def test_a_diverging_run_says_so(options: dict[str, Any], screen: Any, tmp_path: Path, capsys: Any) -> None:
    wild = {**options, "lr": 1e30, "optimizers": ("adamw",), "steps": 8}
    out = tmp_path / "run"
    assert runner.start(DemoOptions(**wild), out, False, "scao demo", screen) == 0
    found = [float(loss) for _, event, _, loss in losses(out) if event == "train"]
    assert not all(math.isfinite(loss) for loss in found)
    assert "was not finite" in (out / "report.md").read_text()
    assert "not finite" in capsys.readouterr().out
