"""A sweep's jobs: checked before the first begins, left alone when they are finished, told apart when they failed.

Hydra's launchers run the jobs, in this process or in others; what they share is the sweep's folder.
"""

import contextlib
import functools
import importlib
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from filelock import FileLock, Timeout
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from conf.schema import Config, plain

ATTEMPTS = "attempts"  # what earlier attempts at a job left
LOCK = ".lock"  # of a sweep's folder and of each of its jobs', for as long as somebody runs it
LEFT = ("result.json", "metrics.jsonl", "table.csv")  # one of them is in every folder that a run has been in
LAUNCHER = "FEEDBACK_LAUNCHER"  # its process, told to the workers that it starts on this machine
BASIC = f"{BasicSweeper.__module__}.{BasicSweeper.__name__}"


def folder(kind: str, name: str, resume: str | None) -> str:
    """Where a run or a sweep goes: what is resumed, or a new folder; two that start in one second get two."""
    new = f"{kind}/{name}/{time.strftime('%Y-%m-%d')}/{time.strftime('%H-%M-%S')}-{secrets.token_hex(3)}"
    return os.path.abspath(resume or new)


OmegaConf.register_new_resolver("folder", folder, use_cache=True, replace=True)


class Taken(ValueError):
    """The folder holds what this run must leave as it is."""


class Sweep(Callback):
    """Before a sweep starts: takes its folder, and composes and checks every job."""

    here: Path | None = None  # of the sweep that this process launches
    jobs: int | None = None  # how many, where that is known beforehand
    _lock: FileLock | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """SystemExit where a job cannot run: of anything less Hydra makes a warning."""
        where = Path(os.path.abspath(config.hydra.sweep.dir))
        try:
            if config.resume is not None and not where.is_dir():
                raise ValueError(f"resume={config.resume}: there is no such folder; expected that of a sweep")
            where.mkdir(parents=True, exist_ok=True)
            Sweep._lock = FileLock(where / LOCK)
            Sweep._lock.acquire(timeout=0)
            refused = _refusals(config, where)
            if refused and not any(path.name != LOCK for path in where.iterdir()):
                shutil.rmtree(where)
        except Timeout:
            refused = [f"another process runs the sweep in {where}"]
        except (OSError, ValueError) as error:
            refused = [str(error)]
        if refused:
            print(*(f"error: {line}" for line in refused), sep="\n", file=sys.stderr)
            sys.exit(2)
        Sweep.here = where
        code = str(Path(__file__).parent.parent)  # what launches is what runs, installed or not
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [code, os.environ.get("PYTHONPATH")]))
        os.environ[LAUNCHER] = str(os.getpid())
        quoted = QuotedString(str(where), Quote.single)
        with read_write(config), open_dict(config):  # jobs of another experiment go to the same folder
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted.with_quotes()}")


def _refusals(config: DictConfig, where: Path) -> list[str]:
    """A line for every job that cannot run, or in whose place other settings' result is."""
    if config.hydra.sweeper._target_ != BASIC:
        return []  # its jobs are not known beforehand
    loader = GlobalHydra.instance().config_loader()
    given = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parsed = OverridesParser.create(loader).parse_overrides([*given, *config.hydra.overrides.task])
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    Sweep.jobs = len(jobs)
    launcher = config.hydra.launcher
    here = kind(launcher) != "SlurmLauncher" and OmegaConf.select(launcher, "ray.init.address") is None
    lines = []
    for number, overrides in enumerate(jobs):
        try:
            composed = loader.load_sweep_config(config, overrides)
            with read_write(composed), open_dict(composed):
                del composed["hydra"]
            job = OmegaConf.to_object(composed)
            assert isinstance(job, Config)
            check(job, here=here)
            finished(where / str(number), job)
        except Exception as error:
            lines.append(f"job {number} ({' '.join(overrides)}): {error}")
    return lines


def kind(launcher: DictConfig) -> str:
    name: str = launcher._target_
    return name.rpartition(".")[2]


def check(config: Config, *, here: bool = True) -> Any:
    """Refuses what cannot run before any model is loaded: ValueError, TrackingError. Returns the experiment. here: it
    runs on this machine, so that a device that is missing is a reason, too."""
    from conf import build
    from feedback import models, tracking

    experiment = importlib.import_module(f"experiments.{config.name}")
    tracking.check(config.tracking.mode)
    build.check(config)
    experiment.check(config, models.describe(build.model_spec(config), here=here))
    return experiment


def finished(where: Path, config: Config) -> dict[str, Any] | None:
    """The finished record that a resumed run or job finds in its place. Taken for one of other settings."""
    from feedback import report, results

    if config.resume is None:
        return None
    try:
        record = results.read_result(where)
    except (FileNotFoundError, ValueError):
        return None
    if record.get("status") != "finished":
        return None
    ours = results.plain(plain(config))
    theirs = record["config"]
    other = [key for key in {**ours, **theirs} if key not in report.NO_NUMBER and ours.get(key) != theirs.get(key)]
    if other:
        raise Taken(
            f"{where} holds a finished result with another {', '.join(other)}; resume={config.resume} goes with the "
            "command that was interrupted"
        )
    return record


def clear(where: Path, config: Config, log: str) -> None:
    """Moves what an earlier attempt left out of the way of this one; but for what its experiment goes on with, if it is
    resumed. Taken where no run has been."""
    keep = () if config.resume is None else continues(config)
    there = [path for path in where.iterdir() if path.name not in (".hydra", ATTEMPTS, LOCK, log)]
    if there and not any(path.name in LEFT for path in there):
        sweep = " It is a sweep's: resume that with -m." if (where / "multirun.yaml").is_file() else ""
        raise Taken(
            f"{where} holds {', '.join(sorted(path.name for path in there)[:3])}…, which no run has left: expected a "
            f"new folder, or one of a run before.{sweep}"
        )
    left = [path for path in there if path.name not in keep]
    if left:
        number = 1
        while (where / ATTEMPTS / str(number)).exists():
            number += 1
        (where / ATTEMPTS / str(number)).mkdir(parents=True)
        for path in left:
            shutil.move(path, where / ATTEMPTS / str(number) / path.name)


def continues(config: Config) -> tuple[str, ...]:
    """The files of an interrupted run that a resumed one goes on with."""
    experiment = importlib.import_module(f"experiments.{config.name}")
    names: tuple[str, ...] = getattr(experiment, "CONTINUES", ())
    return names


@contextlib.contextmanager
def alone(where: Path, resume: str | None) -> Iterator[None]:
    """Holds the folder of one run. Taken while another process does, or where there is no run to resume."""
    if resume is not None and not any((where / name).exists() for name in LEFT):
        raise Taken(f"resume={resume}: no run has been there; expected the folder of one")
    try:
        with FileLock(where / LOCK, timeout=0):
            yield
    except Timeout:
        raise Taken(f"another process runs in {where}; wait for it, or stop it") from None


def set_threads(given: int | None, launcher: DictConfig) -> None:
    """PyTorch's threads in this process: as given, or what the launcher reserves for a job, or a job's share of the
    cores. One where jobs run at once and nothing is known of how many; with the basic launcher all, whatever the job
    before had."""
    import torch

    everything = _threads_at_first()
    if given is None and kind(launcher) == "JoblibLauncher":
        cores = len(os.sched_getaffinity(0))
        given = max(1, cores // launcher.n_jobs) if launcher.n_jobs > 0 else 1
    elif given is None and kind(launcher) != "BasicLauncher":
        reserved = (OmegaConf.select(launcher, name) for name in ("cpus_per_task", "ray.remote.num_cpus"))
        given = int(next((number for number in reserved if number), 1))
    torch.set_num_threads(everything if given is None else given)


@functools.cache  # before the first job of the process
def _threads_at_first() -> int:
    import torch

    return torch.get_num_threads()


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C would, with exit status 143."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def follow(launcher: DictConfig) -> None:
    """Ends this process, a worker on the launcher's machine, soon after the launcher is gone."""
    launched_by = int(os.environ.get(LAUNCHER, os.getpid()))
    if kind(launcher) in ("JoblibLauncher", "LocalLauncher") and launched_by != os.getpid():
        _end_with(launched_by)


@functools.cache  # a worker runs many jobs
def _end_with(process: int) -> None:
    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(process, 0)  # asks whether it is there
                time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)  # the job that runs ends as failed
        time.sleep(20)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def tell(*words: object, file: TextIO | None = None) -> None:
    """Prints, where somebody still reads it."""
    with contextlib.suppress(BrokenPipeError):
        print(*words, file=file, flush=True)


def objective(record: dict[str, Any], name: str | None) -> float | None:
    """The number of the summary that ``objective`` names, by its dotted name. SystemExit where there is none."""
    from feedback import results

    if name is None:
        return None
    value = dict(results.flat(record["summary"])).get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        print(
            f"error: objective={name} is no number of the summary, which has {', '.join(record['summary'])}",
            file=sys.stderr,
        )
        sys.exit(2)
    return float(value)


def close(wait: bool) -> int:
    """Ends the sweep of this process, if it ran one: writes the report, names every job that failed. Returns the exit
    status. wait: for the jobs that run on after the launcher ended, as submitit's does when one of its jobs is killed.
    """
    from feedback import report

    where = Sweep.here
    if where is None:
        return 0
    for lock in where.glob(f"[0-9]*/{LOCK}") if wait else ():
        with FileLock(lock):
            pass
    try:
        jobs = report.jobs(where)
    except FileNotFoundError:  # not one began
        return 1
    settings = report.differing([job.overrides for job in jobs])
    for job in jobs:
        if job.status == "failed":
            own = " ".join(f"{name}={job.overrides[name]}" for name in settings if name in job.overrides)
            tell(f"job {job.number} ({own}) failed: {job.error}", file=sys.stderr)
    done = sum(job.status == "finished" for job in jobs)
    count = max(Sweep.jobs or 0, len(jobs))
    try:
        page = report.write(where, jobs)
    except OSError as error:
        tell(f"error: cannot write the report: {error}", file=sys.stderr)
        return 1
    tell(f"{done} of {count} jobs finished: {page}")
    if done < count:
        tell(f"for the others, the same command with resume={where}", file=sys.stderr)
    return int(done < count)
