"""The cut of the library: imports point one way, and the heavy ones stay where they belong."""

import ast
from pathlib import Path

import pytest

import feedback

LIBRARY = Path(feedback.__file__).parent
ROOT = LIBRARY.parent


def imported(path: Path) -> set[str]:
    """The modules that a file imports, ours by their full name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(path) if name.startswith("feedback.")}


@pytest.mark.parametrize("name", ["metrics", "maps", "programs", "logic"])
def test_these_take_plain_tensors_and_import_nothing_of_ours(name):
    assert not ours(LIBRARY / f"{name}.py")


def test_the_library_never_imports_hydra_the_experiments_or_the_configuration():
    for path in LIBRARY.glob("*.py"):
        heads = {name.split(".")[0] for name in imported(path)}
        assert not heads & {"hydra", "omegaconf", "experiments", "conf", "run"}, path.name


def test_wandb_is_imported_in_tracking_only():
    for path in [*LIBRARY.glob("*.py"), *(ROOT / "experiments").glob("*.py"), ROOT / "run.py"]:
        heads = {name.split(".")[0] for name in imported(path)}
        assert ("wandb" in heads) == (path.name == "tracking.py"), path.name


def test_no_experiment_imports_another():
    for path in (ROOT / "experiments").glob("*.py"):
        assert not {name for name in imported(path) if name.startswith("experiments")}, path.name


def test_imports_have_no_cycles():
    uses = {path.stem: {n for n in ours(path) if (LIBRARY / f"{n}.py").exists()} for path in LIBRARY.glob("*.py")}
    done: set[str] = set()
    while len(done) < len(uses):
        ready = {name for name in uses if name not in done and uses[name] <= done}
        assert ready, f"a cycle among {sorted(set(uses) - done)}"
        done |= ready
