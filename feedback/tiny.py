"""What small random model stands in for a language model in tests of mechanics?

A few blocks of a real architecture with random weights, and a tokenizer whose tokens are bytes. It
says nothing about language models.
"""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

BYTES = 256
SPECIAL = {"pad": BYTES, "bos": BYTES + 1, "eos": BYTES + 2}
VOCAB_SIZE = BYTES + len(SPECIAL)
N_HEADS = 4
SLIDING_WINDOW = 16  # short enough for a test to run out of it
INITIALIZER_RANGE = 0.3  # logits of standard deviation 1 to 2; the usual 0.02 leaves them flat


def _llama(n_blocks: int, d_model: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": n_blocks,
        "hidden_size": d_model,
        "intermediate_size": 2 * d_model,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_HEADS // 2,
    }


def _gpt_neox(n_blocks: int, d_model: int) -> dict[str, Any]:
    sizes = _llama(n_blocks, d_model)
    del sizes["num_key_value_heads"]
    return sizes


def _gpt2(n_blocks: int, d_model: int) -> dict[str, Any]:
    return {"n_layer": n_blocks, "n_embd": d_model, "n_inner": 2 * d_model, "n_head": N_HEADS}


def _mistral(n_blocks: int, d_model: int) -> dict[str, Any]:
    head = {"head_dim": d_model // N_HEADS, "sliding_window": SLIDING_WINDOW}
    return _llama(n_blocks, d_model) | head


def _gemma2(n_blocks: int, d_model: int) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0}  # low enough to bend
    return _mistral(n_blocks, d_model) | {"query_pre_attn_scalar": d_model // N_HEADS} | caps


_SIZES = {
    "llama": _llama,
    "gpt2": _gpt2,  # learned positions, fused attention weights, tied embeddings
    "gemma2": _gemma2,  # scaled tied embeddings, capped logits, sliding and full blocks in turn
    "qwen2": _llama,  # biases in the attention
    "gpt_neox": _gpt_neox,  # attention and MLP in parallel
    "mistral": _mistral,  # sliding attention
}
FAMILIES = tuple(_SIZES)


def tiny_config(family: str, *, n_blocks: int, d_model: int, vocab_size: int, max_positions: int) -> PreTrainedConfig:
    """The configuration of a tiny model; ValueError for an unknown family or impossible sizes."""
    if family not in _SIZES:
        raise ValueError(f"tiny family {family!r} does not exist: expected one of {', '.join(FAMILIES)}")
    if n_blocks < 1 or d_model < 1 or d_model % (2 * N_HEADS):
        raise ValueError(
            f"a tiny model of {n_blocks} blocks and d_model {d_model}: expected at least one "
            f"block, and a d_model that {N_HEADS} heads of even width share, so a multiple of "
            f"{2 * N_HEADS}"
        )
    if vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"tiny vocab_size {vocab_size}: the byte tokenizer needs {VOCAB_SIZE} ({BYTES} bytes, {', '.join(SPECIAL)})"
        )
    build = CONFIG_MAPPING[family]
    settings = {
        **_SIZES[family](n_blocks, d_model),
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
        "initializer_range": INITIALIZER_RANGE,
        **{f"{name}_token_id": number for name, number in SPECIAL.items()},
    }
    # A configuration accepts any keyword: a misspelt one would leave a full-sized model unnoticed.
    unknown = [name for name in settings if not hasattr(build(), name)]
    if unknown:
        raise ValueError(f"{build.__name__} has no setting {', '.join(unknown)}")
    return build(**settings)


def tiny_model(config: PreTrainedConfig, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model on the CPU whose weights are those of ``config`` and ``seed``, rounded to ``dtype``.

    Norm weights and biases are random too: left at 1 and 0, the wrong norm would do as well as the
    right one. The global random state is as it was.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)  # not buffers: rotary frequencies stay float32
    return module


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is byte i of the text in UTF-8; pad, bos and eos follow, never added unasked."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # a visible character for every byte,
    visible = [byte for byte in range(BYTES) if chr(byte) in alphabet]  # itself where it is one,
    others = [byte for byte in range(BYTES) if byte not in visible]  # else the next from U+0100 on
    names = {chr(byte): byte for byte in visible} | {chr(BYTES + i): b for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {f"{name}_token": f"<|{name}|>" for name in SPECIAL}
    tokenizer.add_special_tokens(list(special.values()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
