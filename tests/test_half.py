# SPDX-License-Identifier: Apache-2.0
"""Half precision: operands are rounded exactly as told, split products are as accurate as derived, and nothing turns NaN."""

from __future__ import annotations

import contextlib
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from matrices import error, inverse_root, spd, with_spectrum
from table import BF16, FIXED, FP16, FP32, FP64, ROWS, cases, name

import matroots
from matroots import CoupledNewton, NewtonDB, Status
from matroots._formats import FORMATS, to_tf32
from matroots._products import Product, _float32_as_written, full_precision

PLAIN = ("fp16", "bf16", "tf32")
SPLIT = ("fp16x2", "bf16x2", "bf16x3")
HALF_ROWS = tuple(row for row in ROWS if row.half_products)


def significand(x: np.ndarray, bits: int, smallest: int = -(10**6)) -> np.ndarray:
    """Round to ``bits`` significant bits, ties to even, spacing at least ``2^smallest``: in fp64, by its own rint."""
    _, exponent = np.frexp(x)
    spacing = np.exp2(np.maximum(exponent - bits, smallest).astype(np.float64))
    return np.rint(x / spacing) * spacing


def reference_rounding(x: np.ndarray, format_name: str) -> np.ndarray:
    """Round to one part of a format: numpy's own float16, and for the others `significand`."""
    if format_name.startswith("fp16"):
        return x.astype(np.float16).astype(np.float64)
    return significand(x.astype(np.float64), 11 if format_name == "tf32" else 8)


def gaussian(*shape: int, start: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(start))


# ------------------------------------------------------------------------------------------------------------ formats


@seed(1)
@settings(max_examples=300, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_tf32_is_ten_stored_bits_and_ties_to_even(x):
    expected = significand(np.float64(x), 11, -136)  # subnormals have the spacing 2^-136
    if abs(expected) >= 2.0**128:
        expected = math.copysign(math.inf, x)
    assert to_tf32(torch.tensor([x], dtype=FP32)).item() == expected


def test_tf32_ties_infinities_and_nan():
    ties = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11, math.inf, -math.inf])
    assert to_tf32(ties).tolist() == [1.0, 1 + 2.0**-9, -1.0, math.inf, -math.inf]
    assert to_tf32(torch.tensor([math.nan, -math.nan])).isnan().all()


@pytest.mark.parametrize("format_name", PLAIN)
def test_a_product_of_two_numbers_is_that_of_the_rounded_ones_exactly(format_name):
    A, B = gaussian(500, 1, 1), gaussian(500, 1, 1, start=1)
    P = Product(FORMATS[format_name])(A, B, torch.full_like(A, math.nan))
    expected = reference_rounding(A.numpy(), format_name) * reference_rounding(B.numpy(), format_name)
    assert P.double().numpy().tolist() == expected.tolist()


@pytest.mark.parametrize("format_name", FORMATS)
def test_parts_leave_what_is_derived(format_name):
    """At most u of an operand for one part, ``u^2/2`` for two; three of 8 bits hold float32 exactly."""
    given = FORMATS[format_name]
    A = gaussian(1, 100, 100)
    if given.dtype == FP16:
        A = A.sign() * A.abs().clamp(0.1, 2.0)  # far from where float16 is subnormal
    total = sum(part.double() * given.part_roundoff**k for k, part in enumerate(given.split(A)))
    left = ((total - A.double()).abs() / A.abs()).max()
    expected = {1: given.part_roundoff, 2: given.part_roundoff**2 / 2, 3: 0.0}[given.parts]
    assert expected / 8 <= left <= expected


def test_unit_roundoffs():
    """``2^-bits`` for one part; two and three parts its square and cube: see the derivation at `Format.unit_roundoff`."""
    expected = {"fp16": 11, "bf16": 8, "tf32": 11, "fp16x2": 22, "bf16x2": 16, "bf16x3": 24}
    assert {k: v.unit_roundoff for k, v in FORMATS.items()} == {k: 2.0**-v for k, v in expected.items()}
    for dtype, known in ((FP16, "fp16"), (BF16, "bf16")):
        assert FORMATS[known].unit_roundoff == torch.finfo(dtype).eps / 2
    assert [f.products for f in FORMATS.values()] == [1, 1, 1, 3, 3, 6]


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**50, 1e5])
@pytest.mark.parametrize("format_name", FORMATS)
def test_products_are_as_accurate_as_their_unit_roundoff(format_name, scale):
    """``|P - A B| <= (2 u + 4 n u_32) |A| |B|``, and what float16 cannot hold beside the largest entry."""
    given, n = FORMATS[format_name], 40
    A, B = gaussian(3, n, n, scale=scale), gaussian(3, n, n, start=7)
    A[1] *= 1e3
    P = Product(given)(A, B, torch.empty_like(A))
    sizes = A.double().abs() @ B.double().abs()
    tiny = 4 * n * 2.0**-24 * given.part_roundoff ** (given.parts - 1) if given.dtype == FP16 else 0.0
    tiny *= A.abs().amax((-2, -1), keepdim=True).double() * B.abs().amax((-2, -1), keepdim=True).double()
    wrong = (P.double() - A.double() @ B.double()).abs()
    assert bool((wrong <= (2 * given.unit_roundoff + 4 * n * 2.0**-24) * sizes + tiny).all())
    if given.parts == 1:
        assert (wrong / sizes).max() > given.unit_roundoff / 50, "the operands were not rounded"


@pytest.mark.parametrize("alpha", [1.0, -0.5, 3.0])
@pytest.mark.parametrize("format_name", [None, *FORMATS])
def test_products_of_views_into_views(format_name, alpha):
    """Column panels of a lower triangle: non-square blocks of any strides, and nothing else is written."""
    multiply = Product(None if format_name is None else FORMATS[format_name])
    A, B = gaussian(2, 12, 12), gaussian(2, 12, 12, start=1).mT
    whole = multiply(A, B, torch.empty(2, 12, 12), alpha)
    P = torch.full((2, 12, 12), 7.0)
    for j in range(0, 12, 4):
        out = P[:, j:, j : j + 4]
        assert multiply(A[:, j:], B[:, :, j : j + 4], out, alpha=alpha) is out
    size = float((A.abs() @ B.abs()).max())
    for j in range(0, 12, 4):
        assert torch.allclose(
            P[:, j:, j : j + 4], whole[:, j:, j : j + 4], rtol=0, atol=3e-6 * abs(alpha) * size
        )
        assert bool((P[:, :j, j : j + 4] == 7.0).all())


# ---------------------------------------------------------------------------------------------------- split products


def draws(count: int, n: int, condition: float, start: int) -> torch.Tensor:
    """Random spectra, log-uniform, both ends included."""
    random = np.random.default_rng(start)
    exponents = random.random((count, n))
    exponents[:, 0], exponents[:, -1] = 0.0, 1.0
    return torch.stack([with_spectrum(condition**-e, start + k, FP32) for k, e in enumerate(exponents)])


def fp64_root(A: torch.Tensor, p: float) -> torch.Tensor:
    eigenvalues, Q = torch.linalg.eigh(A.double())
    return (Q * eigenvalues.pow(-1 / p).unsqueeze(-2)) @ Q.mT


def check_split_draws(count: int, format_name: str, method: str, p: int) -> None:
    for n in (2, 8, 24, 48):
        A = draws(count // 4, n, 1e4, 10 * n)
        result = matroots.inv_root_ex(A, p, method=method, matmul_dtype=format_name)
        assert error(result.root, fp64_root(A, p)).max() <= 2e-3
        assert bool((result.status == Status.CONVERGED).all())


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("method", ["ndb", "cn", "minimax"])
@pytest.mark.parametrize("format_name", SPLIT)
def test_split_products_at_condition_1e4(format_name, method, p):
    check_split_draws(40, format_name, method, p)


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("method", ["ndb", "cn", "minimax"])
@pytest.mark.parametrize("format_name", SPLIT)
def test_a_thousand_split_products_at_condition_1e4(format_name, method, p):
    check_split_draws(1000, format_name, method, p)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_split_products_are_as_accurate_as_float32(p):
    """What carries the small eigenvalues on has 22 bits or more in each of them."""
    A = spd(32, 1e4, dtype=FP32)
    for format_name in SPLIT:
        X = matroots.inv_root(A, p, method="minimax", matmul_dtype=format_name)
        assert error(X, inverse_root(A, p)) <= 3e-4


def test_float16_holds_roots_beyond_its_range():
    """``A^{-1}`` has an entry of 1e5 times the scale, ``X^{p-1}`` of more."""
    A = torch.diag(torch.tensor([1.0, 1e-5]))
    X = matroots.inv_root(A, 1, method="cn", matmul_dtype="fp16x2")
    assert X[1, 1].item() == pytest.approx(1e5, rel=1e-4)
    root, inverse = matroots.root_pair(A, 4, method="cn", matmul_dtype="fp16x2")
    assert root[1, 1].item() == pytest.approx(1e-5**0.25, rel=1e-4)
    assert inverse[1, 1].item() == pytest.approx(1e-5**-0.25, rel=1e-4)


@pytest.mark.parametrize("format_name", SPLIT)
@pytest.mark.parametrize(("row", "p"), cases(tuple(r for r in FIXED if r.half_products), (2, 4)), ids=name)
def test_a_split_product_counts_as_one(row, p, format_name):
    result = matroots.inv_root_ex(spd(8, dtype=FP32), p, method=row.fixed(5), matmul_dtype=format_name)
    assert result.matmuls.item() == row.products(p, 5)


# ------------------------------------------------------------------------------------ plain half precision: never NaN


@st.composite
def semidefinite(draw: st.DrawFn) -> torch.Tensor:
    """Spectra of any shape: up to condition 1e12, clustered, or with exact zeros."""
    n = draw(st.integers(1, 24))
    exponents = draw(st.lists(st.floats(-12, 0), min_size=n, max_size=n))
    spectrum = 10.0 ** np.array(exponents)
    rank = draw(st.integers(1, n))
    if draw(st.booleans()):
        spectrum[rank:] = 0.0
    if draw(st.booleans()):
        spectrum[:rank] = spectrum[0]
    return with_spectrum(spectrum, draw(st.integers(0, 10**6)), FP32)


METHODS = [(row.method, p) for row in HALF_ROWS for p in (1, 2, 3, 4, 8, 1.5) if p in row.orders] + [
    (NewtonDB(steps=10), 2),
    (NewtonDB(steps=60), 4),
    (CoupledNewton(steps=10), 4),
    (CoupledNewton(steps=40), 1),
]


@seed(2)
@settings(max_examples=400, deadline=None)
@given(semidefinite(), st.sampled_from(METHODS), st.sampled_from(PLAIN))
def test_plain_half_precision_is_never_nan_and_never_of_the_wrong_sign(A, method, format_name):
    solver, p = method
    result = matroots.inv_root_ex(A, p, method=solver, matmul_dtype=format_name)
    assert result.status < Status.DIVERGED
    assert torch.linalg.eigvalsh(result.root.double()).min() > 0
    X = result.root.double()
    R = inverse_root(A, p, result.damping.item())
    if result.status == Status.CONVERGED:
        assert error(X, R) <= 0.3
    else:  # flagged; undershot at worst
        assert torch.linalg.matrix_norm(X, 2) <= 1.5 * torch.linalg.matrix_norm(R, 2)
    smallest = torch.linalg.eigvalsh(A.double())[0]
    needed = FORMATS[format_name].least_eigenvalue(float(p)) * result.bound
    assert result.damping + smallest >= 0.99 * needed
    assert result.damping <= needed * (1 + 1e-6) + 2.3 * A.shape[-1] * 2.0**-24 * result.bound


@pytest.mark.parametrize("format_name", PLAIN)
@pytest.mark.parametrize(
    "method", ["cn", "ndb", "minimax", NewtonDB(steps=10), CoupledNewton(steps=30)], ids=repr
)
def test_large_rank_deficient_matrices(method, format_name):
    """Half of the spectrum at 1, half at 0: the largest ||A||_F, hence rounding, beside the smallest eigenvalue."""
    spectrum = np.repeat([1.0, 0.0], 128)
    A = with_spectrum(spectrum, 3, FP32)
    structured = torch.stack([A, torch.full((256, 256), 0.7), torch.eye(256), 1e-20 * A, 1e20 * A])
    result = matroots.inv_root_ex(structured, 2, method=method, matmul_dtype=format_name)
    assert bool((result.status < Status.DIVERGED).all())
    assert bool((torch.linalg.eigvalsh(result.root.double())[:, 0] > 0).all())
    assert (result.damping > 0).tolist() == [True, True, False, True, True]


def test_damping_is_raised_only_where_it_is_needed_and_not_above():
    """2 u of the bound: where the spectrum lies above, or the damping does, nothing is added."""
    near, far = spd(8, 10.0, dtype=FP32), spd(8, 1e6, dtype=FP32)
    batch = torch.stack([near, far, far])
    for damping in (0.0, torch.tensor([0.0, 0.0, 0.5]), torch.tensor([0.0, 1e-5, 1e-5])):
        result = matroots.inv_root_ex(batch, 2, method="ndb", matmul_dtype=FP16, damping=damping)
        least = 2 * 2.0**-11 * result.bound
        given = torch.as_tensor(damping).expand(3).double()
        assert torch.allclose(result.damping[1:], torch.maximum(given, least)[1:], rtol=1e-12)
        assert result.damping[0] == 0
        for i in range(3):
            alone = matroots.inv_root_ex(batch[i], 2, method="ndb", matmul_dtype=FP16, damping=given[i])
            assert torch.equal(alone.damping, result.damping[i])
            assert error(result.root[i], inverse_root(batch[i], 2, result.damping[i].item())) <= 0.05


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("row", "p"), cases(HALF_ROWS, (1, 2, 4, 1.5)), ids=name)
def test_certificates_are_true(row, p, format_name):
    A = torch.stack([spd(12, c, dtype=FP32) for c in (5.0, 1e3, 1e5)])
    p = Fraction(p)
    result = matroots.inv_root_ex(A, p, method=row.method, matmul_dtype=format_name, certify=True)
    true = error(result.root, inverse_root(A, p, result.damping.numpy()))
    assert bool((result.certificate.relative_error >= true).all())


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("row", HALF_ROWS, ids=name)
def test_edges(row, format_name):
    """1 x 1, blocks of zeros, nothing at all, a matrix that is not positive."""

    def solve(A, **keywords):
        return matroots.inv_root_ex(A, 2, method=row.method, matmul_dtype=format_name, **keywords)

    u = FORMATS[format_name].unit_roundoff
    one = solve(torch.tensor([[[4.0]], [[1e-20]], [[1e20]], [[0.0]], [[-1.0]], [[math.nan]]]))
    assert one.status[3:].tolist() == [Status.SINGULAR, Status.INDEFINITE, Status.NONFINITE_INPUT]
    assert torch.allclose(one.root[:3, 0, 0], torch.tensor([0.5, 1e10, 1e-10]), rtol=40 * u + 1e-5)
    assert solve(torch.empty(0, 3, 3)).root.shape == (0, 3, 3)
    assert solve(torch.empty(2, 0, 0)).root.shape == (2, 0, 0)
    A = torch.zeros(5, 5)
    A[1:4, 1:4] = spd(3, 4.0, dtype=FP32)
    assert solve(A).status == Status.SINGULAR
    damped = solve(A, rel_damping=0.05)
    assert damped.status == Status.CONVERGED
    assert error(damped.root, inverse_root(A, 2, damped.damping.item())) <= 50 * u + 1e-5
    S = matroots.root(A, 2, method=row.method, matmul_dtype=format_name)
    assert bool((S[[0, 4]] == 0).all())
    assert error(S @ S, A.double()) <= 100 * u + 1e-5


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("row", HALF_ROWS, ids=name)
def test_powers_of_two_scale_the_root_exactly(row, format_name):
    A = spd(9, 1e3, dtype=FP32)
    base = matroots.inv_root_ex(A, 2, method=row.method, matmul_dtype=format_name)
    for k in (-66, 66):
        scaled = matroots.inv_root_ex(A * 2.0**k, 2, method=row.method, matmul_dtype=format_name)
        assert torch.equal(scaled.root, base.root * 2.0 ** (-k // 2))
        assert scaled.damping == base.damping * 2.0**k


@pytest.mark.parametrize("want", ["root", "root_pair"])
@pytest.mark.parametrize("format_name", PLAIN)
@pytest.mark.parametrize(("row", "p"), cases(HALF_ROWS, (2, 3, 4)), ids=name)
@pytest.mark.filterwarnings("ignore::matroots.RootWarning")
def test_roots_are_positive_too(row, p, format_name, want):
    A = torch.stack([spd(16, 1e8, dtype=FP32), with_spectrum([1.0] * 4 + [0.0] * 12, dtype=FP32)])
    roots = getattr(matroots, want)(A, p, method=row.method, matmul_dtype=format_name)
    for R in roots if want == "root_pair" else (roots,):
        assert torch.linalg.eigvalsh(R.double()).min() > 0


# ----------------------------------------------------------------------------------------------------------- keywords


def test_names_and_dtypes_mean_the_same():
    A = spd(6, dtype=FP32)
    for dtype, known in ((FP16, "fp16"), (BF16, "bf16")):
        by_name = matroots.inv_root(A, 2, method="cn", matmul_dtype=known)
        assert torch.equal(by_name, matroots.inv_root(A, 2, method="cn", matmul_dtype=dtype))


def test_float64_input_is_computed_in_float32():
    A = spd(8, 100.0)
    result = matroots.inv_root_ex(A, 2, method="ndb", matmul_dtype="fp16x2")
    assert result.root.dtype == FP64
    assert 1e-9 < error(result.root, inverse_root(A, 2)) < 1e-4


@pytest.mark.parametrize("value", ["fp8", "FP16", "float16", FP32, FP64, torch.int8, 16, ("fp16",)])
def test_an_unknown_format_is_refused(value):
    with pytest.raises(ValueError, match=r"^matmul_dtype: expected torch.float16, .*'bf16x2'.*, got "):
        matroots.inv_root(torch.eye(2), 2, method="cn", matmul_dtype=value)


@pytest.mark.parametrize("value", [BF16, *FORMATS])
@pytest.mark.parametrize("method", ["evd", "auto"])
def test_an_eigendecomposition_has_no_products_to_round(method, value):
    with pytest.raises(ValueError, match=r'^matmul_dtype: method "evd" has no products'):
        matroots.inv_root(torch.eye(2), 2, method=method, matmul_dtype=value)


# ------------------------------------------------------------------------------------------------- TF32 flag of CUDA


def test_the_tf32_flag_is_set_only_while_no_other_solve_runs_and_restored_on_any_exit():
    """The flag can be looked at without a GPU; what CUDA does with it cannot."""
    flags = torch.backends.cuda.matmul
    before = flags.fp32_precision
    with full_precision(torch.device("cpu")):
        inside = flags.fp32_precision
        assert inside != "tf32"
        seen = []
        with contextlib.suppress(KeyError), _float32_as_written.tf32():
            seen.append(flags.fp32_precision)
            raise KeyError
        assert seen == ["tf32"]
        assert flags.fp32_precision == inside
        with full_precision(torch.device("cpu")), _float32_as_written.tf32():
            assert flags.fp32_precision == inside
    with _float32_as_written.tf32():
        assert flags.fp32_precision == before
    assert flags.fp32_precision == before
