# SPDX-License-Identifier: Apache-2.0
"""The command line of roots: ``python -m matroots inv-root``."""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from matroots._arguments import REAL_DTYPES, check_matrices
from matroots._arrays import COMPLEX, REAL, Array, as_tensor, read_arrays, write_arrays
from matroots._call import inv_root_ex
from matroots._certificate import certify
from matroots._command import InputError, Parser, exponent, guarded, nonnegative, positive, whole
from matroots._files import replacement, sweep
from matroots._formats import FORMATS
from matroots._hermitian import COMPLEX_DTYPES
from matroots._result import InvRoot, Status, failure, members_named
from matroots.scaling import SCALINGS
from matroots.solvers import SOLVERS

SUFFIXES = (".npy", ".npz")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name; return its exit code, see :func:`guarded`."""
    return guarded(lambda: _main(argv), "nothing was written")


def _main(argv: Sequence[str]) -> None:
    options = _parser().parse_args(argv)
    path, out = options.input, _checked_output(options.input, options.output)
    arrays = read_arrays(path, "IN")
    if not arrays:
        raise InputError(f"IN: expected at least one array, got none in {str(path)!r}")
    labels = {key: path.name if path.suffix == ".npy" else f"{path.name}[{key}]" for key in arrays}
    inputs = {key: _matrices(array, f"IN: {labels[key]}") for key, array in arrays.items()}
    roots, refused = {}, []
    for key, A in inputs.items():
        result = _solved(A, labels[key], options)
        sys.stdout.write(f"{labels[key]}\n{result}\n")
        refused += [f"{labels[key]}: {reason}" for reason in _refusals(result, options.certify_tol)]
        roots[key] = result.root.numpy().astype(arrays[key].dtype, copy=False)
    if refused and not options.force:
        raise InputError(f"nothing was written: {'; '.join(refused)}; --force writes all the same")
    try:
        sweep(out.parent, glob.escape(out.name))
        with replacement(out) as stream:
            write_arrays(stream, out.suffix, roots)
    except OSError as error:
        raise InputError(f"OUT: cannot write {str(options.output)!r}: {error.strerror}") from error
    if refused:
        sys.stderr.write(f"matroots: warning: written all the same: {'; '.join(refused)}\n")
    sys.stdout.write(f"Wrote {options.output}\n")


def _checked_output(path: Path, out: Path) -> Path:
    """Return the file to write, the target of ``out`` where that is a link; raise :class:`InputError` if it cannot be."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"IN: expected a .npy or .npz file, got {str(path)!r}")
    if out.suffix != path.suffix:
        raise InputError(f"OUT: expected a {path.suffix} file, as IN is, got {str(out)!r}")
    target = Path(os.path.realpath(out))
    if target == Path(os.path.realpath(path)):
        raise InputError("OUT: expected another file than IN, whose matrices would be lost")
    if not target.parent.is_dir():
        raise InputError(f"OUT: no such folder: {str(target.parent)!r}")
    if target.is_dir():
        raise InputError(f"OUT: expected a file, got {str(out)!r}, a folder")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InputError(f"OUT: cannot write to folder {str(target.parent)!r}")
    return target


def _matrices(array: Array, label: str) -> Tensor:
    A = as_tensor(array, label, (*REAL, *COMPLEX))
    try:
        check_matrices(A, label, (*REAL_DTYPES, *COMPLEX_DTYPES))
    except ValueError as error:
        raise InputError(str(error)) from error
    return A


def _solved(A: Tensor, label: str, options: argparse.Namespace) -> InvRoot:
    """Return the roots in the dtype of A, certified as they are written and against A as it was read."""
    dtype = DTYPES.get(options.dtype, A.dtype)
    dtype = dtype.to_complex() if A.is_complex() else dtype
    certified = options.certify or options.certify_tol is not None
    try:
        result = inv_root_ex(
            _converted(A, dtype, label),
            options.p,
            method=options.method,
            scaling=options.scaling,
            damping=options.damping,
            rel_damping=options.rel_damping,
            tol=options.tol,
            max_steps=options.max_steps,
            matmul_dtype=options.matmul_dtype,
            max_batch=options.max_batch,
            assume_positive=options.assume_positive,
            certify=certified,
        )
    except ValueError as error:  # keywords that do not go together
        raise InputError(str(error)) from error
    return result if dtype == A.dtype else _rounded(result, A, options)


def _converted(A: Tensor, dtype: torch.dtype, label: str) -> Tensor:
    """Return A in the dtype to compute in; raise :class:`InputError` where a finite member would become infinite or zero."""
    converted = A.to(dtype)
    lost = _lost(A, converted)
    if lost.any():
        raise InputError(
            f"--dtype: {str(dtype).removeprefix('torch.')} cannot hold {label}, where the largest entry of a matrix is"
            f" {float(A[lost][0].abs().max()):.1e}; expected a dtype that can"
        )
    return converted


def _rounded(result: InvRoot, A: Tensor, options: argparse.Namespace) -> InvRoot:
    """Return the result with its roots in the dtype of A, and with a certificate, if it has one, of these."""
    root = result.root.to(A.dtype)
    lost = _lost(result.root, root)
    root = root.masked_fill(lost[..., None, None], torch.nan)
    certificate = result.certificate
    if certificate is not None:
        certificate = certify(A, root, options.p, damping=result.damping, max_batch=options.max_batch)
    status = result.status.masked_fill(lost, int(Status.SINGULAR))
    return result._replace(root=root, status=status, certificate=certificate)


def _lost(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return which members were finite and not zero and no longer are, bool of the batch shape."""
    if not exact.numel():
        return torch.zeros(exact.shape[:-2], dtype=torch.bool)
    before, after = (M.abs().flatten(-2).amax(-1) for M in (exact, rounded))
    return torch.isfinite(before) & (before > 0) & ~(torch.isfinite(after) & (after > 0))


def _refusals(result: InvRoot, tol: float | None) -> Iterator[str]:
    """Yield why this result should not be written: members without a usable root, without a certificate, or above the tolerance."""
    failed = failure(result)
    if failed:
        yield failed
    if result.certificate is None:
        return
    batch, error = tuple(result.status.shape), result.certificate.relative_error.flatten()
    valid = result.certificate.valid.flatten()
    void = (~valid & (result.status.flatten() < int(Status.DIVERGED))).nonzero().flatten().tolist()
    if void:
        yield (
            f"no bound on the error of {members_named(void, batch)} could be proven: use more damping, a wider --dtype or"
            " another --method"
        )
    loose = [] if tol is None else (valid & (error > tol)).nonzero().flatten().tolist()
    if loose:
        yield (
            f"relative error certified to be at most {float(error[loose].max()):.1e}, not --certify-tol {tol:g}, for"
            f" {members_named(loose, batch)}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="matroots inv-root",
        description="Read symmetric positive definite matrices (*, n, n), write (A + eps I)^(-1/p) of each in the same shape and"
        " dtype, and print what happened to each. Nothing is written, and the exit code is 2, if one of them has no usable root or,"
        " with --certify, no proven bound on its error.",
    )
    parser.add_argument("input", type=Path, metavar="IN", help=".npy file, or .npz file of several arrays")
    parser.add_argument(
        "output", type=Path, metavar="OUT", help="file of the same kind; an existing one is replaced"
    )
    parser.add_argument("--p", type=exponent, required=True, help="order of the root, such as 4, 2.5 or 8/3")
    _add_solve(parser)
    _add_conduct(parser)
    return parser


def _add_solve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method",
        choices=["auto", *SOLVERS],
        default="auto",
        metavar="METHOD",
        help=f"auto (default), {', '.join(SOLVERS)}",
    )
    parser.add_argument(
        "--scaling",
        choices=list(SCALINGS),
        metavar="SCALING",
        help=f"{', '.join(SCALINGS)} (default: the method's)",
    )
    parser.add_argument(
        "--damping", type=nonnegative, default=0.0, metavar="EPS", help="absolute (default: 0)"
    )
    parser.add_argument(
        "--rel-damping",
        type=nonnegative,
        default=0.0,
        metavar="EPS",
        help="relative to the bound on the largest eigenvalue (default: 0)",
    )
    parser.add_argument(
        "--tol",
        type=positive,
        help="relative error for auto, residual for the other methods (default: as far as the precision goes)",
    )
    parser.add_argument(
        "--max-steps", type=whole, metavar="N", help="of a method that iterates (default: the method's)"
    )
    parser.add_argument(
        "--matmul-dtype",
        choices=list(FORMATS),
        metavar="DTYPE",
        help=f"round operands of products to {', '.join(FORMATS)} (default: do not)",
    )


def _add_conduct(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        metavar="DTYPE",
        help=f"to compute in, {' or '.join(DTYPES)} (default: that of the input, for float16 float32)",
    )
    parser.add_argument(
        "--max-batch", type=whole, metavar="N", help="matrices solved at once, to save memory"
    )
    parser.add_argument(
        "--assume-positive", action="store_true", help="leave out the proof that the matrices are positive"
    )
    parser.add_argument(
        "--certify", action="store_true", help="prove a bound on the error of each root that is written"
    )
    parser.add_argument(
        "--certify-tol",
        type=positive,
        metavar="X",
        help="certify, and accept relative errors up to this (default: any that could be proven)",
    )
    parser.add_argument("--force", action="store_true", help="write whatever came out, NaN where no root did")
