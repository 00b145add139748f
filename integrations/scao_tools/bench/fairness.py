"""Why two settings cannot be compared seed by seed. Each function returns the reasons, nothing where there is none."""

from __future__ import annotations

import math

from scao_tools.bench.results import RunRecord
from scao_tools.bench.settings import Setting, common_seeds, count, label, listed, lr_text

MIN_SEEDS = 3  # chosen: with two, the t quantile is 12.7 and the interval says nothing

# The same weights evaluated on another processor differ by 1e-4 of the loss; a model pretrained there by 1e-2 (measured).
_SAME_START = 1e-3


def misjudged(rival: Setting, best: Setting) -> str:
    """Why a setting is not shown to be worse than its family's best, else nothing; divergence is worse."""
    where = f"{rival.name} with learning rate {lr_text(rival.lr)}"
    one, other = common_seeds(rival, best)
    if not one.runs:
        return f"{where} shares no seed with the best setting"
    if one.diverged:
        return ""
    if mixed := _other_tokens(one, other):
        return f"{where} saw another number of label tokens than the best setting at seed {mixed}"
    if mixed := _other_start(one, other):
        return f"{where} began at another held-out loss than the best setting, so with another model, at seed {mixed}"
    better = f"{where} is better than the best setting on the seeds that both have; other seeds are missing"
    return better if one.mean < other.mean else ""


def unpaired(subject: Setting, against: Setting) -> list[str]:
    """Why two settings cannot be compared seed by seed."""
    if subject.diverged:
        return [f"it diverged with {'seed' if len(subject.diverged) == 1 else 'seeds'} {listed(subject.diverged)}"]
    if len(subject.runs) < MIN_SEEDS:
        return [f"it has {count(len(subject.runs), 'seed')} at this setting, {MIN_SEEDS} are needed"]
    common = common_seeds(subject, against)
    if len(common[0].runs) < MIN_SEEDS:
        return [
            f"it shares {count(len(common[0].runs), 'seed')} with {label(against.optimizer)}, {MIN_SEEDS} are needed"
        ]
    if any(map(seedless, common)):
        return ["the loss is the same with every seed"]
    if mixed := _other_tokens(*common):
        return [f"its runs saw another number of label tokens at seed {mixed}"]
    mixed = _other_start(*common)
    return [f"its runs began at another held-out loss, so with another model, at seed {mixed}"] if mixed else []


def seedless(setting: Setting) -> bool:
    """Whether the seeds are no repetitions: in floating point, several do not come to the same loss."""
    return len(set(setting.losses.values())) == 1


def _other_tokens(one: Setting, other: Setting) -> str:
    """The common seeds at which two settings saw different amounts of data."""
    pairs = zip(one.runs, other.runs, strict=True)
    return listed(mine.seed for mine, theirs in pairs if mine.label_tokens != theirs.label_tokens)


def _other_start(one: Setting, other: Setting) -> str:
    """The common seeds at which two settings did not begin with the same model: one pretrained on another machine, say."""
    pairs = zip(one.runs, other.runs, strict=True)
    return listed(mine.seed for mine, theirs in pairs if not _same_start(mine, theirs))


def _same_start(mine: RunRecord, theirs: RunRecord) -> bool:
    begun = [dict(run.heldout_curve).get(0) for run in (mine, theirs)]
    if begun[0] is None or begun[1] is None:
        return True
    return math.isclose(begun[0], begun[1], rel_tol=_SAME_START)
