"""Start or continue a demo run: the steps from options to report, with every result on disk as soon as it exists."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from scao_tools.checkpointing import load_checkpoint, remove_checkpoints, restore, save_checkpoint
from scao_tools.compute import PeakMemory, pick_device, pick_dtype
from scao_tools.console import Screen, TrainingView
from scao_tools.data import DataSet, load_data
from scao_tools.demo.config import DemoOptions, RunConfig, refuse_contradictions
from scao_tools.demo.outputs import RunFiles, choose_existing, choose_new, prepare, read_json, write_json
from scao_tools.demo.report import publish, resume_command
from scao_tools.demo.session import Session, held_out_count, load_session
from scao_tools.errors import ResumeError, ToolError
from scao_tools.interrupts import StopSignals
from scao_tools.metrics import MetricsLog, finite, rewrite_metrics
from scao_tools.models import ModelSource, check_model, quiet_libraries, resolve_model, trainable
from scao_tools.optimizers import OPTIMIZERS, build_optimizer, check_optimizers, state_bytes
from scao_tools.training import Diverged, EvalDone, StepDone, Trainer, lr_at
from scao_tools.versions import versions


def start(options: DemoOptions, out: Path | None, overwrite: bool, command: str, screen: Screen) -> int:
    """Begin a new run; returns the exit code. Everything that can be refused is refused before the model is loaded."""
    files = choose_new(out, overwrite)
    check_optimizers(options.optimizers, options.lr)
    source = resolve_model(options.model)
    quiet_libraries(source)
    check_model(source)
    data = _read_data(options, screen)
    device = pick_device()
    config = RunConfig(
        options=options,
        dtype=pick_dtype(device) if options.dtype == "auto" else options.dtype,
        device=device.type,
        data_description=data.description,
        data_digest=data.digest,
        command=command,
        versions=versions(),
    )
    # Whatever is wrong with the model or the data shows here, before an earlier run is replaced.
    session = _load(config, source, data, screen)
    prepare(files, options.optimizers)
    write_json(files.config, config.to_dict())
    screen.say(f"Writing to {files.root}")
    return _execute(session, files, screen)


def resume(out: Path | None, given: Mapping[str, Any], screen: Screen) -> int:
    """Continue an interrupted run exactly, or print the report of a finished one again; returns the exit code."""
    files = choose_existing(out)
    config = RunConfig.load(files.config)
    options = config.options
    refuse_contradictions(options, given)
    if files.finished():
        screen.say(f"The run in {files.root} is finished.")
        publish(files, screen)
        return 0
    if pick_device().type != config.device:
        raise ResumeError(f"the run in {files.root} was made on {config.device}, which is not what this machine offers")
    source = resolve_model(options.model)
    quiet_libraries(source)
    check_model(source)
    data = _read_data(options, screen)
    if data.digest != config.data_digest:
        raise ResumeError(
            f"the data of the run in {files.root} has changed since then (an edited file, or another Python version); "
            "start a new run without --resume"
        )
    screen.say(f"Continuing the run in {files.root}")
    return _execute(_load(config, source, data, screen), files, screen)


def _read_data(options: DemoOptions, screen: Screen) -> DataSet:
    with screen.task("Reading the data"):
        return load_data(options.data, held_out=held_out_count(options), seed=options.seed)


def _load(config: RunConfig, source: ModelSource, data: DataSet, screen: Screen) -> Session:
    with screen.task("Loading the model"):
        return load_session(config, source, data)


def _execute(session: Session, files: RunFiles, screen: Screen) -> int:
    code = 0
    try:
        _ensure_base(session, files, screen)
        for name in session.config.options.optimizers:
            if not files.result(name).is_file():
                code = OptimizerRun(session, files, name, screen).execute()
            if code:
                break
    except KeyboardInterrupt:
        code = 130
    except torch.OutOfMemoryError as error:
        raise ToolError(
            "the GPU ran out of memory; start again with a smaller --batch-size, --max-length or --model, or --bits 4"
        ) from error
    publish(files, screen)
    if code:
        screen.say(f"Interrupted. Continue with: {resume_command(files)}")
    return code


def _ensure_base(session: Session, files: RunFiles, screen: Screen) -> None:
    """Evaluate the untrained model once: it is the same for every optimizer."""
    if files.base.is_file():
        return
    session.reset_adapter()
    with screen.task("Evaluating the model before training"):
        event = session.evaluator(0, session.settings.micro_tokens, lambda: False)
        text = session.generate()
    row = session.sample_row
    write_json(
        files.base,
        {
            **_eval_line("base", event, lr=0.0),
            "example_label_tokens": [example.label_tokens for example in session.held_out],
            "sample": {"prompt": row.prompt, "reference": row.answer, "text": text},
        },
    )


class OptimizerRun:
    """One optimizer's part of a run."""

    def __init__(self, session: Session, files: RunFiles, name: str, screen: Screen) -> None:
        self.session = session
        self.files = files
        self.name = name
        self.screen = screen
        self.run_id = f"{session.config.fingerprint}:{name}"
        self.memory = PeakMemory(torch.device(session.config.device))

    def execute(self) -> int:
        """Train from the last checkpoint on, then write the results; returns the exit code (0: done)."""
        trainer = self._trainer()
        payload = load_checkpoint(self._directory, self.run_id)
        if payload is not None:
            restore(trainer, payload)
            if trainer.steps_done:
                self.screen.say(f"{self._label}: continuing after step {trainer.steps_done}")
        lines = rewrite_metrics(self.files.metrics, self._keep(trainer.steps_done))
        evaluated = {line["step"] for line in lines if line["optimizer"] == self.name and line["event"] == "eval"}
        self.memory.start(int(payload["peak_memory"]) if payload else 0)
        log = MetricsLog(self.files.metrics)
        try:
            if 0 not in evaluated:
                self._copy_base(log)
            code = self._train(trainer, log, frozenset(evaluated | {0}))
        finally:
            log.close()
        if code == 0:
            self._finish()
        return code

    @property
    def _directory(self) -> Path:
        return self.files.optimizer(self.name)

    @property
    def _label(self) -> str:
        return OPTIMIZERS[self.name].label

    def _trainer(self) -> Trainer:
        session = self.session
        options = session.config.options
        session.reset_adapter()
        torch.manual_seed(options.seed)
        random.seed(options.seed)
        optimizer = build_optimizer(self.name, trainable(session.model), options.lr)
        return Trainer(
            session.model,
            optimizer,
            session.loss,
            session.evaluator,
            session.settings,
            pad_id=session.pad_id,
            fp16=session.config.dtype == "fp16" and session.config.device == "cuda",
        )

    def _keep(self, steps_done: int) -> Any:
        # What came after the checkpoint is computed again, and must not be on record twice.
        return lambda line: line["optimizer"] != self.name or line["step"] <= steps_done

    def _copy_base(self, log: MetricsLog) -> None:
        base = read_json(self.files.base) or {}
        keys = ("event", "step", "loss", "lr", "seconds", "tokens", "label_tokens", "example_losses")
        log.append({"optimizer": self.name, **{key: base[key] for key in keys}})

    def _train(self, trainer: Trainer, log: MetricsLog, evaluated: frozenset[int]) -> int:
        steps = trainer.settings.steps
        left = sum(step not in evaluated for step in trainer.settings.eval_steps)
        with (
            self.screen.training(self._label, steps, left, trainer.steps_done) as view,
            StopSignals() as stop,
        ):
            for event in trainer.run(self.session.batches(), evaluated, stop.requested):
                self._take(event, trainer, log, view)
            if stop.requested():
                self._checkpoint(trainer, log)
                return stop.exit_code
        return 0

    def _take(self, event: Any, trainer: Trainer, log: MetricsLog, view: TrainingView) -> None:
        if isinstance(event, StepDone):
            log.append(self._step_line(event, trainer))
            view.step(event)
            if event.step % self.session.config.options.save_every == 0 or event.step == trainer.settings.steps:
                self._checkpoint(trainer, log)
        elif isinstance(event, EvalDone):
            last = max(0, event.step - 1)
            log.append(_eval_line(self.name, event, lr=lr_at(last, trainer.settings)))
            view.evaluation(event)
        elif isinstance(event, Diverged):
            self.screen.say(f"{self._label}: the loss is not finite any more; training stops at step {event.step}.")

    def _checkpoint(self, trainer: Trainer, log: MetricsLog) -> None:
        log.sync()
        save_checkpoint(self._directory, trainer, run=self.run_id, peak_memory=self.memory.read())

    def _step_line(self, event: StepDone, trainer: Trainer) -> dict[str, Any]:
        return {
            "optimizer": self.name,
            "event": "train",
            "step": event.step,
            "loss": event.loss,
            "lr": event.lr,
            "grad_norm": event.grad_norm,
            "seconds": event.seconds,
            "optimizer_ms": event.optimizer_ms,
            "tokens": event.tokens,
            "label_tokens": event.label_tokens,
            "optimizer_state_bytes": state_bytes(trainer.optimizer),
            "peak_memory_bytes": self.memory.read(),
        }

    def _finish(self) -> None:
        with self.screen.task(f"{self._label}: saving the adapter and a sample"):
            self.session.save_adapter(self.files, self.name)
            write_json(self.files.result(self.name), {"optimizer": self.name, "sample": self.session.generate()})
        remove_checkpoints(self._directory)


def _eval_line(name: str, event: EvalDone, *, lr: float) -> dict[str, Any]:
    content: dict[str, Any] = finite(
        {
            "optimizer": name,
            "event": "eval",
            "step": event.step,
            "loss": event.loss,
            "lr": lr,
            "seconds": event.seconds,
            "tokens": event.tokens,
            "label_tokens": event.label_tokens,
            "example_losses": event.example_losses,
        }
    )
    return content
