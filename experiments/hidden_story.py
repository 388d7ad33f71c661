"""Ordinary text with a bit under it: the loop writes the unsteered model's own paragraph and holds what a pulse wrote.

Learns a cell for some prompts (or reads one), then writes one bit into every row of them, and of prompts that it was
not learned for, by one pulse. Arms: the loop; the same pulses with the text itself fed back, so that the cache is all
that remembers; the same along random vectors; and no pulse. The text is compared token by token with what the model
writes without any of it.
"""

import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from conf import build
from conf.schema import Config
from feedback import audit, carriers, figures, metrics, progress, story
from feedback.hidden import HiddenCell
from feedback.learning import CELL, STATE
from feedback.models import LanguageModel, ModelShape
from feedback.results import Result
from feedback.sites import resolve
from feedback.story import Stories, StoryLearner
from feedback.tracking import Tracker

CONTINUES = (STATE, CELL)  # what a resumed run goes on with


def check(config: Config, shape: ModelShape) -> None:
    """Refuses settings that cannot work, before the model is loaded."""
    settings, learn = config.hidden_story, config.learn
    build.check_shape(config, shape)
    build.check_learning(config)
    if config.cell.file is not None:
        cell, at = HiddenCell.load(build.cell_file(config)), build.numbered_site(config, shape.n_blocks)
        if cell.cover:
            raise ValueError(
                f"cell.file={config.cell.file} says {cell.cover!r} at every step: hidden_latch measures it"
            )
        if cell.site != at:
            raise ValueError(
                f"site.block={at.block} site.at={at.at}: cell.file={config.cell.file} was learned at block "
                f"{cell.site.block} ({cell.site.at})"
            )
    if config.context.kind != "full" or learn.unroll != 1:
        raise ValueError(f"context={config.context.kind}, learn.unroll={learn.unroll}: expected full, and 1")
    if len(learn.pairs) != 1 or learn.cover:
        raise ValueError(
            f"learn.pairs={learn.pairs}, learn.cover={learn.cover!r}: expected one pair, and no cover word"
        )
    few = [name for name in ("known", "unseen", "rows", "start", "pulse_steps") if getattr(settings, name) < 1]
    there = len(config.prompts.texts)
    if few or settings.known + settings.unseen > there or not 0 < settings.mix <= 1 or settings.pulse <= 0:
        raise ValueError(
            f"hidden_story.known={settings.known}, unseen={settings.unseen}, rows={settings.rows}, start="
            f"{settings.start}, pulse_steps={settings.pulse_steps}, mix={settings.mix}, pulse={settings.pulse}: "
            f"expected at least 1 of each, no more known and unseen than the {there} prompts, a mix above 0 and up to "
            "1, and a positive pulse"
        )
    if config.steps < settings.start + settings.pulse_steps:
        raise ValueError(f"steps={config.steps}: expected steps behind the pulse's end, {settings.start} + pulse_steps")


def run(config: Config, model: LanguageModel, tracker: Tracker, folder: Path) -> Result:
    """Learns where no cell is given; then measures the arms."""
    settings, draw = config.hidden_story, torch.Generator().manual_seed(config.seed)
    before = audit.plain(audit.snapshot(model.module))
    stories = Stories.write(model, config.prompts.texts, config.steps)
    known, unseen = list(range(settings.known)), list(range(settings.known, len(stories.prompts)))
    if config.cell.file is None:
        learner = _learner(config, model, stories.pick(known), build.untrained_cell(config, model))
        learner.descend(folder, tracker.log, quiet=config.quiet)
        assert learner.best is not None
        number, tested, cell = learner.best
        learned = {"best_step": number, "loop_test": tested.plain()}
        cell.save(folder / CELL)
        tracker.artifact("cell", "cell", folder / CELL, learned)
    else:
        cell = HiddenCell.load(build.cell_file(config), model)
    learner = _learner(config, model, stories.pick(known), cell)
    v = carriers.from_vectors(learner.contrasts(), "v").with_scale("raw")  # a threshold is a share of its length
    random = carriers.norm_matched_random(v, draw).scaled[0]
    amount = settings.pulse * config.learn.threshold
    table: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    with progress.bar(config.quiet, unit="row-step") as bar:
        for split, which in (("known", known), ("unseen", unseen[: settings.unseen])):
            part = stories.pick(which)
            prompt = torch.arange(len(which)).repeat_interleave(2 * settings.rows)
            bits = torch.arange(len(prompt)) % 2 == 1
            pulse = torch.zeros(config.steps, len(prompt))
            begin = settings.start - 1
            pulse[begin : begin + settings.pulse_steps] = amount * (2.0 * bits - 1)
            nothing = torch.zeros_like(pulse)
            # arm: what is pushed, along what, share of the soft token, first row of its noise
            arms = {
                "loop": (pulse, v.scaled[0], settings.mix, 0),
                "cache": (pulse, v.scaled[0], 0.0, 0),
                "random_v": (pulse, random, settings.mix, 0),
                "unpushed": (nothing, v.scaled[0], settings.mix, len(prompt)),
                "unpushed_cache": (nothing, v.scaled[0], 0.0, len(prompt)),
            }
            base = {settings.mix: "twin", 0.0: "twin_cache"}
            compared = {name: (nothing, v.scaled[0], mix, 0) for mix, name in base.items()}
            seen = {}
            for arm, (strength, vector, mix, first) in {**compared, **arms}.items():
                bar.stage(f"{split}, {arm}")
                told = story.run(
                    model,
                    cell,
                    part,
                    prompt,
                    strength,
                    vector,
                    mix=mix,
                    sigma=config.noise,
                    seed=config.seed,
                    ids=first + torch.arange(len(prompt)),
                    progress=bar.turn,
                )
                seen[arm] = story.observed(model, learner.pair, told, part.cover[:, prompt])
                if arm in arms:
                    said.append(_transcript(model, split, arm, told.text[1], part.cover[:, prompt[1]]))
            for arm, (_, _, mix, _) in arms.items():
                u, same, margin = seen[arm]
                table += _rows(split, arm, (u, seen[base[mix]][0]), same, margin, bits, prompt, draw)
    for row in table:
        if row["split"] == "known":
            tracker.log(row["step"], {f"{row['arm']}/ber": row["ber"], f"{row['arm']}/same": row["text_agreement"]})
    ends = settings.start + settings.pulse_steps
    summary: dict[str, Any] = {
        split: {arm: verdict([r for r in table if (r["split"], r["arm"]) == (split, arm)], ends) for arm in arms}
        for split in ("known", "unseen")
    }
    if config.cell.file is None:
        summary["learned"] = learned
    site = resolve(model.module, cell.site)
    record = {
        "site": {"block": site.block, "at": site.at, "path": site.path},
        "cell": {"file": config.cell.file or str(folder / CELL), "provenance": dict(cell.provenance)},
        "transcripts": said,
        "noise_model": {
            "sigma": config.noise,
            "unit": "mean length of an embedding row, per coordinate / sqrt(d_model), every soft token",
        },
        "readers": {
            "state": "sign of u less an unpushed run's u, u = tanh((z_A − z_B)/2); that run has the row's noise, "
            "but for the unpushed arms, which have noise of their own",
            "sign": "sign of u alone",
        },
        "audit": {"before": before, "after": audit.plain(audit.snapshot(model.module))},
    }
    return Result(table=table, summary=summary, figures=draw_figures(table, ends, folder), record=record)


def verdict(rows: list[dict[str, Any]], ends: int) -> dict[str, Any]:
    """How long the bit lives from the step behind the pulse: until the first step whose interval reaches guessing."""
    after = [row for row in rows if row["step"] >= ends]
    dead = [row["step"] for row in after if row["ber_high"] >= 0.5]
    return {
        "lives_steps": (dead[0] if dead else after[-1]["step"] + 1) - ends,
        "steps_measured": len(after),
        "ber_end": after[-1]["ber"],
        "ber_low": after[-1]["ber_low"],
        "ber_high": after[-1]["ber_high"],
        "sign_ber_end": after[-1]["sign_ber"],
        "text_agreement": sum(row["text_agreement"] for row in rows) / len(rows),
        "text_agreement_after": sum(row["text_agreement"] for row in after) / len(after),
        "u_end": after[-1]["u"],
    }


def _rows(
    split: str,
    arm: str,
    read: tuple[Float[Tensor, "step row"], Float[Tensor, "step row"]],
    same: Bool[Tensor, "step row"],
    margin: Float[Tensor, "step row"],
    bits: Bool[Tensor, " row"],
    prompt: Int[Tensor, " row"],
    draw: torch.Generator,
) -> list[dict[str, Any]]:
    u, base = read
    difference = u - base
    # a difference of exactly nothing says nothing: it reads as a 0, right for half of the rows
    wrong = ((difference > 0) != bits)[..., None]
    signed = torch.where(bits, u, -u)
    clusters = prompt if len(prompt.unique()) > 1 else torch.arange(len(prompt))
    rows = []
    for step in range(len(u)):
        ends = metrics.ber_interval(wrong[step], clusters, draw)
        rows.append(
            {
                "split": split,
                "arm": arm,
                "step": step + 1,
                "ber": wrong[step].double().mean().item(),
                "ber_low": ends.low.item(),
                "ber_high": ends.high.item(),
                "sign_ber": (signed[step] <= 0).double().mean().item(),
                "u": signed[step].mean().item(),
                "text_agreement": same[step].double().mean().item(),
                "margin": margin[step].mean().item(),
            }
        )
    return rows


def _transcript(
    model: LanguageModel, split: str, arm: str, told: Int[Tensor, " position"], cover: Int[Tensor, " position"]
) -> dict[str, Any]:
    def words(ids: Tensor) -> list[str]:
        return [model.decode([token]) for token in ids.tolist()]

    return {"arm": f"{split}, {arm}", "alpha": None, "prompt": "", "cover": words(cover), "steered": words(told)}


def _learner(config: Config, model: LanguageModel, stories: Stories, cell: HiddenCell) -> StoryLearner:
    kind = "prefix" if cell.push is None else "push" if config.learn.kind == "push" else "both"
    options = {**build.learning(config), "kind": kind, "mix": config.hidden_story.mix}
    return StoryLearner(model, cell, build.objective(config), stories=stories, **options)


def draw_figures(table: list[dict[str, Any]], ends: int, folder: Path) -> dict[str, Path]:
    """Bit errors, u and text agreement over the steps, on the prompts that the cell was learned for."""
    drawn = {}
    for name, title in (
        ("ber", "bit error rate of the state"),
        ("u", "u towards the written bit"),
        ("text_agreement", "tokens as unsteered"),
    ):
        series = {}
        for arm in ("loop", "cache", "random_v", "unpushed"):
            rows = [row for row in table if (row["split"], row["arm"]) == ("known", arm)]
            bounds = (
                ([row["ber_low"] for row in rows], [row["ber_high"] for row in rows]) if name == "ber" else (None,) * 2
            )
            series[arm] = ([row["step"] for row in rows], [row[name] for row in rows], *bounds)
        drawn[f"story_{name}"] = figures.lines(
            series,
            folder / "figures" / f"story_{name}.png",
            xlabel=f"step (the pulse is over at {ends})",
            ylabel=title,
            title=f"Ordinary text: {title}",
            reference={"ber": 0.5, "u": 0.0}.get(name),
        )
    return drawn


def show(result: Result) -> Table:
    """The printed table: a row per split and arm."""
    table = Table(
        title="A bit under ordinary text: how long it lives, and whether the text is the unsteered model's",
        caption="lives: steps behind the pulse until the 95 % interval of the bit error rate (of u less an unpushed "
        "run's) reaches 0.5; sign: bit error rate of the sign of u alone",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in (
        "prompts",
        "arm",
        "lives, steps",
        "BER at the end",
        "sign",
        "u at the end",
        "text agreement",
        "… after",
    ):
        table.add_column(column, justify="left" if column in ("prompts", "arm") else "right")
    for split in ("known", "unseen"):
        for arm, s in result.summary[split].items():
            lives = f"{s['lives_steps']}{'+' if s['lives_steps'] == s['steps_measured'] else ''}"
            interval = f"{s['ber_end']:.3f} [{s['ber_low']:.2f}, {s['ber_high']:.2f}]"
            numbers = [s[name] for name in ("sign_ber_end", "u_end", "text_agreement", "text_agreement_after")]
            table.add_row(split, arm, lives, interval, *(f"{x:.3f}" for x in numbers if math.isfinite(x)))
    return table
