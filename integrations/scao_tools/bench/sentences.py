"""What a report says in words: who had the lower loss, who is not compared, and what to know beside the numbers."""

from __future__ import annotations

import math

from scao_tools.bench.analysis import BASELINE, SECOND, SUBJECT, Comparison, Group
from scao_tools.bench.settings import (
    Difference,
    Reach,
    Setting,
    Variant,
    count,
    label,
    listed,
    lr_text,
    same_machine,
    same_schedule,
)

NONE = "—"


def ranking_line(group: Group) -> str:
    """What the rows of a group's tables are ordered by, or why there is no ranking."""
    if group.refusals:
        return f"No ranking: {'; '.join(group.refusals)}. Rows are in alphabetical order."
    return (
        f"Judged at {group.steps} steps. Rows are in the order of the paired difference to tuned {label(BASELINE)}; "
        "optimizers that are not ranked follow in alphabetical order."
    )


def verdicts(group: Group) -> list[str]:
    """Who had the lower loss, who had not, and what is not compared; nothing where there is no ranking."""
    best = [variant.best for variant in group.families]
    # Of a family's other options only the refusals: their table rows say the rest.
    pairs = [p for p in group.comparisons if p.carried or p.refusal or any(p.subject is setting for setting in best)]
    said = [_verdict(pair) for pair in sorted(pairs, key=lambda pair: pair.subject.optimizer != SUBJECT)]
    subject = group.family(SUBJECT)
    if not pairs or subject is None:
        return said
    for against in filter(None, map(group.family, (BASELINE, SECOND))):
        if subject.at(against.best.lr) is None:
            lr = lr_text(against.best.lr)
            said.append(
                f"{subject.best.name} was not run at {label(against.best.optimizer)}’s best learning rate, {lr}."
            )
    return said + _steps_sentences(group, subject)


def _verdict(pair: Comparison) -> str:
    name, other, lr = pair.subject.name, label(pair.against.optimizer), lr_text(pair.subject.lr)
    where = f"at {other}’s best learning rate, {lr}" if pair.carried else f"at its best learning rate {lr}"
    difference = pair.difference
    if difference is None:
        return f"{name} is not compared with tuned {other} {where}: {pair.refusal}."
    low, high, mean = difference.low, difference.high, difference.mean
    if not difference.separated:
        return (
            f"{name}: not separated from tuned {other}; the held-out loss differs by {loss_text(mean)} and the 95 % "
            f"interval, {loss_text(low)} to {loss_text(high)} over {count(difference.seeds, 'seed')}, includes zero, "
            f"{where}."
        )
    near, far = sorted((abs(low), abs(high)))
    return (
        f"{name}: held-out loss {loss_text(abs(mean))} {'lower' if mean < 0 else 'higher'} than tuned {other} (95 % "
        f"interval {loss_text(near)} to {loss_text(far)}, {count(difference.seeds, 'seed')}) {where}."
    )


def _steps_sentences(group: Group, subject: Variant) -> list[str]:
    pair = group.against_baseline(subject)
    if pair is None or pair.difference is None:
        return []
    ours, theirs = pair.paired
    goal = f"tuned {label(BASELINE)}’s final loss, {loss_text(theirs.mean)}"
    said = []
    if (found := same_schedule(ours, theirs.mean)) is not None:
        said.append(f"{ours.name} {_comes(found, group.steps, goal)} on the same schedule.")
    if (found := group.own_schedule(ours, theirs.mean)) is not None:
        longest = group.horizons(ours)[-1].runs[0].steps
        said.append(
            f"{ours.name} {_comes(found, longest, goal)} on a schedule that ends there, {group.steps} being AdamW’s."
        )
    if (found := group.baseline_needs(ours)) is not None:
        longest = group.horizons(theirs)[-1].runs[0].steps
        goal = f"the final loss of {ours.name}, {loss_text(ours.mean)}"
        said.append(
            f"{theirs.name} {_comes(found, longest, goal)} on a schedule that ends there, with the same settings."
        )
    return said


def _comes(found: Reach, steps: int, goal: str) -> str:
    if found.steps is None:
        return f"does not come to {goal}, within {steps} steps"
    return f"comes to {goal}, {'at or before' if found.at_most else 'at'} step {found.steps:.0f}"


def notes(group: Group) -> list[str]:
    """What a reader must know beside the numbers."""
    names = sorted({run.optimizer for run in group.runs}, key=lambda name: label(name).casefold())
    said = [line for name in names for line in _family_notes(group, name)]
    for setting in (setting for variant in group.variants for setting in variant.settings if setting.diverged):
        said.append(
            f"{setting.name} with learning rate {lr_text(setting.lr)} diverged at seed {listed(setting.diverged)}: it "
            "counts as an infinite loss, so it is best only where every setting diverged."
        )
    best = [variant.best for variant in group.variants]
    said += [line for setting in best for line in _curve_notes(setting)]
    for pair in group.comparisons:
        if pair.difference and pair.subject.losses.keys() != pair.against.losses.keys() and not pair.carried:
            said.append(
                f"{pair.subject.name} and tuned {label(pair.against.optimizer)} were not run with the same seeds: what "
                f"is said of both is over the {pair.difference.seeds} that both have."
            )
    if not group.refusals and (versions := len({run.workload_digest for run in group.runs})) > 1:
        said.append(
            f"Runs with other numbers of steps come from other versions of the workload ({versions} in all): those are not "
            "compared."
        )
    if not same_machine(*best):
        machines = sorted({f"{r.device} with {count(r.threads, 'thread')}" for one in best for r in one.runs})
        said.append(f"Times, energy and peak memory are not compared: the runs were made on {' and '.join(machines)}.")
    return said


def _family_notes(group: Group, name: str) -> list[str]:
    best, said = group.family(name), []
    if best is None:
        steps = listed(sorted({run.steps for run in group.runs if run.optimizer == name}))
        said.append(f"{label(name)} was run with {steps} steps, not {group.steps}: its losses are not compared.")
    for variant in (variant for variant in group.variants if variant.best.optimizer == name and variant.at_edge):
        # AdamW's best at an edge is a refusal; of other families' worse options the edge says nothing.
        if variant is not best if name == BASELINE else variant is best:
            said.append(
                f"The best learning rate of {variant.best.name}, {lr_text(variant.best.lr)}, is at the edge of those "
                "tried; a better one may lie outside, so this can only have hurt it."
            )
    if name != BASELINE and name in group.screened:
        said.append(
            f"The setting of {label(name)} was chosen on this workload by screening, so its result here is "
            f"optimistic: {count(group.screened[name], 'setting')} of it, {group.screened.get(BASELINE, 0)} of "
            f"{label(BASELINE)}."
        )
    return said


def _curve_notes(setting: Setting) -> list[str]:
    points = [(step, run.seed) for run in setting.runs for step, loss in run.heldout_curve if not math.isfinite(loss)]
    if not points or setting.diverged:
        return []
    where = ", ".join(f"step {step} with seed {seed}" for step, seed in points)
    return [f"The held-out loss of {setting.name} was not finite at {where}: its curve leaves that out."]


def loss_text(loss: float | None) -> str:
    """Four decimals, or two digits where those would be zeros."""
    if loss is None:
        return NONE
    if loss - loss != 0:  # infinite or not a number
        return "diverged"
    return f"{loss + 0.0:.4f}" if abs(loss) >= 1e-4 or loss == 0 else f"{loss:.1e}"


def interval_text(difference: Difference | None) -> str:
    """Mean and interval of a difference."""
    if difference is None:
        return NONE
    return f"{loss_text(difference.mean)} [{loss_text(difference.low)}, {loss_text(difference.high)}]"


def relative_text(found: Reach | None, steps: int) -> str:
    """A reach in units of ``steps``."""
    if found is None:
        return NONE
    if found.steps is None:
        return "not reached"
    return f"{'≤ ' if found.at_most else ''}{found.steps / max(steps, 1):.2f}×"
