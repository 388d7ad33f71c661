"""Learns a hidden cell: a loop that says one word whatever bits it holds, through the frozen model.

The best cell by a held-out loop test (many starts, noise, nothing of it in any batch) is written whenever there is a
better one, so an interrupted run leaves the best so far, and the same command with ``resume=`` goes on from there.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from conf import build
from conf.schema import Config
from feedback import cells, figures, hidden, progress
from feedback.hidden import HiddenCell
from feedback.learning import Learner, Objective
from feedback.models import LanguageModel, ModelShape
from feedback.results import Result
from feedback.sites import resolve, resolve_block
from feedback.tracking import Tracker

STATE, CELL = "learner.safetensors", "cell.safetensors"
CONTINUES = (STATE, CELL)  # what a resumed run goes on with


def check(config: Config, shape: ModelShape) -> None:
    """Refuses settings that cannot work, before the model is loaded."""
    settings = config.learn
    build.check_shape(config, shape)
    objective(config)
    if settings.kind not in ("prefix", "push", "both"):
        raise ValueError(f"learn.kind={settings.kind!r}: expected prefix, push or both")
    if not settings.prompt.strip() or not settings.pairs or not all(len(pair) == 2 for pair in settings.pairs):
        raise ValueError(f"learn.prompt={settings.prompt!r}, learn.pairs={settings.pairs}: expected text, and pairs")
    counts = ("steps", "batch", "test_every", "test_rows", "patience")
    if few := [name for name in counts if getattr(settings, name) < 1]:
        raise ValueError(f"learn.{few[0]}={getattr(settings, few[0])}: expected at least 1")
    if settings.test_steps < 4 or not 0.2 <= settings.cover_mass <= 0.9:
        raise ValueError(
            f"learn.test_steps={settings.test_steps}, learn.cover_mass={settings.cover_mass}: expected at least 4 "
            "steps, and a mass from 0.2 to 0.9"
        )


def run(config: Config, model: LanguageModel, tracker: Tracker, folder: Path) -> Result:
    """Learns, tests, and measures what came out of it."""
    settings = config.learn
    if config.site.block == "middle":
        raise ValueError("site.block=middle: a cell is learned for one block; site.block=5 does in SmolLM2")
    site = replace(build.site(config), block=resolve_block(config.site.block, model.n_blocks))
    push = settings.kind != "prefix"
    start = hidden.from_prompt(
        model, settings.prompt, settings.cover, settings.pairs, site, settings.cover_mass, push=push
    )
    learner = Learner(
        model,
        start,
        objective(config),
        kind=settings.kind,  # type: ignore[arg-type]
        steps=settings.steps,
        batch=settings.batch,
        rate=settings.rate,
        push_rate=settings.push_rate,
        seed=config.seed,
    )
    if (folder / STATE).is_file():
        learner.restore(folder / STATE)
    resumed = learner.step
    testing = {"rows": settings.test_rows, "steps": settings.test_steps, "sigma": config.noise}
    untrained = learner.test(**testing)
    table = descend(config, learner, testing, tracker, folder)
    assert learner.best is not None
    number, tested, cell = learner.best
    cell.save(folder / CELL)
    tracker.artifact("cell", "cell", folder / CELL, {"loop_test": tested.plain(), "step": number})
    summary = {
        "works": tested.works(settings.margin),
        "best_step": number,
        "steps": learner.step,
        "resumed_at_step": resumed,
        "loop_test": tested.plain(),
        "margin": tested.margin,
        "untrained": untrained.plain(),
        "first_working_step": next((r["step"] for r in table if r["works"]), None),
        "n_bits": len(cell.pairs),
        "positions": len(cell.prefix),
        **measured(config, model, cell),
    }
    record = {
        "cell": str(folder / CELL),
        "site": {"block": site.block, "at": site.at, "path": resolve(model.module, site).path},
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


def objective(config: Config) -> Objective:
    s = config.learn
    return Objective(
        level=s.level,
        sharpness=s.sharpness,
        weakest=s.weakest,
        mass_range=s.mass_range,
        sigma=config.noise,
        unroll=s.unroll,
        pushed=s.pushed,
        threshold=s.threshold,
        largest=s.largest,
    )


def descend(
    config: Config, learner: Learner, testing: dict[str, Any], tracker: Tracker, folder: Path
) -> list[dict[str, Any]]:
    """The learning curve. Leaves the best cell and the learner's state whenever a loop test was made."""
    settings, table, written = config.learn, [], 0
    points = learner.steps(
        test_every=settings.test_every, margin=settings.margin, patience=settings.patience, **testing
    )
    told: dict[str, str] = {}
    with progress.bar(config.quiet, total=settings.steps, initial=learner.step, unit="step") as bar:
        try:
            for point in points:
                bar.update(1)
                told["loss"] = f"{point.loss:.3f}"
                row = {"step": point.step, "loss": point.loss, "kept": None, "text_agreement": None}
                row |= {"margin": None, "level": None, "works": False}
                logged = {"learn/loss": point.loss}
                if point.test is not None:
                    test = point.test.plain()
                    row |= {**test, "works": point.test.works(settings.margin)}
                    logged |= {f"learn/{name}": value for name, value in test.items()}
                    told |= {"kept": f"{test['kept']:.2f}", "margin": f"{test['margin']:.2f}"}
                    learner.save(folder / STATE)
                    if learner.best is not None and learner.best[0] != written:
                        written = learner.best[0]
                        learner.best[2].save(folder / CELL)
                table.append(row)
                tracker.log(point.step, logged)
                bar.set_postfix(told)
        except KeyboardInterrupt:
            raise RuntimeError(
                f"stopped at step {learner.step}; the best cell so far is {folder / CELL}. Go on with the same command "
                f"and resume={folder}"
            ) from None
    return table


def measured(config: Config, model: LanguageModel, cell: HiddenCell) -> dict[str, Any]:
    """Coupling and pulse thresholds of every bit; null for a cell that does not hold all its words."""
    held = cell.on(model, temperature=config.map.temperature)
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
        caption=f"untrained: kept {s['untrained']['kept']:.2f}, margin {s['untrained']['margin']:.2f}; pulses set at "
        f"{', '.join(f'{x:.1f}' for x in s['pulse_set']) or '–'}, reset at "
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
