"""What does a step of the loop cost? python scripts/bench.py [--rows 1 32 128] [--steps 24] [--json bench.json]

Four ways through the same steps on the same model: the bare cached forward (the floor); our loop with the dense map
p·E and with the top-32 map, both with push, receipts and recording on; and transformers' `generate` with a hand-written
steering hook. The ways take turns within one run, so that a machine that speeds up or slows down touches all alike.
Printed and written as JSON: the median time per step, prompt pass included, and the median ratio to the bare forward
of the same turn. `generate` reads the prompt once per row, the others once.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from feedback import carriers, loop, maps, models, programs
from feedback.cache import cache_keyword
from feedback.sites import blocks

PROMPT = "Once upon a time, in a small village by the sea, there lived an old fisherman who"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2", help="smollm2 or tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    model = models.load(models.ModelSpec(kind=options.model, device=options.device, dtype=options.dtype))
    found = [{"rows": rows, **measure(model, rows, options.steps, options.rounds)} for rows in options.rows]
    record = {"threads": torch.get_num_threads(), "steps": options.steps, "model": model.info.name, "results": found}
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    table = Table(
        title=f"{model.info.name}, {options.steps} steps: milliseconds per step and ratio to the bare forward"
    )
    table.add_column("rows", justify="right")
    names = list(found[0]["ms_per_step"])
    for name in names:
        table.add_column(name, justify="right")
    for result in found:
        cells = [f"{result['ms_per_step'][n]:.1f}  ×{result['ratio'][n]:.2f}" for n in names]
        table.add_row(str(result["rows"]), *cells)
    Console(width=110).print(table)


def measure(model: models.LanguageModel, rows: int, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds per step of each way, and the median of its ratio to the bare forward of the same round."""
    prompt = model.encode(PROMPT)
    v = carriers.random_orthonormal(1, model.d_model, torch.Generator().manual_seed(0)).scaled
    program = programs.constant(v, 2.0, steps=steps, rows=rows)
    ways: dict[str, Callable[[], None]] = {
        "bare forward": lambda: bare(model, prompt, rows, steps),
        "loop, dense p·E": lambda: looped(model, prompt, program, maps.expected_embedding()),
        "loop, top-32": lambda: looped(model, prompt, program, maps.top_k(32)),
        "generate + hook": lambda: generated(model, prompt, rows, steps, 2.0 * v[0]),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            way()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    floor = times["bare forward"]
    return {
        "ms_per_step": {n: 1000 * statistics.median(t) / steps for n, t in times.items()},
        "ratio": {n: statistics.median(a / b for a, b in zip(t, floor, strict=True)) for n, t in times.items()},
    }


@torch.no_grad()
def bare(model: models.LanguageModel, prompt: list[int], rows: int, steps: int) -> None:
    """Prefill, then one-token passes on fixed input vectors: no hook, no map, nothing kept but the cache."""
    module: Any = model.module
    cache = DynamicCache()
    keyword = {cache_keyword(module): cache}
    ids = torch.tensor([prompt], device=model.device)
    module(input_ids=ids, use_cache=True, **keyword, **model.last_position_only)
    cache.batch_repeat_interleave(rows)
    inputs = model.embedding[:rows, None]
    for step in range(steps):
        position = torch.full((rows, 1), len(prompt) + step, device=model.device)
        module(inputs_embeds=inputs, position_ids=position, use_cache=True, **keyword)


def looped(
    model: models.LanguageModel, prompt: list[int], program: programs.Program, feedback_map: maps.NamedMap
) -> None:
    """Our loop, everything on: push, receipts, records."""
    row_prompt = torch.zeros(program.n_rows, dtype=torch.long)
    loop.run(model, [prompt], program, feedback_map=feedback_map, row_prompt=row_prompt)


@torch.no_grad()
def generated(model: models.LanguageModel, prompt: list[int], rows: int, steps: int, push: torch.Tensor) -> None:
    """transformers' greedy generate, steered by a hand-written hook."""
    module: Any = model.module
    handle = blocks(model.module)[model.n_blocks // 2].register_forward_hook(
        lambda module, args, output: (
            output + push if isinstance(output, torch.Tensor) else (output[0] + push, *output[1:])
        )
    )
    try:
        module.generate(
            torch.tensor([prompt] * rows, device=model.device),
            attention_mask=torch.ones(rows, len(prompt), dtype=torch.long, device=model.device),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            pad_token_id=model.pad_id,
        )
    finally:
        handle.remove()


if __name__ == "__main__":
    main()
