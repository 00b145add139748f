"""The loss curves as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from scao_tools.checkpointing import write_atomically
from scao_tools.reporting import OptimizerRecord

# Okabe-Ito: told apart with any kind of color vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def smooth(points: Sequence[tuple[int, float]], span: int) -> list[tuple[int, float]]:
    """Mean over the last ``span`` finite losses, at each finite point."""
    finite = [point for point in points if math.isfinite(point[1])]
    result = []
    for index, (step, _) in enumerate(finite):
        window = [loss for _, loss in finite[max(0, index - span + 1) : index + 1]]
        result.append((step, sum(window) / len(window)))
    return result


def plot_losses(records: Sequence[OptimizerRecord], title: str, path: Path) -> None:
    """Draw smoothed training loss and held-out points of all optimizers into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot no window system is touched, whatever the user's matplotlib is set to.
    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for color, record in zip(COLORS * (1 + len(records) // len(COLORS)), records, strict=False):
        span = max(1, len(record.train) // 8)
        train = smooth(record.train, span)
        note = f", mean of {span} steps" if span > 1 else ""
        _draw(axes, train, f"{record.label}: training{note}", color=color, linewidth=1.2, alpha=0.45)
        held_out = [point for point in record.held_out if math.isfinite(point[1])]
        _draw(axes, held_out, f"{record.label}: held out", color=color, linewidth=1.8, marker="o", linestyle="--")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per answer token (nats)")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(frameon=False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))


def _draw(axes: object, points: Sequence[tuple[int, float]], label: str, **style: object) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)  # type: ignore[attr-defined]


def plot_schedules(figures: Mapping[str, Mapping[str, float]], title: str, path: Path) -> None:
    """Draw, for each refresh schedule, the spread of a training step and its mean over AdamW's into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    spread, overhead = figure.subplots(1, 2)
    places = range(len(figures))
    for shift, key, color in ((-0.2, "max_over_median", COLORS[1]), (0.2, "p99_over_median", COLORS[0])):
        values = [row[key] for row in figures.values()]
        spread.bar([x + shift for x in places], values, 0.4, color=color, label=key.replace("_over_", " / "))
    spread.set_ylim(bottom=1.0)
    spread.legend()
    overhead.bar(places, [100 * row["mean_overhead"] for row in figures.values()], color=COLORS[2])
    overhead.set_ylabel("mean step over AdamW's, %")
    for axes in (spread, overhead):
        axes.set_xticks(list(places), list(figures))
    write_atomically(path, lambda part: figure.savefig(part, format="png"))
