# SPDX-License-Identifier: Apache-2.0
"""The studies of the optimizer: their arithmetic against scipy and closed forms, and every arm of each as a job that can be run."""

from __future__ import annotations

import csv
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from training_jobs import text

from dash_optim.__main__ import main
from dash_optim.studies import _arms, better, blocks, compress, filters, grafting, staleness
from dash_optim.studies._arms import (
    QUICK,
    Arm,
    Settings,
    chance,
    cross_table,
    difference,
    loss_cells,
    shown_difference,
    slug,
)
from dash_optim.studies.better import loss_after, reached
from dash_optim.studies.compress import outliers, recorded_inputs, round_to_nearest
from dash_optim.training.data import Corpus, load_corpus
from dash_optim.training.loop import check, load_model
from dash_optim.training.model import Architecture, Llama
from dash_optim.training.outcome import Outcome
from dash_optim.training.run import Run
from dash_optim.training.settings import Job
from matroots._command import InputError


def outcome(loss=2.0, *, curve=(), diverged=False, seed=0, steps=10, seconds=1.0, name="dash"):
    return Outcome(
        name=name,
        seed=seed,
        parameters=1_000_000,
        step=steps,
        steps=steps,
        loss=math.nan if diverged else loss,
        curve=list(curve) or [(steps // 2, seconds / 2, loss + 1.0), (steps, seconds, loss)],
        seconds=seconds,
        tokens_per_second=1e3,
        ms={"forward": 1.0, "backward": 2.0, "optimizer": 3.0},
        optimizer_bytes=2**20,
        roots=0.1,
        diverged=diverged,
    )


# when a loss was reached


CURVE = [(10, 1.0, 4.0), (20, 3.0, 3.0), (40, 4.0, 3.5), (50, 8.0, 2.5)]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (5.0, (10, 1.0)),  # at the first look: it may have been before
        (4.0, (10, 1.0)),
        (3.75, (12.5, 1.5)),
        (3.0, (20, 3.0)),  # the first time, though the loss rises after it
        (2.75, (47.5, 7.0)),
        (2.5, (50, 8.0)),
    ],
)
def test_a_loss_is_reached_on_the_line_between_two_looks(target, expected):
    assert reached(outcome(curve=CURVE), target) == pytest.approx(expected)
    if target < 4.0:  # np.interp, on the piece of the curve that falls through it
        piece = CURVE[:2] if target >= 3.0 else CURVE[2:]
        steps, seconds, losses = (list(each)[::-1] for each in zip(*piece, strict=True))
        ours = reached(outcome(curve=CURVE), target)
        assert ours == pytest.approx((np.interp(target, losses, steps), np.interp(target, losses, seconds)))


def test_a_loss_that_is_never_reached_is_nan():
    assert all(math.isnan(each) for each in reached(outcome(curve=CURVE), 2.4))
    assert all(math.isnan(each) for each in reached(outcome(curve=[(5, 1.0, math.nan)]), 2.4))


@pytest.mark.parametrize("before", [math.inf, math.nan])
def test_there_is_no_line_from_an_infinite_loss(before):
    assert reached(outcome(curve=[(10, 1.0, before), (20, 2.0, 2.0)]), 2.5) == (20, 2.0)


@pytest.mark.parametrize(("seconds", "expected"), [(0.75, 2.5), (1.0, 2.0), (9.0, 2.0)])
def test_the_loss_after_a_time_is_on_the_line_between_two_looks(seconds, expected):
    assert loss_after(outcome(2.0), seconds) == pytest.approx(expected)
    assert loss_after(outcome(2.0, diverged=True), seconds) == math.inf


# differences


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=2, max_size=8))
def test_differences_are_paired(pairs):
    ours, theirs = zip(*pairs, strict=True)
    mean, error = difference([outcome(x) for x in ours], [outcome(x) for x in theirs])
    deltas = np.subtract(ours, theirs)
    assert mean == pytest.approx(deltas.mean(), abs=1e-12)
    assert error == pytest.approx(stats.sem(deltas), abs=1e-12)
    if error > 1e-6:
        assert mean / error == pytest.approx(stats.ttest_rel(ours, theirs).statistic, rel=1e-6)


def test_differences_of_one_seed_or_of_diverged_runs():
    one = difference([outcome(3.0)], [outcome(2.5)])
    assert one[0] == 0.5
    assert math.isnan(one[1])
    bad, good = [outcome(diverged=True), outcome(1.0)], [outcome(1.0), outcome(1.0)]
    for pair in ((bad, good), (good, bad), (bad, bad)):
        assert difference(*pair)[0] == math.inf
        assert shown_difference(*pair) == "-"
    assert shown_difference([outcome(3.0)], [outcome(2.5)]) == "+0.500"
    assert shown_difference([outcome(1.0), outcome(2.0)], [outcome(2.0), outcome(2.0)]) == "-0.500 ± 0.500"
    assert loss_cells(bad) == ("diverged / 1.000", "diverged")
    assert loss_cells(good, good) == ("1.000 / 1.000", "1.000", "+0.000 ± 0.000")


def test_tables_by_two_settings():
    groups = {
        "a": [outcome(1.0), outcome(3.0)],
        "b": [outcome(2.5)],
        "c": [outcome(diverged=True), outcome(1.0)],
    }
    cells = {("p=2", "x"): "a", ("p=4", "y"): "b", ("p=4", "x"): "c", ("p=2", "z"): "a"}
    table = cross_table("title", "p", groups, cells)
    assert table.columns == ("p", "x", "y", "z")
    assert table.rows == [("p=2", "2.000 ± 1.414", "", "2.000 ± 1.414"), ("p=4", "diverged", "2.500", "")]


# rounding and outliers


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([2, 3, 4, 6, 8]),
    st.integers(1, 6),
    st.integers(1, 40),
    st.sampled_from([1e-20, 1e-3, 1.0, 1e10]),
)
def test_rounding_is_to_the_nearest_of_equally_spaced_values(seed, bits, rows, columns, size):
    generator = torch.Generator().manual_seed(seed)
    W = size * torch.randn(rows, columns, generator=generator)
    W[:, 0] = 0.0
    W[0] = 0.0
    rounded = round_to_nearest(W, bits)
    steps = W.double().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((rounded.double() - W.double()).abs() <= 0.5 * steps * (1 + 1e-5)).all()
    assert (rounded[W == 0] == 0).all()
    levels = rounded.double() / steps.where(steps > 0, torch.ones_like(steps))
    torch.testing.assert_close(levels, levels.round(), atol=1e-4, rtol=0)
    assert all(len(row.unique()) <= 2**bits - 1 for row in rounded)
    torch.testing.assert_close(round_to_nearest(rounded, bits), rounded, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        rounded.abs().amax(1), W.abs().amax(1), rtol=1e-6, atol=0
    )  # nothing is clipped


def test_a_row_is_rounded_by_its_own_scale():
    W = torch.tensor([[7.0, 3.4, -0.4, 0.6], [-0.07, 0.02, 0.0, 0.0449]])
    expected = torch.tensor([[7.0, 3.0, 0.0, 1.0], [-0.07, 0.02, 0.0, 0.04]])
    torch.testing.assert_close(round_to_nearest(W, 4), expected)


@pytest.mark.parametrize(
    ("distribution", "kurtosis"),
    [(stats.norm, 3.0), (stats.uniform(-1, 2), 9 / 5), (stats.laplace, 6.0), (stats.logistic, 21 / 5)],
    ids=["normal", "uniform", "laplace", "logistic"],
)
def test_kurtosis_of_known_distributions(distribution, kurtosis):
    x = distribution.ppf((np.arange(1_000_000) + 0.5) / 1_000_000)
    found, ratio = outliers(torch.from_numpy(x).reshape(1000, 1000).float())
    assert found == pytest.approx(kurtosis, rel=5e-3)
    assert found == pytest.approx(stats.kurtosis(x, fisher=False), rel=1e-5)
    assert ratio == pytest.approx(np.abs(x).max() / x.std(), rel=1e-5)


def test_outliers_of_a_spike():
    x = torch.zeros(1000)
    x[17] = -5.0
    assert outliers(x) == pytest.approx((1000.0, math.sqrt(1000)))
    assert outliers(torch.tensor([1.0, -1.0])) == (1.0, 1.0)


# what goes into the layers


@pytest.fixture
def model():
    return Llama(Architecture(width=16, layers=2, heads=2, hidden=24, context=8), seed=0)


def test_recorded_inputs_are_those_of_the_linear_layers(model):
    windows = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), recorded_inputs(model) as found:
        model.loss(windows)
        model.loss(windows[:1])
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert set(found) == {id(module) for module in linear}
    first = model.layers[0]
    with torch.no_grad():
        x = first.attention_norm(model.embed(windows[:, :-1]))
    torch.testing.assert_close(found[id(first.attention.q)][0], x.flatten(0, 1))
    assert [each.shape for each in found[id(first.mlp.down)]] == [(24, 24), (8, 24)]


def test_hooks_are_removed_whatever_happens(model):
    def hooks():
        return sum(len(module._forward_pre_hooks) for module in model.modules())

    with recorded_inputs(model):
        assert hooks() == 2 * 7 + 1
    assert hooks() == 0
    with pytest.raises(RuntimeError, match="on the way"), recorded_inputs(model):
        raise RuntimeError("on the way")
    assert hooks() == 0


def test_the_loss_of_a_study_is_the_mean_over_windows(model):
    windows = torch.randint(256, (21, 9), generator=torch.Generator().manual_seed(0))  # 16 + 5
    with torch.no_grad():
        each = [model.loss(window[None]).item() for window in windows]
    assert compress._loss(model, windows) == pytest.approx(np.mean(each), rel=1e-6)


# settings of arms


def test_what_an_arm_is_about_cannot_be_overridden(tmp_path):
    arm = Arm("x", {"optimizer": {"type": "dash", "p": 4}})
    job = Settings(tmp_path, {"training": {"steps": 7}, "optimizer": {"block_size": 8}, "data": None}).job(
        arm, 3
    )
    assert (job.training.steps, job.training.seed) == (7, 3)
    assert job.optimizer == {"type": "dash", "p": 4, "block_size": 8}
    assert Settings(tmp_path, {"optimizer": {"p": 4}}).job(arm, 0).optimizer["p"] == 4
    for base in ({"optimizer": {"p": 2}}, {"optimizer": "adamw"}):
        with pytest.raises(InputError, match=r"optimizer\.\w+: is what this study sets, here to"):
            Settings(tmp_path, base).job(arm, 0)


def test_quick_is_what_nothing_else_says(tmp_path):
    quick = Settings(tmp_path, {"training": {"batch": 2}}, quick=True)
    job = quick.job(Arm("x", {"training": {"steps": 5}}), 0)
    assert (job.training.steps, job.training.batch, job.model.width) == (5, 2, 32)
    assert quick.job(Arm("x"), 0).training.steps == 12


# all arms of all studies


class Recorded:
    """Takes the place of runs: keeps the jobs, and makes outcomes up."""

    def __init__(self, diverging=()):
        self.jobs: dict[str, Job] = {}
        self.diverging = diverging

    def __call__(self, groups, out, *, workers, quiet):
        found = defaultdict(list)
        for label, members in groups.items():
            for folder, job in members.items():
                key = f"{out.name}/{folder}"
                assert self.jobs.setdefault(key, job) == job, f"{key} is the folder of two jobs"
                bad = any(word in label for word in self.diverging)
                loss = 2.0 + len(self.jobs) % 7 / 10
                made = outcome(loss, diverged=bad, seed=job.training.seed, steps=job.training.steps)
                found[label].append(made)
        return dict(found)


@pytest.fixture
def recorded(monkeypatch):
    made = Recorded()
    monkeypatch.setattr(_arms, "run_groups", made)
    return made


@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
@pytest.mark.parametrize(
    "study", [better, filters, staleness, blocks, grafting, compress], ids=lambda m: m.__name__
)
def test_every_arm_is_a_job_that_can_be_run(tmp_path, recorded, monkeypatch, study, quick):
    if study is grafting:
        monkeypatch.setattr(grafting, "_coefficients", lambda *_: {"up": ([4.0, 8.0], [1.5, 0.5])})
    if study is compress:
        keys = [f"int{b}" for b in compress.BITS]
        keys += [
            f"{k}_{m}{e}"
            for k in ("weight", "activation")
            for m in ("kurtosis", "max_over_rms")
            for e in ("", "_largest")
        ]
        monkeypatch.setattr(compress, "measure", lambda *_: dict.fromkeys(keys, 0.5))
    report = study.run(Settings(tmp_path, {}, (0, 1), quick=quick))
    assert all(len(row) == len(table.columns) for table in report.tables for row in table.rows)
    assert {job.training.seed for job in recorded.jobs.values()} == {0, 1}
    assert report.data[report.name]
    report.plots[0].figure.savefig(tmp_path / "figure.png")
    corpus = tiny_corpus()
    for job in {repr(job.optimizer): job for job in recorded.jobs.values()}.values():
        check(job, corpus)
        small = job.with_values(model=QUICK["model"], training={"batch": 2, "device": "cpu"})
        run = Run(small, corpus, torch.device("cpu"))
        assert run.take_step()["loss"] == pytest.approx(math.log(256), rel=0.05)
        assert not run.given_up


def tiny_corpus():
    tokens = np.random.RandomState(0).randint(0, 256, 4000).astype(np.uint8)
    return Corpus(tokens[:3000], tokens[3000:], 256, "noise", "0" * 16)


def test_studies_show_runs_that_diverged(tmp_path, monkeypatch):
    for study, word in ((better, "muon"), (filters, "p=1"), (staleness, "every 30"), (blocks, "bf16")):
        monkeypatch.setattr(_arms, "run_groups", Recorded((word,)))
        report = study.run(Settings(tmp_path, {}, (0, 1)))
        assert any("diverged" in cell for table in report.tables for row in table.rows for cell in row)
        report.plots[0].figure.savefig(tmp_path / "figure.png")


def test_steps_of_better_are_the_whole_run_and_a_share_of_it(tmp_path, recorded):
    better.run(Settings(tmp_path, {"training": {"steps": 50}}, (0,)))
    steps = defaultdict(set)
    for folder, job in recorded.jobs.items():
        if folder.startswith("timed/"):
            steps[job.optimizer["type"]].add(job.training.steps)
    assert steps.keys() >= {"dash", "adamw", "muon"}
    assert all(each == {50, 20} for each in steps.values())
    swept = [job for folder, job in recorded.jobs.items() if folder.startswith("sweep/dash-")]
    assert sorted((job.training.steps, job.optimizer["lr"]) for job in swept) == [
        (steps, rate) for steps in (20, 50) for rate in better.RATES["dash"]
    ]


def test_what_the_answer_hangs_on_is_swept_with_every_seed(tmp_path, recorded):
    better.run(Settings(tmp_path, {"training": {"steps": 50}}, (0, 1)))
    seeds = defaultdict(set)
    for folder, job in recorded.jobs.items():
        if folder.startswith("sweep/"):
            seeds[job.optimizer["type"], job.training.steps].add(job.training.seed)
    assert {key for key, found in seeds.items() if found == {0, 1}} == {("adamw", 50), ("dash", 20)}
    assert all(0 in found for found in seeds.values())


def test_chance_is_students_t():
    assert "from 12.7 of them" in chance((0, 1))  # 1 degree of freedom: tan(0.475 pi)
    assert "from 4.3 of them" in chance((0, 1, 2))  # 2 degrees: 0.95 sqrt(2 / (1 - 0.95^2))
    assert "One seed" in chance((7,))


def test_peers_that_are_not_installed_are_named(tmp_path, recorded):
    report = better.run(Settings(tmp_path, {}, (0,)))
    note = report.notes[-1]
    has_peers = any(job.optimizer["type"] == "soap" for job in recorded.jobs.values())
    assert ("left out" in note) is not has_peers


# by command


def test_a_study_by_command(tmp_path, capsys):
    """The cheapest that also loads its models again: nothing is run twice, and the table holds what the models say."""
    data = text(tmp_path / "words.txt")
    argv = ["study", "compress", "--quick", "training.steps=6", "--seeds", "0", "1", "--data", str(data)]
    argv += ["--out", str(tmp_path / "out")]
    assert main(argv) == 0
    err = capsys.readouterr().err
    assert err.count(": step 6 of 6: held out ") == 4
    with (tmp_path / "out" / "compress_measures.csv").open() as stream:
        measures = list(csv.DictReader(stream))
    assert [(row["arm"], row["seed"]) for row in measures] == [
        (a, s) for a in ("adamw", "dash") for s in "01"
    ]
    corpus = load_corpus(str(data))
    for row in measures:
        folder = tmp_path / "out" / "compress" / row["arm"] / f"seed{row['seed']}"
        job, _, model = load_model(folder)
        assert job.optimizer["weight_decay"] == 0.1
        windows = corpus.validation(context=32, most=64)
        with torch.no_grad():
            whole = model.loss(windows).item()
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    top = module.weight.abs().amax(1, keepdim=True)
                    module.weight.copy_((module.weight / top * 127).round() / 127 * top)
            rounded = model.loss(windows).item()
        assert float(row["loss"]) == pytest.approx(whole, rel=1e-5)
        assert float(row["int8"]) == pytest.approx(rounded - whole, abs=2e-5)
        assert Outcome.read(folder).loss == pytest.approx(whole, rel=0.05)
    assert main(argv) == 0
    assert ": step " not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["bettr"], "expected a study (better, "),
        (["staleness", "p=4"], "optimizer.p: is what this study sets, here to 2; got 4"),
        (["staleness", "training.seed=3"], "training.seed: studies take several, by --seeds"),
        (["staleness", "stepz=3"], "optimizer.stepz: dash has no such option"),
        (["staleness", "heads=5"], "model.heads: expected width / heads"),
    ],
)
def test_studies_that_cannot_be(tmp_path, capsys, more, message):
    argv = [
        "study",
        *more,
        "--quick",
        "--data",
        str(text(tmp_path / "words.txt")),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_names_of_folders():
    assert slug("dash, p=4") == "dash-p=4"
    assert slug("p=8/3, rel_damping=1e-06") == "p=8-3-rel_damping=1e-06"
