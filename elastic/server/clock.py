"""Times as people and programs read them."""

from datetime import UTC, datetime


def rfc3339(unix_us: int | None) -> str | None:
    """A moment in UTC, to the second; None stays None."""
    if unix_us is None:
        return None
    return datetime.fromtimestamp(unix_us // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
