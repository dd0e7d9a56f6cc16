"""Reads Prometheus' text format as its own parsers do, and refuses what these would."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)")
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


@dataclass
class Exposed:
    kind: str
    samples: list[Sample] = field(default_factory=list)

    def of(self, **labels: str) -> list[float]:
        return [one.value for one in self.samples if labels.items() <= one.labels.items()]


def exposed(text: str) -> dict[str, Exposed]:
    """Families by name."""
    assert text.endswith("\n")
    families: dict[str, Exposed] = {}
    name, seen = "", set[tuple[str, str]]()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert re.fullmatch(_NAME, name)
            assert name not in families, "a family is told in one piece"
        elif line.startswith("# TYPE "):
            _, _, typed, kind = line.split(" ")
            assert typed == name
            families[name] = Exposed(kind)
        else:
            matched = _SAMPLE.fullmatch(line)
            assert matched, line
            sample, labels, value = matched[1], matched[2] or "", float(matched[3])
            assert sample.removeprefix(name) in _SUFFIXES[families[name].kind], line
            assert (sample, labels) not in seen, "a series is told once"
            seen.add((sample, labels))
            families[name].samples.append(Sample(sample, _labels(labels), value))
    for name, family in families.items():
        assert (family.kind == "counter") is name.endswith("_total"), name
        if family.kind == "histogram":
            _check_histogram(name, family)
    return families


def _labels(text: str) -> dict[str, str]:
    found, at = {}, 0
    while at < len(text):
        matched = _LABEL.match(text, at)
        assert matched, text
        assert matched[1] not in found
        found[matched[1]] = matched[2].replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
        at = matched.end()
    return found


def _check_histogram(name: str, family: Exposed) -> None:
    series: dict[tuple, list[tuple[float, float]]] = {}
    for sample in family.samples:
        rest = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
        if sample.name == f"{name}_bucket":
            series.setdefault(rest, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name == f"{name}_count":
            assert series[rest][-1] == (float("inf"), sample.value)
    for buckets in series.values():
        assert buckets == sorted(buckets), "buckets are cumulative, and in order"
