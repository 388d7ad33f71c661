"""A register: n bits in one soft token, under a text that says one word.

Bits are written one at a time and all at once by pulses along one carrier each, under noise; every row has a twin that
is never pushed. The crosstalk matrix says which bit's pulse disturbs which other bit. Random vectors are pushed as
hard.
"""

import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from conf import build
from conf.schema import Config
from feedback import audit, carriers, figures, loop, metrics, progress
from feedback.hidden import Register
from feedback.latch import search
from feedback.models import LanguageModel, ModelShape
from feedback.results import Result
from feedback.sites import resolve
from feedback.tracking import Tracker


def check(config: Config, shape: ModelShape) -> None:
    """Refuses settings that cannot work, before the model is loaded."""
    build.check_shape(config, shape)
    build.check_cell(config, shape, several=True)
    settings = config.register
    if config.cell.file is None:
        raise ValueError("experiment=register measures a learned cell: cell=register_2, or cell.file=…")
    few = [name for name in ("rows", "pulse_steps", "settle_steps") if getattr(settings, name) < 1]
    if few or settings.single <= 1 or settings.intervals < 2:
        raise ValueError(
            f"register.rows={settings.rows}, pulse_steps={settings.pulse_steps}, settle_steps={settings.settle_steps}, "
            f"intervals={settings.intervals}, single={settings.single}: expected at least 1, 2 intervals, and pulses "
            "of more than 1 threshold"
        )
    if settings.period <= settings.pulse_steps:
        raise ValueError(
            f"register.period={settings.period}: expected more steps than pulse_steps={settings.pulse_steps}"
        )


def run(config: Config, model: LanguageModel, tracker: Tracker, folder: Path) -> Result:
    """Measures one register. Of one whose words are not all rests of the loop, only where each of them goes."""
    settings, draw = config.register, torch.Generator().manual_seed(config.seed)
    before = audit.plain(audit.snapshot(model.module))
    held = build.register(config, model)
    n = held.n_bits
    u_rest, rest, _ = held.settle(settings.settle_steps)
    held_words = ((u_rest.cpu() > 0) == held.all_bits).all(1)
    if not held_words.all():
        return Result(*unheld(held, u_rest.cpu()), record=about(config, held, before))
    own = build.cell_carriers(config, held, draw)
    random = carriers.norm_matched_random(own, draw).scaled
    with progress.bar(config.quiet, unit="row-step") as bar:
        bar.stage("thresholds")
        top = (own.raw_lengths / own.scaled.norm(dim=-1)).max().item()  # pushes as long as the rests are apart
        sizes = thresholds(config, held, own.scaled, rest, top)
        if not torch.isfinite(sizes).all():
            bit, up = divmod(int((~torch.isfinite(sizes)).flatten().int().argmax()), 2)
            raise ValueError(
                f"no pulse of {settings.pulse_steps} steps {'sets' if up else 'resets'} bit {bit} in every word; a "
                "longer pulse (register.pulse_steps), or another cell"
            )
        bar.stage("written")
        own_rows = write(config, held, own.scaled, rest, sizes, bar.turn)
        bar.stage("random v")
        random_rows = write(config, held, random, rest, sizes, bar.turn)
    summary = {
        "n_bits": n,
        "words": 2**n,
        "words_held": int(held_words.sum()),
        **verdict(own_rows, n, draw),
        "random_v": verdict(random_rows, n, draw),
        "pulse_set": (settings.single * sizes[:, 1]).tolist(),
        "pulse_reset": (-settings.single * sizes[:, 0]).tolist(),
        "rest_u_smallest": u_rest.abs().min().item(),
        "carrier_cosines": (own.vectors @ own.vectors.mT).tolist(),
    }
    table = [{"vectors": kind, **row} for kind, rows in (("own", own_rows), ("random", random_rows)) for row in rows]
    for number in range(settings.intervals):
        rows = [row for row in own_rows if row["interval"] == number]
        tracker.log(number + 1, {"register/ber": sum(row["wrong"] for row in rows) / (n * len(rows))})
    names = [f"{a.strip()}/{b.strip()}" for a, b in held.cell.pairs]
    crosstalk = [[name, *row] for name, row in zip(names, summary["crosstalk"], strict=True)]
    tracker.table("crosstalk", ("pulse on", *names), crosstalk)
    path = figures.matrix(
        summary["crosstalk"],
        folder / "figures" / "crosstalk.png",
        rows=[f"pulse on {name}" for name in names],
        columns=names,
        title=f"{n} bits in one soft token: share of pulses after which a bit is wrong",
    )
    record = about(config, held, before)
    return Result(table=table, summary=summary, figures={"crosstalk": path}, record=record)


def about(config: Config, held: Register, before: list[dict[str, Any]]) -> dict[str, Any]:
    """Where it was pushed, which cell it is, its noise, and what hung on the model."""
    site = resolve(held.model.module, held.site)
    return {
        "site": {"block": site.block, "at": site.at, "path": site.path},
        "cell": {"file": str(config.cell.file), "provenance": dict(held.cell.provenance)},
        "noise_model": {
            "sigma": config.noise,
            "unit": "mean length of an embedding row, per coordinate / sqrt(d_model), every soft token",
        },
        "audit": {"before": before, "after": audit.plain(audit.snapshot(held.model.module))},
    }


def unheld(held: Register, u: Float[Tensor, "word bit"]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Table and summary of where every word goes unpushed, in a cell that does not hold them all: nothing can be
    written into that one."""
    rests = u > 0
    table = [
        {"word": _bits(word), "rests_as": _bits(rest), "held": bool((word == rest).all())}
        | {f"u_{bit}": value for bit, value in enumerate(line.tolist())}
        for word, rest, line in zip(held.all_bits, rests, u, strict=True)
    ]
    summary = {
        "n_bits": held.n_bits,
        "words": len(table),
        "words_held": int((rests == held.all_bits).all(1).sum()),
        "bit_kept": (rests == held.all_bits).double().mean(0).tolist(),
    }
    return table, summary


def _bits(word: Shaped[Tensor, " bit"]) -> str:
    return "".join(str(int(bit)) for bit in word)


def thresholds(
    config: Config,
    held: Register,
    vectors: Float[Tensor, "bit d_model"],
    rest: Float[Tensor, "word d_model"],
    top: float,
) -> Float[Tensor, "bit 2"]:
    """The sizes of pulses that reset and set each bit: the larger of those with the others all 0 and all 1."""
    settings, n = config.register, held.n_bits
    groups = [(bit, up, others) for bit in range(n) for up in (0, 1) for others in (0, 1)]
    words = held.all_bits.long()
    starts = []
    for bit, up, others in groups:
        wanted = torch.full((n,), others)
        wanted[bit] = 1 - up
        starts.append(int((words == wanted).all(1).int().argmax()))

    def attempt(amounts: Tensor) -> Tensor:
        levels = amounts.shape[1]
        strength = torch.zeros(settings.period, len(groups), levels, n)
        for number, (bit, up, _) in enumerate(groups):
            strength[: settings.pulse_steps, number, :, bit] = amounts[number] * (2 * up - 1)
        first = rest[torch.tensor(starts).repeat_interleave(levels)]
        told = held.run(first, strength.flatten(1, 2), vectors=vectors)
        bits = (held.read(told.hidden[-1]).cpu() > 0).unflatten(0, (len(groups), levels))
        return torch.stack([bits[number, :, bit] == bool(up) for number, (bit, up, _) in enumerate(groups)])

    found = torch.tensor(search(attempt, len(groups), top, levels=10, rounds=2))
    return found.view(n, 2, 2).amax(-1)


def write(
    config: Config,
    held: Register,
    vectors: Float[Tensor, "bit d_model"],
    rest: Float[Tensor, "word d_model"],
    sizes: Float[Tensor, "bit 2"],
    progress: Any,
) -> list[dict[str, Any]]:
    """Random writes: one bit in two intervals of three, in the third all at once. A table row per row and interval."""
    settings, n, rows = config.register, held.n_bits, config.register.rows
    draw = torch.Generator().manual_seed(config.seed)
    word = torch.randint(2, (rows, n), generator=draw)
    start = word @ (2 ** torch.arange(n - 1, -1, -1))
    steps = settings.intervals * settings.period
    strength = torch.zeros(steps, 2 * rows, n)
    wanted, which = [], []
    for number in range(settings.intervals):
        target = torch.randint(2, (rows, n), generator=draw)
        one = torch.randint(n, (rows,), generator=draw) if number % 3 < 2 and n > 1 else torch.full((rows,), -1)
        touched = (torch.arange(n) == one[:, None]) | (one[:, None] < 0)
        amounts = settings.single * torch.where(target == 1, sizes[:, 1], -sizes[:, 0]) * touched
        begin = number * settings.period
        strength[begin : begin + settings.pulse_steps, :rows] = amounts
        word = torch.where(touched, target, word)
        wanted.append(word)
        which.append(one)
    told = held.run(
        rest[start.repeat(2)],
        strength,
        vectors=vectors,
        sigma=config.noise,
        randomness=loop.Randomness(config.seed, torch.arange(rows).repeat(2)),
        progress=progress,
    )
    ends = torch.arange(1, settings.intervals + 1) * settings.period - 1
    u = held.read(told.hidden[ends]).cpu()
    tokens = told.tokens.cpu()
    table = []
    for row in range(rows):
        for number, end in enumerate(ends.tolist()):
            begin = end + 1 - settings.period
            said, plain = tokens[begin : end + 1, row], tokens[begin : end + 1, rows + row]
            bits, target = (u[number, row] > 0).long(), wanted[number][row]
            single = int(which[number][row])
            table.append(
                {
                    "row": row,
                    "interval": number,
                    "pulse_on": "all" if single < 0 else str(single),
                    "written": _bits(target),
                    "read": _bits(bits),
                    "wrong": int((bits != target).sum()),
                    "u_smallest": u[number, row].abs().min().item(),
                    "text_agreement": (said == plain).double().mean().item(),
                }
            )
    return table


def wrong_bits(row: dict[str, Any]) -> Bool[Tensor, " bit"]:
    return torch.tensor([a != b for a, b in zip(row["written"], row["read"], strict=True)])


def verdict(table: list[dict[str, Any]], n: int, draw: torch.Generator) -> dict[str, Any]:
    """Bit errors with rows as clusters, words, text, and the crosstalk of single pulses.

    crosstalk[i][j]: after a pulse on bit i, the share of intervals in which bit j, right before, is wrong; on the
    diagonal the pulsed bit itself, whether right before or not.
    """
    wrong = torch.stack([wrong_bits(row) for row in table])
    clusters = torch.tensor([row["row"] for row in table])
    ends = metrics.ber_interval(wrong, clusters, draw)
    hits, trials = torch.zeros(n, n), torch.zeros(n, n)
    for number, row in enumerate(table):
        if row["pulse_on"] == "all":
            continue
        i = int(row["pulse_on"])
        fresh = ~wrong[number - 1] if row["interval"] else torch.ones(n, dtype=torch.bool)
        fresh[i] = True
        trials[i] += fresh
        hits[i] += wrong[number] & fresh
    share = hits / trials
    return {
        "ber": wrong.double().mean().item(),
        "ber_low": ends.low.item(),
        "ber_high": ends.high.item(),
        "reads": wrong.numel(),
        "ber_by_bit": wrong.double().mean(0).tolist(),
        "words_right": (~wrong).all(1).double().mean().item(),
        "words_written": len({row["written"] for row in table}),
        "text_agreement": sum(row["text_agreement"] for row in table) / len(table),
        "crosstalk": [[None if math.isnan(x) else x for x in line] for line in share.tolist()],
    }


def show(result: Result) -> Table:
    """The printed table: crosstalk, with the totals in its title."""
    s = result.summary
    n = s["n_bits"]
    if s["words_held"] < s["words"]:
        table = Table(
            title=f"{n} bits in one soft token: {s['words_held']} of {s['words']} words are rests; learn another cell",
            title_justify="left",
            box=SIMPLE_HEAD,
        )
        for column in result.table[0]:
            table.add_column(column)
        for row in result.table:
            table.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()))
        return table
    table = Table(
        title=f"{n} bits in one soft token: {s['words_held']} of {s['words']} words are rests, bit error rate "
        f"{s['ber']:.4f} [{s['ber_low']:.3f}, {s['ber_high']:.3f}], text agreement {s['text_agreement']:.4f}",
        caption="share of single-bit pulses after which a bit is wrong (diagonal: the pulsed one); along random v "
        f"as long {s['random_v']['ber']:.3f} of bits, text agreement {s['random_v']['text_agreement']:.3f}",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("pulse on bit")
    for bit in range(n):
        table.add_column(f"bit {bit} wrong", justify="right")
    for bit, line in enumerate(s["crosstalk"]):
        table.add_row(str(bit), *("–" if x is None else f"{x:.3f}" for x in line))
    table.add_row("any", *(f"{x:.4f}" for x in s["ber_by_bit"]))
    return table
