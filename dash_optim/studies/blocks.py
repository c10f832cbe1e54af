# SPDX-License-Identifier: Apache-2.0
"""Block size, scaling and the precision of products: loss and time."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dash_optim.studies._arms import Arm, Settings, chance, loss_cells, rows, run_arms
from dash_optim.training.compare import loss_curves
from matroots.studies._report import Plot, Report, Table, fixed

_NDB: Final = {"type": "ndb", "steps": 10}
ARMS: Final[dict[str, dict[str, Any]]] = {
    **{f"block {size}": {"block_size": size} for size in (16, 32, 64, 128, 256)},
    "block full": {"block_size": float("inf")},
    "ndb 10 steps, multi_power": {"method": _NDB, "scaling": "multi_power"},
    "ndb 10 steps, power": {"method": _NDB, "scaling": "power"},
    "ndb 10 steps, frobenius": {"method": _NDB, "scaling": "frobenius"},
    **{
        f"minimax, {name or 'fp32'}": {"method": "minimax", "matmul_dtype": name}
        for name in (None, "tf32", "fp16x2", "bf16x2", "fp16", "bf16")
    },
}
REFERENCE: Final = "block 128"


def run(settings: Settings) -> Report:
    """Run all arms and report."""
    names = list(ARMS)[2::4] if settings.quick else list(ARMS)
    names = list(dict.fromkeys([REFERENCE, *names]))
    arms = [Arm(name, {"optimizer": {"type": "dash", "block_size": 128, **ARMS[name]}}) for name in names]
    groups = run_arms("blocks", arms, settings)
    model = next(iter(groups.values()))[0]
    title = f"Block size, scaling, precision: {model.parameters / 1e6:.2g}M parameters, {model.steps} steps, {len(settings.seeds)} seeds"
    table = [
        (
            name,
            *loss_cells(outcomes, groups[REFERENCE]),
            fixed(float(np.mean([outcome.ms["optimizer"] for outcome in outcomes]))),
            fixed(outcomes[0].optimizer_bytes / 2**20),
        )
        for name, outcomes in groups.items()
    ]
    columns = ("arm", "held-out loss by seed", "mean", f"minus {REFERENCE}", "optimizer ms", "state MiB")
    sizes = {name: outcomes for name, outcomes in groups.items() if name.startswith("block")}
    return Report(
        name="blocks",
        title=title,
        summary="Loss, time and memory by block size, by scaling and by the precision of products.",
        tables=[Table("Loss, time and memory (± standard error, paired by seed)", columns, table)],
        plots=[
            Plot(
                "blocks",
                "Loss on held-out text by block size, against steps and seconds.",
                loss_curves(sizes, title),
            )
        ],
        data={"blocks": rows(groups)},
        notes=[
            chance(settings.seeds),
            "On a CPU products of half precision are emulated: their loss counts, their time does not.",
            "Arms that name no block size have blocks of 128.",
        ],
    )
