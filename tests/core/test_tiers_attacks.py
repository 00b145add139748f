"""Attacks on the tiers: what a careless user, a bad disk, another rank or another process does to them.

This file is also a program (``python test_tiers_attacks.py MODE FOLDER [RANK]``) for what needs processes of its own.
"""

import copy
import datetime
import errno
import gc
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import children
from scao import SCAO
from scao_core import optimizer as optimizer_module
from scao_core import placement
from scratch_file import damage, manifest, the_file

SHAPES = [(20, 24), (20, 24), (6, 24), (3, 18, 20), (9,)]
EVERY = 6
PAGE = os.sysconf("SC_PAGE_SIZE")
_LIMIT = 120  # seconds for a process of its own


def make(folder=None, **options):
    """Parameters and their optimizer; with a folder everything movable lies in a file there, unless budgets are named."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
    if folder is not None:
        options = {"memory_budget": 0, "offload_dir": folder, **options}
    return params, SCAO(params, lr=1e-2, **{"factors": "dense,dense", "refresh_every": EVERY, **options})


def train(params, optimizer, first, last, without=()):
    for t in range(first, last):
        generator = torch.Generator().manual_seed(t)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator)
            p.grad = None if i in without else grad
        optimizer.step()


def run(steps=16, folder=None, **options):
    params, optimizer = make(folder, **options)
    train(params, optimizer, 0, steps)
    return params, optimizer


def assert_same(a, b):
    """Parameters and state of two runs, each (params, optimizer), are equal to the bit."""
    for i, (x, y) in enumerate(zip(a[0], b[0], strict=True)):
        assert torch.equal(x, y), f"parameter {i}"
    one, other = a[1].state_dict()["state"], b[1].state_dict()["state"]
    assert one.keys() == other.keys()
    for i in one:
        assert one[i].keys() == other[i].keys()
        for key in one[i]:
            assert one[i][key].dtype == other[i][key].dtype, (i, key)
            assert torch.equal(one[i][key], other[i][key]), (i, key)


def assert_as_planned(optimizer):
    planned = placement.planned_bytes(optimizer.plans(), optimizer.defaults)
    assert optimizer.report().last.tiers == planned
    assert optimizer._offload.bytes(optimizer.state) == planned


def movable(optimizer):
    return sum(dict(plan.slots)[key].bytes for _, plan in optimizer.plans() for key in placement.movable(plan))


@contextmanager
def one_warning(match):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert [match in str(w.message) for w in seen].count(True) == 1, [str(w.message) for w in seen]


def resumed(saved, weights, folder=None, **options):
    params, optimizer = make(folder, **options)
    for p, w in zip(params, weights, strict=True):
        p.data.copy_(w)
    optimizer.load_state_dict(saved)
    return params, optimizer


def spawn(mode, folder, *more):
    command = [sys.executable, __file__, mode, str(folder), *map(str, more)]
    return subprocess.Popen(
        command, env=children.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_loading_again_and_again_with_other_placements_between(tmp_path):
    expected = run()
    first = run(5, tmp_path / "a")
    second = resumed(first[1].state_dict(), first[0], tmp_path / "b", host_budget=3000)
    train(*second, 5, 8)
    saved = copy.deepcopy(second[1].state_dict())
    weights = [p.detach().clone() for p in second[0]]
    train(*second, 8, 11)
    for p, w in zip(second[0], weights, strict=True):
        p.data.copy_(w)
    second[1].load_state_dict(saved)  # back by three steps
    second[1].load_state_dict(second[1].state_dict())
    train(*second, 8, 16)
    assert_same(second, expected)
    assert len(list((tmp_path / "b").glob("*.bin"))) == 1
    third = resumed(saved, weights)
    third[1].load_state_dict(saved)
    train(*third, 8, 16)
    assert_same(third, expected)


@pytest.mark.parametrize("closed", [False, True])
def test_what_is_saved_between_loading_and_the_next_step_is_what_was_loaded(closed, tmp_path):
    """The blocks of a loaded state are reserved, and empty until its next step: that is no damage."""
    pair = run(5, tmp_path / "a")
    got = resumed(pair[1].state_dict(), pair[0], tmp_path / "b")
    if closed:
        got[1].close()
    assert_same(got, pair)
    assert_same(copy.deepcopy(got), pair)
    train(*got, 5, 6, without=(0, 3))
    train(*pair, 5, 6, without=(0, 3))
    assert_same(got, pair)


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
def test_distributed_checkpoint_round_trip(flatten, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def build(name):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Linear(20, 8))
        params = list(model.parameters())
        named = {"factors": "dense,dense", "refresh_every": EVERY}
        return model, params, SCAO(params, lr=1e-2, memory_budget=0, offload_dir=tmp_path / name, **named)

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, params, optimizer = build("a")
    train(params, optimizer, 0, 8)
    other, others, twin = build("b")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about one process
        saved = {"o": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.save(saved, checkpoint_id=tmp_path / "d", no_dist=True)
        target = {"o": get_optimizer_state_dict(other, twin, options=options)}
        dcp.load(target, checkpoint_id=tmp_path / "d", no_dist=True)  # writes into the tensors of the state dict
        other.load_state_dict(model.state_dict())
        set_optimizer_state_dict(other, twin, target["o"], options=options)
    train(params, optimizer, 8, 14)
    train(others, twin, 8, 14)
    assert_same((params, optimizer), (others, twin))
    assert twin.report().restarted == twin.report().lost_bases == 0
    assert twin.report().last.tiers["nvme"] > 0


# --- damage -----------------------------------------------------------------------------------------------------------


def test_everything_is_damaged_at_once(tmp_path):
    pair = run(9, tmp_path, runtime="thread")
    path = the_file(tmp_path)
    path.write_bytes(bytes(range(256)) * (path.stat().st_size // 256))
    with one_warning(str(path)):
        train(*pair, 9, 20)
    assert pair[1].report().restarted == 6  # three matrices and three experts
    assert all(torch.isfinite(p).all() for p in pair[0])
    assert pair[1].report().last.restarted == 0
    pair[1].close()


@pytest.mark.parametrize("engine", ["kl", "soap"])
def test_damage_to_directions_that_follow_from_no_covariance(engine, tmp_path):
    """Those of the spiked factor are the factor: the matrix starts over."""
    pair, expected = (
        run(9, tmp_path, engine=engine, factors="dense,spiked"),
        run(9, engine=engine, factors="dense,spiked"),
    )
    damage(tmp_path, "1.right_basis")
    with one_warning(".bin"):
        train(*pair, 9, 14)
    train(*expected, 9, 14)
    assert (pair[1].report().lost_bases, pair[1].report().restarted) == (0, 1)
    assert all(torch.isfinite(p).all() for p in pair[0])
    assert not torch.equal(pair[0][1], expected[0][1])
    for i in (0, 2, 3, 4):
        assert torch.equal(pair[0][i], expected[0][i])


def test_an_idle_matrix_is_looked_at_when_it_moves_again(tmp_path):
    pair = run(5, tmp_path)
    damage(tmp_path, "0.left_cov")
    train(*pair, 5, 8, without=(0,))
    assert pair[1].report().restarted == 0
    with one_warning(".bin"):
        train(*pair, 8, 9)
    assert pair[1].report().restarted == 1


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_damage_does_not_reach_a_checkpoint_or_a_copy(how, tmp_path):
    pair = run(9, tmp_path)
    damage(tmp_path, "0.left_basis")
    damage(tmp_path, "1.left_cov")
    damage(tmp_path, "3.right_cov", part=2, parts=3)
    with one_warning(".bin"):
        if how == "state_dict":
            other = resumed(copy.deepcopy(pair[1].state_dict()), pair[0])
        else:
            other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert [int(other[1].state[other[0][i]]["step"]) for i in (0, 1, 2)] == [9, 0, 9]
    assert other[1].state[other[0][3]]["step"].tolist() == [9, 9, 0]
    basis = other[1].state[other[0][0]]["left_basis"]
    assert torch.allclose(basis @ basis.mT, torch.eye(20), atol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(*other, 9, 14)
        train(*pair, 9, 14)
    assert all(torch.isfinite(p).all() for p in other[0])
    assert (pair[1].report().lost_bases, pair[1].report().restarted) == (1, 2)


def test_a_step_that_raised_is_no_damage(tmp_path, monkeypatch):
    """Also while its traceback is held, as a notebook does, and a handler that saves a checkpoint on Ctrl-C."""
    real, pairs = optimizer_module.move, [run(5), run(5, tmp_path)]
    for pair in pairs:
        calls = []

        def broken(units, calls=calls):
            calls.append(real(units))
            if len(calls) == 2:
                raise KeyboardInterrupt
            return calls[-1]

        held = None
        with monkeypatch.context() as patch:
            patch.setattr(optimizer_module, "move", broken)
            try:
                train(*pair, 5, 6)
            except KeyboardInterrupt as error:
                held = error
                saved = copy.deepcopy(pair[1].state_dict())
        assert held is not None
        assert [float(saved["state"][i]["step"]) for i in (0, 1, 2)] == [6, 6, 6]
        train(*pair, 6, 9)
        assert pair[1].report().restarted == pair[1].report().lost_bases == 0
    assert_same(*pairs)


# --- a disk that is full, a folder of others ----------------------------------------------------------------------------


def test_a_disk_too_full_for_the_manifest(tmp_path, monkeypatch):
    expected, real, calls = run(), Path.write_text, []

    def full(self, *args):
        calls.append(self)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args)

    monkeypatch.setattr(Path, "write_text", full)
    with one_warning("stay on the host instead"):
        pair = run(folder=tmp_path)
    assert calls[1:]
    assert_same(pair, expected)
    assert pair[1].report().last.tiers["nvme"] == 0
    assert sum(path.stat().st_size for path in tmp_path.glob("*.bin")) == 0  # no space is kept
    pair[1].close()
    assert list(tmp_path.iterdir()) == []


def test_a_real_limit_of_the_system(tmp_path):
    """Not ENOSPC but EFBIG, with a signal that ends a process that does not ignore it."""
    expected, pair = run(), make(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with one_warning(f"offload_dir={str(tmp_path)!r}: [Errno {errno.EFBIG}]"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * PAGE, hard))
        try:
            train(*pair, 0, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        train(*pair, 1, 16)
    assert_same(pair, expected)
    tiers = pair[1].report().last.tiers
    assert tiers["nvme"] == 0
    assert tiers["host"] == movable(pair[1])


def test_the_folder_is_the_one_that_was_meant_when_the_optimizer_was_made(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    pair = make("scratch")
    monkeypatch.chdir(tmp_path / "elsewhere")  # as some launchers do
    train(*pair, 0, 2)
    assert the_file(tmp_path / "scratch").stat().st_size > 0
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_files_of_others_stay(tmp_path):
    """The folder may be one with results in it: only what is known to be scratch is removed."""
    mine = {
        "scao-adapter.bin": "weights",
        "scao-adapter.json": "{}",
        "scao-base.bin": "weights",
        "scao-abcdefgh.bin": "weights",
        "scao-abcdefgh.json": json.dumps({"file": "scao-other.bin", "blocks": []}),
        "scao-broken.bin": "weights",
        "scao-broken.json": "[",
        "model.bin": "weights",
    }
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "scao-folder.bin").mkdir()
    pair = run(3, tmp_path)
    pair[1].close()
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == mine


def test_a_closed_file_s_number_is_not_written_to(tmp_path):
    """The number of the closed file belongs to whatever was opened next."""
    expected, pair = run(4), run(4, tmp_path / "scratch")
    pair[1].close()
    others = [(tmp_path / f"other{i}").open("w+b", buffering=0) for i in range(20)]
    for file in others:
        file.write(b"mine")
    for params, optimizer in (expected, pair):
        params.append(torch.nn.Parameter(torch.ones(20, 24)))
        optimizer.add_param_group({"params": params[-1:]})
        train(params, optimizer, 4, 10)
    for file in others:
        file.seek(0)
        assert file.read() == b"mine"
        file.close()
    assert_same(pair, expected)
    pair[1].close()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_two_optimizers_share_a_folder(tmp_path):
    expected, one, other = run(), run(4, tmp_path), run(4, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    train(*one, 4, 8)
    other[1].close()
    assert len(list(tmp_path.iterdir())) == 2
    train(*one, 8, 16)
    assert_same(one, expected)


# --- which parameters -------------------------------------------------------------------------------------------------


def test_freezing_and_thawing_takes_no_more_space(tmp_path):
    """The budget is that of the first matrix: whenever it is frozen, the next one comes up from the file."""
    pair, expected, sizes = run(2, tmp_path, memory_budget=2 * 4 * (20**2 + 24**2)), run(2), set()
    for t in range(2, 14):
        for params, optimizer in (pair, expected):
            params[0].requires_grad_(t % 2 == 0)
            train(params, optimizer, t, t + 1, without=(0,) if t % 2 else ())
        sizes.add(the_file(tmp_path).stat().st_size)
        if t % 2 == 0:
            assert_as_planned(pair[1])
    assert len(sizes) == 1
    assert_same(pair, expected)
    names = [block["name"] for block in manifest(tmp_path)["blocks"]]
    assert len(names) == len(set(names))


BUDGETS = {
    "all in the file": {"memory_budget": 0},
    "all three": {"memory_budget": 9000, "host_budget": 9000},
    "host and file": {"memory_budget": 0, "host_budget": 20000},
}


@pytest.mark.parametrize("split", BUDGETS)
@pytest.mark.parametrize("keeps_grad", [False, True])
def test_parameters_that_are_frozen_and_thawed(split, keeps_grad, tmp_path):
    expected, pair = run(4), run(4, tmp_path, **BUDGETS[split])
    for params, optimizer in (expected, pair):
        params[0].requires_grad_(False)
        params[3].requires_grad_(False)
        train(params, optimizer, 4, 8, without=() if keeps_grad else (0, 3))
        params[0].requires_grad_(True)
        train(params, optimizer, 8, 11, without=() if keeps_grad else (3,))
        params[3].requires_grad_(True)
        train(params, optimizer, 11, 16)
    assert_same(pair, expected)
    assert pair[1].report().restarted == pair[1].report().lost_bases == 0
    assert_as_planned(pair[1])


def test_a_first_parameter_that_is_thawed_later_has_blocks_of_its_own_name(tmp_path):
    pair, expected = make(tmp_path), make()
    for params, optimizer in (pair, expected):
        params[0].requires_grad_(False)
        train(params, optimizer, 0, 3, without=(0,))
        params[0].requires_grad_(True)
        train(params, optimizer, 3, 9)
    assert_same(pair, expected)
    names = [block["name"] for block in manifest(tmp_path)["blocks"]]
    assert len(names) == len(set(names))


def test_steps_in_which_every_gradient_is_zero(tmp_path):
    """As torch's FSDP takes one to create state: there is no stack then."""
    expected, pair = make(), make(tmp_path)
    for params, optimizer in (expected, pair):
        for t in (0, 4, 4, 8):
            for p in params:
                p.grad = torch.zeros_like(p)
            optimizer.step()
            train(params, optimizer, t, t + 2)
    assert_same(pair, expected)


def test_steps_without_any_gradient(tmp_path):
    expected, pair = run(3), run(3, tmp_path)
    for each in (expected, pair):
        train(*each, 3, 5, without=range(5))
        train(*each, 5, 9)
    assert_same(pair, expected)


@pytest.mark.parametrize("runtime", ["staggered", "thread"])
def test_a_skipped_step_does_not_touch_the_file(runtime, tmp_path):
    expected, pair = run(7, runtime=runtime), run(7, tmp_path, runtime=runtime)
    content = the_file(tmp_path).read_bytes()
    with one_warning("skipped a step"):
        for p in pair[0]:
            p.grad = torch.full_like(p, float("nan"))
        pair[1].step()
    assert the_file(tmp_path).read_bytes() == content
    assert pair[1].report().last.skipped
    assert_as_planned(pair[1])
    train(*pair, 7, 16)
    train(*expected, 7, 16)
    assert_same(pair, expected)
    for each in (expected, pair):
        each[1].close()


# --- forks ------------------------------------------------------------------------------------------------------------


def test_a_child_that_is_late(tmp_path):
    """It inherits blocks that its parent has changed since: it notices, starts over, and harms nobody."""
    process = spawn("fork", tmp_path)
    told, _ = process.communicate(timeout=_LIMIT)
    assert process.returncode == 0, told
    seen = json.loads(told.splitlines()[-1])
    assert seen == {"finite": True, "own file": True, "noticed": True, "parent": True, "parent's file": True}, told


def forking(folder):
    folder = Path(folder)
    expected, pair = run(16), run(6, folder)
    mine = the_file(folder)
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        while not (folder / "go").exists():
            time.sleep(0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(*pair, 6, 10)
        own = [path for path in folder.glob("*.bin") if path != mine]
        finite, noticed = all(bool(torch.isfinite(p).all()) for p in pair[0]), pair[1].report().restarted == 6
        os.write(writing, json.dumps({"finite": finite, "own file": len(own) == 1, "noticed": noticed}).encode())
        sys.exit(0)  # with exit handlers, unlike os._exit
    os.close(writing)
    train(*pair, 6, 11)
    (folder / "go").touch()
    with os.fdopen(reading) as told:
        seen = json.loads(told.read())
    os.waitpid(child, 0)
    train(*pair, 11, 16)
    seen["parent"] = all(torch.equal(x, y) for x, y in zip(pair[0], expected[0], strict=True))
    seen["parent's file"] = list(folder.glob("*.bin")) == [mine] and mine.with_suffix(".json").exists()
    print(json.dumps(seen), flush=True)


# --- two ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiers")
    both = [spawn("rank", folder, rank) for rank in (0, 1)]
    try:
        told = [process.communicate(timeout=_LIMIT)[0] for process in both]
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert [process.returncode for process in both] == [0, 0], told
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


COUNTS = {"basis": [1, 0], "cov": [0, 1], "expert": [0, 1], "both": [1, 1], "disk full on one": [0, 1]}


@pytest.mark.parametrize("name", COUNTS)
def test_ranks_stay_equal_when_one_file_is_damaged(ranks, name):
    first, second = (rank[name] for rank in ranks)
    for x, y in zip(first["values"], second["values"], strict=True):
        assert torch.equal(x, y)
    assert first["counts"] == second["counts"] == COUNTS[name]
    assert [first["warned"], second["warned"]] == ([2, 2] if name == "both" else [1, 1])
    assert "rank1" in second["text"]


def test_a_rank_does_not_blame_its_own_disk_for_another_s(ranks):
    assert "rank0" not in ranks[0]["cov"]["text"]
    assert "another rank" in ranks[0]["cov"]["text"]


def test_ranks_may_have_gradients_for_different_parameters(ranks):
    assert [rank["sparse"] for rank in ranks] == [{"steps": 6, "skipped": 1}] * 2


def test_ranks_with_parameters_of_their_own(ranks):
    """As in ZeroRedundancyOptimizer: damage concerns one rank alone, and no rank waits for another for ever."""
    for x, y in zip(ranks[0]["zero"]["values"], ranks[1]["zero"]["values"], strict=True):
        assert torch.equal(x, y)
    assert [rank["zero"]["counts"] for rank in ranks] == [[0, 0], [0, 1]]


def damaged(rank, folder, blocks, full=False):
    """Two replicas with a file each, damaged at the (rank, name, part, parts) that are named."""
    own, real = folder / f"rank{rank}", os.posix_fallocate

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if full and rank == 0:
            os.posix_fallocate = no_space
        pair = run(9, own)
        os.posix_fallocate = real
        for where, *what in blocks:
            if where == rank:
                damage(own, *what)
        train(*pair, 9, 20)
    told = [str(w.message) for w in seen if "checksums" in str(w.message)]
    report = pair[1].report()
    pair[1].close()
    values, counts = [p.detach() for p in pair[0]], [report.lost_bases, report.restarted]
    return {"values": values, "counts": counts, "warned": len(told), "text": " ".join(told)}


def sparse(rank, folder):
    """Each rank lacks other gradients, or has only zeros, and one has a bad one."""
    params, optimizer = make(folder / f"rank{rank}")
    for t in range(7):
        for i, p in enumerate(params):
            nothing = torch.zeros_like(p) if t % 2 else None
            p.grad = torch.ones_like(p) if i % 2 == rank else nothing
        if t == 3 and rank == 1:
            params[1].grad[0, 0] = float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    return {"steps": optimizer.report().steps, "skipped": optimizer.skipped_steps}


def zero(rank, folder):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    generator, own = torch.Generator().manual_seed(0), folder / f"zero{rank}"
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in [(24, 24), (20, 22), (6, 24), (9,)]]
    named = {"factors": "dense,dense", "refresh_every": EVERY, "memory_budget": 0, "offload_dir": str(own)}
    optimizer = ZeroRedundancyOptimizer(params, optimizer_class=SCAO, lr=1e-2, **named)
    train(params, optimizer, 0, 5)
    if rank == 1:
        damage(own, "0.left_cov")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(params, optimizer, 5, 9)
    report = optimizer.optim.report()
    return {"values": [p.detach() for p in params], "counts": [report.lost_bases, report.restarted]}


def rank_of_two(folder, rank):
    import torch.distributed as dist

    rank, folder, limit = int(rank), Path(folder), datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2, timeout=limit)
    results = {
        "basis": damaged(rank, folder, [(1, "0.left_basis")]),
        "cov": damaged(rank, folder, [(1, "1.right_cov")]),
        "expert": damaged(rank, folder, [(1, "3.left_cov", 1, 3)]),
        "both": damaged(rank, folder, [(0, "0.left_basis"), (1, "2.left_cov")]),
        "disk full on one": damaged(rank, folder, [(1, "2.left_cov")], full=True),
        "sparse": sparse(rank, folder),
        "zero": zero(rank, folder),
    }
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"fork": forking, "rank": rank_of_two}[sys.argv[1]](*sys.argv[2:])
    gc.collect()
