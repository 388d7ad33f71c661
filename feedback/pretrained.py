"""How is a trained model read from a folder or the hub, and what is said when it cannot be had?"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub import constants, get_session
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging


class ModelError(ValueError):
    """A model cannot be had, or is not what it should be: in one line, with what to try."""


def read_config(name: str, revision: str | None = None) -> PreTrainedConfig:
    """The configuration alone, no weights. ModelError when it cannot be had."""
    with _one_line(name) as offline:
        return AutoConfig.from_pretrained(name, revision=revision, local_files_only=offline)


def read_model(
    name: str, revision: str | None, dtype: torch.dtype, room: dict[int, int] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Weights in ``dtype``, and the tokenizer, of a folder or a name on the hub.

    The weights are on the CPU or, with ``room`` (bytes for them on every GPU, by its number), spread evenly over those:
    each block on one of them, embedding and unembedding perhaps on different ones.

    Attention is transformers' own choice: scaled_dot_product_attention where the family has it,
    else eager. ModelError when they cannot be had, when the folder lacks some of the weights (those
    would be random), or when ``room`` is not enough: no weight is left on the CPU or on disk.
    """
    spread: dict[str, Any] = {} if room is None else {"device_map": "auto", "max_memory": room}
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with _one_line(name) as offline:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name,
                revision=revision,
                dtype=dtype,
                local_files_only=offline,
                output_loading_info=True,
                **spread,
            )
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, local_files_only=offline)
    finally:
        if shown:
            logging.enable_progress_bar()
    module, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{name} lacks {len(missing)} weights of {type(module).__name__}, among them "
            f"{missing[0]}: load a complete model of this kind"
        )
    places = getattr(module, "hf_device_map", {}) if room is not None else {}
    if left := sorted(part for part, place in places.items() if place in ("cpu", "disk")):
        raise ModelError(
            f"{name} does not fit the GPUs: {len(left)} of its parts, the first {left[0]}, would stay behind and be "
            "copied at every step; use more GPUs or dtype=bfloat16"
        )
    return module, tokenizer


@contextmanager
def _one_line(name: str) -> Iterator[bool]:
    """Whether to do without the hub; inside, the many ways to fail become one line.

    Without a look first, huggingface_hub asks six times and takes half a minute to find that there
    is no network.
    """
    folder = os.path.isdir(name)
    if not folder and (os.path.isabs(name) or name.startswith((".", "~"))):
        raise ModelError(f"model folder {name} does not exist")
    unreachable = None if folder or constants.is_offline_mode() else _unreachable()
    try:
        yield unreachable is not None
    except (OSError, ValueError, KeyError, ImportError) as error:
        if unreachable is not None:
            raise ModelError(
                f"cannot load {name!r}: it is not in the local cache, and the hub does not answer "
                f"({unreachable}). Give model.name the folder of a model, or run once where there "
                "is a network"
            ) from error
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"cannot load {name!r} as a causal language model: {reason}") from error


def _unreachable() -> str | None:
    """Why the hub does not answer; None when it does."""
    try:
        get_session().head(constants.ENDPOINT, timeout=5.0)
    except Exception as error:  # its kind is the HTTP library's, which the hub client may change
        return str(error) or type(error).__name__
    return None
