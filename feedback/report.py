"""One page and one table about a finished sweep, or a single run, made from what lies in its folder.

    path = write(Path("multirun/hidden_bits/2030-01-31/12-00-00-ab12cd"))   # …/report.html, with summary.csv beside it

The page holds its data, style and script and asks the network for nothing. A job that failed, was stopped or left half
a file is reported as such and hides no other. The same folder gives the same bytes.
"""

import base64
import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import jinja2
import yaml

from feedback import results
from feedback.results import Cell
from feedback.tracking import STEP

FIGURE_BYTES = 20_000_000  # figures embedded in one page, all together; the others are named
TEXTS, TOKENS = 40, 300  # distinct transcripts of a job, and words of each, that are shown
TRACES = ("result.json", ".hydra", "run.log", "metrics.jsonl", "table.csv")  # any of them makes a folder a run
FOUND = ("owner", "kind", "path", "name", "defined")  # what an audit tells of something on a model
NO_NUMBER = ("resume", "quiet", "tracking", "objective", "hydra")  # settings that change nothing that is measured


@dataclass(frozen=True)
class Job:
    """One run of a sweep as its folder tells it.

    status: finished, failed or incomplete (no readable result). result: `result.json`, {} without one. overrides: what
    was set on the command line. config: dotted setting → value, lists whole. problems: files that are there and cannot
    be read.
    """

    number: int
    folder: Path
    status: str
    result: dict[str, Any]
    overrides: dict[str, str]
    config: dict[str, Any]
    table: list[dict[str, Cell]]
    metrics: list[dict[str, Any]]
    figures: list[Path]
    problems: list[str]

    @property
    def error(self) -> str | None:
        """Why there is no result, without the folder's path, so that it is the same wherever the job ran."""
        text = self.result.get("error") if self.status == "failed" else "; ".join(self.problems)
        return self.without_path(text) or None if isinstance(text, str) else None

    def without_path(self, text: str) -> str:
        return text.replace(str(self.folder.resolve()), ".")

    def part(self, name: str) -> dict[str, Any]:
        """A part of the result that should be a dict, {} when it is none."""
        part = self.result.get(name)
        return part if isinstance(part, dict) else {}


def jobs(folder: Path) -> list[Job]:
    """The jobs of a sweep folder (numbered folders inside), or the one job of a run folder, in order.

    Raises FileNotFoundError when `folder` holds neither.
    """
    if any((folder / name).exists() for name in TRACES):
        return [_job(0, folder)]
    numbered = [path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()]
    if not numbered:
        raise FileNotFoundError(
            f"no run in {folder}: expected the folder of a run (with result.json or .hydra) or of a sweep (with jobs "
            "0, 1, 2, …)"
        )
    return [_job(int(path.name), path) for path in sorted(numbered, key=lambda path: int(path.name))]


def summary_rows(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """A row per job: job, status, error, the overridden settings that differ, then the summary with dotted names.

    Nothing in it depends on where, when or how fast the jobs ran. A summary name that is already a column's is written
    as `summary.NAME`.
    """
    settings = differing([job.overrides for job in jobs])
    taken = {"job", "status", "error", *settings}
    rows = []
    for job in jobs:
        row: dict[str, Any] = {"job": job.number, "status": job.status, "error": job.error}
        row |= {name: job.overrides.get(name) for name in settings}
        for name, value in results.flat(job.part("summary"), lists=True):
            value = job.without_path(value) if isinstance(value, str) else value
            row[f"summary.{name}" if name in taken else name] = value
        rows.append(row)
    return rows


def write(folder: Path, found: Sequence[Job] | None = None) -> Path:
    """Writes `summary.csv` and `report.html` into `folder`; returns the page's path. Raises as `jobs` does.

    found: its jobs, where they have been read already.
    """
    found = jobs(folder) if found is None else found
    rows = summary_rows(found)
    results.write_table(folder / "summary.csv", rows)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = _shown
    page = environment.get_template("report.html").render(_page(folder.resolve().name, found, rows))
    return results.replace_file(folder / "report.html", page)


# ------------------------------------------------------------------------------------------------- reading a folder


def _job(number: int, folder: Path) -> Job:
    problems: list[str] = []

    def read(name: str, parse: Callable[[Path], Any], kind: type) -> Any:
        path = folder / name
        if not path.exists():
            return kind()
        try:
            found = parse(path)
            if isinstance(found, kind):
                return found
            reason = f"expected a {kind.__name__}, found a {type(found).__name__}"
        except (OSError, ValueError, IndexError, RecursionError, csv.Error, yaml.YAMLError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        problems.append(f"{name} cannot be read ({reason})")
        return kind()

    result = read("result.json", lambda path: results.plain(json.loads(path.read_text("utf-8"))), dict)
    status = result.get("status")
    words = read(".hydra/overrides.yaml", _yaml, list)
    config = result.get("config") or read(".hydra/config.yaml", _yaml, dict)
    return Job(
        number=number,
        folder=folder,
        status=status if status in ("finished", "failed") else "incomplete",
        result=result,
        overrides=_that_matter(dict(_override(str(word)) for word in words)),
        config=_that_matter({name: _whole(one) for name, one in results.flat(config)})
        if isinstance(config, dict)
        else {},
        table=read("table.csv", results.read_table, list),
        metrics=read("metrics.jsonl", _lines, list),
        figures=sorted((folder / "figures").glob("*.png")),
        problems=problems,
    )


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def _override(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name.lstrip("+"), value


def _whole(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def _that_matter(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name.partition(".")[0] not in NO_NUMBER}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; what a stopped job left of its last line is dropped."""
    found = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get(STEP), int | float):
            found.append({name: value for name, value in values.items() if isinstance(value, int | float | None)})
    return found


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values are not the same in all of them, those that one lacks included."""
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if len({repr(one.get(name)) for one in settings}) > 1]


# ------------------------------------------------------------------------------------------------------- the page


def _page(name: str, jobs: Sequence[Job], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    settings = differing([job.overrides for job in jobs])
    labels = {job.number: _label(job, settings) for job in jobs}
    timed = {job.number: {"seconds": job.result.get("wall_seconds")} for job in jobs}
    rows = [{"job": row["job"], "status": row["status"], **timed[row["job"]], **row} for row in rows]
    errors = {"error"} if any(row["error"] for row in rows) else set()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    numbers = [column for column in columns if column not in {"job", "status", "seconds", "error", *settings}]
    headline = [column for column in numbers if column.split(".")[-1] == "ber"]
    headline += [column for column in numbers if "." not in column and column not in headline]
    figures, left_out = _figures(jobs)
    charts = [
        _over_settings(rows, settings, numbers),
        _over_steps(jobs, labels),
        _ber_over_steps(jobs, labels),
        _hysteresis(jobs, labels),
    ]
    differ = differing([job.config for job in jobs])
    audits = _audits(jobs)
    return {
        "max_texts": TEXTS,
        "name": name,
        "experiments": sorted({str(job.result["experiment"]) for job in jobs if "experiment" in job.result}),
        "jobs": jobs,
        "labels": labels,
        "counts": {
            status: sum(job.status == status for job in jobs) for status in ("finished", "failed", "incomplete")
        },
        "versions": _variants(jobs, "versions"),
        "models": _variants(jobs, "model"),
        "changed": [job.number for job in jobs if job.result.get("weights_unchanged") is False],
        "columns": columns,
        "rows": rows,
        "shown_columns": {"job", "status", "seconds", *errors, *settings, *headline[:12]},
        "overrides": jobs[0].overrides if len(jobs) == 1 else {},
        "charts": results.plain([chart for chart in charts if chart["views"]]),
        "truth_tables": _by_job(jobs, _truth_tables),
        "transcripts": _by_job(jobs, _transcripts),
        "settings": [(name, [job.config.get(name) for job in jobs]) for name in differ],
        "audits": audits,
        "audited": sum(len(numbers) for numbers, _ in audits),
        "foreign": any(one["owner"] == "foreign" for _, looks in audits for _, found in looks for one, _ in found),
        "figures": figures,
        "left_out": left_out,
    }


def _label(job: Job, settings: Sequence[str]) -> str:
    set_to = ", ".join(f"{name}={job.overrides[name]}" for name in settings if name in job.overrides)
    return f"{job.number}: {set_to}" if set_to else f"job {job.number}"


def _shown(value: Any) -> str:
    """A value as a reader wants it: four digits, and nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _variants(jobs: Sequence[Job], name: str) -> list[tuple[dict[str, Any], list[int]]]:
    """Each different value of a part of the results, and the jobs that have it."""
    found: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for job in jobs:
        if job.part(name):
            found.setdefault(json.dumps(job.part(name)), (job.part(name), []))[1].append(job.number)
    return list(found.values())


def _by_job(jobs: Sequence[Job], make: Callable[[Job], Any]) -> list[tuple[Job, Any]]:
    """What is made of each job; a table that is not what it looks like makes nothing."""
    found = []
    for job in jobs:
        try:
            made = make(job)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        if made:
            found.append((job, made))
    return found


# --------------------------------------------------------------------------------------------------------- charts
# A chart is {title, note, choices: {name: values}, start, views}. A view belongs to one choice of each, `at`, and has
# series of {name, job, x, y, low, high}, all lists of one length.


def _chart(title: str, note: str, choices: Mapping[str, list[str]], views: list[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "note": note, "choices": dict(choices), "start": [0] * len(choices), "views": views}


def _series(name: str, job: int | None, rows: Sequence[Mapping[str, Any]], x: str, y: str) -> dict[str, Any]:
    columns = {"x": x, "y": y, "low": f"{y}_low", "high": f"{y}_high"}
    return {"name": name, "job": job} | {
        key: [_rounded(row.get(column)) for row in rows]
        for key, column in columns.items()
        if any(column in row for row in rows)
    }


def _rounded(value: Any) -> float | None:
    """Five digits are more than a screen shows."""
    return float(f"{value:.5g}") if isinstance(value, int | float) else None


def _is_bound(name: str, names: Iterable[str]) -> bool:
    return any(name.endswith(end) and name.removesuffix(end) in names for end in ("_low", "_high"))


def _over_settings(
    rows: Sequence[Mapping[str, Any]], settings: Sequence[str], numbers: Sequence[str]
) -> dict[str, Any]:
    """Each number of the summary against each numeric setting; a line per choice of the other settings."""
    columns = [name for name in numbers if any(type(row.get(name)) in (int, float) for row in rows)]
    columns = sorted(
        (name for name in columns if not _is_bound(name, columns)), key=lambda name: name.split(".")[-1] != "ber"
    )
    against = {name: [_number(row[name]) for row in rows] for name in settings}
    against = {name: values for name, values in against.items() if sum(value is not None for value in values) > 1}
    views = []
    for i, setting in enumerate(against):
        others = [name for name in settings if name != setting]
        lines: dict[str, list[dict[str, Any]]] = {}
        for row, value in zip(rows, against[setting], strict=True):
            if row["status"] == "finished" and value is not None:
                name = ", ".join(f"{other}={row[other]}" for other in others if row[other] is not None)
                lines.setdefault(name or "every job", []).append({**row, setting: value})
        for j, column in enumerate(columns):
            series = [
                _series(name, None, sorted(line, key=lambda row: row[setting]), setting, column)
                for name, line in lines.items()
            ]
            views.append({"at": [i, j], "x": setting, "y": column, "series": series})
    return _chart(
        "Summary over settings",
        "A point per finished job; a line joins jobs that differ in nothing else.",
        {"setting": list(against), "number": columns},
        views if len(rows) > 1 else [],
    )


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _over_steps(jobs: Sequence[Job], labels: Mapping[int, str]) -> dict[str, Any]:
    """What was logged at every step, a line per job."""
    names = dict.fromkeys(name for job in jobs for line in job.metrics for name in line if name != STEP)
    shown = [name for name in names if not _is_bound(name, names)]
    views = []
    for i, name in enumerate(shown):
        series = []
        for job in jobs:
            lines = {line[STEP]: line for line in job.metrics if name in line}  # a step logged again counts as last
            if lines:
                series.append(_series(labels[job.number], job.number, [lines[s] for s in sorted(lines)], STEP, name))
        views.append({"at": [i], "x": "loop step", "y": name, "series": series})
    chart = _chart("Over the steps, job by job", "As logged while the jobs ran.", {"metric": shown}, views)
    chart["start"] = [next((i for i, name in enumerate(shown) if name.split("/")[-1] == "ber"), 0)]
    return chart


def _ber_over_steps(jobs: Sequence[Job], labels: Mapping[int, str]) -> dict[str, Any]:
    """BER with its interval over the steps, a line per arm and strength; a view per job, reader and split."""
    needed = {"arm", "reader", "split", "step", "ber"}
    told = [job for job in jobs if job.table and needed <= set(job.table[0])]
    readers, splits = (
        [*dict.fromkeys(str(row[name]) for job in told for row in job.table)] for name in ("reader", "split")
    )
    views = []
    for i, job in enumerate(told):
        strengths = {(row["arm"], row.get("alpha")) for row in job.table}
        lines: dict[tuple[str, str], dict[str, list[dict[str, Cell]]]] = {}
        for row in job.table:
            several = sum(arm == row["arm"] for arm, _ in strengths) > 1
            name = f"{row['arm']}, α = {_shown(row['alpha'])}" if several else str(row["arm"])
            lines.setdefault((str(row["reader"]), str(row["split"])), {}).setdefault(name, []).append(row)
        pushed = [row["step"] for row in job.table if row.get("pushed") is True and isinstance(row["step"], int)]
        for (reader, split), series in lines.items():
            views.append(
                {
                    "at": [i, readers.index(reader), splits.index(split)],
                    "x": "loop step",
                    "y": "bit error rate",
                    "reference": 0.5,
                    "pushed": [min(pushed), max(pushed)] if pushed else None,
                    "series": [_series(name, None, rows, "step", "ber") for name, rows in series.items()],
                }
            )
    return _chart(
        "Bit error rate over the steps, arm by arm",
        "Shading along a line: 95 % interval. Shaded from top to bottom: pushed. Dotted: guessing.",
        {"job": [labels[job.number] for job in told], "reader": readers, "held out": splits},
        views,
    )


def _hysteresis(jobs: Sequence[Job], labels: Mapping[int, str]) -> dict[str, Any]:
    """u against α at the end of every level of a sweep, a line per direction and speed; a view per job."""
    needed = {"kind", "dwell", "row", "alpha", "u"}
    told = [job for job in jobs if job.table and needed <= set(job.table[0])]
    views = []
    for i, job in enumerate(told):
        swept = [row for row in job.table if row["kind"] in ("up", "down")]
        series = []
        for (kind, dwell, _), rows in groupby(swept, key=lambda row: (row["kind"], row["dwell"], row["row"])):
            ends = [list(level)[-1] for _, level in groupby(rows, key=lambda row: row["alpha"])]
            series.append(_series(f"{kind}, dwell {dwell}", None, ends, "alpha", "u"))
        summary = job.part("summary")
        marks = [
            {"x": summary[name], "name": name}
            for name in ("alpha_reset", "alpha_set")
            if isinstance(summary.get(name), int | float)
        ]
        if series:
            views.append({"at": [i], "x": "α", "y": "u", "marks": marks, "series": series})
    return _chart(
        "Hysteresis",
        "u: −1 is B, +1 is A. Dotted: where constant pushes reset and set it.",
        {"job": [labels[job.number] for job in told]},
        views,
    )


# ------------------------------------------------------------------------------------- what is shown job by job


def _truth_tables(job: Job) -> list[dict[str, Any]]:
    """Grids of {title, columns, rows}; a cell is (text, whether it is right, or None where that is no question)."""
    names = list(job.table[0]) if job.table else []
    if {"gate", "control", "expected", "accuracy"} <= set(names):
        return _gates(job, names[2 : names.index("expected")])
    outputs = [name for name in names if name.endswith(" expected")]
    if outputs and "correct" in names:
        return _circuits(job, names, outputs)
    return []


def _gates(job: Job, inputs: Sequence[str]) -> list[dict[str, Any]]:
    grids = []
    for control, rows in _grouped(job.table, "control").items():
        keys = dict.fromkeys(" ".join(f"{name}={row[name]}" for name in inputs) for row in rows)
        lines = []
        for gate, own in _grouped(rows, "gate").items():
            cells = [(f"{row['expected']} ({row['accuracy']:.0%})", row["accuracy"] > 0.5) for row in own]  # type: ignore[operator]
            lines.append([(gate, None), *cells])
        grids.append({"title": control, "columns": ["gate", *keys], "rows": lines})
    return grids


def _circuits(job: Job, names: Sequence[str], outputs: Sequence[str]) -> list[dict[str, Any]]:
    """Trials with the same inputs are one line."""
    first = next((name for name in ("wires", "kind", "control") if name in names), None)
    shown = [name for name in names if name not in (first, "row", "correct") and not name.endswith(" read")]
    if len({row.get("tick") for row in job.table}) == 1:
        shown = [name for name in shown if name != "tick"]
    grids = []
    for kind, rows in (_grouped(job.table, first) if first else {"": job.table}).items():
        trials: dict[tuple[Cell, ...], list[bool]] = {}
        for row in rows:
            trials.setdefault(tuple(row[name] for name in shown), []).append(row["correct"] is True)
        lines = [
            [*((str(cell), None) for cell in key), (f"{sum(right)} of {len(right)}", all(right))]
            for key, right in trials.items()
        ]
        grids.append({"title": kind, "columns": [*shown, "right"], "rows": lines})
    return grids


def _grouped(rows: Sequence[dict[str, Cell]], name: str) -> dict[str, list[dict[str, Cell]]]:
    found: dict[str, list[dict[str, Cell]]] = {}
    for row in rows:
        found.setdefault(str(row[name]), []).append(row)
    return found


def _transcripts(job: Job) -> list[dict[str, Any]]:
    """What was said, each beside the unpushed run's words, or else beside the first one's; equal ones are one entry."""
    pairs: list[tuple[str, list[str], list[str]]] = []
    names = set(job.table[0]) if job.table else set()
    if "transcripts" in job.result:
        for told in job.result["transcripts"]:
            name = f"{told['arm']}, α = {_shown(told['alpha'])}, after “{told['prompt']}”"
            pairs.append((name, told["cover"], told["steered"]))
    elif "text" in names:
        for row in job.table:
            where = [f"{name} {cell}" for name, cell in row.items() if name != "text" and type(cell) in (int, str)]
            pairs.append((", ".join(where[:4]), [], str(row["text"] or "").split()))
    elif {"token", "step"} <= names:
        by = [name for name in job.table[0] if name in ("kind", "dwell", "row")]
        for key, rows in groupby(job.table, key=lambda row: [row[name] for name in by]):
            where = [f"{name} {cell}" for name, cell in zip(by, key, strict=True)]
            pairs.append((", ".join(where), [], [str(row["token"] or "") for row in rows]))
    between = " " if "text" in names else ""
    found: dict[str, dict[str, Any]] = {}
    for name, reference, words in pairs:
        same = json.dumps([reference, words])
        if same in found:
            found[same]["more"] += 1
            continue
        reference = reference or pairs[0][2]
        beside = list(zip_longest(reference, words, fillvalue=""))
        found[same] = {
            "name": name,
            "more": 0,
            "words": len(beside),
            "differ": sum(a != b for a, b in beside),
            "cut": max(len(beside) - TOKENS, 0),
            "reference": _marked([(a, a != b) for a, b in beside[:TOKENS]], between),
            "text": _marked([(b, a != b) for a, b in beside[:TOKENS]], between),
        }
    return list(found.values())


def _marked(words: Sequence[tuple[str, bool]], between: str) -> list[tuple[str, bool]]:
    """Runs of words that differ, or do not, as one piece each."""
    runs = groupby(words, key=lambda word: word[1])
    return [(between.join(word for word, _ in run).replace("\n", "↵\n") + between, marked) for marked, run in runs]


Look = tuple[str, list[tuple[dict[str, str], int]]]
"""When somebody looked, and what hung on the model then, with how often."""


def _audits(jobs: Sequence[Job]) -> list[tuple[list[int], list[Look]]]:
    """The jobs that found the same, and what they found."""

    def looks(audit: Mapping[str, Any], prefix: str = "") -> Iterator[Look]:
        for when, found in audit.items():
            if isinstance(found, Mapping):
                yield from looks(found, f"{prefix}{when}, ")
                continue
            counts = Counter(tuple(str(one[key]) for key in FOUND) for one in found)
            listed = [(dict(zip(FOUND, one, strict=True)), times) for one, times in counts.items()]
            yield (prefix + when).replace("_", " "), listed

    alike: dict[str, tuple[list[int], list[Look]]] = {}
    for job, found in _by_job(jobs, lambda job: list(looks(job.part("audit")))):
        alike.setdefault(json.dumps(found), ([], found))[0].append(job.number)
    return list(alike.values())


def _figures(jobs: Sequence[Job]) -> tuple[list[tuple[Job, list[tuple[str, str]]]], list[str]]:
    """The figures of each job as data URIs, and the names of those that no longer fit."""
    found, left_out, room = [], [], FIGURE_BYTES
    for job in jobs:
        own = []
        for path in job.figures:
            try:
                size = path.stat().st_size
                image = path.read_bytes() if size <= room else None
            except OSError:
                image = None
            if image is None:
                left_out.append(f"job {job.number}: {path.name}")
                continue
            room -= size
            own.append((path.stem.replace("_", " "), f"data:image/png;base64,{base64.b64encode(image).decode()}"))
        if own:
            found.append((job, own))
    return found, left_out
