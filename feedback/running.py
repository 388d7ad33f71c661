"""How does a hook that depends on the whole sequence work under a key-value cache? It keeps its own state.

A cached pass shows a hook the new position only. A statistic over "all positions" that is taken from the tensor at hand
is then one over a single position; this one remembers those before, and cached and uncached passes agree.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from feedback.hooks import Hook, HookError, attached, located
from feedback.sites import ResolvedSite, Site

Change = Callable[[Tensor, Tensor], Tensor | None]


class RunningMean(Hook):
    """The mean of the hidden state over each position and all before it, in whichever passes they came.

    Causal on purpose: a mean over later positions, too, could not be the same with a cache as without.
    """

    def __init__(self, site: ResolvedSite, change: Change | None) -> None:
        super().__init__(site)
        self.change = change
        self.mean: Float[Tensor, "row position d_model"] | None = None
        self._mask: Bool[Tensor, "row position"] | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets everything: the next pass begins new sequences."""
        self._total: Tensor | float = 0.0  # (row, 1, d_model)
        self._count: Tensor | float = 0.0  # (row, 1, 1)

    def expect(self, mask: Bool[Tensor, "row position"]) -> None:
        """Says which positions of the next pass are real; padding counts for nothing."""
        self._mask = mask

    def rows(self, index: Int[Tensor, " row"]) -> None:
        """Goes on with these rows, as a cache does that is gathered to them."""
        if isinstance(self._total, Tensor) and isinstance(self._count, Tensor):
            self._total, self._count = self._total[index], self._count[index]

    def apply(self, hidden: Tensor) -> Tensor | None:
        exact = hidden.detach() if hidden.dtype == torch.float64 else hidden.detach().float()
        if isinstance(self._total, Tensor) and len(self._total) != len(hidden):
            raise HookError(
                f"the running mean at {self.site.name} is over {len(self._total)} rows, the pass has {len(hidden)}: "
                "reset() before new sequences, or rows(index) after the cache was gathered"
            )
        real, self._mask = self._mask, None
        weight = torch.ones_like(exact[..., :1]) if real is None else real[..., None].to(exact)
        totals = self._total + (exact * weight).cumsum(1)
        counts = self._count + weight.cumsum(1)
        self._total, self._count = totals[:, -1:], counts[:, -1:]
        self.mean = totals / counts.clamp(min=1)
        return None if self.change is None else self.change(hidden, self.mean.to(hidden))


@contextmanager
def mean(module: nn.Module, site: Site, change: Change | None = None) -> Iterator[RunningMean]:
    """Keeps the running mean at ``site``; passes on ``change(hidden, mean)``, (row, position, d_model) each, if given.

    The handle holds the last pass's ``mean``; call its ``reset()`` before other sequences, ``expect(mask)`` before a
    padded pass. Statistics are kept in float32 at least; no gradient flows through them.
    """
    hook = RunningMean(located(module, site), change)
    with attached(hook):
        yield hook
