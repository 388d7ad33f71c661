"""How much memory and time does the loop take, on which model? Counted from its configuration, no weights needed.

A run holds the weights once, and for every row of a chunk its keys and values, a few copies of its logits, and the
records of the steps taken. Everything is in bytes unless it says otherwise; 1 GiB is 2^30.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from feedback.sites import blocks, embedding, unembedding

GIB = 2**30
LOGITS_COPIES = 6  # float32 rows of the vocabulary alive at the peak of a step: z, z/τ, p, and the KL's three


@dataclass(frozen=True)
class Accelerator:
    """What one device can do.

    memory: bytes. bandwidth: bytes a second to its memory. flops: a second, dense, in bfloat16.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float


H100 = Accelerator("H100 SXM 80 GB", 80 * GIB, 3.35e12, 989e12)  # NVIDIA H100 datasheet (SXM5), without sparsity


def _llama(n_blocks: int, d_model: int, heads: int, kv_heads: int, inside: int, vocab: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=n_blocks,
        hidden_size=d_model,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inside,
        vocab_size=vocab,
    )


def named() -> dict[str, PreTrainedConfig]:
    """The shapes of four published models, as their config.json has them.

    SmolLM2: HuggingFaceTB/SmolLM2-135M-Instruct. Llama-2-7B: Touvron et al. 2023b, no grouped queries.
    Qwen2.5-7B: Qwen 2024. Llama-3-70B: Llama team 2024, table 3.
    """
    smollm2 = _llama(30, 576, 9, 3, 1536, 49152)
    smollm2.tie_word_embeddings = True
    qwen = Qwen2Config(
        num_hidden_layers=28,
        hidden_size=3584,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=152064,
        tie_word_embeddings=False,
    )
    return {
        "SmolLM2-135M": smollm2,
        "Llama-2-7B": _llama(32, 4096, 32, 32, 11008, 32000),
        "Qwen2.5-7B": qwen,
        "Llama-3-70B": _llama(80, 8192, 64, 8, 28672, 128256),
    }


def without_weights(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of ``config`` on the meta device: every shape and dtype, not one number, in a second."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def parameters(module: nn.Module) -> int:
    """How many numbers are learned; tied weights count once."""
    return sum(p.numel() for p in module.parameters())


def weights(module: nn.Module) -> dict[torch.device, int]:
    """Bytes of the parameters and buffers on each device; tied weights count once."""
    found: Counter[torch.device] = Counter()
    for tensor in [*module.parameters(), *module.buffers()]:
        found[tensor.device] += tensor.nbytes
    return dict(found)


def kv_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Of one row and one position: 2 · n_blocks · n_kv_heads · head_dim · itemsize.

    For models that keep keys and values of every head or group of heads (Ainslie et al. 2023). The loop keeps every
    position also where attention slides over a window.
    """
    text = config.get_text_config()
    _, kv_heads, head_dim = _heads(text)
    return 2 * text.num_hidden_layers * kv_heads * head_dim * dtype.itemsize


def record_bytes(config: PreTrainedConfig, dtype: torch.dtype, carriers: int, recorded: int = 0) -> int:
    """Of one row and one step in a Trajectory with ``kl``: soft token, hidden state and ``recorded`` more states; two
    token ids; seven float32 numbers and one for every carrier."""
    d_model = config.get_text_config().hidden_size
    return (2 + recorded) * d_model * dtype.itemsize + 2 * 8 + (7 + carriers) * 4


@dataclass(frozen=True)
class RowBytes:
    """One row of a chunk: ``cache`` lies with the blocks, ``logits`` and ``records`` with the embedding."""

    cache: int
    logits: int
    records: int

    @property
    def total(self) -> int:
        return self.cache + self.logits + self.records


def row_bytes(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    prompt: int,
    slots: int,
    steps: int,
    carriers: int,
    recorded: int = 0,
    differentiable: bool = False,
) -> RowBytes:
    """At the peak of a run, for one row.

    Args:
        prompt: its length in tokens. slots: positions behind it, see ``Context.slots``. steps: T.
        carriers: of the program. recorded: how many further sites are kept.
        differentiable: also what the backward pass needs: every step's logits and about 20 vectors a block.

    Records count twice, for they are stacked at the end of a chunk while the steps' own are alive.
    """
    text = config.get_text_config()
    logits = LOGITS_COPIES * text.vocab_size * 4
    records = 2 * steps * record_bytes(config, dtype, carriers, recorded)
    if differentiable:
        records += steps * (20 * text.num_hidden_layers * text.hidden_size * dtype.itemsize + logits)
    return RowBytes((prompt + slots) * kv_bytes(config, dtype), logits, records)


def flops(module: PreTrainedModel, length: int, dense_map: bool = True) -> int:
    """Floating-point operations of one row and one step at ``length`` positions, a multiply-add counted as two:
    2 · (parameters without the embedding + unembedding) + 4 · n_blocks · heads · head_dim · length for attention
    (Kaplan et al. 2020, table 1), and 2 · vocab · d_model for the product p·E of a dense map."""
    text = module.config.get_text_config()
    table = embedding(module).get_parameter("weight")
    tied = unembedding(module).get_parameter("weight") is table
    used = parameters(module) - (0 if tied else table.numel())
    heads, _, head_dim = _heads(text)
    attention = 4 * text.num_hidden_layers * heads * head_dim * length
    return 2 * used + attention + (2 * table.numel() if dense_map else 0)


def seconds_per_step(module: PreTrainedModel, device: Accelerator, rows: int, length: int, dtype: torch.dtype) -> float:
    """The least a step of ``rows`` rows can take, whichever is slower: reading all that it reads once, or computing.

    Read are the weights (the embedding for p·E), the rows' keys and values, and the logits LOGITS_COPIES times. On
    several devices blocks take turns, so the sum is the same. Launching kernels and Python come on top.
    """
    config = module.config
    table = embedding(module).get_parameter("weight")
    read = sum(weights(module).values()) + (table.nbytes if unembedding(module).get_parameter("weight") is table else 0)
    read += rows * (length * kv_bytes(config, dtype) + LOGITS_COPIES * config.get_text_config().vocab_size * 4)
    return max(read / device.bandwidth, rows * flops(module, length) / device.flops)


def fitting(memory: int, weights: int, row: int, reserve: float = 0.1) -> int:
    """Rows of ``row`` bytes beside ``weights`` in ``memory``, of which ``reserve`` stays free; 0 where none fits."""
    return max(0, int((1 - reserve) * memory - weights) // row)


def rows_on_devices(
    module: PreTrainedModel, home: torch.device, row: RowBytes, totals: dict[torch.device, int], share: float
) -> int:
    """Rows such that on every device what they take fits ``share`` of its memory, and 0.8 of what the weights leave.

    home: where logits and records are. totals: bytes of memory of each device that holds weights.
    """
    stack = blocks(module)
    held = Counter(next(block.parameters()).device for block in stack)
    least = []
    for device, taken in weights(module).items():
        need = row.cache * held[device] / len(stack)
        if device == home or device == unembedding(module).get_parameter("weight").device:
            need += row.logits + row.records
        if need and device in totals:
            least.append(min(share * totals[device], 0.8 * (totals[device] - taken)) // need)
    return int(max(0, min(least, default=0)))


def _heads(text: PreTrainedConfig) -> tuple[int, int, int]:
    """Query heads, key-value heads, width of a head."""
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, kv_heads, head_dim
