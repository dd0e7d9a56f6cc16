"""What tests of clouds take over from those of the command line."""

from tests.cli.conftest import config, elastic, refused

__all__ = ["config", "elastic", "refused"]
