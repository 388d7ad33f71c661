"""What is pushed when: programs of coefficients (step, row, carrier).

Loop steps count from 1 to T, pass 0 reads the prompt; ``coefficients[t - 1]`` belongs to step t.
Every constructor multiplies a course over the steps by a pattern over (row, carrier) by ``alpha``.
A list of alphas multiplies the rows, alpha outermost: with ``alpha=[0, 2]`` and three rows, rows
0–2 are at 0 and rows 3–5 at 2.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Number = float | int
Scope = Literal["loop", "prompt", "all"]
Vectors = Float[Tensor, "carrier d_model"]
Rows = int | Float[Tensor, "row carrier"]
Columns = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Program:
    """What is pushed at every step, and the meaning of every row.

    The push of step t on row r is Σ_k coefficients[t-1, r, k] · carriers[k].
    ``prompt_coefficients`` is what pass 0 adds at every position of the prompt; None leaves the
    prompt unpushed. ``columns`` travel along the rows (first axis) and say what they mean: alpha,
    bits, prompt, seed.

    ValueError: shapes that do not fit each other, no step, no row, values that are not finite.
    """

    coefficients: Float[Tensor, "step row carrier"]
    carriers: Float[Tensor, "carrier d_model"]
    prompt_coefficients: Float[Tensor, "row carrier"] | None = None
    columns: Mapping[str, Shaped[Tensor, "row ..."]] = field(default_factory=dict)
    name: str = "program"

    def __post_init__(self) -> None:
        shape, carriers = tuple(self.coefficients.shape), tuple(self.carriers.shape)
        if len(shape) != 3 or 0 in shape:
            raise ValueError(f"coefficients are {shape}; expected (step, row, carrier), each at least 1")
        if len(carriers) != 2 or carriers[0] != shape[2]:
            raise ValueError(
                f"carriers are {carriers} and coefficients {shape}; expected (carrier, d_model) "
                f"with {shape[2]} carriers, one for each coefficient of a row"
            )
        prompt = self.prompt_coefficients
        if prompt is not None and tuple(prompt.shape) != shape[1:]:
            raise ValueError(f"prompt coefficients are {tuple(prompt.shape)}; expected (row, carrier) = {shape[1:]}")
        for name, column in self.columns.items():
            if not column.dim() or len(column) != shape[1]:
                raise ValueError(f"column {name!r} is {tuple(column.shape)}; expected {shape[1]} rows first")
        for what, values in (
            ("coefficients", self.coefficients),
            ("carriers", self.carriers),
            ("prompt coefficients", prompt),
        ):
            if values is not None and not torch.isfinite(values).all():
                raise ValueError(f"{what} hold NaN or infinite values: check alpha and the carriers")

    @property
    def n_steps(self) -> int:
        return self.coefficients.shape[0]

    @property
    def n_rows(self) -> int:
        return self.coefficients.shape[1]

    @property
    def n_carriers(self) -> int:
        return self.coefficients.shape[2]

    def rows(self, index: slice | Sequence[int] | Int[Tensor, " n"] | Bool[Tensor, " n"]) -> "Program":
        """The program of the rows that ``index`` (slice, row numbers, boolean mask) picks."""
        picked = index if isinstance(index, slice) else torch.as_tensor(index)
        prompt = self.prompt_coefficients
        return replace(
            self,
            coefficients=self.coefficients[:, _on(picked, self.coefficients)],
            prompt_coefficients=None if prompt is None else prompt[_on(picked, prompt)],
            columns={name: values[_on(picked, values)] for name, values in self.columns.items()},
        )

    def and_always(self, vector: Float[Tensor, " d_model"] | None) -> "Program":
        """The program with ``vector`` pushed in addition at every pass, the prompt's included; itself for None."""
        if vector is None:
            return self
        one = torch.ones_like(self.coefficients[..., :1])
        prompt = (
            torch.zeros_like(self.coefficients[0]) if self.prompt_coefficients is None else self.prompt_coefficients
        )
        return replace(
            self,
            coefficients=torch.cat([self.coefficients, one], dim=-1),
            carriers=torch.cat([self.carriers, vector[None].to(self.carriers)]),
            prompt_coefficients=torch.cat([prompt, one[0]], dim=-1),
        )

    @staticmethod
    def concatenate(programs: Sequence["Program"]) -> "Program":
        """The rows of all ``programs`` in order, as one batch.

        A prompt that one of them does not push counts as 0 there.

        ValueError: no program, or programs that differ in steps, carriers or column names.
        """
        if not programs:
            raise ValueError("no programs to concatenate; expected at least one")
        first = programs[0]
        for number, other in enumerate(programs[1:], 1):
            if other.n_steps != first.n_steps:
                raise ValueError(
                    f"program {number} has {other.n_steps} steps, program 0 has {first.n_steps}; expected the same"
                )
            if not torch.equal(other.carriers, first.carriers):
                raise ValueError(
                    f"program {number} has other carriers than program 0; give all of them the "
                    "same carriers, with coefficient 0 where one is unused"
                )
            if other.columns.keys() != first.columns.keys():
                raise ValueError(
                    f"program {number} has columns {sorted(other.columns)}, program 0 "
                    f"{sorted(first.columns)}; expected the same names"
                )
        pushed = any(p.prompt_coefficients is not None for p in programs)
        prompts = [
            torch.zeros_like(p.coefficients[0]) if p.prompt_coefficients is None else p.prompt_coefficients
            for p in programs
        ]
        return Program(
            torch.cat([p.coefficients for p in programs], dim=1),
            first.carriers,
            torch.cat(prompts) if pushed else None,
            {name: torch.cat([p.columns[name] for p in programs]) for name in first.columns},
            " + ".join(dict.fromkeys(p.name for p in programs)),
        )


def constant(
    carriers: Vectors,
    alpha: Number | Sequence[Number],
    *,
    steps: int,
    rows: Rows,
    scope: Scope = "loop",
    columns: Columns | None = None,
) -> Program:
    """``alpha`` along every carrier at every step: α·v when there is one carrier.

    Args, the same in every constructor:
        carriers: (carrier, d_model).
        alpha: the strength, or a list of strengths that multiplies the rows; column "alpha".
        steps: T, the loop steps.
        rows: how many rows, or a pattern (row, carrier) that alpha is multiplied by, such as the
            sums of a truth table's inputs.
        scope: passes that are pushed: "loop" (steps 1…T), "prompt" (pass 0 only) or "all". A pushed
            prompt gets alpha times the pattern at every position.
        columns: what the rows mean, (row, …) each, before alpha multiplies them.

    Raises:
        ValueError: names what was given and what was expected.
    """
    return _program("constant", carriers, alpha, torch.ones(_at_least_one(steps)), rows, scope, columns)


def pulse(
    carriers: Vectors,
    alpha: Number | Sequence[Number],
    *,
    steps: int,
    rows: Rows,
    start: int,
    length: int,
    scope: Scope = "loop",
    columns: Columns | None = None,
) -> Program:
    """``alpha`` along every carrier at the ``length`` steps from step ``start``, else 0."""
    course = _pulses(steps, [start], length, [1])
    return _program("pulse", carriers, alpha, course, rows, scope, columns)


def pulse_train(
    carriers: Vectors,
    alpha: Number | Sequence[Number],
    *,
    steps: int,
    rows: Rows,
    starts: Sequence[int],
    length: int,
    signs: Sequence[Number] | None = None,
    scope: Scope = "loop",
    columns: Columns | None = None,
) -> Program:
    """Pulses of ``length`` steps from each step of ``starts``; pulse i pushes signs[i] · alpha.

    Without ``signs`` they alternate, + first: set, reset, set, … Pulses must not overlap.
    """
    course = _pulses(steps, starts, length, [(-1) ** i for i in range(len(starts))] if signs is None else signs)
    return _program("pulse_train", carriers, alpha, course, rows, scope, columns)


def ramp(
    carriers: Vectors,
    alpha: Number | Sequence[Number],
    *,
    steps: int,
    rows: Rows,
    dwell: int = 1,
    scope: Scope = "loop",
    columns: Columns | None = None,
) -> Program:
    """From −alpha up to +alpha and down again in equal increments, ``dwell`` steps at each level.

    There are steps // dwell levels, the top one twice when that is even; what is left over stays at
    −alpha. With scope "all" the prompt is pushed by −alpha, the level the ramp starts from.
    """
    _at_least_one(steps)
    levels = steps // dwell if dwell >= 1 else 0
    if levels < 3:
        raise ValueError(
            f"{steps} steps with dwell {dwell} make {levels} levels; a ramp up and down needs "
            "dwell ≥ 1 and at least 3 levels: more steps or a shorter dwell"
        )
    up = torch.linspace(-1, 1, (levels + 1) // 2, dtype=torch.float64)
    down = up.flip(0)[levels % 2 :]
    course = torch.cat([up, down]).repeat_interleave(dwell)
    course = torch.cat([course, course.new_full((steps - len(course),), -1.0)])
    return _program("ramp", carriers, alpha, course, rows, scope, columns, prompt_level=-1.0)


def word(
    carriers: Vectors,
    alpha: Number | Sequence[Number],
    bits: Int[Tensor, "row carrier"] | Bool[Tensor, "row carrier"],
    *,
    steps: int,
    start: int = 1,
    length: int | None = None,
    scope: Scope = "loop",
    columns: Columns | None = None,
) -> Program:
    """One message per row: bit k of a row pushes c = alpha · (2b − 1) along carrier k.

    On from step ``start`` for ``length`` steps (None: to the end). The bits travel along as column
    "bits" (row, carrier).
    """
    n_carriers, d_model = carriers.shape
    if bits.shape[1] != n_carriers or n_carriers > d_model:
        raise ValueError(
            f"{bits.shape[1]} bits per row on {n_carriers} carriers of width {d_model}; expected "
            f"one carrier per bit, and at most {d_model} of them can be told apart"
        )
    if ((bits != 0) & (bits != 1)).any():
        raise ValueError(f"bits are {bits.unique().tolist()}; expected 0 and 1 only")
    course = _pulses(steps, [start], steps - start + 1 if length is None else length, [1])
    columns = {**(columns or {}), "bits": bits.long()}
    pattern = 2.0 * bits.to(carriers.device, torch.float64) - 1
    return _program("word", carriers, alpha, course, pattern, scope, columns)


def balanced_messages(
    n_rows: int,
    n_bits: int,
    generator: torch.Generator,
    apart_from: Int[Tensor, "other carrier"] | None = None,
) -> Int[Tensor, "row carrier"]:
    """Random words of ``n_bits`` such that every carrier has as many zeros as ones.

    Each carrier's column is drawn by itself, so the words span as many directions as they can (pairs of word and
    complement would span half as many). None of them, nor its complement, is among ``apart_from``: messages to fit a
    reader on and messages to ask it about.

    ValueError: an odd ``n_rows`` (it cannot balance), or no such words found.
    """
    if n_bits < 1 or n_rows < 2 or n_rows % 2:
        raise ValueError(
            f"{n_rows} messages of {n_bits} bits; expected an even number of rows, which can balance, and "
            "at least one bit"
        )
    for _ in range(1000):
        columns = [torch.randperm(n_rows, generator=generator) % 2 for _ in range(n_bits)]
        words = torch.stack(columns, dim=1)
        if apart_from is None or not (_pair(words)[:, None] == _pair(apart_from)).all(-1).any():
            return words
    raise ValueError(
        f"found no {n_rows} balanced messages of {n_bits} bits apart from the given ones and their "
        "complements: more bits or fewer messages"
    )


def _pair(words: Tensor) -> Tensor:
    """A word and its complement as one and the same row."""
    return words ^ words[:, :1]


def _program(
    name: str,
    carriers: Tensor,
    alpha: Number | Sequence[Number],
    course: Tensor,
    rows: Rows,
    scope: Scope,
    columns: Columns | None,
    prompt_level: float = 1.0,
) -> Program:
    """alpha × course (step) × pattern (row, carrier), alpha outermost among the rows."""
    if scope not in ("loop", "prompt", "all"):
        raise ValueError(f"scope is {scope!r}; expected loop, prompt or all")
    if scope == "prompt" and name not in ("constant", "word"):
        raise ValueError(f"scope prompt leaves the loop unpushed, so a {name} cannot happen: use loop or all")
    alphas = torch.as_tensor(alpha, dtype=torch.float64, device=carriers.device).reshape(-1)
    if not len(alphas) or not torch.isfinite(alphas).all():
        raise ValueError(f"alpha is {alpha}; expected a finite number or a list of them")
    pattern = _pattern(rows, carriers)
    for column, values in (columns or {}).items():
        if column == "alpha" or not values.dim() or len(values) != len(pattern):
            raise ValueError(
                f"column {column!r} is {tuple(values.shape)}; expected {len(pattern)} rows first "
                '(before alpha multiplies them), and another name than "alpha"'
            )
    pushed = (alphas[:, None, None] * pattern).flatten(0, 1)
    loop = course.to(pushed)[:, None, None] * (pushed * (scope != "prompt"))
    return Program(
        loop.to(carriers.dtype),
        carriers,
        None if scope == "loop" else (prompt_level * pushed).to(carriers.dtype),
        {
            **{k: torch.cat([v] * len(alphas)) for k, v in (columns or {}).items()},
            "alpha": alphas.repeat_interleave(len(pattern)),
        },
        name,
    )


def _pattern(rows: Rows, carriers: Tensor) -> Tensor:
    if isinstance(rows, Tensor):
        return rows.to(carriers.device, torch.float64)
    return torch.ones(_at_least_one(rows, "rows"), len(carriers), device=carriers.device).double()


def _pulses(steps: int, starts: Sequence[int], length: int, signs: Sequence[Number]) -> Tensor:
    """(step,): signs[i] during pulse i, 0 between pulses."""
    course = torch.zeros(_at_least_one(steps), dtype=torch.float64)
    if not starts or len(signs) != len(starts):
        raise ValueError(f"{len(signs)} signs for {len(starts)} pulses; expected one each, and a pulse")
    for start, sign in zip(starts, signs, strict=True):
        end = start + length - 1
        if start < 1 or length < 1 or end > steps:
            raise ValueError(
                f"a pulse of {length} steps from step {start} ends at step {end}; expected it "
                f"within steps 1–{steps}: fewer pulses, a shorter one, or more steps"
            )
        if not math.isfinite(sign) or sign == 0:
            raise ValueError(f"a pulse's sign is {sign}; expected a finite number other than 0")
        if course[start - 1 : end].any():
            raise ValueError(f"the pulse from step {start} overlaps an earlier one; length is {length}")
        course[start - 1 : end] = sign
    return course


def _at_least_one(value: int, what: str = "steps") -> int:
    if value < 1:
        raise ValueError(f"{what} is {value}; expected at least 1")
    return value


def _on(index: slice | Tensor, values: Tensor) -> slice | Tensor:
    return index if isinstance(index, slice) else index.to(values.device)
