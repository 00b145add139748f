"""What the user sees: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

if TYPE_CHECKING:
    # Only for type checking: a first line shall be on the screen before torch is imported, which takes seconds.
    from scao_tools.training import EvalDone, StepDone


def duration(seconds: float) -> str:
    """``75`` -> ``1:15``."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TrainingView:
    """Shows one optimizer's progress; `Screen.training` makes the right one."""

    def __init__(self, label: str, steps: int, evaluations: int) -> None:
        self.label = label
        self.steps = steps
        self._evaluations = evaluations
        self._step_seconds = 0.0
        self._eval_seconds = 0.0
        self._steps_seen = 0
        self._tokens = 0
        self.held_out = ""

    def step(self, event: StepDone) -> None:
        """Take in one step."""
        self._steps_seen += 1
        self._step_seconds += event.seconds
        self._tokens += event.tokens
        self.show(event.step, self.line(event))

    def evaluation(self, event: EvalDone) -> None:
        """Take in one evaluation."""
        self._eval_seconds = event.seconds
        self._evaluations = max(0, self._evaluations - 1)
        self.held_out = f"  held-out {event.loss:.4f}"
        self.evaluated(event)

    def line(self, event: StepDone) -> str:
        """Loss, speed, and time left as text."""
        speed = self._tokens / max(self._step_seconds, 1e-9)
        left = (self.steps - event.step) * self._step_seconds / max(self._steps_seen, 1)
        left += self._evaluations * self._eval_seconds
        return f"loss {event.loss:.4f}{self.held_out}  {speed:,.0f} tokens/s  {duration(left)} left"

    def show(self, step: int, text: str) -> None:
        """Display a step."""
        raise NotImplementedError

    def evaluated(self, event: EvalDone) -> None:
        """Display an evaluation."""
        raise NotImplementedError


class _LiveView(TrainingView):
    def __init__(self, label: str, steps: int, evaluations: int, bars: tuple[Progress, TaskID]) -> None:
        super().__init__(label, steps, evaluations)
        self._progress, self._task = bars

    def show(self, step: int, text: str) -> None:
        self._progress.update(self._task, completed=step, status=text)

    def evaluated(self, event: EvalDone) -> None:
        self._progress.update(self._task, status=f"held-out loss {event.loss:.4f}")


class _PlainView(TrainingView):
    _INTERVAL = 10.0  # seconds between lines, so that a log file stays readable

    def __init__(self, label: str, steps: int, evaluations: int) -> None:
        super().__init__(label, steps, evaluations)
        self._last = 0.0

    def show(self, step: int, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= self._INTERVAL or step == self.steps:
            self._last = now
            print(f"{self.label}  step {step}/{self.steps}  {text}", flush=True)

    def evaluated(self, event: EvalDone) -> None:
        print(f"{self.label}  step {event.step}/{self.steps}  held-out loss {event.loss:.4f}", flush=True)


class Screen:
    """The one place that prints."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    @property
    def live(self) -> bool:
        """Whether bars can be redrawn in place."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def say(self, text: str) -> None:
        """Print one line as it is, without markup."""
        if self.live:
            self.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    @contextmanager
    def task(self, text: str) -> Iterator[None]:
        """Show that something takes a while, and how long it took."""
        start = time.monotonic()
        if self.live:
            with self.console.status(text):
                yield
        else:
            yield
        self.say(f"{text} ({time.monotonic() - start:.0f} s)")

    @contextmanager
    def training(self, label: str, steps: int, evaluations: int, done: int) -> Iterator[TrainingView]:
        """Show the progress of one optimizer's run."""
        if not self.live:
            yield _PlainView(label, steps, evaluations)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[status]}", markup=False),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(label, total=steps, completed=done, status="")
            yield _LiveView(label, steps, evaluations, (progress, task))
