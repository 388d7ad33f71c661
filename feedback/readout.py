"""State → bits: how is what a run carries read back out?

The readers are fitted on some messages or prompts, then frozen and asked about others. A state
reader sees vectors, a text reader only emitted tokens. The plain readouts (projection, mixture
coordinate, logit lens) are not fitted at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from scipy.sparse import csr_array
from torch import Tensor
from transformers import PreTrainedModel

from feedback.sites import lens

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2)  # in units of a row's mean squared length
Combine = Literal["concatenate", "mean"]


@dataclass(frozen=True)
class RidgeReader:
    """A linear reader of one state per row: (features − center) · weights + offset > 0 is a 1.

    Fitted by ridge regression of ±1 on centred features, with the one penalty for all carriers
    whose predictions of left-out rows have the least squared error. All of it comes from one
    eigendecomposition of the row × row Gram matrix (features outnumber rows), in float64.
    scikit-learn's RidgeCV is as fast and gives the same answer when single rows are left out, but
    it has no closed form for leaving out whole groups, and a refit per prompt and penalty is too
    slow for hundreds of readers a run.

    ``penalty`` is the chosen one, in units of a fitting row's mean squared length: the same number
    means as much at any width.
    """

    weights: Float[Tensor, "feature carrier"]
    center: Float[Tensor, " feature"]
    offset: Float[Tensor, " carrier"]
    penalty: float

    @classmethod
    def fit(
        cls,
        features: Float[Tensor, "row feature"],
        bits: Bool[Tensor, "row carrier"],
        groups: Int[Tensor, " row"] | None = None,
        *,
        penalties: Sequence[float] = PENALTIES,
        standardise: bool = True,
    ) -> "RidgeReader":
        """Fit on all rows given.

        ``groups``, the prompt of each row, makes the penalty the best one for unseen prompts: whole
        groups are left out instead of single rows. ``standardise`` divides every feature by its
        standard deviation over the fitting rows. A feature that is the same in all of them is
        ignored. ValueError for shapes that disagree, a carrier with one bit value only, non-finite
        features (naming the rows), a single group, or a penalty that is not positive.
        """
        _refuse_unfit(len(features), bits, groups, penalties)
        _refuse_non_finite(features)
        x = features.double()
        center = x.mean(0)
        varies = (x != x[0]).any(0)
        spread = (x - center).pow(2).mean(0).sqrt() if standardise else torch.ones_like(center)
        scale = torch.where(varies, 1 / spread, 0.0)
        scaled = (x - center) * scale
        dual, offset, penalty = _dual_ridge(scaled @ scaled.T, bits.to(x.device), groups, penalties)
        return cls((scaled * scale).T @ dual, center, offset, penalty)

    def scores(self, features: Float[Tensor, "*axes row feature"]) -> Float[Tensor, "*axes row carrier"]:
        """Signed scores, float64: near +1 for a clear 1, near −1 for a clear 0.

        NaN where a state is not finite. ValueError for another number of features.
        """
        if features.shape[-1] != len(self.center):
            raise ValueError(
                f"this reader was fitted on {len(self.center)} features, got {features.shape[-1]}: "
                "read the same site with the same window"
            )
        return (features.to(self.center) - self.center) @ self.weights + self.offset

    def read(
        self,
        features: Float[Tensor, "*axes row feature"],
        valid: Bool[Tensor, " row"] | None = None,
    ) -> Bool[Tensor, "*axes row carrier"]:
        """The bits. ValueError for non-finite features in a row that ``valid`` does not exclude.

        Excluded rows are read too, as whatever comes out: pass ``valid`` on to the metrics.
        """
        _refuse_non_finite(features, valid)
        return self.scores(features) > 0


@dataclass(frozen=True)
class StepReader:
    """A ridge reader for each step that looks back over the last ``window`` steps (fewer at first).

    >>> reader = StepReader.fit(hidden, bits, prompts, window=4)  # hidden (step, row, d_model)
    >>> reader.read(other_hidden)  # (step, other row, carrier)
    """

    readers: tuple[RidgeReader, ...]
    window: int
    combine: Combine

    @classmethod
    def fit(
        cls,
        features: Float[Tensor, "step row feature"],
        bits: Bool[Tensor, "row carrier"],
        groups: Int[Tensor, " row"] | None = None,
        *,
        window: int = 1,
        combine: Combine = "concatenate",
        penalties: Sequence[float] = PENALTIES,
        standardise: bool = True,
    ) -> "StepReader":
        """Fit each step by :meth:`RidgeReader.fit` on its window, concatenated or averaged."""
        if window < 1 or combine not in ("concatenate", "mean"):
            raise ValueError(f"window is at least 1 and combine is concatenate or mean, got {window} and {combine!r}")
        fit = partial(RidgeReader.fit, penalties=penalties, standardise=standardise)
        seen = (_look_back(features, step, window, combine) for step in range(len(features)))
        return cls(tuple(fit(last, bits, groups) for last in seen), window, combine)

    def scores(self, features: Float[Tensor, "step row feature"]) -> Float[Tensor, "step row carrier"]:
        """Signed scores of every step, each by that step's own reader."""
        if len(features) != len(self.readers):
            raise ValueError(f"fitted on {len(self.readers)} steps, got {len(features)}: give the same steps")
        return torch.stack(
            [
                reader.scores(_look_back(features, step, self.window, self.combine))
                for step, reader in enumerate(self.readers)
            ]
        )

    def read(
        self, features: Float[Tensor, "step row feature"], valid: Bool[Tensor, " row"] | None = None
    ) -> Bool[Tensor, "step row carrier"]:
        """The bits at every step; non-finite rows as in :meth:`RidgeReader.read`."""
        _refuse_non_finite(features, valid)
        return self.scores(features) > 0


@dataclass(frozen=True)
class TextReader:
    """A reader that sees emitted tokens only, by the same ridge regression as :class:`RidgeReader`.

    Its features are which token stands where, how often each token comes (the square root of the
    count, so that both kinds weigh the same), and, if it is informed, where the text differs from
    the α=0 run's. Tokens that never came in the fitting texts, and negative ones (none emitted),
    are ignored. If all fitting texts are the same, it answers each carrier's majority.

    It reads texts of the length it was fitted on. For the bits readable at every step, fit on
    prefixes:

    >>> readers = [TextReader.fit(text[:, : t + 1], bits, prompts) for t in range(text.shape[1])]
    """

    columns: Int[np.ndarray, " feature"]
    weights: Float[np.ndarray, "feature carrier"]
    offset: Float[np.ndarray, " carrier"]
    penalty: float
    n_steps: int
    informed: bool

    @classmethod
    def fit(
        cls,
        tokens: Int[Tensor, "row step"],
        bits: Bool[Tensor, "row carrier"],
        groups: Int[Tensor, " row"] | None = None,
        *,
        reference: Int[Tensor, "row step"] | None = None,
        penalties: Sequence[float] = PENALTIES,
    ) -> "TextReader":
        """Fit on texts; ``reference`` holds, for every row, the α=0 text of that row's prompt.

        ValueError as in :meth:`RidgeReader.fit`, and for empty texts.
        """
        _refuse_unfit(len(tokens), bits, groups, penalties)
        if tokens.shape[1] == 0:
            raise ValueError("a text reader needs at least one token per row, got texts of 0 steps")
        codes = _text_codes(tokens, reference)
        columns = np.unique(codes[codes >= 0])
        counts = _text_counts(codes, columns)
        varies = (counts.max(axis=0) != counts.min(axis=0)).toarray().ravel()
        columns, counts = columns[varies], counts[:, varies]
        gram = torch.from_numpy((counts @ counts.T).toarray())
        gram = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()
        dual, offset, penalty = _dual_ridge(gram, bits.cpu(), groups, penalties)
        weights = counts.T @ dual.numpy()
        at_zero = offset.numpy() - counts.mean(axis=0) @ weights
        return cls(columns, weights, at_zero, penalty, tokens.shape[1], reference is not None)

    def scores(
        self, tokens: Int[Tensor, "row step"], reference: Int[Tensor, "row step"] | None = None
    ) -> Float[Tensor, "row carrier"]:
        """Signed scores, float64. ValueError unless length and kind are those it was fitted on."""
        if tokens.shape[1] != self.n_steps or (reference is not None) != self.informed:
            given = "with" if reference is not None else "without"
            fitted = "with" if self.informed else "without"
            raise ValueError(
                f"fitted on {self.n_steps} steps {fitted} a reference, got {tokens.shape[1]} steps "
                f"{given} one: fit one reader for each length and kind"
            )
        counts = _text_counts(_text_codes(tokens, reference), self.columns)
        return torch.from_numpy(counts @ self.weights + self.offset).to(tokens.device)

    def read(
        self, tokens: Int[Tensor, "row step"], reference: Int[Tensor, "row step"] | None = None
    ) -> Bool[Tensor, "row carrier"]:
        """The bits."""
        return self.scores(tokens, reference) > 0


@dataclass(frozen=True)
class LensReading:
    """What a block would say: its likeliest tokens, likeliest first, and their probabilities."""

    tokens: Int[Tensor, "*axes top"]
    probabilities: Float[Tensor, "*axes top"]


@torch.no_grad()
def logit_lens(module: PreTrainedModel, hidden: Float[Tensor, "*axes d_model"], top: int = 5) -> LensReading:
    """The ``top`` likeliest tokens of softmax(unembed(final_norm(hidden))), for a block's output.

    At the last block these are the model's own probabilities. A lens that shows nothing proves
    nothing: fit a reader beside it. Source: nostalgebraist 2020. ValueError unless 1 <= top <=
    vocab.
    """
    logits = lens(module, hidden)
    if not 1 <= top <= logits.shape[-1]:
        raise ValueError(f"top {top} does not exist: this model has a vocabulary of {logits.shape[-1]}")
    probabilities, tokens = torch.softmax(logits.float(), dim=-1).topk(top)
    return LensReading(tokens, probabilities)


def project(states: Float[Tensor, "*axes d_model"], direction: Float[Tensor, " d_model"]) -> Float[Tensor, "*axes"]:
    """Signed length of the states along ``direction``, whose own length does not matter.

    ValueError for a direction of length zero, a non-finite one, or another width than the states.
    """
    length = direction.double().norm()
    if direction.shape != states.shape[-1:] or not 0 < length.item() < float("inf"):
        raise ValueError(
            f"expected a direction of width {states.shape[-1]} and of positive finite length, "
            f"got width {tuple(direction.shape)} and length {length.item():g}"
        )
    return states @ (direction.double() / length).to(states)


def mixture_coordinate(
    logits: Float[Tensor, "*axes vocab"], token_a: int, token_b: int, temperature: float = 1.0
) -> Float[Tensor, "*axes"]:
    """u = 2w − 1 in [−1, 1], with w = p_A/(p_A + p_B), at that temperature.

    p_X ∝ exp(z_X/τ), so w is the logistic function of (z_A − z_B)/τ and u = tanh((z_A − z_B)/(2τ)):
    the normalisation and all other tokens cancel. ValueError for one token twice, ids outside the
    vocabulary, or τ <= 0.
    """
    vocab = logits.shape[-1]
    if token_a == token_b or not (0 <= token_a < vocab and 0 <= token_b < vocab) or temperature <= 0:
        raise ValueError(
            f"expected two different tokens in 0–{vocab - 1} and a positive temperature, "
            f"got {token_a}, {token_b} and {temperature}"
        )
    pair = logits[..., [token_a, token_b]]
    z_a, z_b = pair.to(torch.promote_types(pair.dtype, torch.float32)).unbind(-1)
    return torch.tanh((z_a - z_b) / (2 * temperature))


def _dual_ridge(
    gram: Float[Tensor, "row row"],
    bits: Bool[Tensor, "row carrier"],
    groups: Int[Tensor, " row"] | None,
    penalties: Sequence[float],
) -> tuple[Float[Tensor, "row carrier"], Float[Tensor, " carrier"], float]:
    """Dual coefficients, mean target and best penalty, from the Gram matrix of centred features.

    With C = gram + λ·1 the fit leaves the residual r = λ C⁻¹(y − ȳ), and a fit without the rows g
    predicts them with the error (λ C⁻¹ − 1/n)_gg⁻¹ r_g, exactly (the 1/n is the intercept's).
    """
    n = len(gram)
    target = 2 * bits.to(gram) - 1
    offset = target.mean(0)
    unit = gram.trace() / n
    lam = torch.tensor(penalties).to(gram) * torch.where(unit > 0, unit, 1.0)
    eigenvalues, q = torch.linalg.eigh(gram)
    inverse = 1 / (eigenvalues.clamp(min=0) + lam[:, None])  # (penalty, row)
    dual = q @ (inverse[:, :, None] * (q.T @ (target - offset)))  # (penalty, row, carrier)
    residual = lam[:, None, None] * dual
    if groups is None:
        own = lam[:, None] * (inverse @ q.T.square()) - 1 / n
        loss = (residual / own[:, :, None]).square().sum((1, 2))
    else:
        loss = torch.zeros_like(lam)
        for group in torch.unique(groups):
            held = torch.nonzero(groups == group)[:, 0].to(gram.device)
            own = lam[:, None, None] * ((q[held] * inverse[:, None, :]) @ q[held].T) - 1 / n
            loss += torch.linalg.solve(own, residual[:, held]).square().sum((1, 2))
    best = int(loss.argmin())
    return dual[best], offset, float(penalties[best])


def _look_back(features: Tensor, step: int, window: int, combine: Combine) -> Tensor:
    last = features[max(0, step + 1 - window) : step + 1]
    if combine == "mean":
        return last.mean(0)
    return rearrange(last, "step row feature -> row (step feature)")


def _text_codes(tokens: Tensor, reference: Tensor | None) -> Int[np.ndarray, "row code"]:
    """A number for each token, token at its position, position that differs; −1 is nothing."""
    tokens = tokens.cpu().long()
    position = (torch.arange(tokens.shape[1]) + 1) << 32
    codes = [tokens, torch.where(tokens < 0, -1, tokens + position)]
    if reference is not None:
        if reference.shape != tokens.shape:
            raise ValueError(
                f"the reference is {tuple(reference.shape)}, the texts are {tuple(tokens.shape)}: "
                "repeat the α=0 text of each prompt once per row"
            )
        same = (tokens == reference.cpu()) | (tokens < 0)
        codes.append(torch.where(same, -1, position + (1 << 32) - 1))
    return torch.cat(codes, dim=1).numpy()


def _text_counts(codes: Int[np.ndarray, "row code"], columns: Int[np.ndarray, " feature"]) -> csr_array:
    """(row, feature): the square root of how often each code of ``columns`` (sorted) occurs."""
    row, place = np.nonzero(np.isin(codes, columns))
    column = np.searchsorted(columns, codes[row, place])
    shape = (len(codes), len(columns))
    return csr_array((np.ones(len(row)), (row, column)), shape=shape).sqrt()


def _refuse_unfit(n_rows: int, bits: Tensor, groups: Tensor | None, penalties: Sequence[float]) -> None:
    if len(bits) != n_rows or (groups is not None and groups.shape != (n_rows,)):
        given = "" if groups is None else f" and groups {tuple(groups.shape)}"
        raise ValueError(
            f"the features have {n_rows} rows, but bits are {tuple(bits.shape)}{given}: index all by the same rows"
        )
    single = bits.all(0) | ~bits.any(0)
    if single.any():
        carriers = torch.nonzero(single)[:, 0].tolist()
        raise ValueError(
            f"carriers {carriers} have the same bit in all {n_rows} fitting rows: add messages with the other bit"
        )
    if groups is not None and len(torch.unique(groups)) < 2:
        raise ValueError("groups names one group only, so none can be left out: pass groups=None")
    if len(penalties) == 0 or min(penalties) <= 0:
        raise ValueError(f"penalties are one or more positive numbers, got {list(penalties)}")


def _refuse_non_finite(features: Tensor, valid: Tensor | None = None) -> None:
    bad = ~features.isfinite().all(-1).reshape(-1, features.shape[-2]).all(0)
    if valid is not None:
        bad = bad & valid.to(bad.device)
    if bad.any():
        rows = torch.nonzero(bad)[:, 0].tolist()
        raise ValueError(f"features of rows {rows} are not finite: leave out the rows that were stopped")
