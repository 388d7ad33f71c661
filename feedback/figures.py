"""The pictures: how well the bits are read, what the text says, what a lens sees.

Every function takes plain rows and numbers, writes one PNG and returns its path; nothing is shown,
and matplotlib's global state is afterwards what it was. A finished run is redrawn from its table:

    ber_over_steps(read_table(folder / "table.csv"), path, push_until=8, title="8 hidden bits")

What cannot be drawn (an arm without rows, NaN, a character without a glyph) leaves a gap or a word
in the picture, never an error at the end of a long run.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, which colour-blind readers tell apart; the pale yellow is left out.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (4, 1.2, 1, 1.2)))
INK, FAINT, GRID, PUSHED, CHANGED = "#24292f", "#656d76", "#e1e5ea", "#ebeef2", "#ffd8b5"
SHADES = LinearSegmentedColormap.from_list("probability", ("#ffffff", "#9ecae9", "#08519c"))
MONO = "DejaVu Sans Mono"  # comes with matplotlib, as does DejaVu Sans
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.usetex": False,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "white",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "lines.linewidth": 1.8,
    "savefig.bbox": None,
    "savefig.dpi": "figure",
    "savefig.facecolor": "white",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
}
DPI = 160

Numbers = Iterable[Any]
"""Numbers in order, None or NaN where one is missing."""

Line = tuple[Numbers, Numbers, Numbers | None, Numbers | None]
"""x, y, and the lower and upper ends of an interval around y, or None for no interval."""


@dataclass(frozen=True)
class LensPanel:
    """What a lens reads in one run: per row (a block) the top tokens and their probabilities."""

    title: str
    tokens: Sequence[Sequence[str]]
    probabilities: Float[np.ndarray, "row rank"]


def arm_colours(arms: Iterable[str]) -> dict[str, str]:
    """A colour per arm, by the order in which arms first appear; from the eighth on they repeat."""
    return {arm: PALETTE[i % len(PALETTE)] for i, arm in enumerate(dict.fromkeys(arms))}


def ber_over_steps(
    table: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    push_until: int | None,
    reader: str = "informed",
    split: str = "messages",
    title: str,
) -> Path:
    """Bit error rate with its interval, and below it how often the token is the unpushed one.

    Rows have the columns arm, reader, split, alpha, step, ber, ber_low, ber_high and
    argmax_agreement; a line is one arm at one alpha, of this reader and this split of the messages.
    Colours go by arm over the whole table, so that both readers' figures agree; dashes go by alpha;
    the unpushed rows of an arm that is also pushed are thin grey lines under one common label.
    `push_until` is the last pushed step, shaded up to there; None shades nothing.

    Raises ValueError when one line has two rows for the same step: choose, or average, before.
    """
    chosen = [row for row in table if (row["reader"], row["split"]) == (reader, split)]
    colours = arm_colours(row["arm"] for row in table)
    curves = _curves(chosen, colours)
    steps = [row["step"] for row in chosen] or [0]
    with matplotlib.rc_context(STYLE):
        shown = [_label(curve.label) for curve in curves if not curve.label.startswith("_")]
        label_lines = sum(1 + text.count("\n") for text in shown)
        figure = _figure(8.5, 5.8 + 0.4 * max(0, label_lines - 9))
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for curve in curves:
            x, ber, low, high, same = (
                [row.get(name) for row in curve.rows]
                for name in ("step", "ber", "ber_low", "ber_high", "argmax_agreement")
            )
            interval = (None, None) if curve.colour == FAINT else (low, high)
            _draw(upper, curve.label, (x, ber, *interval), curve.colour, curve.dash)
            _draw(lower, curve.label, (x, same, None, None), curve.colour, curve.dash)
        shaded = push_until is not None and push_until >= min(steps)
        if push_until is not None and shaded:
            for axes in (upper, lower):
                axes.axvspan(min(steps) - 0.5, push_until + 0.5, color=PUSHED, lw=0, zorder=0)
        highest = np.nanmax([0.6, *_numbers(row.get("ber_high") for row in chosen)])
        upper.set(ylim=(-0.02, highest + 0.03), ylabel="bit error rate")
        upper.axhline(0.5, color=FAINT, lw=1, ls=(0, (2, 2)), zorder=1)
        lower.set(ylim=(-0.04, 1.06), ylabel="same token as\nunpushed run", xlabel="loop step")
        lower.set_xlim(min(steps) - 0.5, max(steps) + 0.5)
        lower.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        notes = [f"{reader} reader, held-out {split}", "0.5 is guessing"]
        notes += ["shaded: pushed"] if shaded else []
        _title(upper, title, " · ".join(notes if chosen else [*notes[:1], "no rows to draw"]))
        return _write(figure, path)


def lines(
    series: Mapping[str, Line],
    path: Path,
    xlabel: str,
    ylabel: str,
    title: str,
    *,
    reference: float | None = None,
    log_y: bool = False,
    log_x: bool = False,
) -> Path:
    """One labelled line per series, with its interval if given; `reference` is a dotted level."""
    colours = arm_colours(series)
    with matplotlib.rc_context(STYLE):
        figure = _figure(8.5, 4.2 + 0.25 * max(0, len(series) - 12))
        axes = figure.subplots()
        for index, (label, line) in enumerate(series.items()):
            _draw(axes, label, line, colours[label], DASHES[index // len(PALETTE) % len(DASHES)])
        if log_y:
            axes.set_yscale("log")
        if log_x:
            axes.set_xscale("log")
        if reference is not None:
            axes.axhline(reference, color=FAINT, lw=1, ls=(0, (2, 2)), zorder=1)
        axes.margins(x=0.015)
        axes.set_xlabel(_phrase(xlabel), parse_math=False)
        axes.set_ylabel(_phrase(ylabel), parse_math=False)
        _title(axes, title)
        return _write(figure, path)


def hysteresis(
    branches: Mapping[str, tuple[Numbers, Numbers]],
    path: Path,
    *,
    measured: tuple[float, float],
    predicted: Sequence[Sequence[float]],
    title: str,
) -> Path:
    """u against α, a line per branch of a sweep with its direction; (reset, set) as measured under constant pushes, and
    the range in which theory puts each, where there is one. Branches of one speed, up and down, stand next to each
    other."""
    with matplotlib.rc_context(STYLE):
        figure = _figure(8.5, 4.8)
        axes = figure.subplots()
        key: list[Any] = []
        for index, (label, (alphas, us)) in enumerate(branches.items()):
            x, y = _numbers(alphas), _numbers(us)
            colour, dash = PALETTE[index // 2 % len(PALETTE)], "-" if index % 2 == 0 else (0, (4, 1.5))
            axes.plot(x, y, color=colour, lw=1.5, ls=dash)
            key.append(Line2D([], [], color=colour, lw=1.5, ls=dash, label=_phrase(label)))
            middle = len(x) // 2
            arrow = {"arrowstyle": "->", "color": colour, "lw": 1.6}
            axes.annotate("", (x[middle + 1], y[middle + 1]), (x[middle], y[middle]), arrowprops=arrow, zorder=9)
        for band in predicted:
            ends = [end for end in band if np.isfinite(end)]
            if len(ends) == 2:
                axes.axvspan(min(ends), max(ends), color=FAINT, alpha=0.3, lw=0, zorder=1)
        for value in measured:
            axes.axvline(value, color=INK, lw=1, ls=(0, (1, 1.5)), zorder=2)
        told = f"resets {measured[0]:.1f}, sets {measured[1]:.1f} (constant push)"
        key.append(Line2D([], [], color=INK, lw=1, ls=(0, (1, 1.5)), label=_phrase(told)))
        if predicted:
            key.append(Patch(color=FAINT, alpha=0.3, lw=0, label="predicted from L and b"))
        axes.set_xlabel("α", parse_math=False)
        axes.set_ylabel("u: −1 is B, +1 is A", parse_math=False)
        axes.set_ylim(-1.08, 1.08)
        axes.legend(handles=key, loc="center", frameon=False, fontsize=9)
        _title(axes, title)
        return _write(figure, path)


def truth_tables(
    gates: Mapping[str, Float[np.ndarray, "input"]], wanted: Mapping[str, Sequence[int]], path: Path, *, title: str
) -> Path:
    """A panel of gates, each a 2 × 2 square over (a, b) shaded by the share of trials that read 1; a ring where 1 is
    right, a cross where a majority is wrong."""
    columns = 4
    lines_ = -(-len(gates) // columns)
    with matplotlib.rc_context(STYLE):
        figure = _figure(7.6, 0.6 + 1.75 * lines_)
        grid = figure.subplots(lines_, columns, squeeze=False)
        for axes in grid.flat[len(gates) :]:
            axes.set_visible(False)
        for axes, (name, shares) in zip(grid.flat, gates.items(), strict=False):
            square = np.asarray(shares, dtype=float).reshape(2, 2)
            axes.imshow(square, cmap=SHADES, vmin=0, vmax=1)
            for (a, b), share in np.ndenumerate(square):
                right = int(wanted[name][2 * a + b])
                ink = "white" if share > 0.6 else INK
                axes.text(b, a, f"{share:.2f}", ha="center", va="center", color=ink, fontsize=9, parse_math=False)
                if right:
                    axes.add_patch(Rectangle((b - 0.44, a - 0.44), 0.88, 0.88, fill=False, ec=PALETTE[1], lw=1.6))
                if (share > 0.5) != bool(right):
                    axes.plot(b, a, marker="x", ms=26, mew=2, color=PALETTE[1])
            axes.set_xticks((0, 1), ("b=0", "1"), fontsize=8)
            axes.set_yticks((0, 1), ("a=0", "1"), fontsize=8)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.set_title(_phrase(name), parse_math=False, fontsize=9.5, weight="normal", loc="center")
        figure.suptitle(_phrase(title), parse_math=False, fontweight="bold", x=0.01, ha="left")
        figure.supxlabel("share of trials that read 1; framed: should be 1", size=9, color=FAINT)
        return _write(figure, path)


def traces(
    groups: Mapping[str, Float[np.ndarray, "row step"]], path: Path, *, push_until: int, title: str, ylabel: str = "u"
) -> Path:
    """One panel per group of rows, a thin line per row, the pushed steps shaded."""
    with matplotlib.rc_context(STYLE):
        figure = _figure(8.5, 3.2)
        row = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
        for index, (axes, (label, values)) in enumerate(zip(row, groups.items(), strict=True)):
            steps = np.arange(1, values.shape[1] + 1)
            axes.axvspan(0.5, push_until + 0.5, color=FAINT, alpha=0.15, lw=0)
            for one in values:
                axes.plot(steps, one, color=PALETTE[index % len(PALETTE)], lw=0.7, alpha=0.5)
            axes.axhline(0, color=FAINT, lw=0.8, ls=(0, (2, 2)))
            axes.set_ylim(-1.08, 1.08)
            axes.set_xlabel("step")
            axes.set_title(_phrase(label), parse_math=False, fontsize=10, weight="normal")
        row[0].set_ylabel(_phrase(ylabel), parse_math=False)
        figure.suptitle(_phrase(title), parse_math=False, fontweight="bold", x=0.01, ha="left")
        return _write(figure, path)


def under_text(
    rows: Mapping[str, tuple[Numbers, Sequence[str]]], path: Path, *, pushed: Sequence[tuple[int, int]], title: str
) -> Path:
    """u over the steps, a line per row, and below them the token that each row says at every step; the steps from
    ``pushed`` (first, last) shaded."""
    with matplotlib.rc_context(STYLE):
        steps = max(len(tokens) for _, tokens in rows.values())
        figure = _figure(max(8.5, 0.24 * steps + 1.5), 4.6)
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 0.55 * len(rows)))
        for first, last in pushed:
            for panel in (axes, below):
                panel.axvspan(first - 0.5, last + 0.5, color=PUSHED, lw=0)
        for index, (label, (values, tokens)) in enumerate(rows.items()):
            y, colour = _numbers(values), PALETTE[index % len(PALETTE)]
            axes.plot(np.arange(1, len(y) + 1), y, color=colour, marker="o", ms=2.5, lw=1.4, label=_phrase(label))
            for step, token in enumerate(tokens, 1):
                word = _short(_visible(token), 6)
                below.text(step, -index, word, color=colour, size=6.5, ha="center", va="center", rotation=90,
                           family=MONO, parse_math=False)  # fmt: skip
        axes.axhline(0, color=FAINT, lw=0.8, ls=(0, (2, 2)))
        axes.set_ylim(-1.08, 1.08)
        axes.set_ylabel("u, what is not said", parse_math=False)
        axes.legend(frameon=False, fontsize=9, loc="upper right", ncols=len(rows), bbox_to_anchor=(1, 1.12))
        below.set_ylim(0.5 - len(rows), 0.5)
        below.set_xlim(0.3, steps + 0.7)
        below.set_yticks([])
        below.spines[:].set_visible(False)
        below.set_ylabel("says", parse_math=False)
        below.set_xlabel("step; shaded: pulses", parse_math=False)
        _title(axes, title)
        return _write(figure, path)


def matrix(
    shares: Sequence[Sequence[float | None]],
    path: Path,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
) -> Path:
    """Shares from 0 to 1 as shaded squares with their numbers."""
    with matplotlib.rc_context(STYLE):
        figure = _figure(3.6 + 1.2 * len(columns), 1.8 + 0.7 * len(rows))
        axes = figure.subplots()
        values = np.array([_numbers(line) for line in shares])
        axes.imshow(values, cmap=SHADES, vmin=0, vmax=1, aspect="auto")
        for (i, j), share in np.ndenumerate(values):
            told, ink = ("–", FAINT) if np.isnan(share) else (f"{share:.3f}", "white" if share > 0.6 else INK)
            axes.text(j, i, told, ha="center", va="center", color=ink, size=9)
        axes.set_xticks(range(len(columns)), [_phrase(name) for name in columns], parse_math=False)
        axes.set_yticks(range(len(rows)), [_phrase(name) for name in rows], parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        _title(axes, title, width=20 + 12 * len(columns))
        return _write(figure, path)


def masses(panels: Mapping[str, Sequence[tuple[str, float]]], path: Path, *, title: str) -> Path:
    """Bars of the likeliest tokens and their probabilities, a panel beside the other."""
    with matplotlib.rc_context(STYLE):
        figure = _figure(8.5, 3.2)
        row = figure.subplots(1, len(panels), sharex=True, squeeze=False)[0]
        for index, (axes, (label, shares)) in enumerate(zip(row, panels.items(), strict=True)):
            y = np.arange(len(shares))[::-1]
            axes.barh(y, [share for _, share in shares], color=PALETTE[index % len(PALETTE)], height=0.65)
            for at, (_, share) in zip(y, shares, strict=True):
                axes.text(share + 0.01, at, f"{share:.3f}", va="center", size=9, color=INK)
            axes.set_yticks(y, [_visible(token) for token, _ in shares], family=MONO, parse_math=False)
            axes.tick_params(length=0)
            axes.margins(x=0.2)
            axes.set_xlabel("probability")
            axes.set_title(_phrase(label), parse_math=False, fontsize=10, weight="normal")
        figure.suptitle(_phrase(title), parse_math=False, fontweight="bold", x=0.01, ha="left")
        return _write(figure, path)


def transcripts(rows: Sequence[Mapping[str, Any]], path: Path, *, max_steps: int = 64) -> Path:
    """The token of every step, the unpushed run's above the pushed run's, differences shaded.

    Rows have arm, alpha, prompt, cover and steered; the last two are lists of token texts, one per
    step, of which `max_steps` are drawn. Spaces and line ends inside a token are made visible.
    """
    width, left, gutter, tall, size = 9.0, 0.2, 1.0, 0.21, 9.0  # inches; points
    letter = 0.602 * size / 72  # inches that every glyph of the monospaced face takes
    room = int((width - gutter - left) / letter)
    texts = [_wrapped(row["cover"], row["steered"], room, max_steps) for row in rows]
    height = 0.7 + sum(0.7 + len(text) * (2 * tall + 0.1) for text in texts)
    with matplotlib.rc_context(STYLE):
        figure = _figure(width, height, layout=None)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()

        def write(x: float, y: float, words: str, **style: Any) -> None:
            axes.text(x, y, words, va="center", parse_math=False, **style)

        write(left, 0.25, "What each run says, step by step", size=12, weight="bold")
        marks = "shaded: another token than unpushed · ␣ space · ↵ line end"
        write(left, 0.47, marks, color=FAINT, size=9)
        y = 0.85
        for row, text in zip(rows, texts, strict=True):
            dropped = max(len(row["cover"]), len(row["steered"])) - max_steps
            tail = f", {dropped} more steps not shown" if dropped > 0 else ""
            head = f"{_short(_phrase(row['arm']), 48)}, α = {row['alpha']:g}{tail}"
            write(left, y, head, weight="bold")
            prompt = _short(_phrase(f"prompt: {row['prompt']}"), 110)
            write(left, y + 0.2, prompt, color=FAINT, size=9)
            y += 0.36
            for line in text:
                for below, name in enumerate(("unpushed", "pushed")):
                    middle = y + (below + 0.5) * tall
                    write(left, middle, name, color=FAINT, size=9)
                    for at, cells, pieces in line:
                        changed = below == 1 and pieces[0] != pieces[1]
                        fill = CHANGED if changed else "white"
                        place = (gutter + at * letter, y + below * tall)
                        axes.add_patch(Rectangle(place, cells * letter, tall, fc=fill, ec=GRID, lw=0.7))
                        x = place[0] + cells * letter / 2
                        write(x, middle, pieces[below], ha="center", family=MONO, size=size)
                y += 2 * tall + 0.1
            y += 0.34
        return _write(figure, path)


def lens_grid(panels: Sequence[LensPanel], path: Path, *, row_labels: Sequence[str], title: str) -> Path:
    """Panels side by side: a row per block with its top tokens, shaded by their probability.

    The first row is drawn at the bottom and the last on top, in the direction the residual stream
    flows. In every panel but the first, tokens that the first does not have in that row are framed.

    Raises ValueError when a panel's tokens, probabilities and `row_labels` differ in shape.
    """
    for panel in panels:
        shape = {(len(panel.tokens), len(row)) for row in panel.tokens}
        if shape != {panel.probabilities.shape} or len(panel.tokens) != len(row_labels):
            raise ValueError(
                f"lens panel {panel.title!r}: tokens {sorted(shape)}, probabilities "
                f"{panel.probabilities.shape} and {len(row_labels)} row labels must agree"
            )
    n_rows, width, size = len(row_labels), 9.5, 8.0
    with matplotlib.rc_context(STYLE):
        figure = _figure(width, 1.5 + 0.21 * n_rows)
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for panel, axes in zip(panels, row, strict=True):
            shares = np.asarray(panel.probabilities, dtype=float)
            image = axes.imshow(shares, cmap=SHADES, vmin=0, vmax=1, aspect="auto", origin="lower")
            n_ranks = shares.shape[1]
            letters = int((width - 1.6) / len(panels) / n_ranks / (0.602 * size / 72)) - 2
            for (y, x), share in np.ndenumerate(shares):
                piece = panel.tokens[y][x]
                style = {"color": "white" if share > 0.7 else INK, "family": MONO, "size": size}
                text = _short(_visible(piece), max(letters, 2))
                axes.text(x, y, text, ha="center", va="center", parse_math=False, **style)
                if piece not in panels[0].tokens[y]:
                    place = (x - 0.46, y - 0.4)
                    axes.add_patch(Rectangle(place, 0.92, 0.8, fill=False, ec=PALETTE[1], lw=1.2))
            axes.set_title(_phrase(panel.title), parse_math=False, fontsize=10, weight="normal")
            axes.set_xticks(range(n_ranks), [f"top {rank + 1}" for rank in range(n_ranks)])
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        row[0].set_yticks(range(n_rows), map(_phrase, row_labels), parse_math=False)
        bar = figure.colorbar(image, ax=list(row), aspect=40, pad=0.01, label="probability")
        bar.outline.set_visible(False)  # type: ignore[operator]
        figure.suptitle(_phrase(title), parse_math=False, fontweight="bold", x=0.01, ha="left")
        if len(panels) > 1:
            note = "framed: not among the tokens that the first panel has in this row"
            figure.supxlabel(note, size=9, color=FAINT)
        return _write(figure, path)


def _figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _write(figure: Figure, path: Path) -> Path:
    figure.draw_without_rendering()  # the labels need to know where the lines end
    for axes in figure.axes:
        _label_lines(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _title(axes: Axes, title: str, note: str = "", width: int = 78) -> None:
    axes.set_title(textwrap.fill(_phrase(title), width), parse_math=False, pad=22 if note else 8)
    axes.text(0, 1.03, note, transform=axes.transAxes, color=FAINT, size=9, parse_math=False)


def _numbers(values: Numbers) -> np.ndarray:
    return np.array([math.nan if value is None else float(value) for value in values])


@dataclass(frozen=True)
class _Curve:
    label: str  # with "_" in front, as in matplotlib, it is not shown
    colour: str
    dash: Any
    rows: list[Mapping[str, Any]]  # in order of step


def _curves(rows: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> list[_Curve]:
    """A curve per arm and alpha; an arm without rows has one too, so that its label stays."""
    curves: list[_Curve] = []
    for turn, (arm, colour) in enumerate(colours.items()):
        alphas = list(dict.fromkeys(row["alpha"] for row in rows if row["arm"] == arm))
        pushed = [alpha for alpha in alphas if alpha] or alphas or [None]
        for index, alpha in enumerate(pushed):
            label = f"{arm}, α = {alpha:g}" if len(pushed) > 1 else arm
            dash = DASHES[(turn // len(PALETTE) + index) % len(DASHES)]
            curves.append(_Curve(label, colour, dash, _by_step(rows, arm, alpha)))
        for alpha in [alpha for alpha in alphas if alpha not in pushed]:
            first = all(curve.colour != FAINT for curve in curves)
            label = "α = 0, every arm" if first else "_unpushed"
            curves.append(_Curve(label, FAINT, "solid", _by_step(rows, arm, alpha)))
    return curves


def _by_step(rows: Sequence[Mapping[str, Any]], arm: str, alpha: Any) -> list[Mapping[str, Any]]:
    mine = [row for row in rows if (row["arm"], row["alpha"]) == (arm, alpha)]
    mine.sort(key=lambda row: row["step"])
    for before, after in pairwise(mine):
        if before["step"] == after["step"]:
            raise ValueError(
                f"{arm}, α = {alpha:g}: two rows for step {after['step']}; a figure shows one "
                "condition per arm and alpha: choose rows, or average them, before drawing"
            )
    return mine


def _draw(axes: Axes, label: str, line: Line, colour: str, dash: Any) -> None:
    x, y = _numbers(line[0]), _numbers(line[1])
    axes.grid(axis="y", color=GRID, lw=0.7)
    axes.set_axisbelow(True)
    marked = len(x) <= 40 and dash == "solid"  # else only so much that a lone point can be seen
    look: dict[str, Any] = {"lw": 0.8, "alpha": 0.6, "ms": 1.0} if colour == FAINT else {}
    look = {"ls": dash, "marker": "o", "ms": 3.5 if marked else 1.5} | look
    axes.plot(x, y, color=colour, label=label, **look)
    if line[2] is None or line[3] is None:
        return
    low, high = (np.ma.masked_invalid(_numbers(end)) for end in line[2:])  # type: ignore[arg-type]
    axes.fill_between(x, low, high, color=colour, alpha=0.14, lw=0)
    if len(x) == 1:
        axes.vlines(x, low, high, color=colour, lw=1.5)


def _label_lines(axes: Axes) -> None:
    """Each labelled line's name to the right of the axes, near its end, none over another."""
    drawn = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    frame, point = axes.get_window_extent(), DPI / 72  # places are points above the frame's foot
    wanted: list[tuple[float, str, Any, tuple[float, float] | None]] = []
    for line in drawn:
        pairs = zip(np.ravel(line.get_xdata()), np.ravel(line.get_ydata()), strict=True)
        points = [(float(x), float(y)) for x, y in pairs if math.isfinite(y)]
        text = _label(str(line.get_label()) if points else f"{line.get_label()} (no data)")
        end = points[-1] if points else None
        foot = (axes.transData.transform(end)[1] - frame.y0) / point if end else 0.0
        wanted.append((float(foot), text, line.get_color(), end))
    wanted.sort(key=lambda label: label[0])
    sizes = [1.5 + 10.5 * (1 + text.count("\n")) for _, text, _, _ in wanted]
    places = _spread([label[0] for label in wanted], sizes, frame.height / point)
    for place, (_, text, colour, end) in zip(places, wanted, strict=True):
        axes.annotate(
            text,
            xy=end or (1.0, 0.0),
            xycoords="data" if end else "axes fraction",
            xytext=(1.03, place),
            textcoords=("axes fraction", "axes points"),
            color=colour,
            size=9,
            va="center",
            parse_math=False,
            annotation_clip=False,
            arrowprops=dict(arrowstyle="-", color=colour, lw=0.6, shrinkB=3, relpos=(0, 0.5)),
        )


def _label(text: str) -> str:
    return textwrap.fill(_phrase(text), 30)


def _spread(wanted: Sequence[float], heights: Sequence[float], room: float) -> list[float]:
    """Centres as near as may be to the wanted ones, in their order, so that nothing overlaps.

    They stay between 0 and `room` as long as everything fits there.
    """
    places = list(wanted)
    fits = sum(heights) <= room
    for _ in range(400):
        if places and fits:
            places[0] = max(places[0], heights[0] / 2)
            places[-1] = min(places[-1], room - heights[-1] / 2)
        for i, (above, below) in enumerate(pairwise(heights)):
            overlap = (above + below) / 2 - (places[i + 1] - places[i])
            if overlap > 0:
                places[i] -= overlap / 2
                places[i + 1] += overlap / 2
    return places


Placed = tuple[int, int, tuple[str, str]]
"""The column where a cell begins, its width in letters, and its two texts."""


def _wrapped(cover: Sequence[str], steered: Sequence[str], room: int, max_steps: int) -> list[list[Placed]]:
    """Steps as cells, each as wide as the wider of its two tokens, in lines of `room` letters."""
    found: list[list[Placed]] = [[]]
    column = 0
    for pair in list(zip_longest(cover, steered, fillvalue=""))[:max_steps]:
        above, below = (_short(_visible(piece), 24) for piece in pair)
        cells = max(len(above), len(below), 1) + 1
        if column + cells > room:
            found.append([])
            column = 0
        found[-1].append((column, cells, (above, below)))
        column += cells
    return found


def _short(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"


def _phrase(text: str) -> str:
    return _drawable(" ".join(text.split()))


def _visible(piece: str) -> str:
    for hidden, mark in ((" ", "␣"), ("\n", "↵"), ("\t", "⇥")):
        piece = piece.replace(hidden, mark)
    return _drawable(piece)


def _drawable(text: str) -> str:
    """The text with characters that the faces have no glyph for written as their number."""
    return "".join(
        letter if ord(letter) in _glyphs() and letter.isprintable() else f"\\u{ord(letter):x}" for letter in text
    )


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(MONO)).get_charmap())
