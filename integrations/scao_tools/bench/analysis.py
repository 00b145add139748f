"""What the runs of ``results.jsonl`` say, and what they must not be used to say. Pure: no files, no pictures.

A `Group` is the comparing runs of one workload at one batch size; `Group.refusals` says why it has no ranking, and
`Comparison.refusal` why one optimizer is left out of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from scao_tools.bench.fairness import MIN_SEEDS, misjudged, seedless, unpaired
from scao_tools.bench.results import RunRecord, options_text
from scao_tools.bench.settings import (
    Difference,
    Reach,
    Setting,
    Variant,
    best_of,
    common_seeds,
    count,
    label,
    late_difference,
    listed,
    lr_text,
    paired_difference,
    reach,
    same_lr,
    variants_of,
)

BASELINE, SECOND, SUBJECT = "adamw", "loraplus", "scao"


@dataclass(frozen=True)
class Comparison:
    """One setting against a tuned baseline: a difference, or the reason why there is none."""

    subject: Setting
    against: Setting
    carried: bool
    difference: Difference | None
    refusal: str

    @cached_property
    def paired(self) -> tuple[Setting, Setting]:
        """Both with only the seeds that are in the difference."""
        return common_seeds(self.subject, self.against)

    @cached_property
    def fresh(self) -> Difference | None:
        """The paired difference on the training batches of the last third of the steps, each measured before its update.

        They are examples that the run has not seen, of the groups that it trains on; the held-out ones are of other groups.
        """
        return None if self.difference is None else late_difference(*self.paired)


@dataclass(frozen=True)
class Group:
    """The comparing runs of one workload and batch; everything is judged at ``steps``, other horizons are extra.

    ``screened``: how many settings of each optimizer were tried on this workload before.
    """

    workload: str
    batch: int
    runs: tuple[RunRecord, ...]
    screened: Mapping[str, int] = field(default_factory=dict)

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
        best = best_of([variant.best for variant in found]) if found else None
        return next((variant for variant in found if variant.best is best), None)

    @cached_property
    def families(self) -> tuple[Variant, ...]:
        """The best variant of each family, in alphabetical order."""
        return tuple(variant for variant in self.variants if self.family(variant.best.optimizer) is variant)

    def trials(self, optimizer: str, *, all_horizons: bool = False) -> int:
        """Distinct (options, learning rate) pairs of a family."""
        runs = (run for run in self.runs if run.optimizer == optimizer)
        return trials(run for run in runs if all_horizons or run.steps == self.steps)

    @cached_property
    def refusals(self) -> tuple[str, ...]:
        """Why nothing in this group may be ranked; empty where it may."""
        reasons = self._untuned(BASELINE)
        digests = {run.workload_digest for run in self.runs if run.steps == self.steps}
        if len(digests) > 1:
            differing = "model, data, schedule, number format or kind of device"
            reasons.append(f"the runs come from {len(digests)} versions of the workload ({differing})")
        for setting in (setting for variant in self.variants for setting in variant.settings):
            where = f"{setting.name} with learning rate {lr_text(setting.lr)}"
            if setting.disputed:
                reasons.append(f"{where} is on record with several losses at seed {listed(setting.disputed)}")
            if setting.contradictory:
                seeds = listed(setting.contradictory)
                reasons.append(f"the held-out curve of {where} does not end with its final loss at seed {seeds}")
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
        reasons = self._untuned(against.best.optimizer)
        for everywhere in (False, True):
            mine, theirs = (self.trials(s.optimizer, all_horizons=everywhere) for s in (subject, against.best))
            if mine > theirs:
                where = ", counted over all numbers of steps" if everywhere else ""
                reasons.append(f"it had {mine} trials, {label(against.best.optimizer)} only {theirs}{where}")
                break
        reasons += unpaired(subject, against.best)
        difference = None
        if not reasons:
            ours, theirs_by_seed = subject.losses, against.best.losses
            common = sorted(ours.keys() & theirs_by_seed.keys())
            difference = paired_difference([ours[seed] - theirs_by_seed[seed] for seed in common])
        return Comparison(subject, against.best, carried, difference, "; ".join(reasons))

    def _untuned(self, name: str) -> list[str]:
        """Why a baseline is none."""
        variant = self.family(name)
        if variant is None:
            return [f"there are no {label(name)} runs at {self.steps} steps"]
        best, reasons = variant.best, []
        if best.diverged:
            return [f"every {label(name)} setting has a diverged seed"]
        if variant.at_edge:
            tried = [lr_text(setting.lr) for setting in variant.settings]
            span = f"tried, {tried[0]} to {tried[-1]}" if len(tried) > 1 else "tried: it is the only one"
            reasons.append(f"the best learning rate of {best.name}, {lr_text(best.lr)}, is at the edge of those {span}")
        if len(best.runs) < MIN_SEEDS:
            seeds = count(len(best.runs), "seed")
            reasons.append(f"{best.name} has {seeds} at its best setting, {MIN_SEEDS} are needed")
        elif seedless(best):
            reasons.append(f"{best.name} has the same loss with every seed")
        family = (other for other in self.variants if other.best.optimizer == name)
        rivals = (setting for other in family for setting in other.settings if setting is not best)
        return reasons + [reason for rival in rivals if (reason := misjudged(rival, best))][:1]

    def horizons(self, setting: Setting) -> list[Setting]:
        """The same optimizer, options, learning rate, workload and seeds at every number of steps, ascending."""
        first = setting.runs[0]
        key = (first.optimizer, options_text(first.options), first.workload_digest)
        found: dict[int, list[RunRecord]] = {}
        for run in self.runs:
            if (run.optimizer, options_text(run.options), run.workload_digest) == key and same_lr(run.lr, first.lr):
                found.setdefault(run.steps, []).append(run)
        seeds = setting.losses.keys()
        settings = (variants_of(runs)[0].settings[0] for _, runs in sorted(found.items()))
        return [one.on(seeds) for one in settings if seeds <= one.losses.keys() and not one.disputed]

    def baseline_needs(self, subject: Setting) -> Reach | None:
        """The horizon at which tuned AdamW comes to the subject's loss, where several were run with enough seeds."""
        baseline = self.family(BASELINE)
        if baseline is None:
            return None
        theirs, ours = common_seeds(baseline.best, subject)
        return self.own_schedule(theirs, ours.mean) if len(theirs.runs) >= MIN_SEEDS else None

    def own_schedule(self, setting: Setting, target: float) -> Reach | None:
        """The horizon at which a setting's final loss is at the target, where several were run."""
        horizons = [(float(other.runs[0].steps), other.mean) for other in self.horizons(setting)]
        return reach(horizons, target) if len(horizons) > 1 else None


def trials(runs: Iterable[RunRecord]) -> int:
    """Distinct settings, whatever their batch and steps."""
    return sum(len(variant.settings) for variant in variants_of(runs))


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
        best = best_of(adamw) if adamw else None
        rows += [Screened(s, _mean_difference(s, best)) for variant in variants for s in variant.settings]
    return rows


def _mean_difference(setting: Setting, best: Setting | None) -> float | None:
    ours, theirs = setting.losses, {} if best is None else best.losses
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    return statistics.fmean(differences) if differences and all(map(math.isfinite, differences)) else None


def groups(records: Sequence[RunRecord]) -> list[Group]:
    """The comparing runs by workload and batch."""
    found: dict[tuple[str, int], list[RunRecord]] = {}
    screened: dict[str, dict[str, list[RunRecord]]] = {}
    for run in records:
        if run.stage == "compare":
            found.setdefault((run.workload, run.batch), []).append(run)
        else:
            screened.setdefault(run.workload, {}).setdefault(run.optimizer, []).append(run)
    before = {name: {one: trials(runs) for one, runs in tried.items()} for name, tried in screened.items()}
    return [Group(name, batch, tuple(runs), before.get(name, {})) for (name, batch), runs in sorted(found.items())]
