"""``runtime="thread"``: the bits do not depend on the workers, whatever happens to them, and nothing is lost or left behind."""

import copy
import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from scao import SCAO, ConfigError
from scao_core.curvature import Dense
from scao_core.runtime import Job, Workers

SHAPES = [(80, 90), (80, 90), (6, 90), (3, 70, 80), (40,)]


def make(engine="kl", **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
    named = {"factors": "dense,dense", "refresh_every": 6, "engine": engine, **options}
    return params, SCAO(params, lr=1e-2, **named)


def train(params, optimizer, first, last):
    for t in range(first, last):
        generator = torch.Generator().manual_seed(t)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def run(steps=20, **options):
    params, optimizer = make(**options)
    train(params, optimizer, 0, steps)
    return params, optimizer


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def slow_down(monkeypatch, seconds):
    """Every decomposition of a worker takes a random time more."""
    original, generator = Dense.refresh, torch.Generator().manual_seed(5)

    def refresh(self, snapshot):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(float(torch.rand((), generator=generator)) * seconds)
        return original(self, snapshot)

    monkeypatch.setattr(Dense, "refresh", refresh)


@pytest.mark.parametrize("engine", ["kl", "soap"])
@pytest.mark.parametrize("delay", [1, 3, 5])
def test_the_same_bits_without_threads(engine, delay, monkeypatch):
    expected, _ = run(engine=engine, runtime="staggered", refresh_delay=delay)
    slow_down(monkeypatch, 0.02)
    params, optimizer = run(engine=engine, runtime="thread", refresh_delay=delay)
    assert_same(params, expected)
    assert optimizer.report().refreshed > 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_bits_do_not_depend_on_how_many_threads_the_step_has(threads):
    """A worker has one thread; LAPACK rounds otherwise with two, on some processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected, _ = run(runtime="staggered", refresh_delay=3)
        assert torch.get_num_threads() == threads
        params, _ = run(runtime="thread", refresh_delay=3)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert_same(params, expected)


def test_no_delay_is_the_plain_optimizer():
    expected, _ = run(runtime="staggered")
    params, optimizer = run(runtime="thread", refresh_delay=0)
    assert_same(params, expected)
    assert optimizer._refreshes.workers is None


@pytest.mark.parametrize("cores", [1, 2])
def test_auto_takes_workers_where_a_core_is_spare_and_the_bits_are_the_same(cores, monkeypatch):
    expected, _ = run(runtime="thread")
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(threads - 1 + cores)), raising=False)
    params, optimizer = run(runtime="auto")
    assert_same(params, expected)
    assert (optimizer._refreshes.workers is not None) == (cores == 2)
    assert optimizer.report().refreshed > 0


def test_the_delay_changes_the_result():
    """Negative control: with a delay that did nothing, the tests above could not fail."""
    a, _ = run(runtime="staggered", refresh_delay=0)
    b, _ = run(runtime="staggered", refresh_delay=3)
    assert not torch.equal(a[0], b[0])


class WhenReady(dict):
    """Negative control: a book that hands out what is ready, not what is due."""

    def get(self, param, default=None):
        entry = super().get(param, default)
        if entry:
            for key, pending in entry.items():
                if pending.computed.job.ready:
                    object.__setattr__(pending, "due", 0)
                entry[key] = pending
        return entry


def replica(monkeypatch, lags, when_ready=""):
    """A run whose jobs take so many steps of the training, one after the other. ``when_ready`` is "" for the real rule; "at
    once" waits for each job before the next step, "late" does not."""
    clock, lags = [0], itertools.cycle(lags)
    with monkeypatch.context() as patch:
        original = Dense.refresh

        def refresh(self, snapshot):
            if threading.current_thread() is not threading.main_thread():
                until, patience = (
                    clock[0] + next(lags),
                    time.monotonic() + 0.3,
                )  # the training may wait for this very job
                while clock[0] < until and time.monotonic() < patience:
                    time.sleep(0.001)
            return original(self, snapshot)

        patch.setattr(Dense, "refresh", refresh)
        params, optimizer = make(runtime="thread", refresh_delay=5)
        if when_ready:
            optimizer._refreshes.pending = WhenReady()
        for t in range(18):
            train(params, optimizer, t, t + 1)
            clock[0] += 1
            jobs = [x.computed.job for entry in optimizer._refreshes.pending.values() for x in entry.values()]
            patience = time.monotonic() + 10
            while not all(job.ready for job in jobs) and time.monotonic() < patience and when_ready == "at once":
                time.sleep(0.001)
    return params


def test_replicas_stay_equal_and_would_not_if_bases_were_installed_when_ready(monkeypatch):
    a, b = (replica(monkeypatch, lags) for lags in ([0, 3, 1], [4, 0, 2, 1]))
    assert_same(a, b)
    a, b = replica(monkeypatch, [0], when_ready="at once"), replica(monkeypatch, [4], when_ready="late")
    assert not all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- checkpoints and copies, with jobs on their way --------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["kl", "soap"])
@pytest.mark.parametrize("at", range(1, 14))
def test_resume_at_any_step(engine, at, tmp_path):
    expected, _ = run(engine=engine, runtime="thread")
    params, optimizer = make(engine=engine, runtime="thread")
    train(params, optimizer, 0, at)
    torch.save({"model": [p.data for p in params], "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    resumed, other = make(engine=engine, runtime="staggered")  # the options come from the checkpoint
    for p, q in zip(resumed, saved["model"], strict=True):
        p.data.copy_(q)
    other.load_state_dict(saved["optimizer"])
    train(resumed, other, at, 20)
    assert_same(resumed, expected)
    train(params, optimizer, at, 20)  # saving has disturbed nothing
    assert_same(params, expected)


def test_pending_keys_are_always_there():
    """torch.distributed.checkpoint loads into what a fresh optimizer's state dict holds."""
    params, optimizer = make(runtime="thread")
    for t in range(12):
        train(params, optimizer, t, t + 1)
        entry = optimizer.state_dict()["state"][0]
        assert {"left_pending", "left_pending_due", "right_pending", "right_pending_due"} <= set(entry)
    params, optimizer = run(runtime="staggered")
    assert not any("pending" in key for key in optimizer.state_dict()["state"][0])


def test_there_is_something_pending_in_these_tests():
    params, optimizer = make(runtime="thread")
    seen = 0
    for t in range(12):
        train(params, optimizer, t, t + 1)
        seen += any(
            int(e["right_pending_due"].abs().sum()) > 0 for e in list(optimizer.state_dict()["state"].values())[:4]
        )
    assert seen > 6


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_copies_go_on_alike(how):
    params, optimizer = make(runtime="thread")
    train(params, optimizer, 0, 8)
    twins, twin = how((params, optimizer))
    train(params, optimizer, 8, 20)
    train(twins, twin, 8, 20)
    assert_same(params, twins)


def test_a_wrong_pending_entry_is_refused_before_anything_changes():
    _, optimizer = run(8, runtime="thread")
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["left_pending"] = torch.zeros(3, 3)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="left_pending has shape"):
        optimizer.load_state_dict(state)
    for key, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, before["state"][0][key])


# --- what goes wrong ---------------------------------------------------------------------------------------------------


def broken_in_worker(kind, released):
    original = Dense.refresh

    def refresh(self, snapshot):
        if threading.current_thread() is not threading.main_thread():
            if kind == "hangs":
                released.wait(60)
            raise SystemExit
        return original(self, snapshot)

    return refresh


@pytest.mark.parametrize("kind", ["dies", "hangs"])
def test_a_lost_worker_costs_time_and_nothing_else(kind, monkeypatch):
    expected, _ = run(runtime="staggered", refresh_delay=3)
    released = threading.Event()
    monkeypatch.setattr(Dense, "refresh", broken_in_worker(kind, released))
    monkeypatch.setattr(Workers.__init__, "__defaults__", (0.2,))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        params, optimizer = run(runtime="thread", refresh_delay=3)
    released.set()
    assert_same(params, expected)
    assert optimizer._refreshes.workers.broken
    (warning,) = [w for w in seen if "worker of SCAO" in str(w.message)]
    assert "runtime='staggered'" in str(warning.message)


def test_a_failed_decomposition_keeps_the_last_basis(monkeypatch):
    def refresh(self, snapshot):
        raise torch.linalg.LinAlgError("no convergence")

    params, optimizer = make(runtime="thread")
    train(params, optimizer, 0, 8)
    monkeypatch.setattr(Dense, "refresh", refresh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(params, optimizer, 8, 40)
    report = optimizer.report()
    assert report.failed_refreshes > 3
    assert report.degraded > 0
    assert all(torch.isfinite(p).all() for p in params)
    monkeypatch.undo()
    train(params, optimizer, 40, 56)
    assert optimizer.report().last.failed == 0


def test_a_skipped_step_does_not_advance_the_clock():
    params, optimizer = make(runtime="thread")
    expected, other = make(runtime="thread")
    train(params, optimizer, 0, 7)
    train(expected, other, 0, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for p in params:
            p.grad = torch.full_like(p, float("nan"))
        optimizer.step()
    train(params, optimizer, 7, 20)
    train(expected, other, 7, 20)
    assert_same(params, expected)


def test_the_delay_must_be_less_than_the_interval():
    with pytest.raises(ConfigError, match="refresh_delay=6 must be at most refresh_every - 1 = 5"):
        make(refresh_delay=6)
    with pytest.raises(ConfigError, match="did you mean 'thread'"):
        make(runtime="treads")


# --- threads -----------------------------------------------------------------------------------------------------------


def ours():
    return [t for t in threading.enumerate() if t.name == "scao-worker"]


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_no_thread_is_left_behind():
    gc.collect()
    assert wait_for(lambda: not ours())
    params, optimizer = run(runtime="thread")
    assert ours()
    optimizer.close()
    assert not ours()
    train(params, optimizer, 20, 30)  # still usable
    assert ours()
    del params, optimizer
    gc.collect()
    assert wait_for(lambda: not ours())


def test_no_thread_without_need():
    before = len(ours())
    made = make(runtime="thread")
    assert made
    assert len(ours()) == before
    vectors = [torch.nn.Parameter(torch.zeros(5))]
    train(vectors, SCAO(vectors, runtime="thread"), 0, 12)
    assert len(ours()) == before


def test_the_number_of_threads_of_others_stays():
    before = torch.get_num_threads()
    kept = run(runtime="thread")
    assert kept
    assert torch.get_num_threads() == before
    seen = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [before]


def test_a_worker_has_one_thread():
    pool = Workers()
    assert pool.submit(torch.get_num_threads).result() == 1
    pool.close()


def test_a_forked_child_computes_for_itself():
    job, started = None, threading.Event()

    def compute():
        started.set()
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)
        return 7

    pool = Workers()
    job = pool.submit(compute)
    assert started.wait(10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks with threads; that is what is tested
        child = os.fork()
    if child == 0:
        os._exit(0 if job.result() == 7 and Workers().submit(lambda: 3).result() == 3 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert job.result() == 7
    pool.close()


def test_an_error_of_the_computation_reaches_who_asks():
    def compute():
        raise KeyError("mine")

    pool = Workers()
    job = pool.submit(compute)
    with pytest.raises(KeyError, match="mine"):
        job.result()
    assert isinstance(job, Job)
    pool.close()


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise KeyboardInterrupt"])
def test_the_interpreter_ends_in_time_and_with_the_right_code(ending):
    code = (
        "import sys, time, torch; from scao_core.runtime import Workers; pool = Workers(); "
        f"jobs = [pool.submit(lambda: time.sleep(1)) for _ in range(50)]; time.sleep(.2); {ending or 'pass'}"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    wanted = {"": (0,), "sys.exit(3)": (3,)}.get(ending, (130, -2, 1))
    assert done.returncode in wanted, done.stderr
    assert time.monotonic() - start < 25  # 50 jobs of a second are not waited for; importing torch takes a while


def test_reports_tell_of_waiting(monkeypatch):
    original = Dense.refresh

    def refresh(self, snapshot):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        return original(self, snapshot)

    monkeypatch.setattr(Dense, "refresh", refresh)
    reports = []
    params, optimizer = make(runtime="thread", refresh_delay=1)
    optimizer.on_step(reports.append)
    train(params, optimizer, 0, 14)
    assert max(r.queued for r in reports) > 0
    assert max(r.waited for r in reports) > 0.02  # several matrices share a job of 0.05 s that is due a fast step later
    assert optimizer.report().waited == pytest.approx(sum(r.waited for r in reports))
    assert "waited for refreshes" in str(optimizer.report())


def test_a_loader_that_drops_bases_on_their_way_is_noticed():
    """Flattened torch.distributed.checkpoint keeps the keys that ``optimizer.state`` has, and no others."""
    _, optimizer = run(8, runtime="thread")
    whole = optimizer.state_dict()
    cut = {i: {k: v for k, v in entry.items() if "pending" not in k} for i, entry in whole["state"].items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(runtime="thread")[1].load_state_dict(whole)
    with pytest.warns(UserWarning, match="holds no bases that were on their way"):
        make(runtime="thread")[1].load_state_dict({**whole, "state": cut})
    plain = run(8)[1].state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make()[1].load_state_dict(plain)
