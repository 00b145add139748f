"""SCAO for one tensor, as the equations read: explicit matrices, no batching, no stored roots. The truth for every fast path.

A gradient G is r × n, r <= n (a taller matrix is transposed first). L (r × r) and R (n × n) are the models of the two
sides' factors; ``left`` and ``right`` name them: ("dense",), ("diagonal",), ("blocked", count) or ("spiked", rank).
``state`` has the keys of ``optimizer.state[p]``. Everything is computed in the dtype of G; compare in fp64.
Left out are the guards that ordinary gradients never meet: entries above 2^50 times the first gradient, and rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
Kind = tuple[Any, ...]


def cut(kind: Kind, x: Tensor) -> list[Tensor]:
    """The columns of x by block; one block for a dense factor."""
    count = kind[1] if kind[0] == "blocked" else 1
    return list(torch.split(x, -(-x.shape[1] // count), dim=1))


def split(c: Tensor) -> list[Tensor]:
    """The blocks of a stored (blocks, b, b), or the one of a stored (d, d)."""
    return list(c.view(-1, *c.shape[-2:]))


def block_diagonal(blocks: list[Tensor]) -> Tensor:
    """One matrix with these on its diagonal."""
    return torch.block_diag(*blocks)  # type: ignore[no-any-return, no-untyped-call]


def model(kind: Kind, s: State, d: int) -> Tensor:
    """C (d × d) as the factor models it: what it has accumulated, seen along its basis."""
    if kind[0] == "diagonal":
        return torch.diag(s["energy"])
    if kind[0] == "spiked":
        return spikes_and_rest(s, s["energy"], rest(kind, s, d))
    c, q = s["cov"], s["basis"]
    pairs = zip(split(c), split(q), strict=True)
    blocks = [qj @ torch.diag(torch.diag(qj.T @ cj @ qj)) @ qj.T for cj, qj in pairs]
    return block_diagonal(blocks)[:d, :d]


def spikes_and_rest(s: State, spikes: Tensor, others: Tensor) -> Tensor:
    """Vᵀ diag(spikes) V + P diag(others) P, with P = I - VᵀV."""
    v = s["basis"]
    p = torch.eye(v.shape[1], dtype=v.dtype) - v.T @ v
    both: Tensor = v.T @ torch.diag(spikes) @ v + p @ torch.diag(others) @ p
    return both


def rest(kind: Kind, s: State, d: int) -> Tensor:
    """τ s (d): the profile of what a spiked factor has beside its directions, with trace(P diag(τ s) P) = (d - ρ) τ."""
    p = torch.eye(d, dtype=s["basis"].dtype) - s["basis"].T @ s["basis"]
    trace = torch.trace(p @ torch.diag(s["rest"]) @ p)
    moments: Tensor = s["rest"] / trace.clamp_min(torch.finfo(trace.dtype).tiny) * (d - kind[1]) * s["tail"]
    return moments


def inverse_root(kind: Kind, s: State, d: int, damping: float, unit: bool = False) -> Tensor:
    """(C + δ mean(C) I)^-1/2 (d × d); with ``unit``, C is divided by its mean eigenvalue first."""
    c = model(kind, s, d)
    mean = torch.trace(c) / d
    c = c / mean if unit else c
    if kind[0] == "spiked":  # the roots of its two parts
        size, more = mean if unit else torch.ones_like(mean), damping * torch.trace(c) / d
        return spikes_and_rest(s, (s["energy"] / size + more) ** -0.5, (rest(kind, s, d) / size + more) ** -0.5)
    values, vectors = torch.linalg.eigh(c + damping * torch.trace(c) / d * torch.eye(d, dtype=c.dtype))
    root: Tensor = vectors @ torch.diag(values.clamp_min(torch.finfo(c.dtype).tiny) ** -0.5) @ vectors.T
    return root


def second_moments(kind: Kind, s: State, d: int) -> Tensor:
    """diag(C) (d) of what has been accumulated."""
    return torch.diag(block_diagonal(split(s["cov"])))[:d] if "cov" in s else torch.diag(model(kind, s, d))


def gram_schmidt(y: Tensor) -> Tensor:
    """Orthonormal rows, in order."""
    rows: list[Tensor] = []
    for row in y:
        for done in rows:
            row = row - (row @ done) * done
        rows.append(row / row.norm())
    return torch.stack(rows)


def start(kind: Kind, s: State, x: Tensor) -> None:
    """The first directions of a spiked factor: two rounds of subspace iteration from smooth combinations of the rows."""
    if kind[0] == "spiked":
        k = x.shape[0]
        omega = torch.tensor([[math.cos(math.pi * (i + 0.5) * j / k) for i in range(k)] for j in range(kind[1])]).to(x)
        s["basis"] = gram_schmidt(omega @ x)
        for _ in range(2):
            s["basis"] = gram_schmidt(gram_schmidt(s["basis"] @ x.T) @ x)


def accumulate(kind: Kind, s: State, x: Tensor, b: float, t: int) -> State:
    """C <- b C + (1-b) xᵀx / k from samples x (k × d). Returns what replaces its namesake after this step."""
    c = x.T @ x / x.shape[0]
    if kind[0] == "diagonal":
        s["energy"] = b * s["energy"] + (1 - b) * torch.diag(c)
    elif kind[0] == "spiked":
        v, d = s["basis"], x.shape[1]
        spikes = torch.diag(v @ c @ v.T)
        s["energy"] = b * s["energy"] + (1 - b) * spikes
        s["tail"] = b * s["tail"] + (1 - b) * ((torch.trace(c) - spikes.sum()) / (d - kind[1])).clamp_min(0)
        w = 1 - b if t <= 8 else min(1, 4 * (1 - b)) if t % 4 == 0 else 0  # after 8 steps V turns at every fourth
        if w == 0:
            return {}
        p = torch.eye(d).to(v) - v.T @ v
        s["rest"] = (1 - w) * s["rest"] + w * torch.diag(p @ c @ p)
        drawn = torch.diag(1 / torch.maximum(s["energy"], s["tail"])) @ v @ c
        for j in range(kind[1]):
            if spikes[j] <= 1e-6 * torch.trace(c):  # it holds nothing of this gradient: let it turn to a row of it
                drawn[j] += x[j] / x[j].norm()
        return {"basis": gram_schmidt((1 - w) * v + w * drawn)}
    else:
        s["cov"] = s["cov"].clone()
        for block, xj in zip(split(s["cov"]), cut(kind, x), strict=True):
            d = xj.shape[1]
            block[:d, :d] = b * block[:d, :d] + (1 - b) * xj.T @ xj / x.shape[0]
    return {}


def eigenbasis(s: State) -> Tensor:
    """Eigenvectors of what has been accumulated, block by block."""
    blocks = s["cov"].view(-1, *s["cov"].shape[-2:])
    return torch.stack([torch.linalg.eigh(c)[1] if c.any() else torch.eye(len(c)).to(c) for c in blocks]).view(
        s["cov"].shape
    )


def frame(kind: Kind, s: State, d: int) -> Tensor:
    """W (d × coordinates) with W Wᵀ = I: the basis in which SOAP runs Adam."""
    eye = torch.eye(d, dtype=next(iter(s.values())).dtype)
    if kind[0] == "diagonal":
        return eye
    if kind[0] == "spiked":
        return torch.cat([s["basis"].T, eye - s["basis"].T @ s["basis"]], dim=1)
    return block_diagonal(split(s["basis"]))[:d]


def adam_bound(betas: tuple[float, float], t: int) -> float:
    """The largest |m| / √v of averages m and v of t samples: (Σ w_i² / u_i)^1/2 for their weights w and u (Cauchy-Schwarz)."""
    pairs = [[(1 - b) * b**k / (1 - b**t) for b in betas] for k in range(t)]
    return max(1.0, math.sqrt(sum(w * w / u if u else math.inf for w, u in pairs if w)))


def step(
    p: Tensor, g: Tensor, state: State, left: Kind, right: Kind, refresh: tuple[bool | Tensor, ...], o: dict[str, Any]
) -> Tensor:
    """One step for a matrix p (r × n): changes ``state``, returns the new p.

    Args:
        refresh: whether the left and the right basis are recomputed at the end of this step, or the basis to install.
        o: lr, betas, eps, weight_decay, damping, curvature_beta, norm_rule, cautious, nesterov and engine, by name.
    """
    r, n = p.shape
    delta = o["damping"] if o["damping"] is not None else 0.1 if r <= 64 else 1e-3
    ls = {k[5:]: v for k, v in state.items() if k.startswith("left_")}
    rs = {k[6:]: v for k, v in state.items() if k.startswith("right_")}
    state["step"] = state["step"] + 1
    t = int(state["step"])
    if t == 1:
        state["scale"] = 2.0 ** torch.floor(torch.log2(g.abs().max()))
    b1, b2, b3 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in (*o["betas"], o["curvature_beta"]))
    state["exp_avg"] = b1 * state["exp_avg"] + (1 - b1) * g
    g, m = g / state["scale"], state["exp_avg"] / state["scale"]
    if o["nesterov"] and o["engine"] != "adam":
        m = b1 * m + (1 - b1) * g
    new_l: State = {}
    new_r: State = {}
    if t == 1 and o["engine"] in ("kl", "soap"):
        start(left, ls, g.T)
        start(right, rs, g)
    if o["engine"] == "adam":
        v = state["exp_avg_sq"] = b2 * state["exp_avg_sq"] + (1 - b2) * g**2
        u = m / (v.sqrt() + o["eps"])
    elif o["engine"] == "kl":
        w = torch.eye(r).to(g) if t == 1 else inverse_root(left, ls, r, delta, unit=True)
        new_r = accumulate(right, rs, w @ g, b3, t)
        new_l = accumulate(left, ls, (g @ inverse_root(right, rs, n, delta)).T, b3, t)
        u = inverse_root(left, ls, r, delta, unit=True) @ m @ inverse_root(right, rs, n, delta)
        if t == 1:
            state["gain"] = torch.ones_like(state["gain"])
        elif o["norm_rule"] == "decrease" and (t <= 4 or t % 4 == 2):
            # the decrease <M, U> of the loss to first order becomes that of Adam with factored second moments
            v = (
                torch.outer(second_moments(left, ls, r), second_moments(right, rs, n))
                / second_moments(left, ls, r).mean()
            )
            state["gain"] = ((m * m / v.sqrt()).sum() / (m * u).sum()).clamp(0.5, 8)
        u = state["gain"] * u
    elif o["engine"] == "soap":
        wl, wr = frame(left, ls, r), frame(right, rs, n)
        v = state["exp_avg_sq"] = b2 * state["exp_avg_sq"] + (1 - b2) * (wl.T @ g @ wr) ** 2
        bound = adam_bound(o["betas"], 10_000)
        u = (
            wl @ ((wl.T @ m @ wr) / (v.sqrt() + o["eps"])).clamp(-bound, bound) @ wr.T
        )  # Adam's own bound, by Cauchy-Schwarz
        new_l, new_r = accumulate(left, ls, g.T, b3, t), accumulate(right, rs, g, b3, t)
    else:
        a, _, c = torch.linalg.svd(m, full_matrices=False)
        u = 0.2 * n**0.5 * a @ c
    if t == 1:
        u = g / (g.abs() + o["eps"])
    if o["engine"] != "adam":
        if o["cautious"]:
            agree = (u * g > 0).to(u.dtype)
            share = agree.sum() / (g != 0).sum().clamp_min(1)
            u = u * agree / share.clamp_min(0.1)
        bound = adam_bound(o["betas"], t) if o["engine"] == "kl" or t == 1 else 10.0
        if t > 1:  # entries of A begin within 1 / n^1/2: a tenth of that does no harm
            bound = min(10.0, max(bound, 0.1 / n**0.5 / o["lr"] if o["lr"] else math.inf))
        u = u.clamp(-bound, bound)
    for s, new, due, side in ((ls, new_l, refresh[0], 0), (rs, new_r, refresh[1], 1)):
        s |= new
        if due is not False and "cov" in s:
            old, s["basis"] = s["basis"], due if isinstance(due, Tensor) else eigenbasis(s)
            if o["engine"] == "soap":
                turn = block_diagonal(split(old.mT @ s["basis"])) ** 2
                state["exp_avg_sq"] = turn.T @ state["exp_avg_sq"] if side == 0 else state["exp_avg_sq"] @ turn
    state |= {"left_" + k: x for k, x in ls.items()} | {"right_" + k: x for k, x in rs.items()}
    moved: Tensor = (1 - o["lr"] * o["weight_decay"]) * p - o["lr"] * u
    return moved
