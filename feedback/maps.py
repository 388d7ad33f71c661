"""How does an output become the next input? Feedback maps, as pure functions of one step's output.

Every map is built from plain numbers, checked when it is built, and then called at each step as
``map(logits, hidden, embedding, tokens, noise) -> (vector, diagnostics)``:

    logits    (row, vocab)      hidden  (row, d_model) after the final norm
    embedding (vocab, d_model)  E: what the embedding module returns for each id
    tokens    (row,)            the tokens just emitted: argmax, a sample or a forced cover text
    noise     RowNoise or None  only gumbel and noisy draw from it
    vector    (row, d_model)    the next soft token, in the dtype of E

A call never waits for the device and never writes in place; probabilities are computed in float32
or better, and gradients flow through whatever is differentiable. Below, p = softmax(z/τ).
"""

import hashlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding as rows_of

Number = float | int
Norm = Literal["keep", "embedding"]


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """What was fed, one number per row.

    Of a map that feeds no mixture (last_hidden, projected_hidden) they describe softmax(z) instead.
    """

    entropy: Float[Tensor, " row"]  # of the fed mixture, in nats
    top_probability: Float[Tensor, " row"]  # largest weight of the fed mixture
    kept_mass: Float[Tensor, " row"]  # mass of p that truncation kept; 1 where nothing is cut
    token_weight: Float[Tensor, " row"]  # weight of the emitted token in the fed mixture


Fed = tuple[Float[Tensor, "row d_model"], Diagnostics]
FeedbackMap = Callable[..., Fed]


@dataclass(frozen=True, eq=False)
class RowNoise:
    """Standard noise for the rows of one step.

    Row i gets line ids[i] of a block (n_ids, width) drawn from a generator seeded by (seed, step,
    stream), so its noise depends on seed, step and its id only: not on which other rows are in the
    batch or the chunk. The same call gives the same numbers again; another ``stream`` gives
    independent ones. Blocks on the CPU and on a GPU differ.
    """

    seed: int
    step: int
    ids: Int[Tensor, " row"]
    n_ids: int
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def normal(self, width: int, stream: str = "normal") -> Float[Tensor, "row width"]:
        """Standard normal draws in ``dtype``."""
        generator, shape = self._generator(stream), (self.n_ids, width)
        block = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        return block.index_select(0, self.ids)

    def gumbel(self, width: int, stream: str = "gumbel") -> Float[Tensor, "row width"]:
        """Standard Gumbel draws −log(Exp(1)), in float32 or better."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        block = torch.empty(self.n_ids, width, device=self.device, dtype=dtype)
        block.exponential_(generator=self._generator(stream))
        return -block.index_select(0, self.ids).clamp(min=torch.finfo(dtype).tiny).log()

    def _generator(self, stream: str) -> torch.Generator:
        # Hashed: a CPU generator reads the low 32 bits of its seed only.
        digest = hashlib.blake2b(f"{self.seed}/{self.step}/{stream}".encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))


class _RowLength:
    """Mean row length of E, (): measured once per matrix, a constant without gradient."""

    def __init__(self) -> None:
        self._of: Callable[[], Tensor | None] = lambda: None
        self._value: Tensor | None = None

    def __call__(self, embedding: Tensor) -> Tensor:
        if self._value is None or self._of() is not embedding:
            # A tensor made in inference mode could not take part in a later backward pass.
            with torch.inference_mode(False), torch.no_grad():
                wide = torch.promote_types(embedding.dtype, torch.float32)
                self._value = torch.linalg.vector_norm(embedding, dim=-1, dtype=wide).mean()
            self._of = weakref.ref(embedding)
        return self._value


@dataclass(frozen=True, eq=False)
class Turn:
    """One step's output, as a map's function sees it."""

    logits: Float[Tensor, "row vocab"]
    hidden: Float[Tensor, "row d_model"]
    embedding: Float[Tensor, "vocab d_model"]
    tokens: Int[Tensor, " row"]
    noise: RowNoise | None
    row_length: Callable[[Tensor], Tensor]  # of E: the mean length of its rows

    def p(self, tau: Number) -> Tensor:
        """softmax(z/τ), (row, vocab)."""
        return torch.softmax(self.z(tau), dim=-1)

    def z(self, tau: Number) -> Tensor:
        """z/τ, (row, vocab), in float32 or better."""
        z = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32))
        return z if tau == 1 else z / tau


@dataclass(frozen=True, eq=False)
class NamedMap:
    """A feedback map with its name and the numbers it was built from.

    A one-dimensional tensor among ``parameters`` holds one value per row.
    """

    name: str
    function: Callable[..., Fed] = field(repr=False)  # (Turn, **parameters)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    _row_length: _RowLength = field(default_factory=_RowLength, repr=False)

    def __call__(
        self,
        logits: Float[Tensor, "row vocab"],
        hidden: Float[Tensor, "row d_model"],
        embedding: Float[Tensor, "vocab d_model"],
        tokens: Int[Tensor, " row"],
        noise: RowNoise | None = None,
    ) -> tuple[Float[Tensor, "row d_model"], Diagnostics]:
        turn = Turn(logits, hidden, embedding, tokens, noise, self._row_length)
        return self.function(turn, **self.parameters)

    def rows(self, index: slice | Sequence[int] | Tensor) -> "NamedMap":
        """The same map for the rows that ``index`` picks: parameters per row are cut."""

        def cut(value: Any) -> Any:
            if isinstance(value, NamedMap):
                return value.rows(index)
            per_row = isinstance(value, Tensor) and value.dim() == 1
            return value[index] if per_row else value

        return replace(self, parameters={name: cut(value) for name, value in self.parameters.items()})


def top_token(logits: Float[Tensor, "*axes vocab"]) -> Int[Tensor, "*axes"]:
    """The argmax along the vocabulary, the first of equal ones, several times as fast as ``argmax`` on a CPU.

    The largest value of every block of the vocabulary is found by the vectorised ``amax``; only the winning block is
    searched for its position.
    """
    vocab = logits.shape[-1]
    width = next((w for w in (256, 128, 64, 32) if vocab % w == 0), None)
    if width is None:
        return logits.argmax(-1)
    blocks = logits.unflatten(-1, (-1, width))
    block = blocks.amax(-1).argmax(-1)
    place = block[..., None, None].expand(*block.shape, 1, width)
    return block * width + blocks.gather(-2, place).squeeze(-2).argmax(-1)


def expected_embedding(tau: Number = 1.0) -> NamedMap:
    """The plain soft token pE. At τ = 0 it is one_hot."""
    _check("expected_embedding", "tau", tau, 0 <= tau < math.inf, "a finite number, at least 0")
    return NamedMap("expected_embedding", _expected_embedding, {"tau": tau})


def _expected_embedding(turn: Turn, tau: Number) -> Fed:
    return _one_hot(turn) if tau == 0 else _softmax(turn, turn.z(tau))


def one_hot() -> NamedMap:
    """E[argmax z]: ordinary greedy decoding, the control."""
    return NamedMap("one_hot", _one_hot)


def _one_hot(turn: Turn) -> Fed:
    return _single(turn, top_token(turn.logits))


def top_k(k: int, tau: Number = 1.0) -> NamedMap:
    """The k most probable tokens of p, renormalised, times E (Soft Thinking).

    A k above the size of the vocabulary keeps all.
    """
    _check("top_k", "k", k, isinstance(k, int) and k >= 1, "a whole number, at least 1")
    _check_temperature("top_k", tau)
    return NamedMap("top_k", _top_k, {"k": k, "tau": tau})


def _top_k(turn: Turn, k: int, tau: Number) -> Fed:
    z = turn.z(tau)
    values, ids = z.topk(min(k, z.shape[-1]), dim=-1)
    # Where more than k tokens tie for the maximum, topk may leave the argmax out: put it last.
    argmax = top_token(z)[:, None]
    last = torch.where((ids == argmax).any(-1, keepdim=True), ids[:, -1:], argmax)
    ids = torch.cat([ids[:, :-1], last], dim=-1)
    weights = torch.softmax(values, dim=-1)
    picked = rows_of(ids, turn.embedding)
    vector = torch.einsum("rk,rkd->rd", weights.to(picked.dtype), picked)
    kept = torch.softmax(z, dim=-1).gather(-1, ids).sum(-1)
    token = (weights * (ids == turn.tokens[:, None])).sum(-1)
    return vector, Diagnostics(_entropy(weights), weights.amax(-1), kept, token)


def top_p(p: Number, tau: Number = 1.0) -> NamedMap:
    """The smallest set of most probable tokens with mass ``p``, renormalised, times E (nucleus).

    Tokens tied with its last one are kept too: the order of the vocabulary does not matter.
    """
    _check("top_p", "p", p, 0 < p <= 1, "in (0, 1]")
    _check_temperature("top_p", tau)
    return NamedMap("top_p", _top_p, {"p": p, "tau": tau})


def _top_p(turn: Turn, p: Number, tau: Number) -> Fed:
    full = turn.p(tau)
    if p == 1:
        return _mixture(turn, full)
    ordered = full.sort(dim=-1, descending=True).values
    n_kept = (ordered.cumsum(dim=-1) - ordered < p).sum(-1, keepdim=True)
    least = ordered.gather(-1, (n_kept - 1).clamp(min=0))  # none is kept of a row of NaN
    return _truncated(turn, full, full >= least)


def min_p(min_p: Number, tau: Number = 1.0) -> NamedMap:
    """The tokens with at least ``min_p`` times the largest probability, renormalised, times E."""
    _check("min_p", "min_p", min_p, 0 < min_p <= 1, "in (0, 1], relative to the largest probability")
    _check_temperature("min_p", tau)
    return NamedMap("min_p", _min_p, {"min_p": min_p, "tau": tau})


def _min_p(turn: Turn, min_p: Number, tau: Number) -> Fed:
    full = turn.p(tau)
    return _truncated(turn, full, full >= min_p * full.amax(-1, keepdim=True))


def gumbel(tau_g: Number, tau: Number = 1.0) -> NamedMap:
    """softmax((log p + g)/τ_g) E with standard Gumbel g (stochastic soft thinking).

    At τ_g = 0 it is the embedding of a sample from p.
    """
    _check("gumbel", "tau_g", tau_g, 0 <= tau_g < math.inf, "a finite number, at least 0")
    _check_temperature("gumbel", tau)
    return NamedMap("gumbel", _gumbel, {"tau_g": tau_g, "tau": tau})


def _gumbel(turn: Turn, tau_g: Number, tau: Number) -> Fed:
    z = turn.z(tau)  # log p up to a constant per row, which neither softmax nor argmax sees
    z = z + _drawn("gumbel", turn).gumbel(z.shape[-1]).to(z)
    if tau_g == 0:
        return _single(turn, z.argmax(dim=-1))
    return _softmax(turn, z / tau_g)


def noisy(inner: FeedbackMap, sigma: Number | Float[Tensor, " row"]) -> NamedMap:
    """inner + σ·n, n standard normal (Soft Tokens, Hard Truths).

    σ is in mean row lengths of E, per coordinate /√d_model: the added vector is about σ mean rows
    long. One number, or one per row; rows at 0 get the inner map's vector exactly. Diagnostics are
    the inner map's.
    """
    _check("noisy", "sigma", sigma, _all(sigma, lambda s: 0 <= s < math.inf), "finite, at least 0")
    name = f"noisy({getattr(inner, 'name', 'inner')})"
    return NamedMap(name, _noisy, {"inner": inner, "sigma": sigma})


def _noisy(turn: Turn, inner: FeedbackMap, sigma: Number | Tensor) -> Fed:
    vector, diagnostics = _call(inner, turn)
    if not isinstance(sigma, Tensor) and sigma == 0:
        return vector, diagnostics
    d_model = vector.shape[-1]
    noise = _drawn("noisy", turn).normal(d_model, stream="noisy").to(vector)
    scale = turn.row_length(turn.embedding).to(vector) / d_model**0.5
    return vector + _per_row("sigma", sigma, vector)[:, None] * scale * noise, diagnostics


def mixture_of_inputs(beta: Number, tau: Number = 1.0) -> NamedMap:
    """H̄·Σ[(p+βy)/(1+β)]E + (1−H̄)E_y with H̄ = H(p)/log n and y the emitted token (MoI).

    That is hard_mix with λ = H̄/(1+β).
    """
    _check("mixture_of_inputs", "beta", beta, 0 <= beta < math.inf, "a finite number, at least 0")
    _check_temperature("mixture_of_inputs", tau)
    return NamedMap("mixture_of_inputs", _mixture_of_inputs, {"beta": beta, "tau": tau})


def _mixture_of_inputs(turn: Turn, beta: Number, tau: Number) -> Fed:
    vector, diagnostics = _softmax(turn, turn.z(tau))
    lam = diagnostics.entropy / (math.log(turn.logits.shape[-1]) * (1 + beta))
    return _with_token(turn, lam, vector, diagnostics)


def hard_mix(inner: FeedbackMap, lam: Number | Float[Tensor, " row"]) -> NamedMap:
    """(1−λ)·E[y] + λ·inner, y the emitted token: the knob between text (λ = 0) and loop (λ = 1).

    λ is one number or one per row. The number 0 gives exactly E[y] without calling ``inner``.
    """
    _check("hard_mix", "lam", lam, _all(lam, lambda value: 0 <= value <= 1), "in [0, 1]")
    name = f"hard_mix({getattr(inner, 'name', 'inner')})"
    return NamedMap(name, _hard_mix, {"inner": inner, "lam": lam})


def _hard_mix(turn: Turn, inner: FeedbackMap, lam: Number | Tensor) -> Fed:
    if not isinstance(lam, Tensor) and lam == 0:
        return _single(turn, turn.tokens)
    vector, diagnostics = _call(inner, turn)
    return _with_token(turn, _per_row("lam", lam, diagnostics.entropy), vector, diagnostics)


def wired(
    inner: FeedbackMap, weights: Float[Tensor, "*trial cell source"], reference: Float[Tensor, " d_model"]
) -> NamedMap:
    """inner's vector plus Σ_j weights[i, j]·(vector of cell j − reference), among the cells of a trial; weights may
    differ from trial to trial.

    Rows are (trial cell), the cell fastest: a soft token is mixed into the next input of another row, with nothing read
    on the way. A cell whose vector is ``reference`` sends nothing. Needs all rows of a trial in one chunk.
    """
    return NamedMap("wired", _wired, {"inner": inner, "weights": weights, "reference": reference[None]})


def _wired(turn: Turn, inner: FeedbackMap, weights: Tensor, reference: Tensor) -> Fed:
    vector, fed = _call(inner, turn)
    return mixed(vector, weights, reference), fed


def mixed(
    vector: Float[Tensor, "row d_model"],
    weights: Float[Tensor, "*trial cell source"],
    reference: Float[Tensor, "*one d_model"],
) -> Float[Tensor, "row d_model"]:
    """What :func:`wired` makes of the vectors of all cells."""
    cells = vector.unflatten(0, (-1, weights.shape[-1])) - reference.to(vector)
    return vector + (weights.to(vector) @ cells).flatten(0, 1)


def last_hidden(norm: Norm = "keep") -> NamedMap:
    """The final hidden state itself (Coconut).

    norm: "keep" its length, or scale it to the mean row length of E ("embedding").
    """
    _check("last_hidden", "norm", norm, norm in ("keep", "embedding"), "keep or embedding")
    return NamedMap("last_hidden", _last_hidden, {"norm": norm})


def _last_hidden(turn: Turn, norm: Norm) -> Fed:
    return _scaled(turn, turn.hidden.to(turn.embedding), norm)


def projected_hidden(
    embedding: Float[Tensor, "vocab d_model"],
    unembedding: Float[Tensor, "vocab d_model"],
    epsilon: Number,
    norm: Norm = "keep",
) -> NamedMap:
    """hW with the ridge map W = (UᵀU + εI)⁻¹UᵀE from hidden states onto embeddings (LatentMAS).

    W is solved once, here, in float64; U is the unembedding matrix, a row per token. norm as in
    :func:`last_hidden`. ValueError when UᵀU + εI is singular.
    """
    name = "projected_hidden"
    _check(name, "epsilon", epsilon, 0 <= epsilon < math.inf, "a finite number, at least 0")
    _check(name, "norm", norm, norm in ("keep", "embedding"), "keep or embedding")
    width = unembedding.shape[-1]
    gram = torch.zeros(width, width, device=unembedding.device, dtype=torch.float64)
    cross = gram.new_zeros(width, embedding.shape[-1])
    with torch.no_grad():
        for u, e in zip(unembedding.split(8192), embedding.split(8192), strict=True):
            gram, cross = gram + u.double().mT @ u.double(), cross + u.double().mT @ e.double()
        ridge = gram + epsilon * torch.eye(width, device=gram.device, dtype=gram.dtype)
        solved, failed = torch.linalg.solve_ex(ridge, cross)
    if failed or not torch.isfinite(solved).all():
        raise ValueError(f"projected_hidden: UᵀU + {epsilon}·I is singular; give a larger epsilon")
    parameters = {"epsilon": epsilon, "norm": norm, "matrix": solved.to(embedding.dtype)}
    return NamedMap(name, _projected_hidden, parameters)


def _projected_hidden(turn: Turn, epsilon: Number, norm: Norm, matrix: Tensor) -> Fed:
    matrix = matrix.to(turn.embedding)
    return _scaled(turn, turn.hidden.to(matrix) @ matrix, norm)


def _softmax(turn: Turn, z: Tensor) -> Fed:
    """softmax(z) E, with the entropy from H = −log p_max − Σ p·(z − z_max): no logarithm over a whole vocabulary, and
    no difference of large numbers at low temperature."""
    weights = torch.softmax(z, dim=-1)
    top, token = weights.amax(-1), weights.gather(-1, turn.tokens[:, None].long()).squeeze(-1)
    below = (z - z.amax(-1, keepdim=True)).clamp(min=torch.finfo(z.dtype).min)  # a banned token has z = −∞
    entropy = -top.log() - (weights * below).sum(-1)
    described = Diagnostics(entropy.clamp(min=0), top, torch.ones_like(top), token)
    return weights.to(turn.embedding) @ turn.embedding, described


def _mixture(turn: Turn, weights: Tensor, kept_mass: Tensor | None = None) -> Fed:
    """weights (row, vocab), each row summing to 1, times E."""
    return weights.to(turn.embedding) @ turn.embedding, _described(turn, weights, kept_mass)


def _truncated(turn: Turn, full: Tensor, kept: Tensor) -> Fed:
    part = torch.where(kept, full, 0)
    mass = part.sum(-1, keepdim=True)
    return _mixture(turn, part / mass, mass.squeeze(-1))


def _single(turn: Turn, ids: Tensor) -> Fed:
    """E[ids], a mixture of one token."""
    ones = torch.ones_like(turn.logits[:, 0], dtype=torch.promote_types(turn.logits.dtype, torch.float32))
    token = (ids == turn.tokens).to(ones)
    return rows_of(ids, turn.embedding), Diagnostics(torch.zeros_like(ones), ones, ones, token)


def _with_token(turn: Turn, lam: Tensor, vector: Tensor, inner: Diagnostics) -> Fed:
    """(1−λ)E[y] + λ·vector, and the entropy and weights of (1−λ)δ_y + λw from those of w."""
    hard = rows_of(turn.tokens, turn.embedding)
    w = inner.token_weight
    token = 1 - lam + lam * w
    entropy = lam * (inner.entropy - _surprise(w)) + (1 - w) * _surprise(lam) + _surprise(token)
    top = torch.maximum(lam * inner.top_probability, token)
    kept = 1 - lam * (1 - inner.kept_mass)
    # lerp is exact at both ends, and where the two vectors are the same.
    return torch.lerp(hard, vector, lam[:, None].to(vector)), Diagnostics(entropy, top, kept, token)


def _scaled(turn: Turn, vector: Tensor, norm: Norm) -> Fed:
    if norm == "embedding":
        length = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        shortest = torch.finfo(vector.dtype).tiny
        vector = vector * (turn.row_length(turn.embedding).to(vector) / length.clamp(min=shortest))
    return vector, _described(turn, turn.p(1.0), None)


def _described(turn: Turn, weights: Tensor, kept_mass: Tensor | None) -> Diagnostics:
    top = weights.amax(-1)
    token = weights.gather(-1, turn.tokens[:, None].long()).squeeze(-1)
    kept = torch.ones_like(top) if kept_mass is None else kept_mass
    return Diagnostics(_entropy(weights), top, kept, token)


def _entropy(weights: Tensor) -> Tensor:
    """Of weights (row, …) along the last axis, in nats."""
    # Not a dot product: in float32 that loses 0.004 nats of log 49152.
    return _surprise(weights).sum(-1)


def _surprise(weights: Tensor) -> Tensor:
    """−w·log w: 0 at w = 0, and there with a finite gradient."""
    return -weights * weights.clamp(min=torch.finfo(weights.dtype).tiny).log()


def _call(inner: FeedbackMap, turn: Turn) -> Fed:
    return inner(turn.logits, turn.hidden, turn.embedding, turn.tokens, turn.noise)


def _per_row(name: str, value: Number | Tensor, like: Tensor) -> Tensor:
    """``value`` as (row,), in the dtype and on the device of ``like``."""
    n_rows = len(like)
    if not isinstance(value, Tensor):
        return like.new_full((n_rows,), value)
    if len(value) != n_rows:
        raise ValueError(
            f"{name} has one value for each of {len(value)} rows; the batch has {n_rows}: cut the map with .rows(index)"
        )
    # A blocking copy from the host would wait for the device.
    return value.to(like.device, like.dtype, non_blocking=True)


def _drawn(name: str, turn: Turn) -> RowNoise:
    if turn.noise is None:
        raise ValueError(f"{name} draws noise; expected a RowNoise as the fifth argument, got None")
    return turn.noise


def _all(value: Number | Tensor, holds: Callable[[Any], bool]) -> bool:
    return all(map(holds, value.tolist())) if isinstance(value, Tensor) else holds(value)


def _check_temperature(name: str, tau: Number) -> None:
    _check(name, "tau", tau, 0 < tau < math.inf, "finite and above 0 (at 0 use one_hot)")


def _check(name: str, parameter: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}: {parameter} is {value}; expected {expected}")
