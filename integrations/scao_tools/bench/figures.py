"""The pictures of a report, as PNG bytes: the same runs give the same picture."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from scao_tools.bench.analysis import BASELINE, SUBJECT, Comparison, Group
from scao_tools.bench.settings import Setting, Variant, label, lr_text, same_machine
from scao_tools.plotting import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vP"  # tell apart what is beyond the colors
_WARMUP = 0.1  # chosen: the fall in the first tenth would flatten what the optimizers differ in
_CURVES_CAPTION = (
    "Held-out loss of each optimizer at its best setting: mean over seeds, band from the lowest to the highest seed. "
    "Seconds are those of training, evaluations left out, spread evenly over the steps. Where the loss falls far in the "
    "first tenth of the steps, that part lies above the top edge."
)
_LR_CAPTION = (
    "Final held-out loss against the learning rate, mean over seeds. Star: best; ring: half and twice the best; "
    "cross at the top edge: a seed diverged."
)
_FOREST_CAPTION = "Paired differences in final held-out loss with 95 % intervals; left of zero is a lower loss."
_COSTS_CAPTION = "Optimizer state per trainable parameter, and the median step, of each variant at its best setting."
Styles = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Picture:
    """One PNG, drawn when it is asked for. ``kind`` is a word for its file name."""

    kind: str
    caption: str
    draw: Callable[[], bytes]

    @cached_property
    def png(self) -> bytes:
        """The file's bytes."""
        return self.draw()


def styles(optimizers: Iterable[str]) -> Styles:
    """A color and a marker for each optimizer, the same in all pictures of a report."""
    names = sorted(set(optimizers), key=lambda name: (name != BASELINE, name != SUBJECT, name))
    return {
        name: (COLORS[index % len(COLORS)], _MARKERS[(index // len(COLORS) + index) % len(_MARKERS)])
        for index, name in enumerate(names)
    }


def pictures(group: Group, styles: Styles) -> list[Picture]:
    """All pictures of a group; those that would compare what must not be compared are left out."""
    made = [
        Picture("curves", _CURVES_CAPTION, partial(_curves, group, styles)),
        Picture("learning-rates", _LR_CAPTION, partial(_learning_rates, group, styles)),
    ]
    pairs = [pair for pair in group.comparisons if pair.difference is not None]
    if pairs:
        made.append(Picture("differences", _FOREST_CAPTION, partial(_forest, pairs, styles, _title(group))))
    made.append(Picture("costs", _COSTS_CAPTION, partial(_costs, group, styles)))
    return made


def _text(text: str) -> str:
    # A pair of dollar signs in a name would be read as a formula.
    return text.replace("$", r"\$")


def _render(size: tuple[float, float], panels: Sequence[Callable[[Axes], None]], title: str) -> bytes:
    import warnings

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot no window system is touched, whatever the user's matplotlib is set to.
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
        axes.grid(alpha=0.25)
    figure.suptitle(_text(title), fontsize="medium")
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names in scripts that the font lacks become boxes
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _title(group: Group) -> str:
    return f"{group.workload}, batch {group.batch}, {group.steps} steps"


def _curves(group: Group, styles: Styles) -> bytes:
    best = [variant.best for variant in group.families]

    def over_steps(axes: Axes) -> None:
        _draw_curves(axes, best, styles, lambda setting: 1.0)
        axes.set_xlabel("steps")
        axes.set_ylabel("held-out loss (nats per label token)")
        _legend(axes)

    def over_seconds(axes: Axes) -> None:
        _draw_curves(axes, best, styles, _mean_step_seconds)
        axes.set_xlabel("training time (s)")

    comparable = same_machine(*best)
    panels = [over_steps, over_seconds] if comparable else [over_steps]
    return _render((9.0 if comparable else 5.5, 4.2), panels, _title(group))


def _mean_step_seconds(setting: Setting) -> float:
    return statistics.fmean(run.seconds / max(run.steps, 1) for run in setting.runs)


def _draw_curves(axes: Axes, best: Sequence[Setting], styles: Styles, unit: Callable[[Setting], float]) -> None:
    late: list[float] = []
    for setting in best:
        if not setting.curve:
            continue
        steps, mean, low, high = zip(*setting.curve, strict=True)
        places = [step * unit(setting) for step in steps]
        color, marker = styles[setting.optimizer]
        axes.plot(places, mean, color=color, marker=marker, markersize=4, linewidth=1.6, label=_text(setting.name))
        axes.fill_between(places, low, high, color=color, alpha=0.18, linewidth=0)
        late += [value for step, value in zip(steps, high, strict=True) if step >= _WARMUP * steps[-1]]
    if late and math.isfinite(top := max(late)):
        bottom = axes.get_ylim()[0]
        if top > bottom:
            axes.set_ylim(bottom, top + 0.05 * (top - bottom))


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small")


def _learning_rates(group: Group, styles: Styles) -> bytes:
    def panel(axes: Axes) -> None:
        axes.set_xscale("log")
        rates = sorted({setting.lr for variant in group.families for setting in variant.settings if setting.lr > 0})
        if rates:
            axes.set_xticks(rates, list(map(lr_text, rates)), rotation=45)
            axes.set_xticks([], minor=True)
            axes.set_xlim(min(rates) / 1.5, max(rates) * 1.5)
        for variant in group.families:
            _draw_rates(axes, variant, *styles[variant.best.optimizer])
        axes.set_xlabel("learning rate")
        axes.set_ylabel("final held-out loss (nats per label token)")
        _legend(axes)

    return _render((6.5, 4.2), [panel], _title(group))


def _draw_rates(axes: Axes, variant: Variant, color: str, marker: str) -> None:
    name, best = _text(variant.best.name), variant.best
    finite = [setting for setting in variant.settings if math.isfinite(setting.mean)]
    if finite:
        rates, means = [setting.lr for setting in finite], [setting.mean for setting in finite]
        axes.plot(rates, means, color=color, marker=marker, markersize=4, linewidth=1.6, label=name)
        axes.plot([best.lr], [best.mean], color=color, marker="*", markersize=14, linestyle="none")
    near = [s for s in (variant.at(best.lr / 2), variant.at(best.lr * 2)) if s is not None and s in finite]
    x, y = [s.lr for s in near], [s.mean for s in near]
    axes.plot(x, y, color=color, marker="o", markersize=11, markerfacecolor="none", linestyle="none")
    lost = [setting.lr for setting in variant.settings if setting not in finite]
    axes.plot(lost, [0.98] * len(lost), color=color, marker="x", linestyle="none", transform=axes.get_xaxis_transform())


def _forest(pairs: Sequence[Comparison], styles: Styles, title: str) -> bytes:
    def panel(axes: Axes) -> None:
        for place, pair in enumerate(reversed(pairs)):
            if (found := pair.difference) is None:  # refused: its place stays empty
                continue
            mean, low, high = found.mean, found.low, found.high
            color, marker = styles[pair.subject.optimizer]
            error = [[mean - low], [high - mean]]
            axes.errorbar([mean], [place], xerr=error, color=color, marker=marker, capsize=4, linewidth=1.6)
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(pairs)), [_text(_pair_name(pair)) for pair in reversed(pairs)])
        axes.set_ylim(-0.6, len(pairs) - 0.4)
        axes.set_xlabel("difference in held-out loss (nats per label token)")

    return _render((7.5, 1.3 + 0.45 * len(pairs)), [panel], title)


def _pair_name(pair: Comparison) -> str:
    where = f", at its lr {lr_text(pair.subject.lr)}" if pair.carried else ""
    return f"{pair.subject.name} − {label(pair.against.optimizer)}{where}"


def _costs(group: Group, styles: Styles) -> bytes:
    best = [variant.best for variant in reversed(group.variants)]
    names, colors = [_text(setting.name) for setting in best], [styles[setting.optimizer][0] for setting in best]
    places = range(len(best))

    def state(axes: Axes) -> None:
        axes.barh(places, [setting.bytes_per_parameter for setting in best], color=colors)
        axes.set_yticks(places, names)
        axes.set_xlabel("optimizer state (bytes per trainable parameter)")

    def times(axes: Axes) -> None:
        optimizer = [setting.median("optimizer_ms") for setting in best]
        rest = [max(0.0, 1e3 * s.median("step_seconds") - ms) for s, ms in zip(best, optimizer, strict=True)]
        axes.barh(places, optimizer, color=colors)
        axes.barh(places, rest, left=optimizer, color="#BBBBBB")
        axes.set_yticks(places, [""] * len(best))
        axes.set_xlabel("median step (ms): optimizer in color, the rest gray")

    panels = [state, times] if same_machine(*best) else [state]
    return _render((11.0 if len(panels) > 1 else 6.5, 1.4 + 0.4 * len(best)), panels, _title(group))
