"""Where a run's numbers go while it runs: `metrics.jsonl` in its folder always, wandb beside it.

The only file that imports wandb, and late: importing this module costs nothing and a run in mode
`disabled` never loads it. wandb holds a copy of what the folder holds, so when wandb fails in the
middle of a run the run goes on, with a warning. Only a run that was asked to be `online` and cannot
even start that way is refused.
"""

import json
import logging
import math
import netrc
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, SupportsFloat, TextIO
from urllib.parse import urlsplit

from feedback import results

MODES = ("offline", "online", "disabled")
STEP = "loop/step"
HOSTED = "api.wandb.ai"  # the name under which `wandb login` keeps a key for the hosted service

log = logging.getLogger(__name__)


class TrackingError(RuntimeError):
    """The run cannot be tracked as asked; the message says what to do instead."""


class Tracker:
    """Takes what a run measures. Made by `track`; every method may be called in every mode.

    `location` says where wandb keeps the run: its URL when online, its folder when offline, None
    when wandb is disabled or could not start.
    """

    def __init__(self, lines: TextIO, run: Any | None) -> None:
        self._lines = lines
        self._run = run
        self._failed: set[str] = set()
        self.location: str | None = None
        if run is not None:
            self.location = str(Path(run.dir).parent) if run.offline else run.url

    def log(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Records the numbers of one loop step; steps may come in any order and more than once.

        Appends one line to `metrics.jsonl`, `{"loop/step": step, name: number, ...}` with null for
        a number that is not finite, and flushes it; wandb gets the same names over `loop/step`.
        """
        numbers = {name: float(value) for name, value in values.items()}
        if STEP in numbers:
            raise ValueError(f"{STEP!r} is the step itself: pass it as step, not among the values")
        finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        self._lines.write(json.dumps({STEP: step, **finite}) + "\n")
        self._lines.flush()
        self._send("the numbers of a step", lambda run: run.log({**numbers, STEP: step}))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Shows a table in wandb. Raises ValueError unless every row has one cell per column."""
        for index, row in enumerate(rows):
            if len(row) != len(columns):
                raise ValueError(f"table {name!r}: row {index} has {len(row)} cells for {len(columns)} columns")

        def send(run: Any) -> None:
            import wandb

            cells = [list(row) for row in rows]
            run.log({name: wandb.Table(list(columns), cells, allow_mixed_types=True)})

        self._send(f"table {name!r}", send)

    def image(self, name: str, path: Path) -> None:
        """Shows a picture file in wandb. Raises FileNotFoundError when there is none at `path`."""
        _require(path)

        def send(run: Any) -> None:
            import wandb

            run.log({name: wandb.Image(str(path))})

        self._send(f"image {name!r}", send)

    def artifact(self, name: str, type: str, path: Path, metadata: Mapping[str, object]) -> None:
        """Registers a file or folder with wandb where it lies; offline, nothing is copied.

        Characters that wandb refuses in a name become `-`. Raises FileNotFoundError when there is
        nothing at `path`, TypeError when `metadata` is not made of plain containers.
        """
        _require(path)
        plain = _plain("metadata", metadata)
        self._send(f"artifact {name!r}", lambda run: run.log_artifact(_artifact(name, type, path, plain)))

    def use(self, name: str, type: str, path: Path) -> None:
        """Says that the run reads the file or folder at `path`.

        What another run registered under this name with the same content is the same artifact, so that wandb
        shows which run made what this one reads; for an offline run once it is synced. Raises FileNotFoundError.
        """

        def send(run: Any) -> None:
            artifact = _artifact(name, type, path, {})
            if run.offline:  # use_artifact refuses; this writes the record that it would have sent
                run._log_artifact(artifact, is_user_created=True, use_after_commit=True)
            else:
                run.use_artifact(artifact)

        _require(path)
        self._send(f"use of artifact {name!r}", send)

    def summary(self, values: Mapping[str, object]) -> None:
        """Sets the run's end results in wandb; `{"ber": {"end": 0.1}}` becomes `ber.end = 0.1`."""
        flat = dict(results.flat(values))
        self._send("the summary", lambda run: run.summary.update(flat))

    def _send(self, what: str, send: Callable[[Any], object]) -> None:
        if self._run is None:
            return
        try:
            send(self._run)
        except Exception as error:  # wandb may fail in any way; the measurement must not
            if what not in self._failed:
                _warn(f"wandb did not take {what}", error)
            self._failed.add(what)

    def _finish(self, exit_code: int) -> None:
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=exit_code)
        except Exception as error:
            _warn("wandb could not close the run", error)
            _forget_service()


def check(mode: str) -> None:
    """Raises TrackingError now, before any model is loaded, if no run in this mode can be opened.

    Asks nothing on a terminal and nothing over the network. `online` needs a key, looked for where
    wandb looks: WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, wandb's settings, the netrc file.
    """
    if mode not in MODES:
        raise TrackingError(f"tracking mode {mode!r} does not exist: use {', '.join(MODES)}")
    if mode == "online" and not _has_key():
        raise TrackingError(
            "tracking mode 'online' needs a wandb key and there is none: run `wandb login`, or set "
            "WANDB_API_KEY, or use mode 'offline' and send the run later with `wandb sync`"
        )


def default_entity() -> str:
    """The account or team that online runs go to: WANDB_ENTITY, or the key's own. Asks the server."""
    import wandb

    entity = os.environ.get("WANDB_ENTITY") or wandb.Api().default_entity
    if not entity:
        raise TrackingError("the wandb key belongs to no account: name one with WANDB_ENTITY")
    return entity


@contextmanager
def track(
    *,
    mode: str,
    folder: Path,
    project: str,
    name: str | None,
    group: str | None,
    job_type: str | None,
    config: Mapping[str, object],
    tags: Sequence[str] = (),
    quiet: bool = True,
) -> Iterator[Tracker]:
    """One run from here to the end of the block: exit code 0, or 1 if anything is raised inside.

    Whatever ends the block (an error, Ctrl-C, `sys.exit`) is raised again unchanged, and stands in
    the run's summary as `error`. `folder` gets `metrics.jsonl` and, unless disabled, `wandb/`.
    Offline opens no connection. `quiet` silences wandb's own output; the warnings of this module go
    to `logging`.

    Raises TrackingError if an online run cannot be opened, and TypeError if `config` holds anything
    but dicts, lists, texts, numbers, bools and None.
    """
    check(mode)
    plain = _plain("config", config)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        lines = stack.enter_context((folder / "metrics.jsonl").open("a", encoding="utf-8"))
        run = None
        if mode != "disabled":
            stack.enter_context(_environment(_variables(mode, folder, quiet)))
            run = _open_run(
                mode,
                quiet,
                dir=str(folder),
                project=project,
                name=name,
                group=group,
                job_type=job_type,
                config=plain,
                tags=list(tags),
            )
        tracker = Tracker(lines, run)
        try:
            yield tracker
        except BaseException as error:
            tracker.summary({"error": f"{type(error).__name__}: {error}"})
            tracker._finish(exit_code=1)
            raise
        tracker._finish(exit_code=0)


def _open_run(mode: Any, quiet: bool, **identity: Any) -> Any | None:
    import wandb

    try:
        settings = wandb.Settings(
            console="off",  # leaves sys.stdout alone
            silent=quiet,
            reinit="create_new",  # never another run that happens to be open in this process
            x_transaction_log_flush_interval=1,  # seconds; by default a SIGKILL costs 15 of them
        )
        with _no_prompt():
            run = wandb.init(mode=mode, settings=settings, **identity)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
    except Exception as error:
        _forget_service()
        if mode == "online":
            raise TrackingError(
                f"wandb could not open an online run: {error or type(error).__name__}. Check key "
                "and network, or use mode 'offline' and send the run later with `wandb sync`"
            ) from error
        _warn("wandb could not open an offline run", error)
        return None
    if not Path(run.dir).resolve().is_relative_to(Path(identity["dir"]).resolve()):
        log.warning("wandb could not write to %s and keeps the run in %s", identity["dir"], run.dir)
    return run


def _warn(what: str, error: Exception) -> None:
    kind = type(error).__name__
    log.warning("%s (%s: %s); metrics.jsonl has every number all the same", what, kind, error)


def _forget_service() -> None:
    """A dead wandb service would fail the next job of a sweep too; now that job starts its own."""
    with suppress(Exception):
        sys.modules["wandb"].teardown(exit_code=1)


def _variables(mode: str, folder: Path, quiet: bool) -> dict[str, str]:
    """What wandb reads while it is imported, when its service starts, and while it logs."""
    given = os.environ
    reporting = given.get("WANDB_ERROR_REPORTING", "false") if mode == "online" else "false"
    staging = given.get("WANDB_DATA_DIR") or str(folder.resolve() / "wandb" / "staging")
    return {
        # wandb reports its own errors to its makers over the network, from offline runs too
        "WANDB_ERROR_REPORTING": reporting,
        # files that wait for `wandb sync` belong to the run, not to the home folder
        "WANDB_DATA_DIR": staging,
        # what it prints outside of a run, such as where it found the key
        "WANDB_SILENT": "true" if quiet else given.get("WANDB_SILENT", "false"),
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextmanager
def _no_prompt() -> Iterator[None]:
    """Without a terminal to read from, wandb raises where it would ask and wait."""
    stdin = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = stdin


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    with _environment(_variables("online", Path(), quiet=True)):
        import wandb

        settings = wandb.setup().settings
    if settings.api_key or settings.identity_token_file:
        return True
    hosts = (urlsplit(settings.base_url).netloc, HOSTED)
    stated = os.environ.get("NETRC")
    for place in [stated] if stated else ["~/.netrc", "~/_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            known = netrc.netrc(Path(place).expanduser())
            if any((known.authenticators(host) or ("", "", ""))[2] for host in hosts):
                return True
    return False


def _artifact(name: str, type: str, path: Path, metadata: Mapping[str, object]) -> Any:
    import wandb

    allowed = re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)
    artifact = wandb.Artifact(allowed, type, metadata=dict(metadata))
    add = artifact.add_dir if path.is_dir() else artifact.add_file
    add(str(path), policy="immutable", skip_cache=True)
    return artifact


def _require(path: Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"nothing to track at {path}")


def _plain(where: str, value: object) -> Any:
    """A copy of plain containers, which neither wandb nor a later change of the config touches."""
    if isinstance(value, dict):
        return {str(key): _plain(f"{where}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{index}]", item) for index, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(
        f"{where} is a {type(value).__name__}, which wandb would keep as text: pass plain "
        "containers, from Hydra with OmegaConf.to_container(cfg, resolve=True)"
    )
