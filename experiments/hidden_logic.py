"""Hidden logic: all 16 two-input logic gates on one cell in the loop, two cells for XOR and XNOR.

One readout, the sign of u, is fixed before any gate runs; pulses are sized by the cell's measured thresholds. Every row
of every truth table runs as many noisy trials, all in one batch. Controls: the best linear readout of the inputs, the
loop cut, and the same pulses along a random vector as long.
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
from feedback import audit, carriers, cells, figures, logic, metrics, progress
from feedback.cells import Bank, Evaluated
from feedback.models import LanguageModel, ModelShape
from feedback.results import Result
from feedback.sites import resolve
from feedback.tracking import Tracker

CONTROLS = ("loop_cut", "random_v")


def check(config: Config, shape: ModelShape) -> None:
    """Refuses settings that cannot work, before the model is loaded."""
    build.check_shape(config, shape)
    build.check_cell(config, shape)


def run(config: Config, model: LanguageModel, tracker: Tracker, folder: Path) -> Result:
    """Measures the cell, runs the gates and their controls; leaves two figures in ``folder``."""
    settings, draw = config.logic, torch.Generator().manual_seed(config.seed)
    before = audit.plain(audit.snapshot(model.module))
    latch = build.latch(config, model, draw)
    random = carriers.norm_matched_random(carriers.from_vectors(latch.vector[None], "v"), draw).scaled[0]
    point = build.operating_point(config, latch)
    rows = 4 * (16 + 2) * settings.trials
    steps = settings.pulse_steps + settings.settle_steps
    with progress.bar(config.quiet, total=rows * steps, unit="row-step") as bar:

        def bank(**different: Any) -> Bank:
            return Bank(latch, point, sigma=config.noise, seed=config.seed, progress=bar.turn, **different)

        own = bank()
        told = all_gates(own, settings.trials)
        controls = {
            "loop_cut": all_gates(bank(cut=True), settings.control_trials),
            "random_v": all_gates(bank(along=random), settings.control_trials),
        }
    table = [row for name, result in told.items() for row in judge(name, result, settings, point, "gate")]
    for control, results in controls.items():
        table += [row for name, result in results.items() for row in judge(name, result, settings, point, control)]
    gates = {name: summarise(name, table, settings.single) for name in logic.GATES}
    for number, gate in enumerate(gates.values(), 1):
        tracker.log(number, {"gate/accuracy": gate["accuracy"], "gate/worst_row": gate["worst_row"]})
    log_tables(tracker, table)
    summary = {
        "gates_correct": sum(gate["worst_row"] > 0.5 for gate in gates.values()),
        "gates_perfect": sum(gate["accuracy"] == 1 for gate in gates.values()),
        "worst_row_low": min(gate["worst_row_low"] for gate in gates.values()),
        "text_agreement": own.text_agreement,  # the first cells of XOR and XNOR are in it
        "gates": gates,
        "controls": {
            "linear_readout_of_inputs": {name: logic.best_linear_accuracy(bits) for name, bits in logic.GATES.items()},
            **{name: control_summary(table, name) for name in CONTROLS},
        },
        "pulse_set": point.set,
        "pulse_reset": -point.reset,
        "rest_u": list(point.u),
    }
    where = resolve(model.module, latch.site)
    record = {
        "site": {"block": where.block, "at": where.at, "path": where.path},
        "readout": "sign of u = tanh((z_A − z_B)/2τ) after the last step, for every gate",
        "noise_model": {
            "sigma": config.noise,
            "unit": "mean length of an embedding row, per coordinate / sqrt(d_model), every soft token",
        },
        "trials_per_row": settings.trials,
        "audit": {"before": before, "after": audit.plain(audit.snapshot(model.module))},
    }
    shares = {
        name: torch.tensor([r["share_of_ones"] for r in table if (r["gate"], r["control"]) == (name, "gate")]).numpy()
        for name in logic.GATES
    }
    nand = told["NAND"].u.unflatten(1, (4, settings.trials))
    groups = {
        f"a, b = {a}, {b}": nand[:, row, : min(16, settings.trials)].mT.numpy()
        for row, (a, b) in enumerate(logic.INPUT_ROWS)
    }
    drawn = {
        "truth_tables": figures.truth_tables(
            shares, logic.GATES, folder / "figures" / "truth_tables.png", title="Sixteen logic gates in the loop"
        ),
        "traces": figures.traces(
            groups, folder / "figures" / "traces.png", push_until=settings.pulse_steps, title="NAND: u over the steps"
        ),
    }
    return Result(table=table, summary=summary, figures=drawn, record=record)


def inputs(trials: int) -> dict[str, Int[Tensor, " row"]]:
    """All four input rows, each ``trials`` times, in order."""
    table = torch.tensor(logic.INPUT_ROWS).repeat_interleave(trials, dim=0)
    return {"a": table[:, 0], "b": table[:, 1]}


def all_gates(bank: Bank, trials: int) -> dict[str, Evaluated]:
    """The 14 threshold gates in one batch; XOR and XNOR as AND and a second cell that hears what was read of it."""
    single = bank.gates({name: logic.gate_cell(name) for name in logic.threshold_gates()}, inputs(trials))
    cascades = {name: logic.gate_circuit(name) for name in ("XOR", "XNOR")}
    both = bank.gates({name: circuit.cells["both"] for name, circuit in cascades.items()}, inputs(trials))
    double: dict[str, Evaluated] = {}
    for name, circuit in cascades.items():
        known = {**inputs(trials), "both": both[name].bits}
        double |= bank.gates({name: circuit.cells["out"]}, known)
    return {name: (single | double)[name] for name in logic.GATES}


def judge(name: str, told: Evaluated, settings: Any, point: cells.OperatingPoint, control: str) -> list[dict[str, Any]]:
    """A table row per row of the truth table."""
    right = torch.tensor(logic.GATES[name])
    trials = len(told.bits) // 4
    bits = told.bits.view(4, trials)
    u = told.u.unflatten(1, (4, trials))
    tokens = told.tokens.unflatten(1, (4, trials))
    start = logic.gate_circuit(name).cells["out"].start
    rest = torch.tensor(point.u)
    restored = (u[-1] / rest[(u[-1] > 0).long()]).mean(1)
    unpushed = tokens[-1].flatten().mode().values if control == "loop_cut" else None
    table = []
    for row, (a, b) in enumerate(logic.INPUT_ROWS):
        correct = int((bits[row] == right[row]).sum())
        low = metrics.wilson(trials - correct, trials)
        said = tokens[:, row] == (unpushed if unpushed is not None else point.tokens[start])
        table.append(
            {
                "gate": name,
                "control": control,
                "a": a,
                "b": b,
                "expected": int(right[row]),
                "trials": trials,
                "accuracy": correct / trials,
                "accuracy_low": 1 - low.high.item(),
                "accuracy_high": 1 - low.low.item(),
                "share_of_ones": bits[row].double().mean().item(),
                "u": u[-1, row].mean().item(),
                "level_restored": restored[row].item(),
                "text_agreement": said.double().mean().item(),
            }
        )
    return table


def log_tables(tracker: Tracker, table: list[dict[str, Any]]) -> None:
    """The truth tables as they were read, and the trials of all gates by expected and read bit."""
    columns = ("gate", "a", "b", "expected", "share_of_ones", "accuracy", "trials")
    own = [row for row in table if row["control"] == "gate"]
    tracker.table("truth_table", columns, [[row[column] for column in columns] for row in own])
    counts = []
    for bit in (0, 1):
        asked = [row for row in own if row["expected"] == bit]
        ones = round(sum(row["share_of_ones"] * row["trials"] for row in asked))
        counts.append([bit, sum(row["trials"] for row in asked) - ones, ones])
    tracker.table("confusion", ("expected", "read 0", "read 1"), counts)


def summarise(name: str, table: list[dict[str, Any]], single: float) -> dict[str, Any]:
    own = [row for row in table if (row["gate"], row["control"]) == (name, "gate")]
    worst = min(own, key=lambda row: row["accuracy"])
    margins = []
    for cell in logic.gate_circuit(name).cells.values():
        sums = [cell.sum({"a": a, "b": b, "both": a & b}) for a, b in logic.INPUT_ROWS]
        margins.append(logic.noise_margin(cell, sums, single))
    return {
        "accuracy": sum(row["accuracy"] for row in own) / len(own),
        "worst_row": worst["accuracy"],
        "worst_row_low": worst["accuracy_low"],
        "noise_margin": min(margins),
        "level_restored": min(row["level_restored"] for row in own),
        "cells": len(logic.gate_circuit(name).cells),
    }


def control_summary(table: list[dict[str, Any]], control: str) -> dict[str, Any]:
    """How many of the 14 gates that depend on an input still come out right on every row, and the mean accuracy."""
    accuracy, correct = {}, []
    for name in logic.GATES:
        own = [row["accuracy"] for row in table if (row["gate"], row["control"]) == (name, control)]
        accuracy[name] = sum(own) / len(own)
        if name not in ("TRUE", "FALSE") and min(own) > 0.5:
            correct.append(name)
    return {
        "gates_correct": len(correct),
        "mean_accuracy": sum(accuracy.values()) / len(accuracy),
        "accuracy": accuracy,
    }


def show(result: Result) -> Table:
    """The printed table: one line per gate, its controls beside it."""
    s = result.summary
    table = Table(
        title=f"Hidden logic: {s['gates_correct']} of 16 gates right in most trials of every row, "
        f"{s['gates_perfect']} in every trial; pulses set at {s['pulse_set']:.1f}, reset at {s['pulse_reset']:.1f}",
        caption="95 % intervals; linear: best linear readout of the inputs; cut: no loop; random v: same pulses",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    columns = ("gate", "cells", "accuracy", "worst row", "margin", "level", "linear", "cut", "random v")
    for column in columns:
        table.add_column(column, justify="left" if column == "gate" else "right")
    for name, gate in s["gates"].items():
        controls = [s["controls"][control]["accuracy"][name] for control in CONTROLS]
        table.add_row(
            name,
            str(gate["cells"]),
            f"{gate['accuracy']:.3f}",
            f"{gate['worst_row']:.3f} [{gate['worst_row_low']:.2f}, …]",
            f"{gate['noise_margin']:.2f}",
            f"{gate['level_restored']:.2f}",
            f"{s['controls']['linear_readout_of_inputs'][name]:.2f}",
            *(f"{accuracy:.2f}" for accuracy in controls),
        )
    return table
