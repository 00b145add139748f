"""Peers that have our package's name: installed into folders of their own, and used by processes of their own."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scao_tools import optimizers, peer_packages
from scao_tools.errors import MissingPackageError, OptionError
from scao_tools.optimizers import REGISTRY, build_optimizer, check_optimizer
from scao_tools.peer_packages import peer_environment, peer_folder, peer_path, runs_isolated


@pytest.fixture
def installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """An empty cache, and a pip that writes an `scao` whose optimizer is AdamW with one option more."""
    calls: list[list[str]] = []
    code = (
        "import torch\nclass SCAO(torch.optim.AdamW):\n"
        "    def __init__(self, params, lr=1e-3, weight_decay=0.0, precond_freq=20):\n"
        "        super().__init__(params, lr=lr, weight_decay=weight_decay)\n"
    )

    def pip(command: list[str], **_: Any) -> Any:
        calls.append(command)
        (Path(command[command.index("--target") + 1]) / "scao.py").write_text(code, encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(peer_packages, "subprocess", SimpleNamespace(run=pip))
    return calls


def test_a_peer_is_installed_once_and_whole(installs: list[list[str]], tmp_path: Path) -> None:
    folder = peer_folder("scao==0.2.4")
    assert folder == peer_path("scao==0.2.4") == tmp_path / "cache" / "scao" / "peers" / "scao==0.2.4"
    assert peer_folder("scao==0.2.4") == folder
    assert len(installs) == 1
    assert "--no-deps" in installs[0]
    assert [path.name for path in folder.parent.iterdir()] == ["scao==0.2.4"]
    assert [path.name for path in folder.iterdir()] == ["scao.py"]
    with pytest.raises(ValueError, match="plain requirement"):
        peer_folder("../scao")


def test_peers_installed_at_the_same_time_do_not_meet(
    installs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, pip = threading.Barrier(2), peer_packages.subprocess.run

    def slow(command: list[str], **given: Any) -> Any:
        done = pip(command, **given)
        both.wait(timeout=20)  # neither has renamed when both have installed
        return done

    monkeypatch.setattr(peer_packages, "subprocess", SimpleNamespace(run=slow))
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(peer_folder("scao==0.2.4"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert folders == [peer_path("scao==0.2.4")] * 2
    assert len(installs) == 2
    assert [path.name for path in folders[0].parent.iterdir()] == ["scao==0.2.4"]


def test_a_failed_install_is_a_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: old\nERROR: No matching distribution found.\n\n")
    monkeypatch.setattr(peer_packages, "subprocess", SimpleNamespace(run=lambda *_, **__: failed))
    with pytest.raises(
        MissingPackageError, match=r"^scao==0.2.4 could not be installed: No matching distribution found;"
    ):
        peer_folder("scao==0.2.4")
    assert list(peer_path("scao==0.2.4").parent.iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingPackageError, match="set XDG_CACHE_HOME"):
        peer_folder("scao==0.2.4")


def test_an_isolated_optimizer_is_checked_in_its_own_process(installs: list[list[str]]) -> None:
    requirement = REGISTRY["older-scao"].isolated
    assert requirement is not None
    assert not runs_isolated(requirement)
    with pytest.raises(OptionError, match=r"older-scao.*cannot be used in this process"):
        build_optimizer("older-scao", [torch.nn.Parameter(torch.ones(2, 2))], 1e-3)
    environment = peer_environment(requirement)
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(peer_path(requirement))
    check_optimizer("older-scao", 1e-3, {"precond_freq": 5})
    with pytest.raises(OptionError, match="older-scao: unknown option 'precond_frq'; did you mean 'precond_freq'"):
        check_optimizer("older-scao", 1e-3, {"precond_frq": 5})
    with pytest.raises(OptionError, match="must be plain values"):
        check_optimizer("older-scao", 1e-3, {"precond_freq": object()})


def test_what_breaks_in_the_other_process_is_a_sentence(
    installs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "_CHECK", "import no_such_module_here")
    with pytest.raises(OptionError, match=r"older-scao cannot be used on this machine: .*no_such_module_here"):
        check_optimizer("older-scao", 1e-3)
