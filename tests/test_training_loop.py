# SPDX-License-Identifier: Apache-2.0
"""Training jobs: what a step computes, against loops written out here; what is left by kills, signals, and settings that cannot be."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from training_jobs import Child, command, computed, is_time, lines, text, tiny, until, words

from dash_optim import DASH, PreconditionerError
from dash_optim.__main__ import main
from dash_optim.training import checkpoint, loop
from dash_optim.training.checkpoint import CheckpointWarning, exclusive, latest
from dash_optim.training.data import load_corpus
from dash_optim.training.loop import load_model, train
from dash_optim.training.metrics import read
from dash_optim.training.model import Llama
from dash_optim.training.outcome import Outcome, perplexity
from dash_optim.training.run import PATIENCE, Run
from dash_optim.training.settings import Training
from matroots._command import InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch):
    """What a killed process has written stays; only a machine that dies needs more, and that takes time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return text(tmp_path_factory.mktemp("text") / "words.txt")


def column(folder, name):
    return [record[name] for record in read(folder)]


# what a step computes


def by_hand(job, corpus, optimizer, rate):
    """The loop without accumulation, clipping at 1, in fp32: losses and the model."""
    model = Llama(job.model.architecture(corpus.vocab), job.training.seed)
    made = optimizer(model)
    losses, norms = [], []
    for step in range(1, job.training.steps + 1):
        windows = corpus.batch(step, batch=job.training.batch, context=16, seed=job.training.seed)
        logits = model(windows[:, :-1])
        loss = cross_entropy(logits.reshape(-1, corpus.vocab), windows[:, 1:].reshape(-1))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).double().norm()
        for param, gradient in zip(model.parameters(), gradients, strict=True):
            param.grad = gradient * min(1.0, float(1 / norm))
        for group in made.param_groups:
            group["lr"] = rate(step)
        made.step()
        losses.append(loss.item())
        norms.append(float(norm))
    return losses, norms, model


def test_a_run_is_the_loop_that_one_would_write(tmp_path, data):
    job = tiny(data, optimizer={"type": "adamw", "lr": 0.02, "weight_decay": 0.1}, training={"seed": 3})
    outcome = train(job, tmp_path / "run", quiet=True)
    corpus = load_corpus(str(data))

    def adamw(model):
        kinds = [[p for p in model.parameters() if (p.ndim == 2) is matrix] for matrix in (True, False)]
        groups = [{"params": params, "weight_decay": d} for params, d in zip(kinds, (0.1, 0.0), strict=True)]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def cosine(step):  # warm-up of a tenth of 12 steps is one step
        return 0.02 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 1) / 11)))

    losses, norms, model = by_hand(job, corpus, adamw, cosine)
    assert column(tmp_path / "run", "loss") == pytest.approx(losses, rel=1e-5)
    assert column(tmp_path / "run", "gradient_norm") == pytest.approx(norms, rel=1e-4)
    assert column(tmp_path / "run", "rate") == pytest.approx([cosine(step) for step in range(1, 13)])
    assert losses[-1] < losses[0] - 0.5  # it has learnt something, so the steps count
    _, _, trained = load_model(tmp_path / "run")
    for ours, theirs in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)

    held = corpus.validation(context=16)
    with torch.no_grad():
        each = [model.loss(window[None]).item() for window in held]
    assert outcome.loss == pytest.approx(np.mean(each), rel=1e-4)
    assert [step for step, _, _ in outcome.curve] == [5, 10, 12]
    assert outcome.parameters == sum(p.numel() for p in model.parameters())
    assert perplexity(outcome.loss) == pytest.approx(math.exp(np.mean(each)), rel=1e-3)


@pytest.mark.parametrize(
    ("options", "schedule", "expected"),
    [
        ("dash", {}, 0.1 + 0.45 * (1 + math.cos(math.pi / 40))),  # a cosine from the first step on
        ("muon", {}, 0.1 + 0.45 * (1 + math.cos(math.pi / 40))),
        ("adamw", {}, 0.25),
        ("sgd", {"type": "constant"}, 0.25),
        ("dash", {"warmup": 0.1}, 0.25),
        ("adamw", {"warmup": 0}, 0.1 + 0.45 * (1 + math.cos(math.pi / 40))),
    ],
)
def test_a_job_warms_up_as_suits_its_optimizer_unless_told_otherwise(data, options, schedule, expected):
    job = tiny(data, optimizer={"type": options, "lr": 0.25}, schedule=schedule, training={"steps": 40})
    run = Run(job, load_corpus(str(data)), torch.device("cpu"))
    assert run.take_step()["rate"] == pytest.approx(0.25 * expected)


def test_looks_in_between_take_as_many_windows_as_asked_for(tmp_path, data):
    job = tiny(data, logging={"validation_windows": 3}, training={"batch": 2})
    corpus = load_corpus(str(data))
    run = Run(job, corpus, torch.device("cpu"))
    with torch.no_grad():
        each = [run.model.loss(w[None]).item() for w in corpus.validation(context=16, most=3)]
    assert run.look()["validation_loss"] == pytest.approx(np.mean(each), rel=1e-6)  # 2 + 1 windows


def test_accumulated_batches_are_the_large_batch(tmp_path, data):
    results = []
    for batch, accumulate in ((8, 1), (2, 4)):
        sizes = {"batch": batch, "accumulate": accumulate}
        folder = tmp_path / f"{batch}"
        train(tiny(data, optimizer={"type": "sgd", "lr": 0.5}, training=sizes), folder, quiet=True)
        results.append((column(folder, "loss"), load_model(folder)[2]))
    (losses, large), (others, small) = results
    assert losses == pytest.approx(others, rel=1e-5)
    for a, b in zip(large.parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("clip", [0.0, 1e-3, 1e3])
def test_gradients_are_clipped_as_a_whole_or_left_alone(tmp_path, data, clip):
    job = tiny(
        data,
        optimizer={"type": "sgd", "lr": 0.25},
        training={"clip": clip, "steps": 1},
        schedule={"type": "constant", "warmup": 0},
    )
    train(job, tmp_path, quiet=True)
    corpus = load_corpus(str(data))
    before = Llama(job.model.architecture(256), 0)
    before.loss(corpus.batch(1, batch=4, context=16, seed=0)).backward()
    gradient = torch.cat([p.grad.flatten() for p in before.parameters()])
    after = load_model(tmp_path)[2]
    moved = torch.cat(
        [(a - b).flatten() for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    )
    norm = float(gradient.double().norm())
    expected = 0.25 * gradient * (clip / norm if 0 < clip < norm else 1.0)
    torch.testing.assert_close(moved, expected, rtol=2e-3, atol=1e-7)
    assert column(tmp_path, "gradient_norm")[0] == pytest.approx(norm, rel=1e-4)


def test_an_infinite_gradient_is_left_as_it_is_without_clipping(data):
    run = Run(tiny(data, training={"clip": 0.0}), load_corpus(str(data)), torch.device("cpu"))
    for param in run.model.parameters():
        param.grad = torch.ones_like(param)
    run.model.embed.weight.grad[0, 0] = math.inf
    assert run._clip() == math.inf
    assert (run.model.layers[0].mlp.up.weight.grad == 1).all()


def test_bfloat16_computes_in_bfloat16_and_keeps_its_weights(tmp_path, data):
    losses = {}
    for precision in ("float32", "bfloat16"):
        train(tiny(data, training={"precision": precision}), tmp_path / precision, quiet=True)
        losses[precision] = column(tmp_path / precision, "loss")
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=2e-2)
    assert losses["bfloat16"] != pytest.approx(losses["float32"], rel=1e-6)
    assert {p.dtype for p in load_model(tmp_path / "bfloat16")[2].parameters()} == {torch.float32}


def test_a_tied_head_is_the_embedding(tmp_path, data):
    job = tiny(data, model={"tied": True}, optimizer={"adamw_lr": 0.01})
    outcome = train(job, tmp_path / "tied", quiet=True)
    other = train(tiny(data), tmp_path / "not", quiet=True)
    assert other.parameters - outcome.parameters == 256 * 16
    assert outcome.loss < 5.0 < math.log(256)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning"
)  # torch's own, when it loads its compiler
def test_a_compiled_model_computes_the_same(tmp_path, data):
    for compiled in (False, True):
        train(tiny(data, training={"compile": compiled}), tmp_path / str(compiled), quiet=True)
    assert column(tmp_path / "True", "loss") == pytest.approx(column(tmp_path / "False", "loss"), rel=1e-3)
    assert (
        max(column(tmp_path / "True", "forward_ms")) < 1e3
    )  # compiled before the clock runs: that takes seconds


def test_times_add_up_and_are_means(tmp_path, data):
    outcome = train(tiny(data, training={"steps": 30}), tmp_path, quiet=True)
    records = read(tmp_path)
    for part in ("forward", "backward", "optimizer"):
        assert outcome.ms[part] == pytest.approx(np.mean([r[f"{part}_ms"] for r in records]))
        assert outcome.ms[part] > 0
    assert sum(outcome.ms.values()) / 1e3 * 30 <= outcome.seconds
    took = np.diff([0.0, *(r["seconds"] for r in records)])
    parts = [sum(r[f"{part}_ms"] for part in ("forward", "backward", "optimizer")) / 1e3 for r in records]
    assert all(part <= whole for part, whole in zip(parts, took, strict=True))
    assert records[-1]["seconds"] == outcome.seconds
    assert outcome.tokens_per_second == pytest.approx(30 * 4 * 16 / outcome.seconds)
    assert [r["tokens_per_second"] for r in records] == pytest.approx(4 * 16 / took)


def test_roots_are_counted_by_factor_and_step(tmp_path, data):
    def roots(young):
        options = {"refresh_young": young, "refresh": "interval"}
        job = tiny(data, training={"steps": 10}, optimizer=options)
        return train(job, tmp_path / f"{young}", quiet=True).roots

    assert roots(False) == pytest.approx(3 / 10)  # in steps 1, 5 and 9
    assert roots(True) == pytest.approx(8 / 10)  # in steps 1 to 7 and 9
    assert train(tiny(data, optimizer={"type": "adamw"}), tmp_path / "a", quiet=True).roots is None


def test_rates_of_groups_keep_their_ratio(tmp_path, data):
    options = {"lr": 0.01, "overrides": {"heads": {"lr": 0.001}}}
    run = Run(tiny(data, optimizer=options), load_corpus(str(data)), torch.device("cpu"))
    assert run.optimizers.set_rate(0.5) == 0.005
    rates = {group["name"]: group["lr"] for group in run.optimizers.dash.param_groups}
    assert rates == {"matrices": 0.005, "embeddings": 0.00125, "heads": 0.0005, "vectors": 0.00125}


def test_diagnostics_join_the_metrics(tmp_path, data):
    train(tiny(data, logging={"diagnostics": True}), tmp_path, quiet=True)
    looks = [record for record in read(tmp_path) if "validation_loss" in record]
    assert [record["step"] for record in looks] == [5, 10, 12]
    for record in looks:
        assert record["dash/failures"] == 0
        assert record["grafting/layers.0.mlp.up.weight"] > 0


# a run that was killed


DASHES = {
    "calendar": {},
    "staggered": {"refresh": "staggered", "update_freq": 5},
    "certified": {"refresh": "certified", "refresh_tol": 3.0, "rel_damping": 1e-4},
}


def settings_of(kind):
    return [f"optimizer.{key}={value}" for key, value in DASHES[kind].items()]


def die_in_step(number):
    """Be killed between the optimizer's step and its record."""

    def before():
        take_step = Run.take_step

        def step(self):
            record = take_step(self)
            if self.step == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return record

        Run.take_step = step

    return before


def die_in_look(number):
    def before():
        look = Run.look

        def dying(self):
            if self.step == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return look(self)

        Run.look = dying

    return before


def die_in_checkpoint(number):
    """Be killed when the file of a checkpoint is half written."""

    def before():
        seal = checkpoint._seal

        def dying(stream, step):
            if step == number:
                stream.truncate(stream.seek(0, 2) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return seal(stream, step)

        checkpoint._seal = dying

    return before


@pytest.mark.parametrize("kind", DASHES)
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(tmp_path, data, kind):
    undisturbed = words("train", *settings_of(kind), data=data, out=tmp_path / "whole")
    assert main(undisturbed) == 0
    argv = words("train", *settings_of(kind), data=data, out=tmp_path / "killed")
    for death in (die_in_step(3), die_in_look(5), die_in_step(7), die_in_checkpoint(10), die_in_look(12)):
        assert command(argv, tmp_path / "log", before=death).wait() == -signal.SIGKILL
    assert main(argv) == 0
    assert computed(tmp_path / "killed") == computed(tmp_path / "whole")
    assert column(tmp_path / "killed", "step") == list(range(1, 13))
    ours, theirs = Outcome.read(tmp_path / "killed"), Outcome.read(tmp_path / "whole")
    assert (ours.loss, ours.roots, ours.step) == (theirs.loss, theirs.roots, theirs.step)
    assert not list((tmp_path / "killed").glob(".*.partial"))
    assert main(argv) == 0  # nothing is left to do


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["staggered", "certified"])
def test_twenty_kills_at_random_moments(tmp_path, data, kind):
    more = ["steps=300", "checkpoint_every=3", "validate_every=10", *settings_of(kind)]
    assert command(words("train", *more, data=data, out=tmp_path / "whole"), tmp_path / "log").wait() == 0
    folder = tmp_path / "killed"
    argv = words("train", *more, data=data, out=folder)
    chance, places = random.Random(0), set()
    for _ in range(20):
        before = lines(folder)
        child = command(argv, tmp_path / "log")
        if chance.random() < 0.8:  # else wherever it is, also before the first step
            until(lambda before=before: lines(folder) not in (before, before // 3 * 3))
        time.sleep(chance.uniform(0, 0.25))
        assert child.alive()
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        places.add(lines(folder))
    assert len(places) >= 10
    assert main(argv) == 0
    assert computed(folder) == computed(tmp_path / "whole")
    assert column(folder, "step") == list(range(1, 301))


@pytest.mark.parametrize("change", ["truncated", "altered", "removed"])
def test_the_checkpoint_before_a_damaged_one_is_used(tmp_path, data, change):
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    assert main(words("train", data=data, out=whole)) == 0
    argv = words("train", data=data, out=damaged)
    assert command(argv, tmp_path / "log", before=die_in_step(11)).wait() == -signal.SIGKILL
    newest = damaged / "step-00000010.pt"
    content = bytearray(newest.read_bytes())
    if change == "removed":
        newest.unlink()
    else:
        content[len(content) // 2] ^= 1
        newest.write_bytes(content[: len(content) // 2] if change == "truncated" else content)
    with pytest.warns(CheckpointWarning, match="step-00000010.pt .*; step-00000005.pt is used"):
        assert main(argv) == 0
    assert computed(damaged) == computed(whole)


# signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_a_summary(tmp_path, data, number):
    more = ["steps=60", "checkpoint_every=1000", "validate_every=1000"]
    assert main(words("train", *more, data=data, out=tmp_path / "whole")) == 0
    argv, folder = words("train", *more, data=data, out=tmp_path / "run"), tmp_path / "run"
    child = command(argv, tmp_path / "log")
    until(lambda: lines(folder) >= 3)
    child.signal(number)
    assert child.wait() == 130
    log = (tmp_path / "log").read_text()
    step = latest(folder)[0]
    assert 3 <= step < 60
    assert f"{step} of 60, stopped" in log
    assert log.endswith(
        "dash_optim: interrupted; what was done is kept, up to the last checkpoint of each run; the same command goes on\n"
    )
    stopped = Outcome.read(folder)
    assert (stopped.step, stopped.finished, lines(folder)) == (step, False, step)
    assert math.isnan(stopped.loss)
    assert main(argv) == 0
    assert computed(folder) == computed(tmp_path / "whole")


def test_a_second_ctrl_c_ends_at_once_without_damage(tmp_path, data):
    assert main(words("train", data=data, out=tmp_path / "whole")) == 0
    argv, mark = words("train", data=data, out=tmp_path / "run"), tmp_path / "mark"

    def hang():
        optimize = Run._optimize

        def hanging(self):
            optimize(self)
            if self.step == 8:
                mark.touch()
                until(lambda: False, seconds=50)

        Run._optimize = hanging

    child = command(argv, tmp_path / "log", before=hang)
    until(mark.exists)
    child.signal(signal.SIGINT)
    time.sleep(0.2)
    assert child.alive()  # the step is still under way
    child.signal(signal.SIGINT)
    assert child.wait(5) == 130
    assert latest(tmp_path / "run")[0] == 5
    assert not (tmp_path / "run" / "result.json").exists()
    assert not list((tmp_path / "run").glob(".*.partial"))
    assert main(argv) == 0
    assert computed(tmp_path / "run") == computed(tmp_path / "whole")


def test_a_signal_in_the_last_step_is_not_forgotten(tmp_path, data, monkeypatch):
    """Or a sweep would go on with the next run."""
    look = Run.look

    def signalled(self):
        if self.step == 12:
            signal.raise_signal(signal.SIGINT)
        return look(self)

    monkeypatch.setattr(Run, "look", signalled)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(data), tmp_path, quiet=True)
    assert Outcome.read(tmp_path).finished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_while_data_are_read_is_an_interrupt(tmp_path, data, monkeypatch, capsys):
    monkeypatch.setattr(loop, "load_corpus", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    assert main(words("train", data=data, out=tmp_path / "run")) == 130
    assert capsys.readouterr().err.startswith("dash_optim: interrupted; ")
    assert not (tmp_path / "run").exists()


def test_a_process_of_its_own(tmp_path, data):
    """The command as it is typed: results on stdout, progress on stderr, Ctrl-C."""
    argv = words("train", "steps=100000", "validate_every=10", data=data, out=tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-m", "dash_optim", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: lines(tmp_path / "run") >= 15)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    *progress, last = err.splitlines()
    assert last.startswith("dash_optim: interrupted; ")
    assert progress
    assert all(": step " in line and ", held out " in line for line in progress)
    assert "of 100000, stopped" in out
    assert "Traceback" not in err


def test_a_result_is_not_older_than_its_run(tmp_path, data):
    argv, folder = words("train", data=data, out=tmp_path / "run"), tmp_path / "run"

    def stopped():
        take_step = Run.take_step

        def step(self):
            signal.raise_signal(signal.SIGINT)
            return take_step(self)

        Run.take_step = step

    assert command(argv, tmp_path / "log", before=stopped).wait() == 130
    assert Outcome.read(folder).step == 1
    (folder / ".job.json.99999999.partial").write_text("{")  # as a kill leaves it
    assert command(argv, tmp_path / "log", before=die_in_step(8)).wait() == -signal.SIGKILL
    assert Outcome.read(folder) is None
    assert not list(folder.glob(".*.partial"))


# which runs may go on


def test_other_settings_are_refused_and_named(tmp_path, data, capsys):
    argv = words("train", data=data, out=tmp_path)
    assert main(argv) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert main([*argv, "seed=1", "p=2", "width=32"]) == 2
    error = capsys.readouterr().err
    for part in (
        "training.seed: 0 then, 1 now",
        "optimizer.p: None then, 2 now",
        "model.width: 16 then, 32 now",
    ):
        assert part in error
    assert error.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert main([*argv, "threads=1", "device=auto", "validate_every=2", "diagnostics=true"]) == 0


def test_logging_and_threads_may_change_in_the_course_of_a_run(tmp_path, data):
    assert main(words("train", data=data, out=tmp_path / "whole")) == 0
    argv = words("train", data=data, out=tmp_path / "run")
    assert command(argv, tmp_path / "log", before=die_in_step(8)).wait() == -signal.SIGKILL
    assert main([*argv, "training.threads=1", "logging.validate_every=3", "checkpoint_every=1"]) == 0
    ours, theirs = computed(tmp_path / "run"), computed(tmp_path / "whole")
    assert {k: v for k, v in ours.items() if k.startswith("/")} == {
        k: v for k, v in theirs.items() if k.startswith("/")
    }
    assert [step for step, _, _ in Outcome.read(tmp_path / "run").curve] == [5, 6, 9, 12]


@pytest.mark.parametrize("ended", [True, False])
def test_changed_data_are_refused(tmp_path, capsys, ended):
    data = text(tmp_path / "words.txt")
    argv = words("train", data=data, out=tmp_path / "run")
    death = (lambda: None) if ended else die_in_step(8)
    assert command(argv, tmp_path / "log", before=death).wait() == (0 if ended else -signal.SIGKILL)
    text(data, seed=1)
    capsys.readouterr()
    assert main(argv) == 2
    assert "words.txt is not what the run was started on, or has changed" in capsys.readouterr().err
    with pytest.raises(InputError, match="has changed"):
        load_model(tmp_path / "run")
    assert main([*argv, "--fresh"]) == 0


def test_fresh_starts_over_and_deletes_what_a_run_left_alone(tmp_path, data, capsys):
    folder = tmp_path / "run"
    argv = words("train", data=data, out=folder)
    assert main(argv) == 0
    (folder / "notes.txt").write_text("mine")
    (folder / "sub").mkdir()
    (folder / "step-1.pt").write_text("mine too")
    assert main([*argv, "seed=1", "--fresh"]) == 0
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "step-1.pt").read_text() == "mine too"
    assert main(words("train", "seed=1", data=data, out=tmp_path / "other")) == 0
    assert computed(folder) == computed(tmp_path / "other")
    # nothing is thrown away for a job that cannot be
    before = (folder / "result.json").read_bytes()
    assert main([*argv, "--fresh", "blok_size=3"]) == 2
    with exclusive(folder):
        assert main([*argv, "--fresh"]) == 2
    assert "in use by process" in capsys.readouterr().err
    assert (folder / "result.json").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("job.json", '{"name": "a job of another program"}'),
        ("job.json", "[1]"),
        ("job.json", "{"),
        ("metrics.csv", "mine"),
        ("metrics.jsonl", '{"step": 3}\n'),
        ("result.json", "{}"),
    ],
)
@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_the_files_of_others_are_neither_deleted_nor_overwritten(
    tmp_path, data, capsys, name, content, fresh
):
    (tmp_path / name).write_text(content)
    (tmp_path / "thesis.txt").write_text("mine")
    assert main([*words("train", data=data, out=tmp_path), *fresh]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / name).read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock") == [name, "thesis.txt"]


# runs that are given up


def test_a_loss_that_stays_infinite_ends_the_run(tmp_path, data, capsys):
    more = ["optimizer={type: sgd, lr: 1e30}", "steps=50", "clip=0"]
    assert main(words("train", *more, data=data, out=tmp_path)) == 0
    outcome = Outcome.read(tmp_path)
    assert (outcome.diverged, outcome.finished) == (True, True)
    assert math.isnan(outcome.loss)
    bad = [not math.isfinite(loss) for loss in column(tmp_path, "loss")]
    assert bad[-PATIENCE:] == [True] * PATIENCE
    assert outcome.step == len(bad) == bad.index(True) + PATIENCE < 50
    assert "given up: no finite loss in 10 steps" in capsys.readouterr().out
    json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)  # strict JSON
    assert main(words("train", *more, data=data, out=tmp_path)) == 0
    assert len(read(tmp_path)) == outcome.step


def test_a_run_too_short_to_be_given_up_has_diverged_too(tmp_path, data):
    job = tiny(data, optimizer={"type": "sgd", "lr": 1e30}, training={"steps": 4, "clip": 0.0})
    outcome = train(job, tmp_path, quiet=True)
    assert (outcome.step, outcome.diverged) == (4, True)
    assert math.isnan(outcome.loss)
    assert outcome.reason == "the last loss is not finite"


def test_a_finite_loss_starts_the_count_again(tmp_path, data, monkeypatch):
    infinite, loss, calls = {1, 2, 3, 4, 5, 6, 7, 8, 9, 11}, Llama.loss, []

    def sometimes_infinite(self, windows):
        value = loss(self, windows)
        calls.extend([1] * torch.is_grad_enabled())
        return value * math.inf if torch.is_grad_enabled() and len(calls) - 1 in infinite else value

    monkeypatch.setattr(Llama, "loss", sometimes_infinite)  # its first call is that of the trial step
    outcome = train(tiny(data), tmp_path, quiet=True)
    assert {record["step"] for record in read(tmp_path) if math.isinf(record["loss"])} == infinite
    assert (outcome.step, outcome.diverged) == (12, False)


def test_an_optimizer_that_refuses_to_go_on_ends_the_run(tmp_path, data, monkeypatch):
    def budget(self, stacks):
        if self.param_groups[0]["lr"] < 0.008:  # late in the schedule
            raise PreconditionerError("layers.0: root failed\nfour times")

    monkeypatch.setattr(DASH, "_check_budget", budget)
    outcome = train(tiny(data), tmp_path, quiet=True)
    rates = column(tmp_path, "rate")
    assert outcome.step == len(rates) < 12
    assert rates[-1] < 0.008 <= rates[-2]
    assert (outcome.diverged, outcome.reason) == (True, "layers.0: root failed four times")
    assert train(tiny(data), tmp_path, quiet=True) == outcome


# data


def tokens(path, count, vocab, seed=0):
    chain = np.random.RandomState(seed).randint(0, vocab, count)
    chain[1::2] = (chain[::2] * 7 + 3)[: len(chain[1::2])] % vocab
    chain.astype("<u2").tofile(path)


def test_token_files_with_a_large_vocabulary(tmp_path):
    folder = tmp_path / "tokens"
    folder.mkdir()
    tokens(folder / "train.bin", 20_000, 1000)
    tokens(folder / "val.bin", 2_000, 1000, seed=1)
    assert main(words("train", "data.vocab=1000", "lr=0.05", data=folder, out=tmp_path / "run")) == 0
    outcome = Outcome.read(tmp_path / "run")
    assert outcome.parameters == 2 * 1000 * 16 + 4 * 16 * 16 + 3 * 16 * 24 + 3 * 16
    assert outcome.loss == pytest.approx(math.log(1000), abs=0.5)
    assert main(words("train", "model.vocab=999", "data.vocab=1000", data=folder, out=tmp_path / "no")) == 2
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_token_that_cannot_be_is_found_before_the_first_step(tmp_path, capsys, part):
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name in ("train", "val"):
        tokens(folder / f"{name}.bin", 4_000, 500)
    with (folder / f"{part}.bin").open("r+b") as stream:
        stream.seek(5_001 // 2 * 2)
        stream.write(b"\xf4\x01")  # 500
    assert main(words("train", "data.vocab=500", data=folder, out=tmp_path / "run")) == 2
    assert f"{part}.bin: holds token 500, expected less than vocab, 500" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_file_names_that_are_no_text(tmp_path):
    path = tmp_path / os.fsdecode(b"bad\xff.txt")
    try:
        text(path)
    except OSError:
        pytest.skip("the file system takes no such name")
    assert main(words("train", data=path, out=tmp_path / "run")) == 0
    assert main(words("train", data=path, out=tmp_path / "run")) == 0  # the settings are found again


def test_text_files_folders_and_the_default(tmp_path, capsys):
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    for number in range(3):
        text(folder / "below" / f"{number}.txt", 800, seed=number)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\1")
    assert main(words("train", data=folder, out=tmp_path / "a")) == 0
    out = capsys.readouterr().out
    assert "picture.png: left out" in out
    argv = words("train", data=folder / "below" / "0.txt", out=tmp_path / "b")
    argv.insert(argv.index("--out"), str(folder / "below" / "1.txt"))  # a second file
    assert main(argv) == 0
    assert main([*words("train", data=folder, out=tmp_path / "c")[:-4], "--out", str(tmp_path / "c")]) == 0
    assert "Python's help topics: " in capsys.readouterr().out


# what cannot be


BAD = [
    (["training.step=3"], "training.step: no such key; did you mean 'steps'?"),
    (["optimizer.blok_size=3"], "did you mean 'block_size'?"),
    (["steps=.inf"], "training.steps: expected an integer, got inf"),
    (["steps=.nan"], "training.steps: expected an integer, got nan"),
    (["steps=1e99x"], "training.steps: expected an integer"),
    (["optimizer.type=[1]"], "optimizer.type: expected one of"),
    (["optimizer={type: adamw, betas: [0.9]}"], "optimizer"),
    (["optimizer={type: adamw, betas: 3}"], "optimizer"),
    (["optimizer={type: adamw, lr: much}"], "optimizer"),
    (["optimizer={type: adam, amsgrad: 3}"], "optimizer: "),  # which torch finds in the first step
    (["optimizer={type: muon, ns_steps: many}"], "optimizer: "),
    (["optimizer={type: sgd, differentiable: true}"], "optimizer: "),
    (["optimizer.eps=2024-01-01"], "optimizer.eps: expected numbers, strings"),
    (["lr=-1"], "optimizer.lr: expected a finite number >= 0"),
    (["lr=null"], "optimizer.lr: expected a real number, got NoneType"),
    (["stps=3"], "optimizer.stps: dash has no such option; did you mean 'training.steps'?"),
    (["warmpu=3"], "did you mean 'schedule.warmup'?"),
    (["optimizer={type: muon, momentum: x}"], "momentum='x'"),
    (["overrides=5"], "optimizer.overrides: expected a mapping, got 5"),
    (["weight_decay=.nan"], "optimizer.weight_decay: expected a number, got nan"),
    (["threads=100000"], "training.threads: expected at most 1024, got 100000"),
    (["data.paths=2024-02-30"], "data.paths: expected a YAML value"),
    (["width=10000000000000"], "out of memory: "),  # more than can be addressed
    (["optimizer={type: soap}"], "bench"),
    (["device=cuda:7"], "training.device: expected a device that this machine has"),
    (["device=meta"], "training.device: expected a device that this machine has"),
    (["device=toaster"], "training.device: expected a device that this machine has"),
    (["context=100000"], "context 100000 needs windows of 100001 tokens"),
    (["context=5000"], "the held-out part has"),
    (["model.vocab=100"], "model.vocab: expected at least the data's 256, got 100"),
    (["nosuch.yaml"], "nosuch.yaml: cannot be read: No such file or directory"),
    (["steps"], "expected section.key=value such as training.steps=100, or a YAML file, got 'steps'"),
    (["held_out=2"], "held_out: expected a share"),
    (["training=5"], "training: expected a mapping of values, got 5"),
    (["--nosuch"], "unrecognized arguments: --nosuch"),
    (["data=5"], "data.paths: expected section.key=value, and data is no mapping of values"),
]


@pytest.mark.parametrize(("more", "message"), BAD, ids=lambda value: str(value)[:30])
def test_what_cannot_be_is_one_line_and_leaves_nothing(tmp_path, data, capsys, more, message):
    assert main(words("train", *more, data=data, out=tmp_path / "run")) == 2
    out, err = capsys.readouterr()
    assert err.startswith("dash_optim: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not out.strip() or "tokens to train on" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"training: [1, 2", "is no YAML"),
        (b"- 1\n- 2\n", "expected a mapping of sections, got list"),
        (b"training: {stepz: 3}", "training.stepz: no such key; did you mean 'steps'?"),
        (b"\xff\xfe\x00", "settings.yaml: "),
        (b"optimizer: {type: adamw", "is no YAML"),
    ],
)
def test_yaml_that_cannot_be_read(tmp_path, data, capsys, content, message):
    (tmp_path / "settings.yaml").write_bytes(content)
    assert main(words("train", str(tmp_path / "settings.yaml"), data=data, out=tmp_path / "run")) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_data_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("a b c d e f g")
    for name in ("none.txt", "empty.txt", "short.txt"):
        assert main(words("train", data=tmp_path / name, out=tmp_path / "run")) == 2
        err = capsys.readouterr().err
        assert name in err
        assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_folders_that_cannot_be_written_to(tmp_path, data, capsys, monkeypatch):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(words("train", data=data, out=out)) == 2
        assert "--out: expected a folder" in capsys.readouterr().err
    with exclusive(tmp_path / "held"):
        assert main(words("train", data=data, out=tmp_path / "held")) == 2
        err = capsys.readouterr().err
        assert f"in use by process {os.getpid()}" in err
        assert err.count("\n") == 1
    assert [path.name for path in (tmp_path / "held").iterdir()] == [".lock"]

    monkeypatch.setattr(os, "access", lambda *_: False)
    assert main(words("train", data=data, out=tmp_path / "run")) == 2
    assert "--out: cannot write to" in capsys.readouterr().err


def test_a_disk_that_is_full_is_one_line(tmp_path, data, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    assert main(words("train", data=data, out=tmp_path)) == 2
    err = capsys.readouterr().err
    assert "No space left on device" in err
    assert "Traceback" not in err
    monkeypatch.undo()
    assert main(words("train", data=data, out=tmp_path)) == 0
    assert column(tmp_path, "step") == list(range(1, 13))


@pytest.mark.parametrize(
    ("missing", "more", "message"),
    [
        ("matplotlib.figure", [], 'pip install "matroots[train]"'),
        ("rich.console", [], 'pip install "matroots[train]"'),
        ("yaml", ["settings.yaml"], 'pip install "matroots[train]"'),
        ("torch.utils.tensorboard", ["tensorboard=true"], "pip install tensorboard"),
    ],
)
def test_missing_extras_are_named(tmp_path, data, capsys, monkeypatch, missing, more, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    argv = words("train", *more, data=data, out=tmp_path / "run")
    if missing == "yaml":
        argv = ["train", *more, "--out", str(tmp_path / "run")]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


# settings from files and from the command line


def test_later_settings_win_wherever_they_stand(tmp_path, data):
    (tmp_path / "a.yaml").write_text(
        "training: {steps: 3, batch: 2}\noptimizer: {type: dash, p: 4}\nschedule:\n"
    )
    (tmp_path / "b.yml").write_text("training: {steps: 2}\noptimizer: {block_size: 8}\n")
    files = [str(tmp_path / "a.yaml"), str(tmp_path / "b.yml")]
    out = tmp_path / "run"
    assert (
        main(
            [
                "train",
                "steps=9",
                *files,
                "--out",
                str(out),
                "schedule.warmup=0",
                "context=16",
                "lr=0.02",
                "--data",
                str(data),
            ]
        )
        == 0
    )
    job = json.loads((out / "job.json").read_text())
    assert (job["training"]["steps"], job["training"]["batch"]) == (2, 2)
    assert job["optimizer"] == {"type": "dash", "p": 4, "block_size": 8, "lr": 0.02}
    assert (job["schedule"]["warmup"], job["model"]["context"], job["data"]["paths"]) == (0, 16, [str(data)])


# progress


def test_progress_without_a_terminal_is_a_line_for_each_look(tmp_path, data, capsys):
    assert main(words("train", data=data, out=tmp_path)) == 0
    out, err = capsys.readouterr()
    looks = [(r["step"], r["validation_loss"], r["loss"]) for r in read(tmp_path) if "validation_loss" in r]
    assert len(looks) == 3
    for line, (step, held, loss) in zip(err.splitlines(), looks, strict=True):
        assert f": step {step} of 12: loss {loss:.3f}, held out {held:.3f}, " in line
    assert "held-out loss  " in out
    assert "step 5 of 12" not in out


def test_progress_on_a_terminal_is_a_bar(tmp_path, data):
    ours, theirs = os.openpty()

    def work():
        os.dup2(theirs, 2)
        return main(
            words(
                "train",
                "steps=30",
                "optimizer={type: adamw, betas: [0.9, 0.99]}",
                data=data,
                out=tmp_path / "run",
            )
        )

    child = Child(work, tmp_path / "log")
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert child.wait() == 0
    assert b"30/30" in shown
    assert b", held out " in shown
    assert b"betas=[0.9" in shown  # not taken for markup
    assert b": step " not in shown
    assert "30 of 30, finished" in child.log.read_text()


def test_the_table_holds_what_the_records_say(tmp_path, data):
    train(tiny(data), tmp_path, quiet=True)
    with (tmp_path / "metrics.csv").open() as stream:
        table = list(csv.DictReader(stream))
    records = read(tmp_path)
    assert [float(row["loss"]) for row in table] == [record["loss"] for record in records]
    assert [row["validation_loss"] != "" for row in table] == ["validation_loss" in r for r in records]


# devices


def test_auto_is_the_accelerator_where_there_is_one(monkeypatch):
    assert Training(device="cpu").place() == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    assert Training().place() == torch.device("meta")
    assert Training(device="meta").place() == torch.device("meta")
    with pytest.raises(InputError, match=r"\(cpu, meta\), got 'cuda'"):
        Training(device="cuda").place()


def test_a_run_leaves_threads_signals_and_generators_as_they_were(tmp_path, data):
    torch.manual_seed(123)
    before = torch.get_rng_state(), signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    train(tiny(data, training={"threads": 2, "steps": 2}), tmp_path, quiet=True)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert signal.getsignal(signal.SIGTERM) == before[1]
    assert torch.get_num_threads() == before[2]


def test_names_of_times_are_those_that_comparisons_leave_out(tmp_path, data):
    train(tiny(data), tmp_path, quiet=True)
    timed = {name for record in read(tmp_path) for name in record if is_time(name)}
    assert timed == {"seconds", "tokens_per_second", "forward_ms", "backward_ms", "optimizer_ms"}


def test_what_came_of_a_run_can_be_read_again(tmp_path):
    path = Path(tmp_path / "result.json")
    outcome = Outcome("x", 0, 1, 2, 3, math.nan, [(1, 0.5, math.inf)], 1.0, 2.0, {"forward": 1.0}, 4)
    outcome.write(tmp_path)
    found = Outcome.read(tmp_path)
    assert math.isnan(found.loss)
    assert found.curve == [(1, 0.5, math.inf)]
    for content in ('{"curve": []}', "[]", "{", '{"a": 1, "curve": []}', '{"curve": 3}'):
        path.write_text(content)
        with pytest.raises(InputError, match=r"result\.json: expected what a run has left"):
            Outcome.read(tmp_path)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


@pytest.mark.parametrize("command", ["train", "compare", "sweep", "study"])
def test_without_yaml_every_command_says_what_to_install(tmp_path, monkeypatch, capsys, command):
    from dash_optim.__main__ import main

    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    assert main([command, "steps=2", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert 'yaml, which cannot be imported: install the extra with pip install "matroots[train]"' in said
    assert not (tmp_path / "out").exists()
