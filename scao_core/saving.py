"""Copies and checkpoints of the optimizer: what is saved, what is loaded, what is rebuilt."""

from __future__ import annotations

import collections
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from . import checkpoint, groups
from .config import DEFAULTS, PLACEMENT
from .offload import Offload
from .plan import Plan
from .refresh import Refreshes
from .reporting import ReportingOptimizer
from .schedule import Turns, delay_of


class SavingOptimizer(ReportingOptimizer):
    """State dicts, pickles and deep copies of SCAO."""

    _turns: tuple[object, list[list[Turns]]] | None
    """The refresh schedule, and what it was made for; rebuilt when that changes."""
    _verified: dict[Tensor, Plan]
    """The plan that a parameter's state was last seen to fit."""
    _refreshes: Refreshes
    _offload: Offload

    def state_dict(self) -> dict[str, Any]:
        """State and options as tensors and plain values, loadable with ``weights_only=True``."""
        known = {param for group in self.param_groups for param in group["params"]}
        # Of a parameter that was replaced or removed: torch would fail on it. Or empty, made by somebody who looked.
        for gone in [param for param, entry in self.state.items() if param not in known or not entry]:
            del self.state[gone]
            self._verified.pop(gone, None)
            self._refreshes.pending.pop(gone, None)
        result = self._with_pending(super().state_dict())
        result["param_groups"] = [checkpoint.plain(checkpoint.portable(group)) for group in result["param_groups"]]
        return result

    def _with_pending(self, result: dict[str, Any]) -> dict[str, Any]:
        """The state dict with the bases that are computed but not due yet; waits for those that are not computed."""
        pending, state, intact = self._refreshes.drained(), dict(result["state"]), self._intact()
        for group, packed in zip(self.param_groups, result["param_groups"], strict=True):
            for param, index in zip(group["params"], packed["params"], strict=True):
                if index in state:
                    state[index] = intact[param]
                    if delay_of(group) or param in pending:
                        state[index] = checkpoint.with_pending(state[index], pending.get(param, {}))
        return {**result, "state": state}

    def _arrange(self, loaded: Collection[int] = ()) -> None:
        """Decide where state lies, that of trainable parameters and of all others that have some or are about to."""
        if not self._offload.active:
            return
        numbered = enumerate(param for group in self.param_groups for param in group["params"])
        kept = {param for i, param in numbered if param.requires_grad or i in loaded or self.state.get(param)}
        self._offload.arrange([(p, plan) for p, plan in groups.planned(self.param_groups, frozen=True) if p in kept])

    def _intact(self) -> dict[Tensor, dict[str, Tensor]]:
        """The state, with copies in place of what is damaged on a disk."""
        plans = dict(groups.planned(self.param_groups, frozen=True)) if self._offload.active else {}
        return {
            p: self._offload.repaired(p, plans[p], entry) if p in plans else entry for p, entry in self.state.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that SCAO saved, in its own dtypes and bit for bit; options come from it, as torch does it.

        Raises:
            CheckpointError: the state belongs to another optimizer, another model or a newer version; nothing has
                changed.
        """
        checkpoint.check_form(state_dict)
        incoming: dict[str, Any] = {}

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            given = checkpoint.with_rests(given)
            checkpoint.check(given, self.param_groups)
            incoming.update(checkpoint.completed(given, {name: self.defaults[name] for name in PLACEMENT}))
            return {**incoming, "state": {}}

        def put(_: torch.optim.Optimizer) -> None:
            self._arrange(set(incoming["state"]))
            saved, device = incoming["param_groups"], self._offload.device
            placed = checkpoint.place(incoming["state"], saved, self.param_groups, device)
            late = [param for group in self.param_groups if delay_of(group) for param in group["params"]]
            if any(checkpoint.lacks_pending(placed[param]) for param in late if param in placed):
                self._warn_once(
                    "pending",
                    "the state was saved with a refresh_delay and holds no bases that were on their way: a loader dropped them "
                    "(flattened torch.distributed.checkpoint does), so this run goes on with the bases in use until their next "
                    "turn, not as if it had not stopped",
                )
            self._refreshes.put({param: checkpoint.take_pending(entry) for param, entry in placed.items()})
            self.state.update(placed)

        # The hooks of users run around these two: theirs see and may change what is loaded, as torch promises.
        hooks = (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        state = collections.defaultdict(dict, self._intact())
        return {**kept, "state": state, "_telemetry": self._telemetry, "_pending": self._refreshes.drained()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pending, is_copy = state.pop("_pending", {}), "defaults" in state  # torch calls this when it loads, too
        super().__setstate__(state)
        self._turns, self._verified = None, {}
        if is_copy:
            self._refreshes = Refreshes()
            self._offload = Offload({**DEFAULTS, **self.defaults}, self._warn_once)
        self._refreshes.put(pending)

    def close(self) -> None:
        """End the host threads of ``runtime="thread"`` and remove the file of ``offload_dir``.

        The optimizer stays usable: it starts new threads if it must, and what lay in the file stays in its mapped memory.
        """
        self._refreshes.close()
        self._offload.close()
