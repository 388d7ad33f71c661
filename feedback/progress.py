"""How far is a run? One bar on a terminal, a plain line every few seconds where there is none, nothing when quiet."""

import sys
from typing import Any

from tqdm import tqdm

PLAIN_SECONDS = 10.0  # between two plain lines


class Bar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar that knows the loop: ``turn`` takes the rows of one step. On no terminal its text is lines."""

    plain = False
    steps = 0

    def turn(self, rows: int) -> None:
        """One step of the loop by so many rows: shows both, and counts row-steps. For ``loop.run(progress=…)``."""
        self.steps += 1
        self.set_postfix_str(f"step {self.steps}, {rows} rows", refresh=False)
        self.update(rows)

    def stage(self, name: str) -> None:
        """What comes now; its steps are counted from 1."""
        self.steps = 0
        self.set_description(name, refresh=not self.plain)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        if not self.plain:
            return super().display(msg, pos)
        text = str(self) if msg is None else msg
        if text:
            print(text, file=sys.stderr, flush=True)
        return True

    def moveto(self, n: int) -> None:
        if not self.plain:
            super().moveto(n)


def bar(quiet: bool, *arguments: Any, **options: Any) -> Bar:
    """A bar with tqdm's arguments (``total``, ``unit``, …) on stderr; it leaves nothing behind on a terminal."""
    if sys.stderr.isatty():
        return Bar(*arguments, disable=quiet, leave=False, **options)
    kind = type("Lines", (Bar,), {"plain": True})
    often = {"mininterval": PLAIN_SECONDS, "maxinterval": PLAIN_SECONDS, "ascii": True, "delay": PLAIN_SECONDS}
    made: Bar = kind(*arguments, disable=quiet, leave=False, **often, **options)
    return made
