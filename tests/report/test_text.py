"""The closing table and Markdown of a realistic run."""

import pytest
from rich.console import Console

from elastic.core.types import EndCause
from elastic.report import as_json, as_markdown, closing_table, tables


def rendered(summary, width=80):
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(closing_table(summary))
    return capture.get()


def test_the_closing_table_fits_a_terminal(realistic):
    lines = rendered(realistic).splitlines()
    assert lines[0].startswith("frozenlake finished after 5 min 12 s")
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    for name in (*realistic.providers, "all"):
        assert any(line.split()[:1] == [name] for line in lines)


def test_a_name_in_brackets_is_not_a_style(summary_of):
    def fill(run):
        run.meta(run="[bold]x[/]")
        run.open("w", "[red]", 0.0)
        run.books()

    text = rendered(summary_of(fill))
    assert "[bold]x[/] incomplete" in text
    assert "[red]" in text


def test_long_names_are_cut_and_figures_are_not(summary_of):
    def fill(run):
        run.open("w", "a-cluster-with-a-very-long-name", 0.0, usd_per_gpu_hour=83.79, gpus=8)
        run.open("v", "b", 0.0)
        run.end("w", EndCause.RELEASED, 40_000.0)
        run.books()

    text = rendered(summary_of(fill))
    assert "a-cluster-w…" in text
    assert "88 h 53 min" in text
    assert "$7,448.00" in text


def test_markdown_has_the_pages_tables(realistic):
    markdown = as_markdown(realistic)
    assert markdown.startswith("# frozenlake: finished\n")
    assert "| provider | leases | preempted |" in markdown
    assert "## Training steps" in markdown


@pytest.mark.parametrize("key", ["run", "outcome", "steps", "providers", "timeline", "turn_latency_s"])
def test_json_is_the_whole_summary(realistic, key):
    assert key in as_json(realistic)


@pytest.mark.parametrize(
    ("started_at", "words"),
    [("2026-11-20T14:03:59+0100", "2026-11-20 14:03 UTC+01:00"), ("2026-11-20", "2026-11-20 00:00"), ("noon", "noon")],
)
def test_times_read_to_the_minute(summary_of, started_at, words):
    assert tables.subtitle(summary_of(lambda run: run.meta(started_at=started_at))) == words
