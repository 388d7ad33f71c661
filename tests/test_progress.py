"""The bar: what it counts, and what it prints where there is no terminal."""

import io
import sys

import pytest

from feedback import progress


def lines(monkeypatch, quiet: bool) -> list[str]:
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    with progress.bar(quiet, total=12, unit="row-step", file=told) as bar:
        bar.stage("first")
        bar.turn(3)
        bar.turn(3)
        bar.stage("second")
        bar.turn(6)
        assert (bar.n, bar.steps) == ((0, 1) if quiet else (12, 1))
    return told.getvalue().splitlines()


def test_without_a_terminal_every_state_is_a_plain_line_with_step_and_rows(monkeypatch):
    told = lines(monkeypatch, quiet=False)
    assert all("\r" not in line and "\x1b" not in line for line in told)
    assert any(line.startswith("first:") and "6/12" in line and "step 2, 3 rows" in line for line in told)
    assert any(line.startswith("second:") and "12/12" in line and "step 1, 6 rows" in line for line in told)


def test_quiet_prints_nothing(monkeypatch):
    assert lines(monkeypatch, quiet=True) == []


@pytest.mark.parametrize(("terminal", "kind"), [(True, progress.Bar), (False, progress._Lines)])
def test_only_a_terminal_gets_a_bar_that_goes_back(terminal, kind, monkeypatch):
    told = io.StringIO()
    told.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", told)
    with progress.bar(False, total=1, file=told) as bar:
        assert type(bar) is kind
