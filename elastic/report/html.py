"""A run's report as one HTML page."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from elastic.report import charts, document, evaluation_charts, learning_charts, tables
from elastic.report.comparison import Comparison
from elastic.report.document import Chart, Concern, LinkedFile, Page
from elastic.report.samples import Chosen, samples_of
from elastic.report.summary import Summary

INSPECT = "inspect"
"""The directory of a run's in which Inspect's logs are looked for."""
INSPECT_LOGS = (".eval", ".json")
LOGS_MAX = 20


def write_html(
    summary: Summary,
    path: Path,
    comparison: Comparison | None = None,
    chosen: Chosen | None = None,
    logs: Sequence[Path] = (),
) -> None:
    """Write the page, with links to `logs`; raises `OSError` where that is not possible."""
    links = [LinkedFile(log.name, quote(os.path.relpath(log, path.parent))) for log in logs]
    path.write_text(as_html(summary, comparison, chosen, links), encoding="utf-8")


def inspect_logs(run_dir: Path) -> list[Path]:
    """The newest of Inspect's logs that lie in a run's directory, by their names, which begin with their time."""
    found = (run_dir / INSPECT).glob("[!.]*")
    return sorted(log for log in found if log.suffix in INSPECT_LOGS and log.is_file())[-LOGS_MAX:]


def as_html(
    summary: Summary,
    comparison: Comparison | None = None,
    chosen: Chosen | None = None,
    inspect_links: Sequence[LinkedFile] = (),
) -> str:
    """The page; `chosen` are the trajectories that it shows, with their texts."""
    total = summary.trajectories_finished + sum(summary.trajectories_failed.values())
    return document.as_html(
        Page(
            title=f"{summary.run}: run report",
            heading=summary.run,
            outcome=summary.outcome,
            subtitle=tables.subtitle(summary),
            concerns=[Concern(one.says, one.advice, one.place) for one in summary.diagnoses],
            warnings=tables.warnings(summary),
            headline=tables.headline(summary),
            charts=_charts(summary),
            tables=tables.tables(summary, comparison),
            samples=None if chosen is None else samples_of(chosen, total),
            inspect_links=[*inspect_links],
        )
    )


def _charts(summary: Summary) -> list[Chart]:
    return [
        Chart(
            title="Rollout throughput and workers",
            picture=charts.elasticity(summary),
            caption="Throughput is that of whole training steps: the tokens accepted in a step over its time. Pale "
            "workers are still booting or loading; the trainer's device generates only while it seeds a step.",
            wide=True,
        ),
        Chart(
            title="Success rate by step",
            picture=charts.success(summary),
            caption="The share of trajectories with a reward above 0. Band: one standard error over the step's "
            "trajectories.",
        ),
        *evaluation_charts.charts_of(summary.evaluations),
        Chart(title="Cost by provider", picture=charts.cost(summary), caption="Each provider's sum at the right."),
        Chart(
            title="Where the GPU time went",
            picture=charts.accounts(summary),
            caption="Each bar is a provider's own GPU time. Every GPU-nanosecond is in exactly one account.",
            wide=True,
        ),
        Chart(
            title="Workers",
            picture=charts.lanes(summary),
            caption="A lane a worker, from its lease's grant to its end. Pale: booting and loading; hatched: on "
            "notice; a triangle marks a preemption.",
            wide=True,
        ),
        Chart(
            title="Turn latency",
            picture=charts.latency(summary.turn_latency_s, summary.turn_latency, "request to last token"),
            caption="Logarithmic time axis; queueing and moves included.",
        ),
        Chart(
            title="Time to first token",
            picture=charts.latency(summary.first_token_s, summary.first_token, "request to first token"),
            caption="Logarithmic time axis; queueing included.",
        ),
        Chart(
            title="Trajectory latency",
            picture=charts.latency(
                summary.trajectory_latency_s, summary.trajectory_latency, "first prompt to reward", "trajectories"
            ),
            caption="Logarithmic time axis; environment steps and scoring included.",
        ),
        Chart(
            title="Staleness of trained tokens",
            picture=charts.staleness(summary),
            caption="Versions between a token and the trainer using it.",
        ),
        *_lengths(summary),
        *learning_charts.charts_of(summary.learning),
        Chart(
            title="Weight updates",
            picture=charts.weight_times(summary),
            caption="From a version's encoding to its being served: means over the workers that held an earlier one. "
            "Nothing is generated in the pause alone; the rest happens beside generation.",
            wide=True,
        ),
        Chart(
            title="Changed elements by version",
            picture=charts.changed_by_version(summary),
            caption="Of all weights, in bf16; band: from the least to the most changed layer (ROSE Fig. 11a).",
        ),
        Chart(
            title="Changed elements by layer",
            picture=charts.changed_by_layer(summary),
            caption="Mean over versions; band: from the least to the most changed version (ROSE Fig. 6).",
        ),
    ]


def _lengths(summary: Summary) -> list[Chart]:
    """None where nothing was dropped in vain."""
    picture = charts.lengths(summary)
    caption = "Mean policy tokens of trajectories: trained on; dashed: dropped as stale or for infrastructure."
    title = "Lengths of what was trained and dropped"
    return [] if picture is None else [Chart(title=title, picture=picture, caption=caption)]
