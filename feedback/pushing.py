"""Is what a program asks really added, once, in every row, at every step?

A push is measured, not assumed: one hook registered before it keeps the hidden state, one registered after it
subtracts. These receipts are on the carriers' device, wherever the site is; :func:`verify` compares them with the
program at the end of a chunk.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from feedback.hooks import Hook, HookError, Record, attached, located
from feedback.sites import ResolvedSite, Site


class ReceiptError(HookError):
    """A push did not do what the program asked; the message names step, site and rows."""


class Receipt(NamedTuple):
    """What a push did in one pass, at the last position, measured as the difference of what came and what went on."""

    fired: int  # times the push ran in this pass: 1 when all is well
    pushed: Float[Tensor, "row carrier"]  # Δ·v̂ along each carrier
    relative: Float[Tensor, " row"]  # ‖Δ‖ / ‖h‖
    length: Float[Tensor, " row"]  # ‖h‖ before the push


class _Add(Hook):
    delta: Tensor | None = None

    def apply(self, hidden: Tensor) -> Tensor | None:
        return None if self.delta is None else hidden + self.delta[:, None, :].to(hidden)


class _Measure(Hook):
    def __init__(self, site: ResolvedSite, before: Record, directions: Tensor, step: int) -> None:
        super().__init__(site)
        self.before = before
        self.directions = directions
        self.home = directions.device
        self.step = step
        self.receipt: tuple[Tensor, Tensor, Tensor] | None = None

    def apply(self, hidden: Tensor) -> None:
        came = self.before.take()
        if (hidden.shape, hidden.dtype) != (came.shape, came.dtype):
            raise ReceiptError(
                f"step {self.step}, site {self.site.path}, all rows: {tuple(came.shape)} {came.dtype} came in and "
                f"{tuple(hidden.shape)} {hidden.dtype} went on: a push is added in the dtype of the activation"
            )
        original = came[:, -1].detach().float()
        delta = hidden.detach()[:, -1].float() - original
        self.directions = self.directions.to(original.device)  # once: afterwards they are there
        length = torch.linalg.vector_norm(original, dim=-1)
        relative = torch.linalg.vector_norm(delta, dim=-1) / length
        self.receipt = (delta @ self.directions.mT, relative, length)


class Push:
    """The handle of a push: what the next pass adds, and the receipt of the last one. Nothing here waits for the
    device."""

    def __init__(self, add: _Add, measure: _Measure) -> None:
        self._add = add
        self._measure = measure

    @property
    def site(self) -> ResolvedSite:
        return self._add.site

    def set(self, delta: Float[Tensor, "row d_model"] | None) -> None:
        """Adds ``delta`` to every position of the next passes; None adds nothing."""
        self._add.delta = delta

    def take(self) -> Receipt:
        """The receipt of the pass since the last call. ReceiptError when the site was not reached, or the push ran more
        or less often than once."""
        step, fired = self._measure.step, self._add.fired
        if self._measure.receipt is None:
            raise ReceiptError(
                f"step {step}, site {self.site.path}, all rows: the push never fired. The module is not on the model's "
                "forward path (another code path, or compiled before the hook was registered); choose another site"
            )
        if fired != 1:
            raise ReceiptError(
                f"step {step}, site {self.site.path}, all rows: the push fired {fired} times in one pass; expected "
                "once. Is it entered twice, or is the module called more than once per pass?"
            )
        receipt = Receipt(fired, *(measured.to(self._measure.home) for measured in self._measure.receipt))
        self._add.fired, self._measure.receipt = 0, None
        self._measure.step += 1
        return receipt


@contextmanager
def push(
    module: PreTrainedModel, site: Site, carriers: Float[Tensor, "carrier d_model"], first_step: int = 1
) -> Iterator[Push]:
    """Registers a push at ``site`` with its receipt along ``carriers``; afterwards the hooks are gone again.

    ``handle.set(delta)`` says what the next pass adds. Weights are never touched. ``first_step`` numbers the passes in
    error messages. HookError when the site carries a push already: together they would add both.
    """
    where = located(module, site)
    queue = where.module._forward_pre_hooks if where.before else where.module._forward_hooks
    if any(isinstance(hook, _Add) for hook in queue.values()):
        raise HookError(f"there is a push at {where.path} already: one push takes any number of carriers")
    directions = torch.nn.functional.normalize(carriers.detach().float(), dim=-1)
    before, add = Record(where), _Add(where)
    measure = _Measure(where, before, directions, first_step)
    with attached(before, add, measure):
        yield Push(add, measure)


def verify(
    handle: Push,
    dtype: torch.dtype,
    receipts: Sequence[Receipt],
    coefficients: Float[Tensor, "step row carrier"],
    carriers: Float[Tensor, "carrier d_model"],
    finite: Bool[Tensor, "step row"] | None = None,
    first_step: int = 1,
) -> None:
    """Compares what every step's receipt measured with what the program asked: Δ·v̂ along every carrier equal to
    Σ c·v·v̂ within the rounding of the model's ``dtype`` at the length of h.

    Called once per chunk, after its last step: the only place where the host waits for the receipts. ``finite``
    excludes rows whose state had turned non-finite. ReceiptError names step, site and rows.
    """
    vectors, rows = carriers.detach().float(), coefficients.detach().float()
    asked = rows @ (vectors @ torch.nn.functional.normalize(vectors, dim=-1).mT)
    measured = torch.stack([r.pushed for r in receipts])
    length = torch.stack([r.length for r in receipts])
    reach = length[..., None] + torch.linalg.vector_norm(rows @ vectors, dim=-1)[..., None]
    eps = max(torch.finfo(kind).eps for kind in (dtype, torch.float32))  # receipts are float32
    wrong = ~((measured - asked).abs() <= 2 * eps * reach)  # not a number is wrong, too
    if finite is not None:
        wrong &= finite[..., None]
    if bool(wrong.any()):
        step = int(wrong.flatten(1).any(-1).int().argmax())
        bad = torch.nonzero(wrong[step].any(-1))[:, 0]
        row = int(bad[0])
        raise ReceiptError(
            f"step {step + first_step}, site {handle.site.path}, rows {bad.tolist()}: the push did not arrive as "
            f"asked; row {row} asked Δ·v̂ = {asked[step, row].tolist()}, measured {measured[step, row].tolist()}. "
            "Does another hook on this module change its output?"
        )
