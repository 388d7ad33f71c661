"""How is a carrier v made, and kept with its provenance?

A carrier is a direction at a site along which a program pushes. Whatever made it, it is kept as a
unit vector together with its length before that, so that ``alpha`` can count in units of either, or
of the residual stream.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from feedback.hooks import record
from feedback.models import LanguageModel
from feedback.sites import Site, resolve, unembedding

Scale = Literal["unit", "residual", "raw"]


@dataclass(frozen=True, eq=False)
class Carriers:
    """Unit vectors to push along, and all that is known about them.

    vectors: (carrier, d_model), each of length 1.
    names: one per carrier.
    operation: what made them, a function of this module; ``provenance`` holds its arguments.
    raw_lengths: (carrier,), the lengths before they were made 1.
    scale: what alpha multiplies: vectors of "unit", "raw" or the "residual" stream's length.
    residual_length: mean ‖h‖ at the site, see :func:`residual_length`; needed for scale "residual".
    model, checksum, site: what they were made on; None where that does not matter.

    ValueError: a vector that is not finite or not of length 1, names or lengths that do not fit.
    """

    vectors: Float[Tensor, "carrier d_model"]
    names: tuple[str, ...]
    operation: str
    raw_lengths: Float[Tensor, " carrier"]
    scale: Scale = "unit"
    residual_length: float | None = None
    model: str | None = None
    checksum: str | None = None
    site: Site | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not torch.isfinite(self.vectors).all() or not torch.isfinite(self.raw_lengths).all():
            raise ValueError("carriers hold NaN or infinite values; expected finite vectors")
        lengths = torch.linalg.vector_norm(self.vectors, dim=-1)
        wrong = (lengths - 1).abs() > 1e-3
        if wrong.any():
            number = int(wrong.int().argmax())
            raise ValueError(
                f"carrier {number} is {float(lengths[number]):.4g} long; expected length 1: use "
                "from_vectors, which keeps the length apart"
            )
        if not len(self.names) == len(self.raw_lengths) == len(self.vectors) > 0:
            raise ValueError(
                f"{len(self.vectors)} carriers with {len(self.names)} names and "
                f"{len(self.raw_lengths)} lengths; expected one of each per carrier, and at least "
                "one"
            )
        if self.scale not in ("unit", "residual", "raw"):
            raise ValueError(f"carrier scale is {self.scale!r}; expected unit, residual or raw")
        if self.scale == "residual" and not (self.residual_length or 0) > 0:
            raise ValueError(
                f"carrier scale is residual with residual length {self.residual_length}; measure "
                "it at the site with residual_length(model, site, prompts)"
            )

    @property
    def n_carriers(self) -> int:
        return self.vectors.shape[0]

    @property
    def d_model(self) -> int:
        return self.vectors.shape[1]

    @property
    def lengths(self) -> Float[Tensor, " carrier"]:
        """The length of what alpha multiplies: 1, the mean residual length, or the raw length."""
        if self.scale == "raw":
            return self.raw_lengths
        return torch.full_like(self.raw_lengths, (self.residual_length or 1) if self.scale == "residual" else 1)

    @property
    def scaled(self) -> Float[Tensor, "carrier d_model"]:
        """What alpha multiplies: the carriers of a program."""
        return self.vectors * self.lengths[:, None]

    def with_scale(self, scale: Scale, residual_length: float | None = None) -> "Carriers":
        """The same carriers with alpha in other units; a known ``residual_length`` is kept."""
        return replace(self, scale=scale, residual_length=residual_length or self.residual_length)

    def orthonormalised(self) -> "Carriers":
        """Gram–Schmidt in order: each loses what the earlier ones have of it; the first stays.

        ValueError when one is a combination of the earlier ones.
        """
        q, r = torch.linalg.qr(self.vectors.double().mT)
        remaining = r.diagonal()
        if self.n_carriers > self.d_model or (remaining.abs() < 1e-4).any():
            number = min(int(remaining.abs().argmin()), self.n_carriers - 1)
            raise ValueError(
                f"carrier {self.names[number]!r} is a combination of the others; expected "
                "linearly independent carriers: leave it out"
            )
        vectors = (q * remaining.sign()).mT.to(self.vectors)
        return replace(self, vectors=vectors, provenance={**self.provenance, "orthonormalised": True})

    def check(self, model: LanguageModel, site: Site | None = None) -> None:
        """ValueError unless these carriers can be pushed at ``site`` of ``model``: same width,
        weights and place. Without a site the place is not looked at."""
        if self.d_model != model.d_model:
            raise ValueError(
                f"the carriers are {self.d_model} numbers wide; {model.info.name} has d_model "
                f"{model.d_model}: make them for this model"
            )
        if self.checksum is not None and self.checksum != model.info.checksum:
            raise ValueError(
                f"the carriers were made on {self.model} with weights {self.checksum[:8]}; this "
                f"is {model.info.name} with weights {model.info.checksum[:8]} (dtype counts): "
                "make them for this model"
            )
        here = None if site is None else _settled(model, site)
        if self.site is not None and here is not None and self.site != here:
            raise ValueError(
                f"the carriers were made at {_address(self.site)}; the push is at "
                f"{_address(here)}: choose that site, or make them here"
            )

    def save(self, path: Path) -> None:
        """Writes a safetensors file, with JSON metadata, that :func:`from_file` reads."""
        about = {k: v for k, v in vars(self).items() if k not in ("vectors", "raw_lengths")}
        about |= {"site": None if self.site is None else asdict(self.site)}
        tensors = {"vectors": self.vectors, "raw_lengths": self.raw_lengths}
        plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(plain, str(path), {"carriers": json.dumps(about)})

    @staticmethod
    def concatenate(parts: Sequence["Carriers"]) -> "Carriers":
        """All carriers in order. ValueError when they differ in width, weights, site or scale."""
        first = parts[0]
        for name in ("d_model", "checksum", "site", "scale", "residual_length"):
            values = [getattr(part, name) for part in parts]
            if any(value != values[0] for value in values):
                raise ValueError(f"carriers with different {name} ({values}) cannot be pushed together")
        return replace(
            first,
            vectors=torch.cat([part.vectors for part in parts]),
            names=tuple(name for part in parts for name in part.names),
            operation=" + ".join(dict.fromkeys(part.operation for part in parts)),
            raw_lengths=torch.cat([part.raw_lengths for part in parts]),
            provenance={"parts": [dict(part.provenance) for part in parts]},
        )


def from_vectors(
    vectors: Float[Tensor, "carrier d_model"],
    operation: str,
    *,
    names: Sequence[str] | None = None,
    model: LanguageModel | None = None,
    site: Site | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Carriers:
    """Carriers along vectors of any length: the difference of two states, a probe, a learned push.

    ValueError: a vector of length zero, or one that is not finite.
    """
    vectors = vectors.detach().float()
    lengths = torch.linalg.vector_norm(vectors, dim=-1)
    if not (lengths > 0).all():
        number = int((lengths > 0).int().argmin())
        raise ValueError(
            f"carrier {number} of {operation} has length {float(lengths[number])}; expected a "
            "direction: the two things it is the difference of may be the same"
        )
    return Carriers(
        vectors=vectors / lengths[:, None],
        names=tuple(names) if names is not None else tuple(f"{operation}[{i}]" for i in range(len(vectors))),
        operation=operation,
        raw_lengths=lengths,
        model=None if model is None else model.info.name,
        checksum=None if model is None else model.info.checksum,
        site=None if site is None or model is None else _settled(model, site),
        provenance=dict(provenance or {}),
    )


def from_file(path: Path, model: LanguageModel | None = None, site: Site | None = None) -> Carriers:
    """The carriers that :meth:`Carriers.save` wrote, checked against ``model`` and ``site``.

    ValueError, beginning with the path: no carriers, broken vectors, another width, model or site.
    """
    try:
        with safe_open(str(path), "pt") as file:
            about = json.loads((file.metadata() or {})["carriers"])
            tensors = {name: file.get_tensor(name) for name in ("vectors", "raw_lengths")}
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} holds no carriers ({error}); expected a file written by Carriers.save") from error
    about["site"] = None if about["site"] is None else Site(**about["site"])
    about["names"] = tuple(about["names"])
    try:
        carriers = Carriers(**tensors, **about)
        if model is not None:
            carriers.check(model, site)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return carriers


def random_orthonormal(n: int, d_model: int, generator: torch.Generator) -> Carriers:
    """``n`` orthonormal directions, uniformly distributed. ValueError unless n ≤ ``d_model``."""
    if not 1 <= n <= d_model:
        raise ValueError(
            f"{n} orthonormal carriers of width {d_model} do not exist; expected 1 to {d_model}: fewer bits"
        )
    return from_vectors(_orthonormal(n, d_model, generator), "random_orthonormal")


def norm_matched_random(carriers: Carriers, generator: torch.Generator) -> Carriers:
    """The control: random directions with the lengths, units, site and mutual angles of others."""
    # V = C·Q with orthonormal rows Q; C holds lengths and angles, so another Q keeps both.
    q, r = torch.linalg.qr(carriers.vectors.double().mT)
    turned = r.mT @ _orthonormal(q.shape[1], carriers.d_model, generator).to(r)
    return replace(
        carriers,
        vectors=turned.to(carriers.vectors),
        names=tuple(f"random instead of {name}" for name in carriers.names),
        operation="norm_matched_random",
        provenance={"of": carriers.operation, **carriers.provenance},
    )


def contrast_prompts(
    model: LanguageModel, site: Site, prompt_a: str | Sequence[str], prompt_b: str | Sequence[str]
) -> Carriers:
    """From B to A: the difference of the site's output at the last position of two prompts.

    Of several prompts a side, the difference of their means.
    """
    a, b = ([prompt] if isinstance(prompt, str) else list(prompt) for prompt in (prompt_a, prompt_b))
    mean_a, mean_b = (
        torch.stack([_outputs(model, site, model.encode(prompt))[-1] for prompt in side]).mean(0) for side in (a, b)
    )
    return from_vectors(
        (mean_a - mean_b)[None],
        "contrast_prompts",
        model=model,
        site=site,
        provenance={"prompt_a": a, "prompt_b": b},
    )


def contrast_soft_tokens(model: LanguageModel, site: Site, prompt: str, token_a: str, token_b: str) -> Carriers:
    """From B to A: the difference of the site's output when A or B is read after ``prompt``.

    At the last position; A and B are each one token, fed as the soft token that is its embedding.
    """
    ids = model.encode(prompt)
    a, b = (_outputs(model, site, [*ids, token_id(model, token)])[-1] for token in (token_a, token_b))
    return from_vectors(
        (a - b)[None],
        "contrast_soft_tokens",
        names=[f"{token_a} − {token_b}"],
        model=model,
        site=site,
        provenance={"prompt": prompt, "token_a": token_a, "token_b": token_b},
    )


def unembedding_direction(model: LanguageModel, token_a: str, token_b: str) -> Carriers:
    """From B to A: U[a] − U[b], the direction of the final hidden state that prefers A to B.

    U is the unembedding matrix, a row per token. It belongs to no site.
    """
    weight = unembedding(model.module).get_parameter("weight").to(model.device)
    difference = weight[token_id(model, token_a)] - weight[token_id(model, token_b)]
    return from_vectors(
        difference[None],
        "unembedding_direction",
        names=[f"{token_a} − {token_b}"],
        model=model,
        provenance={"token_a": token_a, "token_b": token_b},
    )


def pca(
    activations: Float[Tensor, "sample d_model"],
    n: int,
    *,
    model: LanguageModel | None = None,
    site: Site | None = None,
) -> Carriers:
    """The ``n`` principal directions of the centred activations, by falling variance.

    Raw lengths are the standard deviations along them; the largest coordinate of each is positive.
    """
    n_samples = len(activations)
    centred = activations.detach().double() - activations.detach().double().mean(0)
    _, singular, directions = torch.linalg.svd(centred, full_matrices=False)
    rank = int((singular > 1e-6 * singular.max()).sum()) if n_samples > 1 else 0
    if not 1 <= n <= rank:
        raise ValueError(
            f"{n} principal directions of {n_samples} activations that vary in {rank}; expected 1 "
            f"to {rank}: fewer directions or more activations"
        )
    directions, deviations = directions[:n], singular[:n] / (n_samples - 1) ** 0.5
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    share = (singular[:n] ** 2 / (singular**2).sum()).tolist()
    return from_vectors(
        directions * largest.sign() * deviations[:, None],
        "pca",
        model=model,
        site=site,
        provenance={"n_samples": n_samples, "explained_variance": share},
    )


def residual_length(model: LanguageModel, site: Site, prompts: Sequence[str]) -> float:
    """Mean ‖h‖ at the site over all positions of the prompts but their first.

    The first position carries activations of another size, whatever its token: more than a hundred
    times longer in SmolLM2. ValueError when no prompt has a second position.
    """
    lengths = [torch.linalg.vector_norm(_outputs(model, site, model.encode(prompt))[1:], dim=-1) for prompt in prompts]
    if not sum(map(len, lengths)):
        raise ValueError(f"{len(prompts)} prompts without a second token; expected one with two tokens or more")
    return float(torch.cat(lengths).mean())


def token_id(model: LanguageModel, word: str) -> int:
    """The id of the one token that ``word`` is; ValueError names the pieces when it is several."""
    ids = model.tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = " + ".join(repr(model.decode([i])) for i in ids) or "nothing"
        raise ValueError(
            f"{word!r} is {len(ids)} tokens for {model.info.name}: {pieces}; expected a word that "
            "is one token (a leading space often matters)"
        )
    return int(ids[0])


@torch.no_grad()
def _outputs(model: LanguageModel, site: Site, ids: Sequence[int]) -> Float[Tensor, "position d_model"]:
    """The site's value at every position of one text, in float32."""
    tokens = torch.tensor([list(ids)], device=model.device)
    with record(model.module, [site]) as recorder:
        model.module(
            inputs_embeds=torch.nn.functional.embedding(tokens, model.embedding),
            attention_mask=torch.ones_like(tokens),
            use_cache=False,
            **model.last_position_only,
        )
        return recorder.outputs[site][0].float().to(model.device)


def _orthonormal(n: int, d_model: int, generator: torch.Generator) -> Tensor:
    """(n, d_model) in float64; the signs of R make the distribution uniform."""
    drawn = torch.randn(d_model, n, generator=generator, dtype=torch.float64, device=generator.device)
    q, r = torch.linalg.qr(drawn)
    return (q * r.diagonal().sign()).mT


def _settled(model: LanguageModel, site: Site) -> Site:
    """The same site with its block as a number."""
    found = resolve(model.module, site)
    return Site(at=site.at, path=site.path) if found.block is None else replace(site, block=found.block)


def _address(site: Site) -> str:
    return site.path or f"block {site.block} ({site.at})"
