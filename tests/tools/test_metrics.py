"""The metrics file after kills, and numbers that JSON does not have."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from scao_tools.errors import ResumeError
from scao_tools.metrics import MetricsLog, number, read_metrics, rewrite_metrics


def fill(path: Path, count: int = 3) -> None:
    log = MetricsLog(path)
    for step in range(count):
        log.append({"optimizer": "adamw", "step": step})
    log.close()


@pytest.mark.parametrize("torn", ['{"optimizer": "ada', "{", '{"optimizer": "adamw", "step": 3}', "é".encode()[:1]])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: str | bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path)
    with path.open("ab") as file:
        file.write(torn if isinstance(torn, bytes) else torn.encode())
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2]
    rewrite_metrics(path, lambda line: line["step"] < 2)
    log = MetricsLog(path)
    log.append({"optimizer": "adamw", "step": 2})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_damage_in_the_middle_is_not_hidden(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path)
    path.write_text(path.read_text().replace('"step": 1', '"step"'))
    with pytest.raises(ResumeError, match="line 2 is damaged"):
        read_metrics(path)


def test_numbers_that_json_lacks_survive(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append({"loss": math.nan, "all": [math.inf, 1.5]})
    log.close()
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert math.isnan(number(line["loss"]))
    assert [number(value) for value in line["all"]] == [math.inf, 1.5]


def test_no_file_is_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []
