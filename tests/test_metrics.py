"""Claims about feedback.metrics; the arithmetic is in the comments."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import config

from feedback import metrics
from feedback.metrics import Interval

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=5, max_size=5)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """What a user sees, who has no shape checker at run time."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(a: torch.Tensor, b: object, **kwargs: float) -> None:
    expected = torch.as_tensor(b, dtype=a.dtype)
    torch.testing.assert_close(a, expected, equal_nan=True, **{"rtol": 1e-6, "atol": 1e-9, **kwargs})


# 3 rows × 2 carriers
SENT = torch.tensor([[True, False], [False, False], [True, True]])


def test_bit_errors_are_the_places_where_read_and_sent_differ_at_every_step() -> None:
    read = torch.stack([SENT, ~SENT])
    assert metrics.bit_errors(read, SENT).tolist() == [[[False] * 2] * 3, [[True] * 2] * 3]


@pytest.mark.usefixtures("unchecked")
def test_bit_errors_refuses_rows_that_would_only_broadcast() -> None:
    with pytest.raises(ValueError, match=r"\(row, carrier\) = \(1, 2\).*sent are \(3, 2\)"):
        metrics.bit_errors(SENT[:1], SENT)


def test_the_bit_error_rate_averages_over_rows_and_carriers_of_each_step() -> None:
    errors = torch.tensor([[[1, 0], [0, 0], [0, 0]], [[1, 1], [1, 0], [0, 0]]]).bool()
    close(metrics.bit_error_rate(errors), [1 / 6, 3 / 6])


def test_stopped_rows_count_neither_as_errors_nor_as_trials() -> None:
    errors = torch.tensor([[1, 1], [1, 0], [0, 0]]).bool()
    # without row 0: 1 error in 2 rows × 2 carriers
    close(metrics.bit_error_rate(errors, torch.tensor([False, True, True])), 1 / 4)
    assert metrics.bit_error_rate(errors, torch.zeros(3, dtype=torch.bool)).isnan()


@pytest.mark.usefixtures("unchecked")
def test_a_mask_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"valid is \(1,\), expected one truth value for each of 3"):
        metrics.bit_error_rate(SENT, torch.tensor([True]))


def test_the_folded_bit_error_rate_mirrors_at_one_half() -> None:
    close(metrics.folded_ber(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])), [0, 0.25, 0.5, 0.25, 0])


def test_binary_entropy_is_zero_at_certainty_and_one_bit_at_one_half() -> None:
    # h₂(1/4) = 1/4 · 2 + 3/4 · log₂(4/3) = 2 − 3/4 · log₂ 3
    p = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    close(metrics.binary_entropy(p), [0, 2 - 0.75 * math.log2(3), 1, 0])


def test_binary_entropy_refuses_what_is_no_probability_but_lets_nan_through() -> None:
    with pytest.raises(ValueError, match=r"lies in \[0, 1\], got -0.1 to 0.5"):
        metrics.binary_entropy(torch.tensor([0.5, -0.1]))
    assert metrics.binary_entropy(torch.tensor([math.nan, 0.5])).isnan().tolist() == [True, False]


@given(st.floats(0, 1))
@settings(deadline=None)
def test_a_bit_error_rate_and_its_mirror_image_have_the_same_rate(ber: float) -> None:
    pair = torch.tensor([ber, 1 - ber], dtype=torch.float64)
    rate, mirrored = metrics.rate_bits(pair)
    close(rate, mirrored)
    assert 0 <= rate <= 1


def test_the_rate_is_one_bit_without_errors_and_nothing_at_one_half() -> None:
    # h₂(0.11) = 0.49992: the textbook channel of half a bit
    rates = metrics.rate_bits(torch.tensor([0.0, 0.11, 0.5], dtype=torch.float64))
    close(rates, [1, 0.5, 0], atol=1e-3)


def test_hiddenness_is_how_much_worse_the_text_reader_is() -> None:
    text, state = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.5, 0.0])
    close(metrics.hiddenness(text, state), [0.5, 0, 0])


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_the_wilson_interval_agrees_with_scipy(confidence: float) -> None:
    errors, trials = torch.tensor([0, 1, 3, 50, 8]), torch.tensor([1, 8, 9, 100, 8])
    ours = metrics.wilson(errors, trials, confidence)
    theirs = [
        scipy.stats.binomtest(k, n).proportion_ci(confidence, method="wilson")
        for k, n in zip(errors.tolist(), trials.tolist(), strict=True)
    ]
    close(ours.low, [ci.low for ci in theirs])
    close(ours.high, [ci.high for ci in theirs])


def test_the_wilson_interval_is_exact_at_its_ends_and_empty_handed_without_trials() -> None:
    found = metrics.wilson(torch.tensor([0, 7, 0]), torch.tensor([7, 7, 0]))
    # no errors in 7 trials: high = z²/(7 + z²) with z² = 3.8415, so 0.3543
    assert found.low[0] == 0 and found.high[1] == 1
    close(found.high[0], 0.3543, atol=1e-4)
    assert (found.low[2], found.high[2]) == (0, 1)


def test_the_wilson_interval_takes_plain_numbers_and_refuses_impossible_ones() -> None:
    assert metrics.wilson(1, 4).contains(0.25)
    with pytest.raises(ValueError, match="0 <= errors <= trials"):
        metrics.wilson(5, 4)
    with pytest.raises(ValueError, match=r"strictly between 0 and 1, got 95\.0"):
        metrics.wilson(1, 4, confidence=95.0)


def test_an_interval_contains_its_ends_and_nothing_outside() -> None:
    interval = Interval(torch.tensor([0.1, 0.5, 0.6]), torch.tensor([0.5, 0.9, 0.9]))
    assert interval.contains(0.5).tolist() == [True, True, False]


def test_the_cluster_bootstrap_is_as_wide_as_the_prompts_differ() -> None:
    # 16 prompts × 8 rows × 4 carriers, each prompt all wrong or all right: 16 coins, not 512.
    # Standard error of 16 fair coins: 0.5/√16 = 0.125, so a 95 % interval of about 0.5 ± 0.245.
    clusters = torch.arange(16).repeat_interleave(8)
    errors = (clusters % 2 == 0)[:, None].expand(-1, 4)
    found = metrics.cluster_bootstrap(errors, clusters, generator())
    close(torch.stack([found.low, found.high]), [0.255, 0.745], atol=0.07)
    # as independent trials: ± 1.96 · 0.5/√512 = 0.043
    naive = metrics.wilson(256, 512)
    assert found.low < naive.low - 0.15 and found.high > naive.high + 0.15


def test_the_cluster_bootstrap_agrees_with_scipys_paired_bootstrap() -> None:
    sizes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    clusters = torch.arange(8).repeat_interleave(sizes)
    errors = torch.rand(36, 2, generator=generator(3)) < clusters[:, None] / 10
    wrong = np.array([errors[clusters == c].sum().item() for c in range(8)])
    theirs = scipy.stats.bootstrap(
        (wrong, 2 * sizes.numpy()),
        lambda k, n, axis: k.sum(axis) / n.sum(axis),
        paired=True,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(0),
    ).confidence_interval
    ours = metrics.cluster_bootstrap(errors, clusters * 10, generator(), resamples=20_000)
    close(torch.stack([ours.low, ours.high]), theirs, atol=0.01)


def test_the_cluster_bootstrap_repeats_with_its_generator_and_serves_all_steps_at_once() -> None:
    errors = torch.rand(5, 30, 2, generator=generator(1)) < 0.3
    clusters = torch.arange(30) % 7
    together = metrics.cluster_bootstrap(errors, clusters, generator(7))
    alone = [metrics.cluster_bootstrap(step, clusters, generator(7)) for step in errors]
    close(together.low, torch.stack([i.low for i in alone]))
    close(together.high, torch.stack([i.high for i in alone]))
    assert not torch.equal(together.high, metrics.cluster_bootstrap(errors, clusters, generator()).high)


def test_stopped_rows_do_not_move_the_intervals() -> None:
    # 10 prompts all right or all wrong, so that the bootstrap's ends count; stopped rows all wrong
    clusters, valid = torch.arange(60) // 6, torch.arange(60) % 6 > 2
    errors = ((clusters % 2 == 0) | ~valid)[:, None].expand(-1, 4)
    masked = metrics.ber_interval(errors, clusters, generator(), valid=valid)
    sliced = metrics.ber_interval(errors[valid], clusters[valid], generator())
    close(masked.low, sliced.low)
    close(masked.high, sliced.high)


def test_the_quoted_interval_is_the_wider_one_on_each_side() -> None:
    clusters = torch.arange(16).repeat_interleave(8)
    by_prompt = (clusters % 2 == 0)[:, None].expand(-1, 4)
    none = torch.zeros(128, 4, dtype=torch.bool)
    quoted = metrics.ber_interval(torch.stack([by_prompt, none]), clusters, generator())
    resampled = metrics.cluster_bootstrap(by_prompt, clusters, generator())
    # step 0: the bootstrap's; step 1: it is [0, 0], so Wilson's z²/(512 + z²) = 0.00745
    close(quoted.low, [resampled.low, 0])
    close(quoted.high, [resampled.high, 0.00745], atol=1e-5)


def test_the_quoted_interval_of_no_valid_row_says_nothing() -> None:
    nobody = torch.zeros(3, dtype=torch.bool)
    found = metrics.ber_interval(SENT, torch.arange(3), generator(), valid=nobody)
    assert (found.low, found.high) == (0, 1)


@pytest.mark.usefixtures("unchecked")
def test_the_cluster_bootstrap_wants_one_cluster_per_row() -> None:
    with pytest.raises(ValueError, match=r"each of 3 rows and at least 1 resample, got \(2,\) and 2000"):
        metrics.cluster_bootstrap(SENT, torch.arange(2), generator())


def test_the_entropy_of_equal_logits_is_log_n_and_of_one_hot_is_zero() -> None:
    logits = torch.tensor([[3.0] * 4, [0.0, -math.inf, -math.inf, -math.inf], [1.0, 1.0, -math.inf, -1e9]])
    close(metrics.entropy(logits), [math.log(4), 0, math.log(2)])


@given(LOGITS, st.floats(-50, 50, width=32))
@settings(deadline=None)
def test_entropy_agrees_with_scipy_is_bounded_and_ignores_a_shift(z: list[float], shift: float) -> None:
    logits = torch.tensor([z, z, z[::-1]])
    found = metrics.entropy(logits)
    p = torch.softmax(logits.double(), -1).numpy()
    close(found, scipy.stats.entropy(p, axis=-1), atol=2e-6)
    close(metrics.entropy(logits + shift), found, rtol=1e-4, atol=1e-4)
    assert (found >= 0).all() and (found <= math.log(5) + 1e-6).all()


@given(LOGITS, LOGITS)
@settings(deadline=None)
def test_kl_is_never_negative_and_agrees_with_scipy(p: list[float], q: list[float]) -> None:
    z_p, z_q = torch.tensor([p, q, p]), torch.tensor([q, p, p])
    found = metrics.kl(z_p, z_q)
    exact = scipy.stats.entropy(
        torch.softmax(z_p.double(), -1).numpy(), torch.softmax(z_q.double(), -1).numpy(), axis=-1
    )
    close(found, exact, rtol=1e-4, atol=1e-5)
    assert (found >= 0).all()
    assert found[2] == 0


@given(LOGITS, st.integers(0, 4), st.floats(0.01, 20))
@settings(deadline=None)
def test_kl_is_zero_only_between_equals(z: list[float], place: int, by: float) -> None:
    p = torch.tensor([z])
    p[0, place] = p.max()  # a token with real probability, so that moving it moves the distribution
    q = p.clone()
    q[0, place] += by
    # p(place) >= 1/5, and moving its logit by 0.01 or more costs at least about 0.01² · p(1−p)/2
    others = 1 - torch.softmax(p.double(), -1)[0, place].item()
    assert (metrics.kl(p, q) > 0).item() or others < 1e-6


def test_kl_does_not_see_a_shift_even_in_float32_over_a_large_vocabulary() -> None:
    logits = 5 * torch.randn(3, 49_152, generator=generator())
    found = metrics.kl(logits, logits + torch.tensor([0.0, 10.0, -100.0])[:, None])
    # shifts round each logit by up to 4e-6; a plain Σ p log(p/q) would leave that, not its square
    assert found[0] == 0
    assert (found < 1e-10).all()


def test_kl_keeps_small_divergences_that_float32_cancellation_would_lose() -> None:
    logits = torch.randn(3, 1000, generator=generator())
    moved = logits + 1e-3 * torch.randn(3, 1000, generator=generator(1))
    # about variance/2 = 5e-7 nats, below the rounding of a plain float32 sum of p log p
    close(metrics.kl(logits, moved), metrics.kl(logits.double(), moved.double()).float(), rtol=5e-3)


def test_kl_of_distributions_with_holes() -> None:
    hole, full = [0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]
    p, q = torch.tensor([hole, full, hole]), torch.tensor([full, hole, hole])
    # ½,½,0 against thirds: log(½ / ⅓) = log 1.5; the other way round mass meets none
    close(metrics.kl(p, q), [math.log(1.5), math.inf, 0])


def test_stopped_rows_stay_nan_in_entropy_and_kl_and_spoil_no_other() -> None:
    logits = torch.zeros(3, 4)
    logits[1] = math.nan
    assert metrics.entropy(logits).isnan().tolist() == [False, True, False]
    assert metrics.kl(logits, torch.zeros(3, 4)).isnan().tolist() == [False, True, False]


def test_half_precision_logits_are_measured_in_single_precision() -> None:
    logits = torch.randn(3, 64, generator=generator()).bfloat16()
    close(metrics.entropy(logits), metrics.entropy(logits.double()).float(), rtol=1e-5)
    assert metrics.kl(logits, -logits).dtype == torch.float32


@given(LOGITS, LOGITS)
@settings(deadline=None)
def test_pinskers_bound_holds(p: list[float], q: list[float]) -> None:
    z_p, z_q = torch.tensor([p], dtype=torch.float64), torch.tensor([q], dtype=torch.float64)
    variation = (torch.softmax(z_p, -1) - torch.softmax(z_q, -1)).abs().sum(-1) / 2
    bound = metrics.pinsker(metrics.kl(z_p, z_q))
    assert (variation <= bound + 1e-9).all() and (bound <= 1).all()


def test_pinskers_bound_is_the_root_of_half_the_divergence_up_to_one() -> None:
    close(metrics.pinsker(torch.tensor([0.0, 0.02, 8.0])), [0, 0.1, 1])


def test_agreement_can_be_asked_per_row_per_step_and_over_all() -> None:
    tokens = torch.tensor([[1, 2, 3], [1, 2, 4]])
    reference = torch.tensor([[1, 2, 3], [1, 9, 9]])
    close(metrics.agreement(tokens, reference, over=0), [1, 0.5, 0.5])
    close(metrics.agreement(tokens, reference, over=1), [1, 1 / 3])
    close(metrics.agreement(tokens, reference), 4 / 6)


def test_agreement_leaves_out_stopped_rows() -> None:
    tokens, reference = torch.tensor([[1, 2, 3], [1, 2, 4]]), torch.tensor([[1, 2, 3], [1, 9, 9]])
    valid = torch.tensor([True, True, False])
    close(metrics.agreement(tokens, reference, over=0, valid=valid), [1, 0.5, math.nan])
    close(metrics.agreement(tokens, reference, over=1, valid=valid), [1, 0.5])


@pytest.mark.usefixtures("unchecked")
def test_agreement_refuses_a_reference_that_would_only_broadcast() -> None:
    with pytest.raises(ValueError, match=r"\(4, 3\) but the reference is \(4, 1\)"):
        metrics.agreement(torch.zeros(4, 3).long(), torch.zeros(4, 1).long())


def test_distinct_n_counts_each_rows_own_ngrams_once() -> None:
    # columns are rows: 1 1 1 1 → one bigram of three; 1 2 1 2 → 12, 21 of three; 1 2 3 4 → all
    tokens = torch.tensor([[1, 1, 1], [1, 2, 2], [1, 1, 3], [1, 2, 4]])
    close(metrics.distinct_n(tokens), [1 / 3, 2 / 3, 1])
    close(metrics.distinct_n(tokens, 1), [1 / 4, 2 / 4, 1])


def test_distinct_n_refuses_texts_shorter_than_n() -> None:
    with pytest.raises(ValueError, match="no 2-grams in texts of 1 tokens"):
        metrics.distinct_n(torch.ones(1, 3).long())


def test_the_longest_run_is_unbroken_and_may_end_the_text() -> None:
    tokens = torch.tensor([[5, 5, 1], [5, 5, 2], [5, 6, 2], [6, 6, 2]])
    assert metrics.longest_run(tokens).tolist() == [3, 2, 3]
    assert metrics.longest_run(tokens[:1]).tolist() == [1, 1, 1]
    assert metrics.longest_run(tokens[:0]).tolist() == [0, 0, 0]


def test_the_perplexity_of_a_fair_choice_among_n_is_n() -> None:
    # row 2: the geometric mean of 2 and 8 choices is 4
    chances = torch.tensor([[1.0, 1 / 10, 1 / 2], [1.0, 1 / 10, 1 / 8]])
    close(metrics.perplexity(chances.log()), [1, 10, 4])


def test_perplexity_refuses_probabilities() -> None:
    with pytest.raises(ValueError, match=r"at most 0, got 0\.3: apply log_softmax"):
        metrics.perplexity(torch.tensor([0.3, 0.1]))


def test_the_half_life_is_where_half_the_way_to_one_half_is_gone() -> None:
    # 0 → level 0.25: between 0.1 (t=1) and 0.4 (t=2), so 1 + 0.15/0.3 = 1.5
    # 0.1 → level 0.3: exactly at t=3
    # 0.3 → level 0.4: between 0.3 and 0.5 at t=1, so 0.5; that it recovers later is no matter
    ber = torch.tensor([[0, 0.1, 0.3], [0.1, 0.2, 0.5], [0.4, 0.2, 0.3], [0.5, 0.3, 0.3]])
    close(metrics.half_life(ber), [1.5, 3, 0.5])


@given(st.floats(1, 20))
@settings(max_examples=25, deadline=None)
def test_the_half_life_of_an_exponential_decay_is_its_own(life: float) -> None:
    # BER = ½(1 − 2^(−t/life)) has lost half at t = life; straight lines between steps err by < 0.1
    t = torch.arange(60, dtype=torch.float64)
    close(metrics.half_life((1 - 2 ** (-t / life)) / 2), life, atol=0.1)


def test_the_half_life_is_infinite_when_never_reached_and_undefined_with_nothing_to_lose() -> None:
    # column 0 stays below 0.25; 1 and 2 start at 0.5 and above; 3 has a hole before it gets there
    ber = torch.tensor([[0.0, 0.5, 0.6, 0.0], [0.2, 0.5, 0.5, math.nan], [0.2, 0.4, 0.5, 0.2]])
    ber = torch.cat([ber, torch.tensor([[0.24, 0.4, 0.5, 0.5]])])
    close(metrics.half_life(ber), [math.inf, math.nan, math.nan, math.nan])


def test_the_half_life_needs_a_step() -> None:
    with pytest.raises(ValueError, match="got no step"):
        metrics.half_life(torch.zeros(0, 3))


def test_the_interval_of_a_mean_covers_the_true_mean_about_as_often_as_it_says():
    draw = generator(1)
    values = torch.randn(400, 30, generator=draw, dtype=torch.float64) + 2.0
    interval = metrics.mean_interval(values, draw)
    assert 0.90 <= interval.contains(2.0).double().mean() <= 0.97
    assert ((interval.high - interval.low) > 0).all()
    single = metrics.mean_interval(torch.tensor([3.0]), draw)
    assert single.low == single.high == 3.0
