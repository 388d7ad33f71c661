"""Claims about feedback.readout: planted codes are found, and nothing where none was planted."""

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import config
from sklearn.linear_model import Ridge, RidgeCV
from sklearn.model_selection import LeaveOneGroupOut, cross_val_predict
from sklearn.preprocessing import OneHotEncoder
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from feedback import metrics, readout
from feedback.readout import RidgeReader, StepReader, TextReader


@pytest.fixture
def unchecked() -> Iterator[None]:
    """What a user sees, who has no shape checker at run time."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """CPU time then means the work done, however busy the machine is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def random_bits(rows: int, carriers: int, seed: int) -> Tensor:
    return torch.rand(rows, carriers, generator=generator(seed)) < 0.5


PROMPTS = torch.arange(160) // 10  # 16 prompts of 10 messages
BITS = random_bits(160, 4, seed=1)
HELD_OUT = PROMPTS >= 10
CODE = normal(4, 64, seed=2)
# every prompt moves the state by more (|3·n| ≈ 24) than a bit does (|code| ≈ 8), plus noise
STATES = 5.0 + (2.0 * BITS - 1) @ CODE + 3 * normal(16, 64, seed=3)[PROMPTS] + 0.5 * normal(160, 64, seed=4)


def held_out_interval(read: Tensor, bits: Tensor = BITS) -> metrics.Interval:
    errors = metrics.bit_errors(read, bits[HELD_OUT])
    return metrics.ber_interval(errors, PROMPTS[HELD_OUT], generator())


def fit_and_read(states: Tensor, bits: Tensor) -> Tensor:
    known = ~HELD_OUT
    return RidgeReader.fit(states[known], bits[known], PROMPTS[known]).read(states[HELD_OUT])


def test_a_planted_linear_code_is_read_on_prompts_never_seen() -> None:
    # 60 rows × 4 carriers without an error: Wilson's upper end is 3.84/(240 + 3.84) = 0.016
    assert held_out_interval(fit_and_read(STATES, BITS)).high < 0.05


def test_with_shuffled_labels_nothing_is_read() -> None:
    shuffled = BITS[torch.randperm(160, generator=generator(5))]
    assert held_out_interval(fit_and_read(STATES, shuffled), shuffled).contains(0.5)


def test_from_random_features_nothing_is_read() -> None:
    assert held_out_interval(fit_and_read(normal(160, 64, seed=6), BITS)).contains(0.5)


def test_leaving_out_single_rows_agrees_with_scikit_learn() -> None:
    penalties = np.logspace(-4, 3, 29)
    chosen = set()
    for seed in range(6):
        x, bits = normal(30, 50, seed=seed) + 3, random_bits(30, 3, seed=seed + 100)
        x = x + seed * (2.0 * bits - 1) @ normal(3, 50, seed=9)
        ours = RidgeReader.fit(x, bits, penalties=penalties.tolist(), standardise=False)
        unit = (x - x.mean(0)).square().sum().item() / 30
        theirs = RidgeCV(alphas=penalties * unit).fit(x.double().numpy(), 2.0 * bits.numpy() - 1)
        assert math.isclose(ours.penalty * unit, theirs.alpha_, rel_tol=1e-4)
        new = normal(5, 50, seed=seed + 200)
        np.testing.assert_allclose(ours.scores(new), theirs.predict(new.double().numpy()), atol=1e-4)
        chosen.add(ours.penalty)
    assert len(chosen) > 1  # or the agreement would be about nothing


def test_leaving_out_whole_prompts_agrees_with_refitting_without_each_of_them() -> None:
    penalties = np.logspace(-4, 3, 15)
    groups = torch.arange(30) % 7  # of 5 and 4 rows
    chosen, by_row = [], []
    for seed in range(6):
        x = normal(30, 40, seed=seed) + 3 * normal(7, 40, seed=seed + 50)[groups]
        bits = random_bits(30, 3, seed=seed + 100)
        x = x + (2.0 * bits - 1) @ (seed * normal(3, 40, seed=9))
        x = x.double()
        ours = RidgeReader.fit(x, bits, groups, penalties=penalties.tolist(), standardise=False)
        unit = (x - x.mean(0)).square().sum().item() / 30
        target = 2.0 * bits.numpy() - 1
        losses = []
        for penalty in penalties * unit:
            predicted = cross_val_predict(
                Ridge(alpha=penalty),
                x.numpy(),
                target,
                groups=groups.numpy(),
                cv=LeaveOneGroupOut(),
            )
            losses.append(np.square(predicted - target).sum())
        assert ours.penalty == penalties[int(np.argmin(losses))]
        chosen.append(ours.penalty)
        alone = RidgeReader.fit(x, bits, penalties=penalties.tolist(), standardise=False)
        by_row.append(alone.penalty)
    assert chosen != by_row  # the groups must have mattered


def test_standardising_makes_the_units_of_the_features_irrelevant() -> None:
    units = 10.0 ** torch.linspace(-3, 3, 64)
    here, there = fit_and_read(STATES, BITS), fit_and_read(STATES * units, BITS)
    assert torch.equal(here, there)
    raw = RidgeReader.fit(STATES, BITS, standardise=False)
    assert not torch.allclose(raw.scores(STATES), RidgeReader.fit(STATES, BITS).scores(STATES))


def test_features_that_never_vary_carry_no_weight() -> None:
    # in float64 the mean of equal numbers can be off by a rounding, which must not be scaled up
    states = STATES.double()
    constants = torch.linspace(0.1, 0.9, 9, dtype=torch.float64).expand(160, -1)
    with_constants = RidgeReader.fit(torch.cat([states, constants], dim=1), BITS)
    assert (with_constants.weights[-9:] == 0).all()
    torch.testing.assert_close(
        with_constants.weights[:-9], RidgeReader.fit(states, BITS).weights, rtol=1e-8, atol=1e-10
    )


def test_from_constant_features_the_majority_is_read() -> None:
    bits = torch.tensor([[1, 0], [1, 0], [0, 1]]).bool()
    reader = RidgeReader.fit(torch.full((3, 5), 0.1, dtype=torch.float64), bits)
    # mean targets: (1 + 1 − 1)/3 and −1/3
    torch.testing.assert_close(reader.scores(torch.full((3, 5), 7.0)), torch.tensor([[1 / 3, -1 / 3]] * 3).double())


def test_one_reader_can_be_asked_about_many_steps() -> None:
    reader = RidgeReader.fit(STATES, BITS)
    steps = normal(2, 5, 64, seed=8)
    assert reader.scores(steps).shape == (2, 5, 4)
    torch.testing.assert_close(reader.scores(steps)[1], reader.scores(steps[1]))


def test_a_hundred_readers_take_seconds() -> None:
    features, bits = normal(100, 2304, seed=0), random_bits(100, 8, seed=0)
    groups = torch.arange(100) // 6
    start = time.process_time()
    for _ in range(10):
        RidgeReader.fit(features, bits, groups)
    assert time.process_time() - start < 0.5  # 0.12 s where it was written


def refusals() -> dict[str, tuple[Callable[[], object], str]]:
    x, bits, groups = torch.ones(3, 2), torch.tensor([[True], [False], [True]]), torch.arange(3)
    broken = torch.tensor([[1.0, 2.0], [math.nan, 1.0], [1.0, math.inf]])
    fit = RidgeReader.fit
    return {
        "bits": (lambda: fit(x, bits[:2]), r"features have 3 rows, but bits are \(2, 1\)"),
        "groups": (lambda: fit(x, bits, groups[:1]), r"bits are \(3, 1\) and groups \(1,\)"),
        "one bit": (
            lambda: fit(x, torch.cat([bits, bits | True], dim=1)),
            r"carriers \[1\] have the same bit in all 3 fitting rows",
        ),
        "nan": (lambda: fit(broken, bits), r"features of rows \[1, 2\] are not finite"),
        "one group": (lambda: fit(x, bits, groups * 0), "one group only"),
        "penalty": (
            lambda: fit(x, bits, penalties=[1.0, 0.0]),
            r"positive numbers, got \[1.0, 0.0\]",
        ),
        "width": (
            lambda: fit(x, bits).scores(torch.ones(3, 5)),
            "fitted on 2 features, got 5",
        ),
        "window": (
            lambda: StepReader.fit(x[None], bits, window=0),
            "window is at least 1 and combine is concatenate or mean, got 0",
        ),
        "combine": (
            lambda: StepReader.fit(x[None], bits, combine="sum"),  # type: ignore[arg-type]
            "got 1 and 'sum'",
        ),
        "steps": (
            lambda: StepReader.fit(x[None], bits).read(torch.ones(2, 3, 2)),
            "fitted on 1 steps, got 2",
        ),
        "text bits": (
            lambda: TextReader.fit(groups[:, None], bits[:2]),
            r"have 3 rows, but bits are \(2, 1\)",
        ),
        "empty text": (
            lambda: TextReader.fit(torch.zeros(3, 0).long(), bits),
            "got texts of 0 steps",
        ),
        "reference": (
            lambda: TextReader.fit(groups[:, None], bits, reference=groups[:1, None]),
            r"reference is \(1, 1\), the texts are \(3, 1\)",
        ),
        "text length": (
            lambda: TextReader.fit(groups[:, None], bits).read(torch.ones(3, 2).long()),
            "fitted on 1 steps without a reference, got 2 steps without one",
        ),
        "text kind": (
            lambda: TextReader.fit(groups[:, None], bits).read(groups[:, None], groups[:, None]),
            "fitted on 1 steps without a reference, got 1 steps with one",
        ),
        "direction": (
            lambda: readout.project(x, torch.zeros(2)),
            r"width 2 and of positive finite length, got width \(2,\) and length 0",
        ),
        "direction width": (
            lambda: readout.project(x, torch.ones(1)),
            r"got width \(1,\) and length 1",
        ),
        "same token": (lambda: readout.mixture_coordinate(x, 1, 1), "two different tokens in 0–1"),
        "token": (lambda: readout.mixture_coordinate(x, 0, 2), "got 0, 2 and 1.0"),
        "temperature": (
            lambda: readout.mixture_coordinate(x, 0, 1, temperature=0.0),
            "a positive temperature, got 0, 1 and 0.0",
        ),
    }


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("what", refusals())
def test_refusals_say_what_was_given(what: str) -> None:
    call, message = refusals()[what]
    with pytest.raises(ValueError, match=message):
        call()


def test_stopped_rows_are_refused_unless_excluded_and_never_touch_other_rows() -> None:
    reader = RidgeReader.fit(STATES, BITS)
    states = STATES[:3].clone()
    states[1, 0] = math.nan
    with pytest.raises(ValueError, match=r"rows \[1\] are not finite: leave out"):
        reader.read(states)
    read = reader.read(states, valid=torch.tensor([True, False, True]))
    assert torch.equal(read[[0, 2]], reader.read(STATES[:3])[[0, 2]])
    assert reader.scores(states).isnan().all(1).tolist() == [False, True, False]


def test_a_window_reads_at_a_later_step_what_was_only_in_an_earlier_one() -> None:
    # the code is in the states of step 0; steps 1 and 2 are noise
    states = torch.stack([STATES, normal(160, 64, seed=10), normal(160, 64, seed=11)])
    known = ~HELD_OUT
    rates = {}
    for window in (1, 2):
        reader = StepReader.fit(states[:, known], BITS[known], PROMPTS[known], window=window)
        errors = metrics.bit_errors(reader.read(states[:, HELD_OUT]), BITS[HELD_OUT])
        rates[window] = metrics.bit_error_rate(errors)
    assert rates[1][0] < 0.05 and rates[1][1] > 0.3 and rates[1][2] > 0.3
    assert rates[2][0] < 0.05 and rates[2][1] < 0.1 and rates[2][2] > 0.3


def test_averaging_a_window_reads_through_noise_that_single_steps_do_not() -> None:
    # noise of 12 per coordinate against a code of 1: averaging 16 steps divides it by 4
    noise = 12 * normal(16, 160, 64, seed=12)
    states = (2.0 * BITS - 1) @ CODE + noise
    known = ~HELD_OUT
    rate = {}
    for window in (1, 16):
        reader = StepReader.fit(states[:, known], BITS[known], PROMPTS[known], window=window, combine="mean")
        errors = metrics.bit_errors(reader.read(states[:, HELD_OUT]), BITS[HELD_OUT])
        rate[window] = metrics.bit_error_rate(errors)[-1]
    assert rate[16] < rate[1] - 0.1


def test_each_step_is_read_by_the_reader_of_its_own_window() -> None:
    states = normal(3, 20, 6, seed=13)
    bits = random_bits(20, 2, seed=14)
    reader = StepReader.fit(states, bits, window=2)
    first = RidgeReader.fit(states[0], bits)
    last = RidgeReader.fit(torch.cat([states[1], states[2]], dim=1), bits)
    torch.testing.assert_close(reader.scores(states)[0], first.scores(states[0]))
    torch.testing.assert_close(reader.scores(states)[2], last.scores(torch.cat([states[1], states[2]], dim=1)))
    assert torch.equal(reader.read(states), reader.scores(states) > 0)


# texts: 6 random tokens of 40 per row, the same for all rows of a prompt


def texts(seed: int = 20) -> Tensor:
    return torch.randint(40, (16, 6), generator=generator(seed))[PROMPTS]


def text_error_rate(text: Tensor, bits: Tensor, reference: Tensor | None = None) -> Tensor:
    known = ~HELD_OUT
    pick = (lambda rows: None) if reference is None else (lambda rows: reference[rows])
    reader = TextReader.fit(text[known], bits[known], PROMPTS[known], reference=pick(known))
    read = reader.read(text[HELD_OUT], pick(HELD_OUT))
    return metrics.bit_error_rate(metrics.bit_errors(read, bits[HELD_OUT]))


def test_a_bit_in_one_token_is_read_from_the_prefix_that_has_it_and_from_no_shorter_one() -> None:
    bits = BITS[:, :1]
    text = texts()
    text[:, 3] = torch.where(bits[:, 0], 50, 51)
    assert text_error_rate(text[:, :4], bits) == 0
    assert text_error_rate(text[:, :3], bits) > 0.3


def test_a_token_is_noticed_wherever_it_stands() -> None:
    bits = BITS[:, :1]
    text = texts()
    place = torch.randint(6, (160, 1), generator=generator(21))
    marker = torch.where(bits, 50, 51)
    assert text_error_rate(text.scatter(1, place, marker), bits) == 0


def test_only_the_informed_reader_notices_that_a_prompts_text_changed() -> None:
    # a 1 replaces the token at place 2 by a random other one, of a vocabulary too large to learn
    bits = BITS[:, :1]
    reference = torch.randint(10**6, (16, 6), generator=generator(22))[PROMPTS]
    text = reference.clone()
    text[:, 2] += torch.randint(1, 10**6, (160,), generator=generator(23)) * bits[:, 0]
    assert text_error_rate(text, bits, reference) == 0
    assert text_error_rate(text, bits) > 0.3


@given(st.integers(2, 60), st.data())
@settings(max_examples=50, deadline=None)
def test_from_equal_texts_it_answers_the_majority(rows: int, data: st.DataObject) -> None:
    ones = data.draw(st.integers(1, rows - 1))
    bits = (torch.arange(rows) < ones)[:, None]
    text = torch.tensor([[7, 7, 7, 8, 8, 9, 7, 8]]).expand(rows, -1)
    read = TextReader.fit(text, bits, reference=text).read(text, text)
    assert torch.equal(read, torch.full((rows, 1), 2 * ones > rows))
    constant = min(ones, rows - ones) / rows
    assert metrics.bit_error_rate(metrics.bit_errors(read, bits)) == constant


@pytest.mark.parametrize("rows", [14, 30, 46])  # where rounding would break the tie
def test_from_equal_texts_and_as_many_of_each_bit_the_answer_is_no(rows: int) -> None:
    bits = (torch.arange(rows) < rows // 2)[:, None]
    text = torch.tensor([[7, 7, 7, 8, 8, 9, 7, 8]]).expand(rows, -1)
    reader = TextReader.fit(text, bits)
    assert (reader.scores(text) == 0).all()
    assert not reader.read(text).any()


def test_with_shuffled_labels_the_text_says_nothing() -> None:
    text = texts()
    text[:, :4] = torch.where(BITS, 50, 51)
    known, shuffled = ~HELD_OUT, BITS[torch.randperm(160, generator=generator(24))]
    assert text_error_rate(text, BITS) == 0
    read = TextReader.fit(text[known], shuffled[known], PROMPTS[known]).read(text[HELD_OUT])
    assert held_out_interval(read, shuffled).contains(0.5)


def test_the_text_reader_is_ridge_regression_on_places_and_root_counts() -> None:
    text, bits = torch.randint(5, (12, 4), generator=generator(25)), random_bits(12, 2, seed=26)
    unseen = torch.tensor([[0, 1, 2, 3], [4, 4, 4, 77], [77, 77, 77, 77]])

    def features(tokens: Tensor) -> np.ndarray:
        counts = np.stack([(tokens.numpy() == token).sum(1) for token in range(5)], axis=1)
        return np.hstack([encoder.transform(tokens.numpy()).toarray(), np.sqrt(counts)])

    encoder = OneHotEncoder(handle_unknown="ignore").fit(text.numpy())
    x = features(text)
    unit = np.square(x - x.mean(0)).sum() / 12
    ridge = Ridge(alpha=0.5 * unit, solver="svd").fit(x, 2.0 * bits.numpy() - 1)
    reader = TextReader.fit(text, bits, penalties=[0.5])
    np.testing.assert_allclose(reader.scores(unseen), ridge.predict(features(unseen)), atol=1e-9)


def test_places_without_a_token_say_nothing() -> None:
    # the text leaves its reference at place 0 where the bit is 1
    bits, reference = BITS[:, :1], texts()
    text = reference.clone()
    text[:, 0] += 100 * bits[:, 0]
    reader = TextReader.fit(text, bits, reference=reference)
    blank = text[:3].clone()
    blank[1] = -1
    scores = reader.scores(blank, reference[:3])
    torch.testing.assert_close(scores[[0, 2]], reader.scores(text[:3], reference[:3])[[0, 2]])
    torch.testing.assert_close(scores[1], torch.from_numpy(reader.offset))


def test_a_text_reader_for_every_step_of_a_run_takes_about_a_second() -> None:
    text = torch.randint(40, (160, 24), generator=generator(27))
    start = time.process_time()
    for step in range(24):
        TextReader.fit(text[:, : step + 1], BITS, PROMPTS)
    assert time.process_time() - start < 1.5  # 0.3 s where it was written


def test_projection_is_the_signed_length_along_the_direction() -> None:
    states = torch.tensor([[3.0, 4.0], [-3.0, -4.0], [4.0, -3.0]])
    # the direction's own length (here 10) does not count: 3·0.6 + 4·0.8 = 5
    torch.testing.assert_close(readout.project(states, torch.tensor([6.0, 8.0])), torch.tensor([5.0, -5.0, 0.0]))
    assert readout.project(states.expand(2, 3, 2), torch.tensor([1.0, 0.0])).shape == (2, 3)


@given(
    st.lists(st.floats(-20, 20), min_size=4, max_size=4),
    st.floats(0.2, 5),
    st.permutations(range(4)),
)
@settings(deadline=None)
def test_the_mixture_coordinate_is_the_balance_of_two_probabilities(
    z: list[float], temperature: float, tokens: list[int]
) -> None:
    logits, (a, b, *_) = torch.tensor([z, z[::-1]], dtype=torch.float64), tokens
    p = torch.softmax(logits / temperature, dim=-1)
    w = p[:, a] / (p[:, a] + p[:, b])
    torch.testing.assert_close(readout.mixture_coordinate(logits, a, b, temperature), 2 * w - 1)


def test_the_mixture_coordinate_is_fine_where_probabilities_underflow() -> None:
    logits = torch.tensor([[200.0, 1.0, 0.0], [200.0, 0.0, 0.0], [200.0, 0.0, 1.0]])
    # w/(1 − w) = e, so u = tanh(1/2), although p_A and p_B are 0 in float32
    expected = torch.tensor([math.tanh(0.5), 0, -math.tanh(0.5)])
    torch.testing.assert_close(readout.mixture_coordinate(logits, 1, 2), expected)


@pytest.fixture(scope="module")
def module() -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
        return LlamaForCausalLM(shape).eval()


def test_the_lens_on_the_last_block_shows_the_models_own_likeliest_tokens(
    module: LlamaForCausalLM,
) -> None:
    seen = []
    with (
        torch.no_grad(),
        module.model.layers[-1].register_forward_hook(
            lambda _, __, output: seen.append(output if isinstance(output, Tensor) else output[0])
        ),
    ):
        logits = module(torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])).logits
    found = readout.logit_lens(module, seen[0], top=3)
    probabilities, tokens = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True)
    assert torch.equal(found.tokens, tokens[..., :3])
    torch.testing.assert_close(found.probabilities, probabilities[..., :3])
    assert not found.probabilities.requires_grad


def test_the_lens_refuses_more_tokens_than_there_are(module: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="top 41 does not exist: this model has a vocabulary of 40"):
        readout.logit_lens(module, torch.zeros(3, 16), top=41)
