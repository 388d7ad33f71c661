"""How far is a run? One bar on a terminal, a plain line every few seconds where there is none, nothing when quiet."""

import sys
from typing import Any

from tqdm import tqdm

PLAIN_SECONDS = 10.0  # between two plain lines


class Bar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar that knows the loop: ``turn`` takes the rows of one step."""

    steps = 0

    def turn(self, rows: int) -> None:
        """One step of the loop by so many rows: shows both, and counts row-steps. For ``loop.run(progress=…)``."""
        self.steps += 1
        self.set_postfix_str(f"step {self.steps}, {rows} rows", refresh=False)
        self.update(rows)

    def stage(self, name: str) -> None:
        """What comes now; its steps are counted from 1."""
        self.steps = 0
        self.set_description(name)


class _Lines(Bar):
    """The bar's text as lines of their own, for what is no terminal."""

    def set_description(self, desc: str | None = None, refresh: bool | None = False) -> None:
        super().set_description(desc, refresh)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        text = str(self) if msg is None else msg
        if text:
            print(text, file=sys.stderr, flush=True)
        return True

    def moveto(self, n: int) -> None:
        """There is one bar."""


def bar(quiet: bool, *arguments: Any, **options: Any) -> Bar:
    """A bar with tqdm's arguments (``total``, ``unit``, …) on stderr; it leaves nothing behind on a terminal."""
    if sys.stderr.isatty():
        return Bar(*arguments, disable=quiet, leave=False, **options)
    often = {"mininterval": PLAIN_SECONDS, "maxinterval": PLAIN_SECONDS, "delay": PLAIN_SECONDS}
    return _Lines(*arguments, disable=quiet, leave=False, ascii=True, **often, **options)
