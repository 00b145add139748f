"""SCAO in an unmodified LLaMA-Factory (>= 0.9.5): ``optim: scao``, and in its second generation ``optim_config: {name: scao}``.

::

    scao-llamafactory train x.yaml                # llamafactory-cli, with SCAO registered here and in what it starts
    SCAO_AUTOLOAD=1 llamafactory-cli train x.yaml # the same, see `autoload`
    register(); run_exp({"optim": "scao", ...})   # in a script of your own, for this process

LLaMA-Factory takes the optimizers of transformers, so this is `transformers_names` plus what LLaMA-Factory adds: settings
that would silently train with another optimizer are refused when the arguments are read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

import scao_core
from scao_core import SCAO, ConfigError, ScaoError

from . import autoload, transformers_names
from .requirements import FrameworkError, require, version
from .transformers_names import NAME, checked

_PARSER, _ARGUMENTS_V1 = autoload.AWAITED
_OPTIMIZERS_V1 = "llamafactory.v1.plugins.trainer_plugins.optimizer"
_INSTALL = 'pip install "llamafactory==0.9.5"'
# Switches of LLaMA-Factory that build, or replace, the optimizer themselves; `optim` would not be looked at.
_OTHERS = {
    "use_galore": "trains with GaLore",
    "use_apollo": "trains with APOLLO",
    "use_badam": "trains with BAdam",
    "use_adam_mini": "trains with Adam-mini",
    "use_muon": "trains with Muon",
    "use_mca": "trains with Megatron's optimizer (USE_MCA=1)",
    "use_hyper_parallel": "shards the parameters",
}

_patches: list[tuple[Any, str, Any, Any]] = []  # while registered: owner, attribute, what was there before, and ours
_hooked: list[str] = []  # the modules in which it is registered
_names = contextlib.ExitStack()  # undoes the registration in transformers, if it was made here


def register(origin: str = "register()") -> None:
    """Let LLaMA-Factory's arguments know ``scao``, in this process: those it uses now, the new ones with ``USE_V1=1``.

    Wraps the functions that read the arguments, to refuse what would drop SCAO. Registering again does nothing;
    `unregister` undoes it. One line in LLaMA-Factory's log says that it happened, and ``origin`` is in it.

    Raises:
        ConfigError: there is a "scao" that is not ours; nothing has changed.
        FrameworkError: LLaMA-Factory or transformers is missing, too old, or lacks what is wrapped.
    """
    require_llamafactory()
    for module, hook in ((_PARSER, _hook_parser), (_ARGUMENTS_V1, _hook_v1)):
        wanted = module in sys.modules or _enabled("USE_V1") == (module == _ARGUMENTS_V1)
        if not wanted or module in _hooked:
            continue
        before = len(_patches)
        try:
            key = hook(importlib.import_module(module))
        except BaseException:
            _undo(before)
            raise
        _hooked.append(module)
        logger = importlib.import_module("llamafactory.extras.logging").get_logger("llamafactory.scao")
        logger.info_rank0(f'SCAO {scao_core.__version__} is registered: "{key}" (by {origin}).')


def unregister() -> None:
    """Undo `register`: the very objects that were there before are back.

    Raises:
        ConfigError: somebody replaced the same functions later; nothing has changed.
    """
    for owner, name, _, ours in _patches:
        if (owner.get(name) if isinstance(owner, dict) else inspect.getattr_static(owner, name)) is not ours:
            what = getattr(owner, "__name__", "LLaMA-Factory's registry")
            raise ConfigError(f"{what}.{name} was replaced after SCAO was registered: undo that first")
    _undo(0)
    _hooked.clear()


def _undo(keep: int) -> None:
    while len(_patches) > keep:
        owner, name, before, _ = _patches.pop()
        if isinstance(owner, dict):
            del owner[name]
        else:
            setattr(owner, name, before)
    if _PARSER not in _hooked or not keep:
        _names.close()


def _patch(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    before = inspect.getattr_static(owner, name, None)
    if before is None:
        import llamafactory

        raise FrameworkError(
            f"LLaMA-Factory {llamafactory.__version__} has no {owner.__name__}.{name}, which SCAO's door wraps: "
            f"it was written for 0.9.5; run: {_INSTALL}"
        )
    _patches.append((owner, name, before, wrap(before)))
    setattr(owner, name, _patches[-1][3])


def require_llamafactory() -> None:
    """Raise FrameworkError unless LLaMA-Factory is there and new enough."""
    require("llamafactory", "0.9", "LLaMA-Factory door", _INSTALL)
    import llamafactory

    numbers = [int(n) for n in re.findall(r"\d+", llamafactory.__version__)[:3]]
    if numbers < [0, 9, 5]:
        raise FrameworkError(
            f"SCAO's LLaMA-Factory door needs llamafactory >= 0.9.5, found {llamafactory.__version__}; run: {_INSTALL}"
        )


def _enabled(variable: str) -> bool:
    return os.environ.get(variable, "0").lower() in ("true", "y", "1")  # as LLaMA-Factory reads them


# --- the arguments it uses now ----------------------------------------------------------------------------------------


def _hook_parser(parser: ModuleType) -> str:
    if not transformers_names.is_registered():
        transformers_names.register()
        _names.callback(transformers_names.unregister)
    from transformers import Trainer

    _patch(parser.TrainingArguments, "__post_init__", _spelling_out)
    _patch(Trainer, "get_optimizer_cls_and_kwargs", _without_decay)
    _patch(parser, "_parse_train_args", _refusing)
    _patch(parser, "_parse_train_mca_args", _refusing)
    return f"optim: {NAME}"


def _spelling_out(before: Any) -> Any:
    """``optim_args`` may be a mapping, or a list, in a YAML file and in the WebUI; transformers takes text only."""

    @functools.wraps(before)
    def post_init(self: Any) -> None:
        given = self.optim_args
        if self.optim == NAME and not isinstance(given, str | None):
            if isinstance(given, Mapping):
                given = [f"{name}={_text(value)}" for name, value in given.items()]
            if not isinstance(given, list):
                raise ConfigError(f"optim_args={given!r}: expected name=value,name=value or a mapping of options")
            self.optim_args = _text(given)
        before(self)

    return post_init


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _without_decay(before: Any) -> Any:
    """Groups carry their weight decay, all but that of norms and biases in PPO, which means 0."""

    @functools.wraps(before.__func__)
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        kind, kwargs = before.__func__(args, model)
        return (kind, {**kwargs, "weight_decay": 0.0}) if kind is SCAO else (kind, kwargs)

    return staticmethod(get_optimizer_cls_and_kwargs)


def _refusing(before: Any) -> Any:
    @functools.wraps(before)
    def parse(*args: Any, **kwargs: Any) -> Any:
        parsed = before(*args, **kwargs)
        _, _, training, finetuning, _ = parsed
        if training.optim == NAME:
            _refuse_others(training, finetuning)
        return parsed

    return parse


def _refuse_others(training: Any, finetuning: Any) -> None:
    for switch, effect in _OTHERS.items():
        if getattr(finetuning, switch, False):
            raise ConfigError(
                f"{switch}: true {effect}, and optim: {NAME} would have no effect: leave out one of the two"
            )
    if getattr(training, "fsdp", None) or _enabled("ACCELERATE_USE_FSDP"):
        raise ConfigError(
            f"FSDP shards the matrices that optim: {NAME} preconditions: leave out fsdp, so that FORCE_TORCHRUN=1 "
            "trains with DistributedDataParallel"
        )


# --- its second generation (USE_V1=1) ---------------------------------------------------------------------------------


def _hook_v1(arguments: ModuleType) -> str:
    plugin = importlib.import_module(_OPTIMIZERS_V1).OptimizerPlugin
    methods = plugin._registry[NAME]
    if methods:
        raise ConfigError(
            f'"{NAME}" already means something else in LLaMA-Factory\'s plugins ({methods}), so it was left as it is'
        )
    plugin(NAME).register()(build_v1)
    _patches.append((methods, "__call__", None, build_v1))
    _patch(arguments.TrainingArguments, "__post_init__", _checking_v1)
    return f"optim_config: {{name: {NAME}}}"


def build_v1(model: Any, config: Mapping[str, Any]) -> SCAO:
    """The optimizer for ``optim_config: {name: scao, ...}``; vectors, which are norms and biases, do not decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return SCAO([group for group in groups if group["params"]], **_options_v1(config))


def _options_v1(config: Mapping[str, Any]) -> dict[str, Any]:
    return checked({name: value for name, value in config.items() if name != "name"})


def _checking_v1(before: Any) -> Any:
    @functools.wraps(before)
    def post_init(self: Any) -> None:
        before(self)
        if (config := self.optim_config) is None or config.name != NAME:
            return
        if kind := (self.dist_config or {}).get("name"):
            raise ConfigError(
                f"dist_config: {{name: {kind}}} shards the matrices that SCAO preconditions: leave dist_config out, "
                "then LLaMA-Factory uses DistributedDataParallel"
            )
        config.setdefault("lr", self.learning_rate)  # which it gives to its own AdamW only
        _options_v1(config)

    return post_init


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    """``scao-llamafactory ...``: LLaMA-Factory's own command, with SCAO registered here and in the processes it starts."""
    try:
        require_llamafactory()
        os.environ[autoload.VARIABLE] = "1"
        autoload.wait("scao-llamafactory")
        if not _torch_calls_us():
            _redirect_children()
        from llamafactory.cli import main as run

        run()
    except ScaoError as error:
        sys.exit(f"scao-llamafactory: {error}")


def _torch_calls_us() -> bool:
    """Whether a fresh interpreter would register by `autoload`."""
    entries = importlib.metadata.entry_points(group="torch.backends")
    allowed = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    ours = any(entry.value == f"{autoload.__name__}:start" for entry in entries)
    return allowed and ours and version(torch.__version__) >= [2, 5]


def _redirect_children() -> None:
    """Let torchrun start `autoload` as a script instead of LLaMA-Factory's launcher, and the WebUI this command."""
    for name in ("llamafactory.launcher", "llamafactory.v1.launcher"):
        importlib.import_module(name).__file__ = autoload.__file__
    if sys.argv[1:2] == ["webui"]:
        runner: Any = importlib.import_module("llamafactory.webui.runner")
        runner.Popen = _popen


def _popen(command: list[str], **settings: Any) -> subprocess.Popen[Any]:
    if command[0] == "llamafactory-cli":
        command = [sys.executable, "-m", "scao_integrations.llamafactory_hook", *command[1:]]
    return subprocess.Popen(command, **settings)


if __name__ == "__main__":
    main()
