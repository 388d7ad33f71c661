"""What happened in a run of the loop: a frozen record with named axes that can be saved, loaded and sliced."""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from feedback.programs import Program

STATES = ("soft_tokens", "hidden")


@dataclass(frozen=True)
class Trajectory:
    """The record of one program through the loop. Index 0 of ``step`` is loop step 1, which reads the first soft token.

    The soft token of step t was made from the logits of step t−1 and the token emitted there (for step 1: from the
    prompt pass). ``entropy``, ``top_probability`` and ``kept_mass`` describe the mixture that was fed at step t;
    ``hidden``, ``tokens``, ``argmax`` and ``kl`` what came out of step t.
    """

    soft_tokens: Float[Tensor, "step row d_model"]  # the vectors read
    hidden: Float[Tensor, "step row d_model"]  # after the final norm: what the unembedding reads
    tokens: Int[Tensor, "step row"]  # emitted text: argmax, sample or forced cover
    argmax: Int[Tensor, "step row"]  # what the model would have said
    prompt_tokens: Int[Tensor, " row"]  # emitted after the prompt pass
    prompt_hidden: Float[Tensor, "row d_model"]  # the prompt pass's hidden, from which soft token 1 was made
    entropy: Float[Tensor, "step row"]  # nats, of the fed mixture
    top_probability: Float[Tensor, "step row"]  # largest weight in the fed mixture
    kept_mass: Float[Tensor, "step row"]  # share of the model's probability that the map kept
    norm_ratio: Float[Tensor, "step row"]  # length of the soft token over the mean length of an embedding row
    pushed: Float[Tensor, "step row carrier"]  # measured Δ·v̂ at the site, last position
    relative_push: Float[Tensor, "step row"]  # measured ‖Δ‖/‖h‖
    site_norm: Float[Tensor, "step row"]  # ‖h‖ at the site before the push
    stopped_at: Int[Tensor, " row"]  # loop step (1…T) at which the row's state became non-finite; 0: never
    program: Program
    kl: Float[Tensor, "step row"] | None = None  # nats, KL(row ‖ its reference row), where one was named
    recorded: dict[str, Tensor] = field(default_factory=dict)  # path of a site → (step, row, d_model)
    meta: dict[str, Any] = field(default_factory=dict)  # map, context, site, semantics, model: plain values

    @property
    def n_steps(self) -> int:
        return self.hidden.shape[0]

    @property
    def n_rows(self) -> int:
        return self.hidden.shape[1]

    @property
    def finite(self) -> Tensor:
        """(row,) True where the row reached the last step with a finite state."""
        return self.stopped_at == 0

    @property
    def text(self) -> Int[Tensor, "row position"]:
        """The emitted text of every row, the token after the prompt first: (row, step+1)."""
        return torch.cat([self.prompt_tokens[None], self.tokens]).mT

    def failures(self) -> list[dict[str, Any]]:
        """One entry per stopped row: row, step, and the program's columns that are one number per row (alpha, …)."""
        found = []
        for row in torch.nonzero(~self.finite)[:, 0].tolist():
            columns = {k: v[row].item() for k, v in self.program.columns.items() if v.dim() == 1}
            found.append({"row": row, "step": int(self.stopped_at[row]), **columns})
        return found

    def rows(self, index: Tensor) -> "Trajectory":
        """The trajectory of the rows that ``index`` (a boolean mask or row numbers) picks."""
        picked: dict[str, Any] = {"program": self.program.rows(index)}
        for name, value in self._tensors().items():
            picked[name] = value[index] if name in _ROW_FIRST else value[:, index]
        return replace(self, **picked, recorded={k: v[:, index] for k, v in self.recorded.items()})

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def save(self, path: Path, states: bool = True) -> None:
        """Writes a safetensors file with the program and, as JSON metadata, ``meta``. ``states=False`` leaves out the
        two large tensors (soft tokens and hidden states); such a file is for tables and figures and refuses to load
        as a trajectory."""
        tensors = self._tensors() | {f"recorded.{k}": v for k, v in self.recorded.items()}
        tensors |= {f"program.columns.{k}": v for k, v in self.program.columns.items()}
        for name in ("coefficients", "carriers", "prompt_coefficients"):
            value = getattr(self.program, name)
            if value is not None:
                tensors[f"program.{name}"] = value
        if not states:
            tensors = {k: v for k, v in tensors.items() if k not in STATES and not k.startswith("recorded.")}
        plain = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
        meta = json.dumps({"meta": self.meta, "program": self.program.name, "states": states})
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(plain, str(path), {"trajectory": meta})
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from None

    @staticmethod
    def load(path: Path) -> "Trajectory":
        """Reads what ``save`` wrote; ValueError when the file is not one, or was saved without its states."""
        with safe_open(str(path), "pt") as file:
            about = json.loads((file.metadata() or {}).get("trajectory", "null"))
            if about is None or not about["states"]:
                raise ValueError(
                    f"{path} holds no whole trajectory: expected a file written by Trajectory.save with "
                    "states=True (run with save_states=true)"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        columns = {k.removeprefix("program.columns."): v for k, v in tensors.items() if ".columns." in k}
        program = Program(
            coefficients=tensors["program.coefficients"],
            carriers=tensors["program.carriers"],
            prompt_coefficients=tensors.get("program.prompt_coefficients"),
            columns=columns,
            name=about["program"],
        )
        recorded = {k.removeprefix("recorded."): v for k, v in tensors.items() if k.startswith("recorded.")}
        own = {k: v for k, v in tensors.items() if "." not in k}
        return Trajectory(**own, program=program, recorded=recorded, meta=about["meta"])


_ROW_FIRST = ("prompt_tokens", "prompt_hidden", "stopped_at")


def concatenate(parts: list[Trajectory]) -> Trajectory:
    """Trajectories of the same steps, joined along rows in order."""
    first = parts[0]
    joined: dict[str, Any] = {"program": Program.concatenate([p.program for p in parts])}
    for name in first._tensors():
        joined[name] = torch.cat([getattr(p, name) for p in parts], dim=0 if name in _ROW_FIRST else 1)
    recorded = {k: torch.cat([p.recorded[k] for p in parts], dim=1) for k in first.recorded}
    return replace(first, **joined, recorded=recorded)
