"""Does an embedding vector do here what its token does, and do we know its way to the logits?

Soft tokens and the logit lens rest on it. Some models scale their embeddings, in the embedding
module or behind it; some cap or scale their logits. A model for which the answer is no must not
run in the loop.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from feedback.hooks import record, record_final
from feedback.pretrained import ModelError
from feedback.sites import Site, embedding, lens, unembed

LAST_BLOCK = Site(block=-1)
ROUNDING = 16  # units in the last place of the largest value: what another order of sums may do


@torch.no_grad()
def embedding_rows(module: PreTrainedModel) -> Float[Tensor, "vocab d_model"]:
    """What the embedding module returns for every token id.

    Its weight itself, not a copy, where they are equal.
    """
    table = embedding(module)
    weight = getattr(table, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise ModelError(f"the embedding of {type(module).__name__} has no weight: no soft tokens")
    rows = table(torch.arange(weight.shape[0], device=weight.device))
    return weight.detach() if torch.equal(rows, weight) else rows


@torch.no_grad()
def check_contract(module: PreTrainedModel, rows: Float[Tensor, "vocab d_model"]) -> None:
    """Refuses a model, with the reason in a ModelError, that does not do what the loop relies on.

    For three rows of tokens, up to rounding in the model's dtype: the embedding module returns
    one_hot(ids) · rows; these vectors as inputs_embeds give the logits that the ids give; and
    unembed(what the unembedding is called with) and lens(last block) are these logits.
    """
    n_tokens, d_model = rows.shape
    ids = torch.linspace(0, n_tokens - 1, 12, device=rows.device).long().reshape(3, 4)
    vectors = torch.nn.functional.one_hot(ids, n_tokens).to(rows.dtype) @ rows
    mask = torch.ones_like(ids)
    with record(module, [LAST_BLOCK]) as recorder, record_final(module) as final:
        logits = module(input_ids=ids, attention_mask=mask, use_cache=False).logits
        block, hidden = recorder.outputs[LAST_BLOCK].to(rows.device), final.take().to(rows.device)
    refused = f"{type(module).__name__} cannot run in the loop"
    if (widths := (logits.shape[-1], block.shape[-1])) != (n_tokens, d_model):
        raise ModelError(
            f"{refused}: its logits are {widths[0]} and its blocks {widths[1]} wide, its embedding "
            f"has {n_tokens} rows of {d_model}"
        )
    fed = module(inputs_embeds=vectors, attention_mask=mask, use_cache=False).logits
    looked_up, unembedded, seen = (
        embedding(module)(ids),
        unembed(module, hidden),
        lens(module, block),
    )
    for found, expected, otherwise in (
        (looked_up, vectors, "its embedding module does not return rows of a matrix"),
        (fed, logits, "embedding vectors fed as inputs_embeds do not do what their tokens do"),
        (unembedded, logits, "its logits are more than an unembedding of the final hidden state"),
        (seen, logits, "more than a final norm is between its last block and the unembedding"),
    ):
        off = float((found - expected).abs().max())
        allowed = ROUNDING * torch.finfo(expected.dtype).eps * float(expected.abs().max())
        if not off <= allowed:  # "off" that is not a number is too much
            raise ModelError(f"{refused}: {otherwise} (off by {off:.2g}, rounding allows {allowed:.2g})")
