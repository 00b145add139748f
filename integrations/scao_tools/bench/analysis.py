"""What the runs of ``results.jsonl`` say, and what they must not be used to say. Pure: no files, no pictures.

A `Group` is the comparing runs of one workload at one batch size; `Group.refusals` says why it has no ranking, and
`Comparison.refusal` why one optimizer is left out of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from scao_tools.bench.results import RunRecord, options_text
from scao_tools.optimizers import REGISTRY

BASELINE, SECOND, SUBJECT = "adamw", "loraplus", "scao"
MIN_SEEDS = 3  # chosen: with two, the t quantile is 12.7 and the interval says nothing
_SAME_LR = 1e-6  # relative; grids are written in decimals, so 2 x 0.1 and 0.2 must match
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
    """All seeds of one optimizer with the same options, learning rate, batch and steps, in the order of the seeds."""

    runs: tuple[RunRecord, ...]

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
        return min(self.settings, key=lambda setting: (setting.mean, len(setting.diverged), setting.lr))

    @property
    def at_edge(self) -> bool:
        """Whether a better learning rate may lie outside those tried."""
        return self.best is self.settings[0] or self.best is self.settings[-1]

    def at(self, lr: float) -> Setting | None:
        """The setting with this learning rate."""
        return next((s for s in self.settings if math.isclose(s.lr, lr, rel_tol=_SAME_LR)), None)


@dataclass(frozen=True)
class Comparison:
    """One setting against a tuned baseline: a difference, or the reason why there is none."""

    subject: Setting
    against: Setting
    carried: bool
    difference: Difference | None
    refusal: str


def label(optimizer: str) -> str:
    """How an optimizer is called in print."""
    return REGISTRY[optimizer].label if optimizer in REGISTRY else optimizer


def lr_text(lr: float) -> str:
    """``2e-3``: the form in which learning rates are compared by eye."""
    if not lr or not math.isfinite(lr):
        return f"{lr:g}"
    exponent = math.floor(math.log10(abs(lr)) + 1e-9)
    return f"{lr / 10.0**exponent:.4g}e{exponent}"


def variants_of(runs: Iterable[RunRecord]) -> tuple[Variant, ...]:
    """Sort runs of the same batch and steps into variants, in alphabetical order; of equal seeds the first counts."""
    found: dict[tuple[str, str], dict[float, dict[int, RunRecord]]] = {}
    for run in runs:
        by_lr = found.setdefault((run.optimizer, options_text(run.options)), {})
        by_lr.setdefault(run.lr, {}).setdefault(run.seed, run)
    ordered = sorted(found.items(), key=lambda item: (label(item[0][0]).casefold(), item[0]))
    return tuple(
        Variant(tuple(Setting(tuple(seeds[seed] for seed in sorted(seeds))) for _, seeds in sorted(by_lr.items())))
        for _, by_lr in ordered
    )


@dataclass(frozen=True)
class Group:
    """The comparing runs of one workload and batch; everything is judged at ``steps``, other horizons are extra."""

    workload: str
    batch: int
    runs: tuple[RunRecord, ...]
    screened: frozenset[str] = frozenset()

    @cached_property
    def steps(self) -> int:
        """The horizon at which the baseline and most optimizers were run; of equals the longest."""
        families: dict[int, set[str]] = {}
        for run in self.runs:
            families.setdefault(run.steps, set()).add(run.optimizer)
        return max(families, key=lambda steps: (BASELINE in families[steps], len(families[steps]), steps))

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """All variants at `steps`, in alphabetical order."""
        return variants_of(run for run in self.runs if run.steps == self.steps)

    def family(self, optimizer: str) -> Variant | None:
        """The best variant of a family."""
        found = [variant for variant in self.variants if variant.best.optimizer == optimizer]
        return min(found, key=lambda variant: variant.best.mean, default=None)

    @cached_property
    def families(self) -> tuple[Variant, ...]:
        """The best variant of each family, in alphabetical order."""
        return tuple(variant for variant in self.variants if self.family(variant.best.optimizer) is variant)

    def trials(self, optimizer: str, *, all_horizons: bool = False) -> int:
        """Distinct (options, learning rate) pairs of a family."""
        runs = (run for run in self.runs if run.optimizer == optimizer)
        return len({run.setting for run in runs if all_horizons or run.steps == self.steps})

    @cached_property
    def refusals(self) -> tuple[str, ...]:
        """Why nothing in this group may be ranked; empty where it may."""
        reasons = _untuned(self.family(BASELINE), BASELINE, self.steps)
        digests = {run.workload_digest for run in self.runs if run.steps == self.steps}
        if len(digests) > 1:
            differing = "model, data, schedule, number format or kind of device"
            reasons.append(f"the runs come from {len(digests)} versions of the workload ({differing})")
        return tuple(reasons)

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Each variant against tuned AdamW; SCAO also at that learning rate, and both again for LoRA+."""
        baseline = self.family(BASELINE)
        if self.refusals or baseline is None:
            return ()
        others = [variant for variant in self.variants if variant is not baseline]
        made = [self._compare(variant.best, baseline, carried=False) for variant in others]
        subject, second = self.family(SUBJECT), self.family(SECOND)
        if subject is None:
            return tuple(made)
        if second is not None:
            made.append(self._compare(subject.best, second, carried=False))
        for against in filter(None, (baseline, second)):
            setting = subject.at(against.best.lr)
            if setting is not None:
                made.append(self._compare(setting, against, carried=True))
        return tuple(made)

    def against_baseline(self, variant: Variant) -> Comparison | None:
        """The variant at its best against tuned AdamW."""
        pairs = (pair for pair in self.comparisons if pair.subject is variant.best and not pair.carried)
        return next((pair for pair in pairs if pair.against.optimizer == BASELINE), None)

    def _compare(self, subject: Setting, against: Variant, *, carried: bool) -> Comparison:
        reasons = _untuned(against, against.best.optimizer, self.steps)
        for everywhere in (False, True):
            mine, theirs = (self.trials(s.optimizer, all_horizons=everywhere) for s in (subject, against.best))
            if mine > theirs:
                where = ", counted over all numbers of steps" if everywhere else ""
                reasons.append(f"it had {mine} trials, {label(against.best.optimizer)} only {theirs}{where}")
                break
        reasons += _unpaired(subject, against.best)
        difference = None
        if not reasons:
            ours, theirs_by_seed = subject.losses, against.best.losses
            common = sorted(ours.keys() & theirs_by_seed.keys())
            difference = paired_difference([ours[seed] - theirs_by_seed[seed] for seed in common])
        return Comparison(subject, against.best, carried, difference, "; ".join(reasons))

    def horizons(self, setting: Setting) -> list[Setting]:
        """The same optimizer, options, learning rate and workload at every number of steps, ascending."""
        first = setting.runs[0]
        found: dict[int, dict[int, RunRecord]] = {}
        for run in self.runs:
            same = (run.optimizer, run.setting, run.workload_digest)
            if same == (first.optimizer, first.setting, first.workload_digest):
                found.setdefault(run.steps, {}).setdefault(run.seed, run)
        return [Setting(tuple(seeds[seed] for seed in sorted(seeds))) for _, seeds in sorted(found.items())]

    def baseline_needs(self, subject: Setting) -> Reach | None:
        """The horizon at which tuned AdamW comes to the subject's loss, where several were run."""
        baseline = self.family(BASELINE)
        return None if baseline is None else self.own_schedule(baseline.best, subject.mean)

    def own_schedule(self, setting: Setting, target: float) -> Reach | None:
        """The horizon at which a setting's final loss is at the target, where several were run."""
        horizons = [(float(other.runs[0].steps), other.mean) for other in self.horizons(setting)]
        return reach(horizons, target) if len(horizons) > 1 else None


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


def count(number: int, noun: str) -> str:
    """``1 seed``, ``2 seeds``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _untuned(variant: Variant | None, name: str, steps: int) -> list[str]:
    """Why a baseline is none."""
    if variant is None:
        return [f"there are no {label(name)} runs at {steps} steps"]
    best, reasons = variant.best, []
    if best.diverged:
        return [f"every {label(name)} setting has a diverged seed"]
    if variant.at_edge:
        tried = [lr_text(setting.lr) for setting in variant.settings]
        span = f"tried, {tried[0]} to {tried[-1]}" if len(tried) > 1 else "tried: it is the only one"
        reasons.append(f"the best learning rate of {best.name}, {lr_text(best.lr)}, is at the edge of those {span}")
    if len(best.runs) < MIN_SEEDS:
        reasons.append(f"{best.name} has {count(len(best.runs), 'seed')} at its best setting, {MIN_SEEDS} are needed")
    return reasons


def _unpaired(subject: Setting, against: Setting) -> list[str]:
    """Why two settings cannot be compared seed by seed."""
    if subject.diverged:
        return [f"it diverged with {'seed' if len(subject.diverged) == 1 else 'seeds'} {_listed(subject.diverged)}"]
    if len(subject.runs) < MIN_SEEDS:
        return [f"it has {count(len(subject.runs), 'seed')} at this setting, {MIN_SEEDS} are needed"]
    tokens = [{run.seed: run.label_tokens for run in setting.runs} for setting in (subject, against)]
    common = tokens[0].keys() & tokens[1].keys()
    if len(common) < MIN_SEEDS:
        return [f"it shares {count(len(common), 'seed')} with {label(against.optimizer)}, {MIN_SEEDS} are needed"]
    mixed = sorted(seed for seed in common if tokens[0][seed] != tokens[1][seed])
    return [f"its runs saw another number of label tokens at seed {_listed(mixed)}"] if mixed else []


def _listed(items: Iterable[int]) -> str:
    return ", ".join(map(str, items))


def notes(group: Group) -> list[str]:
    """What a reader must know beside the numbers."""
    said = []
    for name in sorted({run.optimizer for run in group.runs}, key=lambda name: label(name).casefold()):
        variant = group.family(name)
        if variant is None:
            steps = _listed(sorted({run.steps for run in group.runs if run.optimizer == name}))
            said.append(f"{label(name)} was run with {steps} steps, not {group.steps}: its losses are not compared.")
        elif name != BASELINE and variant.at_edge:
            said.append(
                f"The best learning rate of {variant.best.name}, {lr_text(variant.best.lr)}, is at the edge of those "
                "tried; a better one may lie outside, so this can only have hurt it."
            )
        if name != BASELINE and name in group.screened:
            said.append(
                f"The setting of {label(name)} was chosen on this workload by screening, so its result here is "
                "optimistic."
            )
    for setting in (setting for variant in group.variants for setting in variant.settings if setting.diverged):
        said.append(
            f"{setting.name} with learning rate {lr_text(setting.lr)} diverged at seed {_listed(setting.diverged)}: it "
            "counts as an infinite loss, so it is best only where every setting diverged."
        )
    if not same_machine(*(variant.best for variant in group.variants)):
        machines = sorted(
            {f"{r.device} with {count(r.threads, 'thread')}" for v in group.variants for r in v.best.runs}
        )
        said.append(f"Times, energy and peak memory are not compared: the runs were made on {' and '.join(machines)}.")
    return said


@dataclass(frozen=True)
class Screened:
    """A screening setting and its difference to AdamW's best on the seeds that both have."""

    setting: Setting
    difference: float | None


def screening(runs: Iterable[RunRecord]) -> list[Screened]:
    """The runs that chose settings, by workload, batch and steps, then alphabetically."""
    found: dict[tuple[str, int, int, str], list[RunRecord]] = {}
    for run in runs:
        found.setdefault((run.workload, run.batch, run.steps, run.workload_digest), []).append(run)
    rows = []
    for _, same in sorted(found.items()):
        variants = variants_of(same)
        adamw = [variant.best for variant in variants if variant.best.optimizer == BASELINE]
        best = min(adamw, key=lambda setting: setting.mean, default=None)
        rows += [Screened(s, _mean_difference(s, best)) for variant in variants for s in variant.settings]
    return rows


def _mean_difference(setting: Setting, best: Setting | None) -> float | None:
    ours, theirs = setting.losses, {} if best is None else best.losses
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    return statistics.fmean(differences) if differences and all(map(math.isfinite, differences)) else None


def groups(records: Iterable[RunRecord]) -> list[Group]:
    """The comparing runs by workload and batch."""
    found: dict[tuple[str, int], list[RunRecord]] = {}
    screened: dict[str, set[str]] = {}
    for run in records:
        if run.stage == "compare":
            found.setdefault((run.workload, run.batch), []).append(run)
        else:
            screened.setdefault(run.workload, set()).add(run.optimizer)
    return [
        Group(workload, batch, tuple(runs), frozenset(screened.get(workload, ())))
        for (workload, batch), runs in sorted(found.items())
    ]
