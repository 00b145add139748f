"""Two processes: replicas stay equal to the bit, agree on skipping, and what cannot be supported is refused.

This file is also the program of the two processes (``python test_cases_distributed.py RANK FOLDER``): each scenario
writes what it saw, and the tests read it.
"""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import children
from scao import SCAO, NonFiniteGradientError, ParameterError

ENGINES = ("kl", "soap", "spectral")
WORLD = 2
STEPS = 10
_LIMIT = 240  # seconds; a hang of one rank must fail, not block

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


def build() -> nn.Module:
    """fp64, so that sums in another order differ by nothing that a direction could amplify."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 4)).double()


def batch(t: int) -> Tensor:
    return torch.randn(16, 10, generator=torch.Generator().manual_seed(t), dtype=torch.float64)


def options(engine: str) -> dict[str, Any]:
    return {"lr": 1e-2, "engine": engine, "refresh_every": 3}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :4]).square().mean()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def single(engine: str) -> list[Tensor]:
    model = build()
    opt = SCAO(model.parameters(), **options(engine))
    for t in range(STEPS):
        opt.zero_grad()
        loss_of(model, batch(t)).backward()
        opt.step()
    return values(model)


# --- the two processes ----------------


def replicated(rank: int, engine: str) -> dict[str, Any]:
    model = nn.parallel.DistributedDataParallel(build())
    opt = SCAO(model.parameters(), **options(engine))
    for t in range(STEPS):
        opt.zero_grad()
        loss_of(model, batch(t).chunk(WORLD)[rank]).backward()
        opt.step()
    return {"params": values(model), "refreshed": opt.report().refreshed}


def poisoned(rank: int, bad: float, victim: int, on_nonfinite: str) -> dict[str, Any]:
    """One rank sees a bad gradient that the others do not see."""
    model = nn.parallel.DistributedDataParallel(build())
    opt = SCAO(model.parameters(), on_nonfinite=on_nonfinite, **options("kl"))
    out: dict[str, Any] = {"changed": False, "raised": 0, "warned": 0}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for t in range(STEPS):
            opt.zero_grad()
            loss_of(model, batch(t).chunk(WORLD)[rank]).backward()
            before = values(model), copy.deepcopy(opt.state_dict()["state"])
            poison = t in (0, 4)
            if poison and rank == victim:
                list(model.parameters())[2].grad[0, 0] = bad
            try:
                opt.step()
            except NonFiniteGradientError:
                out["raised"] += 1
            if poison:
                state = opt.state_dict()["state"]
                kept = same(before[0], values(model)) and state.keys() == before[1].keys()
                kept = kept and all(torch.equal(v, before[1][i][k]) for i, s in state.items() for k, v in s.items())
                out["changed"] |= not kept
        out["warned"] = sum("skipped" in str(w.message) for w in seen)
    return out | {"params": values(model), "skipped": opt.skipped_steps, "steps": opt.report().steps}


def without_gradients(rank: int) -> dict[str, Any]:
    """One rank has no gradient at all in some steps, the other a bad one: nobody waits for ever."""
    p = nn.Parameter(torch.ones(4, 6))
    opt = SCAO([p], **options("kl"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in range(4):
            p.grad = None if rank == 1 else torch.full_like(p, float("nan") if t % 2 else 1.0)
            opt.step()
    return {"skipped": opt.skipped_steps}


def refused(make: Callable[[], Any]) -> str:
    try:
        make()
    except ParameterError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def dtensors(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    result = {}
    for name, placement in (("sharded", Shard(0)), ("replicated", Replicate())):
        p = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [placement]))
        result[name] = refused(lambda p=p: SCAO([p]))
        plain = SCAO([nn.Parameter(torch.ones(3, 4))])
        result[f"{name}, added later"] = refused(lambda p=p, o=plain: o.add_param_group({"params": [p]}))
        result[f"{name}, groups left"] = str(len(plain.param_groups))
    model = build()
    fully_shard(model, mesh=mesh)
    result["fully_shard"] = refused(lambda: SCAO(model.parameters()))
    return result


def flat(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    result = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for original in (False, True):
            model = FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=original)
            shapes = [tuple(p.shape) for p in model.parameters()]
            result[f"use_orig_params={original}, shapes {shapes}"] = refused(lambda m=model: SCAO(m.parameters()))
    return result


def zero_redundancy(rank: int) -> dict[str, Any]:
    """Whole tensors shared out to the ranks: each keeps the state of its own, the parameters are those of plain DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(build())
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=SCAO, **{**options("kl"), "runtime": "inline"})
    for t in range(STEPS):
        opt.zero_grad()
        loss_of(model, batch(t).chunk(WORLD)[rank]).backward()
        opt.step()
    plain = nn.parallel.DistributedDataParallel(build())
    other = SCAO(plain.parameters(), **{**options("kl"), "runtime": "inline"})
    for t in range(STEPS):
        other.zero_grad()
        loss_of(plain, batch(t).chunk(WORLD)[rank]).backward()
        other.step()
    return {"params": values(model), "plain": values(plain)}


def resumed(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 0 saves, both load."""
    import torch.distributed as dist

    model = nn.parallel.DistributedDataParallel(build())
    opt = SCAO(model.parameters(), **options("soap"))
    for t in range(STEPS):
        if t == 5:
            if rank == 0:
                torch.save({"m": model.module.state_dict(), "o": opt.state_dict()}, folder / "resume.pt")
            dist.barrier()
            saved = torch.load(folder / "resume.pt", weights_only=True)
            fresh = build()
            fresh.load_state_dict(saved["m"])
            model = nn.parallel.DistributedDataParallel(fresh)
            opt = SCAO(model.parameters(), **options("soap"))
            opt.load_state_dict(saved["o"])
        opt.zero_grad()
        loss_of(model, batch(t).chunk(WORLD)[rank]).backward()
        opt.step()
    return {"params": values(model)}


def main(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=WORLD)
    nan, inf = float("nan"), float("inf")
    scenarios: dict[str, Callable[[], dict[str, Any]]] = {
        **{f"replicated {engine}": lambda engine=engine: replicated(rank, engine) for engine in ENGINES},
        "nan on 1": lambda: poisoned(rank, nan, 1, "skip"),
        "inf on 0": lambda: poisoned(rank, inf, 0, "skip"),
        "raise": lambda: poisoned(rank, nan, 1, "raise"),
        "without gradients": lambda: without_gradients(rank),
        "dtensors": lambda: dtensors(rank),
        "flat": lambda: flat(rank),
        "zero redundancy": lambda: zero_redundancy(rank),
        "resumed": lambda: resumed(rank, folder),
    }
    results: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        try:
            results[name] = scenario()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        torch.save(results, folder / f"rank{rank}.pt")
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


# --- the tests ----------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    env = children.environment()
    logs = [(folder / f"rank{rank}.log").open("w+") for rank in range(WORLD)]
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(folder)], env=env, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + _LIMIT
    try:
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    files = [folder / f"rank{rank}.pt" for rank in range(WORLD)]
    assert all(f.exists() for f in files), [(folder / f"rank{r}.log").read_text()[-2000:] for r in range(WORLD)]
    return [torch.load(f, weights_only=True) for f in files]


def both(results: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    assert all(name in r for r in results), f"no rank came to {name!r}: one hung or died before"
    for r in results:
        assert "error" not in r[name], r[name]["error"]
    return [r[name] for r in results]


@pytest.mark.parametrize("engine", ENGINES)
def test_replicas_stay_bit_equal_and_equal_one_process(results: list[dict[str, Any]], engine: str) -> None:
    first, second = both(results, f"replicated {engine}")
    assert same(first["params"], second["params"])
    assert first["refreshed"] > 0 or engine == "spectral"
    for p, q in zip(first["params"], single(engine), strict=True):
        assert (p - q).abs().max() <= 1e-6  # fp64; the mean over ranks is summed in another order


@pytest.mark.parametrize("name", ["nan on 1", "inf on 0"])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(results: list[dict[str, Any]], name: str) -> None:
    first, second = both(results, name)
    for r in (first, second):
        assert not r["changed"]
        assert r["skipped"] == 2
        assert r["steps"] == STEPS - 2
        assert r["warned"] == 1
    assert same(first["params"], second["params"])


def test_a_bad_gradient_on_one_rank_raises_on_all(results: list[dict[str, Any]]) -> None:
    first, second = both(results, "raise")
    for r in (first, second):
        assert not r["changed"]
        assert r["raised"] == 2
    assert same(first["params"], second["params"])


def test_ranks_without_gradients_do_not_hang(results: list[dict[str, Any]]) -> None:
    assert [r["skipped"] for r in both(results, "without gradients")] == [2, 2]


def test_dtensors_are_refused_at_construction(results: list[dict[str, Any]]) -> None:
    for r in both(results, "dtensors"):
        for name, got in r.items():
            if name.endswith("groups left"):
                assert got == "1"
            else:
                assert got.startswith("refused:"), (name, got)
                assert "DTensor" in got
                assert "\n" not in got


def test_flat_parameters_of_fsdp_are_refused_at_construction(results: list[dict[str, Any]]) -> None:
    """Also with ``use_orig_params``, where each parameter looks like an ordinary one but is a 1-D piece of a matrix."""
    for r in both(results, "flat"):
        for name, got in r.items():
            assert got.startswith("refused:"), (name, got)


def test_zero_redundancy_of_whole_tensors_equals_plain_replication(results: list[dict[str, Any]]) -> None:
    first, second = both(results, "zero redundancy")
    assert same(first["params"], second["params"])
    for p, q in zip(first["params"], first["plain"], strict=True):
        assert torch.allclose(p, q, rtol=1e-12, atol=1e-13)


def test_both_ranks_resume_from_the_file_of_one(results: list[dict[str, Any]]) -> None:
    first, second = both(results, "resumed")
    expected = both(results, "replicated soap")[0]["params"]
    assert same(first["params"], second["params"])
    assert same(first["params"], expected)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
