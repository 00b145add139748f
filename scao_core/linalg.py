"""Small dense linear algebra, batched and guarded. Pure functions; leading dimensions (…) are batch dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

# Cholesky of a Gram matrix of unit columns needs a shift of a few rounding errors to exist (chosen: 8 units in the last place).
_SHIFT_ULPS = 8.0
# Jitter of the retries of an eigendecomposition, relative to the mean eigenvalue (chosen; ×10 a retry).
_JITTERS = (0.0, 1e-10, 1e-9, 1e-8)


def times(x: Tensor, p: Tensor) -> Tensor:
    """X P for (…, k, d) and (…, d, e), keeping the memory layout of X (a transposed view stays one).

    An element-wise operation on two layouts is several times slower than on one, and a product costs the same either way.
    """
    if x.stride(-1) == 1 or x.stride(-2) != 1:
        return x @ p
    return (p.mT @ x.mT).mT


def orthonormalize(y: Tensor) -> Tensor:
    """Gram-Schmidt of the columns of (…, d, ρ), in order, as two rounds of shifted Cholesky QR.

    Source: Fukaya et al. 2020, "Shifted Cholesky QR for computing the QR factorization of ill-conditioned matrices". Never
    fails: a column that depends on those before it comes out shorter than one (zero if it was zero), never longer, so
    that I - V Vᵀ stays positive semidefinite.
    """
    rank = y.shape[-1]
    eye = torch.eye(rank, dtype=y.dtype, device=y.device)
    shift = _SHIFT_ULPS * torch.finfo(y.dtype).eps
    tiny = torch.finfo(y.dtype).tiny
    for _ in range(2):
        y = y / torch.linalg.vector_norm(y, dim=-2, keepdim=True).clamp_min(tiny)
        gram = y.mT @ y + shift * eye
        factor, info = torch.linalg.cholesky_ex(gram)
        # A shifted Gram matrix of unit or zero columns is positive definite up to rounding; keep the columns if it is not.
        factor = torch.where((info == 0)[..., None, None], factor, eye)
        y = torch.linalg.solve_triangular(factor, y.mT, upper=False).mT
    return y


def eigenbasis(c: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors (…, d, d) of symmetric positive semidefinite (…, d, d), columns by ascending eigenvalue.

    Each matrix is symmetrized and divided by its mean eigenvalue first. Sides up to 64 are decomposed in fp64, larger ones
    in their own dtype; a matrix that fails is tried again alone, in fp64, with growing jitter.

    Returns:
        the bases in the dtype and on the device of ``c`` (identity where all tries failed), and a bool tensor (…) that
        says which are good. Raises nothing for bad input.
    """
    d = c.shape[-1]
    flat = c.detach().reshape(-1, d, d)
    work = flat.to(device="cpu", dtype=torch.float64 if d <= 64 else torch.promote_types(c.dtype, torch.float32))
    mean = torch.diagonal(work, dim1=-2, dim2=-1).mean(-1)
    ok = torch.isfinite(work).all(-1).all(-1) & (mean > 0)
    work = torch.where(ok[:, None, None], (work + work.mT) / (2 * mean[:, None, None]), torch.eye(d, dtype=work.dtype))
    try:
        basis = torch.linalg.eigh(work)[1]
        good = ok & torch.isfinite(basis).all(-1).all(-1)
    except torch.linalg.LinAlgError:
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
            basis = torch.linalg.eigh(work + jitter * eye)[1]
        except torch.linalg.LinAlgError:
            continue
        if bool(torch.isfinite(basis).all()):
            return basis
    return None


def polar(x: Tensor) -> Tensor:
    """The orthogonal polar factor (X Xᵀ)^-1/2 X of (…, r, n) with r <= n; zero singular values stay zero.

    Exact, through the r × r eigenproblem (in fp64 up to r = 64). Directions below rounding of the largest one are dropped.
    """
    # X Xᵀ = Q Λ Qᵀ  ->  polar(X) = Q Λ^-1/2 Qᵀ X
    gram = x @ x.mT
    basis, _ = eigenbasis(gram)
    coefficients = basis.mT @ x
    norm = torch.linalg.vector_norm(coefficients, dim=-1, keepdim=True)
    floor = norm.amax(-2, keepdim=True) * (x.shape[-2] * torch.finfo(x.dtype).eps)
    return basis @ torch.where(norm > floor, coefficients / norm.clamp_min(torch.finfo(x.dtype).tiny), 0.0)


def power_of_two(magnitude: Tensor) -> Tensor:
    """The power of two at or below each positive number, kept within 2^±100 so that its reciprocal is finite in fp32."""
    exponent = torch.frexp(magnitude)[1] - 1
    return torch.ldexp(torch.ones_like(magnitude), exponent.clamp(-100, 100))
