"""Planted faults: every way in which a push can go wrong unseen is caught by its receipt, in its step."""

import pytest
import torch

from feedback import hooks, loop, maps, programs, pushing
from feedback.pushing import ReceiptError
from feedback.sites import Site, blocks, resolve

RAGGED = ("The sea", "A letter came today", "Dog")
STEPS = 4


def run(model, site=Site(1), alpha=1.5, **settings):  # noqa: B008
    v = torch.nn.functional.normalize(torch.arange(1.0, model.d_model + 1), dim=-1)[None]
    program = programs.constant(v, alpha, steps=STEPS, rows=3)
    prompts = [model.encode(p) for p in RAGGED]
    return loop.run(model, prompts, program, feedback_map=maps.expected_embedding(), site=site, **settings)


def test_a_push_on_a_dead_path_is_caught_in_its_step(tiny):
    model = tiny("llama")
    model.module.unused = torch.nn.Linear(model.d_model, model.d_model)
    try:
        with pytest.raises(ReceiptError, match="step 1, site unused, all rows: the push never fired"):
            run(model, Site(at="module", path="unused"))
    finally:
        del model.module.unused


def test_a_path_that_is_alive_in_some_steps_only_is_caught_in_the_step_that_skips_it(tiny):
    model, block = tiny("llama"), blocks(tiny("llama").module)[1]
    calls = []
    original = type(model.module.model).forward

    def skipping(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:  # the prompt pass is the first: this is step 3
            self.layers = torch.nn.ModuleList([layer for layer in self.layers if layer is not block])
        return original(self, *args, **kwargs)

    whole = model.module.model.layers
    model.module.model.forward = skipping.__get__(model.module.model)
    try:
        with pytest.raises(ReceiptError, match=r"step 3, site model\.layers\.1, all rows: the push never fired"):
            run(model)
    finally:
        model.module.model.layers = whole
        del model.module.model.forward


def test_a_push_entered_twice_is_refused(tiny):
    model = tiny("llama")
    v = torch.eye(model.d_model)[:1]
    for site in (Site(1), Site(1, "block_input")):
        with (
            pushing.push(model.module, site, v),
            pytest.raises(hooks.HookError, match=r"a push at model\.layers\.1 already"),
            pushing.push(model.module, site, v),
        ):
            pass
    hook = hooks.Record(resolve(model.module, Site(1)))
    with (
        hooks.attached(hook),
        pytest.raises(hooks.HookError, match=r"is on model\.layers\.1 already"),
        hooks.attached(hook),
    ):
        pass


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "new tensor"])
def test_a_push_on_row_0_only_is_caught_and_the_other_rows_named(tiny, monkeypatch, in_place):
    """``output[0] += v`` means the hidden state of a tuple, and batch row 0 of a bare tensor."""

    def mixed_up(self, hidden):
        if self.delta is None:
            return None
        if in_place:
            hidden[0] += self.delta[0]
            return hidden
        return torch.cat([hidden[:1] + self.delta[:1, None], hidden[1:]])

    monkeypatch.setattr(pushing._Add, "apply", mixed_up)
    rows = r"\[0, 1, 2\]" if in_place else r"\[1, 2\]"  # written in place, not even row 0 shows a difference
    with pytest.raises(ReceiptError, match=rf"step 1, site model\.layers\.1, rows {rows}.*did not arrive as asked"):
        run(tiny("llama"))


def test_a_push_on_the_first_generated_token_only_is_caught_at_the_second(tiny, monkeypatch):
    original, calls = pushing._Add.apply, []

    def first_only(self, hidden):
        calls.append(1)
        return original(self, hidden) if len(calls) == 1 else None

    monkeypatch.setattr(pushing._Add, "apply", first_only)
    with pytest.raises(ReceiptError, match=r"step 2, site model\.layers\.1, rows \[0, 1, 2\]"):
        run(tiny("llama"))


def test_a_first_token_left_unsteered_is_caught_at_step_1(tiny, monkeypatch):
    original, calls = pushing._Add.apply, []

    def all_but_first(self, hidden):
        calls.append(1)
        return None if len(calls) == 1 else original(self, hidden)

    monkeypatch.setattr(pushing._Add, "apply", all_but_first)
    with pytest.raises(ReceiptError, match=r"step 1, site model\.layers\.1, rows \[0, 1, 2\]"):
        run(tiny("llama"))


def test_a_float32_push_into_a_bfloat16_model_is_caught(tiny, monkeypatch):
    monkeypatch.setattr(pushing._Add, "apply", lambda self, hidden: hidden.float() + self.delta[:, None].float())
    with pytest.raises(hooks.HookError, match=r"returned .*float32.*the activation is .*bfloat16"):
        run(tiny("llama", dtype="bfloat16"))
    monkeypatch.setattr(hooks.Hook, "_changed", lambda self, hidden: self.apply(hidden))  # were it not refused at once:
    with pytest.raises(
        ReceiptError, match=r"step 1, site model\.layers\.1, all rows: .*bfloat16 came in and .*float32"
    ):
        run(tiny("llama", dtype="bfloat16"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_float32_vector_steers_a_half_precision_model_in_its_own_dtype(tiny, dtype):
    model = tiny("llama", dtype=dtype)
    v = torch.randn(model.d_model, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]])
    with hooks.record(model.module, [Site(1)]) as recorder:
        model.module(input_ids=ids)
        plain = recorder.outputs[Site(1)]
    with hooks.add(model.module, Site(1), v, 2.0) as hook, hooks.record(model.module, [Site(1)]) as recorder:
        model.module(input_ids=ids)
        steered = recorder.outputs[Site(1)]
    assert steered.dtype == model.dtype == hook.offset.dtype
    assert torch.equal(steered, plain + (2.0 * v).to(model.dtype))


@pytest.mark.parametrize("what", ["model", "block", "wrapper"])
def test_hooks_on_a_compiled_module_are_refused(tiny, what):
    """Compiled code keeps the hooks that it was compiled with: those that come later would be ignored."""
    model = tiny("llama", seed=99)  # its own copy: compiling leaves a mark
    module = model.module
    target = {"model": module, "block": blocks(module)[1], "wrapper": None}[what]
    if target is None:
        module = torch.compile(module, backend="eager")
        site = Site(at="module", path="_orig_mod.model.layers.1")
    else:
        target.compile(backend="eager")
        site = Site(1)
    try:
        with pytest.raises(hooks.HookError, match="is compiled"), hooks.add(module, site, torch.ones(model.d_model)):
            pass
        assert not blocks(model.module)[1]._forward_hooks
    finally:
        if target is not None:
            target._compiled_call_impl = None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_push_behind_a_forward_compiled_earlier_is_caught_by_its_receipt(tiny):
    """A replaced, compiled forward is no compiled module: only the receipt can tell."""
    model = tiny("llama")
    v = torch.eye(model.d_model)[:1]
    inner = model.module.model
    inner.forward = torch.compile(inner.forward, backend="eager")
    ids = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]])
    try:
        with torch.no_grad():
            plain = model.module(input_ids=ids, use_cache=False).logits
            with pushing.push(model.module, Site(1), v) as handle:
                handle.set(5 * v.expand(3, -1))
                steered = model.module(input_ids=ids, use_cache=False).logits
                if torch.equal(steered, plain):
                    with pytest.raises(ReceiptError, match=r"step 1.*never fired.*compiled before"):
                        handle.take()
                else:  # this compiler looked at the hooks again
                    assert handle.take().pushed[:, 0].tolist() == pytest.approx([5.0] * 3, abs=1e-4)
    finally:
        del inner.forward
        torch._dynamo.reset()


@pytest.mark.parametrize("at", ["block", "block_input", "attn", "mlp"])
def test_sites_inside_a_checkpointed_block_are_refused_and_its_output_is_safe(tiny, at):
    model = tiny("llama", seed=98)
    module, v = model.module, torch.randn(model.d_model, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]])

    def gradient():
        with hooks.add(module, Site(1, at), v.detach()) as hook:
            hook.offset = 1.0 * v
            loss = module(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum()
        return torch.autograd.grad(loss, v)[0]

    plain = gradient()
    module.train()
    (getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable)()
    try:
        if at in ("attn", "mlp"):
            with pytest.raises(hooks.HookError, match=r"no hook at model\.layers\.1\..*gradient checkpointing"):
                gradient()
        else:
            torch.testing.assert_close(gradient(), plain)
        with pytest.raises(ValueError, match="transformers drops the cache"):
            run(model, differentiable=True)
    finally:
        module.eval()
        (getattr(module, "activation_checkpointing_disable", None) or module.gradient_checkpointing_disable)()


def test_another_hook_that_takes_the_push_back_is_caught(tiny):
    model = tiny("llama")
    original = pushing._Add.register

    def with_a_foreign_one_behind(self):
        original(self)
        self.site.module.register_forward_hook(lambda module, inputs, output: 0.5 * output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pushing._Add, "register", with_a_foreign_one_behind)
        try:
            with pytest.raises(ReceiptError, match="Does another hook on this module change its output"):
                run(model)
        finally:
            blocks(model.module)[1]._forward_hooks.clear()
