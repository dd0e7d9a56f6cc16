"""What the machine under a worker says of its own end, told to the orchestrator."""

import asyncio
import os
from collections.abc import Callable
from typing import TypeAlias

import structlog

from providers.ec2_user_data import NOTICES_VARIABLE

log = structlog.get_logger(__name__)

POLL_S = 2.0
"""Interval of polling for notices. EC2 asks for five seconds at the most, and gives two minutes of notice."""

Tell: TypeAlias = Callable[[float | None, str], None]
"""Called with the seconds left (None: the end has only become likelier) and the reason."""


async def watch_instance(tell: Tell, poll_s: float = POLL_S) -> None:
    """Report each notice once, for as long as the worker lives. A service that does not answer is asked again."""
    if os.environ.get(NOTICES_VARIABLE) != "ec2":
        return
    # An HTTP client takes long to import, and most workers are not on EC2.
    from providers.ec2_metadata import InstanceMetadata, MetadataError

    silent, told = False, set[str]()
    async with InstanceMetadata.of_environment() as metadata:
        while True:
            try:
                notices = await metadata.notices()
            except MetadataError as error:
                if not silent:
                    log.warning("no notice of this instance's end can be read", error=str(error))
                silent = True
            else:
                silent = False
                for notice in notices:
                    if notice.key not in told:
                        told.add(notice.key)
                        tell(notice.left_s, notice.reason)
            await asyncio.sleep(poll_s)
