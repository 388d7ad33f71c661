"""Hidden cells: words, files, constant pushes, learning that is stopped and goes on, and the commands' refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import COVERT, composed
from torch.nn.functional import one_hot

import run
from experiments import learned_carriers
from feedback import carriers, covert, hidden, hooks, loop, maps, models, programs, results, story
from feedback.cache import Context
from feedback.hidden import HiddenCell, LoopTest, Words
from feedback.learning import Learner, Objective
from feedback.sites import Site, unembed
from feedback.story import Stories, StoryLearner

ROOT = Path(run.__file__).parent
WORDS = Words(99, ((97, 98), (100, 101)))


def cell(model, pairs=(("a", "b"),), push=False, prompt="ab ab c"):
    return hidden.from_prompt(model, prompt, "c", pairs, Site(1), 0.6, push=push)


# --------------------------------------------------------------------------------------------- words and files


def test_a_soft_token_of_words_is_the_mixture_that_it_says_and_split_reads_it_back():
    u, mass = torch.tensor([[0.5, -1.0], [0.0, 0.9], [-0.2, 0.3]]), torch.tensor([0.6, 0.5, 0.2])
    weights = WORDS.weights(u, mass)
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    torch.testing.assert_close(weights[0], torch.tensor([0.6, 0.15, 0.05, 0.0, 0.2]))
    embedding = torch.randn(128, 16)
    full = torch.zeros(3, 128).index_add_(1, torch.tensor(WORDS.ids), weights)
    torch.testing.assert_close(WORDS.soft(embedding, u, mass), full @ embedding)
    torch.testing.assert_close(WORDS.split(weights[1:].log()), u[1:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("pairs", [(), ((97, 99),), ((97, 97),), ((97, 98), (98, 100))])
def test_words_that_are_no_pairs_under_a_cover_are_refused(pairs):
    with pytest.raises(ValueError, match="at least one pair, and no token twice"):
        Words(99, pairs)


def test_a_cell_survives_its_file_and_is_refused_by_another_model(tiny, tmp_path):
    model = tiny("llama")
    made = replace(cell(model, push=True), provenance={"seed": 3})
    made.save(tmp_path / "cell.safetensors")
    back = HiddenCell.load(tmp_path / "cell.safetensors", model)
    assert torch.equal(back.prefix, made.prefix) and torch.equal(back.push, made.push)
    assert (back.pairs, back.cover, back.site, back.provenance) == (made.pairs, "c", Site(1), {"seed": 3})
    with pytest.raises(ValueError, match=r"cell\.safetensors was learned on .*llama.*learn one for this model"):
        HiddenCell.load(tmp_path / "cell.safetensors", tiny("gpt2"))
    half = models.load(models.ModelSpec(kind="tiny", family="llama", dtype="bfloat16"))
    HiddenCell.load(tmp_path / "cell.safetensors", half)  # the same weights, rounded
    for path in (tmp_path / "none.safetensors", ROOT / "README.md"):
        with pytest.raises(ValueError, match="holds no cell"):
            HiddenCell.load(path)


def test_a_cell_under_text_is_no_register(tiny):
    model = tiny("llama")
    with pytest.raises(ValueError, match="experiment=hidden_story"):
        replace(cell(model), cover="").on(model)


# --------------------------------------------------------------------------------------- a constant push, and reading


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_is_always_pushed_is_pushed_at_the_prefix_and_at_every_step(tiny, family):
    """Equal to the whole sequence recomputed under a plain steering hook."""
    model = tiny(family)
    push = 0.3 * torch.randn(model.d_model, generator=torch.Generator().manual_seed(0))
    made = replace(cell(model, push=True), push=push)
    held = made.on(model)
    first = held.soft(torch.tensor([[1.0], [-1.0], [0.2]]))
    told = held.run(first, torch.zeros(2, 3))
    with hooks.add(model.module, Site(1), push):
        for row in range(3):
            inputs = torch.cat([made.prefix, told.soft_tokens[1, row][None]])[None]
            fresh = model.module(inputs_embeds=inputs, use_cache=False).logits[0, -1]
            torch.testing.assert_close(unembed(model.module, told.hidden[1, row]), fresh, atol=1e-5, rtol=0)


def test_prompts_that_are_pushed_alike_are_read_once_with_the_same_result(tiny, monkeypatch):
    model = tiny("llama")
    vectors = torch.eye(2, model.d_model)
    prompts = [model.encode(text) for text in ("abc", "ab", "bca b")]
    rows = torch.tensor([0, 1, 2, 2, 0])
    shared = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])[rows]
    batches = []
    read = loop._read
    monkeypatch.setattr(loop, "_read", lambda s, p, g: batches.append(len(p)) or read(s, p, g))

    def told(asked):
        program = programs.Program(torch.zeros(3, 5, 2), vectors, asked)
        return loop.run(model, prompts, program, feedback_map=maps.expected_embedding(), row_prompt=rows)

    once = told(shared)
    each = told(shared + 1e-12 * torch.arange(5.0)[:, None])  # rows of one prompt that differ are read row by row
    assert batches == [3, 3] or batches == [3, 5]
    different = shared.clone()
    different[4] = 3.0
    other = told(different)
    assert batches[-1] == 5
    torch.testing.assert_close(once.hidden, each.hidden, atol=1e-5, rtol=0)
    torch.testing.assert_close(once.hidden[:, :4], other.hidden[:, :4], atol=1e-5, rtol=0)
    assert (once.hidden[:, 4] - other.hidden[:, 4]).abs().max() > 1e-3


def test_reading_splits_and_margins_are_those_of_the_logits(tiny):
    model = tiny("llama")
    held = cell(model, pairs=(("a", "b"), ("d", "e"))).on(model, temperature=0.5)
    told = held.run(held.soft(torch.zeros(3, 2)), torch.zeros(2, 3))
    logits = unembed(model.module, told.hidden)
    a, b, d, e, c = (ord(x) for x in "abdec")
    expected = torch.stack(
        [torch.tanh(logits[..., a] - logits[..., b]), torch.tanh(logits[..., d] - logits[..., e])], -1
    )
    torch.testing.assert_close(held.read(told.hidden), expected)
    p = logits.softmax(-1)
    others = p.masked_fill(one_hot(torch.tensor(c), p.shape[-1]).bool(), 0).amax(-1)
    torch.testing.assert_close(held.margins(told.hidden), p[..., c] - others)


def test_a_cell_that_does_not_hold_its_words_is_refused_with_what_it_rests_at(tiny):
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"the cell does not hold \d.*experiment=learn_cell"):
        cell(model, pairs=(("a", "b"), ("d", "e"))).on(model).contrasts()


def test_loop_tests_are_ranked_by_what_they_kept_before_how_safely():
    safe, kept = LoopTest(0.9, 1.0, 0.5, 0.9), LoopTest(1.0, 1.0, 0.1, 0.2)
    assert kept > safe and max(safe, kept, LoopTest(1.0, 1.0, 0.2, 0.2)).margin == 0.2
    assert kept.works(0.1) and not kept.works(0.2) and not safe.works(0.1)


# ---------------------------------------------------------------------------------------------------- learning


def learner(model, kind="prefix", steps=8, seed=0, objective=None, **options):
    made = cell(model, pairs=(("a", "b"), ("d", "e")), push=kind != "prefix")
    options = {"batch": 6, "rate": 0.02, "test_every": 4, "testing": {"rows": 4, "steps": 4}} | options
    return Learner(model, made, objective or Objective(), kind=kind, steps=steps, seed=seed, **options)


@pytest.mark.parametrize("kind", ["prefix", "push", "both"])
def test_learning_lowers_the_loss_changes_what_it_may_and_no_weight(tiny, kind):
    model = tiny("llama")
    before = models.checksum(model.module)
    own = learner(model, kind, steps=40, test_every=20)
    start = own.prefix.detach().clone()
    losses = [row["loss"] for row in own.steps()]
    assert sum(losses[-5:]) < (0.95 if kind == "push" else 0.8) * sum(losses[:5])
    assert torch.equal(own.prefix, start) == (kind == "push")
    assert (own.push is None) == (kind == "prefix")
    if own.push is not None:
        assert own.push.norm() > 0.1
    assert models.checksum(model.module) == before
    assert all(not p.requires_grad and p.grad is None for p in model.module.parameters())
    assert own.best is not None and own.best[2].provenance["kind"] == kind


def test_learning_is_the_same_for_a_seed_and_another_for_another(tiny):
    model = tiny("llama")
    a, b, c = (learner(model, seed=seed) for seed in (0, 0, 1))
    losses = [[row["loss"] for row in own.steps()] for own in (a, b, c)]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(a.prefix, b.prefix)


@pytest.mark.parametrize("kind", ["prefix", "both"])
def test_a_learner_that_was_stopped_goes_on_exactly(tiny, tmp_path, kind):
    model = tiny("llama")
    whole, first, second = (learner(model, kind, steps=13) for _ in range(3))
    table = list(whole.steps())
    for row in first.steps():
        if row["step"] == 7:
            first.save(tmp_path / "learner.safetensors")
            break
    second.restore(tmp_path / "learner.safetensors")
    assert list(second.steps()) == table[7:]
    assert second.table == whole.table == table
    assert torch.equal(second.prefix, whole.prefix)
    assert second.best[1] == whole.best[1] and torch.equal(second.best[2].prefix, whole.best[2].prefix)
    assert second.test() == whole.test()


def test_patience_counts_the_tests_from_before_a_stop(tiny, tmp_path, monkeypatch):
    """Every loop test works and none is better than the first: the third one behind it ends the learning."""
    monkeypatch.setattr(Learner, "test", lambda self: LoopTest(1.0, 1.0, 0.5 - self.step / 1000, 0.8))
    model = tiny("llama")
    whole, first, second = (learner(model, steps=40, patience=3) for _ in range(3))
    assert [row["step"] for row in whole.steps()][-1] == 16
    for row in first.steps():
        if row["step"] == 12:
            first.save(tmp_path / "learner.safetensors")
            break
    second.restore(tmp_path / "learner.safetensors")
    assert [row["step"] for row in second.steps()] == [13, 14, 15, 16]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"steps": 14}, "steps: 13 there, 14 here"),
        ({"rate": 0.5}, "rate: 0.02 there, 0.5 here"),
        ({"patience": 9}, "patience"),
        ({"testing": {"rows": 4, "steps": 5}}, r"testing\.steps: 4 there, 5 here"),
        ({"objective": Objective(level=0.5)}, r"objective\.level: 0\.85 there, 0\.5 here"),
    ],
)
def test_a_learner_does_not_go_on_from_one_of_other_settings(tiny, tmp_path, other, named):
    model = tiny("llama")
    first = learner(model, steps=13)
    next(first.steps())
    first.save(tmp_path / "learner.safetensors")
    with pytest.raises(ValueError, match=f"was left by a learner with other settings: {named}"):
        learner(model, **{"steps": 13} | other).restore(tmp_path / "learner.safetensors")
    made = replace(cell(model, pairs=(("a", "b"), ("d", "e"))), cover_mass=0.5)
    with pytest.raises(ValueError, match=r"cell\.cover_mass: 0\.6 there, 0\.5 here"):
        Learner(model, made, Objective(), **{k: first.settings[k] for k in ("steps", "batch", "rate", "test_every")},
                testing=first.testing).restore(tmp_path / "learner.safetensors")  # fmt: skip
    with pytest.raises(ValueError, match="holds no learner's state"):
        learner(model).restore(ROOT / "README.md")


@pytest.mark.parametrize("kind", ["prefix", "both"])
def test_cells_are_learned_on_a_model_in_bfloat16_close_to_float32(kind):
    found = []
    for dtype in ("float32", "bfloat16"):
        model = models.load(models.ModelSpec(kind="tiny", family="llama", dtype=dtype))
        found.append([row["loss"] for row in learner(model, kind, steps=4).steps()])
        own = StoryLearner(
            model, cell(model, push=kind == "both"), Objective(), kind=kind, stories=stories(model), batch=3, steps=1
        )
        found[-1].append(own._outputs(torch.arange(3), torch.zeros(5, 3), torch.ones(5, 3)).mean().item())
        next(own.steps())
    assert found[1] == pytest.approx(found[0], rel=0.05)


def test_the_gradient_of_the_loss_with_respect_to_the_prefix_is_that_of_finite_differences(tiny):
    model = tiny("llama")

    def loss(shift, direction):
        own = learner(model, steps=1, objective=Objective(pushed=0.0))  # pushes and later targets are detached
        own.prefix.data += shift * direction
        own._improve = lambda value: (value.backward(), value.item())[1]
        return own._descend(), own.prefix.grad

    direction = torch.randn(cell(model).prefix.shape, generator=torch.Generator().manual_seed(1))
    _, gradient = loss(0.0, direction)
    slope = (loss(3e-3, direction)[0] - loss(-3e-3, direction)[0]) / 6e-3
    assert (gradient * direction).sum().item() == pytest.approx(slope, rel=0.03)


def test_what_is_wanted_is_the_threshold_gate_of_split_and_push():
    wanted = Objective(level=0.8, sharpness=100.0).wanted(
        WORDS, 0.6, torch.tensor([[0.9, 0.9], [0.9, -0.9], [-0.1, 0.1]]), torch.tensor([[-0.7, -1.6], [0, 1.0], [0, 0]])
    )
    split = WORDS.split(wanted.log())
    torch.testing.assert_close(split, 0.8 * torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]), atol=1e-3, rtol=0)
    torch.testing.assert_close(wanted[:, 0], torch.full((3,), 0.6))


@pytest.mark.parametrize("wrong", [{"level": 1.0}, {"pushed": 2.0}, {"threshold": 0.0}, {"unroll": 0}, {"sigma": -1.0}])
def test_objectives_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="expected level in"):
        Objective(**wrong)


# ------------------------------------------------------------------------------------------------- under text


def stories(model, texts=("abc ab", "ca", "bcab c")):
    return Stories.write(model, texts, 5)


def test_stories_are_the_models_own_greedy_text(tiny):
    model = tiny("llama")
    told = stories(model)
    for row, ids in enumerate(told.prompts):
        tokens = list(ids)
        for token in told.cover[:, row].tolist():
            logits = model.module(torch.tensor([tokens])).logits[0, -1]
            assert token == logits.argmax().item()
            tokens.append(token)


@pytest.mark.parametrize(("family", "push"), [("llama", False), ("gpt2", True)])
def test_all_positions_at_once_are_what_the_loop_gives_step_by_step(tiny, monkeypatch, family, push):
    """Ragged prompts, a pulse at some steps: the padded batch of learning against the loop that is fed the same soft
    tokens."""
    model = tiny(family)
    told = stories(model)
    made = cell(model, push=push)
    if push:
        made = replace(made, push=0.3 * torch.randn(model.d_model, generator=torch.Generator().manual_seed(2)))
    kind = "both" if push else "prefix"
    own = StoryLearner(model, made, Objective(sigma=0.0), kind=kind, stories=told, batch=3, steps=2, mix=0.7)
    own.carriers = torch.randn(1, model.d_model, generator=torch.Generator().manual_seed(0))
    u = torch.rand(5, 3, generator=torch.Generator().manual_seed(1)) * 2 - 1
    pushes = torch.zeros(5, 3)
    pushes[1:3] = torch.tensor([1.0, -2.0, 0.0])
    together = own._outputs(torch.arange(3), u, pushes)

    a, b = model.embedding[list(own.pair)]
    course = []
    for step, split in enumerate(u):
        text, half = model.embedding[told.cover[step]], 0.2 * split[:, None]
        course.append(0.3 * text + 0.7 * (0.6 * text + (0.2 + half) * a + (0.2 - half) * b))
    plain = maps.expected_embedding()
    dictated = maps.NamedMap("dictated", lambda turn: (course.pop(0), plain.function(turn, 1.0)[1]))
    monkeypatch.setattr(maps, "expected_embedding", lambda: dictated)
    looped = story.run(model, made, told, torch.arange(3), pushes, own.carriers[0])
    log_p = unembed(model.module, looped.hidden).log_softmax(-1)
    words = torch.stack([told.cover[1:], *(torch.full_like(told.cover[1:], word) for word in own.pair)], dim=-1)
    torch.testing.assert_close(together[1:], log_p.gather(-1, words), atol=1e-5, rtol=0)
    assert not course
    unpushed = own._outputs(torch.arange(3), u, 0 * pushes)
    torch.testing.assert_close(unpushed[:2], together[:2], atol=1e-6, rtol=0)
    assert (unpushed[2, :2] - together[2, :2]).abs().min() > 1e-5


def test_a_story_cell_is_learned_with_a_lower_loss_and_goes_on_with_its_stories_only(tiny, tmp_path):
    model = tiny("llama")

    def made(texts=("abc ab", "ca", "bcab c"), **options):
        options = {"batch": 6, "steps": 25, "rate": 0.02, "test_every": 25, "stories": stories(model, texts)} | options
        return StoryLearner(model, cell(model), Objective(), **options)

    own = made()
    losses = [row["loss"] for row in own.steps()]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    own.save(tmp_path / "learner.safetensors")
    again = made()
    again.restore(tmp_path / "learner.safetensors")
    assert again.step == 25 and again.test() == own.test()
    for other in (made(mix=0.9), made(("abc ab", "ca", "bcab d"))):
        with pytest.raises(ValueError, match=r"other settings: (mix|prompts|cover)"):
            other.restore(tmp_path / "learner.safetensors")


# ---------------------------------------------------------------------------------- carriers against detection


def channel(model, **changes):
    told = stories(model)
    settings = {"feedback_map": maps.hard_mix(maps.expected_embedding(), 0.5), "sigma": 0.05, "length": 2} | changes
    return covert.Channel(
        model=model, prompts=told.prompts, cover=told.cover, site=Site(1), context=Context("full"), **settings
    )


def test_a_channel_compares_rows_with_twins_under_the_same_noise(tiny):
    model = tiny("llama")
    pushes = torch.tensor([[0.0], [2.0], [0.0], [-2.0]])
    seen = channel(model).run(pushes, torch.eye(1, model.d_model), torch.tensor([0, 0, 1, 2]), 3)
    assert seen.differs.shape == (3, 4, model.d_model)
    assert seen.nats[[0, 2]].abs().max() == 0 and seen.nats[[1, 3]].min() > 0
    assert seen.same[:, [0, 2]].all()
    assert seen.differs[:, 0].abs().max() > 0  # the noise, against the noiseless run


def test_learned_carriers_raise_the_margin_per_nat(tiny):
    model = tiny("llama")
    start = carriers.random_orthonormal(2, model.d_model, torch.Generator().manual_seed(0))
    points = list(covert.learn(channel(model), start, alpha=0.5, steps=40, rows=8, rate=0.2))
    ratio = [point.margin / point.nats for point in points]
    assert sum(ratio[-8:]) > 1.5 * sum(ratio[:8])
    torch.testing.assert_close(points[-1].carriers.vectors.norm(dim=-1), torch.ones(2))
    with pytest.raises(ValueError, match="4 rows"):
        next(covert.learn(channel(model), start, alpha=0.5, rows=3))


def test_domination_is_measured_where_both_curves_are():
    def rows(kind, nats, bits):
        return [
            {"carriers": kind, "split": "messages", "nats": n, "bits_read": b} for n, b in zip(nats, bits, strict=True)
        ]

    table = rows("learned", [0.1, 1, 10], [1, 2, 3]) + rows("random", [1, 10, 100], [1, 2, 3])
    assert learned_carriers.dominates(table, "messages", "random") == {"share": 1.0, "more_bits": pytest.approx(1.0)}
    assert learned_carriers.nats_for(table, "learned", "messages", 1.5) == pytest.approx(0.1 * 10**0.5)
    assert learned_carriers.nats_for(table, "random", "messages", 3.5) is None
    assert learned_carriers.dominates(rows("learned", [1], [1]) + rows("random", [2], [1]), "messages", "random") == {
        "share": None,
        "more_bits": None,
    }


# ------------------------------------------------------------------------------------------------ the commands


def configured(name, *overrides):
    tiny_model = ["model=tiny", "site.block=1", "tracking=disabled", "quiet=true"]
    return composed(f"experiment={name}", *tiny_model, *overrides)


LEARN = [
    "learn.prompt='ab c'", "learn.cover=c", "learn.pairs=[[a,b]]", "learn.steps=6", "learn.test_every=3",
    "learn.test_rows=4", "learn.test_steps=4", "learn.batch=4",
]  # fmt: skip


def test_learn_cell_leaves_its_cell_its_state_and_says_that_it_does_not_work(tmp_path):
    record = run.main(configured("learn_cell", *LEARN), tmp_path / "a", None)
    s = record["summary"]
    assert s["works"] is False and s["why_not"] and s["steps"] == 6
    made = HiddenCell.load(tmp_path / "a" / "cell.safetensors")
    assert made.provenance["loop_test"] == s["loop_test"] and made.provenance["prompt"] == "ab c"
    model = models.load(models.ModelSpec(kind="tiny"))
    sizes = {"rows": 4, "steps": 4}
    assert made.on(model).loop_test(seed=1, **sizes).plain() == s["loop_test"]
    assert made.on(model).loop_test(seed=2, **sizes).plain() == s["confirmed"] != s["loop_test"]
    untrained = hidden.from_prompt(model, "ab c", "c", [("a", "b")], Site(1), 0.65).on(model)
    assert untrained.loop_test(seed=1, **sizes).plain() == s["untrained"]
    assert (tmp_path / "a" / "figures" / "learning.png").stat().st_size > 5_000
    table = results.read_table(tmp_path / "a" / "table.csv")
    assert [row["step"] for row in table] == [*range(1, 7)]
    again = run.main(configured("learn_cell", *LEARN), tmp_path / "b", None)
    assert again["summary"]["loop_test"] == s["loop_test"]


def test_an_interrupted_run_leaves_the_best_cell_and_goes_on_to_the_same_end(tmp_path, monkeypatch):
    descend, count = Learner._descend, iter(range(100))

    def interrupted(self):
        if next(count) == 4:
            raise KeyboardInterrupt
        return descend(self)

    monkeypatch.setattr(Learner, "_descend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.main(configured("learn_cell", *LEARN), tmp_path, None)
    assert HiddenCell.load(tmp_path / "cell.safetensors").provenance["step"] == 3
    monkeypatch.setattr(Learner, "_descend", descend)
    record = run.main(configured("learn_cell", *LEARN), tmp_path, None)
    assert record["summary"]["resumed_at_step"] == 3
    straight = run.main(configured("learn_cell", *LEARN), tmp_path / "straight", None)
    assert {**record["summary"], "resumed_at_step": 0} == straight["summary"]
    assert results.read_table(tmp_path / "table.csv") == results.read_table(tmp_path / "straight" / "table.csv")


def test_learned_carriers_measures_every_kind_at_every_strength(tmp_path):
    record = run.main(configured("learned_carriers", *COVERT), tmp_path, None)
    table = results.read_table(tmp_path / "table.csv")
    assert {(row["carriers"], row["alpha"], row["split"]) for row in table} == {
        (kind, alpha, split)
        for kind in ("learned", "random", "contrast")
        for alpha in (1, 4)
        for split in ("messages", "prompts")
    }
    assert all(0 <= row["bits_low"] <= row["bits_read"] <= row["bits_high"] <= 3 for row in table)
    assert record["summary"]["messages"].keys() == record["summary"]["prompts"].keys()
    model = models.load(models.ModelSpec(kind="tiny"))
    assert carriers.from_file(tmp_path / "carriers.safetensors", model, Site(1)).n_carriers == 3


def test_leaks_are_those_of_the_rows_that_are_read_and_held_out_messages_are_no_fitted_ones(tmp_path, monkeypatch):
    """Nats are 1 in rows of the known prompts, where tokens are the same, and 3 in rows of the unseen one."""
    config = configured("learned_carriers", *COVERT)
    fit, asked = learned_carriers.messages(config)
    both = torch.cat([asked, 1 - asked])
    assert len(fit) == 6 and len(asked) == 2 and not (fit[:, None] == both).all(-1).any()
    assert torch.linalg.matrix_rank(2.0 * fit - 1) == 3
    assert (2 * fit.sum(0) == 6).all() and (2 * asked.sum(0) == 2).all()
    model = models.load(models.ModelSpec(kind="tiny"))

    def seen(self, pushes, vectors, prompt, seed):
        features = torch.randn(2, len(prompt), 5, generator=torch.Generator().manual_seed(0))
        known = prompt < 2
        return covert.Seen(features, torch.where(known, 1.0, 3.0), known.expand(4, -1))

    monkeypatch.setattr(covert.Channel, "run", seen)
    own = carriers.random_orthonormal(3, model.d_model, torch.Generator().manual_seed(0))
    known, unseen = learned_carriers.measure(config, channel(model), own, 1.0)
    assert (known["nats"], known["nats_low"], known["nats_high"]) == (1, 1, 1)
    assert (unseen["nats"], unseen["text_bound"]) == (3, 0.5)
    assert known["text_bound"] == pytest.approx(0.5**0.5 / 2)
    assert (known["argmax_agreement"], unseen["argmax_agreement"]) == (1, 0)
    assert (known["reads"], unseen["reads"]) == (2 * 2 * 3, 8 * 3)


@pytest.mark.parametrize(
    ("experiment", "override", "message"),
    [
        ("learn_cell", "learn.kind=magic", "prefix, push or both"),
        ("learn_cell", "learn.steps=0", "learn.steps=0"),
        ("learn_cell", "learn.cover_mass=0.99", "a mass from 0.2 to 0.9"),
        ("learn_cell", "learn.level=1.5", r"level in \(0, 1\)"),
        ("learn_cell", "learn.pairs=[[a]]", "expected text, and pairs"),
        ("learn_cell", "learn.rate=-1", "positive rates"),
        ("learn_cell", "learn.cover=''", "experiment=hidden_story learns a cell under ordinary text"),
        ("learn_cell", "context=full", "expected context=prompt"),
        ("learn_cell", "map.temperature=2", "at temperature 1"),
        ("learn_cell", "map=top_k", "the expected embedding"),
        ("learn_cell", "site.block=middle", "a cell is learned for one block"),
        ("learn_cell", "learn.test_rows=1", "a row for each of the 2 words"),
        ("hidden_latch", "cell=register_2", "holds 2 bits: experiment=register"),
        ("hidden_latch", "cell=story", "was learned under ordinary text: experiment=hidden_story"),
        ("register", "cell=story", "was learned under ordinary text: experiment=hidden_story"),
        ("register", "register.settle_steps=0", "settle_steps=0"),
        ("hidden_logic", "cell.file=hidden.safetensors", "measured behind a prompt.*cell=hidden sets"),
        ("circuit", "cell.file=hidden.safetensors", "measured behind a prompt.*cell=hidden sets"),
        ("hidden_latch", "cell.file=nowhere.safetensors", r"cell\.file=nowhere\.safetensors: no such file.*hidden"),
        ("hidden_latch", "hidden_latch.rows=6", "rows in fours"),
        ("hidden_latch", "hidden_latch.period=5", "more than pulse_steps=5"),
        ("hidden_latch", "cell=cat_dog", "contrast_soft_tokens|measures a learned cell"),
        ("register", "register.period=3", "more steps than pulse_steps=5"),
        ("register", "cell=cat_dog", "measures a learned cell"),
        ("latch", "carriers.kind=contrast_rests", "is of a learned cell"),
        ("learned_carriers", "carriers=unembedding", "learning starts from carriers=random_orthonormal"),
        ("learned_carriers", "covert.fit_messages=3", "even numbers"),
        ("learned_carriers", "covert.length=6", "steps behind the push"),
        ("learned_carriers", "covert.rows=4", "more rows than covert.n_bits=4"),
        ("learned_carriers", "covert.alpha=-1", "positive numbers"),
        ("learned_carriers", "alpha=[0,1]", "positive numbers"),
        ("learned_carriers", "covert.fit_messages=4", "found none that tell 4 bits apart"),
        ("learned_carriers", "covert.test_messages=32", "found none that tell 4 bits apart"),
        ("learned_carriers", "prompts.unseen=15", "two have to be left"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_model_is_loaded(
    experiment, override, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(models, "load", lambda spec: pytest.fail("the model was loaded"))
    extra = ["carriers.a=a", "carriers.b=b"] if override.startswith("carriers=") else []
    extra += ["cell=hidden"] if experiment == "register" and "cell" not in override else []
    with pytest.raises(ValueError, match=message):
        run.main(configured(experiment, override, *extra), tmp_path, None)


def test_a_cell_with_a_push_is_pushed_where_it_was_learned(tmp_path, tiny, monkeypatch):
    model = models.load(models.ModelSpec(kind="tiny"))
    pushed = replace(cell(model, push=True), push=torch.ones(model.d_model))
    pushed.save(tmp_path / "pushed.safetensors")
    plain, where = cell(model), [f"cell.file={tmp_path / 'pushed.safetensors'}", "site.block=2"]
    assert plain.on(model, Site(2)).site == Site(2)
    with pytest.raises(ValueError, match="a push of its own, learned at block 1"):
        pushed.on(model, Site(2))
    replace(pushed, cover="").save(tmp_path / "story.safetensors")
    monkeypatch.setattr(models, "load", lambda spec: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=r"pushed at block 2 \(block\): site\.block=1"):
        run.main(configured("hidden_latch", *where, "carriers.kind=contrast_rests"), tmp_path, None)
    with pytest.raises(ValueError, match=r"site\.block=2 .* was learned at block 1"):
        story_file = f"cell.file={tmp_path / 'story.safetensors'}"
        run.main(configured("hidden_story", *STORY[:-1], story_file, "site.block=2"), tmp_path, None)


def test_a_register_says_where_each_word_of_an_untrained_cell_goes(tmp_path, tiny):
    model = models.load(models.ModelSpec(kind="tiny"))
    cell(model, pairs=(("a", "b"), ("d", "e"))).save(tmp_path / "two.safetensors")
    record = run.main(
        configured("register", f"cell.file={tmp_path / 'two.safetensors'}", "carriers.kind=contrast_rests"),
        tmp_path / "register",
        None,
    )
    rows = results.read_table(tmp_path / "register" / "table.csv")
    assert [row["word"] for row in rows] == ["00", "01", "10", "11"]
    assert [row["held"] for row in rows] == [row["word"] == f"{row['rests_as']:0>2}" for row in rows]
    assert record["summary"]["words_held"] == sum(row["held"] for row in rows) < 4


STORY = ["hidden_story.known=2", "hidden_story.unseen=1", "hidden_story.rows=2", "steps=6", "learn.cover=''",
         "learn.pairs=[[a,b]]", "learn.prompt='ab c'", "learn.steps=4", "learn.batch=3", "learn.test_every=2",
         "prompts.texts=['abc a','bca','ca b']", "cell.file=null"]  # fmt: skip


def test_hidden_story_measures_every_arm_on_known_and_unseen_prompts_and_its_cell_again(tmp_path):
    record = run.main(configured("hidden_story", *STORY), tmp_path / "a", None)
    arms = {"loop", "cache", "random_v", "unpushed", "unpushed_cache"}
    assert record["summary"].keys() == {"known", "unseen", "learned"} and record["summary"]["known"].keys() == arms
    table = results.read_table(tmp_path / "a" / "table.csv")
    assert len(table) == 2 * 5 * 6
    assert all(row["ber_low"] <= row["ber"] <= row["ber_high"] for row in table)
    # before the pulse a row is its twin; the unpushed arms have noise of their own and differ from theirs
    unpushed = [row for row in table if row["arm"].startswith("unpushed")]
    assert all(row["ber"] == 0.5 for row in table if row["step"] == 1 and row not in unpushed)
    assert len({row["ber"] for row in unpushed}) > 1
    assert record["summary"]["learned"].keys() == {"best_step", "loop_test"}
    made = HiddenCell.load(tmp_path / "a" / "cell.safetensors")
    assert made.cover == "" and made.push is not None
    again = run.main(
        configured("hidden_story", *STORY[:-1], f"cell.file={tmp_path / 'a' / 'cell.safetensors'}"),
        tmp_path / "b",
        None,
    )
    assert again["summary"]["known"]["loop"] == record["summary"]["known"]["loop"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hidden_story.known=3", "no more known and unseen than the 3 prompts"),
        ("hidden_story.unseen=0", "expected at least 1 of each"),
        ("hidden_story.start=0", "expected at least 1 of each"),
        ("context=prompt", "context=prompt, learn.unroll=1: expected full, and 1"),
        ("learn.unroll=2", "learn.unroll=2: expected full, and 1"),
        ("map.temperature=0.5", "at temperature 1"),
        ("hidden_story.mix=0", "a mix above 0"),
        ("steps=4", "steps behind the pulse's end"),
        ("learn.pairs=[[a,b],[c,d]]", "expected one pair"),
        ("cell.file=hidden.safetensors", "hidden_latch measures it"),
    ],
)
def test_story_settings_that_cannot_work_are_refused(override, message, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", lambda spec: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=message):
        run.main(configured("hidden_story", *STORY, override), tmp_path, None)
