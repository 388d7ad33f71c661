"""Which directions carry bits to a reader and leak little into the text? Carriers by gradient through the loop.

A batch of random messages is pushed along the carriers for a few steps. A reader that knows the unpushed run sees how
the states behind the push differ from it, under the loop's noise. Learned is the margin of that reader (what a bit
makes of the states, in units of everything else that varies there) against Σ KL(p_α ‖ p_0) in nats, which bounds every
monitor of the text by Pinsker's inequality. For small pushes both grow with α², so their ratio is the margin under any
budget of nats; the budget then sets α.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from feedback import carriers, loop, maps, programs
from feedback.cache import Context
from feedback.carriers import Carriers
from feedback.maps import NamedMap
from feedback.models import LanguageModel
from feedback.sites import Site


class Seen(NamedTuple):
    """differs: states behind the push less the unpushed, noiseless run's. nats: Σ KL(p_α ‖ p_0) over all steps, p_0
    being the unpushed run under the same noise. same: whether the likeliest token is that run's."""

    differs: Float[Tensor, "step row feature"]
    nats: Float[Tensor, " row"]
    same: Bool[Tensor, "step row"]


@dataclass(frozen=True)
class Channel:
    """The loop that carriers are pushed in.

    cover: (step + 1, prompt), the text that is emitted. length: pushed steps, from the first. feedback_map: without
    noise. sigma: noise in the soft tokens of trials. record: sites that the reader sees beside the final hidden state.
    """

    model: LanguageModel
    prompts: Sequence[loop.Prompt]
    cover: Int[Tensor, "position prompt"]
    site: Site
    length: int
    feedback_map: NamedMap
    sigma: float
    context: Context = Context()  # noqa: RUF009 (frozen)
    record: tuple[Site, ...] = ()

    def run(
        self,
        pushes: Float[Tensor, "row carrier"],
        vectors: Float[Tensor, "carrier d_model"],
        prompt: Int[Tensor, " row"],
        seed: int,
        differentiable: bool = False,
    ) -> Seen:
        """Rows pushed by ``pushes``; in the same batch each has an unpushed twin with its noise, and each prompt an
        unpushed run without noise."""
        n, rows = len(self.prompts), len(prompt)
        prompts = torch.cat([torch.arange(n), prompt, prompt])
        course = torch.zeros(n + 2 * rows, pushes.shape[1], dtype=pushes.dtype)
        course[n : n + rows] = pushes
        every = torch.arange(n + 2 * rows)
        told = loop.run(
            self.model,
            self.prompts,
            programs.pulse(vectors, 1.0, steps=len(self.cover) - 1, rows=course, start=1, length=self.length),
            feedback_map=maps.noisy(self.feedback_map, self.sigma * (every >= n).float()),
            site=self.site,
            context=self.context,
            row_prompt=prompts,
            forced=self.cover[:, prompts],
            randomness=loop.Randomness(seed, torch.cat([every[: n + rows], every[n : n + rows]])),
            reference=torch.cat([every[:n], every[n + rows :], every[n + rows :]]),
            record=self.record,
            differentiable=differentiable,
            max_rows=len(prompts) if differentiable else None,
        )
        states = torch.cat([*told.recorded.values(), told.hidden], dim=-1).float()[self.length :]
        assert told.kl is not None
        pushed = slice(n, n + rows)
        same = told.argmax[:, pushed] == told.argmax[:, n + rows :]
        return Seen(states[:, pushed] - states[:, prompt], told.kl[:, pushed].sum(0), same)


@dataclass(frozen=True)
class Learned:
    """One step of learning: the reader's margin (mean over bits, in squared standard deviations), Σ KL in nats."""

    step: int
    margin: float
    nats: float
    carriers: Carriers


def learn(
    channel: Channel,
    start: Carriers,
    *,
    alpha: float,
    steps: int = 40,
    rows: int = 12,
    rate: float = 0.1,
    seed: int = 0,
) -> Iterator[Learned]:
    """Carriers of length 1 that raise log(margin) − log(Σ KL) at pushes of ``alpha``, from ``start``.

    Every step draws new messages, prompts and noise. rate: by how much of its length a carrier turns in a step at the
    beginning, roughly; it falls to a tenth. ValueError for numbers that are not positive, or fewer than 4 rows.
    """
    if not (alpha > 0 and steps >= 1 and rows >= 4 and rate > 0):
        raise ValueError(f"alpha={alpha}, steps={steps}, rows={rows}, rate={rate}: expected positive numbers, 4 rows")
    draw = torch.Generator().manual_seed(seed)
    model = channel.model
    vectors = start.vectors.to(model.device).clone().requires_grad_()
    optimiser = torch.optim.Adam([vectors], lr=rate / model.d_model**0.5, betas=(0.8, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, eta_min=0.1 * optimiser.defaults["lr"])
    spread: Tensor | None = None
    for step in range(1, steps + 1):
        bits = torch.randint(2, (rows, start.n_carriers), generator=draw)
        prompt = torch.randint(len(channel.prompts), (rows,), generator=draw)
        directions = torch.nn.functional.normalize(vectors, dim=-1)
        signs = (2.0 * bits - 1).to(directions)
        noise = int(torch.randint(2**31, (1,), generator=draw))
        seen = channel.run(alpha * signs, directions, prompt, noise, differentiable=True)
        states = seen.differs.mean(0)
        effect = torch.linalg.lstsq(signs, states).solution  # (bit, feature): what each bit makes of the states
        rest = (states - signs @ effect).detach().pow(2).sum(0) / max(1, rows - start.n_carriers)
        spread = rest if spread is None else 0.9 * spread + 0.1 * rest
        margin = (effect.pow(2) / (spread + 1e-3 * spread.mean())).mean(-1)
        nats = seen.nats.mean()
        loss = nats.log() - margin.log().mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        made = carriers.from_vectors(
            vectors.detach().cpu(),
            "learned_against_detection",
            model=model,
            site=channel.site,
            provenance={"alpha": alpha, "steps": step, "rows": rows, "rate": rate, "seed": seed},
        )
        yield Learned(step, margin.mean().item(), nats.item(), made)
