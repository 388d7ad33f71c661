"""What is left of a run: one tidy table, a summary, figures, and the record of how they came about.

    write_table(folder / "table.csv", result.table)        # a row per condition and step
    write_result(folder, {"summary": result.summary, "versions": versions(), ...})
    read_table(folder / "table.csv") == result.table       # later, without model, Hydra or wandb

Files are replaced whole or not at all, so that a run killed while writing leaves the old file or
the new one. The same input gives the same bytes.
"""

import csv
import dataclasses
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from feedback import __version__

Cell = str | int | float | bool | None

RESULT = "result.json"


@dataclass(frozen=True)
class Result:
    """What an experiment returns.

    `table` has a row per condition and step; `summary` is small and may be nested; `figures` maps a
    name to the file written; `record` is whatever else belongs in `result.json` (receipts, audit,
    checksums), made of anything that `plain` takes.
    """

    table: list[dict[str, Any]]
    summary: dict[str, Any]
    figures: dict[str, Path] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)


def plain(value: Any, where: str = "record") -> Any:
    """`value` as strict JSON can hold it: dict, list, str, int, float, bool or None.

    Numbers that are not finite become None; dataclasses become dicts; paths become text; tensors
    and arrays become nested lists. Raises TypeError, naming the place, for anything else.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in dataclasses.fields(value)]
        return {name: plain(getattr(value, name), f"{where}.{name}") for name in names}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):  # a tensor, an array, a numpy scalar
        return plain(value.tolist(), where)
    raise TypeError(f"{where} is a {type(value).__name__}, which a result file cannot hold")


def flat(value: Any, name: str = "", lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Dotted names, and the values that they lead to; with `lists`, into lists too, by their places."""
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list) and lists:
        parts = enumerate(value)
    else:
        yield name, value
        return
    for key, part in parts:
        yield from flat(part, f"{name}.{key}" if name else str(key), lists)


def write_result(folder: Path, record: Mapping[str, Any]) -> Path:
    """Writes `folder/result.json`, strict JSON with keys in the order given; returns its path."""
    text = json.dumps(plain(record), indent=2, ensure_ascii=False, allow_nan=False)
    return replace_file(folder / RESULT, text + "\n")


def read_result(folder: Path) -> dict[str, Any]:
    """The record of a finished run. Raises FileNotFoundError, saying where it looked."""
    path = folder / RESULT
    if not path.is_file():
        raise FileNotFoundError(f"no finished run in {folder}: {path} does not exist")
    return json.loads(path.read_text(encoding="utf-8"))


def write_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes rows as CSV; columns stand in the order in which they first appear in any row.

    Floats are written so that they read back as the same number; a missing cell and None are empty.
    Raises TypeError for a cell that is not a text, a number, a bool or None.
    """
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([_cell(row.get(name), name) for name in columns] for row in rows)]
    text = "".join(",".join(map(_quoted, line)) + "\n" for line in lines) if columns else ""
    return replace_file(path, text)


def read_table(path: Path) -> list[dict[str, Cell]]:
    """The rows of a table with numbers, bools and None restored, column by column.

    A column is numbers only if every cell is exactly how `write_table` writes a number, so message
    words such as "0110" stay text. An empty text reads back as None.
    """
    with path.open(encoding="utf-8", newline="") as file:
        columns, *lines = list(csv.reader(file)) or [[]]
    restored = [_restored([line[index] for line in lines]) for index in range(len(columns))]
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*restored, strict=True)]


def versions() -> dict[str, str | None]:
    """The versions a result depends on, and the commit of this library; None for what is unknown.

    Nothing is imported to find out. A commit whose files have changed since ends in `-dirty`.
    """
    packages = {name: name for name in ("torch", "transformers", "wandb", "numpy")}
    packages["hydra"] = "hydra-core"
    found: dict[str, str | None] = {"feedback": __version__, "python": platform.python_version()}
    for name, package in packages.items():
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["commit"] = _commit(Path(__file__).resolve())
    return found


def _commit(file: Path) -> str | None:
    """The commit of the repository that tracks `file`, not of one that merely surrounds it."""
    git = ["git", "-C", str(file.parent)]
    tracked = [*git, "ls-files", "--error-unmatch", file.name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, check=True, timeout=10)
        done = subprocess.run(describe, capture_output=True, check=True, timeout=10, text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _cell(value: Any, column: str) -> str:
    if hasattr(value, "tolist"):  # a numpy scalar, a tensor with one element
        value = value.tolist()
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str | int):
        return str(value)
    raise TypeError(
        f"column {column!r} holds a {type(value).__name__}: a table cell is a text, a number, a bool or None"
    )


def _quoted(cell: str) -> str:
    # Not csv.writer: ending lines in "\n" it leaves a lone "\r" unquoted, and reading breaks there.
    if cell == "" or any(mark in cell for mark in ',"\r\n'):
        return '"' + cell.replace('"', '""') + '"'
    return cell


def _restored(cells: list[str]) -> list[Cell]:
    restore: Callable[[str], Cell]
    for restore in ({"True": True, "False": False}.get, _number):
        values = {cell: restore(cell) for cell in cells if cell}
        if None not in values.values():
            return [values.get(cell) for cell in cells]
    return [cell or None for cell in cells]


def _number(cell: str) -> int | float | None:
    for kind in (int, float):
        with suppress(ValueError):
            if repr(kind(cell)) == cell:
                return kind(cell)
    return None


def replace_file(path: Path, text: str) -> Path:
    """Writes `text` as UTF-8, whole or not at all; makes the folders on the way; returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            # half of a token's bytes may decode to a lone surrogate; that must not cost the result
            file.write(text.encode("utf-8", errors="backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path
