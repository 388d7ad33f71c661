"""What is said of forward hooks, a test per sentence: docs/forward-hook.md lists them in the order of the text.

The two-number layer maps [1, 2] to [2, −1]; the layer behind it passes on what it receives.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import composed
from torch import nn
from transformers import DynamicCache

import run
from feedback import audit, gradients, hooks, loop, maps, programs, results, running
from feedback.cache import cache_keyword, padded
from feedback.models import checksum
from feedback.sites import Site, blocks, lens, resolve

ROOT = Path(run.__file__).parent
FAMILIES = ("llama", "gpt2", "gemma2", "qwen2", "gpt_neox", "mistral")
RAGGED = ("The sea", "A letter came today", "Dog")
U, V = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 2.0])
FIRST, SECOND = Site(at="module", path="0"), Site(at="module_input", path="1")


@pytest.fixture
def net():
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[2.0, 0.0], [1.0, -1.0]]))
    return nn.Sequential(layer, nn.Identity())


def batch(model):
    ids, mask = padded([model.encode(p) for p in RAGGED], model.pad_id)
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0),
        "use_cache": False,
    }


@torch.no_grad()
def logits(model):
    """(row, vocab) at the last position of a ragged batch of three."""
    return model.module(**batch(model)).logits[:, -1]


def direction(model):
    return torch.nn.functional.normalize(torch.arange(1.0, model.d_model + 1), dim=-1).to(model.dtype)


# ------------------------------------------------------------------------------------------------ what a hook is


def test_a_hook_runs_automatically_during_every_forward_pass(net):
    seen = []
    with hooks.inspect(net, FIRST, lambda h: seen.append(h.tolist())) as handle:
        for _ in range(3):
            net(U)
    net(U)
    assert seen == [[2.0, -1.0]] * 3 and handle.fired == 3


def test_a_hook_receives_the_module_the_tuple_of_positional_inputs_and_the_output(net):
    seen = []
    with hooks.registered(net[0], "forward", lambda *given: seen.append(given)):
        net(U)
    ((module, inputs, output),) = seen
    assert module is net[0] and isinstance(inputs, tuple) and inputs[0] is U
    assert output.tolist() == [2, -1]


def test_with_kwargs_a_hook_receives_the_keyword_arguments_too(net):
    seen = []
    with hooks.registered(net[0], "forward", lambda *given: seen.append(given), with_kwargs=True):
        net[0](input=U)
    ((_, inputs, keywords, _),) = seen
    assert inputs == () and keywords["input"] is U


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_can_record_the_activation_without_changing_it_or_the_weights(tiny, family):
    model = tiny(family)
    plain, weights = logits(model), checksum(model.module)
    with hooks.record(model.module, [Site(1), Site(2, "attn"), Site(0, "mlp")]) as recorder:
        assert torch.equal(logits(model), plain)
        recorded = recorder.outputs[Site(1)]
    assert recorded.shape[0] == 3 and recorded.shape[-1] == model.d_model
    assert checksum(model.module) == weights


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_can_return_a_compatible_replacement_for_downstream_computation(tiny, family):
    model = tiny(family)
    plain = logits(model)
    with hooks.replace(model.module, Site(1), torch.zeros_like), hooks.record(model.module, [Site(1), Site(3)]) as seen:
        assert not torch.equal(logits(model), plain)
        outputs = seen.outputs
    assert not outputs[Site(1)].any()
    last = outputs[Site(3)][:, -1]
    torch.testing.assert_close(last, last[:1].expand_as(last))  # all rows went on from the same zeros


@pytest.mark.parametrize(
    "change",
    [lambda h: h[..., :1], lambda h: h.double(), lambda h: h[:1].expand(2, *h.shape[1:])],
    ids=["width", "dtype", "rows"],
)
def test_a_replacement_of_another_shape_or_dtype_is_refused(tiny, change):
    model = tiny("llama")
    with (
        hooks.replace(model.module, Site(1), change),
        pytest.raises(hooks.HookError, match=r"model\.layers\.1 returned"),
    ):
        logits(model)


# -------------------------------------------------------------------------------- h̃ = g(u, h), and what comes after


@pytest.mark.parametrize("family", FAMILIES)
def test_unhooked_a_block_passes_its_output_directly_to_the_next(tiny, family):
    model = tiny(family)
    with hooks.record(model.module, [Site(1), Site(2, "block_input")]) as recorder:
        logits(model)
        outputs = recorder.outputs
    assert torch.equal(outputs[Site(1)], outputs[Site(2, "block_input")])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_block_computes_h_first_and_the_hook_runs_immediately_afterwards(tiny, family):
    model = tiny(family)
    v, order = direction(model), []
    with hooks.record(model.module, [Site(1)]) as before:
        logits(model)
        h = before.outputs[Site(1)]
    with (
        hooks.inspect(model.module, Site(1, "mlp"), lambda _: order.append("mlp of 1")),
        hooks.inspect(model.module, Site(1), lambda seen: order.append(torch.equal(seen, h))),
        hooks.add(model.module, Site(1), v, 3.0),
        hooks.inspect(model.module, Site(2, "block_input"), lambda seen: order.append(torch.equal(seen, h + 3.0 * v))),
    ):
        logits(model)
    assert order == ["mlp of 1", True, True]


def test_returning_none_passes_the_original_output_on(net):
    with hooks.registered(net[0], "forward", lambda module, inputs, output: None):
        assert net(U).tolist() == [2, -1]


def test_returning_none_does_not_enforce_read_only_an_in_place_write_arrives_downstream(net):
    def write(module, inputs, output):
        output += 1

    with torch.no_grad(), hooks.registered(net[0], "forward", write):
        assert net(U).tolist() == [3, 0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    "write",
    [lambda h: h.add_(1), lambda h: h.data.add_(1), lambda h: h[..., 0].zero_(), lambda h: h.detach().numpy().fill(0)],
    ids=["in place", "through .data", "through a view", "through numpy"],
)
def test_strict_inspection_catches_an_in_place_write(tiny, mode, write):
    model = tiny("llama")
    with (
        mode(),
        hooks.inspect(model.module, Site(1), write, strict=True),
        pytest.raises(hooks.HookError, match=r"model\.layers\.1 wrote into the activation"),
    ):
        model.module(**batch(model))


def test_strict_inspection_catches_a_write_that_was_undone_by_the_version_counter(net):
    with (
        torch.no_grad(),
        hooks.inspect(net, FIRST, lambda h: h.add_(1).sub_(1), strict=True),
        pytest.raises(hooks.HookError, match="wrote into the activation"),
    ):
        net(U)


def test_strict_inspection_lets_a_look_pass_even_at_not_a_number(tiny):
    model, seen = tiny("llama"), []
    with (
        hooks.replace(model.module, Site(1), lambda h: h.masked_fill(h > 0, float("nan"))),
        hooks.inspect(model.module, Site(1), lambda h: seen.append(h.mean()), strict=True),
    ):
        logits(model)
    assert len(seen) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replacement_reaches_the_next_block_and_every_block_downstream_and_none_before(tiny, family):
    model = tiny(family)
    sites = [Site(n) for n in range(4)]

    def states():
        with hooks.record(model.module, sites) as recorder:
            logits(model)
            return list(recorder.outputs.values())

    plain = states()
    with hooks.add(model.module, Site(1), direction(model), 3.0):
        steered = states()
    assert torch.equal(steered[0], plain[0])
    assert all((a - b)[:, -1].norm(dim=-1).min() > 1e-3 for a, b in zip(steered[1:], plain[1:], strict=True))


# ---------------------------------------------------------------------------------------------- activation steering


@pytest.mark.parametrize("at", ["block", "block_input", "attn", "mlp", "module", "module_input"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steering_adds_alpha_v_at_every_row_and_position_of_any_site(tiny, family, at):
    model = tiny(family)
    path = resolve(model.module, Site(1, "mlp")).path if at.startswith("module") else None
    site = Site(1, at, path)
    v = direction(model)
    with hooks.record(model.module, [site]) as recorder:
        logits(model)
        plain = recorder.outputs[site]
    with hooks.add(model.module, site, v, -2.0), hooks.record(model.module, [site]) as recorder:
        logits(model)
        steered = recorder.outputs[site]
    assert torch.equal(steered, plain - 2.0 * v)


def test_the_worked_example_gives_two_minus_one_then_four_zero_then_two_minus_one_again(net):
    weight, received = net[0].weight.detach().clone(), []
    with hooks.inspect(net, SECOND, lambda h: received.append(h.tolist())):
        net(U)
        with hooks.add(net, FIRST, V, 0.5):
            net(U)
        net(U)
    assert received == [[2.0, -1.0], [4.0, 0.0], [2.0, -1.0]]
    assert torch.equal(net[0].weight, weight)


def test_the_handle_that_registering_returns_detaches_the_callback(net):
    handle = net[0].register_forward_hook(lambda module, inputs, output: output + 0.5 * V)
    assert net(U).tolist() == [4, 0]
    handle.remove()
    assert net(U).tolist() == [2, -1] and not net[0]._forward_hooks


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_hook_is_removed_even_if_an_exception_occurs(net, error):
    with pytest.raises(error), hooks.add(net, FIRST, V, 0.5):
        assert net(U).tolist() == [4, 0]
        raise error
    assert net(U).tolist() == [2, -1] and not net[0]._forward_hooks


def test_a_handle_left_attached_applies_to_every_later_pass_on_that_module_only(net):
    other = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Identity())
    other.load_state_dict(net.state_dict())
    handle = net[0].register_forward_hook(lambda module, inputs, output: output + 0.5 * V)
    try:
        assert [net(U).tolist() for _ in range(3)] == [[4, 0]] * 3
        assert other(U).tolist() == [2, -1]
        assert [(f.kind, f.path, f.owner) for f in audit.snapshot(net)] == [("forward", "0", "foreign")]
    finally:
        handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_removing_the_hook_restores_logits_and_states_bit_for_bit(tiny, family):
    model = tiny(family)
    plain = logits(model)
    with hooks.add(model.module, Site(1), direction(model), 5.0):
        assert not torch.equal(logits(model), plain)
    assert torch.equal(logits(model), plain)


# ---------------------------------------------------------------------------------------- variants: pre and backward


def test_a_pre_hook_runs_before_the_layer_and_inspects_its_input(net):
    order = []
    with (
        hooks.inspect(net, Site(at="module_input", path="0"), lambda u: order.append(u.tolist())),
        hooks.inspect(net, FIRST, lambda h: order.append(h.tolist())),
    ):
        net(U)
    assert order == [[1, 2], [2, -1]]


def test_a_pre_hook_replaces_a_positional_or_a_keyword_input(net):
    with hooks.replace(net, Site(at="module_input", path="0"), lambda u: u + torch.tensor([1.0, 0.0])):
        assert net(U).tolist() == [4, 0]
        assert net[0](input=U).tolist() == [4, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_adding_to_the_next_blocks_input_is_adding_to_this_blocks_output(tiny, family):
    model = tiny(family)
    with hooks.add(model.module, Site(1), direction(model), 2.0):
        after = logits(model)
    with hooks.add(model.module, Site(2, "block_input"), direction(model), 2.0):
        assert torch.equal(logits(model), after)


def test_a_backward_hook_receives_tuples_of_gradients_of_inputs_and_outputs(net):
    seen, u = [], U.clone().requires_grad_()
    with hooks.registered(net[0], "backward", lambda *given: seen.append(given)):
        net(u).sum().backward()
    ((module, to_inputs, to_outputs),) = seen
    assert module is net[0]
    assert [g.tolist() for g in to_outputs] == [[1, 1]] and [g.tolist() for g in to_inputs] == [[3, -1]]  # Wᵀ·[1, 1]


def test_a_backward_hook_may_replace_the_gradients_of_the_inputs(net):
    u = U.clone().requires_grad_()
    with gradients.replace(net, FIRST, lambda g: 10 * g) as seen:
        net(u).sum().backward()
    assert u.grad.tolist() == seen.wrt_input.tolist() == [30, -10]
    with (
        gradients.replace(net, FIRST, lambda g: g[:1]),
        pytest.raises(hooks.HookError, match=r"replaced by one of shape \(1,\)"),
    ):
        net(u).sum().backward()


def test_a_backward_hook_cannot_replace_the_gradients_of_the_outputs(net):
    """What it returns takes the place of the input gradients; the weight's gradient, made of the output's, stays."""
    plain = nn.Linear(2, 2, bias=False)
    plain.load_state_dict(net[0].state_dict())
    plain(U).sum().backward()
    with gradients.replace(net, FIRST, torch.zeros_like) as seen:
        net(U.clone().requires_grad_()).sum().backward()
    assert torch.equal(net[0].weight.grad, plain.weight.grad) and seen.wrt_output.tolist() == [1, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_at_a_block_are_those_that_autograd_keeps(tiny, family):
    model = tiny(family)
    inputs = batch(model)
    embedded = model.embedding[inputs.pop("input_ids")].clone().requires_grad_()
    kept = []
    with (
        hooks.inspect(model.module, Site(1, "block_input"), lambda h: kept.append(h)),
        hooks.inspect(model.module, Site(1), lambda h: kept.append(h)),
        gradients.read(model.module, Site(1)) as seen,
    ):
        loss = model.module(inputs_embeds=embedded, **inputs).logits[:, -1].logsumexp(-1).sum()
        wanted = torch.autograd.grad(loss, kept, retain_graph=True)
        loss.backward()
    assert seen.fired >= 1
    torch.testing.assert_close(seen.wrt_input, wanted[0])
    torch.testing.assert_close(seen.wrt_output, wanted[1])


def test_forward_only_loops_do_not_trigger_backward_hooks_and_differentiable_ones_do(tiny):
    model = tiny("llama", dtype="float64")
    ids = [model.encode(p) for p in RAGGED]
    v = direction(model)[None].clone().requires_grad_()
    with gradients.read(model.module, Site(3)) as seen:
        for differentiable, fired in ((False, 0), (True, 2)):
            program = programs.constant(v if differentiable else v.detach(), 1.0, steps=2, rows=3)
            told = loop.run(
                model, ids, program, feedback_map=maps.expected_embedding(), site=Site(1), differentiable=differentiable
            )
            if differentiable:
                told.hidden[-1].sum().backward()
            assert seen.fired == fired
    assert v.grad.abs().max() > 0 and seen.wrt_output.shape == (3, 1, model.d_model)
    with gradients.read(model.module, Site(1)) as never, pytest.raises(hooks.HookError, match="no backward pass came"):
        _ = never.wrt_input


def test_the_gradient_of_an_input_that_came_by_keyword_is_refused_with_the_reason(tiny):
    model = tiny("llama")
    inputs = batch(model)
    embedded = model.embedding[inputs.pop("input_ids")].clone().requires_grad_()
    with gradients.read(model.module, Site(1, "attn")) as seen, pytest.warns(UserWarning, match="no inputs require"):
        model.module(inputs_embeds=embedded, **inputs).logits.sum().backward()
    assert seen.wrt_output.shape == embedded.shape
    with pytest.raises(hooks.HookError, match="by position"):
        _ = seen.wrt_input


# --------------------------------------------------------------------------------------------- several hooks, order


def double(module, inputs, output):
    return 2 * output


def one_more(module, inputs, output):
    return output + 1


def test_hooks_run_in_the_order_of_registration_and_each_receives_what_the_last_returned(net):
    with (
        hooks.registered(net[0], "forward", double),
        hooks.registered(net[0], "forward", lambda module, inputs, output: None),
        hooks.registered(net[0], "forward", one_more),
    ):
        assert net(U).tolist() == [5, -1]
    with hooks.registered(net[0], "forward", one_more), hooks.registered(net[0], "forward", double):
        assert net(U).tolist() == [6, 0]


def test_prepend_puts_a_hook_at_the_front_of_its_modules_queue(net):
    with hooks.registered(net[0], "forward", double), hooks.registered(net[0], "forward", one_more, prepend=True):
        assert net(U).tolist() == [6, 0]
    with hooks.replace(net, FIRST, lambda h: 2 * h), hooks.add(net, FIRST, torch.ones(2), prepend=True):
        assert net(U).tolist() == [6, 0]


def test_global_hooks_run_before_a_modules_own(net):
    def double_first(module, inputs, output):
        return 2 * output if module is net[0] else None

    with hooks.registered(net[0], "forward", one_more, prepend=True), hooks.registered(None, "forward", double_first):
        assert net(U).tolist() == [5, -1]
    assert net(U).tolist() == [2, -1]


# -------------------------------------------------------------------------------------------- tuples and the cache


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tuple_is_rebuilt_around_its_hidden_state_and_the_rest_of_it_kept(tiny, family):
    model, seen = tiny(family), []
    attention = resolve(model.module, Site(1, "attn"))
    with (
        hooks.registered(attention.module, "forward", lambda m, i, output: seen.append(output)),
        hooks.replace(model.module, Site(1, "attn"), lambda h: h + 1),
        hooks.registered(attention.module, "forward", lambda m, i, output: seen.append(output)),
    ):
        logits(model)
    came, went = seen
    assert isinstance(came, tuple) and type(went) is type(came) and went is not came
    assert torch.equal(went[0], came[0] + 1)
    assert all(a is b for a, b in zip(came[1:], went[1:], strict=True))


@torch.no_grad()
def cached_and_whole(model, tokens, first, between=lambda: None, mask=None):
    """Logits from position ``first`` − 1 on: a prompt pass and one-token passes with a cache, and one uncached pass."""

    def inputs(start, end):
        if mask is None:
            return {"input_ids": tokens[:, start:end]}
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, start:end]
        return {"input_ids": tokens[:, start:end], "attention_mask": mask[:, :end].long(), "position_ids": positions}

    cache = {cache_keyword(model.module): DynamicCache(), "use_cache": True}
    ends = range(first, tokens.shape[1] + 1)
    cached = [model.module(**inputs(0 if end == first else end - 1, end), **cache).logits[:, -1] for end in ends]
    between()
    whole = model.module(**inputs(0, tokens.shape[1]), use_cache=False).logits[:, first - 1 :]
    return torch.stack(cached, dim=1), whole


def tokens(model):
    return torch.randint(5, 200, (3, 9), generator=torch.Generator().manual_seed(0))


def test_with_a_cache_the_prompt_pass_shows_all_positions_and_each_later_pass_one(tiny):
    model, shapes = tiny("llama"), []
    with hooks.inspect(model.module, Site(1), lambda h: shapes.append(tuple(h.shape))):
        cached_and_whole(model, tokens(model), first=5, between=lambda: shapes.append("whole"))
    assert shapes == [(3, 5, 32)] + [(3, 1, 32)] * 4 + ["whole", (3, 9, 32)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fixed_alpha_v_applies_consistently_with_and_without_a_cache(tiny, family):
    model = tiny(family)
    with hooks.add(model.module, Site(1), direction(model), 3.0):
        cached, whole = cached_and_whole(model, tokens(model), first=5)
    torch.testing.assert_close(cached, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_sequence_statistic_agrees_only_with_retained_state_or_full_recomputation(tiny, family):
    model = tiny(family)
    with hooks.replace(model.module, Site(1), lambda h: h - h.mean(1, keepdim=True)):
        cached, whole = cached_and_whole(model, tokens(model), first=5)
    assert (cached - whole)[:, 1:].abs().max() > 0.1
    with running.mean(model.module, Site(1), lambda h, mean: h - mean) as state:
        cached, whole = cached_and_whole(model, tokens(model), first=5, between=state.reset)
    torch.testing.assert_close(cached, whole, atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------- what a hook does and does not


@pytest.mark.parametrize("family", FAMILIES)
def test_steering_writes_no_parameter_the_state_dict_holds_the_original_weights(tiny, family):
    model = tiny(family)
    weights = {name: value.clone() for name, value in model.module.state_dict().items()}
    with hooks.add(model.module, Site(1), direction(model), 4.0):
        logits(model)
        during = model.module.state_dict()
        assert all(torch.equal(during[name], value) for name, value in weights.items())
    assert during.keys() == weights.keys()


def test_in_training_a_replacement_alters_the_gradients_and_so_the_next_update():
    moved = []
    for alpha in (0.0, 0.5):
        net = nn.Sequential(nn.Linear(2, 2, bias=False, dtype=torch.float64))
        nn.init.eye_(net[0].weight)
        with hooks.add(net, FIRST, V, alpha):
            net(U.double()).square().sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        moved.append(net[0].weight.detach())
    # d|h̃|²/dW = 2·h̃·uᵀ, h̃ = [1, 2] + α·[4, 2]: the difference is 0.1·2·[2, 1]·[1, 2]ᵀ
    torch.testing.assert_close(moved[0] - moved[1], torch.tensor([[0.4, 0.8], [0.2, 0.4]], dtype=torch.float64))


def test_a_hook_written_to_do_so_can_overwrite_parameters_and_the_checksum_tells(net):
    before = checksum(net)

    def overwrite(module, inputs, output):
        module.weight.data.mul_(2)

    with hooks.registered(net[0], "forward", overwrite):
        net(U)
    assert checksum(net) != before


def test_hooks_live_on_the_module_visible_to_the_host_while_the_text_is_what_it_was(tiny):
    model = tiny("llama")
    plain = logits(model).argmax(-1)
    with hooks.add(model.module, Site(1), direction(model), 1e-3) as hook:
        assert torch.equal(logits(model).argmax(-1), plain)
        assert hook in blocks(model.module)[1]._forward_hooks.values()
        (found,) = (f for f in audit.snapshot(model.module) if f.owner != "transformers")
    assert (found.kind, found.path, found.owner) == ("forward", "model.layers.1", "ours")


def test_in_the_soft_token_loop_a_forward_hook_applies_the_push_on_each_step(tiny):
    model = tiny("llama")
    program = programs.constant(direction(model)[None], 2.0, steps=5, rows=3)
    told = loop.run(
        model, [model.encode(p) for p in RAGGED], program, feedback_map=maps.expected_embedding(), site=Site(1)
    )
    torch.testing.assert_close(told.pushed, torch.full((5, 3, 1), 2.0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logit_lens_of_the_last_block_is_what_the_steered_model_says(tiny, family):
    model = tiny(family)
    with hooks.add(model.module, Site(1), direction(model), 2.0), hooks.record(model.module, [Site(-1)]) as recorder:
        said = logits(model)
        last = recorder.outputs[Site(-1)][:, -1]
    torch.testing.assert_close(lens(model.module, last), said, atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------------- the experiment


def configured(*overrides):
    return composed("experiment=forward_hook", "tracking=disabled", "quiet=true", *overrides)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experiment_records_that_every_claim_holds_on_every_family(tmp_path, family):
    config = configured("model=tiny", f"model.family={family}", "carriers=random_orthonormal", "alpha=2", "steps=4")
    record = run.main(config, tmp_path, None)
    assert record["summary"]["claims_that_fail"] == []
    assert record["summary"]["claims"] > 40
    assert record["summary"]["worked_example"] == {"unsteered": [2, -1], "steered": [4, 0], "restored": [2, -1]}
    assert {p.stem for p in (tmp_path / "figures").glob("*.png")} == {"logit_lens", "delta_through_blocks"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("site.block=-1", "follows h"),
        ("site=attn", "follows h"),
        ("alpha=0", "takes one strength, not 0"),
        ("alpha=[1,2]", "takes one strength"),
    ],
)
def test_settings_that_the_experiment_cannot_use_are_refused(override, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run.main(configured("model=tiny", override), tmp_path, None)


@pytest.mark.real
def test_every_claim_holds_on_smollm2(tmp_path):
    record = run.main(configured(), tmp_path, None)
    summary = record["summary"]
    assert summary["claims_that_fail"] == []
    assert record["weights_unchanged"] is True
    table = results.read_table(tmp_path / "table.csv")
    assert len(table) == 3 * 30
    assert summary["v"]["delta_at_site"] == pytest.approx(150, abs=0.01)
    assert summary["v"]["kl_nats"] > 0


def test_the_page_about_forward_hooks_lists_every_test_of_a_sentence_and_only_those():
    page = (ROOT / "docs" / "forward-hook.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(test_\w+)`", page))
    own = {name for name in globals() if name.startswith("test_")}
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")]
    defined = set(re.findall(r"^def (test_\w+)\(", "\n".join(sources), flags=re.MULTILINE))
    assert listed <= defined
    about_the_file = {"experiment", "settings", "page", "every_claim", "records"}
    assert {
        name for name in own if not any(f"test_the_{a}" in name or f"test_{a}" in name for a in about_the_file)
    } <= listed


def test_the_records_are_strict_json(tmp_path):
    config = configured("model=tiny", "carriers=random_orthonormal", "alpha=2", "steps=4")
    run.main(config, tmp_path, None)
    assert json.loads((tmp_path / "result.json").read_text())["audit"]["after"] == []
