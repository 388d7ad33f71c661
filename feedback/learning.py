"""How is a hidden cell learned? Adam through one step of the frozen model's loop, on its prefix, its push, or both.

A soft token whose pairs are split u_i, with noise, under pushes a_i along the cell's carriers, is to be followed by one
whose pairs are split level·tanh(s·(u_i + a_i/θ_i)) and whose cover keeps its mass. Then every word of bits is a fixed
point that says the cover, θ_i is the threshold of a push that switches bit i, and pushes leave the text and the other
bits alone. The loss wobbles, so the cell that is kept is the best of a held-out loop test, not the last.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from feedback import hidden, loop, maps, progress, results
from feedback.cache import Context
from feedback.hidden import HiddenCell, LoopTest, Words
from feedback.models import LanguageModel
from feedback.programs import Program
from feedback.sites import Site, unembed
from feedback.trajectory import Trajectory

Kind = Literal["prefix", "push", "both"]
REFRESH = 10  # steps for which the carriers stay as they are
STATE, CELL = "learner.safetensors", "cell.safetensors"  # what a run that learns leaves in its folder


@dataclass(frozen=True)
class Objective:
    """What the learner wants of every step.

    level: |u| that every pair is restored to. sharpness: s. weakest: the smallest |u| of the soft tokens it learns
    from. mass_range: by how much their cover mass differs from the cell's. sigma: noise in them, in mean lengths of an
    embedding row. unroll: steps of the loop that the loss is a mean over; from the second on it reads what the loop
    itself makes, with the mass that no word has. pushed: share of (row, bit) that are pushed. threshold: θ as a share
    of the contrast's own length. largest: the largest push, in thresholds. ValueError for numbers out of range.
    """

    level: float = 0.85
    sharpness: float = 10.0
    weakest: float = 0.1
    mass_range: float = 0.25
    sigma: float = 0.02
    unroll: int = 1
    pushed: float = 0.4
    threshold: float = 0.4
    largest: float = 3.5

    def __post_init__(self) -> None:
        shares = 0 < self.level < 1 and 0 <= self.weakest < 1 and 0 <= self.mass_range < 0.5 and 0 <= self.pushed <= 1
        positive = min(self.sharpness, self.threshold, self.largest) > 0
        if not (shares and positive and self.sigma >= 0 and self.unroll >= 1):
            raise ValueError(
                f"{self}: expected level in (0, 1), weakest in [0, 1), mass_range in [0, 0.5), pushed in [0, 1], sigma "
                "of at least 0, unroll of at least 1, and everything else above 0"
            )

    def starts(
        self, words: Words, cover_mass: float, rows: int, generator: torch.Generator
    ) -> tuple[Float[Tensor, "row bit"], Float[Tensor, " row"]]:
        """u and cover mass of soft tokens to learn from."""
        size = self.weakest + (1 - self.weakest) * torch.rand(rows, words.n_bits, generator=generator)
        sign = 2.0 * torch.randint(2, (rows, words.n_bits), generator=generator) - 1
        mass = cover_mass + self.mass_range * (2 * torch.rand(rows, generator=generator) - 1)
        return sign * size, mass.clamp(0.02, 0.98)

    def pushes(self, words: Words, rows: int, generator: torch.Generator) -> Float[Tensor, "row bit"]:
        """a/θ: 0, or uniform up to ``largest`` of either sign."""
        shape = (rows, words.n_bits)
        amounts = self.largest * (2 * torch.rand(shape, generator=generator) - 1)
        return amounts * (torch.rand(shape, generator=generator) < self.pushed)

    def wanted(
        self, words: Words, cover_mass: float, u: Float[Tensor, "row bit"], pushes: Float[Tensor, "row bit"]
    ) -> Float[Tensor, "row word"]:
        """The probabilities of ``words.ids`` that should come out."""
        return words.weights(self.level * torch.tanh(self.sharpness * (u + pushes)), cover_mass)


class Learner:
    """Learns one cell; can be stopped at any step, saved and continued.

    kind: what is learned. steps: how many in all. rate, push_rate: Adam's learning rates of the prefix and of the push
    at the beginning; they fall to a tenth along a cosine. test_every: steps from one loop test to the next. It ends
    early after ``patience`` loop tests in a row that work with ``margin``, none of them better than the best before.
    testing: options of :meth:`Register.loop_test`. Everything random comes from ``seed``.
    """

    def __init__(
        self,
        model: LanguageModel,
        cell: HiddenCell,
        objective: Objective,
        *,
        kind: Kind = "prefix",
        steps: int = 220,
        batch: int = 48,
        rate: float = 1e-2,
        push_rate: float = 5e-2,
        test_every: int = 10,
        margin: float = 0.15,
        patience: int = 6,
        testing: Mapping[str, Any] = MappingProxyType({}),
        seed: int = 0,
    ) -> None:
        if (kind != "prefix") != (cell.push is not None):
            raise ValueError(f"kind={kind} and a cell {'without' if cell.push is None else 'with'} a push do not fit")
        self.model, self.cell, self.objective, self.testing = model, cell, objective, testing
        self.rows, self.n_steps, self.seed = batch, steps, seed
        self.test_every, self.margin, self.patience = test_every, margin, patience
        self.words = Words.of(model, cell.cover, cell.pairs)
        self.generator = torch.Generator().manual_seed(seed)
        self.prefix = cell.prefix.to(model.device).clone().requires_grad_(kind != "push")
        self.push = None if cell.push is None else cell.push.to(model.device).clone().requires_grad_()
        groups: list[dict[str, Any]] = [{"params": [self.prefix], "lr": rate}] if kind != "push" else []
        groups += [{"params": [self.push], "lr": push_rate}] if self.push is not None else []
        self.step = 0
        self.optimiser = torch.optim.Adam(groups)
        self._rates = [group["lr"] for group in groups]
        self.carriers = torch.zeros(self.words.n_bits, model.d_model, device=model.device)
        self.best: tuple[int, LoopTest, HiddenCell] | None = None
        self.table: list[dict[str, Any]] = []  # the learning curve, a row a step
        self._waited = 0
        self.settings: dict[str, Any] = {
            "kind": kind, "steps": steps, "batch": batch, "rate": rate, "push_rate": push_rate, "seed": seed,
            "test_every": test_every, "margin": margin, "patience": patience, "testing": dict(testing),
            "objective": asdict(objective), "cell": cell.about(),
        }  # fmt: skip

    def steps(self) -> Iterator[dict[str, Any]]:
        """Learns to the last step; yields that step's row of ``table``. loss: mean KL(wanted ‖ p) in nats. kept,
        text_agreement, margin, level, works: of the loop test, where one was made."""
        while self.step < self.n_steps and self._waited <= self.patience:
            row: dict[str, Any] = {"loss": self._descend(), **dict.fromkeys(LoopTest.NAMES), "works": False}
            row = {"step": self.step, **row}
            if self.step % self.test_every == 0 or self.step == self.n_steps:
                tested = self.test()
                row |= {**tested.plain(), "works": tested.works(self.margin)}
                self._waited = self._waited + 1 if row["works"] else 0
                if self.best is None or tested > self.best[1]:
                    about = {"step": self.step, "loop_test": tested.plain(), **self.settings}
                    del about["cell"]
                    self.best = (self.step, tested, hidden.with_values(self.cell, self.prefix, self.push, about))
                    self._waited = min(self._waited, 1)
            self.table.append(row)
            yield row

    def descend(self, folder: Path, log: Callable[[int, dict[str, float]], object], *, quiet: bool) -> int:
        """Takes the steps that are left, with a bar. Leaves STATE and the best CELL in ``folder`` whenever a loop test
        was made, and goes on from the STATE that is there; ``log`` gets every step's numbers. Returns how many steps
        had been taken before."""
        if (folder / STATE).is_file():
            self.restore(folder / STATE)
        before = self.step
        for row in self.table:
            log(row["step"], _logged(row))
        told: dict[str, str] = {}
        with progress.bar(quiet, total=self.n_steps, initial=self.step, unit="step") as bar:
            for row in self.steps():
                bar.update(1)
                log(row["step"], _logged(row))
                told["loss"] = f"{row['loss']:.3f}"
                if row["kept"] is not None:
                    told |= {"kept": f"{row['kept']:.2f}", "margin": f"{row['margin']:.2f}"}
                    self.save(folder / STATE)
                    assert self.best is not None
                    if self.best[0] == self.step:
                        self.best[2].save(folder / CELL)
                bar.set_postfix(told)
        return before

    def test(self) -> LoopTest:
        """The loop test of what is learned so far; its starts and noise are no rows of any batch."""
        return self._as_is().on(self.model).loop_test(seed=self.seed + 1, **self.testing)

    def _as_is(self) -> HiddenCell:
        return hidden.with_values(self.cell, self.prefix, self.push, {})

    def _descend(self) -> float:
        model, objective, words, mass = self.model, self.objective, self.words, self.cell.cover_mass
        if self.step % REFRESH == 0:
            self.carriers = self.contrasts()
        u, masses = objective.starts(words, mass, self.rows, self.generator)
        pushes = objective.pushes(words, self.rows, self.generator)
        u, pushes = u.to(model.device), pushes.to(model.device)
        first = words.soft(model.embedding, u, masses.to(model.device))
        noise = torch.randn(first.shape, generator=self.generator).to(first)
        first = first + objective.sigma * model.mean_embedding_length * noise / model.d_model**0.5
        told = self._run(first, objective.threshold * pushes, objective.unroll)
        log_p = torch.log_softmax(unembed(model.module, told.hidden).float(), -1)[..., words.ids]
        loss = torch.zeros((), device=model.device)
        for said in log_p:
            wanted = objective.wanted(words, mass, u, pushes)
            loss = loss + (wanted * (wanted.log() - said)).sum(-1).mean() / objective.unroll
            u = words.split(said.detach())
        return self._improve(loss)

    def _improve(self, loss: Tensor) -> float:
        """One step of Adam at this step's rate."""
        share = 0.55 + 0.45 * math.cos(math.pi * self.step / self.n_steps)
        for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
            group["lr"] = share * rate
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.step += 1
        value = loss.item()
        if not value < float("inf"):
            raise ValueError(f"the loss is {value} at step {self.step}: lower learn.rate or learn.push_rate")
        return value

    def _run(self, first: Tensor, amounts: Tensor, steps: int, record: Sequence[Site] = ()) -> Trajectory:
        """Rows pushed by ``amounts`` (row, bit) of the carriers at every step."""
        rows = len(first)
        program = Program(amounts.expand(steps, -1, -1), self.carriers, columns={"row": torch.arange(rows)})
        return loop.run(
            self.model,
            [self.prefix],  # in its own float32; the loop reads it in the model's dtype
            program.and_always(self.push),
            feedback_map=maps.expected_embedding(),
            site=self.cell.site,
            context=Context("prompt"),
            row_prompt=torch.zeros(rows, dtype=torch.long),
            first=first,
            record=record,
            differentiable=True,
            max_rows=rows,
        )

    @torch.no_grad()
    def contrasts(self) -> Float[Tensor, "bit d_model"]:
        """What each bit makes of the site's output now: the directions it is pushed along, at their own length."""
        n = self.words.n_bits
        u = torch.cat([torch.eye(n), -torch.eye(n)]).to(self.model.device)
        first = self.words.soft(self.model.embedding, u, self.cell.cover_mass)
        told = self._run(first, torch.zeros(2 * n, n, device=first.device), 1, [self.cell.site])
        (at_site,) = told.recorded.values()
        plus, minus = at_site[0].float().chunk(2)
        return plus - minus

    def save(self, path: Path) -> None:
        """Where it stands, as one safetensors file that :meth:`restore` continues from, exactly."""
        tensors = {"prefix": self.prefix.detach(), "carriers": self.carriers, "generator": self.generator.get_state()}
        tensors |= {} if self.push is None else {"push": self.push.detach()}
        adam = self.optimiser.state_dict()
        tensors |= {f"adam.{n}.{key}": value for n, state in adam["state"].items() for key, value in state.items()}
        about: dict[str, Any] = {"settings": self.settings, "step": self.step, "waited": self._waited}
        about |= {"table": self.table, "adam": adam["param_groups"]}
        if self.best is not None:
            number, tested, cell = self.best
            tensors["best.prefix"] = cell.prefix
            tensors |= {} if cell.push is None else {"best.push": cell.push}
            about["best"] = {"step": number, "test": tested.plain(), "provenance": dict(cell.provenance)}
        part = path.with_suffix(".part")
        save_file(
            {k: v.cpu().contiguous().clone() for k, v in tensors.items()}, str(part), {"learner": json.dumps(about)}
        )
        part.replace(path)

    def restore(self, path: Path) -> None:
        """Continues from :meth:`save`. ValueError when that learner had other settings; it names them."""
        try:
            with safe_open(str(path), "pt") as file:
                about = json.loads((file.metadata() or {})["learner"])
            tensors, theirs = load_file(str(path)), dict(results.flat(about["settings"]))
        except (SafetensorError, KeyError, OSError) as error:
            raise ValueError(f"{path} holds no learner's state ({error})") from error
        ours = dict(results.flat(json.loads(json.dumps(self.settings))))
        if other := [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]:
            told = "; ".join(f"{name}: {theirs.get(name)!r} there, {ours.get(name)!r} here" for name in other)
            raise ValueError(
                f"{path} was left by a learner with other settings: {told}. Resume it with the same command"
            )
        with torch.no_grad():
            self.prefix.copy_(tensors["prefix"])
            if self.push is not None:
                self.push.copy_(tensors["push"])
        self.carriers = tensors["carriers"].to(self.carriers)
        self.generator.set_state(tensors["generator"])
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("adam."):
                _, number, key = name.split(".")
                states.setdefault(int(number), {})[key] = value
        self.optimiser.load_state_dict({"state": states, "param_groups": about["adam"]})
        self.step, self.table, self._waited = about["step"], about["table"], about["waited"]
        if "best" in about:
            best = about["best"]
            cell = hidden.with_values(self.cell, tensors["best.prefix"], tensors.get("best.push"), best["provenance"])
            self.best = (best["step"], LoopTest(**best["test"]), cell)


def _logged(row: Mapping[str, Any]) -> dict[str, float]:
    return {f"learn/{name}": row[name] for name in ("loss", *LoopTest.NAMES) if row[name] is not None}
