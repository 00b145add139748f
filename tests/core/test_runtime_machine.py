"""Random histories: an optimizer with threads, tiers and whatever goes wrong with them against a plain one with the same delay.

Whatever the order of steps, skipped steps, missing gradients, lost workers, checkpoints, copies and closings, parameters
and state are the same to the bit.
"""

from __future__ import annotations

import collections
import copy
import gc
import io
import pickle
import random
import tempfile
import threading
import time
import warnings
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from scao import SCAO
from scao_core.curvature import Dense

SHAPES = [(12, 20), (12, 20), (6, 30), (2, 8, 10), (7,)]
PLACES = {
    "nowhere else": {},
    "host": {"memory_budget": 0},
    "file": {"memory_budget": 0, "offload_dir": "file"},
    "all three": {"memory_budget": "2KiB", "host_budget": "4KiB", "offload_dir": "all three"},
}
SETTINGS = settings(
    max_examples=10,
    stateful_step_count=15,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


class Faults:
    """What happens to the workers: each decomposition in one takes some time, and the next ones end its thread."""

    def __init__(self) -> None:
        self.deaths, self.died, self.slowness, self.random = 1, 0, 0.0, random.Random(3)

    def install(self) -> None:
        self.original = Dense.refresh
        original, faults = self.original, self

        def refresh(self: Dense, snapshot: Any) -> Any:
            if threading.current_thread().name == "scao-worker":
                time.sleep(faults.slowness * faults.random.random())
                if faults.deaths > 0:
                    faults.deaths, faults.died = faults.deaths - 1, faults.died + 1
                    raise SystemExit
            return original(self, snapshot)

        Dense.refresh = refresh  # type: ignore[method-assign]

    def remove(self) -> None:
        Dense.refresh = self.original  # type: ignore[method-assign]


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "scao-worker"]


class Machine(RuleBasedStateMachine):
    """``tested`` and ``model``: parameters with their optimizer."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.before = set(workers())
        self.folder = tempfile.TemporaryDirectory()
        self.silence = warnings.catch_warnings()
        self.silence.__enter__()
        warnings.simplefilter("ignore")
        self.faults = Faults()
        self.faults.install()
        self.seed, self.refreshed = 0, 0
        self.model = self.make(runtime="staggered")
        self.tested = self.make(runtime="thread", place="all three")
        self.adopt()

    def make(self, runtime: str, place: str = "nowhere else") -> tuple[list[Any], SCAO]:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
        options: dict[str, Any] = dict(PLACES[place])
        if "offload_dir" in options:
            options["offload_dir"] = f"{self.folder.name}/{options['offload_dir']}"
        kind = {"factors": "dense,dense", "engine": self.engine, "refresh_every": 4, "refresh_delay": 2}
        return params, SCAO(params, lr=1e-2, runtime=runtime, **kind, **options)

    engine = "kl"
    seen: ClassVar[collections.Counter[str]] = collections.Counter()
    """What has happened in all histories, by name."""

    def adopt(self) -> None:
        """Called for each new optimizer under test."""

    def remember(self) -> None:
        """What the optimizer under test has done, before another one takes its place."""
        optimizer, workers = self.tested[1], self.tested[1]._refreshes.workers
        last = optimizer.report().last
        self.seen["queued"] += bool(last and last.queued)
        self.seen["in the file"] += bool(last and last.tiers.get("nvme"))
        self.seen["pending"] += any(optimizer._refreshes.pending.values())
        self.seen["lost"] += bool(workers and workers._losses)
        self.seen["broken"] += bool(workers and workers.broken)
        self.seen["skipped"] += optimizer.report().skipped_steps
        self.seen["refreshed"] += optimizer.report().refreshed

    def take(self, gradients: list[torch.Tensor | None]) -> None:
        for params, optimizer in (self.model, self.tested):
            for p, g in zip(params, gradients, strict=True):
                p.grad = None if g is None else g.clone()
            optimizer.step()

    def gradients(self) -> list[Any]:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(shape, generator=generator) for shape in SHAPES]

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.take(self.gradients())

    @rule(which=st.integers(0, len(SHAPES) - 1), value=st.sampled_from([float("nan"), float("inf")]))
    def step_that_is_skipped(self, which: int, value: float) -> None:
        gradients = self.gradients()
        gradients[which].view(-1)[0] = value
        self.take(gradients)

    @rule(present=st.lists(st.booleans(), min_size=len(SHAPES), max_size=len(SHAPES)), expert=st.integers(0, 1))
    def step_without_some_gradients(self, present: list[bool], expert: int) -> None:
        gradients = self.gradients()
        gradients[3][expert] = 0
        self.take([g if here else None for g, here in zip(gradients, present, strict=True)])

    @rule(deaths=st.sampled_from([0, 1, 4]))
    def workers_die(self, deaths: int) -> None:
        self.faults.deaths = deaths

    @rule(slowness=st.sampled_from([0.0, 0.005, 0.02]))
    def workers_take_their_time(self, slowness: float) -> None:
        self.faults.slowness = slowness

    @rule(place=st.sampled_from(sorted(PLACES)), runtime=st.sampled_from(["thread", "staggered"]), close=st.booleans())
    def save_and_load(self, place: str, runtime: str, close: bool) -> None:
        self.remember()
        params, optimizer = self.tested
        buffer = io.BytesIO()
        torch.save({"model": [p.data for p in params], "optimizer": optimizer.state_dict()}, buffer)
        if close:
            optimizer.close()
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        self.tested = self.make(runtime, place)
        for p, q in zip(self.tested[0], saved["model"], strict=True):
            p.data.copy_(q)
        self.tested[1].load_state_dict(saved["optimizer"])
        self.adopt()

    @rule()
    def copy_deeply(self) -> None:
        self.remember()
        self.tested = copy.deepcopy(self.tested)
        self.adopt()

    @rule()
    def pickle_and_unpickle(self) -> None:
        self.remember()
        self.tested = pickle.loads(pickle.dumps(self.tested))
        self.adopt()

    @rule()
    def close_it(self) -> None:
        self.remember()
        self.tested[1].close()

    @rule(lr=st.sampled_from([1e-2, 3e-3, 0.0]))
    def change_lr(self, lr: float) -> None:
        for _, optimizer in (self.model, self.tested):
            optimizer.param_groups[0]["lr"] = lr

    @invariant()
    def same_bits(self) -> None:
        """The tensors themselves: asking for a state dict would wait for the workers."""
        (params, model), (others, tested) = self.model, self.tested
        for i, (p, q) in enumerate(zip(params, others, strict=True)):
            assert torch.equal(p, q), f"parameter {i}"
            one, other = model.state.get(p, {}), tested.state.get(q, {})
            assert one.keys() == other.keys()
            for key, value in one.items():
                assert torch.equal(value, other[key]), f"{i}.{key}"

    def teardown(self) -> None:
        try:
            self.remember()
            self.seen["workers died"] += self.faults.died
            one, other = (optimizer.state_dict()["state"] for _, optimizer in (self.model, self.tested))
            self.same_pending(one, other)
            report = self.tested[1].report()
            assert (report.lost_bases, report.restarted, report.failed_refreshes) == (0, 0, 0)
            self.tested[1].close()
            del self.tested, self.model
            gc.collect()
            end = time.monotonic() + 10
            while set(workers()) - self.before and time.monotonic() < end:
                time.sleep(0.01)
            assert not set(workers()) - self.before
        finally:
            self.faults.remove()
            self.silence.__exit__(None, None, None)
            self.folder.cleanup()

    def same_pending(self, one: Any, other: Any) -> None:
        assert one.keys() == other.keys()
        for i, entry in one.items():
            assert all(torch.equal(value, other[i][key]) for key, value in entry.items())


class WithMoments(Machine):
    """Soap keeps second moments in the basis, which each installation expresses anew."""

    engine = "soap"


class WhenReady(dict):  # type: ignore[type-arg]
    """A book that hands out what is ready, not what is due."""

    def get(self, param: Any, default: Any = None) -> Any:
        entry = super().get(param, default)
        for pending in (entry or {}).values():
            if pending.computed.job.ready:
                object.__setattr__(pending, "due", 0)
        return entry


class InstalledWhenReady(Machine):
    """Negative control."""

    def adopt(self) -> None:
        refreshes = self.tested[1]._refreshes
        refreshes.pending = WhenReady(refreshes.pending)

    def same_pending(self, one: Any, other: Any) -> None:
        """It is the invariant that must notice."""


@pytest.mark.parametrize("machine", [Machine, WithMoments], ids=["kl", "soap"])
def test_no_history_changes_a_bit(machine: type[Machine]) -> None:
    machine.seen.clear()
    run_state_machine_as_test(machine, settings=SETTINGS)
    expected = {
        "in the file",
        "pending",
        "workers died",
        "skipped",
        "refreshed",
    }  # what else happens is a matter of time
    assert {what for what, times in machine.seen.items() if times} >= expected, machine.seen


def test_the_machine_would_notice_bases_that_are_installed_when_ready() -> None:
    with pytest.raises(AssertionError, match=r"basis|parameter|exp_avg|gain"):
        run_state_machine_as_test(InstalledWhenReady, settings=SETTINGS)
