"""The page of a realistic run, and what a name may not do to it."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.report import document, write_html
from elastic.report.document import Chart, Concern, Figure, LinkedFile, Page, Table
from elastic.report.html import as_html
from elastic.report.svg import Label, LaneRow, Lanes, Mark, Plot, Plots, Scale, Span
from elastic.system.plain_values import printable
from tests.seeds import examples

HOSTILE = "</title></style><script>alert(1)</script>\"'><img src=x onerror=alert(1)/>{{ 7 * 7 }}{% raw %}&lt;"


def test_every_picture_and_table_is_there(realistic):
    page = ElementTree.fromstring(as_html(realistic).removeprefix("<!DOCTYPE html>"))
    figures = list(page.iter("figure"))
    assert [len(list(figure.iter("svg"))) for figure in figures] == [1] * len(figures)
    labels = [picture.get("aria-label") for picture in page.iter("svg")]
    assert all(labels)
    drawn = {figure.findtext("h2") for figure in figures}
    assert {"Where the GPU time went", "Workers", "Cost by provider", "Weight updates"} <= drawn
    titles = {"".join(title.itertext()) for title in page.iter("h2")}
    assert {"Providers", "GPU time by account", "Moved turns", "Latency", "Training steps"} <= titles
    marks = [mark for mark in page.iter("path") if mark.get("class") == "event-mark"]
    assert len(marks) == 2 * realistic.total.preemptions + 1, "two a preemption, one in the legend"


def test_everything_drawn_is_on_the_drawing(realistic):
    page = ElementTree.fromstring(as_html(realistic).removeprefix("<!DOCTYPE html>"))
    for picture in page.iter("svg"):
        _, _, width, height = map(float, picture.get("viewBox", "").split())
        for element in picture.iter():
            for x in (element.get("x"), element.get("x1"), element.get("x2"), element.get("cx")):
                assert x is None or 0 <= float(x) <= width
            for y in (element.get("y"), element.get("y1"), element.get("y2"), element.get("cy")):
                assert y is None or 0 <= float(y) <= height
            for x, y in re.findall(
                r"(-?[\d.]+),(-?[\d.]+)", element.get("d", "") if "h9" not in element.get("d", "") else ""
            ):
                assert 0 <= float(x) <= width
                assert 0 <= float(y) <= height


def test_a_name_is_text_and_nothing_else(summary_of):
    def fill(run):
        run.meta(run="<script>alert('&')</script>", status='failed: "<b>\x1b[31m"')

    page = as_html(summary_of(fill))
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;" in page
    assert "\x1b" not in page


def page_of(text: str) -> ElementTree.Element:
    """A page with a chart of each kind, all of whose texts are this one."""
    x = Scale(0.0, 10.0, 50.0, 300.0)
    plot = Plot(
        x=x,
        y=Scale(0.0, 1.0, 120.0, 20.0),
        levels=[(0.5, text)],
        title=text,
        rules=[(3.0, text)],
        labels=[Label(60.0, 30.0, text)],
    )
    plots = Plots(
        label=text,
        width=400.0,
        plots=[plot],
        ticks=[(5.0, text)],
        title=text,
        legend=[("bar", text)],
        events=[(4.0, text)],
    )
    row = LaneRow(
        name=text,
        spans=[Span(1.0, 2.0, "idle", text, text)],
        marks=[Mark(2.0, "event-mark", "triangle", text)],
        note=text,
        title=text,
    )
    lanes = Lanes(
        label=text,
        width=400.0,
        x=x,
        rows=[row],
        pitch=20.0,
        height=14.0,
        ticks=[(5.0, text)],
        axis_title=text,
        legends=[(text, [("idle", text)])],
    )
    html = document.as_html(
        Page(
            title=text, heading=text, outcome=text, subtitle=text, concerns=[Concern(text, text, text)],
            warnings=[text], headline=[Figure(text, text, text)],
            charts=[Chart(title=text, picture=picture, caption=text) for picture in (plots, lanes, None)],
            tables=[Table(title=text, header=[text, text], rows=[[text, text]], note=text)],
            inspect_links=[LinkedFile(text, "log.json")],
        )
    )  # fmt: skip
    return ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))


@settings(max_examples=examples(5, 50), deadline=None)
@given(st.text(min_size=1, max_size=60) | st.just(HOSTILE))
def test_no_text_becomes_markup(text: str) -> None:
    page, plain = page_of(text), page_of("x" * len(text))
    assert [(one.tag, sorted(one.attrib)) for one in page.iter()] == [
        (one.tag, sorted(one.attrib)) for one in plain.iter()
    ]
    assert page.findtext("body//figcaption") == page.findtext("body//td") == printable(text)


def test_it_says_what_to_beware_of(summary_of):
    def fill(run):
        run.meta(status="failed: no capacity", config='{"engine": {"pacing": {"decode_step_s": {}}}}')
        run.sample(1.0, {}, cpu_share=0.97, late_share=0.12)

    page = as_html(summary_of(fill))
    assert "The run failed: no capacity." in page
    assert "12.0 % of the paced iterations took longer than modelled" in page


def test_a_busy_machine_is_no_reason_where_engines_kept_their_speed(summary_of):
    def fill(run):
        run.meta(config='{"engine": {"pacing": {"decode_step_s": {}}}}')
        run.sample(1.0, {}, cpu_share=0.97, late_share=0.0)

    assert "below the speed they model" not in as_html(summary_of(fill))


def test_writing(realistic, tmp_path):
    write_html(realistic, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == as_html(realistic)
    with pytest.raises(OSError, match="missing"):
        write_html(realistic, tmp_path / "missing" / "report.html")


@pytest.mark.parametrize(
    ("header", "wide"),
    [
        (["who", "count", "why"], False),
        (["who", "count", "others would have ended its turn long ago"], True),
        (["provider", *(["tokens/s"] * 6)], True),
    ],
)
def test_a_table_takes_the_whole_width_where_half_of_it_cannot_hold_its_columns(header: list[str], wide: bool) -> None:
    assert Table(title="t", header=header, rows=[["a", *["1"] * (len(header) - 1)]]).wide == wide
