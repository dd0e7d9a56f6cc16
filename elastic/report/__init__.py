"""What a run came to: its journal summarised, as a page, a terminal table, Markdown or JSON."""

from elastic.report.agreement import source_words, sources_of
from elastic.report.comparison import Comparison, compare
from elastic.report.evaluations import evaluation_words
from elastic.report.html import as_html, inspect_logs, write_html
from elastic.report.summary import Summary, summarise
from elastic.report.text import as_json, as_markdown, causes, closing_table, comparison_table
