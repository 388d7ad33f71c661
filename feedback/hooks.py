"""How is an activation inspected, replaced, added to, or its gradient seen, and surely released again?

    with hooks.add(model.module, Site(15), v, alpha=2.0):          # h̃ = h + α·v in every pass
        ...
    with hooks.inspect(model.module, Site(15), look, strict=True): # look(h); h goes on untouched, or the run stops
        ...

Every hook is an instance of :class:`Hook`, taken on by a context manager on an ExitStack: whatever happens inside
the ``with`` block, and however far registering got, afterwards the module carries exactly the hooks it carried before,
other people's included. Weights are never written.

Order is PyTorch's: global hooks first, then a module's own in the order in which they were registered
(``prepend=True``: in front of those there are); each sees what the one before returned.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from feedback.audit import KINDS
from feedback.sites import ResolvedSite, Site, resolve, unembedding

HIDDEN_KEYWORDS = ("hidden_states", "input", "inputs_embeds", "x")
REGISTRIES = (*KINDS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")

_BACKWARD = REGISTRIES.index("_backward_hooks")

Kind = Literal["forward_pre", "forward", "backward_pre", "backward"]


class HookError(RuntimeError):
    """A hook that cannot work here, or did what it must not; the message names the module."""


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

    Subclasses see the hidden state, (row, position, d_model) or whatever shape the module has, through :meth:`apply`
    and return a new tensor to replace it, or None to leave it untouched; they never write in place.

    A model cannot be copied or pickled while one hangs on it: the copy would go on steering. ``state_dict`` can.
    """

    def __init__(self, site: ResolvedSite, *, prepend: bool = False) -> None:
        self.site = site
        self.holder: nn.Module | None = site.module  # whose dictionaries it hangs in; None: those for every module
        self.prepend = prepend
        self.fired = 0

    def apply(self, hidden: Tensor) -> Tensor | None:
        raise NotImplementedError

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        self.fired += 1
        if not self.site.before:
            hidden = hidden_of(output[0])
            changed = self._changed(hidden)
            return None if changed is None else with_hidden(output[0], changed)
        hidden, keyword = input_hidden(args, kwargs)
        changed = self._changed(hidden)
        if changed is None:
            return None
        if keyword is None:
            return (changed, *args[1:]), kwargs
        return args, {**kwargs, keyword: changed}

    def _changed(self, hidden: Tensor) -> Tensor | None:
        changed = self.apply(hidden)
        if changed is not None and (changed.shape, changed.dtype, changed.device) != (
            hidden.shape,
            hidden.dtype,
            hidden.device,
        ):
            raise HookError(
                f"a hook at {self.site.name} returned {_looks(changed)}, the activation is "
                f"{_looks(hidden)}: return one like it"
            )
        return changed

    def register(self) -> None:
        """Registers on the site's module."""
        if self.site.before:
            self.site.module.register_forward_pre_hook(self, with_kwargs=True, prepend=self.prepend)
        else:
            self.site.module.register_forward_hook(self, with_kwargs=True, prepend=self.prepend)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HookError(
            f"a model cannot be copied or pickled while a hook hangs on {self.site.name}, or the copy would keep it: "
            "leave the `with` block first, or save model.state_dict()"
        )


def _looks(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}".replace("torch.", "")


@contextmanager
def attached(*hooks: Hook) -> Iterator[None]:
    """Registers ``hooks`` in order; takes all of them off again, even when registering stopped half-way."""
    with ExitStack() as stack:
        for hook in hooks:
            if any(one is hook for registry in _registries(hook.holder) for one in registry.values()):
                raise HookError(f"this hook is on {hook.site.name} already: make another one")
            # before registering, for an interrupt may come in between
            stack.callback(_release, hook, getattr(*_backward_flag(hook.holder)))
            hook.register()
        yield


def _release(hook: Hook, backward_flag: bool | None) -> None:
    """Takes ``hook`` off by identity; other hooks keep their places. PyTorch leaves a mark on modules that had a full
    backward hook, which forbids other kinds for good: it goes back to what it was."""
    registries = _registries(hook.holder)
    numbers = {number for registry in registries for number, one in registry.items() if one is hook}
    for registry in registries:
        for number in numbers & registry.keys():
            del registry[number]
    if not registries[_BACKWARD]:
        setattr(*_backward_flag(hook.holder), backward_flag)


def _registries(holder: nn.Module | None) -> list[dict[int, Any]]:
    if holder is None:
        return [getattr(torch_module, f"_global{name}", {}) for name in REGISTRIES]
    return [getattr(holder, name) for name in REGISTRIES]


def _backward_flag(holder: nn.Module | None) -> tuple[Any, str]:
    if holder is None:
        return torch_module, "_global_is_full_backward_hook"
    return holder, "_is_full_backward_hook"


def located(module: nn.Module, site: Site) -> ResolvedSite:
    """The site, if a hook taken on now is sure to run there, once per pass.

    HookError for a module that is compiled (hooks added later are ignored) or that lies inside a block under gradient
    checkpointing (the backward pass runs it again, with whatever the hook says by then; a block's own hooks stay
    outside and are safe).
    """
    found = resolve(module, site)
    parts = found.path.split(".") if found.path else []
    above = [module, *(module.get_submodule(".".join(parts[:n])) for n in range(1, len(parts) + 1))]
    for part in above:
        if getattr(part, "_compiled_call_impl", None) is not None or "_orig_mod" in part._modules:
            raise HookError(
                f"no hook at {found.name}: {type(part).__name__} is compiled, and a compiled module "
                "ignores hooks that come later; load the model without torch.compile"
            )
    for part in above[:-1]:
        if isinstance(part, GradientCheckpointingLayer) and part.training and part.gradient_checkpointing:
            raise HookError(
                f"no hook at {found.path}: {type(part).__name__} around it uses gradient checkpointing, so the "
                "backward pass runs the hook again; choose the block itself, switch checkpointing off, or model.eval()"
            )
    return found


class _Inspect(Hook):
    def __init__(self, site: ResolvedSite, look: Callable[[Tensor], object], strict: bool, prepend: bool) -> None:
        super().__init__(site, prepend=prepend)
        self.look = look
        self.strict = strict

    def apply(self, hidden: Tensor) -> None:
        if not self.strict:
            self.look(hidden)
            return
        version = None if hidden.is_inference() else hidden._version  # counts writes, also those undone again
        copy = hidden.detach().clone()  # sees writes that are not counted: through .data, numpy, under inference mode
        self.look(hidden)
        counted = version is not None and hidden._version != version
        same = (copy == hidden) | ((copy != copy) & (hidden != hidden))  # not a number equals not a number
        if counted or not bool(same.all()):
            raise HookError(
                f"the inspection hook at {self.site.name} wrote into the activation: returning nothing "
                "is not enough, work on hidden.clone()"
            )


@contextmanager
def inspect(
    module: nn.Module, site: Site, look: Callable[[Tensor], object], *, strict: bool = False, prepend: bool = False
) -> Iterator[Hook]:
    """Calls ``look(hidden)`` in every pass; what it returns is ignored and the hidden state goes on as it is.

    hidden: (row, position, d_model). ``strict`` compares it with a copy and by its version counter, and ends the pass
    with a HookError when ``look`` wrote into it. The handle counts passes in ``fired``.
    """
    hook = _Inspect(located(module, site), look, strict, prepend)
    with attached(hook):
        yield hook


class _Replace(Hook):
    def __init__(self, site: ResolvedSite, change: Callable[[Tensor], Tensor | None], prepend: bool) -> None:
        super().__init__(site, prepend=prepend)
        self.change = change

    def apply(self, hidden: Tensor) -> Tensor | None:
        return self.change(hidden)


@contextmanager
def replace(
    module: nn.Module, site: Site, change: Callable[[Tensor], Tensor | None], *, prepend: bool = False
) -> Iterator[Hook]:
    """Passes on ``change(hidden)``, (row, position, d_model) as it came, in every pass; None leaves it.

    The container around the hidden state (tuple, ModelOutput) is rebuilt. HookError for a replacement of another shape,
    dtype or device. ``change`` must not write into what it is given.
    """
    hook = _Replace(located(module, site), change, prepend)
    with attached(hook):
        yield hook


class _AddFixed(Hook):
    def __init__(self, site: ResolvedSite, offset: Tensor, prepend: bool) -> None:
        super().__init__(site, prepend=prepend)
        self.offset = offset

    def apply(self, hidden: Tensor) -> Tensor:
        if hidden.shape[-1] != self.offset.shape[-1]:
            raise HookError(
                f"the vector is {self.offset.shape[-1]} numbers wide, the activation at "
                f"{self.site.name} {hidden.shape[-1]}: make it for this site"
            )
        self.offset = self.offset.to(hidden)  # once: afterwards it is of that dtype and there
        return hidden + self.offset


@contextmanager
def add(
    module: nn.Module,
    site: Site,
    vector: Float[Tensor, " d_model"],
    alpha: float = 1.0,
    *,
    prepend: bool = False,
) -> Iterator[Hook]:
    """Activation steering: passes on h + α·v at every row and position, in every pass; in the dtype of h.

    ``pushing.push`` is the one with a program, and a receipt for every step.

    ValueError: a vector that is not finite or has length zero (with alpha=0 nothing would tell).
    """
    length = torch.linalg.vector_norm(vector.detach().float())
    if not (torch.isfinite(length) and length > 0):
        raise ValueError(f"the steering vector has length {length.item():g}; expected a finite one of more than zero")
    hook = _AddFixed(located(module, site), alpha * vector, prepend)
    with attached(hook):
        yield hook


class _AsGiven(Hook):
    """A callback with PyTorch's own signature."""

    def __init__(
        self, kind: Kind, callback: Callable[..., Any], holder: nn.Module | None, options: dict[str, Any]
    ) -> None:
        super().__init__(ResolvedSite(None, "module", "", holder or nn.Identity(), "pre" in kind))
        self.kind, self.callback, self.holder, self.options = kind, callback, holder, options

    def __call__(self, *given: Any, **keywords: Any) -> Any:
        self.fired += 1
        return self.callback(*given, **keywords)

    def register(self) -> None:
        name = f"full_{self.kind}_hook" if self.kind.startswith("backward") else f"{self.kind}_hook"
        where, name = (
            (torch_module, f"register_module_{name}") if self.holder is None else (self.holder, f"register_{name}")
        )
        getattr(where, name)(self, **self.options)


@contextmanager
def registered(module: nn.Module | None, kind: Kind, callback: Callable[..., Any], **options: bool) -> Iterator[Hook]:
    """PyTorch's own hook with PyTorch's own signature, surely released: the way in for everything the others hide.

    module: None registers it for every module there is (a global hook; these run before a module's own).
    kind: forward (module, inputs, output), forward_pre (module, inputs), backward (module, input gradients, output
    gradients), backward_pre (module, output gradients).
    options: with_kwargs, prepend, always_call, as PyTorch has them.
    """
    hook = _AsGiven(kind, callback, module, options)
    with attached(hook):
        yield hook


class Record(Hook):
    """Keeps the hidden state of the latest pass in ``last``: the tensor itself (row, position, d_model), no copy."""

    last: Tensor | None = None

    def apply(self, hidden: Tensor) -> None:
        self.last = hidden

    def take(self) -> Tensor:
        """The hidden state of the latest pass; RuntimeError when no pass reached the site since the last call."""
        if self.last is None:
            raise HookError(
                f"no forward pass reached {self.site.name}: run the model inside the `with` block, or choose "
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
def record(module: nn.Module, sites: Sequence[Site]) -> Iterator[Recorder]:
    """Records what ``sites`` pass on (what their module receives, for ``block_input``) in every forward pass.

    Registered after a push on the same site it sees the pushed value: hooks run in the order of registration.
    """
    hooks = {site: Record(located(module, site)) for site in sites}
    with attached(*hooks.values()):
        yield Recorder(hooks)


@contextmanager
def record_final(module: PreTrainedModel) -> Iterator[Record]:
    """Records what the unembedding is called with: the hidden state after the final norm."""
    hook = Record(ResolvedSite(None, "module_input", "the unembedding", unembedding(module), True))
    with attached(hook):
        yield hook
