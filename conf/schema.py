"""The typed schema of every setting: Hydra checks names and types against it before anything runs."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf


@dataclass
class ModelConfig:
    kind: str = MISSING  # smollm2 | hf | tiny | oracle
    name: str | None = None  # hf: name on the hub, or a folder
    revision: str | None = None  # hf: branch, tag or commit
    family: str = "llama"  # tiny: llama, gpt2, gemma2, qwen2, gpt_neox, mistral
    seed: int = 0  # tiny: seed of the random weights; oracle: of its directions
    n_blocks: int = 4  # tiny, oracle
    d_model: int = 32  # tiny, oracle
    coupling: float = 4.0  # oracle: L of u' = tanh((b + L·u)/2)
    field: float = 0.0  # oracle: b
    cache: str | None = None  # folder of converted weights; null: the user's cache folder


@dataclass
class SiteConfig:
    block: Any = "middle"  # number from 0, negative from the end, or "middle"
    at: str = "block"  # block (output) | block_input | attn | mlp | module | module_input
    path: str | None = None  # at=module, module_input: dotted name of any module


@dataclass
class CarriersConfig:
    kind: str = (
        MISSING  # random_orthonormal | contrast_prompts | contrast_soft_tokens | contrast_rests | unembedding | file
    )
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
    headline: str = "hard"  # arm whose numbers wandb also has without its name, for sweeps and parallel coordinates
    arms: dict[str, ArmConfig] = field(default_factory=dict)


@dataclass
class AuditConfig:
    plants: list[str] = field(default_factory=list)  # foreign code to put on the model, one at a time; [] only looks


@dataclass
class CellConfig:
    prompt: str = ""  # what the loop reads before its soft token
    a: str = ""  # the word, one token with its blank, that a high cell says
    b: str = ""  # the word that a low cell says
    file: str | None = None  # a learned cell in place of these: a file, or the name of one that is shipped


@dataclass
class LearnConfig:
    kind: str = "prefix"  # prefix | push | both: what is learned
    prompt: str = "The animal is a bird. It may also be a cat or a dog. Say: bird bird bird bird; cat dog; Animal:"
    cover: str = " bird"  # one token, said at every step
    pairs: list[list[str]] = field(default_factory=lambda: [[" cat", " dog"]])  # one pair of words for every bit
    cover_mass: float = 0.65  # the cover's share of the soft token
    level: float = 0.85  # |u| that every pair is restored to
    sharpness: float = 10.0  # of the restoring
    weakest: float = 0.1  # smallest |u| to learn from
    mass_range: float = 0.25  # by how much the cover mass of what is learned from differs
    unroll: int = 1  # steps of the loop in the loss
    pushed: float = 0.4  # share of what is learned from that is pushed
    threshold: float = 0.4  # push that is to switch a bit, as a share of the contrast's length
    largest: float = 3.5  # largest push, in thresholds
    steps: int = 220
    batch: int = 48
    rate: float = 1e-2  # Adam's, of the prefix; falls to a tenth
    push_rate: float = 5e-2  # of the push
    test_every: int = 10  # steps from one held-out loop test to the next
    test_rows: int = 32
    test_steps: int = 16
    margin: float = 0.15  # top-1 less top-2 probability that a working cell needs in the test's worst step
    patience: int = 6  # working tests in a row, none better than the best, after which it ends


@dataclass
class HiddenLatchConfig:
    rows: int = 40  # written by random pulses; as many twins are never pushed
    once: int = 16  # rows that are switched once and then held
    steps: int = 250
    period: int = 16  # steps from one pulse to the next
    pulse_steps: int = 5
    single: float = 1.6  # pulse in thresholds
    levels: int = 25  # of the hysteresis sweep, each way
    dwell: int = 2  # steps at each of them
    random_vectors: int = 8  # as long as v


@dataclass
class HiddenStoryConfig:
    known: int = 1  # the first so many prompts are those that the cell is learned for
    unseen: int = 4  # of the others, measured
    rows: int = 16  # per prompt and bit
    start: int = 2  # first step of the pulse
    pulse_steps: int = 3
    pulse: float = 1.5  # in thresholds as learned: learn.threshold × the length of the contrast
    mix: float = 1.0  # share of the soft token in what is fed back, the rest is the said word's embedding


@dataclass
class RegisterConfig:
    rows: int = 32  # written at random; as many twins are never pushed
    intervals: int = 12  # writes
    period: int = 16  # steps from one write to the next
    pulse_steps: int = 5
    single: float = 1.4  # pulse in thresholds
    settle_steps: int = 30  # from every word to its rest


@dataclass
class CovertConfig:
    n_bits: int = 4
    alpha: float = 0.5  # push while learning; the top-level alpha lists those that are measured
    length: int = 2  # pushed steps, from the first
    mix: float = 0.5  # share of the soft token in what is fed back, the rest is the cover's embedding
    learn_steps: int = 60
    rows: int = 12  # messages in a step of learning
    rate: float = 0.1  # by how much of its length a carrier turns in a step at the beginning
    fit_messages: int = 8  # per known prompt, for the readers
    test_messages: int = 4  # held-out, per prompt; apart from the fitted ones and their complements
    pairs: list[list[str]] = field(  # of the contrast carriers
        default_factory=lambda: [[" cat", " dog"], [" red", " blue"], [" hot", " cold"], [" up", " down"]]
    )


@dataclass
class LatchConfig:
    top: float = 40.0  # largest |α| of the search for thresholds; pulses are searched up to twice that
    levels: int = 35  # of the slow sweep, each way
    margin: float = 0.15  # how far the sweep goes beyond the static thresholds, in their distance
    dwell: int = 2  # steps at each level of the quickest sweep
    dwells: list[int] = field(default_factory=lambda: [1, 4, 16])  # how many times slower each sweep is
    settle_steps: int = 30  # from A and from B to rest
    static_steps: int = 40  # under a constant push, to see whether it switches
    pulse_lengths: list[int] = field(default_factory=lambda: [1, 2, 5, 10])  # steps
    hold_steps: int = 220  # without a push
    hold_trials: int = 8  # per rest
    noisy_sweeps: int = 6  # each way, at the quickest speed, for an interval around its thresholds
    random_vectors: int = 5  # of the length of v, at three times the thresholds
    control_pulse: int = 5  # steps of the pulses along them
    other_blocks: list[int] | None = None  # where v is pushed as a control; null: half-way to the site, and the last
    screen: bool = False  # rank pairs × prompts × blocks in place of measuring one
    verified: int = 8  # screen: the best so many are measured at every block
    pairs: list[list[str]] = field(
        default_factory=lambda: [
            [" cat", " dog"],
            [" red", " blue"],
            [" yes", " no"],
            [" true", " false"],
            [" up", " down"],
            [" hot", " cold"],
            [" king", " queen"],
            [" north", " south"],
            [" gold", " silver"],
            [" sun", " moon"],
            [" black", " white"],
            [" left", " right"],
        ]
    )
    templates: list[str] = field(
        default_factory=lambda: [
            "The switch is either{a} or{b}. State:{a}{a}{a}{a}; State:{b}{b}{b}{b}; State:",
            "{a}{a}{a}{a}{a}\n{b}{b}{b}{b}{b}\n",
            "Repeat the word.{a}{a}{a}.{b}{b}{b}.",
        ]
    )
    blocks: list[int] = field(default_factory=lambda: [5, 10, 15, 20, 25])  # screen: where to push


@dataclass
class LogicConfig:
    trials: int = 64  # noisy trials per row of a truth table
    control_trials: int = 8  # per row, with the loop cut and along a random vector
    pulse_steps: int = 5
    settle_steps: int = 6
    top: float | None = 80.0  # largest pulse in the search for the thresholds; null: as far as the rests are apart
    single: float = 1.6  # pulse of an input that is enough alone, in thresholds
    wires: str = "both"  # circuit: host | loop | both (loop where nothing is held)
    ticks: int = 8  # circuits that hold: turns of a random input sequence
    sequences: int = 16  # circuits that hold: how many sequences


@dataclass
class CircuitConfig:
    name: str = ""
    inputs: list[str] = field(default_factory=list)
    cells: dict[str, Any] = field(default_factory=dict)  # name → weights, threshold, start, hold
    outputs: dict[str, str] = field(default_factory=dict)  # output → cell
    truth: dict[str, str] = field(default_factory=dict)  # output → expression over inputs (and outputs before)


@dataclass
class Config:
    name: str = MISSING  # which file of experiments/ runs
    alpha: Any = 2.0  # push strength, a number or a list (one batch), in units of carriers.scale
    steps: int = 15  # loop steps T
    seed: int = 0
    noise: float = 0.01  # σ added to every soft token, in mean lengths of an embedding row
    dtype: str = "float32"
    device: str = "cpu"  # cpu | cuda | cuda:1 | mps | auto (blocks spread over all GPUs)
    max_rows: int | None = None  # rows per chunk; null: as many as fit a quarter of the memory
    save_states: bool = False  # keep soft tokens and hidden states in trajectory.safetensors
    quiet: bool = False  # no progress bar
    threads: int | None = None  # of PyTorch in every job; null: all cores, or a job's share where several run at once
    resume: str | None = None  # folder of a run or sweep that was interrupted: what is finished there is left alone
    objective: str | None = None  # what a sweeper that searches gets: a number of the summary, as hard.ber
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
    cell: CellConfig = field(default_factory=CellConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    hidden_latch: HiddenLatchConfig = field(default_factory=HiddenLatchConfig)
    hidden_story: HiddenStoryConfig = field(default_factory=HiddenStoryConfig)
    register: RegisterConfig = field(default_factory=RegisterConfig)
    covert: CovertConfig = field(default_factory=CovertConfig)
    latch: LatchConfig = field(default_factory=LatchConfig)
    logic: LogicConfig = field(default_factory=LogicConfig)
    circuit: CircuitConfig = field(default_factory=CircuitConfig)


def plain(config: Config) -> dict[str, Any]:
    """Every setting, in dicts and lists."""
    settings: Any = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
    return settings


def register() -> None:
    """Makes the schema known to Hydra under the name that conf/config.yaml starts from."""
    ConfigStore.instance().store(name="schema", node=Config)
