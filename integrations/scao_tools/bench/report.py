"""The report of ``scao bench``: Markdown, one self-contained HTML page and PNGs, from ``results.jsonl`` alone.

The same runs give the same text, so a report that nobody can reproduce shows in a diff.
"""

from __future__ import annotations

import base64
import html
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scao_tools.bench.analysis import (
    BASELINE,
    SECOND,
    SUBJECT,
    Comparison,
    Difference,
    Group,
    Reach,
    Setting,
    Variant,
    count,
    groups,
    label,
    lr_text,
    notes,
    relative_drop,
    same_schedule,
    screening,
    variants_of,
)
from scao_tools.bench.figures import Picture, Styles, pictures, styles
from scao_tools.bench.results import RunRecord, read_results
from scao_tools.checkpointing import write_atomically, write_text_atomically
from scao_tools.errors import ResultsError
from scao_tools.reporting import markdown_table

_NONE = "—"
_FIGURES = "figures"
_CSS = """
:root { color-scheme: light dark; --line: #ccc; --soft: #f4f4f4; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 0.3rem 0.6rem; text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; background: #fff; }
figure { margin: 1.5rem 0; } figcaption { font-size: 0.875rem; }
pre { background: var(--soft); padding: 0.6rem; overflow-x: auto; }
@media (prefers-color-scheme: dark) { :root { --line: #555; --soft: #222; } body { background: #111; color: #ddd; } }
"""


@dataclass(frozen=True)
class Block:
    """A piece of the report. ``kind``: h1 to h3, p, ul, pre, table (its first row is the header) or img."""

    kind: str
    lines: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    file: str = ""
    picture: Picture | None = None

    def markdown(self) -> str:
        """As Markdown; a picture is a link into the folder of figures."""
        plain = [_escape(line) for line in self.lines]
        if self.kind == "table":
            head, *rows = [[_escape(cell) for cell in row] for row in self.rows]
            return markdown_table(head, rows)
        if self.picture:
            return f"![{plain[0]}]({_FIGURES}/{self.file})"
        if self.kind == "pre":
            return "\n".join(f"    {line}" for line in self.lines[0].splitlines() or [""])
        mark = {"ul": "- ", "p": ""}.get(self.kind) if self.kind[0] != "h" else "#" * int(self.kind[1]) + " "
        return "\n".join(f"{mark}{line}" for line in plain)

    def html(self) -> str:
        """As HTML; a picture is embedded."""
        safe = [html.escape(line) for line in self.lines]
        if self.kind == "table":
            head, *rows = [[html.escape(cell) for cell in row] for row in self.rows]
            lines = [_row("th", head), *(_row("td", row) for row in rows)]
            return f'<div class="wide"><table>\n{chr(10).join(lines)}\n</table></div>'
        if self.picture:
            data = base64.b64encode(self.picture.png).decode("ascii")
            source = f"data:image/png;base64,{data}"
            return f'<figure><img alt="{safe[0]}" src="{source}"><figcaption>{safe[0]}</figcaption></figure>'
        if self.kind == "ul":
            return "<ul>" + "".join(f"<li>{line}</li>" for line in safe) + "</ul>"
        return f"<{self.kind}>{' '.join(safe)}</{self.kind}>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _escape(text: str) -> str:
    """Names come from files: none may break a table or become markup."""
    return re.sub(r"([\\`*_|<>])", r"\\\1", " ".join(text.split()))


def load_and_write(paths: list[Path], out: Path, command: str) -> list[Path]:
    """Read files (or directories) of results and write their report.

    Raises:
        ResultsError: there is no run in them, or a file cannot be read.
    """
    records = read_results(paths)
    if not records:
        named = ", ".join(map(str, paths)) or "no file"
        raise ResultsError(f"no finished run in {named}; run `scao bench` first or name its results.jsonl")
    return write_report(records, out, command)


def write_report(records: Sequence[RunRecord], out: Path, command: str) -> list[Path]:
    """Write report.md, report.html and figures/*.png; ``command`` is what a reader types to get them again.

    Returns:
        The files written, report.md first.
    """
    blocks = report_blocks(records, command)
    (out / _FIGURES).mkdir(parents=True, exist_ok=True)
    written = [out / "report.md", out / "report.html"]
    for block in blocks:
        if block.picture:
            written.append(out / _FIGURES / block.file)
            write_atomically(written[-1], _writer(block.picture.png))
    write_text_atomically(written[0], "\n\n".join(block.markdown() for block in blocks) + "\n")
    body = "\n".join(block.html() for block in blocks)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    page = (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{blocks[0].lines[0]}</title><style>{_CSS}</style></head>'
    )
    write_text_atomically(written[1], f"{page}\n<body>\n{body}\n</body></html>\n")
    return written


def _writer(png: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(png)

    return write


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
    "Losses are means per label token, in nats. Best setting: the lowest mean held-out loss; a diverged run counts as an "
    "infinite loss. SD is over seeds. Trials are the distinct pairs of options and learning rate of an optimizer.",
    "Tuned AdamW is the best of all AdamW settings. Differences are paired by seed; their 95 % intervals are Student’s "
    "t over at least three common seeds. The intervals do not allow for choosing the best of several trials.",
    "Nothing is ranked where AdamW’s best learning rate is at the edge of those tried or has fewer than three seeds. An "
    "optimizer is not ranked with fewer than three seeds, with more trials than AdamW, or with other data or steps.",
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
    times = sorted(record.time for record in records) or [_NONE]
    commits = each(record.commit for record in records)
    lines = [
        f"Runs: {stages[0]} comparing, {stages[1]} screening; {sum(record.diverged for record in records)} diverged.",
        f"Commits: {commits}." + (" A dirty one had uncommitted changes." if "-dirty" in commits else ""),
        f"Versions: {versions}.",
        f"Dates: {times[0]} to {times[-1]}.",
        f"Devices: {each(record.device for record in records)}. Threads: {each(record.threads for record in records)}.",
    ]
    return [Block("ul", lines), Block("p", ["Made by:"]), Block("pre", [command])]


def _overview(found: Sequence[Group]) -> list[list[str]]:
    baseline, subject = label(BASELINE), label(SUBJECT)
    head = ["workload", "batch", "steps", f"tuned {baseline}", subject, f"{subject} − {baseline}", "steps to its loss"]
    rows = []
    for group in found:
        best, ours = group.family(BASELINE), group.family(SUBJECT)
        pair = group.against_baseline(ours) if ours else None
        cells = ["not ranked, see below", _NONE, _NONE, _NONE]
        if best and ours and pair and pair.difference:
            cells = [f"{loss_text(one.best.mean)} at {lr_text(one.best.lr)}" for one in (best, ours)]
            cells += [_interval(pair.difference), _relative(same_schedule(ours.best, best.best.mean), group.steps)]
        rows.append([group.workload, str(group.batch), str(group.steps), *cells])
    return [head, *rows]


def _group_blocks(group: Group, index: int, style: Styles) -> list[Block]:
    blocks = [Block("h2", [f"{group.workload}, batch {group.batch}"]), Block("p", [_ranking_line(group)])]
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


def _ranking_line(group: Group) -> str:
    if group.refusals:
        return f"No ranking: {'; '.join(group.refusals)}. Rows are in alphabetical order."
    return (
        f"Judged at {group.steps} steps. Rows are in the order of the held-out loss; optimizers that are not ranked "
        "follow in alphabetical order."
    )


def ranked(group: Group) -> list[tuple[Variant, bool]]:
    """The rows of a group's tables, and whether each is ranked: those first, by loss."""
    baseline, rows = group.family(BASELINE), []
    for variant in group.variants:
        pair = group.against_baseline(variant)
        rows.append((variant, not group.refusals and (variant is baseline or bool(pair and pair.difference))))
    return sorted(rows, key=lambda row: (not row[1], row[0].best.mean if row[1] else 0.0))


def loss_text(loss: float | None) -> str:
    """Four decimals, or two digits where those would be zeros."""
    if loss is None:
        return _NONE
    if loss - loss != 0:  # infinite or not a number
        return "diverged"
    return f"{loss + 0.0:.4f}" if abs(loss) >= 1e-4 or loss == 0 else f"{loss:.1e}"


def _interval(difference: Difference | None) -> str:
    if difference is None:
        return _NONE
    return f"{loss_text(difference.mean)} [{loss_text(difference.low)}, {loss_text(difference.high)}]"


def _relative(found: Reach | None, steps: int) -> str:
    if found is None:
        return _NONE
    if found.steps is None:
        return "not reached"
    return f"{'≤ ' if found.at_most else ''}{found.steps / max(steps, 1):.2f}×"


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
    baseline, pair = group.family(BASELINE), group.against_baseline(subject)
    if baseline is None or pair is None or pair.difference is None:
        return []
    name, target = subject.best.name, baseline.best.mean
    goal = f"tuned {label(BASELINE)}’s final loss, {loss_text(target)}"
    said = []
    if (found := same_schedule(subject.best, target)) is not None:
        said.append(f"{name} {_comes(found, group.steps, goal)} on the same schedule.")
    if (found := group.own_schedule(subject.best, target)) is not None:
        longest = group.horizons(subject.best)[-1].runs[0].steps
        said.append(
            f"{name} {_comes(found, longest, goal)} on a schedule that ends there, {group.steps} being AdamW’s."
        )
    if (found := group.baseline_needs(subject.best)) is not None:
        longest = group.horizons(baseline.best)[-1].runs[0].steps
        goal = f"the final loss of {name}, {loss_text(subject.best.mean)}"
        said.append(
            f"{baseline.best.name} {_comes(found, longest, goal)} on a schedule that ends there, with the same settings."
        )
    return said


def _comes(found: Reach, steps: int, goal: str) -> str:
    if found.steps is None:
        return f"does not come to {goal}, within {steps} steps"
    return f"comes to {goal}, {'at or before' if found.at_most else 'at'} step {found.steps:.0f}"


def _loss_table(group: Group, rows: Sequence[tuple[Variant, bool]]) -> list[list[str]]:
    baseline = group.family(BASELINE)
    compared = baseline is not None and not group.refusals
    head = ["optimizer", "best lr", "trials", "seeds", "held-out loss ± SD", "at 0.5× lr (seeds)", "at 2× lr (seeds)"]
    if compared:
        head += [f"minus tuned {label(BASELINE)} [95 %]", "steps to its loss, same schedule", "own schedule"]
    table = [head]
    for variant, is_ranked in rows:
        best = variant.best
        spread = "" if best.deviation is None else f" ± {loss_text(best.deviation)}"
        cells = [best.name, lr_text(best.lr), str(group.trials(best.optimizer)), str(len(best.runs))]
        cells += [loss_text(best.mean) + spread, _near(variant, 0.5), _near(variant, 2.0)]
        if compared and baseline and not is_ranked:
            cells += ["not ranked", _NONE, _NONE]
        elif compared and baseline:
            pair, target = group.against_baseline(variant), baseline.best.mean
            found = (same_schedule(best, target), group.own_schedule(best, target))
            if variant is baseline:  # by definition; its own curve may touch the target before its end
                found = (Reach(float(group.steps)),) * 2
            cells += [_interval(pair.difference if pair else None), *(_relative(one, group.steps) for one in found)]
        table.append(cells)
    return table


def _near(variant: Variant, factor: float) -> str:
    setting = variant.at(variant.best.lr * factor)
    return _NONE if setting is None else f"{loss_text(setting.mean)} ({len(setting.runs)})"


def _cost_table(group: Group, rows: Sequence[tuple[Variant, bool]]) -> list[list[str]]:
    baseline = group.family(BASELINE)
    compared = baseline is not None and not group.refusals
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
        cells += [_NONE if best.joules is None else f"{best.joules:,.0f}"] if with_joules else []
        if compared and baseline:
            for joules in (False, True)[: 1 + with_joules]:
                ratio = relative_drop(best, baseline.best, joules=joules) if is_ranked else None
                cells.append(_NONE if ratio is None else f"{ratio:.2f}×")
        table.append(cells)
    return table


def _cpu(setting: Setting) -> str:
    return f"{statistics.fmean(run.cpu_seconds for run in setting.runs):,.1f}"


def _horizon_table(group: Group) -> list[list[str]]:
    table = [["optimizer", "lr", "steps", "seeds", "held-out loss"]]
    for steps in sorted({run.steps for run in group.runs} - {group.steps}):
        for variant in variants_of(run for run in group.runs if run.steps == steps):
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
