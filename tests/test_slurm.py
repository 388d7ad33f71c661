"""Claims about hydra/launcher=slurm: on a real Slurm of one node that the tests start on the loopback interface."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import submitit
from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

import run
from feedback import results

ROOT = Path(run.__file__).parent
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
TINY = ["model=tiny", "steps=6", "tracking=disabled", "quiet=true", "hidden_bits.read_behind=[1]"]
SMALL = ["hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=2", "hydra.launcher.timeout_min=5"]

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser={user}
SlurmdUser={user}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=16000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def launcher(*overrides: str):
    """The launcher's settings, as the command composes them."""
    Plugins.instance()  # registers the launchers
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = compose("config", ["hydra/launcher=slurm", *overrides], return_hydra_config=True)
    return settings.hydra.launcher


def test_the_choice_builds_on_submitits_own_and_takes_overrides():
    settings = launcher("hydra.launcher.gpus_per_node=2", "hydra.launcher.partition=gpu", "experiment=latch")
    assert settings._target_.endswith("SlurmLauncher")
    assert (settings.name, settings.partition, settings.gpus_per_node) == ("latch", "gpu", 2)
    assert settings.cpus_per_task and settings.mem_gb and settings.timeout_min and settings.array_parallelism
    assert launcher().gpus_per_node is None


@contextmanager
def daemon(*command: str, log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program in the foreground; ended with SIGTERM, and with SIGKILL if that takes more than ten seconds."""
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def becomes_true(ask, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if ask():
            return True
        time.sleep(0.2)
    return False


def output(*command: str, environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands find a cluster of this machine, with a key, ports and files of its own;
    afterwards its daemons are gone."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        told = f"{', '.join(missing)} not installed: apt-get install slurmd slurmctld munge slurm-client"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(told)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has at most 107 characters
    host, (controller, node) = socket.gethostname().split(".")[0], free_ports(2)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(
        CONF.format(host=host, controller=controller, daemon=node, user=getpass.getuser(), folder=folder)
    )
    own = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT)}
    own = {
        name: value for name, value in own.items() if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SBATCH"))
    }
    key = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]

    def state() -> str:
        return output("sinfo", "--noheader", "--format=%T", environment=own)

    try:
        with ExitStack() as stack:
            start = ["munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *key]
            stack.enter_context(daemon(*start, log=folder / "munged.log", environment=own))
            assert becomes_true((folder / "munge.sock").exists, 20), (folder / "munged.log").read_text()
            # the plugin is asked for though nothing uses control groups; which of the two names exists differs
            for plugin in ("cgroup/v1", "disabled"):
                (folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\nCgroupMountpoint={folder}/cgroup\n")
                inner = stack.enter_context(ExitStack())
                inner.enter_context(daemon("slurmctld", "-D", log=folder / "slurmctld.log", environment=own))
                served = inner.enter_context(daemon("slurmd", "-D", log=folder / "slurmd.log", environment=own))
                becomes_true(lambda served=served: state() == "idle" or served.poll() is not None, 40)
                if served.poll() is None:
                    break
                inner.close()
            logs = [(folder / f"{name}.log").read_text() for name in ("slurmctld", "slurmd")]
            assert state() == "idle", "\n".join(logs)
            yield own
            output("scancel", f"--user={getpass.getuser()}", environment=own)
            becomes_true(lambda: not output("squeue", "--noheader", environment=own), 20)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(*overrides: str, cluster: dict[str, str], folder: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The command in ``folder``, and the one sweep folder that it left there under its own name."""
    told = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "-m", "hydra/launcher=slurm", *SMALL, *TINY, *overrides],
        capture_output=True,
        text=True,
        env={**cluster, "WANDB_MODE": "offline"},
        cwd=folder,
        timeout=300,
    )
    (left,) = folder.glob("multirun/hidden_bits/*/*")
    return told, left


@pytest.mark.real
def test_a_sweep_on_slurm_leaves_what_the_same_job_leaves_without_it(cluster, tmp_path):
    told, left = sweep("hidden_bits.fit_messages=4", "seed=0,1", cluster=cluster, folder=tmp_path)
    assert told.returncode == 0, told.stderr
    found = [results.read_result(left / str(number)) for number in (0, 1)]
    assert [(one["status"], one["seed"]) for one in found] == [("finished", 0), ("finished", 1)]
    (script,) = left.glob(".submitit/*/*_submission.sh")
    assert "#SBATCH --array=0-1%2" in script.read_text()
    alone = tmp_path / "alone"
    command = [sys.executable, str(ROOT / "run.py"), *TINY, "hidden_bits.fit_messages=4", f"hydra.run.dir={alone}"]
    subprocess.run(command, env={**cluster, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True, timeout=120)
    assert (alone / "table.csv").read_bytes() == (left / "0" / "table.csv").read_bytes()
    assert (alone / "table.csv").read_bytes() != (left / "1" / "table.csv").read_bytes()


@pytest.mark.real
def test_a_job_that_fails_is_reported_and_the_others_finish(cluster, tmp_path):
    told, left = sweep("hidden_bits.fit_messages=4", "alpha=1e39,2", cluster=cluster, folder=tmp_path)
    assert told.returncode == 1
    assert "coefficients hold NaN or infinite values" in told.stderr
    assert [results.read_result(left / str(number))["status"] for number in (0, 1)] == ["failed", "finished"]


def _granted() -> tuple[str, str]:
    step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    shown = subprocess.run(["scontrol", "show", "step", step], capture_output=True, text=True, check=True).stdout
    return os.environ["OMP_NUM_THREADS"], next(w for w in shown.split() if w.startswith("CPUs="))


@pytest.mark.real
def test_a_job_gets_the_cores_that_were_asked_for_and_uses_as_many_threads(cluster, tmp_path, monkeypatch):
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what the submitting shell says must not count
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    settings = launcher("hydra.launcher.cpus_per_task=3")
    executor = submitit.SlurmExecutor(tmp_path)
    executor.update_parameters(
        cpus_per_task=settings.cpus_per_task, setup=OmegaConf.to_object(settings.setup), time=5, mem="1GB"
    )
    assert executor.submit(_granted).result() == ("3", "CPUs=3")
