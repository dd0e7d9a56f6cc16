"""What is on a relay: the versions that can be pulled, and how old ones come off it."""

from collections.abc import Callable, Collection, Iterable

from elastic.weights.plan import PublishedUpdate, needed_from
from elastic.weights.records import (
    NOTHING,
    base_of,
    begun_base_of,
    delta_prefix,
    keyframe_key,
    manifest_key,
    version_of,
    version_prefix,
)
from elastic.weights.relay import Relay

VERSIONS = "versions/"
"""All keys of versions begin with this."""


def published_updates(relay: Relay) -> list[PublishedUpdate]:
    """Returns everything that can be pulled, by version."""
    found = updates_in(relay.list_keys(VERSIONS))
    return sorted(found, key=lambda update: (update.version, -1 if update.base is None else update.base))


def updates_in(keys: Iterable[str], coming: int | None = None) -> set[PublishedUpdate]:
    """Returns the updates of which these keys are: those that are complete, and those of version `coming` that are
    still being published.
    """
    return {update for key in keys if (update := _update_of(key, coming)) is not None}


def published_versions(relay: Relay) -> list[int]:
    """Versions that can be pulled, ascending."""
    return sorted({update.version for update in published_updates(relay)})


def collect_garbage(
    relay: Relay, keep_versions: int, pulled: Collection[int] = (), updates: Collection[PublishedUpdate] | None = None
) -> list[int]:
    """Deletes old versions, and returns them.

    Kept are the newest `keep_versions`, the ones being `pulled`, and all that a newcomer needs for them. `updates` are
    the published updates: those that the relay lists, unless the publisher passes its own. A worker whose path from its
    own version is cut pulls a keyframe instead.
    """
    if keep_versions < 1:
        raise ValueError(f"keep_versions: must be at least 1 (found {keep_versions})")
    updates = published_updates(relay) if updates is None else updates
    published = sorted({update.version for update in updates})
    if not published:
        return []
    wanted = {*published[-keep_versions:], *(version for version in pulled if version in published)}
    kept = wanted | needed_from(updates, wanted)
    return _delete(relay, lambda version: version not in kept and version < published[-1])


def discard_all(relay: Relay) -> list[int]:
    """Deletes every version, complete or not: its trainer is gone, and workers no longer accept its signature."""
    return _delete(relay, lambda version: True)


def withdraw_keyframe(relay: Relay, version: int) -> None:
    """Delete the keyframe of `version`, if there is one, so that another can be put in its place."""
    begins = manifest_key(version), keyframe_key(version), delta_prefix(version, NOTHING)
    _delete_all(relay, (key for key in relay.list_keys(version_prefix(version)) if key.startswith(begins)))


def _update_of(key: str, coming: int | None) -> PublishedUpdate | None:
    version = version_of(key)
    if version is None:
        return None
    if key == manifest_key(version):
        return PublishedUpdate(version, None)
    base = base_of(key)
    if base is None and version == coming:
        base = begun_base_of(key)
    return None if base is None else PublishedUpdate(version, None if base == NOTHING else base)


def _delete(relay: Relay, condemned: Callable[[int], bool]) -> list[int]:
    keys = [(version, key) for key in relay.list_keys(VERSIONS) if (version := version_of(key)) is not None]
    doomed = [(version, key) for version, key in keys if condemned(version)]
    _delete_all(relay, (key for _, key in doomed))
    return sorted({version for version, _ in doomed})


def _delete_all(relay: Relay, keys: Iterable[str]) -> None:
    """Manifests go before the rest of their version, so that whatever has one can still be pulled."""
    for key in sorted(keys, key=lambda key: (version_of(key), not key.endswith(".json"), key)):
        relay.delete(key)
