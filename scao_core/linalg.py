"""Small dense linear algebra, batched and guarded. Pure functions; leading dimensions (…) are batch dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

# The Cholesky factor of a Gram matrix of unit rows needs a shift of a few rounding errors to exist (chosen: 8 units in
# the last place).
_SHIFT_ULPS = 8.0
_NOISE_ULPS = 100.0  # chosen: a squared pivot below this many is rounding
# A product of 16 rows with a long side takes a CPU's library 2.5 times as long as two products of 8 rows (measured:
# MKL).
_GRAM_ROWS = 8
# Jitter of the retries of an eigendecomposition, relative to the mean eigenvalue (chosen; ×10 a retry).
_JITTERS = (0.0, 1e-10, 1e-9, 1e-8)


def times(x: Tensor, p: Tensor) -> Tensor:
    """X P for (…, k, d) and (…, d, e), keeping the memory layout of X (a transposed view stays one).

    An element-wise operation on two layouts is several times slower than on one, and a product costs the same either
    way.
    """
    if x.stride(-1) == 1 or x.stride(-2) != 1:
        return x @ p
    return (p.mT @ x.mT).mT


Matrices: TypeAlias = Tensor | list[Tensor]
"""A stack (…, r, n), or a list of N matrices (r, n) that lie apart: what is only read need not be copied into a stack. Results
are stacks."""


def gram(x: Matrices) -> Tensor:
    """x xᵀ (…, r, r) for (…, r, n)."""
    if isinstance(x, list):
        out = x[0].new_empty(len(x), x[0].shape[0], x[0].shape[0])
        for one, target in zip(x, out, strict=True):
            for rows in _row_blocks(one):
                torch.mm(one[rows], one.T, out=target[rows])
        return out
    blocks = _row_blocks(x)
    return x @ x.mT if len(blocks) == 1 else torch.cat([x[..., rows, :] @ x.mT for rows in blocks], dim=-2)


def _row_blocks(x: Tensor) -> list[slice]:
    rows = x.shape[-2]
    if x.device.type != "cpu" or x.stride(-1) != 1 or not _GRAM_ROWS < rows <= 4 * _GRAM_ROWS:
        return [slice(0, rows)]
    return [slice(i, i + _GRAM_ROWS) for i in range(0, rows, _GRAM_ROWS)]


def along_rows(x: Matrices, v: Tensor) -> Tensor:
    """x vᵀ (…, r, ρ) for (…, r, n) and (…, ρ, n) with few rows ρ.

    As (v xᵀ)ᵀ: with the fewer rows first the product is several times faster on a CPU.
    """
    if isinstance(x, list):
        out = v.new_empty(len(x), v.shape[-2], x[0].shape[0])
        for one, directions, target in zip(x, v, out, strict=True):
            torch.mm(directions, one.T, out=target)
        return out.mT
    return (v @ x.mT).mT


def weighted_rows(x: Matrices, w: Tensor) -> Tensor:
    """wᵀ x (…, ρ, n) for (…, r, n) and weights (…, r, ρ)."""
    if not isinstance(x, list):
        return times(x.mT, w).mT
    out = w.new_empty(len(x), w.shape[-1], x[0].shape[1])
    for one, weights, target in zip(x, w, out, strict=True):
        if one.stride(-1) == 1:
            torch.mm(weights.T, one, out=target)
        else:
            target.copy_((one.T @ weights).T)
    return out


def deflated(x: Tensor, a: Tensor, v: Tensor) -> Tensor:
    """X - A V for (…, r, n), (…, r, ρ), (…, ρ, n), in the memory layout of X; new memory."""
    product = torch.addmm if x.dim() == 2 else torch.baddbmm
    if x.stride(-1) == 1:
        return product(x, a.neg(), v)
    return product(x.mT, v.mT, a.neg().mT).mT


def add_product_(x: Tensor, a: Tensor, v: Tensor) -> Tensor:
    """X <- X + A V in place."""
    if x.stride(-1) != 1:
        add_product_(x.mT, v.mT, a.mT)
        return x
    return x.addmm_(a, v) if x.dim() == 2 else x.baddbmm_(a, v)


def combined(p: Tensor, x: Tensor, a: Tensor, v: Tensor) -> Tensor:
    """P X - A V for (…, r, r), (…, r, n), (…, r, ρ), (…, ρ, n), in the memory layout of X; new memory."""
    return add_product_(times(x.mT, p.mT).mT, a.neg(), v)


def column_squares(p: Tensor, x: Matrices, a: Tensor, v: Tensor) -> Tensor:
    """Mean over the rows of the squares of P X - A V (…, n)."""
    if isinstance(x, list):
        return torch.stack([combined(*parts).square().mean(-2) for parts in zip(p, x, a, v, strict=True)])
    return combined(p, x, a, v).square().mean(-2)


def weighted_gram(x: Matrices, a: Tensor, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """y yᵀ (…, r, r) and y vᵀ (…, r, ρ) of y = (X - A V) diag(w), w (…, 1, n)."""
    if isinstance(x, list):
        results = [weighted_gram(*parts) for parts in zip(x, a, v, weights, strict=True)]
        return torch.stack([g for g, _ in results]), torch.stack([c for _, c in results])
    y = deflated(x, a, v).mul_(weights)
    return gram(y), along_rows(y, v)


def weighted_rest(
    p: Tensor, x: Matrices, a: Tensor, v: Tensor, weights: Tensor, strengths: Tensor
) -> Tensor | Iterator[Tensor]:
    """y (I - VᵀV) + A diag(s) V with y = (P X - A V) diag(w), w (…, 1, n) and s (…, 1, ρ), in the memory layout of X.

    For a list of matrices they come one by one, so that each can be used while it is in the cache.
    """
    if isinstance(x, list):
        return (weighted_rest(*parts) for parts in zip(p, x, a, v, weights, strengths, strict=True))  # type: ignore[misc]
    y = combined(p, x, a, v).mul_(weights)
    return add_product_(y, a * strengths - along_rows(y, v), v)


def weighted_squares(x: Matrices, w: Tensor) -> Tensor:
    """Σ_j w_j x_ij² (…, r) for (…, r, n) and weights (…, n).

    As a row times a matrix: on a CPU a matrix times a vector rounds otherwise alone than in a stack.
    """
    if isinstance(x, list):
        return torch.stack([weighted_squares(*parts) for parts in zip(x, w, strict=True)])
    return (w[..., None, :] @ x.square().mT).squeeze(-2)


def orthonormal_rows(y: Tensor, careful: bool = False) -> Tensor:
    """Gram-Schmidt of the rows of (…, ρ, d), in order, as shifted Cholesky QR.

    Source: Fukaya et al. 2020, "Shifted Cholesky QR for computing the QR factorization of ill-conditioned matrices".
    One round is exact to rounding for rows that are nearly orthogonal; ``careful`` takes two, in fp64, for rows of any
    kind. Never
    fails: a zero row, and one that depends on those before it up to rounding, comes out as zero.
    """
    if not careful or y.device.type == "mps":  # which has no fp64
        return _cholesky_qr(y)
    return _cholesky_qr(_cholesky_qr(y.double(), torch.finfo(y.dtype).eps)).to(y.dtype)


def _cholesky_qr(y: Tensor, rounding: float | None = None) -> Tensor:
    """One round. ``rounding`` is the relative error of the rows; that of their dtype if None."""
    eps = torch.finfo(y.dtype).eps
    noise = _NOISE_ULPS * (eps if rounding is None else max(rounding**2, eps))
    eye = torch.eye(y.shape[-2], dtype=y.dtype, device=y.device)
    first = torch.zeros_like(eye)
    first[0, 0] = 1
    # D = diag(|y_i|);  F Fᵀ = D^-1 y yᵀ D^-1;  y <- F^-1 D^-1 y
    products = y @ y.mT
    length = torch.diagonal(products, dim1=-2, dim2=-1).sqrt()
    scale = torch.where(length > 0, length.reciprocal(), 0)
    factor, failed = torch.linalg.cholesky_ex(
        products * scale[..., None] * scale[..., None, :] + _SHIFT_ULPS * eps * eye
    )
    # The square of a pivot is what is left of a unit row beside those before it.
    sure = torch.diagonal(factor, dim1=-2, dim2=-1).square() > noise
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False) * sure[..., None]
    # Unit or zero rows and a shift are positive definite up to rounding; if they are not, only the first row is sure.
    inverse = torch.where((failed == 0)[..., None, None], inverse, first)
    return (inverse * scale[..., None, :]) @ y


def eigenbasis(c: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors (…, d, d) of symmetric positive semidefinite (…, d, d), columns by ascending eigenvalue.

    Each matrix is symmetrized and divided by its mean eigenvalue first. Sides up to 64 are decomposed in fp64, larger
    ones in their own dtype; a matrix that fails is tried again alone, in fp64, with growing jitter.

    Returns:
        the bases in the dtype and on the device of ``c`` (identity where all tries failed), and a bool tensor (…) that
        says which are good. Raises nothing for bad input.
    """
    d = c.shape[-1]
    flat = c.detach().reshape(-1, d, d)
    work = flat.cpu().to(torch.float64 if d <= 64 else torch.promote_types(c.dtype, torch.float32))
    mean = torch.diagonal(work, dim1=-2, dim2=-1).mean(-1)
    ok = torch.isfinite(work).all(-1).all(-1) & (mean > 0)
    work = torch.where(ok[:, None, None], (work + work.mT) / (2 * mean[:, None, None]), torch.eye(d, dtype=work.dtype))
    try:
        basis = torch.linalg.eigh(work)[1]
        good = ok & torch.isfinite(basis).all(-1).all(-1)
    except RuntimeError:  # torch.linalg.LinAlgError is one; so are the errors of a broken LAPACK
        basis, good = torch.zeros_like(work), torch.zeros_like(ok)
    for i in torch.nonzero(ok & ~good).flatten().tolist():
        retried = _retry(work[i].double())
        if retried is not None:
            basis[i], good[i] = retried.to(basis.dtype), True
    basis = torch.where(good[:, None, None], basis, torch.eye(d, dtype=basis.dtype))
    return basis.to(device=c.device, dtype=c.dtype).reshape(c.shape), good.to(c.device).reshape(c.shape[:-2])


def _retry(work: Tensor) -> Tensor | None:
    """Eigenvectors of one (d, d) fp64 matrix of unit mean eigenvalue with growing jitter, or None."""
    eye = torch.eye(work.shape[-1], dtype=work.dtype)
    for jitter in _JITTERS:
        try:
            basis: Tensor = torch.linalg.eigh(work + jitter * eye)[1]
        except RuntimeError:
            continue
        if bool(torch.isfinite(basis).all()):
            return basis
    return None


def polar(x: Tensor) -> tuple[Tensor, Tensor]:
    """The orthogonal polar factor (X Xᵀ)^-1/2 X of (…, r, n) with r <= n; zero singular values stay zero.

    Exact, through the r × r eigenproblem (in fp64 up to r = 64). Directions below rounding of the largest one are
    dropped.

    Returns:
        the factor, and a bool tensor (…) that says where the eigenproblem was solved; elsewhere the rows are
        normalized.
    """
    # X Xᵀ = Q Λ Qᵀ  ->  polar(X) = Q Λ^-1/2 Qᵀ X
    basis, good = eigenbasis(gram(x))
    coefficients = basis.mT @ x
    norm = torch.linalg.vector_norm(coefficients, dim=-1, keepdim=True)
    floor = norm.amax(-2, keepdim=True) * (x.shape[-2] * torch.finfo(x.dtype).eps)
    rows = torch.where(norm > floor, coefficients / norm.clamp_min(torch.finfo(x.dtype).tiny), 0.0)
    return basis @ rows, good
