"""Hidden bits: written into the loop by a push, read from the state, absent from the text?

Every row carries one message b ∈ {0,1}ⁿ, pushed as α(2b−1) on n carriers while the program is on. Readers are fitted
on some messages and prompts, frozen, and asked about others. All arms see the same prompts, messages and noise; every
prompt has one reference row, unpushed and without noise, which the informed reader knows and the text is compared with.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from conf import build
from conf.schema import ArmConfig, Config
from feedback import figures, loop, maps, metrics, programs, progress
from feedback.models import LanguageModel, ModelShape
from feedback.programs import balanced_messages
from feedback.readout import StepReader, TextReader
from feedback.results import Result
from feedback.tracking import Tracker
from feedback.trajectory import Trajectory

REFERENCE, FIT, MESSAGES, PROMPTS = range(4)  # what a row is for
SPLITS = {"messages": MESSAGES, "prompts": PROMPTS}  # held-out messages on known prompts; unseen prompts
HEADLINE = (
    *("ber", "ber_while_pushed", "ber_blind", "ber_unseen_prompts", "text_ber", "argmax_ber", "hiddenness"),
    *("text_agreement", "argmax_agreement", "kl_nats", "rate_bits", "half_life_steps"),
)
SHUFFLES = 16  # permutations of the labels that the shuffled control averages over


def check(config: Config, shape: ModelShape) -> None:
    """Refuses settings that cannot work, before the model is loaded."""
    bits, prompts = config.hidden_bits, config.prompts
    build.check_shape(config, shape)
    if bits.n_bits < 1 or bits.n_bits > shape.d_model:
        raise ValueError(
            f"hidden_bits.n_bits={bits.n_bits}: expected 1 to {shape.d_model}, the width of the model "
            "(orthonormal carriers cannot be more than that)"
        )
    for name in ("fit_messages", "test_messages"):
        count = getattr(bits, name)
        if count < 2 or count % 2:
            raise ValueError(f"hidden_bits.{name}={count}: expected an even number, at least 2, so that it can balance")
    if bits.window < 1:
        raise ValueError(f"hidden_bits.window={bits.window}: expected at least 1 step")
    if not 1 <= prompts.unseen <= len(prompts.texts) - 2:
        raise ValueError(
            f"prompts.unseen={prompts.unseen} of {len(prompts.texts)} prompts: expected at least 1 unseen and 2 known"
        )
    if bits.headline not in bits.arms:
        raise ValueError(f"hidden_bits.headline={bits.headline!r}; arms: {', '.join(bits.arms)}")
    for name, arm in bits.arms.items():
        if arm.states_of is not None and arm.states_of not in bits.arms:
            raise ValueError(f"arm {name} reads the states of {arm.states_of!r}; arms: {', '.join(bits.arms)}")
        if arm.cover not in ("free", "forced"):
            raise ValueError(f"arm {name}: cover={arm.cover!r}; expected free or forced")
        maps.hard_mix(maps.expected_embedding(1.0 if arm.temperature is None else arm.temperature), arm.mix)


@dataclass(frozen=True)
class Rows:
    """What each row of the batch is: one reference row per prompt, then the trials of every strength."""

    kind: Int[Tensor, " row"]  # REFERENCE, FIT, MESSAGES or PROMPTS
    prompt: Int[Tensor, " row"]
    bits: Bool[Tensor, "row carrier"]
    alpha: Float[Tensor, " row"]
    trial: Int[Tensor, " row"]  # the same in every strength: rows of one trial share their noise


def lay_out(config: Config, alphas: list[float], generator: torch.Generator) -> Rows:
    """Messages are balanced within each prompt, so that no reader gains from a bit that is often 1; no held-out message
    of a prompt is one of its fitted messages or the complement of one."""
    bits, n_prompts = config.hidden_bits, len(config.prompts.texts)
    kinds: list[int] = []
    prompts: list[int] = []
    words: list[Tensor] = []
    for prompt in range(n_prompts):
        if prompt < n_prompts - config.prompts.unseen:
            fit = balanced_messages(bits.fit_messages, bits.n_bits, generator)
            asked = balanced_messages(bits.test_messages, bits.n_bits, generator, apart_from=fit)
            words += [fit, asked]
            kinds += [FIT] * len(fit) + [MESSAGES] * len(asked)
        else:
            words.append(balanced_messages(bits.test_messages, bits.n_bits, generator))
            kinds += [PROMPTS] * bits.test_messages
        prompts += [prompt] * (len(kinds) - len(prompts))
    kind, prompt_of = torch.tensor(kinds), torch.tensor(prompts)
    trials = len(kind)
    message = torch.cat(words).bool()
    return Rows(
        kind=torch.cat([torch.full((n_prompts,), REFERENCE), *[kind] * len(alphas)]),
        prompt=torch.cat([torch.arange(n_prompts), *[prompt_of] * len(alphas)]),
        bits=torch.cat([torch.zeros(n_prompts, bits.n_bits, dtype=torch.bool), *[message] * len(alphas)]),
        alpha=torch.cat([torch.zeros(n_prompts), torch.tensor(alphas).repeat_interleave(trials)]),
        trial=torch.cat([torch.arange(n_prompts), (n_prompts + torch.arange(trials)).repeat(len(alphas))]),
    )


def run(config: Config, model: LanguageModel, tracker: Tracker, folder: Path) -> Result:
    """Runs every arm, fits and asks its readers; leaves trajectories and figures in ``folder``."""
    generator = torch.Generator().manual_seed(config.seed)
    alphas = build.alphas(config)
    carriers = build.carriers(config, model, config.hidden_bits.n_bits, generator)
    prompts = [model.encode(text) for text in config.prompts.texts]
    rows = lay_out(config, alphas, generator)
    randomness = loop.Randomness.of(generator, rows.trial)
    cover = cover_text(config, model, prompts, carriers.scaled)
    arms = {name: arm for name, arm in config.hidden_bits.arms.items() if arm.states_of is None}
    total = len(arms) * config.steps * len(rows.kind)
    states: dict[str, Trajectory] = {}
    table: list[dict[str, Any]] = []
    with progress.bar(config.quiet, total=total, unit="row-step") as bar:
        for name, arm in config.hidden_bits.arms.items():
            bar.stage(name)
            if arm.states_of is None:
                states[name] = run_arm(config, model, prompts, carriers.scaled, rows, arm, cover, randomness, bar.turn)
                states[name].save(folder / "trajectories" / f"{name}.safetensors", config.save_states)
            for alpha in alphas if arm.alpha is None else alphas[:1]:
                measured = measure(config, name, arm, states[arm.states_of or name], rows, alpha, generator)
                table += measured
                for row in measured:
                    if (row["reader"], row["split"]) == ("informed", "messages"):
                        prefix = name if len(alphas) == 1 else f"{name}/alpha={alpha:g}"
                        numbers = {k: v for k, v in row.items() if isinstance(v, float) and k != "alpha"}
                        tracker.log(row["step"], {f"{prefix}/{k}": v for k, v in numbers.items()})
    summary = summarise(config, table, alphas)
    tracker.summary({key: summary.get(config.hidden_bits.headline, {}).get(key) for key in HEADLINE})
    said = transcripts(config, model, rows, states, alphas)
    columns = ("arm", "alpha", "prompt", "cover", "steered")
    tracker.table("transcripts", columns, [[_joined(one[column]) for column in columns] for one in said])
    failures = {name: trajectory.failures() for name, trajectory in states.items() if not trajectory.finite.all()}
    record = {
        "alpha_measured": {name: summary[name]["alpha_measured"] for name in summary},
        "receipts": {name: receipts(trajectory, rows) for name, trajectory in states.items()},
        "semantics": {name: trajectory.meta["semantics"] for name, trajectory in states.items()},
        "site": next(iter(states.values())).meta["site"],
        "audit": next(iter(states.values())).meta["audit"],
        "stopped_rows": failures,
        "transcripts": said,
        "noise_model": {
            "sigma": config.noise,
            "unit": "mean length of an embedding row, per coordinate / sqrt(d_model), every soft token",
            "dtype": config.dtype,
            "reader_sees": [*next(iter(states.values())).recorded, "final hidden state"],
            "held_out": "messages on known prompts (split messages); prompts (split prompts)",
        },
    }
    drawn = draw(config, table, said, alphas, folder / "figures")
    return Result(table=table, summary=summary, figures=drawn, record=record)


def cover_text(
    config: Config, model: LanguageModel, prompts: list[list[int]], vectors: Float[Tensor, "carrier d_model"]
) -> Int[Tensor, "position prompt"]:
    """What the unpushed model writes after each prompt: T+1 greedy tokens, written by the loop with the one-hot map."""
    nothing = programs.constant(vectors, 0.0, steps=config.steps, rows=len(prompts))
    return loop.run(model, prompts, nothing, feedback_map=maps.one_hot()).text.mT


def run_arm(
    config: Config,
    model: LanguageModel,
    prompts: list[list[int]],
    vectors: Float[Tensor, "carrier d_model"],
    rows: Rows,
    arm: ArmConfig,
    cover: Int[Tensor, "position prompt"],
    randomness: loop.Randomness,
    progress: Any,
) -> Trajectory:
    """One arm's batch through the loop."""
    alpha = rows.alpha if arm.alpha is None else torch.full_like(rows.alpha, arm.alpha)
    trial = rows.kind != REFERENCE
    strength = alpha * trial
    program = build.program(config, strength[:, None] * (2.0 * rows.bits - 1), vectors)
    program = replace(program, columns={"alpha": strength, "bits": rows.bits, "prompt": rows.prompt, "kind": rows.kind})
    inner = build.feedback_map(config, model, arm.temperature)
    context = config.context if arm.context is None else replace(config.context, kind=arm.context)
    return loop.run(
        model,
        prompts,
        program,
        feedback_map=maps.noisy(maps.hard_mix(inner, arm.mix), config.noise * trial.float()),
        site=build.site(config),
        context=build.context(context),
        row_prompt=rows.prompt,
        forced=cover[:, rows.prompt] if arm.cover == "forced" else None,
        randomness=randomness,
        record=build.read_sites(config, model),
        reference=rows.prompt,  # the reference rows stand first, in the order of the prompts
        max_rows=config.max_rows,
        progress=progress,
    )


def measure(
    config: Config, name: str, arm: ArmConfig, states: Trajectory, rows: Rows, alpha: float, generator: torch.Generator
) -> list[dict[str, Any]]:
    """The arm's table rows at one strength: a row per reader, split and step."""
    hidden = torch.cat([*states.recorded.values(), states.hidden], dim=-1).float()
    text = states.text.mT[1:]
    finite = states.finite.to("cpu")
    trials = (rows.kind != REFERENCE) & (rows.alpha == alpha) & finite
    if not trials.any():
        return []
    fit = trials & (rows.kind == FIT)
    labels = rows.bits[fit]
    if arm.shuffle:
        orders = [torch.randperm(len(labels), generator=generator) for _ in range(SHUFFLES)]
        labels = torch.cat([labels[order] for order in orders], dim=1)
    differs = hidden - hidden[:, rows.prompt]
    text_read = read_text(text, rows, fit, labels, trials)
    argmax_read = read_text(states.argmax, rows, fit, labels, trials)
    shared = text_metrics(config, states, rows, trials)
    table = []
    for reader, features in (("informed", differs), ("blind", hidden)):
        for split, kind in SPLITS.items():
            asked = trials & (rows.kind == kind)
            groups = rows.prompt[fit] if split == "prompts" else None
            read = read_states(config, features, fit, asked, labels, groups)
            state = score(read, rows, asked, generator)
            words = score(text_read[:, asked[trials]], rows, asked, generator)
            unsaid = score(argmax_read[:, asked[trials]], rows, asked, torch.Generator().manual_seed(config.seed))
            for step in range(config.steps):
                table.append(
                    {
                        "arm": name,
                        "alpha": alpha if arm.alpha is None else arm.alpha,
                        "reader": reader,
                        "split": split,
                        "step": step + 1,
                        **{key: values[step] for key, values in state.items()},
                        **{f"text_{key}": words[key][step] for key in ("ber", "ber_low", "ber_high")},
                        **{f"argmax_{key}": unsaid[key][step] for key in ("ber", "ber_low", "ber_high")},
                        "hiddenness": words["ber"][step] - state["ber"][step],
                        **{key: values[step] for key, values in shared.items()},
                    }
                )
    return table


def read_states(
    config: Config,
    features: Float[Tensor, "step row feature"],
    fit: Bool[Tensor, " row"],
    asked: Bool[Tensor, " row"],
    labels: Bool[Tensor, "fitted carrier"],
    groups: Int[Tensor, " fitted"] | None,
) -> Bool[Tensor, "step asked carrier"]:
    """What a state reader says after each step about the rows ``asked``, fitted on the rows ``fit``.

    It combines the last ``window`` steps; once the push is over, only steps since then, so that what it still reads was
    remembered by the loop and not by the reader.
    """
    on = build.pushed_steps(config)
    end = int(torch.nonzero(on).max()) + 1 if on.any() else 0
    window, read = config.hidden_bits.window, []
    for part in (features[:end], features[end:]):
        if len(part):
            read.append(StepReader.fit(part[:, fit], labels, groups, window=window).read(part[:, asked]))
    return torch.cat(read)


def score(
    read: Bool[Tensor, "step row read"], rows: Rows, asked: Bool[Tensor, " row"], generator: torch.Generator
) -> dict[str, list[float]]:
    """BER, interval and rate per step. Several readings of one message (shuffled control) are averaged, and the
    interval is that of a single reading."""
    bits, prompts = rows.bits[asked], rows.prompt[asked]
    errors = read != bits.repeat(1, read.shape[-1] // bits.shape[-1])
    ber = metrics.bit_error_rate(errors)
    if errors.shape[-1] == bits.shape[-1]:
        interval = metrics.ber_interval(errors, prompts, generator)
    else:
        interval = metrics.wilson((ber * bits.numel()).round().long(), bits.numel())
    return {
        "ber": ber.tolist(),
        "ber_low": interval.low.tolist(),
        "ber_high": interval.high.tolist(),
        "rate_bits": metrics.rate_bits(ber).tolist(),
    }


def read_text(
    text: Int[Tensor, "step row"], rows: Rows, fit: Tensor, labels: Tensor, trials: Tensor
) -> Bool[Tensor, "step trial carrier"]:
    """What a text reader says after each step of emitted tokens, or of what the model would have said. It knows the α=0
    text of every prompt."""
    tokens, reference = text.mT, text[:, rows.prompt].mT
    read = []
    for end in range(1, len(text) + 1):
        reader = TextReader.fit(tokens[fit, :end], labels, rows.prompt[fit], reference=reference[fit, :end])
        read.append(reader.read(tokens[trials, :end], reference[trials, :end]))
    return torch.stack(read)


def text_metrics(config: Config, states: Trajectory, rows: Rows, trials: Tensor) -> dict[str, list[float]]:
    """Per step, over all trials: how ordinary text and logits are, what was fed, and the push that was measured."""
    reference = rows.prompt[trials]
    sign = 2 * rows.bits[trials].float() - 1
    on = build.pushed_steps(config)
    assert states.kl is not None
    values = {
        "kl_nats": states.kl[:, trials],
        "entropy": states.entropy[:, trials],
        "soft_fraction": (states.top_probability[:, trials] < 0.99).float(),
        "norm_ratio": states.norm_ratio[:, trials],
        "alpha_measured": (states.pushed[:, trials] * sign).mean(-1),
        "relative_push": states.relative_push[:, trials],
    }
    same = {
        "text_agreement": metrics.agreement(states.tokens[:, trials], states.tokens[:, reference], over=1),
        "argmax_agreement": metrics.agreement(states.argmax[:, trials], states.argmax[:, reference], over=1),
    }
    curves = same | {key: value.double().mean(1) for key, value in values.items()}
    return {"pushed": on.tolist()} | {key: curve.tolist() for key, curve in curves.items()}


def receipts(states: Trajectory, rows: Rows) -> dict[str, Any]:
    """The push as measured: fired once in every step, and how far Δ·v̂ was from what was asked."""
    asked = states.program.coefficients
    off = (states.pushed - asked)[:, states.finite].abs()
    trials = rows.kind != REFERENCE
    return {
        "steps": states.n_steps,
        "rows": states.n_rows,
        "fired_per_step": 1,  # anything else ends the run
        "largest_error": off.max().item() if off.numel() else None,
        "mean_site_norm": states.site_norm[:, trials].mean().item(),
        "largest_relative_push": states.relative_push[:, states.finite].max().item() if off.numel() else None,
    }


def summarise(config: Config, table: list[dict[str, Any]], alphas: list[float]) -> dict[str, Any]:
    """Per arm, the informed reader on held-out messages; with several strengths the largest one's, and all of them
    under ``by_alpha``."""
    summary: dict[str, Any] = {}
    for name, arm in config.hidden_bits.arms.items():
        by_alpha = {}
        for label in alphas if arm.alpha is None else [arm.alpha]:
            own = [row for row in table if row["arm"] == name and row["alpha"] == label]
            if own:
                by_alpha[f"{label:g}"] = summarise_arm(own)
        if by_alpha:
            largest = max(by_alpha, key=lambda text: abs(float(text)))
            summary[name] = by_alpha[largest] | ({"by_alpha": by_alpha} if len(by_alpha) > 1 else {})
    return summary


def summarise_arm(table: list[dict[str, Any]]) -> dict[str, Any]:
    def curve(reader: str, split: str) -> list[dict[str, Any]]:
        return [row for row in table if (row["reader"], row["split"]) == (reader, split)]

    steps = curve("informed", "messages")
    on = [row for row in steps if row["pushed"]]
    last = steps[-1]
    written = bool(on) and on[-1]["ber_high"] < 0.5  # else there was nothing to lose
    since = [row["ber"] for row in steps if on and row["step"] >= on[-1]["step"]]
    mean = {key: sum(row[key] for row in steps) / len(steps) for key in ("text_agreement", "argmax_agreement")}
    return {
        "alpha": last["alpha"],
        **{key: last[key] for key in ("ber", "ber_low", "ber_high")},
        "ber_while_pushed": sum(row["ber"] for row in on) / len(on) if on else None,
        "ber_while_pushed_worst": max(row["ber"] for row in on) if on else None,
        "ber_blind": curve("blind", "messages")[-1]["ber"],
        "ber_unseen_prompts": curve("informed", "prompts")[-1]["ber"],
        "ber_blind_unseen_prompts": curve("blind", "prompts")[-1]["ber"],
        **{key: last[key] for key in ("text_ber", "text_ber_low", "text_ber_high", "hiddenness", "rate_bits")},
        **{key: last[key] for key in ("argmax_ber", "argmax_ber_low", "argmax_ber_high")},
        **mean,
        "half_life_steps": metrics.half_life(torch.tensor(since)).item() if written else float("nan"),
        "kl_nats": sum(row["kl_nats"] for row in steps),
        "alpha_measured": sum(row["alpha_measured"] for row in on) / len(on) if on else None,
    }


def transcripts(
    config: Config, model: LanguageModel, rows: Rows, states: dict[str, Trajectory], alphas: list[float]
) -> list[dict[str, Any]]:
    """Per arm, what the model says at one held-out message and the largest strength, token by token (steered), beside
    what it says unpushed (cover)."""
    alpha = max(alphas, key=abs)
    trial = int(torch.nonzero((rows.kind == MESSAGES) & (rows.alpha == alpha))[0])
    said = []
    for name, trajectory in states.items():
        unpushed, pushed = (
            torch.cat([trajectory.prompt_tokens[row : row + 1], trajectory.argmax[:, row]]).tolist()
            for row in (int(rows.prompt[trial]), trial)
        )
        said.append(
            {
                "arm": name,
                "alpha": trajectory.program.columns["alpha"][trial].item(),
                "prompt": config.prompts.texts[int(rows.prompt[trial])],
                "cover": [model.decode([token]) for token in unpushed],
                "steered": [model.decode([token]) for token in pushed],
            }
        )
    return said


def draw(
    config: Config,
    table: list[dict[str, Any]],
    said: list[dict[str, Any]],
    alphas: list[float],
    folder: Path,
) -> dict[str, Path]:
    """BER and agreement over steps at the largest strength, and the transcripts."""
    alpha = max(alphas, key=abs)
    shown = [row for row in table if row["alpha"] in (alpha, 0.0)]
    on = build.pushed_steps(config)
    push_until = int(torch.nonzero(on).max()) + 1 if on.any() else 0
    return {
        "ber_over_steps": figures.ber_over_steps(
            shown, folder / "ber_over_steps.png", push_until=push_until, title=f"Hidden bits at α = {alpha:g}"
        ),
        "transcripts": figures.transcripts(said, folder / "transcripts.png"),
    }


def show(result: Result) -> Table:
    """The printed table: one line per arm (and strength)."""
    table = Table(
        title="Hidden bits: error rate of a frozen reader of the state, and what the text shows",
        caption="informed reader, held-out messages, unless said; 95 % intervals; 0.5 is guessing",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    columns = ("arm", "α", "BER\npushed", "BER\nat the end", "blind\nreader", "unseen\nprompts", "text reader\nBER")
    for column in (*columns, "text\n= α0", "argmax\n= α0", "Σ KL\nnats", "half-life\nsteps"):
        table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    for name, arm in result.summary.items():
        for alpha, numbers in arm.get("by_alpha", {"": arm}).items():
            table.add_row(
                name,
                alpha or f"{numbers['alpha']:g}",
                _number(numbers["ber_while_pushed"], ".3f"),
                f"{numbers['ber']:.3f} [{numbers['ber_low']:.2f}, {numbers['ber_high']:.2f}]",
                f"{numbers['ber_blind']:.3f}",
                f"{numbers['ber_unseen_prompts']:.3f}",
                f"{numbers['text_ber']:.2f} [{numbers['text_ber_low']:.2f}, {numbers['text_ber_high']:.2f}]",
                f"{numbers['text_agreement']:.3f}",
                f"{numbers['argmax_agreement']:.3f}",
                f"{numbers['kl_nats']:.2f}",
                _number(numbers["half_life_steps"], ".1f"),
            )
    return table


def _joined(cell: Any) -> Any:
    return "".join(cell) if isinstance(cell, list) else cell


def _number(value: float | None, form: str) -> str:
    """– where there is no such number, ∞ where it was not reached within the run."""
    if value is None or value != value:
        return "–"
    return "∞" if value == float("inf") else format(value, form)
