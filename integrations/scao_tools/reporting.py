"""What a comparison of optimizers found: read back from its metrics, as a table and as sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scao_tools.metrics import Line, number
from scao_tools.optimizers import OPTIMIZERS

HEADER = (
    "optimizer",
    "held-out loss before",
    "held-out loss after",
    "steps/s",
    "optimizer step (ms)",
    "optimizer state (MB)",
    "peak memory (MB)",
)
SHORT_HEADER = ("optimizer", "before", "after", "steps/s", "step ms", "state MB", "peak MB")  # for 80 columns
_NONE = "—"


@dataclass
class OptimizerRecord:
    """One optimizer's run, as far as it went."""

    name: str
    steps: int
    train: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    example_losses: tuple[float, ...] = ()
    seconds: float = 0.0
    optimizer_ms: float = 0.0
    state_bytes: int = 0
    peak_memory: int = 0
    sample: str | None = None

    @property
    def label(self) -> str:
        """How the optimizer is called in print."""
        return OPTIMIZERS[self.name].label if self.name in OPTIMIZERS else self.name

    @property
    def before(self) -> float | None:
        """Held-out loss before training."""
        return next((loss for step, loss in self.held_out if step == 0), None)

    @property
    def after(self) -> float | None:
        """Held-out loss at the last step; None where the run did not get there."""
        return next((loss for step, loss in self.held_out if step == self.steps), None)

    @property
    def nonfinite_steps(self) -> list[int]:
        """Steps whose training loss was NaN or infinite."""
        return [step for step, loss in self.train if not math.isfinite(loss)]


def collect(name: str, steps: int, lines: Sequence[Line]) -> OptimizerRecord:
    """Gather one optimizer's lines of ``metrics.jsonl``."""
    record = OptimizerRecord(name, steps)
    for line in lines:
        if line.get("optimizer") != name:
            continue
        point = (int(line["step"]), number(line["loss"]))
        if line["event"] == "eval":
            record.held_out.append(point)
            record.example_losses = tuple(number(loss) for loss in line["example_losses"])
        else:
            record.train.append(point)
            record.seconds += line["seconds"]
            record.optimizer_ms += line["optimizer_ms"]
            record.state_bytes = line["optimizer_state_bytes"]
            record.peak_memory = line["peak_memory_bytes"]
    return record


def table_rows(records: Sequence[OptimizerRecord]) -> list[tuple[str, ...]]:
    """The cells under `HEADER`, one row per optimizer."""
    return [_cells(record) for record in records]


def _cells(record: OptimizerRecord) -> tuple[str, ...]:
    done = len(record.train)
    after = _loss(record.after)
    if record.after is None and done:
        after = f"{_NONE} (step {done}/{record.steps})"
    return (
        record.label,
        _loss(record.before),
        after,
        f"{done / record.seconds:.3f}" if done and record.seconds else _NONE,
        f"{record.optimizer_ms / done:.1f}" if done else _NONE,
        f"{record.state_bytes / 1e6:.1f}" if done else _NONE,
        f"{record.peak_memory / 1e6:,.0f}" if done else _NONE,
    )


def _loss(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def verdict(records: Sequence[OptimizerRecord], label_tokens: Sequence[int]) -> list[str]:
    """Say plainly who had the lower held-out loss, and what went wrong. ``label_tokens``: per held-out example."""
    sentences = [_trouble(record) for record in records if record.nonfinite_steps]
    complete = [record for record in records if record.after is not None and math.isfinite(record.after)]
    missing = [record.label for record in records if record not in complete]
    if missing and len(records) > 1:
        sentences.append(f"No final held-out loss for {' and '.join(missing)}, so there is no comparison with it.")
    ranked = sorted(complete, key=lambda record: record.after or 0.0)
    sentences += [_compare(ranked[0], other, label_tokens) for other in ranked[1:]]
    if len(ranked) > 1:
        sentences.append("This is one seed: another seed or data set can come out differently.")
    return sentences


def _trouble(record: OptimizerRecord) -> str:
    steps = record.nonfinite_steps
    shown = ", ".join(str(step) for step in steps[:5]) + (", …" if len(steps) > 5 else "")
    stopped = "" if len(record.train) >= record.steps else f", and training stopped at step {len(record.train)}"
    return f"The training loss of {record.label} was not finite at {len(steps)} step(s) ({shown}){stopped}."


def _compare(best: OptimizerRecord, other: OptimizerRecord, label_tokens: Sequence[int]) -> str:
    best_loss, other_loss = best.after or 0.0, other.after or 0.0
    if f"{best_loss:.4f}" == f"{other_loss:.4f}":
        return f"{best.label} and {other.label} had the same held-out loss to four decimals: {best_loss:.4f}."
    text = (
        f"{best.label} had the lower held-out loss: {best_loss:.4f} against {other_loss:.4f} for {other.label}, "
        f"a difference of {other_loss - best_loss:.4f}"
    )
    error = paired_error(best.example_losses, other.example_losses, label_tokens)
    if error is None:
        return text + "."
    text += f" (standard error over the {len(label_tokens)} held-out examples: {error:.4f})."
    if other_loss - best_loss < 2 * error:
        text += " That is less than two standard errors, so this run does not separate them."
    return text


def paired_error(first: Sequence[float], second: Sequence[float], tokens: Sequence[int]) -> float | None:
    """Standard error of the difference in mean loss per token over held-out examples (ratio estimator)."""
    count = len(tokens)
    if count < 2 or not len(first) == len(second) == count:
        return None
    differences = [a - b for a, b in zip(first, second, strict=True)]
    total = sum(tokens)
    mean = sum(differences) / total
    squares = math.fsum((d - mean * n) ** 2 for d, n in zip(differences, tokens, strict=True))
    return math.sqrt(squares * count / (count - 1)) / total
