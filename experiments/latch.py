"""Is the soft loop of a token pair a latch? Theory predicts from L and b; the loop is swept, pulsed and held.

Context ``prompt``: the soft token is all that the loop remembers. Every number has its control in the same run: random
vectors as long as v, −v, and v pushed at another block.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from conf import build
from conf.schema import Config
from feedback import audit, carriers, figures, loop, maps, metrics, programs, progress
from feedback.cache import Context
from feedback.latch import Latch, critical_field, crossing, pulses, rests, search, static_thresholds
from feedback.models import LanguageModel, ModelShape
from feedback.results import Result
from feedback.sites import Site, resolve, unembed
from feedback.tracking import Tracker

LEVELS, ROUNDS = 8, 3  # of a search for a threshold: amounts tried at once, how often that is refined


def check(config: Config, shape: ModelShape) -> None:
    """Refuses settings that cannot work, before the model is loaded."""
    build.check_shape(config, shape)
    build.check_cell(config, shape)
    settings = config.latch
    counts = {
        name: getattr(settings, name)
        for name in ("dwell", "hold_steps", "hold_trials", "random_vectors", "control_pulse")
    }
    counts |= {"dwells": min(settings.dwells, default=0), "pulse_lengths": min(settings.pulse_lengths, default=0)}
    few = [name for name, count in counts.items() if count < 1]
    if few or settings.levels < 3:
        raise ValueError(
            f"latch.levels={settings.levels}, latch.{', latch.'.join(few) or 'levels'}: expected at least 3 levels "
            "and at least 1 of everything else"
        )
    if settings.screen:
        wrong = [b for b in settings.blocks if not 0 <= b < shape.n_blocks]
        if wrong or not settings.pairs or not settings.templates or not all(len(pair) == 2 for pair in settings.pairs):
            raise ValueError(
                f"latch.blocks={settings.blocks} of {shape.n_blocks}, {len(settings.pairs)} pairs, "
                f"{len(settings.templates)} templates: expected blocks that exist, pairs of two words, and a template"
            )
    elif wrong := [b for b in settings.other_blocks or [] if not 0 <= b < shape.n_blocks]:
        raise ValueError(f"latch.other_blocks {wrong} do not exist: this model has blocks 0–{shape.n_blocks - 1}")


def run(config: Config, model: LanguageModel, tracker: Tracker, folder: Path) -> Result:
    """Measures one latch, or screens for some."""
    draw = torch.Generator().manual_seed(config.seed)
    before = audit.plain(audit.snapshot(model.module))
    if config.latch.screen:
        result = screen(config, model)
    else:
        result = measure(config, model, build.latch(config, model, draw), draw, tracker, folder)
    result.record["audit"] = {"before": before, "after": audit.plain(audit.snapshot(model.module))}
    return result


# ---------------------------------------------------------------------------------------------------- one latch


def measure(
    config: Config, model: LanguageModel, cell: Latch, draw: torch.Generator, tracker: Tracker, folder: Path
) -> Result:
    """Everything about one latch. ValueError, with the measured L, where there are no two rests."""
    settings, top = config.latch, config.latch.top
    with progress.bar(config.quiet, unit="row-step") as bar:
        theory = predict(cell, top)
        u, rest, _ = cell.settle(settings.settle_steps)
        low, high = u[-1].tolist()
        if not low < 0 < high:
            raise ValueError(
                f"no latch: L = {theory['coupling_L']:.2f} and b = {theory['field_b']:.2f} (b_c = "
                f"{theory['critical_field']:.2f}; two rests need L > 2 and |b| < b_c), and the loop comes to "
                f"rest at u = {high:.2f} from A and {low:.2f} from B. Screen for another pair or prompt: "
                "python run.py experiment=latch_screen"
            )
        bar.stage("thresholds")
        set_at, reset_at = static_thresholds(cell, rest, top, settings.static_steps, LEVELS, ROUNDS)
        by_length = pulse_thresholds(cell, rest, settings.pulse_lengths, 2 * top, settings.settle_steps // 3)
        if not (math.isfinite(set_at) and math.isfinite(reset_at)):
            raise ValueError(
                f"no push up to latch.top={top:g} {'sets' if math.isinf(set_at) else 'resets'} this latch at "
                f"{resolve(model.module, cell.site).path}: raise latch.top, or choose another site or vector"
            )
        beyond = settings.margin * (set_at + reset_at)
        levels = torch.linspace(-reset_at - beyond, set_at + beyond, settings.levels)
        bar.stage("sweep")
        table, by_dwell = sweep(config, cell, rest, levels, bar)
        bar.stage("hold")
        held, noisy, rows = hold(config, cell, rest, levels, bar)
        table += rows
        bar.stage("controls")
        controls = control(config, cell, rest, set_at, reset_at, draw)
    for row in table:
        if row["kind"] == "up" and row["dwell"] == max(settings.dwells):
            tracker.log(row["step"], {"latch/u": row["u"], "latch/alpha": row["alpha"]})
    branches = table_of_branches(table, settings.dwell)
    quickest = f"{min(settings.dwells) * settings.dwell} steps a level"
    (alphas, up), (_, down) = (branches[f"{way}, {quickest}"] for way in ("up", "down"))
    for number, (alpha, rising, falling) in enumerate(zip(alphas, up, reversed(down), strict=True), 1):
        tracker.log(number, {"hysteresis/alpha": alpha, "hysteresis/up": rising, "hysteresis/down": falling})
    site = resolve(model.module, cell.site)
    summary = {
        **theory,
        "alpha_set": set_at,
        "alpha_reset": -reset_at,
        "width": set_at + reset_at,
        "width_by_dwell": {str(dwell): found["width"] for dwell, found in by_dwell.items()},
        "by_dwell": {str(dwell): found for dwell, found in by_dwell.items()},
        "with_noise": noisy,
        "pulse_set": {str(n): found[0] for n, found in by_length.items()},
        "pulse_reset": {str(n): -found[1] for n, found in by_length.items()},
        "rest_u": [low, high],
        **held,
        **controls,
    }
    record = {
        "site": {"block": site.block, "at": site.at, "path": site.path},
        "noise_model": {
            "sigma": config.noise,
            "unit": "mean length of an embedding row, per coordinate / sqrt(d_model)",
        },
        "resolution": {"alpha_set": top / LEVELS**ROUNDS, "sweep": (levels[1] - levels[0]).item()},
        "semantics": "autonomous: the cache is cut back to the prompt after every step",
    }
    path = figures.hysteresis(
        branches,
        folder / "figures" / "hysteresis.png",
        measured=(-reset_at, set_at),
        predicted=[summary["predicted_alpha_reset_band"], summary["predicted_alpha_set_band"]],
        title=f"{config.cell.a.strip()} or {config.cell.b.strip()}: hysteresis at block {site.block}",
    )
    return Result(table=table, summary=summary, figures={"hysteresis": path}, record=record)


def predict(cell: Latch, top: float) -> dict[str, Any]:
    """L, b, db/dα, and what theory makes of them: rests, and the α at which each rest is gone.

    The band goes from L and b taken as straight lines at α = 0 to the L(α) and b(α) that were measured.
    """
    grid = torch.linspace(-top, top, 41).tolist()
    found = cell.couplings(grid)
    middle = len(grid) // 2
    coupling, bias = found.coupling[middle].item(), found.bias[middle].item()
    slope = (
        (found.bias[middle + 1] - found.bias[middle - 1]) / (found.alpha[middle + 1] - found.alpha[middle - 1])
    ).item()
    edge = critical_field(coupling)
    straight = [(sign * edge - bias) / slope if edge and slope else math.nan for sign in (-1, 1)]
    curved = [found.crossing(upper=True), found.crossing(upper=False)]
    return {
        "coupling_L": coupling,
        "field_b": bias,
        "critical_field": edge,
        "field_per_alpha": slope,
        "predicted_rest_u": rests(coupling, bias),
        "predicted_alpha_set": curved[1],
        "predicted_alpha_reset": curved[0],
        "predicted_alpha_set_band": sorted([curved[1], straight[1]]),
        "predicted_alpha_reset_band": sorted([curved[0], straight[0]]),
    }


def pulse_thresholds(
    cell: Latch, rest: Float[Tensor, "2 d_model"], lengths: list[int], top: float, settle: int
) -> dict[int, tuple[float, float]]:
    """For each length, the pulse that sets from the low rest, and the one (as a size) that resets from the high one."""

    def attempt(amounts: Tensor) -> Tensor:
        groups, n = amounts.shape
        signs = torch.tensor([1.0, -1.0]).repeat(len(lengths))
        start = rest[torch.tensor([0, 1]).repeat(len(lengths)).repeat_interleave(n)]
        steps = max(lengths) + settle
        parts = [
            pulses(sign * size, length, steps)
            for sign, size, length in zip(signs, amounts, [length for length in lengths for _ in "+-"], strict=True)
        ]
        up = cell.read(cell.run(start, torch.cat(parts, dim=1)).hidden[-1]) > 0
        return up.view(groups, n) == (signs[:, None] > 0).to(up.device)

    found = search(attempt, 2 * len(lengths), top, LEVELS, ROUNDS)
    return {length: (found[2 * i], found[2 * i + 1]) for i, length in enumerate(lengths)}


def sweep(
    config: Config, cell: Latch, rest: Float[Tensor, "2 d_model"], levels: Float[Tensor, " level"], bar: Any
) -> tuple[list[dict[str, Any]], dict[int, dict[str, float]]]:
    """Up from the low rest and down from the high one at every speed, as one batch without noise. The quickest sweep
    goes through all levels, slower ones begin in the middle, where both rests are."""
    settings = config.latch
    middle = (levels[0] + levels[-1]) / 2
    stairs = []
    for times in settings.dwells:
        rising, falling = levels, levels.flip(0)
        if times != min(settings.dwells):
            rising, falling = levels[levels >= middle], levels[levels <= middle].flip(0)
        stairs += [course.repeat_interleave(settings.dwell * times) for course in (rising, falling)]
    longest = max(map(len, stairs))
    strength = torch.stack([torch.cat([s, s[-1:].expand(longest - len(s))]) for s in stairs], dim=1)
    start = rest[torch.tensor([0, 1] * len(settings.dwells))]
    told = cell.run(start, strength, progress=bar.turn)
    u = cell.read(told.hidden).cpu()
    table, by_dwell = [], {}
    for number, times in enumerate(settings.dwells):
        for row, kind in ((2 * number, "up"), (2 * number + 1, "down")):
            for step, alpha in enumerate(stairs[row].tolist()):
                token = int(told.tokens[step, row])
                table.append(line(kind, times, row, step + 1, alpha, u[step, row].item(), cell, token))
        up, down = (crossing(stairs[row], u[: len(stairs[row]), row]) for row in (2 * number, 2 * number + 1))
        by_dwell[times] = {"set": up, "reset": down, "width": up - down}
    return table, by_dwell


def hold(
    config: Config, cell: Latch, rest: Float[Tensor, "2 d_model"], levels: Float[Tensor, " level"], bar: Any
) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """How long each rest lasts unpushed, without noise and with it; and, in the same batch, noisy sweeps."""
    settings = config.latch
    trials, steps, sweeps = settings.hold_trials, settings.hold_steps, settings.noisy_sweeps
    stair = levels.repeat_interleave(settings.dwell)
    if len(stair) > steps:
        sweeps = 0
    state = torch.tensor([0, 1] + [0] * trials + [1] * trials + [0] * sweeps + [1] * sweeps)
    sigma = torch.full((len(state),), config.noise)
    sigma[:2] = 0
    strength = torch.zeros(steps, len(state))
    n_held = 2 + 2 * trials
    if sweeps:
        strength[: len(stair), n_held : n_held + sweeps] = stair[:, None]
        strength[: len(stair), n_held + sweeps :] = stair.flip(0)[:, None]
    told = cell.run(rest[state], strength, sigma=sigma, randomness=loop.Randomness(config.seed), progress=bar.turn)
    u = cell.read(told.hidden).cpu()
    kept = (u[:, :n_held] > 0) == (state[:n_held] > 0)
    lasted = torch.where(kept.all(0), steps, kept.int().argmin(0))
    lost = metrics.wilson(int((lasted[2:] < steps).sum()), 2 * trials)
    held = {
        "hold_steps": int(lasted[2:].min()),
        "hold_censored": bool((lasted[2:] == steps).all()),
        "hold_trials": 2 * trials,
        "hold_steps_without_noise": int(lasted[:2].min()),
        "lost_within_hold": [lost.low.item(), lost.high.item()],
    }
    noisy: dict[str, Any] = {"sigma": config.noise, "sweeps": sweeps}
    for name, first, course in (("set", n_held, stair), ("reset", n_held + sweeps, stair.flip(0))):
        found = [crossing(course, u[: len(stair), first + i]) for i in range(sweeps)]
        if sweeps:
            values = torch.tensor(found, dtype=torch.float64)
            ends = metrics.mean_interval(values, torch.Generator().manual_seed(config.seed))
            noisy[name] = [values.mean().item(), ends.low.item(), ends.high.item()]
    rows = [
        line("hold", 0, row, step + 1, 0.0, u[step, row].item(), cell, int(told.tokens[step, row]), sigma[row].item())
        for row in (0, 1, 2, 2 + trials)
        for step in range(steps)
    ]
    return held, noisy, rows


def line(
    kind: str, dwell: int, row: int, step: int, alpha: float, u: float, cell: Latch, token: int, sigma: float = 0.0
) -> dict[str, Any]:
    said = cell.model.decode([token])
    return {
        "kind": kind, "dwell": dwell, "row": row, "step": step, "alpha": alpha, "u": u, "token": said, "sigma": sigma,
    }  # fmt: skip


def control(
    config: Config, cell: Latch, rest: Float[Tensor, "2 d_model"], set_at: float, reset_at: float, draw: torch.Generator
) -> dict[str, Any]:
    """Random vectors at three times the thresholds, in both directions from both rests, as pulses and held on; −v; and
    v at other blocks."""
    settings, sizes = config.latch, (set_at, reset_at)
    own = carriers.from_vectors(cell.vector[None], "v")
    random = torch.cat([carriers.norm_matched_random(own, draw).scaled for _ in range(settings.random_vectors)])
    pushed, steps = settings.static_steps, settings.static_steps + settings.settle_steps // 2
    trials = [
        (number, state, sign * 3 * sizes[state])
        for number in range(len(random))
        for state in (0, 1)
        for sign in (1, -1)
    ]
    which, state = (torch.tensor([trial[i] for trial in trials]).repeat(2) for i in (0, 1))
    amounts = torch.tensor([trial[2] for trial in trials])
    strength = torch.cat([pulses(amounts, settings.control_pulse, steps), pulses(amounts, pushed, steps)], dim=1)
    u = cell.read(cell.run(rest[state], strength, vectors=random, which=which).hidden).cpu()
    ended = ((u[-1] > 0) != (state > 0)).view(2, -1).sum(1).tolist()
    against = pulses(torch.tensor([-3 * set_at, 3 * reset_at]), settings.control_pulse, 4 * settings.control_pulse)
    kept = (cell.read(cell.run(rest, against).hidden[-1]).cpu() > 0) == torch.tensor([False, True])
    block = resolve(cell.model.module, cell.site).block or 0
    blocks = [block // 2, cell.model.n_blocks - 1] if settings.other_blocks is None else settings.other_blocks
    elsewhere = {}
    for number in blocks:
        there = static_thresholds(replace(cell, site=Site(number)), rest, settings.top, settings.static_steps // 2)
        elsewhere[str(number)] = {"alpha_set": there[0], "alpha_reset": -there[1]}
    return {
        "random_v_switches": ended[0],
        "random_v_switches_held_on": ended[1],
        "random_v_rows": len(trials),
        "minus_v_switches": int((~kept).sum()),
        "other_blocks": elsewhere,
    }


def table_of_branches(table: list[dict[str, Any]], dwell: int) -> dict[str, tuple[list[float], list[float]]]:
    """Label → (α, u) at the last step of every level, a branch for every speed and direction."""
    branches: dict[str, tuple[list[float], list[float]]] = {}
    for row in table:
        if row["kind"] in ("up", "down") and row["step"] % (row["dwell"] * dwell) == 0:
            alphas, us = branches.setdefault(f"{row['kind']}, {row['dwell'] * dwell} steps a level", ([], []))
            alphas.append(row["alpha"])
            us.append(row["u"])
    return branches


# ---------------------------------------------------------------------------------------------------- screening


def screen(config: Config, model: LanguageModel) -> Result:
    """All pairs × prompts as one batch, from A and from B; the best of them at every block."""
    settings = config.latch
    tried = [(a, b, t) for a, b in settings.pairs for t in settings.templates]
    words = [(carriers.token_id(model, a), carriers.token_id(model, b)) for a, b, _ in tried]
    prompts: list[loop.Prompt] = [model.encode(t.replace("{a}", a).replace("{b}", b)) for a, b, t in tried]
    n = len(tried)
    ids = torch.tensor([a for a, _ in words] + [b for _, b in words])
    row_prompt = torch.arange(n).repeat(2)
    nothing = torch.ones(1, model.d_model) / math.sqrt(model.d_model)
    told = loop.run(
        model,
        prompts,
        programs.constant(nothing, 0.0, steps=settings.settle_steps, rows=2 * n),
        feedback_map=maps.expected_embedding(config.map.temperature),
        context=Context("prompt"),
        row_prompt=row_prompt,
        first=model.embedding[ids.to(model.device)],
        record=[Site(block) for block in settings.blocks],
    )
    pair = torch.tensor(words).repeat(2, 1)
    logits = unembed(model.module, told.hidden[[0, -1]])
    picked = logits.gather(-1, pair.to(logits.device).expand(2, -1, -1)) / config.map.temperature
    differs = (picked[..., 0] - picked[..., 1]).double().cpu()
    after_a, after_b = differs[0, :n], differs[0, n:]
    coupling, bias = (after_a - after_b) / 2, (after_a + after_b) / 2
    u = torch.tanh(differs[1] / 2)
    table: list[dict[str, Any]] = []
    for i, (a, b, template) in enumerate(tried):
        edge = critical_field(coupling[i].item())
        table.append(
            {
                "a": a,
                "b": b,
                "prompt": template,
                "L": coupling[i].item(),
                "b_field": bias[i].item(),
                "margin": 1 - abs(bias[i].item()) / edge if edge else -math.inf,
                "rest_low": u[n + i].item(),
                "rest_high": u[i].item(),
                "two_rests": bool(u[n + i] < 0 < u[i]),
                "number": i,
            }
        )
    table.sort(key=lambda row: (row["two_rests"], row["margin"]), reverse=True)
    best = [row for row in table if row["two_rests"]][: settings.verified]
    for block, path in zip(settings.blocks, told.recorded, strict=True):
        at_block(config, model, block, told.recorded[path][0], best, prompts, words)
    for rank, row in enumerate(table, 1):
        row["rank"] = rank
        row["margin"] = row["margin"] if math.isfinite(row["margin"]) else None
        del row["number"]
    first = best[0] if best else None
    shown = ("a", "b", "prompt", "L", "b_field", "margin", "rest_low", "rest_high")
    summary = {
        "tried": n,
        "latches": sum(row["two_rests"] for row in table),
        "predicted_latches": sum(row["margin"] is not None and row["margin"] > 0 for row in table),
        "best": {key: first[key] for key in shown} if first else None,
    }
    return Result(table=table, summary=summary)


def at_block(
    config: Config,
    model: LanguageModel,
    block: int,
    states: Float[Tensor, "row d_model"],
    best: list[dict[str, Any]],
    prompts: list[loop.Prompt],
    words: list[tuple[int, int]],
) -> None:
    """db/dα at one block for each of ``best``, along its own contrast of A and B, and the thresholds that follow."""
    n, delta = len(prompts), 1.0
    if not best:
        return
    numbers = [row["number"] for row in best]
    contrast = torch.stack([states[i] - states[n + i] for i in numbers]).float()
    vectors = torch.nn.functional.normalize(contrast, dim=-1)
    k = len(best)
    along = torch.eye(k).repeat(4, 1)
    strength = torch.tensor([delta, delta, -delta, -delta]).repeat_interleave(k)
    first = torch.tensor([words[i][side] for side in (0, 1, 0, 1) for i in numbers])
    told = loop.run(
        model,
        [prompts[i] for i in numbers],
        programs.Program((strength[:, None] * along)[None], vectors),
        feedback_map=maps.expected_embedding(config.map.temperature),
        site=Site(block),
        context=Context("prompt"),
        row_prompt=torch.arange(k).repeat(4),
        first=model.embedding[first.to(model.device)],
    )
    pair = torch.tensor([words[i] for i in numbers]).repeat(4, 1).to(model.device)
    picked = unembed(model.module, told.hidden[0]).gather(-1, pair).double().cpu() / config.map.temperature
    differs = (picked[:, 0] - picked[:, 1]).view(4, k)
    slope = ((differs[0] + differs[1]) - (differs[2] + differs[3])) / 2 / (2 * delta)
    length = states[numbers].norm(dim=-1).float().cpu()
    for i, row in enumerate(best):
        edge, s = critical_field(row["L"]), slope[i].item()
        row[f"field_per_alpha_{block}"] = s
        row[f"alpha_set_{block}"] = (edge - row["b_field"]) / s if s else None
        row[f"alpha_reset_{block}"] = (-edge - row["b_field"]) / s if s else None
        row[f"length_{block}"] = length[i].item()


# -------------------------------------------------------------------------------------------------------- printing


def show(result: Result) -> Table:
    """The printed table: what was predicted beside what was measured, or the ranking."""
    if "tried" in result.summary:
        return show_screen(result)
    s = result.summary
    table = Table(
        title="A latch in the loop: predicted from one step, and measured",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("quantity", "predicted", "measured", "note"):
        table.add_column(column)

    def number(value: float | None, form: str = ".2f") -> str:
        return "–" if value is None or not math.isfinite(value) else format(value, form)

    low, high = s["rest_u"]
    predicted = s["predicted_rest_u"]
    noisy = s["with_noise"]
    table.add_row("L, b", "", f"{s['coupling_L']:.2f}, {s['field_b']:.2f}", f"b_c = {s['critical_field']:.2f}")
    table.add_row("rests u", ", ".join(f"{u:.3f}" for u in predicted), f"{low:.3f}, {high:.3f}", "")
    for name in ("set", "reset"):
        band = " to ".join(number(x) for x in s[f"predicted_alpha_{name}_band"])
        note = ""
        if name in noisy:
            mean, lower, upper = noisy[name]
            note = f"in sweeps with σ = {noisy['sigma']:g}: {number(mean)} [{number(lower)}, {number(upper)}]"
        table.add_row(f"α {name}", f"{number(s[f'predicted_alpha_{name}'])} ({band})", number(s[f"alpha_{name}"]), note)
    for dwell, found in s["by_dwell"].items():
        ends = f"set {number(found['set'])}, reset {number(found['reset'])}"
        table.add_row(f"width at dwell {dwell}", "", number(found["width"]), ends)
    for length, size in s["pulse_set"].items():
        table.add_row(f"pulse of {length}", "", f"{number(size)}, {number(s['pulse_reset'][length])}", "sets, resets")
    kept = "and longer" if s["hold_censored"] else f"share lost by the end: {s['lost_within_hold']}"
    trials = (
        f"{kept}, {s['hold_trials']} trials at σ = {noisy['sigma']:g}; without noise {s['hold_steps_without_noise']}"
    )
    table.add_row("holds, steps", "", str(s["hold_steps"]), trials)
    random = f"{s['random_v_switches']} of {s['random_v_rows']}"
    table.add_row("random v, 3 × α", "0", random, f"switched by pulses; held on: {s['random_v_switches_held_on']}")
    table.add_row("−v, 3 × α", "0", f"{s['minus_v_switches']} of 2", "switched")
    for block, found in s["other_blocks"].items():
        ends = f"{number(found['alpha_set'])}, {number(found['alpha_reset'])}"
        table.add_row(f"v at block {block}", "", ends, "sets, resets")
    return table


def show_screen(result: Result) -> Table:
    s = result.summary
    table = Table(
        title=f"{s['latches']} of {s['tried']} pairs and prompts have two rests ({s['predicted_latches']} by L and b)",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    blocks = [
        key.removeprefix("alpha_set_")
        for key in (result.table[0] if result.table else {})
        if key.startswith("alpha_set_")
    ]
    for column in (
        "rank",
        "A",
        "B",
        "prompt",
        "L",
        "b",
        "margin",
        "rests",
        *(f"set, reset\nat block {b}" for b in blocks),
    ):
        table.add_column(column, overflow="fold")
    for row in result.table[:20]:
        margin = "–" if row["margin"] is None else f"{row['margin']:.2f}"
        ends = [
            f"{row[f'alpha_set_{block}']:.0f}, {row[f'alpha_reset_{block}']:.0f}"
            if row.get(f"alpha_set_{block}") is not None
            else ""
            for block in blocks
        ]
        own = [f"{row['L']:.2f}", f"{row['b_field']:.2f}", margin, f"{row['rest_low']:.2f}, {row['rest_high']:.2f}"]
        table.add_row(str(row["rank"]), row["a"], row["b"], repr(row["prompt"][:28]), *own, *ends)
    return table
