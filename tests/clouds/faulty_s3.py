"""Between a client and a server that speaks S3: everything that goes wrong on the way, and what the server lacks."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

BODY = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>{message}</Message><RequestId>1</RequestId></Error>"""

NOT_HANDED_ON = {"connection", "content-length", "keep-alive", "transfer-encoding"}

REFUSALS = ((503, "SlowDown"), (500, "InternalError"), (503, "ServiceUnavailable"), (400, "RequestTimeout"))


class S3Answer(NamedTuple):
    status: int
    code: str
    headers: tuple[tuple[str, str], ...] = ()


class FaultyS3:
    """A proxy. Of its requests a `share` fails, of kinds that are drawn from the seed; or all of them by `answer`."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self.share = 0.0
        self.answer: S3Answer | None = None
        self.faults = 0
        self.upstream_port = port
        self._chance = random.Random(seed)
        self._lock = threading.Lock()

    def drawn(self) -> str:
        with self._lock:
            if self._chance.random() >= self.share:
                return ""
            self.faults += 1
            return self._chance.choice(("refused", "answer lost", "request lost", "torn"))

    def refusal(self) -> tuple[int, str]:
        with self._lock:
            return self._chance.choice(REFUSALS)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its URL, while it answers."""
        faulty = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:  # The client has gone.
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

            def handled(self) -> None:
                if self.headers.get("expect", "").lower() == "100-continue":
                    self.send_response_only(100)
                    self.end_headers()
                content = self.rfile.read(int(self.headers.get("content-length", 0)))
                fault = faulty.drawn()
                if fault == "request lost":
                    self.close_connection = True
                    return
                if faulty.answer is not None or fault == "refused":
                    told = faulty.answer or S3Answer(*faulty.refusal())
                    self.say(told.status, list(told.headers), BODY.format(code=told.code, message="as told").encode())
                    return
                status, headers, body = self.upstream(content)
                if fault == "answer lost":
                    self.close_connection = True
                    return
                self.say(status, headers, body, torn=fault == "torn")

            def upstream(self, content: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
                connection = HTTPConnection("127.0.0.1", faulty.upstream_port, timeout=60)
                try:
                    headers = {k: v for k, v in self.headers.items() if k.lower() not in {"connection", "expect"}}
                    connection.request(self.command, self.path, content, headers)
                    answer = connection.getresponse()
                    return answer.status, answer.getheaders(), answer.read()
                finally:
                    connection.close()

            def say(self, status: int, headers: list[tuple[str, str]], body: bytes, torn: bool = False) -> None:
                self.send_response_only(status)
                head = self.command == "HEAD"
                size = next((v for k, v in headers if k.lower() == "content-length"), "0") if head else str(len(body))
                for name, value in headers:
                    if name.lower() not in NOT_HANDED_ON:
                        self.send_header(name, value)
                if status != 204:
                    self.send_header("content-length", size)
                self.end_headers()
                if not head:
                    self.wfile.write(body[: len(body) // 2] if torn else body)
                self.close_connection |= torn

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handled

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        with Server(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}"
            finally:
                server.shutdown()
                thread.join(timeout=10)
