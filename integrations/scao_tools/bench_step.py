"""``make bench-step``: the time of one optimizer step on the LoRA r=16 matrices of Qwen2.5-3B, on this machine.

All optimizers of a process take turns, step by step, on the same tensors, so a drift of the machine's speed hits all of them;
what counts is the ratio of medians to ``torch.optim.AdamW(foreach=True)``. Peers come from the package index into a folder of
their own, since one of them has our name, and run in a process each; the two second-order ones build a 2048 × 2048 factor per
matrix, so they are timed on fewer layers, against AdamW on the same layers.

Run as a script with ``--worker`` it needs torch and the optimizer only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

HIDDEN, KEY_VALUE, INTERMEDIATE, LAYERS, RANK = (
    2048,
    256,
    11008,
    36,
    16,
)  # Qwen2.5-3B's config.json; LoRA on all linear layers
# The first steps create state and warm caches, and SCAO turns its directions more often in its first 8: not timed.
WARMUP = 10
LINEAR = (
    (HIDDEN, HIDDEN),
    (HIDDEN, KEY_VALUE),
    (HIDDEN, KEY_VALUE),
    (HIDDEN, HIDDEN),
    (HIDDEN, INTERMEDIATE),
    (HIDDEN, INTERMEDIATE),
    (INTERMEDIATE, HIDDEN),
)
PEERS = {"pytorch-optimizer SOAP": "pytorch_optimizer==4.1.0", "older scao 0.2.4": "scao==0.2.4"}
Params = list[torch.nn.Parameter]


def lora_matrices(layers: int) -> Params:
    """A (16 × in) and B (out × 16) of every linear layer, with gradients of a LoRA run's size."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(layers):
        for fan_in, fan_out in LINEAR:
            for shape in ((RANK, fan_in), (fan_out, RANK)):
                param = torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.01)
                param.grad = torch.randn(shape, generator=generator) * 1e-4
                params.append(param)
    return params


def _scao(params: Params, **options: Any) -> torch.optim.Optimizer:
    from scao import SCAO

    return SCAO(params, lr=1e-5, **options)


def _soap(params: Params) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP  # type: ignore[import-not-found,unused-ignore]

    return SOAP(params, lr=1e-5)  # type: ignore[no-any-return,unused-ignore]


def _older_scao(params: Params) -> torch.optim.Optimizer:
    import scao

    # Its own warm-up is plain Adam: turn it off, so that what is timed is the preconditioner.
    return scao.SCAO(params, lr=1e-5, warmup_steps=0, blend_steps=1, precond_freq=10, async_precond=False)  # type: ignore[call-arg,unused-ignore]


FACTORIES: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "AdamW (foreach)": lambda params: torch.optim.AdamW(params, lr=1e-5, foreach=True),
    "AdamW (fused)": lambda params: torch.optim.AdamW(params, lr=1e-5, fused=True),
    "SCAO": _scao,
    "SCAO, bf16 momentum": lambda params: _scao(params, momentum_dtype="bfloat16"),
    "pytorch-optimizer SOAP": _soap,
    "older scao 0.2.4": _older_scao,
}
BASELINE = "AdamW (foreach)"


def measure(names: list[str], layers: int, steps: int, seconds: float) -> dict[str, dict[str, float]]:
    """Median and largest step in milliseconds, and bytes of state per parameter, for optimizers that take turns."""
    params = lora_matrices(layers)
    count = sum(p.numel() for p in params)
    optimizers = {name: FACTORIES[name](params) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.monotonic() + seconds
    for turn in range(steps + WARMUP):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            elapsed = time.perf_counter() - start
            if turn >= WARMUP:
                times[name].append(elapsed * 1e3)
        if time.monotonic() > end and turn >= WARMUP + 2:
            break
    return {
        name: {
            "median_ms": statistics.median(times[name]),
            "max_ms": max(times[name]),
            "steps": len(times[name]),
            "layers": layers,
            "bytes_per_param": _state_bytes(optimizers[name]) / count,
        }
        for name in names
    }


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [v for state in optimizer.state.values() for v in state.values()]
    tensors = [t for v in values for t in (v if isinstance(v, (list, tuple)) else [v]) if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def measure_peer(name: str, requirement: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]] | str:
    """The same in a process of its own, with the peer first on the path; a sentence where it could not be run."""
    # Not at the top: a worker finds torch and the peer, and not necessarily us.
    from scao_tools.errors import MissingPackageError
    from scao_tools.peer_packages import peer_folder

    try:
        folder = peer_folder(requirement)
    except MissingPackageError as error:
        return str(error)
    worker = [sys.executable, __file__, "--worker", name, "--layers", str(arguments.peer_layers)]
    worker += [
        "--steps",
        str(arguments.peer_steps),
        "--seconds",
        str(arguments.seconds),
        "--threads",
        str(arguments.threads),
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(
            worker, env=environment, capture_output=True, text=True, timeout=8 * arguments.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took more than {8 * arguments.seconds:.0f} s for a few steps on {arguments.peer_layers} layers"
    if done.returncode:
        return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
    result: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(name: str, result: dict[str, dict[str, float]]) -> str:
    """One line of the table."""
    own, base = result[name], result[BASELINE]
    return (
        f"{name:<24}{own['layers']:>7.0f}{own['median_ms']:>12.1f}{own['max_ms']:>11.1f}"
        f"{own['median_ms'] / base['median_ms']:>10.2f}{own['bytes_per_param']:>13.2f}"
    )


def main() -> None:
    """Print the table, or with ``--worker`` one process's figures as JSON."""
    parser = argparse.ArgumentParser(prog="make bench-step", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers for AdamW and SCAO")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each")
    parser.add_argument("--peer-layers", type=int, default=1)
    parser.add_argument("--peer-steps", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=60, help="stop timing after this long")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--worker", choices=list(PEERS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.worker:
        print(json.dumps(measure([BASELINE, arguments.worker], arguments.layers, arguments.steps, arguments.seconds)))
        return
    ours = [name for name in FACTORIES if name not in PEERS]
    count = sum(p.numel() for p in lora_matrices(arguments.layers))
    print(
        f"LoRA r=16 of Qwen2.5-3B, {14 * arguments.layers} matrices, {count:,} parameters; CPU, {arguments.threads} threads"
    )
    print(f"{'optimizer':<24}{'layers':>7}{'median ms':>12}{'max ms':>11}{'x AdamW':>10}{'bytes/param':>13}")
    result = measure(ours, arguments.layers, arguments.steps, arguments.seconds)
    for name in ours:
        print(row(name, result))
    for name, requirement in ({} if arguments.no_peers else PEERS).items():
        peer = measure_peer(name, requirement, arguments)
        print(f"{name:<24}{peer}" if isinstance(peer, str) else row(name, peer))


if __name__ == "__main__":
    main()
