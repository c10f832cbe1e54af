# SPDX-License-Identifier: Apache-2.0
"""Many runs: comparisons and sweeps hold what the runs say, each contestant has a folder of its own, and nothing is run twice or for nothing."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from training_jobs import TINY, command, computed, lines, text, tiny, until, words

from dash_optim.__main__ import main
from dash_optim.training._arguments import contestants
from dash_optim.training._sweep_cli import _varied
from dash_optim.training.compare import comparison, mean_loss
from dash_optim.training.metrics import read
from dash_optim.training.outcome import Outcome
from dash_optim.training.run import Run
from dash_optim.training.runs import by_seed, folder_name, run_groups
from dash_optim.training.settings import Job, override
from dash_optim.training.sweep import best_rates, grid_of, sweep_report
from matroots._command import InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch):
    """What a killed process has written stays; only a machine that dies needs more, and that takes time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return text(tmp_path_factory.mktemp("text") / "words.txt")


def outcome(loss, seed=0, *, diverged=False, curve=None, **values):
    curve = curve or [(5, 0.5, loss + 1), (10, 1.0, loss)]
    fields = {
        "name": "dash",
        "parameters": 1000,
        "step": 10,
        "steps": 10,
        "seconds": 1.0,
        "tokens_per_second": 640.0,
        "ms": {"forward": 1.0, "backward": 2.0, "optimizer": 3.0},
        "optimizer_bytes": 2**20,
    }
    why = "no finite loss in 10 steps" if diverged else ""
    return Outcome(
        seed=seed,
        loss=math.nan if diverged else loss,
        curve=curve,
        diverged=diverged,
        reason=why,
        **(fields | values),
    )


def table(path):
    with path.open() as stream:
        return list(csv.DictReader(stream))


def runs_in(folder):
    return {path.name: Outcome.read(path) for path in sorted(folder.iterdir()) if path.is_dir()}


def folders(out):
    return sorted(path.name for path in out.iterdir() if path.is_dir())


# names


def test_labels_that_differ_have_folders_that_differ():
    labels = [
        "dash",
        "Dash",  # one folder on a Mac
        "dash (p=8/3)",
        "dash (p=8-3)",
        "dash (p=8 3)",
        "dash, p=8-3",
        "dash (betas=[0.9, 0.95])",
        "dash (betas=[0.9], x=[0.95])",
        "dash-",
        "größe",
        "grösse",
        "..",
        "a/../../b",
        "x" * 300,
        "x" * 301,
        "",
    ]
    names = [folder_name(label, seed) for label in labels for seed in (0, 1, 10)]
    assert len({name.lower() for name in names}) == len(names)
    for name in names:
        assert Path(name).name == name
        assert not name.startswith(".")
        assert len(name) < 120
    assert folder_name("adamw", 3) == "adamw-seed3"


def test_contestants_are_what_the_command_line_says():
    base = override({}, ["steps=300", "optimizer.grafting={type: adam, eps: 1e-6}"])
    texts = [
        "dash",
        "{type: dash, optimizer.grafting.eps: 1e-3}",
        "dash",
        "{type: dash, schedule.type: wsd}",
        "{type: dash, training.steps: 120}",
    ]
    found = contestants(texts, base)
    assert len(found) == 4  # one was named twice
    plain, eps, wsd, short = found.values()
    assert plain.optimizer["grafting"] == {"type": "adam", "eps": 1e-6}  # what another sets is not its own
    assert eps.optimizer["grafting"] == {"type": "adam", "eps": 1e-3}
    assert (wsd.schedule.type, wsd.training.steps) == ("wsd", 300)
    assert (short.schedule.type, short.training.steps) == ("cosine", 120)
    assert base["optimizer"]["grafting"]["eps"] == "1e-6"
    labels = list(found)
    assert labels[2] == f"{labels[0]}, schedule.type=wsd"
    assert labels[3] == f"{labels[0]}, training.steps=120"


def test_a_setting_is_varied_for_every_contestant():
    found = contestants(["dash", "{type: dash, p: 4}"], {}, ("update_freq", [5, 10]))
    assert [(job.optimizer.get("p"), job.optimizer["update_freq"]) for job in found.values()] == [
        (None, 5),
        (None, 10),
        (4, 5),
        (4, 10),
    ]
    found = contestants(["adamw"], {}, ("steps", [100, 200]))
    assert [(label, job.training.steps) for label, job in found.items()] == [
        ("adamw, steps=100", 100),
        ("adamw, steps=200", 200),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p=2,4", ("p", [2, 4])),
        ("p=8/3", ("p", ["8/3"])),
        ("betas=[0.9, 0.95],[0.8, 0.9]", ("betas", [[0.9, 0.95], [0.8, 0.9]])),
        ("grafting={type: adam},none", ("grafting", [{"type": "adam"}, "none"])),
    ],
)
def test_values_that_are_varied(text, expected):
    assert _varied(text) == expected


def test_a_grid_has_every_rate_and_seed():
    named = {"a": Job(optimizer={"type": "adamw"}), "b": Job(optimizer={"type": "dash"})}
    grid = grid_of(named, (0.1, 0.2, 0.2 + 1e-12), (3, 4))
    assert list(grid) == [(name, rate) for name in named for rate in (0.1, 0.2, 0.2 + 1e-12)]
    jobs = {folder: job for members in grid.values() for folder, job in members.items()}
    assert len(jobs) == 2 * 3 * 2
    assert {(j.optimizer["type"], j.optimizer["lr"], j.training.seed) for j in jobs.values()} == {
        (kind, rate, seed)
        for kind in ("adamw", "dash")
        for rate in (0.1, 0.2, 0.2 + 1e-12)
        for seed in (3, 4)
    }
    assert [
        job.training.seed for job in by_seed("a", named["a"].with_values(training={"seed": 7}), ()).values()
    ] == [7]


# judging


def test_a_run_that_diverged_is_infinitely_bad():
    assert mean_loss([outcome(2.0), outcome(4.0)]) == 3.0
    assert mean_loss([outcome(2.0), outcome(0, diverged=True)]) == math.inf
    points = {
        ("a", 0.1): [outcome(0, diverged=True)],
        ("a", 0.2): [outcome(3.0), outcome(2.0)],
        ("a", 0.3): [outcome(2.4), outcome(2.5)],
        ("a", 0.4): [outcome(1.0), outcome(0, diverged=True)],
        ("b", 0.1): [outcome(0, diverged=True)],
    }
    assert best_rates(points) == {"a": 0.3, "b": 0.1}
    report = sweep_report(points, "title")
    assert report.summary == "Each at its own best rate, a has the lowest loss: 2.450."
    (cells,) = report.tables
    assert cells.columns == ("optimizer", "0.1", "0.2", "0.3", "0.4", "best")
    assert cells.rows == [
        ("a", "diverged", "2.500", "2.450*", "diverged", "0.3"),
        ("b", "diverged", "", "", "", "-"),
    ]
    assert not report.notes  # nothing lies at an edge
    assert [row["diverged"] for row in report.data["sweep"]].count(True) == 3


@pytest.mark.parametrize("best", [0, 1, 2])
def test_a_best_rate_at_the_edge_is_noted(best):
    losses = [3.0, 3.0, 3.0]
    losses[best] = 2.0
    report = sweep_report(
        {("a", r): [outcome(x)] for r, x in zip((1e-3, 1e-2, 1e-1), losses, strict=True)}, ""
    )
    assert [("edge" in note) for note in report.notes] == ([] if best == 1 else [True])


def test_a_comparison_holds_means_and_spreads():
    losses = {"a": [2.0, 2.5, 3.3], "b": [2.2, 2.1, 2.9]}
    groups = {name: [outcome(x, seed) for seed, x in enumerate(each)] for name, each in losses.items()}
    groups["c"] = [outcome(0, diverged=True, curve=[(5, 0.5, math.nan)], step=7), outcome(1.0, 1, roots=0.25)]
    report = comparison(groups, "title")
    assert report.summary.startswith(
        "The lowest loss on the held-out text is that of b: 2.400 nats per token (perplexity 11.02)"
    )
    rows = {row[0]: row for row in report.tables[0].rows}
    for name, each in losses.items():
        mean, spread = np.mean(each), np.std(each, ddof=1)
        assert rows[name][2:6] == (
            " / ".join(f"{x:.3f}" for x in each),
            f"{mean:.3f}",
            f"{np.exp(mean):.2f}",
            f"{spread:.3f}",
        )
    assert rows["c"][2:] == ("diverged / 1.000", "inf", "inf", "-", "0.250")
    assert report.notes == ["c, seed 0: given up at step 7: no finite loss in 10 steps."]
    curves = {line.get_label(): line.get_ydata() for line in report.plots[0].figure.axes[0].get_lines()}
    assert curves["a"] == pytest.approx(np.mean([[x + 1, x] for x in losses["a"]], axis=0))
    assert curves["c"] == pytest.approx([2.0, 1.0])  # the run that went on to the end


def test_a_comparison_of_nothing_but_diverged_runs_can_be_shown(tmp_path):
    groups = {
        "a": [outcome(0, diverged=True, curve=[(5, 0.5, math.nan)])],
        "b": [outcome(0, diverged=True, curve=[(5, 1.0, math.inf)])],
    }
    for report in (
        comparison(groups, "title"),
        sweep_report({(n, 0.1): g for n, g in groups.items()}, "title"),
    ):
        report.plots[0].figure.savefig(tmp_path / "figure.png")
        assert "given up" in report.summary
        assert "inf" not in report.summary


def drawn(groups):
    """The points of the lines of a comparison's left panel, by label."""
    axes = comparison(groups, "title").plots[0].figure.axes[0]
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata()), line) for line in axes.lines}


def test_seeds_that_were_looked_at_in_different_steps_are_drawn_where_all_were():
    often = [(step, step / 10, 5.0 - step / 100) for step in range(10, 101, 10)]
    seldom = [(50, 5.5, 4.0), (100, 11.0, 3.0)]
    steps, losses, _ = drawn({"a": [outcome(4.0, curve=often), outcome(3.0, 1, curve=seldom)]})["a"]
    assert steps == [50, 100]
    assert losses == [4.25, 3.5]


def test_a_curve_of_one_point_is_seen():
    lines = drawn({"one": [outcome(4.0, curve=[(8, 1.0, 4.0)])], "two": [outcome(4.0)]})
    assert [lines[name][2].get_marker() for name in ("one", "two")] == ["o", "None"]


def test_a_folder_of_another_run_is_found_before_the_first_is_run(tmp_path, data, capsys):
    out = tmp_path / "out"
    assert main(words("compare", "--optimizers", "sgd", data=data, out=out)) == 0
    (folder,) = [path for path in out.iterdir() if path.is_dir()]
    (folder / "result.json").unlink()  # as if it had been killed
    capsys.readouterr()
    assert main(words("compare", "steps=13", "--optimizers", "adamw", "sgd", data=data, out=out)) == 2
    assert "another" in capsys.readouterr().err
    assert [path for path in out.iterdir() if path.is_dir()] == [folder]


# running


def test_compare_reports_what_the_runs_say_and_runs_them_once(tmp_path, data, capsys, monkeypatch):
    chosen = [
        "--optimizers",
        "adamw",
        "{type: dash, block_size: 16}",
        "adamw",
        "{type: adamw, training.steps: 6}",
        "--seeds",
        "0",
        "1",
    ]
    argv = words("compare", *chosen, data=data, out=tmp_path)
    assert main(argv) == 0
    found = runs_in(tmp_path)
    assert len(found) == 6
    curves = table(tmp_path / "comparison.csv")
    labels = ["adamw", "dash (block_size=16)", "adamw, training.steps=6"]
    for label in labels:
        for seed in (0, 1):
            run = found[folder_name(label, seed)]
            job = json.loads((tmp_path / folder_name(label, seed) / "job.json").read_text())
            assert (job["training"]["seed"], job["training"]["steps"]) == (
                seed,
                6 if "6" in label[-1] and "steps" in label else 12,
            )
            rows = [row for row in curves if (row["optimizer"], row["seed"]) == (label, str(seed))]
            assert [(int(r["step"]), float(r["seconds"]), float(r["loss"])) for r in rows] == run.curve
    report = (tmp_path / "comparison.md").read_text()
    for label in labels:
        losses = [found[folder_name(label, seed)].loss for seed in (0, 1)]
        assert f"| {label} |" in report
        assert f"| {losses[0]:.3f} / {losses[1]:.3f} | {np.mean(losses):.3f} |" in report
        ms = [
            np.mean([r["optimizer_ms"] for r in read(tmp_path / folder_name(label, seed))]) for seed in (0, 1)
        ]
        assert f"| {np.mean(ms):.1f} |" in report
    assert "- seed: 0 1\n" in report
    out, err = capsys.readouterr()
    assert "Loss after training" in out
    assert "Loss after training" not in err

    monkeypatch.setattr(Run, "take_step", lambda _: pytest.fail("a finished run was run again"))
    before = (tmp_path / "comparison.csv").read_bytes()
    assert main(argv) == 0
    assert (tmp_path / "comparison.csv").read_bytes() == before


def alive(group):
    """The processes of a group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        found += [path.parent.name] if int(of) == group and state != "Z" else []
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_workers_compute_the_same_and_end_with_their_checkpoints(tmp_path, data):
    """Ctrl-C when the short runs have ended and the long one is under way: it leaves a checkpoint, and no process remains."""
    more = ["training.threads=1", "checkpoint_every=1000", "validate_every=30"]
    short = ["{type: dash, block_size: 16}", "{type: dash, block_size: 8}"]
    long = "{type: adamw, training.steps: 100000}"
    assert main(words("compare", *more, "--optimizers", *short, data=data, out=tmp_path / "alone")) == 0
    out = tmp_path / "workers"
    more += ["--optimizers", *short, long, "--workers", "2"]
    child = command(
        words("compare", *more, data=data, out=out), tmp_path / "log", before=lambda: os.setpgid(0, 0)
    )
    until(lambda: out.exists() and len(folders(out)) == 3 and all(lines(path) > 2 for path in out.iterdir()))
    until(lambda: (tmp_path / "log").read_text().count(": held out ") == 2)  # one worker has nothing to do
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does
    assert child.wait() == 130
    until(lambda: not alive(child.pid), seconds=10)
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log, log
    assert log.endswith("the same command goes on\n")
    for name, run in runs_in(out).items():
        if run.steps == 100000:
            assert (run.step, run.finished) == (lines(out / name), False)
            assert computed(out / name)["step"] == run.step
        else:
            assert computed(out / name) == computed(tmp_path / "alone" / name)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_second_ctrl_c_does_not_wait_for_workers(tmp_path, data):
    """However soon after the first: a step that takes a minute would keep the first waiting."""
    more = ["batch=20000", "context=128", "width=128", "--optimizers", "adamw", "sgd", "--workers", "2"]
    argv = words("compare", *more, data=data, out=tmp_path / "out")
    child = command(argv, tmp_path / "log", before=lambda: os.setpgid(0, 0))
    until(lambda: (tmp_path / "out").exists() and len(folders(tmp_path / "out")) == 2)
    started = time.monotonic()
    for _ in range(2):
        os.killpg(child.pid, signal.SIGINT)
        time.sleep(0.05)
    assert child.wait() == 130
    assert time.monotonic() - started < 10
    until(lambda: not alive(child.pid), seconds=10)
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_workers_that_are_still_starting_do_not_hear_ctrl_c(tmp_path, data):
    argv = words(
        "compare",
        "steps=100000",
        "--optimizers",
        "adamw",
        "sgd",
        "--workers",
        "2",
        data=data,
        out=tmp_path / "out",
    )
    for seconds in (0.3, 0.8, 1.3, 1.8, 2.3):
        child = command(argv, tmp_path / "log", before=lambda: os.setpgid(0, 0))
        time.sleep(seconds)
        os.killpg(child.pid, signal.SIGINT)
        assert child.wait() == 130
        assert (tmp_path / "log").read_text().count("\n") == 1


@pytest.mark.slow
def test_workers_end_with_their_parent(tmp_path, data):
    out = tmp_path / "out"
    argv = words(
        "compare",
        "steps=100000",
        "--optimizers",
        "adamw",
        "--seeds",
        "0",
        "1",
        "--workers",
        "2",
        data=data,
        out=out,
    )
    child = command(argv, tmp_path / "log", before=lambda: os.setpgid(0, 0))
    until(lambda: out.exists() and sum(lines(path) > 2 for path in out.iterdir()) == 2)
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL

    until(lambda: not alive(child.pid), seconds=10)


def test_nothing_is_run_before_all_is_known_to_be_possible(tmp_path, data, capsys):
    out = tmp_path / "out"
    for bad, message in {
        "{type: dash, blok_size: 3}": "did you mean 'block_size'?",
        "{type: adamw, lr: -1}": "optimizer.lr: expected a finite number >= 0",
        "{type: adamw, 1.5: 2}": "1: no such section",
        "{type: adamw, model.context: 5000}": "needs windows of 5001 tokens",
        "{type: adamw, training.device: toaster}": "training.device: expected a device",
        "soap": "bench",
        "{type: adamw, training.steps: 0}": "training.steps: expected a number >= 1",
        "{type: adamw, training.seed: 3}": "training.seed: is the same for all that are compared, by --seeds",
        "{type: adamw": "--optimizers: expected a type or a YAML mapping",
        "[adamw]": "--optimizers: expected a type or a YAML mapping",
    }.items():
        assert main(words("compare", "--optimizers", "adamw", bad, data=data, out=out)) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
        assert not out.exists()
    # a folder of another run further down the list
    assert main(words("compare", "--optimizers", "sgd", data=data, out=out)) == 0
    capsys.readouterr()
    assert main(words("compare", "steps=13", "--optimizers", "adamw", "sgd", data=data, out=out)) == 2
    assert "training.steps: 12 then, 13 now" in capsys.readouterr().err
    assert folders(out) == ["sgd-seed0"]


def test_the_seed_of_the_settings_is_used(tmp_path, data):
    assert main(words("compare", "training.seed=5", "--optimizers", "sgd", data=data, out=tmp_path)) == 0
    assert folders(tmp_path) == ["sgd-seed5"]
    assert "- seed: 5\n" in (tmp_path / "comparison.md").read_text()


def test_one_folder_is_for_one_job(tmp_path, data):
    jobs = tiny(data), tiny(data, training={"steps": 3})
    with pytest.raises(ValueError, match="expected one job for each folder, got two for 'x'"):
        run_groups({"a": {"x": jobs[0]}, "b": {"x": jobs[1]}}, tmp_path)
    shared = run_groups({"a": {"x": jobs[1]}, "b": {"x": jobs[1]}}, tmp_path, quiet=True)
    assert shared["a"] == shared["b"] == [Outcome.read(tmp_path / "x")]


def test_a_sweep_goes_over_diverged_runs_and_is_not_run_again(tmp_path, data, capsys, monkeypatch):
    more = [
        "--optimizers",
        "{type: sgd}",
        "--lrs",
        "0.1",
        "1e30",
        "0.5",
        "--vary",
        "momentum=0,0.9",
        "clip=0",
    ]
    argv = words("sweep", *more, data=data, out=tmp_path)
    assert main(argv) == 0
    found = runs_in(tmp_path)
    assert len(found) == 6
    for row in table(tmp_path / "sweep.csv"):
        run = found[folder_name(f"{row['optimizer']}, lr={float(row['rate'])!r}", 0)]
        job = json.loads(
            (
                tmp_path / folder_name(f"{row['optimizer']}, lr={float(row['rate'])!r}", 0) / "job.json"
            ).read_text()
        )
        assert job["optimizer"] == {
            "type": "sgd",
            "momentum": 0.9 if "0.9" in row["optimizer"] else 0,
            "lr": float(row["rate"]),
        }
        assert (row["diverged"] == "True") == run.diverged == (row["rate"] == "1e+30")
        assert run.diverged or float(row["loss"]) == run.loss
    report = (tmp_path / "sweep.md").read_text()
    for momentum in ("0", "0.9"):
        label = f"sgd (momentum={momentum})"
        each = {rate: found[folder_name(f"{label}, lr={rate}", 0)].loss for rate in (0.1, 0.5)}
        best = min(each, key=each.__getitem__)
        cells = [f"{each[rate]:.3f}" + ("*" if rate == best else "") for rate in (0.1, 0.5)]
        assert f"| {label} | {cells[0]} | {cells[1]} | diverged | {best:g} |" in report
    out, err = capsys.readouterr()
    assert (
        err.count("given up, no finite loss in 10 steps\n")
        + err.count("given up, the last loss is not finite\n")
        == 2
    )
    assert err.count(": held out ") == 4
    assert "best of each" in out

    monkeypatch.setattr(Run, "take_step", lambda _: pytest.fail("a finished run was run again"))
    assert main(argv) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["lr=0.1"], "optimizer.lr: is what a sweep varies, by --lrs; got 0.1"),
        (["--vary", "lr=1,2"], "optimizer.lr: is what a sweep varies"),
        (["--vary", "p"], "expected KEY=A,B,... such as p=2,4, got 'p'"),
        (["--vary", "p=[1"], "expected KEY=A,B,... such as p=2,4, got 'p=[1'"),
        (["--vary", "zzz=1"], "optimizer.zzz: adamw has no such option"),
        (["--lrs", "0"], "expected a finite number > 0, got '0'"),
        (["--lrs", "inf"], "expected a finite number > 0"),
        (["--workers", "0"], "expected an integer from 1 to 1000"),
        (["--seeds", "-1"], "--seeds"),
    ],
)
def test_sweeps_that_cannot_be(tmp_path, data, capsys, more, message):
    assert main(words("sweep", *more, "--optimizers", "adamw", data=data, out=tmp_path / "out")) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_brackets_in_options_are_no_markup(tmp_path, data, capsys):
    chosen = [
        "--optimizers",
        "{type: adamw, betas: [0.9, 0.99]}",
        "{type: dash, overrides: {heads: {algorithm: dash}}}",
    ]
    assert main(words("compare", "steps=2", *chosen, data=data, out=tmp_path)) == 0
    assert "betas=[0.9," in capsys.readouterr().out


def test_an_interrupted_comparison_stops_and_goes_on(tmp_path, data, monkeypatch, capsys):
    more = ["--optimizers", "sgd", "adamw", "{type: sgd, lr: 0.5}"]
    assert main(words("compare", *more, data=data, out=tmp_path / "whole")) == 0
    argv = words("compare", *more, data=data, out=tmp_path / "stopped")
    take_step, taken = Run.take_step, []

    def step(self):
        taken.append(self.step)
        if len(taken) == 20:  # in the second run
            signal.raise_signal(signal.SIGTERM)
        return take_step(self)

    monkeypatch.setattr(Run, "take_step", step)
    assert main(argv) == 130
    assert len(taken) == 20
    assert capsys.readouterr().err.endswith("the same command goes on\n")
    assert main(argv) == 0
    assert len(taken) == 3 * TINY["training"]["steps"]
    for name in folders(tmp_path / "whole"):
        assert computed(tmp_path / "stopped" / name) == computed(tmp_path / "whole" / name)


def test_a_contestant_without_a_name_is_refused():
    with pytest.raises(InputError, match="expected a type or a YAML mapping"):
        contestants(["5"], {})
