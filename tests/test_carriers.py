"""Carriers: what direction each constructor gives, and which files are refused."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from feedback import carriers as made
from feedback.carriers import Carriers, from_file, from_vectors
from feedback.hooks import record
from feedback.models import ModelSpec, load
from feedback.sites import Site

SITE = Site(block=2)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def model():
    return load(ModelSpec(kind="tiny"))


def output_at(model, site, ids):
    """The site's output, (position, d_model), by the ordinary forward pass from token ids."""
    with torch.no_grad(), record(model.module, [site]) as recorder:
        model.module(input_ids=torch.tensor([ids]))
        return recorder.outputs[site][0]


def cosine(a, b):
    return float(torch.cosine_similarity(a, b, dim=-1))


@pytest.mark.parametrize("n", [1, 8, 32])
def test_random_carriers_are_orthonormal(n):
    carriers = made.random_orthonormal(n, 32, generator())
    torch.testing.assert_close(carriers.vectors @ carriers.vectors.mT, torch.eye(n))
    assert (carriers.n_carriers, carriers.d_model, carriers.site) == (n, 32, None)
    assert torch.equal(carriers.vectors, made.random_orthonormal(n, 32, generator()).vectors)
    assert not torch.equal(carriers.vectors, made.random_orthonormal(n, 32, generator(1)).vectors)


def test_random_carriers_point_everywhere():
    # 100 first carriers of width 3: every coordinate has mean 0 and mean square 1/3 (standard error
    # 0.03: the variance of a square is 4/45)
    one = generator()
    drawn = torch.cat([made.random_orthonormal(2, 3, one).vectors[:1] for _ in range(100)])
    assert drawn.mean(0).abs().max() < 4 * (1 / 3 / 100) ** 0.5
    torch.testing.assert_close(drawn.square().mean(0), torch.full((3,), 1 / 3), atol=0.12, rtol=0)


def test_more_orthonormal_carriers_than_dimensions_are_refused():
    with pytest.raises(ValueError, match="33 orthonormal carriers of width 32 do not exist; expected 1 to 32"):
        made.random_orthonormal(33, 32, generator())


def test_contrast_of_prompts_points_from_b_to_a(model):
    carriers = made.contrast_prompts(model, SITE, "a cat sat", "dogs")
    a, b = (output_at(model, SITE, model.encode(text))[-1] for text in ("a cat sat", "dogs"))
    torch.testing.assert_close(carriers.vectors[0] * carriers.raw_lengths[0], a - b)
    assert carriers.provenance == {"prompt_a": ["a cat sat"], "prompt_b": ["dogs"]}
    assert (carriers.site, carriers.checksum) == (SITE, model.info.checksum)


def test_contrast_of_several_prompts_is_that_of_their_means(model):
    several = made.contrast_prompts(model, SITE, ["one", "longer one"], ["x", "yz", "w"])
    sides = [
        torch.stack([output_at(model, SITE, model.encode(text))[-1] for text in side]).mean(0)
        for side in (["one", "longer one"], ["x", "yz", "w"])
    ]
    torch.testing.assert_close(several.vectors[0] * several.raw_lengths[0], sides[0] - sides[1])


def test_contrast_of_soft_tokens_reads_each_behind_the_prompt(model):
    carriers = made.contrast_soft_tokens(model, SITE, "State:", "c", "d")
    ids = model.encode("State:")
    a, b = (output_at(model, SITE, [*ids, ord(letter)])[-1] for letter in "cd")
    torch.testing.assert_close(carriers.vectors[0] * carriers.raw_lengths[0], a - b)
    assert carriers.names == ("c − d",)


def test_the_unembedding_direction_raises_one_logit_over_the_other(model):
    carriers = made.unembedding_direction(model, "c", "d")
    weight = model.module.get_output_embeddings().weight
    torch.testing.assert_close(carriers.vectors[0] * carriers.raw_lengths[0], weight[ord("c")] - weight[ord("d")])
    preference = (weight[ord("c")] - weight[ord("d")]) @ carriers.vectors[0]
    torch.testing.assert_close(preference, carriers.raw_lengths[0])


def test_pca_finds_planted_directions_beside_a_large_mean():
    # planted: deviations 6, 4 and 2 in three directions, noise 0.1, a mean 100 long in a fourth
    basis = made.random_orthonormal(4, 24, generator()).vectors
    drawn = torch.randn(2000, 3, generator=generator(1)) * torch.tensor([6.0, 4.0, 2.0])
    noise = 0.1 * torch.randn(2000, 24, generator=generator(2))
    carriers = made.pca(drawn @ basis[:3] + noise + 100 * basis[3], 3)
    for found, planted in zip(carriers.vectors, basis[:3], strict=True):
        assert abs(cosine(found, planted)) > 0.995
        assert found[found.abs().argmax()] > 0
    torch.testing.assert_close(carriers.raw_lengths, torch.tensor([6.0, 4.0, 2.0]), rtol=0.05, atol=0)
    # variances 36, 16, 4 of 56
    explained = torch.tensor(carriers.provenance["explained_variance"])
    torch.testing.assert_close(explained, torch.tensor([36.0, 16, 4]) / 56, rtol=0.1, atol=0)


def test_pca_refuses_more_directions_than_the_activations_vary_in():
    with pytest.raises(ValueError, match="3 principal directions of 3 activations that vary in 2"):
        made.pca(torch.randn(3, 8, generator=generator()), 3)
    with pytest.raises(ValueError, match="1 principal directions of 3 activations that vary in 0"):
        made.pca(torch.ones(3, 8), 1)


def test_random_controls_keep_lengths_and_angles_and_nothing_else():
    vectors = torch.randn(3, 200, generator=generator()) * torch.tensor([[1.0], [2.0], [3.0]])
    vectors[2] += vectors[1]
    real = from_vectors(vectors, "probe").with_scale("raw")
    control = made.norm_matched_random(real, generator(1))
    torch.testing.assert_close(control.scaled @ control.scaled.mT, real.scaled @ real.scaled.mT)
    assert (control.vectors @ real.vectors.mT).abs().max() < 4 / 200**0.5
    assert control.operation == "norm_matched_random"


def test_alpha_counts_in_the_units_of_the_scale():
    carriers = from_vectors(torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]]), "probe")
    unit = torch.tensor([[0.6, 0.8], [0.0, 1.0], [1.0, 0.0]])
    torch.testing.assert_close(carriers.scaled, unit)
    torch.testing.assert_close(carriers.with_scale("raw").scaled, torch.tensor([[3.0, 4], [0, 2], [1, 0]]))
    residual = carriers.with_scale("residual", 10.0)
    torch.testing.assert_close(residual.scaled, 10 * unit)
    torch.testing.assert_close(residual.lengths, torch.full((3,), 10.0))
    assert residual.with_scale("unit").residual_length == 10.0
    with pytest.raises(ValueError, match=r"residual length None; measure it at the site with residual_length"):
        carriers.with_scale("residual")


def test_orthonormalised_carriers_keep_the_first_and_the_span():
    vectors = torch.randn(3, 10, generator=generator())
    carriers = from_vectors(vectors, "probe")
    made_so = carriers.orthonormalised()
    torch.testing.assert_close(made_so.vectors @ made_so.vectors.mT, torch.eye(3))
    torch.testing.assert_close(made_so.vectors[0], carriers.vectors[0])
    assert all(cosine(new, old) > 0 for new, old in zip(made_so.vectors, carriers.vectors, strict=True))
    inside = carriers.vectors @ made_so.vectors.mT @ made_so.vectors
    torch.testing.assert_close(inside, carriers.vectors)
    dependent = from_vectors(torch.cat([vectors, vectors[:1] + vectors[1:2]]), "probe")
    with pytest.raises(ValueError, match=r"carrier 'probe\[3\]' is a combination of the others"):
        dependent.orthonormalised()


def test_concatenated_carriers_share_their_place(model):
    a, b = (made.contrast_prompts(model, SITE, x, y) for x, y in (("one", "two"), ("red", "blue")))
    both = Carriers.concatenate([a, b])
    assert torch.equal(both.vectors, torch.cat([a.vectors, b.vectors]))
    assert both.provenance["parts"][1]["prompt_a"] == ["red"]
    with pytest.raises(ValueError, match="carriers with different site"):
        Carriers.concatenate([a, made.contrast_prompts(model, Site(1), "one", "two")])


def test_residual_length_leaves_the_first_position_out(model):
    texts = ["one two", "three", "s"]
    lengths = [output_at(model, SITE, model.encode(t))[1:].norm(dim=-1) for t in texts]
    assert made.residual_length(model, SITE, texts) == pytest.approx(float(torch.cat(lengths).mean()))
    with pytest.raises(ValueError, match="1 prompts without a second token"):
        made.residual_length(model, SITE, ["s"])


def test_a_word_of_several_tokens_is_refused_with_its_pieces(model):
    assert made.token_id(model, "c") == ord("c")
    with pytest.raises(ValueError, match=r"' cat' is 4 tokens for tiny llama, seed 0: ' ' \+ 'c' \+ 'a' \+ 't'"):
        made.token_id(model, " cat")
    with pytest.raises(ValueError, match=r"'' is 0 tokens for tiny llama, seed 0: nothing"):
        made.token_id(model, "")


def test_making_carriers_leaves_no_hook_behind(model):
    made.contrast_prompts(model, Site(block=1, at="block_input"), "one", "two")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules())


def test_a_file_gives_back_everything(model, tmp_path):
    carriers = made.contrast_soft_tokens(model, Site(block="middle"), "State:", "c", "d")
    carriers = carriers.with_scale("residual", 3.5)
    path = tmp_path / "deep" / "switch.safetensors"
    carriers.save(path)
    again = from_file(path, model, Site(block=2))
    assert torch.equal(again.vectors, carriers.vectors)
    assert torch.equal(again.raw_lengths, carriers.raw_lengths)
    for name in (
        "names",
        "operation",
        "scale",
        "residual_length",
        "model",
        "checksum",
        "site",
        "provenance",
    ):
        assert getattr(again, name) == getattr(carriers, name)
    assert again.site == Site(block=2)


def test_carriers_of_another_model_width_or_site_are_refused(model, tmp_path):
    path = tmp_path / "v.safetensors"
    made.contrast_prompts(model, SITE, "one", "two").save(path)
    from_file(path, model)
    from_file(path, model, Site(block=-2))
    other = load(ModelSpec(kind="tiny", seed=1))
    with pytest.raises(
        ValueError,
        match=r"v.safetensors: the carriers were made on tiny llama, seed 0 with weights",
    ):
        from_file(path, other, SITE)
    wide = load(ModelSpec(kind="tiny", d_model=40))
    with pytest.raises(ValueError, match=r"the carriers are 32 numbers wide; tiny llama, seed 0 has d_model 40"):
        from_file(path, wide, SITE)
    for site, place in (
        (Site(block=1), r"block 1 \(block\)"),
        (Site(block=2, at="mlp"), r"block 2 \(mlp\)"),
    ):
        with pytest.raises(ValueError, match=rf"made at block 2 \(block\); the push is at {place}"):
            from_file(path, model, site)


def test_random_carriers_go_with_any_site_of_their_width(model, tmp_path):
    path = tmp_path / "v.safetensors"
    made.random_orthonormal(3, 32, generator()).save(path)
    assert from_file(path, model, Site(block=0, at="attn")).n_carriers == 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.0, "carrier 1 is 0 long; expected length 1"),
        (math.nan, "carriers hold NaN or infinite values"),
        (math.inf, "carriers hold NaN or infinite values"),
    ],
)
def test_a_file_with_a_broken_vector_is_refused(value, message, tmp_path):
    path = tmp_path / "v.safetensors"
    good = made.random_orthonormal(3, 8, generator())
    good.save(path)
    about = json.dumps(
        {
            **{k: v for k, v in vars(good).items() if k not in ("vectors", "raw_lengths")},
            "provenance": {},
        }
    )
    vectors = good.vectors.clone()
    vectors[1] = value
    save_file({"vectors": vectors, "raw_lengths": good.raw_lengths}, str(path), {"carriers": about})
    with pytest.raises(ValueError, match=f"v.safetensors: {message}"):
        from_file(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "v.safetensors"
    save_file({"vectors": torch.ones(1, 2)}, str(path))
    with pytest.raises(ValueError, match=r"holds no carriers .* expected a file written by Carriers.save"):
        from_file(path)
    path.write_bytes(b"text")
    with pytest.raises(ValueError, match="holds no carriers"):
        from_file(path)


def test_vectors_without_a_direction_are_refused(model):
    with pytest.raises(ValueError, match=r"carrier 0 of contrast_prompts has length 0.0; expected a direction"):
        made.contrast_prompts(model, SITE, "same", "same")
    with pytest.raises(ValueError, match="carrier 1 of probe has length nan"):
        from_vectors(torch.tensor([[1.0, 0.0], [math.nan, 0.0]]), "probe")
    good = from_vectors(torch.eye(2), "probe")
    with pytest.raises(ValueError, match="2 carriers with 1 names and 2 lengths"):
        replace(good, names=("one",))
    with pytest.raises(ValueError, match="carrier 0 is 3 long; expected length 1: use from_vectors"):
        replace(good, vectors=3 * torch.eye(2))
