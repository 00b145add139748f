"""Cross entropy on answer tokens, with the output head evaluated at those positions only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from scao_tools.data.encoding import IGNORED, Encoded


@dataclass(frozen=True)
class Batch:
    """Right-padded token ids; ``labels`` is `IGNORED` on prompts and padding."""

    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor


def collate(examples: Sequence[Encoded], pad_id: int, device: torch.device) -> Batch:
    """Pad a few examples to their longest."""
    width = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), width), pad_id, dtype=torch.long)
    labels = torch.full((len(examples), width), IGNORED, dtype=torch.long)
    mask = torch.zeros((len(examples), width), dtype=torch.long)
    for row, example in enumerate(examples):
        length = len(example.ids)
        ids[row, :length] = torch.tensor(example.ids)
        labels[row, :length] = torch.tensor(example.labels)
        mask[row, :length] = 1
    return Batch(ids.to(device), mask.to(device), labels.to(device))


class AnswerLoss:
    """Loss of a causal language model on labeled tokens.

    The vocabulary is large and most tokens are prompt, so a hook hands the output head only the hidden states whose
    next token has a label. Everything after the head in the model (scaling, soft caps) works on them unchanged.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype
        self._wanted: torch.Tensor | None = None
        head = model.get_output_embeddings()
        self._hook = None if head is None else head.register_forward_pre_hook(self._select)

    def close(self) -> None:
        """Remove the hook from the model."""
        if self._hook is not None:
            self._hook.remove()

    def _select(self, _module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._wanted is None or not args or args[0].shape[:2] != self._wanted.shape:
            return None
        return (args[0][self._wanted], *args[1:])

    def per_token(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the fp32 loss of each labeled token, and the row of the batch that it belongs to."""
        targets = functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORED)
        wanted = targets != IGNORED
        self._wanted = wanted
        try:
            device = batch.ids.device.type
            with torch.autocast(device, dtype=self._dtype, enabled=self._dtype != torch.float32):
                output = self._model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
        finally:
            self._wanted = None
        logits = output.logits
        if logits.dim() == 3:
            logits = logits[wanted] if logits.shape[:2] == wanted.shape else logits.flatten(0, 1)
        losses = functional.cross_entropy(logits.float(), targets[wanted], reduction="none")
        return losses, wanted.nonzero()[:, 0]
