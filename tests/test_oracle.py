"""The oracle: a loop that is known exactly, behind the interface of the real models."""

import math

import pytest
import torch

from feedback import carriers, hooks, loop, maps, models, programs
from feedback.cache import Context
from feedback.latch import critical_field, rests
from feedback.models import ModelSpec
from feedback.sites import Site, lens, unembed


def oracle(coupling=4.0, field=0.3, **settings):
    return models.load(ModelSpec(kind="oracle", coupling=coupling, field=field, dtype="float64", **settings))


def u_of(model, hidden):
    z = unembed(model.module, hidden)
    return torch.tanh((z[..., 0] - z[..., 1]) / 2)


@pytest.mark.parametrize("context", [Context(), Context("prompt"), Context("window", 2)], ids=lambda c: c.kind)
@pytest.mark.parametrize("block", [0, 2, 3])
@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_the_loop_is_exactly_the_formula_in_every_context_with_the_push_at_any_block(context, block, tau):
    """u' = tanh((b + α + L·u)/2τ), for three strengths from the same prompt."""
    model = oracle()
    v = carriers.unembedding_direction(model, "A", "B").scaled
    alphas = [0.0, 0.7, -2.5]
    told = loop.run(
        model,
        [model.encode("A B B"), model.encode("A"), model.encode("B A")],
        programs.constant(v.double(), alphas, steps=7, rows=3),
        feedback_map=maps.expected_embedding(tau),
        context=context,
        site=Site(block),
        row_prompt=torch.arange(3).repeat(3),
    )
    z = unembed(model.module, told.prompt_hidden)
    u = torch.tanh((z[:, 0] - z[:, 1]) / 2 / tau)
    alpha = told.program.columns["alpha"]
    for step in range(7):
        expected = 0.3 + alpha + 4.0 * u  # what the soft token of this step makes of the logits
        z = unembed(model.module, told.hidden[step])
        torch.testing.assert_close(z[:, 0] - z[:, 1], expected, atol=1e-6, rtol=0)
        u = torch.tanh(expected / 2 / tau)


def test_it_obeys_the_embedding_contract_and_its_lens_is_its_logits(tiny):
    model = oracle()
    ids = torch.tensor([[0, 1, 0], [1, 1, 1], [0, 0, 1]])
    with hooks.record(model.module, [Site(-1)]) as recorder:
        logits = model.module(input_ids=ids).logits
        last = recorder.outputs[Site(-1)]
    assert torch.equal(lens(model.module, last), logits)
    assert model.encode("A B what ever") == [0, 1, 1, 1]
    assert model.decode([0, 1]) == "A B"
    assert (model.vocab_size, model.n_blocks, model.d_model) == (2, 4, 32)


def test_a_push_along_a_direction_it_does_not_use_changes_nothing():
    model = oracle()
    used = torch.cat([model.embedding, model.module.lm_head.weight])
    v = torch.randn(1, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    v = v - torch.linalg.lstsq(used.mT, v.mT).solution.mT @ used
    plain, pushed = (
        loop.run(
            model,
            [[0], [1], [0, 1]],
            programs.constant(v, alpha, steps=5, rows=3),
            feedback_map=maps.expected_embedding(),
        )
        for alpha in (0.0, 50.0)
    )
    torch.testing.assert_close(u_of(model, pushed.hidden), u_of(model, plain.hidden), atol=1e-12, rtol=0)


def test_twenty_random_oracles_come_to_rest_where_the_closed_form_says_to_1e_4():
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        coupling = 0.5 + 8 * torch.rand((), generator=draw).item()
        field = (2 * torch.rand((), generator=draw).item() - 1) * max(0.8 * critical_field(coupling), 0.5)
        model = oracle(coupling, field, seed=int(torch.randint(1000, (), generator=draw)))
        v = carriers.unembedding_direction(model, "A", "B").scaled
        first = model.embedding[torch.tensor([1, 0])]
        told = loop.run(
            model,
            [[0]],
            programs.constant(v.double(), 0.0, steps=200, rows=2),
            feedback_map=maps.expected_embedding(),
            context=Context("prompt"),
            row_prompt=torch.zeros(2, dtype=torch.long),
            first=first,
        )
        low, high = u_of(model, told.hidden[-1]).tolist()
        expected = rests(coupling, field)
        assert low == pytest.approx(expected[0], abs=1e-4) and high == pytest.approx(expected[-1], abs=1e-4)
        assert len(expected) == (2 if coupling > 2 and abs(field) < critical_field(coupling) else 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_model": 2}, "d_model of at least 3"),
        ({"n_blocks": 0}, "at least one block"),
        ({"coupling": math.inf}, "finite L and b"),
    ],
)
def test_an_oracle_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        oracle(**settings)
