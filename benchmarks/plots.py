"""Line plots of benchmark rows; matplotlib is needed only here."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STYLES: dict[str, dict[str, Any]] = {
    "ours": {"color": "#0b6e4f", "marker": "o", "linewidth": 2.0},
    "shared pages": {"color": "#d17b0f", "marker": "s"},
    "separate pages": {"color": "#a63d40", "marker": "^"},
    "sdpa": {"color": "#5b6c9d", "marker": "v"},
    "sdpa packed": {"color": "#8fa3d4", "marker": "D"},
    "flex": {"color": "#7b5ea7", "marker": "P"},
    "roofline": {"color": "#555555", "linestyle": "--"},
    "prefix": {"color": "#0b6e4f", "marker": "o", "linewidth": 2.0},
    "product": {"color": "#5fb49c", "marker": "s"},
    "threshold": {"color": "#d17b0f", "marker": "^"},
    "bounded_hash": {"color": "#7b5ea7", "marker": "P"},
    "ray_prefix": {"color": "#a63d40", "marker": "X"},
    "power_of_two": {"color": "#5b6c9d", "marker": "v"},
    "least_loaded": {"color": "#8fa3d4", "marker": "D"},
    "round_robin": {"color": "#999999", "marker": "<"},
    "random": {"color": "#bbbbbb", "marker": ">"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One set of axes; `lines` has the points (x, y) of each system."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, list[tuple[float, float]]]


def panels(
    rows: Sequence[dict[str, Any]],
    *,
    context: str,
    x: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, str],
) -> list[Panel]:
    """One for each case, type, number of threads and context.

    Args:
        context: column of the tokens that stay the same within a panel.
        x: column of the horizontal axis.
        lines: the column of each line by its name; what is drawn is a thousandth of it.
    """
    return [
        Panel(
            title=f"{case}, {dtype}, {threads} thread(s), {context} = {tokens}",
            x_label=x_label,
            y_label=y_label,
            lines={name: points(group, x, column, 1e-3) for name, column in lines.items()},
        )
        for (case, dtype, threads, tokens), group in grouped(rows, "case", "dtype", "threads", context).items()
    ]


def require_matplotlib(plot: Path | None) -> None:
    """Ends the script before it measures anything when a plot is asked for that cannot be drawn."""
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("--plot needs matplotlib, which is not installed: pip install 'chunkserve[bench]'")


def draw(path: Path, title: str, panels: Sequence[Panel], *, columns: int = 2) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(columns, len(panels))
    grid_rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        grid_rows, columns, figsize=(5 * columns, 3.6 * grid_rows), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, panel in zip(axes.flat, panels, strict=False):
        for name, points in panel.lines.items():
            if points:
                ax.plot(*zip(*points, strict=True), label=name, **STYLES.get(name, {"marker": "o"}))
        ax.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
    # Panels may lack a system that others have, so one legend names them all; inside it would hide lines.
    handles = {line.get_label(): line for ax in axes.flat for line in ax.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def points(rows: Sequence[dict[str, Any]], x: str, y: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """(x, y * scale) of the rows that have y."""
    return [(row[x], row[y] * scale) for row in rows if row[y] is not None]


def grouped(rows: Sequence[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by their values of some columns, in order of appearance."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups
