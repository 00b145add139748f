"""One run in a process of its own, for an optimizer whose package would take the place of ours.

``python -m scao_tools.bench.worker`` reads the run from its standard input and prints the record as its last line.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from scao_tools.bench.results import RunRecord
from scao_tools.bench.workload import Run, Workload, workload_from_plain
from scao_tools.environment import prepare_environment
from scao_tools.errors import ToolError
from scao_tools.peer_packages import peer_environment

if TYPE_CHECKING:
    from scao_tools.console import TrainingView

_POLL_SECONDS = 0.2


def execute_elsewhere(
    workload: Workload, dtype: str, run: Run, stage: str, requirement: str, should_stop: Callable[[], bool]
) -> RunRecord | None:
    """Make the run in a new process with ``requirement`` first on its path; None if the user asked to stop.

    ``dtype`` is the number format of the other runs, which that process is not to choose anew.

    Raises:
        ToolError: the process failed; its last line says why.
    """
    plain = {"workload": dataclasses.asdict(workload), "run": dataclasses.asdict(run)}
    job = json.dumps({**plain, "dtype": dtype, "stage": stage})
    process = subprocess.Popen(
        [sys.executable, "-m", "scao_tools.bench.worker"],
        env=peer_environment(requirement),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process only, which then ends that one
    )
    try:
        output, errors = _wait(process, job, should_stop)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if should_stop():
        return None
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        raise ToolError(f"{run.label}: the process of its own failed: {lines[-1]}")
    return RunRecord.from_line(json.loads(output.splitlines()[-1]), run.label)


def _wait(process: subprocess.Popen[str], job: str, should_stop: Callable[[], bool]) -> tuple[str, str]:
    text: str | None = job
    while not should_stop():
        try:
            return process.communicate(text, timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            text = None  # it has been handed over
    return "", ""


def work(job: Mapping[str, Any], view: TrainingView) -> RunRecord | None:
    """The other side: load the workload and make the run."""
    from scao_tools.bench.runner import execute
    from scao_tools.bench.session import Place, load_session, read_data

    workload = workload_from_plain(job["workload"])
    session = load_session(workload, read_data(workload), Place.here(job["dtype"]))
    return execute(session, Run(**job["run"]), job["stage"], view, lambda: False)


def main() -> None:
    """Entry point of the process."""
    prepare_environment()
    from scao_tools.console import TrainingView

    class Quiet(TrainingView):
        def show(self, step: int, text: str) -> None:
            pass

        def evaluated(self, event: object) -> None:
            pass

    started = time.monotonic()
    try:
        record = work(json.load(sys.stdin), Quiet("", 0, 0))
    except ToolError as error:
        sys.exit(f"{error}")
    if record is None:
        sys.exit(f"no result after {time.monotonic() - started:.0f} s")
    print(json.dumps(record.to_line()))


if __name__ == "__main__":
    main()
