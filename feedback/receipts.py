"""Did the push do what the program asked, at every step and in every row?"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from feedback.hooks import Push, Receipt


class ReceiptError(RuntimeError):
    """A push did not do what the program asked; the message names step, site and rows."""


def verify(
    handle: Push,
    dtype: torch.dtype,
    receipts: Sequence[Receipt],
    coefficients: Float[Tensor, "step row carrier"],
    carriers: Float[Tensor, "carrier d_model"],
    finite: Bool[Tensor, "step row"] | None = None,
    first_step: int = 1,
) -> None:
    """Compares what every step's receipt measured with what the program asked: fired once, and Δ·v̂ along every
    carrier equal to Σ c·v·v̂ within the rounding of the model's ``dtype`` at the length of h.

    Called once per chunk, after its last step: the only place where the host waits for the receipts. ``finite``
    excludes rows whose state had turned non-finite. ReceiptError names step, site and rows.
    """
    path = handle.site.path
    for step, receipt in enumerate(receipts, first_step):
        if receipt.fired != 1:
            raise ReceiptError(
                f"step {step}, site {path}: the push fired {receipt.fired} times in one pass; expected once. "
                "Is the same push entered twice, or is the module called more than once per pass?"
            )
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
            f"step {step + first_step}, site {path}, rows {bad.tolist()}: the push did not arrive as asked; "
            f"row {row} asked Δ·v̂ = {asked[step, row].tolist()}, measured {measured[step, row].tolist()}. "
            "Does another hook on this module change its output?"
        )
