"""Claims about feedback/sites.py: where the parts of a model are, and what the lens says."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from feedback import sites
from feedback.hooks import record, record_final
from feedback.sites import Site, lens, resolve, resolve_block, unembed
from feedback.tiny import FAMILIES

IDS = torch.tensor([[72, 101, 108, 108, 111], [0, 255, 7, 7, 7], [32, 33, 34, 35, 36]])
PATHS = {
    "llama": ("model.layers.2", "self_attn", "mlp", "model.norm"),
    "gpt2": ("transformer.h.2", "attn", "mlp", "transformer.ln_f"),
    "gemma2": ("model.layers.2", "self_attn", "mlp", "model.norm"),
    "qwen2": ("model.layers.2", "self_attn", "mlp", "model.norm"),
    "gpt_neox": ("gpt_neox.layers.2", "attention", "mlp", "gpt_neox.final_layer_norm"),
    "mistral": ("model.layers.2", "self_attn", "mlp", "model.norm"),
}
OTHERS = {  # families without a tiny model: scaled logits, and blocks under unknown names
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "num_key_value_heads": 2},
    "cohere": {"logit_scale": 0.25, "num_key_value_heads": 2},
    "mpt": {},
}


def other(family: str) -> PreTrainedModel:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 259,
        "initializer_range": 0.3,
        "pad_token_id": 256,
        "bos_token_id": 257,
        "eos_token_id": 258,
        **OTHERS[family],
    }
    build = CONFIG_MAPPING[family]
    known = {build().attribute_map.get(k, k): v for k, v in sizes.items() if hasattr(build(), k)}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return AutoModelForCausalLM.from_config(build(**known)).eval()


@torch.no_grad()
def last_block_hidden_logits(
    module: PreTrainedModel,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    last = Site(block=-1)
    with record(module, [last]) as recorder, record_final(module) as final:
        logits = module(input_ids=IDS).logits
        return recorder.outputs[last], final.take(), logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lens_at_the_last_block_is_the_models_logits(tiny, family):
    module = tiny(family).module
    block, hidden, logits = last_block_hidden_logits(module)
    assert logits.shape == (3, 5, 259)
    torch.testing.assert_close(lens(module, block), logits)
    torch.testing.assert_close(unembed(module, hidden), logits)
    assert (unembed(module, block) - logits).abs().max() > 0.1  # the final norm does something


@pytest.mark.parametrize("family", OTHERS)
def test_the_lens_holds_for_scaled_logits_and_for_blocks_under_unknown_names(family):
    module = other(family)
    assert len(sites.blocks(module)) == 4
    block, hidden, logits = last_block_hidden_logits(module)
    torch.testing.assert_close(lens(module, block), logits)
    torch.testing.assert_close(unembed(module, hidden), logits)


def test_gemma2_logits_stay_under_their_cap(tiny):
    module = tiny("gemma2").module
    logits = unembed(module, torch.full((3, 32), 1e3))
    assert logits.abs().max() <= module.config.final_logit_softcapping == 5.0
    assert logits.abs().max() > 4.9


def test_the_lens_of_one_state_is_the_lens_of_a_batch(tiny):
    module = tiny("llama").module
    states = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0))
    assert lens(module, states).shape == (3, 2, 259)
    torch.testing.assert_close(lens(module, states)[2, 1], lens(module, states[2, 1]))


def test_the_lens_fires_no_hooks_and_passes_gradients(tiny):
    module = tiny("llama").module
    fired = []
    handles = [
        part.register_forward_hook(lambda *_: fired.append(1))
        for part in (sites.final_norm(module), sites.unembedding(module))
    ]
    try:
        hidden = torch.ones(3, 32, requires_grad=True)
        lens(module, hidden)[:, 65].sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    assert fired == []
    assert hidden.grad is not None and bool(hidden.grad.abs().sum(-1).gt(0).all())


def test_the_lens_takes_float32_states_of_a_bfloat16_model():
    from feedback.models import ModelSpec, load

    module = load(ModelSpec(kind="tiny", dtype="bfloat16")).module
    assert lens(module, torch.ones(3, 32)).dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_of_a_block_is_found_under_its_familys_name(tiny, family):
    module = tiny(family).module
    block, attn, mlp, norm = PATHS[family]
    found = {at: resolve(module, Site(block=-2, at=at)) for at in sites.AT[:4]}
    assert {at: site.path for at, site in found.items()} == {
        "block": block,
        "block_input": block,
        "attn": f"{block}.{attn}",
        "mlp": f"{block}.{mlp}",
    }
    assert all(site.module is module.get_submodule(site.path) for site in found.values())
    assert [at for at, site in found.items() if site.before] == ["block_input"]
    assert {site.block for site in found.values()} == {2}  # 4 blocks, second from the end
    assert sites.final_norm(module) is module.get_submodule(norm)
    assert sites.embedding(module).weight.shape == (259, 32)
    assert sites.unembedding(module).weight.shape == (259, 32)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gpt_neox", "mistral"])
def test_a_block_passes_on_its_input_plus_attn_plus_mlp(tiny, family):
    module = tiny(family).module  # not gemma2: it norms both once more before adding
    wanted = [Site(1, at) for at in ("block_input", "attn", "mlp", "block")]
    with torch.no_grad(), record(module, wanted) as recorder:
        module(input_ids=IDS)
        before, attn, mlp, after = recorder.outputs.values()
    torch.testing.assert_close(after, before + attn + mlp)
    assert (after - before).abs().max() > 0.1


def test_any_module_is_a_site_by_its_dotted_name(tiny):
    module = tiny("llama").module
    site = resolve(module, Site(at="module", path="model.layers.1.mlp.up_proj"))
    assert site.module is module.model.layers[1].mlp.up_proj
    assert (site.block, site.before) == (None, False)


@pytest.mark.parametrize(
    ("block", "n_blocks", "number"),
    [("middle", 30, 15), ("middle", 5, 2), (0, 30, 0), (29, 30, 29), (-1, 30, 29), (-30, 30, 0)],
)
def test_a_block_is_counted_from_zero_from_the_end_or_is_the_middle_one(block, n_blocks, number):
    assert resolve_block(block, n_blocks) == number


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (31, "site block 31 does not exist: this model has blocks 0–29"),
        (30, "site block 30 does not exist: this model has blocks 0–29"),
        (-31, "site block -31 does not exist: this model has blocks 0–29"),
        ("last", "site block 'last' is no block: expected a number from 0 to 29"),
        (True, "site block True is no block"),
    ],
)
def test_a_block_that_does_not_exist_is_refused_with_those_that_do(block, message):
    with pytest.raises(ValueError) as error:
        resolve_block(block, 30)
    assert str(error.value).startswith(message)


def test_a_site_refuses_an_unknown_place_and_a_path_without_at_module():
    with pytest.raises(ValueError, match=r"'atn' does not exist: expected one of block, .*, mlp"):
        Site(at="atn")
    with pytest.raises(ValueError, match="a path goes with at=module, and only with it"):
        Site(at="mlp", path="model.norm")
    with pytest.raises(ValueError, match="a path goes with at=module, and only with it"):
        Site(at="module")


def test_a_misspelt_path_is_answered_with_the_names_where_it_leaves_the_model(tiny):
    with pytest.raises(ValueError) as error:
        resolve(tiny("llama").module, Site(at="module", path="model.layers.1.mpl.up_proj"))
    assert str(error.value) == (
        "site path 'model.layers.1.mpl.up_proj' does not exist: this model has "
        "model.layers.1.self_attn, model.layers.1.mlp, model.layers.1.input_layernorm, "
        "model.layers.1.post_attention_layernorm"
    )


def test_a_block_without_the_part_asked_for_names_the_parts_it_has(tiny, monkeypatch):
    module = tiny("llama").module
    monkeypatch.setitem(sites._INSIDE_BLOCK, "mlp", ("no_such_name",))
    with pytest.raises(ValueError, match=r"site at 'mlp': block 2 has no such module; it has self"):
        resolve(module, Site(at="mlp"))


def test_of_two_lists_as_long_as_the_model_is_deep_the_larger_holds_the_blocks():
    module = other("mpt")
    decoy = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(4))
    module.transformer._modules = {"decoy": decoy, **module.transformer._modules}
    assert sites.blocks(module) is module.transformer.blocks


def test_a_model_without_blocks_or_without_a_clear_final_norm_is_refused():
    module = other("mpt")
    module.transformer.another = torch.nn.LayerNorm(32)
    module.transformer.third = torch.nn.LayerNorm(32)
    del module.transformer.norm_f
    with pytest.raises(ValueError, match="no final norm found in MptForCausalLM: beside the block"):
        sites.final_norm(module)
    del module.transformer.blocks
    with pytest.raises(ValueError, match="no list of 4 decoder blocks found in MptForCausalLM"):
        sites.blocks(module)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_some_tokens_are_those_of_all_scaling_and_capping_included(tiny, family):
    module = tiny(family).module
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    tokens = [200, 3, 77]
    torch.testing.assert_close(sites.unembed(module, hidden, tokens), sites.unembed(module, hidden)[..., tokens])
