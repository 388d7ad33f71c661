"""One batch through the soft-token feedback loop.

Pass 0 reads the prompt, once per distinct prompt. Steps 1…T each read one soft token, made by the feedback map from
the logits of the pass before; a hook at the site adds what the push program says. Rows never share a mutable cache.
Under a cache a push changes the new position only: a constant push on every pass (``scope=all``) equals recomputing
the whole sequence with the push on, any other program does not; ``meta["semantics"]`` says which one ran.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache

from feedback import audit, scale
from feedback.cache import Context, LoopCache, cache_keyword, padded
from feedback.hooks import Record, record_final
from feedback.hooks import record as recording
from feedback.maps import Diagnostics, NamedMap, RowNoise, top_token
from feedback.models import LanguageModel
from feedback.programs import Program
from feedback.pushing import Receipt, push, verify
from feedback.sites import Site, resolve
from feedback.trajectory import Trajectory, concatenate

MEMORY_SHARE = 0.25  # of the device's memory, for one chunk of rows


@dataclass(frozen=True)
class Randomness:
    """Where a run's draws come from (noise of its maps, sampled text).

    Rows with the same id draw the same numbers at the same step, in every batch and chunk: arms and strengths are
    compared under one noise.
    """

    seed: int = 0
    ids: Int[Tensor, " row"] | None = None  # default: every row its own

    @staticmethod
    def of(generator: torch.Generator, ids: Int[Tensor, " row"] | None = None) -> "Randomness":
        """With a seed drawn from ``generator``."""
        return Randomness(int(torch.randint(2**31, (1,), generator=generator)), ids)


Prompt = Sequence[int] | Tensor  # token ids, or vectors (position, d_model)


def run(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    program: Program,
    *,
    feedback_map: NamedMap,
    site: Site = Site(),  # noqa: B008 (frozen)
    context: Context = Context(),  # noqa: B008 (frozen)
    row_prompt: Int[Tensor, " row"] | None = None,
    forced: Int[Tensor, "position row"] | None = None,
    sample: float | None = None,
    randomness: Randomness = Randomness(),
    reference: Int[Tensor, " row"] | None = None,
    first: Float[Tensor, "row d_model"] | None = None,
    record: Sequence[Site] = (),
    differentiable: bool = False,
    max_rows: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Trajectory:
    """Runs ``program`` through the loop and returns what happened.

    Args:
        prompts: token ids of the distinct prompts, or the vectors (position, d_model) to read in their place; lengths
            may differ.
        program: what is pushed, (step, row, carrier); its step axis is the number of loop steps T.
        feedback_map: how logits, hidden state and emitted token become the next input vector; ``maps.noisy`` around
            it injects noise.
        site: where the push is added.
        context: what stays in the cache behind the prompt.
        row_prompt: which prompt each row reads; by default row r reads prompt r.
        forced: cover text, (T+1, row): the token emitted after the prompt and after each step. Without it the text is
            the argmax or, with ``sample``, a draw at that temperature.
        randomness: the seed, and which rows share their draws.
        reference: for each row, the row it is compared with; fills ``kl``.
        first: the soft token of step 1, in place of the one that the prompt's output would make; as it is, so noise
            has to be in it. What the map says about step 1 is then not a number. Where the soft token is all that the
            loop remembers (context ``prompt``), and only there, it continues the run whose last output made it.
        record: further sites whose last position is kept at every step.
        differentiable: gradients flow from the trajectory to the program's carriers and coefficients.
        max_rows: rows per chunk; by default as many as fit in a quarter of the device's memory.
        progress: called after every step with the number of rows that took it.

    Raises:
        ValueError: shapes that do not fit, a prompt that is empty or too long, a context the model cannot have.
        ReceiptError: a push that did not arrive as asked.

    A row whose state turns non-finite is marked in ``stopped_at``; the others go on.
    """
    row_prompt = torch.arange(program.n_rows) if row_prompt is None else row_prompt.cpu()
    _check(model, prompts, program, row_prompt, forced, reference, first, context, differentiable)
    chunk_rows = max_rows or rows_that_fit(model, prompts, program, context, len(record), differentiable)
    settings = _Settings(model, site, context, sample, tuple(record), differentiable)
    ids = torch.arange(program.n_rows) if randomness.ids is None else randomness.ids.cpu()
    parts = []
    before = audit.snapshot(model.module)
    with nullcontext() if differentiable else torch.no_grad():
        shared = _read_once(settings, prompts, program, row_prompt)
        for start in range(0, program.n_rows, chunk_rows):
            own = torch.arange(start, min(start + chunk_rows, program.n_rows))
            rows = own if reference is None else _with_references(own, reference)
            part = program.rows(rows)
            if shared is None:
                read = _read(settings, [prompts[i] for i in row_prompt[rows].tolist()], part)
                reads = torch.arange(len(rows))
            else:
                read, reads = shared, row_prompt[rows]
            trajectory = _run_chunk(
                settings,
                read,
                reads.to(model.device),
                part,
                forced=None if forced is None else forced[:, rows].to(model.device),
                first=None if first is None else first[rows.to(first.device)].to(model.embedding),
                feedback_map=feedback_map.rows(rows),
                noise=partial(
                    RowNoise,
                    randomness.seed,
                    ids=ids[rows].to(model.device),
                    n_ids=int(ids.max()) + 1,
                    device=model.device,
                    dtype=model.dtype,
                ),
                reference=None if reference is None else _positions(reference[rows], rows, model),
                progress=progress,
                before=before,
            )
            parts.append(trajectory if rows is own else trajectory.rows(torch.arange(len(own))))
    text = "forced" if forced is not None else "argmax" if sample is None else f"sampled at {sample}"
    meta = settings.describe(program) | {
        "feedback_map": feedback_map.name,
        "text": text,
        "seed": randomness.seed,
        "chunk_rows": chunk_rows,
        "audit": {
            "before": audit.plain(before),
            "added_during": parts[0].meta["added"],
            "after": audit.plain(audit.snapshot(model.module)),
        },
    }
    return replace(concatenate(parts), program=program, meta=meta)


@dataclass(frozen=True)
class _Settings:
    """What is the same in every chunk of a run."""

    model: LanguageModel
    site: Site
    context: Context
    sample: float | None
    record: tuple[Site, ...]
    differentiable: bool

    def describe(self, program: Program) -> dict[str, Any]:
        where = resolve(self.model.module, self.site)
        return {
            "context": asdict(self.context),
            "site": {"block": where.block, "at": where.at, "path": where.path},
            "semantics": _semantics(program, self.context),
            "model": asdict(self.model.info),
        }

    @cached_property
    def cache_keyword(self) -> str:
        return cache_keyword(self.model.module)

    def forward(self, cache: Cache, final: Record, **inputs: Any) -> tuple[Tensor, Tensor]:
        """One pass: logits (row, vocab) and the hidden state before the unembedding (row, d_model), last position."""
        keywords = {**inputs, self.cache_keyword: cache}
        output = self.model.module(**keywords, use_cache=True, return_dict=True)
        return output.logits[:, -1].to(self.model.device), final.take()[:, -1].to(self.model.device)


@dataclass(frozen=True)
class _Read:
    """The prompts after pass 0: their cache, what came out, and where real tokens are."""

    cache: Cache
    logits: Float[Tensor, "prompt vocab"]
    hidden: Float[Tensor, "prompt d_model"]
    mask: Bool[Tensor, "prompt position"]
    ragged: bool


def _read_once(
    settings: _Settings, prompts: Sequence[Prompt], program: Program, row_prompt: Int[Tensor, " row"]
) -> "_Read | None":
    """Pass 0 over the distinct prompts; None where the rows of one prompt are pushed differently while they read it."""
    asked = program.prompt_coefficients
    if asked is None:
        return _read(settings, prompts, None)
    rows = [(row_prompt == number).nonzero()[:, 0] for number in range(len(prompts))]
    if any(len(own) == 0 or (asked[own] != asked[own[0]]).any() for own in rows):
        return None
    return _read(settings, prompts, program.rows(torch.stack([own[0] for own in rows])))


def _read(settings: _Settings, prompts: Sequence[Prompt], program: Program | None) -> _Read:
    """Pass 0 over ``prompts``, pushed at every position by ``program``'s prompt coefficients where there are any."""
    model = settings.model
    embedded, mask = _embedded(model, prompts)
    cache = DynamicCache()
    with ExitStack() as stack:
        handle = None
        if program is not None and program.prompt_coefficients is not None:
            carriers = program.carriers.to(model.device)
            handle = stack.enter_context(push(model.module, settings.site, carriers, first_step=0))
            asked = program.prompt_coefficients.to(model.device)
            handle.set((asked @ carriers).to(model.dtype))
        final = stack.enter_context(record_final(model.module))
        logits, hidden = settings.forward(
            cache,
            final,
            inputs_embeds=embedded,
            attention_mask=mask.long(),
            position_ids=(mask.long().cumsum(-1) - 1).clamp(min=0),
            **model.last_position_only,
        )
        if handle is not None:
            verify(handle, model.dtype, [handle.take()], asked[None], carriers, first_step=0)
    return _Read(cache, logits, hidden, mask, not bool(mask.all()))


def _embedded(model: LanguageModel, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """What pass 0 reads, left-padded (prompt, position, d_model), and the mask of real positions."""
    ids, mask = padded([[model.pad_id] * len(p) if isinstance(p, Tensor) else list(p) for p in prompts], model.pad_id)
    embedded = torch.nn.functional.embedding(ids.to(model.device), model.embedding)
    if any(isinstance(p, Tensor) for p in prompts):
        longest = mask.shape[1]
        rows = [
            torch.cat([row[: longest - len(p)], p.to(row)]) if isinstance(p, Tensor) else row
            for p, row in zip(prompts, embedded, strict=True)
        ]
        embedded = torch.stack(rows)
    return embedded, mask.to(model.device)


def _run_chunk(
    settings: _Settings,
    read: _Read,
    reads: Tensor,
    program: Program,
    *,
    forced: Tensor | None,
    first: Tensor | None,
    feedback_map: NamedMap,
    noise: Callable[[int], RowNoise],
    reference: Tensor | None,
    progress: Callable[[int], None] | None,
    before: Sequence[audit.Found],
) -> Trajectory:
    model, context, embedding = settings.model, settings.context, settings.model.embedding
    coefficients, carriers = program.coefficients.to(model.device), program.carriers.to(model.device)
    active = program.coefficients.detach().ne(0).flatten(1).any(-1).tolist()
    cache = LoopCache(read.cache, reads, context, program.n_steps, settings.differentiable)
    mask = _StepMask(model, read, reads, cache.n_slots)
    lengths = read.mask.sum(-1)[reads][:, None]
    logits, hidden = read.logits.index_select(0, reads), read.hidden.index_select(0, reads)
    out: dict[str, list[Tensor]] = defaultdict(list)
    receipts: list[Receipt] = []

    def emit(step: int) -> Tensor:
        if forced is not None:
            return forced[step]
        if settings.sample is None:
            return top_token(logits)
        drawn = noise(step).gumbel(logits.shape[-1], stream="sample")
        return (logits / settings.sample + drawn).argmax(-1)

    tokens = prompt_tokens = emit(0)
    prompt_hidden = hidden
    recorded: dict[Site, list[Tensor]] = {site: [] for site in settings.record}
    with ExitStack() as stack:
        handle = stack.enter_context(push(model.module, settings.site, carriers))
        recorder = stack.enter_context(recording(model.module, settings.record))
        final = stack.enter_context(record_final(model.module))
        added, _ = audit.changes(before, audit.snapshot(model.module))
        for step in range(1, program.n_steps + 1):
            if first is not None and step == 1:
                vector, fed = first, _unknown(len(reads), model)
            else:
                vector, fed = feedback_map(logits, hidden, embedding, tokens, noise(step))
            delta = (coefficients[step - 1] @ carriers).to(model.dtype) if active[step - 1] else None
            handle.set(delta)
            used = cache.begin(step)
            logits, hidden = settings.forward(
                cache,
                final,
                inputs_embeds=vector[:, None],
                attention_mask=mask.at(used),
                position_ids=lengths + context.offset(step),
            )
            tokens = emit(step)
            receipts.append(handle.take())
            for site, value in recorder.outputs.items():
                recorded[site].append(value[:, -1].to(model.device))
            out["soft_tokens"].append(vector)
            out["hidden"].append(hidden)
            out["tokens"].append(tokens)
            out["argmax"].append(tokens if _is_argmax(settings, forced) else top_token(logits))
            out["entropy"].append(fed.entropy)
            out["top_probability"].append(fed.top_probability)
            out["kept_mass"].append(fed.kept_mass)
            if reference is not None:
                out["kl"].append(_kl_to(logits, reference))
            if progress is not None:
                progress(len(reads))
    stacked: dict[str, Any] = {name: torch.stack(values) for name, values in out.items()}
    soft_tokens = stacked["soft_tokens"].detach()
    finite = torch.isfinite(stacked["hidden"].detach()).all(-1)
    stopped_at = torch.where(finite.all(0), 0, finite.int().argmin(0) + 1)
    verify(handle, model.dtype, receipts, coefficients, carriers, finite=finite)
    return Trajectory(
        **stacked,
        prompt_tokens=prompt_tokens,
        prompt_hidden=prompt_hidden,
        norm_ratio=torch.linalg.vector_norm(soft_tokens, dim=-1) / model.mean_embedding_length,
        pushed=torch.stack([r.pushed for r in receipts]),
        relative_push=torch.stack([r.relative for r in receipts]),
        site_norm=torch.stack([r.length for r in receipts]),
        stopped_at=stopped_at,
        program=program,
        recorded={resolve(model.module, s).path: torch.stack(v) for s, v in recorded.items()},
        meta={"added": audit.plain(added)},
    )


def _unknown(n_rows: int, model: LanguageModel) -> Diagnostics:
    nothing = torch.full((n_rows,), torch.nan, device=model.device)
    return Diagnostics(nothing, nothing, nothing, nothing)


def _is_argmax(settings: _Settings, forced: Tensor | None) -> bool:
    return forced is None and settings.sample is None


def _kl_to(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(row ‖ reference row) in nats, (row,). Unlike ``metrics.kl`` it needs one log-softmax for both sides: a
    reference is a row of the same batch."""
    log_p = torch.log_softmax(logits.float(), -1)
    return (log_p.exp() * (log_p - log_p[reference])).sum(-1).clamp(min=0)


class _StepMask:
    """The attention mask of a one-token pass: None when no row is padded, else a view of one buffer.

    Models with scaled-dot-product attention and no sliding window take it ready-made (row, 1, 1, key); the others get
    the (row, key) form, from which transformers builds its own, at the price of one look at it per step.
    """

    def __init__(self, model: LanguageModel, read: _Read, reads: Tensor, n_slots: int) -> None:
        config = model.module.config
        self._mask = None
        plain = getattr(config, "sliding_window", None) is None
        if read.ragged or not plain:
            real = read.mask[reads]
            mask = torch.cat([real, real.new_ones((len(reads), n_slots))], dim=-1)
            ready = plain and config._attn_implementation == "sdpa"
            self._mask = mask[:, None, None] if ready else mask
        self._prompt_length = read.mask.shape[-1]

    def at(self, used: int) -> Tensor | None:
        return None if self._mask is None else self._mask[..., : self._prompt_length + used]


def _semantics(program: Program, context: Context) -> str:
    if context.kind == "prompt":
        return "autonomous: the cache is cut back to the prompt after every step"
    constant = bool((program.coefficients == program.coefficients[:1]).all())
    prompt = program.prompt_coefficients
    if constant and prompt is not None and bool((program.coefficients[0] == prompt).all()):
        return "constant push on every pass: equal to recomputing the whole sequence with it"
    return "cached: a push changes the position of its own step; earlier positions keep what they were pushed with"


def rows_that_fit(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    program: Program,
    context: Context = Context(),  # noqa: B008 (frozen)
    recorded: int = 0,
    differentiable: bool = False,
) -> int:
    """Rows per chunk such that cache, logits and records (of ``recorded`` further sites, too) take at most a quarter of
    the device's memory; where blocks are on several devices, of each one's.

    Depends on the machine's total memory, not on what is free: the same command gives the same chunks.
    """
    prompt = max(map(len, prompts))
    row = scale.row_bytes(
        model.module.config,
        model.dtype,
        prompt=prompt,
        slots=context.slots(program.n_steps),
        steps=program.n_steps,
        carriers=program.coefficients.shape[-1],
        recorded=recorded,
        differentiable=differentiable,
    )
    if program.prompt_coefficients is not None:  # every row may read its prompt with a push of its own
        row = replace(row, cache=row.cache + prompt * 24 * model.d_model * model.dtype.itemsize)
    totals = {device: _memory(device) for device in scale.weights(model.module)}
    rows = scale.rows_on_devices(model.module, model.device, row, totals, MEMORY_SHARE)
    return max(1, min(program.n_rows, rows))


def _memory(device: torch.device) -> int:
    """Bytes in all, not what is free."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _with_references(own: Tensor, reference: Tensor) -> Tensor:
    """The rows of a chunk: its own first, then those reference rows that are not among them."""
    needed = torch.unique(reference[own].cpu())
    return torch.cat([own, needed[~torch.isin(needed, own)]])


def _positions(wanted: Tensor, rows: Tensor, model: LanguageModel) -> Tensor:
    """Where each of the ``wanted`` row numbers stands in ``rows`` (absent ones, of rows dropped later: itself)."""
    place = {row: i for i, row in enumerate(rows.tolist())}
    return torch.tensor([place.get(w, i) for i, w in enumerate(wanted.tolist())], device=model.device)


def _check(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    program: Program,
    row_prompt: Tensor,
    forced: Tensor | None,
    reference: Tensor | None,
    first: Tensor | None,
    context: Context,
    differentiable: bool,
) -> None:
    """ValueError for whatever would fail later, or worse, would not."""
    n_rows, n_steps = program.n_rows, program.n_steps
    if not prompts or not all(len(p) for p in prompts):
        empty = [i for i, p in enumerate(prompts) if not len(p)]
        raise ValueError(f"prompts {empty or 'missing'}: a prompt needs at least one token")
    for number, p in enumerate(prompts):
        if isinstance(p, Tensor) and (p.dim() != 2 or p.shape[1] != model.d_model):
            raise ValueError(f"prompt {number} is {tuple(p.shape)}; expected (position, d_model = {model.d_model})")
    if len(row_prompt) != n_rows or int(row_prompt.max()) >= len(prompts) or int(row_prompt.min()) < 0:
        raise ValueError(
            f"row_prompt names prompts {int(row_prompt.min())}–{int(row_prompt.max())} for {len(row_prompt)} rows; "
            f"the program has {n_rows} rows and there are {len(prompts)} prompts"
        )
    if program.carriers.shape[-1] != model.d_model:
        raise ValueError(
            f"the carriers are {program.carriers.shape[-1]} numbers wide; {model.info.name} has d_model "
            f"{model.d_model}: make them for this model"
        )
    if differentiable and any(
        m.training and getattr(m, "gradient_checkpointing", False) for m in model.module.modules()
    ):
        raise ValueError(
            "a differentiable loop over a model under gradient checkpointing: transformers drops the cache there, so "
            "every step would forget the prompt; switch checkpointing off, or model.module.eval()"
        )
    longest = max(map(len, prompts))
    if longest + n_steps > model.max_positions:
        raise ValueError(
            f"the longest prompt ({longest} tokens) and {n_steps} steps need {longest + n_steps} positions; "
            f"{model.info.name} has {model.max_positions}: shorten the prompt or lower steps"
        )
    sliding = getattr(model.module.config, "sliding_window", None)
    if context.kind == "window" and sliding is not None and longest + n_steps > sliding:
        raise ValueError(
            f"context window reuses cache slots, which a model with sliding attention ({sliding} positions) cannot "
            f"follow over {longest + n_steps} positions; use context full or prompt"
        )
    if forced is not None and tuple(forced.shape) != (n_steps + 1, n_rows):
        raise ValueError(
            f"forced cover text is {tuple(forced.shape)}; expected (steps + 1, rows) = {(n_steps + 1, n_rows)}: "
            "one token after the prompt and one after each step"
        )
    if first is not None and tuple(first.shape) != (n_rows, model.d_model):
        raise ValueError(f"first is {tuple(first.shape)}; expected (row, d_model) = {(n_rows, model.d_model)}")
    if reference is not None and len(reference) != n_rows:
        raise ValueError(f"reference names {len(reference)} rows; the program has {n_rows}")
