"""Runs the grid of a workload: what is on record is skipped, each finished run is written at once."""

from __future__ import annotations

import contextlib
import datetime
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from scao_tools.bench.machine import Meter, commit
from scao_tools.bench.results import RESULTS, RunRecord, append_result, read_results, run_key
from scao_tools.bench.session import BenchSession
from scao_tools.bench.worker import execute_elsewhere
from scao_tools.bench.workload import Run, Workload
from scao_tools.compute import PeakMemory
from scao_tools.console import Screen, TrainingView, duration
from scao_tools.metrics import rewrite_metrics
from scao_tools.models import trainable
from scao_tools.optimizers import REGISTRY, build_optimizer, state_bytes
from scao_tools.peer_packages import runs_isolated
from scao_tools.training import Diverged, EvalDone, StepDone, StopRequested, Trainer, TrainSettings
from scao_tools.versions import versions

Stop = Callable[[], bool]


@dataclass
class _Curves:
    """What one run has shown so far."""

    train: list[StepDone] = field(default_factory=list)
    held_out: list[EvalDone] = field(default_factory=list)
    diverged: bool = False

    def take(self, event: object) -> None:
        if isinstance(event, StepDone):
            self.train.append(event)
        elif isinstance(event, EvalDone):
            self.held_out.append(event)
        elif isinstance(event, Diverged):
            self.diverged = True


def execute(session: BenchSession, run: Run, stage: str, view: TrainingView, should_stop: Stop) -> RunRecord | None:
    """One run from its initial weights; None if the user asked to stop before its end."""
    session.reset(run.seed)
    try:
        first = session.first_evaluation(run.seed, should_stop)
    except StopRequested:
        return None
    trainer, device = _trainer(session, run), session.place.device
    memory, meter, curves = PeakMemory(device), Meter(device), _Curves(held_out=[first])
    memory.start()
    meter.resume()
    try:
        for event in trainer.run(session.batches(run.batch, run.seed), frozenset({0}), should_stop):
            meter.pause()
            curves.take(event)
            _show(event, view)
            # What an evaluation costs is not training's.
            if not isinstance(event, StepDone) or event.step not in trainer.settings.eval_steps:
                meter.resume()
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # some peers decompose what they are given, NaN too
        curves.diverged = True
    meter.pause()
    if curves.held_out[-1].step < session.workload.steps and not curves.diverged:
        return None
    return _record(session, run, stage, curves, _Cost(memory.read(), meter, state_bytes(trainer.optimizer)))


def _trainer(session: BenchSession, run: Run) -> Trainer:
    """From the weights as they are; what the optimizer draws at random depends on the seed alone."""
    workload = session.workload
    torch.manual_seed(run.seed)
    random.seed(run.seed)
    named = trainable(session.model)
    optimizer = build_optimizer(run.optimizer, named, run.lr, run.options, workload.weight_decay)
    settings = TrainSettings(
        steps=workload.steps,
        lr=run.lr,
        eval_steps=workload.eval_steps(),
        warmup_share=workload.warmup_share,
        max_grad_norm=workload.max_grad_norm,
        micro_tokens=session.micro_tokens,
        schedule=REGISTRY[run.optimizer].schedule,
    )
    fp16 = session.place.dtype == "fp16" and session.place.device.type == "cuda"
    return Trainer(
        session.model, optimizer, session.loss, session.evaluator, settings, pad_id=session.pad_id, fp16=fp16
    )


def _show(event: object, view: TrainingView) -> None:
    if isinstance(event, StepDone):
        view.step(event)
    elif isinstance(event, EvalDone):
        view.evaluation(event)


@dataclass(frozen=True)
class _Cost:
    peak_bytes: int
    meter: Meter
    state_bytes: int


def _record(session: BenchSession, run: Run, stage: str, curves: _Curves, cost: _Cost) -> RunRecord:
    workload, steps = session.workload, curves.train
    final = curves.held_out[-1]
    return RunRecord(
        workload=workload.name,
        workload_digest=session.digest,
        stage=stage,
        optimizer=run.optimizer,
        options=run.options,
        lr=run.lr,
        seed=run.seed,
        batch=run.batch,
        steps=workload.steps,
        label_tokens=sum(step.label_tokens for step in steps),
        heldout_loss=final.loss if final.step == workload.steps and not curves.diverged else math.nan,
        heldout_curve=tuple((e.step, e.loss) for e in curves.held_out),
        train_curve=tuple(step.loss for step in steps),
        seconds=sum(step.seconds for step in steps),
        step_seconds=statistics.median(step.seconds for step in steps),
        optimizer_ms=statistics.median(step.optimizer_ms for step in steps),
        cpu_seconds=cost.meter.cpu_seconds,
        energy_joules=cost.meter.joules,
        state_bytes=cost.state_bytes,
        trainable=sum(p.numel() for p in trainable(session.model).values()),
        peak_bytes=cost.peak_bytes,
        device=session.place.device.type,
        threads=torch.get_num_threads(),
        commit=commit(),
        time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions=versions(),
        dtype=session.place.dtype,
    )


@dataclass
class Grid:
    """The runs of a workload that are still to be made, and how long they take."""

    workload: Workload
    digest: str
    runs: Sequence[Run]
    out: Path
    stage: str = "compare"
    shard: tuple[int, int] = (1, 1)

    def open(self) -> None:
        """Make the folder, and drop a line that a kill has torn."""
        self.out.mkdir(parents=True, exist_ok=True)
        commit()  # of the code that is loaded now
        if self.file.exists():
            rewrite_metrics(self.file, lambda _: True)

    @property
    def file(self) -> Path:
        """Where the results go."""
        return self.out / RESULTS

    def records(self) -> list[RunRecord]:
        """What is on record, of this and of other workloads."""
        return read_results([self.file]) if self.file.exists() else []

    def left(self) -> list[Run]:
        """Runs of this shard that are not on record; read anew each time, since another process may be writing."""
        done = {record.key for record in self.records()}
        index, count = self.shard
        return [
            run for number, run in enumerate(self.runs) if number % count == index - 1 and self._key(run) not in done
        ]

    def _key(self, run: Run) -> tuple[object, ...]:
        return run_key(
            self.digest, self.stage, run.optimizer, run.options, run.lr, run.seed, run.batch, self.workload.steps
        )

    def seconds(self, run: Run) -> float | None:
        """Expected duration: the median of finished runs with the same batch size, else of other batch sizes to scale."""
        own = [r for r in self.records() if r.workload_digest == self.digest]
        same = [r.seconds * self.workload.steps / r.steps for r in own if r.batch == run.batch]
        if same:
            return statistics.median(same)
        per_example = [r.seconds * self.workload.steps / r.steps / r.batch for r in own]
        return statistics.median(per_example) * run.batch if per_example else None

    def seconds_left(self, runs: Sequence[Run]) -> float | None:
        """Expected duration of several runs, None while nothing is known."""
        known = [self.seconds(run) for run in runs]
        return None if None in known else sum(s for s in known if s is not None)


def run_grid(
    grid: Grid, session: BenchSession, screen: Screen, should_stop: Stop, budget_minutes: float | None
) -> bool:
    """Make all runs that are left; returns whether the grid is complete. Results made so far stay in any case."""
    start = time.monotonic()
    overhead = 1.15  # evaluations and resets, chosen: they are not in a record's seconds
    while left := grid.left():
        run, total = left[0], len(grid.runs)
        expected = grid.seconds(run)
        spent = time.monotonic() - start
        if budget_minutes is not None and spent + overhead * (expected or 0) > 60 * budget_minutes:
            screen.say(f"The budget of {budget_minutes:g} minutes is used up; {len(left)} runs are left.")
            return False
        seconds = grid.seconds_left(left)
        time_left = f", about {duration(overhead * seconds)} left" if seconds is not None else ""
        screen.say(f"[{total - len(left) + 1}/{total}{time_left}] {run.label}")
        record = _make(session, run, grid.stage, screen, should_stop)
        if record is None:
            return False
        append_result(grid.file, record)
    return True


def _make(session: BenchSession, run: Run, stage: str, screen: Screen, should_stop: Stop) -> RunRecord | None:
    spec, workload = REGISTRY[run.optimizer], session.workload
    if spec.isolated and not runs_isolated(spec.isolated):
        return execute_elsewhere(workload, session.place.dtype, run, stage, spec.isolated, should_stop)
    with screen.training(spec.label, workload.steps, len(workload.eval_steps()) - 1, 0) as view:
        return execute(session, run, stage, view, should_stop)


def probe(session: BenchSession, batch: int) -> float:
    """Seconds that one run takes here, from one training step and one evaluation."""
    workload = session.workload
    session.reset(0)
    optimizer = torch.optim.SGD(list(trainable(session.model).values()), lr=0.0)
    settings = TrainSettings(1, 1e-9, eval_steps=(), micro_tokens=session.micro_tokens)
    trainer = Trainer(session.model, optimizer, session.loss, session.evaluator, settings, pad_id=session.pad_id)
    examples = session.batches(batch, 0)[0]
    trainer.step(examples)  # the first one warms caches
    step = trainer.step(examples).seconds
    with contextlib.suppress(StopRequested):
        evaluation = session.first_evaluation(0, lambda: False).seconds
    return step * workload.steps + evaluation * (len(workload.eval_steps()) - 1)
