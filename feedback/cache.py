"""What does the loop remember besides its soft token? The key-value cache of one chunk of rows.

The prompt is read once per distinct prompt; its keys and values are copied to the rows, so no two rows share memory.
Behind the prompt lie slots for soft tokens. In the step nothing grows and nothing is copied: a new key is written
into its slot and attention reads a view. Rotary and learned positions are applied before a key is stored, so the
order of the slots does not matter and a window may reuse the oldest one.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


@dataclass(frozen=True)
class Context:
    """What stays in the cache behind the prompt.

    ``full``: every soft token. ``prompt``: none; each step is read at the same position right behind the prompt, so
    the loop is an autonomous map e ↦ F(e). ``window``: the last ``window`` soft tokens, at their own positions.
    """

    kind: str = "full"
    window: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("full", "prompt", "window"):
            raise ValueError(f"context {self.kind!r} does not exist; choose full, prompt or window")
        if self.kind == "window" and self.window < 1:
            raise ValueError(f"context window needs window >= 1, got {self.window}; for none at all use context prompt")

    def slots(self, n_steps: int) -> int:
        """Cache slots needed behind the prompt, the token being read included."""
        return {"full": n_steps, "prompt": 1, "window": min(self.window + 1, n_steps)}[self.kind]

    def offset(self, step: int) -> int:
        """Positions between the prompt's end and the soft token read at ``step`` (1…T)."""
        return 0 if self.kind == "prompt" else step - 1


class _Slot:
    """Where the running step writes, shared by all layers: ``index`` behind the prompt, ``used`` slots visible."""

    index = 0
    used = 0


class _Layer(CacheLayerMixin):
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, n_slots: int, slot: _Slot, functional: bool) -> None:
        super().__init__()
        self.slot = slot
        self.prompt_length = keys.shape[-2]
        self.functional = functional
        self.is_initialized = True
        if functional:
            self.keys, self.values = keys, values
        else:
            room = (*keys.shape[:2], self.prompt_length + n_slots, keys.shape[-1])
            self.keys = keys.new_zeros(room)
            self.values = values.new_zeros((*room[:3], values.shape[-1]))
            self.keys[:, :, : self.prompt_length] = keys
            self.values[:, :, : self.prompt_length] = values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        position = self.prompt_length + self.slot.index
        if self.functional:
            self.keys = _written(self.keys, key_states, position)
            self.values = _written(self.values, value_states, position)
            return self.keys, self.values
        self.keys[:, :, position : position + 1] = key_states
        self.values[:, :, position : position + 1] = value_states
        length = self.prompt_length + self.slot.used
        return self.keys[:, :, :length], self.values[:, :, :length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The keys are there from the start."""

    def get_seq_length(self) -> int:
        return self.prompt_length + self.slot.used - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.prompt_length + self.slot.used, 0

    def get_max_length(self) -> int:
        return -1


def _written(past: Tensor, new: Tensor, position: int) -> Tensor:
    """``past`` with ``new`` in slot ``position``, as a new tensor that gradients flow through."""
    return torch.cat([past[:, :, :position], new, past[:, :, position + 1 :]], dim=-2)


class LoopCache(Cache):
    """The cache of one chunk: the prompts' keys and values, gathered to rows, and slots for the context's soft tokens.

    ``functional=True`` builds new tensors instead of writing into slots, as a differentiable loop needs.
    """

    def __init__(
        self, prompt: Cache, rows: Int[Tensor, " row"], context: Context, n_steps: int, functional: bool
    ) -> None:
        self.context = context
        self.n_slots = context.slots(n_steps)
        self._slot = _Slot()
        layers: list[Any] = []
        for read in prompt.layers:
            if not isinstance(read, DynamicLayer):
                raise ValueError(f"the loop keeps keys and values; this model's cache holds {type(read).__name__}")
            keys, values = read.keys, read.values
            assert keys is not None and values is not None
            here = rows.to(keys.device)  # blocks may be on several devices
            # not keys[here]: the gradient of that is summed in any order by several threads
            own = (keys.index_select(0, here), values.index_select(0, here))
            layers.append(_Layer(*own, self.n_slots, self._slot, functional))
        super().__init__(layers=layers)

    def begin(self, step: int) -> int:
        """Opens the slot of ``step`` (1…T) and returns how many slots behind the prompt the step sees."""
        self._slot.index = (step - 1) % self.n_slots
        self._slot.used = min(step, self.n_slots)
        return self._slot.used


def cache_keyword(module: PreTrainedModel) -> str:
    """The name under which this model's forward takes its cache: it differs between transformers releases."""
    parameters = inspect.signature(module.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def padded(prompts: list[list[int]], pad: int) -> tuple[Int[Tensor, "row position"], Bool[Tensor, "row position"]]:
    """Left-padded token ids and the mask of real positions."""
    length = max(map(len, prompts))
    ids = torch.full((len(prompts), length), pad)
    mask = torch.zeros((len(prompts), length), dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
        mask[row, length - len(prompt) :] = True
    return ids, mask
