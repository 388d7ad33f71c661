"""Where is block ℓ, the final norm, the unembedding, the embedding of this model?

The only file that knows architectures. It finds modules by the names that transformers gives them,
and falls back to their shape; :func:`feedback.models.load` checks the answer on every model by
``lens(last block) == logits``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

AT = ("block", "block_input", "attn", "mlp", "module", "module_input")

_BLOCKS = (
    "model.layers",  # Llama and its many relatives
    "transformer.h",  # GPT-2, GPT-J, Falcon, Bloom
    "gpt_neox.layers",
    "model.decoder.layers",  # OPT
    "model.language_model.layers",  # the text half of vision-language models
)
_FINAL_NORM = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
_INSIDE_BLOCK = {
    "attn": ("self_attn", "attn", "attention", "self_attention"),
    "mlp": ("mlp", "feed_forward", "ffn", "block_sparse_moe"),
}


@dataclass(frozen=True)
class Site:
    """An address in a model, before the model is known.

    block: counted from 0; negative from the end; "middle" is n_blocks // 2.
    at: "block" (its output), "block_input", "attn", "mlp" (their outputs), or "module" and
    "module_input", the output and the input of any module.
    path: dotted name of that module, only with at="module" and "module_input"; "" is the module asked itself.
    """

    block: int | str = "middle"
    at: str = "block"
    path: str | None = None

    def __post_init__(self) -> None:
        if self.at not in AT:
            raise ValueError(f"site at {self.at!r} does not exist: expected one of {', '.join(AT)}")
        if self.at.startswith("module") != (self.path is not None):
            raise ValueError(
                f"site at {self.at!r} with path {self.path!r}: a path goes with at=module, and only with it "
                "(or with at=module_input)"
            )


@dataclass(frozen=True)
class ResolvedSite:
    """A site found in one model: hook ``module``, its input when ``before``, else its output.

    block: counted from 0; None for a module given by its path. path: dotted name of ``module``.
    """

    block: int | None
    at: str
    path: str
    module: nn.Module
    before: bool

    @property
    def name(self) -> str:
        """For messages."""
        return self.path or f"the {type(self.module).__name__} itself"


def resolve_block(block: int | str, n_blocks: int) -> int:
    """The block's number counted from 0; ValueError when this model has no such block.

    "middle" is n_blocks // 2, negative numbers count from the end.
    """
    if block == "middle":
        return n_blocks // 2
    if isinstance(block, str | bool):
        raise ValueError(
            f"site block {block!r} is no block: expected a number from 0 to {n_blocks - 1}, a "
            'negative one counted from the end, or "middle"'
        )
    if not -n_blocks <= block < n_blocks:
        raise ValueError(f"site block {block} does not exist: this model has blocks 0–{n_blocks - 1}")
    return block % n_blocks


def resolve(module: nn.Module, site: Site) -> ResolvedSite:
    """The module that ``site`` means in this model; ValueError, with those there are, for none.

    A site given by its path is found in any module, the others in a language model of transformers only.
    """
    if site.path is not None:
        before = site.at == "module_input"
        try:
            return ResolvedSite(None, site.at, site.path, module.get_submodule(site.path), before)
        except AttributeError:
            raise ValueError(_no_such_path(module, site.path)) from None
    if not isinstance(module, PreTrainedModel):
        raise ValueError(
            f"site at {site.at!r} of a {type(module).__name__}: only a causal language model has blocks; give the "
            'module by its dotted name, Site(at="module", path=…)'
        )
    stack = blocks(module)
    number = resolve_block(site.block, len(stack))
    found = stack[number]
    if site.at in _INSIDE_BLOCK:
        found = _inside(found, number, site.at)
    return ResolvedSite(number, site.at, _path_of(module, found), found, site.at == "block_input")


def blocks(module: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks in order."""
    n_blocks = module.config.get_text_config().num_hidden_layers
    named = dict(module.named_modules())
    for path in _BLOCKS:
        found = named.get(path)
        if isinstance(found, nn.ModuleList) and len(found) == n_blocks:
            return found
    alike = [
        m
        for m in named.values()
        if isinstance(m, nn.ModuleList) and len(m) == n_blocks and len({type(b) for b in m}) == 1
    ]
    if not alike:
        lists = [path for path, m in named.items() if isinstance(m, nn.ModuleList)]
        raise ValueError(
            f"no list of {n_blocks} decoder blocks found in {type(module).__name__}: its lists are "
            f"{', '.join(lists) or 'none'}"
        )
    return max(alike, key=lambda stack: sum(p.numel() for p in stack.parameters()))


def final_norm(module: PreTrainedModel) -> nn.Module:
    """The norm between the last block and the unembedding."""
    path = _path_of(module, blocks(module)).rpartition(".")[0]
    beside = dict(module.get_submodule(path).named_children())
    for name in _FINAL_NORM:
        if name in beside:
            return beside[name]
    norms = [m for m in beside.values() if "norm" in type(m).__name__.lower()]
    if len(norms) != 1:
        raise ValueError(
            f"no final norm found in {type(module).__name__}: beside the blocks, "
            f"{path or 'the model'} has {', '.join(beside)}"
        )
    return norms[0]


def embedding(module: PreTrainedModel) -> nn.Module:
    """The module that turns token ids into vectors."""
    return module.get_input_embeddings()


def unembedding(module: PreTrainedModel) -> nn.Module:
    """The linear map from d_model to the vocabulary."""
    head = module.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(module).__name__} has no unembedding: load it as a causal language model")
    return head


def unembed(
    module: PreTrainedModel, hidden: Float[Tensor, "*axes d_model"], tokens: Sequence[int] | None = None
) -> Float[Tensor, "*axes vocab"]:
    """The logits of hidden states after the final norm, the family's scaling and capping included; of all tokens, or of
    ``tokens`` in their order.

    A function of the weights alone: hooks on the modules it uses do not fire. ``hidden`` is taken
    to the dtype of the weights; the logits are differentiable in it, and on its device.
    """
    head, config, device = unembedding(module), module.config.get_text_config(), hidden.device
    weight = next(head.parameters())
    hidden = hidden.to(weight.dtype)
    if tokens is None:
        logits = head.forward(hidden)
    elif type(head) is nn.Linear and not weight.is_meta:  # offloaded weights are there during forward only
        rows = torch.as_tensor(tokens, device=weight.device)
        bias = None if head.bias is None else head.bias[rows]
        logits = nn.functional.linear(hidden.to(weight.device), weight[rows], bias)
    else:
        logits = head.forward(hidden)[..., list(tokens)]
    if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * factor
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma 2 and later
        logits = cap * torch.tanh(logits / cap)
    return logits.to(device)


def lens(module: PreTrainedModel, hidden: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes vocab"]:
    """The logit lens on a block's output: unembed(final_norm(hidden)).

    At the last block these are the model's own logits. Source: nostalgebraist 2020. Dtype, hooks
    and gradient as in :func:`unembed`.
    """
    dtype = next(unembedding(module).parameters()).dtype
    return unembed(module, final_norm(module).forward(hidden.to(dtype))).to(hidden.device)


def _inside(block: nn.Module, number: int, at: str) -> nn.Module:
    children = dict(block.named_children())
    for name in _INSIDE_BLOCK[at]:
        if name in children:
            return children[name]
    raise ValueError(
        f"site at {at!r}: block {number} has no such module; it has {', '.join(children)}. Give "
        "one of them by its dotted name: at=module path=…"
    )


def _path_of(module: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, found in module.named_modules() if found is wanted)


def _no_such_path(module: nn.Module, path: str) -> str:
    """An error that names the children at the place where ``path`` leaves the model."""
    *parents, _ = path.split(".")
    here, known = module, ""
    for name in parents:
        if name not in dict(here.named_children()):
            break
        here, known = here.get_submodule(name), f"{known}{name}."
    names = [f"{known}{name}" for name, _ in here.named_children()]
    more = f", … ({len(names)} in all)" if len(names) > 12 else ""
    return f"site path {path!r} does not exist: this model has {', '.join(names[:12])}{more}"
