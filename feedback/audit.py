"""Which hooks hang on this model, whose are they, and what changed since the snapshot?

What the text cannot show, the host can: hooks live in dictionaries on the modules, and a list of them needs no data at
all. Looking changes nothing; foreign hooks are reported and left alone.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

KINDS = {  # attribute of a module → what the hooks in it are called
    "_forward_pre_hooks": "forward_pre",
    "_forward_hooks": "forward",
    "_backward_pre_hooks": "backward_pre",
    "_backward_hooks": "backward",
}


@dataclass(frozen=True)
class Found:
    """Something that runs beside a module's own code.

    kind: forward_pre, forward, backward_pre, backward, each also as global_…; replaced_forward; parametrization.
    path: dotted name of the module, "" for the model itself, "*" for global hooks, which run on every module.
    order: place in the module's queue, first 0. owner: ours, transformers, torch or foreign, by the code's package.
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
    return [*_global_hooks(), *(found for path, part in module.named_modules() for found in _on(path, part))]


def changes(before: Sequence[Found], after: Sequence[Found]) -> tuple[list[Found], list[Found]]:
    """What came and what went between two snapshots of one process."""
    old, new = {_key(f) for f in before}, {_key(f) for f in after}
    return [f for f in after if _key(f) not in old], [f for f in before if _key(f) not in new]


def plain(found: Sequence[Found]) -> list[dict[str, Any]]:
    """For a result file: without the numbers that mean something in this process only."""
    return [{k: v for k, v in asdict(one).items() if k != "identity"} for one in found]


def _key(found: Found) -> tuple[str, str, int]:
    return found.kind, found.path, found.identity


def _on(path: str, module: nn.Module) -> Iterator[Found]:
    for attribute, kind in KINDS.items():
        for order, hook in enumerate(getattr(module, attribute, {}).values()):
            yield _found(kind, path, order, hook)
    if "forward" in vars(module):
        yield _found("replaced_forward", path, 0, vars(module)["forward"])
    if parametrize.is_parametrized(module):
        for name, parametrizations in module.parametrizations.items():  # type: ignore[union-attr,operator]
            for order, one in enumerate(parametrizations):
                yield _found("parametrization", f"{path}.{name}", order, one)


def _global_hooks() -> Iterator[Found]:
    for attribute, kind in KINDS.items():
        for order, hook in enumerate(getattr(torch_module, f"_global{attribute}", {}).values()):
            yield _found(f"global_{kind}", "*", order, hook)


def _found(kind: str, path: str, order: int, hook: Callable[..., Any]) -> Found:
    code = inspect.unwrap(getattr(hook, "func", hook))  # partial, functools.wraps
    target = code if inspect.isroutine(code) else type(code)
    package = getattr(target, "__module__", None) or "?"
    try:
        defined = f"{package}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        defined = package
    name = getattr(target, "__qualname__", type(code).__qualname__)
    head = package.split(".")[0]
    owner = {"feedback": "ours", "transformers": "transformers", "torch": "torch"}.get(head, "foreign")
    return Found(kind, path, order, name, defined, owner, id(hook))
