"""What tests of clouds take over from those of the command line."""

from tests.cli.conftest import config, elastic

__all__ = ["config", "elastic"]
