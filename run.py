"""Compose the config, check it, open the run, call the experiment, print its table, close the run."""

import contextlib
import logging
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf import sweeps
from conf.schema import Config, plain, register

register()


def main(config: Config, folder: Path, group: str | None) -> dict[str, Any]:
    """Runs one job into ``folder`` and returns its record. Everything heavy is imported here, so that a misspelt key
    answers at once. group: the sweep that it is a job of, if any."""
    import torch
    from rich.console import Console

    from conf import build
    from feedback import models, results, tracking

    started = time.perf_counter()
    settings = plain(config)
    tracked: dict[str, Any] = {
        "mode": config.tracking.mode,
        "folder": folder,
        "project": config.tracking.project,
        "name": config.tracking.name,
        "group": group,
        "job_type": config.name,
        "config": settings,
        "tags": config.tracking.tags,
    }
    try:
        experiment = sweeps.check(config)
        torch.manual_seed(config.seed)  # nothing in the library draws from the global generator; foreign code might
        model = models.shared(build.model_spec(config))
    except Exception:
        if group is None:
            raise
        with tracking.track(**tracked):  # every job of a sweep is a run in wandb, a refused one a failed run
            raise
    with tracking.track(**tracked) as tracker:
        for kind, path in build.files(config).items():
            tracker.use(kind, kind, path)
        result = experiment.run(config, model, tracker, folder)
        record = {
            "status": "finished",
            "experiment": config.name,
            "summary": result.summary,
            **result.record,
            "weights_unchanged": models.checksum(model.module) == model.info.checksum,
            "model": model.info,
            "seed": config.seed,
            "versions": results.versions(),
            "config": settings,
            "wall_seconds": round(time.perf_counter() - started, 2),
        }
        results.write_table(folder / "table.csv", result.table)
        results.write_result(folder, record)
        columns = list(result.table[0]) if result.table else []
        tracker.table("table", columns, [[row.get(c) for c in columns] for row in result.table])
        for name, path in result.figures.items():
            tracker.image(f"figures/{name}", path)
        tracker.summary(result.summary)
    if not record["weights_unchanged"]:
        models.shared.cache_clear()
    if group is None:
        width = None if sys.stdout.isatty() else 140
        console = Console(width=width, soft_wrap=width is not None)
        console.print(experiment.show(result))
        console.print(f"{folder}  ({record['wall_seconds']:.0f} s)", highlight=False)
    return record


def fail(folder: Path, config: Config, error: BaseException) -> None:
    """Leaves the error where the result would have been. A finished result stays, and so does a folder that is not
    this run's."""
    from feedback import results

    with contextlib.suppress(FileNotFoundError, ValueError):
        if isinstance(error, sweeps.Taken) or results.read_result(folder)["status"] == "finished":
            return
    record = {
        "status": "failed",
        "experiment": config.name,
        "error": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "config": plain(config),
    }
    try:
        results.write_result(folder, record)
    except OSError as second:
        print(f"error: cannot write {folder}/result.json: {second}", file=sys.stderr)


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def job(settings: DictConfig) -> float | None:
    """One run, or one job of a sweep: a sweep's other jobs go on when this one fails. Returns the objective."""
    hydra_config = HydraConfig.get()
    sweeping = hydra_config.mode == RunMode.MULTIRUN
    folder = Path(hydra_config.runtime.output_dir)
    group = Path(hydra_config.sweep.dir).name if sweeping else None
    told = f"#{hydra_config.job.num}:" if sweeping else f"{folder}:"
    config = OmegaConf.to_object(settings)
    assert isinstance(config, Config)
    logging.captureWarnings(True)
    warnings.filterwarnings("default", category=DeprecationWarning, module="feedback|experiments|conf")
    launcher = hydra_config.launcher
    sweeps.follow(launcher)
    try:
        with sweeps.stoppable(), sweeps.alone(folder, None if sweeping else config.resume):
            try:
                before = record = sweeps.finished(folder, config)
                if record is None:
                    sweeps.clear(folder, config, f"{hydra_config.job.name}.log")
                    sweeps.set_threads(config.threads, launcher)
                    record = main(config, folder, group)
            except BaseException as error:
                fail(folder, config, error)  # while the folder is still this run's
                raise
    except BaseException as error:
        _forget_model()
        by_submitit = isinstance(error, SystemExit) and sweeps.kind(launcher) in ("LocalLauncher", "SlurmLauncher")
        if not isinstance(error, Exception) and not by_submitit:
            if not sweeping and any((folder / name).exists() for name in sweeps.continues(config)):
                sweeps.tell(f"stopped; the same command with resume={folder} goes on from there", file=sys.stderr)
            raise  # told to stop: the sweep's other jobs, too
        if sweeping:
            sweeps.tell(told, f"failed: {type(error).__name__}: {error}", file=sys.stderr)
            return float("nan")
        if not isinstance(error, (ValueError, OSError, RuntimeError)) or _debugging():
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if sweeping or before:
        sweeps.tell(told, "finished before" if before else f"finished in {record['wall_seconds']:.0f} s")
    return None if hydra_config.sweeper._target_ == sweeps.BASIC else sweeps.objective(record, config.objective)


def _forget_model() -> None:
    """A run that failed may have left something on its model."""
    if "feedback.models" in sys.modules:
        sys.modules["feedback.models"].shared.cache_clear()


def _debugging() -> bool:
    return bool(os.environ.get("HYDRA_FULL_ERROR"))


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # terminals without Σ
    status: Any = None
    try:
        with sweeps.stoppable():
            job()
        status = 0
    except SystemExit as stop:
        status = stop.code
    except KeyboardInterrupt:
        if _debugging():
            raise
        print("interrupted", file=sys.stderr)
        status = 130  # as shells have it
    finally:
        closed = sweeps.close(wait=status == 1)
    sys.exit(status or closed)
