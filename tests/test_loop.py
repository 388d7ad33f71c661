"""One batch through the loop: what a step computes, what it remembers, and what can go wrong in it.

Where two ways of computing one thing are compared over several steps, the models are float64: a free-running loop of a
random model amplifies the rounding of float32 a thousandfold in six steps.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from feedback import loop, maps, models, programs, pushing
from feedback.cache import Context
from feedback.pushing import ReceiptError
from feedback.sites import Site, blocks, unembed

FAMILIES = ("llama", "gpt2", "gemma2", "qwen2", "gpt_neox", "mistral")
RAGGED = ("The sea", "A letter came today", "Dog")
STEPS = 6


def exact(tiny, family):
    """float64, but for gemma2: its attention makes NaN of padded positions there, in transformers itself."""
    return tiny(family, dtype="float32" if family == "gemma2" else "float64")


def close(found, expected):
    """Equal up to the rounding of the model's dtype."""
    torch.testing.assert_close(found, expected, atol=1e-4 if found.dtype == torch.float32 else 1e-7, rtol=0)


def carriers(model, n=2):
    drawn = torch.randn(n, model.d_model, generator=torch.Generator().manual_seed(5))
    return torch.linalg.qr(drawn.mT)[0].mT.contiguous()


def constant(model, alpha=1.5, rows=3, steps=STEPS, scope="loop", n=1):
    return programs.constant(carriers(model, n), alpha, steps=steps, rows=rows, scope=scope)


def run(model, program, prompts=RAGGED, **settings):
    settings.setdefault("feedback_map", maps.expected_embedding())
    return loop.run(model, [model.encode(p) for p in prompts], program, **settings)


def logits(model, trajectory):
    return unembed(model.module, trajectory.hidden)


def hook_counts(model):
    return [(name, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.module.named_modules()]


def recomputed(model, prompt, soft_tokens, delta=None, from_position=0):
    """Logits after each soft token from one uncached pass over all of it, block 1 shifted by ``delta``."""
    ids = torch.tensor([model.encode(prompt)])
    inputs = torch.cat([model.embedding[ids], soft_tokens[None]], dim=1)

    def shift(module, args, output):
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        moved = hidden.clone()
        moved[:, from_position:] += delta
        return moved if isinstance(output, torch.Tensor) else (moved, *output[1:])

    handle = blocks(model.module)[1].register_forward_hook(shift) if delta is not None else None
    try:
        out = model.module(inputs_embeds=inputs, use_cache=False).logits[0]
    finally:
        if handle is not None:
            handle.remove()
    return out[ids.shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_hot_map_is_greedy_generation_token_for_token(tiny, family):
    model = tiny(family)
    prompts = [torch.tensor([model.encode(p)]) for p in RAGGED]
    told = run(model, constant(model, alpha=0.0, steps=64), feedback_map=maps.one_hot())
    for row, ids in enumerate(prompts):
        expected = model.module.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)[
            0, ids.shape[1] :
        ]
        assert told.text[row, :64].tolist() == expected.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_of_three_equals_its_single_runs(tiny, family):
    model = exact(tiny, family)
    together = logits(model, run(model, constant(model, steps=3)))
    for row, prompt in enumerate(RAGGED):
        alone = logits(model, run(model, constant(model, rows=1, steps=3), prompts=(prompt,)))
        close(together[:, row], alone[:, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cached_loop_equals_recomputing_where_the_push_is_constant_on_all_passes(tiny, family):
    model = exact(tiny, family)
    program = constant(model, scope="all")
    told = run(model, program, site=Site(1))
    assert "equal to recomputing" in told.meta["semantics"]
    delta = 1.5 * program.carriers[0]
    for row, prompt in enumerate(RAGGED):
        expected = recomputed(model, prompt, told.soft_tokens[:, row], delta)
        close(logits(model, told)[:, row], expected)


def test_a_push_in_the_loop_only_equals_recomputing_with_the_loop_positions_pushed(tiny):
    model = tiny("llama", dtype="float64")
    program = constant(model)
    told = run(model, program, site=Site(1))
    delta = 1.5 * program.carriers[0]
    for row, prompt in enumerate(RAGGED):
        length = len(model.encode(prompt))
        expected = recomputed(model, prompt, told.soft_tokens[:, row], delta, from_position=length)
        torch.testing.assert_close(logits(model, told)[:, row], expected, atol=1e-7, rtol=0)


def test_a_pulse_stays_in_the_cache_so_it_differs_from_recomputing_without_it(tiny):
    model = tiny("llama")
    program = programs.pulse(carriers(model, 1), 8.0, steps=STEPS, rows=3, start=1, length=1)
    told = run(model, program, site=Site(1))
    assert told.meta["semantics"].startswith("cached")
    clean = recomputed(model, RAGGED[1], told.soft_tokens[:, 1])
    assert (logits(model, told)[-1, 1] - clean[-1]).abs().max() > 1e-3


def test_step_t_does_not_depend_on_how_many_steps_follow(tiny):
    model = tiny("llama", dtype="float64")
    short = run(model, constant(model, steps=3), randomness=loop.Randomness(7), sample=1.0)
    long = run(model, constant(model, steps=9), randomness=loop.Randomness(7), sample=1.0)
    torch.testing.assert_close(long.hidden[:3], short.hidden, atol=1e-7, rtol=0)
    assert torch.equal(long.tokens[:3], short.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_alpha_zero_is_bit_identical_to_no_hook(tiny, family, monkeypatch):
    model = tiny(family)
    hooked = run(model, constant(model, alpha=0.0, n=2))
    monkeypatch.setattr("feedback.pushing._Add.apply", lambda self, hidden: None)
    bare = run(model, constant(model, alpha=0.0, n=2))
    assert torch.equal(hooked.hidden, bare.hidden)
    model_only = recomputed(model, RAGGED[0], hooked.soft_tokens[:, 0])
    torch.testing.assert_close(logits(model, hooked)[:, 0], model_only, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_before_the_site_nothing_changes_and_at_the_site_exactly_alpha_v(tiny, family):
    model = tiny(family)
    sites = [Site(0), Site(1), Site(2), Site(2, at="block_input")]
    pushed, plain = (run(model, constant(model, alpha=a, steps=1), site=Site(1), record=sites) for a in (2.0, 0.0))
    path = {site: list(pushed.recorded)[i] for i, site in enumerate(sites[:3])}
    assert torch.equal(pushed.recorded[path[Site(0)]], plain.recorded[path[Site(0)]])
    expected = plain.recorded[path[Site(1)]] + 2.0 * pushed.program.carriers[0]
    assert torch.equal(pushed.recorded[path[Site(1)]], expected)
    torch.testing.assert_close(pushed.pushed, torch.full((1, 3, 1), 2.0))
    assert (pushed.recorded[path[Site(2)]] - plain.recorded[path[Site(2)]]).abs().max() > 1e-3


def test_chunks_equal_one_batch_with_noise_sampling_and_references(tiny):
    model = tiny("llama", dtype="float64")
    program = programs.constant(carriers(model, 1), [0.0, 1.0, 4.0], steps=STEPS, rows=3)
    settings = {
        "row_prompt": torch.arange(3).repeat(3),
        "reference": torch.arange(3).repeat(3),
        "feedback_map": maps.noisy(maps.gumbel(0.5), torch.linspace(0, 0.2, 9)),
        "randomness": loop.Randomness(3, torch.arange(3).repeat(3)),
        "sample": 1.0,
    }
    whole, chunked = (run(model, program, **settings, max_rows=n) for n in (None, 2))
    for name in ("hidden", "soft_tokens", "kl", "pushed"):
        close(getattr(chunked, name), getattr(whole, name))
    assert torch.equal(chunked.tokens, whole.tokens)
    assert whole.kl[:, :3].abs().max() < 1e-6 < whole.kl[:, 6:].min()


def test_a_list_of_alphas_in_one_batch_equals_separate_runs(tiny):
    model = tiny("llama", dtype="float64")
    v = carriers(model, 1)
    ids = torch.arange(3)
    batch = run(
        model,
        programs.constant(v, [0.0, 0.5, 8.0], steps=STEPS, rows=3),
        row_prompt=ids.repeat(3),
        feedback_map=maps.noisy(maps.expected_embedding(), 0.01),
        randomness=loop.Randomness(3, ids.repeat(3)),
    )
    for i, alpha in enumerate((0.0, 0.5, 8.0)):
        alone = run(
            model,
            programs.constant(v, alpha, steps=STEPS, rows=3),
            feedback_map=maps.noisy(maps.expected_embedding(), 0.01),
            randomness=loop.Randomness(3, ids),
        )
        torch.testing.assert_close(batch.hidden[:, 3 * i : 3 * i + 3], alone.hidden, atol=1e-7, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_context_prompt_is_an_autonomous_map(tiny, family):
    """The same soft token read at step 1 and at step 5 gives the same state: only the prompt is remembered."""
    model = exact(tiny, family)
    told = run(model, constant(model, alpha=0.0), context=Context("prompt"))
    for step in (0, 4):
        fresh = recomputed(model, RAGGED[1], told.soft_tokens[step, 1][None])
        close(logits(model, told)[step, 1], fresh[0])


def test_context_window_sees_the_last_soft_tokens_only(tiny):
    model = tiny("llama", dtype="float64")
    told = run(model, constant(model, alpha=0.0), context=Context("window", 2))
    full = run(model, constant(model, alpha=0.0))
    torch.testing.assert_close(told.hidden[:3], full.hidden[:3], atol=1e-7, rtol=0)
    assert (told.hidden[3:] - full.hidden[3:]).abs().max() > 1e-4
    # Row 1, step 5 by hand: prompt, then soft tokens 3, 4, 5 at their own positions.
    ids = torch.tensor([model.encode(RAGGED[1])])
    p = ids.shape[1]
    inputs = torch.cat([model.embedding[ids], told.soft_tokens[2:5, 1][None]], dim=1)
    positions = torch.cat([torch.arange(p), torch.tensor([p + 2, p + 3, p + 4])])[None]
    # A kept soft token still holds what it read when it was new, so only block 0's keys are as in a fresh pass;
    # with one block the two agree exactly.
    single = tiny("llama", n_blocks=1, dtype="float64")
    told = run(single, constant(single, alpha=0.0), context=Context("window", 2), site=Site(0))
    inputs = torch.cat([single.embedding[ids], told.soft_tokens[2:5, 1][None]], dim=1)
    out = single.module(
        inputs_embeds=inputs,
        position_ids=positions,
        attention_mask=torch.ones(1, p + 3, dtype=torch.long),
        use_cache=False,
    ).logits[0, -1]
    torch.testing.assert_close(logits(single, told)[4, 1], out, atol=1e-7, rtol=0)


def test_a_window_as_long_as_the_run_is_context_full(tiny):
    model = tiny("gpt2", dtype="float64")
    full, window = (run(model, constant(model), context=c) for c in (Context(), Context("window", STEPS)))
    torch.testing.assert_close(window.hidden, full.hidden, atol=1e-7, rtol=0)


def test_rows_of_one_prompt_never_share_a_cache(tiny):
    model = tiny("llama", dtype="float64")
    program = programs.constant(carriers(model, 1), [0.0, 5.0], steps=STEPS, rows=1)
    both = run(model, program, prompts=RAGGED[:1], row_prompt=torch.tensor([0, 0]))
    alone = run(model, constant(model, alpha=0.0, rows=1), prompts=RAGGED[:1])
    torch.testing.assert_close(both.hidden[:, :1], alone.hidden, atol=1e-7, rtol=0)
    assert (both.hidden[:, 1] - both.hidden[:, 0]).abs().max() > 1e-2


def test_the_next_soft_token_recomputed_from_the_record_is_what_was_fed(tiny):
    model = exact(tiny, "gemma2")
    chosen = maps.hard_mix(maps.top_k(5, 0.7), 0.4)
    told = run(model, constant(model), feedback_map=chosen, sample=0.8)
    before = torch.cat([told.prompt_hidden[None], told.hidden[:-1]])
    said = torch.cat([told.prompt_tokens[None], told.tokens[:-1]])
    for step in range(STEPS):
        z = unembed(model.module, before[step])
        vector, fed = chosen(z, before[step], model.embedding, said[step])
        close(told.soft_tokens[step], vector)
        close(told.entropy[step], fed.entropy)


def test_forced_cover_text_is_emitted_and_at_mix_zero_it_is_all_that_is_fed(tiny):
    model = tiny("llama")
    cover = torch.randint(0, 200, (STEPS + 1, 3), generator=torch.Generator().manual_seed(0))
    told = run(
        model,
        constant(model),
        forced=cover,
        feedback_map=maps.hard_mix(maps.expected_embedding(), 0.0),
    )
    assert torch.equal(told.text, cover.mT)
    assert torch.equal(told.soft_tokens, model.embedding[cover[:-1]])


def test_a_row_whose_state_turns_non_finite_is_named_and_the_others_go_on(tiny):
    model = tiny("llama", dtype="float64")
    strengths = torch.tensor([[1.0], [3e38], [1.0]])
    program = programs.pulse(3 * carriers(model, 1), 1.0, steps=STEPS, rows=strengths, start=3, length=2)
    told = run(model, program)
    assert told.stopped_at.tolist() == [0, 3, 0]
    assert [(f["row"], f["step"]) for f in told.failures()] == [(1, 3)]
    healthy = run(model, program.rows([0, 2]), prompts=(RAGGED[0], RAGGED[2]))
    torch.testing.assert_close(told.hidden[:, [0, 2]], healthy.hidden, atol=1e-7, rtol=0)


@pytest.mark.parametrize("where", ["map", "hook", "interrupt"])
def test_hooks_are_gone_after_an_exception_anywhere(tiny, where, monkeypatch):
    model = tiny("llama")
    before = hook_counts(model)
    calls = 0

    def broken(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt if where == "interrupt" else RuntimeError("planted")
        return original(*args, **kwargs)

    target = "feedback.maps._expected_embedding" if where != "hook" else "feedback.pushing._Add.apply"
    holder, name = (maps, "_expected_embedding") if where != "hook" else (pushing._Add, "apply")
    original = getattr(holder, name)
    monkeypatch.setattr(target, broken)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        run(model, constant(model), feedback_map=maps.expected_embedding())
    assert calls == 3
    assert hook_counts(model) == before


def test_a_push_that_arrives_wrong_in_one_row_names_step_site_and_row(tiny, monkeypatch):
    model = tiny("llama")
    original, calls = pushing._Add.apply, []

    def sabotaged(self, hidden):
        changed = original(self, hidden)
        calls.append(changed)
        if len(calls) == 4:
            changed[1] += 0.5
        return changed

    monkeypatch.setattr(pushing._Add, "apply", sabotaged)
    with pytest.raises(ReceiptError, match=r"step 4, site model\.layers\.2, rows \[1\]"):
        run(model, constant(model))


def test_a_push_that_fires_twice_in_a_pass_is_an_error_that_names_the_step(tiny):
    model = tiny("llama")
    block = blocks(model.module)[2]
    forward = block.forward

    def twice(*args, **kwargs):
        for hook in list(block._forward_hooks.values()):
            if type(hook).__name__ == "_Add":
                hook.fired += 1
        return forward(*args, **kwargs)

    block.forward = twice
    try:
        with pytest.raises(ReceiptError, match=r"step 1.*fired 2 times"):
            run(model, constant(model))
    finally:
        del block.forward


class _Waits(TorchDispatchMode):
    """Counts operations whose result the host has to wait for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("feedback_map", [maps.expected_embedding(), maps.top_k(8)], ids=lambda m: m.name)
def test_no_step_makes_the_host_wait(tiny, feedback_map):
    """The waits of a run (checks at its start, receipts at its end) do not grow with the number of steps."""
    model = tiny("llama")
    counts = []
    for steps in (4, 12):
        with _Waits() as waits:
            run(model, constant(model, steps=steps), feedback_map=feedback_map, reference=torch.arange(3))
        counts.append(waits.count)
    assert counts[0] == counts[1]


def test_the_gradient_through_a_differentiable_loop_agrees_with_finite_differences(tiny):
    model = tiny("gpt2", dtype="float64")  # its norms stay in float64, where Llama's go through float32
    v = carriers(model, 1).double()

    def readout(vectors):
        program = programs.constant(vectors, 1.0, steps=3, rows=3)
        told = run(model, program, differentiable=True)
        return (told.hidden[-1] * torch.arange(model.d_model)).sum()

    leaf = v.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(readout(leaf), leaf)
    direction = torch.randn(v.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    epsilon = 1e-5
    with torch.no_grad():
        slope = (readout(v + epsilon * direction) - readout(v - epsilon * direction)) / (2 * epsilon)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-8)


def test_the_gradient_is_the_same_to_the_last_bit_with_several_threads():
    """Of one prompt that many rows read: the sum over the rows has one order."""
    model = models.load(models.ModelSpec(kind="tiny", d_model=128))
    prompt = torch.randn(64, model.d_model, generator=torch.Generator().manual_seed(0))

    def gradient():
        read = prompt.clone().requires_grad_()
        nothing = programs.constant(carriers(model, 1), 0.0, steps=1, rows=96)
        reads = torch.zeros(96, dtype=torch.long)
        settings = {"feedback_map": maps.expected_embedding(), "site": Site(1), "context": Context("prompt")}
        told = loop.run(model, [read], nothing, row_prompt=reads, differentiable=True, max_rows=96, **settings)
        (told.hidden * torch.linspace(-1, 1, told.hidden.numel()).view_as(told.hidden)).sum().backward()
        return read.grad

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradient()
        assert first.abs().max() > 0
        assert all(torch.equal(gradient(), first) for _ in range(10))
    finally:
        torch.set_num_threads(threads)


def test_the_differentiable_loop_computes_what_the_plain_one_does(tiny):
    model = tiny("llama", dtype="float64")
    for context in (Context(), Context("prompt"), Context("window", 2)):
        plain, graph = (run(model, constant(model), context=context, differentiable=d) for d in (False, True))
        torch.testing.assert_close(graph.hidden, plain.hidden, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": ("The sea", "A", "")}, "prompt"),
        ({"row_prompt": torch.tensor([0, 1, 3])}, "there are 3 prompts"),
        ({"forced": torch.zeros(STEPS, 3, dtype=torch.long)}, r"expected \(steps \+ 1, rows\) = \(7, 3\)"),
        ({"reference": torch.tensor([0])}, "reference names 1 rows; the program has 3"),
    ],
)
def test_bad_input_is_refused_with_what_was_given_and_expected(tiny, settings, message):
    model = tiny("llama")
    with pytest.raises(ValueError, match=message):
        run(model, constant(model), **settings)


def test_a_prompt_longer_than_the_context_is_refused(tiny):
    model = tiny("llama")
    with pytest.raises(ValueError, match="positions"):
        run(model, constant(model, rows=1), prompts=("x" * (model.max_positions + 1),))


def test_carriers_of_another_width_are_refused(tiny):
    model = tiny("llama")
    program = programs.constant(torch.eye(7)[:1], 1.0, steps=2, rows=3)
    with pytest.raises(ValueError, match="7 numbers wide"):
        run(model, program)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_float32_carrier_is_pushed_into_a_half_precision_model_and_the_effective_alpha_is_measured(tiny, dtype):
    model = tiny("llama", dtype=dtype)
    told = run(model, constant(model, alpha=1.5))
    assert told.hidden.dtype == model.dtype
    effective = told.pushed.mean().item()
    assert effective == pytest.approx(1.5, rel=0.05)
    assert effective != 1.5  # rounded to the grid of the dtype, and said so


@pytest.mark.parametrize("at", ["block_input", "attn", "mlp"])
def test_a_push_at_every_kind_of_site_arrives_in_every_step(tiny, at):
    model = tiny("qwen2")
    told = run(model, constant(model, alpha=1.5), site=Site(1, at))
    torch.testing.assert_close(told.pushed, torch.full((STEPS, 3, 1), 1.5), atol=1e-4, rtol=0)
    assert told.meta["site"] == {"block": 1, "at": at, "path": told.meta["site"]["path"]}


def test_a_first_soft_token_is_read_at_step_1_as_it_is_and_the_rest_follows_from_it(tiny):
    model = exact(tiny, "llama")
    first = torch.randn(3, model.d_model, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    told = run(model, constant(model, alpha=0.0), first=first, context=Context("prompt"), max_rows=2)
    assert torch.equal(told.soft_tokens[0], first)
    assert told.entropy[0].isnan().all() and told.entropy[1:].isfinite().all()
    z = logits(model, told)[0]
    close(told.soft_tokens[1], torch.softmax(z.float(), -1).double() @ model.embedding)


def test_in_context_prompt_a_run_is_continued_by_its_next_soft_token(tiny):
    model = exact(tiny, "llama")
    whole = run(model, constant(model), context=Context("prompt"))
    later = run(model, constant(model, steps=3), first=whole.soft_tokens[3], context=Context("prompt"))
    close(later.hidden, whole.hidden[3:])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_prompt_of_vectors_does_what_its_tokens_do_beside_others_of_another_length(tiny, family):
    model = exact(tiny, family)
    ids = [model.encode(p) for p in RAGGED]
    program = constant(model, alpha=0.5)
    told = loop.run(model, ids, program, feedback_map=maps.expected_embedding())
    mixed = [ids[0], model.embedding[torch.tensor(ids[1])], model.embedding[torch.tensor(ids[2])]]
    again = loop.run(model, mixed, program, feedback_map=maps.expected_embedding())
    close(again.hidden, told.hidden)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first": torch.zeros(2, 32)}, r"first is \(2, 32\); expected \(row, d_model\) = \(3, 32\)"),
        ({"prompts": (torch.zeros(4, 7), "A", "B")}, r"prompt 0 is \(4, 7\); expected \(position, d_model = 32\)"),
    ],
)
def test_vectors_of_another_shape_are_refused(tiny, settings, message):
    model = tiny("llama")
    prompts = [p if isinstance(p, torch.Tensor) else model.encode(p) for p in settings.pop("prompts", RAGGED)]
    with pytest.raises(ValueError, match=message):
        loop.run(model, prompts, constant(model), feedback_map=maps.expected_embedding(), **settings)
