"""Claims about a language model, shown on the real one: SmolLM2-135M-Instruct."""

import ast
import re
from pathlib import Path

import pytest
import torch
from conftest import composed

import run
from conf import build
from experiments import hidden_bits
from feedback import carriers, loop, maps, programs, results
from feedback.cache import Context
from feedback.sites import blocks, unembed

pytestmark = pytest.mark.real

ROOT = Path(run.__file__).parent
PROMPTS = (
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "The capital of France is",
    "A letter arrived from the capital, sealed with red wax. The mayor read it and",
)


def configured(*overrides):
    return composed("experiment=hidden_bits", "quiet=true", *overrides)


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hidden_bits")
    record = run.main(configured("alpha=2.0", "tracking=disabled"), folder, None)
    return record["summary"], results.read_table(folder / "table.csv"), record


def curve(table, arm, key="ber", reader="informed", split="messages"):
    return [r[key] for r in table if (r["arm"], r["reader"], r["split"]) == (arm, reader, split)]


def test_cache_memory_keeps_eight_bits_that_the_text_does_not_show(main_job):
    summary, table, _ = main_job
    hard = summary["hard"]
    on = sum(curve(table, "hard", "pushed"))
    assert max(curve(table, "hard")[:on]) <= 0.02
    assert hard["ber"] <= 0.02
    assert hard["argmax_agreement"] >= 0.97
    assert hard["text_agreement"] == 1.0
    assert hard["text_ber_low"] <= 0.5 <= hard["text_ber_high"]


def test_half_a_soft_token_still_keeps_them(main_job):
    summary, _, _ = main_job
    assert summary["mixed"]["ber"] <= 0.05
    assert summary["mixed"]["ber_while_pushed"] <= 0.05


def test_the_free_soft_loop_shows_them_while_they_are_pushed(main_job):
    summary, _, _ = main_job
    assert summary["soft"]["ber_while_pushed_worst"] <= 0.15


def test_without_a_push_or_with_shuffled_labels_nothing_is_read(main_job):
    summary, _, _ = main_job
    for arm in ("alpha0", "shuffled"):
        assert summary[arm]["ber_low"] <= 0.5 <= summary[arm]["ber_high"], arm


def test_with_the_loop_cut_nothing_outlives_the_push(main_job):
    summary, table, _ = main_job
    on = sum(curve(table, "cut", "pushed"))
    assert max(curve(table, "cut")[:on]) <= 0.02
    for low, high in list(zip(curve(table, "cut", "ber_low"), curve(table, "cut", "ber_high"), strict=True))[on:]:
        assert low <= 0.55 and high >= 0.45
    assert summary["cut"]["ber_low"] <= 0.5 <= summary["cut"]["ber_high"]


def test_the_push_is_measured_as_asked_and_the_weights_are_untouched(main_job):
    summary, _, record = main_job
    assert summary["hard"]["alpha_measured"] == pytest.approx(2.0, abs=1e-3)
    assert summary["alpha0"]["alpha_measured"] == 0.0
    assert record["receipts"]["hard"]["largest_error"] < 1e-4
    assert record["receipts"]["hard"]["largest_relative_push"] < 0.1  # eight carriers: √8 × 2 / ‖h‖
    assert record["weights_unchanged"] is True


def test_one_hot_map_is_greedy_generation_token_for_token_over_64_tokens(smollm2):
    v = carriers.random_orthonormal(1, smollm2.d_model, torch.Generator().manual_seed(0)).scaled
    ids = [smollm2.encode(p) for p in PROMPTS]
    told = loop.run(smollm2, ids, programs.constant(v, 0.0, steps=64, rows=3), feedback_map=maps.one_hot())
    for row, prompt in enumerate(ids):
        expected = smollm2.module.generate(
            torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :]
        assert told.text[row, :64].tolist() == expected.tolist()


def test_a_ragged_cached_batch_equals_recomputing_each_row_with_the_push_on(smollm2):
    """Constant push on every pass, three prompts of different length, logits to 1e-3 of values up to 30."""
    v = carriers.random_orthonormal(1, smollm2.d_model, torch.Generator().manual_seed(0)).scaled
    ids = [smollm2.encode(p) for p in PROMPTS]
    program = programs.constant(v, 20.0, steps=8, rows=3, scope="all")
    told = loop.run(smollm2, ids, program, feedback_map=maps.expected_embedding(0.3))
    handle = blocks(smollm2.module)[15].register_forward_hook(lambda module, args, output: output + 20 * v[0])
    try:
        for row, prompt in enumerate(ids):
            inputs = torch.cat([smollm2.embedding[torch.tensor(prompt)], told.soft_tokens[:, row]])[None]
            whole = smollm2.module(inputs_embeds=inputs, use_cache=False).logits[0, len(prompt) :]
            torch.testing.assert_close(unembed(smollm2.module, told.hidden[:, row]), whole, atol=1e-3, rtol=0)
    finally:
        handle.remove()


def test_four_strengths_in_one_batch_equal_four_separate_runs(smollm2):
    """In the logits, which go up to 30: the hard arm to 1e-4; the mixed one, half of whose input is fed back, to 3e-4;
    the free arm up to the step at which rounding has grown to 1e-3."""
    config = configured("alpha=[0,0.5,2,8]", "prompts.unseen=1", "steps=9", "hidden_bits.fit_messages=2")
    config.prompts.texts = list(PROMPTS)
    config.hidden_bits.test_messages = 2
    ids = [smollm2.encode(p) for p in PROMPTS]
    v = carriers.random_orthonormal(8, smollm2.d_model, torch.Generator().manual_seed(0)).scaled
    cover = hidden_bits.cover_text(config, smollm2, ids, v)

    def rows(alphas):
        return hidden_bits.lay_out(config, alphas, torch.Generator().manual_seed(1))

    def logits(arm, laid):
        told = hidden_bits.run_arm(config, smollm2, ids, v, laid, arm, cover, loop.Randomness(7, laid.trial), None)
        return unembed(smollm2.module, told.hidden)

    alphas = build.alphas(config)
    together = rows(alphas)
    for name in ("hard", "mixed", "soft"):
        arm = config.hidden_bits.arms[name]
        batch = logits(arm, together)
        for alpha in alphas:
            alone = logits(arm, rows([alpha]))[:, 3:]  # the first three rows are the references
            off = (batch[:, 3:][:, together.alpha[3:] == alpha] - alone).abs().flatten(1).amax(-1)
            if name == "soft":
                grown = torch.nonzero(off > 1e-3)[:, 0].tolist()
                print(f"free-running, alpha={alpha:g}: rounding reaches 1e-3 at step {grown[0] + 1 if grown else '>9'}")
                assert off[0] < 1e-3
            else:
                assert off.max() < {"hard": 1e-4, "mixed": 3e-4}[name], (name, alpha, off)


def test_the_prompt_context_is_an_autonomous_map_on_the_real_model(smollm2):
    v = carriers.random_orthonormal(1, smollm2.d_model, torch.Generator().manual_seed(0)).scaled
    ids = [smollm2.encode(p) for p in PROMPTS]
    program = programs.constant(v, 0.0, steps=4, rows=3)
    told = loop.run(smollm2, ids, program, feedback_map=maps.expected_embedding(0.5), context=Context("prompt"))
    for row, prompt in enumerate(ids):
        inputs = torch.cat([smollm2.embedding[torch.tensor(prompt)], told.soft_tokens[3, row][None]])[None]
        fresh = smollm2.module(inputs_embeds=inputs, use_cache=False).logits[0, -1]
        torch.testing.assert_close(unembed(smollm2.module, told.hidden[3, row]), fresh, atol=1e-3, rtol=0)


def test_the_readmes_library_example_runs_and_prints_what_it_says(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    statements = [node for node in ast.parse(code).body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    assert len(statements) == 10
    exec(compile(code, "README.md", "exec"), {})
    said = capsys.readouterr().out
    (promised,) = re.findall(r"^# prints: (.*)$", code, flags=re.MULTILINE)
    assert said.strip() == promised.strip()


def cell_job(tmp_path, name, *overrides):
    config = composed(f"experiment={name}", "quiet=true", "tracking=disabled", *overrides)
    return run.main(config, tmp_path, None)["summary"]


def test_the_soft_loop_of_cat_and_dog_is_a_latch_with_the_hysteresis_that_theory_predicts(tmp_path):
    """Set and reset by a constant push at block 15, slow sweeps, 200 unpushed steps under noise, random vectors."""
    quick = ["latch.pulse_lengths=[5]", "latch.hold_trials=4", "latch.noisy_sweeps=1", "latch.other_blocks=[29]"]
    s = cell_job(tmp_path, "latch", *quick)
    assert s["coupling_L"] > 2 and abs(s["field_b"]) < s["critical_field"]
    assert s["rest_u"] == pytest.approx(s["predicted_rest_u"], abs=0.02)
    assert s["alpha_set"] == pytest.approx(22, rel=0.3)
    assert s["alpha_set"] == pytest.approx(s["predicted_alpha_set"], rel=0.3)
    assert -8 < s["alpha_reset"] < 0  # -3.5 under a constant push, -7.5 to -4.5 in sweeps
    assert s["width_by_dwell"]["16"] >= 0.8 * s["width_by_dwell"]["1"]
    assert s["hold_censored"] and s["hold_steps"] >= 200
    assert s["minus_v_switches"] == 0
    assert s["random_v_switches"] <= 2  # of 20 at three times the thresholds, 40 % of the residual length: 1 was seen
    assert s["other_blocks"]["29"]["alpha_set"] == float(
        "inf"
    )  # behind the last block there is no way back into the loop


def test_all_sixteen_logic_gates_are_right_in_64_of_64_noisy_trials_of_every_row(tmp_path):
    s = cell_job(tmp_path, "hidden_logic", "logic.control_trials=2")
    assert s["gates_correct"] == 16
    assert s["worst_row_low"] >= 0.94
    assert min(gate["level_restored"] for gate in s["gates"].values()) > 0.9
    assert s["controls"]["linear_readout_of_inputs"]["XOR"] <= 0.75
    assert s["controls"]["loop_cut"]["gates_correct"] == 0


def test_a_hidden_bit_is_set_held_and_reset_while_every_token_stays_the_same(tmp_path):
    s = cell_job(tmp_path, "hidden_latch", "hidden_latch.levels=5")
    assert (s["rows"], s["steps"]) >= (32, 250) and s["reads"] >= 512
    assert s["ber"] == 0
    assert s["text_agreement"] >= 0.995
    assert s["text_ber_low"] <= 0.5 <= s["text_ber_high"]
    assert s["hold_censored"] and s["hold_steps"] >= 200
    assert s["random_v_switches"] == 0
    assert s["margin"] > 0.1
    assert s["kl_nats_per_step"]["same_bit_held"] < 0.01 < s["kl_nats_per_step"]["other_bit_held"]  # logits show it


def test_logic_gates_and_the_full_adder_are_right_under_a_text_that_does_not_change(tmp_path):
    quick = ["cell=hidden", "logic.trials=16", "logic.control_trials=1"]
    s = cell_job(tmp_path / "gates", "hidden_logic", *quick)
    assert s["gates_perfect"] == 16 and s["text_agreement"] >= 0.99
    s = cell_job(tmp_path / "adder", "circuit", "circuit=full_adder", "cell=hidden", "logic.trials=4")
    assert s["correct_rows"] == s["loop"]["correct_rows"] == 8
    assert s["text_agreement"] >= 0.99 and s["random_v"]["correct_rows"] < 8


def test_two_bits_in_one_soft_token_are_set_apart_under_the_same_text(tmp_path):
    s = cell_job(tmp_path, "register")
    assert s["words_held"] == s["words_written"] == 4
    assert s["ber"] == 0 and s["text_agreement"] >= 0.99
    assert s["random_v"]["ber"] > 0.25


def test_learning_a_cell_from_scratch_comes_to_hold_a_bit_that_its_prompt_does_not(tmp_path):
    quick = ["learn.steps=120", "learn.test_every=20", "learn.margin=0.05", "learn.patience=1"]
    s = cell_job(tmp_path, "learn_cell", *quick)
    assert s["untrained"]["kept"] < 0.5
    assert s["loop_test"]["kept"] == 1 and s["loop_test"]["text_agreement"] == 1


def test_learned_carriers_read_more_bits_for_the_same_nats_than_random_ones(tmp_path):
    s = cell_job(tmp_path, "learned_carriers", "covert.learn_steps=30", "alpha=[0.5,1,2]", "covert.fit_messages=6")
    assert s["messages"]["dominates_random"]["share"] == 1
    assert s["messages"]["dominates_random"]["more_bits"] > 0.1


@pytest.mark.parametrize("circuit", ["full_adder", "counter_2"])
def test_circuits_are_right_on_every_row_with_the_host_as_the_wire(tmp_path, circuit):
    quick = ["logic.trials=4", "logic.ticks=4", "logic.sequences=6", "logic.wires=host"]
    s = cell_job(tmp_path, "circuit", f"circuit={circuit}", *quick)
    assert s["correct_rows"] == s["rows"]
    assert s["random_v"]["correct_rows"] < s["rows"]
