"""What the documentation names: words have one meaning, links lead somewhere, and the README leads to every page."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("infra/**/*.md")])
_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@cache
def _text(page: Path) -> str:
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


@cache
def _anchors(page: Path) -> frozenset[str]:
    """As GitHub makes them of headings."""
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in _HEADING.findall(_text(page)))
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain)


def _links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Each link to this clone: as it is written, the file, and the heading there."""
    for link in _LINK.findall(_text(page)):
        if not link.startswith(("http://", "https://", "mailto:")):
            name, _, anchor = link.partition("#")
            yield link, (page.parent / name).resolve() if name else page, anchor


def test_links_lead_to_files_and_headings() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in PAGES
        for link, target, anchor in _links(page)
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target))
    ]
    assert lost == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {target for _, target, _ in _links(README)}
    assert [page.name for page in PAGES if page.parent == ROOT / "docs" and page not in linked] == []


def test_the_glossary_gives_each_word_one_meaning() -> None:
    lines = GLOSSARY.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    words = [word for line in lines[6:] for word in line.split("|")[1].strip().split(", ")]
    assert len(words) > 30
    assert len(set(words)) == len(words)
