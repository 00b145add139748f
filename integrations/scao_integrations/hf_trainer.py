"""SCAO in the Hugging Face Trainer, and in those of TRL, which derive from it.

::

    Trainer(model, args, ..., **scao_trainer_kwargs(spike_rank=8))                # by its class: patches nothing
    register(); TrainingArguments(..., optim="scao", optim_args="spike_rank=8")   # by its name: opt-in, can be undone
    Trainer(..., callbacks=[ScaoCallback()])                                      # what it did, in the Trainer's logs

Learning rate, betas and eps are those of the ``TrainingArguments`` unless they are given here. Weight decay is always
theirs, because the Trainer writes it into the groups. transformers is imported when one of these is used.
"""

from __future__ import annotations

from typing import Any

from scao_core import SCAO

from . import transformers_callback
from .requirements import FrameworkError
from .transformers_names import (
    checked,
    register,
    registered,
    require_transformers,
    unregister,
)

__all__ = ["FrameworkError", "register", "registered", "scao_trainer_kwargs", "unregister"]


def scao_trainer_kwargs(**options: Any) -> dict[str, Any]:
    """Arguments that make a ``Trainer``, or one that derives from it, use SCAO: ``Trainer(model, args, **these)``.

    The Trainer hands ``optimizer_cls_and_kwargs`` to the class as it is; of its arguments only the weight decay gets
    there, in its two groups. So the callback that comes along fills in ``lr`` (``learning_rate``), ``betas``
    (``adam_beta1``, ``adam_beta2``) and ``eps`` (``adam_epsilon``) when the Trainer is built, where no option gives them;
    ``weight_decay`` may only repeat that of the arguments. Without the callback SCAO refuses to start. Callbacks of your
    own go into the list ``these["callbacks"]``.

    Raises:
        ConfigError: an option is wrong or does not exist (the message names the nearest one).
        FrameworkError: transformers is missing or too old.
    """
    require_transformers()
    kwargs: dict[str, Any] = {**dict.fromkeys(("lr", "betas", "eps"), transformers_callback.LATER), **checked(options)}
    return {"optimizer_cls_and_kwargs": (SCAO, kwargs), "callbacks": [transformers_callback.ScaoCallback(kwargs)]}


def __getattr__(name: str) -> Any:
    """``ScaoCallback`` needs transformers, so it is fetched when it is first asked for."""
    if name != "ScaoCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(transformers_callback, name)
