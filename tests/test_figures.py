import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from feedback import figures

NAN = float("nan")
ARMS = ["cover forced, λ=0 (cache memory only)", "free-running, λ=1, τ=0.3", "hard loop"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """The figures that were written, as objects, in order."""
    found: list[Figure] = []
    save = Figure.savefig

    def spy(figure: Figure, *args: Any, **options: Any) -> None:
        found.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", spy)
    yield found


def size(path: Path) -> tuple[int, int]:
    """Width and height from the header of a PNG file."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def words(figure: Figure) -> list[str]:
    found = [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)]
    return [" ".join(text.split()) for text in found if text.strip()]


def table(arms: list[str], steps: list[int], alphas: tuple[float, ...] = (2.0,)) -> list[dict[str, Any]]:
    return [
        {
            "arm": arm, "reader": reader, "split": "messages", "alpha": alpha, "step": step,
            "ber": 0.1 * index, "ber_low": 0.1 * index - 0.02, "ber_high": 0.1 * index + 0.02,
            "argmax_agreement": 1 - 0.1 * index,
        }
        for index, arm in enumerate(arms)
        for reader in ("informed", "blind")
        for alpha in alphas
        for step in steps
    ]  # fmt: skip


def curves(figure: Figure, panel: int = 0) -> dict[str, Any]:
    found = figure.axes[panel].lines
    return {str(line.get_label()): line for line in found if not str(line.get_label()).startswith("_")}


def ber(rows: list[dict[str, Any]], folder: Path, **changes: Any) -> Path:
    options: dict[str, Any] = {"push_until": 4, "title": "three arms"} | changes
    return figures.ber_over_steps(rows, folder / "figures" / "ber.png", **options)


def test_the_picture_is_of_readable_size_and_every_arm_is_labelled_in_both_panels(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    path = ber(table(ARMS, list(range(1, 9))), tmp_path)
    assert path == tmp_path / "figures" / "ber.png"
    assert size(path) == (1360, 928)  # 8.5 x 5.8 inches at 160 dots per inch
    (figure,) = drawn
    for arm in ARMS:
        assert words(figure).count(arm) == 2
    assert list(curves(figure)) == list(curves(figure, 1)) == ARMS
    assert "informed reader, held-out messages · 0.5 is guessing · shaded: pushed" in words(figure)


def test_both_panels_show_the_numbers_of_the_table(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = table(ARMS, [1, 2, 3])
    rows.reverse()  # the order of the rows does not matter
    ber(rows, tmp_path, reader="blind")
    line = curves(drawn[0])[ARMS[2]]
    assert line.get_xdata().tolist() == [1, 2, 3]
    assert line.get_ydata().tolist() == [0.2, 0.2, 0.2]
    assert curves(drawn[0], 1)[ARMS[2]].get_ydata().tolist() == [0.8, 0.8, 0.8]


def test_labels_stand_beside_the_data_inside_the_picture_and_apart(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = table([f"an arm with a rather long name, number {i}" for i in range(7)], [1, 2, 3])
    for row in rows:
        row["ber"] = row["argmax_agreement"] = 1.0  # all lines end at one point
    ber(rows, tmp_path)
    (figure,) = drawn
    width, height = figure.canvas.get_width_height(physical=True)
    for axes in figure.axes:
        notes = [note for note in axes.texts if "number" in note.get_text()]
        boxes = [Text.get_window_extent(note) for note in notes]  # without the line to the data
        assert len(boxes) == 7
        for box in boxes:
            assert axes.get_window_extent().x1 < box.x0 < box.x1 <= width
            assert 0 <= box.y0 < box.y1 <= height
        boxes.sort(key=lambda box: box.y0)
        assert all(low.y1 <= high.y0 + 1 for low, high in pairwise(boxes))


def test_the_pushed_steps_are_shaded_and_no_others(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = table(ARMS, list(range(1, 9)))
    ber(rows, tmp_path, push_until=4)
    ber(rows, tmp_path, push_until=None)
    spans = [
        patch.get_extents().transformed(axes.transData.inverted()) for axes in drawn[0].axes for patch in axes.patches
    ]
    assert [(span.x0, span.x1) for span in spans] == [pytest.approx((0.5, 4.5))] * 2
    assert [len(axes.patches) for axes in drawn[1].axes] == [0, 0]
    assert not any("shaded" in text for text in words(drawn[1]))
    ber(rows, tmp_path, push_until=0)  # nothing was pushed
    assert [len(axes.patches) for axes in drawn[2].axes] == [0, 0]
    assert not any("shaded" in text for text in words(drawn[2]))


def test_an_arm_keeps_its_colour_in_the_figure_of_another_reader(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = table(ARMS, [1, 2])
    ber(rows, tmp_path)
    ber(
        [row for row in rows if (row["arm"], row["reader"]) != (ARMS[0], "blind")],
        tmp_path,
        reader="blind",
    )
    first, second = ({arm: line.get_color() for arm, line in curves(one).items()} for one in drawn)
    assert first == figures.arm_colours(ARMS)
    assert len(set(first.values())) == 3
    assert second == {f"{arm}": colour for arm, colour in first.items()}
    assert f"{ARMS[0]} (no data)" in words(drawn[1])


def test_two_strengths_of_one_arm_are_two_labelled_lines_of_one_colour(tmp_path: Path, drawn: list[Figure]) -> None:
    ber(table(ARMS[:1], [1, 2, 3], alphas=(0.5, 8.0)), tmp_path)
    found = curves(drawn[0])
    assert list(found) == [f"{ARMS[0]}, α = 0.5", f"{ARMS[0]}, α = 8"]
    assert len({line.get_color() for line in found.values()}) == 1
    assert len({line.get_linestyle() for line in found.values()}) == 2


def test_unpushed_rows_of_pushed_arms_are_grey_and_share_one_label(tmp_path: Path, drawn: list[Figure]) -> None:
    ber(table(ARMS, [1, 2, 3], alphas=(2.0, 0.0)), tmp_path)
    (figure,) = drawn
    assert sorted(curves(figure)) == sorted([*ARMS, "α = 0, every arm"])
    assert words(figure).count("α = 0, every arm") == 2
    upper = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 3]  # type: ignore[arg-type]
    assert [line.get_color() for line in upper].count(figures.FAINT) == 3
    assert len(figure.axes[0].collections) == 3  # intervals of the pushed lines only
    ber(table(ARMS, [1, 2, 3], alphas=(0.0,)), tmp_path)  # alone, it is what the figure is about
    assert list(curves(drawn[1])) == ARMS


def test_more_arms_than_colours_still_differ(tmp_path: Path, drawn: list[Figure]) -> None:
    ber(table([f"arm {i}" for i in range(9)], [1, 2]), tmp_path)
    looks = {(line.get_color(), line.get_linestyle()) for line in curves(drawn[0]).values()}
    assert len(looks) == 9


def test_one_step_is_drawn_with_its_interval(tmp_path: Path, drawn: list[Figure]) -> None:
    assert size(ber(table(ARMS, [5]), tmp_path)) == (1360, 928)
    upper = drawn[0].axes[0]
    bars = [c for c in upper.collections if type(c).__name__ == "LineCollection"]
    assert len(bars) == 3
    drawn[0].draw_without_rendering()
    ticks = [float(tick) for tick in drawn[0].axes[1].get_xticks()]
    assert all(tick == round(tick) for tick in ticks)


def test_gaps_missing_intervals_and_an_arm_of_nan_do_not_stop_the_picture(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = table(ARMS, [1, 2, 3, 4, 5])
    for row in rows:
        if row["arm"] == ARMS[1]:
            row |= {"ber": NAN, "ber_low": NAN, "ber_high": NAN, "argmax_agreement": None}
        elif row["step"] == 3:
            row |= {"ber": None, "ber_low": None, "ber_high": None}
    ber(rows, tmp_path)
    line = curves(drawn[0])[ARMS[2]].get_ydata()
    assert np.isnan(line).tolist() == [False, False, True, False, False]
    assert words(drawn[0]).count(f"{ARMS[1]} (no data)") == 2


def test_an_empty_table_and_a_reader_without_rows_give_a_picture_that_says_so(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    assert size(ber([], tmp_path)) == (1360, 928)
    ber(table(ARMS, [1, 2]), tmp_path, split="prompts")
    assert "informed reader, held-out prompts · no rows to draw" in words(drawn[1])


def test_two_rows_for_one_point_are_refused(tmp_path: Path) -> None:
    rows = table(ARMS, [1, 2])
    with pytest.raises(ValueError, match=r"hard loop, α = 2: two rows for step 2.*average"):
        ber([*rows, rows[-1] | {"reader": "informed"}], tmp_path)


def test_nothing_in_a_text_is_taken_for_a_formula_or_a_missing_glyph(
    tmp_path: Path, drawn: list[Figure], recwarn: pytest.WarningsRecorder
) -> None:
    odd = "$\\nosuch$ 你好"  # as a formula, an error
    ber(table([odd], [1, 2]), tmp_path, title=odd)
    figures.lines({odd: ([1, 2], [1, 2], None, None)}, tmp_path / "l.png", odd, odd, odd)
    figures.transcripts([transcript(cover=[odd, "$", "$"], prompt=odd, arm=odd)], tmp_path / "t.png")
    panel = figures.LensPanel(odd, [[odd]], np.ones((1, 1)))
    figures.lens_grid([panel, panel], tmp_path / "g.png", row_labels=[odd], title=odd)
    assert [str(warning.message) for warning in recwarn] == []
    assert all(any("$\\nosuch$ \\u4f60" in text for text in words(one)) for one in drawn[:3])


def transcript(**changes: Any) -> dict[str, Any]:
    return {
        "arm": "free-running",
        "alpha": 2.0,
        "prompt": "Tell me\na story",
        "cover": ["Once", " upon", " a", " time", ",", "\n"],
        "steered": ["Once", " upon", " the", " time", ",", "\n"],
    } | changes


def cells(figure: Figure) -> list[tuple[str, bool, Any, Any]]:
    """Text, whether shaded, and the extents of text and cell, in the order drawn."""
    axes = figure.axes[0]
    mono = [text for text in axes.texts if text.get_fontfamily() == [figures.MONO]]
    assert len(mono) == len(axes.patches)
    shaded = matplotlib.colors.to_rgba(figures.CHANGED)
    return [
        (
            text.get_text(),
            patch.get_facecolor() == shaded,
            text.get_window_extent(),
            patch.get_window_extent(),
        )
        for text, patch in zip(mono, axes.patches, strict=True)
    ]


def test_transcripts_show_both_runs_and_shade_the_tokens_that_differ(tmp_path: Path, drawn: list[Figure]) -> None:
    path = figures.transcripts([transcript(), transcript(arm="hard loop", alpha=-8.0)], tmp_path / "t.png")
    width, height = size(path)
    assert width == 1440 and 300 < height < 600
    found = cells(drawn[0])
    above, below = found[:6], found[6:12]
    assert [text for text, *_ in above] == ["Once", "␣upon", "␣a", "␣time", ",", "↵"]
    assert [text for text, *_ in below] == ["Once", "␣upon", "␣the", "␣time", ",", "↵"]
    assert [shaded for _, shaded, *_ in above] == [False] * 6
    assert [shaded for _, shaded, *_ in below] == [False, False, True, False, False, False]
    for text in ("free-running, α = 2", "hard loop, α = -8", "prompt: Tell me a story", "pushed"):
        assert text in words(drawn[0])


def test_no_token_leaves_its_cell_and_no_cell_the_picture(tmp_path: Path, drawn: list[Figure]) -> None:
    long = ["W" * 300, "", "\t", "🙂", *[" internationalization"] * 30, *["W"] * 100]
    row = transcript(cover=long, steered=long[::-1], prompt="W" * 500, arm="W" * 500)
    figures.transcripts([row, transcript(cover=[], steered=[])], tmp_path / "t.png", max_steps=200)
    (figure,) = drawn
    width, height = figure.canvas.get_width_height(physical=True)
    for _, _, text, cell in cells(figure):
        assert cell.x0 - 0.5 <= text.x0 and text.x1 <= cell.x1 + 0.5
        assert min(cell.min) >= 0 and cell.x1 <= width and cell.y1 <= height
    boxes = sorted(((cell.y0, cell.x0, cell.x1) for _, _, _, cell in cells(figure)))
    for (y, _, end), (next_y, start, _) in pairwise(boxes):
        assert next_y > y + 1 or start >= end - 0.5  # cells of one line do not overlap


def test_a_run_that_stopped_early_and_steps_left_out_are_said(tmp_path: Path, drawn: list[Figure]) -> None:
    row = transcript(cover=["a"] * 10, steered=["a"] * 3)
    figures.transcripts([row], tmp_path / "t.png", max_steps=4)
    found = cells(drawn[0])
    assert [(text, shaded) for text, shaded, *_ in found[4:]] == [("a", False)] * 3 + [("", True)]
    assert "free-running, α = 2, 6 more steps not shown" in words(drawn[0])


def test_no_transcripts_are_a_picture_too(tmp_path: Path) -> None:
    assert size(figures.transcripts([], tmp_path / "t.png"))[0] == 1440


def panel(title: str, tokens: list[list[str]]) -> figures.LensPanel:
    shares = np.linspace(0.9, 0.1, len(tokens) * len(tokens[0]), dtype=np.float32)
    return figures.LensPanel(title, tokens, shares.reshape(len(tokens), -1))


def test_a_lens_grid_shows_every_token_and_frames_what_the_first_panel_lacks(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    one = panel("unpushed", [[" cat", " dog"], [" bird", "\n"], ["a", "b"]])
    two = panel("pushed", [[" dog", " cat"], [" bird", " sea"], ["c", "d"]])
    labels = ["block 0", "block 1", "block 2"]
    path = figures.lens_grid([one, two], tmp_path / "l.png", row_labels=labels, title="Lens")
    width, height = size(path)
    assert width == 1520 and 300 < height < 500
    left, right = drawn[0].axes[:2]
    assert [text.get_text() for text in left.texts] == ["␣cat", "␣dog", "␣bird", "↵", "a", "b"]
    assert [text.get_text() for text in right.texts] == ["␣dog", "␣cat", "␣bird", "␣sea", "c", "d"]
    assert len(left.patches) == 0
    places = [(round(p.get_x() + 0.46), round(p.get_y() + 0.4)) for p in right.patches]  # type: ignore[attr-defined]
    assert places == [(1, 1), (0, 2), (1, 2)]  # rank, row: " sea", "c", "d"
    assert left.get_ylim()[0] < left.get_ylim()[1]  # the first row is at the bottom
    for text in ["unpushed", "pushed", "Lens", *labels]:
        assert text in words(drawn[0])


def test_lens_tokens_stay_in_their_cells(tmp_path: Path, drawn: list[Figure]) -> None:
    wide = panel("wide", [["internationalization"] * 8 for _ in range(3)])
    figures.lens_grid([wide, wide], tmp_path / "l.png", row_labels=["a", "b", "c"], title="t")
    for axes in drawn[0].axes[:2]:
        edges = axes.transData.transform([(x - 0.5, 0) for x in range(9)])[:, 0]
        for index, text in enumerate(axes.texts):
            box = text.get_window_extent()
            assert edges[index % 8] - 0.5 <= box.x0 and box.x1 <= edges[index % 8 + 1] + 0.5


def test_lens_panels_of_other_shapes_are_refused(tmp_path: Path) -> None:
    good = panel("good", [["a", "b"], ["c", "d"], ["e", "f"]])
    bad = figures.LensPanel("bad", [["a", "b"], ["c"], ["e", "f"]], np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"lens panel 'bad': tokens .* must agree"):
        figures.lens_grid([good, bad], tmp_path / "l.png", row_labels=["0", "1", "2"], title="t")
    with pytest.raises(ValueError, match=r"lens panel 'good': .* 2 row labels"):
        figures.lens_grid([good], tmp_path / "l.png", row_labels=["0", "1"], title="t")


def test_lines_are_labelled_at_their_ends_with_intervals_and_level(tmp_path: Path, drawn: list[Figure]) -> None:
    x = np.arange(5)
    series: dict[str, figures.Line] = {
        "measured": (x, x**2.0, x**2.0 - 1, x**2.0 + 1),
        "predicted": (x, [0, 1, None, 9, NAN], None, None),
        "none": ([], [], None, None),
    }
    path = figures.lines(series, tmp_path / "l.png", "block", "length", "Norm", reference=4.0)
    assert size(path) == (1360, 672)
    axes = drawn[0].axes[0]
    assert len(axes.collections) == 1  # one interval
    for text in ("measured", "predicted", "none (no data)", "block", "length", "Norm"):
        assert text in words(drawn[0])
    assert [line.get_ydata() for line in axes.lines[3:]] == [[4.0, 4.0]]
    figures.lines(series, tmp_path / "log.png", "x", "y", "t", log_y=True)
    assert drawn[1].axes[0].get_yscale() == "log"
    assert size(figures.lines({}, tmp_path / "empty.png", "x", "y", "t")) == (1360, 672)


def test_drawing_leaves_matplotlib_as_it_was_and_gives_the_same_bytes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ber(table(ARMS, [1, 2, 3]), tmp_path / "1")
    monkeypatch.setitem(matplotlib.rcParams, "axes.titlesize", 31.0)  # a user's own style
    two = ber(table(ARMS, [1, 2, 3]), tmp_path / "2")
    assert matplotlib.rcParams["axes.titlesize"] == 31.0
    assert one.read_bytes() == two.read_bytes()


def test_a_hysteresis_shows_every_branch_the_thresholds_and_the_prediction(tmp_path: Path, drawn: list[Figure]) -> None:
    branches = {
        "up, 2 steps a level": ([-1.0, 0.0, 1.0, 2.0], [-0.9, -0.8, -0.5, 0.9]),
        "down, 2 steps a level": ([2.0, 1.0, 0.0, -1.0], [0.9, 0.8, 0.5, -0.9]),
    }
    path = figures.hysteresis(
        branches, tmp_path / "h.png", measured=(-0.8, 1.6), predicted=[[-0.9, -0.7], [NAN, 1.7]], title="cat or dog"
    )
    assert min(size(path)) > 500
    (axes,) = drawn[0].axes
    assert [list(line.get_ydata()) for line in axes.lines[:1]] == [[-0.9, -0.8, -0.5, 0.9]]
    assert sum(list(line.get_xdata()) in ([-0.8, -0.8], [1.6, 1.6]) for line in axes.lines) == 2
    assert len(axes.patches) == 1  # a band of which one end is unknown is none
    assert {*branches, "resets -0.8, sets 1.6 (constant push)", "predicted from L and b", "cat or dog"} <= set(
        words(drawn[0])
    )


def test_truth_tables_write_the_share_in_its_square_frame_what_is_right_and_cross_what_is_wrong(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    shares = {"AND": np.array([0.0, 0.1, 0.2, 0.9]), "OR": np.array([0.0, 1.0, 0.3, 1.0])}
    wanted = {"AND": (0, 0, 0, 1), "OR": (0, 1, 1, 1)}
    figures.truth_tables(shares, wanted, tmp_path / "t.png", title="Gates")
    first, second = (axes for axes in drawn[0].axes if axes.get_visible())
    assert [text.get_text() for text in first.texts] == ["0.00", "0.10", "0.20", "0.90"]
    assert [text.get_position() for text in first.texts] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert (len(first.patches), len(second.patches)) == (1, 3)
    assert (len(first.lines), len(second.lines)) == (0, 1)  # OR of 1, 0 is wrong more often than not


def test_traces_draw_a_line_per_row_and_shade_the_pushed_steps(tmp_path: Path, drawn: list[Figure]) -> None:
    groups = {"0, 0": np.full((3, 6), -0.9), "1, 1": np.linspace(-0.9, 0.9, 18).reshape(3, 6)}
    figures.traces(groups, tmp_path / "u.png", push_until=2, title="NAND")
    for axes, values in zip(drawn[0].axes, groups.values(), strict=True):
        own = [line for line in axes.lines if len(line.get_xdata()) == 6]
        assert np.allclose([line.get_ydata() for line in own], values)
        (shade,) = axes.patches
        assert (shade.get_x(), shade.get_x() + shade.get_width()) == (0.5, 2.5)
