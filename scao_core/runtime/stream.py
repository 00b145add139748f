"""As ``thread``, with the transfers of CUDA tensors on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .base import Result
from .thread import Thread

_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one low-priority stream of a device; it lives as long as the process."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]  # 0 is the least urgent
    return _streams[device]


class Stream(Thread):
    """What a worker reads from a GPU and writes to it does not wait for the training's own stream, nor does that for it.

    The decomposition itself is the host's, so the bits are those of every other schedule at the same delay. On a CPU it
    is the same as ``thread``.
    """

    name: ClassVar[str] = "stream"

    def beside(self, compute: Callable[[], Result], reads: Sequence[Tensor]) -> Callable[[], Result]:
        device = reads[0].device
        if device.type != "cuda":
            return compute
        training, side = torch.cuda.current_stream(device), side_stream(device)
        written = training.record_event()
        for tensor in reads:
            tensor.record_stream(side)  # its memory is not given away while the side stream still reads it

        def run() -> Result:
            with torch.cuda.stream(side):
                side.wait_event(written)
                result = compute()
                side.synchronize()  # only this thread waits: a result that is ready can be read by any stream
            for value in result if isinstance(result, tuple) else (result,):
                if isinstance(value, Tensor):
                    value.record_stream(training)
            return result

        return run
