"""Push programs: which coefficient stands where, and what is refused."""

import importlib.util
import math

import pytest
import torch

from feedback import programs
from feedback.programs import Program, balanced_messages

CARRIERS = torch.eye(2, 6)
ONE = CARRIERS[:1]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def course(program, row=0, carrier=0):
    """The coefficients of one row over the steps."""
    return program.coefficients[:, row, carrier].tolist()


def test_constant_pushes_alpha_at_every_step_and_leaves_the_prompt_alone():
    program = programs.constant(CARRIERS, 2.5, steps=4, rows=3)
    assert torch.equal(program.coefficients, torch.full((4, 3, 2), 2.5))
    assert program.prompt_coefficients is None
    assert (program.n_steps, program.n_rows, program.n_carriers) == (4, 3, 2)
    assert (program.name, program.columns["alpha"].tolist()) == ("constant", [2.5] * 3)


def test_pulses_count_steps_from_one():
    assert course(programs.pulse(ONE, 3, steps=6, rows=3, start=2, length=3)) == [0, 3, 3, 3, 0, 0]
    assert course(programs.pulse(ONE, 3, steps=3, rows=3, start=1, length=1)) == [3, 0, 0]


def test_a_train_sets_and_resets_in_turn_unless_told_otherwise():
    where = {"steps": 8, "rows": 3, "starts": [1, 4, 7], "length": 2}
    assert course(programs.pulse_train(ONE, 5, **where)) == [5, 5, 0, -5, -5, 0, 5, 5]
    told = programs.pulse_train(ONE, 5, **where, signs=[1, 1, -2])
    assert course(told) == [5, 5, 0, 5, 5, 0, -10, -10]


@pytest.mark.parametrize(
    ("steps", "dwell", "expected"),
    [
        (5, 1, [-4, 0, 4, 0, -4]),
        (6, 1, [-4, 0, 4, 4, 0, -4]),
        (11, 2, [-4, -4, 0, 0, 4, 4, 0, 0, -4, -4, -4]),  # the odd step stays at the bottom
    ],
)
def test_a_ramp_goes_up_and_down_and_dwells(steps, dwell, expected):
    assert course(programs.ramp(ONE, 4, steps=steps, rows=3, dwell=dwell)) == expected


def test_a_ramp_over_all_passes_pushes_the_prompt_by_its_first_level():
    program = programs.ramp(ONE, 4, steps=5, rows=3, scope="all")
    assert torch.equal(program.prompt_coefficients, torch.full((3, 1), -4.0))


def test_word_pushes_bits_as_signs_while_it_is_on():
    bits = torch.tensor([[0, 1], [1, 1], [0, 0]])
    program = programs.word(CARRIERS, 2, bits, steps=3, start=2, length=1)
    expected = torch.zeros(3, 3, 2)
    expected[1] = torch.tensor([[-2.0, 2.0], [2.0, 2.0], [-2.0, -2.0]])
    assert torch.equal(program.coefficients, expected)
    assert torch.equal(program.columns["bits"], bits)
    forever = programs.word(CARRIERS, 2, bits.bool(), steps=3, start=2)
    assert course(forever, row=1) == [0, 2, 2]


def test_a_list_of_alphas_multiplies_the_rows_alpha_outermost():
    bits = torch.tensor([[0, 1], [1, 1], [0, 0]])
    prompt = torch.tensor([7, 8, 9])
    program = programs.word(CARRIERS, [0, 0.1], bits, steps=2, columns={"prompt": prompt})
    assert program.n_rows == 6
    assert program.columns["alpha"].tolist() == [0, 0, 0, 0.1, 0.1, 0.1]
    assert program.columns["prompt"].tolist() == [7, 8, 9, 7, 8, 9]
    assert torch.equal(program.columns["bits"], torch.cat([bits, bits]))
    assert torch.equal(program.coefficients[:, :3], torch.zeros(2, 3, 2))
    assert torch.equal(program.coefficients[0, 3:], (0.1 * (2.0 * bits - 1)))


def test_a_pattern_gives_every_row_its_own_share():
    # the sums of a two-input truth table
    sums = torch.tensor([[0.0], [1.0], [1.0], [2.0]])
    program = programs.pulse(ONE, 8, steps=2, rows=sums, start=1, length=1)
    assert program.coefficients[0, :, 0].tolist() == [0, 8, 8, 16]
    assert not program.coefficients[1].any()


@pytest.mark.parametrize(("scope", "prompt", "loop"), [("loop", None, 2.0), ("prompt", 2.0, 0.0), ("all", 2.0, 2.0)])
def test_the_scope_says_which_passes_are_pushed(scope, prompt, loop):
    program = programs.constant(CARRIERS, 2, steps=3, rows=3, scope=scope)
    assert torch.equal(program.coefficients, torch.full((3, 3, 2), loop))
    if prompt is None:
        assert program.prompt_coefficients is None
    else:
        assert torch.equal(program.prompt_coefficients, torch.full((3, 2), prompt))


def test_rows_take_their_columns_and_prompt_along():
    bits = torch.tensor([[0, 1], [1, 1], [0, 0]])
    program = programs.word(CARRIERS, [1, 2], bits, steps=2, scope="all")
    mask = torch.tensor([False, False, True, False, True, False])
    for index in ([2, 4], torch.tensor([2, 4]), mask, slice(2, 5, 2)):
        part = program.rows(index)
        assert torch.equal(part.coefficients, program.coefficients[:, [2, 4]])
        assert torch.equal(part.prompt_coefficients, program.prompt_coefficients[[2, 4]])
        assert torch.equal(part.columns["bits"], bits[[2, 1]])
        assert part.columns["alpha"].tolist() == [1, 2]
        assert part.name == "word"


def test_concatenate_puts_programs_back_together():
    whole = programs.word(CARRIERS, [1, 2], torch.tensor([[0, 1], [1, 1], [0, 0]]), steps=2, scope="all")
    joined = Program.concatenate([whole.rows(slice(0, 4)), whole.rows([4, 5])])
    assert torch.equal(joined.coefficients, whole.coefficients)
    assert torch.equal(joined.prompt_coefficients, whole.prompt_coefficients)
    assert all(torch.equal(joined.columns[name], whole.columns[name]) for name in whole.columns)
    assert joined.name == "word"


def test_concatenate_counts_an_unpushed_prompt_as_zero():
    loop, prompt = (programs.constant(ONE, 2, steps=2, rows=2, scope=s) for s in ("loop", "prompt"))
    joined = Program.concatenate([loop, prompt])
    assert joined.prompt_coefficients[:, 0].tolist() == [0, 0, 2, 2]
    assert joined.coefficients[0, :, 0].tolist() == [2, 2, 0, 0]
    assert Program.concatenate([loop, loop]).prompt_coefficients is None


def test_gradients_reach_carriers_and_coefficients():
    carriers = CARRIERS.clone().requires_grad_()
    program = programs.constant(carriers, 2, steps=3, rows=3)
    learned = Program(torch.ones(3, 3, 2, requires_grad=True), carriers)
    assert program.rows([0]).carriers is carriers
    assert learned.rows(torch.tensor([0, 2])).coefficients.requires_grad


@pytest.mark.parametrize(("n_rows", "n_bits"), [(16, 8), (8, 3), (22, 3), (2, 1), (64, 40)])
def test_messages_are_balanced_on_every_carrier(n_rows, n_bits):
    words = balanced_messages(n_rows, n_bits, generator())
    assert words.shape == (n_rows, n_bits)
    assert torch.equal(words.sum(0), torch.full((n_bits,), n_rows // 2))


def test_eight_messages_span_seven_directions_where_pairs_with_complement_would_span_four():
    # columns of zeros and ones that sum to 4 lie in a space of 7 dimensions once centred
    ranks = [torch.linalg.matrix_rank(balanced_messages(8, 40, generator(s)) - 0.5) for s in range(5)]
    assert [int(rank) for rank in ranks] == [7] * 5


def test_messages_depend_on_the_generator_and_are_not_sorted():
    first, again, other = (balanced_messages(16, 8, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, first.sort(dim=0).values)


@pytest.mark.parametrize("seed", range(20))
def test_held_out_messages_are_no_fitted_message_nor_the_complement_of_one(seed):
    draw = generator(seed)
    fitted = balanced_messages(4, 4, draw)
    asked = balanced_messages(4, 4, draw, apart_from=fitted)
    seen = {tuple(w) for w in fitted.tolist()} | {tuple(w) for w in (1 - fitted).tolist()}
    assert not seen & {tuple(w) for w in asked.tolist()}


def test_messages_that_cannot_be_kept_apart_are_refused():
    everything = torch.tensor([[0, 0], [0, 1]])
    with pytest.raises(ValueError, match="2 balanced messages of 2 bits apart from the given ones"):
        balanced_messages(2, 2, generator(), apart_from=everything)


BITS = torch.tensor([[0, 1], [1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: programs.constant(ONE, math.nan, steps=2, rows=3),
            "alpha is nan; expected a finite",
        ),
        (lambda: programs.constant(ONE, [1, math.inf], steps=2, rows=3), r"alpha is \[1, inf\]"),
        (lambda: programs.constant(ONE, [], steps=2, rows=3), r"alpha is \[\]; expected"),
        (lambda: programs.constant(ONE, 1, steps=0, rows=3), "steps is 0; expected at least 1"),
        (lambda: programs.constant(ONE, 1, steps=2, rows=0), "rows is 0; expected at least 1"),
        (lambda: programs.constant(ONE * math.nan, 1, steps=2, rows=3), "carriers hold NaN"),
        (
            lambda: programs.pulse(ONE, 1, steps=4, rows=3, start=0, length=2),
            "from step 0 ends at step 1",
        ),
        (
            lambda: programs.pulse(ONE, 1, steps=4, rows=3, start=4, length=2),
            "within steps 1–4: fewer",
        ),
        (lambda: programs.pulse(ONE, 1, steps=4, rows=3, start=4, length=0), "a pulse of 0 steps"),
        (
            lambda: programs.pulse(ONE, 1, steps=4, rows=3, start=1, length=1, scope="prompt"),
            "scope prompt leaves the loop unpushed, so a pulse cannot happen: use loop or all",
        ),
        (
            lambda: programs.pulse_train(ONE, 1, steps=9, rows=3, starts=[1, 3], length=3),
            "the pulse from step 3 overlaps an earlier one",
        ),
        (
            lambda: programs.pulse_train(ONE, 1, steps=9, rows=3, starts=[1, 5], length=3, signs=[1]),
            "1 signs for 2 pulses",
        ),
        (
            lambda: programs.pulse_train(ONE, 1, steps=9, rows=3, starts=[1], length=3, signs=[0]),
            "a pulse's sign is 0",
        ),
        (
            lambda: programs.ramp(ONE, 1, steps=8, rows=3, dwell=4),
            "8 steps with dwell 4 make 2 levels; a ramp up and down needs",
        ),
        (lambda: programs.ramp(ONE, 1, steps=8, rows=3, dwell=0), "with dwell 0 make 0 levels"),
        (
            lambda: programs.word(CARRIERS, 1, 2 * BITS, steps=2),
            r"bits are \[0, 2\]; expected 0 and 1",
        ),
        (
            lambda: programs.word(torch.ones(3, 2), 1, torch.ones(3, 3).long(), steps=2),
            "3 bits per row on 3 carriers of width 2; expected one carrier per bit, and at most 2",
        ),
        (
            lambda: programs.constant(ONE, 1, steps=2, rows=3, columns={"prompt": torch.arange(2)}),
            r"column 'prompt' is \(2,\); expected 3 rows first",
        ),
        (
            lambda: programs.constant(ONE, 1, steps=2, rows=3, columns={"alpha": torch.arange(3)}),
            "another name than",
        ),
        (
            lambda: balanced_messages(5, 4, generator()),
            "5 messages of 4 bits; expected an even number",
        ),
        (lambda: balanced_messages(4, 0, generator()), "4 messages of 0 bits"),
    ],
)
def test_impossible_programs_are_refused_with_the_reason(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"coefficients": torch.zeros(0, 3, 2)},
            r"coefficients are \(0, 3, 2\); expected \(step, row, carrier\)",
        ),
        (
            {"coefficients": torch.zeros(3, 2)},
            r"coefficients are \(3, 2\); expected \(step, row, carrier\)",
        ),
        (
            {"carriers": torch.eye(3)},
            r"carriers are \(3, 3\) and coefficients \(4, 3, 2\); expected",
        ),
        (
            {"prompt_coefficients": torch.zeros(2, 2)},
            r"prompt coefficients are \(2, 2\); expected \(row,",
        ),
        ({"columns": {"seed": torch.zeros(4)}}, r"column 'seed' is \(4,\); expected 3 rows first"),
        (
            {"coefficients": torch.full((4, 3, 2), math.inf)},
            "coefficients hold NaN or infinite values",
        ),
    ],
)
def test_a_program_that_does_not_fit_together_is_refused(changed, message):
    # imported anew, as a user has it: without the runtime shape checks that would speak first
    spec = importlib.util.spec_from_file_location("programs_as_used", programs.__file__)
    as_used = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(as_used)
    good = {"coefficients": torch.zeros(4, 3, 2), "carriers": CARRIERS}
    as_used.Program(**good)
    with pytest.raises(ValueError, match=message):
        as_used.Program(**(good | changed))


def test_programs_that_differ_cannot_be_concatenated():
    base = programs.constant(ONE, 1, steps=3, rows=3)
    for other, message in (
        (programs.constant(ONE, 1, steps=2, rows=3), "program 1 has 2 steps, program 0 has 3"),
        (programs.constant(CARRIERS[1:], 1, steps=3, rows=3), "program 1 has other carriers"),
        (
            programs.constant(ONE, 1, steps=3, rows=3, columns={"seed": torch.arange(3)}),
            r"program 1 has columns \['alpha', 'seed'\], program 0 \['alpha'\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Program.concatenate([base, other])
    with pytest.raises(ValueError, match="no programs to concatenate"):
        Program.concatenate([])
