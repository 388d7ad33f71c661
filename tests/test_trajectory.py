"""The record of a run: saved, loaded and sliced without losing what its axes mean."""

import dataclasses

import pytest
import torch
from safetensors import safe_open

from feedback import loop, maps, programs
from feedback.sites import Site
from feedback.trajectory import Trajectory, concatenate

PROMPTS = ("The sea", "A letter came today", "Dog")


@pytest.fixture
def told(tiny):
    model = tiny("llama")
    v = torch.eye(model.d_model)[:2]
    bits = torch.tensor([[0, 1], [1, 1], [1, 0]])
    return loop.run(
        model,
        [model.encode(p) for p in PROMPTS],
        programs.word(v, 2.0, bits, steps=4, length=2),
        feedback_map=maps.expected_embedding(),
        reference=torch.arange(3),
        record=[Site(1)],
    )


def tensors(trajectory):
    values = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    own = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
    return own | trajectory.recorded | {f"column {k}": v for k, v in trajectory.program.columns.items()}


def test_a_saved_trajectory_loads_as_the_same_trajectory(told, tmp_path):
    told.save(tmp_path / "deep" / "t.safetensors")
    back = Trajectory.load(tmp_path / "deep" / "t.safetensors")
    assert tensors(back).keys() == tensors(told).keys()
    for name, value in tensors(told).items():
        assert torch.equal(tensors(back)[name], value), name
    assert torch.equal(back.program.coefficients, told.program.coefficients)
    assert back.meta == told.meta


def test_saved_without_states_it_is_small_and_refuses_to_pass_for_whole(told, tmp_path):
    told.save(tmp_path / "t.safetensors", states=False)
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        names = set(file.keys())
    assert "tokens" in names and not names & {"hidden", "soft_tokens"}
    with pytest.raises(ValueError, match="no whole trajectory"):
        Trajectory.load(tmp_path / "t.safetensors")


def test_rows_pick_the_same_rows_of_every_tensor_and_of_the_program(told):
    picked = told.rows(torch.tensor([2, 0]))
    assert torch.equal(picked.hidden, told.hidden[:, [2, 0]])
    assert torch.equal(picked.prompt_hidden, told.prompt_hidden[[2, 0]])
    assert torch.equal(picked.stopped_at, told.stopped_at[[2, 0]])
    assert torch.equal(picked.program.columns["bits"], told.program.columns["bits"][[2, 0]])
    assert torch.equal(picked.recorded["model.layers.1"], told.recorded["model.layers.1"][:, [2, 0]])


def test_parts_joined_again_are_the_whole(told):
    parts = [told.rows(torch.tensor([i])) for i in range(3)]
    whole = concatenate(parts)
    for name, value in tensors(told).items():
        assert torch.equal(tensors(whole)[name], value), name


def test_the_text_starts_with_the_token_after_the_prompt(told):
    assert told.text.shape == (3, 5)
    assert torch.equal(told.text[:, 0], told.prompt_tokens)
    assert torch.equal(told.text[:, 1:], told.tokens.mT)
