"""What does a run take? python scripts/memory.py [--rows 8 32 128] [--steps 15] [--no-measure] [--json memory.json]

First the memory model beside a measurement: the loop (push, receipts, records, KL) on SmolLM2 at several
numbers of rows, with every tensor counted from its making to its freeing. Then a table for published shapes, built
without weights: what fits an H100, and how long its memory and its arithmetic need for the default `hidden_bits` run.
`feedback/scale.py` has the formulas. Inner buffers of a kernel and Python itself are not counted.
"""

import argparse
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from feedback import carriers, loop, maps, models, programs, scale
from feedback.scale import GIB, H100, RowBytes
from feedback.sites import Site

PROMPT = "Once upon a time, in a small village by the sea, there lived an old fisherman who"
PROMPT_LENGTH = 20  # tokens, of the shapes without a tokenizer
CARRIERS, RECORDED = 8, 3  # of experiment=hidden_bits
RUN_ROWS, RUN_ARMS = 176, 6  # its rows at one alpha, and the arms that run the loop
JOBS = 8  # a sweep: four alphas and two seeds
DISK = 2e9  # bytes a second from which weights are read, an assumption
DTYPE = torch.bfloat16


class Counted(TorchDispatchMode):
    """Bytes of all tensors made inside that are alive, and their largest sum so far."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in before | self.alive.keys():
                storage, key = tensor.untyped_storage(), _key(tensor)
                self.alive[key] = storage.nbytes()
                self.now += self.alive[key]
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, key)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self.alive.pop(key)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--model", default="smollm2", help="smollm2 or tiny")
    parser.add_argument("--no-measure", action="store_true", help="only the table of published shapes")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    found: dict[str, Any] = {"steps": options.steps}
    console = Console(width=140)
    if not options.no_measure:
        model = models.load(models.ModelSpec(kind=options.model))
        found["measured"] = [compare(model, rows, options.steps) for rows in options.rows]
        title = f"{model.info.name}, {options.steps} steps, float32: MiB beside the weights"
        console.print(shown(title, found["measured"]))
    found["shapes"] = [shape(name, options.steps) for name in scale.named()]
    title = f"{H100.name}, bfloat16, {PROMPT_LENGTH} tokens and {options.steps} steps, {RUN_ROWS} rows"
    console.print(shown(title, found["shapes"]))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def compare(model: models.LanguageModel, rows: int, steps: int) -> dict[str, float]:
    """Measured and predicted MiB of one run: keys and values, the trajectory, and the peak of everything."""
    prompt, record = model.encode(PROMPT), [Site(block) for block in range(RECORDED)]
    vectors = carriers.random_orthonormal(CARRIERS, model.d_model, torch.Generator().manual_seed(0)).scaled
    row_prompt = torch.zeros(rows, dtype=torch.long)
    program = programs.constant(vectors, 2.0, steps=steps, rows=rows)
    feedback_map = maps.expected_embedding()
    model.mean_embedding_length  # noqa: B018 (made once, and kept)

    def once() -> Any:
        return loop.run(
            model,
            [prompt],
            program,
            feedback_map=feedback_map,
            row_prompt=row_prompt,
            reference=row_prompt,
            record=record,
            max_rows=rows,
        )

    peak, kept = measured(once)
    asked: dict[str, Any] = {
        "prompt": len(prompt),
        "slots": steps,
        "steps": steps,
        "carriers": CARRIERS,
        "recorded": RECORDED,
    }
    row = scale.row_bytes(model.module.config, model.dtype, **asked)
    return {
        "rows": rows,
        "kept, measured": kept / 2**20,
        "kept, counted": rows * row.records / 2 / 2**20,
        "peak, measured": peak / 2**20,
        "peak, counted": rows * row.total / 2**20,
        "a row: cache": row.cache / 2**20,
        "logits": row.logits / 2**20,
        "records": row.records / 2**20,
    }


def measured(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes at the peak of ``run``, and bytes that its result keeps."""
    with Counted() as counted:
        told = run()
        kept = counted.now
    del told
    return counted.peak, kept


def shape(name: str, steps: int) -> dict[str, float | str]:
    """What one published shape takes."""
    config = scale.named()[name]
    module, length = scale.without_weights(config, DTYPE), PROMPT_LENGTH + steps
    weights = sum(scale.weights(module).values())
    row: RowBytes = scale.row_bytes(
        config, DTYPE, prompt=PROMPT_LENGTH, slots=steps, steps=steps, carriers=CARRIERS, recorded=RECORDED
    )
    gpus = math.ceil((weights + row.total) / (0.9 * H100.memory))
    rows = scale.fitting(gpus * H100.memory, weights, row.total)
    step = scale.seconds_per_step(module, H100, RUN_ROWS, length, DTYPE)
    job = RUN_ARMS * steps * step
    return {
        "model": name,
        "weights GiB": weights / GIB,
        "KV KiB/position": scale.kv_bytes(config, DTYPE) / 2**10,
        "row MiB": row.total / 2**20,
        "GPUs": gpus,
        "rows": rows,
        "GFLOP/row-step": scale.flops(module, length) / 1e9,
        "ms/step": 1e3 * step,
        "loop s/job": job,
        "loading s": weights / DISK,
        "GPU-h/sweep": gpus * JOBS * (job + weights / DISK) / 3600,
    }


def shown(title: str, found: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for name in found[0]:
        table.add_column(name, justify="left" if isinstance(found[0][name], str) else "right")
    for one in found:
        table.add_row(*map(cell, one.values()))
    return table


def cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.3g}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
