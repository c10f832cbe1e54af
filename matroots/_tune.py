# SPDX-License-Identifier: Apache-2.0
"""What each method costs on a machine: the model that method "auto" chooses by, and `tune`, which measures it.

Without a measurement, fixed figures serve (two cores of a x86 CPU): the choice, and with it the result, is then the same on every
machine and every run. A measured model is kept in a file and used from then on.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

SIZES = (32, 64, 128, 256, 512, 1024)
_ELEMENTS = 2**21  # of a measured batch: 8 MB in float32
_REPEATS = 3


@dataclass(frozen=True)
class Costs:
    """Time per matrix of one size, in any unit: eigendecompositions, a pole of "rational", and what it costs without poles."""

    evd32: float
    evd64: float
    pole: float
    fixed: float


# in units of one product of two matrices of that size in float32
_DEFAULTS = {
    "cpu": {
        32: Costs(60.0, 80.0, 6.0, 40.0),
        64: Costs(24.6, 36.3, 2.9, 14.0),
        128: Costs(15.4, 27.9, 2.1, 12.0),
        256: Costs(10.6, 18.8, 1.5, 4.7),
        512: Costs(7.6, 14.1, 0.9, 4.7),
        1024: Costs(6.7, 11.8, 0.88, 2.5),
    }
}
# accelerators decompose slowly, most of all in float64
_DEFAULTS["cuda"] = {
    n: Costs(40 * c.evd32, 80 * c.evd64, c.pole, c.fixed) for n, c in _DEFAULTS["cpu"].items()
}
_loaded: dict[Path, dict[str, dict[int, Costs]]] = {}


def costs(n: int, device_type: str) -> Costs:
    """Return the costs at this size: measured ones where :func:`tune` has left them, else the fixed ones.

    Between two sizes, geometrically; outside, those of the nearest.
    """
    table = measured().get(device_type, _DEFAULTS["cpu" if device_type == "cpu" else "cuda"])
    sizes = sorted(table)
    below = max((size for size in sizes if size <= n), default=sizes[0])
    above = min((size for size in sizes if size >= n), default=sizes[-1])
    weight = 0.0 if above == below else math.log(n / below) / math.log(above / below)
    low, high = asdict(table[below]), asdict(table[above])
    return Costs(**{name: low[name] ** (1 - weight) * high[name] ** weight for name in low})


def cache_file() -> Path:
    """Return where measurements are kept: ``$MATROOTS_CACHE`` or ``~/.cache/matroots``, one file for a torch version and thread count."""
    folder = os.environ.get("MATROOTS_CACHE") or Path.home() / ".cache" / "matroots"
    return Path(folder) / f"costs-torch{torch.__version__}-threads{torch.get_num_threads()}.json"


def measured() -> dict[str, dict[int, Costs]]:
    """Return what :func:`tune` has left, by device type and size; nothing where it has not run or its file cannot be read."""
    path = cache_file()
    if path not in _loaded:
        _loaded[path] = _read(path)
    return _loaded[path]


def _read(path: Path) -> dict[str, dict[int, Costs]]:
    try:
        stored = json.loads(path.read_text())
        tables = {d: {int(n): Costs(**c) for n, c in t.items()} for d, t in stored.items()}
        figures = [x for table in tables.values() for n, c in table.items() for x in (n, *asdict(c).values())]
        usable = all(0 < x < math.inf for x in figures)
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {device: table for device, table in tables.items() if table} if usable else {}


def tune(
    device: str | torch.device = "cpu", sizes: tuple[int, ...] = SIZES, say: Callable[[str], object] = print
) -> dict[int, Costs]:
    """Measure the costs that method "auto" chooses by, keep them in a file, and print them; about half a minute.

    Args:
        device: where to measure.
        sizes: of the matrices, each at least 2.
        say: what prints a line.

    Returns:
        The costs by size, in microseconds a matrix.

    Raises:
        ValueError: for a size below 2, no size, or a device that is not there.
        OSError: if the file cannot be written; nothing is kept then.
    """
    if not sizes or min(sizes) < 2:
        raise ValueError(f"sizes: expected at least one, each >= 2, got {sizes!r}")
    target = torch.device(device)
    try:
        torch.empty(1, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: {device!r} cannot be used here: {error}") from error
    table = {}
    say(f"{'n':>5} {'evd32':>10} {'evd64':>10} {'pole':>10} {'fixed':>10}   us a matrix")
    for n in sorted(set(sizes)):
        table[n] = c = _measure(n, target)
        say(f"{n:>5} {c.evd32:10.1f} {c.evd64:10.1f} {c.pole:10.1f} {c.fixed:10.1f}")
    path = cache_file()
    _write(path, {**_read(path), target.type: table})
    _loaded.pop(path, None)
    say(f"kept in {path}")
    return table


def _write(path: Path, tables: dict[str, dict[int, Costs]]) -> None:
    """Write the whole file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    stored = {d: {n: asdict(c) for n, c in table.items()} for d, table in tables.items()}
    partial.write_text(json.dumps(stored, indent=1))
    partial.replace(path)


def _measure(n: int, device: torch.device) -> Costs:
    from matroots._call import inv_root_ex
    from matroots.solvers import EVD, Rational

    b = max(1, _ELEMENTS // n**2)
    G = torch.randn(b, n, n + 8, generator=torch.Generator().manual_seed(0)).to(device)
    A = G @ G.mT / n

    def solve(method: EVD | Rational) -> float:
        return 1e6 * _seconds(lambda: inv_root_ex(A, 4, method=method), A) / b

    few, many = solve(Rational(poles=2)), solve(Rational(poles=10))
    pole = max((many - few) / 8, few / 100)
    return Costs(
        evd32=solve(EVD(compute_dtype=torch.float32)),
        evd64=solve(EVD(compute_dtype=torch.float64)),
        pole=pole,
        fixed=max(few - 2 * pole, few / 100),
    )


def _seconds(function: Callable[[], object], like: Tensor) -> float:
    """Return the median time of some calls after a first one."""
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        function()
        if like.is_cuda:
            torch.cuda.synchronize(like.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
