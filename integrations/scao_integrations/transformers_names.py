"""``optim="scao"`` in transformers, and what its arguments mean to SCAO: shared by the doors that are built on it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from scao_core import SCAO, ConfigError, Options

from .requirements import require

NAME, _MEMBER = "scao", "SCAO"


def require_transformers() -> None:
    """Raise FrameworkError unless transformers is there and new enough."""
    require("transformers", "4.48", "the Hugging Face door", 'pip install "transformers>=4.48" accelerate')


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as SCAO takes them, converted, those of older code translated; a wrong one raises now."""
    if "params" in options:
        Options.from_mapping({"params": None})  # not an option, and the error says so
    plain, probe = Options().as_dict(), SCAO([torch.nn.Parameter(torch.zeros(1))], **options)
    return {name: value for name, value in probe.defaults.items() if name in options or value != plain[name]}


def of_arguments(args: Any) -> dict[str, Any]:
    return {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def parse_optim_args(text: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """``"spike_rank=8,betas=0.9,0.99"`` by name; an item without ``=`` belongs to the value before it. A mapping stays."""
    if isinstance(text, Mapping):
        return dict(text)
    items = [item.partition("=") for item in re.split(r",(?=[^,=]*=)", text or "") if item.strip()]
    if not all(equals for _, equals, _ in items):
        raise ConfigError(f"optim_args={text!r}: expected name=value pairs, e.g. 'spike_rank=8,damping=1e-3'")
    return {name.strip(): value.strip(" ,") for name, _, value in items}


def kwargs_by_name(args: Any) -> dict[str, Any]:
    """What SCAO gets from TrainingArguments with ``optim="scao"``; raises on anything that would not work."""
    options = checked(parse_optim_args(args.optim_args))
    refuse_conflicts(args, options)
    return {**of_arguments(args), **options}


def refuse_conflicts(args: Any, options: Mapping[str, Any]) -> None:
    """Raise if a setting of the TrainingArguments would drop SCAO, or be dropped, without a word."""
    if (decay := options.get("weight_decay", args.weight_decay)) != args.weight_decay:
        raise ConfigError(
            f"weight_decay={decay} would have no effect: set TrainingArguments.weight_decay (here {args.weight_decay})"
        )
    if targets := getattr(args, "optim_target_modules", None):
        raise ConfigError(
            f"optim_target_modules={targets!r} would have no effect: SCAO preconditions every matrix; leave it out"
        )
    launched = getattr(getattr(args, "deepspeed_plugin", None), "hf_ds_config", None)  # by `accelerate launch`
    config: Mapping[str, Any] = getattr(getattr(args, "hf_deepspeed_config", None) or launched, "config", {})
    if block := config.get("optimizer"):
        raise ConfigError(f'the "optimizer" block of the DeepSpeed config ({block}) would replace SCAO: delete it')
    zero = config.get("zero_optimization") or {}
    offload = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if offload or str(zero.get("stage", 0)) != "0":
        raise ConfigError(
            f"DeepSpeed ZeRO (stage {zero.get('stage')}) hides the matrices from SCAO in flat shards"
            f"{', and ZeRO-Offload replaces it by DeepSpeedCPUAdam' if offload else ''}: set zero_optimization to "
            '{"stage": 0} without offload, or use DistributedDataParallel'
        )


_patches: list[tuple[type, str, Any, Any]] = []  # while registered: class, attribute, what was there before, and ours


def register() -> None:
    """Let ``TrainingArguments(optim="scao", optim_args="name=value,...")`` mean SCAO, in this process.

    Adds a member to transformers' ``OptimizerNames``, which command lines list, and wraps two functions, which do for
    every other name what they did: ``TrainingArguments.__post_init__``, which then checks the options at once, and
    ``Trainer.get_optimizer_cls_and_kwargs``. Registering again does nothing; `unregister` undoes it.

    Raises:
        ConfigError: this transformers has a "scao" that is not ours; nothing has changed.
        FrameworkError: transformers is missing or too old.
    """
    require_transformers()
    from transformers import Trainer, TrainingArguments
    from transformers.training_args import OptimizerNames

    if _patches:
        return
    if NAME in OptimizerNames._value2member_map_ or _MEMBER in OptimizerNames.__members__:
        raise ConfigError(
            f'optim="{NAME}" already means something else in this process, so it was left as it is: use '
            "Trainer(..., **scao_trainer_kwargs()), which needs no registration"
        )
    _patch(TrainingArguments, "__post_init__", _checking)
    _patch(Trainer, "get_optimizer_cls_and_kwargs", _dispatching)
    _set_member(OptimizerNames, True)


def unregister() -> None:
    """Undo `register`: the very objects that were there before are back.

    Raises:
        ConfigError: somebody replaced the same functions later; nothing has changed.
    """
    for owner, name, _, ours in _patches:
        if inspect.getattr_static(owner, name) is not ours:
            raise ConfigError(f"{owner.__name__}.{name} was replaced after SCAO was registered: undo that first")
    if _patches:
        from transformers.training_args import OptimizerNames

        _set_member(OptimizerNames, False)
    while _patches:
        owner, name, before, _ = _patches.pop()
        setattr(owner, name, before)


def is_registered() -> bool:
    """Whether `register` is in effect in this process."""
    return bool(_patches)


def _patch(owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
    before = inspect.getattr_static(owner, name)
    _patches.append((owner, name, before, wrap(before)))
    setattr(owner, name, _patches[-1][3])


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """``with registered(): ...``; a registration that was there before stays."""
    before = bool(_patches)
    register()
    try:
        yield
    finally:
        if not before:
            unregister()


def _checking(before: Any) -> Any:
    @functools.wraps(before)
    def post_init(self: Any) -> None:
        before(self)
        if self.optim == NAME:
            kwargs_by_name(self)

    return post_init


def _dispatching(before: Any) -> Any:
    @functools.wraps(before.__func__)
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        return (SCAO, kwargs_by_name(args)) if args.optim == NAME else before.__func__(args, model)

    return staticmethod(get_optimizer_cls_and_kwargs)


def _set_member(names: Any, present: bool) -> None:
    """Add our member to an enum of text, as its class body would, or take it out (Python 3.10 to 3.13)."""
    ordered = [(names._member_names_, _MEMBER), (getattr(names, "_hashable_values_", []), NAME)]
    if not present:
        del names._member_map_[_MEMBER], names._value2member_map_[NAME]
        type.__delattr__(names, _MEMBER)
        for entries, entry in ordered:
            entries[:] = [kept for kept in entries if kept != entry]
        return
    member = str.__new__(names, NAME)
    member._name_, member._value_, member._sort_order_ = _MEMBER, NAME, len(names._member_names_)
    member.__objclass__ = names
    type.__setattr__(names, _MEMBER, member)
    names._member_map_[_MEMBER] = names._value2member_map_[NAME] = member
    for entries, entry in ordered:
        entries.append(entry)
