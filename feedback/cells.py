"""How does a logic gate, or a netlist of cells, run on latches in the loop?

Every cell is one row of the batch: it begins at a rest, is pushed by the weighted sum of its inputs for some steps,
settles, and is read by the sign of u, the one readout there is. Pulse sizes come from the measured thresholds of the
latch. Two kinds of wire: ``host`` (the bit that was read from one cell sets the next cell's pulse) and ``loop`` (the
soft token of one cell is mixed into the next cell's input; nothing is read on the way).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from feedback import loop, maps
from feedback.latch import Latch, pulses, search
from feedback.logic import Cell, Circuit, pulse_unit
from feedback.trajectory import Trajectory

Values = Mapping[str, Int[Tensor, " row"]]


@dataclass(frozen=True)
class OperatingPoint:
    """What the pulses of cells are made from: measured, never typed in.

    set, reset: the sizes of a pulse of ``pulse_steps`` steps at which the latch sets from its low rest and resets from
    its high one. wire_set, wire_reset: the shares of a high cell's soft token that do; inf where none does. wire_hold:
    the share for each unit of a negative weight that keeps a low cell low against as many inputs.
    """

    rest: Float[Tensor, "2 d_model"]  # soft tokens (low, high)
    u: tuple[float, float]  # u at rest
    tokens: tuple[int, int]  # what the loop says at rest
    pulse_steps: int
    settle_steps: int
    set: float
    reset: float
    single: float = 1.6  # pulse of an input that is enough alone, in thresholds
    wire_set: float = math.inf
    wire_reset: float = math.inf
    wire_hold: float = math.inf

    def unit(self, cell: Cell) -> tuple[float, float]:
        """α per unit of the cell's weighted sum: when the sum is positive, and when it is negative."""
        size = pulse_unit(cell.threshold, self.single)
        if cell.hold:
            return size * self.set, size * self.reset
        return (-size * self.reset,) * 2 if cell.start else (size * self.set,) * 2

    def wires(self, cell: Cell, sources: Mapping[str, int]) -> dict[str, float]:
        """The share of each high source's soft token that is mixed into the cell's own, by the sources' weights.

        Where some weights are negative, all are in units of what holds the cell down, so that they cancel.
        """
        size = pulse_unit(cell.threshold, self.single)
        if cell.start:
            unit = -size * self.wire_reset
        elif min(sources.values(), default=0) < 0:
            unit = size / self.single * self.wire_hold
        else:
            unit = size * self.wire_set
        return {name: weight * unit for name, weight in sources.items()}


def operating_point(
    latch: Latch, *, pulse_steps: int, settle_steps: int, top: float | None, single: float
) -> OperatingPoint:
    """Finds the rests, and the pulse thresholds up to ``top`` (None: as far as the rests are apart). ValueError where
    there are no two rests, or no pulse up to ``top`` switches between them: then it is no cell."""
    u, rest, said = latch.settle(max(4 * settle_steps, 20))
    low, high = u[-1].tolist()
    if not low < 0 < high:
        raise ValueError(
            f"no latch: from A the loop comes to rest at u = {high:.2f}, from B at {low:.2f}; expected one of each "
            "sign. Screen for another pair or prompt: python run.py experiment=latch_screen"
        )
    steps = pulse_steps + settle_steps
    top = latch.distance(rest) if top is None else top

    def attempt(amounts: Tensor) -> Tensor:
        levels = amounts.shape[1]
        start = torch.cat([rest[:1].expand(levels, -1), rest[1:].expand(levels, -1)])
        told = latch.run(start, pulses(torch.cat([amounts[0], -amounts[1]]), pulse_steps, steps))
        up = latch.read(told.hidden[-1]) > 0
        return torch.stack([up[:levels], ~up[levels:]])

    sizes = search(attempt, 2, top)
    if not all(map(math.isfinite, sizes)):
        raise ValueError(
            f"no pulse of {pulse_steps} steps up to {top:g} {'sets' if math.isinf(sizes[0]) else 'resets'} the latch: "
            "a stronger or longer pulse, or another site or vector"
        )
    set_at, reset_at = sizes
    return OperatingPoint(rest, (low, high), said, pulse_steps, settle_steps, set_at, reset_at, single)


@dataclass(frozen=True)
class Evaluated:
    """What a batch of cells did: bits read at the end, and how it went."""

    bits: Int[Tensor, " row"]
    soft_tokens: Float[Tensor, "row d_model"]  # the next ones: where a held cell goes on
    u: Float[Tensor, "step row"]
    tokens: Int[Tensor, "step row"]
    strength: Float[Tensor, "step row"]

    def split(self, names: Sequence[str]) -> dict[str, "Evaluated"]:
        """Equal parts of the rows, in order, by name."""
        parts = {}
        for name, own in zip(names, torch.arange(len(self.bits)).chunk(len(names)), strict=True):
            u, tokens, strength = self.u[:, own], self.tokens[:, own], self.strength[:, own]
            parts[name] = Evaluated(self.bits[own], self.soft_tokens[own], u, tokens, strength)
        return parts


class Bank:
    """Cells on one latch at one operating point, under a stated noise.

    along: another vector (a control) to push along. cut: the loop is cut, every step reads the start again. Each run
    draws its own noise from ``seed``.
    """

    def __init__(
        self,
        latch: Latch,
        point: OperatingPoint,
        *,
        sigma: float,
        seed: int,
        along: Float[Tensor, " d_model"] | None = None,
        cut: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.latch, self.point, self.sigma, self.along, self.cut = latch, point, sigma, along, cut
        self.progress = progress
        self._seeds = (seed * 1_000_003 + number for number in count())
        self.steps = 0
        self._same = self._said = 0

    @property
    def text_agreement(self) -> float | None:
        """Share of all steps of all cells at which the loop said what it says at rest; None for a cell that says its
        bit, where there is no one text to agree with."""
        low, high = self.point.tokens
        return self._same / self._said if low == high and self._said else None

    def _listen(self, tokens: Int[Tensor, "step row"]) -> None:
        self._same += int((tokens == self.point.tokens[0]).sum())
        self._said += tokens.numel()

    def start(self, bits: Int[Tensor, " row"]) -> Float[Tensor, "row d_model"]:
        return self.point.rest[bits.long()]

    def evaluate(self, start: Float[Tensor, "row d_model"], amounts: Float[Tensor, " row"]) -> Evaluated:
        """Pulses of ``amounts``, then the settling, one row each."""
        point = self.point
        strength = pulses(amounts, point.pulse_steps, point.pulse_steps + point.settle_steps)
        if self.cut:
            strength = strength[-1:]
        told = self.latch.run(
            start,
            strength,
            sigma=self.sigma,
            randomness=loop.Randomness(next(self._seeds)),
            vectors=None if self.along is None else self.along[None],
            progress=self.progress,
        )
        self.steps += len(strength)
        self._listen(told.tokens)
        u = self.latch.read(told.hidden).cpu()
        return Evaluated((u[-1] > 0).long(), self.latch.next(told), u, told.tokens.cpu(), strength)

    def gates(self, cells: Mapping[str, Cell], values: Values) -> dict[str, Evaluated]:
        """Several cells on the same rows of inputs, in one batch."""
        rows = len(next(iter(values.values())))
        starts = torch.cat([torch.full((rows,), cell.start) for cell in cells.values()])
        told = self.evaluate(self.start(starts), torch.cat([self.amounts(cell, values) for cell in cells.values()]))
        return told.split([*cells])

    def amounts(self, cell: Cell, values: Values) -> Float[Tensor, " row"]:
        """The pulse of each row: the weighted sum of the cell's inputs, in α."""
        total = torch.as_tensor(cell.sum(values)).expand(len(next(iter(values.values())))).float()
        positive, negative = self.point.unit(cell)
        return total.clamp(min=0) * positive + total.clamp(max=0) * negative

    def tick(
        self, circuit: Circuit, values: Values, state: dict[str, Evaluated]
    ) -> tuple[dict[str, Evaluated], dict[str, Int[Tensor, " row"]]]:
        """One turn of a circuit with ``host`` wires: every cell once, level by level, bits read in between.

        state: where held cells are; missing ones begin at their start.
        """
        rows = len(next(iter(values.values())))
        known = dict(values)
        held = {name: cell for name, cell in circuit.cells.items() if cell.hold}
        for name, cell in held.items():
            known[name] = state[name].bits if name in state else torch.full((rows,), cell.start)
        done: dict[str, Evaluated] = {}
        for level in circuit.levels():
            starts = torch.cat(
                [
                    state[name].soft_tokens
                    if name in state and name in held
                    else self.start(torch.full((rows,), circuit.cells[name].start))
                    for name in level
                ]
            )
            amounts = torch.cat([self.amounts(circuit.cells[name], known) for name in level])
            told = self.evaluate(starts, amounts)
            done |= told.split(level)
            known |= {name: done[name].bits for name in level}
        return done, {name: known[name] for name in circuit.cells}

    def wired_tick(self, circuit: Circuit, values: Values) -> dict[str, Int[Tensor, " row"]]:
        """One turn of a circuit without held cells, with ``loop`` wires: all cells run at once, and while a level is
        pushed by the inputs, the soft tokens of earlier cells are mixed into its own. Read once, at the end."""
        point, cells = self.point, circuit.cells
        names, rows = [*cells], len(next(iter(values.values())))
        soft = self.start(torch.tensor([cell.start for cell in cells.values()]).repeat(rows))
        u = torch.empty(0)
        for level in circuit.levels():
            weights = torch.zeros(len(names), len(names))
            amounts = torch.zeros(rows, len(names))
            for name in level:
                cell = cells[name]
                outside = Cell({k: w for k, w in cell.weights.items() if k in values}, cell.threshold, cell.start)
                amounts[:, names.index(name)] = self.amounts(outside, values)
                heard = {source: weight for source, weight in cell.weights.items() if source in cells}
                for source, share in point.wires(cell, heard).items():
                    weights[names.index(name), names.index(source)] = share
            for told in linked(
                self.latch, point, soft, weights, amounts.flatten(), self.sigma, self._seeds, self.progress
            ):
                soft, u = self.latch.next(told), self.latch.read(told.hidden[-1]).cpu()
                self.steps += told.n_steps
                self._listen(told.tokens)
        bits = (u > 0).long().unflatten(0, (rows, len(names)))
        return {name: bits[:, number] for number, name in enumerate(names)}


def with_wires(latch: Latch, point: OperatingPoint, top: float = 4.0) -> OperatingPoint:
    """The operating point with the shares of a soft token that do what pulses do, measured on two cells of which the
    second hears the first, a high one."""

    def second(shares: Float[Tensor, " trial"], state: Tensor, amount: float = 0.0) -> Bool[Tensor, " trial"]:
        """Whether the second cell, which was at ``state``, is high in the end."""
        weights = torch.zeros(len(shares), 2, 2)
        weights[:, 1, 0] = shares
        amounts = torch.tensor([0.0, amount]).repeat(len(shares))
        start = point.rest[torch.stack([torch.ones_like(state), state], dim=1).flatten()]
        *_, told = linked(latch, point, start, weights, amounts)
        return (latch.read(told.hidden[-1])[1::2] > 0).cpu()

    def attempt(amounts: Tensor) -> Tensor:
        n = amounts.shape[1]
        high = second(torch.cat([amounts[0], -amounts[1]]), torch.tensor([0] * n + [1] * n))
        return torch.stack([high[:n], ~high[n:]])

    set_share, reset_share = search(attempt, 2, top)
    shares = torch.linspace(0.125, 5, 40) * (set_share if math.isfinite(set_share) else top / 5)
    at_low, unit = torch.zeros(40, dtype=torch.long), point.single * point.set
    holds = ~second(-2 * shares, at_low, 2 * unit)
    lets = second(-2 * shares, at_low, 3 * unit) & second(-shares, at_low, 2 * unit) & second(shares, at_low)
    return replace(point, wire_set=set_share, wire_reset=reset_share, wire_hold=_middle(shares, holds & lets))


def _middle(shares: Float[Tensor, " share"], holds: Bool[Tensor, " share"]) -> float:
    """The geometric middle of the first run of shares that hold: a soft token that is moved too far turns around. inf
    for none."""
    if not holds.any():
        return math.inf
    first = int(holds.int().argmax())
    fails = torch.nonzero(~holds[first:])
    last = first + int(fails[0]) - 1 if len(fails) else len(holds) - 1
    return math.sqrt(shares[first].item() * shares[last].item())


def linked(
    latch: Latch,
    point: OperatingPoint,
    soft: Float[Tensor, "row d_model"],
    weights: Float[Tensor, "*trial cell source"],
    amounts: Float[Tensor, " row"],
    sigma: float = 0.0,
    seeds: Iterator[int] = count(),  # noqa: B008 (without noise nobody looks)
    progress: Callable[[int], None] | None = None,
) -> Iterator[Trajectory]:
    """The pulse, with soft tokens mixed along ``weights`` at each of its steps, then the settling without either."""
    first = maps.mixed(soft, weights, point.rest[0])
    inner = maps.wired(latch.map, weights, point.rest[0])
    for steps, strength in ((point.pulse_steps, amounts), (point.settle_steps, torch.zeros_like(amounts))):
        told = latch.run(
            first,
            strength.expand(steps, -1),
            sigma=sigma,
            randomness=loop.Randomness(next(seeds)),
            feedback_map=inner,
            progress=progress,
        )
        yield told
        first, inner = latch.next(told), latch.map
