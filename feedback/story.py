"""Can the loop write ordinary text, the unpushed model's own, and hold a bit under it?

As a hidden cell, but the cover is another word at every step: what the unsteered model would write. The context is
``full``. Learned from the model's own greedy texts, all positions at once: the soft token of every step is the cover
word and a pair, split u, pushed a; what should come out is the next cover word, safely, and the pair split
level·tanh(s·(u + a/θ)).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from feedback import hooks, loop, maps, programs
from feedback.cache import Context
from feedback.hidden import HiddenCell, LoopTest
from feedback.learning import REFRESH, Learner
from feedback.maps import NamedMap
from feedback.models import LanguageModel
from feedback.sites import unembed
from feedback.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class Stories:
    """Prompts and what the unsteered model writes after them.

    cover: (step + 1, prompt): the token after the prompt, and the one after each step.
    """

    prompts: list[list[int]]
    cover: Int[Tensor, "position prompt"]

    @staticmethod
    def write(model: LanguageModel, texts: Sequence[str], steps: int) -> "Stories":
        """Greedy decoding of every prompt, by the loop with the one-hot map."""
        prompts = [model.encode(text) for text in texts]
        nothing = programs.constant(torch.eye(1, model.d_model), 0.0, steps=steps, rows=len(prompts))
        return Stories(prompts, loop.run(model, prompts, nothing, feedback_map=maps.one_hot()).text.mT.cpu())

    @property
    def n_steps(self) -> int:
        return len(self.cover) - 1

    def pick(self, which: Sequence[int]) -> "Stories":
        return Stories([self.prompts[i] for i in which], self.cover[:, list(which)])


def run(
    model: LanguageModel,
    cell: HiddenCell,
    stories: Stories,
    prompt: Int[Tensor, " row"],
    strength: Float[Tensor, "step row"],
    vector: Float[Tensor, " d_model"],
    *,
    mix: float = 1.0,
    sigma: float = 0.0,
    seed: int = 0,
    ids: Int[Tensor, " row"] | None = None,
    progress: Any = None,
) -> Trajectory:
    """The cell in the loop, behind its prefix each row's prompt, free-running, context ``full``.

    mix: share of the soft token in what is fed back; at 0 the text itself is, so the cache is all that remembers.
    """
    read = [torch.cat([cell.prefix.to(model.embedding), model.embedding[torch.tensor(p)]]) for p in stories.prompts]
    inner: NamedMap = maps.hard_mix(maps.expected_embedding(), mix)
    return loop.run(
        model,
        read,
        programs.Program(strength[..., None], vector[None], columns={"prompt": prompt}).and_always(cell.push),
        feedback_map=maps.noisy(inner, sigma) if sigma else inner,
        site=cell.site,
        context=Context("full"),
        row_prompt=prompt,
        randomness=loop.Randomness(seed, ids),
        progress=progress,
    )


class StoryLearner(Learner):
    """Learns a cell under ordinary text. mix: as :func:`run`'s. The objective's unroll is taken as 1: the model's own
    text is read at all positions at once."""

    def __init__(
        self,
        model: LanguageModel,
        cell: HiddenCell,
        *args: Any,
        stories: Stories,
        mix: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(model, cell, *args, **options)
        self.stories, self.mix = stories, mix
        (self.pair,) = self.words.pairs
        self.settings |= {"mix": mix, "prompts": stories.prompts, "cover": stories.cover.tolist()}

    def _descend(self) -> float:
        objective, draw, steps = self.objective, self.generator, self.stories.n_steps
        if self.step % REFRESH == 0:
            self.carriers = self.contrasts()
        rows = self.rows
        prompt = torch.randint(len(self.stories.prompts), (rows,), generator=draw)
        sign = 2.0 * torch.randint(2, (rows,), generator=draw) - 1
        size = objective.weakest + (1 - objective.weakest) * torch.rand(steps, rows, generator=draw)
        # one pulse a row, which may switch it: behind it the split has the pulse's sign
        begin = torch.randint(steps, (rows,), generator=draw)
        at = torch.arange(steps)[:, None]
        amount = objective.largest * (2 * torch.rand(rows, generator=draw) - 1)
        amount = amount * (torch.rand(rows, generator=draw) < objective.pushed)
        pushes = torch.where((at >= begin) & (at < begin + 3), amount, 0.0)
        switched = torch.where((amount.abs() > 1) & (at > begin), amount.sign(), sign)
        u = switched * size
        mass = self.cell.cover_mass + objective.mass_range * (2 * torch.rand(steps, rows, generator=draw) - 1)
        said = self._outputs(prompt, u, objective.threshold * pushes, mass.clamp(0.05, 0.98))
        wanted_u = objective.level * torch.tanh(objective.sharpness * (u + pushes))
        wanted = self._weights(torch.cat([torch.zeros(1, rows), wanted_u])).to(said)
        loss: Tensor = (wanted * (wanted.log() - said)).sum(-1).mean()
        return self._improve(loss)

    def _weights(
        self, u: Float[Tensor, "*axes"], mass: Float[Tensor, "*axes"] | None = None
    ) -> Float[Tensor, "*axes word"]:
        mass = torch.full_like(u, self.cell.cover_mass) if mass is None else mass.to(u)
        return torch.stack([mass, (1 - mass) * (1 + u) / 2, (1 - mass) * (1 - u) / 2], dim=-1)

    def _outputs(
        self,
        prompt: Int[Tensor, " row"],
        u: Float[Tensor, "step row"],
        pushes: Float[Tensor, "step row"],
        mass: Float[Tensor, "step row"] | None = None,
    ) -> Float[Tensor, "position row word"]:
        """log p of (cover, a, b) after the prompt and after every step, all positions in one pass. mass: the cover's
        in every soft token that is read; None for the cell's."""
        model, device = self.model, self.model.device
        cover = self.stories.cover[:, prompt].to(device)
        embedding = model.embedding
        a, b = embedding[list(self.pair)]
        weights = self._weights(u.to(device), mass).to(embedding)
        text = embedding[cover[:-1]]
        soft = weights[..., :1] * text + weights[..., 1:2] * a + weights[..., 2:] * b
        soft = text + self.mix * (soft - text)
        noise = torch.randn(soft.shape, generator=self.generator).to(soft)
        soft = soft + self.objective.sigma * model.mean_embedding_length * noise / model.d_model**0.5
        prompts = [self.stories.prompts[i] for i in prompt.tolist()]
        longest = max(map(len, prompts))
        prefix = self.prefix.to(embedding)
        rows, mask = [], torch.ones(len(prompts), longest + len(self.prefix) + len(u), dtype=torch.long, device=device)
        for row, ids in enumerate(prompts):
            missing = longest - len(ids)
            mask[row, :missing] = 0
            read = embedding[torch.tensor(ids, device=device)]
            rows.append(torch.cat([embedding[:1].expand(missing, -1), prefix, read, soft[:, row]]))
        directions = self.carriers[0]

        def pushed(hidden: Float[Tensor, "row position d_model"]) -> Tensor:
            delta = (pushes.mT.to(hidden)[..., None] * directions).to(hidden)
            changed = torch.cat([hidden[:, : -len(u)], hidden[:, -len(u) :] + delta], dim=1)
            return changed if self.push is None else changed + self.push.to(hidden)

        keep = {name: len(u) + 1 for name in model.last_position_only}
        with hooks.replace(model.module, self.cell.site, pushed):
            logits = model.module(
                inputs_embeds=torch.stack(rows),
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
                use_cache=False,
                **keep,
            ).logits[:, -len(u) - 1 :]
        log_p = torch.log_softmax(logits.float(), -1).transpose(0, 1)
        ids_ = torch.stack([cover, torch.full_like(cover, self.pair[0]), torch.full_like(cover, self.pair[1])], dim=-1)
        return log_p.gather(-1, ids_)

    @torch.no_grad()
    def contrasts(self) -> Float[Tensor, "one d_model"]:
        """Mean difference at the site between a and b in the soft tokens, over all stories and steps."""
        n = len(self.stories.prompts)
        outputs = []
        for sign in (1.0, -1.0):
            with hooks.record(self.model.module, [self.cell.site]) as recorder:
                steps = self.stories.n_steps
                self._outputs(torch.arange(n), torch.full((steps, n), sign), torch.zeros(steps, n))
                outputs.append(recorder.outputs[self.cell.site][:, -steps:].float().mean((0, 1)))
        return (outputs[0] - outputs[1])[None].to(self.model.device)

    @torch.no_grad()
    def test(self) -> LoopTest:
        """The stories in the real loop, under noise of no batch: a pulse of either sign at steps 2 to 4, then nothing.
        kept: share of later steps at which the split has its sign; text agreement: with the unsteered model's text;
        margin, level: means."""
        stories, n, steps = self.stories, len(self.stories.prompts), self.stories.n_steps
        prompt, sign = torch.arange(n).repeat(2), torch.tensor([1.0, -1.0]).repeat_interleave(n)
        strength = torch.zeros(steps, 2 * n)
        strength[1:4] = 1.5 * self.objective.threshold * sign
        options = {"mix": self.mix, "seed": self.seed + 1, **self.testing}
        told = run(self.model, self._as_is(), stories, prompt, strength, self.carriers[0], **options)
        u, same, margin = observed(self.model, self.pair, told, stories.cover[:, prompt])
        towards = u[4:] * sign
        values = ((towards > 0).double(), same.double(), margin, towards)
        return LoopTest(*(value.mean().item() for value in values))


def observed(
    model: LanguageModel, pair: tuple[int, int], told: Trajectory, cover: Int[Tensor, "position row"]
) -> tuple[Float[Tensor, "step row"], Bool[Tensor, "step row"], Float[Tensor, "step row"]]:
    """u, whether the cover's word is said, and its probability less the likeliest other's, at every step."""
    us, margins = [], []
    for step, hidden in enumerate(told.hidden, 1):
        p = torch.softmax(unembed(model.module, hidden).float(), -1)
        a, b = p[:, pair[0]], p[:, pair[1]]
        us.append(((a - b) / (a + b)).cpu())
        word = cover[step][:, None].to(p.device)
        own = p.gather(1, word)[:, 0]
        margins.append((own - p.scatter(1, word, 0.0).amax(-1)).cpu())
    return torch.stack(us), told.tokens.cpu() == cover[1:], torch.stack(margins)
