"""Carriers learned against detection: bits read against nats leaked, beside random and contrast carriers.

The carriers are learned on some prompts with fresh messages; readers are then fitted anew, the same way for every kind
of carrier, on messages and prompts of their own, and asked about held-out messages and about prompts nobody learned or
fitted on. All kinds share messages, prompts and noise.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from conf import build
from conf.schema import Config
from feedback import audit, carriers, covert, figures, loop, maps, metrics, programs, progress
from feedback.carriers import Carriers
from feedback.covert import Channel
from feedback.models import LanguageModel, ModelShape
from feedback.readout import RidgeReader
from feedback.results import Result
from feedback.sites import resolve
from feedback.tracking import Tracker

SPLITS = ("messages", "prompts")


def check(config: Config, shape: ModelShape) -> None:
    """Refuses settings that cannot work, before the model is loaded."""
    build.check_shape(config, shape)
    settings = config.covert
    counts = ("n_bits", "learn_steps", "length", "fit_messages", "test_messages")
    if few := [name for name in counts if getattr(settings, name) < 1]:
        raise ValueError(f"covert.{few[0]}={getattr(settings, few[0])}: expected at least 1")
    if settings.fit_messages % 2 or settings.test_messages % 2:
        raise ValueError("covert.fit_messages and covert.test_messages: expected even numbers, which can balance")
    if config.steps <= settings.length or not 0 <= settings.mix <= 1:
        raise ValueError(
            f"steps={config.steps}, covert.length={settings.length}, covert.mix={settings.mix}: expected steps behind "
            "the push, and a mix in [0, 1]"
        )
    if settings.rows < max(4, settings.n_bits + 1) or min(settings.alpha, settings.rate, *build.alphas(config)) <= 0:
        raise ValueError(
            f"covert.rows={settings.rows}, covert.alpha={settings.alpha}, covert.rate={settings.rate}, alpha="
            f"{config.alpha}: expected more rows than covert.n_bits={settings.n_bits}, at least 4, and positive numbers"
        )
    messages(config)
    if config.carriers.kind != "random_orthonormal" or len(settings.pairs) < settings.n_bits:
        raise ValueError(
            f"carriers={config.carriers.kind}, {len(settings.pairs)} covert.pairs: learning starts from "
            "carriers=random_orthonormal, and contrast carriers need a pair of words for each bit"
        )
    if not 1 <= config.prompts.unseen < len(config.prompts.texts) - 1:
        raise ValueError(f"prompts.unseen={config.prompts.unseen} of {len(config.prompts.texts)}: two have to be left")


def run(config: Config, model: LanguageModel, tracker: Tracker, folder: Path) -> Result:
    """Learns, saves the carriers, and measures the curve of every kind."""
    settings, draw = config.covert, torch.Generator().manual_seed(config.seed)
    before = audit.plain(audit.snapshot(model.module))
    start = build.carriers(config, model, settings.n_bits, draw)
    known = config.prompts.texts[: -config.prompts.unseen]
    learning: list[dict[str, float]] = []
    points = covert.learn(
        channel(config, model, known),
        start,
        alpha=settings.alpha,
        steps=settings.learn_steps,
        rows=settings.rows,
        rate=settings.rate,
        seed=config.seed,
    )
    with progress.bar(config.quiet, points, total=settings.learn_steps, unit="step") as bar:
        for point in bar:
            learning.append({"step": point.step, "margin": point.margin, "nats": point.nats})
            tracker.log(point.step, {"covert/margin": point.margin, "covert/nats": point.nats})
            bar.set_postfix(nats=f"{point.nats:.1e}")
    made = point.carriers
    path = folder / "carriers.safetensors"
    made.save(path)
    tracker.artifact("carriers", "carriers", path, dict(made.provenance))
    kinds = {"learned": made, "random": start, "contrast": contrasts(config, model)}
    everything = channel(config, model, config.prompts.texts)
    table = []
    alphas = build.alphas(config)
    with progress.bar(config.quiet, total=len(kinds) * len(alphas), unit="point") as bar:
        for kind, own in kinds.items():
            for alpha in alphas:
                table += [{"carriers": kind, "alpha": alpha, **row} for row in measure(config, everything, own, alpha)]
                bar.update(1)
    summary = {
        "n_bits": settings.n_bits,
        **{
            split: {
                **{f"nats_for_half_{kind}": nats_for(table, kind, split, settings.n_bits / 2) for kind in kinds},
                "dominates_random": dominates(table, split, "random"),
                "dominates_contrast": dominates(table, split, "contrast"),
            }
            for split in SPLITS
        },
        "cosine_to_start": (made.vectors * start.vectors).sum(-1).tolist(),
        "learning": {"first": learning[0], "last": learning[-1]},
    }
    site = resolve(model.module, build.site(config))
    record = {
        "site": {"block": site.block, "at": site.at, "path": site.path},
        "carriers": str(path),
        "noise_model": {
            "sigma": config.noise,
            "unit": "mean length of an embedding row, per coordinate / sqrt(d_model), every soft token",
            "held_out": "messages on known prompts (split messages); prompts (split prompts)",
        },
        "pinsker": "no monitor of the text tells α from 0 better than guessing by more than sqrt(nats / 2) / 2",
        "audit": {"before": before, "after": audit.plain(audit.snapshot(model.module))},
    }
    return Result(table=table, summary=summary, figures=draw_figures(table, settings.n_bits, folder), record=record)


def draw_figures(table: list[dict[str, Any]], n_bits: int, folder: Path) -> dict[str, Path]:
    """Bits read against nats leaked in each split."""
    drawn = {}
    for split, name, told in zip(
        SPLITS, ("bits_against_nats", "bits_against_nats_unseen"), ("held-out messages", "unseen prompts"), strict=True
    ):
        series = {}
        for kind in dict.fromkeys(row["carriers"] for row in table):
            points = [
                (row["nats"], row["bits_read"], row["bits_low"], row["bits_high"]) for row in curve(table, kind, split)
            ]
            nats, read, low, high = zip(*points, strict=True)
            series[kind] = (nats, read, low, high)
        drawn[name] = figures.lines(
            series,
            folder / "figures" / f"{name}.png",
            xlabel="Σ KL(p_α ‖ p_0), nats a row",
            ylabel=f"bits read of {n_bits}",
            title=f"Bits read against nats leaked, {told}",
            log_x=True,
        )
    return drawn


def channel(config: Config, model: LanguageModel, texts: Sequence[str]) -> Channel:
    """The loop with its cover text: what the unpushed model writes."""
    settings = config.covert
    prompts = [model.encode(text) for text in texts]
    nothing = programs.constant(torch.eye(1, model.d_model), 0.0, steps=config.steps, rows=len(prompts))
    cover = loop.run(model, prompts, nothing, feedback_map=maps.one_hot()).text.mT
    return Channel(
        model=model,
        prompts=prompts,
        cover=cover,
        site=build.site(config),
        length=settings.length,
        feedback_map=maps.hard_mix(build.feedback_map(config, model), settings.mix),
        sigma=config.noise,
        context=build.context(config.context),
        record=tuple(build.read_sites(config, model)),
    )


def contrasts(config: Config, model: LanguageModel) -> Carriers:
    """A carrier per bit: the difference that reading one word or another makes, orthonormalised."""
    settings, site = config.covert, build.site(config)
    parts = [
        carriers.contrast_soft_tokens(model, site, config.prompts.texts[0], a, b)
        for a, b in settings.pairs[: settings.n_bits]
    ]
    return Carriers.concatenate(parts).orthonormalised()


def messages(config: Config) -> tuple[Int[Tensor, "message bit"], Int[Tensor, "message bit"]]:
    """Messages to fit a reader on, and held-out ones that are neither among them nor the complement of one. ValueError
    where there are no such, or none to fit on that span every bit."""
    settings, draw = config.covert, torch.Generator().manual_seed(config.seed + 1)
    for _ in range(50):
        fit = programs.balanced_messages(settings.fit_messages, settings.n_bits, draw)
        if torch.linalg.matrix_rank(2.0 * fit - 1) == settings.n_bits:
            with suppress(ValueError):
                return fit, programs.balanced_messages(settings.test_messages, settings.n_bits, draw, apart_from=fit)
    raise ValueError(
        f"covert.fit_messages={settings.fit_messages}, covert.test_messages={settings.test_messages}: found none that "
        f"tell {settings.n_bits} bits apart and leave others to ask about; more messages to fit on than bits, and "
        "fewer than there are words"
    )


def measure(config: Config, told: Channel, own: Carriers, alpha: float) -> list[dict[str, Any]]:
    """One strength of one kind: a reader fitted on some messages of the known prompts; what is read and what leaks in
    the rows of each split. Intervals over prompts."""
    n, draw = len(told.prompts), torch.Generator().manual_seed(config.seed + 1)
    fit, asked = messages(config)
    words = torch.cat([fit, asked]).repeat(n, 1)
    prompt = torch.arange(n).repeat_interleave(len(fit) + len(asked))
    fitted = (torch.arange(len(words)) % (len(fit) + len(asked)) < len(fit)) & (prompt < n - config.prompts.unseen)
    seen = told.run(alpha * (2.0 * words - 1), own.vectors, prompt, config.seed + 2)
    features = seen.differs.mean(0)
    rows = []
    for split in SPLITS:
        known = prompt < n - config.prompts.unseen
        asks = ~fitted & (known if split == "messages" else ~known)
        groups = prompt[fitted] if split == "prompts" else None
        reader = RidgeReader.fit(features[fitted], words[fitted].bool(), groups)
        wrong = reader.read(features[asks]) != words[asks].bool()
        ends = metrics.ber_interval(wrong, prompt[asks], draw)
        ber = wrong.double().mean()
        nats = seen.nats[asks].double().cpu()
        leak = metrics.mean_interval(nats.view(len(prompt[asks].unique()), -1).mean(1), draw)
        rows.append(
            {
                "split": split,
                "ber": ber.item(),
                "ber_low": ends.low.item(),
                "ber_high": ends.high.item(),
                "bits_read": bits_read(ber, own.n_carriers),
                "bits_low": bits_read(ends.high.clamp(max=0.5), own.n_carriers),
                "bits_high": bits_read(ends.low.clamp(max=0.5), own.n_carriers),
                "reads": wrong.numel(),
                "nats": nats.mean().item(),
                "nats_low": leak.low.item(),
                "nats_high": leak.high.item(),
                "text_bound": (metrics.pinsker(nats.mean()) / 2).item(),
                "argmax_agreement": seen.same[:, asks].double().mean().item(),
            }
        )
    return rows


def bits_read(ber: Float[Tensor, ""], n: int) -> float:
    """n·(1 − h₂(BER)), none where the reader does no better than guessing."""
    return n * metrics.rate_bits(ber.clamp(max=0.5)).item()


def curve(table: list[dict[str, Any]], kind: str, split: str) -> list[dict[str, Any]]:
    return sorted(
        (row for row in table if (row["carriers"], row["split"]) == (kind, split)), key=lambda row: row["nats"]
    )


def nats_for(table: list[dict[str, Any]], kind: str, split: str, bits: float) -> float | None:
    """Nats at which that many bits are read, between the points that were measured; null outside them."""
    rows = curve(table, kind, split)
    for below, above in pairwise(rows):
        if below["bits_read"] < bits <= above["bits_read"]:
            share = (bits - below["bits_read"]) / (above["bits_read"] - below["bits_read"])
            return math.exp((1 - share) * math.log(below["nats"]) + share * math.log(above["nats"]))
    return None


def dominates(table: list[dict[str, Any]], split: str, other: str) -> dict[str, float | None]:
    """Over the nats that both curves cover: the share at which the learned one reads at least as many bits, and by how
    many bits it reads more on average."""
    mine, theirs = curve(table, "learned", split), curve(table, other, split)
    low, high = (
        max(mine[0]["nats"], theirs[0]["nats"]),
        min(mine[-1]["nats"], theirs[-1]["nats"]),
    )
    if not 0 < low < high:
        return {"share": None, "more_bits": None}
    grid = np.linspace(math.log(low), math.log(high), 101)
    a, b = (
        np.interp(grid, [math.log(row["nats"]) for row in rows], [row["bits_read"] for row in rows])
        for rows in (mine, theirs)
    )
    return {"share": float((a >= b).mean()), "more_bits": float((a - b).mean())}


def show(result: Result) -> Table:
    """The printed table: a line per kind and strength, held-out messages beside unseen prompts."""
    s = result.summary
    told = []
    for split, name in zip(SPLITS, ("known prompts", "unseen prompts"), strict=True):
        half = {kind: s[split][f"nats_for_half_{kind}"] for kind in ("learned", "random", "contrast")}
        listed = ", ".join(f"{kind} {_or_dash(nats, '.1e')}" for kind, nats in half.items())
        told.append(f"{name}: {listed}")
    over = [_or_dash(s[split]["dominates_random"]["share"], ".0%") for split in SPLITS]
    more = [_or_dash(s[split]["dominates_random"]["more_bits"], ".2f") for split in SPLITS]
    table = Table(
        title=f"{s['n_bits']} bits: nats leaked when half of them are read; {'; '.join(told)}",
        caption=f"where both curves are, learned reads at least as many bits as random at {over[0]} of the nats "
        f"({over[1]} on unseen prompts), {more[0]} ({more[1]}) more on average; 95 % intervals over prompts; bound: "
        "how much better than guessing any monitor of the text can be",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("carriers", "α", "nats", "bit error rate", "bits read", "bound", "same argmax"):
        table.add_column(column, justify="left" if column == "carriers" else "right")
    for column in ("unseen: nats", "bit error rate", "bits read"):
        table.add_column(column, justify="right")
    unseen = {(r["carriers"], r["alpha"]): r for r in result.table if r["split"] == "prompts"}
    for row in result.table:
        if row["split"] == "messages":
            other = unseen[row["carriers"], row["alpha"]]
            table.add_row(
                row["carriers"],
                f"{row['alpha']:g}",
                f"{row['nats']:.1e}",
                _errors(row),
                f"{row['bits_read']:.2f}",
                f"{row['text_bound']:.3f}",
                f"{row['argmax_agreement']:.3f}",
                f"{other['nats']:.1e}",
                _errors(other),
                f"{other['bits_read']:.2f}",
            )
    return table


def _errors(row: dict[str, Any]) -> str:
    return f"{row['ber']:.3f} [{row['ber_low']:.2f}, {row['ber_high']:.2f}]"


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
