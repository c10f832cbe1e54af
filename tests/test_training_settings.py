# SPDX-License-Identifier: Apache-2.0
"""Schedules against closed forms; settings: what is accepted, what is refused, and with which words."""

import math

import pytest
import torch

from dash_optim import DASH
from dash_optim.config import parse_yaml
from dash_optim.training.model import Architecture, Llama
from dash_optim.training.optimizers import Optimizers
from dash_optim.training.schedule import Schedule
from dash_optim.training.settings import Job, differences, override, read_job
from matroots._command import InputError, MissingExtraError


def test_cosine_after_warmup():
    schedule = Schedule(warmup=30, final=0.1)
    assert schedule.factor(1, 300) == pytest.approx(1 / 30)
    assert schedule.factor(30, 300) == 1.0
    assert schedule.factor(165, 300) == pytest.approx(0.55)  # half way: the middle between 1 and 0.1
    assert schedule.factor(300, 300) == pytest.approx(0.1)
    factors = [schedule.factor(step, 300) for step in range(30, 301)]
    assert factors == sorted(factors, reverse=True)


def test_warmup_as_a_share_is_that_of_all_steps():
    assert Schedule(warmup=0.1).warmup_steps(300) == 30
    assert Schedule(warmup=0.1).factor(6, 120) == pytest.approx(0.5)
    assert Schedule(warmup=0).factor(1, 100) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 100)))


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_a_warmup_that_nobody_asked_for_is_put_in_once(kind):
    asked, open_ = Schedule(kind, warmup=0.5), Schedule(kind)
    assert asked.suited(0.1) == asked
    assert open_.suited(0.1) == Schedule(kind, warmup=0.1)
    with pytest.raises(ValueError, match=r"schedule.warmup: expected a number"):
        open_.factor(1, 10)


def test_wsd_is_flat_and_then_linear():
    schedule = Schedule(type="wsd", warmup=10, final=0.0, decay=0.25)
    assert [schedule.factor(step, 100) for step in (5, 10, 40, 75)] == [0.5, 1.0, 1.0, 1.0]
    assert schedule.factor(80, 100) == pytest.approx(0.8)
    assert schedule.factor(100, 100) == 0.0


def test_constant_and_shortest():
    assert Schedule(type="constant", warmup=2).factor(77, 100) == 1.0
    assert Schedule(warmup=0).factor(1, 1) == pytest.approx(0.1)
    assert Schedule(warmup=5).factor(2, 2) == pytest.approx(0.4)
    assert Schedule(type="wsd", warmup=3, decay=1.0, final=0.5).factor(3, 3) == 1.0


def test_a_job_is_what_was_written():
    job = read_job(
        {
            "model": {"preset": "0.5m", "context": 64, "tied": True},
            "optimizer": {"type": "dash", "block_size": 64, "rel_damping": "1e-5", "betas": [0.9, 0.99]},
            "schedule": {"type": "wsd", "warmup": 0.05},
            "training": {"steps": 10, "clip": "1e0", "precision": "bfloat16"},
            "data": {"paths": "a.txt"},
        }
    )
    assert job.model.architecture(vocab=300) == Architecture(96, 4, 4, 256, 64, 300, tied=True)
    assert job.optimizer == {"type": "dash", "block_size": 64, "rel_damping": 1e-5, "betas": [0.9, 0.99]}
    assert job.training.clip == 1.0
    assert job.data.paths == ("a.txt",)
    assert read_job(job.plain()) == job
    assert job.name == "dash (block_size=64, rel_damping=1e-05, betas=[0.9, 0.99])"


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"optimiser": {}}, "optimiser: no such section; did you mean 'optimizer'?"),
        ({"training": {"step": 5}}, "training.step: no such key; did you mean 'steps'?"),
        ({"model": {"zzz": 5}}, "model.zzz: no such key; there are"),
        ({"model": {"preset": "1m"}}, "model.preset: expected one of"),
        ({"model": {"heads": 5}}, "model.heads: expected width / heads to be an even integer"),
        ({"training": {"steps": 0}}, "training.steps: expected a number >= 1, got 0"),
        ({"training": {"steps": 1.5}}, "training.steps: expected an integer, got 1.5"),
        ({"training": {"steps": "many"}}, "training.steps: expected an integer, got 'many'"),
        ({"training": {"steps": True}}, "training.steps: expected an integer, got True"),
        ({"training": {"precision": "fp8"}}, "training.precision: expected one of"),
        ({"training": {"clip": float("nan")}}, "training.clip: expected a finite number"),
        ({"training": {"clip": -1}}, "training.clip: expected a number >= 0, got -1"),
        ({"training": {"compile": 1}}, "training.compile: expected true or false, got 1"),
        ({"training": {"seed": -1}}, "training.seed: expected an integer from 0"),
        ({"training": [1]}, "training: expected a mapping of values, got"),
        ({"data": {"paths": [1]}}, "data.paths: expected a list of strings, got"),
        ({"schedule": {"type": "cosin"}}, "schedule.type: expected one of"),
        ({"schedule": {"warmup": 2.5}}, "schedule.warmup: expected a number of steps"),
        ({"schedule": {"final": 2}}, "schedule.final: expected a number from 0 to 1, got 2"),
        ({"logging": {"validate_every": 0}}, "logging.validate_every: expected a number >= 1, got 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(mapping, message):
    with pytest.raises(InputError) as caught:
        read_job(mapping)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_of_the_command_line_win():
    merged = override(
        {"training": {"steps": 10, "seed": 3}},
        [
            "steps=20",
            "training.batch=2",
            "lr=3e-3",
            "optimizer.grafting={type: adam, eps: 1e-6}",
            "tied=true",
        ],
    )
    job = read_job(merged)
    assert (job.training.steps, job.training.seed, job.training.batch, job.model.tied) == (20, 3, 2, True)
    assert job.optimizer == {"type": "dash", "lr": 3e-3, "grafting": {"type": "adam", "eps": 1e-6}}


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (["lr=0.5", "optimizer=adamw"], {"type": "adamw", "lr": 0.5}),
        (["optimizer=adamw", "lr=0.5"], {"type": "adamw", "lr": 0.5}),
        (["optimizer={type: adamw}", "lr=0.5", "optimizer.type=adamw"], {"type": "adamw", "lr": 0.5}),
        (["lr=0.5", "optimizer={eps: 1.e-6}"], {"type": "dash", "lr": 0.5, "eps": 1e-6}),
        (["optimizer={type: dash, p: 4}", "lr=0.5", "optimizer=adamw"], {"type": "adamw"}),
        (["optimizer={type: dash, p: 4}", "optimizer.type=adamw"], {"type": "adamw"}),
    ],
)
def test_naming_an_optimizer_keeps_options_but_those_of_another_type(assignments, expected):
    assert read_job(override({}, assignments)).optimizer == expected


def test_a_section_as_a_whole_keeps_what_it_does_not_name():
    training = read_job(override({}, ["steps=8", "training={clip: 0.5}"])).training
    assert (training.steps, training.clip) == (8, 0.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("training: {steps: 8}\ntraining: {batch: 4}", "line 1: the key 'training' stands twice"),
        ("a:\n  - {b: 1, c: {d: 1, d: 2}}", "line 2: the key 'd' stands twice"),
        ("&a {type: adamw, x: *a}", "holds itself"),
        ("a: 2024-02-30", "day"),
        ("a: [1", "expected"),
    ],
)
def test_yaml_that_would_lose_something_is_refused(content, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_yaml(content)
    assert "\n" not in str(caught.value)


def test_yaml_may_repeat_a_value_and_take_in_another_mapping():
    content = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]"
    both = {"x": 1, "y": 2}
    assert parse_yaml(content) == {"a": both, "b": {"x": 1, "y": 3}, "c": [both, both]}
    assert parse_yaml("") is None


@pytest.mark.parametrize("decay", [0, 0.01])
def test_a_decay_of_no_steps_leaves_the_rate_at_its_peak(decay):
    schedule = Schedule("wsd", warmup=0.1, decay=decay)
    assert [schedule.factor(step, 40) for step in (1, 4, 5, 39, 40)] == [0.25, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("steps", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("type=wsd", "optimizer or schedule"),
        ("vocab=300", "which one is meant, model.vocab or data.vocab?"),
        ("training.steps.more=1", "training.steps.more: expected section.key=value"),
        ("training.steps=[1", "training.steps: expected a YAML value"),
    ],
)
def test_assignments_that_cannot_be_meant_are_refused(assignment, message):
    if assignment == "type=wsd":  # has one owner among the sections with keys of their own
        assert override({}, [assignment]) == {"schedule": {"type": "wsd"}}
        return
    with pytest.raises(InputError) as caught:
        override({"training": {"steps": 3}}, [assignment])
    assert message in str(caught.value)


def test_only_what_changes_the_result_keeps_a_run_from_going_on():
    old = Job().plain()
    free = Job().with_values(logging={"validate_every": 7}, training={"threads": 2, "device": "cpu"}).plain()
    assert differences(old, free) == []
    changed = Job().with_values(training={"steps": 7}, optimizer={"p": 2}).plain()
    assert sorted(differences(old, changed)) == [
        "optimizer.p: None then, 2 now",
        "training.steps: 300 then, 7 now",
    ]


@pytest.fixture
def model():
    return Llama(Architecture(width=16, layers=2, heads=2, hidden=24, context=8), seed=0)


def parameters(optimizers):
    return [param for one in optimizers.each for group in one.param_groups for param in group["params"]]


@pytest.mark.parametrize("kind", ["dash", "adamw", "adam", "sgd", "muon"])
def test_every_optimizer_has_every_parameter_once_and_moves_it(model, kind):
    optimizers = Optimizers(model, {"type": kind, "lr": 0.5})
    assert sorted(map(id, parameters(optimizers))) == sorted(map(id, model.parameters()))
    before = [param.detach().clone() for param in model.parameters()]
    assert optimizers.set_rate(0.02) == pytest.approx(0.01)
    model.loss(torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))).backward()
    optimizers.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    # what AdamW does beside them has a quarter of the rate
    rates = {0.01, 0.0025} if kind in ("dash", "muon") else {0.01}
    assert {group["lr"] for one in optimizers.each for group in one.param_groups} == rates
    optimizers.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_muon_has_matrices_and_adamw_the_rest(model):
    matrices, rest = Optimizers(model, {"type": "muon"}).each
    assert isinstance(matrices, torch.optim.Muon)
    assert isinstance(rest, torch.optim.AdamW)
    assert {p.shape for group in rest.param_groups for p in group["params"]} == {(256, 16), (16,)}
    assert len(Optimizers(model, {"type": "muon", "routing": "all"}).each[0].param_groups) == 3


def test_vectors_have_no_weight_decay(model):
    for kind in ("dash", "adamw", "muon"):
        optimizers = Optimizers(model, {"type": kind, "weight_decay": 0.1})
        for one in optimizers.each:
            for group in one.param_groups:
                vectors = all(param.ndim == 1 for param in group["params"])
                assert group["weight_decay"] == (0.0 if vectors else 0.1)


def test_routing_of_dash(model):
    def preconditioned(options):
        (one,) = Optimizers(model, {"type": "dash", **options}).each
        assert isinstance(one, DASH)
        return {group["name"] for group in one.param_groups if group["algorithm"] == "dash"}

    assert preconditioned({"routing": "all"}) == {"matrices", "embeddings", "heads"}
    assert preconditioned({"overrides": {"heads": {"algorithm": "dash"}}}) >= {"matrices", "heads"}


def test_memory_of_the_state_is_that_of_its_tensors(model):
    optimizers = Optimizers(model, {"type": "adamw"})
    model.loss(torch.zeros(1, 9, dtype=torch.int64)).backward()
    optimizers.step()
    numbers = sum(param.numel() for param in model.parameters())
    assert optimizers.bytes == 4 * (2 * numbers + len(list(model.parameters())))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "adamww"}, "optimizer.type: expected one of"),
        (
            {"type": "dash", "blok_size": 3},
            "optimizer.blok_size: dash has no such option; did you mean 'block_size'?",
        ),
        (
            {"type": "adamw", "amsgad": True},
            "optimizer.amsgad: adamw has no such option; did you mean 'amsgrad'?",
        ),
        ({"type": "adamw", "overrides": {}}, "optimizer.overrides: is for type dash"),
        ({"type": "dash", "overrides": {"head": {}}}, "overrides: expected kinds among"),
        ({"type": "dash", "routing": "none"}, "optimizer.routing: expected 'auto' or 'all'"),
        ({"type": "dash", "p": 0.5}, "p"),
        ({"type": "adamw", "lr": -1.0}, "optimizer.lr: expected a finite number >= 0"),
    ],
)
def test_optimizers_that_cannot_be_are_refused(model, options, message):
    with pytest.raises(InputError) as caught:
        Optimizers(model, options)
    assert message in str(caught.value)


def test_a_peer_that_is_not_installed_names_the_extra(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pytorch_optimizer", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'matroots\[bench\]'"):
        Optimizers(model, {"type": "soap"})


def test_state_that_no_checkpoint_takes_is_recognised_and_counted(model):
    class Preconditioner:
        def __init__(self):
            self.statistics = [torch.zeros(3, 3), torch.zeros(2, 2)]

    optimizers = Optimizers(model, {"type": "sgd"})
    assert optimizers.plain
    weight = next(model.parameters())
    optimizers.each[0].state[weight]["average"] = {"values": [torch.zeros(5), 1.0, None]}
    assert optimizers.plain
    assert optimizers.bytes == 20
    optimizers.each[0].state[weight]["pre"] = Preconditioner()
    assert not optimizers.plain
    assert optimizers.bytes == 20 + 4 * (9 + 4)


def test_adamw_beside_has_a_rate_of_its_own(model):
    for kind in ("dash", "muon"):
        for options, expected in (({}, 0.1), ({"adamw_lr": 0.3}, 0.3)):
            optimizers = Optimizers(model, {"type": kind, "lr": 0.4, **options})
            rates = {group["name"]: group["lr"] for one in optimizers.each for group in one.param_groups}
            assert rates == {"matrices": 0.4, **dict.fromkeys(("embeddings", "heads", "vectors"), expected)}
            optimizers.set_rate(0.5)
            assert optimizers.each[0].param_groups[0]["lr"] == 0.2
    own = Optimizers(model, {"type": "dash", "lr": 0.4, "overrides": {"heads": {"lr": 0.7}}})
    rates = {group["name"]: group["lr"] for group in own.each[0].param_groups}
    assert (rates["heads"], rates["embeddings"]) == (0.7, 0.1)
    with pytest.raises(InputError, match="adamw_lr"):
        Optimizers(model, {"type": "dash", "adamw_lr": "fast"})
    with pytest.raises(InputError, match="adamw_lr"):
        Optimizers(model, {"type": "adamw", "adamw_lr": 0.1})
