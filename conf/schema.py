"""The typed schema of every setting: Hydra checks names and types against it before anything runs."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class ModelConfig:
    kind: str = MISSING  # smollm2 | hf | tiny
    name: str | None = None  # hf: name on the hub, or a folder
    revision: str | None = None  # hf: branch, tag or commit
    family: str = "llama"  # tiny: llama, gpt2, gemma2, qwen2, gpt_neox, mistral
    seed: int = 0  # tiny: seed of the random weights
    n_blocks: int = 4  # tiny
    d_model: int = 32  # tiny
    cache: str | None = None  # folder of converted weights; null: the user's cache folder


@dataclass
class SiteConfig:
    block: Any = "middle"  # number from 0, negative from the end, or "middle"
    at: str = "block"  # block (output) | block_input | attn | mlp | module | module_input
    path: str | None = None  # at=module, module_input: dotted name of any module


@dataclass
class CarriersConfig:
    kind: str = MISSING  # random_orthonormal | contrast_prompts | contrast_soft_tokens | unembedding | file
    scale: str = "unit"  # alpha multiplies: unit vectors | residual (mean ‖h‖ at the site) | raw
    a: str | None = None  # contrast_*, unembedding: prompt or word that the positive direction points to
    b: str | None = None  # contrast_*, unembedding: prompt or word that it points away from
    prompt: str | None = None  # contrast_soft_tokens: read before the soft token
    file: str | None = None  # file: a safetensors file written by Carriers.save


@dataclass
class ProgramConfig:
    kind: str = MISSING  # word | constant | pulse | pulse_train | ramp
    scope: str = "loop"  # passes that are pushed: loop | prompt | all
    start: int = 1  # first pushed step
    length: int | None = None  # pushed steps; null: a third of all steps
    every: int = 8  # pulse_train: steps from one pulse's start to the next
    dwell: int = 1  # ramp: steps at each level


@dataclass
class MapConfig:
    kind: str = MISSING  # see feedback/maps.py
    temperature: float = 1.0  # τ of the softmax whose expectation is fed
    k: int = 32  # top_k
    p: float = 0.9  # top_p
    min_p: float = 0.05  # min_p, relative to the largest probability
    gumbel_temperature: float = 1.0  # τ_g
    beta: float = 1.0  # mixture_of_inputs
    norm: str = "keep"  # last_hidden, projected_hidden: keep | embedding
    ridge: float = 1e-3  # projected_hidden: ε


@dataclass
class ContextConfig:
    kind: str = MISSING  # full | prompt | window
    window: int = 0  # window: soft tokens that stay


@dataclass
class PromptsConfig:
    texts: list[str] = MISSING
    unseen: int = 4  # the last so many prompts are never shown to a reader while it is fitted


@dataclass
class TrackingConfig:
    mode: str = MISSING  # offline | online | disabled
    project: str = "feedback-loop"
    name: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class ArmConfig:
    cover: str = MISSING  # forced: the emitted text is the α=0 greedy text | free: the model's own argmax
    mix: float = MISSING  # λ: share of the soft token, the rest is the emitted token's embedding
    temperature: float | None = None  # τ of this arm's map; null: map.temperature
    context: str | None = None  # null: the group's
    alpha: float | None = None  # null: the top-level alpha
    shuffle: bool = False  # fit the reader on shuffled labels
    states_of: str | None = None  # read the states of another arm instead of running one


@dataclass
class HiddenBitsConfig:
    n_bits: int = 8
    fit_messages: int = 8  # messages per known prompt that readers are fitted on
    test_messages: int = 4  # held-out messages per prompt, known and unseen ones
    read_behind: list[int] = field(default_factory=lambda: [1, 4, 8])  # blocks behind the site that readers see too
    window: int = 10  # steps whose states a reader combines
    arms: dict[str, ArmConfig] = field(default_factory=dict)


@dataclass
class AuditConfig:
    plants: list[str] = field(default_factory=list)  # foreign code to put on the model, one at a time; [] only looks


@dataclass
class Config:
    name: str = MISSING  # which file of experiments/ runs
    alpha: Any = 2.0  # push strength, a number or a list (one batch), in units of carriers.scale
    steps: int = 15  # loop steps T
    seed: int = 0
    noise: float = 0.01  # σ added to every soft token, in mean lengths of an embedding row
    dtype: str = "float32"
    device: str = "cpu"
    max_rows: int | None = None  # rows per chunk; null: as many as fit a quarter of the memory
    save_states: bool = False  # keep soft tokens and hidden states in trajectory.safetensors
    quiet: bool = False  # no progress bar
    model: ModelConfig = field(default_factory=ModelConfig)
    site: SiteConfig = field(default_factory=SiteConfig)
    carriers: CarriersConfig = field(default_factory=CarriersConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)
    map: MapConfig = field(default_factory=MapConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hidden_bits: HiddenBitsConfig = field(default_factory=HiddenBitsConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)


def register() -> None:
    """Makes the schema known to Hydra under the name that conf/config.yaml starts from."""
    ConfigStore.instance().store(name="schema", node=Config)
