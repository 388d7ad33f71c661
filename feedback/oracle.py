"""A two-token causal model whose soft loop is known exactly: u' = tanh((b + L·u)/2).

Everything that runs on a language model runs on it unchanged, and must find what the formula says. Source of the
formula: Backour 2026, arXiv 2609.02049 (two tokens, linear transport).

Tokens A and B are read as q₀ + q₁ and q₀ − q₁, so a soft token of weights w and 1−w is q₀ + u·q₁ with u = 2w − 1. Each
of n blocks adds (L·u + b)/n along q₂, and the unembedding reads ±½ along q₂: the logits differ by b + L·u, and α along
q₂, pushed at any block, adds α to b. q₀, q₁, q₂ are orthonormal, drawn from the model's seed. Attention writes keys and
values into the cache like any other and adds nothing, so the soft token is all the loop remembers, in every context.
"""

import math
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

TOKENS = ("A", "B")  # every other word is read as B


class OracleConfig(PreTrainedConfig):
    """Sizes as the field names them, and the loop's coupling L and field b."""

    model_type = "oracle"

    def __init__(
        self,
        coupling: float = 4.0,
        field: float = 0.0,
        num_hidden_layers: int = 4,
        hidden_size: int = 32,
        max_position_embeddings: int = 4096,
        seed: int = 0,
        **rest: Any,
    ) -> None:
        self.coupling, self.field, self.seed = coupling, field, seed
        self.num_hidden_layers, self.hidden_size = num_hidden_layers, hidden_size
        self.max_position_embeddings = max_position_embeddings
        self.vocab_size, self.num_attention_heads = len(TOKENS), 1
        super().__init__(**{"tie_word_embeddings": False, **rest})


class OracleAttention(nn.Module):
    """Keeps keys and values, adds nothing."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, past_key_values: Cache | None = None) -> tuple[Tensor, None]:
        if past_key_values is not None:
            past_key_values.update(hidden_states[:, None], hidden_states[:, None], self.layer)
        return torch.zeros_like(hidden_states), None


class OracleBlock(nn.Module):
    def __init__(self, config: OracleConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = OracleAttention(layer)
        self.mlp = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, past_key_values: Cache | None = None) -> Tensor:
        hidden_states = hidden_states + self.self_attn(hidden_states=hidden_states, past_key_values=past_key_values)[0]
        return hidden_states + self.mlp(hidden_states)


class OracleModel(nn.Module):
    def __init__(self, config: OracleConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OracleBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.Identity()


class OracleForCausalLM(PreTrainedModel):
    """The oracle behind the interface of a causal language model of transformers."""

    config_class = OracleConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: OracleConfig) -> None:
        super().__init__(config)
        self.model = OracleModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """They are set, not drawn: see :func:`oracle_model`."""

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool | None = None,
    ) -> CausalLMOutputWithPast:
        hidden = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        states = [hidden]
        for block in self.model.layers:
            hidden = block(hidden, past_key_values=past_key_values if use_cache else None)
            states.append(hidden)
        hidden = self.model.norm(hidden)
        logits = self.lm_head(hidden[:, -logits_to_keep:])
        return CausalLMOutputWithPast(
            logits=logits,
            hidden_states=tuple(states) if output_hidden_states else None,
        )


def oracle_model(config: OracleConfig, dtype: torch.dtype = torch.float32) -> OracleForCausalLM:
    """The model of ``config``. ValueError for a width or depth that cannot hold it, or an L or b that is not finite."""
    width, n_blocks = config.hidden_size, config.num_hidden_layers
    if width < 3 or n_blocks < 1 or not (math.isfinite(config.coupling) and math.isfinite(config.field)):
        raise ValueError(
            f"an oracle of {n_blocks} blocks, d_model {width}, coupling {config.coupling} and field {config.field}: "
            "expected at least one block, d_model of at least 3, and finite L and b"
        )
    module = OracleForCausalLM(config)
    nn.Module.to(module, dtype)
    drawn = torch.randn(width, 3, generator=torch.Generator().manual_seed(config.seed), dtype=torch.float64)
    constant, weight, logit = torch.linalg.qr(drawn)[0].mT  # q₀, q₁, q₂
    rule = torch.outer(logit, config.coupling * weight + config.field * constant) / n_blocks
    with torch.no_grad():
        module.model.embed_tokens.weight.copy_(torch.stack([constant + weight, constant - weight]))
        module.lm_head.weight.copy_(torch.stack([logit, -logit]) / 2)
        for block in module.model.layers:
            assert isinstance(block, OracleBlock)
            block.mlp.weight.copy_(rule)
    return module


def oracle_tokenizer() -> PreTrainedTokenizerFast:
    """A is token 0; B and every other word token 1. Words stand between blanks; text comes back with them."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(TOKENS)}, unk_token="B"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="B", eos_token=None)
