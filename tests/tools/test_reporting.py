"""What the report says when SCAO wins, loses, ties, or breaks down."""

from __future__ import annotations

import math

import pytest

from scao_tools.reporting import HEADER, OptimizerRecord, collect, markdown_table, paired_error, table_rows, verdict

TOKENS = [10, 20, 30]


def record(name: str, after: float, spread: tuple[float, ...] = (0.0, 0.0, 0.0)) -> OptimizerRecord:
    made = OptimizerRecord(name, steps=2, train=[(1, 3.0), (2, 2.5)], held_out=[(0, 3.0), (2, after)], seconds=4.0)
    made.example_losses = tuple(after * n + extra for n, extra in zip(TOKENS, spread, strict=True))
    made.optimizer_ms, made.state_bytes, made.peak_memory = 20.0, 39_000_000, 3_000_000_000
    return made


def test_the_winner_is_named_whoever_it_is() -> None:
    won = verdict([record("adamw", 2.0), record("scao", 1.9)], TOKENS)
    assert won[0].startswith(
        "SCAO had the lower held-out loss: 1.9000 against 2.0000 for AdamW, a difference of 0.1000"
    )
    lost = verdict([record("adamw", 1.9), record("scao", 2.0)], TOKENS)
    assert lost[0].startswith("AdamW had the lower held-out loss: 1.9000 against 2.0000 for SCAO")
    assert "one seed" in won[-1]
    assert "one seed" in lost[-1]


def test_ties_and_noise_are_called_so() -> None:
    assert "the same held-out loss" in verdict([record("adamw", 2.0), record("scao", 2.000001)], TOKENS)[0]
    noisy = verdict([record("adamw", 2.0), record("scao", 1.99, (5.0, -5.0, 0.0))], TOKENS)
    assert "does not separate them" in noisy[0]


def test_one_optimizer_is_no_comparison() -> None:
    assert verdict([record("adamw", 2.0)], TOKENS) == []


def test_a_loss_that_is_not_finite_is_reported() -> None:
    broken = record("scao", math.nan)
    broken.train = [(1, 3.0), (2, math.nan)]
    said = " ".join(verdict([record("adamw", 2.0), broken], TOKENS))
    assert "training loss of SCAO was not finite at 1 step(s) (2)" in said
    assert "No final held-out loss for SCAO" in said
    assert "lower held-out loss" not in said


def test_an_unfinished_run_has_no_final_loss() -> None:
    stopped = record("scao", 2.0)
    stopped.held_out, stopped.train = [(0, 3.0)], [(1, 3.0)]
    assert stopped.after is None
    assert table_rows([stopped])[0][2] == "— (step 1/2)"


def test_cells_and_table() -> None:
    cells = table_rows([record("adamw", 2.0)])[0]
    assert cells == ("AdamW", "3.0000", "2.0000", "0.500", "10.0", "39.0", "3,000")
    lines = markdown_table(HEADER, [cells]).splitlines()
    assert len(lines) == 3
    assert {line.count("|") for line in lines} == {len(HEADER) + 1}


def test_records_are_collected_from_metrics_lines() -> None:
    step = {"seconds": 2.0, "optimizer_ms": 3.0, "optimizer_state_bytes": 4, "peak_memory_bytes": 5}
    lines = [
        {"optimizer": "adamw", "event": "eval", "step": 0, "loss": 3.0, "example_losses": [1.0, 2.0]},
        {"optimizer": "adamw", "event": "train", "step": 1, "loss": "nan", **step},
        {"optimizer": "scao", "event": "train", "step": 1, "loss": 9.0, **step},
    ]
    made = collect("adamw", 1, lines)
    assert (made.before, made.after, made.nonfinite_steps) == (3.0, None, [1])
    assert (made.seconds, made.state_bytes, made.peak_memory) == (2.0, 4, 5)


def test_paired_error_matches_the_textbook_for_equal_lengths() -> None:
    differences = [0.5, -0.1, 0.3, 0.2]
    error = paired_error(differences, [0.0] * 4, [1] * 4)
    mean = sum(differences) / 4
    expected = math.sqrt(sum((d - mean) ** 2 for d in differences) / 3 / 4)
    assert error == pytest.approx(expected)
    assert paired_error([1.0], [1.0], [1]) is None
