"""The command: what it leaves, what it prints, and how it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import composed
from hydra.errors import ConfigCompositionException, MissingConfigException

import run
from conf.schema import Config
from feedback import models, results
from feedback.tracking import TrackingError

ROOT = Path(run.__file__).parent
TINY = ["model=tiny", "steps=6", "tracking=disabled", "quiet=true", "hidden_bits.read_behind=[1]"]


def configured(*overrides: str) -> Config:
    return composed("experiment=hidden_bits", *TINY, *overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("alpha=abc", r"alpha='abc' is not a finite number"),
        ("alpha=nan", r"alpha=nan is not a finite number"),
        ("alpha=[1,inf]", r"is not a finite number"),
        ("alpha=[1,1]", r"names a strength twice"),
        ("alpha=true", r"alpha=True is not a finite number"),
        ("steps=0", r"steps=0: expected at least 1"),
        ("noise=-1", r"noise=-1.0: expected a finite number, 0 or more"),
        ("max_rows=0", r"max_rows=0"),
        ("site.block=31", r"site block 31 does not exist: this model has blocks 0–3"),
        ("site.block=first", r"site block 'first' is no block"),
        ("site=module", r"path goes with at=module"),
        ("hidden_bits.n_bits=33", r"hidden_bits.n_bits=33: expected 1 to 32"),
        ("hidden_bits.fit_messages=3", r"expected an even number"),
        ("prompts.texts=['a','b','  ']", r"prompts \[2\]"),
        ("prompts.unseen=15", r"prompts.unseen=15 of 16 prompts"),
        ("steps=600", r"steps=600 need more than the model's 512 positions"),
        ("context.kind=window", r"window needs window >= 1"),
        ("context.kind=most", r"context 'most' does not exist"),
        ("program.length=7", r"within steps 1–6"),
        ("program.kind=wave", r"program 'wave' does not exist"),
        ("map.kind=sum", r"map 'sum' does not exist"),
        ("map.temperature=-1", r"tau is -1"),
        ("carriers=file", r"carriers=file needs carriers.file"),
        ("carriers=unembedding", r"carriers=unembedding needs carriers.a"),
        ("dtype=float8", r"dtype 'float8' does not exist"),
        ("device=tpu", r"device 'tpu'"),
        ("model.family=bert", r"family 'bert' does not exist"),
        ("model.kind=big", r"model kind 'big' does not exist"),
        ("model=hf", r"name"),
        ("hidden_bits.arms.hard.cover=none", r"cover='none'; expected free or forced"),
        ("hidden_bits.arms.shuffled.states_of=nobody", r"reads the states of 'nobody'"),
        ("hidden_bits.arms.hard.mix=1.5", r"lam is 1.5"),
    ],
)
def test_bad_input_is_refused_in_one_clear_line_before_the_model_is_loaded(override, message, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", lambda spec: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=message):
        run.main(configured(override), tmp_path, None)


def test_online_tracking_without_a_key_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", lambda spec: pytest.fail("the model was loaded"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(TrackingError, match="needs a wandb key"):
        run.main(configured("tracking=online"), tmp_path, None)


def test_an_unknown_experiment_is_answered_with_the_names_there_are():
    with pytest.raises(MissingConfigException, match=r"(?s)experiment/nothing.*hidden_bits"):
        configured("experiment=nothing")


def test_a_misspelt_key_is_answered_by_name():
    with pytest.raises(ConfigCompositionException, match="alhpa"):
        configured("alhpa=2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run.main(configured("alpha=[0,4]", "hidden_bits.fit_messages=4"), folder, None)


def test_a_run_leaves_result_table_trajectories_figures_and_metrics(finished):
    folder, _ = finished
    left = results.read_result(folder)
    assert left["status"] == "finished"
    assert left["weights_unchanged"] is True
    assert left["config"]["alpha"] == [0, 4]
    for key in ("alpha_measured", "receipts", "versions", "model", "seed", "wall_seconds", "noise_model", "site"):
        assert key in left, key
    assert left["site"] == {"block": 2, "at": "block", "path": "model.layers.2"}
    assert len(left["model"]["checksum"]) == 64
    arms = set(left["config"]["hidden_bits"]["arms"])
    assert set(left["summary"]) == arms
    for arm in ("soft", "hard", "cut", "shuffled"):
        wanted = {"ber", "ber_low", "ber_high", "ber_while_pushed", "text_ber", "text_agreement", "argmax_agreement"}
        assert wanted | {"rate_bits", "half_life_steps", "kl_nats"} <= set(left["summary"][arm])
        assert set(left["summary"][arm]["by_alpha"]) == {"0", "4"}
    assert {p.stem for p in (folder / "figures").glob("*.png")} == {"ber_over_steps", "transcripts"}
    assert {p.stem for p in (folder / "trajectories").glob("*.safetensors")} == arms - {"shuffled"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["loop/step"] for line in lines} == set(range(1, 7))
    assert any("hard/alpha=4/ber" in line for line in lines)


def test_the_table_has_a_row_per_arm_strength_reader_split_and_step(finished):
    folder, _ = finished
    table = results.read_table(folder / "table.csv")
    keys = [tuple(row[k] for k in ("arm", "alpha", "reader", "split", "step")) for row in table]
    # 6 arms at two strengths and alpha0 at one of its own; 2 readers, 2 splits, 6 steps
    assert len(set(keys)) == len(keys) == (6 * 2 + 1) * 2 * 2 * 6
    assert all(row["text_agreement"] == 1.0 for row in table if row["arm"] not in ("soft",))
    at_zero = [row for row in table if row["alpha"] == 0 and row["step"] <= 2]
    assert max(abs(row["alpha_measured"]) for row in at_zero) == 0
    pushed = [row for row in table if row["alpha"] == 4 and row["arm"] == "hard"]
    assert [row["pushed"] for row in pushed[:6]] == [True, True, False, False, False, False]
    assert [round(row["alpha_measured"], 3) for row in pushed[:6]] == [4, 4, 0, 0, 0, 0]


def test_the_same_command_and_seed_give_the_same_table(finished, tmp_path):
    folder, _ = finished
    run.main(configured("alpha=[0,4]", "hidden_bits.fit_messages=4"), tmp_path, None)
    assert (tmp_path / "table.csv").read_bytes() == (folder / "table.csv").read_bytes()


def test_a_list_of_alphas_measures_what_single_runs_measure(finished, tmp_path):
    folder, _ = finished
    run.main(configured("alpha=4", "hidden_bits.fit_messages=4"), tmp_path, None)
    alone = {
        (row["arm"], row["reader"], row["split"], row["step"]): row
        for row in results.read_table(tmp_path / "table.csv")
    }
    for row in results.read_table(folder / "table.csv"):
        if row["alpha"] == 4 and row["arm"] in ("hard", "cut"):
            twin = alone[row["arm"], row["reader"], row["split"], row["step"]]
            assert row["ber"] == pytest.approx(twin["ber"], abs=0.02)
            assert row["kl_nats"] == pytest.approx(twin["kl_nats"], rel=1e-2)


def test_in_bfloat16_the_result_shows_the_effective_alpha_beside_the_one_asked_for(tmp_path):
    record = run.main(configured("alpha=1.3", "dtype=bfloat16", "hidden_bits.fit_messages=4"), tmp_path, None)
    hard = record["summary"]["hard"]
    assert hard["alpha"] == 1.3
    assert hard["alpha_measured"] == pytest.approx(1.3, rel=0.05) and hard["alpha_measured"] != 1.3
    assert 0 < record["receipts"]["hard"]["largest_error"] < 0.2


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WANDB_MODE": "offline"}
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *TINY, f"hydra.run.dir={folder}", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder.parent,
        timeout=300,
    )


@pytest.mark.real
def test_a_refusal_is_one_line_without_a_traceback_and_leaves_a_failed_result(tmp_path):
    told = command("experiment=hidden_bits", "site.block=31", folder=tmp_path / "job")
    assert told.returncode == 2
    assert told.stderr.strip().splitlines()[-1] == "error: site block 31 does not exist: this model has blocks 0–3"
    assert "Traceback" not in told.stderr
    assert results.read_result(tmp_path / "job")["status"] == "failed"


@pytest.mark.real
def test_help_explains_the_groups_and_gives_examples(tmp_path):
    told = command("--help", folder=tmp_path / "job")
    assert told.returncode == 0
    groups = ("model", "site", "carriers", "program", "map", "context", "prompts", "tracking", "experiment")
    for group in (*groups, "cell", "circuit"):
        assert f"\n{group}" in told.stdout
    assert told.stdout.count("\npython run.py ") == 6


@pytest.mark.real
def test_the_command_prints_the_table_and_tracks_offline(tmp_path):
    told = command("experiment=hidden_bits", "tracking=offline", "hidden_bits.fit_messages=4", folder=tmp_path / "job")
    assert told.returncode == 0, told.stderr
    for arm in ("soft", "soft_forced", "mixed", "hard", "cut", "alpha0", "shuffled"):
        assert arm in told.stdout
    (run_file,) = (tmp_path / "job" / "wandb").glob("offline-run-*/*.wandb")
    inspected = subprocess.run(
        [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--summary", "--json", str(run_file)],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    assert '"hard.ber"' in inspected or "hard.ber" in inspected
    assert "loop/step" in inspected
