"""Which hooks hang on this model, whose are they, and what changed since the snapshot?

What the text cannot show, the host can: hooks live in dictionaries on the modules, and a list of them needs no data at
all. Code can also ride along without being a hook: in a replaced ``forward``, a module put around or in place of
another, a parametrized weight, a patched class, a mode that sees every operation. They are listed, too. Looking
changes nothing; foreign things are reported and left alone.

What it cannot see: code patched inside PyTorch's own compiled parts, and weights that were trained to misbehave.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

KINDS = {  # attribute of a module → what the hooks in it are called
    "_forward_pre_hooks": "forward_pre",
    "_forward_hooks": "forward",
    "_backward_pre_hooks": "backward_pre",
    "_backward_hooks": "backward",
}
STATE_KINDS = {  # these run when weights are saved or loaded
    "_state_dict_pre_hooks": "state_dict_pre",
    "_state_dict_hooks": "state_dict",
    "_load_state_dict_pre_hooks": "load_state_dict_pre",
    "_load_state_dict_post_hooks": "load_state_dict_post",
}
CALLS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")  # what runs when a module is called
HOMES = ("torch", "transformers", "transformers_modules")  # packages that models are made of
PLATFORM = ("torch", "transformers", "accelerate")  # owners named by their package; all others are foreign
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True)
class Found:
    """Something that runs beside a module's own code.

    kind: forward_pre, forward, backward_pre, backward (each also as global_…), gradient (on a parameter), state_dict…;
    replaced_forward (on one module), patched_class (for every module of a class), foreign_module (its class is from
    none of the packages that the model is made of), parametrization, tensor_subclass, mode.
    path: dotted name of the module, "" for the model itself, "*" for what concerns every module.
    order: place in the module's queue, first 0. owner: ours, transformers, torch, accelerate (a model spread over
    devices has its replaced_forward on every module that holds weights) or foreign, by the code's package.
    """

    kind: str
    path: str
    order: int
    name: str
    defined: str  # package.module:line, as far as Python knows
    owner: str
    identity: int  # tells two registrations of one function apart; not comparable between processes


def snapshot(module: nn.Module) -> list[Found]:
    """Everything that hangs on ``module`` and what is in it, hooks in the order in which they run."""
    homes = {*HOMES, _package(type(module))}
    found = [*_everywhere(), *(one for path, part in module.named_modules() for one in _on(path, part, homes))]
    classes = {kind for part in module.modules() for kind in type(part).__mro__}
    return found + [one for kind in sorted(classes, key=_full_name) for one in _patched(kind)]


def changes(before: Sequence[Found], after: Sequence[Found]) -> tuple[list[Found], list[Found]]:
    """What came and what went between two snapshots of one process."""
    old, new = {_key(f) for f in before}, {_key(f) for f in after}
    return [f for f in after if _key(f) not in old], [f for f in before if _key(f) not in new]


def plain(found: Sequence[Found]) -> list[dict[str, Any]]:
    """For a result file: without the numbers that mean something in this process only."""
    return [{k: v for k, v in asdict(one).items() if k != "identity"} for one in found]


def _key(found: Found) -> tuple[str, str, int]:
    return found.kind, found.path, found.identity


def _on(path: str, module: nn.Module, homes: set[str]) -> Iterator[Found]:
    for attribute, kind in (KINDS | STATE_KINDS).items():
        for order, hook in enumerate(getattr(module, attribute, {}).values()):
            yield _found(kind, path, order, hook)
    for name in CALLS:
        if name in vars(module):
            yield _found("replaced_forward", path, 0, vars(module)[name])
    if _package(type(module)) not in homes:
        yield _found("foreign_module", path, 0, module)
    if parametrize.is_parametrized(module):
        for name, parametrizations in module.parametrizations.items():  # type: ignore[union-attr,operator]
            for order, one in enumerate(parametrizations):
                yield _found("parametrization", f"{path}.{name}", order, one)
    for name, weight in module.named_parameters(recurse=False):
        where = f"{path}.{name}".lstrip(".")
        if type(weight) not in PLAIN:
            yield _found("tensor_subclass", where, 0, weight)
        for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            for order, hook in enumerate((getattr(weight, attribute) or {}).values()):
                yield _found("gradient", where, order, hook)


def _everywhere() -> Iterator[Found]:
    """Global hooks, and modes that see every operation."""
    for attribute, kind in KINDS.items():
        for order, hook in enumerate(getattr(torch_module, f"_global{attribute}", {}).values()):
            yield _found(f"global_{kind}", "*", order, hook)
    for order, mode in enumerate([*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]):
        yield _found("mode", "*", order, mode)


def _patched(kind: type) -> Iterator[Found]:
    """Methods of a class that were written elsewhere than the class: put there later."""
    for name in CALLS:
        method = vars(kind).get(name)
        if callable(method) and _package(inspect.unwrap(method)) != _package(kind):
            yield _found("patched_class", f"*{_full_name(kind)}.{name}", 0, method)


def _found(kind: str, path: str, order: int, hook: Callable[..., Any] | Any) -> Found:
    code: Any = hook
    while (inner := getattr(code, "func", None) or getattr(code, "__wrapped__", None)) is not None:
        code = inner  # partial, functools.wraps
    target = code if inspect.isroutine(code) else type(code)
    package = getattr(target, "__module__", None) or "?"
    try:
        defined = f"{package}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        defined = package
    name = getattr(target, "__qualname__", type(code).__qualname__)
    owner = _package(target)
    owner = owner if owner in PLATFORM else "ours" if owner == "feedback" else "foreign"
    return Found(kind, path, order, name, defined, owner, id(hook))


def _package(target: Any) -> str:
    return (getattr(target, "__module__", None) or "?").split(".")[0]


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
