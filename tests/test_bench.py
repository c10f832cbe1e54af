# SPDX-License-Identifier: Apache-2.0
"""The bench: what it measures against independent values, how it shares time, and what it says about what it leaves out."""

from __future__ import annotations

import csv
import itertools
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import error, geometric, inverse_root, spd, with_spectrum

from matroots.__main__ import COMMANDS, main
from matroots.bench import _cli, _run, papers, peers
from matroots.bench._contestants import METHODS, TARGETS, Contestant, others, ours
from matroots.bench._matrices import batch_size, matrices, orthogonal, relative_errors, spectral_norm
from matroots.bench._report import comparisons, frontier
from matroots.bench._run import Bench, Pace, Row, available_memory
from matroots.bench._settings import Cell, Settings
from matroots.bench._timing import interleave, plan, spread, wall_clock
from matroots.solvers import SOLVERS

FP32, FP64 = torch.float32, torch.float64
SMALL = ["--n", "8", "--p", "2", "--conditions", "1e2", "--megabytes", "0.002", "--budget", "0.05"]
SMALL += ["--threads", "1"]


def batch(condition: float = 1e3, n: int = 12) -> torch.Tensor:
    return torch.stack([spd(n, condition, seed) for seed in range(3)])


# --- transcriptions and peers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 4])
def test_denman_beavers_of_the_paper_converges(p: int) -> None:
    A = batch()
    assert error(papers.newton_denman_beavers(A, p, steps=25), inverse_root(A, p)).max() < 1e-10


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_coupled_newton_of_the_paper_converges(p: int) -> None:
    A = batch()
    assert error(papers.coupled_newton(A, p, 40, tolerance=1e-12), inverse_root(A, p)).max() < 1e-10


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_transcriptions_are_the_scalar_iterations(steps: int) -> None:
    spectrum = geometric(6, 1e5)
    A = with_spectrum(spectrum).unsqueeze(0)
    scale = 2.0 * float(papers.largest_eigenvalue(A))

    def square_root(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z = np.ones_like(y)
        for _ in range(steps):
            e = (3 - z * y) / 2
            y, z = y * e, e * z
        return y, z

    values = square_root(square_root(spectrum / scale)[0])[1] / scale**0.25
    assert error(papers.newton_denman_beavers(A, 4, steps), with_spectrum(values).unsqueeze(0)).max() < 1e-12
    z = 5 / (2 * np.linalg.norm(spectrum))
    m, x = z * spectrum, z**0.25 * np.ones(6)
    for _ in range(steps):
        q = (5 - m) / 4
        m, x = m * q**4, x * q
    assert error(papers.coupled_newton(A, 4, steps), with_spectrum(x).unsqueeze(0)).max() < 1e-12


def test_coupled_newton_of_the_paper_stops_at_its_tolerance() -> None:
    A = torch.eye(4).double().expand(2, 4, 4)
    assert torch.equal(papers.coupled_newton(A, 2, 20), papers.coupled_newton(A, 2, 40))


def test_the_largest_eigenvalue_is_estimated_from_below() -> None:
    estimate = papers.largest_eigenvalue(batch())
    assert ((estimate <= 1 + 1e-12) & (estimate > 0.9)).all()


@pytest.mark.parametrize("call", [papers.newton_denman_beavers, lambda A, p: papers.coupled_newton(A, p, 5)])
def test_transcriptions_name_the_p_that_they_take(call) -> None:
    with pytest.raises(ValueError, match=r"^p: "):
        call(batch(), 2.5)


@pytest.mark.parametrize("p", [2, 4, 2.5])
def test_peers_return_the_root(p: float) -> None:
    A = batch(100.0)
    for call in (peers.eigh, peers.scipy_fractional_power):
        assert error(call(A, p, 0.0), inverse_root(A, p)).max() < 1e-10
    single = A.float()
    assert error(peers.eigh_fp64(single, p, 0.0), inverse_root(single, p)).max() < 1e-6


def test_pytorch_optimizer_returns_the_root_and_names_the_p_that_it_takes() -> None:
    pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is not installed")
    A = batch(10.0).float()
    found, note = peers.pytorch_optimizer()
    assert note == ""
    assert [peer.name for peer in found] == ["pt-opt-svd", "pt-opt-ndb", "pt-opt-cn", "pt-opt-cn-1e-6"]
    for peer, p in itertools.product(found, (2, 4)):
        assert error(peer.call(A, p, 0.0), inverse_root(A, p)).max() < 1e-3
    with pytest.raises(ValueError, match="takes 2 or 4, got 3"):
        found[1].call(A, 3, 0.0)


@pytest.mark.parametrize("broken", [False, True])
def test_pytorch_optimizer_that_cannot_be_used_is_a_sentence(monkeypatch, broken: bool) -> None:
    if broken:  # the package is there, and has changed
        for name in ("pytorch_optimizer", "pytorch_optimizer.optimizer", "pytorch_optimizer.optimizer.utils"):
            monkeypatch.setitem(sys.modules, name, torch)
        monkeypatch.setitem(sys.modules, "pytorch_optimizer.optimizer.utils.matrix", torch)
        monkeypatch.setitem(sys.modules, "pytorch_optimizer.optimizer.dash", torch)
    else:
        for name in [name for name in sys.modules if name.startswith("pytorch_optimizer.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    found, notes = others()
    assert {one.name for one in found} == {
        *("paper-ndb-10", "paper-cn-10", "paper-cn-40", "eigh", "eigh-fp64", "scipy")
    }
    assert len(notes) == 1
    assert ("cannot be used" if broken else 'pip install "matroots[bench]"') in notes[0]


def test_every_solver_takes_part() -> None:
    names = [method.name for method in METHODS]
    assert {*SOLVERS, *TARGETS, "auto"} <= set(names)
    assert len(set(names)) == len(names)
    halves = ours(["cn", "minimax-floor"], [torch.bfloat16])
    assert [one.name for one in halves] == ["cn", "minimax-floor", "cn-bfloat16", "minimax-floor-bfloat16"]
    A = batch(10.0).float()
    result = halves[3].call(A, 2, 10.0)
    exact = halves[1].call(A, 2, 10.0)
    assert 1e-4 < error(result.root, inverse_root(A, 2)).max() < 0.1
    assert error(exact.root, inverse_root(A, 2)).max() < 1e-5
    assert int(exact.matmuls.max()) < int(ours(["minimax"])[0].call(A, 2, 10.0).matmuls.max())


# --- matrices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_matrices_have_the_truth_that_is_claimed(dtype: torch.dtype) -> None:
    Q = orthogonal(4, 10, seed=7)
    assert torch.dist(Q.mT @ Q, torch.eye(10).double().expand(4, 10, 10)) < 1e-13
    assert torch.equal(Q, orthogonal(4, 10, seed=7))
    A, truth = matrices(Q, 1e4, dtype, measured=2)
    assert A.shape == (4, 10, 10)
    assert A.dtype == dtype
    assert truth.definite
    assert torch.linalg.cond(A.double()).sub(1e4).abs().max() < 50
    assert error(truth.inverse_root(4), inverse_root(A[:2], 4)).max() < 1e-12


def test_a_dtype_that_cannot_hold_the_condition_has_no_truth() -> None:
    _, truth = matrices(orthogonal(4, 10, 0), 1e12, FP32, measured=4)
    assert not truth.definite


def test_errors_are_those_of_the_2_norm_also_without_symmetry() -> None:
    R = batch()
    X = R + 1e-3 * torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=FP64)
    expected = [
        np.linalg.norm(x - r, 2) / np.linalg.norm(r, 2) for x, r in zip(X.numpy(), R.numpy(), strict=True)
    ]
    assert relative_errors(X, R).tolist() == pytest.approx(expected, rel=1e-9)
    assert relative_errors(1e-200 * X, 1e-200 * R).tolist() == pytest.approx(expected, rel=1e-9)
    X[1, 0, 0] = math.nan
    assert relative_errors(X, R).isnan().tolist() == [False, True, False]
    assert relative_errors(R, R).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("n", [1, 48, 49, 200])
@pytest.mark.parametrize("kind", ["noise", "graded", "one direction", "zero"])
def test_the_norm_is_that_of_a_singular_value_decomposition(n: int, kind: str) -> None:
    E = torch.randn(3, n, n, generator=torch.Generator().manual_seed(n), dtype=FP64)
    if kind == "graded":
        E = E * torch.logspace(0, -8, n, dtype=FP64)
    elif kind == "one direction":
        E = 1e-9 * E + E[:, :, :1] @ E[:, :1]
    elif kind == "zero":
        E = 0 * E
    exact = torch.linalg.svdvals(E)[:, 0]
    norm = spectral_norm(E)
    assert (norm <= exact * (1 + 1e-12)).all()
    assert (norm >= exact * 0.995).all()


def test_batches_fill_the_memory_that_they_are_given() -> None:
    assert batch_size(64, FP32, 64) == 4096
    assert batch_size(64, FP64, 64) == 2048
    assert batch_size(8192, FP64, 64) == 1
    assert available_memory(torch.device("cpu")) > 0


# --- time --------------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(1e-6, 100), min_size=1),
    st.floats(0.01, 100),
    st.integers(1, 60),
)
def test_the_plan_keeps_the_budget_and_wastes_little(
    first: dict[str, float], budget: float, most: int
) -> None:
    counts = plan(first, budget, most)
    spent = sum(first[name] * count for name, count in counts.items())
    assert spent <= budget * (1 + 1e-9)
    assert all(0 <= count <= most for count in counts.values())
    # whoever got less than allowed got an equal share of half of the budget, but for a fraction of a run
    for name, count in counts.items():
        assert count == most or (count + 1) * first[name] >= budget / 2 / len(first) * (1 - 1e-9)


def test_runs_are_interleaved() -> None:
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in ("unit", "often", "seldom", "never")}
    now = itertools.count()

    def clock(run) -> float:
        run()
        return float(next(now))

    counts = {"unit": 12, "often": 12, "seldom": 3, "never": 0}
    times = interleave(runs, counts, clock)
    assert {name: len(seconds) for name, seconds in times.items()} == counts
    assert sorted(itertools.chain(*times.values())) == list(range(27))
    # in each third of the run everyone had a third of its turns, and no two neighbours are of one kind for long
    for third in (calls[:9], calls[9:18], calls[18:]):
        assert [third.count(name) for name in ("unit", "often", "seldom")] == [4, 4, 1]
    assert interleave(runs, counts, clock, seed=1).keys() == runs.keys()


def test_spread_is_median_and_quartiles() -> None:
    found = spread([4.0, 1.0, 2.0, 3.0, 5.0], first=9.0)
    assert (found.low, found.median, found.high, found.repeats) == (2.0, 3.0, 4.0, 5)
    assert spread([], first=9.0).median == 9.0
    assert spread([], first=9.0).repeats == 0


def test_the_wall_clock_runs_what_it_times() -> None:
    calls: list[int] = []
    assert wall_clock(lambda: calls.append(1)) >= 0
    assert calls == [1]


def test_the_pace_grows_with_the_cube_of_the_size() -> None:
    pace = Pace()
    pace.note("a", Cell(64, FP32, 1e4, 2), 0.5)
    assert pace.guess("a", Cell(128, FP32, 1e8, 2)) == 4.0
    assert pace.guess("a", Cell(128, FP64, 1e4, 2)) == 0.0
    assert pace.guess("b", Cell(128, FP32, 1e4, 2)) == 0.0


# --- a cell ------------------------------------------------------------------------------------------------------------


def settings(tmp_path: Path, **changes: object) -> Settings:
    options = _cli._parser().parse_args([*SMALL, "--dtypes", "float32", "--out", str(tmp_path)])
    found = _cli._settings(options)
    return replace(found, **changes)


def measure(settings: Settings, *contestants: Contestant) -> Bench:
    bench = Bench(settings, contestants, wall_clock)
    assert list(bench.run(list(settings.cells()))) == list(settings.cells())
    return bench


def contestant(call, **options: object) -> Contestant:
    return Contestant("other", "peer", lambda A, p, condition: call(A, p), "a test", **options)


def broken(A: torch.Tensor, p: float) -> torch.Tensor:
    raise RuntimeError("out of luck\nand more lines")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (broken, "RuntimeError: out of luck"),
        (lambda A, p: A[:, :2], "returned a tensor (8, 2, 8), expected (8, 8, 8)"),
        (lambda A, p: None, "AttributeError: 'NoneType' object has no attribute 'root'"),
    ],
)
def test_a_peer_that_raises_is_reported_and_the_others_are_measured(tmp_path, call, reason: str) -> None:
    bench = measure(settings(tmp_path), contestant(call), *ours(["evd"]))
    assert [(skip.method, skip.reason) for skip in bench.skips] == [("other", reason)]
    assert [row.method for row in bench.rows] == ["evd"]


def test_failed_members_are_counted_and_time_without_error_is_not_reported(tmp_path) -> None:
    def half(A: torch.Tensor, p: float) -> torch.Tensor:
        X = peers.eigh(A, p, 0.0)
        X[::2] = math.nan
        return X

    (row,) = measure(settings(tmp_path), contestant(half)).rows
    assert (row.failed, row.measured, row.batch) == (4, 4, 8)
    assert row.error_max < 1e-4
    assert row.ms > 0
    assert not row.reaches(1e-2)
    (row,) = measure(settings(tmp_path), contestant(lambda A, p: A * math.nan)).rows
    assert row.failed == 8
    assert math.isnan(row.ms)
    assert math.isnan(row.error_max)


def test_members_that_are_run_alone_are_multiplied_up(tmp_path) -> None:
    one = contestant(lambda A, p: peers.eigh(A, p, 0.0), members=2)

    def clock(run) -> float:
        run()
        return 0.004

    bench = Bench(settings(tmp_path), [one], clock)
    list(bench.run(list(bench.settings.cells())))
    (row,) = bench.rows
    assert (row.run_on, row.batch, row.measured) == (2, 8, 2)
    assert row.ms == pytest.approx(4 * 4.0)
    assert row.bmm_ms == pytest.approx(4.0)
    assert row.units == pytest.approx(4.0)


def test_what_does_not_fit_is_listed(tmp_path, monkeypatch) -> None:
    slow = contestant(lambda A, p: A, units=1e12)
    elsewhere = replace(slow, name="elsewhere", devices=("cuda",), units=0.0)
    bench = measure(settings(tmp_path), slow, elsewhere)
    assert bench.rows == []
    assert bench.skips[0].reason.startswith("time: one call is expected to take ")
    assert bench.skips[1].reason == "does not run on cpu"
    for reason, changes in (
        ("time: the limit of -1 s was reached", {"limit": -1.0}),
        ("rounded to this dtype, some matrices are no longer positive definite", {"conditions": (1e12,)}),
    ):
        bench = measure(settings(tmp_path, **changes), *ours(["evd"]))
        assert [(skip.method, skip.reason) for skip in bench.skips] == [("everyone", reason)]
    monkeypatch.setattr(_run, "available_memory", lambda device: 1e3)
    (skip,) = measure(settings(tmp_path), *ours(["evd"])).skips
    assert skip.reason.startswith("memory: needs about ")


def test_one_certificate_is_timed_for_all_of_ours_and_for_no_peer(tmp_path) -> None:
    bench = measure(
        settings(tmp_path), *ours(["cn", "auto-1e-2"]), contestant(lambda A, p: peers.eigh(A, p, 0.0))
    )
    cn, auto, other = bench.rows
    assert cn.certificate_ms == auto.certificate_ms > 0
    assert math.isnan(other.certificate_ms)
    assert cn.products > 0
    assert other.products is None


# --- the report --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_the_frontier_is_what_nobody_beats(points: list[tuple[float, float]]) -> None:
    def beaten(point: tuple[float, float]) -> bool:
        return any(q != point and q[0] <= point[0] and q[1] <= point[1] for q in points)

    assert frontier(points) == sorted({point for point in points if not beaten(point)})


def row(method: str, kind: str, ms: float, error: float, failed: int = 0) -> Row:
    return Row(
        *("float32", "4", 64, 1e4, 8, method, kind, error, error, 8, failed, ms, ms, ms, ms, 3, 8, 1.0, 4.0),
        products=None,
    )


def test_auto_is_compared_with_the_fastest_peer_that_is_as_accurate() -> None:
    rows = [
        row("wild", "peer", 1.0, 0.5),
        row("lossy", "paper", 2.0, 5e-3, failed=1),
        row("rough", "paper", 10.0, 5e-3),
        row("fine", "peer", 20.0, 1e-5),
        row("slow", "peer", 30.0, 1e-8),
        row("cn", "ours", 4.0, 1e-5),
        row("auto-1e-2", "ours", 5.0, 1e-3),
        row("auto-1e-4", "ours", 8.0, 2e-4),
    ]
    loose, tight = comparisons(rows)
    assert (loose.target, loose.peer.method, loose.best.method, loose.auto.method) == (
        *(1e-2, "rough", "cn", "auto-1e-2"),
    )
    assert loose.ratio == 0.5
    assert (tight.target, tight.peer.method, tight.auto.method) == (1e-4, "fine", "auto-1e-4")
    assert math.isnan(tight.ratio)  # auto has missed the target
    alone = comparisons(rows[:1])[0]
    assert (alone.peer, alone.best, alone.auto) == (None, None, None)
    assert math.isnan(alone.ratio)


# --- the command -------------------------------------------------------------------------------------------------------


def records(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_run_leaves_tables_figures_and_every_solver(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", *SMALL, "--dtypes", "float32", "--out", str(tmp_path)]) == 0
    rows = records(tmp_path, "bench")
    assert {*SOLVERS, "auto", "eigh", "scipy", "paper-ndb-10"} <= {row["method"] for row in rows}
    for row in rows:
        assert float(row["error_max"]) >= float(row["error_median"]) >= 0
        assert float(row["units"]) == pytest.approx(float(row["ms"]) / float(row["bmm_ms"]))
        assert float(row["ms_low"]) <= float(row["ms"]) <= float(row["ms_high"])
    exact = next(row for row in rows if row["method"] == "eigh-fp64")
    assert float(exact["error_max"]) < 1e-6
    assert [row["target"] for row in records(tmp_path, "bench-summary")] == ["0.01", "0.0001"]
    assert (tmp_path / "bench-float32-p2.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "bench.md").read_text()
    for heading in ("auto against the best peer", "All results", "Left out", "Who took part"):
        assert f"## {heading}" in text
    assert "--seed" not in text
    assert "- seed: 0" in text
    assert "auto against the best peer" in capsys.readouterr().out


def test_errors_are_the_same_in_every_run(tmp_path) -> None:
    options = ["bench", *SMALL, "--plain", "--methods", "cn", "evd", "--no-peers"]
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert main([*options, "--seed", seed, "--out", str(tmp_path / name)]) == 0
    first, again, other = ([row["error_max"] for row in records(tmp_path / name, "bench")] for name in "abc")
    assert first == again != other
    assert {row["kind"] for row in records(tmp_path / "a", "bench")} == {"ours"}


def test_a_plain_run_needs_neither_matplotlib_nor_rich(tmp_path, capsys, monkeypatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    options = ["bench", *SMALL, "--methods", "cn", "--no-peers", "--out", str(tmp_path)]
    assert main(options) == 2
    assert (err := capsys.readouterr().err).startswith("matroots: error: the bench needs matplotlib, which")
    assert 'pip install "matroots[bench]"' in err
    assert main([*options, "--plain"]) == 0
    assert "Wrote 4 files" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))


def test_an_interrupt_keeps_the_cells_before(tmp_path, capsys, monkeypatch) -> None:
    measured = Bench._measure
    seen: list[Cell] = []

    def interrupted(self, cell):
        seen.append(cell)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return measured(self, cell)

    monkeypatch.setattr(Bench, "_measure", interrupted)
    assert main(["bench", *SMALL, "--plain", "--methods", "cn", "--no-peers", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err.startswith(
        "matroots: interrupted; the cells that were finished before are kept"
    )
    assert [row["dtype"] for row in records(tmp_path, "bench")] == ["float32"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n", "1"], "argument --n: expected an integer from 2 to 8192, got '1'"),
        (["--n", "x"], "argument --n: expected an integer"),
        (["--p", "0.5"], "argument --p: expected a number >= 1"),
        (["--dtypes", "float16"], "argument --dtypes: invalid choice: 'float16'"),
        (["--conditions", "1"], "argument --conditions: expected a number above 1"),
        (["--conditions", "many"], "argument --conditions: expected a number above 1"),
        (["--methods", "qr"], "argument --methods: invalid choice: 'qr'"),
        (["--matmul-dtypes", "float32"], "argument --matmul-dtypes: invalid choice"),
        (["--device", "tpu"], "argument --device: invalid choice"),
        (["--threads", "0"], "argument --threads: expected an integer from 1"),
        (["--megabytes", "-1"], "argument --megabytes: expected a finite number > 0"),
        (["--budget", "nan"], "argument --budget: expected a finite number > 0"),
        (["--limit", "0"], "argument --limit: expected a finite number > 0"),
        (["--members", "0"], "argument --members: expected an integer from 1"),
        (["--seed", "-1"], "argument --seed: expected an integer >= 0"),
        (["extra"], "unrecognized arguments: extra"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(tmp_path, capsys, options: list[str], message: str) -> None:
    assert main(["bench", *options, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_device_that_is_not_there_is_named(tmp_path, capsys) -> None:
    assert main(["bench", "--device", "cuda", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "matroots: error: --device: expected a device that is there, got 'cuda' where torch sees none\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_script_for_gpus_says_that_there_is_none(tmp_path) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "gpu.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(script), str(tmp_path / "out")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 3
    assert "torch sees no CUDA device: nothing was run" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [[], ["stud"], ["--quick", "study"]])
def test_an_unknown_command_is_one_line(capsys, arguments: list[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_lists_the_commands(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and what in out for name, (_, what) in COMMANDS.items())
