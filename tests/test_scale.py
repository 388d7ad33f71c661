"""Claims about memory (feedback/scale.py), and about models whose blocks are on several devices."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import hooks as accelerate_hooks
from conftest import composed
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers import DynamicCache, LlamaConfig

from experiments import hidden_bits
from feedback import audit, carriers, contract, loop, maps, models, pretrained, programs, scale
from feedback.cache import Context, LoopCache, cache_keyword
from feedback.models import LanguageModel, ModelError, ModelSpec
from feedback.sites import Site, blocks, embedding, final_norm, lens, unembed, unembedding
from feedback.tiny import FAMILIES
from feedback.trajectory import Trajectory
from scripts import memory

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [40, 41, 42, 43]]
STEPS = 6

# --- what is counted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_of_a_row_takes_what_is_counted_from_the_configuration(tiny, family, dtype):
    model = tiny(family, dtype=str(dtype).removeprefix("torch."))
    cache, ids = DynamicCache(), torch.arange(3 * 20).reshape(3, 20)  # longer than a tiny sliding window of 16
    model.module(input_ids=ids, use_cache=True, **{cache_keyword(model.module): cache})
    each = scale.kv_bytes(model.module.config, dtype)
    assert stored(cache) == 3 * 20 * each
    for context, slots in ((Context(), 6), (Context("prompt"), 1), (Context("window", 2), 3)):
        copied = LoopCache(cache, torch.tensor([0, 1, 2, 2, 0]), context, 6, functional=False)
        assert stored(copied) == 5 * (20 + slots) * each


def stored(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_the_cache_bytes_by_hand():
    # 2 (keys and values) · 30 blocks · 3 key-value heads · 64 wide · 4 bytes
    assert scale.kv_bytes(scale.named()["SmolLM2-135M"], torch.float32) == 46_080
    # 2 · 80 · 8 · 128 · 2: eight heads are kept, not 64
    assert scale.kv_bytes(scale.named()["Llama-3-70B"], torch.bfloat16) == 327_680


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_take_what_their_file_takes(tiny, family, tmp_path):
    model = tiny(family)
    model.module.save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    buffers = sum(b.nbytes for b in model.module.buffers())  # rotary frequencies, masks: made anew, not saved
    on_disk = (tmp_path / "model.safetensors").stat().st_size - header
    assert scale.weights(model.module) == {torch.device("cpu"): on_disk + buffers}


@pytest.mark.parametrize(
    ("name", "published"),
    [("SmolLM2-135M", 134.5e6), ("Llama-2-7B", 6.74e9), ("Qwen2.5-7B", 7.61e9), ("Llama-3-70B", 70.6e9)],
)
def test_a_model_without_weights_has_the_published_number_of_parameters(name, published):
    module = scale.without_weights(scale.named()[name], torch.bfloat16)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert scale.parameters(module) == pytest.approx(published, rel=0.01)
    assert sum(scale.weights(module).values()) == pytest.approx(2 * published, rel=0.01)


@pytest.mark.real
def test_the_shape_of_smollm2_is_that_of_the_model_in_its_wheel(smollm2):
    shape, config = scale.named()["SmolLM2-135M"], smollm2.module.config
    for name in ("num_hidden_layers", "hidden_size", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert getattr(shape, name) == getattr(config, name)
    assert scale.parameters(smollm2.module) == scale.parameters(scale.without_weights(shape, torch.float32))


@pytest.mark.parametrize("recorded", [0, 2])
def test_a_trajectory_takes_what_is_counted_for_its_records(tiny, recorded):
    told = run(tiny("llama"), record=[Site(0), Site(2)][:recorded])
    values = {f.name: getattr(told, f.name) for f in fields(Trajectory)}
    per_step = [v for v in values.values() if isinstance(v, Tensor) and v.shape[:2] == (STEPS, 3)]
    found = sum(v.nbytes for v in [*per_step, *told.recorded.values()])
    assert found == STEPS * 3 * scale.record_bytes(tiny("llama").module.config, torch.float32, 2, recorded)


def test_the_operations_of_a_step_by_hand(tiny):
    module = tiny("llama").module  # untied: the embedding is not multiplied with
    # a block: attention 32·32 (q) + 2·32·16 (k, v) + 32·32 (o), MLP 3·32·64, two norms of 32: 9,280; final norm, head
    used = 4 * 9_280 + 32 + 259 * 32
    assert scale.flops(module, length=10, dense_map=False) == 2 * used + 4 * 4 * 32 * 10
    assert scale.flops(module, length=10) - scale.flops(module, length=10, dense_map=False) == 2 * 259 * 32


def test_a_step_takes_as_long_as_its_slower_half(tiny):
    module = tiny("llama").module
    size = sum(scale.weights(module).values())
    row = 10 * scale.kv_bytes(module.config, torch.float32) + scale.LOGITS_COPIES * 259 * 4
    slow_memory = scale.Accelerator("a", scale.GIB, 1e3, 1e30)
    assert scale.seconds_per_step(module, slow_memory, 3, 10, torch.float32) == pytest.approx((size + 3 * row) / 1e3)
    slow_cores = scale.Accelerator("b", scale.GIB, 1e30, 1e3)
    expected = 3 * scale.flops(module, 10) / 1e3
    assert scale.seconds_per_step(module, slow_cores, 3, 10, torch.float32) == pytest.approx(expected)


def test_rows_that_fit_leave_the_reserve_and_are_none_where_weights_fill_the_device():
    assert scale.fitting(memory=1000, weights=400, row=100) == 5  # (900 − 400) / 100
    assert scale.fitting(memory=1000, weights=950, row=100) == 0


def test_a_chunk_fits_the_device_with_the_least_room(tiny):
    module, row = tiny("llama").module, scale.RowBytes(cache=400, logits=50, records=50)
    cpu, size = torch.device("cpu"), sum(scale.weights(tiny("llama").module).values())
    assert scale.rows_on_devices(module, cpu, row, {cpu: 100 * size}, 0.25) == 25 * size // 500
    assert scale.rows_on_devices(module, cpu, row, {cpu: int(1.1 * size)}, 0.25) == int(0.8 * 0.1 * size) // 500
    assert scale.rows_on_devices(module, cpu, row, {cpu: size // 2}, 0.25) == 0
    with several_devices():
        placed = on_two_devices(ModelSpec(kind="tiny"))
        weights, gpus = scale.weights(placed.module), [torch.device("cuda", n) for n in range(2)]
        assert set(weights) == set(gpus) and sum(weights.values()) == size
        # half of the blocks on each: 200 of cache, and logits and records on both the embedding's and the head's
        room = {gpus[0]: 1000 * size, gpus[1]: 40 * size}
        assert scale.rows_on_devices(placed.module, gpus[0], row, room, 0.25) == 10 * size // 300


# --- blocks on several devices ---------------------------------------------------------------------------------------


def run(model: LanguageModel, **options: Any) -> Trajectory:
    """Three ragged prompts, two carriers, pushed at block 2 in the prompt and at every step."""
    vectors = carriers.random_orthonormal(2, model.d_model, torch.Generator().manual_seed(0)).scaled
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 0.5]])
    program = programs.constant(vectors, 3.0, steps=STEPS, rows=signs, scope="all")
    settings = {"site": Site(2), "reference": torch.tensor([0, 0, 0]), "record": [Site(0), Site(3)]} | options
    with torch.no_grad():
        return loop.run(model, PROMPTS, program, feedback_map=maps.expected_embedding(0.7), **settings)


def assert_same(one: Trajectory, other: Trajectory, **tolerance: float) -> None:
    for name, value in one._tensors().items():
        torch.testing.assert_close(value, getattr(other, name), **tolerance)
    for name, value in one.recorded.items():
        torch.testing.assert_close(value, other.recorded[name], **tolerance)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_loop_over_a_model_that_is_partly_on_disk_gives_the_same_numbers(tiny, family, tmp_path):
    plain, model = tiny(family), offloaded(family, tmp_path)
    assert any(p.is_meta for p in blocks(model.module)[2].parameters())  # there while it runs, and only then
    assert_same(run(plain), run(model), rtol=0, atol=0)
    state = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unembed(plain.module, state), unembed(model.module, state))
    torch.testing.assert_close(unembed(plain.module, state, [3, 1]), unembed(model.module, state, [3, 1]))
    assert torch.equal(lens(plain.module, state), lens(model.module, state))
    contract.check_contract(model.module, model.embedding)


def offloaded(family: str, folder: Path) -> LanguageModel:
    """A tiny model whose later blocks and, untied, unembedding are copied from disk by accelerate at every pass."""
    model = models.load(ModelSpec(kind="tiny", family=family))
    tied = unembedding(model.module).weight is embedding(model.module).weight
    places = {path: "disk" if later and not (tied and path == "lm_head") else "cpu" for path, later in parts(model)}
    module = accelerate.dispatch_model(
        model.module, places, main_device="cpu", offload_dir=folder, skip_keys=model.module._skip_keys_device_placement
    )
    return replace(model, module=module)


def parts(model: LanguageModel) -> Iterator[tuple[str, bool]]:
    """The modules that a device map names, and whether each is in the model's second half."""
    paths = {part: path for path, part in model.module.named_modules()}
    stack, norm, head = blocks(model.module), final_norm(model.module), unembedding(model.module)
    later = {*stack[len(stack) // 2 :], norm, head}
    for part in [*stack, norm, head]:
        yield paths[part], part in later
    beside = model.module.get_submodule(paths[stack].rpartition(".")[0])
    for name, part in beside.named_children():
        if part is not stack and part is not norm:
            yield f"{paths[beside]}.{name}", False


def test_the_audit_names_accelerate_and_still_finds_what_is_foreign(tiny, tmp_path):
    model = offloaded("llama", tmp_path)
    found = [f for f in audit.snapshot(model.module) if f.owner != "transformers"]
    assert {(f.kind, f.owner) for f in found} == {("replaced_forward", "accelerate")}
    handle = blocks(model.module)[2].register_forward_hook(lambda module, given, output: None)
    came, gone = audit.changes(found, audit.snapshot(model.module))
    assert [(f.kind, f.path, f.owner) for f in came if f.owner == "foreign"] == [
        ("forward", "model.layers.2", "foreign")
    ]
    assert gone == []
    handle.remove()


class SeveralDevices(TorchFunctionMode):
    """GPUs played by the CPU: every tensor carries the name of a device, and an operation on tensors of two devices
    raises as it would there. Indices and single numbers may come from the CPU, copies from anywhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func == Tensor.device.__get__:
            return place(args[0])
        if func is Tensor.to:
            return self._moved(args, kwargs)
        here = {place(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and not self._free(t, name)}
        if len(here) > 1 and name != "copy_":
            raise RuntimeError(f"{name}: expected all tensors on the same device, found {sorted(map(str, here))}")
        if kwargs.get("device") is not None:
            here, kwargs["device"] = {torch.device(kwargs["device"])}, "cpu"
        if name in ("cpu", "numpy", "tolist", "item"):
            here = set()
        first = next((place(t) for t in args if isinstance(t, Tensor)), torch.device("cpu"))
        result = func(*args, **kwargs)
        return tree_map(lambda r: put(r, next(iter(here), first)) if isinstance(r, Tensor) else r, result)

    @staticmethod
    def _free(tensor: Tensor, name: str) -> bool:
        return place(tensor).type == "cpu" and (tensor.dim() == 0 or name in ("__getitem__", "cpu"))

    @staticmethod
    def _moved(args: Any, kwargs: Any) -> Tensor:
        tensor, *rest = args
        wanted, kept = place(tensor), []
        if kwargs.get("device") is not None:
            wanted, kwargs = torch.device(kwargs["device"]), {k: v for k, v in kwargs.items() if k != "device"}
        for one in rest:
            if isinstance(one, Tensor):
                wanted, kept = place(one), [*kept, one.dtype]
            elif isinstance(one, torch.dtype | bool):
                kept.append(one)
            else:
                wanted = torch.device("cuda", one) if isinstance(one, int) else torch.device(one)
        result = tensor.to(*kept, **kwargs) if kept or kwargs else tensor
        return put(result.clone() if result is tensor and wanted != place(tensor) else result, wanted)


def place(tensor: Tensor) -> torch.device:
    return getattr(tensor, "_place", torch.device("cpu"))


def put(tensor: Tensor, device: torch.device) -> Tensor:
    tensor._place = device  # type: ignore[attr-defined]
    return tensor


@contextmanager
def several_devices() -> Iterator[None]:
    with SeveralDevices():
        yield


def on_two_devices(spec: ModelSpec) -> LanguageModel:
    """Embedding and first half on cuda:0, second half on cuda:1, with accelerate's hooks between them."""
    with torch._C.DisableTorchFunction():
        model = models.load(spec)
    gpus = [torch.device("cuda", n) for n in range(2)]
    for tensor in [*model.module.parameters(), *model.module.buffers(), model.embedding]:
        put(tensor, gpus[0])
    tied = unembedding(model.module).weight is embedding(model.module).weight
    places = {path: gpus[later and not (tied and path == "lm_head")] for path, later in parts(model)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            accelerate_hooks,
            "set_module_tensor_to_device",
            lambda module, name, device, **ignored: put(dict(named(module))[name], torch.device(device)),
        )
        accelerate_hooks.attach_align_device_hook_on_blocks(
            model.module,
            execution_device={**places, "": gpus[0]},
            offload=dict.fromkeys(places, False),
            skip_keys=model.module._skip_keys_device_placement,
        )
    return model


def named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def test_the_stand_in_for_gpus_refuses_what_gpus_refuse():
    with several_devices():
        one, two = torch.zeros(3, device="cuda:0"), torch.zeros(3).to("cuda:1")
        assert (str(one.device), str((two + 1.0)[1:].device)) == ("cuda:0", "cuda:1")
        assert (one + two.to(one)).device == one[torch.tensor([0, 1])].device == one.device
        for wrong in (lambda: one + two, lambda: torch.stack([one, two]), lambda: one * torch.ones(3)):
            with pytest.raises(RuntimeError, match="expected all tensors on the same device"):
                wrong()
        with pytest.raises(RuntimeError, match="expected all tensors on the same device"):
            one[two.long()]


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
@pytest.mark.parametrize("site", [Site(0), Site(2), Site(3, "block_input"), Site(2, "mlp")])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_loop_over_two_devices_never_mixes_them_and_gives_the_same_numbers(tiny, family, site):
    # copies lie elsewhere in memory, so kernels round differently, and a loop amplifies it; in float64, eager attention
    # over padding is not a number
    dtype, off = ("float32", 2e-3) if family == "gemma2" else ("float64", 1e-5)
    with several_devices():
        model = on_two_devices(ModelSpec(kind="tiny", family=family, dtype=dtype))
        devices = Counter(str(next(block.parameters()).device) for block in blocks(model.module))
        assert devices == {"cuda:0": 2, "cuda:1": 2} and str(model.device) == "cuda:0"
        told = run(model, site=site, max_rows=2)
        kept = [*told._tensors().values(), *told.recorded.values()]
        assert {str(value.device) for value in kept} == {"cuda:0"}
    assert_same(run(tiny(family, dtype=dtype), site=site, max_rows=2), told, rtol=off, atol=off)


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_contract_lens_and_carriers_hold_over_two_devices(tiny, family):
    with several_devices():
        model = on_two_devices(ModelSpec(kind="tiny", family=family))
        contract.check_contract(model.module, model.embedding)
        length = carriers.residual_length(model, Site(3), ["Once upon a time"])
        contrast = carriers.contrast_prompts(model, Site(3), "cat", "dog").scaled
        word = carriers.unembedding_direction(model, "a", "b").scaled
        state = torch.ones(2, 32, device="cuda:0")
        assert unembed(model.module, state, [1, 2]).device == lens(model.module, state).device == model.device
    assert length == carriers.residual_length(tiny(family), Site(3), ["Once upon a time"])
    assert torch.equal(contrast, carriers.contrast_prompts(tiny(family), Site(3), "cat", "dog").scaled)
    assert torch.equal(word, carriers.unembedding_direction(tiny(family), "a", "b").scaled)


# --- device=auto -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [models.describe, models.load])
def test_what_cannot_be_spread_is_refused_before_anything_is_read(use, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "read_model", lambda *given: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match="device 'auto:1' does not exist"):
        use(ModelSpec(device="auto:1"))
    for kind in ("tiny", "oracle"):
        with pytest.raises(ValueError, match=f"model kind '{kind}' has none to read: use device=cpu or device=cuda"):
            use(ModelSpec(kind=kind, device="auto"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ModelError, match=r"over the GPUs, and there is none here: try device=cpu$"):
        use(ModelSpec(device="auto"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(models, "_free_memory", lambda: dict.fromkeys(range(4), 20 * scale.GIB))
    scale.named()["Llama-3-70B"].save_pretrained(tmp_path)
    # 70.55e9 parameters in 2 bytes are 131.4 GiB
    with pytest.raises(ModelError, match=r"in bfloat16 takes 131.4 GiB; 90% of what is free on 4 GPUs is 72.0 GiB"):
        use(ModelSpec(kind="hf", name=str(tmp_path), device="auto", dtype="bfloat16"))
    monkeypatch.setattr(models, "_free_memory", lambda: dict.fromkeys(range(4), 80 * scale.GIB))
    assert models.describe(ModelSpec(kind="hf", name=str(tmp_path), device="auto", dtype="bfloat16")).n_blocks == 80


@pytest.fixture
def saved(tiny, tmp_path) -> Path:
    tiny("llama").module.save_pretrained(tmp_path)
    tiny("llama").tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_auto_asks_transformers_to_spread_the_weights_over_the_gpus_and_nothing_else(saved, tiny, monkeypatch):
    asked: list[dict[str, Any]] = []
    read = pretrained.AutoModelForCausalLM.from_pretrained

    def remember(*given: Any, device_map: str | None = None, max_memory: Any = None, **options: Any) -> Any:
        asked.append({"device_map": device_map, "max_memory": max_memory})
        return read(*given, **options)  # onto the CPU: there are no GPUs

    monkeypatch.setattr(pretrained.AutoModelForCausalLM, "from_pretrained", remember)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(models, "_free_memory", lambda: {0: 1000, 1: 10**9})
    model = models.load(ModelSpec(kind="hf", name=str(saved), device="auto"))
    assert asked == [{"device_map": "auto", "max_memory": {0: 900, 1: 9 * 10**8}}]
    assert model.info.checksum == tiny("llama").info.checksum and model.info.device == "cpu"


def test_a_model_that_is_left_partly_off_the_gpus_is_refused(saved, monkeypatch):
    read = pretrained.AutoModelForCausalLM.from_pretrained

    def left_behind(*given: Any, **options: Any) -> Any:
        module, report = read(*given, **{k: v for k, v in options.items() if k not in ("device_map", "max_memory")})
        module.hf_device_map = {"model.embed_tokens": 0, "model.layers.2": "cpu", "model.layers.3": "disk"}
        return module, report

    monkeypatch.setattr(pretrained.AutoModelForCausalLM, "from_pretrained", left_behind)
    with pytest.raises(ModelError, match=r"does not fit the GPUs: 2 of its parts, the first model.layers.2"):
        pretrained.read_model(str(saved), None, torch.float32, room={0: 10**6})


def test_a_model_on_one_device_says_so(tiny):
    assert tiny("llama").info.device == "cpu"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_spread_over_real_gpus_gives_the_numbers_of_one(saved):
    pair, alone = (models.load(ModelSpec(kind="hf", name=str(saved), device=d)) for d in ("auto", "cuda:0"))
    assert pair.info.device == "cuda:0 + cuda:1"
    assert_same(run(alone), run(pair), rtol=1e-4, atol=1e-4)


def test_a_shape_that_is_built_by_hand_is_the_configuration_that_it_says():
    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=1)
    assert scale.kv_bytes(config, torch.bfloat16) == 2 * 2 * 1 * 16 * 2


# --- measured --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [12, 48])  # with fewer, the prompt pass and the parts that all rows share show
def test_the_peak_of_a_run_stays_below_what_is_counted_and_near_it(tiny, rows):
    found = memory.compare(tiny("llama", vocab_size=2048), rows, steps=8)
    assert found["kept, measured"] == pytest.approx(found["kept, counted"], rel=0.1)
    assert 0.6 < found["peak, measured"] / found["peak, counted"] < 1.05


@pytest.mark.real
def test_the_peak_of_a_run_on_smollm2_is_what_is_counted(smollm2):
    few, many = (memory.compare(smollm2, rows, steps=8) for rows in (4, 12))
    measured, counted = ((many[k] - few[k]) / 8 for k in ("peak, measured", "peak, counted"))  # of a row
    assert 0.75 < measured / counted < 1.0


def test_the_tracker_counts_what_is_alive_and_forgets_what_is_freed():
    def work() -> Tensor:
        first = torch.zeros(256)  # 1 KiB
        second = first + 1  # another
        view = second.reshape(16, 16)[1:]  # none
        del first
        third = view.sum(0).repeat(16)  # 64 bytes, freed again, and 1 KiB
        return second + third

    # at the sum: second, third and what becomes of them; view.sum(0) is gone
    assert memory.measured(work) == (3 * 1024, 1024)


def test_the_table_of_published_shapes_follows_from_the_run_that_it_is_of():
    config = composed("experiment=hidden_bits")
    rows = hidden_bits.lay_out(config, [2.0], torch.Generator().manual_seed(0))
    arms = [arm for arm in config.hidden_bits.arms.values() if arm.states_of is None]
    assert (len(rows.kind), len(arms)) == (memory.RUN_ROWS, memory.RUN_ARMS)
    assert (config.hidden_bits.n_bits, len(config.hidden_bits.read_behind)) == (memory.CARRIERS, memory.RECORDED)
    big = memory.shape("Llama-3-70B", steps=15)
    assert big["GPUs"] == 2  # 131.4 GiB of weights in 0.9 · 80 GiB each
    # 141.1e9 bytes of weights, and 176 · (35 · 327,680 + 6 · 128,256 · 4) of rows, at 3.35e12 a second
    assert big["ms/step"] == pytest.approx(1e3 * (141.1e9 + 176 * 14.55e6) / 3.35e12, rel=1e-3)
