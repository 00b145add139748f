"""What a state dict of SCAO is, and what is refused.

Schema 1: ``state[i]`` holds tensors only, with the keys, shapes and dtypes that ``plan`` lists; ``param_groups[i]``
holds the options as plain values and ``scao_schema``. Nothing else is saved, so ``weights_only`` loading,
torch.distributed.checkpoint and FSDP, which keep exactly these two, keep everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .config import DEFAULTS, OPTION_NAMES, PLACEMENT, Options
from .engines import PREFIXES
from .errors import CheckpointError, ConfigError
from .plan import Slot, plan, plan_key

SCHEMA = 1
SCHEMA_KEY = "scao_schema"

# Options and state keys by which other optimizers' checkpoints are recognized, most specific first.
_OTHERS = (
    ("torch.optim.AdamW or Adam", {"exp_avg_sq", "amsgrad"}),
    ("torch.optim.SGD", {"dampening"}),
    ("torch.optim.Muon", {"ns_coefficients"}),
    ("Adafactor", {"scale_parameter"}),
    ("an 8-bit bitsandbytes optimizer", {"qmap1"}),
    ("an older SCAO", {"precond_freq"}),
)
# What was done before an option existed, where that is not its default now: an older state goes on as it was.
_BEFORE: dict[str, Any] = {"cautious": False, "nesterov": False}
# What a basis that is not installed yet is kept as, beside the slots of its parameter.
PENDING, DUE = "pending", "pending_due"
_WAY_OUT = "start with a fresh optimizer state, or resume from the weights alone (in transformers: save_only_model)"


def check(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Refuse, before anything changes, a state dict that these parameter groups cannot take.

    Raises:
        CheckpointError: another optimizer's state, a newer schema, other groups, or tensors that do not fit.
    """
    check_form(state_dict)
    saved = state_dict["param_groups"]
    for group in saved:
        if SCHEMA_KEY not in group:
            raise CheckpointError(f"this state was written by {_writer(state_dict)}, not by SCAO: {_WAY_OUT}")
        if not isinstance(group[SCHEMA_KEY], int) or group[SCHEMA_KEY] > SCHEMA:
            raise CheckpointError(
                f"this state has schema {group[SCHEMA_KEY]}, this version of SCAO reads up to {SCHEMA}: update scao, "
                f"or {_WAY_OUT}"
            )
    sizes, expected = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if sizes != expected:
        raise CheckpointError(
            f"the state has parameter groups of {sizes} parameters, this optimizer of {expected}: build it as it was "
            "built for the saved run"
        )
    for group, here in zip(saved, groups, strict=True):
        _options(group)
        for position, (key, param) in enumerate(zip(group["params"], here["params"], strict=True)):
            if key in state_dict["state"]:
                _check_entry(state_dict["state"][key], param, group, position)


def check_form(state_dict: Any) -> None:
    wrong = "not an optimizer state dict"
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise CheckpointError(f"{wrong}: expected the keys 'state' and 'param_groups'; {_WAY_OUT}")
    state, saved = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in state.values()):
        raise CheckpointError(f"{wrong}: 'state' must be a dict of dicts, got {type(state).__name__}; {_WAY_OUT}")
    if not isinstance(saved, (list, tuple)) or not all(isinstance(g, Mapping) and "params" in g for g in saved):
        raise CheckpointError(f"{wrong}: 'param_groups' must be a list of dicts with the key 'params'; {_WAY_OUT}")


def with_rests(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with a flat profile where a spiked factor was saved before it had one: its rest was one number."""
    state = {}
    for key, entry in state_dict["state"].items():
        state[key] = dict(entry)
        for prefix in PREFIXES:
            tail, basis = entry.get(prefix + "tail"), entry.get(prefix + "basis")
            if prefix + "rest" not in entry and isinstance(tail, Tensor) and isinstance(basis, Tensor) and basis.dim():
                state[key][prefix + "rest"] = tail[..., None].expand(*tail.shape, basis.shape[-1])
    return {**state_dict, "state": state}


def portable(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group with what belongs to the machine of this run unset; the keys stay, for torch.distributed.checkpoint."""
    return {name: DEFAULTS[name] if name in PLACEMENT else value for name, value in group.items()}


def completed(state_dict: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with options converted, and those that it lacks at what they were before they existed.

    Args:
        here: the options that belong to the machine of this run.
    """
    saved = [{**DEFAULTS, **g, **_options(portable(g)).as_dict(), **here} for g in state_dict["param_groups"]]
    return {**state_dict, "param_groups": saved}


def plain(value: Any) -> Any:
    """A value of a parameter group as a plain number, text, tuple or tensor, which any loader can read.

    Schedulers and users write into groups what they have: a numpy number, a list of a configuration library.
    """
    if value is None or (isinstance(value, (bool, int, float, str, Tensor)) and type(value).__module__ != "numpy"):
        return value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        return value.item()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Iterable):
        return tuple(plain(item) for item in value)
    return value


def _writer(state_dict: Mapping[str, Any]) -> str:
    keys = {key for group in state_dict["param_groups"] for key in group}
    keys |= {key for entry in state_dict["state"].values() if isinstance(entry, Mapping) for key in entry}
    for name, marks in _OTHERS:
        if marks & keys:
            return name
    return f"another optimizer (its options: {', '.join(sorted(keys - {'params'})[:8])})"


def _slots(param: Tensor, group: Mapping[str, Any]) -> dict[str, Slot]:
    """The planned state tensors of a parameter under the options of a saved group."""
    return dict(plan(tuple(param.shape), param.dtype, plan_key(_options(group).as_dict())).slots)


def _pending_slots(slots: Mapping[str, Slot]) -> dict[str, Slot]:
    """For each basis that is refreshed, the next one, and at which count of its matrix it is due.

    Due is 0 where nothing is pending, and negative where the decomposition failed.
    """
    found: dict[str, Slot] = {}
    for key in [key for key in slots if key.endswith("failures")]:
        prefix = key.removesuffix("failures")
        found[prefix + PENDING] = slots[prefix + "basis"]
        found[prefix + DUE] = Slot(slots["step"].shape, torch.int64)
    return found


def with_pending(
    entry: Mapping[str, Tensor], pending: Mapping[tuple[int, int], tuple[int, Tensor | None]]
) -> dict[str, Any]:
    """A parameter's entry with what is pending for it, by (matrix, side); the keys are there also for nothing."""
    result: dict[str, Any] = dict(entry)
    for side, prefix in enumerate(PREFIXES):
        if prefix + "failures" not in entry:
            continue
        due = torch.zeros(entry["step"].shape, dtype=torch.int64)
        bases = torch.zeros_like(entry[prefix + "basis"])
        for (part, at), (when, basis) in pending.items():
            if at == side:
                due.view(-1)[part] = when if basis is not None else -when
                if basis is not None:
                    (bases[part] if due.dim() else bases).copy_(basis)
        result |= {prefix + PENDING: bases, prefix + DUE: due}
    return result


def lacks_pending(entry: Mapping[str, Tensor]) -> bool:
    """Whether a loader has dropped what ``with_pending`` adds to every entry."""
    return any(key.endswith("failures") and key.removesuffix("failures") + DUE not in entry for key in entry)


def take_pending(entry: dict[str, Tensor]) -> dict[tuple[int, int], tuple[int, Tensor | None]]:
    """The inverse of ``with_pending``: removes what it added."""
    found: dict[tuple[int, int], tuple[int, Tensor | None]] = {}
    for side, prefix in enumerate(PREFIXES):
        due, bases = entry.pop(prefix + DUE, None), entry.pop(prefix + PENDING, None)
        if due is None or bases is None:
            continue
        for part, when in enumerate(due.view(-1).tolist()):
            if when:
                basis = (bases[part] if due.dim() else bases).clone() if when > 0 else None
                found[part, side] = (abs(int(when)), basis)
    return found


def _options(group: Mapping[str, Any]) -> Options:
    try:
        return Options.from_mapping(_BEFORE | {name: group[name] for name in OPTION_NAMES if name in group})
    except ConfigError as error:
        raise CheckpointError(f"the options in the state are not valid: {error}") from error


def _check_entry(entry: Mapping[str, Any], param: Tensor, group: Mapping[str, Any], position: int) -> None:
    wanted = _slots(param, group)
    wanted |= {key: slot for key, slot in _pending_slots(wanted).items() if key in entry}
    where = f"parameter {position} of shape {tuple(param.shape)}"
    missing, extra = sorted(set(wanted) - set(entry)), sorted(set(entry) - set(wanted))
    if missing or extra:
        raise CheckpointError(
            f"{where}: the state lacks {missing or 'nothing'} and has {extra or 'nothing'} too much; it was saved for "
            f"another model or edited: {_WAY_OUT}"
        )
    for key, slot in wanted.items():
        value = entry[key]
        if not isinstance(value, Tensor) or tuple(value.shape) != slot.shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(f"{where}: {key} has {got}, expected a tensor of shape {slot.shape}; {_WAY_OUT}")


def place(
    state: Mapping[int, Mapping[str, Any]],
    saved: Iterable[Mapping[str, Any]],
    groups: Iterable[Mapping[str, Any]],
    device: Callable[[Tensor, str], torch.device],
) -> dict[Tensor, dict[str, Tensor]]:
    """The saved tensors by parameter: copies in the planned dtype (so bit for bit), each on the device where it belongs.

    torch's own loading would cast every tensor to the dtype of its parameter.
    """
    placed: dict[Tensor, dict[str, Tensor]] = {}
    for group, here in zip(saved, groups, strict=True):
        for key, param in zip(group["params"], here["params"], strict=True):
            if key in state:
                slots = _slots(param, group)
                slots |= {name: slot for name, slot in _pending_slots(slots).items() if name in state[key]}
                placed[param] = {
                    name: _placed(
                        state[key][name], slot.dtype, torch.device("cpu") if DUE in name else device(param, name)
                    )
                    for name, slot in slots.items()
                }
    return placed


def _placed(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    copy = torch.empty(value.shape, dtype=dtype, device=device)
    return copy if copy.is_meta else copy.copy_(value)
