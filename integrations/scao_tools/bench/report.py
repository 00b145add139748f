"""The report of ``scao bench``: Markdown, one self-contained HTML page and PNGs, from ``results.jsonl`` alone.

The same runs give the same text, so a report that nobody can reproduce shows in a diff.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from scao_tools.bench.analysis import BASELINE, SUBJECT, Group, groups, screening
from scao_tools.bench.figures import Styles, pictures, styles
from scao_tools.bench.rendering import Block, write_blocks
from scao_tools.bench.results import RunRecord, read_results
from scao_tools.bench.sentences import NONE, interval_text, loss_text, notes, ranking_line, relative_text, verdicts
from scao_tools.bench.settings import Reach, Setting, Variant, label, lr_text, relative_drop, same_schedule, variants_of
from scao_tools.errors import ResultsError


def load_and_write(paths: list[Path], out: Path, command: str) -> list[Path]:
    """Read files (or directories) of results and write their report.

    Raises:
        ResultsError: there is no run in them, or a file cannot be read.
    """
    # File by file: where two files disagree on a run, the report must see both.
    found = [record for path in paths for record in read_results([path])]
    records = list({json.dumps(record.to_line(), sort_keys=True): record for record in found}.values())
    if not records:
        named = ", ".join(map(str, paths)) or "no file"
        raise ResultsError(f"no finished run in {named}; run `scao bench` first or name its results.jsonl")
    return write_report(records, out, command)


def write_report(records: Sequence[RunRecord], out: Path, command: str) -> list[Path]:
    """Write report.md, report.html and figures/*.png; ``command`` is what a reader types to get them again.

    Returns:
        The files written, report.md first.
    """
    return write_blocks(report_blocks(records, command), out)


def report_blocks(records: Sequence[RunRecord], command: str) -> list[Block]:
    """The whole report, in order."""
    found, style = groups(records), styles(record.optimizer for record in records)
    blocks = [Block("h1", ["SCAO benchmark report"]), *_header(records, command)]
    if found:
        blocks += [Block("h2", ["Overview"]), Block("table", rows=_overview(found))]
    else:
        blocks.append(Block("p", ["No run of these compares optimizers (stage “compare”), so nothing is ranked."]))
    for index, group in enumerate(found, start=1):
        blocks += _group_blocks(group, index, style)
    blocks += _screening_blocks([record for record in records if record.stage == "screen"])
    return [*blocks, Block("h2", ["How to read this"]), Block("ul", _METHOD)]


_METHOD = (
    "Losses are means per label token, in nats. Best setting: the lowest mean held-out loss, in pairs on the seeds that "
    "both have; a diverged run counts as an infinite loss. SD is over seeds. Trials are the distinct pairs of options and "
    "learning rate of an optimizer.",
    "Tuned AdamW is the best of all AdamW settings. Differences are paired by seed; their 95 % intervals are Student’s "
    "t over at least three common seeds. The intervals do not allow for choosing the best of several trials.",
    "Held-out examples are of groups (modules, services) that training never sees. Fresh training batches are of the groups "
    "that it does see, each measured before its update, in the last third of the steps: also examples that are new to the "
    "run. The two can differ in sign where groups differ; settings are chosen by the held-out loss.",
    "Nothing is ranked where AdamW’s best learning rate is at the edge of those tried or has fewer than three seeds, where "
    "another AdamW setting may be better on the same seeds, or where records contradict each other. An optimizer is not "
    "ranked with fewer than three common seeds, with more trials than AdamW, or with other data or steps. Rows are in the "
    "order of the paired differences; losses are over all seeds of a row, steps and costs relative to AdamW over common ones.",
    "Steps to AdamW’s loss are relative to AdamW’s full number of steps. Same schedule: where the mean held-out curve, "
    "linear between evaluations, comes to AdamW’s final loss; the learning rate is not yet decayed there. Own schedule: "
    "the same between the final losses of runs with several numbers of steps.",
    "Step, optimizer time, and peak memory are medians over seeds (a step’s time: the median of its run); CPU seconds and "
    "joules are means. MB is 10⁶ bytes. Loss drop is initial minus final held-out loss.",
)


def _header(records: Sequence[RunRecord], command: str) -> list[Block]:
    def each(values: Iterable[object]) -> str:
        return ", ".join(sorted({str(value) for value in values})) or "none"

    stages = [sum(record.stage == stage for record in records) for stage in ("compare", "screen")]
    versions = each(f"{name} {version}" for record in records for name, version in record.versions.items())
    times = sorted(record.time for record in records) or [NONE]
    commits = each(record.commit for record in records)
    lines = [
        f"Runs: {stages[0]} comparing, {stages[1]} screening; {sum(record.diverged for record in records)} diverged.",
        f"Commits: {commits}." + (" A dirty one had uncommitted changes." if "-dirty" in commits else ""),
        f"Versions: {versions}.",
        f"Dates: {times[0]} to {times[-1]}.",
        f"Devices: {each(record.device for record in records)}. Threads: {each(record.threads for record in records)}. "
        f"Number format: {each(record.dtype for record in records)}.",
    ]
    return [Block("ul", lines), Block("p", ["Made by:"]), Block("pre", [command])]


def _overview(found: Sequence[Group]) -> list[list[str]]:
    baseline, subject = label(BASELINE), label(SUBJECT)
    head = ["workload", "batch", "steps", f"tuned {baseline}", subject, f"{subject} − {baseline}", "steps to its loss"]
    rows = []
    for group in found:
        ours = group.family(SUBJECT)
        pair = group.against_baseline(ours) if ours else None
        cells = ["not ranked, see below", NONE, NONE, NONE]
        if pair and pair.difference:
            mine, theirs = pair.paired
            cells = [f"{loss_text(one.mean)} at {lr_text(one.lr)}" for one in (theirs, mine)]
            cells += [interval_text(pair.difference), relative_text(same_schedule(mine, theirs.mean), group.steps)]
        rows.append([group.workload, str(group.batch), str(group.steps), *cells])
    return [head, *rows]


def _group_blocks(group: Group, index: int, style: Styles) -> list[Block]:
    blocks = [Block("h2", [f"{group.workload}, batch {group.batch}"]), Block("p", [ranking_line(group)])]
    said = [*verdicts(group), *notes(group)]
    if said:
        blocks.append(Block("ul", said))
    order = ranked(group)
    blocks += [Block("table", rows=_loss_table(group, order)), Block("table", rows=_cost_table(group, order))]
    if len({run.steps for run in group.runs}) > 1:
        blocks += [Block("h3", ["Other numbers of steps"]), Block("table", rows=_horizon_table(group))]
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", group.workload)
    for picture in pictures(group, style):
        file = f"{index:02d}-{name}-batch{group.batch}-{picture.kind}.png"
        blocks.append(Block("img", [picture.caption], file=file, picture=picture))
    return blocks


def ranked(group: Group) -> list[tuple[Variant, bool]]:
    """The rows of a group's tables, and whether each is ranked: those first, by their paired differences.

    Not by their mean losses: those are over different seeds where seeds are missing.
    """
    baseline, places = group.family(BASELINE), {}
    for variant in () if group.refusals else group.variants:
        pair = group.against_baseline(variant)
        if variant is baseline or (pair and pair.difference):
            places[id(variant)] = pair.difference.mean if pair and pair.difference else 0.0
    rows = [(variant, id(variant) in places) for variant in group.variants]
    return sorted(rows, key=lambda row: (not row[1], places.get(id(row[0]), 0.0)))


def _loss_table(group: Group, rows: Sequence[tuple[Variant, bool]]) -> list[list[str]]:
    compared = not group.refusals
    head = ["optimizer", "best lr", "trials", "seeds", "held-out loss ± SD", "at 0.5× lr (seeds)", "at 2× lr (seeds)"]
    if compared:
        head += [f"minus tuned {label(BASELINE)} [95 %]", "the same on fresh training batches, last third"]
        head += ["steps to its loss, same schedule", "own schedule"]
    table = [head]
    for variant, is_ranked in rows:
        best = variant.best
        spread = "" if best.deviation is None else f" ± {loss_text(best.deviation)}"
        cells = [best.name, lr_text(best.lr), str(group.trials(best.optimizer)), str(len(best.runs))]
        cells += [loss_text(best.mean) + spread, _near(variant, 0.5), _near(variant, 2.0)]
        if compared:
            cells += _compared_cells(group, variant) if is_ranked else ["not ranked", *[NONE] * 3]
        table.append(cells)
    return table


def _compared_cells(group: Group, variant: Variant) -> list[str]:
    pair = group.against_baseline(variant)
    if pair is None:  # AdamW itself; its own curve may touch its final loss before its end
        return [NONE, NONE, *[relative_text(Reach(float(group.steps)), group.steps)] * 2]
    mine, theirs = pair.paired
    found = (same_schedule(mine, theirs.mean), group.own_schedule(mine, theirs.mean))
    fresh = NONE if pair.fresh is None else interval_text(pair.fresh)
    return [interval_text(pair.difference), fresh, *(relative_text(one, group.steps) for one in found)]


def _near(variant: Variant, factor: float) -> str:
    setting = variant.at(variant.best.lr * factor)
    return NONE if setting is None else f"{loss_text(setting.mean)} ({len(setting.runs)})"


def _cost_table(group: Group, rows: Sequence[tuple[Variant, bool]]) -> list[list[str]]:
    compared = not group.refusals
    with_joules = any(variant.best.joules is not None for variant, _ in rows)
    head = ["optimizer", "state bytes per parameter", "step (s)", "optimizer (ms)", "peak (MB)", "CPU (s)"]
    head += ["energy (J)"] if with_joules else []
    if compared:
        costs = ["CPU-second", *(["joule"] if with_joules else [])]
        head += [f"loss drop per {cost}, relative to {label(BASELINE)}" for cost in costs]
    table = [head]
    for variant, is_ranked in rows:
        best = variant.best
        cells = [best.name, f"{best.bytes_per_parameter:.2f}", f"{best.median('step_seconds'):.3g}"]
        cells += [f"{best.median('optimizer_ms'):.3g}", f"{best.median('peak_bytes') / 1e6:,.0f}", _cpu(best)]
        cells += [NONE if best.joules is None else f"{best.joules:,.0f}"] if with_joules else []
        if compared:
            pair = group.against_baseline(variant)
            ours, theirs = pair.paired if pair else (best, best)
            for joules in (False, True)[: 1 + with_joules]:
                ratio = relative_drop(ours, theirs, joules=joules) if is_ranked else None
                cells.append(NONE if ratio is None else f"{ratio:.2f}×")
        table.append(cells)
    return table


def _cpu(setting: Setting) -> str:
    return f"{statistics.fmean(run.cpu_seconds for run in setting.runs):,.1f}"


def _horizon_table(group: Group) -> list[list[str]]:
    table = [["optimizer", "lr", "steps", "seeds", "held-out loss"]]
    for steps, digest in sorted({(r.steps, r.workload_digest) for r in group.runs if r.steps != group.steps}):
        for variant in variants_of(r for r in group.runs if (r.steps, r.workload_digest) == (steps, digest)):
            for setting in variant.settings:
                cells = [setting.name, lr_text(setting.lr), str(steps), str(len(setting.runs))]
                table.append([*cells, loss_text(setting.mean)])
    return table


def _screening_blocks(runs: Sequence[RunRecord]) -> list[Block]:
    if not runs:
        return []
    table = [
        ["optimizer", "workload", "batch", "steps", "lr", "seeds", "held-out loss", f"minus best {label(BASELINE)}"]
    ]
    for row in screening(runs):
        first = row.setting.runs[0]
        cells = [row.setting.name, first.workload, str(first.batch), str(first.steps), lr_text(first.lr)]
        cells += [str(len(row.setting.runs)), loss_text(row.setting.mean), loss_text(row.difference)]
        table.append(cells)
    return [Block("h2", ["Screening (chose the settings; not evidence)"]), Block("table", rows=table)]
