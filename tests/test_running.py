"""A statistic over the whole sequence that a cache does not change."""

import pytest
import torch

from feedback import hooks, running
from feedback.sites import Site

IDENTITY = Site(at="module", path="")


@pytest.fixture
def net():
    return torch.nn.Identity()


def test_the_running_mean_is_the_mean_over_each_position_and_all_before_it(net):
    h = torch.tensor([[[1.0], [3.0], [8.0]], [[0.0], [2.0], [4.0]], [[6.0], [6.0], [0.0]]])
    with running.mean(net, IDENTITY) as state:
        assert net(h) is h
        assert state.mean[..., 0].tolist() == [[1, 2, 4], [0, 1, 2], [6, 6, 4]]
        net(h[:, :1])  # a fourth position: (12 + 1)/4, (6 + 0)/4, (12 + 6)/4
        assert state.mean[..., 0].tolist() == [[3.25], [1.5], [4.5]]
        state.reset()
        net(h[:, 1:2])
        assert state.mean[..., 0].tolist() == [[3], [2], [6]]


def test_padding_counts_for_nothing(net):
    h = torch.tensor([[[9.0], [3.0], [5.0]], [[9.0], [9.0], [4.0]], [[1.0], [2.0], [3.0]]])
    with running.mean(net, IDENTITY) as state:
        state.expect(torch.tensor([[False, True, True], [False, False, True], [True, True, True]]))
        net(h)
        assert state.mean[:, -1, 0].tolist() == [4, 4, 2]
        net(torch.full((3, 1, 1), 7.0))  # real again, unless said: (3 + 5 + 7)/3, (4 + 7)/2, (6 + 7)/4
        torch.testing.assert_close(state.mean[:, -1, 0], torch.tensor([5.0, 5.5, 3.25]))


def test_the_state_follows_a_cache_that_is_gathered_to_rows(net):
    h = torch.arange(6.0).reshape(2, 3, 1)
    with running.mean(net, IDENTITY) as state:
        net(h)
        with pytest.raises(hooks.HookError, match="over 2 rows, the pass has 3"):
            net(torch.zeros(3, 1, 1))
        state.rows(torch.tensor([1, 0, 1]))
        net(torch.zeros(3, 1, 1))
        assert state.mean[:, 0, 0].tolist() == [3, 0.75, 3]


def test_statistics_of_half_precision_activations_are_kept_in_float32(net):
    h = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    with running.mean(net, IDENTITY, lambda hidden, mean: hidden - mean) as state:
        net(512 * h)
        for _ in range(3):
            assert net(h).dtype == torch.bfloat16
    assert state.mean.item() == 515 / 4  # 513 is no bfloat16
