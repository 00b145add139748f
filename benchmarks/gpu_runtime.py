"""What SCAO's runtimes and tiers do on a GPU, in one run of a few minutes: ``python benchmarks/gpu_runtime.py``.

1. Hazards: bases computed beside the training (``thread``, ``stream``; delays 0, 2 and 5) give the bits that the plain schedule
   gives at the same delay, while memory is allocated and freed all the time, on the default stream and on another one.
2. Tiers: with everything, half and nothing of the curvature on the device the bits are the same; the peak of the allocated
   memory and the median step, with copies beside the training and, for comparison, on its own stream.
3. Time: maximum and median of a training step by schedule, beside AdamW's.

The figures go to a JSON file; the exit code is 1 if any bits differ. ``--device cpu`` runs the same on a CPU, where only the
bits mean something.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import scao_core.runtime.copies as copies
from scao import SCAO

DELAYS = (0, 2, 5)
EVERY, LEAST_STEPS = 8, 16
PLACES = ("device", "host", "half", "host, one stream")


class Block(torch.nn.Module):
    """A residual block of two matrices: what matters here are its shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(torch.nn.functional.layer_norm(x, x.shape[-1:]))))


class Run:
    """A model that learns a fixed random map, with its optimizer."""

    def __init__(self, device: torch.device, width: int, layers: int, rows: int, optimizer: Any) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = torch.nn.Sequential(*(Block(width) for _ in range(layers))).to(device)
        self.optimizer = optimizer(self.model.parameters())
        generator = torch.Generator().manual_seed(1)
        self.batch = torch.randn(rows, width, generator=generator).to(device)
        self.target = torch.randn(rows, width, generator=generator).to(device)
        self.seconds: list[float] = []

    def step(self) -> None:
        """One training step, timed to its end on the device."""
        wait(self.device)
        start = time.perf_counter()
        loss = torch.nn.functional.mse_loss(self.model(self.batch), self.target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        wait(self.device)
        self.seconds.append(time.perf_counter() - start)

    def train(self, steps: int, churn: bool = False) -> list[Tensor]:
        """The parameters after some steps; ``churn`` allocates and frees memory of changing size between them."""
        for t in range(steps):
            self.step()
            if churn:
                for size in (2**10, 2**16, 2**20):
                    torch.full((size + 64 * t,), float(t), device=self.device)
        return [p.detach().cpu().clone() for p in self.model.parameters()]

    def end(self) -> None:
        """Stop the workers."""
        if isinstance(self.optimizer, SCAO):
            self.optimizer.close()


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def scao(**options: Any) -> Any:
    """A maker of optimizers."""
    return lambda params: SCAO(params, lr=1e-3, refresh_every=EVERY, **options)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether all bits are equal."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def hazards(device: torch.device, width: int, steps: int) -> dict[str, bool]:
    """For each schedule, delay and stream: whether the bits are those of the plain schedule."""
    found = {}
    for delay in DELAYS:
        plain = Run(device, width, 3, 64, scao(runtime="staggered", refresh_delay=delay))
        expected = plain.train(steps)
        for runtime in ("thread", "stream"):
            for own in (False, True):
                other = torch.cuda.Stream(device) if own and device.type == "cuda" else None
                with torch.cuda.stream(other) if other is not None else contextlib.nullcontext():
                    run = Run(device, width, 3, 64, scao(runtime=runtime, refresh_delay=delay))
                    got = run.train(steps, churn=True)
                run.end()
                found[f"{runtime}, delay {delay}{', own stream' if own else ''}"] = same(got, expected)
    return found


def tiers(device: torch.device, width: int, layers: int, steps: int) -> dict[str, dict[str, Any]]:
    """Bits, bytes and seconds with the curvature on the device, half of it, and none of it there."""
    rows: dict[str, dict[str, Any]] = {}
    expected: list[Tensor] = []
    for name in PLACES:
        budget = None if name == "device" else rows["host"]["tiers"]["host"] // 2 if name == "half" else 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        # For comparison: copies that wait for the training, and it for them.
        serial = mock.patch.object(copies, "side_stream", torch.cuda.current_stream) if "one stream" in name else None
        with serial or contextlib.nullcontext():
            run = Run(device, width, layers, 256, scao(memory_budget=budget))
            got = run.train(steps)
        expected = expected or got
        rows[name] = {
            "same_bits": same(got, expected),
            "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "median_seconds": statistics.median(run.seconds[steps // 3 :]),
            "tiers": dict(run.optimizer.report().last.tiers),
        }
        del run
    return rows


def times(device: torch.device, width: int, layers: int, steps: int) -> dict[str, dict[str, float]]:
    """Maximum and median of a training step by schedule; all take turns, step by step."""
    makers = {"adamw": lambda params: torch.optim.AdamW(params, lr=1e-3), "burst": scao(runtime="inline")}
    makers |= {name: scao(runtime=name) for name in ("staggered", "thread", "stream")}
    runs = {name: Run(device, width, layers, 1024, maker) for name, maker in makers.items()}
    for _ in range(steps):
        for run in runs.values():
            run.step()
    rows = {}
    for name, run in runs.items():
        measured = run.seconds[steps // 3 :]
        median = statistics.median(measured)
        rows[name] = {"median_seconds": median, "max_over_median": max(measured) / median}
        run.end()
    return rows


def main() -> int:
    """Run all three parts, print and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-runtime.json"))
    given = parser.parse_args()
    if given.device.split(":")[0] not in ("cuda", "cpu"):
        parser.error(f"--device must be cuda, cuda:N or cpu, got {given.device!r}")
    if given.width < 8 or given.layers < 1 or given.steps < LEAST_STEPS:
        parser.error(
            f"--width must be at least 8, --layers 1, and --steps {LEAST_STEPS}: fewer refresh nothing that is compared"
        )
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu runs the same checks on a CPU")
    figures = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "hazards": hazards(device, min(given.width, 256), given.steps),
        "tiers": tiers(device, given.width, given.layers, given.steps),
        "times": times(device, given.width, given.layers, given.steps),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    equal = all(figures["hazards"].values()) and all(row["same_bits"] for row in figures["tiers"].values())
    print(f"{'all bits are equal' if equal else 'BITS DIFFER'}; figures: {given.out}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
