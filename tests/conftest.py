"""What tests share: tiny models of every family, and the real one for tests marked `real`."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from conf.schema import Config
from feedback.models import LanguageModel, ModelSpec, load

CONF = str(Path(__file__).parent.parent / "conf")
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


# experiment=learned_carriers on a tiny model, in seconds: of eight messages six to fit on, one pair to ask about
COVERT = [
    "covert.n_bits=3", "covert.learn_steps=3", "covert.rows=4", "covert.fit_messages=6", "steps=4",
    "covert.test_messages=2", "covert.pairs=[[a,b],[c,d],[e,f]]", "hidden_bits.read_behind=[1]",
    "prompts.texts=['abc a','bca','ca b']", "prompts.unseen=1", "alpha=[1,4]",
]  # fmt: skip


def composed(*overrides: str) -> Config:
    """The settings of a command, as its experiment gets them."""
    import run  # noqa: F401 (registers the schema)

    with initialize_config_dir(CONF, version_base="1.3"):
        config = OmegaConf.to_object(compose("config", list(overrides)))
    assert isinstance(config, Config)
    return config
