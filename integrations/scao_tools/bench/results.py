"""``results.jsonl``: one line per finished run. Everything that a report says is computed from these lines alone."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scao_tools.errors import ResultsError
from scao_tools.metrics import MetricsLog, finite, number, read_metrics

FORMAT = 1
STAGES = ("screen", "compare")
RESULTS = "results.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One finished run. Losses are means per label token in nats, times in seconds, sizes in bytes.

    Args:
        workload_digest: hash of all that can change a result and is shared by the optimizers: model, data, schedule.
        stage: ``"screen"`` for runs that chose settings, ``"compare"`` for those that judge them.
        options: what the optimizer was given besides ``lr``.
        batch: examples per step.
        label_tokens: seen in training, all steps together.
        heldout_curve: (step, loss) pairs, from step 0 to the last.
        train_curve: the loss of each step's fresh examples, before the update.
        seconds: training alone, without evaluations.
        step_seconds: the median step, forward and backward included; ``optimizer_ms`` the optimizer's part of it.
        cpu_seconds: of all threads of the process, training alone. ``energy_joules``: where the machine can tell.
        commit: of the code that made it, with ``-dirty`` where files differed from it.
        dtype: number format of the frozen weights and of the matrix products; lines from before it was kept lack it.
    """

    workload: str
    workload_digest: str
    stage: str
    optimizer: str
    options: dict[str, Any]
    lr: float
    seed: int
    batch: int
    steps: int
    label_tokens: int
    heldout_loss: float
    heldout_curve: tuple[tuple[int, float], ...]
    train_curve: tuple[float, ...]
    seconds: float
    step_seconds: float
    optimizer_ms: float
    cpu_seconds: float
    energy_joules: float | None
    state_bytes: int
    trainable: int
    peak_bytes: int
    device: str
    threads: int
    commit: str
    time: str
    versions: dict[str, str] = field(default_factory=dict)
    dtype: str = "not recorded"

    @property
    def key(self) -> tuple[Any, ...]:
        """Two runs with the same key are the same run."""
        return run_key(
            self.workload_digest, self.stage, self.optimizer, self.options, self.lr, self.seed, self.batch, self.steps
        )

    @property
    def diverged(self) -> bool:
        """Whether training ended without a finite held-out loss."""
        return not math.isfinite(self.heldout_loss)

    def to_line(self) -> dict[str, Any]:
        """The JSON object of this run."""
        line: dict[str, Any] = finite({"format": FORMAT, **dataclasses.asdict(self)})
        return line

    @classmethod
    def from_line(cls, line: Mapping[str, Any], where: str) -> RunRecord:
        """Read one JSON object back.

        Raises:
            ResultsError: a field is missing, unknown or of the wrong type, or another version wrote the line.
        """
        values = dict(line)
        if values.pop("format", None) != FORMAT:
            raise ResultsError(f"{where}: format {line.get('format')!r} is not {FORMAT}; was another version at work?")
        names = {f.name for f in dataclasses.fields(cls)}
        values.setdefault("dtype", cls.dtype)
        if set(values) != names:
            wrong = ", ".join(sorted(set(values) ^ names))
            raise ResultsError(f"{where}: missing or unknown fields: {wrong}")
        try:
            for name in ("heldout_loss", "lr", "seconds", "step_seconds", "optimizer_ms", "cpu_seconds"):
                values[name] = number(values[name])
            values["heldout_curve"] = tuple((int(step), number(loss)) for step, loss in values["heldout_curve"])
            values["train_curve"] = tuple(number(loss) for loss in values["train_curve"])
            for name in ("seed", "batch", "steps", "label_tokens", "state_bytes", "trainable", "peak_bytes"):
                values[name] = int(values[name])
            values["options"] = dict(values["options"])
        except (TypeError, ValueError) as error:
            raise ResultsError(f"{where}: {error}") from error
        if values["stage"] not in STAGES:
            raise ResultsError(f"{where}: stage {values['stage']!r} must be one of {', '.join(STAGES)}")
        return cls(**values)


def options_text(options: Mapping[str, Any]) -> str:
    """Options in a fixed order: ``betas=[0.9, 0.99] engine="soap"``, empty for the defaults."""
    return " ".join(f"{name}={json.dumps(options[name])}" for name in sorted(options))


def run_key(
    digest: str, stage: str, optimizer: str, options: Mapping[str, Any], lr: float, seed: int, batch: int, steps: int
) -> tuple[Any, ...]:
    """What identifies a run."""
    return (digest, stage, optimizer, options_text(options), lr, seed, batch, steps)


def read_results(paths: Iterable[Path]) -> list[RunRecord]:
    """All runs of the files, in their order; of two with the same key the first counts. A torn last line is left out.

    A directory stands for the ``results.jsonl`` in it.
    """
    records: dict[tuple[Any, ...], RunRecord] = {}
    for path in paths:
        file = path / RESULTS if path.is_dir() else path
        for index, line in enumerate(read_metrics(file), start=1):
            record = RunRecord.from_line(line, f"{file}, run {index}")
            records.setdefault(record.key, record)
    return list(records.values())


def dtype_on_record(records: Iterable[RunRecord], workload: str, device: str) -> str | None:
    """The number format that a workload's latest run on this kind of device had, None if there is none.

    A grid goes on in it: what the chip is best at is measured, and another answer would make every run again.
    """
    found = [r.dtype for r in records if (r.workload, r.device) == (workload, device) and r.dtype != RunRecord.dtype]
    return found[-1] if found else None


def append_result(path: Path, record: RunRecord) -> None:
    """Add one line and wait until it is on the disk."""
    log = MetricsLog(path)
    try:
        log.append(record.to_line())
        log.sync()
    finally:
        log.close()
