"""Truth tables, threshold programs and netlists, as exact arithmetic."""

import itertools
import random
from pathlib import Path

import pytest
import torch
import yaml

import feedback
from feedback import logic
from feedback.logic import Cell, Circuit

CIRCUITS = sorted((Path(feedback.__file__).parent.parent / "conf" / "circuit").glob("*.yaml"))


def load(path):
    told = yaml.safe_load(path.read_text(encoding="utf-8"))
    return logic.circuit(told.pop("name"), told)


def test_the_sixteen_gates_are_all_there_are_by_their_names():
    assert set(logic.GATES.values()) == set(itertools.product((0, 1), repeat=4))
    means = {
        "AND": lambda a, b: a & b,
        "OR": lambda a, b: a | b,
        "XOR": lambda a, b: a ^ b,
        "NAND": lambda a, b: 1 - (a & b),
        "NOR": lambda a, b: 1 - (a | b),
        "XNOR": lambda a, b: 1 - (a ^ b),
        "A_AND_NOT_B": lambda a, b: a & (1 - b),
        "B_AND_NOT_A": lambda a, b: b & (1 - a),
        "A_OR_NOT_B": lambda a, b: a | (1 - b),
        "B_OR_NOT_A": lambda a, b: b | (1 - a),
        "A": lambda a, b: a,
        "B": lambda a, b: b,
        "NOT_A": lambda a, b: 1 - a,
        "NOT_B": lambda a, b: 1 - b,
        "TRUE": lambda a, b: 1,
        "FALSE": lambda a, b: 0,
    }
    for name, table in logic.GATES.items():
        assert table == tuple(means[name](a, b) for a, b in logic.INPUT_ROWS), name


def test_fourteen_gates_are_one_cell_and_xor_and_xnor_are_none_however_large_the_weights():
    for name in logic.threshold_gates():
        assert logic.truth_table(logic.gate_cell(name)) == logic.GATES[name]
    cells = (
        Cell({"a": a, "b": b}, k, start)
        for a, b, k, start in itertools.product(range(-4, 5), range(-4, 5), range(1, 9), (0, 1))
    )
    reached = {logic.truth_table(cell) for cell in cells}
    assert len(reached) == 14
    for name in ("XOR", "XNOR"):
        assert logic.GATES[name] not in reached
        with pytest.raises(ValueError, match=f"{name} is no threshold gate: it takes two cells"):
            logic.gate_cell(name)
        assert logic.best_linear_accuracy(logic.GATES[name]) == 0.75
    with pytest.raises(ValueError, match="'IMPLY' does not exist: expected one of FALSE, AND"):
        logic.gate_cell("IMPLY")


@pytest.mark.parametrize("name", logic.GATES)
def test_every_gate_as_a_circuit_computes_its_truth_table(name):
    circuit = logic.gate_circuit(name)
    for (a, b), right in zip(logic.INPUT_ROWS, logic.GATES[name], strict=True):
        assert circuit.tick({"a": a, "b": b}, {})["out"] == right == circuit.expected({"a": a, "b": b}, {})["out"]


def test_a_cell_decides_by_its_weighted_sum_from_either_start_and_holds_where_told():
    carry = Cell({"a": 1, "b": 1, "c": 1}, 2)
    assert [carry.decide({"a": a, "b": b, "c": c}) for a, b, c in itertools.product((0, 1), repeat=3)] == [
        0, 0, 0, 1, 0, 1, 1, 1,
    ]  # fmt: skip
    held = Cell({"set": 1, "reset": -1}, hold=True)
    assert [held.decide({"set": s, "reset": r}, q) for s, r, q in itertools.product((0, 1), repeat=3)] == [
        0, 1, 0, 0, 1, 1, 0, 1,
    ]  # fmt: skip
    bits = torch.tensor([0, 1, 1])
    assert carry.sum({"a": bits, "b": bits, "c": 1 - bits}).tolist() == [1, 2, 2]


def test_pulse_units_stand_between_the_sums_that_must_not_pass_and_those_that_must():
    assert logic.pulse_unit(1) == 1.6
    for k in range(2, 6):
        unit = logic.pulse_unit(k)
        assert (k - 1) * unit < 1 < k * unit
        assert (k * unit) * ((k - 1) * unit) == pytest.approx(1)  # equally far, as a ratio
    assert logic.noise_margin(Cell({"a": 1, "b": 1}, 2), [0, 1, 1, 2]) == pytest.approx(1 - 2**-0.5)  # 0.707 of θ
    assert logic.noise_margin(Cell({"a": 1, "b": -1}), [0, -1, 1, 0]) == pytest.approx(0.6)


@pytest.mark.parametrize("path", CIRCUITS, ids=lambda path: path.stem)
def test_every_netlist_that_ships_computes_its_truth_with_exact_cells(path):
    circuit = load(path)
    assert circuit.name == path.stem
    if not circuit.holds:
        for values in logic.input_rows(circuit.inputs):
            cells = circuit.tick(values, {})
            assert {name: cells[cell] for name, cell in circuit.outputs.items()} == circuit.expected(values, {})
        return
    rng = random.Random(0)
    for _ in range(50):
        state = {name: rng.randint(0, 1) for name, cell in circuit.cells.items() if cell.hold}
        for _ in range(10):
            values = {name: rng.randint(0, 1) for name in circuit.inputs}
            before = {name: state[cell] for name, cell in circuit.outputs.items()}
            state = circuit.tick(values, state)
            assert {name: state[cell] for name, cell in circuit.outputs.items()} == circuit.expected(values, before)


def test_the_circuits_that_were_asked_for_ship():
    wanted = {"sr_latch", "d_latch", "t_flip_flop", "half_adder", "full_adder", "ripple_adder_4", "counter_2"}
    assert wanted | {"multiplexer"} <= {path.stem for path in CIRCUITS}
    assert len(load(next(p for p in CIRCUITS if p.stem == "full_adder")).cells) == 2


def netlist(**changes):
    return {
        "inputs": ["a", "b"],
        "cells": {"out": {"weights": {"a": 1, "b": 1}}},
        "outputs": {"y": "out"},
        "truth": {"y": "a | b"},
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cells": {"out": {"weights": {"a": 1, "x": 1}}, "x": {"weights": {"out": 1}}}},
            "cells out, x read each other in a circle; only a cell with hold",
        ),
        ({"cells": {"out": {"weights": {"out": 1}}}}, "cells out read each other in a circle"),
        ({"cells": {"out": {"weights": {"c": 1}}}}, r"cell out reads \['c'\]; there are a, b, out"),
        ({"cells": {"out": {"weights": {"a": 1}, "threshold": 0}}}, "threshold 0 and start 0"),
        ({"cells": {"out": {"weights": {"a": 1}, "start": 2}}}, "start 2"),
        ({"cells": {"out": {"weights": {"a": 1}, "treshold": 2}}}, r"cell out has \['treshold'\]"),
        ({"outputs": {"y": "end"}}, r"outputs come from \['end'\]; cells: out"),
        ({"truth": {"z": "a"}}, r"truth is said of \['z'\], the outputs are \['y'\]"),
        ({"truth": {"y": "a | c"}}, "names c; there are a, b, y"),
        ({"truth": {"y": "__import__('os')"}}, "holds Call"),
        ({"truth": {"y": "a.real"}}, "holds Attribute"),
        ({"truth": {"y": "a +"}}, "is no expression"),
        ({"inputs": ["a", "out"]}, "no name twice"),
        ({"wires": 1}, r"unknown keys \['wires'\]"),
    ],
)
def test_a_netlist_that_cannot_be_is_refused_with_the_names_in_it(changes, message):
    with pytest.raises(ValueError, match=message):
        logic.circuit("mine", netlist(**changes))


def test_cells_that_can_be_evaluated_together_stand_in_one_level():
    cells = {"x": Cell({"a": 1}), "y": Cell({"x": 1}), "z": Cell({"b": 1}), "q": Cell({"y": 1, "q": -1}, hold=True)}
    circuit = Circuit("mine", ("a", "b"), cells, {"q": "q"}, {"q": "q"})
    assert circuit.levels() == [["x", "z"], ["y"], ["q"]]


def test_expressions_know_arithmetic_logic_and_choice():
    values = {"a": 1, "b": 0, "n": 6}
    for text, value in {
        "a and not b": 1, "n // 4 % 2": 1, "a if b else n": 6, "n ^ 3": 5, "(a == 1) * (b < 1)": 1, "-n + 7": 1,
    }.items():  # fmt: skip
        assert logic.evaluate(text, values) == value
