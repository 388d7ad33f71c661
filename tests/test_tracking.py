import functools
import io
import json
import logging
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from feedback import tracking

NAN = float("nan")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def nobody_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        if name != "WANDB_SERVICE":  # how this process finds the service it has started
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    chosen = {
        "mode": "offline",
        "folder": folder,
        "project": "feedback-loop",
        "name": "run 1",
        "group": "sweep",
        "job_type": "hidden_bits",
        "config": {"alpha": [0.0, 2.0], "site": {"block": 15}, "limit": NAN},
        "tags": ["test"],
    }
    return chosen | changes


@functools.cache
def records(folder: Path) -> list[dict[str, Any]]:
    """What wandb's own reader says of the one run in a folder that is over, a record an entry."""
    (run,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in records(folder) if record["type"] == kind]


def history(folder: Path) -> list[dict[str, Any]]:
    return [record["item"] for record in of_kind(folder, "history")]


def exit_code(folder: Path) -> int:
    (record,) = of_kind(folder, "exit")
    return record.get("exit_code", 0)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_offline_run_reads_back_as_it_was_logged(tmp_path: Path) -> None:
    picture = tmp_path / "ber.png"
    picture.write_bytes(PIXEL)
    with tracking.track(**options(tmp_path)) as tracker:
        for step in range(3):
            tracker.log(step, {"ber/informed": step / 4, "entropy": NAN})
        tracker.table("cells", ["arm", "ber"], [["a", 0.5], [None, NAN], ["c", 1]])
        tracker.image("figures/ber", picture)
        tracker.artifact("the run/α", "figure", picture, {"steps": 3})
        tracker.summary({"ber": {"informed": {"end": 0.5}, "blind": NAN}, "worst": "a"})
    (run,) = of_kind(tmp_path, "run")
    assert (run["display_name"], run["project"], run["tags"]) == (
        "run 1",
        "feedback-loop",
        ["test"],
    )
    assert (run["run_group"], run["job_type"]) == ("sweep", "hidden_bits")
    config = run["config"]["update"]
    assert (config["alpha"], config["site"], config["limit"]) == ([0, 2], {"block": 15}, None)
    assert exit_code(tmp_path) == 0
    logged = [item for item in history(tmp_path) if "ber/informed" in item]
    assert [(item["loop/step"], item["ber/informed"]) for item in logged] == [
        (0, 0),
        (1, 0.25),
        (2, 0.5),
    ]
    assert [item["entropy"] for item in logged] == ["NaN"] * 3
    globs = [m for m in of_kind(tmp_path, "metric") if "glob_name" in m]
    assert [(m["glob_name"], m["step_metric"]) for m in globs] == [("*", "loop/step")]
    summary: dict[str, Any] = {}
    for record in of_kind(tmp_path, "summary"):
        summary |= record["update"]
    assert (summary["ber.informed.end"], summary["ber.blind"]) == (0.5, None)
    assert (summary["worst"], summary["cells.nrows"]) == ("a", 3)
    assert summary["figures/ber._type"] == "image-file"
    (made,) = [one for one in of_kind(tmp_path, "artifact") if one["type"] == "figure"]
    assert made["name"] == "the-run--"
    assert made["manifest"]["contents"][0]["local_path"] == str(picture)  # not copied
    assert tracker.location is not None
    assert Path(tracker.location).parent == tmp_path / "wandb"


def test_metrics_jsonl_has_every_line_while_the_run_goes_on(tmp_path: Path) -> None:
    with tracking.track(**options(tmp_path, mode="disabled")) as tracker:
        tracker.log(0, {"ber": 0.5, "kl": NAN})
        assert metrics(tmp_path) == [{"loop/step": 0, "ber": 0.5, "kl": None}]
        tracker.log(1, {"ber": 0, "kl": float("inf")})
        assert metrics(tmp_path)[1:] == [{"loop/step": 1, "ber": 0.0, "kl": None}]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert tracker.location is None


def test_steps_that_go_back_are_kept_in_both_places(tmp_path: Path) -> None:
    steps = [0, 1, 0, 1]  # one arm after the other
    with tracking.track(**options(tmp_path)) as tracker:
        for row, step in enumerate(steps):
            tracker.log(step, {"row": row})
    assert [line["loop/step"] for line in metrics(tmp_path)] == steps
    assert [(item["loop/step"], item["row"]) for item in history(tmp_path)] == list(zip(steps, range(4), strict=True))


def test_every_run_of_a_sequence_is_its_own_and_failed_if_it_raised(tmp_path: Path) -> None:
    errors = [ValueError("bad"), KeyboardInterrupt(), SystemExit(0), None]
    for job, error in enumerate(errors):
        raised: BaseException | None = None
        try:
            with tracking.track(**options(tmp_path / str(job))) as tracker:
                tracker.log(0, {"job": job})
                if error:
                    raise error
        except BaseException as caught:
            raised = caught
        assert raised is error
    folders = [tmp_path / str(job) for job in range(4)]
    assert [exit_code(folder) for folder in folders] == [1, 1, 1, 0]
    assert [[item["job"] for item in history(folder)] for folder in folders] == [[0], [1], [2], [3]]
    assert len({of_kind(folder, "run")[0]["run_id"] for folder in folders}) == 4


def test_a_run_inside_another_one_is_its_own(tmp_path: Path) -> None:
    with tracking.track(**options(tmp_path / "0")) as outer:
        with tracking.track(**options(tmp_path / "1")) as inner:
            inner.log(0, {"ber": 0.25})
        outer.log(0, {"ber": 0.5})
    assert [item["ber"] for item in history(tmp_path / "0")] == [0.5]
    assert [item["ber"] for item in history(tmp_path / "1")] == [0.25]


def test_the_environment_is_as_before_even_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    with pytest.raises(ValueError), tracking.track(**options(tmp_path)):
        assert os.environ["WANDB_ERROR_REPORTING"] == "false"
        raise ValueError
    assert os.environ["WANDB_ERROR_REPORTING"] == "true"
    assert "WANDB_DATA_DIR" not in os.environ


def track_in(folder: Path, body: str, mode: str = "offline") -> str:
    """A program that runs `body` inside one `track`."""
    return (
        "import os, signal, sys, time\nfrom pathlib import Path\nfrom feedback import tracking\n"
        f"with tracking.track(mode={mode!r}, folder=Path({str(folder)!r}), project='p', name=None, "
        "group=None, job_type=None, config={}) as tracker:\n"
    ) + "".join(f"    {line}\n" for line in body.splitlines())


def start(program: str, **variables: str) -> "subprocess.Popen[str]":
    env = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=env | {"PYTHONPATH": str(ROOT)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.mark.real
def test_an_offline_run_prints_nothing_and_calls_nobody(tmp_path: Path) -> None:
    calls: list[str] = []
    with server(calls) as address:
        names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "WANDB_BASE_URL")
        body = "tracker.log(0, {'ber': 0.5})\ntracker.table('t', ['a'], [[1]])\nraise SystemExit(3)"
        process = start(track_in(tmp_path, body), **dict.fromkeys(names, address))
        assert finish(process) == (3, "", "")
    assert calls == []
    assert exit_code(tmp_path) == 1


@pytest.mark.real
def test_a_run_that_is_killed_keeps_what_it_logged(tmp_path: Path) -> None:
    body = """for step in range(3): tracker.log(step, {'ber': 0.5})
tracker.log(3, {'last': 1})
file = next(Path(tracker.location).glob('*.wandb'))
until = time.monotonic() + 10
while b'last' not in file.read_bytes() and time.monotonic() < until: time.sleep(0.1)
print('ready', flush=True)
time.sleep(60)
"""
    with start(track_in(tmp_path, body)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    assert [line["loop/step"] for line in metrics(tmp_path)] == [0, 1, 2, 3]
    assert [item["loop/step"] for item in history(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.real
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the service in /proc")
def test_a_dead_service_costs_a_warning_and_neither_this_run_nor_the_next(tmp_path: Path) -> None:
    body = """tracker.log(0, {'ber': 0.5})
for stat in Path('/proc').glob('[0-9]*/stat'):
    process, parent = stat.parent.name, stat.read_text().rpartition(')')[2].split()[1]
    if int(parent) == os.getpid():
        os.kill(int(process), signal.SIGKILL)
time.sleep(1)
for step in range(1, 4): tracker.log(step, {'ber': 0.5})
"""
    program = track_in(tmp_path / "0", body)
    program += track_in(tmp_path / "1", "tracker.log(0, {'ber': 0.25})")
    code, out, err = finish(start(program))
    assert (code, out) == (0, "")
    assert err.count("wandb did not take the numbers of a step") == 1
    assert err.count("\n") == 2 and "wandb could not close the run" in err
    assert [line["loop/step"] for line in metrics(tmp_path / "0")] == [0, 1, 2, 3]
    assert [item["ber"] for item in history(tmp_path / "1")] == [0.25]
    assert exit_code(tmp_path / "1") == 0


def test_a_folder_wandb_cannot_use_costs_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "wandb").write_text("a file where wandb wants its folder")
    with tracking.track(**options(tmp_path)) as tracker:
        tracker.log(0, {"ber": 0.5})
        tracker.summary({"ber": 0.5})
    assert metrics(tmp_path) == [{"loop/step": 0, "ber": 0.5}]
    (warning,) = [record for record in caplog.records if not record.name.startswith("wandb")]  # pytest sees its log too
    assert "could not open an offline run" in warning.message


def test_something_wandb_refuses_costs_a_warning_and_the_rest_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.png").write_text("no picture")
    with tracking.track(**options(tmp_path)) as tracker:
        tracker.image("broken", tmp_path / "broken.png")
        tracker.log(0, {"ber": 0.5})
    (warning,) = [record for record in caplog.records if not record.name.startswith("wandb")]  # pytest sees its log too
    assert warning.levelno == logging.WARNING and "image 'broken'" in warning.message
    assert exit_code(tmp_path) == 0
    assert [item["ber"] for item in history(tmp_path)] == [0.5]


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_mistakes_of_the_caller_are_errors_in_every_mode(tmp_path: Path, mode: str) -> None:
    with tracking.track(**options(tmp_path, mode=mode)) as tracker:
        with pytest.raises(ValueError, match="row 1 has 1 cells for 2 columns"):
            tracker.table("t", ["a", "b"], [[1, 2], [3]])
        with pytest.raises(FileNotFoundError, match="nothing to track at"):
            tracker.image("ber", tmp_path / "missing.png")
        with pytest.raises(FileNotFoundError, match="nothing to track at"):
            tracker.artifact("a", "b", tmp_path / "missing", {})
        with pytest.raises(ValueError, match="'loop/step' is the step itself"):
            tracker.log(0, {"loop/step": 1})


def test_a_config_that_is_not_plain_is_refused_by_its_place(tmp_path: Path) -> None:
    config = {"push": [{"alpha": 1.0}, {"alpha": io.StringIO()}]}
    with (
        pytest.raises(TypeError, match=r"config\.push\[1\]\.alpha is a StringIO.*to_container"),
        tracking.track(**options(tmp_path, mode="disabled", config=config)),
    ):
        raise AssertionError("the block must not run")


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(tracking.TrackingError, match="'ofline' does not exist: use offline, online"):
        tracking.check("ofline")


def test_importing_tracking_and_checking_an_offline_mode_do_not_load_wandb() -> None:
    code = (
        "import sys; from feedback import tracking; tracking.check('offline');"
        "tracking.check('disabled'); print('wandb' in sys.modules)"
    )
    assert finish(start(code)) == (0, "False\n", "")


def test_online_without_a_key_is_refused_at_once_without_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
            raise AssertionError("asked on the terminal")

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(tracking.TrackingError, match=r"wandb login.*WANDB_API_KEY.*'offline'"):
        tracking.check("online")
    with (
        pytest.raises(tracking.TrackingError, match="needs a wandb key"),
        tracking.track(**options(tmp_path, mode="online")),
    ):
        raise AssertionError("the block must not run")


def test_a_key_is_found_in_the_environment_and_in_the_netrc_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    tracking.check("online")
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine elsewhere.example login user password secret\n")
    with pytest.raises(tracking.TrackingError):
        tracking.check("online")
    netrc = "machine api.wandb.ai login user password " + "k" * 40 + "\n"
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "netrc").chmod(0o600)
    tracking.check("online")


KEY = {"WANDB_API_KEY": "k" * 40, "NO_PROXY": "127.0.0.1"}


@pytest.mark.real
def test_an_online_run_reaches_the_server_with_its_exit_code(tmp_path: Path) -> None:
    calls: list[str] = []
    with server(calls) as address:
        body = "tracker.log(7, {'ber': 0.125})\nprint(tracker.location)\nraise SystemExit(3)"
        process = start(track_in(tmp_path, body, "online"), WANDB_BASE_URL=address, **KEY)
        code, out, err = finish(process)
    assert (code, err) == (3, "")
    assert "/p/runs/" in out
    streamed = "".join(call for call in calls if "file_stream" in call)
    assert '\\"ber\\":0.125' in streamed and '\\"loop/step\\":7' in streamed
    assert '"exitcode":1' in streamed


@pytest.mark.real
def test_an_online_run_that_the_server_refuses_says_what_to_do(tmp_path: Path) -> None:
    with server([], status=401) as address:
        process = start(track_in(tmp_path, "pass", "online"), WANDB_BASE_URL=address, **KEY)
        code, _, err = finish(process)
    assert code == 1
    assert "TrackingError: wandb could not open an online run" in err
    assert "use mode 'offline'" in err


PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c6360000000020001e221bc330000000049454e44ae426082"
)  # a valid picture of one grey pixel


@contextmanager
def server(calls: list[str], status: int = 200) -> Iterator[str]:
    """As much of a wandb server as one run needs, on this machine; keeps what it was asked."""
    project = {"id": "P", "name": "p", "entity": {"id": "E", "name": "e"}}
    bucket = {"id": "B", "name": "r", "displayName": "r", "config": "{}", "historyLineCount": 0}
    answer = {
        "viewer": {"id": "U", "entity": "e", "username": "u"},
        "upsertBucket": {"bucket": bucket | {"project": project}, "inserted": True},
        "createRunFiles": {"runID": "B", "uploadHeaders": [], "files": []},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = zlib.decompress(body, wbits=31)
            calls.append(f"{self.path} {body.decode()}")
            reply = json.dumps({"data": answer} if "graphql" in self.path else {}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_GET = do_PUT = do_CONNECT = do_POST

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
