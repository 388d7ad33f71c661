"""Panels for every experiment, as a saved view in wandb: python scripts/dashboard.py [--project …] [--entity …]

Adds the view to the project that tracking=online or `wandb sync` has filled, and prints its address. Needs a wandb key
and wandb-workspaces (`pip install '.[dashboard]'`). Panels of experiments that never ran stay empty.
"""

import argparse
import os
import sys
from typing import Any

from feedback import tracking

ARMS = ("soft", "soft_forced", "mixed", "hard", "cut")
SWEPT = ("alpha", "site.block", "map.temperature", "seed")
MEASURED = ("ber", "text_ber", "text_agreement", "argmax_agreement", "kl_nats")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", default="feedback-loop", help="tracking.project of the runs (feedback-loop)")
    parser.add_argument("--entity", help="account or team; without it, the key's own")
    parser.add_argument("--name", default="feedback loop", help="of the view (feedback loop)")
    options = parser.parse_args()
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        tracking.check("online")
    except tracking.TrackingError:
        refuse("there is no wandb key: run `wandb login`, or set WANDB_API_KEY")
    try:
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        refuse(f"{error}: pip install '.[dashboard]'")
    try:
        entity = options.entity or tracking.default_entity()
        workspace = ws.Workspace(entity=entity, project=options.project, name=options.name, sections=sections())
        print(workspace.save().url)
    except Exception as error:  # whatever the client or the server says, in its words
        refuse(f"wandb did not save the dashboard: {error or type(error).__name__}")


def refuse(message: str) -> None:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def sections() -> list[Any]:
    """The sections in the order of the README. Metrics are named as the experiments log and summarise them."""
    import wandb_workspaces.workspaces as ws

    made = {
        "Hidden bits": hidden_bits(),
        "Hysteresis": hysteresis(),
        "Logic and circuits": logic(),
        "Bits under a text that does not change": hidden_cells(),
        "Learning": learning(),
        "Hooks and audit": hooks(),
    }
    return [
        ws.Section(name=name, panels=panels, is_open=number < 2) for number, (name, panels) in enumerate(made.items())
    ]


def over_steps(title: str, *metrics: str, **settings: Any) -> Any:
    import wandb_workspaces.reports.v2 as wr

    return wr.LinePlot(title=title, x=settings.pop("x", tracking.STEP), y=list(metrics), **settings)


def scatter(title: str, x: str, y: str, **settings: Any) -> Any:
    import wandb_workspaces.reports.v2 as wr

    return wr.ScatterPlot(title=title, x=wr.SummaryMetric(x), y=wr.SummaryMetric(y), **settings)


def hidden_bits() -> list[Any]:
    """A run with several strengths logs each under `arm/alpha=…`, one with a single strength under `arm`."""
    import wandb_workspaces.reports.v2 as wr

    curves = [
        over_steps(
            f"{arm}: {what} over steps, by alpha",
            metric_regex=f"^{arm}(/alpha=[^/]+)?/{metric}$",
            groupby=wr.Config("alpha"),
            range_y=(0, top),
        )
        for metric, what, top in (("ber", "BER", 0.6), ("argmax_agreement", "argmax agreement", 1))
        for arm in ARMS
    ]
    columns = [wr.ParallelCoordinatesPlotColumn(wr.Config(name), display_name=name) for name in SWEPT]
    columns += [wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric(name), display_name=name) for name in MEASURED]
    return [
        wr.ParallelCoordinatesPlot(title="Settings, BER and text of the headline arm", columns=columns),
        scatter("Text agreement against BER: the loop writes its own text", "soft/ber", "soft/text_agreement"),
        scatter("Argmax agreement against BER: headline arm", "ber", "argmax_agreement"),
        scatter("Text reader against state reader: headline arm", "ber", "text_ber", range_y=(0, 0.6)),
        *curves,
        wr.MediaBrowser(title="Transcripts and curves", media_keys=["figures/ber_over_steps", "figures/transcripts"]),
        wr.WeavePanelSummaryTable(table_name="transcripts"),
    ]


def hysteresis() -> list[Any]:
    """Of experiment=latch and hidden_latch."""
    import wandb_workspaces.reports.v2 as wr

    return [
        over_steps("u over alpha, up and down", "hysteresis/up", "hysteresis/down", x="hysteresis/alpha"),
        over_steps("u and alpha over steps", "latch/u", "latch/alpha"),
        wr.BarPlot(title="Thresholds", metrics=["alpha_reset", "alpha_set"]),
        wr.BarPlot(title="Width of the hysteresis", metrics=["width"]),
        scatter("Width against L", "coupling_L", "width"),
        wr.MediaBrowser(title="Hysteresis", media_keys=["figures/hysteresis"]),
    ]


def logic() -> list[Any]:
    """Of experiment=hidden_logic and circuit."""
    import wandb_workspaces.reports.v2 as wr

    return [
        wr.WeavePanelSummaryTable(table_name="truth_table"),
        wr.WeavePanelSummaryTable(table_name="confusion"),
        wr.BarPlot(title="Logic gates right in every row", metrics=["gates_correct"]),
        wr.BarPlot(title="Rows of a circuit right in every trial", metrics=["correct_rows", "rows"]),
        over_steps("Accuracy of each logic gate", "gate/accuracy", "gate/worst_row"),
        wr.MediaBrowser(title="Truth tables", media_keys=["figures/truth_tables"]),
    ]


def hidden_cells() -> list[Any]:
    """Of experiment=hidden_latch, register and hidden_story."""
    import wandb_workspaces.reports.v2 as wr

    return [
        scatter("Text agreement against BER", "ber", "text_agreement"),
        over_steps("BER over writes", "register/ber"),
        over_steps("BER under ordinary text", "loop/ber", "cache/ber", "random_v/ber", range_y=(0, 1)),
        over_steps("Ordinary text: tokens as unsteered", "loop/same", "cache/same", "random_v/same", range_y=(0, 1)),
        wr.WeavePanelSummaryTable(table_name="crosstalk"),
        wr.MediaBrowser(title="Crosstalk", media_keys=["figures/crosstalk"]),
    ]


def learning() -> list[Any]:
    """Of experiment=learn_cell and learned_carriers."""
    import wandb_workspaces.reports.v2 as wr

    return [
        over_steps("Loss of a cell", "learn/loss"),
        over_steps("Held-out loop test", "learn/kept", "learn/margin", "learn/level", "learn/text_agreement"),
        over_steps("Carriers: margin of the reader", "covert/margin"),
        over_steps("Carriers: nats in the text", "covert/nats", log_y=True),
        wr.MediaBrowser(title="Bits read against nats leaked", media_keys=["figures/bits_against_nats"]),
    ]


def hooks() -> list[Any]:
    """Of experiment=forward_hook and audit."""
    import wandb_workspaces.reports.v2 as wr

    return [
        wr.BarPlot(title="Claims that hold", metrics=["claims_that_hold", "claims"]),
        wr.BarPlot(title="Foreign code found", metrics=["found", "planted", "false_alarms"]),
        wr.WeavePanelSummaryTable(table_name="claims"),
    ]


if __name__ == "__main__":
    main()
