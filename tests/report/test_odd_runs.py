"""Whatever a journal holds, the summary keeps its invariants and every format can be read."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from elastic.core.ledger import NANO_USD_PER_USD
from elastic.core.types import NS_PER_S, SHARED_ACCOUNTS, Account, EndCause
from elastic.report import as_json, as_markdown, closing_table, tables
from elastic.report.html import as_html
from elastic.runtime.status import ProviderStatus
from tests.seeds import examples

HOSTILE = st.text("ab-1 <>&\"'|*_[]`\\$\n\t\x00\x1b\x7f\u202e\ufffe日é;/]", min_size=1, max_size=12)
SECONDS = st.floats(0.0, 200_000.0).map(lambda value: round(value, 3))
COUNTS = st.integers(0, 10**9)
REWARDS = st.none() | st.sampled_from((0.0, 1.0, -0.5, math.nan))
NOT_A_NUMBER = re.compile(r"\b(nan|inf|none)\b", re.IGNORECASE)


@st.composite
def book(draw):
    """Worker, provider, opening, price, GPUs, reports (after, accounts) and an end, or none after a crash."""
    return {
        "provider": draw(HOSTILE | st.sampled_from(("trainer", "spot"))),
        "at_s": draw(SECONDS),
        "usd_per_gpu_hour": draw(st.floats(0.0, 100.0)),
        "gpus": draw(st.integers(1, 8)),
        "reports": draw(st.lists(st.tuples(SECONDS, st.dictionaries(st.sampled_from(Account), SECONDS)), max_size=3)),
        "end": draw(st.none() | st.tuples(st.sampled_from(EndCause), SECONDS, st.booleans())),
    }


@st.composite
def odd_runs(draw):
    """A function that fills a journal with what no run in its right mind would leave."""
    meta = draw(st.dictionaries(st.sampled_from(("run", "seed", "started_at", "providers")), HOSTILE))
    status = draw(st.none() | st.sampled_from(("finished", "failed", "running")) | HOSTILE.map("failed: {}".format))
    books = draw(st.lists(book(), max_size=5))
    names = st.sampled_from([b["provider"] for b in books] or ["spot"]) | HOSTILE
    counters = st.builds(ProviderStatus, ready=st.integers(0, 9), booting=st.integers(0, 9), tokens=COUNTS)
    samples = draw(
        st.lists(st.tuples(SECONDS, st.dictionaries(names, counters, max_size=3), st.floats(0, 1)), max_size=6)
    )
    turns = draw(st.lists(st.tuples(SECONDS, st.none() | SECONDS, SECONDS), max_size=5))
    groups = draw(st.lists(st.tuples(st.lists(REWARDS, max_size=4), st.booleans(), HOSTILE), max_size=5))
    steps = draw(st.lists(st.tuples(SECONDS, SECONDS), max_size=4))
    moves = draw(st.lists(st.tuples(SECONDS, SECONDS, st.integers(0, 99)), max_size=4))
    pulls = draw(st.lists(st.tuples(SECONDS, COUNTS, SECONDS, SECONDS, st.just("") | HOSTILE), max_size=4))

    def fill(run):
        run.meta(**meta)
        if status is not None:
            run.meta(status=status)
        for n, one in enumerate(books):
            _write_book(run, f"w{n}", **one)
        run.books()
        for at_s, providers, cpu_share in sorted(samples, key=lambda sample: sample[0]):
            run.sample(at_s, providers, cpu_share)
        for n, (at_s, first_s, length_s) in enumerate(turns):
            run.turn(f"t{n}", at_s, None if first_s is None else at_s + first_s, at_s + (first_s or 0.0) + length_s)
        for n, (rewards, trained, cause) in enumerate(groups):
            run.group(n % 2, n, rewards, trained=trained, cause=cause)
        for n, (at_s, duration_s) in enumerate(steps):
            run.step(n, at_s, duration_s)
        for n, (left_s, waited_s, kept) in enumerate(moves):
            run.move(f"t{n}", f"w{n}", left_s, left_s + waited_s, kept)
        for pull in pulls:
            run.pull(*pull)

    return fill


def _write_book(run, worker, provider, at_s, usd_per_gpu_hour, gpus, reports, end):
    run.open(worker, provider, at_s, usd_per_gpu_hour, gpus)
    for after_s, accounts_s in reports:
        at_s += after_s
        run.report(worker, accounts_s, at_s)
    if end is not None:
        cause, after_s, clean = end
        run.end(worker, cause, at_s + after_s, clean)


@settings(max_examples=examples(5, 25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fill=odd_runs())
def test_the_summary_adds_up_and_every_format_can_be_read(summary_of, fill):
    books = []

    def filling(run):
        fill(run)
        books.append(run.ledger)

    summary = summary_of(filling)
    adds_up(summary, books[0])
    page_is_well_formed_and_stands_alone(as_html(summary))
    texts_can_be_read(summary)


def adds_up(summary, ledger):
    end_ns = round(summary.wall_s * NS_PER_S)
    assert summary.ledger_imbalance_ns == ledger.imbalance_ns() == 0
    bill = ledger.bill_nano_usd(end_ns)
    for name, usage in (*summary.providers.items(), ("", summary.total)):
        assert sum(usage.accounts_s.values()) == pytest.approx(usage.gpu_s)
        assert {account.value for account in Account} >= set(usage.accounts_s) >= set(Account) - SHARED_ACCOUNTS
        assert min(usage.accounts_s.values()) >= 0.0
        for share in (usage.overhead_share, usage.preempted_share):
            assert 0.0 <= share <= 1.0
        nano_usd = bill.get(name, 0) if name else sum(bill.values())
        assert usage.usd == pytest.approx(nano_usd / NANO_USD_PER_USD)
    durations_ns = [
        ((end_ns if b.closed_ns is None else b.closed_ns) - b.opened_ns) * b.gpus for b in ledger.books.values()
    ]
    assert summary.total.gpu_s == pytest.approx(sum(durations_ns) / NS_PER_S)
    for share in (summary.unattributed_share, summary.cpu_saturated_share, summary.success_first, summary.success_last):
        assert share is None or 0.0 <= share <= 1.0
    assert set(summary.timeline.providers) <= set(summary.providers)
    for series in summary.timeline.providers.values():
        assert len(series.tokens_per_s) == len(summary.timeline.step_edges_s) - 1
        assert len(series.up_workers) == len(series.usd) == len(summary.timeline.edges_s) - 1


def page_is_well_formed_and_stands_alone(page):
    elements = list(ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>")).iter())
    assert not {element.tag for element in elements} & {"script", "link", "img", "iframe", "object", "image", "use"}
    attributes = {name for element in elements for name in element.attrib}
    assert not attributes & {"src", "srcset", "onload", "onclick"}
    places = [element.attrib["id"] for element in elements if "id" in element.attrib]
    assert len(places) == len(set(places))
    assert {element.attrib["href"] for element in elements if "href" in element.attrib} <= {f"#{at}" for at in places}
    (style,) = (element.text or "" for element in elements if element.tag == "style")
    assert style
    assert "url(" not in style
    assert "@import" not in style
    words = [element.text or "" for element in elements if element.tag != "style"]
    assert not NOT_A_NUMBER.search(" ".join(words))
    assert not NOT_A_NUMBER.search(" ".join(re.findall(r' d="[^"]*"| [xy12]+="[^"]*"', page)))


def texts_can_be_read(summary):
    assert json.loads(json.dumps(as_json(summary), allow_nan=False))["total"]["tokens"] == summary.total.tokens

    markdown = as_markdown(summary)
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in markdown.splitlines() if line.startswith("| ")}
    assert columns <= {len(table.header) + 1 for table in tables.tables(summary)}
    assert not NOT_A_NUMBER.search(markdown)

    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(closing_table(summary))
    assert all(line.isprintable() for line in capture.get().splitlines())
    assert not NOT_A_NUMBER.search(capture.get())
