"""Is the soft loop of a token pair a latch: two rests, set and reset by a push? What theory says, and what it does.

For two tokens A, B with u = 2w − 1, w = p(A)/(p(A) + p(B)), the loop obeys u' = tanh((b + L·u)/2) with
L = (Δ_A − Δ_B)/2, b = (Δ_A + Δ_B)/2, Δ_X the logit difference after reading X, divided by the feedback temperature τ
(Backour 2026, arXiv 2609.02049). L < 2 forgets; L > 2 has two rests while |b| < b_c(L). A push adds to b. Derived for
two tokens and linear transport: exact on the oracle, a prediction on a language model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import brentq
from torch import Tensor

from feedback import loop, maps
from feedback.cache import Context
from feedback.models import LanguageModel
from feedback.programs import Program
from feedback.readout import mixture_coordinate
from feedback.sites import Site, unembed
from feedback.trajectory import Trajectory


def critical_field(coupling: float) -> float:
    """b_c(L) = L·u_s − 2·artanh(u_s), u_s = √(1 − 2/L): the field at which one of the two rests is gone; 0 for L ≤ 2,
    where there is only one rest at any field."""
    if coupling <= 2:
        return 0.0
    u = math.sqrt(1 - 2 / coupling)
    return coupling * u - 2 * math.atanh(u)


def rests(coupling: float, bias: float) -> list[float]:
    """The stable fixed points of u = tanh((b + L·u)/2), lowest first: one, or two for L > 2 and |b| < b_c."""

    def excess(u: float) -> float:
        return math.tanh((bias + coupling * u) / 2) - u

    bends: list[float] = []
    if coupling > 2:  # excess rises only between these two points
        turn = 2 * math.acosh(math.sqrt(coupling / 2))
        bends = sorted(((-turn - bias) / coupling, (turn - bias) / coupling))
    ends = [-1.0, *(min(max(b, -1.0), 1.0) for b in bends), 1.0]
    found = []
    for low, high in pairwise(ends):
        if low < high and excess(low) >= 0 >= excess(high):
            found.append(brentq(excess, low, high, xtol=1e-15))
    return [u for u in sorted(set(found)) if coupling / 2 * (1 - u * u) <= 1 + 1e-9]


@dataclass(frozen=True)
class Coupling:
    """L and b at feedback temperature τ, for each push strength α: (alpha,) each."""

    alpha: Float[Tensor, " alpha"]
    coupling: Float[Tensor, " alpha"]
    bias: Float[Tensor, " alpha"]

    def crossing(self, upper: bool) -> float:
        """The α nearest to 0 at which theory loses a rest: the lower one (b rises to b_c, the latch sets) or the upper
        one (b falls to −b_c, it resets). Interpolated linearly; NaN when that lies outside the strengths measured."""
        sign = 1 if upper else -1
        points = sorted(
            (a, b + sign * critical_field(coupling))
            for a, coupling, b in zip(self.alpha.tolist(), self.coupling.tolist(), self.bias.tolist(), strict=True)
        )
        found = [x0 - y0 * (x1 - x0) / (y1 - y0) for (x0, y0), (x1, y1) in pairwise(points) if (y0 < 0) != (y1 < 0)]
        return min(found, key=abs, default=math.nan)


@dataclass(frozen=True, eq=False)
class Latch:
    """A token pair in a prompt, a site to push at, and the loop in context ``prompt`` at temperature τ.

    prompt: token ids, or vectors (position, d_model). vector: (d_model,), what α multiplies. starts: the soft tokens
    that count as B and as A; by default the words themselves. always: what is pushed at every pass, the prompt's
    included.
    """

    model: LanguageModel
    prompt: loop.Prompt
    a: int
    b: int
    site: Site
    vector: Float[Tensor, " d_model"]
    temperature: float = 1.0
    starts: Float[Tensor, "2 d_model"] | None = None
    always: Float[Tensor, " d_model"] | None = None

    @cached_property
    def map(self) -> maps.NamedMap:
        return maps.expected_embedding(self.temperature)

    def read(self, hidden: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes"]:
        """u, the one readout of every experiment: from the logits of A and B, fixed before anything is run."""
        logits = unembed(self.model.module, hidden, [self.a, self.b])
        return mixture_coordinate(logits, 0, 1, self.temperature)

    def tokens(self, which: Bool[Tensor, " row"]) -> Float[Tensor, "row d_model"]:
        """A as a soft token where ``which``, else B."""
        starts = self.model.embedding[[self.b, self.a]] if self.starts is None else self.starts
        return starts[which.long().to(starts.device)]

    def next(self, told: Trajectory) -> Float[Tensor, "row d_model"]:
        """The soft token that the last step's output makes."""
        logits = unembed(self.model.module, told.hidden[-1])
        return self.map(logits, told.hidden[-1], self.model.embedding, told.tokens[-1])[0]

    def run(
        self,
        first: Float[Tensor, "row d_model"],
        strength: Float[Tensor, "step row"] | Float[Tensor, "step row carrier"],
        *,
        sigma: float | Float[Tensor, " row"] = 0.0,
        randomness: loop.Randomness = loop.Randomness(),  # noqa: B008 (frozen)
        feedback_map: maps.NamedMap | None = None,
        vectors: Float[Tensor, "carrier d_model"] | None = None,
        which: Int[Tensor, " row"] | None = None,
        site: Site | None = None,
        progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Trajectory:
        """Rows that begin with the soft tokens ``first`` and are pushed by ``strength`` at every step.

        sigma: noise in every soft token, the first included, in mean lengths of an embedding row; one or one per row.
        feedback_map: another than the latch's own. vectors, which: other vectors than the latch's own, and which of
        them each row is pushed along; a strength of (step, row, carrier) needs no ``which``. options: further ones of
        ``loop.run``. ValueError when a row's state turns non-finite, naming its strength.
        """
        carriers = self.vector[None] if vectors is None else vectors
        if strength.dim() == 2:
            which = torch.zeros(len(first), dtype=torch.long) if which is None else which
            strength = strength[..., None] * torch.nn.functional.one_hot(which, len(carriers)).to(strength.dtype)
        inner = self.map if feedback_map is None else feedback_map
        noisy = bool(torch.as_tensor(sigma).any())
        told = loop.run(
            self.model,
            [self.prompt],
            Program(strength, carriers, columns={"row": torch.arange(len(first))}).and_always(self.always),
            feedback_map=maps.noisy(inner, sigma) if noisy else inner,
            site=self.site if site is None else site,
            context=Context("prompt"),
            row_prompt=torch.zeros(len(first), dtype=torch.long),
            first=first + self._noise(len(first), sigma, randomness) if noisy else first,
            max_rows=len(first) if feedback_map is not None else None,  # it may mix rows
            randomness=randomness,
            progress=progress,
            **options,
        )
        if not told.finite.all():
            row = int((~told.finite).nonzero()[0])
            step = int(told.stopped_at[row])
            asked = strength[step - 1, row]
            largest = int(asked.abs().argmax())
            raise ValueError(
                f"the loop's state turned non-finite at step {step} under a push of {asked[largest].item():g} along a "
                f"vector of length {carriers[largest].norm().item():g}: use a smaller alpha"
            )
        return told

    def _noise(self, rows: int, sigma: float | Tensor, randomness: loop.Randomness) -> Tensor:
        """What maps.noisy adds, for a step 0 that the loop does not know."""
        width = self.model.d_model
        ids = torch.arange(rows) if randomness.ids is None else randomness.ids
        row_noise = maps.RowNoise(randomness.seed, 0, ids, int(ids.max()) + 1, dtype=self.model.dtype)
        drawn = row_noise.normal(width, "first").to(self.model.device)
        share = torch.as_tensor(sigma, dtype=drawn.dtype, device=drawn.device).expand(rows)[:, None]
        return share * self.model.mean_embedding_length.to(drawn) / math.sqrt(width) * drawn

    def couplings(self, alphas: Sequence[float]) -> Coupling:
        """L and b under each of the strengths: one step from A and one from B."""
        n = len(alphas)
        strength = torch.tensor(alphas, dtype=torch.float32).repeat(2)[None]
        told = self.run(self.tokens(torch.arange(2 * n) < n), strength)
        logits = unembed(self.model.module, told.hidden[-1], [self.a, self.b]).double()
        differs = ((logits[:, 0] - logits[:, 1]) / self.temperature).cpu()
        after_a, after_b = differs[:n], differs[n:]
        return Coupling(torch.tensor(alphas, dtype=torch.float64), (after_a - after_b) / 2, (after_a + after_b) / 2)

    def settle(self, steps: int) -> tuple[Float[Tensor, "step 2"], Float[Tensor, "2 d_model"], tuple[int, int]]:
        """From B and from A, unpushed: u at every step, the soft tokens they come to rest at (low, high), and what the
        loop says there."""
        told = self.run(self.tokens(torch.tensor([False, True])), torch.zeros(steps, 2))
        low, high = told.tokens[-1].tolist()
        return self.read(told.hidden), self.next(told), (low, high)

    def distance(self, rest: Float[Tensor, "2 d_model"]) -> float:
        """How far apart the site's outputs are at the two rests, in α: a push by that much makes one the other."""
        told = self.run(rest, torch.zeros(1, 2), record=[self.site])
        (at_site,) = told.recorded.values()
        low, high = at_site[0].float()
        return float((high - low).norm() / self.vector.norm())


def pulses(amounts: Float[Tensor, " row"], length: int, steps: int) -> Float[Tensor, "step row"]:
    """``amounts`` at the first ``length`` of ``steps`` steps, then 0."""
    strength = torch.zeros(steps, len(amounts))
    strength[:length] = amounts
    return strength


def crossing(strength: Float[Tensor, " step"], u: Float[Tensor, " step"]) -> float:
    """The α at which u has first changed its sign for good; NaN where it never does."""
    sign = u > 0
    if sign[0] == sign[-1]:
        return math.nan
    return strength[int((sign != sign[-1]).nonzero()[-1]) + 1].item()


def threshold(amounts: Float[Tensor, " amount"], switched: Bool[Tensor, " amount"]) -> tuple[float, float]:
    """Between which two amounts the switching begins: the largest that did not switch (0 if all did) and the next one,
    inf if that did not switch either. amounts: ascending."""
    stays = torch.nonzero(~switched)
    first = int(stays[-1]) + 1 if len(stays) else 0
    below = amounts[first - 1].item() if first else 0.0
    return below, amounts[first].item() if first < len(amounts) else math.inf


def search(
    attempt: Callable[[Float[Tensor, "group level"]], Bool[Tensor, "group level"]],
    groups: int,
    top: float,
    levels: int = 20,
    rounds: int = 2,
) -> list[float]:
    """For each group, the amount from which on ``attempt`` says that it switches; inf if not even at ``top``.

    Each round tries ``levels`` amounts at once between the last that did not switch and the first that did, so the
    answer is the middle of an interval of top/levels^rounds.
    """
    low, high = torch.zeros(groups), torch.full((groups,), float(top))
    never = [False] * groups
    for number in range(rounds):
        amounts = low[:, None] + (high - low)[:, None] * (torch.arange(levels) + 1) / levels
        for group, switched in enumerate(attempt(amounts)):
            below, above = threshold(amounts[group], switched.cpu())
            if math.isinf(above):
                never[group] |= number == 0
            else:
                low[group], high[group] = max(below, low[group].item()), above
    middle = ((low + high) / 2).tolist()
    return [math.inf if none else found for none, found in zip(never, middle, strict=True)]


def static_thresholds(
    latch: Latch, rest: Float[Tensor, "2 d_model"], top: float, steps: int, levels: int = 20, rounds: int = 2
) -> tuple[float, float]:
    """The constant push that takes the loop off its low rest, and the size of that which takes it off its high one."""

    def attempt(amounts: Tensor) -> Tensor:
        n = amounts.shape[1]
        start = torch.cat([rest[:1].expand(n, -1), rest[1:].expand(n, -1)])
        told = latch.run(start, torch.cat([amounts[0], -amounts[1]]).expand(steps, -1))
        up = latch.read(told.hidden[-1]) > 0
        return torch.stack([up[:n], ~up[n:]])

    set_at, reset_at = search(attempt, 2, top, levels, rounds)
    return set_at, reset_at
