"""Numbers as people read them: rounded to what matters, always with their unit, a dash where there is none."""

NONE = "–"
LONG_REWARD = 1e15
"""From here on rewards are told by a few digits and a power of ten."""
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float | None) -> str:
    """1,234 below ten thousand, then 12.3 k, 4.56 M."""
    if value is None:
        return NONE
    if abs(value) < 10_000:
        return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"
    return _scaled(value, "")


def si(value: float, unit: str = "") -> str:
    """Three digits with a prefix: 340, 3.4 k, 12 M."""
    return _scaled(value, unit) if abs(value) >= 1000 else f"{value:.3g} {unit}".rstrip()


def size(n_bytes: float | None) -> str:
    return NONE if n_bytes is None else si(n_bytes, "B")


def share(value: float | None) -> str:
    """0.0731 → 7.3 %; tiny but not zero → < 0.1 %."""
    if value is None:
        return NONE
    if 0 < value < 0.0005:
        return "< 0.1 %"
    return f"{100 * value:.0f} %" if value in (0.0, 1.0) else f"{100 * value:.1f} %"


def duration(value_s: float | None) -> str:
    """340 ms, 4.56 s, 5 min 12 s, 3 h 04 min."""
    if value_s is None:
        return NONE
    if value_s < 0.9995:
        return "0 s" if value_s == 0 else f"{1000 * value_s:.3g} ms"
    if value_s < 59.95:
        return f"{value_s:.3g} s"
    minutes, seconds = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(round(value_s / 60), 60)
    return f"{hours} h {minutes:02d} min"


def usd(value: float | None) -> str:
    """Cents where they matter, more digits where cents would hide the sum."""
    if value is None:
        return NONE
    if value == 0 or value >= 1:
        return f"${value:,.2f}"
    return f"${value:.3f}" if value >= 0.001 else f"${value:.2g}"


def reward(value: float | None) -> str:
    """A mean of rewards, which have no unit and any scale: 0.481, -4.250, 1,234.5, 2e+20."""
    if value is None:
        return NONE
    if abs(value) >= LONG_REWARD:
        return f"{value:.3g}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def shortened(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _scaled(value: float, unit: str) -> str:
    for scale, prefix in _SCALES:
        if abs(value) >= 0.9995 * scale:
            digits = f"{value / scale:.3g}"
            return f"{float(digits):g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()
