"""``make bench-runtime``: what refreshes cost on the critical path of a full fine-tune, by schedule, on this machine.

A transformer with blocked factors is trained on one batch with one thread, by AdamW and by SCAO with each schedule; all take
turns, step by step, so a drift of the machine's speed hits all of them. Measured is the main thread's CPU time of a whole
training step, and how long it waited for a worker; not the wall clock, which other programs change. Figures go into one
JSON file: schedule -> max_over_median, p99_over_median, mean_overhead (over AdamW's training step), barrier_wait (seconds a
step). ``--sweep`` also trains a small transformer with every refresh interval and delay, over several seeds, into a second
file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Schedule -> SCAO's options; None is AdamW. "burst" refreshes all matrices in the same step.
SCHEDULES: dict[str, dict[str, Any] | None] = {
    "adamw": None,
    "burst": {"runtime": "inline"},
    "staggered": {"runtime": "staggered"},
    "thread": {"runtime": "thread"},
}
WARMUP = 20  # steps that create state and in which directions turn more often


class Trainee:
    """One copy of the model with its optimizer, and what its steps took."""

    def __init__(self, name: str, model: Any, every: int) -> None:
        torch: Any = importlib.import_module("torch")
        options = SCHEDULES[name]
        self.name, self.model, self.cpu, self.waits = name, model, list[float](), list[float]()
        if options is None:
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            return
        from scao import SCAO

        self.optimizer = SCAO(model.parameters(), lr=1e-4, refresh_every=every, **options)
        self.optimizer.on_step(lambda report: self.waits.append(report.waited))

    def step(self, batch: Any) -> None:
        """Forward, backward, optimizer."""
        start = time.thread_time()
        self.model(input_ids=batch, labels=batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.cpu.append(time.thread_time() - start)


def summary(cpu: Sequence[float], waits: Sequence[float], adamw: Sequence[float]) -> dict[str, float]:
    """The figures of one schedule from seconds a step; waiting counts as time of the step."""
    steps = [a + b for a, b in zip(cpu, waits or [0.0] * len(cpu), strict=True)]
    median = statistics.median(steps)
    ordered = sorted(steps)
    return {
        "max_over_median": max(steps) / median,
        "p99_over_median": ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))] / median,
        "mean_overhead": statistics.fmean(steps) / statistics.fmean(adamw) - 1,
        "barrier_wait": statistics.fmean(waits) if waits else 0.0,
        "median_seconds": median,
    }


def measure(steps: int, every: int, hidden: int, layers: int, rows: int = 8) -> dict[str, dict[str, float]]:
    """Train all schedules side by side on ``rows`` sequences of 128 tokens and return their figures."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    trainees = []
    for name in SCHEDULES:
        torch.manual_seed(0)
        trainees.append(Trainee(name, transformers.LlamaForCausalLM(config), every))
    batch = torch.randint(512, (rows, 128), generator=torch.Generator().manual_seed(1))
    for _ in range(WARMUP + steps):
        for trainee in trainees:
            trainee.step(batch)
    adamw = trainees[0].cpu[WARMUP:]
    return {t.name: summary(t.cpu[WARMUP:], t.waits[WARMUP:], adamw) for t in trainees}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the JSON files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help=f"measured steps, after {WARMUP} of warm-up")
    parser.add_argument("--refresh-every", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="sequences of 128 tokens in a step")
    parser.add_argument(
        "--sweep", type=int, default=0, metavar="SEEDS", help="also the final loss by interval and delay"
    )
    parser.add_argument("--sweep-steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-runtime.json"))
    given = parser.parse_args(arguments)
    if min(given.steps, given.refresh_every, given.layers, given.rows, given.sweep_steps) < 1 or given.sweep < 0:
        parser.error(
            "--steps, --refresh-every, --layers, --rows and --sweep-steps must be at least 1, --sweep at least 0"
        )
    if given.hidden < 8 or given.hidden % 8:
        parser.error("--hidden must be a multiple of 8")
    try:
        given.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    try:
        _run(given)
    except KeyboardInterrupt:
        print("\nInterrupted: what was not finished was not written.")
        return 130
    return 0


def _run(given: argparse.Namespace) -> None:
    from scao_tools.environment import prepare_environment
    from scao_tools.plotting import plot_schedules

    prepare_environment()
    figures = measure(given.steps, given.refresh_every, given.hidden, given.layers, given.rows)
    given.out.write_text(json.dumps(figures, indent=2) + "\n")
    title = (
        f"hidden {given.hidden}, {given.layers} layers, {given.rows * 128} tokens and one thread a step, refresh every "
        f"{given.refresh_every}, {given.steps} steps"
    )
    plot_schedules(figures, title, given.out.with_suffix(".png"))
    print(title + "\n")
    print(f"{'schedule':<12}{'median s':>10}{'max/median':>12}{'p99/median':>12}{'overhead':>10}{'wait s/step':>13}")
    for name, row in figures.items():
        print(
            f"{name:<12}{row['median_seconds']:>10.3f}{row['max_over_median']:>12.2f}{row['p99_over_median']:>12.2f}"
            f"{row['mean_overhead']:>+10.1%}{row['barrier_wait']:>13.4f}"
        )
    print(f"\nfigures: {given.out}")
    if given.sweep:
        _sweep(given.sweep, given.sweep_steps, given.out.with_name(given.out.stem + "-sweep.json"))


def _sweep(seeds: int, steps: int, out: Path) -> None:
    from scao_tools import runtime_sweep

    importlib.import_module("torch").set_num_threads(1)
    finals = runtime_sweep.sweep(
        range(seeds), steps, lambda f: print(f"F={f.every} D={f.delay} seed {f.seed}: {f.loss:.4f}", flush=True)
    )
    rows = runtime_sweep.table(finals)
    runs = [vars(final) for final in finals]
    out.write_text(json.dumps({"steps": steps, "table": rows, "runs": runs}, indent=2) + "\n")
    print(f"\n{'F':>4}{'D':>4}{'held-out loss':>16}{'over seeds':>13}{'minus D=0':>12}")
    for row in rows:
        print(
            f"{row['refresh_every']:>4}{row['refresh_delay']:>4}{row['loss']:>16.4f}{'±':>5}{row['deviation']:.4f}"
            f"{row['difference']:>+13.4f} ± {row['half_width']:.4f}"
        )
    print(f"\nfigures: {out}")


if __name__ == "__main__":
    raise SystemExit(main())
