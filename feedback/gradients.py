"""What does the loss feel at a site, and what if it felt something else? Full backward hooks.

    hidden = inputs.requires_grad_()
    with gradients.read(model.module, Site(15)) as seen:
        loss(model.module(inputs_embeds=hidden)).backward()
    seen.wrt_output                                        # (row, position, d_model)

A forward-only loop never triggers them. Gradients with respect to a module's output cannot be replaced, those with
respect to its input can.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from feedback.hooks import Hook, HookError, attached, located
from feedback.sites import ResolvedSite, Site

Gradient = Tensor | None


class Gradients(Hook):
    """What the latest backward pass said at a module; ``fired`` counts the passes.

    ``wrt_output``: with respect to what the module passed on, forward hooks included. ``wrt_input``: with respect to
    the hidden state it was called with, pre-hooks included, after a replacement.
    """

    def __init__(self, site: ResolvedSite, change: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(site)
        self.change = change
        self._wrt_input: Gradient = None
        self._wrt_output: Gradient = None

    def __call__(self, module: nn.Module, to_inputs: Any, to_outputs: Any) -> Any:  # type: ignore[override]
        """Called with tuples of gradients, None where there is none (PyTorch's annotations know neither)."""
        self.fired += 1
        self._wrt_input = to_inputs[0] if to_inputs else None
        self._wrt_output = to_outputs[0]
        if self.change is None:
            return None
        changed = self._wrt_input = self.change(self.wrt_input)
        if changed.shape != to_inputs[0].shape:
            raise HookError(
                f"the gradient at {self.site.name} was replaced by one of shape {tuple(changed.shape)}; expected "
                f"{tuple(to_inputs[0].shape)}"
            )
        return (changed, *to_inputs[1:])

    def register(self) -> None:
        self.site.module.register_full_backward_hook(self)

    @property
    def wrt_input(self) -> Tensor:
        """(row, position, d_model). HookError when there is none, and why."""
        self._refuse_unfired()
        if self._wrt_input is None:
            raise HookError(
                f"no gradient reached the input of {self.site.name}: PyTorch passes on those of positional inputs "
                "that need one. Feed inputs_embeds with requires_grad, or choose a module that gets its hidden state "
                "by position (a block does, its attention often does not)"
            )
        return self._wrt_input

    @property
    def wrt_output(self) -> Tensor:
        """(row, position, d_model). HookError when there is none, and why."""
        self._refuse_unfired()
        if self._wrt_output is None:
            raise HookError(f"the loss does not depend on the hidden state that {self.site.name} passes on")
        return self._wrt_output

    def _refuse_unfired(self) -> None:
        if not self.fired:
            raise HookError(
                f"no backward pass came through {self.site.name}: call .backward() inside the `with` block, on "
                "something that depends on it (a forward-only loop triggers no backward hooks; "
                "loop.run(differentiable=True) can)"
            )


@contextmanager
def read(module: nn.Module, site: Site) -> Iterator[Gradients]:
    """Reads the gradients at the module of ``site`` in every backward pass, and changes none."""
    hook = Gradients(located(module, site))
    with attached(hook):
        yield hook


@contextmanager
def replace(module: nn.Module, site: Site, change: Callable[[Tensor], Tensor]) -> Iterator[Gradients]:
    """Sends ``change(gradient)``, (row, position, d_model) both, back in place of the gradient with respect to the
    module's input."""
    hook = Gradients(located(module, site), change)
    with attached(hook):
        yield hook
