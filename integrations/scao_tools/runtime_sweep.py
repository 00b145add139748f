"""What an older basis costs in loss: a small transformer trained with every refresh interval F and delay D, over several seeds.

The delay is the runtime's price: with ``runtime="thread"`` a basis is D steps older when it is installed. The bits do not
depend on the schedule that computes it, so the sweep uses the plain one.
"""

from __future__ import annotations

import functools
import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

INTERVALS = (5, 10, 20)
DELAYS = (0, 1, 3, 5)
LENGTH, BATCH, HELD_OUT, _ROWS = 64, 8, 64, 8192
# Two-sided 97.5 % points of Student's t for 1, 2, … degrees of freedom (any table of it).
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Final:
    """One run: interval, delay, seed and held-out loss (nats a byte)."""

    every: int
    delay: int
    seed: int
    loss: float


def grid() -> Iterator[tuple[int, int]]:
    """Every interval with every delay that it allows."""
    for every in INTERVALS:
        for delay in DELAYS:
            if delay < every:
                yield every, delay


def sweep(seeds: Sequence[int], steps: int, tell: Callable[[Final], None]) -> list[Final]:
    """All runs, seed by seed; ``tell`` hears each as it ends."""
    found = []
    for seed in seeds:
        for every, delay in grid():
            found.append(Final(every, delay, seed, train(every, delay, seed, steps)))
            tell(found[-1])
    return found


def train(every: int, delay: int, seed: int, steps: int) -> float:
    """The held-out loss of a byte-level Llama of half a million parameters, trained whole, with blocks of 80."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    from scao import SCAO

    torch.manual_seed(seed)
    sizes = {"hidden_size": 160, "intermediate_size": 320, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes)
    model = transformers.LlamaForCausalLM(config)
    # Little damping: what is trained from scratch wants it.
    options: dict[str, Any] = {"max_dense_dim": 64, "block_size": 96, "damping": 1e-3}
    optimizer = SCAO(model.parameters(), lr=2e-3, refresh_every=every, refresh_delay=delay, **options)
    windows, held_out = _windows(torch, seed)
    for t in range(min(steps, len(windows) // BATCH)):
        batch = windows[t * BATCH : (t + 1) * BATCH]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(model(input_ids=held_out, labels=held_out).loss)


@functools.lru_cache(maxsize=1)
def _windows(torch: Any, seed: int) -> tuple[Any, Any]:
    """Bytes of the standard library's sources: for training in an order of the seed's, and of other modules for the test."""
    from scao_tools.data.sources import load_data

    data = load_data("python-source", held_out=HELD_OUT, seed=0)

    def encoded(rows: Sequence[Any]) -> Any:
        texts = [row.text.encode()[:LENGTH].ljust(LENGTH) for row in rows]
        return torch.tensor([list(text) for text in texts])

    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed)).tolist()
    return encoded([data.train[i] for i in order[:_ROWS]]), encoded(data.held_out)


def table(finals: Sequence[Final]) -> list[dict[str, float]]:
    """For each interval and delay: mean and spread over seeds; the paired difference to delay 0, with its 95 % half width."""
    losses = {(f.every, f.delay, f.seed): f.loss for f in finals}
    seeds = sorted({f.seed for f in finals})
    rows = []
    for every, delay in grid():
        mine = [losses[every, delay, seed] for seed in seeds]
        differences = [losses[every, delay, seed] - losses[every, 0, seed] for seed in seeds]
        rows.append(
            {
                "refresh_every": every,
                "refresh_delay": delay,
                "loss": statistics.fmean(mine),
                "deviation": statistics.stdev(mine) if len(seeds) > 1 else 0.0,
                "difference": statistics.fmean(differences),
                "half_width": _half_width(differences),
            }
        )
    return rows


def _half_width(values: Sequence[float]) -> float:
    n = len(values)
    return _STUDENT[min(n - 2, len(_STUDENT) - 1)] * statistics.stdev(values) / n**0.5 if n > 1 else float("inf")
