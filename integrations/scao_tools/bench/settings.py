"""The runs of one setting over its seeds, the settings of one variant over its learning rates, and their numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from scao_tools.bench.results import RunRecord, options_text
from scao_tools.optimizers import REGISTRY

_SAME_LR = 1e-6  # relative; grids are written in decimals, so 2 x 0.1 and 0.2 must match
_LATE = 3  # the last one in so many steps is late (chosen)
_NEIGHBOR = 1.1  # chosen: a learning rate nearer than this to the best one does not show what lies beyond it
# 97.5 % points of Student's t with 1 to 30 degrees of freedom; the test integrates the density.
_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448),
    *(2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484),
    *(2.0452, 2.0423),
)


def t_quantile(degrees: int) -> float:
    """The 97.5 % point of Student's t; the normal one beyond 30 degrees of freedom."""
    return _T[degrees - 1] if degrees <= len(_T) else 1.95996


@dataclass(frozen=True)
class Difference:
    """A mean of paired differences and its 95 % interval."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def separated(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def paired_difference(differences: Sequence[float]) -> Difference:
    """Mean and Student-t interval of at least two differences."""
    mean, count = statistics.fmean(differences), len(differences)
    half = t_quantile(count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return Difference(mean, mean - half, mean + half, count)


@dataclass(frozen=True)
class Reach:
    """Where a curve first comes to a target: ``steps`` is None where it does not, a bound where its start is there."""

    steps: float | None
    at_most: bool = False


def reach(points: Iterable[tuple[float, float]], target: float) -> Reach | None:
    """First crossing, linear between the points; None where nothing finite was measured."""
    before: tuple[float, float] | None = None
    for step, loss in points:
        if not math.isfinite(loss):
            continue
        if loss <= target:
            if before is None:
                return Reach(step, at_most=True)
            return Reach(before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss))
        before = (step, loss)
    return None if before is None else Reach(None)


@dataclass(frozen=True)
class Setting:
    """All seeds of one optimizer with the same options, learning rate, batch and steps, in the order of the seeds.

    ``disputed``: seeds on record more than once, with different losses.
    """

    runs: tuple[RunRecord, ...]
    disputed: tuple[int, ...] = ()

    @cached_property
    def name(self) -> str:
        """The optimizer and its options as printed."""
        return " ".join(filter(None, (label(self.optimizer), options_text(self.runs[0].options))))

    @property
    def optimizer(self) -> str:
        """The family."""
        return self.runs[0].optimizer

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.runs[0].lr

    @property
    def losses(self) -> dict[int, float]:
        """Final held-out loss by seed."""
        return {run.seed: run.heldout_loss for run in self.runs}

    @property
    def diverged(self) -> tuple[int, ...]:
        """Seeds without a finite final loss."""
        return tuple(run.seed for run in self.runs if run.diverged)

    @property
    def contradictory(self) -> tuple[int, ...]:
        """Seeds whose held-out curve does not end with their final loss."""
        kept = (run for run in self.runs if run.heldout_curve and not run.diverged)
        return tuple(run.seed for run in kept if run.heldout_curve[-1] != (run.steps, run.heldout_loss))

    @cached_property
    def mean(self) -> float:
        """Mean final held-out loss; a diverged seed counts as infinity."""
        return math.inf if self.diverged else statistics.fmean(self.losses.values())

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds."""
        return statistics.stdev(self.losses.values()) if len(self.runs) > 1 and not self.diverged else None

    @cached_property
    def curve(self) -> list[tuple[int, float, float, float]]:
        """(step, mean, lowest, highest) held-out loss wherever all seeds were evaluated and finite."""
        curves = [dict(run.heldout_curve) for run in self.runs]
        points = ((step, [curve[step] for curve in curves]) for step in sorted(set(curves[0]).intersection(*curves)))
        return [(s, statistics.fmean(x), min(x), max(x)) for s, x in points if all(map(math.isfinite, x))]

    def on(self, seeds: Collection[int]) -> Setting:
        """The same setting with only these of its seeds."""
        return Setting(tuple(run for run in self.runs if run.seed in seeds), self.disputed)

    def median(self, field: str) -> float:
        """Median over seeds of a field of the records."""
        return float(statistics.median(getattr(run, field) for run in self.runs))

    @property
    def bytes_per_parameter(self) -> float:
        """Optimizer state per trainable parameter."""
        return statistics.fmean(run.state_bytes / max(run.trainable, 1) for run in self.runs)

    @property
    def joules(self) -> float | None:
        """Mean energy; None unless every seed recorded it."""
        found = [run.energy_joules for run in self.runs if run.energy_joules is not None]
        return statistics.fmean(found) if len(found) == len(self.runs) else None

    def drop_per(self, cost: float | None) -> float | None:
        """Fall of the held-out loss from step 0 to the end, by a cost; None where one of them is not known."""
        if not cost or self.diverged or not self.curve or self.curve[0][0] != 0:
            return None
        return (self.curve[0][1] - self.mean) / cost


@dataclass(frozen=True)
class Variant:
    """An optimizer with one set of options: its settings by learning rate, ascending."""

    settings: tuple[Setting, ...]

    @cached_property
    def best(self) -> Setting:
        """The lowest mean loss; a diverged seed takes a setting out unless it took out all."""
        return best_of(self.settings)

    @property
    def at_edge(self) -> bool:
        """Whether a better learning rate may lie outside those tried."""
        rates, best = [setting.lr for setting in self.settings], self.best.lr
        lower = any(0 < lr * _NEIGHBOR <= best for lr in rates)
        return not (lower and any(best * _NEIGHBOR <= lr < math.inf for lr in rates))

    def at(self, lr: float) -> Setting | None:
        """The setting with this learning rate."""
        return next((setting for setting in self.settings if same_lr(setting.lr, lr)), None)


def best_of(settings: Sequence[Setting]) -> Setting:
    """The lowest mean loss, compared in pairs on the seeds that both have: one run with more seeds has no other chance."""

    def order(setting: Setting) -> tuple[int, int, float, float]:
        pairs = (common_seeds(other, setting) for other in settings)
        beaten = sum(1 for theirs, ours in pairs if ours.runs and theirs.mean < ours.mean)
        return len(setting.diverged), beaten, setting.mean, setting.lr

    return min(settings, key=order)


def same_lr(one: float, other: float) -> bool:
    """Whether two learning rates differ in no more than how they were written."""
    return math.isclose(one, other, rel_tol=_SAME_LR)


def label(optimizer: str) -> str:
    """How an optimizer is called in print."""
    return REGISTRY[optimizer].label if optimizer in REGISTRY else optimizer


def lr_text(lr: float) -> str:
    """``2e-3``: the form in which learning rates are compared by eye."""
    if not lr or not math.isfinite(lr):
        return f"{lr:g}"
    exponent = math.floor(math.log10(abs(lr)) + 1e-9)
    return f"{lr / 10.0**exponent:.4g}e{exponent}"


def count(number: int, noun: str) -> str:
    """``1 seed``, ``2 seeds``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def listed(items: Iterable[int]) -> str:
    """``0, 1, 2``."""
    return ", ".join(map(str, items))


def variants_of(runs: Iterable[RunRecord]) -> tuple[Variant, ...]:
    """Sort runs of the same batch and steps into variants, in alphabetical order; of equal seeds the first counts."""
    found: dict[tuple[str, str], list[RunRecord]] = {}
    for run in runs:
        found.setdefault((run.optimizer, options_text(run.options)), []).append(run)
    ordered = sorted(found.items(), key=lambda item: (label(item[0][0]).casefold(), item[0]))
    return tuple(Variant(_settings(same)) for _, same in ordered)


def _settings(runs: Iterable[RunRecord]) -> tuple[Setting, ...]:
    """The settings of one variant by learning rate, ascending."""
    by_lr: list[dict[int, list[RunRecord]]] = []
    lowest = math.nan
    for run in sorted(runs, key=lambda run: (math.isnan(run.lr), run.lr)):
        if not same_lr(run.lr, lowest):
            by_lr.append({})
            lowest = run.lr
        by_lr[-1].setdefault(run.seed, []).append(run)
    return tuple(_setting([seeds[seed] for seed in sorted(seeds)]) for seeds in by_lr)


def _setting(repeats: Sequence[Sequence[RunRecord]]) -> Setting:
    # As text, since no NaN is equal to another one.
    disputed = (same[0].seed for same in repeats if len({repr(run.heldout_loss) for run in same}) > 1)
    return Setting(tuple(same[0] for same in repeats), tuple(disputed))


def common_seeds(one: Setting, other: Setting) -> tuple[Setting, Setting]:
    """Both with only the seeds that both have: what may be compared."""
    return one.on(other.losses), other.on(one.losses)


def same_schedule(setting: Setting, target: float) -> Reach | None:
    """The step at which a setting's held-out curve comes to the target."""
    return reach(((step, mean) for step, mean, _, _ in setting.curve), target)


def same_machine(*settings: Setting) -> bool:
    """Whether times, energy and memory of all these runs may be compared."""
    return len({(run.device, run.threads) for setting in settings for run in setting.runs}) < 2


def relative_drop(setting: Setting, baseline: Setting, *, joules: bool) -> float | None:
    """Loss drop by CPU-second (or joule) over the baseline's; None where it is not known or not comparable."""
    costs = [one.joules if joules else statistics.fmean(r.cpu_seconds for r in one.runs) for one in (setting, baseline)]
    mine, theirs = setting.drop_per(costs[0]), baseline.drop_per(costs[1])
    if mine is None or theirs is None or theirs <= 0 or not same_machine(setting, baseline):
        return None
    return mine / theirs


def late_difference(subject: Setting, against: Setting) -> Difference | None:
    """The paired difference on the training batches of the last third of the steps, of two settings with the same seeds.

    None where a curve is missing, of another length, or not finite.
    """
    mine, theirs = ({run.seed: run.train_curve for run in one.runs} for one in (subject, against))
    pairs = [(mine[seed], theirs[seed]) for seed in sorted(mine)]
    if any(len(a) != len(b) or len(a) < _LATE for a, b in pairs):
        return None
    differences = [
        statistics.fmean(a[-(len(a) // _LATE) :]) - statistics.fmean(b[-(len(b) // _LATE) :]) for a, b in pairs
    ]
    return paired_difference(differences) if all(map(math.isfinite, differences)) else None
