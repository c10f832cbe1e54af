# SPDX-License-Identifier: Apache-2.0
"""The command inv-root: what it writes against numpy, what it refuses to write, and files that are there whole or not at all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrices import spd

from matroots import RootError, Status, _inv_root_cli, inv_root
from matroots.__main__ import main
from matroots._arrays import write_arrays

N = 6


def stack(condition: float = 1e3) -> np.ndarray:
    return torch.stack([spd(N, condition, seed) for seed in range(3)]).numpy()


def inverse_root(A: np.ndarray, p: float) -> np.ndarray:
    """Return the root by numpy's float64 eigendecomposition."""
    values, Q = np.linalg.eigh(np.asarray(A, dtype=float))
    return (Q * values[..., None, :] ** (-1 / p)) @ Q.swapaxes(-1, -2)


def error(X: np.ndarray, truth: np.ndarray) -> float:
    gap = np.linalg.norm(X.astype(float) - truth, 2, axis=(-2, -1))
    return float((gap / np.linalg.norm(truth, 2, axis=(-2, -1))).max())


def certified(table: str) -> list[str]:
    """Return the certified errors in the table that was printed."""
    return [line.split()[-1] for line in table.splitlines() if re.match(r"\s+\[\d*\]", line)]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Write an array, run the command on it; return its exit code, what it wrote (None if nothing), stdout and stderr."""

    def runs(array: np.ndarray, *options: object) -> tuple[int, np.ndarray | None, str, str]:
        source, out = tmp_path / "in.npy", tmp_path / "out.npy"
        np.save(source, array)
        code = main(["inv-root", str(source), str(out), *map(str, options)])
        captured = capsys.readouterr()
        return code, np.load(out) if out.exists() else None, captured.out, captured.err

    return runs


# --- roots ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "p"), [("4", 4), ("2.5", 2.5), ("8/3", 8 / 3)])
def test_the_file_holds_the_roots_and_the_table_bounds_their_errors(run: Any, text: str, p: float) -> None:
    A = stack().reshape(1, 3, N, N)
    code, X, out, err = run(A, "--p", text, "--certify")
    assert (code, err) == (0, "")
    assert X.shape == A.shape
    assert X.dtype == A.dtype
    wrong = error(X, inverse_root(A, p))
    assert wrong < 1e-12
    bounds = re.findall(r"\[0, \d\] +CONVERGED.* (\S+)$", out, re.M)
    assert len(bounds) == 3
    assert wrong <= max(map(float, bounds)) < 1e-8  # p = 8/3 is certified through A^3, at 1e9 u


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f2", ">f4", ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_dtype_of_the_input_comes_back_to_the_byte_order(run: Any, dtype: str, order: Any) -> None:
    A = np.asarray(stack(10.0), dtype=dtype, order=order)
    code, X, _, _ = run(A, "--p", 2)
    assert code == 0
    assert X.dtype == A.dtype
    # at condition 10, ten times the rounding of the input in its smallest eigenvalue, and that of the result
    assert error(X, inverse_root(A, 2)) < 100 * np.finfo(A.dtype).eps


@pytest.mark.parametrize(("dtype", "options"), [("c8", []), ("c16", []), (">c16", []), ("c8", ["--dtype", "float64"]), ("c16", ["--dtype", "float32"])])  # fmt: skip
def test_hermitian_matrices(run: Any, dtype: str, options: list[str]) -> None:
    G = np.random.default_rng(0).standard_normal((2, 3, N, 40)) * 0.2
    H = (G[0] + 1j * G[1]) @ (G[0] - 1j * G[1]).swapaxes(-1, -2)
    code, X, out, _ = run(H.astype(dtype), "--p", 4, "--certify", *options)
    assert code == 0
    assert X.dtype == np.dtype(dtype)
    values, Q = np.linalg.eigh(H)
    truth = (Q * values[..., None, :] ** -0.25) @ Q.conj().swapaxes(-1, -2)
    gap = np.linalg.norm(X - truth, 2, axis=(-2, -1)) / np.linalg.norm(truth, 2, axis=(-2, -1))
    assert gap.max() < (1e-12 if options == [] and dtype != "c8" else 1e-6)
    assert dtype == "c8" or gap.max() <= max(map(float, certified(out)))  # of c8, A is what was rounded


def test_an_archive_keeps_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in.npz", tmp_path / "out.npz"
    arrays = {"b/left": stack()[0].astype("f4"), "a": stack(), "allow_pickle": np.eye(2), "empty": np.empty((0, 2, 2))}  # fmt: skip
    with source.open("wb") as stream:
        write_arrays(stream, ".npz", arrays)  # numpy.savez would take one of the keys for an option
    assert main(["inv-root", str(source), str(out), "--p", "2", "--certify"]) == 0
    with np.load(out) as archive:
        assert archive.files == list(arrays)
        for key, A in arrays.items():
            assert archive[key].shape == A.shape
            assert archive[key].dtype == A.dtype
            assert A.size == 0 or error(archive[key], inverse_root(A, 2)) < 1e4 * np.finfo(A.dtype).eps
    table = capsys.readouterr().out
    assert re.findall(r"^in\.npz\[(.*)\]$", table, re.M) == list(arrays)
    assert len(certified(table)) == 1 + 3 + 1


def test_one_bad_array_of_an_archive_keeps_all_of_it_from_being_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, good=np.eye(2), bad=-np.eye(2))
    assert main(["inv-root", str(source), str(out), "--p", "2"]) == 2
    assert "in.npz[bad]: no usable root for the matrix (INDEFINITE" in capsys.readouterr().err
    assert not out.exists()


def test_damping_is_absolute_and_relative(run: Any) -> None:
    A = np.diag([0.0, 1.0, 2.0])
    _, X, _, _ = run(A, "--p", 2, "--damping", 1, "--rel-damping", 0.5)
    # the bound is min(||A||_F, ||A||_inf) = 2: eps = 1 + 0.5 * 2
    assert np.allclose(X, np.diag([2.0**-0.5, 3.0**-0.5, 4.0**-0.5]), rtol=1e-12)


def test_options_reach_the_solve(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def recorded(A: torch.Tensor, p: float, **keywords: Any) -> Any:
        seen.update(keywords, p=p, dtype=A.dtype)
        return real(A, p, **keywords)

    real = _inv_root_cli.inv_root_ex
    monkeypatch.setattr(_inv_root_cli, "inv_root_ex", recorded)
    options = (
        "--p 4 --method cn --scaling power --tol 1e-3 --max-steps 50 --matmul-dtype bf16x2 --max-batch 2"
    )
    code, _, _, _ = run(stack(10.0), *options.split(), "--assume-positive", "--dtype", "float32")
    assert code == 0
    assert seen == {
        "p": 4, "method": "cn", "scaling": "power", "damping": 0.0, "rel_damping": 0.0, "tol": 1e-3, "max_steps": 50,
        "matmul_dtype": "bf16x2", "max_batch": 2, "assume_positive": True, "certify": False, "dtype": torch.float32,
    }  # fmt: skip


def test_computing_in_a_wider_dtype_certifies_what_is_written(run: Any) -> None:
    A = stack(1e6).astype("f4")
    truth = inverse_root(A, 2)
    _, narrow, _, _ = run(A, "--p", 2, "--method", "evd")
    code, X, out, _ = run(A, "--p", 2, "--method", "evd", "--dtype", "float64", "--certify")
    assert code == 0
    assert X.dtype == A.dtype
    wrong = error(X, truth)
    # entries rounded to float32, against an eigendecomposition in float32, whose error is u times the condition number
    assert wrong < 2.0**-24 < error(narrow, truth) / 100
    assert "float32" in out
    assert wrong <= max(map(float, certified(out)))


def test_computing_in_a_narrower_dtype_is_certified_against_the_file(run: Any) -> None:
    A = stack(1e2)
    code, X, out, _ = run(A, "--p", 4, "--dtype", "float32", "--certify")
    wrong = error(X, inverse_root(A, 4))
    assert code == 0
    assert X.dtype == np.float64
    assert 1e-9 < wrong <= max(map(float, certified(out))) < 1e-4


# --- what is not written ---------------------------------------------------------------------------------------------------


def refused(run: Any, tmp_path: Path, array: np.ndarray, *options: object) -> str:
    """Return the one line that a refusal is said in; the file that was there is what it was."""
    old = np.arange(3.0)
    np.save(tmp_path / "out.npy", old)
    code, X, _, err = run(array, *options)
    assert code == 2
    assert np.array_equal(X, old)
    assert err.startswith("matroots: error: ")
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npy", "out.npy"]
    return str(err)


def bad_members() -> np.ndarray:
    A = stack()
    A[0] = -A[0]
    A[2, 1, 1] = np.nan
    return A


def test_members_without_a_root_are_named_as_the_library_names_them(run: Any, tmp_path: Path) -> None:
    A = bad_members()
    message = refused(run, tmp_path, A, "--p", 4)
    with pytest.raises(RootError) as raised:
        inv_root(torch.from_numpy(A), 4)
    assert f"in.npy: {raised.value}" in message
    assert "[0]" in message
    assert "[2]" in message
    assert Status.INDEFINITE.advice in message
    assert Status.NONFINITE_INPUT.advice in message


def test_force_writes_them_as_nan_and_warns(run: Any) -> None:
    A = bad_members()
    code, X, _, err = run(A, "--p", 4, "--certify", "--force")
    assert code == 0
    assert np.isnan(X[[0, 2]]).all()
    assert error(X[1], inverse_root(A[1], 4)) < 1e-12
    assert err.startswith("matroots: warning: written all the same: in.npy: no usable root for ")
    assert err.count("\n") == 1


def test_a_root_without_a_certificate_is_not_written_if_one_is_asked_for(run: Any, tmp_path: Path) -> None:
    A = stack(10.0)
    A[1] = spd(N, 1e6).numpy()  # p = 7/5 is certified through A^5, whose condition number is 1e30
    message = refused(run, tmp_path, A, "--p", "7/5", "--certify")
    assert "no bound on the error of members [1] of batch (3,) could be proven" in message
    code, X, _, _ = run(A, "--p", "7/5")
    assert code == 0
    assert error(X, inverse_root(A, 7 / 5)) < 1e-8
    assert run(A, "--p", "7/5", "--rel-damping", 1e-3, "--certify")[0] == 0


def test_the_tolerance_is_on_the_certified_error(run: Any, tmp_path: Path) -> None:
    A = stack(1e4).astype("f4")
    A[2] = np.eye(N)
    _, _, out, _ = run(A, "--p", 2, "--method", "cn", "--certify-tol", 1)
    bounds = [float(bound) for bound in certified(out)]
    between = (bounds[0] * bounds[2]) ** 0.5
    assert bounds[2] < between < min(bounds[:2])
    message = refused(run, tmp_path, A, "--p", 2, "--method", "cn", "--certify-tol", between)
    assert (
        f"at most {max(bounds):.1e}, not --certify-tol {between:g}, for members [0], [1] of batch (3,)"
        in message
    )


def test_less_accurate_than_asked_for_is_written_with_advice(run: Any) -> None:
    code, X, out, err = run(stack(), "--p", 2, "--method", "ndb", "--max-steps", 2)
    assert (code, err) == (0, "")
    assert X is not None
    assert f"MAX_STEPS: {Status.MAX_STEPS.advice}" in out


def test_an_overflow_of_the_output_is_no_root(run: Any, tmp_path: Path) -> None:
    A = np.full((2, 1, 1), 1.0, dtype=np.float16)
    A[1] = 2.0**-20  # its inverse, 2^20, is beyond float16
    message = refused(run, tmp_path, A, "--p", 1, "--dtype", "float64")
    assert "members [1] of batch (2,) (SINGULAR" in message
    _, X, _, _ = run(A, "--p", 1, "--dtype", "float64", "--force")
    assert X[0] == 1.0
    assert np.isnan(X[1])


# --- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.eye(3, dtype=np.int64), "in.npy: expected float16, float32, float64, complex64 or complex128, got int64"),
        (np.eye(3, dtype=bool), "got bool"),
        (1j * np.eye(3), Status.INDEFINITE.advice),
        (np.zeros((2, 2), dtype=[("x", "f8")]), "got [('x', '<f8')]"),
        (np.array([{}, None], dtype=object), "cannot read "),
        (np.array([["1"]]), "got <U1"),
        (np.ones((3, 4)), "expected (*, n, n), got (3, 4)"),
        (np.ones(3), "expected (*, n, n), got (3,)"),
        (np.float64(2.0), "expected (*, n, n), got ()"),
        (np.full((2, 2), np.nan), Status.NONFINITE_INPUT.advice),
        (np.array([[1.0, 0.5], [0.0, 1.0]]), Status.INDEFINITE.advice),
        (np.zeros((2, 2)), Status.SINGULAR.advice),
    ],
    ids=str,
)  # fmt: skip
def test_arrays_that_hold_no_spd_matrices(run: Any, tmp_path: Path, array: np.ndarray, message: str) -> None:
    assert message in refused(run, tmp_path, array, "--p", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: --p"),
        (["--p", "0.5"], "argument --p: expected a number >= 1"),
        (["--p", "3", "--method", "ndb"], 'p: method "ndb" takes 2, 4, 8'),
        (["--p", "2", "--method", "qr"], "argument --method: invalid choice"),
        (["--p", "2", "--dtype", "float16"], "argument --dtype: invalid choice"),
        (["--p", "2", "--max-steps", "9"], "max_steps"),
        (["--p", "2", "--max-steps", "0"], "argument --max-steps: expected an integer >= 1"),
        (["--p", "2", "--max-batch", "x"], "argument --max-batch: expected an integer >= 1"),
        (["--p", "2", "--damping", "-1"], "argument --damping: expected a finite number >= 0"),
        (["--p", "2", "--tol", "0"], "argument --tol: expected a finite number > 0"),
        (["--p", "2", "--certify-tol", "nan"], "argument --certify-tol: expected a finite number > 0"),
        (["--p", "2", "--method", "evd", "--matmul-dtype", "fp16"], 'method "evd" has no products to round'),
    ],
)
def test_bad_options(run: Any, tmp_path: Path, options: list[str], message: str) -> None:
    assert message in refused(run, tmp_path, stack(), *options)


@pytest.mark.parametrize("factor", [1e60, 1e-60])
def test_a_dtype_that_cannot_hold_the_input(run: Any, tmp_path: Path, factor: float) -> None:
    A = stack()
    A[1] *= factor
    message = refused(run, tmp_path, A, "--p", 2, "--dtype", "float32")
    assert "--dtype: float32 cannot hold in.npy" in message
    assert run(A, "--p", 2)[0] == 0


def damaged(path: Path, kind: str) -> None:
    with path.open("wb") as stream:
        np.save(stream, stack())
        if kind == "truncated":
            stream.truncate(200)
        elif kind == "a header of too much":
            stream.seek(0)
            np.lib.format.write_array_header_1_0(
                stream, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6, 10**6)}
            )
        elif kind == "garbage":
            stream.seek(0)
            stream.write(b"\x00not an array")
        elif kind == "empty":
            stream.truncate(0)


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        ("absent.npy", "out.npy", "IN: no such file"),
        ("folder.npy", "out.npy", "IN: no such file"),
        ("in.csv", "out.csv", "IN: expected a .npy or .npz file"),
        ("truncated", "out.npy", "IN: cannot read"),
        ("a header of too much", "out.npy", "IN: cannot read"),
        ("garbage", "out.npy", "IN: cannot read"),
        ("empty", "out.npy", "IN: cannot read"),
        ("in.npy", "out", "OUT: expected a .npy file, as IN is, got"),
        ("in.npy", "out.npz", "OUT: expected a .npy file, as IN is, got"),
        ("none.npz", "out.npz", "IN: expected at least one array"),
        ("notes.npz", "out.npz", "IN: notes.npz[readme.txt]: expected float16"),
        ("in.npy", "nowhere/out.npy", "OUT: no such folder"),
        ("in.npy", "in.npy/out.npy", "OUT: no such folder"),
        ("in.npy", "folder.npy", "OUT: expected a file, got"),
        ("in.npy", "in.npy", "OUT: expected another file than IN"),
        ("in.npy", "link.npy", "OUT: expected another file than IN"),
    ],
)
def test_bad_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, out: str, message: str
) -> None:
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "in.csv").write_text("1,0\n0,1\n")
    np.save(tmp_path / "in.npy", stack())
    (tmp_path / "link.npy").symlink_to("in.npy")
    np.savez(tmp_path / "none.npz")
    np.savez(tmp_path / "notes.npz", a=np.eye(2))
    with zipfile.ZipFile(tmp_path / "notes.npz", "a") as archive:
        archive.writestr("readme.txt", "not an array")
    if "." not in source:
        damaged(tmp_path / "damaged.npy", source)
        source = "damaged.npy"
    before = {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")}
    assert main(["inv-root", str(tmp_path / source), str(tmp_path / out), "--p", "2"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"matroots: error: {message}")
    assert captured.err.count("\n") == 1
    assert {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_a_folder_that_cannot_be_written_to(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # to the superuser every folder is open
    assert "OUT: cannot write to folder" in refused(run, tmp_path, stack(), "--p", 2)


# --- whole or not at all -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    message = refused(run, tmp_path, stack(), "--p", 2)
    assert "OUT: cannot write" in message
    assert "No space left on device" in message


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.eye(2))
    np.save(tmp_path / "target.npy", np.zeros(3))
    (tmp_path / "out.npy").symlink_to("target.npy")
    assert main(["inv-root", str(tmp_path / "in.npy"), str(tmp_path / "out.npy"), "--p", "2"]) == 0
    assert (tmp_path / "out.npy").is_symlink()
    assert np.array_equal(np.load(tmp_path / "target.npy"), np.eye(2))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_kill_in_the_middle_leaves_the_old_file_and_the_next_run_cleans_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "in.npy", stack())
    np.save(tmp_path / "out.npy", np.arange(3.0))
    arguments = ["inv-root", str(tmp_path / "in.npy"), str(tmp_path / "out.npy"), "--p", "2"]
    script = (
        "import os, signal, sys; from matroots.__main__ import main\n"
        "os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main(sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], check=False)
    assert done.returncode == -signal.SIGKILL
    assert np.array_equal(np.load(tmp_path / "out.npy"), np.arange(3.0))
    assert len(list(tmp_path.glob(".out.npy.*.partial"))) == 1
    assert main(arguments) == 0
    assert error(np.load(tmp_path / "out.npy"), inverse_root(stack(), 2)) < 1e-11
    assert not list(tmp_path.glob(".*"))


def test_from_a_shell(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", stack())
    command = [sys.executable, "-m", "matroots", "inv-root", "in.npy", "out.npy", "--p", "4", "--certify-tol"]
    done = subprocess.run([*command, "1e-30"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(certified(done.stdout)) == 3
    assert done.stderr.startswith("matroots: error: nothing was written: in.npy: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.npy").exists()


def test_the_commands_in_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[1] / "docs" / "guide.md").read_text()
    commands = re.findall(r"^python -m matroots (inv-root .*)$", guide, re.M)
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    np.save("factors.npy", stack())
    np.savez("factors.npz", a=stack())
    for command in commands:
        assert main(command.split()) == 0
    with np.load("roots.npz") as archive:
        assert (
            error(archive["a"], inverse_root(stack(), 8 / 3)) < 1e-2
        )  # relative damping 1e-6 at condition 1e3
    assert error(np.load("roots.npy"), inverse_root(stack(), 4)) < 1e-12
