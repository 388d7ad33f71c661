"""Circuits of cells in the loop: a netlist on every input row, under noise.

Two kinds of wire. ``host``: the bit read from one cell sets the next cell's pulse. ``loop``: the soft token of one cell
is mixed into the next cell's input, and only the outputs are read, at the end; for circuits that hold nothing.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from conf import build
from conf.schema import Config
from feedback import audit, carriers, metrics, progress
from feedback.cells import Bank, Evaluated
from feedback.logic import Circuit, input_rows
from feedback.models import LanguageModel, ModelShape
from feedback.results import Result
from feedback.sites import resolve
from feedback.tracking import Tracker

WIRES = ("host", "loop")


def check(config: Config, shape: ModelShape) -> None:
    """Refuses settings that cannot work, before the model is loaded."""
    build.check_shape(config, shape)
    build.check_cell(config, shape)
    circuit = build.circuit(config)
    if config.logic.wires not in (*WIRES, "both"):
        raise ValueError(f"logic.wires={config.logic.wires!r}: expected host, loop or both")
    if config.logic.wires == "loop" and circuit.holds:
        raise ValueError(f"circuit {circuit.name} holds a state, which loop wires do not carry yet: logic.wires=host")


def run(config: Config, model: LanguageModel, tracker: Tracker, folder: Path) -> Result:
    """Runs the circuit with the wires asked for, and its control along a random vector."""
    settings, draw = config.logic, torch.Generator().manual_seed(config.seed)
    before = audit.plain(audit.snapshot(model.module))
    circuit, latch = build.circuit(config), build.latch(config, model, draw)
    random = carriers.norm_matched_random(carriers.from_vectors(latch.vector[None], "v"), draw).scaled[0]
    looped = settings.wires != "host" and not circuit.holds and len(circuit.cells) > 1
    point = build.operating_point(config, latch, wires=looped)
    values = sequence(circuit, config, draw) if circuit.holds else [combinations(circuit, settings.trials)]
    table: list[dict[str, Any]] = []
    steps: dict[str, int] = {}
    said: dict[str, float | None] = {}
    runs: list[tuple[str, dict[str, Any]]] = [("host", {})] if settings.wires != "loop" else []
    runs += [("loop", {})] if looped else []
    runs += [("random_v", {"along": random})]
    with progress.bar(config.quiet, unit="row-step") as bar:
        for kind, different in runs:
            bar.stage(kind)
            bank = Bank(latch, point, sigma=config.noise, seed=config.seed, progress=bar.turn, **different)
            asked = (
                values
                if kind != "random_v"
                else [{k: v[:: settings.trials] for k, v in tick.items()} for tick in values]
            )
            table += loop_wired(bank, circuit, asked) if kind == "loop" else host_wired(bank, circuit, asked, kind)
            steps[kind], said[kind] = bank.steps, bank.text_agreement
            tracker.log(len(steps), {f"circuit/{kind}/correct": share([r for r in table if r["wires"] == kind])})
    truth = truth_table(table)
    tracker.table("truth_table", list(truth[0]), [list(row.values()) for row in truth])
    main = "host" if settings.wires != "loop" else "loop"
    summary = {
        **verdict(table, main),
        "circuit": circuit.name,
        "cells": len(circuit.cells),
        "steps": steps[main],
        "wires": main,
        "text_agreement": said[main],
        **{kind: {**verdict(table, kind), "text_agreement": said[kind]} for kind in steps},
        "noise": config.noise,
    }
    where = resolve(model.module, latch.site)
    record = {
        "site": {"block": where.block, "at": where.at, "path": where.path},
        "operating_point": {
            "pulse_set": point.set,
            "pulse_reset": -point.reset,
            "wire_set": point.wire_set,
            "wire_reset": point.wire_reset,
            "wire_hold": point.wire_hold,
            "rest_u": list(point.u),
        },
        "who_carries_the_wire": {
            "host": "the host reads each cell's sign of u and sizes the next cell's pulse by it",
            "loop": "the soft token of a cell is mixed into the next cell's input; read at the end only",
        },
        "noise_model": {
            "sigma": config.noise,
            "unit": "mean length of an embedding row, per coordinate / sqrt(d_model), every soft token",
        },
        "audit": {"before": before, "after": audit.plain(audit.snapshot(model.module))},
    }
    return Result(table=table, summary=summary, record=record)


def combinations(circuit: Circuit, trials: int) -> dict[str, Int[Tensor, " row"]]:
    """Every input row, each ``trials`` times in order."""
    rows = input_rows(circuit.inputs)
    return {name: torch.tensor([row[name] for row in rows]).repeat_interleave(trials) for name in circuit.inputs}


def sequence(circuit: Circuit, config: Config, draw: torch.Generator) -> list[dict[str, Int[Tensor, " row"]]]:
    """Inputs of every tick: random sequences, each ``trials`` times in order. The first two ticks go through all inputs
    that the number of sequences allows, so that every row of the truth table is met."""
    settings = config.logic
    rows = input_rows(circuit.inputs)
    ticks = []
    for tick in range(settings.ticks):
        picked = torch.randint(len(rows), (settings.sequences,), generator=draw)
        if tick < 2:
            picked = (torch.arange(settings.sequences) // (len(rows) ** tick)) % len(rows)
        ticks.append(
            {
                name: torch.tensor([rows[i][name] for i in picked.tolist()]).repeat_interleave(settings.trials)
                for name in circuit.inputs
            }
        )
    return ticks


def host_wired(
    bank: Bank, circuit: Circuit, ticks: list[dict[str, Int[Tensor, " row"]]], kind: str
) -> list[dict[str, Any]]:
    """One table row per input row (or sequence), tick and output."""
    state: dict[str, Evaluated] = {}
    n_rows = len(next(iter(ticks[0].values())))
    before = {name: torch.full((n_rows,), circuit.cells[cell].start) for name, cell in circuit.outputs.items()}
    table = []
    for number, values in enumerate(ticks, 1):
        state, known = bank.tick(circuit, values, state)
        given = before
        before = wanted(circuit, values, before)
        table += rows_of(
            circuit, kind, number, values, given, before, {n: known[c] for n, c in circuit.outputs.items()}
        )
    return table


def loop_wired(bank: Bank, circuit: Circuit, ticks: list[dict[str, Int[Tensor, " row"]]]) -> list[dict[str, Any]]:
    known = bank.wired_tick(circuit, ticks[0])
    read = {name: known[cell] for name, cell in circuit.outputs.items()}
    return rows_of(circuit, "loop", 1, ticks[0], {}, wanted(circuit, ticks[0], {}), read)


def wanted(
    circuit: Circuit, values: dict[str, Int[Tensor, " row"]], before: dict[str, Int[Tensor, " row"]]
) -> dict[str, Int[Tensor, " row"]]:
    """What each row should give, by the circuit's truth: never by its cells."""
    n_rows = len(next(iter(values.values())))
    told = [
        circuit.expected(
            {name: int(value[row]) for name, value in values.items()},
            {name: int(value[row]) for name, value in before.items()},
        )
        for row in range(n_rows)
    ]
    return {name: torch.tensor([one[name] for one in told]) for name in circuit.outputs}


def rows_of(
    circuit: Circuit,
    kind: str,
    tick: int,
    values: dict[str, Int[Tensor, " row"]],
    before: dict[str, Int[Tensor, " row"]],
    expected: dict[str, Int[Tensor, " row"]],
    read: dict[str, Int[Tensor, " row"]],
) -> list[dict[str, Any]]:
    right = torch.stack([read[name] == expected[name] for name in circuit.outputs]).all(0)
    names = [*values, *(f"{name} before" for name in before if circuit.holds)]
    columns = [*values.values(), *(value for value in before.values() if circuit.holds)]
    return [
        {
            "wires": kind,
            "tick": tick,
            "row": row,
            **{name: int(column[row]) for name, column in zip(names, columns, strict=True)},
            **{f"{name} expected": int(expected[name][row]) for name in circuit.outputs},
            **{f"{name} read": int(read[name][row]) for name in circuit.outputs},
            "correct": bool(right[row]),
        }
        for row in range(len(right))
    ]


def truth_rows(table: list[dict[str, Any]], kind: str) -> dict[tuple[int, ...], list[bool]]:
    """Inputs (and the state before) → whether all outputs were right, trial by trial."""
    found: dict[tuple[int, ...], list[bool]] = {}
    for row in table:
        if row["wires"] == kind:
            key = tuple(
                value
                for name, value in row.items()
                if name not in ("wires", "tick", "row", "correct") and not name.endswith((" expected", " read"))
            )
            found.setdefault(key, []).append(row["correct"])
    return found


def truth_table(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per input row (and state before): what each output should be, and the share of trials in which all were
    right, by who carried the wire."""
    kinds = list(dict.fromkeys(row["wires"] for row in table))
    found = {kind: truth_rows(table, kind) for kind in kinds}
    inputs, outputs = columns_of(table)
    right = {tuple(row[name] for name in inputs): [row[f"{name} expected"] for name in outputs] for row in table}
    return [
        {
            **dict(zip(inputs, key, strict=True)),
            **{f"{name} expected": bit for name, bit in zip(outputs, right[key], strict=True)},
            **{kind: sum(found[kind][key]) / len(found[kind][key]) if key in found[kind] else None for kind in kinds},
            "trials": len(trials),
        }
        for key, trials in sorted(found[kinds[0]].items())
    ]


def columns_of(table: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The names of the inputs (and the state before), and of the outputs."""
    inputs = [
        name
        for name in table[0]
        if name not in ("wires", "tick", "row", "correct") and not name.endswith((" expected", " read"))
    ]
    return inputs, [name.removesuffix(" expected") for name in table[0] if name.endswith(" expected")]


def verdict(table: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """correct_rows: rows of the truth table on which every trial was right."""
    found = truth_rows(table, kind)
    lows = [1 - metrics.wilson(len(right) - sum(right), len(right)).high.item() for right in found.values()]
    return {
        "correct_rows": sum(all(right) for right in found.values()),
        "rows": len(found),
        "worst_row": min(sum(right) / len(right) for right in found.values()),
        "worst_row_low": min(lows),
        "accuracy": share([row for row in table if row["wires"] == kind]),
    }


def share(rows: list[dict[str, Any]]) -> float:
    return sum(row["correct"] for row in rows) / len(rows)


def show(result: Result) -> Table:
    """The printed table: the truth table with the share of trials that were right, and the wires beside each other."""
    s = result.summary
    kinds = [kind for kind in ("host", "loop", "random_v") if kind in s]
    heads = ", ".join(f"{kind} {s[kind]['correct_rows']} of {s[kind]['rows']} rows" for kind in kinds)
    table = Table(
        title=f"{s['circuit']}: {s['cells']} cells, {s['steps']} steps; right in every trial: {heads}",
        caption="share of trials in which every output was right, by who carried the wire; random_v is the control"
        + ("" if s["text_agreement"] is None else f"; the text is the same in {s['text_agreement']:.4f} of steps"),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    inputs, outputs = columns_of(result.table)
    for column in (*inputs, *outputs, *kinds, "trials"):
        table.add_column(column, justify="right")
    for row in truth_table(result.table)[:32]:
        bits = [str(row[name]) for name in (*inputs, *(f"{name} expected" for name in outputs))]
        shares = ["–" if row[kind] is None else f"{row[kind]:.3f}" for kind in kinds]
        table.add_row(*bits, *shares, str(row["trials"]))
    return table
