"""Pushing and recording: what a hook adds, what it must leave alone, and that it is surely gone afterwards."""

from collections import namedtuple

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from feedback import hooks, pushing
from feedback.sites import Site, blocks, resolve

IDS = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]])


def logits(model):
    return model.module(input_ids=IDS, use_cache=False).logits


def hook_dictionaries(module):
    return {
        (name, kind): list(getattr(part, kind).items())
        for name, part in module.named_modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")
    }


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(3, 2, 4),
        (torch.ones(3, 2, 4), "cache"),
        [torch.ones(3, 2, 4), "weights"],
        namedtuple("Output", "hidden rest")(torch.ones(3, 2, 4), "rest"),
        BaseModelOutputWithPast(last_hidden_state=torch.ones(3, 2, 4)),
    ],
    ids=lambda output: type(output).__name__,
)
def test_the_container_of_an_output_is_rebuilt_and_every_row_replaced(output):
    hidden = hooks.hidden_of(output)
    changed = hooks.with_hidden(output, hidden + 1)
    assert type(changed) is type(output)
    assert torch.equal(hooks.hidden_of(changed), torch.full((3, 2, 4), 2.0))
    assert torch.equal(hooks.hidden_of(output), torch.ones(3, 2, 4))
    if isinstance(output, (tuple, list)):
        assert changed[1] == output[1]


@pytest.mark.parametrize("output", [None, {"hidden": torch.ones(1)}, ("text", torch.ones(1)), ()])
def test_any_other_output_is_refused_by_its_type_name(output):
    with pytest.raises(TypeError, match=type(output).__name__):
        hooks.hidden_of(output)


@pytest.mark.parametrize("at", ["block", "block_input", "attn", "mlp"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen2", "gpt_neox"])
def test_a_push_adds_its_delta_to_every_row_and_position_of_the_site(tiny, family, at):
    model = tiny(family)
    site = Site(1, at)
    v = torch.nn.functional.normalize(torch.arange(1.0, model.d_model + 1)[None], dim=-1)
    delta = torch.tensor([[0.5], [-1.0], [2.0]]) * v
    with hooks.record(model.module, [site]) as recorder:
        logits(model)
        before = recorder.outputs[site].clone()
    with pushing.push(model.module, site, v) as handle, hooks.record(model.module, [site]) as recorder:
        handle.set(delta)
        logits(model)
        after, receipt = recorder.outputs[site], handle.take()
    assert torch.equal(after, before + delta[:, None])
    assert receipt.fired == 1
    torch.testing.assert_close(receipt.pushed, torch.tensor([[0.5], [-1.0], [2.0]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(receipt.length, before[:, -1].norm(dim=-1))
    torch.testing.assert_close(receipt.relative, delta.norm(dim=-1) / before[:, -1].norm(dim=-1), atol=1e-5, rtol=0)


def test_recording_alone_changes_nothing(tiny):
    model = tiny("llama")
    plain = logits(model)
    with hooks.record(model.module, [Site(0), Site(2, "attn")]):
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), plain)


def test_a_recorded_site_that_no_pass_reached_is_an_error_not_a_stale_value(tiny):
    model = tiny("llama")
    with hooks.record(model.module, [Site(0)]) as recorder:
        logits(model)
        assert recorder.outputs
        with pytest.raises(RuntimeError, match=r"no forward pass reached model\.layers\.0"):
            _ = recorder.outputs


def test_a_push_on_a_dead_path_is_an_error_that_names_the_site(tiny):
    model = tiny("llama")
    with (
        pushing.push(model.module, Site(1), torch.eye(model.d_model)[:1]) as handle,
        pytest.raises(RuntimeError, match=r"step 1, site model\.layers\.1, all rows: the push never fired"),
    ):
        handle.take()


def test_the_steered_state_is_what_the_recorder_saw_and_not_what_output_hidden_states_says(tiny):
    """transformers collects hidden_states by hooks of its own, installed at first use: before our push on this module,
    so a later push moves the logits and not hidden_states."""
    model = tiny("llama")
    ask = {"input_ids": IDS, "use_cache": False, "output_hidden_states": True}
    plain = model.module(**ask)
    v = torch.eye(model.d_model)[:1]
    with pushing.push(model.module, Site(1), v) as handle, hooks.record(model.module, [Site(1)]) as recorder:
        handle.set(3 * v.expand(3, -1))
        steered = model.module(**ask)
        seen = recorder.outputs[Site(1)]
    assert (steered.logits - plain.logits).abs().max() > 1e-3
    assert torch.equal(seen, plain.hidden_states[2] + 3 * v)


def test_the_push_writes_a_new_tensor_so_an_earlier_capture_keeps_its_value(tiny):
    model = tiny("llama")
    v = torch.eye(model.d_model)[:1]
    with hooks.record(model.module, [Site(1)]) as early, pushing.push(model.module, Site(1), v) as handle:
        handle.set(torch.full((3, model.d_model), 7.0))
        logits(model)
        captured = early.outputs[Site(1)]
        handle.take()
        handle.set(None)
        with hooks.record(model.module, [Site(1)]) as again:
            logits(model)
            assert torch.equal(captured, again.outputs[Site(1)])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_an_exception_the_hooks_of_a_module_are_what_they_were_foreign_ones_included(tiny, error):
    model = tiny("llama")
    block = blocks(model.module)[1]
    foreign = [block.register_forward_hook(lambda *_: None), block.register_forward_pre_hook(lambda *_: None)]
    try:
        before, plain = hook_dictionaries(model.module), logits(model)
        with pytest.raises(error), pushing.push(model.module, Site(1), torch.eye(model.d_model)[:1]) as handle:
            handle.set(torch.ones(3, model.d_model))
            logits(model)
            raise error
        assert hook_dictionaries(model.module) == before
        assert torch.equal(logits(model), plain)
    finally:
        for handle in foreign:
            handle.remove()


def test_registering_that_fails_half_way_leaves_no_hook(tiny, monkeypatch):
    model = tiny("llama")
    before = hook_dictionaries(model.module)
    register, calls = hooks.Hook.register, []

    def third_fails(self):
        calls.append(self)
        if len(calls) == 3:
            raise RuntimeError("planted")
        return register(self)

    monkeypatch.setattr(hooks.Hook, "register", third_fails)
    with (
        pytest.raises(RuntimeError, match="planted"),
        pushing.push(model.module, Site(1), torch.eye(model.d_model)[:1]),
    ):
        pass
    assert len(calls) == 3
    assert hook_dictionaries(model.module) == before


def test_a_module_called_with_keywords_only_is_hooked_through_its_keyword(tiny):
    """Decoder blocks hand hidden_states to their attention as a keyword: a plain pre-hook would see nothing."""
    model = tiny("llama")
    attention = resolve(model.module, Site(1, "attn")).module
    seen = []
    handle = attention.register_forward_pre_hook(lambda module, args: seen.append(args))
    try:
        logits(model)
    finally:
        handle.remove()
    assert seen == [()]
    hidden, keyword = hooks.input_hidden((), {"hidden_states": torch.ones(3, 1, 2)})
    assert keyword == "hidden_states" and torch.equal(hidden, torch.ones(3, 1, 2))
    with pytest.raises(TypeError, match="without a hidden state"):
        hooks.input_hidden((), {"mask": torch.ones(1)})
