"""The report: what it says of a folder, whole or half broken, and what a browser makes of it."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from feedback import report, results

HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=document.title='taken'>"
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001a5f64540"
    "0000000049454e44ae426082"
)
OWN = {
    "kind": "forward",
    "path": "layers.1",
    "order": 0,
    "name": "_Add",
    "defined": "feedback.pushing:33",
    "owner": "ours",
}


def job(folder: Path, *overrides: str, **record: Any) -> Path:
    """What a job leaves; without a record it was stopped before it could."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(dict(word.split("=", 1) for word in overrides)))
    if record:
        results.write_result(folder, {"status": "finished", "experiment": "hidden_bits", **record})
    return folder


def arms(ber: float) -> list[dict[str, Any]]:
    """A table as hidden_bits leaves it."""
    return [
        {
            "arm": arm, "alpha": 2.0, "reader": reader, "split": "messages", "step": step, "ber": ber,
            "ber_low": ber - 0.1, "ber_high": ber + 0.1, "pushed": step == 1,
        }
        for arm in ("soft", "hard") for reader in ("informed", "blind") for step in (1, 2, 3)
    ]  # fmt: skip


def log(folder: Path, **metrics: list[float | None]) -> None:
    lines = [{"loop/step": step + 1} | {name: y[step] for name, y in metrics.items()} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Four jobs: two finished, one failed, one stopped in the middle of a line."""
    folder = tmp_path / "sweep"
    for number, (alpha, ber) in enumerate([("0", 0.5), ("10", 0.125)]):
        own = job(
            folder / str(number), f"alpha={alpha}", "steps=3",
            summary={"soft": {"ber": ber, "alpha": float(alpha)}, "band": [ber, 1.0], "says": [" cat"]},
            seed=0, model={"name": "tiny", "checksum": "ab12"}, versions={"torch": "2.13"}, wall_seconds=number + 0.5,
            audit={"before": [], "added_during": [OWN, OWN], "after": []}, config={"alpha": alpha, "at": {"block": 1}},
            transcripts=[{"arm": "soft", "alpha": 2.0, "prompt": "Once", "cover": [" a", "\n"],
                          "steered": [" a", " b"]}],
        )  # fmt: skip
        results.write_table(own / "table.csv", arms(ber))
        log(own, **{"soft/kl": [0.0, 1.0, 2.0], "soft/ber": [0.0, ber, None], "soft/ber_low": [0.0, 0.0, 0.0]})
        (own / "figures").mkdir()
        (own / "figures" / "ber_over_steps.png").write_bytes(PIXEL)
    failed = job(folder / "2", "alpha=-1", "steps=3", status="failed", traceback="Traceback …\nValueError: no")
    results.write_result(failed, results.read_result(failed) | {"error": f"ValueError: {failed.resolve()}/x is no"})
    log(job(folder / "10", "alpha=2", "steps=3"), **{"soft/ber": [0.25, 0.25, 0.25]})
    with (folder / "10" / "metrics.jsonl").open("a") as file:
        file.write('{"loop/step": 4, "soft/b')
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    return folder


class Page(HTMLParser):
    """The page's visible text, and its tags."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.inside = "", ""
        self.charts: list[dict[str, Any]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "charts":
            self.charts = json.loads(data)
        elif self.inside not in ("script", "style"):
            self.text += data


def page(folder: Path) -> Page:
    return Page(report.write(folder))


def chart(of: Page, title: str) -> dict[str, Any]:
    return next(chart for chart in of.charts if chart["title"] == title)


# ---------------------------------------------------------------------------------------------------- the folder


def test_a_sweep_has_its_jobs_in_the_order_of_their_numbers_and_says_how_each_ended(sweep: Path) -> None:
    found = report.jobs(sweep)
    assert [(one.number, one.status) for one in found] == [
        (0, "finished"), (1, "finished"), (2, "failed"), (10, "incomplete")
    ]  # fmt: skip
    assert found[1].overrides == {"alpha": "10", "steps": "3"}
    assert found[1].config == {"alpha": "10", "at.block": 1}
    assert found[3].config == {"alpha": "2", "steps": "3"}  # Hydra's, as there is no result
    assert len(found[3].metrics) == 3  # half a line is no line


def test_a_run_is_one_job_and_another_folder_is_refused(sweep: Path, tmp_path: Path) -> None:
    (one,) = report.jobs(sweep / "1")
    assert one.status == "finished" and one.overrides["alpha"] == "10"
    with pytest.raises(FileNotFoundError, match=r"no run in .*expected the folder of a run"):
        report.jobs(tmp_path)


def test_the_summary_has_a_row_per_job_the_settings_that_differ_and_every_number_by_its_dotted_name(
    sweep: Path,
) -> None:
    report.write(sweep)
    with (sweep / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["job", "status", "error", "alpha", "soft.ber", "soft.alpha", "band.0", "band.1", "says.0"]
    assert [list(row.values()) for row in rows] == [
        ["0", "finished", "", "0", "0.5", "0.0", "0.5", "1.0", " cat"],
        ["1", "finished", "", "10", "0.125", "10.0", "0.125", "1.0", " cat"],
        ["2", "failed", "ValueError: ./x is no", "-1", "", "", "", "", ""],
        ["10", "incomplete", "", "2", "", "", "", "", ""],
    ]


def test_a_number_of_the_summary_that_is_called_like_a_setting_keeps_both(tmp_path: Path) -> None:
    for number, name in enumerate(("adder", "latch")):
        job(tmp_path / str(number), f"circuit={name}", summary={"circuit": name, "status": number})
    assert report.summary_rows(report.jobs(tmp_path)) == [
        {"job": n, "status": "finished", "error": None, "circuit": name, "summary.circuit": name, "summary.status": n}
        for n, name in enumerate(("adder", "latch"))
    ]


def test_the_same_sweep_elsewhere_and_slower_gives_the_same_summary_and_the_same_folder_the_same_page(
    sweep: Path, tmp_path: Path
) -> None:
    other = tmp_path / "elsewhere" / "sweep"
    shutil.copytree(sweep, other)
    for number in ("0", "1"):
        results.write_result(other / number, results.read_result(other / number) | {"wall_seconds": 99.0})
    failed = results.read_result(other / "2")
    failed["error"] = failed["error"].replace(str(sweep.resolve()), str(other.resolve()))
    results.write_result(other / "2", failed)
    first = report.write(sweep).read_bytes()
    report.write(other)
    assert (sweep / "summary.csv").read_bytes() == (other / "summary.csv").read_bytes()
    assert report.write(sweep).read_bytes() == first


@pytest.mark.parametrize("name", ["result.json", "table.csv", "metrics.jsonl", ".hydra/overrides.yaml"])
@pytest.mark.parametrize(
    "junk", [b"", b"\xff\xfe{", b'{"status": ', b"[1, [2", b'a,b\n"1', b"[[1]]", b"a,b\n1\n", b"null"]
)
def test_a_file_that_cannot_be_read_costs_its_job_that_file_and_no_other_job_anything(
    sweep: Path, name: str, junk: bytes
) -> None:
    (sweep / "1" / name).write_bytes(junk)
    told = page(sweep)
    found = report.jobs(sweep)
    assert [one.status for one in found if one.number != 1] == ["finished", "failed", "incomplete"]
    if name == "result.json":
        assert found[1].status == "incomplete" and "result.json cannot be read" in str(found[1].error)
        assert "result.json cannot be read" in told.text


@pytest.mark.parametrize(
    "record",
    [
        {
            "summary": [1],
            "model": "tiny",
            "versions": 3,
            "audit": {"before": 1, "after": [2]},
            "config": [1],
            "seed": {},
        },
        {"summary": {"a": {}, "b": [], "c": None}, "audit": [], "transcripts": 5, "error": ["x"], "experiment": None},
        {"transcripts": [{"arm": 1}], "audit": {"before": [{}]}, "model": {}, "status": ["finished"], "traceback": 4},
    ],
)
def test_a_result_of_another_shape_is_reported_as_far_as_it_goes(tmp_path: Path, record: dict[str, Any]) -> None:
    results.write_table(job(tmp_path / "0", "alpha=1", **record) / "table.csv", [dict.fromkeys(arms(0.5)[0])])
    results.write_table(job(tmp_path / "1", "alpha=2", **record) / "table.csv", [{"kind": None, "alpha": "x", "u": 1}])
    assert "2 jobs" in page(tmp_path).text


# ------------------------------------------------------------------------------------------------------- the page


def test_the_page_says_how_the_jobs_ended_on_which_model_and_why_one_failed(sweep: Path) -> None:
    told = page(sweep)
    assert "hidden_bits: 4 jobs" in told.text
    for words in ("2 finished", "1 failed", "1 incomplete", "checksum ab12", "torch", "ValueError: ./x is no"):
        assert words in told.text
    assert "Traceback …" in told.text


def test_the_page_asks_the_network_for_nothing(sweep: Path) -> None:
    told = page(sweep)
    for tag, attributes in told.tags:
        for name in ("src", "href", "action", "srcset", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert any("default-src 'none'" in (attributes.get("content") or "") for _, attributes in told.tags)


def test_every_header_says_what_it_heads_and_every_picture_what_it_shows(sweep: Path) -> None:
    told = page(sweep)
    assert {attributes.get("scope") for tag, attributes in told.tags if tag == "th"} == {"col", "row"}
    pictures = [attributes["alt"] for tag, attributes in told.tags if tag == "img"]
    assert pictures == ["ber over steps, 0: alpha=0", "ber over steps, 1: alpha=10"]


def test_curves_start_at_the_bit_error_rate_with_a_line_per_job_that_logged_it(sweep: Path) -> None:
    steps = chart(page(sweep), "Over the steps, job by job")
    assert steps["choices"] == {"metric": ["soft/kl", "soft/ber"]} and steps["start"] == [1]  # bounds are no metrics
    assert [line["job"] for line in steps["views"][1]["series"]] == [0, 1, 10]
    first = steps["views"][1]["series"][1]
    assert first["name"] == "1: alpha=10" and first["y"] == [0.0, 0.125, None] and first["low"] == [0.0, 0.0, 0.0]


def test_a_step_that_was_logged_twice_counts_as_last_logged(tmp_path: Path) -> None:
    log(job(tmp_path, "a=1"), x=[1.0, 2.0, 3.0])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"loop/step": 2, "x": 7.0}\n')
    (view,) = chart(page(tmp_path), "Over the steps, job by job")["views"]
    assert (view["series"][0]["x"], view["series"][0]["y"]) == ([1, 2, 3], [1.0, 7.0, 3.0])


def test_the_summary_is_drawn_over_a_setting_with_a_line_per_choice_of_the_others(tmp_path: Path) -> None:
    for number, (alpha, seed) in enumerate([(8, 0), (2, 0), (2, 1), (8, 1)]):
        job(tmp_path / str(number), f"alpha={alpha}", f"seed={seed}", summary={"x": 0, "ber": alpha + seed / 10})
    over = chart(page(tmp_path), "Summary over settings")
    assert over["choices"] == {"setting": ["alpha", "seed"], "number": ["ber", "x"]}  # error rates first
    series = over["views"][0]["series"]
    assert [(line["name"], line["x"], line["y"]) for line in series] == [
        ("seed=0", [2.0, 8.0], [2.0, 8.0]), ("seed=1", [2.0, 8.0], [2.1, 8.1])
    ]  # fmt: skip


def test_error_rates_are_drawn_per_job_reader_and_split_with_interval_and_push(sweep: Path) -> None:
    told = chart(page(sweep), "Bit error rate over the steps, arm by arm")
    assert told["choices"] == {
        "job": ["0: alpha=0", "1: alpha=10"], "reader": ["informed", "blind"], "held out": ["messages"]
    }  # fmt: skip
    view = next(view for view in told["views"] if view["at"] == [1, 1, 0])
    assert view["pushed"] == [1, 1] and view["reference"] == 0.5
    assert [line["name"] for line in view["series"]] == ["soft", "hard"]
    assert view["series"][0] == {
        "name": "soft", "job": None, "x": [1, 2, 3], "y": [0.125] * 3, "low": [0.025] * 3, "high": [0.225] * 3
    }  # fmt: skip


def test_hysteresis_has_the_end_of_every_level_of_each_branch_and_the_thresholds(tmp_path: Path) -> None:
    up = [(0, -0.9), (0, -0.8), (5, -0.7), (5, 0.9)]
    rows = [
        {"kind": kind, "dwell": 2, "row": row, "step": step, "alpha": alpha, "u": u}
        for row, (kind, levels) in enumerate({"up": up, "down": up[::-1], "hold": up}.items())
        for step, (alpha, u) in enumerate(levels)
    ]
    folder = job(tmp_path, "a=1", summary={"alpha_set": 4.5, "alpha_reset": -1})
    results.write_table(folder / "table.csv", rows)
    (view,) = chart(page(folder), "Hysteresis")["views"]
    assert [(line["name"], line["x"], line["y"]) for line in view["series"]] == [
        ("up, dwell 2", [0, 5], [-0.8, 0.9]), ("down, dwell 2", [5, 0], [-0.7, -0.9])
    ]  # fmt: skip
    assert [mark["x"] for mark in view["marks"]] == [-1, 4.5]


def test_truth_tables_of_logic_gates_have_a_row_per_gate_and_say_right_or_wrong_in_a_sign(tmp_path: Path) -> None:
    rows = [
        {"gate": "AND", "control": control, "a": a, "b": b, "expected": a & b, "accuracy": accuracy}
        for control, accuracy in (("gate", 1.0), ("cut", 0.25))
        for a in (0, 1)
        for b in (0, 1)
    ]
    results.write_table(job(tmp_path, "a=1", summary={}) / "table.csv", rows)
    text = page(tmp_path).text
    assert "AND ✓ 0 (100%) ✓ 0 (100%) ✓ 0 (100%) ✓ 1 (100%)".replace(" ", "") in text.replace(" ", "")
    assert "✗ 1 (25%)" in text


def test_truth_tables_of_circuits_have_a_row_per_input_with_its_trials(tmp_path: Path) -> None:
    rows = [
        {"wires": "host", "tick": 1, "row": row, "a": a, "q expected": a, "q read": a, "correct": (row, a) != (1, 1)}
        for row in (0, 1)
        for a in (0, 1)
    ]
    results.write_table(job(tmp_path, "a=1", summary={}) / "table.csv", rows)
    (found,) = report.jobs(tmp_path)
    (grid,) = report._truth_tables(found)
    assert grid == {
        "title": "host",
        "columns": ["a", "q expected", "right"],
        "rows": [[("0", None), ("0", None), ("2 of 2", True)], [("1", None), ("1", None), ("1 of 2", False)]],
    }


def test_transcripts_mark_the_tokens_that_are_not_those_of_the_unpushed_run(sweep: Path) -> None:
    told = report._transcripts(report.jobs(sweep)[0])
    assert [(one["name"], one["differ"], one["words"]) for one in told] == [("soft, α = 2, after “Once”", 1, 2)]
    assert told[0]["reference"] == [(" a", False), ("↵\n", True)] and told[0]["text"] == [(" a", False), (" b", True)]


def test_texts_of_a_table_are_compared_with_the_first_and_equal_ones_told_once(tmp_path: Path) -> None:
    rows = [{"row": row, "text": text} for row, text in enumerate((" bird bird", " bird bird", " bird cat", None))]
    results.write_table(job(tmp_path, "a=1") / "table.csv", rows)
    told = report._transcripts(report.jobs(tmp_path)[0])
    assert [(one["name"], one["more"], one["differ"]) for one in told] == [
        ("row 0", 1, 0),
        ("row 2", 0, 1),
        ("row 3", 0, 2),
    ]


def test_tokens_of_a_table_are_read_step_by_step(tmp_path: Path) -> None:
    rows = [
        {"kind": "up", "row": row, "step": s, "token": " cat" if row * s else " dog"} for row in (0, 1) for s in (0, 1)
    ]
    results.write_table(job(tmp_path, "a=1") / "table.csv", rows)
    told = report._transcripts(report.jobs(tmp_path)[0])
    assert [(one["name"], one["differ"]) for one in told] == [("kind up, row 0", 0), ("kind up, row 1", 1)]
    assert told[1]["text"] == [(" dog", False), (" cat", True)]


def test_the_audit_says_plainly_whether_something_foreign_was_there(sweep: Path) -> None:
    text = page(sweep).text
    assert (
        "Nothing foreign was on the model in any of the 2 jobs that looked." in text and "2 jobs left no audit." in text
    )
    foreign = OWN | {"owner": "foreign", "name": "spy"}
    found = results.read_result(sweep / "1")
    results.write_result(sweep / "1", found | {"audit": {"before": [], "clean_run": {"after": [foreign]}}})
    text = page(sweep).text
    assert "Foreign code was on the model." in text and "clean run, after✗ foreign" in text and "spy" in text


def test_only_settings_that_differ_are_listed(sweep: Path) -> None:
    settings = dict(report._page("", report.jobs(sweep), report.summary_rows(report.jobs(sweep)))["settings"])
    assert settings["alpha"] == ["0", "10", "-1", "2"]
    results.write_result(sweep / "2", results.read_result(sweep / "2") | {"config": {"alpha": "0", "at": {"block": 1}}})
    two = [one for one in report.jobs(sweep) if one.number in (0, 2)]
    assert report._page("", two, report.summary_rows(two))["settings"] == []


def test_figures_beyond_the_limit_are_named_instead_of_embedded(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "FIGURE_BYTES", len(PIXEL))
    told = page(sweep)
    assert sum(tag == "img" for tag, _ in told.tags) == 1
    assert "job 1: ber_over_steps.png" in told.text


def hostile(folder: Path) -> Path:
    """A sweep in which every text is markup."""
    for number in range(2):
        own = job(
            folder / str(number), f"name={HOSTILE}{number}", experiment=HOSTILE,
            summary={HOSTILE: HOSTILE, "n": number}, model={"name": HOSTILE, "checksum": HOSTILE},
            versions={HOSTILE: HOSTILE}, config={HOSTILE: HOSTILE + str(number)},
            audit={HOSTILE: [dict.fromkeys(OWN, HOSTILE)]},
            transcripts=[{"arm": HOSTILE, "alpha": 1.0, "prompt": HOSTILE, "cover": [HOSTILE], "steered": ["<!--"]}],
        )  # fmt: skip
        results.write_table(own / "table.csv", [row | {"arm": HOSTILE, "reader": HOSTILE} for row in arms(0.5)])
        log(own, **{HOSTILE: [1.0, 2.0, 3.0]})
        (own / "figures").mkdir()
        (own / "figures" / "<u onload=x>.png").write_bytes(PIXEL)
    job(folder / "2", "name=x", status="failed", experiment=HOSTILE, error=HOSTILE, traceback=HOSTILE)
    return folder


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    told = page(hostile(tmp_path))
    assert sum(tag == "script" for tag, _ in told.tags) == 2 and not any(tag == "u" for tag, _ in told.tags)
    assert all((attributes.get("src") or "").startswith("data:") for tag, attributes in told.tags if tag == "img")
    assert chart(told, "Over the steps, job by job")["choices"] == {"metric": [HOSTILE]}
    assert HOSTILE in told.text


def test_importing_the_report_loads_neither_wandb_nor_hydra_nor_torch() -> None:
    code = (
        "import sys; from feedback import report;"
        "print(sorted({'wandb', 'hydra', 'omegaconf', 'torch', 'matplotlib'} & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_command_prints_where_the_page_is_and_refuses_what_is_no_run(sweep: Path, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, str(root / "scripts" / "report.py")]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([*command, str(sweep)], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(sweep / "report.html"), done.stderr
    done = subprocess.run([*command, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "error: no run in" in done.stderr and "Traceback" not in done.stderr


# --------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    from selenium import webdriver

    names = {"browser": ("chromium", "chromium-browser", "google-chrome"), "driver": ("chromedriver",)}
    found = {part: next(filter(None, map(shutil.which, those)), None) for part, those in names.items()}
    missing = [" or ".join(names[part]) for part, path in found.items() if path is None]
    if missing:
        reason = f"{' and '.join(missing)} not found: install Debian's chromium and chromium-driver"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = str(found["browser"])
    switches = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    for switch in (
        *switches.split(),
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(found["driver"])))
    yield driver
    driver.quit()


def opened(browser: Any, folder: Path, width: int = 1200, scheme: str = "light") -> Any:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.get(report.write(folder).resolve().as_uri())
    return browser


def texts(browser: Any, selector: str) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility())"
        ".map(e => e.textContent.trim())",
        selector,
    )


def click(browser: Any, selector: str, index: int = 0) -> None:
    browser.find_elements("css selector", selector)[index].click()


@pytest.mark.real
def test_the_page_opens_without_an_error_and_without_a_request(browser: Any, sweep: Path) -> None:
    opened(browser, sweep)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert len(texts(browser, ".chart svg[role=img]")) == 3
    assert texts(browser, "nav a") == texts(browser, "h2")


@pytest.mark.real
def test_a_header_sorts_by_number_up_and_down_with_empty_cells_last(browser: Any, sweep: Path) -> None:
    opened(browser, sweep)
    heads = texts(browser, "#job-table thead th")
    ber = heads.index("soft.ber")
    orders = []
    for _ in range(2):
        browser.find_elements("css selector", "#job-table thead th:not([hidden]) button")[ber].send_keys("\n")
        orders.append(texts(browser, "#job-table tbody th"))
    assert orders == [["1", "0", "2", "10"], ["0", "1", "2", "10"]]
    states = browser.execute_script(
        "return [...document.querySelectorAll('th[aria-sort]:not([aria-sort=none])')].map(e => e.ariaSort)"
    )
    assert states == ["descending"]
    click(browser, "#job-table thead th:not([hidden]) button", heads.index("alpha"))
    assert texts(browser, "#job-table tbody th") == ["2", "0", "10", "1"]  # -1, 0, 2, 10


@pytest.mark.real
def test_the_filter_leaves_rows_and_their_curves(browser: Any, sweep: Path) -> None:
    opened(browser, sweep)
    field = browser.find_element("css selector", "#filter")
    field.send_keys("VALUEERROR")
    assert texts(browser, "#job-table tbody th") == ["2"]
    field.clear()
    field.send_keys("10")
    assert texts(browser, "#job-table tbody th") == ["1", "10"]
    click(browser, "#filter-column option", 5)  # any, job, status, seconds, error, alpha
    assert texts(browser, "#job-table tbody th") == ["1"]
    assert texts(browser, "#left") == ["1 of 4 jobs, here and in the curves over steps"]
    lines = browser.execute_script(
        "return document.querySelectorAll('.chart')[1].querySelectorAll('.plot .line').length"
    )
    assert lines == 1


@pytest.mark.real
def test_a_column_is_shown_on_request(browser: Any, sweep: Path) -> None:
    opened(browser, sweep)
    assert "says.0" not in texts(browser, "#job-table thead th")
    click(browser, ".columns summary")
    click(browser, ".choice label", -1)
    assert texts(browser, "#job-table thead th")[-1] == "says.0"


@pytest.mark.real
def test_the_legend_switches_a_line_off_and_on_and_the_select_changes_the_metric(browser: Any, sweep: Path) -> None:
    opened(browser, sweep)
    plot = "figure[data-chart='1']"
    names = "0: alpha=0", "1: alpha=10", "10: alpha=2"
    drawn = f'return [...document.querySelectorAll("{plot} .plot .line")].map(e => e.dataset.name)'
    assert browser.execute_script(drawn) == [*names]
    click(browser, f"{plot} .legend button", 1)
    assert browser.execute_script(drawn) == [names[0], names[2]]
    assert browser.find_elements("css selector", f"{plot} .legend button")[1].get_attribute("aria-pressed") == "false"
    click(browser, f"{plot} .legend button", 1)
    assert browser.execute_script(drawn) == [*names]
    click(browser, f"{plot} select option", 0)
    assert browser.execute_script(drawn) == [*names[:2]]  # the stopped job logged no soft/kl
    assert texts(browser, f"{plot} figcaption") == ["soft/kl"]


@pytest.mark.real
def test_pointing_and_the_arrow_keys_read_the_values_off_the_plot(browser: Any, sweep: Path) -> None:
    from selenium.webdriver import ActionChains, Keys

    opened(browser, sweep)
    plot = browser.find_element("css selector", "figure[data-chart='1'] .plot svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(browser).move_to_element(plot).perform()  # the middle: step 2
    readout = "figure[data-chart='1'] .readout"
    expected = "loop step 2: 0: alpha=0: 0.5 1: alpha=10: 0.125 10: alpha=2: 0.25".replace(" ", "")
    assert texts(browser, readout)[0].replace(" ", "") == expected
    ActionChains(browser).move_by_offset(0, 0).perform()
    browser.execute_script("arguments[0].focus()", plot)
    plot.send_keys(Keys.ARROW_RIGHT)
    assert texts(browser, readout)[0].startswith("loop step 3")


@pytest.mark.real
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_takes_the_systems_colours_and_switches_them(browser: Any, sweep: Path, scheme: str) -> None:
    opened(browser, sweep, scheme=scheme)

    def brightness() -> int:
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))

    assert (brightness() > 600) == (scheme == "light")
    click(browser, "#theme")
    assert (brightness() > 600) == (scheme == "dark")


@pytest.mark.real
def test_a_phone_scrolls_the_page_downwards_only(browser: Any, sweep: Path, tmp_path: Path) -> None:
    for folder in (sweep, hostile(tmp_path / "hostile")):
        opened(browser, folder, width=390)
        browser.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


@pytest.mark.real
def test_on_paper_everything_is_open_and_nothing_is_there_to_press(browser: Any, sweep: Path) -> None:
    opened(browser, sweep, scheme="dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert texts(browser, "details:not([open]):not(.columns)") == []
    assert texts(browser, "input, select, nav, #theme, .choice") == []
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script("return document.querySelectorAll('details[open]').length") == 1


@pytest.mark.real
def test_hostile_texts_run_nothing(browser: Any, tmp_path: Path) -> None:
    opened(browser, hostile(tmp_path / "hostile"))
    assert browser.get_log("browser") == []
    assert browser.title == f"{HOSTILE}: 3 jobs"


def test_how_a_job_was_launched_is_no_difference_between_jobs(tmp_path):
    for number, more in enumerate((["alpha=1"], ["alpha=2", "resume=there", "quiet=true", "tracking.mode=disabled"])):
        hydra = tmp_path / str(number) / ".hydra"
        hydra.mkdir(parents=True)
        (hydra / "overrides.yaml").write_text("".join(f"- {word}\n" for word in more))
    rows = report.summary_rows(report.jobs(tmp_path))
    assert [set(row) for row in rows] == [{"job", "status", "error", "alpha"}] * 2
