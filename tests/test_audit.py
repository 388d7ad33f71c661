"""Who hangs on the model: found without data, told apart, and left alone."""

import functools
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from conftest import composed
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

import run
from feedback import audit, loop, maps, programs, pushing, results
from feedback.sites import Site, blocks

ROOT = Path(run.__file__).parent


def foreign(module, *rest):
    return None


def foreign_gradient(gradient):
    return None


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


class Weight(torch.Tensor):
    pass


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


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


@pytest.mark.parametrize(
    ("put", "kind", "path"),
    [
        ("class", "patched_class", "*transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward"),
        ("wrapper", "foreign_module", "model.layers.1"),
        ("call", "replaced_forward", "model.layers.1"),
        ("parameter", "gradient", "model.layers.1.mlp.up_proj.weight"),
        ("state", "state_dict", "model.layers.1"),
        ("subclass", "tensor_subclass", "model.layers.1.mlp.up_proj.weight"),
        ("mode", "mode", "*"),
    ],
)
def test_what_is_no_hook_but_runs_along_is_found_and_gone_when_it_is_gone(tiny, put, kind, path, monkeypatch):
    model = tiny("llama", seed=96)
    block = blocks(model.module)[1]
    before = audit.snapshot(model.module)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if put == "class":
            original = type(block).forward
            patch.setattr(type(block), "forward", lambda self, *args, **keywords: original(self, *args, **keywords))
        elif put == "wrapper":
            patch.setitem(blocks(model.module)._modules, "1", Around(block))
        elif put == "call":
            patch.setitem(vars(block), "_call_impl", lambda *args, **keywords: block.forward(*args, **keywords))
        elif put == "parameter":
            weight = block.mlp.up_proj.weight.requires_grad_()
            stack.callback(weight.requires_grad_, False)
            stack.callback(weight.register_hook(foreign_gradient).remove)
        elif put == "state":
            stack.callback(block.register_state_dict_post_hook(foreign).remove)
        elif put == "subclass":
            weight = block.mlp.up_proj.weight
            patch.setitem(block.mlp.up_proj._parameters, "weight", weight.detach().as_subclass(Weight))
        else:
            stack.enter_context(Watching())
        came, gone = audit.changes(before, audit.snapshot(model.module))
    assert [(f.kind, f.path, f.owner) for f in came] == [(kind, path, "foreign")] and gone == []
    assert audit.changes(before, audit.snapshot(model.module)) == ([], [])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen2", "gpt_neox", "mistral"])
def test_a_model_as_it_comes_has_nothing_foreign_and_a_used_one_only_what_transformers_put_there(tiny, family):
    model = tiny(family, seed=95)
    assert audit.snapshot(model.module) == []
    model.module(input_ids=torch.tensor([[1, 2, 3]] * 3), output_hidden_states=True)
    assert {f.owner for f in audit.snapshot(model.module)} <= {"transformers"}


def configured(*overrides):
    return composed("experiment=audit", "tracking=disabled", "quiet=true", *overrides)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_experiment_finds_every_plant_leaves_it_alone_and_finds_nothing_without_one(tmp_path, family):
    record = run.main(configured("model=tiny", f"model.family={family}", "steps=3"), tmp_path, None)
    summary = record["summary"]
    assert summary["found"] == summary["planted"] == 9 and summary["missed"] == []
    assert summary["false_alarms"] == summary["foreign_on_the_model"] == 0
    assert summary["left_alone"] is summary["restored"] is True
    table = {row["plant"]: row for row in results.read_table(tmp_path / "table.csv")}
    assert table["none"]["kl_nats"] == table["backward_hook"]["kl_nats"] == table["function_mode"]["kl_nats"] == 0
    steering = (
        "forward_hook",
        "forward_pre_hook",
        "global_hook",
        "replaced_forward",
        "wrapped_module",
        "patched_class",
    )
    assert all(table[name]["kl_nats"] > 1e-3 for name in steering)
    assert record["audit"]["before"] == record["audit"]["after"] == []


def test_the_experiment_without_plants_only_looks(tmp_path):
    record = run.main(configured("model=tiny", "audit.plants=[]", "steps=2"), tmp_path, None)
    assert record["summary"]["planted"] == 0 and len(results.read_table(tmp_path / "table.csv")) == 1


def test_a_plant_that_does_not_exist_is_refused_with_those_that_do(tmp_path):
    with pytest.raises(ValueError, match=r"\['virus'\] do not exist: expected some of forward_hook"):
        run.main(configured("model=tiny", "audit.plants=[virus]"), tmp_path, None)


@pytest.mark.real
def test_the_audit_finds_every_plant_on_smollm2_and_the_text_does_not_show_all_of_them(tmp_path):
    record = run.main(configured("steps=4"), tmp_path, None)
    assert record["summary"]["found"] == 9 and record["summary"]["false_alarms"] == 0
    assert record["summary"]["left_alone"] is record["summary"]["restored"] is record["weights_unchanged"] is True
