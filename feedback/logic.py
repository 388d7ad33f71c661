"""Which gate can a cell be, and what do circuits of cells compute? Truth tables, threshold programs, netlists.

A cell is a latch. It starts at 0 or 1, its inputs push it, it settles, and it is read. From 0 it goes to 1 if the
weighted sum of its inputs reaches its threshold; from 1 it goes to 0 if the sum, pushed the other way, does. So a cell
is a logic gate with integer weights: [w·x ≥ k] from 0, ¬[w·x ≥ k] from 1. 14 of the 16 two-input gates are such; XOR
and XNOR are not, and take two cells. Pure functions of numbers; nothing here knows a model.
"""

import ast
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Bits = tuple[int, ...]

INPUT_ROWS: tuple[tuple[int, int], ...] = ((0, 0), (0, 1), (1, 0), (1, 1))
GATES: dict[str, Bits] = {  # output for the inputs (a, b) = 00, 01, 10, 11
    "FALSE": (0, 0, 0, 0),
    "AND": (0, 0, 0, 1),
    "A_AND_NOT_B": (0, 0, 1, 0),
    "A": (0, 0, 1, 1),
    "B_AND_NOT_A": (0, 1, 0, 0),
    "B": (0, 1, 0, 1),
    "XOR": (0, 1, 1, 0),
    "OR": (0, 1, 1, 1),
    "NOR": (1, 0, 0, 0),
    "XNOR": (1, 0, 0, 1),
    "NOT_B": (1, 0, 1, 0),
    "A_OR_NOT_B": (1, 0, 1, 1),
    "NOT_A": (1, 1, 0, 0),
    "B_OR_NOT_A": (1, 1, 0, 1),
    "NAND": (1, 1, 1, 0),
    "TRUE": (1, 1, 1, 1),
}


@dataclass(frozen=True)
class Cell:
    """What one cell computes: ``start`` while w·x < threshold, its opposite from there on.

    weights: input or cell name → integer. hold: the cell keeps its state from tick to tick in place of beginning at
    ``start``; then a sum of at least +threshold sets it and one of at most −threshold resets it.
    """

    weights: Mapping[str, int]
    threshold: int = 1
    start: int = 0
    hold: bool = False

    def sum(self, values: Mapping[str, Any]) -> Any:
        """w·x, of bits or of tensors of bits."""
        return sum(weight * values[name] for name, weight in self.weights.items())

    def decide(self, values: Mapping[str, int], state: int = 0) -> int:
        """What the cell ends at; ``state`` is where a holding cell was."""
        total = self.sum(values)
        if self.hold:
            return 1 if total >= self.threshold else 0 if total <= -self.threshold else state
        return self.start ^ (total >= self.threshold)


@dataclass(frozen=True)
class Circuit:
    """Cells in the order in which they are evaluated, and what the outputs should be.

    truth: output → an expression over the inputs; for a circuit that holds, over the inputs and the outputs' previous
    values. A cell may be read by those behind it; one that holds may be read earlier, and is then its previous value.

    ValueError: unknown names, cells that read each other in a circle, a threshold below 1, a start that is no bit.
    """

    name: str
    inputs: tuple[str, ...]
    cells: Mapping[str, Cell]
    outputs: Mapping[str, str]  # output → cell
    truth: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {*self.inputs, *self.cells}
        if len(known) != len(self.inputs) + len(self.cells) or not self.inputs or not self.cells or not self.outputs:
            raise ValueError(
                f"circuit {self.name}: expected inputs, cells and outputs, and no name twice among inputs and cells"
            )
        for name, cell in self.cells.items():
            unknown = [source for source in cell.weights if source not in known]
            if unknown:
                raise ValueError(
                    f"circuit {self.name}: cell {name} reads {unknown}; there are {', '.join(sorted(known))}"
                )
            if cell.threshold < 1 or cell.start not in (0, 1):
                raise ValueError(
                    f"circuit {self.name}: cell {name} has threshold {cell.threshold} and start {cell.start}; "
                    "expected a threshold of at least 1, and a start of 0 or 1"
                )
        missing = [cell for cell in self.outputs.values() if cell not in self.cells]
        if missing:
            raise ValueError(f"circuit {self.name}: outputs come from {missing}; cells: {', '.join(self.cells)}")
        if self.truth.keys() != self.outputs.keys():
            raise ValueError(
                f"circuit {self.name}: truth is said of {[*self.truth]}, the outputs are {[*self.outputs]}"
            )
        self.levels()
        for expression in self.truth.values():
            evaluate(expression, dict.fromkeys([*self.inputs, *self.outputs], 0))

    @property
    def holds(self) -> bool:
        return any(cell.hold for cell in self.cells.values())

    def levels(self) -> list[list[str]]:
        """Cells that can be evaluated together, in order: each reads inputs, earlier levels, and held values.

        ValueError, naming them, for cells that read each other in a circle without one that holds.
        """
        waiting, done, levels = dict(self.cells), {*self.inputs}, []
        while waiting:
            ready = [name for name, cell in waiting.items() if self._sources(name, cell) <= done]
            if not ready:
                raise ValueError(
                    f"circuit {self.name}: cells {', '.join(waiting)} read each other in a circle; only a cell with "
                    "hold: true has a value before it is evaluated"
                )
            levels.append(ready)
            done |= {*ready}
            for name in ready:
                del waiting[name]
        return levels

    def _sources(self, name: str, cell: Cell) -> set[str]:
        """What has to be evaluated first: held cells that stand behind in the file are read as they were."""
        order = [*self.cells]
        return {
            s
            for s in cell.weights
            if not (s in self.cells and self.cells[s].hold and order.index(s) >= order.index(name))
        }

    def tick(self, values: Mapping[str, int], state: Mapping[str, int]) -> dict[str, int]:
        """All cells after one turn of exact cells, given the inputs and the held cells' state."""
        known = {**{name: state.get(name, 0) for name, cell in self.cells.items() if cell.hold}, **values}
        for level in self.levels():
            known |= {name: self.cells[name].decide(known, state.get(name, 0)) for name in level}
        return {name: known[name] for name in self.cells}

    def expected(self, values: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
        """The outputs by ``truth``: independent of the cells."""
        return {name: int(evaluate(text, {**before, **values})) for name, text in self.truth.items()}


def gate_cell(name: str) -> Cell:
    """The one-cell program of a two-input gate, found by search over weights −1, 0, 1 and thresholds 1, 2.

    ValueError for XOR and XNOR, which no cell can be, and for unknown names.
    """
    if name not in GATES:
        raise ValueError(f"logic gate {name!r} does not exist: expected one of {', '.join(GATES)}")
    for size in range(3):  # the fewest inputs first
        for start, threshold, a, b in itertools.product((0, 1), (1, 2), (1, 0, -1), (1, 0, -1)):
            cell = Cell({"a": a, "b": b}, threshold, start)
            if abs(a) + abs(b) == size and truth_table(cell) == GATES[name]:
                return cell
    raise ValueError(f"{name} is no threshold gate: it takes two cells")


def truth_table(cell: Cell) -> Bits:
    return tuple(cell.decide({"a": a, "b": b}) for a, b in INPUT_ROWS)


def threshold_gates() -> list[str]:
    """The 14 two-input gates that one cell can be."""
    return [name for name in GATES if name not in ("XOR", "XNOR")]


def gate_circuit(name: str) -> Circuit:
    """Any two-input gate as a circuit: one cell, or, for XOR and XNOR, AND followed by a + b − 2·AND ≥ 1."""
    ones = [f"(a == {a}) * (b == {b})" for (a, b), y in zip(INPUT_ROWS, GATES[name], strict=True) if y]
    truth = " + ".join(ones) or "0"
    if name in ("XOR", "XNOR"):
        last = Cell({"a": 1, "b": 1, "both": -2}, 1, start=int(name == "XNOR"))
        cells = {"both": Cell({"a": 1, "b": 1}, 2), "out": last}
    else:
        cells = {"out": gate_cell(name)}
    return Circuit(name, ("a", "b"), cells, {"out": "out"}, {"out": truth})


def best_linear_accuracy(table: Bits) -> float:
    """How much of a truth table the best linear threshold on its two inputs gets right: 1 for the 14 threshold gates,
    0.75 for XOR and XNOR."""
    lines = (GATES[name] for name in threshold_gates())
    return max(sum(x == y for x, y in zip(table, line, strict=True)) for line in lines) / len(table)


def pulse_unit(threshold: int, single: float = 1.6) -> float:
    """The pulse for weight 1, in units of the latch's own threshold θ, for a cell of integer threshold k.

    k = 1: ``single``·θ, so that one input passes. k ≥ 2: θ/√(k(k−1)), the geometric middle between k−1 inputs, which
    must not pass, and k, which must; for k = 2 that is 0.707.
    """
    return single if threshold == 1 else 1 / math.sqrt(threshold * (threshold - 1))


def noise_margin(cell: Cell, sums: Iterable[int], single: float = 1.6) -> float:
    """How near the nearest pulse of a truth table comes to the latch's threshold, as a share of it.

    A pulse that points away from the threshold is no danger and does not count.
    """
    unit = pulse_unit(cell.threshold, single)
    return min((abs(total * unit - 1) for total in sums if total >= 0), default=1.0)


def evaluate(expression: str, values: Mapping[str, int]) -> int:
    """An expression of integers, names, + - * // %, & | ^, comparisons, and/or/not and x if c else y.

    ValueError, naming it, for anything else.
    """
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no expression: {error.msg}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in values:
            raise ValueError(f"{expression!r} names {node.id}; there are {', '.join(sorted(values))}")
        if not isinstance(node, _ALLOWED) or (isinstance(node, ast.Constant) and type(node.value) is not int):
            raise ValueError(f"{expression!r} holds {type(node).__name__}; expected arithmetic and logic of names only")
    return int(eval(compile(tree, "<truth>", "eval"), {"__builtins__": {}}, dict(values)))


_ALLOWED = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)


def input_rows(names: Sequence[str]) -> list[dict[str, int]]:
    """All 2ⁿ assignments, the last name fastest."""
    return [dict(zip(names, bits, strict=True)) for bits in itertools.product((0, 1), repeat=len(names))]


def circuit(name: str, description: Mapping[str, Any]) -> Circuit:
    """The circuit of a netlist as YAML gives it: inputs, cells, outputs, truth. ValueError for anything else in it."""
    unknown = description.keys() - {"inputs", "cells", "outputs", "truth"}
    if unknown:
        raise ValueError(f"circuit {name}: unknown keys {sorted(unknown)}; expected inputs, cells, outputs, truth")
    cells = {}
    for own, told in description["cells"].items():
        if wrong := told.keys() - {"weights", "threshold", "start", "hold"}:
            raise ValueError(
                f"circuit {name}: cell {own} has {sorted(wrong)}; expected weights, threshold, start, hold"
            )
        cells[own] = Cell(**told)
    return Circuit(name, tuple(description["inputs"]), cells, dict(description["outputs"]), dict(description["truth"]))
