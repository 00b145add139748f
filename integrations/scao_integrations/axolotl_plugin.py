"""SCAO in Axolotl: ``optimizer: scao``, with SCAO's own options under ``optim_args``.

Axolotl >= 0.20 knows the name and imports ``SCAO`` from the module ``scao``; from 0.21 on it also finds this plugin, by its
entry point. 0.19 and 0.20 need it in the YAML::

    plugins: [scao_integrations.axolotl_plugin.ScaoPlugin]

The plugin checks the options and what would drop SCAO before a model is loaded, gives the class to the Trainer, and adds SCAO's
counters to its logs. With another ``optimizer`` it does nothing, and imports neither torch nor ``scao_core``.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_OLDEST, _NAME = "0.19", "scao"
_COMMAND = f'pip install "axolotl>={_OLDEST}"'
_PLACEHOLDER = {
    "optim": "adamw_torch",
    "optim_args": None,
}  # what TrainingArguments accept; `post_trainer_create` decides


class _Hooks:
    """What Axolotl calls; each does nothing unless ``optimizer`` is scao."""

    def register(self, cfg: Any = None) -> None:
        """Refuse a wrong version, wrong options and what would drop SCAO, as soon as the YAML is read."""
        if _chosen(cfg):
            _require_axolotl()
            _refuse_misplaced(cfg)
            _prepare(cfg)

    def pre_model_load(self, cfg: Any) -> None:
        """The same for code that validates a config without the command line."""
        if _chosen(cfg):
            _require_axolotl()
            _prepare(cfg)

    def get_training_args(self, cfg: Any) -> dict[str, Any] | None:
        """A name that transformers knows in place of "scao", which its arguments refuse."""
        return dict(_PLACEHOLDER) if _chosen(cfg) else None

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """SCAO's counters in the Trainer's logs."""
        if not _chosen(cfg):
            return []
        from . import transformers_callback

        return [transformers_callback.ScaoCallback()]

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Give the Trainer the class, which it calls with its own parameter groups after the model is wrapped."""
        if not _chosen(cfg):
            return
        from axolotl.utils.logging import get_logger

        from scao_core import SCAO

        options, kwargs = _prepare(cfg)
        _refuse_launched(trainer, options)
        kwargs |= {"weight_decay": trainer.args.weight_decay}
        kwargs.setdefault("lr", trainer.args.learning_rate)
        # Under Axolotl's name, because it sets every other logger to warnings only.
        get_logger("axolotl.scao").info("the optimizer is SCAO with %s", kwargs)
        trainer.optimizer_cls_and_kwargs = (SCAO, kwargs | _loraplus(trainer.args))


def _chosen(cfg: Any) -> bool:
    name = (cfg or {}).get("optimizer")
    return str(getattr(name, "value", name)).strip().lower() == _NAME


def _require_axolotl() -> None:
    from .requirements import require

    require("axolotl", _OLDEST, "the Axolotl door", _COMMAND)


def _prepare(cfg: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of ``optim_args``, and with them all that SCAO gets; both checked, as everything that could drop SCAO.

    Leaves ``optim_args`` in the config as a mapping of converted values: Axolotl hands a mapping on as it is, but cuts text at
    each comma, and options of older code are translated, with their warning, only once.
    """
    from scao_core import ConfigError, Options

    from .transformers_names import checked

    if (name := cfg["optimizer"]) != _NAME:
        raise ConfigError(f"optimizer: {name!r} is no optimizer of Axolotl; did you mean {_NAME!r}?")
    options = checked(_optim_args(cfg.get("optim_args")))
    if options or cfg.get("optim_args"):
        cfg["optim_args"] = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    # One of the two rates may be given: the other is SCAO's default, not dropped together with the first.
    pair = [cfg.get(name) for name in ("adam_beta1", "adam_beta2")]
    settings = {
        "lr": cfg.get("learning_rate"),
        "weight_decay": cfg.get("weight_decay"),
        "betas": [d if b is None else b for b, d in zip(pair, Options().betas, strict=True)],
        "eps": cfg.get("adam_epsilon"),
    }
    kwargs = checked({name: value for name, value in settings.items() if value is not None})
    _refuse_conflicts(cfg, options, kwargs.get("weight_decay", 0.0))
    return options, kwargs | options


def _optim_args(given: Any) -> dict[str, Any]:
    """By name, whether given as a mapping or as text."""
    from scao_core import ConfigError

    from .transformers_names import parse_optim_args

    if given is None or isinstance(given, str):
        return dict(parse_optim_args(given))
    if not isinstance(given, dict):
        raise ConfigError(f"optim_args={given!r}: expected a mapping, or text such as 'spike_rank=8,damping=1e-3'")
    return {str(name): value for name, value in given.items()}


def _refuse_conflicts(cfg: Any, options: Mapping[str, Any], decay: float) -> None:
    """Raise if a key of the config would drop SCAO, or be dropped, without a word."""
    from scao_core import ConfigError

    from .transformers_names import refuse_conflicts

    if options.get("weight_decay", decay) != decay:
        raise ConfigError(
            f"weight_decay={options['weight_decay']} under optim_args would have no effect, because Axolotl writes its own "
            f"into every group (here {decay}): set weight_decay at the top level"
        )
    if cfg.get("relora"):
        raise ConfigError(
            "relora: true resets the optimizer's state by AdamW's names, so SCAO would keep the curvature of weights that are "
            "gone: delete relora, or train with AdamW"
        )
    if cfg.get("fsdp") or cfg.get("fsdp_config"):
        raise ConfigError(_sharded("fsdp_config" if cfg.get("fsdp_config") else "fsdp"))
    for key in ("dp_shard_size", "tensor_parallel_size"):
        if str(cfg.get(key) or 1) != "1":
            raise ConfigError(_sharded(f"{key}: {cfg[key]}"))
    args = SimpleNamespace(weight_decay=options.get("weight_decay", decay))
    args.optim_target_modules = cfg.get("optim_target_modules")
    args.hf_deepspeed_config = SimpleNamespace(config=_deepspeed(cfg.get("deepspeed")))
    refuse_conflicts(args, options)


def _refuse_launched(trainer: Any, options: Mapping[str, Any]) -> None:
    """Raise on what ``accelerate launch`` brought in, which no key of the config shows."""
    from scao_core import ConfigError

    from .transformers_names import refuse_conflicts

    refuse_conflicts(trainer.args, options)
    if getattr(trainer, "is_fsdp_enabled", False):
        raise ConfigError(_sharded("FSDP from the launcher"))


def _sharded(what: str) -> str:
    return (
        f"{what} hides the matrices from SCAO in shards: delete it; several GPUs train with DistributedDataParallel, which is "
        "what Axolotl uses without it"
    )


def _deepspeed(given: Any) -> Mapping[str, Any]:
    """The DeepSpeed config, which may be a file; what cannot be read is left for Axolotl to report."""
    if isinstance(given, str):
        with contextlib.suppress(OSError, ValueError):
            given = json.loads(Path(given).read_text(encoding="utf-8"))
    return given if isinstance(given, dict) else {}


def _refuse_misplaced(cfg: Any) -> None:
    """Raise on options outside of ``optim_args``: Axolotl drops a key that it does not know without a word."""
    from scao_core import ConfigError
    from scao_core.config import LEGACY, OPTION_NAMES

    names = {*OPTION_NAMES, *LEGACY}
    found = [key for key in map(str, cfg) if key in names or key.startswith(f"{_NAME}_")]
    if not found:
        return
    from axolotl.integrations.config import merge_input_args

    known = merge_input_args()[1].model_fields  # with those of all plugins
    for key in found:
        if key not in known:
            option = key.removeprefix(f"{_NAME}_")
            raise ConfigError(f"{key} is no key of Axolotl, which would drop it: write {option} under optim_args")


def _loraplus(args: Any) -> dict[str, Any]:
    """LoRA+ makes groups of its own, which have no weight decay before Axolotl 0.20 unless it is given so."""
    import axolotl

    from .requirements import version

    if getattr(args, "loraplus_lr_ratio", None) is None or version(axolotl.__version__) >= version("0.20"):
        return {}
    return {"loraplus_weight_decay": args.weight_decay}


def __getattr__(name: str) -> Any:
    """``ScaoPlugin`` derives from a class of Axolotl, so it is made when Axolotl first asks for it."""
    if name != "ScaoPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from axolotl.integrations.base import BasePlugin
    except ImportError:
        _require_axolotl()  # a sentence where it is missing; otherwise the error is about something else
        raise
    members = {"__module__": __name__, "__doc__": __doc__}
    return globals().setdefault(name, type(name, (_Hooks, BasePlugin), members))
