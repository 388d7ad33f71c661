"""Feedback maps: what each feeds back, exactly, on batches of three rows."""

import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from feedback import maps
from feedback.maps import RowNoise

VOCAB, D_MODEL = 11, 5
ROWS = 3


def example(dtype=torch.float32, vocab=VOCAB, d_model=D_MODEL, rows=ROWS):
    """Random (logits, hidden, embedding, tokens, noise)."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    tokens = torch.randint(vocab, (rows,), generator=generator)
    noise = RowNoise(seed=1, step=2, ids=torch.arange(rows), n_ids=rows, dtype=dtype)
    return 2 * normal(rows, vocab), normal(rows, d_model), normal(vocab, d_model), tokens, noise


def weights_fed(feedback_map, logits, tokens=None, noise=None):
    """The mixture that a map feeds, (row, vocab): with E the identity it is the vector itself."""
    tokens = torch.zeros(len(logits), dtype=torch.long) if tokens is None else tokens
    vocab = logits.shape[-1]
    hidden = torch.zeros(len(logits), vocab)
    return feedback_map(logits, hidden, torch.eye(vocab, dtype=logits.dtype), tokens, noise)


# p = 1/2, 1/4, 1/8, 1/8, in three orders
HALVES = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.125, 0.25], [0.25, 0.125, 0.125, 0.5]])
ORDER = torch.tensor([[0, 1, 2, 3], [1, 3, 0, 2], [3, 0, 1, 2]])  # columns of HALVES by probability


def in_order(values):
    """(4,) by falling probability → (row, vocab) in the columns of HALVES."""
    return torch.zeros(3, 4).scatter(1, ORDER, torch.tensor(values).expand(3, 4))


def every_map(embedding):
    """One of each, by name, with parameters off their special values."""
    lam = torch.tensor([0.0, 0.4, 1.0])
    made = [
        maps.expected_embedding(0.7),
        maps.one_hot(),
        maps.top_k(3, 0.7),
        maps.top_p(0.8, 0.7),
        maps.min_p(0.1, 0.7),
        maps.gumbel(0.5, 0.7),
        maps.noisy(maps.top_k(3), 0.1),
        maps.noisy(maps.expected_embedding(), torch.tensor([0.0, 0.1, 0.2])),
        maps.mixture_of_inputs(1.5, 0.7),
        maps.hard_mix(maps.expected_embedding(0.7), 0.3),
        maps.hard_mix(maps.top_k(3), lam),
        maps.hard_mix(maps.one_hot(), 0),
        maps.last_hidden("keep"),
        maps.last_hidden("embedding"),
        maps.projected_hidden(embedding, embedding.flip(0), 0.1, "embedding"),
    ]
    return {f"{number}-{made.name}": made for number, made in enumerate(made)}


NAMES = list(every_map(torch.eye(VOCAB, D_MODEL)))


def test_expected_embedding_is_the_mean_of_the_rows_of_e_under_softmax():
    logits, hidden, embedding, tokens, _ = example()
    vector, diagnostics = maps.expected_embedding(0.5)(logits, hidden, embedding, tokens)
    p = torch.softmax(logits / 0.5, -1)
    expected = torch.stack([sum(p[r, i] * embedding[i] for i in range(VOCAB)) for r in range(ROWS)])
    torch.testing.assert_close(vector, expected)
    torch.testing.assert_close(diagnostics.top_probability, p.max(-1).values)
    torch.testing.assert_close(diagnostics.token_weight, p[torch.arange(ROWS), tokens])
    torch.testing.assert_close(diagnostics.kept_mass, torch.ones(ROWS))


def test_entropy_is_in_nats():
    # ½·ln 2 + ¼·ln 4 + 2·⅛·ln 8 = (½ + ½ + ¾)·ln 2 = 1.75·ln 2
    _, diagnostics = weights_fed(maps.expected_embedding(), HALVES.log())
    torch.testing.assert_close(diagnostics.entropy, torch.full((3,), 1.75 * math.log(2)))


def test_the_entropy_of_a_uniform_mixture_is_log_n():
    n = 49152
    inputs = torch.full((3, n), 7.0), torch.zeros(3, 2), torch.ones(n, 2), torch.tensor([0, 1, 2])
    _, diagnostics = maps.expected_embedding(0.3)(*inputs)
    torch.testing.assert_close(diagnostics.entropy, torch.full((3,), math.log(n)))


@pytest.mark.parametrize(
    "feedback_map",
    [
        maps.expected_embedding(),
        maps.top_k(4),
        maps.top_p(0.9),
        maps.min_p(0.01),
        maps.gumbel(0.01),
        maps.hard_mix(maps.expected_embedding(), 0.3),
        maps.mixture_of_inputs(1.0),
    ],
    ids=lambda m: m.name,
)
def test_a_one_hot_p_gives_exactly_a_row_of_e(feedback_map):
    _, hidden, embedding, _, noise = example()
    certain = torch.tensor([7, 0, 10])
    logits = torch.zeros(ROWS, VOCAB).scatter(1, certain[:, None], 500.0)
    vector, diagnostics = feedback_map(logits, hidden, embedding, certain, noise)
    assert torch.equal(vector, embedding[certain])
    torch.testing.assert_close(diagnostics.entropy, torch.zeros(ROWS), atol=1e-6, rtol=0)
    torch.testing.assert_close(diagnostics.top_probability, torch.ones(ROWS))
    torch.testing.assert_close(diagnostics.token_weight, torch.ones(ROWS))


@pytest.mark.parametrize("tau", [0, 1e-6])
def test_expected_embedding_at_vanishing_temperature_is_one_hot(tau):
    inputs = example()
    cold, hard = maps.expected_embedding(tau)(*inputs), maps.one_hot()(*inputs)
    assert torch.equal(cold[0], hard[0])
    assert torch.equal(hard[0], inputs[2][inputs[0].argmax(-1)])
    for name in ("entropy", "top_probability", "kept_mass", "token_weight"):
        torch.testing.assert_close(getattr(cold[1], name), getattr(hard[1], name))


# kept of p = 1/2, 1/4, 1/8, 1/8:   top 2 → 2/3, 1/3 of mass 3/4;
# mass 0.8 needs the third, tied with the fourth;   mass 0.45 is held by the first alone;
# at least 0.4 × ½ → the first two.
@pytest.mark.parametrize(
    ("feedback_map", "expected", "mass"),
    [
        (maps.top_k(1), [1.0, 0, 0, 0], 0.5),
        (maps.top_k(2), [2 / 3, 1 / 3, 0, 0], 0.75),
        (maps.top_k(9), [0.5, 0.25, 0.125, 0.125], 1.0),
        (maps.top_p(0.45), [1.0, 0, 0, 0], 0.5),
        (maps.top_p(0.7), [2 / 3, 1 / 3, 0, 0], 0.75),
        (maps.top_p(0.8), [0.5, 0.25, 0.125, 0.125], 1.0),
        (maps.top_p(1), [0.5, 0.25, 0.125, 0.125], 1.0),
        (maps.min_p(1), [1.0, 0, 0, 0], 0.5),
        (maps.min_p(0.4), [2 / 3, 1 / 3, 0, 0], 0.75),
        (maps.min_p(0.01), [0.5, 0.25, 0.125, 0.125], 1.0),
    ],
)
def test_truncations_keep_the_most_probable_and_renormalise(feedback_map, expected, mass):
    tokens = ORDER[:, 1]
    vector, diagnostics = weights_fed(feedback_map, HALVES.log() - 3.0, tokens)
    torch.testing.assert_close(vector, in_order(expected))
    entropy = -sum(w * math.log(w) for w in expected if w)
    torch.testing.assert_close(diagnostics.kept_mass, torch.full((3,), mass))
    torch.testing.assert_close(diagnostics.entropy, torch.full((3,), entropy))
    torch.testing.assert_close(diagnostics.top_probability, torch.full((3,), float(expected[0])))
    torch.testing.assert_close(diagnostics.token_weight, torch.full((3,), float(expected[1])))


@pytest.mark.parametrize("feedback_map", [maps.top_k(2), maps.top_p(0.1), maps.min_p(1)])
def test_truncation_keeps_the_argmax_even_among_ties(feedback_map):
    logits = torch.tensor([0.0, 5, 5, 5, 5, 5, -1]).repeat(3, 1).roll(1, 0)
    logits = torch.stack([logits[0], logits[1].roll(1), logits[2].roll(2)])
    vector, _ = weights_fed(feedback_map, logits)
    assert (vector[torch.arange(3), logits.argmax(-1)] > 0).all()
    torch.testing.assert_close(vector.sum(-1), torch.ones(3))


@pytest.mark.parametrize("tau", [1.0, 0.1, 0.001])
def test_entropy_stays_exact_when_logits_are_large_against_the_temperature(tau):
    logits = 15 + 4 * torch.randn(3, 20000, generator=torch.Generator().manual_seed(0))
    inputs = logits, torch.zeros(3, 2), torch.ones(20000, 2), torch.tensor([0, 1, 2])
    _, diagnostics = maps.expected_embedding(tau)(*inputs)
    exact = torch.special.entr(torch.softmax(logits.double() / tau, -1)).sum(-1)
    torch.testing.assert_close(diagnostics.entropy.double(), exact, atol=5e-5, rtol=0)


# with mass 0.9 or a fifth of the maximum, τ = 1 would keep all four
@pytest.mark.parametrize(
    "feedback_map", [maps.top_k(2, tau=0.5), maps.top_p(0.9, tau=0.5), maps.min_p(0.2, tau=0.5)], ids=lambda m: m.name
)
def test_temperature_acts_before_truncation(feedback_map):
    # τ = ½ squares p: 1/4, 1/16, 1/64, 1/64 of 11/32 in all; the top two are 8/11 and 2/11
    vector, diagnostics = weights_fed(feedback_map, HALVES.log())
    torch.testing.assert_close(vector, in_order([0.8, 0.2, 0.0, 0.0]))
    torch.testing.assert_close(diagnostics.kept_mass, torch.full((3,), 10 / 11))


def test_gumbel_at_zero_temperature_samples_from_softmax():
    n = 6000
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = RowNoise(seed=5, step=1, ids=torch.arange(n), n_ids=n)
    # logits 0.5·log p at τ = 0.5 are p again
    vector, _ = weights_fed(maps.gumbel(0, tau=0.5), (0.5 * p.log()).repeat(n, 1), noise=noise)
    assert set(vector.unique().tolist()) == {0.0, 1.0}
    deviation = (vector.mean(0) - p) / (p * (1 - p) / n).sqrt()
    assert deviation.abs().max() < 4  # standard errors


def test_gumbel_mixture_approaches_its_own_sample_as_it_cools():
    logits, hidden, embedding, tokens, noise = example()
    sample, _ = maps.gumbel(0)(logits, hidden, embedding, tokens, noise)
    cold, _ = maps.gumbel(1e-4)(logits, hidden, embedding, tokens, noise)
    warm, diagnostics = maps.gumbel(1.0)(logits, hidden, embedding, tokens, noise)
    torch.testing.assert_close(cold, sample)
    assert not torch.allclose(warm, sample)
    perturbed = torch.softmax(logits.log_softmax(-1) + noise.gumbel(VOCAB), -1)
    torch.testing.assert_close(warm, perturbed @ embedding)
    torch.testing.assert_close(diagnostics.top_probability, perturbed.max(-1).values)


def test_mixture_of_inputs_is_its_formula():
    logits, hidden, embedding, tokens, _ = example()
    vector, diagnostics = maps.mixture_of_inputs(beta=1.5, tau=0.7)(logits, hidden, embedding, tokens)
    p = torch.softmax(logits / 0.7, -1)
    y = torch.nn.functional.one_hot(tokens, VOCAB).float()
    h = torch.special.entr(p).sum(-1, keepdim=True) / math.log(VOCAB)
    weights = h * (p + 1.5 * y) / 2.5 + (1 - h) * y
    torch.testing.assert_close(vector, weights @ embedding)
    torch.testing.assert_close(diagnostics.entropy, torch.special.entr(weights).sum(-1))
    torch.testing.assert_close(diagnostics.top_probability, weights.max(-1).values)


def test_hard_mix_at_zero_is_the_emitted_token_and_never_calls_the_inner_map():
    def inner(*_):
        raise AssertionError("the inner map was called")

    logits, hidden, embedding, tokens, _ = example()
    vector, diagnostics = maps.hard_mix(inner, 0.0)(logits, hidden, embedding, tokens)
    assert torch.equal(vector, embedding[tokens])
    assert torch.equal(diagnostics.entropy, torch.zeros(ROWS))
    assert torch.equal(diagnostics.token_weight, torch.ones(ROWS))


def test_hard_mix_takes_a_share_per_row():
    logits, hidden, embedding, tokens, _ = example()
    inner = maps.top_k(4)
    soft, _ = inner(logits, hidden, embedding, tokens)
    lam = torch.tensor([0.0, 0.25, 1.0])
    vector, _ = maps.hard_mix(inner, lam)(logits, hidden, embedding, tokens)
    assert torch.equal(vector[0], embedding[tokens[0]])
    torch.testing.assert_close(vector[1], 0.75 * embedding[tokens[1]] + 0.25 * soft[1])
    assert torch.equal(vector[2], soft[2])


@pytest.mark.parametrize("lam", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("inner", [maps.top_k(3), maps.expected_embedding()], ids=lambda m: m.name)
def test_hard_mix_describes_the_mixture_it_feeds(inner, lam):
    logits = example()[0]
    best = logits.argmax(-1)
    tokens = torch.stack([best[0], logits[1].argmin(), logits[2].topk(2).indices[1]])  # in, out, between
    weights, diagnostics = weights_fed(maps.hard_mix(inner, lam), logits, tokens)
    inner_mass = weights_fed(inner, logits)[1].kept_mass
    torch.testing.assert_close(diagnostics.entropy, torch.special.entr(weights).sum(-1))
    torch.testing.assert_close(diagnostics.top_probability, weights.max(-1).values)
    torch.testing.assert_close(diagnostics.token_weight, weights[torch.arange(ROWS), tokens])
    torch.testing.assert_close(diagnostics.kept_mass, 1 - lam * (1 - inner_mass))


def test_last_hidden_keeps_its_length_or_takes_that_of_a_mean_row():
    # rows of E are 3 and 5 long, 4 on average; h is 10, 1 and 4 long
    embedding = torch.tensor([[3.0, 0.0], [3.0, 4.0]])
    hidden = torch.tensor([[6.0, 8.0], [0.0, 1.0], [-4.0, 0.0]])
    inputs = torch.zeros(3, 2), hidden, embedding, torch.zeros(3, dtype=torch.long)
    kept, diagnostics = maps.last_hidden("keep")(*inputs)
    assert torch.equal(kept, hidden)
    scaled, _ = maps.last_hidden("embedding")(*inputs)
    torch.testing.assert_close(scaled, torch.tensor([[2.4, 3.2], [0.0, 4.0], [-4.0, 0.0]]))
    torch.testing.assert_close(diagnostics.entropy, torch.full((3,), math.log(2)))  # of softmax(z)


def test_projected_hidden_is_the_ridge_map_from_unembedding_to_embedding():
    _, hidden, embedding, tokens, _ = example()
    unembedding = torch.randn(VOCAB, D_MODEL, generator=torch.Generator().manual_seed(8))
    vector, _ = maps.projected_hidden(embedding, unembedding, 0.5)(torch.zeros(ROWS, VOCAB), hidden, embedding, tokens)
    # ridge as least squares: rows √ε·I with target 0 below U
    stacked = torch.cat([unembedding, math.sqrt(0.5) * torch.eye(D_MODEL)])
    target = torch.cat([embedding, torch.zeros(D_MODEL, D_MODEL)])
    torch.testing.assert_close(vector, hidden @ torch.linalg.lstsq(stacked, target).solution)


def test_projected_hidden_of_tied_embeddings_is_the_identity():
    logits, hidden, embedding, tokens, _ = example()
    tied = maps.projected_hidden(embedding, embedding, 0)
    torch.testing.assert_close(tied(logits, hidden, embedding, tokens)[0], hidden)
    lengths = maps.projected_hidden(embedding, embedding, 0, "embedding")(logits, hidden, embedding, tokens)[0]
    torch.testing.assert_close(lengths.norm(dim=-1), embedding.norm(dim=-1).mean().expand(ROWS))


def test_projected_hidden_refuses_a_singular_unembedding():
    with pytest.raises(ValueError, match=r"projected_hidden: UᵀU \+ 0·I is singular; give a larger epsilon"):
        maps.projected_hidden(torch.ones(6, 4), torch.zeros(6, 4), 0)


def test_noise_is_as_long_as_sigma_mean_rows():
    # 400 rows of width 256 at σ = 0.5: mean squared length (0.5 · mean row)²,
    # four standard errors are 4·√(2/102400) = 1.8 %
    generator = torch.Generator().manual_seed(0)
    embedding = 3 * torch.randn(VOCAB, 256, generator=generator)
    rows = 400
    inputs = (
        torch.zeros(rows, VOCAB),
        torch.zeros(rows, 256),
        embedding,
        torch.zeros(rows, dtype=torch.long),
    )
    noise = RowNoise(seed=0, step=1, ids=torch.arange(rows), n_ids=rows)
    inner = maps.expected_embedding()
    added = maps.noisy(inner, 0.5)(*inputs, noise)[0] - inner(*inputs, noise)[0]
    mean_row = embedding.norm(dim=-1).mean()
    ratio = added.square().sum(-1).mean() / (0.5 * mean_row) ** 2
    assert abs(ratio - 1) < 0.018


def test_rows_at_sigma_zero_get_the_inner_vector_exactly():
    logits, hidden, embedding, tokens, noise = example()
    inner, _ = maps.expected_embedding()(logits, hidden, embedding, tokens)
    sigma = torch.tensor([0.0, 0.1, 0.0])
    vector, _ = maps.noisy(maps.expected_embedding(), sigma)(logits, hidden, embedding, tokens, noise)
    assert torch.equal(vector[[0, 2]], inner[[0, 2]])
    assert (vector[1] != inner[1]).all()
    silent, _ = maps.noisy(maps.expected_embedding(), 0)(logits, hidden, embedding, tokens, None)
    assert torch.equal(silent, inner)


@pytest.mark.parametrize("draw", ["normal", "gumbel"])
def test_the_noise_of_a_row_depends_on_its_id_only(draw):
    def noise(ids, seed=1, step=2):
        return getattr(RowNoise(seed, step, torch.tensor(ids), n_ids=6), draw)(50)

    whole = noise([0, 1, 2, 3, 4, 5])
    assert torch.equal(noise([4, 1, 4]), whole[[4, 1, 4]])
    assert torch.equal(noise([3]), whole[[3]])
    for other in (noise([0], step=3), noise([0], seed=2), whole[[1]]):
        assert (other != whole[[0]]).float().mean() > 0.9


def test_seeds_that_agree_in_their_low_bits_draw_different_noise():
    # a CPU generator ignores the high 32 bits of its seed
    ids = torch.arange(3)
    low, high = RowNoise(1, 1, ids, 3).normal(8), RowNoise(1 + 2**32, 1, ids, 3).normal(8)
    assert (low != high).all()


def test_noise_has_the_moments_of_its_distribution():
    noise = RowNoise(0, 0, torch.arange(3), 3)
    normal, gumbel = noise.normal(40000), noise.gumbel(40000)
    # Gumbel: mean 0.5772 (Euler's constant), variance π²/6; standard errors below 0.0065 and 0.02
    torch.testing.assert_close(normal.mean(-1), torch.zeros(3), atol=0.025, rtol=0)
    torch.testing.assert_close(normal.var(-1), torch.ones(3), atol=0.04, rtol=0)
    torch.testing.assert_close(gumbel.mean(-1), torch.full((3,), 0.5772), atol=0.03, rtol=0)
    torch.testing.assert_close(gumbel.var(-1), torch.full((3,), math.pi**2 / 6), atol=0.09, rtol=0)


class Operations(TorchDispatchMode):
    """Counts the operations that run, and keeps the shapes that each read."""

    def __init__(self):
        super().__init__()
        self.count: Counter[str] = Counter()
        self.read: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count[name] += 1
        self.read.append((name, [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


def test_the_watcher_sees_a_wait_for_the_device():
    with Operations() as operations:
        bool(torch.ones(()) > 0)
        torch.ones(3)[torch.tensor([True, False, True])]
    assert operations.count["_local_scalar_dense"] == 1
    assert operations.count["index"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_call_never_waits_for_the_device(name):
    inputs = example()
    feedback_map = every_map(inputs[2])[name]
    for _ in range(2):
        with Operations() as operations:
            feedback_map(*inputs)
        waits = {
            "_local_scalar_dense",
            "nonzero",
            "index",
            "masked_select",
            "unique_dim",
            "_unique2",
            "equal",
        }
        assert not waits & set(operations.count)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_changes_nothing_and_repeats(name):
    inputs = example()
    feedback_map = every_map(inputs[2])[name]
    before = [value.clone() for value in inputs[:4]]
    first, second = feedback_map(*inputs), feedback_map(*inputs)
    assert all(torch.equal(value, old) for value, old in zip(inputs[:4], before, strict=True))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1].entropy, second[1].entropy)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_fed_the_same_in_every_batch(name):
    logits, hidden, embedding, tokens, noise = example()
    feedback_map = every_map(embedding)[name]
    whole, described = feedback_map(logits, hidden, embedding, tokens, noise)
    pick = torch.tensor([2, 0])
    part_noise = RowNoise(noise.seed, noise.step, pick, n_ids=ROWS)
    part, part_described = feedback_map.rows(pick)(logits[pick], hidden[pick], embedding, tokens[pick], part_noise)
    torch.testing.assert_close(part, whole[pick])
    torch.testing.assert_close(part_described.entropy, described.entropy[pick])


@pytest.mark.parametrize("name", [n for n in NAMES if "one_hot" not in n])
def test_vectors_are_differentiable(name):
    logits, hidden, embedding, tokens, noise = example(torch.float64)
    logits, hidden = logits.requires_grad_(), hidden.requires_grad_()
    feedback_map = every_map(embedding)[name]

    def outputs(z, h):
        vector, d = feedback_map(z, h, embedding, tokens, noise)
        return vector, d.entropy, d.top_probability, d.kept_mass

    assert any(value.requires_grad for value in outputs(logits, hidden))
    assert torch.autograd.gradcheck(outputs, (logits, hidden), fast_mode=True)


@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")  # torch's own, in its jvp
@pytest.mark.parametrize("name", NAMES)
def test_jacobian_vector_products_go_forward_and_backward(name):
    logits, hidden, embedding, tokens, noise = example(torch.float64)
    feedback_map = every_map(embedding)[name]

    def vector(z, h):
        return feedback_map(z, h, embedding, tokens, noise)[0]

    tangents = torch.ones_like(logits), torch.ones_like(hidden)
    _, forward = torch.func.jvp(vector, (logits, hidden), tangents)
    _, backward = torch.autograd.functional.jvp(vector, (logits, hidden), tangents)
    torch.testing.assert_close(forward, backward)


def test_the_gradient_of_the_entropy_survives_probabilities_that_vanish():
    logits = torch.tensor([[0.0, -1.0, -500.0]] * 3, requires_grad=True)
    for feedback_map in (
        maps.expected_embedding(),
        maps.top_k(2),
        maps.hard_mix(maps.top_k(1), 0.5),
    ):
        _, diagnostics = weights_fed(feedback_map, logits, torch.tensor([0, 1, 2]))
        (gradient,) = torch.autograd.grad(diagnostics.entropy.sum(), logits)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    "feedback_map", [maps.expected_embedding(0.5), maps.top_k(3), maps.top_p(0.9), maps.min_p(0.1)]
)
def test_banned_tokens_are_never_fed(feedback_map):
    logits = torch.tensor([[1.0, 2.0, -math.inf, 0.0]] * 3)
    vector, diagnostics = weights_fed(feedback_map, logits)
    assert torch.equal(vector[:, 2], torch.zeros(3))
    assert torch.isfinite(vector).all()
    assert torch.isfinite(diagnostics.entropy).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_broke_leaves_the_others_alone(name):
    logits, hidden, embedding, tokens, noise = example()
    feedback_map = every_map(embedding)[name]
    whole, _ = feedback_map(logits, hidden, embedding, tokens, noise)
    logits, hidden = logits.clone(), hidden.clone()
    logits[1], hidden[1] = math.nan, math.nan
    vector, _ = feedback_map(logits, hidden, embedding, tokens, noise)
    assert torch.equal(vector[[0, 2]], whole[[0, 2]])


def test_top_k_reads_only_the_rows_it_keeps():
    inputs = example(vocab=400, d_model=8)
    with Operations() as operations:
        maps.top_k(5)(*inputs)
    heavy = [shapes for name, shapes in operations.read if name in ("mm", "bmm")]
    assert len(heavy) == 1  # the weighted sum of five rows; E itself is in no product
    assert not any(400 in shape for shapes in heavy for shape in shapes)


@pytest.mark.parametrize("make", [lambda: maps.noisy(maps.one_hot(), 0.1), lambda: maps.last_hidden("embedding")])
def test_the_mean_row_length_is_measured_once_per_matrix(make):
    logits, hidden, embedding, tokens, noise = example()
    feedback_map = make()

    def measured(matrix):
        with Operations() as operations:
            feedback_map(logits, hidden, matrix, tokens, noise)
        read = [shapes[0] for name, shapes in operations.read if name == "linalg_vector_norm"]
        return read.count(tuple(embedding.shape))

    assert [measured(embedding), measured(embedding)] == [1, 0]
    longer = 2 * embedding
    assert [measured(longer), measured(longer)] == [1, 0]
    torch.testing.assert_close(
        maps.last_hidden("embedding")(logits, hidden, longer, tokens)[0].norm(dim=-1),
        longer.norm(dim=-1).mean().expand(ROWS),
    )


def test_a_map_first_used_in_inference_mode_still_differentiates():
    logits, hidden, embedding, tokens, _ = example()
    feedback_map = maps.last_hidden("embedding")
    with torch.inference_mode():
        feedback_map(logits, hidden, embedding, tokens)
    hidden = hidden.clone().requires_grad_()
    vector, _ = feedback_map(logits, hidden, embedding, tokens)
    assert torch.isfinite(torch.autograd.grad(vector[:, 0].sum(), hidden)[0]).all()


def test_the_ridge_matrix_is_not_solved_again_at_a_step():
    inputs = example()
    feedback_map = maps.projected_hidden(inputs[2], inputs[2], 0.1)
    with Operations() as operations:
        feedback_map(*inputs)
    assert not any("solve" in name for name in operations.count)
    assert operations.count["mm"] == 1


def test_half_precision_logits_are_weighted_in_float32():
    logits, hidden, embedding, tokens, _ = example()
    low = logits.bfloat16()
    vector, diagnostics = maps.expected_embedding(0.3)(low, hidden.bfloat16(), embedding.bfloat16(), tokens)
    assert vector.dtype == torch.bfloat16
    exact = torch.special.entr(torch.softmax(low.double() / 0.3, -1)).sum(-1)
    torch.testing.assert_close(diagnostics.entropy.double(), exact, atol=1e-6, rtol=1e-5)


def test_maps_know_their_names_and_numbers():
    made = maps.hard_mix(maps.noisy(maps.top_k(32, 0.5), 0.01), 0.3)
    assert made.name == "hard_mix(noisy(top_k))"
    assert made.parameters["inner"].parameters["inner"].parameters == {"k": 32, "tau": 0.5}
    assert repr(maps.min_p(0.05)) == "NamedMap(name='min_p', parameters={'min_p': 0.05, 'tau': 1.0})"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: maps.expected_embedding(-0.1),
            "expected_embedding: tau is -0.1; expected a finite number",
        ),
        (lambda: maps.expected_embedding(math.nan), "tau is nan"),
        (lambda: maps.top_k(0), "top_k: k is 0; expected a whole number, at least 1"),
        (
            lambda: maps.top_k(3, 0),
            r"top_k: tau is 0; expected finite and above 0 \(at 0 use one_hot\)",
        ),
        (lambda: maps.top_p(0), r"top_p: p is 0; expected in \(0, 1\]"),
        (lambda: maps.top_p(1.5), r"top_p: p is 1.5"),
        (
            lambda: maps.min_p(0),
            r"min_p: min_p is 0; expected in \(0, 1\], relative to the largest",
        ),
        (lambda: maps.gumbel(-1), "gumbel: tau_g is -1"),
        (lambda: maps.gumbel(1, 0), "gumbel: tau is 0"),
        (
            lambda: maps.noisy(maps.one_hot(), -0.5),
            "noisy: sigma is -0.5; expected finite, at least 0",
        ),
        (
            lambda: maps.noisy(maps.one_hot(), torch.tensor([0.1, math.nan])),
            "noisy: sigma is tensor",
        ),
        (lambda: maps.mixture_of_inputs(-2), "mixture_of_inputs: beta is -2"),
        (lambda: maps.hard_mix(maps.one_hot(), 1.2), r"hard_mix: lam is 1.2; expected in \[0, 1\]"),
        (
            lambda: maps.hard_mix(maps.one_hot(), torch.tensor([0.1, -1.0])),
            "hard_mix: lam is tensor",
        ),
        (lambda: maps.projected_hidden(torch.ones(3, 2), torch.ones(3, 2), -1), "epsilon is -1"),
    ],
)
def test_impossible_parameters_are_refused_when_the_map_is_built(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("feedback_map", [maps.gumbel(1.0), maps.noisy(maps.one_hot(), 0.1)])
def test_a_map_that_draws_says_so_when_it_gets_no_noise(feedback_map):
    logits, hidden, embedding, tokens, _ = example()
    with pytest.raises(ValueError, match="draws noise; expected a RowNoise as the fifth argument, got None"):
        feedback_map(logits, hidden, embedding, tokens)


def test_parameters_for_other_rows_are_refused():
    inputs = example()
    with pytest.raises(ValueError, match=r"lam has one value for each of 2 rows; the batch has 3: cut the map"):
        maps.hard_mix(maps.one_hot(), torch.tensor([0.1, 0.2]))(*inputs)


@pytest.mark.parametrize("vocab", [64, 259, 512, 49152])
def test_the_top_token_is_the_argmax_and_of_equal_ones_the_first(vocab):
    logits = torch.randn(3, 2, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1] = logits[1].round()  # many ties for the maximum
    logits[2, 0] = 0.0
    assert torch.equal(maps.top_token(logits), logits.argmax(-1))
