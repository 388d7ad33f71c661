"""What tests share: tiny models of every family, and the real one for tests marked `real`."""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from feedback.models import LanguageModel, ModelSpec, load

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """One thread for tiny models: a second one gains nothing, and on a busy machine it costs a lot."""
    torch.set_num_threads(THREADS if item.get_closest_marker("real") else 1)


@cache
def _tiny(family: str, **settings: Any) -> LanguageModel:
    return load(ModelSpec(kind="tiny", family=family, **settings))


@pytest.fixture(scope="session")
def tiny() -> Callable[..., LanguageModel]:
    """tiny("gemma2") is a frozen random model of that family: 4 blocks, d_model 32, float32 unless
    told. Shared: leave no hooks.
    """
    return _tiny


@pytest.fixture(scope="session")
def smollm2() -> LanguageModel:
    """SmolLM2-135M-Instruct, float32, for tests marked `real`. Shared: leave no hooks."""
    return load(ModelSpec())
