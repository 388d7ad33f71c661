"""How is an activation pushed or recorded, and surely released again?

Every hook of ours is an instance of :class:`Hook`, registered by a context manager on an ExitStack: whatever
happens inside the ``with`` block, and however far registering got, afterwards the module carries exactly the hooks
it carried before, other people's included.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from feedback.sites import ResolvedSite, Site, resolve, unembedding

HIDDEN_KEYWORDS = ("hidden_states", "input", "inputs_embeds", "x")


def hidden_of(output: Any) -> Tensor:
    """The hidden state (row, position, d_model) in a module's output: a tensor, a tuple or list that starts with one,
    or a ModelOutput whose first field is one.

    TypeError names any other type: guessing would steer the wrong numbers (``out[0] += v`` on a bare tensor pushes
    batch row 0 only).
    """
    first = output
    if isinstance(output, ModelOutput):
        first = output.to_tuple()[0]
    elif isinstance(output, (tuple, list)) and output:
        first = output[0]
    if not isinstance(first, Tensor):
        inside = "" if first is output else f" of {type(first).__name__}"
        raise TypeError(
            f"the hooked module returned {type(output).__name__}{inside}; expected a tensor, or a tuple, "
            "list or ModelOutput that starts with one: choose another site"
        )
    return first


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """The same kind of container as ``output`` with its hidden state replaced; ``output`` itself is left alone."""
    if isinstance(output, Tensor):
        return hidden
    if isinstance(output, ModelOutput):
        return type(output)(**{**output, next(iter(output)): hidden})
    if hasattr(output, "_fields"):
        return type(output)(hidden, *output[1:])
    return type(output)((hidden, *output[1:]))


def input_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, str | None]:
    """The hidden state a module is called with, and the keyword it came under (None: first positional argument)."""
    if args and isinstance(args[0], Tensor):
        return args[0], None
    for keyword in HIDDEN_KEYWORDS:
        if isinstance(kwargs.get(keyword), Tensor):
            return kwargs[keyword], keyword
    raise TypeError(
        f"the hooked module was called without a hidden state: positional {[type(a).__name__ for a in args]}, "
        f"keywords {sorted(kwargs)}; expected a tensor first or one of {HIDDEN_KEYWORDS}"
    )


class Hook:
    """A hook of this library at one site.

    Subclasses see the hidden state (row, position, d_model) through :meth:`apply` and return a new tensor to replace
    it, or None to leave it untouched; they never write in place.
    """

    def __init__(self, site: ResolvedSite) -> None:
        self.site = site
        self.fired = 0

    def apply(self, hidden: Tensor) -> Tensor | None:
        raise NotImplementedError

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        self.fired += 1
        if self.site.before:
            hidden, keyword = input_hidden(args, kwargs)
            changed = self.apply(hidden)
            if changed is None:
                return None
            if keyword is None:
                return (changed, *args[1:]), kwargs
            return args, {**kwargs, keyword: changed}
        changed = self.apply(hidden_of(output[0]))
        return None if changed is None else with_hidden(output[0], changed)

    def register(self) -> Any:
        """Registers on the site's module and returns the handle that removes the hook."""
        if self.site.before:
            return self.site.module.register_forward_pre_hook(self, with_kwargs=True)
        return self.site.module.register_forward_hook(self, with_kwargs=True)


@contextmanager
def attached(*hooks: Hook) -> Iterator[None]:
    """Registers ``hooks`` in order; removes all of them again, even when registering stopped half-way."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.register().remove)
        yield


class Record(Hook):
    """Keeps the hidden state of the latest pass in ``last``: the tensor itself (row, position, d_model), no copy."""

    last: Tensor | None = None

    def apply(self, hidden: Tensor) -> None:
        self.last = hidden

    def take(self) -> Tensor:
        """The hidden state of the latest pass; RuntimeError when no pass reached the site since the last call."""
        if self.last is None:
            raise RuntimeError(
                f"no forward pass reached {self.site.path}: run the model inside the `with` block, or choose "
                "a site on its forward path"
            )
        last, self.last = self.last, None
        return last


class Recorder:
    """``outputs[site]`` is what the site passed on last, (row, position, d_model)."""

    def __init__(self, hooks: Mapping[Site, Record]) -> None:
        self._hooks = hooks

    @property
    def outputs(self) -> dict[Site, Tensor]:
        return {site: hook.take() for site, hook in self._hooks.items()}


@contextmanager
def record(module: PreTrainedModel, sites: Sequence[Site]) -> Iterator[Recorder]:
    """Records what ``sites`` pass on (what their module receives, for ``block_input``) in every forward pass.

    Registered after a push on the same site it sees the pushed value: hooks run in the order of registration.
    """
    hooks = {site: Record(resolve(module, site)) for site in sites}
    with attached(*hooks.values()):
        yield Recorder(hooks)


@contextmanager
def record_final(module: PreTrainedModel) -> Iterator[Record]:
    """Records what the unembedding is called with: the hidden state after the final norm."""
    hook = Record(ResolvedSite(None, "module", "the unembedding", unembedding(module), True))
    with attached(hook):
        yield hook


class Receipt(NamedTuple):
    """What a push did in one pass, at the last position, measured as the difference of what came and what went on."""

    fired: int  # times the push ran since the last receipt: 1 when all is well
    pushed: Float[Tensor, "row carrier"]  # Δ·v̂ along each carrier
    relative: Float[Tensor, " row"]  # ‖Δ‖ / ‖h‖
    length: Float[Tensor, " row"]  # ‖h‖ before the push


class _Add(Hook):
    delta: Tensor | None = None

    def apply(self, hidden: Tensor) -> Tensor | None:
        return None if self.delta is None else hidden + self.delta[:, None, :]


class _Measure(Hook):
    def __init__(self, site: ResolvedSite, before: Record, directions: Tensor) -> None:
        super().__init__(site)
        self.before = before
        self.directions = directions
        self.receipt: tuple[Tensor, Tensor, Tensor] | None = None

    def apply(self, hidden: Tensor) -> None:
        original = self.before.take()[:, -1].detach().float()
        delta = hidden.detach()[:, -1].float() - original
        length = torch.linalg.vector_norm(original, dim=-1)
        relative = torch.linalg.vector_norm(delta, dim=-1) / length
        self.receipt = (delta @ self.directions.mT, relative, length)


class Push:
    """The handle of a push: what the next pass adds, and the receipt of the last one.

    The receipt is measured, not assumed: one hook registered before the push keeps the hidden state, one registered
    after it subtracts. It stays on the device; nothing here waits for it.
    """

    def __init__(self, add: _Add, measure: _Measure) -> None:
        self._add = add
        self._measure = measure

    @property
    def site(self) -> ResolvedSite:
        return self._add.site

    def set(self, delta: Float[Tensor, "row d_model"] | None) -> None:
        """Adds ``delta``, in the model's dtype and on its device, to every position of the next passes; None adds
        nothing."""
        self._add.delta = delta

    def take(self) -> Receipt:
        """The receipt of the passes since the last call. RuntimeError when the site was not reached."""
        if self._measure.receipt is None:
            raise RuntimeError(
                f"the push at {self.site.path} never fired: the module is not on the model's forward path "
                "(another code path, or compiled before the hook was registered); choose another site"
            )
        receipt = Receipt(self._add.fired, *self._measure.receipt)
        self._add.fired, self._measure.receipt = 0, None
        return receipt


@contextmanager
def push(module: PreTrainedModel, site: Site, carriers: Float[Tensor, "carrier d_model"]) -> Iterator[Push]:
    """Registers a push at ``site`` with its receipt along ``carriers``; afterwards the hooks are gone again.

    ``handle.set(delta)`` says what the next pass adds. Weights are never touched.
    """
    resolved = resolve(module, site)
    directions = torch.nn.functional.normalize(carriers.detach().float(), dim=-1)
    before, add = Record(resolved), _Add(resolved)
    measure = _Measure(resolved, before, directions)
    with attached(before, add, measure):
        yield Push(add, measure)
