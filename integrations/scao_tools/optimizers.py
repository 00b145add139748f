"""The optimizers that the command line can compare. To add one, add a row to `REGISTRY` and its builder to ``peers.py``."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from scao_tools import peers
from scao_tools.errors import OptionError, ToolError
from scao_tools.peer_packages import peer_environment, runs_isolated
from scao_tools.requirements import require

if TYPE_CHECKING:
    import torch

    from scao_tools.bench.workload import Entry


@dataclass(frozen=True)
class OptimizerSpec:
    """How an optimizer is called in options and reports, and how it is built; use `build_optimizer`, which checks first.

    Args:
        name: in options and files.
        label: in reports.
        build: from named parameters, learning rate, options and weight decay.
        schedule: ``"linear"``, or ``"constant"`` for one that averages instead of decaying the rate; both warm up.
        requires: modules that must be installed; the extra ``bench`` brings them all.
        isolated: the requirement that must come first on the path of a process of its own, since it has our name.
        lora_only: whether it is defined for pairs of LoRA matrices only.
    """

    name: str
    label: str
    build: Callable[[Mapping[str, torch.nn.Parameter], float, Mapping[str, Any], float], torch.optim.Optimizer]
    schedule: str = "linear"
    requires: tuple[str, ...] = ()
    isolated: str | None = None
    lora_only: bool = False


_POOL = ("pytorch_optimizer",)
REGISTRY: dict[str, OptimizerSpec] = {
    spec.name: spec
    for spec in (
        OptimizerSpec("adamw", "AdamW", peers.adamw),
        OptimizerSpec("scao", "SCAO", peers.scao),
        OptimizerSpec("adamw-fused", "AdamW (fused)", peers.adamw_fused),
        OptimizerSpec("adamw-cautious", "AdamW, cautious", peers.adamw_cautious),
        OptimizerSpec("adamw8bit", "AdamW 8-bit", peers.adamw8bit, requires=("bitsandbytes",)),
        OptimizerSpec("loraplus", "LoRA+", peers.loraplus, lora_only=True),
        OptimizerSpec("riemannian", "Riemannian LoRA", peers.riemannian, requires=("peft",), lora_only=True),
        OptimizerSpec("muon", "Muon", peers.muon),
        OptimizerSpec("soap", "SOAP", peers.soap, requires=_POOL),
        OptimizerSpec("shampoo", "Shampoo", peers.shampoo, requires=_POOL),
        OptimizerSpec(
            "schedulefree", "Schedule-Free AdamW", peers.schedulefree, schedule="constant", requires=("schedulefree",)
        ),
        OptimizerSpec("older-scao", "SCAO 0.2.4", peers.older_scao, isolated=peers.OLDER_SCAO),
    )
}
# Those of `scao demo`, whose checkpoints are read without trusting pickle and whose schedule is the same for all.
OPTIMIZERS: dict[str, OptimizerSpec] = {name: REGISTRY[name] for name in ("adamw", "scao")}


def parse_optimizers(text: str, known: Collection[str] = tuple(OPTIMIZERS)) -> tuple[str, ...]:
    """Turn ``"adamw,scao"`` into names, refusing unknown, repeated, and no names."""
    names = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    listed = ", ".join(known)
    if not names:
        raise OptionError(f"--optimizers is empty; name at least one of: {listed}")
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? (known: {listed})" if close else f"known: {listed}"
            raise OptionError(f"--optimizers: unknown optimizer {name!r}; {hint}")
        if names.count(name) > 1:
            raise OptionError(f"--optimizers names {name!r} more than once; name each optimizer once")
    return names


def build_optimizer(
    name: str,
    params: Mapping[str, torch.nn.Parameter] | Sequence[torch.nn.Parameter],
    lr: float,
    options: Mapping[str, Any] | None = None,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """Build a registered optimizer; parameters without names are enough for those that do not look at them.

    Raises:
        OptionError: an option is unknown or has a wrong value, or the parameters are not what the optimizer is for.
        MissingPackageError: a package is missing or too old.
    """
    spec = REGISTRY[name]
    named = params if isinstance(params, Mapping) else {str(index): p for index, p in enumerate(params)}
    require(spec.requires, "bench", f"the optimizer {name!r}")
    if spec.lora_only and not any(".lora_A." in key for key in named):
        raise OptionError(f"the optimizer {name!r} is for LoRA only, and no parameter is a LoRA matrix; leave it out")
    return spec.build(named, lr, options or {}, weight_decay)


def check_optimizers(names: Sequence[str], lr: float) -> None:
    """`check_optimizer` for several, with no options."""
    for name in names:
        check_optimizer(name, lr)


def check_grid(entries: Iterable[Entry], full: bool = False, weight_decay: float = 0.0, device: str = "cpu") -> None:
    """`check_optimizer` for each entry of a workload; with ``full``, what is for LoRA only is refused."""
    for entry in entries:
        if full and REGISTRY[entry.optimizer].lora_only:
            raise OptionError(
                f"the optimizer {entry.optimizer!r} is for LoRA only, and the workload trains all weights; leave it out"
            )
        check_optimizer(entry.optimizer, entry.lrs[0], entry.options, weight_decay, device)


def check_optimizer(
    name: str, lr: float, options: Mapping[str, Any] | None = None, weight_decay: float = 0.0, device: str = "cpu"
) -> None:
    """Build an optimizer for one small pair of LoRA matrices and take a step, so that what cannot work fails here.

    One that needs a process of its own is installed, if need be, and checked in such a process.

    Raises:
        OptionError: an option is unknown or has a wrong value, or the optimizer cannot run on ``device``.
        MissingPackageError: a package is missing, too old, or could not be installed.
    """
    isolated = REGISTRY[name].isolated
    if isolated and not runs_isolated(isolated):
        _check_elsewhere(isolated, name, lr, dict(options or {}), weight_decay, device)
        return
    named = _toy_pair(device)
    optimizer = build_optimizer(name, named, lr, options, weight_decay)
    try:
        optimizer.step()
    except Exception as error:  # whatever a library raises, it comes before any long work
        raise OptionError(f"{name} cannot take a step on {device}: {type(error).__name__}: {error}") from error


def _toy_pair(device: str) -> dict[str, torch.nn.Parameter]:
    import torch

    # 4096 elements each: bitsandbytes keeps smaller ones in 32 bits, so what is 8-bit would not be tried.
    shapes = {"toy.lora_A.default.weight": (8, 512), "toy.lora_B.default.weight": (512, 8)}
    named = {name: torch.nn.Parameter(torch.full(shape, 0.01, device=device)) for name, shape in shapes.items()}
    for parameter in named.values():
        parameter.grad = torch.linspace(-1e-2, 1e-2, parameter.numel(), device=device).reshape(parameter.shape)
    return named


# Prints the sentence of a refusal and exits with 2; all else is a traceback and another status.
_CHECK = """
import json, sys
from scao_tools.errors import ToolError
from scao_tools.optimizers import check_optimizer
try:
    check_optimizer(*json.loads(sys.argv[1]))
except ToolError as error:
    raise SystemExit(print(error) or error.exit_code)
"""


def _check_elsewhere(requirement: str, *arguments: Any) -> None:
    try:
        text = json.dumps(arguments)
    except TypeError as error:
        raise OptionError(f"{arguments[0]}: options must be plain values like those of YAML ({error})") from error
    command = [sys.executable, "-c", _CHECK, text]
    done = subprocess.run(command, env=peer_environment(requirement), capture_output=True, text=True, check=False)
    if done.returncode == ToolError.exit_code and done.stdout.strip():
        raise OptionError(done.stdout.strip())
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise OptionError(f"{arguments[0]} cannot be used on this machine: {lines[-1]}")


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in ``optimizer.state``, in nested containers and objects, too; shared ones counted once."""
    import torch

    # Some optimizers keep a reference to the parameter in its state: it is not theirs.
    seen = {id(p) for group in optimizer.param_groups for p in group["params"]}

    def size(value: object) -> int:
        if id(value) in seen:
            return 0
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            return value.numel() * value.element_size()
        if isinstance(value, (dict, list, tuple)):
            return sum(size(item) for item in (value.values() if isinstance(value, dict) else value))
        if isinstance(value, (type, ModuleType)) or not hasattr(value, "__dict__"):
            return 0
        seen.add(id(value))  # objects may refer to each other
        return sum(size(item) for item in vars(value).values())

    return sum(size(entry) for entry in optimizer.state.values())
