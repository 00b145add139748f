"""Tiers: the same bits wherever curvature lies, the planned bytes on each tier, and nothing lost or left behind."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import io
import mmap
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import children
import scao_core.offload
import scao_core.optimizer
from scao import SCAO, ConfigError
from scao_core.placement import planned_bytes
from scao_core.runtime import assign
from scratch_file import damage, manifest, the_file

SHAPES = [(40, 24), (40, 24), (6, 40), (3, 16, 32), (16,)]
DENSE = {"factors": "dense,dense"}
BLOCKED = {"factors": "blocked,blocked", "block_size": 16}
SPIKED = {"factors": "dense,spiked"}
# Where curvature lies: name -> the options, FOLDER standing for a folder of the test.
FOLDER = object()
SPLITS = {
    "host": {"memory_budget": 0},
    "file": {"memory_budget": 0, "offload_dir": FOLDER},
    "device and host": {"memory_budget": "8KiB"},
    "device and file": {"memory_budget": 8000, "offload_dir": FOLDER},
    "all three": {"memory_budget": "6KiB", "host_budget": "12KiB", "offload_dir": FOLDER},
    "host and file": {"memory_budget": 0, "host_budget": 20000, "offload_dir": FOLDER},
    "nothing elsewhere": {"memory_budget": "1GiB", "host_budget": 0, "offload_dir": FOLDER},
}
PLACES = [None, "host", "file", "all three"]


def make(dtype=torch.float32, shapes=SHAPES, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]
    named = {"refresh_every": 5, **({} if "factors" in options else DENSE), **options}
    return params, SCAO(params, lr=1e-2, **named)


def gradients(params, t):
    generator = torch.Generator().manual_seed(100 + t)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p)


def train(params, optimizer, first, last):
    for t in range(first, last):
        gradients(params, t)
        optimizer.step()


def run(steps=14, **options):
    params, optimizer = make(**options)
    train(params, optimizer, 0, steps)
    return params, optimizer


@functools.cache
def plain(steps=14, **options):
    """The same without tiers; not to be trained any further."""
    params, optimizer = run(steps, **options)
    optimizer.close()  # it lives as long as the tests do
    return params, optimizer


def where(name, folder):
    return {k: str(folder) if v is FOLDER else v for k, v in SPLITS[name].items()} if name else {}


def contents(params, optimizer):
    """Parameters and state, by name."""
    saved = optimizer.state_dict()["state"]
    found = {f"param {i}": p.detach() for i, p in enumerate(params)}
    return found | {f"{i}.{key}": value for i, entry in saved.items() for key, value in entry.items()}


def assert_same(a, b, but=()):
    first, second = contents(*a), contents(*b)
    assert first.keys() == second.keys()
    different = [k for k in first if not torch.equal(first[k], second[k])]
    assert set(different) <= set(but), different


def files(folder):
    return sorted(p.name for p in Path(folder).iterdir())


# --- the same bits -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["here", "apart"])
def apart(request, monkeypatch):
    """With True, host state is copied for each stack and written back, as for a GPU."""
    if request.param:
        monkeypatch.setattr(scao_core.offload, "is_apart", lambda device: True)
    return request.param


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("engine", ["kl", "soap"])
def test_the_same_bits_for_every_split(split, engine, apart, tmp_path):
    for factors in (DENSE, BLOCKED, SPIKED):
        expected = plain(engine=engine, bytes_per_param=100, **factors)
        got = run(engine=engine, bytes_per_param=100, **factors, **where(split, tmp_path))
        assert_same(got, expected)
        assert got[1].report().refreshed == expected[1].report().refreshed > 5
        got[1].close()


@pytest.mark.parametrize("runtime", ["staggered", "inline", "thread", "stream"])
@pytest.mark.parametrize("delay", [0, 3])
def test_the_same_bits_for_every_schedule(runtime, delay, apart, tmp_path):
    options = {"runtime": runtime, "refresh_delay": delay}
    for engine in ("kl", "soap"):
        expected = plain(engine=engine, **options)
        for split in ("host", "all three") if apart else ("file",):
            got = run(engine=engine, **options, **where(split, tmp_path))
            assert_same(got, expected)
            got[1].close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("engine", ["kl", "soap"])
def test_the_same_bits_in_other_dtypes(dtype, engine, apart, tmp_path):
    expected = plain(dtype=dtype, engine=engine)
    for split in ("host", "all three") if apart else ("file", "all three"):
        assert_same(run(dtype=dtype, engine=engine, **where(split, tmp_path)), expected)


def test_copies_are_made_in_these_tests(monkeypatch, tmp_path):
    """Negative control of ``apart``: without writing back, the result differs."""
    monkeypatch.setattr(scao_core.offload, "is_apart", lambda device: True)
    expected = run()
    monkeypatch.setattr(scao_core.runtime.Copies, "write_back", lambda self, which: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of decompositions of zeros
        assert not torch.equal(run(memory_budget=0)[0][0], expected[0][0])
    assert torch.equal(run(**where("file", tmp_path))[0][0], expected[0][0])


# --- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_bytes_on_each_tier_are_the_planned_ones(split, tmp_path):
    for factors in (DENSE, BLOCKED):
        _, optimizer = run(4, **factors, **where(split, tmp_path))
        tiers, planned = optimizer.report().last.tiers, planned_bytes(optimizer.plans(), optimizer.defaults)
        assert tiers == planned == measured(optimizer)
        assert sum(tiers.values()) == optimizer.report().state_bytes
        if planned["nvme"]:
            blocks = manifest(tmp_path)["blocks"]
            sizes = [torch.Size(b["shape"]).numel() * getattr(torch, b["dtype"]).itemsize for b in blocks]
            assert sum(sizes) == planned["nvme"]
            page = mmap.ALLOCATIONGRANULARITY
            assert os.path.getsize(the_file(tmp_path)) == sum(-(-size // page) * page for size in sizes)
        optimizer.close()


def measured(optimizer):
    """By address: what lies in the mapped file, counted from the system's own list of mappings; the rest by the places."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/scao-" in line]
    ranges = [tuple(int(x, 16) for x in line[0].split("-")) for line in maps if "(deleted)" not in line]
    result = dict.fromkeys(("device", "host", "nvme"), 0)
    for param, entry in optimizer.state.items():
        for key, value in entry.items():
            mapped = any(low <= value.data_ptr() < high for low, high in ranges)
            elsewhere = "host" if key in optimizer._offload.places.get(param, ()) else "device"
            result["nvme" if mapped else elsewhere] += value.numel() * value.element_size()
    return result


@pytest.mark.parametrize("memory", [0, 1, 4000, 10**5])
@pytest.mark.parametrize("host", [None, 0, 5000, 10**5])
def test_budgets_are_kept(memory, host, tmp_path):
    _, optimizer = run(2, memory_budget=memory, host_budget=host, offload_dir=tmp_path)
    tiers = optimizer.report().last.tiers
    fixed = planned_bytes(optimizer.plans(), {"memory_budget": 0, "host_budget": None, "offload_dir": None})["device"]
    assert tiers["device"] - fixed <= memory
    assert tiers["host"] <= (host or 0)
    _, plain = run(2)
    assert sum(tiers.values()) == plain.report().last.tiers["device"]
    assert all("cov" in key or "basis" in key for entry in optimizer._offload.places.values() for key in entry)


def test_covariances_come_before_bases():
    _, plain = run(1)
    size = sum(v.numel() * 4 for entry in plain.state.values() for key, v in entry.items() if key.endswith("cov"))
    _, optimizer = run(2, memory_budget=size)
    places = optimizer._offload.places
    assert {key[-3:] for entry in places.values() for key in entry} == {"sis"}
    assert sum(len(entry) for entry in places.values()) == 8
    _, optimizer = run(2, memory_budget=size - 1)
    assert sum(key.endswith("cov") for entry in optimizer._offload.places.values() for key in entry) == 1


def test_assign_never_exceeds_a_budget_but_that_of_the_last_tier():
    assert assign([5, 5, 5, 1], [6, 5, None]) == [0, 1, 2, 0]
    assert assign([7], [6]) == [0]
    assert assign([], [0, None]) == []


# --- checkpoints and copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", PLACES)
@pytest.mark.parametrize("after", PLACES)
@pytest.mark.parametrize(("engine", "runtime"), [("kl", "thread"), ("soap", "staggered")])
def test_a_checkpoint_goes_to_any_placement(before, after, engine, runtime, tmp_path):
    options = {"engine": engine, "runtime": runtime}
    expected = plain(16, **options)
    params, optimizer = run(8, **options, **where(before, tmp_path / "a"))
    buffer = io.BytesIO()
    torch.save({"model": [p.data for p in params], "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert all(group[name] is None for group in saved["optimizer"]["param_groups"] for name in PLACEMENT)
    assert str(tmp_path) not in repr(saved["optimizer"]["param_groups"])
    resumed, other = make(**options, **where(after, tmp_path / "b"))
    for p, q in zip(resumed, saved["model"], strict=True):
        p.data.copy_(q)
    other.load_state_dict(saved["optimizer"])
    for name in PLACEMENT:
        assert all(group[name] == other.defaults[name] for group in other.param_groups)
    train(resumed, other, 8, 16)
    assert_same((resumed, other), expected)
    assert other.report().last.tiers == planned_bytes(other.plans(), other.defaults)
    train(params, optimizer, 8, 16)
    assert_same((params, optimizer), expected)


PLACEMENT = ("memory_budget", "host_budget", "offload_dir")


def test_a_checkpoint_stays_small_and_does_not_change_afterwards(tmp_path):
    """A saved tensor of the file carries its own bytes, not the whole file."""
    params, optimizer = run(6, **where("file", tmp_path))
    buffer, plain = io.BytesIO(), io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    torch.save(run(6)[1].state_dict(), plain)
    assert abs(len(buffer.getvalue()) - len(plain.getvalue())) < 0.02 * len(plain.getvalue())
    saved = copy.deepcopy(optimizer.state_dict())
    before = saved["state"][0]["left_cov"].clone()
    train(params, optimizer, 6, 8)
    assert torch.equal(saved["state"][0]["left_cov"], before)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
@pytest.mark.parametrize("split", ["file", "all three"])
@pytest.mark.parametrize("runtime", ["staggered", "thread"])
def test_a_copy_has_its_own_file(how, split, runtime, tmp_path):
    expected = plain(16, runtime=runtime)
    params, optimizer = run(8, runtime=runtime, **where(split, tmp_path))
    twins, twin = how((params, optimizer))
    train(twins, twin, 8, 16)
    assert len(list(tmp_path.glob("*.bin"))) == len(list(tmp_path.glob("*.json"))) == 2
    assert twin._offload._disk.path != optimizer._offload._disk.path
    assert_same((twins, twin), expected)
    train(params, optimizer, 8, 16)
    assert_same((params, optimizer), expected)
    twin.close()
    assert the_file(tmp_path) == optimizer._offload._disk.path


# --- damage ----------------------------------------------------------------------------------------------------------------


def damaged(folder, blocks, steps=14, at=8, **options):
    """A run in which blocks are damaged after some steps; and the warnings, reports and the optimizer's file."""
    params, optimizer = run(at, **options, memory_budget=0, offload_dir=str(folder))
    reports: list[Any] = []
    optimizer.on_step(reports.append)
    for block in blocks:
        damage(folder, *block)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(params, optimizer, at, steps)
    return (params, optimizer), reports, [str(w.message) for w in seen]


@pytest.mark.parametrize("engine", ["kl", "soap"])
@pytest.mark.parametrize("factors", [DENSE, BLOCKED], ids=["dense", "blocked"])
def test_a_damaged_basis_is_computed_anew(engine, factors, tmp_path):
    options = {"engine": engine, "bytes_per_param": 100, **factors}
    expected = plain(14, **options)
    key = next(k for k in expected[1].state[expected[0][0]] if k.endswith("basis"))
    got, reports, seen = damaged(tmp_path, [(f"0.{key}",), (f"2.{key}",)], **options)
    assert [r.lost_bases for r in reports] == [2, 0, 0, 0, 0, 0]
    assert (got[1].report().lost_bases, got[1].report().restarted) == (2, 0)
    (warning,) = seen
    assert str(got[1]._offload._disk.path) in warning
    for i, (p, q) in enumerate(zip(got[0], expected[0], strict=True)):
        assert torch.isfinite(p).all()
        assert i in (0, 2) or torch.equal(p, q)
        assert (p - q).norm() < 0.1 * q.norm()
    assert all(torch.isfinite(v).all() for v in contents(*got).values())


@pytest.mark.parametrize("at", [1, 6, 8])
@pytest.mark.parametrize("runtime", ["staggered", "thread"])
def test_a_matrix_whose_covariance_is_damaged_starts_over(at, runtime, tmp_path):
    """One at a time: a product of two matrices at once may round otherwise than one of a single matrix."""
    options = {"runtime": runtime, "foreach": False}
    expected = plain(16, **options)
    got, reports, seen = damaged(tmp_path, [("0.left_cov",)], 16, at, **options)
    assert [r.restarted for r in reports] == [1] + [0] * (15 - at)
    assert got[1].report().lost_bases == 0
    assert len(seen) == 1
    own = {k for k in contents(*got) if k.startswith("0.") or k == "param 0"}
    assert_same(got, expected, but=own)
    assert int(got[1].state[got[0][0]]["step"]) == 16 - at
    assert all(torch.isfinite(v).all() for v in contents(*got).values())


@pytest.mark.parametrize("engine", ["kl", "soap"])
@pytest.mark.parametrize("factors", [DENSE, BLOCKED, SPIKED], ids=["dense", "blocked", "spiked"])
def test_whatever_is_damaged_the_others_go_on_and_everything_stays_finite(engine, factors, tmp_path):
    options = {"engine": engine, "bytes_per_param": 100, "max_dense_dim": 8, **factors}
    expected = plain(14, **options)
    keys = [k for k in expected[1].state[expected[0][0]] if k.endswith(("cov", "basis"))]
    for key in keys:
        got, reports, _ = damaged(tmp_path / key, [(f"0.{key}",), (f"3.{key}", 1, 3)], **options)
        assert reports[0].lost_bases + reports[0].restarted == 2
        assert sum(r.lost_bases + r.restarted for r in reports) == 2
        assert all(torch.isfinite(v).all() for v in contents(*got).values())
        for p, q in zip(got[0], expected[0], strict=True):
            assert (p - q).norm() < 0.2 * q.norm()
        got[1].close()


@pytest.mark.parametrize("runtime", ["staggered", "thread"])
def test_a_matrix_that_starts_over_is_as_a_new_one(runtime, tmp_path):
    """From the step of the damage on it takes the steps of a new matrix with the same values."""
    shapes = [(12, 20)]
    params, optimizer = run(7, shapes=shapes, runtime=runtime, memory_budget=0, offload_dir=str(tmp_path))
    values, scale = params[0].detach().clone(), optimizer.state[params[0]]["scale"].clone()
    damage(tmp_path, "0.right_cov")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(params, optimizer, 7, 21)
    fresh, other = make(shapes=shapes, runtime=runtime)
    fresh[0].data.copy_(values)
    gradients(fresh, 7)
    fresh[0].grad *= 0  # makes the state, and moves nothing
    other.state[fresh[0]] = {}
    train(fresh, other, 7, 21)
    if torch.equal(scale, other.state[fresh[0]]["scale"]):  # powers of two: nearly always
        assert_same((params, optimizer), (fresh, other))
    assert not optimizer._refreshes.pending.get(params[0]) or runtime == "thread"


def test_only_the_damaged_expert_is_concerned(tmp_path):
    expected = plain(14)
    got, reports, _ = damaged(tmp_path, [("3.left_cov", 1, 3), ("3.right_basis", 2, 3)])
    assert (reports[0].restarted, reports[0].lost_bases) == (1, 1)
    assert sum(r.restarted + r.lost_bases for r in reports) == 2
    assert_same(got, expected, but={k for k in contents(*got) if k.startswith("3.") or k == "param 3"})
    p, q = got[0][3], expected[0][3]
    assert [torch.equal(p[e], q[e]) for e in range(3)] == [True, False, False]
    assert got[1].state[p]["step"].tolist() == [14, 6, 14]


def test_what_is_pending_for_a_matrix_that_starts_over_is_dropped(tmp_path):
    options = {"runtime": "thread", "refresh_delay": 4, "memory_budget": 0, "offload_dir": str(tmp_path)}
    for at in range(5, 13):
        params, optimizer = run(at, **options)
        had = {key[0] for key in optimizer._refreshes.pending.get(params[3], {})}
        if had == {0, 1, 2}:
            before = {key: pending.due for key, pending in optimizer._refreshes.pending[params[3]].items()}
            break
        optimizer.close()
    damage(tmp_path, "3.left_cov", 1, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(params, optimizer, at, at + 1)
    left = optimizer._refreshes.pending[params[3]]
    assert all(pending.due == 1 + 4 for key, pending in left.items() if key[0] == 1)
    assert {key for key, due in before.items() if due > at + 1} - {key for key in before if key[0] == 1} <= left.keys()
    steps = optimizer.state[params[3]]["step"]
    assert steps.tolist() == [at + 1, 1, at + 1]


@pytest.mark.parametrize("key", ["left_basis", "left_cov"])
@pytest.mark.parametrize("engine", ["kl", "soap"])
@pytest.mark.parametrize("runtime", ["staggered", "thread"])
def test_what_is_saved_of_damaged_state_is_what_the_next_step_makes_of_it(key, engine, runtime, tmp_path):
    options = {"engine": engine, "runtime": runtime}
    params, optimizer = run(8, **options, **where("file", tmp_path))
    damage(tmp_path, f"0.{key}")
    damage(tmp_path, f"3.{key}", 1, 3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        saved = copy.deepcopy(optimizer.state_dict())
        twins, twin = copy.deepcopy((params, optimizer))
        resumed, other = make(**options)
        for p, q in zip(resumed, params, strict=True):
            p.data.copy_(q)
        other.load_state_dict(saved)
        for pair in ((params, optimizer), (resumed, other), (twins, twin)):
            train(*pair, 8, 18)
    assert len(seen) == 1
    for o, wanted in ((optimizer, 2), (other, 0), (twin, 0)):
        assert o.report().lost_bases + o.report().restarted == wanted
    assert_same((resumed, other), (params, optimizer))
    assert_same((twins, twin), (params, optimizer))


def test_a_skipped_step_leaves_damage_for_the_next_one(tmp_path):
    params, optimizer = run(6, **where("file", tmp_path))
    for key in ("left_cov", "left_basis", "right_basis"):
        damage(tmp_path, f"0.{key}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients(params, 6)
        params[1].grad[0, 0] = float("nan")
        optimizer.step()
        assert optimizer.report().restarted == 0
        train(params, optimizer, 7, 8)
    report = optimizer.report()
    assert (report.restarted, report.lost_bases, report.skipped_steps) == (1, 0, 1)


def test_damage_of_what_is_not_used_is_found_when_it_is(tmp_path):
    params, optimizer = run(6, **where("file", tmp_path))
    damage(tmp_path, "1.left_basis")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in range(6, 9):
            gradients(params, t)
            if t < 8:
                params[1].grad = None
            assert optimizer.report().lost_bases == 0
            optimizer.step()
    assert optimizer.report().lost_bases == 1


# --- the disk --------------------------------------------------------------------------------------------------------------


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_everything_on_the_host(monkeypatch, tmp_path, apart):
    expected = plain(14)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.warns(UserWarning, match=r"No space left on device.*stay on the host") as seen:
        got = run(14, **where("file", tmp_path))
    assert len(seen) == 1
    assert str(tmp_path) in str(seen[0].message)
    assert_same(got, expected)
    tiers = got[1].report().last.tiers
    assert tiers["nvme"] == 0
    assert tiers["host"] == planned_bytes(got[1].plans(), got[1].defaults)["nvme"]
    got[1].close()
    assert files(tmp_path) == []


def test_a_disk_that_fills_up_later_keeps_what_it_has(monkeypatch, tmp_path):
    expected, others = make(), [torch.nn.Parameter(torch.ones(8, 12)) for _ in range(2)]
    got = make(**where("file", tmp_path))
    for which, (params, optimizer) in enumerate((expected, got)):
        train(params, optimizer, 0, 6)
        if which:
            length = os.path.getsize(the_file(tmp_path))
            monkeypatch.setattr(os, "posix_fallocate", no_space)
        optimizer.add_param_group({"params": [others[which]]})
        params.append(others[which])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(params, optimizer, 6, 14)
    assert_same(got, expected)
    assert os.path.getsize(the_file(tmp_path)) == length
    assert got[1].report().last.tiers["host"] > 0


def test_a_folder_that_cannot_be_used_is_refused_at_construction(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"offload_dir=.*cannot be used"):
            make(memory_budget=0, offload_dir=path)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written_to_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="cannot be written to"):
        make(memory_budget=0, offload_dir=tmp_path)


def test_the_folder_is_made(tmp_path):
    _, optimizer = run(2, memory_budget=0, offload_dir=tmp_path / "a" / "b")
    assert len(files(tmp_path / "a" / "b")) == 2
    optimizer.close()


def test_the_manifest_describes_the_file(tmp_path):
    params, optimizer = run(7, **where("all three", tmp_path))
    listed = manifest(tmp_path)
    data = the_file(tmp_path).read_bytes()
    assert listed["file"] == the_file(tmp_path).name
    assert listed["bytes"] == len(data)
    assert listed["blocks"]
    for block in listed["blocks"]:
        number, key = block["name"].split(".")
        dtype = getattr(torch, block["dtype"])
        count = torch.Size(block["shape"]).numel()
        found = torch.frombuffer(bytearray(data), dtype=dtype, count=count, offset=block["offset"])
        assert torch.equal(found.view(block["shape"]), optimizer.state[params[int(number)]][key])


def test_the_file_goes_with_the_optimizer(tmp_path):
    pair = run(6, **where("file", tmp_path))
    assert len(files(tmp_path)) == 2
    del pair
    gc.collect()
    assert files(tmp_path) == []


@pytest.mark.parametrize("runtime", ["staggered", "thread"])
def test_somebody_removes_the_file(runtime, tmp_path):
    expected = plain(12, runtime=runtime)
    params, optimizer = run(6, runtime=runtime, **where("file", tmp_path))
    for path in tmp_path.iterdir():
        path.unlink()
    train(params, optimizer, 6, 12)
    assert_same((params, optimizer), expected)
    optimizer.close()


def test_two_optimizers_in_one_folder(tmp_path):
    pairs = [make(**where("file", tmp_path)) for _ in range(2)]
    for pair in pairs:
        train(*pair, 0, 8)
    assert len(files(tmp_path)) == 4
    assert_same(*pairs)
    pairs[0][1].close()
    assert the_file(tmp_path) == pairs[1][1]._offload._disk.path


@pytest.mark.parametrize("runtime", ["staggered", "thread"])
def test_a_closed_optimizer_goes_on(runtime, tmp_path):
    expected = run(20, runtime=runtime)
    params, optimizer = run(7, runtime=runtime, **where("all three", tmp_path))
    for t in range(7, 20):
        optimizer.close()
        optimizer.close()
        assert files(tmp_path) == []
        train(params, optimizer, t, t + 1)
    assert_same((params, optimizer), expected)
    twins, twin = copy.deepcopy((params, optimizer))
    train(twins, twin, 20, 22)
    train(*expected, 20, 22)
    assert_same((twins, twin), expected)


def test_a_group_after_closing(tmp_path):
    expected, got = run(4), run(4, **where("file", tmp_path))
    got[1].close()
    for params, optimizer in (expected, got):
        params.append(torch.nn.Parameter(torch.ones(8, 12)))
        optimizer.add_param_group({"params": params[-1:]})
        train(params, optimizer, 4, 12)
    assert_same(got, expected)
    got[1].close()
    assert files(tmp_path) == []


# --- processes ---------------------------------------------------------------------------------------------------------------

_SCRIPT = """
    import os, signal, sys, time, torch, warnings
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    from scao import SCAO
    folder = sys.argv[1]
    p = torch.nn.Parameter(torch.ones(20, 30))
    o = SCAO([p], lr=1e-2, factors="dense,dense", memory_budget=0, offload_dir=folder, refresh_every=4)
    def step(t, p=p, o=o):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
        o.step()
    for t in range(6):
        step(t)
"""


def start(folder, code):
    script = textwrap.dedent(_SCRIPT) + textwrap.dedent(code)
    env = children.environment()
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], env=env, stdout=pipe, stderr=pipe, text=True)


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path):
    code = """
        child = os.fork()
        step(6)  # also in the child, which so makes a file of its own
        if child == 0:
            os.write(1, b"ready\\n")
            time.sleep(60)
        os.write(1, b"%d\\n" % child)  # one write, which the other process's cannot part
        time.sleep(60)
    """
    process, child = start(tmp_path, code), 0
    try:
        for line in (process.stdout.readline(), process.stdout.readline()):
            child = int(line) if line != "ready\n" else child
        (tmp_path / "scao-mine.bin").write_text("a user's file")
        (tmp_path / "other.bin").write_text("another one")
        before = set(tmp_path.glob("scao-*.bin"))
        assert len(before) == 3
        os.kill(child, signal.SIGKILL)
        while Path(f"/proc/{child}/stat").read_text().rsplit(")")[1].split()[0] != "Z":
            time.sleep(0.01)  # not waited for by its parent, but gone
        assert set(tmp_path.glob("scao-*.bin")) == before
        _, optimizer = run(2, **where("file", tmp_path))
        found = set(tmp_path.glob("scao-*.bin"))
        assert len(found) == 3  # the living one's, the user's, and our own
        assert optimizer._offload._disk.path in found
        assert len(list(tmp_path.glob("*.json"))) == 2
        optimizer.close()
        process.send_signal(signal.SIGINT)
        process.wait(60)
        assert files(tmp_path) == ["other.bin", "scao-mine.bin"]
    finally:
        process.kill()
        process.communicate()


def test_forked_children_have_their_own_files_and_change_nothing_of_their_parent(tmp_path):
    code = """
        before, mine = {k: v.clone() for k, v in o.state[p].items()}, set(os.listdir(folder))
        out, into = os.pipe()

        def forked(child, expected=0):
            number = os.fork()
            if number == 0:
                sys.exit(child())
            assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == expected
            assert set(os.listdir(folder)) == mine, os.listdir(folder)
            assert all(torch.equal(v, o.state[p][k]) for k, v in before.items())

        def train():
            for t in range(6, 12):
                step(t)
            os.write(into, p.detach().numpy().tobytes())
            return int(len(set(os.listdir(folder)) - mine) != 2 or o.report().lost_bases or o.report().restarted)

        def save():
            saved = o.state_dict()["state"][0]
            return int(not all(torch.equal(v, saved[k]) for k, v in before.items()))

        def another(ending):
            def child():
                q = torch.nn.Parameter(torch.ones(8, 9))
                other = SCAO([q], factors="dense,dense", memory_budget=0, offload_dir=folder)
                step(0, q, other)
                assert len(set(os.listdir(folder)) - mine) == 2
                ending()
                return 0

            return child

        def fail():
            raise SystemExit(4)

        for child in (train, lambda: 0, lambda: o.close() or 0, save, another(lambda: None)):
            forked(child)
        forked(another(fail), 4)
        for t in range(6, 12):
            step(t)
        assert os.read(out, 10**6) == p.detach().numpy().tobytes()
        assert not o.report().restarted and not o.report().lost_bases
        assert set(os.listdir(folder)) == mine
        print("done")
    """
    out, err = start(tmp_path, code).communicate(timeout=120)
    assert out == "done\n", err
    assert files(tmp_path) == []


# --- two ranks ---------------------------------------------------------------------------------------------------------------

DAMAGES = {
    "nothing": [],
    "a basis on 0": [(0, 5, "0.left_basis")],
    "a covariance on 1": [(1, 5, "1.right_cov")],
    "both on both": [(0, 4, "0.left_cov"), (1, 4, "1.left_basis"), (1, 7, "0.right_basis"), (0, 7, "0.right_basis")],
    "an expert on 1": [(1, 6, "3.left_cov")],
    "while there is no gradient": [(1, 6, "2.left_cov")],
    "different gradients": [(0, 6, "0.left_basis"), (1, 6, "3.left_cov"), (1, 8, "1.left_basis")],
}


def of_rank(rank, folder, damages, name):
    """Ranks with the same gradients, or none; what is damaged on one of them."""
    folder = folder / f"{rank}"
    params, optimizer = make(runtime="thread", memory_budget=0, offload_dir=str(folder))
    for t in range(12):
        for who, when, name in damages:
            if (who, when) == (rank, t):
                damage(folder, name, 0, 3 if name[0] == "3" else 1)
        gradients(params, t)
        if name == "while there is no gradient" and t in (6, 8):
            params[2].grad = None
        if name == "different gradients" and t > 4:
            params[rank + t % 2].grad = None
            if rank == 0 and t == 8:
                optimizer.zero_grad()
        optimizer.step()
    report = optimizer.report()
    return {"contents": contents(params, optimizer), "lost": report.lost_bases, "restarted": report.restarted}


def main(rank, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    results = {name: of_rank(rank, folder / name, damages, name) for name, damages in DAMAGES.items()}
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_ranks_stay_equal_whatever_is_damaged_on_one(tmp_path):
    env = children.environment()
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], errors
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert first.pop("different gradients").keys() == second.pop("different gradients").keys()  # nobody hung
    for name in first:
        one, other = first[name], second[name]
        assert [k for k, v in one["contents"].items() if not torch.equal(v, other["contents"][k])] == [], name
        assert (one["lost"], one["restarted"]) == (other["lost"], other["restarted"]), name
    counts = {name: (first[name]["lost"], first[name]["restarted"]) for name in first}
    assert list(counts.values()) == [(0, 0), (1, 0), (0, 1), (2, 1), (0, 1), (0, 1)]


# --- what happens in training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["host", "file", "all three"])
@pytest.mark.parametrize("runtime", ["staggered", "thread"])
def test_loading_into_the_tensors_of_a_state_dict(split, runtime, apart, tmp_path):
    """As torch.distributed.checkpoint does: it writes into the tensors that a state dict holds, then has it loaded."""
    expected = plain(12, runtime=runtime)
    params, optimizer = run(6, runtime=runtime, **where(split, tmp_path))
    saved, values = copy.deepcopy(optimizer.state_dict()["state"]), [p.detach().clone() for p in params]
    train(params, optimizer, 6, 9)
    into = optimizer.state_dict()
    for i, entry in saved.items():
        for key, value in entry.items():
            into["state"][i][key].copy_(value)
    optimizer.load_state_dict(into)
    for p, value in zip(params, values, strict=True):
        p.data.copy_(value)
    train(params, optimizer, 6, 12)
    assert_same((params, optimizer), expected)
    assert optimizer.report().lost_bases + optimizer.report().restarted == 0


@pytest.mark.parametrize("split", ["host", "file", "all three"])
def test_an_error_in_the_middle_of_a_step(split, apart, monkeypatch, tmp_path):
    """What the stacks before it came to stays, as without tiers; nothing counts as damaged."""
    pairs = [make(**where(name, tmp_path)) for name in (None, split)]
    original, kept = scao_core.optimizer.move, []
    for params, optimizer in pairs:
        train(params, optimizer, 0, 6)
        calls = iter(range(100))

        def move(units, calls=calls):
            if next(calls) == 2:
                raise RuntimeError("in the middle")
            return original(units)

        monkeypatch.setattr(scao_core.optimizer, "move", move)
        gradients(params, 6)
        with pytest.raises(RuntimeError, match="in the middle") as raised:
            optimizer.step()
        kept.append(raised)  # as a debugger does: the step's frames stay alive
        monkeypatch.setattr(scao_core.optimizer, "move", original)
        train(params, optimizer, 7, 14)
    assert_same(*pairs)
    assert pairs[1][1].report().lost_bases + pairs[1][1].report().restarted == 0


@pytest.mark.parametrize("split", ["host", "file", "all three"])
@pytest.mark.parametrize("runtime", ["staggered", "thread"])
def test_groups_added_missing_gradients_and_skipped_steps(split, runtime, apart, tmp_path):
    pairs = [make(runtime=runtime, **where(name, tmp_path)) for name in (None, split)]
    for params, optimizer in pairs:
        for t in range(20):
            if t == 6:
                params.append(torch.nn.Parameter(torch.ones(10, 14)))
                optimizer.add_param_group({"params": params[-1:], "lr": 3e-3})
            gradients(params, t)
            if t in (0, 3, 9):
                params[t % 4].grad = None
            if t in (2, 5, 11):
                params[3].grad[t % 3] = 0
            if t in (4, 10):
                params[1].grad[0, 0] = float("nan")
            if t == 12:
                params[2].requires_grad_(False)
                params[2].grad = None
            if t == 15:
                params[2].requires_grad_(True)
            if t in (12, 13, 14):
                params[2].grad = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
    assert pairs[0][1].skipped_steps == pairs[1][1].skipped_steps == 2
    assert_same(*pairs)


@pytest.mark.parametrize("split", ["host", "file", "all three"])
def test_a_model_that_changes_its_dtype(split, tmp_path):
    pairs = [make(**where(name, tmp_path)) for name in (None, split)]
    for params, optimizer in pairs:
        train(params, optimizer, 0, 6)
        for p in params:
            p.grad, p.data = None, p.data.double()
        train(params, optimizer, 6, 12)
        for p in params:
            p.grad, p.data = None, p.data.float()
        train(params, optimizer, 12, 18)
    assert_same(*pairs)
    assert pairs[1][1].report().last.tiers == planned_bytes(pairs[1][1].plans(), pairs[1][1].defaults)


def test_a_parameter_that_is_replaced(tmp_path):
    pairs = [make(**where(name, tmp_path)) for name in (None, "file")]
    for params, optimizer in pairs:
        train(params, optimizer, 0, 6)
        params[1] = torch.nn.Parameter(torch.ones(30, 10))
        optimizer.param_groups[0]["params"][1] = params[1]
        train(params, optimizer, 6, 14)
    assert_same(*pairs)


# --- options -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bytes"),
    [
        ("2GiB", 2**31), ("2G", 2**31), ("512MB", 512 * 10**6), ("1e9", 10**9), (2**30, 2**30), ("0", 0), (0, 0), (1e9, 10**9),
        ("1.5 GiB", 3 * 2**29), ("7", 7), ("3kb", 3000), ("3k", 3072), ("64 B", 64), ("1TiB", 2**40),
        (1e16, 10**16), ("1e+9", 10**9),
    ],
)  # fmt: skip
def test_byte_counts(text, bytes):
    _, optimizer = make(memory_budget=text)
    assert optimizer.defaults["memory_budget"] == optimizer.param_groups[0]["memory_budget"] == bytes


@pytest.mark.parametrize("none", [None, "none", "null", ""])
def test_no_budget(none):
    assert make(memory_budget=none)[1].defaults["memory_budget"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        "2 apples",
        "-1",
        -1,
        True,
        False,
        "GiB",
        "1..2GiB",
        "two",
        float("nan"),
        float("inf"),
        [1],
        b"2GiB",
        {},
        "2GiBs",
        "1e400",
        "0.3",
        1.5,
    ],
)
@pytest.mark.parametrize("name", ["memory_budget", "host_budget"])
def test_wrong_byte_counts(wrong, name, tmp_path):
    with pytest.raises(ConfigError, match=rf"{name}=.*(2GiB|e\.g\.)") as raised:
        make(**{"memory_budget": 0, "offload_dir": tmp_path, name: wrong})
    assert "\n" not in str(raised.value)


def test_options_that_do_not_go_together(tmp_path):
    with pytest.raises(ConfigError, match="host_budget=5 needs offload_dir"):
        make(memory_budget=0, host_budget=5)
    with pytest.raises(ConfigError, match=r"offload_dir=.*without memory_budget"):
        make(offload_dir=tmp_path)
    for wrong in (5, True, b"x", ["a"], "a\0b"):
        with pytest.raises(ConfigError, match=r"offload_dir=.*path of a folder"):
            make(memory_budget=0, offload_dir=wrong)
    with pytest.raises(ConfigError, match="did you mean 'memory_budget'"):
        make(memory_buget=0)


def test_placement_is_one_for_all_groups(tmp_path):
    p = torch.nn.Parameter(torch.ones(4, 6))
    for name, value in (("memory_budget", "1KiB"), ("host_budget", 7), ("offload_dir", str(tmp_path))):
        with pytest.raises(ConfigError, match=f"{name}=.*in a parameter group: it is one for all groups"):
            SCAO([{"params": [p], name: value}], memory_budget=0)
    group = SCAO([{"params": [p], "memory_budget": "1KiB"}], memory_budget=1024).param_groups[0]
    assert group["memory_budget"] == 1024
    with pytest.raises(ConfigError, match="in a parameter group"):
        SCAO([{"params": [p], "memory_budget": None}], memory_budget=1024)


# --- ages --------------------------------------------------------------------------------------------------------------------


def count_ages(params, optimizer, steps, every, delay):
    """Ages by watching when bases change; how long before that they were snapshot follows from the delay."""
    taken: dict[str, int] = {}
    seen = []
    for t in range(1, steps + 1):
        before = {p: {k: v.clone() for k, v in e.items()} for p, e in optimizer.state.items()}
        train(params, optimizer, t - 1, t)
        for i, p in enumerate(params):
            for side in ("left", "right") if p.dim() > 1 else ():
                new = optimizer.state[p][side + "_basis"]
                old = before.get(p, {}).get(side + "_basis", torch.eye(new.shape[-1]).expand_as(new))
                short = min(p.shape[-2:]) == new.shape[-1]
                for e in range(p.shape[0] if p.dim() == 3 else 1):
                    label = f"{i} of group 0{f'[{e}]' if p.dim() == 3 else ''}.{side}"
                    changed = not torch.equal(new[e], old[e]) if p.dim() == 3 else not torch.equal(new, old)
                    if changed:
                        taken[label] = t if short and t < every else t - delay
                    taken.setdefault(label, 0)
        seen.append({label: t - at for label, at in taken.items()})
    return seen


@pytest.mark.parametrize(
    ("runtime", "delay"), [("staggered", 0), ("staggered", 3), ("inline", 0), ("inline", 2), ("thread", 4)]
)
def test_ages_are_those_of_the_snapshots(runtime, delay):
    every, steps = 5, 22
    params, optimizer = make(runtime=runtime, refresh_delay=delay, refresh_every=every)
    reports: list[Any] = []
    optimizer.on_step(reports.append)
    counted = count_ages(params, optimizer, steps, every, delay)
    for report, ages in zip(reports, counted, strict=True):
        assert dict(report.ages) == ages
        assert report.oldest == max(ages.values())
    late = [age for report in reports[2 * every + delay :] for age in report.ages.values()]
    assert max(late) == every + delay - 1


@pytest.mark.parametrize("at", [1, 4, 7, 11])
@pytest.mark.parametrize(("runtime", "delay"), [("staggered", 3), ("inline", 2), ("thread", 4)])
def test_ages_after_loading_are_those_of_a_run_without(at, runtime, delay):
    options = {"runtime": runtime, "refresh_delay": delay}
    params, optimizer = run(at, **options)
    resumed, other = make(**options)
    for p, q in zip(resumed, params, strict=True):
        p.data.copy_(q)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twins, twin = copy.deepcopy((params, optimizer))
    for t in range(at, 18):
        for pair in ((params, optimizer), (resumed, other), (twins, twin)):
            train(*pair, t, t + 1)
        assert optimizer.report().last.ages == other.report().last.ages == twin.report().last.ages


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
