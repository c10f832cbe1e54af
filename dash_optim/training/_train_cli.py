# SPDX-License-Identifier: Apache-2.0
"""``python -m dash_optim train``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dash_optim.training import _arguments
from dash_optim.training.data import Corpus
from dash_optim.training.launch import Launch, joined
from dash_optim.training.loop import corpus_of, train
from dash_optim.training.outcome import PARTS, Outcome, perplexity
from dash_optim.training.ranks import Ranks
from dash_optim.training.settings import Job, read_job
from dash_optim.training.stop import Stopped
from matroots.studies._report import fixed, say

_NOTES = 8  # on what was left out of the text, as many as are shown


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name; return its exit code, see :func:`dash_optim.training._arguments.guarded`."""
    return _arguments.guarded_ranks(lambda launch: _main(argv, launch), _arguments.KEPT)


def _main(argv: Sequence[str], launch: Launch | None) -> None:
    parser = _arguments.parser(
        "train",
        "Train a language model and leave metrics, checkpoints and a summary in a folder. The same command goes on where a run was stopped."
        " Under torchrun several processes train one model.",
        "dash-train",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="throw away what a run has left in the folder, and start over"
    )
    options = parser.parse_intermixed_args(argv)
    job = read_job(_arguments.mapping_of(options))
    with joined(launch, job.training) as ranks:
        _train(job, options.out, options.fresh, ranks)


def _train(job: Job, out: Path, fresh: bool, ranks: Ranks) -> None:
    corpus = corpus_of(job.data)
    if ranks.leads:
        _tell(corpus)
    try:
        outcome = train(job, out, fresh=fresh, quiet=not ranks.leads, corpus=corpus, ranks=ranks)
    except Stopped:
        so_far = Outcome.read(out) if ranks.leads else None
        if so_far is not None:
            say(summary(so_far))
        ranks.any(False)  # torchrun ends all as soon as one has ended
        raise
    if ranks.leads:
        say(summary(outcome))
        say(f"Wrote {out / 'metrics.csv'}, {out / 'result.json'} and checkpoints")


def _tell(corpus: Corpus) -> None:
    """Say what is trained on."""
    say(f"{corpus.name}: {len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out")
    for note in corpus.notes[:_NOTES]:
        say(f"  {note}")
    if len(corpus.notes) > _NOTES:
        say(f"  and {len(corpus.notes) - _NOTES} more notes of this kind")


def summary(outcome: Outcome) -> str:
    """Return what came of a run, a line for each thing."""
    state = (
        f"given up: {outcome.reason}" if outcome.diverged else "finished" if outcome.finished else "stopped"
    )
    lines = {
        "optimizer": outcome.name,
        "parameters": f"{outcome.parameters:,}",
        "steps": f"{outcome.step} of {outcome.steps}, {state}",
        "held-out loss": f"{outcome.loss:.4f} nats per token, perplexity {perplexity(outcome.loss):.3f}",
        "training": f"{fixed(outcome.seconds)} s, {outcome.tokens_per_second:,.0f} tokens/s",
        "a step": ", ".join(f"{part} {fixed(outcome.ms[part])} ms" for part in PARTS),
        "state": f"{fixed(outcome.optimizer_bytes / 2**20)} MiB",
        "roots": "" if outcome.roots is None else f"{outcome.roots:.3f} a factor and step",
    }
    if math.isnan(outcome.loss):
        del lines["held-out loss"]
    return "\n".join(f"{name:<14} {value}" for name, value in lines.items() if value)
