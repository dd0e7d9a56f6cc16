"""The suite that every engine passes, on every one that is installed here."""

from elastic.testing.conformance import *  # noqa: F403
