"""Latches: closed forms, what the measurements recover of them on the oracle, and the experiments' commands."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import composed

import run
from conf import build
from experiments import latch as experiment
from feedback import carriers, latch, models, results
from feedback.latch import Latch, critical_field, crossing, pulses, rests, search, threshold
from feedback.models import ModelSpec
from feedback.sites import Site

ROOT = Path(run.__file__).parent


def oracle(coupling=4.0, field=0.0, tau=1.0, block=2, **settings):
    model = models.load(ModelSpec(kind="oracle", coupling=coupling, field=field, max_positions=65536, **settings))
    v = carriers.unembedding_direction(model, "A", "B").scaled[0]
    return Latch(model, model.encode("A B"), 0, 1, Site(block), v, tau)


@pytest.mark.parametrize(("coupling", "half_width"), [(2.5, 0.156), (4.0, 1.066), (8.0, 4.294), (2.0, 0.0), (1.0, 0.0)])
def test_the_half_width_of_the_hysteresis_is_the_published_one(coupling, half_width):
    assert critical_field(coupling) == pytest.approx(half_width, abs=5e-4)


@pytest.mark.parametrize("coupling", [0.5, 2.0, 2.3, 4.0, 9.0])
def test_rests_are_fixed_points_that_nearby_starts_return_to(coupling):
    for bias in (-3.0, -0.4, 0.0, 0.1, 2.0):
        found = rests(coupling, bias)
        assert len(found) == (2 if abs(bias) < critical_field(coupling) else 1)
        for u in found:
            assert math.tanh((bias + coupling * u) / 2) == pytest.approx(u, abs=1e-9)
        for start in torch.linspace(-1, 1, 11).tolist():
            for _ in range(5000):
                start = math.tanh((bias + coupling * start) / 2)
            assert min(abs(start - u) for u in found) < 0.03 or abs(bias) < 1e-12  # on the ridge, or at L = 2 slowly


def test_couplings_are_l_and_b_and_a_push_adds_to_b_alone_with_the_temperature_dividing_both():
    for tau in (0.5, 1.0, 2.0):
        found = oracle(coupling=5.0, field=-0.7, tau=tau).couplings([-1.0, 0.0, 3.0])
        torch.testing.assert_close(found.coupling, torch.full((3,), 5.0 / tau, dtype=torch.float64), atol=1e-5, rtol=0)
        expected = torch.tensor([-1.7, -0.7, 2.3], dtype=torch.float64) / tau
        torch.testing.assert_close(found.bias, expected, atol=1e-5, rtol=0)


def test_thresholds_are_the_closed_form_to_one_percent_for_twenty_random_oracles():
    """α_set = b_c(L) − b and α_reset = −b_c(L) − b; near them the loop slows down, so they get 300 steps."""
    draw = torch.Generator().manual_seed(1)
    for number in range(20):
        coupling = 2.6 + 6 * torch.rand((), generator=draw).item()
        edge = critical_field(coupling)
        field = (2 * torch.rand((), generator=draw).item() - 1) * 0.6 * edge
        cell = oracle(coupling, field, block=number % 4, seed=number)
        _, rest, _ = cell.settle(60)
        set_at, reset_at = experiment.static_thresholds(cell, rest, 3 * edge, 300)
        assert set_at == pytest.approx(edge - field, rel=0.01), (coupling, field)
        assert reset_at == pytest.approx(edge + field, rel=0.01), (coupling, field)


def test_the_prediction_from_one_step_is_the_closed_form():
    found = experiment.predict(oracle(4.0, 0.2), 6.0)
    edge = critical_field(4.0)
    assert found["coupling_L"] == pytest.approx(4.0, abs=1e-4) and found["field_b"] == pytest.approx(0.2, abs=1e-4)
    assert found["predicted_alpha_set"] == pytest.approx(edge - 0.2, abs=1e-3)
    assert found["predicted_alpha_reset"] == pytest.approx(-edge - 0.2, abs=1e-3)
    assert found["predicted_rest_u"] == pytest.approx(rests(4.0, 0.2), abs=1e-5)


def test_a_longer_pulse_needs_less_strength_down_to_the_static_threshold():
    """Critical slowing: the excess over b_c that a pulse of n steps needs falls with n."""
    cell = oracle(4.0)
    _, rest, _ = cell.settle(60)
    found = experiment.pulse_thresholds(cell, rest, [1, 2, 4, 8, 16, 64], 6.0, 40)
    sizes = [found[n][0] for n in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * critical_field(4.0) and sizes[-1] == pytest.approx(critical_field(4.0), rel=0.03)
    assert all(a == pytest.approx(b, rel=0.03) for a, b in found.values())  # symmetric at b = 0
    # One step from the low rest u₀ crosses 0 when b + α + L·u₀ > 0.
    assert sizes[0] == pytest.approx(-4.0 * rests(4.0, 0.0)[0], rel=0.25)


def test_threshold_and_search_bracket_where_switching_begins():
    amounts = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert threshold(amounts, torch.tensor([False, False, True, True])) == (2.0, 3.0)
    assert threshold(amounts, torch.tensor([True, False, True, True])) == (2.0, 3.0)  # from there on all of them
    assert threshold(amounts, torch.tensor([False] * 4)) == (4.0, math.inf)
    assert threshold(amounts, torch.tensor([True] * 4)) == (0.0, 1.0)
    true = torch.tensor([3.217, 0.4, 99.0])
    found = search(lambda tried: tried > true[:, None], 3, 10.0, levels=20, rounds=2)
    assert found[:2] == pytest.approx(true[:2].tolist(), abs=10 / 400) and found[2] == math.inf


def test_crossing_is_where_the_sign_has_changed_for_good():
    alpha = torch.arange(6.0)
    assert crossing(alpha, torch.tensor([-1.0, -1, 1, -1, 1, 1])) == 4.0
    assert crossing(alpha, torch.tensor([1.0, 1, 1, -1, -1, -1])) == 3.0
    assert math.isnan(crossing(alpha, torch.full((6,), 0.5)))


def test_a_run_that_begins_with_anothers_next_soft_token_continues_it():
    cell = oracle(3.0, 0.1)
    first = cell.tokens(torch.tensor([True, False, True]))
    strength = pulses(torch.tensor([0.5, -2.0, 1.0]), 3, 10)
    whole = cell.run(first, strength)
    half = cell.run(first, strength[:4])
    rest = cell.run(cell.next(half), strength[4:])
    torch.testing.assert_close(torch.cat([half.hidden, rest.hidden]), whole.hidden, atol=1e-5, rtol=0)


def test_noise_is_in_the_first_soft_token_too_and_the_same_for_the_same_seed():
    cell = oracle(3.0)
    first, strength = cell.tokens(torch.tensor([True, True, False])), torch.zeros(2, 3)
    clean, noisy, again = (cell.run(first, strength, sigma=s) for s in (0.0, torch.tensor([0.0, 0.1, 0.1]), 0.1))
    assert torch.equal(noisy.soft_tokens[0, 0], clean.soft_tokens[0, 0])
    moved = (noisy.soft_tokens[:, 1:] - clean.soft_tokens[:, 1:]).norm(dim=-1)
    assert moved.min() > 0.01
    assert torch.equal(again.soft_tokens[0, 1:], noisy.soft_tokens[0, 1:])


def test_a_push_that_makes_the_state_non_finite_is_named():
    cell = oracle(4.0)
    with pytest.raises(ValueError, match=r"non-finite at step 1 under a push of 1e\+38"):
        cell.run(
            cell.tokens(torch.tensor([True] * 3)), torch.tensor([[0.0, 1e38, 0.0]] * 2), vectors=10 * cell.vector[None]
        )


# ------------------------------------------------------------------------------------------------- the command

TINY = ["model=oracle", "cell=ab", "latch.top=4", "tracking=disabled", "quiet=true"]


def configured(*overrides, name="latch"):
    return composed(f"experiment={name}", *TINY, *overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latch")
    return folder, run.main(
        configured("carriers=unembedding", "carriers.a=A", "carriers.b=B", "latch.static_steps=300"), folder, None
    )


def test_the_experiment_puts_the_prediction_beside_the_measurement_and_they_agree_on_the_oracle(finished):
    folder, record = finished
    s = record["summary"]
    edge = critical_field(4.0)
    assert s["predicted_alpha_set"] == pytest.approx(edge, abs=1e-3)
    assert s["alpha_set"] == pytest.approx(edge, rel=0.02) and s["alpha_reset"] == pytest.approx(-edge, rel=0.02)
    assert s["rest_u"] == pytest.approx(s["predicted_rest_u"], abs=1e-4)
    assert s["hold_censored"] is True and s["hold_steps"] == 220
    assert s["minus_v_switches"] == 0 and s["random_v_rows"] == 20
    widths = [s["width_by_dwell"][key] for key in ("1", "4", "16")]
    assert widths == sorted(widths, reverse=True) and widths[-1] == pytest.approx(2 * edge, rel=0.1)
    assert (folder / "figures" / "hysteresis.png").stat().st_size > 10_000
    assert json.loads((folder / "result.json").read_text())["audit"]["after"] == []
    kinds = {row["kind"] for row in results.read_table(folder / "table.csv")}
    assert kinds == {"up", "down", "hold"}


def test_a_loop_that_is_no_latch_is_refused_with_the_measured_l_and_what_to_try(tmp_path):
    with pytest.raises(ValueError, match=r"no latch: L = 1\.50 and b = 0\.20.*L > 2.*experiment=latch_screen"):
        run.main(configured("model.coupling=1.5", "model.field=0.2"), tmp_path, None)
    with pytest.raises(ValueError, match=r"no latch: L = 4\.00 and b = 3\.00 \(b_c = 1\.07"):
        run.main(configured("model.field=3.0"), tmp_path, None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("context=full", "use context=prompt"),
        ("map=top_k", "map=top_k"),
        ("cell.b=A", "cell.a and cell.b are both 'A'"),
        ("latch.levels=2", "at least 3 levels"),
        ("latch.dwells=[0]", "latch.dwells"),
        ("latch.other_blocks=[9]", r"latch.other_blocks \[9\] do not exist: this model has blocks 0–3"),
        ("latch.top=-1", "positive strengths"),
        ("logic.single=1", "more than one threshold"),
        ("logic.trials=0", "logic.trials=0"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_model_is_loaded(override, message, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", lambda spec: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=message):
        run.main(configured(override), tmp_path, None)


def test_words_of_several_tokens_are_refused_with_their_pieces(tmp_path):
    with pytest.raises(ValueError, match=r"'A B' is 2 tokens for oracle.*'A' \+ 'B'"):
        run.main(configured("cell.a='A B'"), tmp_path, None)


def test_a_search_that_finds_no_threshold_says_what_to_raise(tmp_path):
    with pytest.raises(ValueError, match=r"no push up to latch.top=0.1 sets this latch at model\.layers\.2"):
        run.main(configured("latch.top=0.1"), tmp_path, None)


def test_screening_ranks_what_it_tried_and_predicts_thresholds_at_every_block(tmp_path):
    overrides = [
        "latch.pairs=[[A,B],[B,A]]",
        "latch.templates=['{a} {b}','{b}']",
        "latch.blocks=[1,3]",
        "model.field=0.3",
    ]
    record = run.main(configured(*overrides, name="latch_screen"), tmp_path, None)
    assert record["summary"]["tried"] == record["summary"]["latches"] == record["summary"]["predicted_latches"] == 4
    table = results.read_table(tmp_path / "table.csv")
    assert [row["rank"] for row in table] == [1, 2, 3, 4]
    for row in table:
        sign = 1 if row["a"] == "A" else -1
        assert row["L"] == pytest.approx(4.0, abs=1e-4) and row["b_field"] == pytest.approx(0.3 * sign, abs=1e-4)
        for block in (1, 3):
            slope = row[f"field_per_alpha_{block}"]
            assert row[f"alpha_set_{block}"] == pytest.approx((critical_field(4.0) - 0.3 * sign) / slope, rel=1e-3)


def test_the_cell_of_the_config_is_built_with_its_own_contrast_as_carrier():
    config = configured()
    model = models.load(build.model_spec(config))
    cell = build.latch(config, model, torch.Generator().manual_seed(0))
    assert isinstance(cell, latch.Latch) and (cell.a, cell.b) == (0, 1)
    assert cell.vector.norm().item() == pytest.approx(1.0, abs=1e-5)
