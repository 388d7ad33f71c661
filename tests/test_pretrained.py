"""Claims about feedback/pretrained.py: trained models come in whole, or fail in one line."""

import json

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from feedback.models import ModelError, ModelSpec, checksum, describe, load
from feedback.pretrained import read_config, read_model


@pytest.fixture
def saved(tiny, tmp_path):
    """A folder with a tiny llama and its tokenizer, as anybody's model would be."""
    tiny("llama").module.save_pretrained(tmp_path)
    tiny("llama").tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there


def test_a_model_read_from_a_folder_is_the_model_that_was_saved(tiny, saved):
    model = load(ModelSpec(kind="hf", name=str(saved)))
    original = tiny("llama")
    assert model.info.checksum == original.info.checksum
    assert (model.info.kind, model.info.name, model.info.family) == ("hf", str(saved), "llama")
    ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
    with torch.no_grad():
        assert torch.equal(model.module(input_ids=ids).logits, original.module(input_ids=ids).logits)
    assert model.encode("Größe") == original.encode("Größe")
    assert describe(ModelSpec(kind="hf", name=str(saved))).d_model == read_config(str(saved)).hidden_size == 32


def test_weights_come_in_the_dtype_asked_for_and_rotary_frequencies_stay_exact(saved):
    module, _ = read_model(str(saved), None, torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in module.buffers()} == {torch.float32}


def test_a_folder_that_lacks_a_weight_is_refused_and_not_filled_with_noise(saved):
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights of LlamaForCausalLM, among them model\.layers\.3\.mlp"):
        read_model(str(saved), None, torch.float32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5"}, "Unrecognized configuration class"),
        ({"model_type": "no-such-family"}, "no-such-family"),
        ({}, "Unrecognized model"),
    ],
)
def test_a_folder_without_a_causal_model_is_refused_in_one_line(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as error:
        read_model(str(tmp_path), None, torch.float32)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder", "~/no-such-folder"])
def test_a_folder_that_does_not_exist_is_no_name_on_the_hub(name):
    with pytest.raises(ModelError, match=f"^model folder {name} does not exist$"):
        read_config(name)


def test_without_a_network_a_name_on_the_hub_fails_at_once_in_one_line(no_network):
    with pytest.raises(ModelError, match="not in the local cache, and the hub does not answer") as error:
        read_model("somebody/some-model", None, torch.float32)
    assert "\n" not in str(error.value)


def test_reading_prints_no_progress_and_leaves_the_setting_as_it_was(saved, capfd):
    assert logging.is_progress_bar_enabled()
    read_model(str(saved), None, torch.float32)
    assert logging.is_progress_bar_enabled()
    assert "Loading weights" not in capfd.readouterr().err


def test_the_checksum_survives_saving_and_reading(tiny, saved):
    assert checksum(read_model(str(saved), None, torch.float32)[0]) == tiny("llama").info.checksum
