"""A bit that the text never shows: a hidden cell set, held and reset under noise while the loop says one word.

Rows are written by random pulses; each has a twin with the same start and the same noise that is never pushed, so the
text is compared step by step with the α = 0 run's, pulses included. A text reader gets the emitted tokens only. Random
vectors as long as v are pushed as hard.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from conf import build
from conf.schema import Config
from feedback import audit, carriers, cells, figures, loop, metrics, progress
from feedback.cells import OperatingPoint
from feedback.latch import Latch, crossing, pulses, static_thresholds
from feedback.models import LanguageModel, ModelShape
from feedback.readout import TextReader
from feedback.results import Result
from feedback.sites import resolve, unembed
from feedback.tracking import Tracker
from feedback.trajectory import Trajectory


def check(config: Config, shape: ModelShape) -> None:
    """Refuses settings that cannot work, before the model is loaded."""
    build.check_shape(config, shape)
    build.check_cell(config, shape)
    settings = config.hidden_latch
    if config.cell.file is None:
        raise ValueError("experiment=hidden_latch measures a learned cell: cell=hidden, or cell.file=…")
    counts = ("once", "pulse_steps", "dwell", "random_vectors")
    if few := [name for name in counts if getattr(settings, name) < 1]:
        raise ValueError(f"hidden_latch.{few[0]}={getattr(settings, few[0])}: expected at least 1")
    if settings.rows < 4 or settings.rows % 4 or settings.levels < 4 or settings.single <= 1:
        raise ValueError(
            f"hidden_latch.rows={settings.rows}, levels={settings.levels}, single={settings.single}: "
            "expected rows in fours, at least 4 levels, and pulses of more than 1 threshold"
        )
    if not settings.pulse_steps < settings.period <= settings.steps // 2:
        raise ValueError(
            f"hidden_latch.period={settings.period}: expected more than pulse_steps={settings.pulse_steps}, and at "
            f"least two periods in steps={settings.steps}"
        )


def run(config: Config, model: LanguageModel, tracker: Tracker, folder: Path) -> Result:
    """Measures the cell, writes and holds bits in it, reads state and text; leaves three figures."""
    settings, draw = config.hidden_latch, torch.Generator().manual_seed(config.seed)
    before = audit.plain(audit.snapshot(model.module))
    held = build.register(config, model)
    latch = build.latch(config, model, draw)
    with progress.bar(config.quiet, unit="row-step") as bar:
        bar.stage("thresholds")
        point = cells.operating_point(
            latch, pulse_steps=settings.pulse_steps, settle_steps=8, top=None, single=settings.single
        )
        set_at, reset_at = static_thresholds(latch, point.rest, latch.distance(point.rest), 40)
        coupling = latch.couplings([0.0])
        alphas, up, down = sweep(settings, latch, point.rest, set_at, reset_at)
        bar.stage("written and held")
        plan = Plan(config, point, draw)
        told = plan.run(latch, bar.turn)
        bar.stage("random v")
        controls = random_vectors(config, latch, point, draw)
    u = latch.read(told.hidden).cpu()
    tokens, margin = told.tokens.cpu(), held.margins(told.hidden).cpu()
    table = plan.table(u, tokens, margin, model)
    for step in range(settings.steps):
        row = plan.shown[0]
        tracker.log(step + 1, {"latch/u": u[step, row], "latch/alpha": plan.strength[step, row]})
    ends = slice(settings.dwell - 1, None, settings.dwell)  # the last step at every level
    for number, (alpha, rising, falling) in enumerate(zip(alphas[ends], up[ends], down[ends].flip(0), strict=True), 1):
        tracker.log(number, {"hysteresis/alpha": alpha, "hysteresis/up": rising, "hysteresis/down": falling})
    own = carriers.from_vectors(latch.vector[None], "v")
    summary = {
        **plan.bits(table, draw),
        **plan.text(tokens, told, margin, draw),
        **plan.held(u),
        "alpha_set": set_at,
        "alpha_reset": -reset_at,
        "sweep_set": crossing(alphas, up),
        "sweep_reset": crossing(alphas.flip(0), down),
        "pulse_set": point.set,
        "pulse_reset": -point.reset,
        "coupling_L": coupling.coupling.item(),
        "field_b": coupling.bias.item(),
        "rest_u": list(point.u),
        "says": [model.decode([token]) for token in point.tokens],
        **controls,
    }
    site = resolve(model.module, latch.site)
    record = {
        "site": {"block": site.block, "at": site.at, "path": site.path},
        "cell": {"file": str(config.cell.file), "provenance": dict(held.cell.provenance)},
        "carrier_length": own.raw_lengths.tolist(),
        "noise_model": {
            "sigma": config.noise,
            "unit": "mean length of an embedding row, per coordinate / sqrt(d_model), every soft token",
        },
        "readers": {
            "state": "sign of u = tanh((z_A − z_B)/2τ), fixed before anything ran",
            "text": "ridge over which token stands where and how often, fitted on half of the rows, read on the other",
        },
        "audit": {"before": before, "after": audit.plain(audit.snapshot(model.module))},
    }
    drawn = draw_figures(config, latch, point, plan, u, tokens, (alphas, up, down), (set_at, reset_at), folder)
    return Result(table=table, summary=summary, figures=drawn, record=record)


def sweep(
    settings: Any, latch: Latch, rest: Float[Tensor, "2 d_model"], set_at: float, reset_at: float
) -> tuple[Float[Tensor, " step"], Float[Tensor, " step"], Float[Tensor, " step"]]:
    """α from below the reset threshold to above the set threshold, and u on the way up and on the way down."""
    beyond = 0.3 * (set_at + reset_at)
    course = torch.linspace(-reset_at - beyond, set_at + beyond, settings.levels).repeat_interleave(settings.dwell)
    u = latch.read(latch.run(rest, torch.stack([course, course.flip(0)], dim=1)).hidden).cpu()
    return course, u[:, 0], u[:, 1]


class Plan:
    """Who is pushed when: written rows, their unpushed twins, and rows that are switched once."""

    def __init__(self, config: Config, point: OperatingPoint, draw: torch.Generator) -> None:
        self.config, self.settings, self.point = config, config.hidden_latch, point
        settings = self.settings
        n, m = settings.rows, settings.once
        self.n_pulses = settings.steps // settings.period
        self.begins = [settings.period * number for number in range(self.n_pulses)]
        half = torch.arange(n) % 2 == 1  # in every interval half of the rows are 1, in either half of the rows
        order = [torch.cat([torch.randperm(n // 2, generator=draw) + side * n // 2 for side in (0, 1)])
                 for _ in range(self.n_pulses)]  # fmt: skip
        self.written = torch.stack([half[own] for own in order])  # (pulse, row)
        start = torch.arange(n) % 4 >= 2
        self.once = torch.arange(m) % 2 == 0
        self.start = torch.cat([start, start, ~self.once])
        self.strength = torch.zeros(settings.steps, len(self.start))
        for begin, bits in zip(self.begins, self.written, strict=True):
            self.strength[begin : begin + settings.pulse_steps, :n] = self.amount(bits)
        self.strength[: settings.pulse_steps, 2 * n :] = self.amount(self.once)
        first = self.written[0]
        self.shown = (int(first.int().argmax()), int((~first).int().argmax()))

    def amount(self, bits: Bool[Tensor, " row"]) -> Float[Tensor, " row"]:
        """The pulse that writes the bits."""
        return torch.where(bits, self.point.single * self.point.set, -self.point.single * self.point.reset)

    def run(self, latch: Latch, progress: Any) -> Trajectory:
        n, m = self.settings.rows, self.settings.once
        ids = torch.cat([torch.arange(n), torch.arange(n), n + torch.arange(m)])
        return latch.run(
            self.point.rest[self.start.long()],
            self.strength,
            sigma=self.config.noise,
            randomness=loop.Randomness(self.config.seed, ids),
            reference=torch.cat([n + torch.arange(n), n + torch.arange(n), 2 * n + torch.arange(m)]),
            progress=progress,
        )

    def table(
        self,
        u: Float[Tensor, "step row"],
        tokens: Int[Tensor, "step row"],
        margin: Float[Tensor, "step row"],
        model: LanguageModel,
    ) -> list[dict[str, Any]]:
        """A row per written row and interval, with what it said."""
        n = self.settings.rows
        table = []
        for row in range(n):
            for number, (begin, end) in enumerate(self.intervals()):
                said, plain = tokens[begin:end, row], tokens[begin:end, n + row]
                bit, value = bool(self.written[number, row]), u[end - 1, row].item()
                table.append(
                    {
                        "row": row,
                        "interval": number,
                        "first_step": begin + 1,
                        "alpha": self.strength[begin, row].item(),
                        "written": int(bit),
                        "u": value,
                        "read": int(value > 0),
                        "correct": (value > 0) == bit,
                        "text_agreement": (said == plain).double().mean().item(),
                        "worst_margin": margin[begin:end, row].min().item(),
                        "text": model.decode(said),
                    }
                )
        return table

    def intervals(self) -> list[tuple[int, int]]:
        """From the first step of a pulse to the step before the next one."""
        return [(begin, begin + self.settings.period) for begin in self.begins]

    def bits(self, table: list[dict[str, Any]], draw: torch.Generator) -> dict[str, Any]:
        """Bits read at the end of every interval, rows being clusters."""
        wrong = torch.tensor([not row["correct"] for row in table])[:, None]
        ends = metrics.ber_interval(wrong, torch.tensor([row["row"] for row in table]), draw)
        return {
            "ber": wrong.double().mean().item(),
            "ber_low": ends.low.item(),
            "ber_high": ends.high.item(),
            "reads": len(table),
        }

    def text(
        self,
        tokens: Int[Tensor, "step row"],
        told: Trajectory,
        margin: Float[Tensor, "step row"],
        draw: torch.Generator,
    ) -> dict[str, Any]:
        """What the text shows, and what its probabilities leak, against the twins."""
        n = self.settings.rows
        same = tokens[:, :n] == tokens[:, n : 2 * n]
        pushed = self.strength[:, :n] != 0
        texts = torch.stack([tokens[begin:end, :n].mT for begin, end in self.intervals()])  # (pulse, row, step)
        fitted = torch.arange(n) < n // 2
        reader = TextReader.fit(texts[:, fitted].flatten(0, 1), self.written[:, fitted].flatten()[:, None])
        right = self.written[:, ~fitted].flatten()[:, None]
        wrong = reader.read(texts[:, ~fitted].flatten(0, 1)) != right
        clusters = torch.arange(n)[~fitted].repeat(self.n_pulses)
        ends = metrics.ber_interval(wrong, clusters, draw)
        assert told.kl is not None
        divergence = told.kl[:, :n].cpu()
        state = torch.stack([self.written[min(step // self.settings.period, self.n_pulses - 1)]
                             for step in range(self.settings.steps)])  # fmt: skip
        other = (state != self.start[:n]) & ~pushed
        changed = (~same).flatten()[:, None]  # steps of a row are a cluster
        unlike = metrics.ber_interval(changed, torch.arange(n).repeat(self.settings.steps), draw)
        return {
            "text_agreement": same.double().mean().item(),
            "text_agreement_low": 1 - unlike.high.item(),
            "text_agreement_in_pulses": same[pushed].double().mean().item(),
            "rows": n,
            "steps": self.settings.steps,
            "text_ber": wrong.double().mean().item(),
            "text_ber_low": ends.low.item(),
            "text_ber_high": ends.high.item(),
            "margin": margin[:, :n].min().item(),
            "margin_median": margin[:, :n].median().item(),
            "kl_nats": divergence.sum(0).mean().item(),
            "kl_nats_per_step": {
                "in_pulses": divergence[pushed].mean().item(),
                "other_bit_held": divergence[other].mean().item(),
                "same_bit_held": divergence[(state == self.start[:n]) & ~pushed].mean().item(),
            },
        }

    def held(self, u: Float[Tensor, "step row"]) -> dict[str, Any]:
        """How long rows keep their bit unpushed: the twins, and those that were switched once."""
        n, settle = self.settings.rows, self.settings.period
        bits = torch.cat([self.start[n : 2 * n], self.once])
        kept = ((u[:, n:] > 0) == bits)[settle:]
        lasted = torch.where(kept.all(0), len(kept), kept.int().argmin(0))
        lost = metrics.wilson(int((~kept.all(0)).sum()), len(bits))
        return {
            "hold_steps": int(lasted.min()),
            "hold_censored": bool(kept.all()),
            "hold_rows": len(bits),
            "lost_within_hold": [lost.low.item(), lost.high.item()],
        }


def random_vectors(config: Config, latch: Latch, point: OperatingPoint, draw: torch.Generator) -> dict[str, Any]:
    """Pulses along random vectors as long as v, both directions from both rests, as hard and three times as hard."""
    settings = config.hidden_latch
    own = carriers.from_vectors(latch.vector[None], "v")
    vectors = torch.cat([carriers.norm_matched_random(own, draw).scaled for _ in range(settings.random_vectors)])
    size = settings.single * max(point.set, point.reset)
    trials = [
        (vector, state, sign * times * size)
        for times in (1, 3)
        for vector in range(len(vectors))
        for state in (0, 1)
        for sign in (1, -1)
    ]
    state = torch.tensor([trial[1] for trial in trials])
    told = latch.run(
        point.rest[state],
        pulses(torch.tensor([trial[2] for trial in trials]), settings.pulse_steps, settings.pulse_steps + 12),
        sigma=config.noise,
        randomness=loop.Randomness(config.seed + 1),
        vectors=vectors,
        which=torch.tensor([trial[0] for trial in trials]),
    )
    switched = ((latch.read(told.hidden[-1]).cpu() > 0).long() != state).chunk(2)
    same = (told.tokens.cpu() == point.tokens[0]).double().mean(0).chunk(2)
    rows = len(trials) // 2
    return {
        "random_v_switches": int(switched[0].sum()),
        "random_v_rows": rows,
        "random_v_switches_high": metrics.wilson(int(switched[0].sum()), rows).high.item(),
        "random_v_alpha": size,
        "random_v_text_agreement": same[0].mean().item(),
        "random_v_switches_at_3_alpha": int(switched[1].sum()),
        "random_v_text_agreement_at_3_alpha": same[1].mean().item(),
    }


def draw_figures(
    config: Config,
    latch: Latch,
    point: OperatingPoint,
    plan: Plan,
    u: Float[Tensor, "step row"],
    tokens: Int[Tensor, "step row"],
    swept: tuple[Tensor, Tensor, Tensor],
    thresholds: tuple[float, float],
    folder: Path,
) -> dict[str, Path]:
    settings, model = config.hidden_latch, latch.model
    alphas, up, down = swept
    shown = min(settings.steps, 3 * settings.period)
    rows = {
        f"row {row}": (u[:shown, row].tolist(), [model.decode([t]) for t in tokens[:shown, row].tolist()])
        for row in plan.shown
    }
    spans = [(begin + 1, begin + settings.pulse_steps) for begin, _ in plan.intervals() if begin < shown]
    settled = latch.run(point.rest, torch.zeros(1, 2))
    likeliest = torch.softmax(unembed(model.module, settled.hidden[-1]).float(), -1).topk(5)
    masses = {
        f"bit {bit} (u = {point.u[bit]:+.2f})": [
            (model.decode([token]), p)
            for token, p in zip(likeliest.indices[bit].tolist(), likeliest.values[bit].tolist(), strict=True)
        ]
        for bit in (0, 1)
    }
    set_at, reset_at = thresholds
    return {
        "hidden_bit": figures.under_text(
            rows, folder / "figures" / "hidden_bit.png", pushed=spans, title="A bit under a text that does not change"
        ),
        "masses": figures.masses(
            masses, folder / "figures" / "masses.png", title="What the loop feeds back at its two rests"
        ),
        "hysteresis": figures.hysteresis(
            {"up": (alphas.tolist(), up.tolist()), "down": (alphas.flip(0).tolist(), down.tolist())},
            folder / "figures" / "hysteresis.png",
            measured=(-reset_at, set_at),
            predicted=[],
            title=f"Hidden cell: hysteresis at block {config.site.block}",
        ),
    }


def show(result: Result) -> Table:
    """The printed table: the bit beside the text."""
    s = result.summary
    table = Table(
        title="A bit that the text does not show",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("quantity", "measured", "note"):
        table.add_column(column)

    def span(name: str) -> str:
        return f"{s[name]:.4f} [{s[f'{name}_low']:.4f}, {s[f'{name}_high']:.4f}]"

    held = "and longer" if s["hold_censored"] else f"share lost {s['lost_within_hold']}"
    leak = s["kl_nats_per_step"]
    table.add_row("bit error rate, state", span("ber"), f"{s['reads']} reads, {s['rows']} rows of {s['steps']} steps")
    table.add_row("bit error rate, text", span("text_ber"), "half of the rows fitted, the other half read")
    agreement = f"{s['text_agreement']:.4f} [{s['text_agreement_low']:.4f}, …]"
    table.add_row("text agreement with α = 0", agreement, f"in pulses {s['text_agreement_in_pulses']:.4f}")
    table.add_row("margin of the said word", f"{s['margin']:.3f}", f"worst step; median {s['margin_median']:.3f}")
    table.add_row("holds, steps", str(s["hold_steps"]), f"{held}; {s['hold_rows']} rows")
    table.add_row(
        "leak, nats a row",
        f"{s['kl_nats']:.2f}",
        f"a step: pulses {leak['in_pulses']:.3f}, other bit {leak['other_bit_held']:.3f}, same "
        f"{leak['same_bit_held']:.4f}",
    )
    table.add_row("constant push", f"sets {s['alpha_set']:.1f}, resets {s['alpha_reset']:.1f}", "")
    table.add_row("pulse", f"sets {s['pulse_set']:.1f}, resets {s['pulse_reset']:.1f}", "")
    rests = ", ".join(f"{u:.3f} says {said!r}" for u, said in zip(s["rest_u"], s["says"], strict=True))
    table.add_row("rests u", rests, f"L = {s['coupling_L']:.2f}, b = {s['field_b']:.2f}")
    table.add_row(
        "random v switches",
        f"{s['random_v_switches']} of {s['random_v_rows']} at |α| = {s['random_v_alpha']:.1f}",
        f"{s['random_v_switches_at_3_alpha']} of {s['random_v_rows']} at three times that",
    )
    return table
