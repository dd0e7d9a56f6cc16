"""One name, one thing: what stands in no other module by the same name."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("elastic", "functions", "providers", "policies", "traces", "benchmarks")
CLASS = re.compile(r"^ *class (\w+)[\[(:]", re.MULTILINE)


def test_no_class_has_the_name_of_another() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(modules) > 200
    found = Counter(name for path in modules for name in CLASS.findall(path.read_text(encoding="utf-8")))
    assert len(found) > 1000
    assert [name for name, times in found.items() if times > 1] == []
