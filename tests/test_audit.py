"""Who hangs on the model: found without data, told apart, and left alone."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from feedback import audit, loop, maps, programs, pushing
from feedback.sites import Site, blocks


def foreign(module, args, output):
    return None


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def seen(model):
    return [(f.kind, f.path, f.owner, f.name) for f in audit.snapshot(model.module) if f.owner != "transformers"]


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        ("register_forward_hook", "forward"),
        ("register_forward_pre_hook", "forward_pre"),
        ("register_full_backward_hook", "backward"),
        ("register_full_backward_pre_hook", "backward_pre"),
    ],
)
def test_a_foreign_hook_of_every_kind_is_found_with_its_place_and_origin(tiny, register, kind):
    model = tiny("llama")
    before = audit.snapshot(model.module)
    handle = getattr(blocks(model.module)[1], register)(functools.partial(foreign))
    try:
        (came,), gone = audit.changes(before, audit.snapshot(model.module))
    finally:
        handle.remove()
    assert (came.kind, came.path, came.owner, came.name) == (kind, "model.layers.1", "foreign", "foreign")
    assert came.defined.split(":")[0].endswith("test_audit") and gone == []
    assert audit.changes(before, audit.snapshot(model.module)) == ([], [])


def test_a_global_hook_is_found_though_it_is_on_no_module(tiny):
    handle = register_module_forward_hook(foreign)
    try:
        assert ("global_forward", "*", "foreign", "foreign") in seen(tiny("llama"))
    finally:
        handle.remove()
    assert not [f for f in seen(tiny("llama")) if f[0] == "global_forward"]


def test_a_replaced_forward_and_a_parametrized_weight_are_found(tiny):
    model = tiny("llama")
    block = blocks(model.module)[2]
    block.forward = lambda *args, **kwargs: type(block).forward(block, *args, **kwargs)
    parametrize.register_parametrization(block.mlp.up_proj, "weight", Doubled())
    try:
        kinds = {(kind, path) for kind, path, _, _ in seen(model)}
    finally:
        parametrize.remove_parametrizations(block.mlp.up_proj, "weight", leave_parametrized=False)
        del block.forward
    assert ("replaced_forward", "model.layers.2") in kinds
    assert ("parametrization", "model.layers.2.mlp.up_proj.weight") in kinds
    assert not seen(model)


def test_our_hooks_are_ours_and_in_the_order_in_which_they_run(tiny):
    model = tiny("llama")
    v = torch.eye(model.d_model)[:1]
    with pushing.push(model.module, Site(1), v):
        during = [f for f in audit.snapshot(model.module) if f.path == "model.layers.1"]
    assert [(f.order, f.name) for f in during] == [(0, "Record"), (1, "_Add"), (2, "_Measure")]
    assert {f.owner for f in during} == {"ours"}


def test_a_run_says_what_hung_on_the_model_before_during_and_after(tiny):
    model = tiny("llama")
    handle = blocks(model.module)[3].register_forward_hook(foreign)
    try:
        program = programs.constant(torch.eye(model.d_model)[:1], 1.0, steps=2, rows=3)
        prompts = [model.encode(p) for p in ("The sea", "A letter", "Dog")]
        told = loop.run(model, prompts, program, feedback_map=maps.expected_embedding(), site=Site(1)).meta["audit"]
    finally:
        handle.remove()
    assert [one["name"] for one in told["before"] if one["owner"] == "foreign"] == ["foreign"]
    assert told["after"] == told["before"]
    added = [(one["path"], one["name"]) for one in told["added_during"]]
    assert added[:3] == [("model.layers.1", "Record"), ("model.layers.1", "_Add"), ("model.layers.1", "_Measure")]
    assert all(one["owner"] == "ours" for one in told["added_during"])
