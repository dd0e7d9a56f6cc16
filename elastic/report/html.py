"""The report as one HTML page: it opens offline, follows the reader's colour scheme and prints on paper."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from elastic.report import charts, tables
from elastic.report.comparison import Comparison
from elastic.report.markup import Markup, join, tag
from elastic.report.summary import Summary

WIDE_COLUMNS = 6
"""A table with more columns takes the page's whole width."""


def write_html(summary: Summary, path: Path, comparison: Comparison | None = None) -> None:
    """Write the page; raises `OSError` where that is not possible."""
    path.write_text(as_html(summary, comparison), encoding="utf-8")


def as_html(summary: Summary, comparison: Comparison | None = None) -> str:
    style = files("elastic.report").joinpath("report.css").read_text(encoding="utf-8")
    page = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{summary.run}: run report"),
            tag("style", Markup(style)),
        ),
        tag("body", tag("main", _header(summary), *_pictures(summary), _tables(summary, comparison))),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{page}\n"


def _header(summary: Summary) -> Markup:
    figures = [
        tag(
            "div",
            tag("dt", figure.name),
            tag("dd", tag("b", figure.value), tag("span", figure.detail)),
        )
        for figure in tables.headline(summary)
    ]
    return tag(
        "header",
        tag("h1", summary.run, " ", tag("span", summary.outcome, class_=f"outcome {summary.outcome}")),
        tag("p", tables.subtitle(summary), class_="subtitle"),
        *(tag("p", words, class_="warning") for words in tables.warnings(summary)),
        tag("dl", *figures, class_="headline"),
    )


def _pictures(summary: Summary) -> list[Markup]:
    throughput = _figure(
        "Rollout throughput and workers",
        charts.elasticity(summary),
        "Throughput is that of whole training steps: the tokens accepted in a step over its time. Pale workers are "
        "still booting or loading; the trainer's device generates only while it seeds a step.",
        "full",
    )
    learning = _figure(
        "Success rate by step",
        charts.success(summary),
        "The share of trajectories with a reward above 0. Band: one standard error over the step's trajectories.",
    )
    cost = _figure("Cost by provider", charts.cost(summary), "Each provider's sum at the right.")
    accounts = _figure(
        "Where the GPU time went",
        charts.accounts(summary),
        "Each bar is a provider's own GPU time. Every GPU-nanosecond is in exactly one account.",
        "full",
    )
    turn = _figure(
        "Turn latency",
        charts.latency(summary.turn_latency_s, summary.turn_latency, "request to last token"),
        "Logarithmic time axis; queueing and moves included.",
    )
    first = _figure(
        "Time to first token",
        charts.latency(summary.first_token_s, summary.first_token, "request to first token"),
        "Logarithmic time axis; queueing included.",
    )
    lifetimes = _figure(
        "Workers",
        charts.lanes(summary),
        "A lane a worker, from its lease's grant to its end. Pale: booting and loading; hatched: on notice; a triangle "
        "marks a preemption.",
        "full",
    )
    whole = _figure(
        "Trajectory latency",
        charts.latency(
            summary.trajectory_latency_s, summary.trajectory_latency, "first prompt to reward", "trajectories"
        ),
        "Logarithmic time axis; environment steps and scoring included.",
    )
    ages = _figure(
        "Staleness of trained tokens", charts.staleness(summary), "Versions between a token and the trainer using it."
    )
    updates = _figure(
        "Weight updates",
        charts.weight_times(summary),
        "From a version's encoding to its being served: means over the workers that held an earlier one. Nothing is "
        "generated in the pause alone; the rest happens beside generation.",
        "full",
    )
    changed = _figure(
        "Changed elements by version",
        charts.changed_by_version(summary),
        "Of all weights, in bf16; band: from the least to the most changed layer (ROSE Fig. 11a).",
    )
    layers = _figure(
        "Changed elements by layer",
        charts.changed_by_layer(summary),
        "Mean over versions; band: from the least to the most changed version (ROSE Fig. 6).",
    )
    return [
        throughput,
        _pair(learning, cost),
        accounts,
        lifetimes,
        _pair(turn, first),
        _pair(whole, ages),
        updates,
        _pair(changed, layers),
    ]


def _figure(title: str, picture: Markup | None, caption: str, class_: str | None = None) -> Markup:
    return tag(
        "figure",
        tag("h2", title),
        tag("div", picture, class_="picture")
        if picture
        else tag("p", "The run left nothing to show here.", class_="nothing"),
        tag("figcaption", caption) if picture else None,
        class_=class_,
    )


def _pair(*figures: Markup) -> Markup:
    return tag("div", *figures, class_="pair")


def _tables(summary: Summary, comparison: Comparison | None) -> Markup:
    return tag("div", *map(_table, tables.tables(summary, comparison)), class_="tables")


def _table(table: tables.Table) -> Markup:
    return tag(
        "section",
        tag("h2", table.title),
        tag(
            "div",
            tag(
                "table",
                tag("thead", _row("th", table.header)),
                tag("tbody", *(_row("td", row) for row in table.rows)),
            ),
            class_="scroll",
        ),
        tag("p", table.note, class_="note") if table.note else None,
        class_="wide" if len(table.header) > WIDE_COLUMNS else None,
    )


def _row(cell: str, values: Sequence[str]) -> Markup:
    return tag("tr", join([tag(cell, value) for value in values]))
