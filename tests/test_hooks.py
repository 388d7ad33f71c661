"""Pushing and recording: what a hook adds, what it must leave alone, and that it is surely gone afterwards."""

import copy
import io
import pickle
import random
from collections import namedtuple
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from feedback import gradients, hooks, pushing, running
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


REGISTRIES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


class Chain(torch.nn.Module):
    """Three layers in a row, the middle one called with a keyword and returning a tuple."""

    class Tupled(torch.nn.Linear):
        def forward(self, hidden_states, rest=None):
            return super().forward(hidden_states), rest

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = torch.nn.Linear(3, 3), self.Tupled(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.c(self.b(hidden_states=self.a(x), rest="kept")[0])


def everything(net):
    """What hangs where, marks of PyTorch's own included, and whether a forward was replaced."""
    return [
        (name, kind, [(number, id(hook)) for number, hook in getattr(part, kind).items()])
        for name, part in net.named_modules()
        for kind in REGISTRIES
    ] + [(name, "forward" in vars(part), part._is_full_backward_hook) for name, part in net.named_modules()]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_after_any_interleaving_and_exception_the_module_is_what_the_foreign_hooks_alone_would_make_it():
    """1,000 random runs: ours and foreign hooks taken on in any order, foreign ones also removed, then an exception in
    a hook, in the block, while registering the third of five, or none."""
    x = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0], [0.0, 1.0, 0.0]])
    raised = 0
    for seed in range(1000):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        net, foreign, fails = Chain(), [], rng.choice(["hook", "block", "registering", "interrupt", "nothing"])

        def take_on_foreign(net=net, foreign=foreign, rng=rng):
            part = rng.choice([net, net.a, net.b, net.c])
            front = rng.random() < 0.3
            foreign.append(
                rng.choice(
                    [
                        lambda: part.register_forward_hook(lambda m, i, o: None, prepend=front),
                        lambda: part.register_forward_hook(lambda m, i, k, o: None, with_kwargs=True, prepend=front),
                        lambda: part.register_forward_hook(lambda m, i, o: None, always_call=True),
                        lambda: part.register_forward_pre_hook(lambda m, i: None, prepend=front),
                        lambda: part.register_full_backward_hook(lambda m, i, o: None),
                        lambda: part.register_full_backward_pre_hook(lambda m, o: None),
                    ]
                )()
            )

        def ours(net=net, rng=rng, fails=fails):
            path = rng.choice(["a", "b", "c"])
            site = Site(at=rng.choice(["module", "module_input"]), path=path)
            front = rng.random() < 0.3
            return rng.choice(
                [
                    lambda: hooks.inspect(net, site, lambda h: None, strict=rng.random() < 0.5, prepend=front),
                    lambda: hooks.replace(net, site, torch.neg, prepend=front),
                    lambda: hooks.add(net, site, torch.ones(3), 0.5, prepend=front),
                    lambda: hooks.record(net, [site, Site(at="module", path="a")]),
                    lambda: gradients.read(net, Site(at="module", path=path)),
                    lambda: running.mean(net, site),
                    lambda: hooks.registered(
                        net.get_submodule(path), rng.choice(["forward", "forward_pre", "backward"]), lambda *_: None
                    ),
                ]
            )()

        for _ in range(rng.randrange(4)):
            take_on_foreign()
        twin = copy.deepcopy(net)
        expected = twin(x)
        try:
            with ExitStack() as stack:
                for _ in range(rng.randrange(1, 7)):
                    if rng.random() < 0.6:
                        stack.enter_context(ours())
                    elif foreign and rng.random() < 0.4:
                        foreign.pop(rng.randrange(len(foreign))).remove()
                    else:
                        take_on_foreign()
                if fails == "hook":
                    stack.enter_context(hooks.replace(net, Site(at="module", path="c"), lambda h: 1 / 0))
                if fails == "registering":
                    broken = [hooks.Record(resolve(net, Site(at="module", path="b"))) for _ in range(5)]
                    broken[2].register = Mock(side_effect=KeyboardInterrupt)
                    stack.enter_context(hooks.attached(*broken))
                net(x).sum().backward()
                if fails == "block":
                    raise RuntimeError
                if fails == "interrupt":
                    raise KeyboardInterrupt
        except (RuntimeError, ZeroDivisionError, KeyboardInterrupt):
            raised += 1
        alive = {handle.id for handle in foreign}
        numbers = {n for part in net.modules() for k in REGISTRIES for n in getattr(part, k)}
        assert numbers == alive, (seed, fails)
        assert torch.equal(net(x), expected), (seed, fails)
        assert not any("forward" in vars(part) for part in net.modules())
        while foreign:
            foreign.pop().remove()
        assert not any(getattr(part, kind) for part in net.modules() for kind in REGISTRIES), (seed, fails)
    assert raised > 600


def test_foreign_hooks_keep_their_places_when_ours_come_and_go_between_them():
    net, order = Chain(), []
    first = net.a.register_forward_hook(lambda *_: order.append("first"))
    with hooks.replace(net, Site(at="module", path="a"), lambda h: order.append("ours") or h + 1):
        net.a.register_forward_hook(lambda *_: order.append("second"))
        net.a.register_forward_hook(lambda *_: order.append("front"), prepend=True)
        net(torch.ones(3, 3))
        during, before = list(order), everything(net)
        order.clear()
    net(torch.ones(3, 3))
    assert during == ["front", "first", "ours", "second"] and order == ["front", "first", "second"]
    assert [kind for *_, kind in before] != [kind for *_, kind in everything(net)]
    first.remove()


def test_an_interrupt_between_registering_and_returning_leaves_no_hook(monkeypatch):
    net = Chain()
    before, register = everything(net), torch.nn.Module.register_forward_hook

    def interrupted(self, *args, **kwargs):
        register(self, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.nn.Module, "register_forward_hook", interrupted)
    with pytest.raises(KeyboardInterrupt), hooks.add(net, Site(at="module", path="a"), torch.ones(3)):
        pass
    assert everything(net) == before


def test_a_backward_hook_of_ours_leaves_no_mark_that_forbids_other_kinds_later():
    """PyTorch's own handle leaves one: a module that once had a full backward hook refuses the older kind for good."""
    net = Chain()
    before = everything(net)
    with gradients.read(net, Site(at="module", path="a")), gradients.read(net, Site(at="module", path="a")):
        assert net.a._is_full_backward_hook is True
    assert everything(net) == before
    foreign = net.a.register_full_backward_hook(lambda *_: None)
    with gradients.read(net, Site(at="module", path="a")):
        pass
    assert net.a._is_full_backward_hook is True
    foreign.remove()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())])
def test_a_model_with_hooks_on_is_not_copied_or_pickled(tiny, copied):
    model = tiny("llama", seed=97)  # its own: transformers leaves hooks that cannot be pickled on the shared one
    held = [
        pushing.push(model.module, Site(1), torch.eye(model.d_model)[:1]),
        hooks.add(model.module, Site(1), torch.ones(model.d_model)),
        hooks.registered(blocks(model.module)[1], "forward", lambda *_: None),
        gradients.read(model.module, Site(1)),
        running.mean(model.module, Site(1)),
    ]
    for context in held:
        with context, pytest.raises(hooks.HookError, match="cannot be copied or pickled"):
            copied(model.module)
    with hooks.add(model.module, Site(1), torch.ones(model.d_model)):
        torch.save(model.module.state_dict(), io.BytesIO())
    twin = copy.deepcopy(model.module)
    assert not any(getattr(part, kind) for part in twin.modules() for kind in REGISTRIES)


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (torch.zeros(32), "length 0"),
        (torch.full((32,), float("nan")), "length nan"),
        (torch.full((32,), float("inf")), "length inf"),
    ],
)
def test_a_vector_that_cannot_steer_is_refused_before_a_pass(tiny, vector, message):
    model = tiny("llama")
    with pytest.raises(ValueError, match=message), hooks.add(model.module, Site(1), vector):
        pass


def test_a_vector_of_another_width_is_refused_in_the_first_pass(tiny):
    model = tiny("llama")
    with (
        hooks.add(model.module, Site(1), torch.ones(7)),
        pytest.raises(hooks.HookError, match=r"7 numbers wide, the activation at model\.layers\.1 32"),
    ):
        logits(model)


def test_a_site_that_only_a_language_model_has_is_refused_on_another_module():
    with pytest.raises(ValueError, match=r"site at 'block' of a Chain: only a causal language model has blocks"):
        resolve(Chain(), Site(1))
