"""What is installed, what each door needs, whether a registration is active, and what is known not to work together.

Each check is a function of a `Machine`, which a test can make up.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

OK, ABSENT, NOTE, BAD = "ok", "absent", "note", "bad"

# Door -> what it needs with the oldest version that works, and the command that brings it.
DOORS: dict[str, tuple[dict[str, str], str]] = {
    "hf": ({"transformers": "4.48", "accelerate": "1.0"}, 'pip install "scao[hf]"'),
    "trl": ({"trl": "0.18", "transformers": "4.48"}, 'pip install "scao[trl]"'),
    "axolotl": ({"axolotl": "0.19"}, 'pip install "axolotl>=0.19"'),
    "llamafactory": ({"llamafactory": "0.9.5"}, 'pip install "llamafactory>=0.9.5"'),
    "torchtune": ({"torchtune": "0.6.1", "torchao": "0.1"}, 'pip install "torchtune==0.6.1" "torchao==0.15.0"'),
    "litgpt": ({"litgpt": "0.5"}, 'pip install "litgpt>=0.5"'),
}
_PACKAGES = sorted(
    {name for needs, _ in DOORS.values() for name in needs} | {"torch", "peft", "bitsandbytes", "deepspeed"}
)
_ON = ("1", "true", "yes", "on")


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``remedy`` is what to type or change."""

    what: str
    status: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Machine:
    """What the checks look at."""

    installed: Mapping[str, str] = field(default_factory=dict)
    """Version by package; only what is installed."""
    environ: Mapping[str, str] = field(default_factory=dict)
    entry_points: frozenset[str] = frozenset()
    """``group:name`` of those that point to SCAO."""

    def at_least(self, package: str, oldest: str) -> bool:
        """Whether a package is installed in this version or a later one."""
        return package in self.installed and _number(self.installed[package]) >= _number(oldest)


def this_machine() -> Machine:
    """The packages, variables and entry points of this process."""
    installed = {}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    points = {
        f"{point.group}:{point.name}"
        for group in ("torch.backends", "axolotl.plugins")
        for point in importlib.metadata.entry_points(group=group)
        if point.value.startswith("scao_integrations.")
    }
    return Machine(installed, dict(os.environ), frozenset(points))


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def examine(machine: Machine, door: str | None = None) -> list[Finding]:
    """All findings; with ``door``, what this door lacks is wrong and the other doors are left out."""
    doors = [door] if door else list(DOORS)
    findings = [*_core(machine), *(_door(machine, name, wanted=name == door) for name in doors)]
    findings += [finding for check in COMBINATIONS for finding in check(machine)]
    return findings


def _core(machine: Machine) -> Iterator[Finding]:
    torch = machine.installed.get("torch", "")
    if machine.at_least("torch", "2.4"):
        yield Finding("torch", OK, torch)
    else:
        yield Finding("torch", BAD, torch or "not installed", 'SCAO needs 2.4 or later; run: pip install "torch>=2.4"')


def _door(machine: Machine, name: str, wanted: bool) -> Finding:
    needs, command = DOORS[name]
    missing = [package for package in needs if package not in machine.installed]
    if missing:
        return Finding(name, BAD if wanted else ABSENT, f"{', '.join(missing)} not installed", f"run: {command}")
    found = ", ".join(f"{package} {machine.installed[package]}" for package in needs)
    old = [f"{package} >= {oldest}" for package, oldest in needs.items() if not machine.at_least(package, oldest)]
    return Finding(name, BAD, found, f"needs {', '.join(old)}; run: {command}") if old else Finding(name, OK, found)


def _autoload(machine: Machine) -> Iterator[Finding]:
    value = machine.environ.get("SCAO_AUTOLOAD", "").strip()
    there = "torch.backends:scao" in machine.entry_points
    if value.lower() not in _ON:
        state = "installed, inactive" if there else "not installed"
        yield Finding(
            "autoload",
            NOTE,
            f"{state} (SCAO_AUTOLOAD={value or 'unset'})",
            "only LLaMA-Factory uses it: SCAO_AUTOLOAD=1",
        )
        return
    use = "or start with scao-llamafactory, which does not need it"
    if not there:
        yield Finding(
            "autoload",
            BAD,
            "SCAO_AUTOLOAD is on, the entry point is missing",
            "run: pip install --force-reinstall scao",
        )
    elif machine.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        yield Finding(
            "autoload", BAD, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from calling it", f"unset it, {use}"
        )
    elif not machine.at_least("torch", "2.5"):
        yield Finding("autoload", BAD, "torch before 2.5 does not call it", f'run: pip install "torch>=2.5", {use}')
    else:
        yield Finding("autoload", OK, f"active, from SCAO_AUTOLOAD={value}: registers when LLaMA-Factory is imported")


def _axolotl(machine: Machine) -> Iterator[Finding]:
    if not machine.at_least("axolotl", "0.19"):
        return
    if not machine.at_least("axolotl", "0.20"):
        line = "plugins: [scao_integrations.axolotl_plugin.ScaoPlugin]"
        yield Finding("axolotl plugin", NOTE, "this version loads no entry points", f"add to the YAML: {line}")
    elif "axolotl.plugins:scao" in machine.entry_points:
        yield Finding("axolotl plugin", OK, "found by axolotl through its entry point; acts on optimizer: scao only")
    else:
        yield Finding("axolotl plugin", BAD, "the entry point is missing", "run: pip install --force-reinstall scao")


def _torchtune(machine: Machine) -> Iterator[Finding]:
    if "torchtune" in machine.installed and machine.at_least("torchao", "0.16"):
        remedy = 'run: pip install --no-deps "torchao==0.15.0"'
        yield Finding("torchtune and torchao", BAD, f"torchao {machine.installed['torchao']} breaks torchtune", remedy)


def _llamafactory(machine: Machine) -> Iterator[Finding]:
    found = machine.installed.get("transformers", "")
    if "llamafactory" not in machine.installed or not found:
        return
    if found in ("4.57.0", "5.6.0") or _number(found) > (5, 6, 0):
        remedy = 'run: pip install "transformers>=4.55,<=5.6.0,!=4.57.0,!=5.6.0"'
        yield Finding("llamafactory and transformers", BAD, f"LLaMA-Factory refuses transformers {found}", remedy)


def _deepspeed(machine: Machine) -> Iterator[Finding]:
    if "deepspeed" in machine.installed:
        remedy = "ZeRO stages 1 to 3 and offload are refused: use DistributedDataParallel"
        yield Finding("deepspeed", NOTE, machine.installed["deepspeed"], remedy)


COMBINATIONS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _autoload,
    _axolotl,
    _torchtune,
    _llamafactory,
    _deepspeed,
)


def examine_process() -> list[Finding]:
    """What only running code can tell: whose ``scao`` is imported, registrations here, the accelerator, 4-bit kernels."""
    return [_identity(), _registration(), *_accelerator()]


def _identity() -> Finding:
    scao: Any = importlib.import_module("scao")
    core: Any = importlib.import_module("scao_core")
    if getattr(scao, "SCAO", None) is core.SCAO:
        return Finding("scao", OK, f"{_version('scao')}, from {os.path.dirname(core.__file__)}")
    remedy = (
        "another package of this name hides it; run: pip uninstall scao, until it finds none, then pip install scao"
    )
    return Finding("scao", BAD, f"`import scao` gives {scao.__file__}", remedy)


def _registration() -> Finding:
    names: Any = importlib.import_module("scao_integrations.transformers_names")
    if names.is_registered():
        return Finding("registration", OK, 'optim="scao" is registered in this process')
    return Finding("registration", NOTE, 'optim="scao" is not registered in this process; `register()` does it')


def _accelerator() -> Iterator[Finding]:
    torch: Any = importlib.import_module("torch")
    device = "cpu"
    if torch.cuda.is_available():
        device, properties = "cuda", torch.cuda.get_device_properties(0)
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16: use fp16"
        found = f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {bf16}"
        yield Finding("GPU", OK, found)
    elif torch.backends.mps.is_available():
        yield Finding("GPU", NOTE, "Apple MPS", "SCAO was not run there; bitsandbytes has no 4-bit for it")
    else:
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "this torch is a CPU build"
        yield Finding("GPU", NOTE, f"none in use; {built}", "on a GPU machine install the torch of your CUDA version")
    yield _four_bit(torch, device)


def _four_bit(torch: Any, device: str) -> Finding:
    try:
        functional: Any = importlib.import_module("bitsandbytes.functional")
        functional.quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4")
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            return Finding(
                "bitsandbytes", BAD, f"does not import ({error})", "run: pip install --force-reinstall bitsandbytes"
            )
        return Finding("bitsandbytes", ABSENT, "not installed", "needed for QLoRA; run: pip install bitsandbytes")
    except Exception as error:  # a library without kernels for this device raises many kinds
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        return Finding("bitsandbytes", BAD, f"4-bit fails on {device} ({reason})", "run: pip install -U bitsandbytes")
    return Finding("bitsandbytes", OK, f"{_version('bitsandbytes')}, 4-bit works on {device}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"
