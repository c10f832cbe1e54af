# SPDX-License-Identifier: Apache-2.0
"""Derivatives of roots, against finite differences, closed forms, Sylvester equations and 50-digit arithmetic; and torch's transforms."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import spd, with_spectrum
from table import FP32, FP64, ROWS, Row
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import matroots
from matroots import EVD, Chebyshev, CoupledNewton, Frobenius, Minimax, MultiPower, NewtonDB, Rational
from matroots._frechet import Power, frechet, second_frechet

SPECTRA = {
    "random": [3.0, 1.7, 0.6, 0.2],
    "clustered": [1.0, 1.0 + 1e-9, 0.3, 0.3 - 1e-12],
    "repeated": [2.0, 2.0, 2.0, 0.5],
    "one": [1.0, 1.0, 1.0, 1.0],
}
each_row = pytest.mark.parametrize("row", ROWS, ids=str)
each_spectrum = pytest.mark.parametrize("spectrum", SPECTRA)
each_sign = pytest.mark.parametrize("sign", [-1, 1])


def orders(row: Row) -> list[Any]:
    """A few p that a method takes: even, odd, rational, real."""
    return [p for p in (2, 3, 4, Fraction(8, 3), math.pi) if p in row.orders][:3]


def symmetric(M: Tensor) -> Tensor:
    """What finite differences move element by element has to be made symmetric first."""
    return (M + M.mH) / 2


def inverse(row_or_method: Any, p: Any, **keywords: Any) -> Any:
    method = getattr(row_or_method, "method", row_or_method)
    return lambda M: matroots.inv_root(symmetric(M), p, method=method, **keywords)


# ------------------------------------------------------------------------------------------ against finite differences


@each_spectrum
@each_row
def test_gradcheck(row, spectrum):
    A = with_spectrum(SPECTRA[spectrum]).requires_grad_()
    for p in orders(row):
        assert gradcheck(inverse(row, p), A, check_forward_ad=True), p
        assert gradcheck(lambda M, p=p: matroots.root(symmetric(M), p, method=row.method), A), p


@each_spectrum
@each_row
def test_gradgradcheck(row, spectrum):
    A = with_spectrum(SPECTRA[spectrum]).requires_grad_()
    for p in orders(row)[:2]:
        assert gradgradcheck(inverse(row, p), A, check_fwd_over_rev=True), p
        assert gradgradcheck(lambda M, p=p: matroots.root(symmetric(M), p, method=row.method), A), p


@each_row
def test_gradcheck_of_a_batch_with_damping(row):
    """The damping and what ``rel_damping`` multiplies depend on A too."""
    A = torch.stack([spd(3, 10.0, seed=s) for s in range(2)]).reshape(2, 1, 3, 3).requires_grad_()
    eps = torch.tensor([[0.1], [0.2]], dtype=FP64, requires_grad=True)

    def function(M: Tensor, eps: Tensor) -> Tensor:
        return matroots.inv_root(symmetric(M), 2, method=row.method, damping=eps, rel_damping=0.1)

    assert gradcheck(function, (A, eps), check_batched_grad=True, check_forward_ad=True)
    assert gradgradcheck(function, (A, eps))


@each_row
def test_gradcheck_of_a_pair(row):
    A = spd(4, 20.0).requires_grad_()
    assert gradcheck(
        lambda M: matroots.root_pair(symmetric(M), 2, method=row.method), A, check_forward_ad=True
    )
    assert gradgradcheck(lambda M: matroots.root_pair(symmetric(M), 2, method=row.method), A)


@each_spectrum
@each_row
def test_gradcheck_of_hermitian_matrices(row, spectrum):
    U = torch.linalg.qr(
        torch.randn(4, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    ).Q
    A = symmetric((U * torch.tensor(SPECTRA[spectrum], dtype=FP64)) @ U.mH).requires_grad_()
    assert gradcheck(inverse(row, 2), A, check_forward_ad=True)
    assert gradgradcheck(inverse(row, 2), A)


# ----------------------------------------------------------------------------------------------- against other mathematics


def by_mpmath(B: Tensor, p: float, sign: int, *directions: Tensor) -> Tensor:
    """First or second derivative by central differences in 60 digits."""
    with mpmath.workdps(60):
        h = mpmath.mpf(10) ** -16

        def f(M: mpmath.matrix) -> mpmath.matrix:
            values, Q = mpmath.eigsy(M)
            return Q * mpmath.diag([v ** (mpmath.mpf(sign) / mpmath.mpf(p)) for v in values]) * Q.T

        M, *E = (mpmath.matrix(t.tolist()) for t in (B, *directions))
        if len(E) == 1:
            found = (f(M + h * E[0]) - f(M - h * E[0])) / (2 * h)
        else:
            plus, minus = E[0] + E[1], E[0] - E[1]
            found = (f(M + h * plus) - f(M + h * minus) - f(M - h * minus) + f(M - h * plus)) / (4 * h * h)
        return torch.tensor(np.array(found.tolist(), dtype=float))


@each_sign
@pytest.mark.parametrize("p", [1, 1.5, 2, 4, 7.3])
@pytest.mark.parametrize(
    "spectrum",
    [np.geomspace(1e-6, 1, 5), [1.0, 1.0, 0.5, 0.5, 1e-3], [1.0, 1 + 1e-9, 1 + 1e-12, 0.1, 0.1 + 1e-10]],
    ids=["wide", "repeated", "clustered"],
)
def test_both_derivatives_in_sixty_digits(sign, p, spectrum):
    """Each to eleven digits, at condition numbers up to 1e6."""
    B = with_spectrum(spectrum, seed=3)
    E, F = (
        symmetric(torch.randn(5, 5, dtype=FP64, generator=torch.Generator().manual_seed(s))) for s in (1, 2)
    )
    with mpmath.workdps(60):
        values, Q = mpmath.eigsy(mpmath.matrix(B.tolist()))
        X = Q * mpmath.diag([v ** (mpmath.mpf(sign) / mpmath.mpf(p)) for v in values]) * Q.T
    X = symmetric(torch.tensor(np.array(X.tolist(), dtype=float)))
    power = Power(float(p), sign)
    first, second = by_mpmath(B, p, sign, E), by_mpmath(B, p, sign, E, F)
    assert torch.dist(frechet(X, E, power), first) <= 1e-12 * first.norm()
    limit = 1e-11 * second.norm() if (sign, p) != (1, 1) else 1e-15  # B itself has none
    assert torch.dist(second_frechet(X, E, F, power), second) <= limit


@each_row
def test_a_square_root_solves_a_sylvester_equation(row):
    """``S dS + dS S = dA``, and ``dX = -X dS X``."""
    A, E = (
        spd(12, 1e3),
        symmetric(torch.randn(12, 12, dtype=FP64, generator=torch.Generator().manual_seed(5))),
    )
    S, X = (M.numpy() for M in matroots.root_pair(A, 2, method="evd"))
    dS = scipy.linalg.solve_sylvester(S, S, E.numpy())
    _, found = jvp(lambda M: matroots.root(M, 2, method=row.method), (A,), (E,))
    assert np.linalg.norm(found.numpy() - dS) <= 1e-10 * np.linalg.norm(dS)
    _, found = jvp(lambda M: matroots.inv_root(M, 2, method=row.method), (A,), (E,))
    dX = -X @ dS @ X
    assert np.linalg.norm(found.numpy() - dX) <= 1e-9 * np.linalg.norm(dX)


@each_row
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_gradients_scale_as_they_should(row, scale):
    """That of ``tr A^{-1/2}`` is ``-A^{-3/2}/2``, for fp32 as well."""
    for dtype, limit in ((FP64, 1e-11), (FP32, 2e-4)):
        A = (spd(6, 100.0) * scale).to(dtype).requires_grad_()
        matroots.inv_root(A, 2, method=row.method).trace().backward()
        exact = with_spectrum(np.geomspace(1.0, 0.01, 6) ** -1.5 * -0.5) * float(scale) ** -1.5
        assert A.grad is not None
        assert A.grad.dtype == dtype
        assert torch.dist(A.grad.double(), exact) <= limit * exact.norm()


@pytest.mark.parametrize("n", [6, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients(dtype, n):
    A = spd(n, 10.0 if n < 10 else 100.0).to(dtype).requires_grad_()
    matroots.inv_root(A, 2).trace().backward()
    B = A.detach().double().requires_grad_()
    matroots.inv_root(B, 2).trace().backward()
    assert A.grad is not None
    assert B.grad is not None
    assert A.grad.dtype == dtype
    assert torch.dist(A.grad.double(), B.grad) <= 8 * torch.finfo(dtype).eps * B.grad.norm()


def test_a_thousand_clustered_spectra():
    """No NaN, and the derivative of ``tr(C A^{-1/4})`` in a basis where it is known."""
    draw = np.random.default_rng(7)
    centres = 10 ** draw.uniform(-3, 0, (1000, 2))
    spectra = centres[:, [0, 0, 0, 1, 1, 1]] * (
        1 + draw.choice([0, 1e-15, 1e-12, 1e-8, 1e-4], (1000, 6)) * draw.normal(size=(1000, 6))
    )
    A = torch.stack([with_spectrum(values, seed=k) for k, values in enumerate(spectra)])
    for dtype, limit in ((FP64, 1e-10), (FP32, 1e-2)):
        M = A.to(dtype, copy=True).requires_grad_()
        C = symmetric(torch.randn(6, 6, dtype=FP64, generator=torch.Generator().manual_seed(9)))
        (matroots.inv_root(M, 4) * C.to(dtype)).sum().backward()
        assert M.grad is not None
        assert bool(M.grad.isfinite().all())
        values, Q = np.linalg.eigh(M.detach().double().numpy())
        fourth = values**-0.25  # x_i^4 l_i = 1: (x_i - x_j)/(l_i - l_j) without a difference
        y, z = fourth[:, :, None], fourth[:, None, :]
        D = -((y * z) ** 4) / (y**3 + y**2 * z + y * z**2 + z**3)
        exact = torch.from_numpy(Q @ (D * (Q.transpose(0, 2, 1) @ C.numpy() @ Q)) @ Q.transpose(0, 2, 1))
        gap = torch.linalg.matrix_norm(M.grad.double() - exact) / torch.linalg.matrix_norm(exact)
        assert gap.max() <= limit


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    log_spectrum=st.lists(st.floats(-4, 4), min_size=1, max_size=5),
    p=st.floats(1, 12),
    sign=st.sampled_from([-1, 1]),
    seed=st.integers(0, 99),
)
def test_derivatives_are_symmetric_and_consistent(log_spectrum, p, sign, seed):
    """``<L(E), F> = <E, L(F)>``, ``L(B) = (s/p) f(B)`` by Euler, and ``L2(E, F) = L2(F, E)``, ``L2(B, E) = (s/p - 1) L(E)``."""
    B = with_spectrum(np.exp(log_spectrum), seed)
    X = with_spectrum(np.exp(np.array(log_spectrum) * sign / p), seed)
    draw = torch.Generator().manual_seed(seed)
    E, F = (symmetric(torch.randn(len(B), len(B), dtype=FP64, generator=draw)) for _ in range(2))
    power = Power(p, sign)
    LE, LF = frechet(X, E, power), frechet(X, F, power)
    size = LE.norm() * F.norm() + LF.norm() * E.norm()
    assert abs((LE * F).sum() - (LF * E).sum()) <= 1e-12 * size
    assert torch.dist(frechet(X, B, power), sign / p * X) <= 1e-10 * X.norm()
    assert (
        torch.dist(second_frechet(X, E, F, power), second_frechet(X, F, E, power))
        <= 1e-10 * second_frechet(X, E, F, power).norm() + 1e-300
    )
    scale = LE.norm() * np.exp(np.ptp(log_spectrum))
    assert torch.dist(second_frechet(X, B, E, power), (sign / p - 1) * LE) <= 1e-11 * scale


# --------------------------------------------------------------------------------------------------------------- odd members


def test_a_bad_member_spoils_only_its_own_gradient():
    A = torch.stack([spd(3), -spd(3), spd(3, seed=2)]).requires_grad_()
    result = matroots.inv_root_ex(A, 2)
    assert result.status.tolist() == [0, 5, 0]
    result.root.sum().backward()
    assert A.grad is not None
    assert A.grad.isnan().flatten(1).all(-1).tolist() == [False, True, False]
    alone = A.detach()[[0, 2]].requires_grad_()
    matroots.inv_root(alone, 2).sum().backward()
    assert alone.grad is not None
    assert torch.equal(A.grad[[0, 2]], alone.grad)


def test_a_bad_member_that_the_loss_leaves_out_has_gradient_zero():
    A = torch.stack([spd(3), torch.full((3, 3), torch.nan, dtype=FP64)]).requires_grad_()
    result = matroots.inv_root_ex(A, 2)
    result.root[result.status == 0].sum().backward()
    assert A.grad is not None
    assert bool(A.grad[0].isfinite().all())
    assert torch.equal(A.grad[1], torch.zeros(3, 3, dtype=FP64))


def test_a_singular_matrix_has_a_root_with_a_finite_gradient():
    A = torch.diag(torch.tensor([4.0, 1.0, 0.0], dtype=FP64)).requires_grad_()
    S = matroots.root(A, 2, method="evd")
    S[:2, :2].sum().backward()
    assert A.grad is not None
    assert bool(A.grad.isfinite().all())
    assert A.grad.diagonal()[:2].tolist() == pytest.approx([0.25, 0.5])


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (0, 0), (1, 1), (2, 1, 1)])
def test_small_and_empty(shape):
    A = (torch.ones(shape, dtype=FP64) * 4).requires_grad_()
    X = matroots.inv_root(A, 2)
    (G,) = torch.autograd.grad(X.sum(), A, create_graph=True)
    (H,) = torch.autograd.grad(G.sum(), A)
    assert torch.allclose(G, torch.full(shape, -1 / 16, dtype=FP64), rtol=1e-14)
    assert torch.allclose(H, torch.full(shape, 3 / 128, dtype=FP64), rtol=1e-12)


def test_strides_and_views_do_not_matter():
    A = torch.stack([spd(4, seed=s) for s in range(3)])
    G = torch.randn(3, 4, 4, dtype=FP64, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad(matroots.inv_root(A.requires_grad_(), 2), A, G)[0]
    strange = A.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_()
    found = torch.autograd.grad(matroots.inv_root(strange, 2), strange, G.mT.contiguous().mT)[0]
    assert torch.allclose(found, expected, rtol=1e-13, atol=0)
    expanded = spd(4).requires_grad_()
    matroots.inv_root(expanded.expand(3, 4, 4), 2).sum().backward()
    assert expanded.grad is not None
    single = torch.autograd.grad(matroots.inv_root(expanded, 2).sum(), expanded)[0]
    assert torch.allclose(expanded.grad, 3 * single, rtol=1e-13, atol=1e-15)


def test_the_damping_has_a_gradient():
    """``d tr(A + eps)^{-1/2} / d eps = -tr(A + eps)^{-3/2} / 2``, summed over the members that share it."""
    A = torch.stack([spd(3, seed=s) for s in range(2)])
    for eps in (torch.tensor(0.1, dtype=FP64), torch.tensor([0.1, 0.3], dtype=FP64)):
        eps.requires_grad_()
        matroots.inv_root(A, 2, damping=eps).diagonal(dim1=-2, dim2=-1).sum().backward()
        spectra = np.geomspace(1.0, 0.1, 3) + eps.detach().expand(2).numpy()[:, None]
        exact = (-0.5 * spectra**-1.5).sum(-1)
        assert eps.grad is not None
        assert eps.grad.tolist() == pytest.approx(exact.sum() if eps.ndim == 0 else exact.tolist(), rel=1e-12)


def test_diagnostics_and_certificates_are_detached():
    A = spd(4).requires_grad_()
    result = matroots.inv_root_ex(
        A, 2, method="ndb", certify=True, damping=torch.tensor(0.1, requires_grad=True)
    )
    assert result.root.requires_grad
    assert result.certificate is not None
    assert not any(t.requires_grad for t in (*result[1:-1], *result.certificate))
    assert not any(t.requires_grad for t in matroots.certify(A, result.root, 2))
    assert not matroots.lambda_bound(A).requires_grad


@pytest.mark.parametrize("spectrum", ["shift", "abs", "clip", "pinv"])
def test_what_has_no_derivative_says_so(spectrum):
    A = spd(3).requires_grad_()
    X = matroots.inv_root(A, 2, method=EVD(spectrum=spectrum), damping=0.1)
    with pytest.raises(NotImplementedError, match=rf'^method: EVD\(spectrum="{spectrum}"\).*no derivative'):
        X.sum().backward()
    with pytest.raises(NotImplementedError, match="no derivative"):
        jvp(
            lambda M: matroots.inv_root(M, 2, method=EVD(spectrum=spectrum), damping=0.1),
            (A.detach(),),
            (A.detach(),),
        )


def test_a_third_derivative_says_that_there_is_none():
    A = spd(3).requires_grad_()
    (G,) = torch.autograd.grad(matroots.inv_root(A, 2).sum(), A, create_graph=True)
    (H,) = torch.autograd.grad(G.sum(), A, create_graph=True)
    with pytest.raises(NotImplementedError, match="a third was asked for"):
        H.sum().backward()


def test_errors_and_warnings_are_those_of_a_plain_call():
    A = torch.stack([spd(3), -spd(3)]).requires_grad_()
    with pytest.raises(matroots.RootError, match=r"members \[1\] of batch \(2,\)") as caught:
        matroots.inv_root(A, 2)
    assert caught.value.status.tolist() == [0, 5]
    with pytest.warns(matroots.RootWarning, match="ran out of steps") as warned:
        matroots.inv_root(spd(3, 1e6).requires_grad_(), 2, method="ndb", max_steps=2)
    assert warned[0].filename == __file__
    with pytest.raises(ValueError, match=r"^damping: .*broadcasts"):
        matroots.inv_root(A, 2, damping=torch.ones(3))
    with pytest.raises(ValueError, match=r"^damping: expected values >= 0"):
        matroots.inv_root(A, 2, damping=torch.tensor(-1.0))
    with pytest.raises(ValueError, match=r"^p: "):
        matroots.inv_root(A, 0.5)


def test_the_value_is_that_of_a_plain_call():
    A = torch.stack([spd(16, 1e4, seed=s, dtype=FP32) for s in range(3)])
    for row in ROWS:
        plain = matroots.inv_root_ex(A, 2, method=row.method, rel_damping=1e-3)
        followed = matroots.inv_root_ex(A.clone().requires_grad_(), 2, method=row.method, rel_damping=1e-3)
        for name in ("root", "status", "steps", "residual", "damping", "matmuls"):
            expected, found = getattr(plain, name), getattr(followed, name)
            assert torch.equal(expected.nan_to_num(-1.0), found.nan_to_num(-1.0)), (row, name)


# ------------------------------------------------------------------------------------------------------- torch's transforms


@each_row
def test_transforms_agree(row):
    A = torch.stack([spd(3, seed=s) for s in range(2)])
    function = inverse(row, 2)
    backward, forward = jacrev(function)(A[0]), jacfwd(function)(A[0])
    assert torch.allclose(backward, forward, rtol=1e-12, atol=1e-13)
    (ordinary,) = torch.autograd.functional.jacobian(function, (A[0],))
    assert torch.allclose(backward, ordinary, rtol=1e-12, atol=1e-13)
    each = vmap(jacrev(function))(A)
    assert torch.allclose(each[0], backward, rtol=1e-12, atol=1e-13)

    def total(M: Tensor) -> Tensor:
        return (function(M) ** 2).sum()

    assert torch.allclose(hessian(total)(A[1]), jacrev(jacrev(total))(A[1]), rtol=1e-10, atol=1e-11)
    assert torch.allclose(vmap(grad(total))(A), grad(lambda M: total(M))(A), rtol=1e-12, atol=1e-13)


@each_row
@pytest.mark.parametrize("in_dim", [0, 1, -1])
def test_nested_vmap(row, in_dim):
    A = torch.stack([spd(3, seed=s) for s in range(6)]).reshape(2, 3, 3, 3)
    expected = matroots.inv_root(A, 2, method=row.method)
    twice = vmap(vmap(lambda M: matroots.inv_root(M, 2, method=row.method)))(A)
    assert torch.equal(twice, expected)
    moved = A[0].movedim(0, in_dim)
    once = vmap(lambda M: matroots.inv_root(M, 2, method=row.method), in_dims=in_dim)(moved)
    assert torch.equal(once, expected[0])


def test_vmap_over_the_damping_alone():
    A, eps = spd(3), torch.tensor([0.0, 0.1, 1.0], dtype=FP64)
    X = vmap(lambda e: matroots.inv_root(A, 2, damping=e))(eps)
    assert torch.allclose(
        X, torch.stack([matroots.inv_root(A, 2, damping=float(e)) for e in eps]), rtol=1e-13
    )


def test_vmap_of_everything_else():
    A = torch.stack([spd(3), -spd(3)])
    assert vmap(lambda M: matroots.inv_root_ex(M, 2).status)(A).tolist() == [0, 5]
    with pytest.raises(matroots.RootError, match=r"members \[1\] of batch \(2,\)"):
        vmap(lambda M: matroots.inv_root(M, 2))(A)
    S, X = vmap(lambda M: matroots.root_pair(M, 2))(A[:1])
    assert torch.allclose(S @ X, torch.eye(3, dtype=FP64), atol=1e-13)
    certified = vmap(lambda M: matroots.inv_root_ex(M, 2, certify=True).certificate.relative_error)(A[:1])
    assert certified.shape == (1,)
    assert certified.max() < 1e-10


def test_dual_tensors():
    A, E = spd(3), symmetric(torch.randn(3, 3, dtype=FP64, generator=torch.Generator().manual_seed(0)))
    with forward_ad.dual_level():
        X, tangent = forward_ad.unpack_dual(matroots.inv_root(forward_ad.make_dual(A, E), 1))
    assert torch.allclose(tangent, -X @ E @ X, rtol=1e-12)


# -------------------------------------------------------------------------------------------------------- compile and export

compiling = pytest.mark.filterwarnings("ignore:::torch")  # the compiler's, about its own business


@compiling
@pytest.mark.parametrize("method", [*(row.method for row in ROWS), NewtonDB(steps=12)], ids=str)
def test_compiled_whole_with_its_gradient(method):
    torch.compiler.reset()
    A = torch.stack([spd(4, seed=s) for s in range(2)])
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(
        lambda M: (matroots.inv_root(M, 2, method=method, damping=0.1) ** 2).sum(),
        fullgraph=True,
        backend=backend,
    )
    found, expected = A.clone().requires_grad_(), A.clone().requires_grad_()
    for _ in range(3):
        found.grad = None
        compiled(found).backward()
    (matroots.inv_root(expected, 2, method=method, damping=0.1) ** 2).sum().backward()
    assert len(graphs) == 1  # one graph per shape
    assert found.grad is not None
    assert expected.grad is not None
    assert torch.allclose(found.grad, expected.grad, rtol=1e-12, atol=1e-14)


@compiling
def test_compiled_results_are_whole():
    torch.compiler.reset()
    A = torch.stack([spd(4), -spd(4)])
    compiled = torch.compile(
        lambda M: matroots.inv_root_ex(M, 2.5, method="chebyshev", certify=True),
        fullgraph=True,
        backend="aot_eager",
    )
    found, plain = compiled(A), matroots.inv_root_ex(A, 2.5, method="chebyshev", certify=True)
    for a, b in zip((*found[:-1], *found[-1]), (*plain[:-1], *plain[-1]), strict=True):
        assert torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))
    p = Fraction(5, 2)
    strict = torch.compile(lambda M: matroots.inv_root(M, p), fullgraph=True, backend="aot_eager")
    with pytest.raises(matroots.RootError, match=r"members \[1\]"):
        strict(A)


@compiling
def test_compiled_pairs_complex_matrices_and_vmap():
    torch.compiler.reset()
    A = torch.stack([spd(4, seed=s) for s in range(2)])
    S, X = torch.compile(lambda M: matroots.root_pair(M, 4), fullgraph=True, backend="aot_eager")(A)
    assert torch.allclose(S @ X, torch.eye(4, dtype=FP64), atol=1e-12)
    H = A + 0.01j * (A.tril() - A.triu())
    found = torch.compile(lambda M: matroots.inv_root(M, 2), fullgraph=True, backend="aot_eager")(H)
    assert torch.equal(found, matroots.inv_root(H, 2))
    mapped = torch.compile(vmap(lambda M: matroots.inv_root(M, 2)), fullgraph=True, backend="aot_eager")(A)
    assert torch.equal(mapped, matroots.inv_root(A, 2))


@compiling
@pytest.mark.parametrize("inside", [False, True])
def test_solvers_and_scalings_keep_their_fields(inside):
    """Made outside of what is compiled, or in it."""
    A = torch.stack([spd(8, 1e4, seed=s) for s in range(2)])
    made = {
        "evd": lambda: {"method": EVD(spectrum="clip", compute_dtype=torch.float64), "damping": 0.1},
        "ndb": lambda: {"method": NewtonDB(steps=3), "scaling": Frobenius()},
        "rational": lambda: {"method": Rational(error=0.05, floor=1e-2)},
        "cn": lambda: {"method": CoupledNewton(steps=2), "scaling": MultiPower(vectors=1, steps=1)},
        "chebyshev": lambda: {"method": Chebyshev(degree=5, floor=0.1), "max_batch": 1},
        "minimax": lambda: {"method": Minimax(floor=0.2), "matmul_dtype": torch.bfloat16},
    }
    for name, keywords in made.items():
        torch.compiler.reset()
        outside = keywords()
        expected = matroots.inv_root_ex(A, 2, **outside)
        compiled = torch.compile(
            lambda M, k=keywords, o=outside: matroots.inv_root_ex(M, 2, **(k() if inside else o)),
            fullgraph=True,
            backend="aot_eager",
        )
        found = compiled(A)
        assert torch.equal(found.root, expected.root), name
        assert torch.equal(found.matmuls, expected.matmuls), name


class _OwnSolver(NewtonDB):
    """Somebody's own."""


@compiling
def test_what_cannot_be_compiled_says_so():
    torch.compiler.reset()
    A, own = spd(3), _OwnSolver(steps=9)
    compiled = torch.compile(
        lambda M: matroots.inv_root(M, 2, method=own), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match="method: a compiled or exported call takes those of matroots only"):
        compiled(A)


@compiling
@pytest.mark.parametrize("fullgraph", [False, True])
def test_derivatives_inside_of_what_is_compiled_are_refused(fullgraph):
    """Torch drops tangents of operations there, without a word."""

    def function(M: Tensor) -> Tensor:
        return matroots.inv_root(M, 2).sum()

    for inside in (grad(function), lambda M: jvp(function, (M,), (M,))[1]):
        torch.compiler.reset()
        compiled = torch.compile(inside, fullgraph=fullgraph, backend="aot_eager")
        with pytest.raises(Exception, match="are not possible inside of a compiled or exported function"):
            compiled(spd(3))


@compiling
def test_gradients_of_a_vmap_that_is_compiled():
    torch.compiler.reset()
    A = torch.stack([spd(3), 3 * spd(3, seed=1)])

    def function(M: Tensor, eps: Tensor) -> Tensor:
        return vmap(lambda m, e: matroots.inv_root(m, 2, damping=e, rel_damping=0.3))(M, eps).sum()

    found = [A.clone().requires_grad_(), torch.tensor([0.1, 0.2], dtype=FP64, requires_grad=True)]
    expected = [t.detach().clone().requires_grad_() for t in found]
    torch.compile(function, fullgraph=True, backend="aot_eager")(*found).backward()
    function(*expected).backward()
    for a, b in zip(found, expected, strict=True):
        assert a.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-13)
    torch.compiler.reset()
    clipped = vmap(lambda m: matroots.inv_root(m, 2, method=EVD(spectrum="abs")))
    with pytest.raises(Exception, match="no derivative"):
        torch.compile(clipped, fullgraph=True, backend="aot_eager")(
            A.clone().requires_grad_()
        ).sum().backward()


class _Damped(torch.nn.Module):
    def forward(self, A: Tensor, eps: Tensor) -> Tensor:
        """Return a root that depends on the damping in two ways."""
        return matroots.inv_root(A, 2, damping=eps, rel_damping=0.3)


def test_gradients_of_an_exported_program():
    """Of inputs that asked for none when it was traced; second ones are refused."""
    A, eps = torch.stack([spd(3), spd(3, seed=1)]), torch.tensor([0.1, 0.2], dtype=FP64)
    program = torch.export.export(_Damped(), (A, eps)).module()
    found = [A.clone().requires_grad_(), eps.clone().requires_grad_()]
    expected = [A.clone().requires_grad_(), eps.clone().requires_grad_()]
    program(*found).sum().backward()
    _Damped()(*expected).sum().backward()
    for a, b in zip(found, expected, strict=True):
        assert a.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-13)
    (first,) = torch.autograd.grad(program(*found).sum(), found[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        first.sum().backward()


def test_results_may_be_written_to():
    """As those of torch: what was written over cannot be differentiated any more, and says so."""
    A = spd(3).requires_grad_()
    X = matroots.inv_root(A, 2)
    X.diagonal().add_(1.0)
    X = matroots.inv_root(A, 2)
    Y = X.sum()
    X.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Y.backward()


def test_rel_damping_at_the_ends_of_the_range():
    """``A -> c A`` makes the gradient ``c^{-3/2}`` times as large."""
    A = spd(3)
    gradients = []
    for scale in (1.0, 2.0**500, 2.0**-500):
        M = (A * scale).requires_grad_()
        matroots.inv_root(M, 2, rel_damping=0.3).sum().backward()
        assert M.grad is not None
        gradients.append(M.grad * scale**0.5 * scale)
    assert torch.allclose(gradients[1], gradients[0], rtol=1e-11)
    assert torch.allclose(gradients[2], gradients[0], rtol=1e-11)


class _Whitening(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Return whitened rows."""
        return x @ matroots.inv_root(x.mT @ x / len(x), 2, method="ndb", rel_damping=1e-3)


def test_export_and_load(tmp_path):
    x = torch.randn(50, 4, dtype=FP64, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(_Whitening(), (x,))
    assert [str(node.target) for node in program.graph.nodes].count("matroots.solve.default") == 1
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    assert torch.equal(loaded(x), _Whitening()(x))


def test_fake_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        X = matroots.inv_root(torch.empty(2, 3, 3), 2)
    assert (X.shape, X.dtype) == ((2, 3, 3), FP32)


def test_torch_checks_the_operations():
    """Torch's own test of an operation: schema, autograd registration, fake and real results alike."""
    from matroots import _opaque

    A = torch.stack([spd(3, seed=s) for s in range(2)]).requires_grad_()
    eps = torch.zeros(2, dtype=FP64)
    text = _opaque.encoded(2, "inverse", False, True, False, method="ndb")
    torch.library.opcheck(_opaque.solve, (A, A.detach(), eps, text, False))
    torch.library.opcheck(_opaque.derivative, (A.detach(), A.detach(), 2.0, -1))
