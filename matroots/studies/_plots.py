# SPDX-License-Identifier: Apache-2.0
"""How all figures look: colours that the colour-blind can tell apart, one meaning for each, legends beside the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito, Color Universal Design (2008); their yellow is left out, it is too pale for lines
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
METHOD_COLOURS = {
    "evd": PALETTE[6],
    "cn": PALETTE[0],
    "ndb": PALETTE[1],
    "chebyshev": PALETTE[2],
    "minimax": PALETTE[3],
    "rational": PALETTE[5],
}
# for p = 2 cn and ndb are the same map: the wider line shows under the other
METHOD_WIDTHS = {"cn": 2.4, "ndb": 1.2, "chebyshev": 1.2, "minimax": 1.2, "rational": 1.2}
METHOD_MARKERS = {"evd": "s", "cn": "o", "ndb": "^", "chebyshev": "D", "minimax": "v", "rational": "P"}
_PANEL = (4.0, 3.2)  # inches


def grid(rows: int, columns: int, title: str) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with room for a legend at its foot, and its panels."""
    from matplotlib.figure import Figure

    size = (max(6.5, _PANEL[0] * columns + 0.4), _PANEL[1] * rows + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False)
    panels: list[list[Axes]] = [list(row) for row in np.asarray(axes)]
    for panel in (panel for row in panels for panel in row):
        panel.grid(visible=True, which="major", color="0.88", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def name_axes(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Label both axes and name the panel."""
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.set_title(title, fontsize=9)


def integer_ticks(axes: Axes) -> None:
    """Label whole numbers only on the x axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def scatter(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    method: str,
    label: str,
    *,
    alpha: float = 1.0,
    size: float = 4.5,
) -> None:
    """Draw points in the colour and with the marker of a method."""
    axes.plot(
        x,
        y,
        linestyle="",
        marker=METHOD_MARKERS[method],
        color=METHOD_COLOURS[method],
        markersize=size,
        markeredgewidth=0,
        alpha=alpha,
        label=label,
    )


def legend(figure: Figure, columns: int) -> None:
    """Put one legend for all panels under them, with every label once."""
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside lower center",
        ncols=min(columns, max(1, len(found))),
        fontsize=8,
        frameon=False,
    )


def span(values: Iterable[float], floor: float = 1e-300) -> tuple[float, float]:
    """Return limits for a log axis around the finite positive values, a third of a decade wider."""
    known = [value for value in values if np.isfinite(value) and value > floor]
    if not known:
        return 0.1, 10.0
    return min(known) / 2.2, max(known) * 2.2
