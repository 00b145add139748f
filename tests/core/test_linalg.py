"""The guarded linear algebra: what it returns is what it says, and it never raises."""

import pytest
import torch

from scao_core.linalg import along_rows, eigenbasis, gram, orthonormal_rows, polar, times


def spd(d, condition=1e6, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=generator))[0]
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), d, dtype=torch.float64)
    return (q * values @ q.T).to(dtype)


@pytest.mark.parametrize("d", [1, 3, 16, 65])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_eigenbasis_diagonalizes(d, scale):
    c = spd(d).float() * scale
    q, good = eigenbasis(c)
    assert bool(good)
    torch.testing.assert_close(q @ q.T, torch.eye(d), rtol=0, atol=1e-5)
    rotated = q.T @ (c / scale) @ q
    # fp32 rounding of a matrix of norm one and side up to 65.
    assert (rotated - torch.diag(torch.diagonal(rotated))).abs().max() < 1e-5


def test_bad_matrices_are_marked_and_leave_the_others_alone():
    c = torch.stack(
        [spd(4), torch.full((4, 4), torch.nan, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64), spd(4)]
    )
    q, good = eigenbasis(c)
    assert good.tolist() == [True, False, False, True]
    assert torch.equal(q[1], torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(q[0], eigenbasis(c[0])[0])


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_failed_decomposition_is_tried_again_in_fp64(monkeypatch, failures):
    real, calls = torch.linalg.eigh, []

    def flaky(x):
        calls.append(x.dtype)
        if len(calls) <= failures:
            raise torch.linalg.LinAlgError("did not converge")
        return real(x)

    monkeypatch.setattr(torch.linalg, "eigh", flaky)
    q, good = eigenbasis(spd(70).float())
    assert bool(good)
    assert calls[0] == torch.float32
    assert set(calls[1:]) == {torch.float64}
    torch.testing.assert_close(q @ q.T, torch.eye(70), rtol=0, atol=1e-5)


def test_total_failure_gives_the_identity(monkeypatch):
    def broken(x):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", broken)
    q, good = eigenbasis(spd(4))
    assert not bool(good)
    assert torch.equal(q, torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthonormal_rows(dtype):
    y = torch.randn(5, 3, 20, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 1e5
    v = orthonormal_rows(y, careful=True)
    torch.testing.assert_close(
        v @ v.mT, torch.eye(3, dtype=dtype).expand(5, 3, 3), rtol=0, atol=20 * torch.finfo(dtype).eps
    )
    # Gram-Schmidt in order: the first k rows span what the first k given rows span.
    for k in (1, 2, 3):
        residual = y[:, :k] - y[:, :k] @ v[:, :k].mT @ v[:, :k]
        assert residual.abs().max() < 1e5 * 100 * torch.finfo(dtype).eps


def test_dependent_and_zero_rows_stay_bounded():
    y = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    y[1], y[2] = 2 * y[0], 0
    v = orthonormal_rows(y, careful=True)
    assert torch.isfinite(v).all()
    assert not v[2].any()
    assert torch.linalg.eigvalsh(torch.eye(10) - v.T @ v).min() > -1e-5


@pytest.mark.parametrize("shape", [(3, 5), (5, 5), (1, 4)])
def test_polar(shape):
    x = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(polar(x)[0], u @ v, rtol=1e-9, atol=1e-9)


def test_polar_of_rank_one_keeps_the_null_space():
    x = torch.outer(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([0.0, 3.0, 4.0, 0.0])).double()
    torch.testing.assert_close(polar(x)[0], x / 15, rtol=1e-6, atol=1e-7)
    assert not polar(torch.zeros(2, 3))[0].any()


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 31, 40])
@pytest.mark.parametrize("tall", [False, True])
def test_products_do_not_depend_on_layout(rows, tall):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, rows, 50, dtype=torch.float64, generator=generator)
    v = torch.randn(2, 3, 50, dtype=torch.float64, generator=generator)
    p = torch.randn(2, 50, 4, dtype=torch.float64, generator=generator)
    given = x.mT.contiguous().mT if tall else x
    torch.testing.assert_close(gram(given), torch.einsum("bik,bjk->bij", x, x))
    torch.testing.assert_close(along_rows(given, v), torch.einsum("bik,bjk->bij", x, v))
    torch.testing.assert_close(times(given, p), torch.einsum("bik,bkj->bij", x, p))
