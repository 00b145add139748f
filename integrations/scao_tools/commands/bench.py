"""``scao bench`` and ``scao bench-report``: options in, `scao_tools.bench` does the work."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scao_tools.environment import prepare_environment
from scao_tools.errors import OptionError
from scao_tools.requirements import DEMO_MODULES, require

if TYPE_CHECKING:
    from scao_tools.bench.runner import Grid
    from scao_tools.bench.session import BenchSession, Place
    from scao_tools.bench.workload import Workload
    from scao_tools.console import Screen


def bench(
    *,
    workload: Annotated[str, typer.Argument(help="A workload's name, or the path of its .yaml file.")] = "tiny-lora",
    optimizers: Annotated[str | None, typer.Option(help="Only these, comma-separated; others need --lr.")] = None,
    lr: Annotated[str | None, typer.Option(help="Learning rates for all of them, comma-separated.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", help="An optimizer's option, e.g. scao.spike_rank=8. May be repeated.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated.")] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Examples per step, comma-separated.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per run.")] = None,
    model: Annotated[str | None, typer.Option(help="Another model: a directory or a Hugging Face name.")] = None,
    data: Annotated[str | None, typer.Option(help="Other data: a JSONL file, a named source, or a Hub name.")] = None,
    out: Annotated[Path | None, typer.Option(help="Results and report.  [default: runs/bench/<workload>]")] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="auto, bf16, fp16 or fp32 for matrix products. auto: as the runs on record, or what is faster."
        ),
    ] = "auto",
    stage: Annotated[str | None, typer.Option(help="compare, or screen for runs that only choose settings.")] = None,
    shard: Annotated[str, typer.Option(help="Which part of the grid: 1/2 and 2/2 may run side by side.")] = "1/1",
    budget_minutes: Annotated[float | None, typer.Option(help="Start no run that would end after this time.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the grid and how long it would take.")] = False,
) -> None:
    """Compare optimizers: learning rates x seeds x batch sizes on one workload. The same command continues it."""
    require((*DEMO_MODULES, "yaml"), "demo", "scao bench")
    prepare_environment()
    from scao_tools.console import Screen

    changes: dict[str, Any] = {
        "steps": steps,
        "stage": stage,
        "model": model,
        "data": data,
        "seeds": _numbers("--seeds", seeds, int),
        "batch_sizes": _numbers("--batch-sizes", batch_sizes, int),
    }
    chosen = _chosen(workload, changes, optimizers, _numbers("--lr", lr, float), options or [])
    part = _shard(shard)
    if budget_minutes is not None and not budget_minutes > 0:
        raise OptionError(f"--budget-minutes must be above 0, got {budget_minutes}")
    folder = out if out is not None else Path("runs") / "bench" / chosen.name
    screen = Screen()
    try:
        code = _bench(chosen, folder, dtype, part, budget_minutes, dry_run, screen)
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


def bench_report(
    results: Annotated[list[Path], typer.Argument(help="results.jsonl files, or folders that hold one.")],
    out: Annotated[Path, typer.Option(help="Folder for report.md, report.html and figures.")] = Path("bench-report"),
) -> None:
    """Write the report again, from results alone."""
    require(("matplotlib",), "demo", "scao bench-report")
    from scao_tools.bench.report import load_and_write

    for path in load_and_write(results, out, shlex.join(["scao", *sys.argv[1:]])):
        print(path)


def _bench(
    workload: Workload,
    folder: Path,
    dtype: str,
    shard: tuple[int, int],
    budget_minutes: float | None,
    dry_run: bool,
    screen: Screen,
) -> int:
    with screen.task("Importing torch and transformers"):
        from scao_tools.bench.runner import Grid, run_grid
        from scao_tools.bench.session import load_session, read_data, workload_digest
        from scao_tools.bench.workload import plan_runs
    from scao_tools.bench.report import load_and_write
    from scao_tools.interrupts import StopSignals
    from scao_tools.optimizers import check_grid

    place = _place(workload, folder, dtype, screen)
    check_grid(workload.optimizers, workload.train == "full", workload.weight_decay, place.device.type)
    with screen.task("Reading the data"):
        rows = read_data(workload)
    screen.say(f"Data: {rows.description}.")
    grid = Grid(workload, workload_digest(workload, rows, place), plan_runs(workload), folder, workload.stage, shard)
    if dry_run:
        with screen.task("Loading the model"):
            session = load_session(workload, rows, place, _pretraining(screen))
        _show_plan(grid, session, screen)
        return 0
    grid.open()
    complete, code = not grid.left(), 0
    if not complete:
        with screen.task("Loading the model"):
            session = load_session(workload, rows, place, _pretraining(screen))
        with StopSignals() as stop:
            complete = run_grid(grid, session, screen, stop.requested, budget_minutes)
            code = stop.exit_code if stop.requested() else 0
    if grid.records():
        written = load_and_write([grid.file], folder, shlex.join(["scao", *sys.argv[1:]]))
        screen.say(f"Report: {written[0]}")
    if not complete:
        screen.say(f"{len(grid.left())} runs are left; the same command continues. Results so far: {grid.file}")
    return code


def _place(workload: Workload, folder: Path, dtype: str, screen: Screen) -> Place:
    """Where and in which format: as asked for, else as the runs on record, else as the chip does best."""
    from scao_tools.bench.results import RESULTS, dtype_on_record, read_results
    from scao_tools.bench.session import Place
    from scao_tools.compute import DTYPES, pick_device

    if dtype not in ("auto", *DTYPES):
        raise OptionError(f"--dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    if dtype != "auto":
        return Place.here(dtype)
    file = folder / RESULTS
    recorded = dtype_on_record(read_results([file]) if file.exists() else [], workload.name, pick_device().type)
    if recorded:
        screen.say(f"Continuing in {recorded}, as the runs in {file}.")
    return Place.here(recorded)


def _show_plan(grid: Grid, session: BenchSession, screen: Screen) -> None:
    from scao_tools.bench.runner import probe
    from scao_tools.console import duration

    left = grid.left()
    for run in grid.runs:
        screen.say(f"{'to do' if run in left else 'done '}  {run.label}")
    seconds = {batch: probe(session, batch) for batch in grid.workload.batch_sizes}
    for batch, each in seconds.items():
        count = sum(run.batch == batch for run in left)
        screen.say(f"batch {batch}: {count} runs of about {duration(each)} each")
    total = sum(seconds[run.batch] for run in left)
    screen.say(f"{len(left)} of {len(grid.runs)} runs to do, about {duration(total)} with AdamW's step time")


def _pretraining(screen: Screen) -> Any:
    def show(event: Any) -> None:
        if event.step % 50 == 0:
            screen.say(f"Pretraining the small model (once, then cached): step {event.step}, loss {event.loss:.3f}")

    return show


def _chosen(
    name: str,
    changes: dict[str, Any],
    optimizers: str | None,
    lrs: tuple[float, ...] | None,
    options: list[str],
) -> Workload:
    """The workload with what the command line changes, checked again as a whole."""
    from scao_tools.bench.workload import check_workload, load_workload

    workload = load_workload(name)
    entries = list(workload.optimizers)
    if optimizers is not None:
        entries = _wanted(entries, name, optimizers, lrs)
    if lrs is not None:
        entries = [dataclasses.replace(entry, lrs=lrs) for entry in entries]
    for text in options:
        entries = _with_option(entries, text)
    given = {key: value for key, value in changes.items() if value is not None}
    if "model" in given or "data" in given:
        given["name"] = f"{workload.name}-own"
    result = dataclasses.replace(workload, **given, optimizers=tuple(entries))
    check_workload(result, name)
    return result


def _wanted(entries: list[Any], workload: str, text: str, lrs: tuple[float, ...] | None) -> list[Any]:
    """The workload's entries of these optimizers, and with learning rates given also of others that can be compared."""
    from scao_tools.bench.workload import Entry
    from scao_tools.optimizers import REGISTRY, parse_optimizers

    wanted, ours = parse_optimizers(text, tuple(REGISTRY)), {entry.optimizer for entry in entries}
    others = [name for name in wanted if name not in ours]
    if others and lrs is None:
        raise OptionError(
            f"--optimizers {text}: {workload} has learning rates for {', '.join(sorted(ours))} only; give those of "
            f"{', '.join(others)}, e.g. --lr 1e-3,2e-3,4e-3"
        )
    return [entry for entry in entries if entry.optimizer in wanted] + [Entry(name, {}, lrs or ()) for name in others]


def _with_option(entries: list[Any], text: str) -> list[Any]:
    """Add ``optimizer.option=value`` to the entries of that optimizer."""
    left, equals, value = text.partition("=")
    optimizer, dot, option = left.strip().partition(".")
    if not (equals and dot and optimizer and option):
        raise OptionError(f"--set {text!r} must look like scao.spike_rank=8")
    if all(entry.optimizer != optimizer for entry in entries):
        known = ", ".join(sorted({entry.optimizer for entry in entries}))
        raise OptionError(f"--set {text!r}: no optimizer {optimizer!r} in this grid; there are {known}")
    import yaml

    parsed = yaml.safe_load(value)
    return [
        dataclasses.replace(entry, options={**entry.options, option: parsed}) if entry.optimizer == optimizer else entry
        for entry in entries
    ]


def _numbers(name: str, text: str | None, kind: type) -> Any:
    if text is None:
        return None
    try:
        values = tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = ()
    if not values:
        raise OptionError(f"{name} must be numbers separated by commas, got {text!r}")
    return values


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise OptionError(f"--shard must look like 1/2, got {text!r}")
    return int(index), int(count)
