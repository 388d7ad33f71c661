"""Which directions carry bits to a reader and leak little into the text? Carriers by gradient through the loop.

A batch of random messages is pushed along the carriers for a few steps; a linear reader, learned with them, sees how the
states behind the push differ from the unpushed run's, under the loop's noise. The carriers maximise its margin under a
budget on Σ KL(p_α ‖ p_0) in nats, which bounds every monitor of the text by Pinsker's inequality. How well the bits can
be read is then for a reader fitted anew to say.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from feedback import carriers, loop, maps, programs
from feedback.cache import Context
from feedback.carriers import Carriers
from feedback.maps import NamedMap
from feedback.models import LanguageModel
from feedback.sites import Site


@dataclass(frozen=True)
class Setting:
    """The loop that carriers are learned for.

    cover: (step + 1, prompt) tokens emitted. length: pushed steps, from the first. feedback_map: without noise. sigma:
    noise in the soft tokens of pushed rows.
    """

    model: LanguageModel
    prompts: Sequence[loop.Prompt]
    cover: Int[Tensor, "position prompt"]
    site: Site
    length: int
    feedback_map: NamedMap
    sigma: float
    context: Context = Context()  # noqa: B008 (frozen)
    record: tuple[Site, ...] = ()

    def run(
        self,
        pushes: Float[Tensor, "row carrier"],
        vectors: Float[Tensor, "carrier d_model"],
        prompt: Int[Tensor, " row"],
        seed: int,
        differentiable: bool = False,
    ) -> tuple[Float[Tensor, "step row feature"], Float[Tensor, " row"], Float[Tensor, "step row"]]:
        """Rows pushed by ``pushes`` with an unpushed reference for each prompt in the same batch.

        Returns what a reader that knows the unpushed run sees after the push has ended, Σ KL(p_α ‖ p_0) over all steps,
        and whether each step's likeliest token is the unpushed run's.
        """
        n = len(self.prompts)
        rows = torch.cat([torch.arange(n), prompt])
        course = torch.cat([torch.zeros(n, pushes.shape[1], dtype=pushes.dtype), pushes])
        steps = len(self.cover) - 1
        told = loop.run(
            self.model,
            self.prompts,
            programs.pulse(vectors, 1.0, steps=steps, rows=course, start=1, length=self.length),
            feedback_map=maps.noisy(self.feedback_map, self.sigma * (torch.arange(len(rows)) >= n).float()),
            site=self.site,
            context=self.context,
            row_prompt=rows,
            forced=self.cover[:, rows],
            randomness=loop.Randomness(seed),
            reference=rows,
            record=self.record,
            differentiable=differentiable,
            max_rows=len(rows) if differentiable else None,
        )
        states = torch.cat([*told.recorded.values(), told.hidden], dim=-1).float()[self.length :]
        assert told.kl is not None
        same = (told.argmax == told.argmax[:, rows])[:, n:]
        return states[:, n:] - states[:, rows[n:]], told.kl[:, n:].sum(0), same


@dataclass(frozen=True)
class Learned:
    """One step of learning: the reader's mean cross-entropy in bits per bit and step, and Σ KL in nats."""

    step: int
    loss: float
    nats: float
    carriers: Carriers


def learn(
    setting: Setting,
    start: Carriers,
    *,
    alpha: float,
    budget: float,
    steps: int = 60,
    rows: int = 16,
    rate: float = 0.03,
    seed: int = 0,
) -> Iterator[Learned]:
    """Carriers of length ``alpha`` at most, from ``start``, with Σ KL held near ``budget`` nats by a penalty.

    Every step draws new messages, prompts and noise. ValueError for a budget or a strength that is not positive.
    """
    if not (budget > 0 and alpha > 0 and steps >= 1 and rows >= 2):
        raise ValueError(
            f"budget={budget}, alpha={alpha}, steps={steps}, rows={rows}: expected positive numbers and 2 rows or more"
        )
    draw = torch.Generator().manual_seed(seed)
    model, n = setting.model, start.n_carriers
    vectors = start.vectors.to(model.device).clone().requires_grad_()
    reader: Tensor | None = None
    scale = torch.ones(())
    for step in range(1, steps + 1):
        bits = torch.randint(2, (rows, n), generator=draw)
        prompt = torch.randint(len(setting.prompts), (rows,), generator=draw)
        directions = torch.nn.functional.normalize(vectors, dim=-1)
        signs = (2.0 * bits - 1).to(directions)
        noise = int(torch.randint(2**31, (1,), generator=draw))
        differs, nats, _ = setting.run(alpha * signs, directions, prompt, noise, differentiable=True)
        if reader is None:
            # Least squares on the first batch is a start from which both can be learned.
            scale = differs.detach().pow(2).mean((0, 1)).sqrt() + 1e-6
            seen = (differs.detach() / scale).mean(0)
            reader = (seen.mT @ signs / seen.shape[1]).clone().requires_grad_()
            optimiser = torch.optim.Adam([{"params": [vectors], "lr": rate / model.d_model**0.5},
                                          {"params": [reader], "lr": rate * float(reader.detach().std())}])  # fmt: skip
        scores = (differs / scale) @ reader
        loss = torch.nn.functional.softplus(-signs * scores).mean() / torch.log(torch.tensor(2.0))
        leak = nats.mean()
        excess = torch.relu(leak / budget - 1)
        optimiser.zero_grad()
        (loss + excess).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        made = carriers.from_vectors(
            vectors.detach().cpu(),
            "learned_against_detection",
            model=model,
            site=setting.site,
            provenance={"alpha": alpha, "budget_nats": budget, "steps": step, "seed": seed},
        )
        yield Learned(step, loss.item(), leak.item(), made)
