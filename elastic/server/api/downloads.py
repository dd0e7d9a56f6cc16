"""Downloads of files, whole or in the ranges that are asked for."""

import os
from typing import BinaryIO

from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from elastic.server.problems import ApiProblem

RANGES = "allowed: bytes=FIRST-LAST, both within the file"


class Download(FileResponse):
    """Answers with a file that has been opened, and closes it. Raises `ApiProblem` for a `Range` that is none."""

    def __init__(self, file: BinaryIO, filename: str) -> None:
        self._file = file
        path, status = f"/proc/self/fd/{file.fileno()}", os.fstat(file.fileno())
        super().__init__(path, media_type="application/octet-stream", filename=filename, stat_result=status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def checked(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._refuse_range(message["status"])
            await send(message)

        try:
            await super().__call__(scope, receive, checked)
        finally:
            self._file.close()

    def _refuse_range(self, status: int) -> None:
        """Starlette itself would answer in plain text."""
        if status == 416:
            size = os.fstat(self._file.fileno()).st_size
            headers = {"content-range": f"bytes */{size}"}
            raise ApiProblem("invalid-range", f"range: the file has {size} bytes; {RANGES}", headers=headers)
        if status == 400:
            raise ApiProblem("invalid-request", f"range: is none; {RANGES}")
