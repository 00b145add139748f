"""``scao bench`` from end to end on a tiny model: what a user types, interrupts, and types again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scao_tools.bench.results import RESULTS, read_results
from scao_tools.bench.workload import load_workload, parse_workload, plan_runs, workload_from_plain, workload_names
from scao_tools.cli import build_app, run
from scao_tools.errors import OptionError


def workload_file(folder: Path, model: Path, rows: Path, **changes: Any) -> Path:
    content = {
        "name": "mini",
        "about": "two steps of everything",
        "model": str(model),
        "data": str(rows),
        "max_length": 64,
        "held_out": 6,
        "steps": 2,
        "batch_sizes": [2],
        "evaluate_at": [0.5],
        "seeds": [0, 1],
        "optimizers": [{"name": "adamw", "lr": ["1e-3", 2e-3]}, {"name": "scao", "lr": 1e-3}],
    }
    path = folder / "mini.yaml"
    path.write_text(json.dumps(content | changes))
    return path


Bench = Callable[..., int]


@pytest.fixture(name="bench")
def bench_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run(build_app(), ["bench", *map(str, arguments)])


def losses(path: Path) -> dict[Any, Any]:
    return {record.key: (record.heldout_curve, record.train_curve) for record in read_results([path])}


def test_every_cell_is_on_record_once_and_again_only_the_report_is_written(
    bench: Bench, tmp_path: Path, model_dir: Path, rows_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = workload_file(tmp_path, model_dir, rows_file)
    assert bench(file, "--out", "o") == 0
    records = read_results([Path("o")])
    assert len(records) == 6
    assert {(r.optimizer, r.lr, r.seed) for r in records} == {
        (name, lr, seed) for name, lr in (("adamw", 1e-3), ("adamw", 2e-3), ("scao", 1e-3)) for seed in (0, 1)
    }
    for record in records:
        assert [step for step, _ in record.heldout_curve] == [0, 1, 2]
        assert record.heldout_loss == record.heldout_curve[-1][1]
        assert len(record.train_curve) == 2
        assert record.label_tokens > 0
        assert record.state_bytes > 0
        assert 0 < record.optimizer_ms / 1e3 < record.step_seconds
    # adapters start at zero: the same loss before training for all; the same data and weights for all with a seed
    assert len({record.heldout_curve[0][1] for record in records}) == 1
    assert len({record.train_curve[0] for record in records}) == 2
    before = (tmp_path / "o" / RESULTS).read_bytes()
    assert bench(file, "--out", "o") == 0
    assert (tmp_path / "o" / RESULTS).read_bytes() == before
    assert (tmp_path / "o" / "report.md").is_file()
    assert "Loading the model" not in capfd.readouterr().out.split("Report:")[1]


def test_a_killed_grid_continues_and_equals_an_uninterrupted_one(
    bench: Bench, tmp_path: Path, model_dir: Path, rows_file: Path
) -> None:
    file = workload_file(tmp_path, model_dir, rows_file, steps=6)
    assert bench(file, "--out", "whole") == 0
    command = [sys.executable, "-m", "scao_tools.cli", "bench", str(file), "--out", "cut"]
    results = tmp_path / "cut" / RESULTS
    process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if results.exists() and results.read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = results.read_bytes().count(b"\n")
    assert done >= 2
    with results.open("ab") as stream:
        stream.write(b'{"format": 1, "workl')  # what a kill within a write leaves
    assert bench(file, "--out", "cut") == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert results.read_bytes().count(b"\n") == 6


@pytest.mark.parametrize("first", ["fp32", "bf16"])
def test_a_grid_goes_on_in_the_number_format_of_its_runs(
    bench: Bench,
    tmp_path: Path,
    model_dir: Path,
    rows_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    first: str,
) -> None:
    file = workload_file(tmp_path, model_dir, rows_file, steps=1)
    other = {"fp32": "bf16", "bf16": "fp32"}[first]
    monkeypatch.setattr("scao_tools.bench.session.pick_dtype", lambda _: first)
    assert bench(file, "--out", "o", "--seeds", "0") == 0
    monkeypatch.setattr("scao_tools.bench.session.pick_dtype", lambda _: other)  # as a loaded machine may find
    assert bench(file, "--out", "o") == 0
    assert f"Continuing in {first}" in capfd.readouterr().out
    records = read_results([Path("o")])
    assert len(records) == 6
    assert {(record.dtype, record.workload_digest) for record in records} == {(first, records[0].workload_digest)}
    assert bench(file, "--out", "o", "--seeds", "0", "--dtype", other) == 0  # asked for, it is another comparison
    assert [record.dtype for record in read_results([Path("o")])] == [first] * 6 + [other] * 3


def test_two_shards_share_the_grid(bench: Bench, tmp_path: Path, model_dir: Path, rows_file: Path) -> None:
    file = workload_file(tmp_path, model_dir, rows_file, steps=1)
    assert bench(file, "--out", "o", "--shard", "1/2") == 0
    first = {record.key for record in read_results([Path("o")])}
    assert len(first) == 3
    assert bench(file, "--out", "o", "--shard", "2/2") == 0
    assert len({record.key for record in read_results([Path("o")])}) == 6


def test_a_dry_run_shows_every_cell_and_a_time_and_writes_nothing(
    bench: Bench, tmp_path: Path, model_dir: Path, rows_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = workload_file(tmp_path, model_dir, rows_file)
    assert bench(file, "--out", "o", "--dry-run") == 0
    shown = capfd.readouterr().out
    assert shown.count("to do ") >= 6
    assert "6 of 6 runs to do, about" in shown
    assert not (tmp_path / "o").exists()


def test_a_budget_too_small_for_another_run_ends_between_runs(
    bench: Bench, tmp_path: Path, model_dir: Path, rows_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = workload_file(tmp_path, model_dir, rows_file)
    assert bench(file, "--out", "o", "--budget-minutes", "1e-9") == 0
    assert not (tmp_path / "o" / RESULTS).exists()
    assert "6 runs are left" in capfd.readouterr().out
    assert bench(file, "--out", "o", "--budget-minutes", "60") == 0
    assert len(read_results([Path("o")])) == 6


def test_options_of_the_command_line_replace_those_of_the_file(
    bench: Bench, tmp_path: Path, model_dir: Path, rows_file: Path
) -> None:
    file = workload_file(tmp_path, model_dir, rows_file)
    arguments = ("--optimizers", "scao", "--lr", "3e-3", "--seeds", "5", "--steps", "1", "--set", "scao.spike_rank=2")
    assert bench(file, "--out", "o", "--stage", "screen", *arguments) == 0
    (record,) = read_results([Path("o")])
    assert (record.optimizer, record.lr, record.seed, record.steps) == ("scao", 3e-3, 5, 1)
    assert record.options == {"spike_rank": 2}
    assert record.stage == "screen"


def test_an_optimizer_that_the_workload_does_not_name_joins_with_learning_rates(
    bench: Bench, tmp_path: Path, model_dir: Path, rows_file: Path
) -> None:
    file = workload_file(tmp_path, model_dir, rows_file)
    arguments = ("--optimizers", "scao,adamw-cautious", "--lr", "3e-3", "--seeds", "5", "--steps", "1")
    assert bench(file, "--out", "o", *arguments, "--set", "adamw-cautious.eps=1e-6") == 0
    runs = {record.optimizer: (record.lr, record.options) for record in read_results([Path("o")])}
    assert runs == {"scao": (3e-3, {}), "adamw-cautious": (3e-3, {"eps": "1e-6"})}


def test_full_training_starts_from_the_same_weights_each_time(
    bench: Bench, tmp_path: Path, model_dir: Path, rows_file: Path
) -> None:
    file = workload_file(tmp_path, model_dir, rows_file, train="full", steps=1, seeds=[0])
    assert bench(file, "--out", "o") == 0
    assert len({record.train_curve for record in read_results([Path("o")])}) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "scao.spike_rnk=2"), "spike_rank"),
        (("--set", "soap.lr=2"), "no optimizer 'soap'"),
        (("--set", "spike_rank=2"), "must look like"),
        (("--optimizers", "adamv"), "adamw, scao"),
        (("--optimizers", "adamw,muon"), "learning rates for adamw, scao only; give those of muon, e.g. --lr"),
        (("--optimizers", " "), "--optimizers is empty"),
        (("--lr", "fast"), "--lr must be numbers"),
        (("--lr", "0"), "above 0"),
        (("--shard", "3/2"), "must look like 1/2"),
        (("--dtype", "int8"), "auto, fp32, bf16, fp16"),
        (("--stage", "final"), "screen, compare"),
        (("--budget-minutes", "0"), "above 0"),
        (("--steps", "0"), "at least 1"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(
    bench: Bench,
    tmp_path: Path,
    model_dir: Path,
    rows_file: Path,
    arguments: tuple[str, str],
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = workload_file(tmp_path, model_dir, rows_file)
    assert bench(file, "--out", "o", *arguments) == 2
    shown = capfd.readouterr()
    assert said in shown.err
    assert "Loading the model" not in shown.out
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stps": 3}, "steps"),
        ({"steps": 2.5}, "whole number"),
        ({"optimizers": [{"name": "adamw"}]}, "name and lr"),
        ({"optimizers": [{"name": "adamv", "lr": 1e-3}]}, "did you mean 'adamw'"),
        ({"train": "full", "bits": 4}, "4-bit base cannot be trained"),
        ({"train": "full", "optimizers": [{"name": "loraplus", "lr": 1e-3}]}, "LoRA only"),
        ({"seeds": "zero"}, "finite number"),
    ],
)
def test_a_wrong_workload_says_what_is_allowed(change: dict[str, Any], said: str) -> None:
    content = {"name": "x", "about": "x", "model": "m", "data": "d", "optimizers": [{"name": "adamw", "lr": 1e-3}]}
    with pytest.raises(OptionError, match=said):
        parse_workload(content | change, "x.yaml")


def test_every_workload_of_the_package_is_valid_and_brackets_the_baseline() -> None:
    assert {
        "smollm2-qlora", "smollm2-qlora-second-domain", "tiny-full", "tiny-full-finetune", "tiny-lora",
        "qwen2.5-3b-qlora"
    } <= set(workload_names())  # fmt: skip
    for name in workload_names():
        workload = load_workload(name)
        assert workload.name == name
        if workload.stage == "screen":
            continue
        assert len(workload.seeds) >= 3
        trials: dict[str, int] = {}
        for entry in workload.optimizers:
            trials[entry.optimizer] = trials.get(entry.optimizer, 0) + len(entry.lrs)
        assert trials["adamw"] >= max(trials.values())
        assert max(len(entry.lrs) for entry in workload.optimizers if entry.optimizer == "adamw") >= 3
        runs = plan_runs(workload)
        assert len({str(run) for run in runs}) == len(runs)


def test_a_workload_survives_the_way_to_another_process() -> None:
    import dataclasses

    workload = load_workload("tiny-lora")
    assert workload_from_plain(json.loads(json.dumps(dataclasses.asdict(workload)))) == workload


def test_unknown_workload_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'tiny-lora'"):
        load_workload("tiny-lroa")


def test_an_optimizer_with_our_package_name_runs_in_a_process_of_its_own(
    bench: Bench, tmp_path: Path, model_dir: Path, rows_file: Path
) -> None:
    entries = [{"name": "older-scao", "lr": 1e-3}, {"name": "adamw", "lr": 1e-3}]
    file = workload_file(tmp_path, model_dir, rows_file, seeds=[0], optimizers=entries)
    assert bench(file, "--out", "o") == 0
    older, adamw = sorted(read_results([Path("o")]), key=lambda record: record.optimizer != "older-scao")
    assert older.optimizer == "older-scao"
    # The same weights, data and order in both processes; its state is what it is, and more than AdamW's.
    assert older.workload_digest == adamw.workload_digest
    assert older.train_curve[0] == adamw.train_curve[0]
    assert older.heldout_curve[0] == adamw.heldout_curve[0]
    assert not older.diverged
    assert older.state_bytes >= adamw.state_bytes
