"""Sweeps: nothing lost, nothing run twice, every failure named, whichever launcher runs the jobs."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from conftest import composed
from filelock import FileLock
from omegaconf import OmegaConf

import run
from conf import sweeps
from conf.schema import Config
from feedback import models, results

ROOT = Path(run.__file__).parent
QUICK = [
    "experiment=hidden_bits", "model=tiny", "steps=4", "hidden_bits.read_behind=[1]", "hidden_bits.fit_messages=2",
    "hidden_bits.test_messages=2", "hidden_bits.n_bits=2", "prompts.unseen=1", "prompts.texts=[abc,bcd,cde]",
    "tracking=disabled", "quiet=true", "threads=1",
]  # fmt: skip


def command(*arguments: str, folder: Path, **options) -> subprocess.Popen[str]:
    """run.py -m with quick settings, in ``folder``, as the head of its own process group."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), "-m", *QUICK, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
        **options,
    )


def sweep(*arguments: str, folder: Path, status: int = 0, **options) -> tuple[str, str]:
    """Runs one to its end; what it printed."""
    process = command(*arguments, folder=folder, **options)
    out, err = process.communicate(timeout=600)
    assert process.returncode == status, f"{process.returncode}\n{out}\n{err}"
    return out, err


def configured(*overrides: str) -> Config:
    return composed(*QUICK, *overrides)


def test_two_folders_of_one_second_differ_and_a_resumed_one_is_itself(tmp_path):
    assert sweeps.folder("multirun", "x", None) != sweeps.folder("multirun", "x", None)
    assert sweeps.folder("multirun", "x", str(tmp_path)) == str(tmp_path)
    assert Path(sweeps.folder("multirun", "x", None)).is_absolute()


def test_a_finished_result_is_found_only_by_the_command_that_made_it(tmp_path):
    assert sweeps.finished(tmp_path, configured(f"resume={tmp_path}")) is None
    run.main(configured("alpha=2"), tmp_path, None)
    assert sweeps.finished(tmp_path, configured("alpha=2")) is None  # nobody asked to resume
    found = sweeps.finished(tmp_path, configured("alpha=2", f"resume={tmp_path}", "quiet=false"))
    assert found is not None and found["status"] == "finished"
    with pytest.raises(ValueError, match=r"finished result with another alpha, seed; resume="):
        sweeps.finished(tmp_path, configured("alpha=3", "seed=1", f"resume={tmp_path}"))
    results.write_result(tmp_path, {**found, "status": "failed"})
    assert sweeps.finished(tmp_path, configured("alpha=2", f"resume={tmp_path}")) is None
    (tmp_path / "result.json").write_text("{ half")
    assert sweeps.finished(tmp_path, configured("alpha=2", f"resume={tmp_path}")) is None


def test_what_an_attempt_left_is_moved_away_and_kept(tmp_path):
    for _ in range(2):
        (tmp_path / ".hydra").mkdir(exist_ok=True)
        (tmp_path / "metrics.jsonl").write_text("1\n")
        (tmp_path / "run.log").write_text("")
        sweeps.clear(tmp_path, configured(), "run.log")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hydra", "attempts", "run.log"]
    assert [(tmp_path / "attempts" / n / "metrics.jsonl").read_text() for n in "12"] == ["1\n", "1\n"]


def test_a_resumed_learner_keeps_its_state_and_a_new_one_does_not(tmp_path):
    for options, left in (([f"resume={tmp_path}"], ["attempts", "learner.safetensors"]), ([], ["attempts"])):
        (tmp_path / "learner.safetensors").write_text("x")
        (tmp_path / "metrics.jsonl").write_text("x")
        sweeps.clear(tmp_path, configured("experiment=learn_cell", *options), "run.log")
        assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_a_folder_in_which_no_run_has_been_is_left_as_it_is(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(sweeps.Taken, match=r"holds thesis\.txt…, which no run has left"):
        sweeps.clear(tmp_path, configured(), "run.log")
    (tmp_path / "multirun.yaml").write_text("")
    with pytest.raises(sweeps.Taken, match="resume that with -m"):
        sweeps.clear(tmp_path, configured(f"resume={tmp_path}"), "run.log")
    with pytest.raises(sweeps.Taken, match=r"resume=x: no run has been there"), sweeps.alone(tmp_path, "x"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["multirun.yaml", "thesis.txt"]


def test_a_run_has_its_folder_alone(tmp_path):
    there = pytest.raises(sweeps.Taken, match="another process runs in")
    with sweeps.alone(tmp_path, None), there, sweeps.alone(tmp_path, None):
        pass
    with sweeps.alone(tmp_path, None):
        pass


def test_no_later_error_takes_the_place_of_a_finished_result(tmp_path):
    finished = {"status": "finished", "summary": {}, "config": {}}
    for error in (SystemExit(143), sweeps.Taken("x")):
        results.write_result(tmp_path, finished)
        run.fail(tmp_path, configured(), error)
        assert results.read_result(tmp_path)["status"] == "finished"
    (tmp_path / "result.json").unlink()
    run.fail(tmp_path, configured(), sweeps.Taken("x"))
    assert not (tmp_path / "result.json").exists()
    run.fail(tmp_path, configured(), ValueError("x"))
    assert results.read_result(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("threads=0", "threads=0: expected at least 1"),
        ("carriers.scale=unti", "carriers.scale='unti': expected one of unit, residual, raw"),
        ("hidden_bits.window=0", "hidden_bits.window=0"),
        ("seed=99999999999999999999", "seed=99999999999999999999: expected 0 to"),
    ],
)
def test_a_value_that_cannot_work_is_refused_before_a_model_is_loaded(override, message):
    with pytest.raises(ValueError, match=message):
        sweeps.check(configured(override))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_job_for_another_machine_may_name_a_device_that_is_not_here():
    with pytest.raises(ValueError, match="cuda is not to be had here"):
        sweeps.check(configured("device=cuda"))
    sweeps.check(configured("device=cuda"), here=False)


@pytest.mark.parametrize(
    ("launcher", "given", "threads"),
    [
        ({"_target_": "x.BasicLauncher"}, None, None),
        ({"_target_": "x.BasicLauncher"}, 3, 3),
        ({"_target_": "x.JoblibLauncher", "n_jobs": -1}, None, 1),
        ({"_target_": "x.JoblibLauncher", "n_jobs": 2}, None, 4),
        ({"_target_": "x.JoblibLauncher", "n_jobs": 16}, None, 1),
        ({"_target_": "x.LocalLauncher", "cpus_per_task": None}, None, 1),
        ({"_target_": "x.SlurmLauncher", "cpus_per_task": 6}, None, 6),
        ({"_target_": "x.RayLauncher", "ray": {"remote": {"num_cpus": 2}}}, None, 2),
        ({"_target_": "x.RayLauncher", "ray": {"remote": {}}}, 5, 5),
    ],
)
def test_a_job_gets_the_threads_that_its_launcher_leaves_it(launcher, given, threads, monkeypatch):
    told = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr("torch.set_num_threads", told.append)
    sweeps.set_threads(given, OmegaConf.create(launcher))
    assert told == [threads or torch.get_num_threads()]


def test_a_job_does_not_inherit_the_threads_of_the_job_before():
    basic = OmegaConf.create({"_target_": "x.BasicLauncher"})
    before = torch.get_num_threads()
    try:
        sweeps.set_threads(None, basic)
        first = torch.get_num_threads()
        sweeps.set_threads(first + 1, basic)
        assert torch.get_num_threads() == first + 1
        sweeps.set_threads(None, basic)
        assert torch.get_num_threads() == first
    finally:
        torch.set_num_threads(before)


def test_the_objective_is_a_number_of_the_summary_by_its_dotted_name(capsys):
    record = {"summary": {"hard": {"ber": 0.25}, "works": True}}
    assert sweeps.objective(record, None) is None
    assert sweeps.objective(record, "hard.ber") == 0.25
    for name in ("hard", "works", "soft.ber", "hard.ber.low"):
        with pytest.raises(SystemExit):
            sweeps.objective(record, name)
        assert f"objective={name} is no number of the summary, which has hard, works" in capsys.readouterr().err


def test_jobs_of_one_process_share_a_model_until_it_is_forgotten(monkeypatch):
    load, loaded = models.load, []
    monkeypatch.setattr(models, "load", lambda spec: loaded.append(spec) or load(spec))
    models.shared.cache_clear()
    a, b = models.ModelSpec(kind="tiny"), models.ModelSpec(kind="tiny", seed=1)
    assert models.shared(a) is models.shared(a) and len(loaded) == 1
    models.shared(b)
    models.shared.cache_clear()
    models.shared(b)
    assert loaded == [a, b, b]
    models.shared.cache_clear()


def test_a_job_that_cannot_run_is_named_before_the_first_begins(tmp_path):
    _, err = sweep("alpha=0,2", "site.block=1,31", "prompts.unseen=1,7", folder=tmp_path, status=2)
    lines = [line for line in err.splitlines() if line.startswith("error: job ")]
    assert [line.split()[2] for line in lines] == ["1", "3", "4", "5", "6", "7"]
    assert "site.block=31" in lines[1] and lines[1].endswith("this model has blocks 0–3")
    assert not list(tmp_path.rglob("result.json")) and not list(tmp_path.rglob(".lock"))


@pytest.mark.real
def test_a_failure_leaves_its_error_the_others_go_on_and_all_failures_are_named(tmp_path):
    # 1e39 is finite here and infinite in float32, which is found while the run is on
    _, err = sweep("alpha=0,1e39,2,-1e39", "hydra.sweep.dir=s", folder=tmp_path, status=1)
    status = [results.read_result(tmp_path / "s" / str(n))["status"] for n in range(4)]
    assert status == ["finished", "failed", "finished", "failed"]
    assert "job 1 (" in err and "job 3 (" in err and f"resume={tmp_path / 's'}" in err
    rows = results.read_table(tmp_path / "s" / "summary.csv")
    assert [row["status"] for row in rows] == status
    assert (tmp_path / "s" / "report.html").stat().st_size > 10_000
    before = [(tmp_path / "s" / n / "result.json").read_bytes() for n in "02"]
    out, err = sweep("alpha=0,1e39,2,-1e39", "resume=s", folder=tmp_path, status=1)
    assert out.count("finished before") == 2
    assert before == [(tmp_path / "s" / n / "result.json").read_bytes() for n in "02"]
    _, err = sweep("alpha=0,5,2,-1e39", "resume=s", folder=tmp_path, status=1)  # a failed job may be replaced
    assert results.read_result(tmp_path / "s" / "1")["status"] == "finished"
    _, err = sweep("alpha=1,5,2", "resume=s", folder=tmp_path, status=2)
    assert "error: job 0 (" in err and "holds a finished result with another alpha" in err


@pytest.mark.real
def test_experiments_can_be_swept_too_and_their_jobs_share_a_folder(tmp_path):
    two = ["experiment=hidden_bits,audit", "audit.plants=[]", "hydra.sweep.dir=s"]
    sweep(*two, folder=tmp_path)
    assert [results.read_result(tmp_path / "s" / n)["experiment"] for n in "01"] == ["hidden_bits", "audit"]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.real
def test_three_sweeps_of_one_second_lose_nothing_and_one_folder_has_one_owner(tmp_path):
    started = [command("alpha=0,2", folder=tmp_path) for _ in range(3)]
    for process in started:
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
    assert len(list(tmp_path.rglob("result.json"))) == 6
    assert len(list(tmp_path.rglob("summary.csv"))) == 3
    started = [command("alpha=0,2,3,4,5,6,7,8", "hydra.sweep.dir=s", folder=tmp_path) for _ in range(2)]
    told = [process.communicate(timeout=600)[1] for process in started]
    assert sorted(process.returncode for process in started) == [0, 2]
    assert sum("another process runs the sweep" in err for err in told) == 1


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_told_to_stop_ends_its_job_as_failed_and_can_be_resumed(number, tmp_path):
    alphas = "alpha=" + ",".join(map(str, range(20)))
    # what a shell starts in the background ignores Ctrl-C, and so would its children
    process = command(
        alphas, "hydra.sweep.dir=s", folder=tmp_path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    wait_for(tmp_path / "s" / "1" / "metrics.jsonl", process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    status = [results.read_result(path.parent)["status"] for path in sorted((tmp_path / "s").glob("*/result.json"))]
    assert status.count("failed") <= 1 and status[0] == "finished" and len(status) < 20
    assert f"resume={tmp_path / 's'}" in err


@pytest.mark.real
@pytest.mark.parametrize("launcher", [["joblib", "hydra.launcher.n_jobs=2"], ["submitit_local"]])
def test_no_worker_outlives_a_launcher_that_is_killed(launcher, tmp_path):
    long = ["alpha=0,1", "steps=200", "prompts.texts=[" + ",".join(f"ab{n}" for n in range(40)) + "]", "max_rows=1"]
    process = command(*long, "hydra.sweep.dir=s", f"hydra/launcher={launcher[0]}", *launcher[1:], folder=tmp_path)
    for number in "01":
        wait_for(tmp_path / "s" / number / "metrics.jsonl", process)
    process.kill()
    process.wait()  # until then its number stays taken
    for number in "01":
        with FileLock(tmp_path / "s" / number / sweeps.LOCK, timeout=60):  # free once its worker is gone
            assert "143" in results.read_result(tmp_path / "s" / number)["error"]
    process.communicate(timeout=60)  # ends when the last worker closes the output that it inherited


@pytest.mark.real
def test_killed_at_any_moment_and_resumed_a_sweep_is_as_if_undisturbed(tmp_path):
    draw = random.Random(int(os.environ.get("KILL_SEED", "0")))
    alphas = "alpha=0,1,2,3,4,5"
    sweep(alphas, "hydra.sweep.dir=whole", folder=tmp_path)
    kills = 0
    while kills < int(os.environ.get("KILLS", "4")):
        process = command(alphas, "resume=s" if (tmp_path / "s").is_dir() else "hydra.sweep.dir=s", folder=tmp_path)
        wait_for(tmp_path / "s" / "multirun.yaml", process)
        try:
            process.wait(timeout=draw.uniform(0, 4))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()
        for line_file in (tmp_path / "s").rglob("metrics.jsonl"):
            for line in line_file.read_text().splitlines()[:-1]:
                json.loads(line)
        if process.returncode == 0:  # it got through: begin another
            compare(tmp_path / "whole", tmp_path / "s")
            shutil.rmtree(tmp_path / "s")
    sweep(alphas, "resume=s", folder=tmp_path)
    compare(tmp_path / "whole", tmp_path / "s")


def compare(whole: Path, other: Path) -> None:
    """Every job's result is there once, and none differs."""
    assert (other / "summary.csv").read_bytes() == (whole / "summary.csv").read_bytes()
    for job in whole.glob("[0-9]*"):
        for name in ("table.csv", "metrics.jsonl"):
            assert (other / job.name / name).read_bytes() == (job / name).read_bytes(), f"{job.name}/{name}"


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"no {path}: {process.communicate()}")
        time.sleep(0.05)


LEARN = [
    "experiment=learn_cell", "model=tiny", "site.block=1", "tracking=disabled", "quiet=true", "learn.prompt='ab c'",
    "learn.cover=c", "learn.pairs=[[a,b]]", "learn.test_every=5", "learn.test_rows=4", "learn.test_steps=4",
    "learn.batch=4", "learn.steps=1000",
]  # fmt: skip


@pytest.mark.real
@pytest.mark.parametrize("sweeping", [False, True])
def test_ctrl_c_ends_a_learner_and_its_sweep_and_the_hint_goes_on_from_there(sweeping, tmp_path):
    where = tmp_path / "s"
    own = ["-m", "seed=0,1", f"hydra.sweep.dir={where}"] if sweeping else [f"hydra.run.dir={where}"]

    def started(*more):
        return subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *own, *LEARN, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=tmp_path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    first = where / "0" if sweeping else where
    state, begun = first / "learner.safetensors", 0.0
    for options in ([], [f"resume={where}"]):
        process = started(*options)
        wait_for(state, process)
        while state.stat().st_mtime == begun and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert f"resume={where}" in err and "Traceback" not in err
        assert results.read_result(first)["error"].startswith("KeyboardInterrupt")
        assert (first / "cell.safetensors").is_file() and not (where / "1").exists()
        begun = state.stat().st_mtime


@pytest.mark.real
@pytest.mark.parametrize("launcher", [["joblib", "hydra.launcher.n_jobs=2"], ["submitit_local"]])
def test_other_launchers_give_the_summary_of_the_basic_one(launcher, tmp_path):
    jobs = ["alpha=0,1e39,2", "seed=0,1,2,3"]
    sweep(*jobs, "hydra.sweep.dir=basic", folder=tmp_path, status=1)
    sweep(*jobs, "hydra.sweep.dir=other", f"hydra/launcher={launcher[0]}", *launcher[1:], folder=tmp_path, status=1)
    assert (tmp_path / "other" / "summary.csv").read_bytes() == (tmp_path / "basic" / "summary.csv").read_bytes()


@pytest.mark.real
def test_a_ray_cluster_of_two_nodes_gives_the_summary_of_the_basic_launcher(tmp_path):
    jobs = ["alpha=0,1e39,2", "seed=0,1,2,3"]
    ray = str(Path(sys.executable).parent / "ray")
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    sockets = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # the path of a socket has to be short
    small = ["--num-cpus=1", "--object-store-memory=80000000", f"--temp-dir={sockets}", "--disable-usage-stats"]
    sweep(*jobs, "hydra.sweep.dir=basic", folder=tmp_path, status=1)
    try:
        head = ["--head", "--port=26379", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        for node in (head, ["--address=127.0.0.1:26379", "--node-ip-address=127.0.0.2"]):
            subprocess.run([ray, "start", *node, *small], env=environment, check=True, capture_output=True, timeout=120)
        where = ["hydra/launcher=ray_cluster", "hydra.launcher.ray.init.address=127.0.0.1:26379"]
        sweep(*jobs, "hydra.sweep.dir=other", *where, folder=tmp_path, status=1, env=environment)
    finally:
        subprocess.run([ray, "stop", "--force"], env=environment, capture_output=True, timeout=120)
        shutil.rmtree(sockets, ignore_errors=True)
    assert (tmp_path / "other" / "summary.csv").read_bytes() == (tmp_path / "basic" / "summary.csv").read_bytes()


@pytest.mark.real
def test_optuna_searches_for_what_the_objective_names(tmp_path):
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "objective=hard.ber",
              "alpha=interval(0.1,4)", "hydra.sweep.dir=s"]  # fmt: skip
    sweep(*search, folder=tmp_path)
    assert "best_value" in (tmp_path / "s" / "optimization_results.yaml").read_text()
    _, err = sweep(*search[:-2], "alpha=interval(0.1,4)", "objective=hard.bier", folder=tmp_path, status=2)
    assert "objective=hard.bier is no number of the summary" in err


@pytest.mark.real
def test_a_place_that_cannot_be_written_is_a_clear_error_and_what_is_there_stays(tmp_path):
    (tmp_path / "file").write_text("")
    _, err = sweep("alpha=0,2", "hydra.sweep.dir=file/s", folder=tmp_path, status=2)
    assert "error: " in err and "file" in err and "Traceback" not in err
    sweep("alpha=0,2", "hydra.sweep.dir=s", folder=tmp_path)
    before = (tmp_path / "s" / "0" / "result.json").read_bytes()

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, 15_000))  # a disk that is full after so many bytes
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    _, err = sweep("alpha=0,2,3", "resume=s", folder=tmp_path, status=1, preexec_fn=little_room)
    assert "File too large" in err and before == (tmp_path / "s" / "0" / "result.json").read_bytes()
    sweep("alpha=0,2,3", "resume=s", folder=tmp_path)
