"""The colours of reports and pages: texts can be read, and lines told apart by people who see few colours or none."""

import itertools
import re

import pytest

from elastic.report.charts import provider_classes
from elastic.report.document import colours

LIGHT, DARK = (dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", part)) for part in colours().split("@media screen"))
SCHEMES = {"light": LIGHT, "dark": LIGHT | DARK}
SIGHTS = {
    "all colours": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "deuteranopia": ((0.3673, 0.8606, -0.228), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
    "protanopia": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.052)),
    "tritanopia": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}
"""How linear red, green and blue are seen, after Machado, Oliveira and Fernandes (2009)."""
TEXT, PICTURE = 4.5, 3.0
"""The least contrasts that WCAG 2 asks for."""
APART = 10.0
"""Of CIE 1976: what is seen at once, in lines that do not touch."""
Triple = tuple[float, float, float]


def linear(colour: str) -> Triple:
    found = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in found)
    return red, green, blue


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def lab(seen: Triple) -> Triple:
    red, green, blue = (min(1.0, max(0.0, one)) for one in seen)
    told = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883,
    )
    x, y, z = (one ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116 for one in told)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen_by(sight: str, colour: str) -> Triple:
    red, green, blue = (sum(part * one for part, one in zip(row, linear(colour), strict=True)) for row in SIGHTS[sight])
    return lab((red, green, blue))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_texts_and_lines_stand_out_from_the_paper(scheme: str) -> None:
    found = SCHEMES[scheme]
    for name in ("ink", "muted", "accent", "good", "bad", "warn"):
        assert contrast(found[name], found["paper"]) >= TEXT, name
    for number in range(9):
        assert contrast(found[f"provider-{number}"], found["paper"]) >= PICTURE, number
    for number in range(5):
        assert contrast(found["ink"], found[f"likely-{number}"]) >= TEXT, number


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_providers_are_told_apart_by_who_sees_few_colours(scheme: str, sight: str) -> None:
    for one, other in itertools.combinations(range(9), 2):
        first, second = (seen_by(sight, SCHEMES[scheme][f"provider-{number}"]) for number in (one, other))
        apart = sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5
        assert apart >= APART, (one, other)


def test_a_name_has_its_colour_in_every_report_and_no_two_have_the_same_while_there_are_enough() -> None:
    alone = provider_classes(["acme"])["acme"]
    assert (
        provider_classes(["trainer", "zeta", "acme", "spot"])["acme"]
        == provider_classes(["acme", "ray"])["acme"]
        == alone
    )
    assert provider_classes(["spot", "trainer"]) == {"spot": "provider-3", "trainer": "provider-0"}
    several = [f"cloud-{number}" for number in range(9)]
    assert len(set(provider_classes(several).values())) == 9
    assert provider_classes(several) == provider_classes(several[::-1])
    assert set(provider_classes([*several, "one more"]).values()) == {f"provider-{slot}" for slot in range(9)}
