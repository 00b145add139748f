"""The command from outside: refusals are one sentence with exit code 2, before any output directory exists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scao_tools import requirements
from scao_tools.cli import build_app, run


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def scao(*arguments: str) -> int:
    return run(build_app(), arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--lr", "nan"], "--lr must be a finite number above 0, got nan"),
        (["--lr", "inf"], "--lr must be a finite number above 0, got inf"),
        (["--lr", "-1"], "--lr must be a finite number above 0, got -1.0"),
        (["--bits", "8"], "--bits must be 4 (QLoRA) or 16 (plain LoRA), got 8"),
        (["--optimizers", "adamw,scoa"], "unknown optimizer 'scoa'; did you mean 'scao'? (known: adamw, scao)"),
        (["--optimizers", "zzz"], "unknown optimizer 'zzz'; known: adamw, scao"),
        (["--optimizers", "adamw,AdamW"], "names 'adamw' more than once"),
        (["--optimizers", ","], "--optimizers is empty"),
        (["--seed", "-1"], "--seed must be between 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--max-length", "3"], "--max-length must be at least 16 tokens, got 3"),
        (["--dtype", "int8"], "--dtype must be auto, bf16, fp16 or fp32, got 'int8'"),
        (["--model", "./nothing"], "--model './nothing' does not exist"),
        (["--model", "file.bin"], "--model"),
        (["--data", "nothing.jsonl"], "--data nothing.jsonl does not exist"),
        (["--resume"], "there is no run in demo-output"),
        (["--resume", "--overwrite"], "give one of the two"),
        (["--resume", "--out", "nowhere"], "holds no demo run"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "file.bin").touch()
    assert scao("demo", *arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("scao: ")
    assert sentence in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "holds no rows"),
        ('{"prompt": "p", "completion": "c"}\nnot json\n', "line 2 is not valid JSON"),
        ('{"prompt": "p", "completion": "c"}\n{"a": 1}\n', "line 2: no known shape (keys: a)"),
        ('{"prompt": "p", "completion": "c"}\n' * 3, "at least 2 are needed"),
    ],
)
def test_bad_data(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_dir: Path, content: str, sentence: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    assert scao("demo", "--model", str(model_dir), "--data", "rows.jsonl") == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "rows.jsonl" in error or "distinct" in error
    assert not (tmp_path / "demo-output").exists()


def test_a_model_without_linear_layers_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tokenizer: Any, tiny_llama: Any
) -> None:
    tiny_llama(layers=0).save_pretrained(tmp_path / "flat")
    tokenizer.save_pretrained(tmp_path / "flat")
    assert scao("demo", "--model", "flat") == 2
    assert "no linear layers" in capsys.readouterr().err


def test_a_directory_that_is_no_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    assert scao("demo", "--model", "empty") == 2
    assert scao("demo", "--model", "odd") == 2
    first, second = capsys.readouterr().err.strip().splitlines()
    assert "has no config.json" in first
    assert "cannot be loaded" in second


def test_a_missing_package_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "is_installed", lambda module: module not in {"peft", "bitsandbytes"})
    assert scao("demo") == 2
    error = capsys.readouterr().err.strip()
    assert error == ('scao: scao demo needs peft, bitsandbytes, which is not installed; run: pip install "scao[demo]"')


def test_without_typer_the_command_still_answers() -> None:
    code = "import sys; sys.modules['typer'] = None; from scao_tools.cli import main; sys.argv = ['scao']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'pip install "scao[demo]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from scao_tools.cli import build_app, run; code = run(build_app(), ['demo', '--help']); "
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'peft'} & set(sys.modules); print(code, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "--optimizers" in done.stdout


def test_unknown_options_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert scao("demo", "--stpes", "4") == 2
    assert "--steps" in capsys.readouterr().err
    assert scao("dmeo") == 2
