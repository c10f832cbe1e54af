# SPDX-License-Identifier: Apache-2.0
"""The studies, run in-process: what their files say, and what they say about files they cannot use."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

from matroots.__main__ import main
from matroots.studies import _cli
from matroots.studies._inputs import InputError, default_matrices, load_matrices
from matroots.studies._reference import reference
from matroots.studies.convergence import newton_steps, predicted_steps

PNG = b"\x89PNG\r\n\x1a\n"


def records(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def assert_complete(folder: Path, study: str, plots: list[str]) -> None:
    text = (folder / f"{study}.md").read_text()
    for plot in plots:
        assert (folder / f"{plot}.png").read_bytes()[:8] == PNG
        assert f"({plot}.png)" in text
    assert all(word in text for word in ("command", "seed", torch.__version__, np.__version__))
    assert not list(folder.glob(".*")), "no partial files"


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four SPD matrices of size 24 with condition number 1e4, one with a flat spectrum, and one of size 16."""
    generator = torch.Generator().manual_seed(3)

    def spd(eigenvalues: torch.Tensor) -> np.ndarray:
        n = len(eigenvalues)
        Q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
        A = (Q * eigenvalues) @ Q.T
        return ((A + A.T) / 2).numpy()

    path = tmp_path_factory.mktemp("input") / "matrices.npz"
    spread = [spd(torch.logspace(-4, 0, 24, dtype=torch.float64)) for _ in range(4)]
    flat = spd(torch.cat([torch.tensor([1e-4]).double(), torch.ones(23).double()]))
    np.savez(path, spread=np.stack(spread), flat=flat, small=spd(torch.linspace(1, 2, 16).double()))
    return path


def study(name: str, out: Path, *options: object) -> None:
    assert main(["study", name, "--out", str(out), *map(str, options)]) == 0


def test_accuracy_certificates_hold_on_recorded_factors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study("accuracy", tmp_path, "--quick", "--scalings", "multi_power", "frobenius")
    rows = records(tmp_path, "accuracy")
    assert {row["method"] for row in rows} == {"evd", "cn", "ndb", "chebyshev", "minimax", "rational"}
    valid = [row for row in rows if row["valid"] == "True"]
    assert len(valid) == len(rows)
    assert all(float(row["certificate"]) >= float(row["true_error"]) for row in valid)
    iterated = [row for row in rows if row["method"] in ("cn", "ndb")]
    assert all(row["status"] == "CONVERGED" for row in iterated)
    # forward error of a converged iteration: a modest multiple of u times the condition number
    for row in iterated:
        u = torch.finfo(getattr(torch, row["dtype"])).eps / 2
        assert 0 < float(row["true_error"]) < 20 * u * float(row["condition"])
    assert_complete(tmp_path, "accuracy", [f"accuracy-{x}" for x in ("condition", "certificate", "time")])
    out = capsys.readouterr()
    assert "0 of them below" in out.out
    assert max(map(len, out.out.splitlines())) <= 120
    assert out.err == ""


def test_convergence_scalar_map_and_scalings(tmp_path: Path, matrices: Path) -> None:
    study("convergence", tmp_path, "--input", matrices, "--p", 2, 3, 4, "--seed", 5)
    mapped = records(tmp_path, "convergence-map")
    assert {(row["p"], row["method"]) for row in mapped} == {
        ("2", "cn"),
        ("3", "cn"),
        ("4", "cn"),
        ("2", "ndb"),
        ("4", "ndb"),
    }
    assert all(abs(int(row["predicted"]) - int(row["taken"])) <= 1 for row in mapped)
    blocks = records(tmp_path, "convergence-blocks")
    steps = {
        (row["scaling"], row["p"], row["method"], row["matrix"]): int(row["steps"])
        for row in blocks
        if row["status"] == "CONVERGED"
    }
    assert len(steps) == len(blocks)
    pairs = [
        (count, steps[("frobenius", *key[1:])]) for key, count in steps.items() if key[0] == "multi_power"
    ]
    assert sum(slow for _, slow in pairs) >= sum(fast for fast, _ in pairs)
    flat = [(steps["multi_power", p, "cn", "flat"], steps["frobenius", p, "cn", "flat"]) for p in ("2", "4")]
    # the Frobenius norm is sqrt(23) too large here: one or two steps at a gain of 9/4 to e per step
    assert all(1 <= slow - fast <= 2 for fast, slow in flat)
    history = records(tmp_path, "convergence-history")
    last = {(row["p"], row["method"], row["matrix"]): float(row["residual"]) for row in history}
    assert all(residual < 1e-4 for residual in last.values())
    assert_complete(tmp_path, "convergence", [f"convergence-{x}" for x in ("map", "scalings", "history")])


def test_newton_steps_against_closed_forms() -> None:
    # far below 1 each step gains (1 + 1/p)^p
    for p in (1, 2, 3, 4, 8):
        more = newton_steps(1e-60, p, 1e-3) - newton_steps(1e-30, p, 1e-3)
        assert more == pytest.approx(30 * math.log(10) / (p * math.log1p(1 / p)), abs=1)
    assert predicted_steps("ndb", 1e-8, 4, 1e-4) == newton_steps(1e-8, 2, 2.5e-5) + newton_steps(
        1e-4, 2, 2.5e-5
    )


def test_transfer_peaks_are_those_of_the_scalar_iteration(tmp_path: Path) -> None:
    study("transfer", tmp_path, "--dtypes", "float64")
    rows = records(tmp_path, "transfer")

    def curve(p: str, label: str) -> list[dict[str, str]]:
        return [row for row in rows if row["p"] == p and row["filter"] == label]

    def square_root(x: float) -> tuple[float, float]:
        y, z = x, 1.0
        for _ in range(10):
            e = (3 - z * y) / 2
            y, z = y * e, e * z
        return y, z

    for row in curve("4", "ndb, 10 steps a root"):
        scaled = float(row["eigenvalue"]) / float(row["scale"])
        expected = square_root(square_root(scaled)[0])[1] * scaled**0.25
        assert float(row["transfer"]) == pytest.approx(expected, rel=1e-5)
    peak = max(float(row["transfer"]) for row in curve("4", "ndb, 10 steps a root"))
    assert peak == pytest.approx(2.18, abs=0.02)
    for p in ("2", "4"):
        assert all(float(row["transfer"]) <= 1 + 1e-6 for row in curve(p, "cn, 10 steps"))
        assert all(float(row["transfer"]) == pytest.approx(1, abs=1e-5) for row in curve(p, "ndb, converged"))
    assert_complete(tmp_path, "transfer", ["transfer"])


def test_scaling_ratios(tmp_path: Path, matrices: Path) -> None:
    study("scaling", tmp_path, "--input", matrices, "--dtypes", "float64", "--rel-damping", 0)
    rows = records(tmp_path, "scaling")
    norms = {row["variant"]: float(row["estimate_ratio"]) for row in rows if row["matrix"] == "flat"}
    assert norms["frobenius"] == pytest.approx(23**0.5, rel=1e-6)
    assert norms["frobenius order=2"] == pytest.approx(23**0.25, rel=1e-6)
    for row in rows:
        if row["variant"].startswith(("power", "multi_power")):
            assert float(row["estimate_ratio"]) <= 1.1 * (1 + 1e-12)
        least = {"cn": 0.5, "ndb": 0.4, "chebyshev": 1.0}[row["method"]]
        assert float(row["scale_ratio"]) >= least * (1 - 1e-12)
    assert_complete(tmp_path, "scaling", ["scaling-ratio", "scaling-steps"])


def test_all_studies_run_twice_and_are_deterministic(tmp_path: Path, matrices: Path) -> None:
    options = [
        "study",
        "--quick",
        "--input",
        str(matrices),
        "--out",
        str(tmp_path / "a" / "b"),
        "--methods",
        "cn",
    ]
    options += ["--p", "2", "--scalings", "power", "--dtypes", "bfloat16"]
    assert main(options) == 0
    folder = tmp_path / "a" / "b"
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(options) == 0
    assert {path.name for path in folder.iterdir()} == set(first)
    repeated = [
        name for name in first if name.endswith(".csv") and name != "accuracy.csv"
    ]  # that one has times
    assert len(repeated) == 5
    assert all((folder / name).read_bytes() == first[name] for name in repeated)


def test_matrices_without_a_root_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.npy"
    np.save(path, np.stack([np.diag([1.0, -1.0]), np.zeros((2, 2))]))
    assert main(["study", "--input", str(path), "--out", str(tmp_path / "out"), "--rel-damping", "0"]) == 0
    assert {row["status"] for row in records(tmp_path / "out", "accuracy")} == {"INDEFINITE", "SINGULAR"}
    assert capsys.readouterr().err == ""


def test_combinations_that_do_not_exist_are_skipped_and_named(tmp_path: Path, matrices: Path) -> None:
    study(
        "accuracy",
        tmp_path,
        "--input",
        matrices,
        "--p",
        "3",
        "8/3",
        "--methods",
        "evd",
        "cn",
        "ndb",
        "--dtypes",
        "float32",
    )
    rows = records(tmp_path, "accuracy")
    assert {(row["method"], row["p"]) for row in rows} == {("evd", "3"), ("evd", "8/3"), ("cn", "3")}
    text = (tmp_path / "accuracy.md").read_text()
    assert 'Skipped method "ndb" with p = 3' in text
    assert 'Skipped method "cn" with p = 8/3' in text


def test_reference_is_more_accurate_than_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    B = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    A = B @ B.T + 1e-6 * torch.eye(6, dtype=torch.float64)
    A = (A + A.T) / 2
    exact = reference(A.unsqueeze(0), torch.tensor([1e-3], dtype=torch.float64), 3)
    with mpmath.workdps(40):
        M = mpmath.matrix(A.tolist()) + mpmath.mpf(1e-3) * mpmath.eye(6)
        values, Q = mpmath.eigsy(M)
        X = Q * mpmath.diag([value ** (-mpmath.mpf(1) / 3) for value in values]) * Q.T
        scale = min(values) ** (-mpmath.mpf(1) / 3)
        gap = max(
            abs(X[i, j] - mpmath.mpf(float(exact.head[0, i, j])) - mpmath.mpf(float(exact.tail[0, i, j])))
            for i in range(6)
            for j in range(6)
        )
        assert gap / scale < (1e-17 if np.finfo(np.longdouble).eps < 1e-18 else 1e-12)


EYE = np.eye(3)


def test_loader_reads_every_format(tmp_path: Path) -> None:
    stack = np.stack([EYE, 2 * EYE]).reshape(1, 2, 3, 3)
    np.save(tmp_path / "one.npy", EYE.astype(">f4"))
    np.savez_compressed(tmp_path / "many.npz", a=stack, **{"b/left": np.eye(2, dtype=np.float16)})
    torch.save(torch.eye(4, dtype=torch.bfloat16), tmp_path / "tensor.pt")
    torch.save({"w": torch.eye(2).expand(3, 2, 2)}, tmp_path / "dict.pt")
    torch.save([torch.eye(2), torch.eye(5, requires_grad=True)], tmp_path / "list.pt")
    assert load_matrices(tmp_path / "one.npy")["one"].dtype == torch.float32
    many = load_matrices(tmp_path / "many.npz")
    assert list(many) == ["a[0]", "a[1]", "b/left"]
    assert torch.equal(many["a[1]"], 2 * torch.eye(3, dtype=torch.float64))
    assert load_matrices(tmp_path / "tensor.pt")["tensor"].dtype == torch.bfloat16
    assert list(load_matrices(tmp_path / "dict.pt")) == ["w[0]", "w[1]", "w[2]"]
    listed = load_matrices(tmp_path / "list.pt")
    assert [matrix.shape[-1] for matrix in listed.values()] == [2, 5]
    assert not listed["1"].requires_grad


def test_default_input() -> None:
    factors = default_matrices()
    assert len(factors) == 46
    assert {matrix.shape[-1] for matrix in factors.values()} == {64, 128, 256}
    assert "step300/layer1.mlp.gate/left" in factors


class Payload:
    pass


def write_bad(path: Path, kind: str) -> None:
    arrays = {
        "integer": np.eye(3, dtype=np.int64),
        "complex": np.eye(3, dtype=np.complex128),
        "rectangular": np.ones((3, 4)),
        "vector": np.ones(3),
        "nan": np.full((2, 2), np.nan),
        "asymmetric": np.array([[1.0, 0.5], [0.0, 1.0]]),
        "empty": np.empty((0, 3, 3)),
        "zero-sized": np.empty((2, 0, 0)),
    }
    objects = {"object": Payload(), "number": 3, "nested": {"a": [torch.eye(2)]}, "no tensors": []}
    if kind == "missing":
        return
    with path.open("wb") as stream:
        if kind in arrays:
            np.save(stream, arrays[kind])
        elif kind in objects:
            torch.save(objects[kind], stream)
        elif kind == "pickled":
            np.savez(stream, a=np.array([{}, None], dtype=object))
        elif kind == "no arrays":
            np.savez(stream)
        elif kind == "truncated":
            np.savez(stream, a=EYE)
            stream.truncate(150)
        else:
            stream.write(b"\x00not a matrix")


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("m.npy", "missing", "no such file"),
        ("m.csv", "text", "expected a .npy, .npz or .pt file"),
        ("m.npy", "garbage", "cannot read"),
        ("m.npz", "garbage", "cannot read"),
        ("m.pt", "garbage", "cannot read"),
        ("m.npz", "truncated", "cannot read"),
        ("m.npz", "pickled", "numpy.savez"),
        ("m.npz", "no arrays", "at least one matrix"),
        ("m.npz", "nan", "name it .npy"),
        ("m.npy", "pickled", "name it .npz"),
        ("m.npy", "integer", "expected float16, float32 or float64, got int64"),
        ("m.npy", "complex", "got complex128"),
        ("m.npy", "rectangular", "expected (*, n, n), got (3, 4)"),
        ("m.npy", "vector", "expected (*, n, n), got (3,)"),
        ("m.npy", "nan", "expected finite values"),
        ("m.npy", "asymmetric", "expected symmetric"),
        ("m.npy", "empty", "empty array (0, 3, 3)"),
        ("m.npy", "zero-sized", "empty array (2, 0, 0)"),
        ("m.pt", "object", "cannot read"),
        ("m.pt", "number", "got int"),
        ("m.pt", "nested", "m.pt[a]: expected a torch.Tensor, got list"),
        ("m.pt", "no tensors", "at least one matrix"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str, message: str
) -> None:
    path, out = tmp_path / name, tmp_path / "out"
    write_bad(path, kind)
    assert main(["study", "accuracy", "--input", str(path), "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("matroots: error: --input: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["accuracy", "--methods", "qr"], "argument --methods: invalid choice: 'qr'"),
        (["accuracy", "--dtypes", "int8"], "argument --dtypes: invalid choice: 'int8'"),
        (["accuracy", "--scalings", "trace"], "argument --scalings: invalid choice"),
        (["precision"], "invalid choice: 'precision'"),
        (["--p", "0.5"], "argument --p: expected a number >= 1"),
        (["--p", "four"], "argument --p: expected a number >= 1"),
        (["--p", "3.14159"], "argument --p: expected a number >= 1"),
        (["--rel-damping", "nan"], "argument --rel-damping: expected a finite number >= 0"),
        (["--steps", "0"], "argument --steps: expected an integer from 1"),
        (["--seed", "-1"], "argument --seed: expected an integer >= 0"),
        (
            ["accuracy", "--p", "3", "--methods", "ndb"],
            "--methods, --p: nothing is left for the accuracy study",
        ),
        (["--methods", "evd"], "--methods, --p: nothing is left for the convergence study"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["study", *options, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_out_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["study", "transfer", "--out", str(out)]) == 2
        assert "--out: expected a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("module", "package"), [("rich.console", "rich"), ("matplotlib.figure", "matplotlib")]
)
def test_missing_extra_says_what_to_install(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["study", "transfer", "--out", str(tmp_path / "out")]) == 2
    assert f"studies need {package}" in (err := capsys.readouterr().err)
    assert 'pip install "matroots[study]"' in err
    assert not (tmp_path / "out").exists()


def test_a_failing_loader_names_its_argument(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--input: no such file"):
        load_matrices(tmp_path / "absent.npz")


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_a_dtype_that_cannot_hold_the_input_is_named_before_any_work(size, tmp_path, capsys):
    np.save(tmp_path / "extreme.npy", size * np.eye(3))
    out = tmp_path / "out"
    assert main(["study", "--quick", "--input", str(tmp_path / "extreme.npy"), "--out", str(out)]) == 2
    assert "--dtypes: float32 cannot hold matrix extreme" in capsys.readouterr().err
    assert not out.exists()
    arguments = ["--input", str(tmp_path / "extreme.npy"), "--dtypes", "float64", "--methods", "cn"]
    assert main(["study", "accuracy", *arguments, "--out", str(out)]) == 0


def test_a_link_to_nothing_is_no_folder(tmp_path, capsys):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    assert main(["study", "--quick", "--out", str(tmp_path / "out")]) == 2
    assert "a link to nothing" in capsys.readouterr().err


def test_an_interrupt_ends_in_one_line(tmp_path, capsys, monkeypatch):
    def interrupted(settings):
        raise KeyboardInterrupt

    monkeypatch.setitem(_cli.STUDIES, "accuracy", (interrupted, ("cn",)))
    assert main(["study", "accuracy", "--quick", "--methods", "cn", "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.startswith("matroots: interrupted")
    assert not (tmp_path / "out").exists()
