"""Host threads that compute jobs, and what happens when one dies, hangs, or is left behind by a fork."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")

_PATIENCE = 60.0  # seconds that a result may be late before it is computed here instead (chosen)
_GIVE_UP = 2  # workers lost before no more are started (chosen)
_LAST_WAIT = 5.0  # seconds that a running job may take to end when the interpreter exits (chosen)
_MOST = 4  # workers of one optimizer (chosen)
_LOOK = 0.05  # seconds between two looks at whether the worker is still alive


def spare_cores() -> int:
    """Cores that this process may use and its main thread's own operations do not."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return allowed - torch.get_num_threads()


class Job(Generic[Result]):
    """One computation, on copies only. Whoever asks for the result gets it, also if no worker will ever compute it."""

    def __init__(self, compute: Callable[[], Result]) -> None:
        self._compute = compute
        self._done = threading.Event()
        self._result: list[Result] = []
        self._error: Exception | None = None
        self._worker: threading.Thread | None = None
        self._workers: Workers | None = None
        self._process = os.getpid()

    def run(self) -> None:
        """Compute; an error is kept for whoever asks for the result. Interrupts and exits go through."""
        try:
            self._result = [self._compute()]
        except Exception as error:
            self._error = error.with_traceback(None)  # which would keep the tensors of all its frames
        self._done.set()

    @property
    def ready(self) -> bool:
        """Whether the result can be had without waiting."""
        return self._process == os.getpid() and self._done.is_set()

    def result(self) -> Result:
        """The result; waits for it for a limited time, and computes it here if its worker is gone.

        Raises:
            Exception: what the computation raised.
        """
        if not self._arrives():
            self.run()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _arrives(self) -> bool:
        if self._process != os.getpid():  # the worker stayed in the parent process, maybe with a lock in its hands
            self._process, self._done = os.getpid(), threading.Event()
            return bool(self._result or self._error)
        if self._workers is None or self._workers.closed:
            return self._done.is_set()
        patience = time.monotonic() + self._workers.patience
        while not self._done.wait(_LOOK):
            alive = self._worker.is_alive() if self._worker else self._workers.alive
            if self._done.is_set():
                break
            if not alive or time.monotonic() > patience:
                self._workers.lost(self._worker, "did not finish" if alive else "died")
                return False
        return True


class Workers:
    """A few daemon threads, started with the first job. Each computes with one thread of its own."""

    def __init__(self, patience: float = _PATIENCE) -> None:
        self._count = max(1, min(_MOST, spare_cores()))
        self.patience = patience
        self.closed = False
        self._losses = 0
        self._reset()
        _alive.add(self)

    def _reset(self) -> None:
        self._process = os.getpid()
        self._queue: SimpleQueue[Job[object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._late: list[threading.Thread] = []
        """Given up, but alive: they end when they come back."""

    @property
    def broken(self) -> bool:
        """Whether so many workers were lost that jobs are computed by whoever asks for them."""
        return self._losses >= _GIVE_UP

    @property
    def alive(self) -> bool:
        """Whether a worker is there to take a job."""
        return any(thread.is_alive() for thread in self._threads)

    def submit(self, compute: Callable[[], Result]) -> Job[Result]:
        """Have it computed; at once and here if there are no workers any more."""
        job = Job(compute)
        if self.closed or self.broken:
            job.run()
            return job
        if self._process != os.getpid():
            self._reset()  # after a fork: the threads are in the parent
        job._workers = self
        while len(self._threads) < self._count:
            self._start()
        self._queue.put(job)  # type: ignore[arg-type]
        return job

    def _start(self) -> None:
        queue, before = self._queue, torch.get_num_threads()
        thread = threading.Thread(target=_work, args=(queue, before), name="scao-worker", daemon=True)
        self._threads.append(thread)
        thread.start()

    def lost(self, worker: threading.Thread | None, how: str) -> None:
        """Replace a worker that died or hangs; after the second there are no more, with a warning."""
        known = [thread for thread in self._threads if thread is worker or not thread.is_alive()]
        self._threads = [thread for thread in self._threads if thread not in known]
        self._late += [thread for thread in known if thread.is_alive()]
        self._losses += 1
        if self._losses == _GIVE_UP:
            self.close(0.0)
            warnings.warn(
                f"a second worker of SCAO {how}: refreshes are computed within the step from now on, as by "
                "runtime='staggered'; the results are the same",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self, wait: float = _LAST_WAIT) -> None:
        """Let the workers finish what they compute now, drop what waits, and join them for a limited time."""
        if self.closed or self._process != os.getpid():
            self.closed = True
            return
        self.closed = True
        with contextlib.suppress(Empty):  # a worker may take the last one
            while True:
                self._queue.get_nowait()
        for _ in [*self._threads, *self._late]:
            self._queue.put(None)
        end = time.monotonic() + wait
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def __del__(self) -> None:
        if self._process == os.getpid():
            for _ in [*self._threads, *self._late]:  # they hold the queue, not this object
                self._queue.put(None)


_alive: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for workers in list(_alive):
        workers.close()


def _work(queue: SimpleQueue[Job[object] | None], threads: int) -> None:
    """What a worker does until it gets None."""
    _keep_to_one_thread(threads)
    while (job := queue.get()) is not None:
        job._worker = threading.current_thread()
        try:
            job.run()
        except BaseException:  # SystemExit and the like end this thread, as in a worker that was killed
            return
        del job


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Operations with one thread, as in a worker: a decomposition with two may round otherwise."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _keep_to_one_thread(before: int) -> None:
    """Use one thread for this thread's operations. torch remembers the number for threads that start later: put that back."""
    torch.get_num_threads()
    torch.set_num_threads(1)
    torch.get_num_threads()
    restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
    restoring.start()
    restoring.join()
