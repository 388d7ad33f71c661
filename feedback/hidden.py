"""Can the loop hold bits in what it does not say? Cells of n token pairs under one cover token.

The soft token of such a cell is about half the cover word's embedding; the rest is split between the two words of each
pair, and how it is split is the bit: u_i = tanh((z_a − z_b)/2). Every step says the cover word, whatever the bits are.
No prompt was found that makes a loop like that; a prefix of continuous vectors, or a constant push, is learned
(``feedback.learning``) with the model frozen.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from feedback import loop
from feedback.carriers import Carriers, from_vectors, token_id
from feedback.latch import Latch
from feedback.models import LanguageModel
from feedback.sites import Site, unembed
from feedback.trajectory import Trajectory


@dataclass(frozen=True)
class Words:
    """Token ids: the cover, and the pair (a, b) of every bit; all different. ValueError otherwise."""

    cover: int
    pairs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        ids = self.ids
        if not self.pairs or len(set(ids)) != len(ids):
            raise ValueError(f"cover and pairs are the tokens {ids}; expected at least one pair, and no token twice")

    @staticmethod
    def of(model: LanguageModel, cover: str, pairs: Sequence[Sequence[str]]) -> "Words":
        """ValueError for a word that is not one token. A cover of "" is a text, another word at every step: −1."""
        return Words(
            token_id(model, cover) if cover else -1, tuple((token_id(model, a), token_id(model, b)) for a, b in pairs)
        )

    @property
    def ids(self) -> list[int]:
        return [self.cover, *itertools.chain.from_iterable(self.pairs)]

    @property
    def n_bits(self) -> int:
        return len(self.pairs)

    def weights(
        self, u: Float[Tensor, "row bit"], cover_mass: float | Float[Tensor, " row"]
    ) -> Float[Tensor, "row word"]:
        """Probabilities in the order of ``ids``: the cover has its mass, the pairs share the rest equally."""
        mass = torch.as_tensor(cover_mass, dtype=u.dtype, device=u.device).expand(len(u))
        halves = torch.stack([1 + u, 1 - u], dim=-1).flatten(1) / (2 * self.n_bits)
        return torch.cat([mass[:, None], (1 - mass)[:, None] * halves], dim=1)

    def split(self, log_p: Float[Tensor, "*axes word"]) -> Float[Tensor, "*axes bit"]:
        """u of every pair, from logits or log-probabilities in the order of ``ids``."""
        pairs = log_p[..., 1:].unflatten(-1, (self.n_bits, 2))
        return torch.tanh((pairs[..., 0] - pairs[..., 1]) / 2)

    def soft(
        self,
        embedding: Float[Tensor, "vocab d_model"],
        u: Float[Tensor, "row bit"],
        cover_mass: float | Float[Tensor, " row"],
    ) -> Float[Tensor, "row d_model"]:
        """Soft tokens that hold ``u``."""
        return self.weights(u, cover_mass).to(embedding) @ embedding[self.ids]


@dataclass(frozen=True, eq=False)
class HiddenCell:
    """What was learned, with what it was learned for.

    prefix: vectors that the loop reads in place of a prompt. push: (d_model,), added at ``site`` at every pass, the
    prefix's included; None without one. cover: the word that is said, "" for the model's own text (``story``). ``site``
    is also where carriers act. cover_mass: the cover's share of the soft token that was aimed at.
    """

    prefix: Float[Tensor, "position d_model"]
    push: Float[Tensor, " d_model"] | None
    cover: str
    pairs: tuple[tuple[str, str], ...]
    site: Site
    cover_mass: float
    model: str
    checksum: str
    dtype: str
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes a safetensors file, with JSON metadata, that :meth:`load` reads."""
        tensors = {"prefix": self.prefix} | ({} if self.push is None else {"push": self.push})
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        plain = {name: value.detach().float().cpu().contiguous() for name, value in tensors.items()}
        save_file(plain, str(part), {"cell": json.dumps(self.about())})
        part.replace(path)

    def about(self) -> dict[str, Any]:
        """All but the tensors, plain."""
        told = {k: v for k, v in vars(self).items() if k not in ("prefix", "push")}
        return {**told, "site": asdict(self.site), "provenance": dict(self.provenance)}

    @staticmethod
    def load(path: Path, model: LanguageModel | None = None) -> "HiddenCell":
        """ValueError, beginning with the path: no cell, or one of another model."""
        try:
            with safe_open(str(path), "pt") as file:
                about = json.loads((file.metadata() or {})["cell"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, KeyError, OSError) as error:
            raise ValueError(
                f"{path} holds no cell ({error}); make one: python run.py experiment=learn_cell"
            ) from error
        about |= {"site": Site(**about["site"]), "pairs": tuple((a, b) for a, b in about["pairs"])}
        cell = HiddenCell(prefix=tensors["prefix"], push=tensors.get("push"), **about)
        if model is not None:
            cell.check(model, str(path))
        return cell

    def check(self, model: LanguageModel, what: str = "the cell") -> None:
        """ValueError unless it was learned on this model; its weights are compared where the dtype is the same."""
        info = model.info
        same = self.model == info.name and self.prefix.shape[1] == info.d_model
        if not same or (self.dtype == info.dtype and self.checksum != info.checksum):
            raise ValueError(
                f"{what} was learned on {self.model} with weights {self.checksum[:8]} ({self.dtype}); this is "
                f"{info.name} with weights {info.checksum[:8]} ({info.dtype}): learn one for this model, "
                "python run.py experiment=learn_cell"
            )

    def check_site(self, site: Site) -> None:
        """ValueError where the cell's own push would be added at another site than it was learned for."""
        if self.push is not None and site != self.site:
            raise ValueError(
                f"the cell has a push of its own, learned at block {self.site.block} ({self.site.at}), and is to be "
                f"pushed at block {site.block} ({site.at}): site.block={self.site.block} site.at={self.site.at}"
            )

    def on(self, model: LanguageModel, site: Site | None = None, temperature: float = 1.0) -> "Register":
        """The cell in the loop of a model, carriers at ``site``. ValueError for one that was learned under ordinary
        text, and for one with a push that is to be pushed elsewhere."""
        self.check(model)
        if not self.cover:
            raise ValueError(
                "this cell was learned under ordinary text, not under one word: experiment=hidden_story does"
            )
        site = self.site if site is None else site
        self.check_site(site)
        return Register(model, self, site, temperature)


@dataclass(frozen=True, eq=False)
class Register:
    """n latches in one soft token: a cell in its model's loop, carriers at ``site``."""

    model: LanguageModel
    cell: HiddenCell
    site: Site
    temperature: float = 1.0

    @cached_property
    def words(self) -> Words:
        return Words.of(self.model, self.cell.cover, self.cell.pairs)

    @property
    def n_bits(self) -> int:
        return self.words.n_bits

    @cached_property
    def all_bits(self) -> Bool[Tensor, "word bit"]:
        """All 2ⁿ words, the last bit fastest."""
        return torch.tensor(list(itertools.product((False, True), repeat=self.n_bits)))

    def latch(self, bit: int = 0, vector: Float[Tensor, " d_model"] | None = None) -> Latch:
        """One bit as a latch, pushed along ``vector`` (default: along nothing); the others start at u = 0."""
        starts = torch.zeros(2, self.n_bits)
        starts[:, bit] = torch.tensor([-1.0, 1.0])
        return Latch(
            self.model,
            self.cell.prefix,
            *self.words.pairs[bit],
            site=self.site,
            vector=torch.zeros(self.model.d_model) if vector is None else vector,
            temperature=self.temperature,
            starts=self.soft(starts),
            always=self.cell.push,
        )

    def soft(self, u: Float[Tensor, "row bit"]) -> Float[Tensor, "row d_model"]:
        return self.words.soft(self.model.embedding, u, self.cell.cover_mass)

    def run(self, first: Float[Tensor, "row d_model"], strength: Tensor, **options: Any) -> Trajectory:
        """As :meth:`Latch.run`; strength may be (step, row, carrier) with ``vectors``."""
        return self.latch().run(first, strength, **options)

    def read(self, hidden: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes bit"]:
        """u of every bit."""
        return self.words.split(unembed(self.model.module, hidden, self.words.ids).float() / self.temperature)

    def settle(
        self, steps: int
    ) -> tuple[Float[Tensor, "word bit"], Float[Tensor, "word d_model"], Float[Tensor, "word d_model"]]:
        """From every word, unpushed: u at rest, the soft tokens there, and the site's output. Words in the order of
        ``all_bits``; whether each stayed what it was is the caller's to look at."""
        first = self.soft(2.0 * self.all_bits - 1)
        told = self.run(first, torch.zeros(steps, len(first)), record=[self.site])
        (at_site,) = told.recorded.values()
        return self.read(told.hidden[-1]), self.latch().next(told), at_site[-1].float()

    def contrasts(self, steps: int = 30) -> Carriers:
        """One carrier a bit: the mean difference that the bit makes in the site's output at rest, over the words of the
        others. ValueError where a word does not rest as itself."""
        u, _, at_site = self.settle(steps)
        wrong = ((u.cpu() > 0) != self.all_bits).any(1)
        if wrong.any():
            word = int(wrong.int().argmax())
            raise ValueError(
                f"the cell does not hold {''.join(str(int(b)) for b in self.all_bits[word])}: it comes to rest at "
                f"u = {', '.join(f'{x:.2f}' for x in u[word].tolist())}; learn another (experiment=learn_cell)"
            )
        signs = (2.0 * self.all_bits - 1).to(at_site)
        differences = 2 * signs.mT @ at_site / len(signs)
        names = [f"{a} − {b}" for a, b in self.cell.pairs]
        made = from_vectors(differences, "contrast_rests", names=names, model=self.model, site=self.site)
        return replace(made, residual_length=at_site.norm(dim=-1).mean().item())

    def margins(self, hidden: Float[Tensor, "step row d_model"]) -> Float[Tensor, "step row"]:
        """How safely the cover is said: its probability less that of the likeliest other token; negative where that
        one is said."""
        return torch.stack([self._margin(step) for step in hidden])

    def _margin(self, hidden: Float[Tensor, "row d_model"]) -> Float[Tensor, " row"]:
        p = torch.softmax(unembed(self.model.module, hidden).float(), -1)
        cover = p[:, self.words.cover].clone()
        p[:, self.words.cover] = 0
        return cover - p.amax(-1)

    def loop_test(
        self, *, rows: int = 32, steps: int = 16, sigma: float = 0.02, seed: int = 0, spread: float = 0.5
    ) -> "LoopTest":
        """From many starts, under noise: does every row keep its word and say the cover?

        Words go round; |u| of the starts is uniform from 1 − ``spread`` to 1, their cover mass within 0.15 of the
        cell's. The first quarter of the steps, in which it settles, does not count for margin and level.
        """
        draw = torch.Generator().manual_seed(seed)
        bits = self.all_bits[torch.arange(rows) % len(self.all_bits)]
        u = (2.0 * bits - 1) * (1 - spread * torch.rand(bits.shape, generator=draw))
        mass = self.cell.cover_mass + 0.15 * (2 * torch.rand(rows, generator=draw) - 1)
        first = self.words.soft(self.model.embedding, u, mass.clamp(0.05, 0.95))
        told = self.run(first, torch.zeros(steps, rows), sigma=sigma, randomness=loop.Randomness(seed))
        settled = told.hidden[steps // 4 :]
        found = self.read(settled).cpu()
        margin = self.margins(settled).cpu()
        kept = ((found > 0) == bits).all(-1).all(0)
        said = (told.tokens == self.words.cover).cpu().double().mean()
        signed = torch.where(bits, found, -found)
        return LoopTest(kept.double().mean().item(), said.item(), margin.min().item(), signed.min().item())


@dataclass(frozen=True, order=True)
class LoopTest:
    """Whether a cell did as it is to do; see :meth:`Register.loop_test`.

    kept: share of rows that kept their word at every step that counts. text_agreement: share of all steps whose token
    is the cover's. margin: the cover's probability less the likeliest other's, in the worst step. level: u towards the
    bit, in the worst step of the worst bit. (Of a cell under ordinary text all four are means over steps.) Compared by
    kept + text_agreement, then by margin + level/10.
    """

    NAMES: ClassVar = ("kept", "text_agreement", "margin", "level")
    rank: tuple[float, float] = field(init=False, repr=False)
    kept: float = field(compare=False)
    text_agreement: float = field(compare=False)
    margin: float = field(compare=False)
    level: float = field(compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", (self.kept + self.text_agreement, self.margin + 0.1 * self.level))

    def works(self, margin: float) -> bool:
        """All rows kept their word and said the cover, by at least ``margin``."""
        return self.kept == 1 and self.text_agreement == 1 and self.margin >= margin

    def plain(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.NAMES}


def from_prompt(
    model: LanguageModel,
    prompt: str,
    cover: str,
    pairs: Sequence[Sequence[str]],
    site: Site,
    cover_mass: float,
    push: bool = False,
) -> HiddenCell:
    """What learning begins with: the embeddings of an ordinary prompt, and no push or one of length 0."""
    Words.of(model, cover, pairs)
    return HiddenCell(
        prefix=model.embedding[torch.tensor(model.encode(prompt), device=model.device)].float().clone(),
        push=torch.zeros(model.d_model) if push else None,
        cover=cover,
        pairs=tuple((a, b) for a, b in pairs),
        site=site,
        cover_mass=cover_mass,
        model=model.info.name,
        checksum=model.info.checksum,
        dtype=model.info.dtype,
        provenance={"prompt": prompt},
    )


def with_values(cell: HiddenCell, prefix: Tensor, push: Tensor | None, provenance: Mapping[str, Any]) -> HiddenCell:
    """The cell with other learned tensors, detached copies."""
    return replace(
        cell,
        prefix=prefix.detach().clone(),
        push=None if push is None else push.detach().clone(),
        provenance={**cell.provenance, **provenance},
    )
