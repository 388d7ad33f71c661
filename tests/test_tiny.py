"""Claims about feedback/tiny.py: small random models that are what they say."""

import pytest
import torch

from feedback import tiny as module_under_test
from feedback.tiny import FAMILIES, byte_tokenizer, tiny_config, tiny_model

SIZES = {"n_blocks": 3, "d_model": 16, "vocab_size": 259, "max_positions": 64}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_has_the_sizes_it_was_asked_for(family):
    config = tiny_config(family, **SIZES)
    assert config.num_hidden_layers == 3
    assert config.hidden_size == 16
    assert config.vocab_size == 259
    assert config.max_position_embeddings == 64
    # 259·16 = 4,144 numbers per embedding, two where they are not tied; a block is at most
    # 4·16² (attention) + 3·16·32 (MLP) = 2,560 and some norms and biases: under 20,000 in all.
    assert sum(p.numel() for p in tiny_model(config, 0).parameters()) < 20_000


def test_a_misspelt_setting_is_refused_and_not_ignored(monkeypatch):
    wrong = {"num_hidden_layer": 3, "hidden_size": 16}
    monkeypatch.setitem(module_under_test._SIZES, "llama", lambda n_blocks, d_model: wrong)
    with pytest.raises(ValueError, match=r"LlamaConfig has no setting num_hidden_layer$"):
        tiny_config("llama", **SIZES)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_depend_on_the_seed_alone_and_leave_the_global_generator_alone(family):
    config = tiny_config(family, **SIZES)
    torch.manual_seed(1)
    first = tiny_model(config, 7).state_dict()
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))  # as if no model had been made
    torch.manual_seed(2)
    again, another = tiny_model(config, 7).state_dict(), tiny_model(config, 8).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if not torch.equal(first[name], another[name])]
    constant = {name for name in first if name not in drawn}
    assert not [name for name in constant if name.endswith(("weight", "bias"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_neither_flat_nor_decided(tiny, family):
    ids = torch.arange(60).reshape(3, 20)
    with torch.no_grad():
        p = tiny(family).module(input_ids=ids).logits.softmax(-1)
    entropy = -(p * p.log()).sum(-1)  # ln 259 = 5.56 nats when flat
    assert 3.0 < float(entropy.mean()) < 5.1
    assert float(p.amax(-1).mean()) > 0.02  # 1/259 = 0.004 when flat


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_sliding_attention_forgets_what_is_further_back_than_its_window(family):
    config = tiny_config(family, n_blocks=1, d_model=32, vocab_size=259, max_positions=64)
    module = tiny_model(config, 0).eval()
    ids = torch.arange(3 * 40).reshape(3, 40) % 256
    other = ids.clone()
    other[:, 0] = 200
    with torch.no_grad():
        moved = (module(input_ids=ids).logits - module(input_ids=other).logits).abs().amax(-1)
    # one block: position 15 is the last whose 16 visible positions include position 0
    assert bool((moved[:, 1:16] > 0).all())
    assert bool((moved[:, 16:] == 0).all())


def test_gemma2_bends_logits_and_scales_embeddings():
    config = tiny_config("gemma2", **SIZES)
    module = tiny_model(config, 0)
    assert (config.final_logit_softcapping, config.attn_logit_softcapping) == (5.0, 5.0)
    ids = torch.tensor([[1], [2], [3]])
    rows = module.get_input_embeddings()(ids)
    torch.testing.assert_close(rows, 4.0 * module.get_input_embeddings().weight[ids])  # √16


@pytest.mark.parametrize("text", ["plain", "Größe: π ≈ 3.14\n\t", "  two  spaces ", "🙂 <0x41>", "\x00"])
def test_token_i_is_byte_i_and_decodes_back(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_byte_has_its_token_and_the_special_ones_follow():
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 259
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        256,
        257,
        258,
    )
    assert tokenizer("<|eos|>")["input_ids"] == [258]
    assert tokenizer.decode([0xFF, 65]) == "\ufffdA"  # no UTF-8: one mark, the rest is kept
    assert all(tokenizer.decode([byte]) == chr(byte) for byte in range(128))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"family": "lama"}, r"'lama' does not exist: expected one of llama, gpt2, gemma2"),
        ({"n_blocks": 0}, "expected at least one block"),
        ({"d_model": 30}, "a multiple of 8"),
        ({"vocab_size": 100}, r"the byte tokenizer needs 259"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**{"family": "llama", **SIZES, **changed})
