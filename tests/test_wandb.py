"""wandb against a server on this machine: sweeps, sync, lineage, the dashboard and the sweep file."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb_stub
import yaml
from conftest import COVERT, composed
from wandb_stub import KEY, Server, Uploaded

import run
from conf import build
from feedback import results, tracking
from scripts import dashboard as dashboard_script

ROOT = Path(run.__file__).parent
TINY = ["model=tiny", "steps=4", "quiet=true", "hidden_bits.read_behind=[1]", "hidden_bits.fit_messages=4"]
ORACLE = [
    *("model=oracle", "cell=ab", "quiet=true", "latch.top=3", "latch.levels=5", "latch.dwells=[1]", "noise=0.01"),
    *("latch.hold_steps=12", "latch.hold_trials=1", "latch.noisy_sweeps=1", "latch.random_vectors=1"),
]
# What Python itself connects to, a line each; loaded by every interpreter that finds it on its path.
WATCH = """
import os, socket
def watched(name):
    original = getattr(socket.socket, name)
    def connect(self, address):
        with open(os.environ["WATCHED"], "a") as file:
            print(address[0] if isinstance(address, tuple) else "unix", file=file)
        return original(self, address)
    setattr(socket.socket, name, connect)
watched("connect")
watched("connect_ex")
"""


@pytest.fixture(autouse=True)
def nobody_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        if name != "WANDB_SERVICE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))


class Told:
    """A command that has ended: how, and which processes and addresses were seen while it ran."""

    def __init__(self, arguments: list[str], folder: Path, variables: dict[str, str]) -> None:
        (folder / "watch").mkdir(exist_ok=True)
        (folder / "watch" / "sitecustomize.py").write_text(WATCH)
        own = {"PYTHONPATH": f"{ROOT}:{folder / 'watch'}", "WATCHED": str(folder / "connected.txt")}
        inherited = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
        self.children: set[psutil.Process] = set()
        self.connected: set[str] = set()
        out, err = folder / "out.txt", folder / "err.txt"
        with out.open("w") as told, err.open("w") as failed:
            process = psutil.Popen(
                arguments, cwd=folder, env=inherited | own | variables, stdout=told, stderr=failed, text=True
            )
            until = time.monotonic() + 200
            while process.poll() is None:
                assert time.monotonic() < until or process.kill(), f"{arguments}: still running"
                self.look(process)
                time.sleep(0.02)
        self.code, self.out, self.err = process.returncode, out.read_text(), err.read_text()
        python = folder / "connected.txt"
        self.connected |= set(python.read_text().split()) if python.exists() else set()

    def look(self, process: psutil.Process) -> None:
        try:
            self.children |= set(process.children(recursive=True))
        except psutil.NoSuchProcess:
            return
        for one in [process, *self.children]:
            try:
                self.connected |= {end.raddr.ip for end in one.net_connections("inet") if end.raddr}
            except psutil.Error:
                continue

    def left_behind(self) -> list[psutil.Process]:
        """Processes that are still there a moment after the command has ended."""
        _, alive = psutil.wait_procs(self.children, timeout=10)
        return alive


def command(*arguments: str, folder: Path, **variables: str) -> Told:
    return Told([sys.executable, str(ROOT / "run.py"), *arguments], folder, variables)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(run: Uploaded) -> list[dict[str, Any]]:
    """The history that was uploaded, as metrics.jsonl has it: no line of a table or picture, NaN null."""
    lines = [{key: value for key, value in line.items() if key[0] != "_"} for line in run.history]
    plain = [line for line in lines if not any(isinstance(value, dict) for value in line.values())]
    return [{k: None if isinstance(v, str) else v for k, v in line.items()} for line in plain]


# --------------------------------------------------------------------------------------------------------- sweeps


@pytest.mark.real
def test_a_sweep_is_four_runs_in_one_group_with_what_the_folders_hold(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep-1"
    with wandb_stub.serve() as server:
        told = command(
            *("-m", "experiment=hidden_bits", *TINY, "tracking=online", "tracking.tags=[tiny]"),
            *("alpha=1,2,0,1e39", f"hydra.sweep.dir={sweep}"),
            folder=tmp_path,
            **server.environment,
        )
        runs = {run.config["alpha"]: run for run in server.runs.values()}
    assert told.code == 1 and "coefficients hold NaN or infinite values" in told.err  # in float32 1e39 is
    assert len(server.runs) == 4 and set(runs) == {0, 1, 2, 1e39}
    for job, alpha in enumerate((1, 2, 0, 1e39)):
        one, left = runs[alpha], results.read_result(sweep / str(job))
        assert (one.group, one.job_type, one.tags) == ("sweep-1", "hidden_bits", ["tiny"])
        assert one.config == left["config"]
        assert one.exit_code == (1 if alpha == 1e39 else 0)
        assert numbers(one) == metrics(sweep / str(job))
        if alpha == 1e39:
            assert one.summary["error"].startswith("ValueError: coefficients hold NaN")
            continue
        assert len(numbers(one)) == 4 * 7  # steps × arms
        hard = left["summary"]["hard"]
        for name in ("ber", "text_agreement", "argmax_agreement", "kl_nats", "text_ber"):
            assert one.summary[name] == one.summary[f"hard.{name}"] == pytest.approx(hard[name])
        assert {"table", "transcripts", "figures/ber_over_steps", "figures/transcripts"} <= set(one.summary)
    assert (server.unknown, server.refused) == ([], [])
    assert any(child.pid for child in told.children)  # the service was seen
    assert told.left_behind() == []
    assert told.connected <= {"127.0.0.1", "unix"} and "127.0.0.1" in told.connected


@pytest.mark.real
def test_a_job_that_fails_in_its_experiment_ends_as_a_failed_run_and_the_other_does_not(tmp_path: Path) -> None:
    with wandb_stub.serve() as server:
        told = command(
            *("-m", "experiment=latch", *ORACLE, "tracking=online", "model.coupling=1,4"),
            f"hydra.sweep.dir={tmp_path / 'sweep'}",
            folder=tmp_path,
            **server.environment,
        )
        runs = {run.config["model"]["coupling"]: run for run in server.runs.values()}
    assert told.code == 1 and "no latch: L = 1.00" in told.err
    assert {coupling: run.exit_code for coupling, run in runs.items()} == {1: 1, 4: 0}
    assert runs[1].summary["error"].startswith("ValueError: no latch")
    assert numbers(runs[4]) == metrics(tmp_path / "sweep" / "1")
    swept = [line for line in numbers(runs[4]) if "hysteresis/up" in line]
    assert len(swept) == 5 and swept[0]["hysteresis/up"] < 0 < swept[-1]["hysteresis/down"]
    assert told.left_behind() == []


@pytest.mark.real
def test_an_offline_sweep_calls_nobody_and_sync_uploads_the_same(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    with wandb_stub.serve() as server:
        told = command(
            *("-m", "experiment=hidden_bits", *TINY, "tracking=offline", "seed=0,1", f"hydra.sweep.dir={sweep}"),
            folder=tmp_path,
            **server.environment,
        )
        assert (told.code, server.requests, server.refused) == (0, 0, []), told.err
        assert told.connected <= {"127.0.0.1", "unix"}  # the service is talked to over this machine
        assert told.left_behind() == []
        offline = [str(path) for path in sorted(sweep.glob("*/wandb/offline-run-*"))]
        synced = Told([sys.executable, "-m", "wandb", "sync", "--yes", *offline], tmp_path, server.environment)
    assert synced.code == 0, synced.err
    runs = {run.config["seed"]: run for run in server.runs.values()}
    assert len(server.runs) == 2 and set(runs) == {0, 1}
    for seed, one in runs.items():
        assert (one.group, one.job_type, one.exit_code) == ("sweep", "hidden_bits", 0)
        assert numbers(one) == metrics(sweep / str(seed))
    assert (server.unknown, server.refused) == ([], [])


# ------------------------------------------------------------------------------------------------------- lineage


def track_and_use(folder: Path, mode: str, server: Server, made: Path) -> Told:
    """One run registers the file, the next one reads it."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom feedback import tracking\n"
        f"made = Path({str(made)!r})\n"
        "for name in ('makes', 'reads'):\n"
        f"    with tracking.track(mode={mode!r}, folder=Path({str(folder)!r}) / name, project='p', name=name,\n"
        "        group=None, job_type=None, config={}) as tracker:\n"
        "        tracker.artifact('cell', 'cell', made, {}) if name == 'makes' else tracker.use('cell', 'cell', made)\n"
    )
    return Told([sys.executable, "-c", program], folder, server.environment)


@pytest.mark.real
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_run_that_reads_a_cell_uses_the_artifact_of_the_run_that_made_it(tmp_path: Path, mode: str) -> None:
    made = tmp_path / "cell.safetensors"
    made.write_bytes(b"a cell")
    with wandb_stub.serve() as server:
        told = track_and_use(tmp_path, mode, server, made)
        assert (told.code, told.err) == (0, "")
        if mode == "offline":
            assert server.requests == 0
            offline = [str(path) for path in tmp_path.glob("*/wandb/offline-run-*")]
            Told([sys.executable, "-m", "wandb", "sync", "--yes", *offline], tmp_path, server.environment)
    runs = {run.display_name: run for run in server.runs.values()}
    (cell,) = runs["makes"].made
    assert cell.startswith("cell/cell:")
    assert (runs["makes"].used, runs["reads"].made, runs["reads"].used) == ([], [], [cell])


def test_what_a_run_reads_is_its_learned_cell_and_its_carriers_file(tmp_path: Path) -> None:
    assert build.files(composed("experiment=hidden_bits")) == {}
    assert build.files(composed("experiment=hidden_latch")) == {"cell": ROOT / "conf/cell/hidden.safetensors"}
    learned = composed("experiment=hidden_bits", "carriers=learned")
    assert build.files(learned) == {"carriers": ROOT / "conf/carriers/learned.safetensors"}


# ---------------------------------------------------------------------------------------------- an unwritable folder


def test_where_wandb_cannot_write_the_run_warns_and_leaves_its_results(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wandb").write_text("a file where wandb wants its folder")
    config = composed("experiment=hidden_bits", *TINY, "tracking=offline")
    record = run.main(config, tmp_path, None)
    (warning,) = [one for one in caplog.records if one.name == tracking.__name__]
    assert (
        "wandb could not open an offline run" in warning.message and "metrics.jsonl has every number" in warning.message
    )
    assert results.read_result(tmp_path)["summary"] == results.plain(record["summary"])
    assert len(metrics(tmp_path)) == 4 * 7
    assert (tmp_path / "table.csv").is_file() and (tmp_path / "wandb").is_file()


def test_an_arm_that_does_not_exist_cannot_be_the_headline(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hidden_bits\.headline='loud'; arms: soft, "):
        run.main(composed("experiment=hidden_bits", *TINY, "hidden_bits.headline=loud"), tmp_path, None)


# ----------------------------------------------------------------------------------------------------- the dashboard


def dashboard(*arguments: str, folder: Path, **variables: str) -> Told:
    return Told([sys.executable, str(ROOT / "scripts" / "dashboard.py"), *arguments], folder, variables)


@pytest.mark.real
def test_the_dashboard_saves_a_view_with_the_panels_and_metrics_of_every_experiment(tmp_path: Path) -> None:
    with wandb_stub.serve() as server:
        told = dashboard("--project", "loops", "--name", "all of it", folder=tmp_path, **server.environment)
    assert told.code == 0, told.err
    assert told.out.startswith(f"{server.address}/e/loops?nw=")
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("e", "loops", "all of it")
    sections = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    panels = {section["name"]: section["panels"] for section in sections}
    lines = {panel["config"].get("chartTitle"): panel["config"] for panel in panels["Hidden bits"]}
    ber = lines["hard: BER over steps, by alpha"]
    assert (ber["xAxis"], ber["metricRegex"], ber["groupBy"]) == (
        *("loop/step", "^hard(/alpha=[^/]+)?/ber$"),
        "alpha.value",
    )
    columns = [column["accessor"] for column in lines["Settings, BER and text of the headline arm"]["columns"]]
    assert columns[:4] == ["config:alpha.value", "config:site.value.block", "config:map.value.temperature",
                           "config:seed.value"]  # fmt: skip
    assert columns[4:] == [f"summary:{name}" for name in ("ber", "text_ber", "text_agreement", "argmax_agreement",
                                                          "kl_nats")]  # fmt: skip
    scatter = lines["Text agreement against BER: the loop writes its own text"]
    assert (scatter["xAxis"], scatter["yAxis"]) == ("summary:soft/ber", "summary:soft/text_agreement")
    (up,) = [panel["config"] for panel in panels["Hysteresis"] if "hysteresis/up" in panel["config"].get("metrics", [])]
    assert up["xAxis"] == "hysteresis/alpha" and "hysteresis/down" in up["metrics"]
    shown = json.dumps(panels)
    for name in ("truth_table", "confusion", "crosstalk", "transcripts", "claims", "learn/loss", "register/ber"):
        assert f'"{name}"' in shown, name
    assert (server.unknown, server.refused) == ([], [])


@pytest.mark.real
def test_without_a_key_or_the_package_or_a_server_the_dashboard_says_so_in_one_line(tmp_path: Path) -> None:
    told = dashboard(folder=tmp_path)
    assert (told.code, told.out) == (2, "")
    assert told.err == "error: there is no wandb key: run `wandb login`, or set WANDB_API_KEY\n"
    (tmp_path / "watch" / "wandb_workspaces.py").write_text("raise ImportError('No module named wandb_workspaces')")
    told = dashboard(folder=tmp_path, WANDB_API_KEY=KEY)
    assert told.code == 2
    assert told.err == "error: No module named wandb_workspaces: pip install '.[dashboard]'\n"


GATES = ["model=oracle", "cell=ab", "carriers=unembedding", "carriers.a=A", "carriers.b=B", "logic.top=8"]
LEARN = [
    *("learn.prompt='ab c'", "learn.cover=c", "learn.pairs=[[a,b]]", "learn.steps=2", "learn.test_every=1"),
    *("learn.test_rows=4", "learn.test_steps=4", "learn.batch=4", "site.block=1", "model=tiny"),
]
STORY = [
    *("cell.file=null", "learn.cover=''", "hidden_story.known=2", "hidden_story.unseen=1", "hidden_story.rows=2"),
    *("steps=6", "prompts.texts=['abc a','bca','ca b']"),
]
RUNS = {
    "hidden_bits": TINY,
    "latch": ORACLE,
    "hidden_logic": [*GATES, "logic.trials=2", "logic.control_trials=1"],
    "circuit": [*GATES, "circuit=half_adder", "logic.trials=2"],
    "learn_cell": LEARN,
    "hidden_story": [*LEARN, *STORY],
    "learned_carriers": ["model=tiny", "site.block=1", *COVERT],
    "forward_hook": ["model=tiny", "carriers=random_orthonormal", "alpha=2", "steps=4"],
    "audit": ["model=tiny", "steps=2"],
}


def panel_names() -> set[str]:
    """Every metric, table and picture that a panel asks for by its name."""
    names: set[str] = set()
    for section in dashboard_script.sections():
        for panel in section.panels:
            asked = [getattr(panel, key, None) for key in ("x", "y", "metrics", "media_keys", "table_name")]
            asked = [one for part in asked for one in (part if isinstance(part, list) else [part])]
            asked += [column.metric for column in getattr(panel, "columns", [])]
            names |= {one if isinstance(one, str) else one.name for one in asked if one and not is_setting(one)}
    return names


def is_setting(metric: Any) -> bool:
    return type(metric).__name__ == "Config"


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of wandb_workspaces, while it is imported
def test_every_name_in_the_dashboard_is_one_that_an_experiment_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, logged = panel_names(), {tracking.STEP}
    tracker = tracking.Tracker
    monkeypatch.setattr(tracker, "log", lambda self, step, values: logged.update(values))
    monkeypatch.setattr(tracker, "table", lambda self, name, columns, rows: logged.add(name))
    monkeypatch.setattr(tracker, "image", lambda self, name, path: logged.add(name))
    monkeypatch.setattr(tracker, "summary", lambda self, values: logged.update(values))
    for name, settings in RUNS.items():
        config = composed(f"experiment={name}", *settings, "tracking=disabled", "quiet=true")
        run.main(config, tmp_path / name, None)
    needs_a_cell = {"register/ber", "crosstalk", "figures/crosstalk"}  # of experiment=register, on SmolLM2
    assert asked - logged == needs_a_cell
    for name in needs_a_cell:
        assert f'"{name.removeprefix("figures/")}"' in (ROOT / "experiments" / "register.py").read_text()


def test_truth_tables_and_the_confusion_of_all_gates_are_tables_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: dict[str, list[dict[str, Any]]] = {}

    def table(self: Any, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        tables[name] = [dict(zip(columns, row, strict=True)) for row in rows]

    monkeypatch.setattr(tracking.Tracker, "table", table)
    settings = ["tracking=disabled", "quiet=true"]
    run.main(composed("experiment=circuit", *RUNS["circuit"], *settings), tmp_path / "circuit", None)
    added = {(row["a"], row["b"]): (row["sum expected"], row["carry expected"]) for row in tables["truth_table"]}
    assert added == {(0, 0): (0, 0), (0, 1): (1, 0), (1, 0): (1, 0), (1, 1): (0, 1)}
    assert all((row["host"], row["loop"], row["trials"]) == (1, 1, 2) for row in tables["truth_table"])
    run.main(composed("experiment=hidden_logic", *RUNS["hidden_logic"], *settings), tmp_path / "logic", None)
    assert len(tables["truth_table"]) == 16 * 4
    assert all(row["accuracy"] == 1 for row in tables["truth_table"])
    # the sixteen gates have a 1 in half of their 64 rows, two trials each
    assert [list(row.values()) for row in tables["confusion"]] == [[0, 64, 0], [1, 0, 64]]


# ----------------------------------------------------------------------------------------------------- the sweep file


def sweep_file() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "conf" / "wandb_sweep.yaml").read_text())


def test_the_sweep_file_names_settings_that_exist_and_every_combination_is_accepted() -> None:
    parameters = sweep_file()["parameters"]
    for name, given in parameters.items():
        for value in given["values"]:
            build.check(composed("experiment=hidden_bits", f"{name}={value}"))


@pytest.mark.real
def test_wandb_takes_the_sweep_file_and_its_agent_runs_a_job_that_has_the_metric(tmp_path: Path) -> None:
    settings = sweep_file()
    chosen = {name: given["values"][-1] for name, given in settings["parameters"].items()} | {"site.block": 2}
    chosen |= dict(setting.split("=", 1) for setting in TINY) | {"hydra.run.dir": str(tmp_path / "job")}
    arguments = {name: {"value": value} for name, value in chosen.items()}
    start = {"type": "run", "run_id": "r1", "args": arguments, "program": str(ROOT / settings["program"])}
    with wandb_stub.serve() as server:
        made = Told(
            [sys.executable, "-m", "wandb", "sweep", str(ROOT / "conf" / "wandb_sweep.yaml")],
            tmp_path,
            server.environment,
        )
        assert made.code == 0, made.err
        (sent,) = server.sweeps
        server.commands = [start]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        agent = Told(
            [sys.executable, "-m", "wandb", "agent", "--count", "1", "e/feedback-loop/S"],
            tmp_path,
            server.environment | {"PATH": path},
        )
    assert yaml.safe_load(sent["config"])["parameters"].keys() == settings["parameters"].keys()
    assert "ERROR" not in made.err and "WARN" not in made.err
    one = server.runs["r1"]
    assert (agent.code, one.exit_code, one.sweep) == (0, 0, "S"), agent.err
    assert one.config["site"]["block"] == 2 and one.config["alpha"] == 4
    assert 0 <= one.summary[settings["metric"]["name"]] <= 1
