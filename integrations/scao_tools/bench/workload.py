"""A workload: model, data, schedule, and which optimizers run at which learning rates. One YAML file each."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scao_tools.bench.results import STAGES, options_text
from scao_tools.errors import OptionError
from scao_tools.optimizers import REGISTRY
from scao_tools.recipes import config_folder

TINY_PRETRAINED, TINY_RANDOM = "tiny-pretrained", "tiny-random"


@dataclass(frozen=True)
class Entry:
    """One optimizer with its options and the learning rates to try."""

    optimizer: str
    options: dict[str, Any]
    lrs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What all optimizers of a comparison share, and the grid.

    Args:
        train: ``"lora"`` (adapters on all linear layers) or ``"full"``.
        bits: 4 for an NF4 base (QLoRA), 16 for the weights as they are.
        batch_sizes: examples per step; the report compares within each.
        evaluate_at: shares of the run at which the held-out loss is measured, besides start and end.
        stage: ``"screen"`` for a grid that only chooses settings; the report does not rank it.
        split_seed: draws the held-out rows; ``seeds`` draw the initial adapters (or weights) and the data order.
    """

    name: str
    about: str
    model: str
    data: str
    train: str = "lora"
    bits: int = 16
    rank: int = 16
    alpha: int = 32
    max_length: int = 512
    held_out: int = 64
    split_seed: int = 0
    steps: int = 30
    batch_sizes: tuple[int, ...] = (8,)
    warmup_share: float = 0.06
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    evaluate_at: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9)
    seeds: tuple[int, ...] = (0, 1, 2)
    optimizers: tuple[Entry, ...] = ()
    stage: str = "compare"

    def eval_steps(self) -> tuple[int, ...]:
        """Steps at which the held-out loss is measured."""
        inner = {round(share * self.steps) for share in self.evaluate_at}
        return tuple(sorted({0, *inner, self.steps}))

    def shared(self) -> dict[str, Any]:
        """All that can change a result and is the same for every optimizer, seed, batch size and number of steps."""
        grid = ("name", "about", "steps", "batch_sizes", "seeds", "optimizers", "evaluate_at", "stage")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in grid}


@dataclass(frozen=True)
class Run:
    """One cell of the grid."""

    optimizer: str
    options: dict[str, Any]
    lr: float
    seed: int
    batch: int

    @property
    def label(self) -> str:
        """For the screen: ``SCAO spike_rank=8, lr 0.002, seed 0, batch 8``."""
        extra = f" {options_text(self.options)}" if self.options else ""
        return f"{REGISTRY[self.optimizer].label}{extra}, lr {self.lr:g}, seed {self.seed}, batch {self.batch}"


def plan_runs(workload: Workload) -> list[Run]:
    """All cells. Optimizers take turns inside a learning rate and a seed, so that an interrupted grid is balanced."""
    runs = []
    for batch, seed in itertools.product(workload.batch_sizes, workload.seeds):
        for column in itertools.zip_longest(*(entry.lrs for entry in workload.optimizers)):
            for entry, lr in zip(workload.optimizers, column, strict=True):
                if lr is not None:
                    runs.append(Run(entry.optimizer, entry.options, lr, seed, batch))
    return runs


def workload_names() -> list[str]:
    """The workloads that come with the package."""
    return sorted(path.stem for path in (config_folder() / "bench").glob("*.yaml"))


def load_workload(name: str) -> Workload:
    """Read a workload of the package by name, or any YAML file by path."""
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        if name not in workload_names():
            close = difflib.get_close_matches(name, workload_names(), n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise OptionError(
                f"unknown workload {name!r}; {hint}known: {', '.join(workload_names())}, or the path of a .yaml file"
            )
        path = config_folder() / "bench" / f"{name}.yaml"
    return parse_workload(_read_yaml(path), str(path))


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error


def parse_workload(content: Any, where: str) -> Workload:
    """Check names and types; numbers may be written as text, as PyYAML reads ``2e-3``."""
    if not isinstance(content, Mapping):
        raise OptionError(f"{where} must hold a mapping of options, got {type(content).__name__}")
    fields = {f.name: f for f in dataclasses.fields(Workload)}
    _known(content, fields, where)
    missing = [f.name for f in fields.values() if f.default is dataclasses.MISSING and f.name not in content]
    if missing:
        raise OptionError(f"{where}: missing {', '.join(missing)}")
    values = {name: _CONVERT[fields[name].type](f"{where}: {name}", value) for name, value in content.items()}
    workload = Workload(**values)
    check_workload(workload, where)
    return workload


def _known(content: Mapping[Any, Any], known: Iterable[str], where: str) -> None:
    for name in content:
        if name not in set(known):
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise OptionError(f"{where}: unknown key {name!r}{hint} Known: {', '.join(known)}")


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{where} must be text, got {value!r}")
    return value


def _number(where: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        result = float(value)
    except (TypeError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        raise OptionError(f"{where} must be a finite number, got {value!r}")
    return result


def _whole(where: str, value: Any) -> int:
    result = _number(where, value)
    if result != int(result):
        raise OptionError(f"{where} must be a whole number, got {value!r}")
    return int(result)


def _list(where: str, value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _entries(where: str, value: Any) -> tuple[Entry, ...]:
    entries = []
    for item in _list(where, value):
        if not isinstance(item, Mapping) or "name" not in item or "lr" not in item:
            raise OptionError(f"{where}: each optimizer needs name and lr, got {item!r}")
        _known(item, ("name", "lr", "options"), where)
        options = item.get("options") or {}
        if not isinstance(options, Mapping):
            raise OptionError(f"{where}: options of {item['name']} must be a mapping, got {options!r}")
        lrs = tuple(_number(f"{where}: lr of {item['name']}", lr) for lr in _list(where, item["lr"]))
        entries.append(Entry(str(item["name"]), dict(options), lrs))
    return tuple(entries)


# By the annotation of the field, which is text because of the __future__ import.
_CONVERT: dict[Any, Any] = {
    "str": _text,
    "int": _whole,
    "float": _number,
    "tuple[int, ...]": lambda where, value: tuple(_whole(where, item) for item in _list(where, value)),
    "tuple[float, ...]": lambda where, value: tuple(_number(where, item) for item in _list(where, value)),
    "tuple[Entry, ...]": _entries,
}


def check_workload(workload: Workload, where: str) -> None:
    """Refuse values that cannot work.

    Raises:
        OptionError: says which, and what is allowed.
    """
    rules: tuple[tuple[bool, str], ...] = (
        (workload.train in ("lora", "full"), f"train must be lora or full, got {workload.train!r}"),
        (workload.bits in (4, 16), f"bits must be 4 or 16, got {workload.bits}"),
        (workload.train == "lora" or workload.bits == 16, "train: full needs bits: 16; a 4-bit base cannot be trained"),
        (workload.steps >= 1, f"steps must be at least 1, got {workload.steps}"),
        (workload.rank >= 1, f"rank must be at least 1, got {workload.rank}"),
        (workload.max_length >= 16, f"max_length must be at least 16 tokens, got {workload.max_length}"),
        (workload.held_out >= 1, f"held_out must be at least 1, got {workload.held_out}"),
        (0 <= workload.warmup_share < 1, f"warmup_share must be in [0, 1), got {workload.warmup_share}"),
        (bool(workload.batch_sizes) and min(workload.batch_sizes) >= 1, "batch_sizes must be at least 1"),
        (bool(workload.seeds) and min(workload.seeds) >= 0, "seeds must be at least one number >= 0"),
        (all(0 <= share <= 1 for share in workload.evaluate_at), "evaluate_at must be shares in [0, 1]"),
        (workload.stage in STAGES, f"stage must be one of {', '.join(STAGES)}, got {workload.stage!r}"),
        (bool(workload.optimizers), "optimizers is empty"),
        (
            all(lr > 0 for entry in workload.optimizers for lr in entry.lrs)
            and all(e.lrs for e in workload.optimizers),
            "every optimizer needs learning rates above 0",
        ),
    )
    for holds, message in rules:
        if not holds:
            raise OptionError(f"{where}: {message}")
    for entry in workload.optimizers:
        if workload.train == "full" and entry.optimizer in REGISTRY and REGISTRY[entry.optimizer].lora_only:
            raise OptionError(f"{where}: {entry.optimizer} is for LoRA only; this workload has train: full")
        if entry.optimizer not in REGISTRY:
            close = difflib.get_close_matches(entry.optimizer, REGISTRY, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise OptionError(f"{where}: unknown optimizer {entry.optimizer!r}; {hint}known: {', '.join(REGISTRY)}")


def workload_from_plain(content: Mapping[str, Any]) -> Workload:
    """The inverse of ``dataclasses.asdict``, also after a way through JSON."""
    values = dict(content)
    entries = tuple(Entry(e["optimizer"], dict(e["options"]), tuple(e["lrs"])) for e in values.pop("optimizers"))
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, (list, tuple))}
    return Workload(**{**values, **lists}, optimizers=entries)
