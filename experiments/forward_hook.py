"""Forward hooks, claim by claim: what a hook is said to do, and what it did, on two numbers and on a language model.

The two-number layer maps [1, 2] to [2, −1]; steering it by 0.5·[4, 2] gives [4, 0]. On the language model α·v is added
to one block's output at every position of every prompt; a random direction of the same length is the control.
"""

import copy
import pickle
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn
from transformers import DynamicCache

from conf import build
from conf.schema import Config
from feedback import audit, carriers, figures, gradients, hooks, metrics, models, running
from feedback.cache import cache_keyword, padded
from feedback.models import LanguageModel, ModelShape
from feedback.readout import logit_lens
from feedback.results import Result
from feedback.sites import Site, lens, resolve
from feedback.tracking import Tracker


class Claims:
    """What is claimed of hooks, what was measured, and whether it holds."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.part = ""

    def add(self, claim: str, measured: object, holds: bool) -> None:
        self.rows.append({"part": self.part, "claim": claim, "measured": str(measured), "holds": bool(holds)})

    def expect(self, claim: str, measured: object, expected: object) -> None:
        self.add(claim, measured, measured == expected)

    def equal(self, claim: str, found: Tensor, expected: Tensor) -> None:
        """Bit for bit."""
        self.add(claim, f"largest difference {largest(found - expected):g}", torch.equal(found, expected))


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def check(config: Config, shape: ModelShape) -> None:
    """Refuses settings that cannot work, before the model is loaded."""
    build.check_shape(config, shape)
    if len(build.alphas(config)) != 1 or build.alphas(config)[0] == 0:
        raise ValueError(f"alpha={config.alpha}: this experiment takes one strength, not 0, and a control beside it")
    if config.site.at != "block" or config.site.block in (-1, shape.n_blocks - 1):
        raise ValueError(
            f"site {config.site.at} of block {config.site.block}: this experiment follows h + αv from a block into the "
            f"next one; choose site.at=block and a block before {shape.n_blocks - 1}"
        )


def run(config: Config, model: LanguageModel, tracker: Tracker, folder: Path) -> Result:
    """Tests every claim and leaves the two figures in ``folder``."""
    draw = torch.Generator().manual_seed(config.seed)
    before = audit.snapshot(model.module)
    made = build.carriers(config, model, 1, draw)
    random = carriers.norm_matched_random(made, draw).scaled[0]
    v, (alpha,) = made.scaled[0], build.alphas(config)
    where = resolve(model.module, build.site(config))
    assert where.block is not None
    site, block = Site(where.block), where.block
    batch, claims = Batch(model, config.prompts.texts), Claims()
    example = worked_example(claims)
    two_numbers(claims)
    at_the_block(claims, batch, block, v, alpha)
    under_a_cache(claims, batch, site, v, alpha)
    backwards(claims, batch, site)
    table, downstream = through_the_blocks(claims, batch, block, v, random, alpha, draw)
    what_the_host_sees(claims, batch, site, v, before)
    for number, row in enumerate(claims.rows, 1):
        tracker.log(number, {"claim/holds": float(row["holds"])})
    tracker.table("claims", list(claims.rows[0]), [list(row.values()) for row in claims.rows])
    failed = [row["claim"] for row in claims.rows if not row["holds"]]
    summary = {
        "worked_example": example,
        "claims": len(claims.rows),
        "claims_that_hold": len(claims.rows) - len(failed),
        "claims_that_fail": failed,
        **downstream,
    }
    drawn = {
        "logit_lens": lens_figure(batch, block, v, alpha, folder / "figures" / "logit_lens.png"),
        "delta_through_blocks": delta_figure(table, block, alpha, folder / "figures" / "delta_through_blocks.png"),
    }
    record = {
        "claims": claims.rows,
        "site": {"block": block, "at": where.at, "path": where.path},
        "carrier": {"names": made.names, "kind": config.carriers.kind, "length": v.norm().item(), "alpha": alpha},
        "audit": {"before": audit.plain(before), "after": audit.plain(audit.snapshot(model.module))},
    }
    return Result(table=table, summary=summary, figures=drawn, record=record)


def two_number_layer() -> tuple[nn.Linear, nn.Sequential]:
    """A layer that maps [1, 2] to [2, −1], alone and with one behind it that passes on what it receives."""
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[2.0, 0.0], [1.0, -1.0]]))
    return layer, nn.Sequential(layer, nn.Identity())


FIRST, SECOND = Site(at="module", path="0"), Site(at="module_input", path="1")
U, V = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 2.0])


def worked_example(claims: Claims) -> dict[str, list[float]]:
    """What the layer behind received: without a hook, with 0.5·[4, 2] added, and after the hook was removed."""
    claims.part = "two numbers"
    layer, net = two_number_layer()
    weight, received = layer.weight.detach().clone(), []
    with hooks.inspect(net, SECOND, lambda h: received.append(h.tolist()), strict=True):
        net(U)
        with hooks.add(net, FIRST, V, 0.5):
            net(U)
        net(U)
    claims.expect("without a hook the next layer receives [2, −1]", received[0], [2, -1])
    claims.expect("with 0.5·[4, 2] added it receives [4, 0]", received[1], [4, 0])
    claims.expect("with the hook removed it receives [2, −1] again", received[2], [2, -1])
    claims.equal("the layer's weights stay unchanged", layer.weight, weight)
    return dict(zip(("unsteered", "steered", "restored"), received, strict=True))


def two_numbers(claims: Claims) -> None:
    """What returning, writing in place, order, and leaving a hook on do; on the layer of the worked example."""
    layer, net = two_number_layer()
    on = hooks.registered

    def out() -> list[float]:
        return net(U).tolist()

    def scale(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return 2 * output

    def shift(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + 1

    def write(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output += 1

    def erase(module: Any, inputs: Any, output: Tensor) -> None:
        module.weight.data.zero_()

    with on(layer, "forward", lambda module, inputs, output: None):
        claims.expect("returning None passes the output on", out(), [2, -1])
    with torch.no_grad(), on(layer, "forward", write):
        claims.expect("None is no protection: a write in place arrives downstream", out(), [3, 0])
    try:
        with torch.no_grad(), hooks.inspect(net, FIRST, lambda h: h.add_(1), strict=True):
            caught = f"passed on {out()}"
    except hooks.HookError as error:
        caught = type(error).__name__
    claims.expect("strict inspection catches the write", caught, "HookError")
    seen: list[Any] = []
    with on(layer, "forward", lambda module, inputs, output: seen.append([i.tolist() for i in inputs])):
        out()
    claims.expect("a forward hook receives the tuple of positional inputs", seen[0], [[1, 2]])
    with on(layer, "forward", lambda m, inputs, keywords, o: seen.append((inputs, [*keywords])), with_kwargs=True):
        layer(input=U)
    claims.expect("with_kwargs=True shows keyword inputs, which the tuple lacks", seen[1], ((), ["input"]))
    with on(layer, "forward_pre", lambda module, inputs: (inputs[0] + torch.tensor([1.0, 0.0]),)):
        claims.expect("a pre-hook replaces the input: [2, 2] gives [4, 0]", out(), [4, 0])
    with on(layer, "forward", scale), on(layer, "forward", shift):
        claims.expect("hooks run as registered, each on what the last returned: 2h, then +1", out(), [5, -1])
    with on(layer, "forward", scale), on(layer, "forward", shift, prepend=True):
        claims.expect("prepend=True goes to the front: +1, then 2h", out(), [6, 0])
    only = lambda module, inputs, output: scale(module, inputs, output) if module is layer else None  # noqa: E731
    with on(layer, "forward", shift), on(None, "forward", only):
        claims.expect("global hooks run before a module's own: 2h, then +1", out(), [5, -1])
    handle = layer.register_forward_hook(shift)
    claims.expect("a handle left attached applies to every later call", [out(), out()], [[3, 0], [3, 0]])
    handle.remove()
    claims.expect("removing it restores the layer at once", out(), [2, -1])
    try:
        with hooks.add(net, FIRST, V, 0.5):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        claims.expect("an exception inside the block removes the hook, too", out(), [2, -1])
    updated = []
    for alpha in (0.0, 0.5):
        trained, whole = two_number_layer()
        with hooks.add(whole, FIRST, V, alpha):
            whole(U).square().sum().backward()
        torch.optim.SGD(trained.parameters(), lr=1.0).step()
        updated.append(trained.weight.detach())
    off = largest(updated[1] - updated[0])
    claims.add("in training a replaced output changes the gradient, so the next update", f"by up to {off:g}", off > 0)
    with on(layer, "forward", erase):
        out()
    claims.expect("a hook written to do so can overwrite parameters", layer.weight.tolist(), [[0, 0], [0, 0]])


class Batch:
    """All prompts as one left-padded batch; passes without a cache."""

    def __init__(self, model: LanguageModel, texts: list[str]) -> None:
        self.model, self.module = model, model.module
        ids, mask = padded([model.encode(text) for text in texts], model.pad_id)
        self.ids, self.mask = ids.to(model.device), mask.to(model.device)
        self.positions = (self.mask.long().cumsum(-1) - 1).clamp(min=0)

    def forward(self, embedded: Tensor | None = None) -> Float[Tensor, "row vocab"]:
        """Logits at the last position."""
        inputs: dict[str, Any] = {"input_ids": self.ids} if embedded is None else {"inputs_embeds": embedded}
        inputs |= self.model.last_position_only
        mask = self.mask.long()
        return self.module(attention_mask=mask, position_ids=self.positions, use_cache=False, **inputs).logits[:, -1]

    @torch.no_grad()
    def seen(self, *sites: Site) -> tuple[Float[Tensor, "row vocab"], list[Float[Tensor, "row position d_model"]]]:
        """Logits, and what the sites passed on."""
        with hooks.record(self.module, sites) as recorder:
            logits = self.forward()
            outputs = recorder.outputs
        return logits, [outputs[site] for site in sites]


def at_the_block(claims: Claims, batch: Batch, n: int, v: Float[Tensor, " d_model"], alpha: float) -> None:
    """h̃ = h + αv at the block and in the input of the next; nothing before it, in the weights, or after removal."""
    claims.part = f"block {n}"
    module, site, following = batch.module, Site(n), Site(n + 1, "block_input")
    checksum = models.checksum(module)
    earlier = [Site(block) for block in range(n)]
    with torch.no_grad():
        bare = batch.forward()
    plain, (h, received, *before) = batch.seen(site, following, *earlier)
    with hooks.add(module, site, v, alpha):
        steered, (pushed, steered_received, *steered_before) = batch.seen(site, following, *earlier)
    restored, (h_again,) = batch.seen(site)
    with hooks.add(module, following, v, alpha):
        by_pre_hook, _ = batch.seen()
    claims.equal("recording without writing leaves the logits as they are", plain, bare)
    claims.equal("unsteered, the next block receives h", received, h)
    claims.equal("steered, h̃ = h + αv at every row and position", pushed, h + (alpha * v).to(h))
    claims.equal("the next block receives h̃", steered_received, pushed)
    untouched = sum(map(torch.equal, before, steered_before))
    claims.expect("the blocks before are untouched", f"{untouched} of {n} equal", f"{n} of {n} equal")
    claims.add("the logits move", f"by up to {largest(steered - plain):.3g}", not torch.equal(steered, plain))
    claims.equal("a pre-hook on the next block that adds αv does the same", by_pre_hook, steered)
    claims.equal("removed, the activation is restored bit for bit", h_again, h)
    claims.equal("removed, the logits are restored bit for bit", restored, plain)
    claims.expect("the weights are unchanged", models.checksum(module)[:16], checksum[:16])
    outputs: list[Any] = []
    attention = resolve(module, Site(n, "attn")).module
    keep = lambda module, inputs, output: outputs.append(output)  # noqa: E731
    with (
        hooks.registered(attention, "forward", keep),
        hooks.replace(module, Site(n, "attn"), torch.clone),
        hooks.registered(attention, "forward", keep),
        hooks.registered(resolve(module, site).module, "forward", keep),
    ):
        batch.seen()
    came, went, block = outputs
    names = f"a block returns {type(block).__name__}, its attention {type(came).__name__}"
    same_rest = not isinstance(came, tuple) or all(a is b for a, b in zip(came[1:], went[1:], strict=True))
    rebuilt = type(came) is type(went) and came is not went and same_rest
    claims.add("the container of a replaced hidden state is rebuilt, the rest of it kept", names, rebuilt)


@torch.no_grad()
def under_a_cache(claims: Claims, batch: Batch, site: Site, v: Float[Tensor, " d_model"], alpha: float) -> None:
    """What a hook sees in cached passes, and which hooks agree with recomputing the whole sequence."""
    claims.part = "key-value cache"
    module, length = batch.module, int(batch.mask.sum(1).min())
    ids = batch.ids[:, -length:]  # no padding: the cache is what is asked about
    first = (length + 1) // 2

    def whole() -> Tensor:
        return module(input_ids=ids, use_cache=False).logits[:, first - 1 :]

    def cached() -> Tensor:
        cache: dict[str, Any] = {cache_keyword(module): DynamicCache(), "use_cache": True}
        parts = [ids[:, :first], *ids[:, first:].split(1, dim=1)]
        return torch.cat([module(input_ids=part, **cache).logits[:, -1:] for part in parts], dim=1)

    shapes: list[tuple[int, ...]] = []
    with hooks.inspect(module, site, lambda h: shapes.append(tuple(h.shape))):
        scale = largest(cached())
    with hooks.add(module, site, v, alpha):
        fixed = largest(cached() - whole())
    with hooks.replace(module, site, lambda h: h - h.mean(1, keepdim=True)):
        naive = largest(cached() - whole())
    with running.mean(module, site, lambda h, mean: h - mean) as state:
        recomputed = whole()
        state.reset()
        kept = largest(cached() - recomputed)
    allowed = min(1000 * torch.finfo(batch.model.dtype).eps, 0.1) * scale  # for sums in another order
    seen = f"{shapes[0]}, then {' '.join(map(str, sorted({*shapes[1:]})))}"
    one_each = {shape[1] for shape in shapes[1:]} == {1}
    claims.add("the prompt pass shows all positions, a cached step one", seen, shapes[0][1] == first and one_each)
    claims.add("a fixed αv agrees with recomputing", f"off by {fixed:.1g} of {scale:.0f}", fixed <= allowed)
    claims.add("a mean over the positions at hand does not", f"off by {naive:.2g} of {scale:.0f}", naive > 2 * allowed)
    claims.add("a mean that keeps its own state does", f"off by {kept:.1g} of {scale:.0f}", kept <= allowed)


def backwards(claims: Claims, batch: Batch, site: Site) -> None:
    """Full backward hooks: silent in forward-only loops, reading both gradients, replacing the input's."""
    claims.part = "backward hook"
    module, kept = batch.module, []
    embedded = batch.model.embedding[batch.ids].clone().requires_grad_()

    def gradient() -> Tensor:
        return torch.autograd.grad(batch.forward(embedded).logsumexp(-1).sum(), embedded)[0]

    def keep(hidden: Tensor) -> None:
        hidden.retain_grad()
        kept.append(hidden)

    with gradients.read(module, site) as silent:
        batch.seen()
    with hooks.inspect(module, site, keep), gradients.read(module, site) as read:
        batch.forward(embedded).logsumexp(-1).sum().backward()
    plain = gradient()
    with gradients.replace(module, site, torch.zeros_like):
        cut = gradient()
    claims.expect("forward-only passes do not trigger it", f"fired {silent.fired} times", "fired 0 times")
    shapes = [tuple(read.wrt_input.shape), tuple(read.wrt_output.shape)]
    claims.expect("it reads the gradients of input and output", shapes, [tuple(kept[0].shape)] * 2)
    own = kept[0].grad
    assert own is not None
    claims.equal("the output's is the one autograd keeps", read.wrt_output, own)
    measured = f"{largest(plain):.3g} at the embeddings became {largest(cut):g}"
    claims.add(
        "zero in place of the input's silences all that lies before", measured, largest(cut) == 0 < largest(plain)
    )


def what_the_host_sees(
    claims: Claims, batch: Batch, site: Site, v: Float[Tensor, " d_model"], before: list[audit.Found]
) -> None:
    """The hook is in the module's dictionary, whatever the text looks like."""
    claims.part = "host"
    module, path = batch.module, resolve(batch.module, site).path
    plain, (h,) = batch.seen(site)
    small = 0.01 * h[:, -1].norm(dim=-1).mean().item()
    refused = []
    with hooks.add(module, site, v / v.norm(), small):
        came, gone = audit.changes(before, audit.snapshot(module))
        steered, _ = batch.seen()
        for copied in (copy.deepcopy, pickle.dumps):
            try:
                copied(resolve(module, site).module)
            except hooks.HookError:
                refused.append(copied.__name__)
    same = metrics.agreement(steered.argmax(-1), plain.argmax(-1)).item()
    listed = [(f.kind, f.path, f.owner) for f in came]
    claims.expect("while it is on, the hook is listed on its module", listed, [("forward", path, "ours")])
    text = f"push of 1 % of ‖h‖ ({small:.2g}): {same:.3f} of {len(plain)} next tokens as unsteered"
    claims.add("that needs no look at the text, which is ordinary", text, same >= 0.8 and not gone)
    claims.expect("a module with a hook on is not copied or pickled", refused, ["deepcopy", "dumps"])
    after = audit.changes(before, audit.snapshot(module))
    claims.expect("afterwards nothing hangs on it that did not before", after, ([], []))


def through_the_blocks(
    claims: Claims,
    batch: Batch,
    n: int,
    v: Float[Tensor, " d_model"],
    random: Float[Tensor, " d_model"],
    alpha: float,
    draw: torch.Generator,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """‖Δ‖ and the logit lens at every block, last position, for v, −v and the random control: table and summary."""
    sites = [Site(block) for block in range(batch.model.n_blocks)]
    _, plain = batch.seen(*sites)
    table: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for name, direction in (("v", v), ("minus_v", -v), ("random", random)):
        with hooks.add(batch.module, Site(n), direction, alpha):
            _, steered = batch.seen(*sites)
        rows = [
            moved(block, h[:, -1], g[:, -1], batch, draw)
            for block, (h, g) in enumerate(zip(plain, steered, strict=True))
        ]
        table += [{"direction": name, "alpha": alpha, **row} for row in rows]
        summary[name] = {
            "delta_at_site": rows[n]["delta"],
            "relative_at_site": rows[n]["relative"],
            "delta_last_block": rows[-1]["delta"],
            **{f"next_token_{key}": rows[-1][f"lens_{key}"] for key in ("changed", "changed_low", "changed_high")},
            "kl_nats": rows[-1]["lens_kl_nats"],
        }
    deltas = [row["delta"] for row in table if row["direction"] == "v"]
    asked = abs(alpha) * v.norm().item()
    claims.part = f"behind block {n}"
    claims.expect("‖Δ‖ before the block", max([0.0, *deltas[:n]]), 0.0)
    precision = 0.02 if batch.model.dtype != torch.float32 else 1e-4
    said = f"{deltas[n]:.4f}, asked {asked:.4f}"
    claims.add("‖Δ‖ at the block is |α|·‖v‖", said, abs(deltas[n] - asked) <= precision * asked)
    reached = sum(delta > 0 for delta in deltas[n:])
    claims.add(
        "every block from there on passes on a moved state",
        f"{reached} of {len(deltas[n:])}",
        reached == len(deltas[n:]),
    )
    return table, summary


def moved(
    block: int, h: Float[Tensor, "row d_model"], g: Float[Tensor, "row d_model"], batch: Batch, draw: torch.Generator
) -> dict[str, Any]:
    """How far a block's output moved from h to g, in length and in what the logit lens reads."""
    delta, length = (g - h).float().norm(dim=-1), h.float().norm(dim=-1)
    with torch.no_grad():
        reads, now = (lens(batch.module, x).float() for x in (h, g))
    changed = reads.argmax(-1) != now.argmax(-1)
    ends, share = metrics.mean_interval(delta, draw), metrics.wilson(int(changed.sum()), len(changed))
    return {
        "block": block,
        "delta": delta.mean().item(),
        "delta_low": ends.low.item(),
        "delta_high": ends.high.item(),
        "relative": (delta / length).mean().item(),
        "lens_changed": changed.double().mean().item(),
        "lens_changed_low": share.low.item(),
        "lens_changed_high": share.high.item(),
        "lens_kl_nats": metrics.kl(now, reads).mean().item(),
    }


def lens_figure(batch: Batch, n: int, v: Float[Tensor, " d_model"], alpha: float, path: Path) -> Path:
    """The logit lens of the first prompt, unsteered and steered, side by side."""
    sites, panels = [Site(block) for block in range(batch.model.n_blocks)], []
    for title, strength in (("unsteered", 0.0), (f"α = {alpha:g} at block {n}", alpha)):
        with hooks.add(batch.module, Site(n), v, strength):
            _, states = batch.seen(*sites)
        reading = logit_lens(batch.module, torch.stack([h[0, -1] for h in states]), top=4)
        tokens = [[batch.model.decode([token]) for token in row] for row in reading.tokens.tolist()]
        panels.append(figures.LensPanel(title, tokens, reading.probabilities.cpu().numpy()))
    labels = [f"block {block}" + (" ← push" if block == n else "") for block in range(len(sites))]
    return figures.lens_grid(panels, path, row_labels=labels, title="What each block would say (logit lens)")


def delta_figure(table: list[dict[str, Any]], n: int, alpha: float, path: Path) -> Path:
    series: dict[str, figures.Line] = {}
    for name, label in {"v": "v", "minus_v": "−v", "random": "random, as long"}.items():
        rows = [row for row in table if row["direction"] == name and row["block"] >= n]
        x, y, low, high = ([row[key] for row in rows] for key in ("block", "delta", "delta_low", "delta_high"))
        series[label] = x, y, low, high
    title = f"How far α = {alpha:g} at block {n} moves the residual stream"
    return figures.lines(series, path, "block", "‖Δ‖, mean over prompts", title)


def show(result: Result) -> Table:
    """The printed table: one line per claim."""
    summary = result.summary
    table = Table(
        title=f"Forward hooks: {summary['claims_that_hold']} of {summary['claims']} claims hold",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("where", "claim", "measured", "holds"):
        table.add_column(column)
    for one in result.record["claims"]:
        table.add_row(one["part"], one["claim"], one["measured"], "yes" if one["holds"] else "NO")
    return table
