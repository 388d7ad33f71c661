"""Who hangs on this model? A host-level audit, and what the text shows of the things it finds.

Each plant is foreign code that gets into a forward pass in its own way and adds α·v at one block. The loop then runs
as always, with the plant on. The audit has to name it (and nothing else), leave it alone, and find nothing once it is
gone; the text is compared with that of the clean model. Without plants (``audit.plants=[]``) it audits the model.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from conf import build
from conf.schema import Config
from feedback import audit, loop, maps, metrics, programs, progress
from feedback.hooks import hidden_of, with_hidden
from feedback.models import LanguageModel, ModelShape
from feedback.results import Result
from feedback.sites import blocks, resolve, unembed
from feedback.tracking import Tracker
from feedback.trajectory import Trajectory

CLEAN = "none"


@dataclass(frozen=True)
class Target:
    """Where a plant goes and what it adds."""

    model: nn.Module
    path: str
    number: int
    push: Float[Tensor, " d_model"]

    @property
    def block(self) -> nn.Module:
        return self.model.get_submodule(self.path)

    def pushed(self, output: Any) -> Any:
        return with_hidden(output, hidden_of(output) + self.push)


@contextmanager
def forward_hook(target: Target) -> Iterator[None]:
    with target.block.register_forward_hook(lambda module, inputs, output: target.pushed(output)):
        yield


@contextmanager
def forward_pre_hook(target: Target) -> Iterator[None]:
    with target.block.register_forward_pre_hook(lambda module, inputs: (target.pushed(inputs[0]), *inputs[1:])):
        yield


@contextmanager
def backward_hook(target: Target) -> Iterator[None]:
    """Hangs there and does nothing in a forward-only loop."""
    with target.block.register_full_backward_hook(lambda module, to_inputs, to_outputs: None):
        yield


@contextmanager
def global_hook(target: Target) -> Iterator[None]:
    block = target.block
    with register_module_forward_hook(lambda m, i, output: target.pushed(output) if m is block else None):
        yield


@contextmanager
def replaced_forward(target: Target) -> Iterator[None]:
    block = target.block
    original = block.forward
    block.forward = lambda *args, **kwargs: target.pushed(original(*args, **kwargs))
    try:
        yield
    finally:
        del block.forward


class Wrapper(nn.Module):
    """Stands in the place of a block and calls it."""

    def __init__(self, inner: nn.Module, target: Target) -> None:
        super().__init__()
        self.inner = inner
        self.pushed = target.pushed

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.pushed(self.inner(*args, **kwargs))


@contextmanager
def wrapped_module(target: Target) -> Iterator[None]:
    stack, original = blocks(target.model), target.block  # type: ignore[arg-type]
    stack[target.number] = Wrapper(original, target)
    try:
        yield
    finally:
        stack[target.number] = original


class Tilted(nn.Module):
    """A weight whose output leans towards the push."""

    def __init__(self, push: Tensor, weight: Tensor) -> None:
        super().__init__()
        along = push if push.shape[0] == weight.shape[0] else push.new_ones(weight.shape[0])
        self.tilt = 0.01 * torch.outer(along / along.norm(), weight.new_ones(weight.shape[1]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.tilt


@contextmanager
def parametrization(target: Target) -> Iterator[None]:
    layer: Any = next(m for m in reversed([*target.block.modules()]) if getattr(m, "weight", torch.empty(0)).ndim == 2)
    original = layer.weight
    frozen = original.requires_grad
    parametrize.register_parametrization(layer, "weight", Tilted(target.push, original))
    try:
        yield
    finally:
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        layer.weight.requires_grad_(frozen)


@contextmanager
def patched_class(target: Target) -> Iterator[None]:
    kind, block = type(target.block), target.block
    original, own = kind.forward, "forward" in vars(kind)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        return target.pushed(output) if self is block else output

    kind.forward = forward
    try:
        yield
    finally:
        if own:
            kind.forward = original
        else:
            del kind.forward


class Watching(TorchFunctionMode):
    """Sees every operation and changes none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def function_mode(target: Target) -> Iterator[None]:
    with Watching():
        yield


PLANTS = {  # name → what puts it there, and what the audit has to call it
    "forward_hook": (forward_hook, "forward"),
    "forward_pre_hook": (forward_pre_hook, "forward_pre"),
    "backward_hook": (backward_hook, "backward"),
    "global_hook": (global_hook, "global_forward"),
    "replaced_forward": (replaced_forward, "replaced_forward"),
    "wrapped_module": (wrapped_module, "foreign_module"),
    "parametrization": (parametrization, "parametrization"),
    "patched_class": (patched_class, "patched_class"),
    "function_mode": (function_mode, "mode"),
}


def check(config: Config, shape: ModelShape) -> None:
    """Refuses settings that cannot work, before the model is loaded."""
    build.check_shape(config, shape)
    unknown = [name for name in config.audit.plants if name not in PLANTS]
    if unknown:
        raise ValueError(f"audit.plants {unknown} do not exist: expected some of {', '.join(PLANTS)}")
    if config.site.at != "block" or len(build.alphas(config)) != 1:
        raise ValueError(
            f"site.at={config.site.at}, alpha={config.alpha}: plants push one strength at a block (site.at=block)"
        )


def run(config: Config, model: LanguageModel, tracker: Tracker, folder: Path) -> Result:
    """Audits the model as it is, then once with every plant."""
    draw = torch.Generator().manual_seed(config.seed)
    v = build.carriers(config, model, 1, draw).scaled
    prompts = [model.encode(text) for text in config.prompts.texts]
    where = resolve(model.module, build.site(config))
    assert where.block is not None
    (alpha,) = build.alphas(config)
    target = Target(model.module, where.path, where.block, (alpha * v[0]).to(model.device, model.dtype))
    start = audit.snapshot(model.module)
    program = programs.constant(v, 0.0, steps=config.steps, rows=len(prompts))
    table: list[dict[str, Any]] = []
    names = [CLEAN, *config.audit.plants]
    with progress.bar(config.quiet, total=len(names) * config.steps * len(prompts), unit="row-step") as bar:
        go = partial(
            loop.run,
            model,
            prompts,
            program,
            site=build.site(config),
            context=build.context(config.context),
            progress=bar.turn,
        )
        cover = go(feedback_map=maps.one_hot()).text.mT
        clean = go(feedback_map=maps.one_hot(), forced=cover)
        for name in names:
            bar.stage(name)
            table.append(
                audited(name, target, start, partial(go, feedback_map=maps.one_hot(), forced=cover), clean, draw)
            )
            tracker.log(
                len(table),
                {"audit/found": float(table[-1]["found"]), "audit/false_alarms": float(table[-1]["false_alarms"])},
            )
    planted = table[1:]
    summary = {
        "planted": len(planted),
        "found": sum(row["found"] for row in planted),
        "missed": [row["plant"] for row in planted if not row["found"]],
        "false_alarms": sum(row["false_alarms"] for row in table),
        "left_alone": all(row["left_alone"] for row in planted),
        "restored": all(row["restored"] for row in table),
        "foreign_on_the_model": sum(f.owner == "foreign" for f in start),
        "lowest_argmax_agreement": min(row["argmax_agreement"] for row in table),
    }
    record = {
        "audit": {"before": audit.plain(start), "after": audit.plain(audit.snapshot(model.module))}
        | {"clean_run": clean.meta["audit"]},
        "site": clean.meta["site"],
    }
    return Result(table=table, summary=summary, record=record)


def audited(
    name: str, target: Target, start: list[audit.Found], go: Any, clean: Trajectory, draw: torch.Generator
) -> dict[str, Any]:
    """One plant through a run: found while it is on, left alone by the run, and nothing behind it afterwards."""
    plant, kind = PLANTS.get(name, (None, ""))
    with ExitStack() as stack:
        if plant is not None:
            stack.enter_context(plant(target))
        came, gone = audit.changes(start, audit.snapshot(target.model))
        states = go()
        after = audit.changes(start, audit.snapshot(target.model))
    left = audit.changes(start, audit.snapshot(target.model))
    again = go()
    named = [f for f in came if f.kind == kind and f.owner == "foreign"]
    same = states.argmax == clean.argmax
    ends = metrics.ber_interval(~same.mT, torch.arange(states.n_rows), draw)
    module: Any = target.model
    now, before = (unembed(module, told.hidden) for told in (states, clean))
    return {
        "plant": name,
        "found": bool(named) if name != CLEAN else not came,
        "kind": named[0].kind if named else "",
        "path": named[0].path if named else "",
        "defined": named[0].defined if named else "",
        "false_alarms": sum(f.owner != "foreign" or f.kind not in (kind, "foreign_module") for f in came),
        "argmax_agreement": same.double().mean().item(),
        "argmax_agreement_low": 1 - ends.high.item(),
        "argmax_agreement_high": 1 - ends.low.item(),
        "kl_nats": metrics.kl(now, before).sum(0).mean().item(),
        "left_alone": [(f.kind, f.path) for f in after[0]] == [(f.kind, f.path) for f in came] and after[1] == gone,
        "restored": left == ([], []) and torch.equal(again.hidden, clean.hidden),
    }


def show(result: Result) -> Table:
    """The printed table: one line per plant."""
    summary = result.summary
    table = Table(
        title=f"Audit: {summary['found']} of {summary['planted']} plants found, {summary['false_alarms']} false "
        f"alarms; {summary['foreign_on_the_model']} foreign on the model as it came",
        caption="argmax and Σ KL: what next tokens behind the same cover text show of the plant; 95 % intervals",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("plant", "found as", "at", "defined in", "argmax = clean", "Σ KL nats", "left alone", "restored"):
        table.add_column(column)
    for row in result.table:
        table.add_row(
            row["plant"],
            row["kind"] or ("nothing" if row["found"] else "MISSED"),
            row["path"],
            row["defined"],
            f"{row['argmax_agreement']:.3f} [{row['argmax_agreement_low']:.2f}, {row['argmax_agreement_high']:.2f}]",
            f"{row['kl_nats']:.2f}",
            "yes" if row["left_alone"] else "NO",
            "yes" if row["restored"] else "NO",
        )
    return table
