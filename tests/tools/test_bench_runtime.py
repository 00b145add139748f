"""``make bench-runtime``: its arithmetic, and that a small run measures every schedule. Times themselves are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scao_tools import bench_runtime, runtime_sweep


def test_figures_of_a_burst() -> None:
    cpu = [1.0] * 9 + [3.0]
    row = bench_runtime.summary(cpu, [], [1.0] * 10)
    assert row["max_over_median"] == 3.0
    assert row["mean_overhead"] == pytest.approx(0.2)
    assert row["barrier_wait"] == 0.0


def test_waiting_counts() -> None:
    row = bench_runtime.summary([1.0, 1.0, 1.0], [0.0, 0.5, 0.0], [1.0, 1.0, 1.0])
    assert row["max_over_median"] == 1.5
    assert row["barrier_wait"] == pytest.approx(0.5 / 3)


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    threads = torch.get_num_threads()
    out = tmp_path / "deep" / "figures.json"
    try:
        assert bench_runtime.main(["--steps", "12", "--hidden", "64", "--layers", "1", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    figures = json.loads(out.read_text())
    assert set(figures) == {"adamw", "burst", "staggered", "thread"}
    for row in figures.values():
        assert row["max_over_median"] >= row["p99_over_median"] >= 1
    assert figures["adamw"]["mean_overhead"] == 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "max/median" in capsys.readouterr().out


def test_a_small_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every allowed pair, twice with different seeds; two steps, in which no delay can act, so all its losses are equal."""
    monkeypatch.setattr(runtime_sweep, "INTERVALS", (4, 10))
    monkeypatch.setattr(runtime_sweep, "DELAYS", (0, 3, 5))
    monkeypatch.setattr(bench_runtime, "measure", lambda *_: {})
    arguments = ["--sweep", "2", "--sweep-steps", "2", "--out", str(tmp_path / "figures.json")]
    assert bench_runtime.main(arguments) == 0
    found = json.loads((tmp_path / "figures-sweep.json").read_text())
    assert [(r["refresh_every"], r["refresh_delay"]) for r in found["table"]] == [
        (4, 0),
        (4, 3),
        (10, 0),
        (10, 3),
        (10, 5),
    ]
    assert len({run["loss"] for run in found["runs"] if run["seed"] == 0}) == 1
    assert len({run["loss"] for run in found["runs"]}) == 2
    assert "minus D=0" in capsys.readouterr().out


def test_differences_are_paired() -> None:
    """Two seeds far apart, the same difference in both: the spread is large, the interval of the difference is nothing."""
    finals = [
        runtime_sweep.Final(every, delay, seed, 1.0 + seed + 0.5 * (delay == 3))
        for every, delay in runtime_sweep.grid()
        for seed in (0, 1)
    ]
    row = next(r for r in runtime_sweep.table(finals) if r["refresh_delay"] == 3)
    assert row["difference"] == pytest.approx(0.5)
    assert row["half_width"] == pytest.approx(0.0)
    assert row["deviation"] == pytest.approx(0.7071, abs=1e-4)


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--hidden", "12"], ["--layers", "0"], ["--sweep", "-1"]])
def test_wrong_numbers_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_runtime.main(arguments)
    assert ended.value.code == 2


def test_an_interrupt_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_runtime, "measure", interrupted)
    assert bench_runtime.main(["--out", str(tmp_path / "figures.json")]) == 130
    assert "Interrupted" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_runtime.main(["--out", "/dev/null/figures.json"])
    assert ended.value.code == 2
    assert "--out" in capsys.readouterr().err.splitlines()[-1]
