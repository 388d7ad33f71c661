"""Logic gates and circuits on the oracle's latch: as predicted at every coupling and pulse, and the controls."""

import math
from pathlib import Path

import pytest
import torch
from conftest import composed
from hydra.errors import MissingConfigException

import run
from feedback import carriers, cells, logic, maps, models, results
from feedback.cells import Bank, operating_point
from feedback.latch import Latch, critical_field
from feedback.logic import Cell
from feedback.models import ModelSpec
from feedback.sites import Site

ROOT = Path(run.__file__).parent


def oracle(coupling=4.0, field=0.0, block=2):
    model = models.load(ModelSpec(kind="oracle", coupling=coupling, field=field, max_positions=65536))
    v = carriers.unembedding_direction(model, "A", "B").scaled[0]
    return Latch(model, model.encode("A B"), 0, 1, Site(block), v)


def inputs(trials=1):
    table = torch.tensor(logic.INPUT_ROWS).repeat_interleave(trials, dim=0)
    return {"a": table[:, 0], "b": table[:, 1]}


def predicted(coupling, field, start, amounts, pulse_steps, settle_steps):
    """The formula itself, step by step."""
    u = torch.full((len(amounts),), float(start), dtype=torch.float64)
    for step in range(pulse_steps + settle_steps):
        push = amounts.double() if step < pulse_steps else torch.zeros(len(amounts), dtype=torch.float64)
        u = torch.tanh((field + push + coupling * u) / 2)
    return u


@pytest.mark.parametrize("coupling", [2.6, 4.0, 8.0])
@pytest.mark.parametrize("field", [0.0, 0.05])
def test_gates_are_as_the_formula_predicts_at_every_coupling_and_pulse_of_a_grid(coupling, field):
    """OR, AND, NOR, NAND and all others that one cell can be: which gate a pulse size makes is the formula's to say."""
    cell = oracle(coupling, field)
    point = operating_point(cell, pulse_steps=5, settle_steps=30, top=8 * coupling, single=1.6)
    bank = Bank(cell, point, sigma=0.0, seed=0)
    low, high = point.u
    sizes = torch.linspace(0.1, 8.0, 25) * critical_field(coupling)
    for start, sign, u_start in ((0, 1, low), (1, -1, high)):
        amounts = torch.cat([sign * n * sizes for n in (0, 1, 2)])
        told = bank.evaluate(bank.start(torch.full((len(amounts),), start)), amounts)
        expected = predicted(coupling, field, u_start, amounts, 5, 30)
        clear = expected.abs() > 0.3  # not within rounding of the ridge
        assert torch.equal(told.bits[clear].bool(), (expected > 0)[clear])
        torch.testing.assert_close(told.u[-1][clear].double(), expected[clear], atol=1e-3, rtol=0)
        tables = {tuple(told.bits.view(3, 25)[[0, 1, 1, 2], i].tolist()) for i in range(25)}
        names = {name for name, table in logic.GATES.items() if table in tables}
        assert names == ({"FALSE", "AND", "OR"} if start == 0 else {"TRUE", "NAND", "NOR"})


def test_all_sixteen_gates_are_right_under_noise_at_the_measured_operating_point():
    cell = oracle()
    point = operating_point(cell, pulse_steps=5, settle_steps=8, top=8.0, single=1.6)
    bank = Bank(cell, point, sigma=0.02, seed=0)
    for name in logic.GATES:
        done, known = bank.tick(logic.gate_circuit(name), inputs(8), {})
        right = torch.tensor(logic.GATES[name]).repeat_interleave(8)
        assert torch.equal(known["out"], right), name
        assert set(done) == set(logic.gate_circuit(name).cells)


def test_gates_in_one_batch_are_the_gates_one_by_one():
    cell = oracle()
    point = operating_point(cell, pulse_steps=4, settle_steps=6, top=8.0, single=1.6)
    bank = Bank(cell, point, sigma=0.0, seed=0)
    wanted = {name: logic.gate_cell(name) for name in ("NAND", "OR", "NOT_A")}
    together = bank.gates(wanted, inputs())
    for name, one in wanted.items():
        alone = bank.gates({name: one}, inputs())[name]
        torch.testing.assert_close(together[name].u, alone.u, atol=1e-5, rtol=0)
        assert torch.equal(together[name].bits, torch.tensor(logic.GATES[name]))


def test_wires_of_the_loop_mix_the_source_minus_the_low_rest_and_nothing_from_a_cell_at_rest():
    low = torch.tensor([1.0, 0.0, 0.0])
    vectors = torch.tensor([[1.0, 0.0, 0.0], [3.0, 1.0, 0.0], [0.0, 2.0, 5.0]]).repeat(2, 1)  # two trials
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.0, -1.0, 0.0]])
    mixed = maps.mixed(vectors, weights, low)
    expected = torch.tensor([[1.0, 0.0, 0.0], [3.0, 1.0, 0.0], [-2.0, 1.0, 5.0]]).repeat(2, 1)
    assert torch.equal(mixed, expected)
    per_trial = torch.stack([weights, torch.zeros(3, 3)])
    assert torch.equal(maps.mixed(vectors, per_trial, low)[3:], vectors[3:])


def test_a_share_of_a_high_cells_soft_token_does_what_a_pulse_does():
    """Exactly on the oracle: mixing in κ·(u_high − u_low) adds L·κ·(u_high − u_low) to the field, as a push does."""
    cell = oracle(4.0)
    point = operating_point(cell, pulse_steps=5, settle_steps=20, top=8.0, single=1.6)
    point = cells.with_wires(cell, point)
    share_set, share_reset = point.wire_set, point.wire_reset
    gap = point.u[1] - point.u[0]
    assert 4.0 * share_set * gap == pytest.approx(point.set, rel=0.05)
    assert 4.0 * share_reset * gap == pytest.approx(point.reset, rel=0.05)


def test_a_held_cell_goes_on_from_where_it_was_and_others_from_their_start():
    cell = oracle()
    point = operating_point(cell, pulse_steps=5, settle_steps=8, top=8.0, single=1.6)
    bank = Bank(cell, point, sigma=0.02, seed=0)
    sr = logic.circuit(
        "sr",
        {
            "inputs": ["set", "reset"],
            "cells": {"q": {"weights": {"set": 1, "reset": -1}, "hold": True}},
            "outputs": {"q": "q"},
            "truth": {"q": "q if set == reset else set"},
        },
    )
    state, seen = {}, []
    for s, r in ((0, 0), (1, 0), (0, 0), (1, 1), (0, 1), (0, 0)):
        state, known = bank.tick(sr, {"set": torch.full((3,), s), "reset": torch.full((3,), r)}, state)
        seen.append(known["q"].tolist())
    assert seen == [[q] * 3 for q in (0, 1, 1, 1, 0, 0)]


def test_units_of_a_cell_come_from_the_thresholds_of_the_direction_it_is_pushed_in():
    point = cells.OperatingPoint(
        torch.zeros(2, 3), (-1.0, 1.0), (0, 1), 5, 5, set=10.0, reset=4.0, wire_set=0.5, wire_reset=0.2, wire_hold=0.7
    )
    root = 2**-0.5
    assert point.unit(Cell({"a": 1})) == (16.0, 16.0)
    assert point.unit(Cell({"a": 1}, 2, start=1)) == pytest.approx((-4 * root, -4 * root))
    assert point.unit(Cell({"a": 1}, hold=True)) == (16.0, 6.4)
    assert point.wires(Cell({}), {"x": 1}) == {"x": 0.8}
    assert point.wires(Cell({}), {"x": 1, "y": -2}) == pytest.approx({"x": 0.7, "y": -1.4})
    assert point.wires(Cell({}, 2, start=1), {"x": 1}) == pytest.approx({"x": -0.2 * root})


def test_no_cell_without_two_rests_or_without_a_pulse_that_switches():
    with pytest.raises(ValueError, match=r"no latch: from A the loop comes to rest at u = .*experiment=latch_screen"):
        operating_point(oracle(1.5, 0.5), pulse_steps=5, settle_steps=8, top=8.0, single=1.6)
    with pytest.raises(ValueError, match=r"no pulse of 5 steps up to 0\.5 sets the latch"):
        operating_point(oracle(), pulse_steps=5, settle_steps=8, top=0.5, single=1.6)


# ------------------------------------------------------------------------------------------------- the commands

TINY = ["model=oracle", "cell=ab", "carriers=unembedding", "carriers.a=A", "carriers.b=B", "logic.top=8"]


def configured(name, *overrides):
    return composed(f"experiment={name}", *TINY, "tracking=disabled", "quiet=true", *overrides)


def test_hidden_logic_gets_all_sixteen_gates_and_its_controls_what_they_must(tmp_path):
    record = run.main(configured("hidden_logic", "logic.trials=64", "logic.control_trials=4"), tmp_path, None)
    s = record["summary"]
    assert s["gates_correct"] == s["gates_perfect"] == 16
    assert s["worst_row_low"] >= 0.94
    for name, gate in s["gates"].items():
        assert gate["worst_row_low"] == pytest.approx(0.943, abs=1e-3)  # Wilson, 64 of 64
        assert gate["level_restored"] > 0.95 and gate["noise_margin"] > 0.2
        assert gate["cells"] == (2 if name in ("XOR", "XNOR") else 1)
    controls = s["controls"]
    linear = controls["linear_readout_of_inputs"]
    assert {name for name, share in linear.items() if share < 1} == {"XOR", "XNOR"} and linear["XOR"] == 0.75
    assert controls["loop_cut"]["gates_correct"] == 0
    assert {p.stem for p in (tmp_path / "figures").glob("*.png")} == {"truth_tables", "traces"}
    assert len(results.read_table(tmp_path / "table.csv")) == 16 * 4 * 3


@pytest.mark.parametrize("wires", ["both", "host", "loop"])
def test_the_full_adder_is_right_on_every_row_with_either_wire(tmp_path, wires):
    record = run.main(
        configured("circuit", "circuit=full_adder", f"logic.wires={wires}", "logic.trials=8"), tmp_path, None
    )
    s = record["summary"]
    assert (s["correct_rows"], s["rows"], s["cells"]) == (8, 8, 2)
    assert s["wires"] == ("loop" if wires == "loop" else "host")
    assert s["random_v"]["correct_rows"] < 8
    assert s["steps"] == 22
    if wires == "both":
        assert s["loop"]["correct_rows"] == 8
        assert math.isfinite(record["operating_point"]["wire_set"])


@pytest.mark.parametrize("name", ["sr_latch", "d_latch", "t_flip_flop", "half_adder", "counter_2", "multiplexer"])
def test_every_circuit_is_right_on_every_row_with_host_wires(tmp_path, name):
    overrides = ["logic.wires=host", "logic.trials=2", "logic.ticks=6", "logic.sequences=8"]
    record = run.main(configured("circuit", f"circuit={name}", *overrides), tmp_path, None)
    s = record["summary"]
    assert s["correct_rows"] == s["rows"] == {"counter_2": 8, "t_flip_flop": 4, "half_adder": 4}.get(name, 8)
    assert s["random_v"]["correct_rows"] < s["rows"]


def test_the_four_bit_adder_adds_all_pairs_on_the_oracle_with_nothing_read_on_the_way(tmp_path):
    record = run.main(configured("circuit", "circuit=ripple_adder_4", "logic.trials=1"), tmp_path, None)
    assert record["summary"]["host"]["correct_rows"] == record["summary"]["loop"]["correct_rows"] == 256


def test_an_unknown_circuit_is_answered_with_those_there_are():
    with pytest.raises(MissingConfigException, match=r"(?s)circuit/abacus.*full_adder"):
        configured("circuit", "circuit=abacus")


def test_bad_netlists_and_wires_are_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", lambda spec: pytest.fail("the model was loaded"))
    for overrides, message in (
        (["+circuit.cells.sum.weights.sum=1"], "cells sum read each other in a circle"),
        (["circuit=sr_latch", "logic.wires=loop"], "holds a state, which loop wires do not carry"),
        (["logic.wires=radio"], "expected host, loop or both"),
    ):
        with pytest.raises(ValueError, match=message):
            run.main(configured("circuit", *overrides), tmp_path, None)
