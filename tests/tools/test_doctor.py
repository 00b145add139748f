"""``scao doctor``: every known bad combination is found on a machine that has it, and only there; the exit code says."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from scao_tools import doctor
from scao_tools.cli import build_app, run
from scao_tools.doctor import BAD, Machine, examine

ALL = frozenset({"torch.backends:scao", "axolotl.plugins:scao"})


def wrong(machine: Machine, door: str | None = None) -> dict[str, str]:
    return {f.what: f"{f.found}; {f.remedy}" for f in examine(machine, door) if f.status == BAD}


def test_a_machine_with_torch_only_is_fine() -> None:
    assert not wrong(Machine({"torch": "2.13.0+cpu"}, {}, ALL))


@pytest.mark.parametrize("door", sorted(doctor.DOORS))
def test_a_door_that_was_asked_for_must_be_there(door: str) -> None:
    needs, command = doctor.DOORS[door]
    bare = Machine({"torch": "2.13.0"}, {}, ALL)
    assert command in wrong(bare, door)[door]
    there = Machine({"torch": "2.13.0", **needs}, {}, ALL)
    assert door not in wrong(there, door)
    old = Machine({"torch": "2.13.0", **dict.fromkeys(needs, "0.0.1")}, {}, ALL)
    assert command in wrong(old, door)[door]


@pytest.mark.parametrize(
    ("installed", "environ", "points", "what", "remedy"),
    [
        ({"torch": "2.3.1"}, {}, ALL, "torch", '"torch>=2.4"'),
        ({}, {}, ALL, "torch", "not installed"),
        ({"torchtune": "0.6.1", "torchao": "0.16.0"}, {}, ALL, "torchtune and torchao", '"torchao==0.15.0"'),
        ({"llamafactory": "0.9.5", "transformers": "5.6.0"}, {}, ALL, "llamafactory and transformers", "!=5.6.0"),
        ({"llamafactory": "0.9.5", "transformers": "5.20.1"}, {}, ALL, "llamafactory and transformers", "<=5.6.0"),
        ({}, {"SCAO_AUTOLOAD": "1"}, frozenset(), "autoload", "--force-reinstall scao"),
        ({}, {"SCAO_AUTOLOAD": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, ALL, "autoload", "scao-llamafactory"),
        ({"torch": "2.4.1"}, {"SCAO_AUTOLOAD": "1"}, ALL, "autoload", "scao-llamafactory"),
        ({"axolotl": "0.21.0"}, {}, frozenset(), "axolotl plugin", "--force-reinstall scao"),
    ],
)
def test_bad_combinations(
    installed: dict[str, str], environ: dict[str, str], points: frozenset[str], what: str, remedy: str
) -> None:
    base = {} if what == "torch" else {"torch": "2.13.0"}
    assert remedy in wrong(Machine({**base, **installed}, environ, points))[what]


@pytest.mark.parametrize(
    "machine",
    [
        Machine({"torch": "2.13.0", "torchtune": "0.6.1", "torchao": "0.15.0"}, {}, ALL),
        Machine({"torch": "2.13.0", "llamafactory": "0.9.5", "transformers": "4.57.6"}, {}, ALL),
        Machine({"torch": "2.13.0", "axolotl": "0.19.0"}, {}, frozenset()),
        Machine({"torch": "2.13.0", "axolotl": "0.21.0"}, {}, ALL),
        Machine({"torch": "2.13.0"}, {"SCAO_AUTOLOAD": "1"}, ALL),
        Machine({"torch": "2.13.0", "torchao": "0.18.0"}, {"SCAO_AUTOLOAD": "0"}, ALL),
    ],
)
def test_good_combinations(machine: Machine) -> None:
    assert not wrong(machine)


def test_a_foreign_scao_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = ModuleType("scao")
    foreign.__file__ = "/elsewhere/scao/__init__.py"
    monkeypatch.setitem(sys.modules, "scao", foreign)
    (finding,) = (f for f in doctor.examine_process() if f.what == "scao")
    assert finding.status == BAD
    assert "pip uninstall scao" in finding.remedy


def test_a_registration_is_seen() -> None:
    names = pytest.importorskip("scao_integrations.transformers_names")
    pytest.importorskip("transformers")
    with names.registered():
        assert 'optim="scao" is registered in this process' in [f.found for f in doctor.examine_process()]
    assert 'optim="scao" is registered in this process' not in [f.found for f in doctor.examine_process()]


def test_the_command_and_its_exit_codes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine({"torch": "2.13.0"}, {}, ALL))
    assert run(build_app(), ["doctor"]) == 0
    assert "nothing to mend" in capsys.readouterr().out
    assert run(build_app(), ["doctor", "axolotl"]) == 1
    out = capsys.readouterr().out
    assert "!!  axolotl" in out
    assert 'pip install "axolotl>=0.19"' in out
    assert run(build_app(), ["doctor", "keras"]) == 2
    assert "unknown framework 'keras'; known: hf, trl" in capsys.readouterr().err
