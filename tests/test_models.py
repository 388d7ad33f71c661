"""Claims about feedback/models.py: what a loaded model is, and what its checksum sees."""

import json
from dataclasses import FrozenInstanceError, asdict

import pytest
import torch

from feedback.models import DTYPES, ModelError, ModelSpec, checksum, describe, load
from feedback.tiny import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_model_is_frozen_and_in_evaluation_mode(tiny, family):
    model = tiny(family)
    assert not any(p.requires_grad for p in model.module.parameters())
    assert not any(m.training for m in model.module.modules())
    assert not model.embedding.requires_grad
    with pytest.raises(FrozenInstanceError):
        model.module = None


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_described_without_weights_is_what_is_loaded(tiny, family):
    model, shape = tiny(family), describe(ModelSpec(kind="tiny", family=family))
    assert asdict(shape) == {"n_blocks": 4, "d_model": 32, "vocab_size": 259, "max_positions": 512}
    assert asdict(shape).items() <= asdict(model.info).items()
    assert (model.n_blocks, model.d_model, model.vocab_size, model.max_positions) == (
        4,
        32,
        259,
        512,
    )
    assert model.embedding.shape == (259, 32)
    assert json.loads(json.dumps(asdict(model.info)))["family"] == family


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_the_contract_in_every_dtype(family, dtype):
    model = load(ModelSpec(kind="tiny", family=family, dtype=dtype))
    assert {p.dtype for p in model.module.parameters()} == {DTYPES[dtype]}
    # rotary frequencies keep their precision in every dtype
    assert {b.dtype for b in model.module.buffers() if b.is_floating_point()} <= {torch.float32}
    assert model.dtype == model.embedding.dtype == DTYPES[dtype]
    assert (model.info.dtype, model.info.device, model.device.type) == (dtype, "cpu", "cpu")


def test_the_attention_is_sdpa_where_the_family_has_it(tiny):
    used = {family: tiny(family).module.config._attn_implementation for family in FAMILIES}
    assert used.pop("gemma2") == "eager"  # its capped attention scores are not in sdpa
    assert set(used.values()) == {"sdpa"}


def test_text_becomes_tokens_and_text_again(tiny):
    model = tiny("llama")
    ids = model.encode("Größe 🙂")
    assert ids == list("Größe 🙂".encode())
    assert model.decode(ids) == model.decode(torch.tensor(ids)) == "Größe 🙂"


def test_a_text_without_tokens_is_refused(tiny):
    with pytest.raises(ValueError, match="the text '' has no tokens"):
        tiny("llama").encode("")


def test_the_mean_embedding_length_is_the_mean_of_the_rows_lengths(tiny):
    for family in ("llama", "gemma2"):
        lengths = [sum(x * x for x in row) ** 0.5 for row in tiny(family).embedding.tolist()]
        assert float(tiny(family).mean_embedding_length) == pytest.approx(sum(lengths) / 259, rel=1e-5)


def test_the_last_positions_logits_can_be_had_alone(tiny):
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    for family in FAMILIES:
        model = tiny(family)
        with torch.no_grad():
            last = model.module(input_ids=ids, **model.last_position_only).logits
            every = model.module(input_ids=ids).logits
        assert last.shape == (3, 1, 259)
        torch.testing.assert_close(last[:, -1], every[:, -1])


def test_padding_is_the_tokenizers_own_or_the_end_of_text(tiny):
    model = tiny("llama")
    assert model.pad_id == 256
    bare = load(ModelSpec(kind="tiny"))
    bare.tokenizer.pad_token = None
    assert bare.pad_id == 258


def test_equal_weights_have_equal_checksums_and_one_changed_bit_is_seen():
    first, second = (load(ModelSpec(kind="tiny")) for _ in range(2))
    assert len(first.info.checksum) == 64
    assert first.info.checksum == second.info.checksum == checksum(first.module)
    assert load(ModelSpec(kind="tiny", seed=1)).info.checksum != first.info.checksum
    weight = second.module.model.layers[3].mlp.down_proj.weight
    kept = weight[5, 7].clone()
    weight[5, 7] = torch.nextafter(kept, torch.tensor(torch.inf))
    assert checksum(second.module) != first.info.checksum
    weight[5, 7] = kept
    assert checksum(second.module) == first.info.checksum


def test_the_checksum_sees_buffers_names_shapes_and_dtypes():
    module = torch.nn.Linear(2, 3, bias=False)
    torch.nn.init.ones_(module.weight)
    seen = {checksum(module)}
    module.register_buffer("scale", torch.tensor(2.0))
    seen.add(checksum(module))
    module.scale.fill_(3.0)
    seen.add(checksum(module))
    module.weight.data = module.weight.data.reshape(2, 3)
    seen.add(checksum(module))
    module.weight.data = torch.ones(2, 3, dtype=torch.float64)
    seen.add(checksum(module))
    assert len(seen) == 5


def test_a_tied_weight_counts_once_in_the_checksum_and_in_the_number_of_parameters():
    tied = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    alone = torch.nn.Sequential(tied[0])
    assert checksum(tied) != checksum(alone)
    tied[1].weight = tied[0].weight
    assert checksum(tied) == checksum(alone)
    gpt2 = load(ModelSpec(kind="tiny", family="gpt2"))
    # per block: attention 32·96+96 + 32·32+32, MLP 32·64+64 + 64·32+32, two norms of 64: 8,544
    # embeddings 259·32 once and 512·32 positions, final norm 64
    assert gpt2.info.n_parameters == 4 * 8_544 + 259 * 32 + 512 * 32 + 64


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "gguf"}, "model kind 'gguf' does not exist: expected one of smollm2, hf, tiny"),
        (
            {"kind": "hf"},
            "model kind 'hf' with name None: a name, on the hub or of a folder, goes with",
        ),
        ({"name": "gpt2"}, "model kind 'smollm2' with name 'gpt2'"),
        ({"kind": "tiny", "family": "lama"}, "tiny family 'lama' does not exist"),
        (
            {"dtype": "fp32"},
            "dtype 'fp32' does not exist: expected one of float32, bfloat16, float16",
        ),
        ({"device": "gpu"}, "device 'gpu' does not exist: expected one of cpu, cuda, mps"),
        ({"device": "cuda:x"}, "device 'cuda:x' does not exist"),
        ({"device": "cuda:99"}, "device cuda:99 is not to be had here"),
    ],
)
def test_a_wrong_setting_is_refused_before_any_weight_is_read(spec, message):
    for use in (describe, load):
        with pytest.raises(ValueError) as error:
            use(ModelSpec(**spec))
        assert str(error.value).startswith(message)
        assert "\n" not in str(error.value)


def test_a_device_that_is_not_there_is_a_model_error_with_a_way_out():
    with pytest.raises(ModelError, match=r"try device=cpu$"):
        load(ModelSpec(device="cuda:99"))


@pytest.mark.real
def test_smollm2_is_the_model_that_the_documentation_describes(smollm2):
    info = smollm2.info
    assert (info.n_blocks, info.d_model, info.vocab_size) == (30, 576, 49152)
    assert info.n_parameters == 134_515_008
    assert asdict(describe(ModelSpec())).items() <= asdict(info).items()
    weight = smollm2.module.get_input_embeddings().weight
    assert smollm2.embedding.data_ptr() == weight.data_ptr()  # tied and not copied
    assert smollm2.decode(smollm2.encode("Größe 3.14\n")) == "Größe 3.14\n"


@pytest.mark.real
def test_smollm2_answers_a_question(smollm2):
    ids = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    out = smollm2.module.generate(**ids, max_new_tokens=8, do_sample=False)
    assert smollm2.decode(out[0, ids["input_ids"].shape[1] :]).startswith("The capital of France is Paris.")
