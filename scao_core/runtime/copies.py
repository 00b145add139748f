"""Copies of host tensors on a device and back, beside the training's own stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .stream import side_stream


def is_apart(device: torch.device) -> bool:
    """Whether host memory must be copied to be used on the device."""
    return device.type != "cpu"


class Copies:
    """Host tensors on their way to a device.

    All transfers of a device take the same stream, so what is read follows what was written back before.

    Args:
        hosts: pinned, or the copies wait for the training.
    """

    def __init__(self, hosts: Sequence[Tensor], device: torch.device) -> None:
        self._hosts, self._device = hosts, device
        self._stream = side_stream(device) if device.type == "cuda" else None
        if self._stream is None:
            self._copies = [host.to(device, copy=True) for host in hosts]
            return
        with torch.cuda.stream(self._stream):
            self._copies = [host.to(device, non_blocking=True) for host in hosts]
            self._arrived = self._stream.record_event()

    def arrived(self) -> list[Tensor]:
        """The copies, for use on the current stream, which waits for them; the host does not."""
        if self._stream is not None:
            training = torch.cuda.current_stream(self._device)
            training.wait_event(self._arrived)
            for copy in self._copies:
                copy.record_stream(training)
        return self._copies

    def write_back(self, which: Sequence[int]) -> None:
        """Copy some back to where they came from; until ``settle`` the host must not look at them."""
        if self._stream is None:
            for i in which:
                self._hosts[i].copy_(self._copies[i])
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for i in which:
                self._hosts[i].copy_(self._copies[i], non_blocking=True)


def settle(device: torch.device) -> None:
    """Wait until everything that was written back has arrived."""
    if device.type == "cuda":
        side_stream(device).synchronize()
