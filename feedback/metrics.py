"""Plain tensors in, numbers out: how many bits arrived, how surely, and how ordinary is the text?

Axes are named as everywhere (step, row, carrier, vocab); leading axes pass through, so one call
answers every step. Rows whose run was stopped as non-finite are excluded by ``valid`` (row), True
where the row counts; a share of no rows is NaN. Functions that give one number per row take no
mask, and NaN in a row stays NaN in that row's answer.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Interval:
    """Both ends of a confidence interval, of the same shape as the estimate they belong to."""

    low: Float[Tensor, "*axes"]
    high: Float[Tensor, "*axes"]

    def contains(self, value: float) -> Bool[Tensor, "*axes"]:
        """Where ``low <= value <= high``."""
        return (self.low <= value) & (value <= self.high)


def bit_errors(
    read: Bool[Tensor, "*axes row carrier"], sent: Bool[Tensor, "row carrier"]
) -> Bool[Tensor, "*axes row carrier"]:
    """True where the bit read is not the bit sent. ValueError unless row and carrier agree."""
    if read.shape[-2:] != sent.shape:
        raise ValueError(
            f"the bits read end in (row, carrier) = {tuple(read.shape[-2:])}, "
            f"the bits sent are {tuple(sent.shape)}: index both by the same rows"
        )
    return read != sent


def bit_error_rate(
    errors: Bool[Tensor, "*axes row carrier"], valid: Bool[Tensor, " row"] | None = None
) -> Float[Tensor, "*axes"]:
    """Share of wrong bits (BER) over valid rows and all carriers, float64; NaN for no valid row."""
    wrong, trials = _row_counts(errors, valid)
    return wrong.sum(-1) / trials.sum(-1)


def folded_ber(ber: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """min(BER, 1−BER): the BER of a reader that may flip every answer after seeing the truth.

    Below 0.5 by chance alone when nothing was read, so quote it beside the BER, not instead.
    """
    return torch.minimum(ber, 1 - ber)


def binary_entropy(p: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """h₂(p) = −p log₂ p − (1−p) log₂(1−p) in bits, 0 at both ends.

    ValueError for values outside [0, 1]; NaN stays NaN.
    """
    if ((p < 0) | (p > 1)).any():
        raise ValueError(f"a probability lies in [0, 1], got {p.min().item():g} to {p.max().item():g}")
    return (torch.special.entr(p) + torch.special.entr(1 - p)) / math.log(2)


def rate_bits(ber: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """1 − h₂(BER): bits per carrier and step through a binary symmetric channel with that BER.

    BER and 1−BER have the same rate: a reader that is always wrong tells as much as one that is
    always right. A frozen reader with BER above 0.5 needs its answers flipped to have it, so quote
    the BER beside the rate.
    """
    return 1 - binary_entropy(ber)


def hiddenness(text_ber: Float[Tensor, "*axes"], state_ber: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """BER of the text reader minus BER of the state reader.

    0.5: all bits are in the state and none in the text. 0: the text says as much as the state.
    """
    return text_ber - state_ber


def wilson(
    errors: int | Int[Tensor, "*axes"], trials: int | Int[Tensor, "*axes"], confidence: float = 0.95
) -> Interval:
    """Wilson's score interval for errors/trials, as if every trial were independent (Wilson 1927).

    No trials give [0, 1]. The ends at 0 errors and at only errors are exactly 0 and 1. ValueError
    unless 0 <= errors <= trials and 0 < confidence < 1.
    """
    k, n = torch.as_tensor(errors).double(), torch.as_tensor(trials).double()
    if ((k < 0) | (k > n)).any():
        raise ValueError("wilson needs 0 <= errors <= trials in every place")
    z = NormalDist().inv_cdf(1 - _tail(confidence))
    centre = k + z**2 / 2
    half = z * (k * (n - k) / n.clamp(min=1) + z**2 / 4).sqrt()
    low, high = (centre - half) / (n + z**2), (centre + half) / (n + z**2)
    return Interval(torch.where(k == 0, 0.0, low), torch.where(k == n, 1.0, high))


def cluster_bootstrap(
    errors: Bool[Tensor, "*axes row carrier"],
    clusters: Int[Tensor, " row"],
    generator: torch.Generator,
    *,
    valid: Bool[Tensor, " row"] | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Percentile interval of the BER when whole clusters (prompts) are drawn again with their rows.

    Rows of one prompt succeed and fail together, so they are not separate evidence. The same draws
    serve all leading axes, so curves over steps compare like with like. Degenerate, by
    construction, with one cluster or with no error: see :func:`ber_interval`. Narrow, as all such
    intervals, with few clusters. NaN when no row is valid. ValueError unless there is one cluster
    per row and at least one resample.
    """
    if clusters.shape != errors.shape[-2:-1] or resamples < 1:
        raise ValueError(
            f"expected one cluster for each of {errors.shape[-2]} rows and at least 1 resample, "
            f"got {tuple(clusters.shape)} and {resamples}"
        )
    wrong, trials = _row_counts(errors, valid)
    names, member = torch.unique(clusters, return_inverse=True)
    n = len(names)
    totals = torch.stack([wrong, trials.expand_as(wrong)])
    per_cluster = totals.new_zeros(*totals.shape[:-1], n).index_add_(-1, member.to(totals.device), totals)
    draws = torch.randint(n, (resamples, n), generator=generator, device=generator.device)
    weights = torch.zeros(resamples, n, dtype=torch.float64, device=generator.device)
    weights = weights.scatter_add_(1, draws, torch.ones_like(weights)).to(totals.device)
    drawn_wrong, drawn_trials = per_cluster @ weights.T
    tail = _tail(confidence)
    ends = torch.tensor([tail, 1 - tail], dtype=torch.float64, device=totals.device)
    low, high = torch.nanquantile(drawn_wrong / drawn_trials, ends, dim=-1)
    return Interval(low, high)


def ber_interval(
    errors: Bool[Tensor, "*axes row carrier"],
    clusters: Int[Tensor, " row"],
    generator: torch.Generator,
    *,
    valid: Bool[Tensor, " row"] | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """The interval to quote: on each side, the wider of Wilson's and the cluster bootstrap's.

    Wilson alone believes correlated rows; the bootstrap alone turns zero errors into certainty.
    No valid row gives [0, 1].
    """
    wrong, trials = _row_counts(errors, valid)
    total = trials.sum(-1).expand(wrong.shape[:-1])
    score = wilson(wrong.sum(-1).long(), total.long(), confidence)
    resampled = cluster_bootstrap(errors, clusters, generator, valid=valid, confidence=confidence, resamples=resamples)
    return Interval(torch.fmin(score.low, resampled.low), torch.fmax(score.high, resampled.high))


def mean_interval(
    values: Float[Tensor, "*axes row"],
    generator: torch.Generator,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Percentile bootstrap interval of the mean over rows, as if rows were independent; in float64.

    The same draws serve all leading axes. Narrow, as all such intervals, with few rows; a single
    row gives its own value twice.
    """
    draws = torch.randint(values.shape[-1], (resamples, values.shape[-1]), generator=generator)
    means = values.double().cpu()[..., draws].mean(-1)
    tail = _tail(confidence)
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=-1)
    return Interval(low, high)


def _row_counts(
    errors: Bool[Tensor, "*axes row carrier"], valid: Bool[Tensor, " row"] | None
) -> tuple[Float[Tensor, "*axes row"], Float[Tensor, " row"]]:
    n_rows, n_carriers = errors.shape[-2:]
    valid = _all_rows(valid, n_rows, errors.device)
    return (errors & valid[:, None]).sum(-1).double(), valid.double() * n_carriers


def _all_rows(valid: Tensor | None, n_rows: int, device: torch.device) -> Tensor:
    if valid is None:
        return torch.ones(n_rows, dtype=torch.bool, device=device)
    if valid.shape != (n_rows,):
        raise ValueError(f"valid is {tuple(valid.shape)}, expected one truth value for each of {n_rows} rows")
    return valid


def _tail(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is a probability strictly between 0 and 1, got {confidence}")
    return (1 - confidence) / 2


def entropy(logits: Float[Tensor, "*axes vocab"]) -> Float[Tensor, "*axes"]:
    """Entropy of softmax(logits) in nats: 0 if one-hot, log n if n are equal; −inf is p = 0."""
    return torch.special.entr(torch.softmax(_at_least_float32(logits), dim=-1)).sum(-1)


def kl(logits_p: Float[Tensor, "*axes vocab"], logits_q: Float[Tensor, "*axes vocab"]) -> Float[Tensor, "*axes"]:
    """KL(p‖q) in nats of p = softmax(logits_p) against q = softmax(logits_q).

    Summed as Σ [p log(p/q) − p + q], whose terms are all ≥ 0 (the two additions cancel over the
    vocabulary): rounding cannot make it negative, and near p = q, where p(eᵟ−1−δ) with δ = log(q/p)
    is used, the rounding of float32 logits enters squared. inf where p has mass and q has none.
    """
    log_p = torch.log_softmax(_at_least_float32(logits_p), dim=-1)
    log_q = torch.log_softmax(_at_least_float32(logits_q), dim=-1)
    p, q, delta = log_p.exp(), log_q.exp(), log_q - log_p
    terms = torch.where(delta.abs() < 1, p * (torch.expm1(delta) - delta), q - p - p * delta)
    return torch.where(p == 0, q, terms).clamp(min=0).sum(-1)


def pinsker(divergence: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """min(1, √(KL/2)), KL in nats: a bound on the total variation (Pinsker's inequality).

    No monitor of the text alone has a hit rate above its false-alarm rate by more. For a whole
    text give it the sum of KL over steps.
    """
    return (divergence / 2).sqrt().clamp(max=1)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def agreement(
    tokens: Int[Tensor, "*axes row"],
    reference: Int[Tensor, "*axes row"],
    over: int | tuple[int, ...] | None = None,
    valid: Bool[Tensor, " row"] | None = None,
) -> Float[Tensor, "..."]:
    """Share of tokens equal to the reference's over the axes ``over`` (None: all), float64.

    With tokens (step, row): ``over=0`` gives a share per row, ``over=1`` one per step. Only valid
    rows count; a share of none is NaN. ValueError when the shapes differ.
    """
    if tokens.shape != reference.shape:
        raise ValueError(
            f"tokens are {tuple(tokens.shape)} but the reference is {tuple(reference.shape)}: "
            "repeat the reference run once per row"
        )
    counted = _all_rows(valid, tokens.shape[-1], tokens.device)
    same = (tokens == reference).double().masked_fill(~counted, math.nan)
    return same.nanmean(dim=over)


def distinct_n(tokens: Int[Tensor, "step row"], n: int = 2) -> Float[Tensor, " row"]:
    """Different n-grams of a row's text over all its n-grams; 1 when none comes twice.

    Source: Li et al. 2016, arXiv 1510.03055. ValueError when the text is shorter than n.
    """
    if not 1 <= n <= len(tokens):
        raise ValueError(f"no {n}-grams in texts of {len(tokens)} tokens: n is 1 to {len(tokens)}")
    grams = tokens.unfold(0, n, 1).transpose(0, 1)
    shares = [len(torch.unique(row, dim=0)) / len(row) for row in grams]
    return torch.tensor(shares, dtype=torch.float64, device=tokens.device)


def longest_run(tokens: Int[Tensor, " step *axes"]) -> Int[Tensor, "*axes"]:
    """Length of the longest unbroken run of one token in each text; 0 for empty texts."""
    if len(tokens) == 0:
        return torch.zeros(tokens.shape[1:], dtype=torch.long, device=tokens.device)
    run = torch.ones_like(tokens[0])
    longest = run
    for before, now in pairwise(tokens):
        run = torch.where(now == before, run + 1, 1)
        longest = torch.maximum(longest, run)
    return longest


def perplexity(log_probabilities: Float[Tensor, " step *axes"]) -> Float[Tensor, "*axes"]:
    """exp(−mean over steps) of the emitted tokens' log-probabilities, in nats.

    They are those of whichever model judges the text. ValueError for values above 0.
    """
    if (log_probabilities > 1e-4).any():
        raise ValueError(
            f"log-probabilities are at most 0, got {log_probabilities.max().item():g}: apply log_softmax first"
        )
    return log_probabilities.double().mean(0).neg().exp()


def half_life(ber: Float[Tensor, " step *axes"]) -> Float[Tensor, "*axes"]:
    """Steps until half of what was readable at the end of the push is gone.

    ``ber[0]`` is the BER at the last pushed step, ``ber[t]`` the BER t steps later. Half gone is
    the level (ber[0] + 0.5)/2; the answer is the first time the curve, joined by straight lines,
    reaches that level, in steps. inf when it never does within the record, which shows only that
    the half-life exceeds ``len(ber) − 1`` steps. NaN where ber[0] >= 0.5 (nothing was there to
    lose) or where the curve has a NaN. ValueError for no step.
    """
    if len(ber) == 0:
        raise ValueError("half_life needs the BER at the end of the push at least, got no step")
    ber = ber.double()
    level = (ber[0] + 0.5) / 2
    reached = ber >= level
    after = reached.int().argmax(0, keepdim=True)  # the first step at or above the level
    high, low = ber.gather(0, after)[0], ber.gather(0, (after - 1).clamp(min=0))[0]
    time = after[0] - 1 + (level - low) / (high - low)
    time = torch.where(reached.any(0), time, math.inf)
    return torch.where((ber[0] >= 0.5) | ber.isnan().any(0), math.nan, time)
