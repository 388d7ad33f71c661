import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import feedback
from feedback import results

ROWS = [
    {"arm": "text only, λ=0", "word": "0110", "step": 0, "ber": 0.1, "soft": True, "low": None},
    {"arm": 'says "bird"\n', "word": "1000", "step": 1, "ber": 1 / 3, "soft": False, "low": 0.25},
    {"arm": "a\rb", "word": "0011", "step": 2, "ber": 1e-17, "soft": True, "low": 3},
]


def test_a_table_reads_back_with_numbers_bools_and_texts_as_they_were(tmp_path: Path) -> None:
    path = results.write_table(tmp_path / "table.csv", ROWS)
    read = results.read_table(path)
    assert read == ROWS
    assert [[type(cell) for cell in row.values()] for row in read] == [
        [type(cell) for cell in row.values()] for row in ROWS
    ]


def test_words_of_bits_with_leading_zeros_stay_text(tmp_path: Path) -> None:
    rows = [{"word": "0110"}, {"word": "1"}, {"word": "10"}]  # "0110" is no number as written here
    read = results.read_table(results.write_table(tmp_path / "table.csv", rows))
    assert [row["word"] for row in read] == ["0110", "1", "10"]


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    one = results.write_table(tmp_path / "one.csv", ROWS)
    two = results.write_table(tmp_path / "two.csv", [dict(row) for row in ROWS])
    again = results.write_table(tmp_path / "again.csv", results.read_table(one))
    assert one.read_bytes() == two.read_bytes() == again.read_bytes()


def test_columns_stand_in_the_order_of_their_first_appearance(tmp_path: Path) -> None:
    rows = [{"step": 0, "ber": 0.5}, {"alpha": 2.0, "step": 1}, {"ber": 0.25, "alpha": 0.0}]
    path = results.write_table(tmp_path / "table.csv", rows)
    assert path.read_text() == 'step,ber,alpha\n0,0.5,""\n1,"",2.0\n"",0.25,0.0\n'


def test_scalars_of_torch_and_numpy_are_written_at_their_own_value(tmp_path: Path) -> None:
    third = torch.tensor(1 / 3)  # float32: 0.3333333432674408
    rows = [{"a": third, "b": np.float32(0.1), "c": np.int64(3), "d": np.bool_(True)}]
    (read,) = results.read_table(results.write_table(tmp_path / "table.csv", rows))
    assert read == {"a": 0.3333333432674408, "b": 0.10000000149011612, "c": 3, "d": True}


def test_not_a_number_and_infinity_survive_in_a_table(tmp_path: Path) -> None:
    rows = [{"x": float("nan")}, {"x": float("inf")}, {"x": -2.5}]
    nan, inf, number = (row["x"] for row in results.read_table(results.write_table(tmp_path / "t.csv", rows)))
    assert isinstance(nan, float) and nan != nan
    assert (inf, number) == (float("inf"), -2.5)


def test_an_empty_table_and_a_table_of_nothing_read_back(tmp_path: Path) -> None:
    assert results.read_table(results.write_table(tmp_path / "empty.csv", [])) == []
    rows = [{"x": None}, {"x": None}]
    assert results.read_table(results.write_table(tmp_path / "none.csv", rows)) == rows


def test_a_cell_that_is_no_scalar_is_refused_by_column_and_type(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="column 'ber' holds a list"):
        results.write_table(tmp_path / "t.csv", [{"ber": torch.tensor([0.1, 0.2])}])
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Info:
    name: str
    scale: float


def test_a_record_becomes_strict_json(tmp_path: Path) -> None:
    record: dict[str, object] = {
        "nan": float("nan"),
        "inf": [1.0, float("-inf")],
        "info": Info("tiny", float("nan")),
        "path": tmp_path,
        "tensor": torch.tensor([[1.0, float("nan")], [0.5, 2.0]]),
        "numpy": np.float64(0.1),
        "blocks": {7: (True, None)},
        "text": "α·v ↵",
    }
    path = results.write_result(tmp_path, record)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse) == {
        "nan": None,
        "inf": [1.0, None],
        "info": {"name": "tiny", "scale": None},
        "path": str(tmp_path),
        "tensor": [[1.0, None], [0.5, 2.0]],
        "numpy": 0.1,
        "blocks": {"7": [True, None]},
        "text": "α·v ↵",
    }
    assert results.read_result(tmp_path) == json.loads(path.read_text(encoding="utf-8"))


def test_what_no_json_can_hold_is_refused_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"record\.audit\[1\]\.hook is a function"):
        results.write_result(
            tmp_path,
            {"audit": [{}, {"hook": test_an_empty_table_and_a_table_of_nothing_read_back}]},
        )
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_result_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results.write_result(tmp_path, {"status": "first"})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        results.write_result(tmp_path, {"status": "second"})
    assert results.read_result(tmp_path) == {"status": "first"}
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_result_is_replaced_whole_and_never_written_in_place(tmp_path: Path) -> None:
    results.write_result(tmp_path, {"status": "first"})
    with (tmp_path / "result.json").open() as reading:
        results.write_result(tmp_path, {"status": "second"})
        assert json.load(reading) == {"status": "first"}
    assert results.read_result(tmp_path) == {"status": "second"}


def test_half_a_character_does_not_cost_the_result(tmp_path: Path) -> None:
    results.write_result(tmp_path, {"token": "\udc80"})
    assert results.read_result(tmp_path) == {"token": "\udc80"}  # JSON has a way to write it
    path = results.write_table(tmp_path / "table.csv", [{"token": "\udc80"}])
    assert results.read_table(path) == [{"token": "\\udc80"}]


def test_a_folder_without_a_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no finished run in"):
        results.read_result(tmp_path / "elsewhere")


def test_versions_name_every_package_and_unknown_ones_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(name: str) -> str:
        if name == "wandb":
            raise results.metadata.PackageNotFoundError(name)
        return f"{name} 1"

    monkeypatch.setattr(results.metadata, "version", unknown)
    found = results.versions()
    assert list(found) == [
        "feedback", "python", "torch", "transformers", "wandb", "numpy", "hydra", "commit"
    ]  # fmt: skip
    assert (found["torch"], found["hydra"]) == ("torch 1", "hydra-core 1")
    assert found["feedback"] == feedback.__version__
    assert found["wandb"] is None


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_repository_that_tracks_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # set when a git hook runs the tests
    for name in ("mine.py", "foreign.py"):
        (tmp_path / name).write_text("1\n")
    assert results._commit(tmp_path / "mine.py") is None  # no repository
    git(tmp_path, "init", "-q")
    assert results._commit(tmp_path / "mine.py") is None  # not tracked
    git(tmp_path, "add", "mine.py")
    assert results._commit(tmp_path / "mine.py") is None  # no commit yet
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert results._commit(tmp_path / "mine.py") == head
    assert results._commit(tmp_path / "foreign.py") is None  # an environment inside a repository
    (tmp_path / "mine.py").write_text("2\n")
    assert results._commit(tmp_path / "mine.py") == f"{head}-dirty"


def test_without_git_there_is_no_commit_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert results.versions()["commit"] is None


def test_importing_results_loads_neither_wandb_nor_hydra_nor_torch() -> None:
    code = (
        "import sys; from feedback import results;"
        "print(sorted({'wandb', 'hydra', 'torch', 'matplotlib'} & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_other_csv_readers_see_the_same_cells(tmp_path: Path) -> None:
    path = results.write_table(tmp_path / "table.csv", ROWS)
    with path.open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["arm"] for row in read] == [row["arm"] for row in ROWS]
