"""Claims about feedback/contract.py: what a model must keep to run in the loop, and that every
breach is seen.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from feedback import sites
from feedback.contract import check_contract, embedding_rows
from feedback.models import ModelError, ModelSpec, load
from feedback.tiny import FAMILIES


@pytest.fixture
def model():
    """A llama of its own, to be broken."""
    return load(ModelSpec(kind="tiny"))


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_rows_fed_as_vectors_do_what_their_tokens_do(tiny, family):
    module, rows = tiny(family).module, tiny(family).embedding
    ids = torch.tensor([[0, 1, 2, 3], [70, 65, 65, 258], [9, 99, 199, 256]])
    vectors = torch.nn.functional.one_hot(ids, 259).float() @ rows
    with torch.no_grad():
        fed, read = module(inputs_embeds=vectors).logits, module(input_ids=ids).logits
    torch.testing.assert_close(fed, read)
    assert (read[0] - read[1]).abs().max() > 0.1  # different tokens do different things


def test_rows_are_the_weight_itself_unless_the_module_changes_it(tiny):
    for family in FAMILIES:
        weight = sites.embedding(tiny(family).module).weight
        rows = embedding_rows(tiny(family).module)
        assert rows.shape == (259, 32)
        assert (rows.data_ptr() == weight.data_ptr()) == (family != "gemma2")
        scale = 32**0.5 if family == "gemma2" else 1.0
        torch.testing.assert_close(rows, scale * weight)


def test_an_embedding_that_depends_on_the_place_is_refused(model):
    def by_place(module, args, output):
        return output * torch.arange(1, output.shape[-2] + 1)[:, None]

    with sites.embedding(model.module).register_forward_hook(by_place):
        broken("its embedding module does not return rows of a matrix", model)


def test_a_model_that_treats_vectors_differently_from_tokens_is_refused(model, monkeypatch):
    forward = model.module.forward

    def scaled(**inputs):
        if "inputs_embeds" in inputs:
            inputs["inputs_embeds"] = 2 * inputs["inputs_embeds"]
        return forward(**inputs)

    monkeypatch.setattr(model.module, "forward", scaled)
    broken("embedding vectors fed as inputs_embeds do not do what their tokens do", model)


def test_logits_that_are_more_than_the_unembedding_are_refused(model):
    head = sites.unembedding(model.module)
    with head.register_forward_hook(lambda module, args, logits: 3 * torch.tanh(logits / 3)):
        broken("its logits are more than an unembedding of the final hidden state", model)


def test_something_between_the_last_block_and_the_unembedding_is_refused(model):
    norm = sites.final_norm(model.module)
    with norm.register_forward_hook(lambda module, args, hidden: 1.01 * hidden):
        broken("more than a final norm is between its last block and the unembedding", model)


def test_weights_that_are_no_numbers_are_refused(model):
    with torch.no_grad():
        sites.unembedding(model.module).weight[65] = float("nan")
    broken("off by nan", model)


def test_embeddings_narrower_than_the_blocks_are_refused():
    """OPT-350m's kind: a projection stands between its embedding and its blocks."""
    config = CONFIG_MAPPING["opt"](
        vocab_size=259,
        hidden_size=32,
        word_embed_proj_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
    )
    module = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match="259 and its blocks 32 wide, its embedding has 259 rows of 16"):
        check_contract(module, embedding_rows(module))


def broken(message, model):
    with pytest.raises(ModelError) as error:
        check_contract(model.module, model.embedding)
    assert "LlamaForCausalLM cannot run in the loop: " in str(error.value)
    assert message in str(error.value)
    assert not any(m._forward_hooks for m in sites.blocks(model.module))  # and its own hooks are gone
