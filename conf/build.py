"""From settings to the library's objects: the only place where one becomes the other."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from conf.schema import Config, ContextConfig
from feedback import carriers as carrying
from feedback import cells, hidden, logic, maps, programs
from feedback.cache import Context
from feedback.carriers import Carriers, Scale
from feedback.cells import OperatingPoint
from feedback.hidden import HiddenCell, Register
from feedback.latch import Latch
from feedback.learning import Objective
from feedback.logic import Circuit
from feedback.maps import NamedMap, Norm
from feedback.models import LanguageModel, ModelShape, ModelSpec
from feedback.programs import Program, Scope
from feedback.sites import Site, resolve, resolve_block, unembedding

MAX_POSITIONS = {"oracle": 65536}  # of models without weights of their own; others have their limit
NEEDED = {  # settings that a kind of carriers cannot do without
    "contrast_prompts": ("a", "b"),
    "contrast_soft_tokens": ("prompt", "a", "b"),
    "unembedding": ("a", "b"),
    "file": ("file",),
}


def alphas(config: Config) -> list[float]:
    """``alpha`` as a list of finite numbers; ValueError says what was given."""
    given = config.alpha if isinstance(config.alpha, list) else [config.alpha]
    numbers = [_number(one) for one in given]
    if not numbers or None in numbers:
        raise ValueError(
            f"alpha={config.alpha!r} is not a finite number or a list of them; try alpha=2.0 or alpha=[0,0.5,2]"
        )
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"alpha={config.alpha!r} names a strength twice")
    return [number for number in numbers if number is not None]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def check(config: Config) -> None:
    """ValueError for settings of every run that cannot work, before a model is looked at."""
    alphas(config)
    if config.steps < 1:
        raise ValueError(f"steps={config.steps}: expected at least 1 turn of the loop")
    if not (math.isfinite(config.noise) and config.noise >= 0):
        raise ValueError(f"noise={config.noise}: expected a finite number, 0 or more")
    if not 0 <= config.seed < 2**63:
        raise ValueError(f"seed={config.seed}: expected 0 to 2^63 - 1")
    if config.threads is not None and config.threads < 1:
        raise ValueError(f"threads={config.threads}: expected at least 1, or null")
    if config.carriers.scale not in get_args(Scale):
        raise ValueError(f"carriers.scale={config.carriers.scale!r}: expected one of {', '.join(get_args(Scale))}")
    if config.max_rows is not None and config.max_rows < 1:
        raise ValueError(f"max_rows={config.max_rows}: expected at least 1, or null")
    empty = [number for number, text in enumerate(config.prompts.texts) if not text.strip()]
    if empty or not config.prompts.texts:
        raise ValueError(f"prompts {empty or 'missing'}: a prompt needs at least one word (numbered from 0)")
    context(config.context)
    site(config)
    for name in NEEDED.get(config.carriers.kind, ()):
        _given(config, name)
    if config.map.kind != "projected_hidden":  # that one needs the model's matrices
        feedback_map(config, None)


def check_shape(config: Config, shape: ModelShape) -> None:
    """ValueError for settings that do not fit the model, known from its configuration alone."""
    if config.site.path is None:
        resolve_block(config.site.block, shape.n_blocks)
    shortest = max(len(text.split()) for text in config.prompts.texts)
    if shortest + config.steps > shape.max_positions:
        raise ValueError(
            f"a prompt of at least {shortest} tokens and steps={config.steps} need more than the model's "
            f"{shape.max_positions} positions: shorten the prompt or lower steps"
        )
    program(config, torch.ones(1, 1), torch.ones(1, 1))
    if config.carriers.kind == "file":
        shipped("carriers", _given(config, "file"))


def model_spec(config: Config) -> ModelSpec:
    model = config.model
    return ModelSpec(
        kind=model.kind,
        name=model.name,
        revision=model.revision,
        family=model.family,
        seed=model.seed,
        n_blocks=model.n_blocks,
        d_model=model.d_model,
        max_positions=MAX_POSITIONS.get(model.kind, 512),
        coupling=model.coupling,
        field=model.field,
        dtype=config.dtype,
        device=config.device,
        cache=model.cache,
    )


def site(config: Config) -> Site:
    return Site(block=config.site.block, at=config.site.at, path=config.site.path)


def numbered_site(config: Config, n_blocks: int) -> Site:
    """The site with its block's number, as a learned cell names it."""
    at = site(config)
    return at if at.path is not None else replace(at, block=resolve_block(at.block, n_blocks))


def read_sites(config: Config, model: LanguageModel) -> list[Site]:
    """The blocks behind the push whose outputs readers see, as far as the model has them."""
    at = resolve(model.module, site(config)).block
    if at is None:
        return []
    return [Site(at + behind) for behind in config.hidden_bits.read_behind if at + behind < model.n_blocks]


def context(settings: ContextConfig) -> Context:
    return Context(kind=settings.kind, window=settings.window)


def feedback_map(config: Config, model: LanguageModel | None, temperature: float | None = None) -> NamedMap:
    """The map that ``map`` names, at ``temperature`` if that is given."""
    settings = config.map
    tau = settings.temperature if temperature is None else temperature
    match settings.kind:
        case "expected_embedding":
            return maps.expected_embedding(tau)
        case "top_k":
            return maps.top_k(settings.k, tau)
        case "top_p":
            return maps.top_p(settings.p, tau)
        case "min_p":
            return maps.min_p(settings.min_p, tau)
        case "gumbel":
            return maps.gumbel(settings.gumbel_temperature, tau)
        case "mixture_of_inputs":
            return maps.mixture_of_inputs(settings.beta, tau)
        case "last_hidden":
            return maps.last_hidden(cast(Norm, settings.norm))
        case "projected_hidden":
            assert model is not None
            return maps.projected_hidden(
                model.embedding,
                unembedding(model.module).get_parameter("weight").to(model.device),
                settings.ridge,
                cast(Norm, settings.norm),
            )
        case "one_hot":
            return maps.one_hot()
    raise ValueError(f"map {settings.kind!r} does not exist")


def carriers(config: Config, model: LanguageModel, n: int, generator: torch.Generator) -> Carriers:
    """``n`` carriers as ``carriers`` says. ValueError when that kind makes, or that file holds, another number."""
    settings, where = config.carriers, site(config)
    match settings.kind:
        case "random_orthonormal":
            made = carrying.random_orthonormal(n, model.d_model, generator)
        case "contrast_prompts":
            made = carrying.contrast_prompts(model, where, _given(config, "a"), _given(config, "b"))
        case "contrast_soft_tokens":
            prompt, a, b = (_given(config, name) for name in ("prompt", "a", "b"))
            made = carrying.contrast_soft_tokens(model, where, prompt, a, b)
        case "unembedding":
            made = carrying.unembedding_direction(model, _given(config, "a"), _given(config, "b"))
        case "file":
            made = carrying.from_file(shipped("carriers", _given(config, "file")), model, where)
        case _:
            raise ValueError(f"carriers {settings.kind!r} do not exist")
    if made.n_carriers != n:
        raise ValueError(
            f"carriers={settings.kind} gives {made.n_carriers} carriers, the experiment needs {n}: "
            f"set hidden_bits.n_bits={made.n_carriers}, or use carriers=random_orthonormal"
        )
    length = carrying.residual_length(model, where, config.prompts.texts) if settings.scale == "residual" else None
    return made.with_scale(cast(Scale, settings.scale), length)


def _given(config: Config, name: str) -> str:
    value = getattr(config.carriers, name)
    if value is None:
        raise ValueError(f"carriers={config.carriers.kind} needs carriers.{name}='…'")
    return str(value)


def program(
    config: Config, pattern: Float[Tensor, "row carrier"], vectors: Float[Tensor, "carrier d_model"]
) -> Program:
    """The course that ``program`` names, multiplied row by row by ``pattern`` (strength × sign per carrier)."""
    settings, steps, scope = config.program, config.steps, cast(Scope, config.program.scope)
    length = settings.length or max(1, steps // 3)
    match settings.kind:
        case "word" | "pulse":
            return programs.pulse(
                vectors, 1.0, steps=steps, rows=pattern, start=settings.start, length=length, scope=scope
            )
        case "constant":
            return programs.constant(vectors, 1.0, steps=steps, rows=pattern, scope=scope)
        case "pulse_train":
            starts = list(range(settings.start, steps - length + 2, settings.every))
            return programs.pulse_train(
                vectors, 1.0, steps=steps, rows=pattern, starts=starts, length=length, scope=scope
            )
        case "ramp":
            return programs.ramp(vectors, 1.0, steps=steps, rows=pattern, dwell=settings.dwell, scope=scope)
    raise ValueError(f"program {settings.kind!r} does not exist; expected word, constant, pulse, pulse_train or ramp")


def latch(config: Config, model: LanguageModel, generator: torch.Generator) -> Latch:
    """The cell, a learned one or a token pair in its prompt, pushed along the one carrier at the site."""
    if config.cell.file is not None:
        held = register(config, model)
        return held.latch(0, cell_carriers(config, held, generator).scaled[0])
    return Latch(
        model=model,
        prompt=model.encode(config.cell.prompt),
        a=carrying.token_id(model, config.cell.a),
        b=carrying.token_id(model, config.cell.b),
        site=site(config),
        vector=carriers(config, model, 1, generator).scaled[0],
        temperature=config.map.temperature,
    )


def untrained_cell(config: Config, model: LanguageModel) -> HiddenCell:
    """What learning a cell begins with."""
    settings, at = config.learn, numbered_site(config, model.n_blocks)
    pushed = settings.kind != "prefix"
    return hidden.from_prompt(
        model, settings.prompt, settings.cover, settings.pairs, at, settings.cover_mass, push=pushed
    )


def objective(config: Config) -> Objective:
    """What a learned cell is to do, the loop's noise included."""
    names = ("level", "sharpness", "weakest", "mass_range", "unroll", "pushed", "threshold", "largest")
    return Objective(sigma=config.noise, **{name: getattr(config.learn, name) for name in names})


def learning(config: Config, **testing: Any) -> dict[str, Any]:
    """How a cell is learned: a Learner's options. testing: those of its loop tests, but for their noise."""
    names = ("kind", "steps", "batch", "rate", "push_rate", "test_every", "margin", "patience")
    options = {name: getattr(config.learn, name) for name in names}
    return {"seed": config.seed, "testing": {"sigma": config.noise, **testing}, **options}


def register(config: Config, model: LanguageModel) -> Register:
    """The learned cell in the loop, pushed at the site."""
    at = numbered_site(config, model.n_blocks)
    return HiddenCell.load(cell_file(config), model).on(model, at, config.map.temperature)


def cell_carriers(config: Config, held: Register, generator: torch.Generator) -> Carriers:
    """One carrier a bit: the difference between its rests, or what else ``carriers`` names."""
    if config.carriers.kind != "contrast_rests":
        return carriers(config, held.model, held.n_bits, generator)
    return held.contrasts().with_scale(cast(Scale, config.carriers.scale))


def cell_file(config: Config) -> Path:
    """Where the learned cell is."""
    return shipped("cell", str(config.cell.file))


def files(config: Config) -> dict[str, Path]:
    """The learned cell and the carriers that the run reads, by what they are."""
    found = {"cell": cell_file(config)} if config.cell.file is not None else {}
    if config.carriers.kind == "file":
        found["carriers"] = shipped("carriers", _given(config, "file"))
    return found


def shipped(group: str, name: str) -> Path:
    """A file by its path, or one that comes with the project by its name. ValueError where there is none."""
    folder = Path(__file__).parent / group
    for path in (Path(name), folder / name):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.name for path in folder.glob("*.safetensors")))
    raise ValueError(f"{group}.file={name}: no such file; expected a path, or one of {known}")


def operating_point(config: Config, latch: Latch, wires: bool = False) -> OperatingPoint:
    """The cell as measured now: rests, pulse thresholds, and, where asked, what shares of a soft token do as much."""
    settings = config.logic
    point = cells.operating_point(
        latch,
        pulse_steps=settings.pulse_steps,
        settle_steps=settings.settle_steps,
        top=settings.top,
        single=settings.single,
    )
    return cells.with_wires(latch, point) if wires else point


def circuit(config: Config) -> Circuit:
    """The netlist that ``circuit`` names, checked."""
    told = config.circuit
    parts = {"inputs": told.inputs, "cells": told.cells, "outputs": told.outputs, "truth": told.truth}
    return logic.circuit(told.name, parts)


def check_learning(config: Config) -> None:
    """ValueError for settings of learning a cell that cannot work, before a model is looked at."""
    settings = config.learn
    objective(config)
    if settings.kind not in ("prefix", "push", "both"):
        raise ValueError(f"learn.kind={settings.kind!r}: expected prefix, push or both")
    if not settings.prompt.strip() or not settings.pairs or not all(len(pair) == 2 for pair in settings.pairs):
        raise ValueError(f"learn.prompt={settings.prompt!r}, learn.pairs={settings.pairs}: expected text, and pairs")
    counts = ("steps", "batch", "test_every", "patience")
    if few := [name for name in counts if getattr(settings, name) < 1]:
        raise ValueError(f"learn.{few[0]}={getattr(settings, few[0])}: expected at least 1")
    if not (settings.rate > 0 and settings.push_rate > 0 and 0.2 <= settings.cover_mass <= 0.9):
        raise ValueError(
            f"learn.rate={settings.rate}, learn.push_rate={settings.push_rate}, learn.cover_mass="
            f"{settings.cover_mass}: expected positive rates, and a mass from 0.2 to 0.9"
        )
    if config.map.kind != "expected_embedding" or config.map.temperature != 1:
        raise ValueError(
            f"map={config.map.kind} at temperature {config.map.temperature}: a cell is learned with the expected "
            "embedding at temperature 1"
        )
    if config.site.block == "middle" and config.site.path is None:
        raise ValueError("site.block=middle: a cell is learned for one block; site.block=5 does in SmolLM2")


def check_cell(config: Config, shape: ModelShape, *, several: bool = False) -> None:
    """ValueError for settings of a latch, a gate or a circuit that cannot work, before the model is loaded. several: a
    cell may hold more than one bit."""
    if config.context.kind != "prompt" or config.map.kind != "expected_embedding":
        raise ValueError(
            f"context={config.context.kind} map={config.map.kind}: a cell is a loop whose soft token is all it "
            "remembers; use context=prompt map=expected_embedding"
        )
    if config.cell.file is not None:
        cell = HiddenCell.load(cell_file(config))
        if not cell.cover:
            raise ValueError(f"cell.file={config.cell.file} was learned under ordinary text: experiment=hidden_story")
        cell.check_site(numbered_site(config, shape.n_blocks))
        if len(cell.pairs) > 1 and not several:
            raise ValueError(
                f"cell.file={config.cell.file} holds {len(cell.pairs)} bits: experiment=register measures it"
            )
        if config.carriers.kind in ("contrast_prompts", "contrast_soft_tokens"):
            raise ValueError(
                f"carriers.kind={config.carriers.kind} is measured behind a prompt, and cell.file={config.cell.file} "
                "has a prefix of its own: carriers.kind=contrast_rests, which cell=hidden sets, or carriers=file"
            )
    elif config.carriers.kind == "contrast_rests":
        raise ValueError("carriers.kind=contrast_rests is of a learned cell: cell=hidden, or cell.file=…")
    elif config.cell.a == config.cell.b:
        raise ValueError(f"cell.a and cell.b are both {config.cell.a!r}: a latch needs two words")
    for name in ("trials", "control_trials", "pulse_steps", "settle_steps", "ticks", "sequences"):
        if getattr(config.logic, name) < 1:
            raise ValueError(f"logic.{name}={getattr(config.logic, name)}: expected at least 1")
    if not ((config.logic.top is None or config.logic.top > 0) and config.latch.top > 0 and config.logic.single > 1):
        raise ValueError(
            f"logic.top={config.logic.top}, latch.top={config.latch.top}, logic.single={config.logic.single}: expected "
            "positive strengths, and more than one threshold for an input that is enough alone"
        )


def pushed_steps(config: Config) -> Bool[Tensor, " step"]:
    """True for the loop steps at which the program pushes."""
    return program(config, torch.ones(1, 1), torch.ones(1, 1)).coefficients[:, 0, 0] != 0
