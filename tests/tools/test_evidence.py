"""The committed evidence: reports are what the committed results say, and the page for people quotes them as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from scao_tools.bench.report import load_and_write
from scao_tools.bench.results import RESULTS, read_results

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
FOLDERS = sorted(path.parent for path in EVIDENCE.glob(f"*/{RESULTS}"))


def command(folder: Path) -> str:
    where = f"docs/evidence/{folder.name}"
    return f"scao bench-report {where} --out {where}"


def test_there_is_evidence() -> None:
    assert FOLDERS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_report_is_rebuilt_from_the_results(folder: Path, tmp_path: Path) -> None:
    written = load_and_write([folder / RESULTS], tmp_path, command(folder))
    assert written[0].read_text() == (folder / "report.md").read_text()
    pictures = {path.relative_to(tmp_path).as_posix() for path in written if path.suffix == ".png"}
    assert pictures
    assert all((folder / picture).is_file() for picture in pictures)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_run_was_made_by_a_commit(folder: Path) -> None:
    for record in read_results([folder]):
        assert record.commit != "unknown"
        assert not record.commit.endswith("-dirty")


def overview(folder: Path) -> set[str]:
    report = (folder / "report.md").read_text().split("## Overview")[1].split("##")[0]
    return {line for line in report.splitlines() if line.startswith("|")}


def test_the_pages_table_is_quoted_from_the_reports() -> None:
    """Whatever has an interval in it stands in an overview, and the latest overview is there whole."""
    page = {line for line in (EVIDENCE.parent / "evidence.md").read_text().splitlines() if line.startswith("|")}
    # the page's own columns: the folder of the runs, and the difference on fresh batches
    quoted = {f"{line.removesuffix('|').rsplit('|', 2)[0]}|" for line in page if "× |" in line}
    assert quoted <= set().union(*map(overview, FOLDERS))
    assert {row for row in overview(FOLDERS[-1]) if "× |" in row} <= quoted
