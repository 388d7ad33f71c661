"""Learns a hidden cell: a loop that says one word whatever bits it holds, through the frozen model.

The best cell by a held-out loop test (many starts, noise, nothing of it in any batch) is written whenever there is a
better one, so an interrupted run leaves the best so far, and the same command with ``resume=`` goes on from there.
"""

import math
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from conf import build
from conf.schema import Config
from feedback import cells, figures
from feedback.hidden import HiddenCell
from feedback.learning import CELL, STATE, Learner
from feedback.models import LanguageModel, ModelShape
from feedback.results import Result
from feedback.sites import resolve
from feedback.tracking import Tracker

CONTINUES = (STATE, CELL)  # what a resumed run goes on with


def check(config: Config, shape: ModelShape) -> None:
    """Refuses settings that cannot work, before the model is loaded."""
    settings = config.learn
    build.check_shape(config, shape)
    build.check_learning(config)
    if config.context.kind != "prompt" or not settings.cover:
        raise ValueError(
            f"context={config.context.kind}, learn.cover={settings.cover!r}: expected context=prompt and a word; "
            "experiment=hidden_story learns a cell under ordinary text"
        )
    words = 2 ** len(settings.pairs)
    if settings.test_rows < words or settings.test_steps < 4:
        raise ValueError(
            f"learn.test_rows={settings.test_rows}, learn.test_steps={settings.test_steps}: expected a row for each of "
            f"the {words} words, and at least 4 steps"
        )


def run(config: Config, model: LanguageModel, tracker: Tracker, folder: Path) -> Result:
    """Learns, tests, and measures what came out of it."""
    settings = config.learn
    start = build.untrained_cell(config, model)
    options = build.learning(config, rows=settings.test_rows, steps=settings.test_steps)
    learner = Learner(model, start, build.objective(config), **options)
    untrained = learner.test()
    resumed = learner.descend(folder, tracker.log, quiet=config.quiet)
    assert learner.best is not None
    table, (number, tested, cell) = learner.table, learner.best
    confirmed = cell.on(model).loop_test(seed=config.seed + 2, **options["testing"])  # not what it was chosen by
    cell.save(folder / CELL)
    tracker.artifact("cell", "cell", folder / CELL, {"loop_test": tested.plain(), "step": number})
    summary = {
        "works": confirmed.works(settings.margin),
        "best_step": number,
        "steps": learner.step,
        "resumed_at_step": resumed,
        "loop_test": tested.plain(),
        "confirmed": confirmed.plain(),
        "margin": confirmed.margin,
        "untrained": untrained.plain(),
        "first_working_step": next((r["step"] for r in table if r["works"]), None),
        "n_bits": len(cell.pairs),
        "positions": len(cell.prefix),
        **measured(model, cell),
    }
    record = {
        "cell": str(folder / CELL),
        "site": {"block": start.site.block, "at": start.site.at, "path": resolve(model.module, start.site).path},
        "noise_model": {
            "sigma": config.noise,
            "unit": "mean length of an embedding row, per coordinate / sqrt(d_model), every soft token of a loop test",
        },
    }
    tests = [row for row in table if row["margin"] is not None]
    path = figures.lines(
        {
            "loss, nats": (
                [row["step"] for row in table],
                [row["loss"] for row in table],
                None,
                None,
            ),
            "worst margin": ([row["step"] for row in tests], [row["margin"] for row in tests], None, None),
            "worst level": ([row["step"] for row in tests], [row["level"] for row in tests], None, None),
        },
        folder / "figures" / "learning.png",
        title=f"A cell under {config.learn.cover!r}: loss, and the held-out loop test",
        xlabel="step",
        ylabel="",
    )
    return Result(table=table, summary=summary, figures={"learning": path}, record=record)


def measured(model: LanguageModel, cell: HiddenCell) -> dict[str, Any]:
    """Coupling and pulse thresholds of every bit; null for a cell that does not hold all its words."""
    held = cell.on(model)
    found: dict[str, Any] = {"coupling_L": [], "pulse_set": [], "pulse_reset": [], "why_not": None}
    try:
        vectors = held.contrasts().scaled
        for bit in range(held.n_bits):
            latch = held.latch(bit, vectors[bit])
            found["coupling_L"].append(latch.couplings([0.0]).coupling.item())
            point = cells.operating_point(latch, pulse_steps=5, settle_steps=8, top=None, single=1.6)
            found["pulse_set"].append(point.set)
            found["pulse_reset"].append(-point.reset)
    except ValueError as error:
        found["why_not"] = str(error)
    return found


def show(result: Result) -> Table:
    """The printed table: the loop tests."""
    s = result.summary
    first = s["first_working_step"]
    table = Table(
        title=f"{s['n_bits']}-bit cell: {'works' if s['works'] else 'does not work'}; best at step {s['best_step']} of "
        f"{s['steps']}, first working at {'none' if first is None else first}",
        caption=f"the best under other noise: {_told(s['confirmed'])}; untrained: {_told(s['untrained'])}; pulses set "
        f"at {', '.join(f'{x:.1f}' for x in s['pulse_set']) or '–'}, reset at "
        f"{', '.join(f'{x:.1f}' for x in s['pulse_reset']) or '–'}",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("step", "loss", "kept", "text agreement", "worst margin", "worst level", ""):
        table.add_column(column, justify="right")
    for row in result.table:
        if row["margin"] is None:
            continue
        values = [row[name] for name in ("kept", "text_agreement", "margin", "level")]
        note = "best" if row["step"] == s["best_step"] else "works" if row["works"] else ""
        table.add_row(str(row["step"]), f"{row['loss']:.3f}", *(f"{x:.3f}" for x in values if math.isfinite(x)), note)
    return table


def _told(test: dict[str, float]) -> str:
    return f"kept {test['kept']:.2f}, text {test['text_agreement']:.2f}, margin {test['margin']:.3f}"
