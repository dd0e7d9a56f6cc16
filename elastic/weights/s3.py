"""A relay in an object store that speaks S3: AWS's own, Cloudflare R2, MinIO.

- Blobs are objects under a prefix of one bucket. A put is conditional (`If-None-Match: *`), so that of several writers
  one wins, and an object is there whole or not at all: large blobs go up in parts, which appear together.
- The service checks a CRC32 of every part that arrives. What workers pull they verify themselves, by the manifest.
- Who may use the bucket is for the usual chain of credentials to say (environment, profile, instance or task role), on
  the trainer's host and on each worker's. Workers believe what the trainer has signed.
"""

import importlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from elastic.protocol.proxies import proxies_of_boto
from elastic.weights.blobs import Buffer, check_key, pieces
from elastic.weights.errors import BlobConflict, BlobNotFound, RelayError, RelayUnavailable

OPTIONS = ("endpoint_url", "profile", "region")
"""What a URL's query may say."""

PART_BYTES = 8 << 20
"""Larger blobs are put in parts, and read in ranges, of this size. S3 takes 10,000 parts: blobs of up to 78 GiB."""

TRANSFERS = 8
"""Parts or ranges of this process under way at once."""

CONNECT_TIMEOUT_S, SILENCE_TIMEOUT_S, ANSWER_TIMEOUT_S = 5.0, 10.0, 60.0
"""To connect, the longest pause within a transfer, and the longest time for a part, however steadily it trickles."""

ATTEMPTS = 3
"""The attempts of a request by botocore. A caller with more patience asks again (`elastic.weights.waiting`)."""

CONFLICTS = 5
"""How often a put begins again since another is under way, or the blob that was there is deleted meanwhile."""

_ABSENT = {"404", "NoSuchKey", "NotFound"}
_TAKEN = {"412", "PreconditionFailed"}
_CONTESTED = {"409", "ConditionalRequestConflict", "NoSuchUpload"}
_PAST_THE_END = {"416", "InvalidRange"}
_AGAIN = {"BadDigest", "IncompleteBody", "InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown"} | {
    "Throttling",
    "ThrottlingException",
    "XAmzContentChecksumMismatch",
}
_CREDENTIALS = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired"}
_ELSEWHERE = {"301", "307", "400", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"} | {
    "PermanentRedirect",
    "TemporaryRedirect",
}


class S3Relay:
    """`elastic.weights.relay.Relay` at `s3://BUCKET/PREFIX?region=…&endpoint_url=…&profile=…`. Threads may share it.

    The environment's `AWS_ENDPOINT_URL_S3`, `AWS_REGION` and the like count as everywhere. Needs the extra `aws`.
    """

    def __init__(self, url: str, token: str | None = None, anchor: str = "", *, part_bytes: int = PART_BYTES) -> None:
        parts = urlsplit(url)
        self._url = url
        self._part_bytes = part_bytes
        self._bucket = parts.netloc
        self._prefix = f"{parts.path.strip('/')}/".lstrip("/")
        self._options = dict(parse_qsl(parts.query))
        unknown = sorted(self._options.keys() - set(OPTIONS))
        if unknown or not self._bucket:
            what = f"unknown option {unknown[0]!r}" if unknown else "no bucket"
            raise RelayError(
                f"relay {url}: {what}; expected s3://BUCKET/PREFIX, and of ?name=value&… {', '.join(OPTIONS)}"
            )
        self._opening = threading.Lock()
        self._client: Any = None
        self._executor = ThreadPoolExecutor(TRANSFERS, thread_name_prefix="s3")

    def put(self, key: str, *parts: Buffer) -> None:
        name = self._name(key)
        large = sum(memoryview(part).nbytes for part in parts) > self._part_bytes
        for _ in range(CONFLICTS):
            with self._translated("PutObject", key):
                try:
                    if large and self._is_there(name):
                        return self._compare(key, name, parts)
                    put = self._put_in_parts if large else self._put_at_once
                    return put(name, parts)
                except _botocore().ClientError as error:
                    if _code(error) not in _TAKEN | _CONTESTED:
                        raise
                    if _code(error) in _TAKEN:
                        with suppress(BlobNotFound):
                            return self._compare(key, name, parts)
        raise RelayUnavailable(f"{self._url}: {key}: others put or delete it all the time")

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        name = self._name(key)
        # HTTP has no empty range.
        wanted = None if length is None else max(length, 1)
        most = self._part_bytes
        with self._translated("GetObject", key):
            first, total = self._range(name, start, most if wanted is None else min(wanted, most))
            end = total if wanted is None else min(start + wanted, total)
            begins = range(start + len(first), end, most)
            rest = self._executor.map(lambda begin: self._range(name, begin, min(most, end - begin))[0], begins)
            return b"".join([first, *rest])[:length] if begins else first[:length]

    def list_keys(self, prefix: str = "") -> list[str]:
        with self._translated("ListObjectsV2", prefix):
            pages = self._opened().get_paginator("list_objects_v2")
            found = pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
            names = [entry["Key"] for page in found for entry in page.get("Contents", ())]
        return sorted(name.removeprefix(self._prefix) for name in names)

    def delete(self, key: str) -> None:
        with self._translated("DeleteObject", key):
            self._opened().delete_object(Bucket=self._bucket, Key=self._name(key))

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
        if self._client is not None:
            self._client.close()

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _opened(self) -> Any:
        with self._opening:
            if self._client is None:
                self._client = self._open()
        return self._client

    def _open(self) -> Any:
        try:
            boto3, config = importlib.import_module("boto3"), importlib.import_module("botocore.config")
        except ImportError as error:
            raise RelayError(
                f"relay {self._url}: needs boto3; pip install -e '.[aws]' in a clone of elastic"
            ) from error
        session = boto3.session.Session(
            profile_name=self._options.get("profile"), region_name=self._options.get("region")
        )
        return session.client(
            "s3",
            endpoint_url=self._options.get("endpoint_url"),
            config=config.Config(
                proxies=proxies_of_boto(self._options.get("endpoint_url")),
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=SILENCE_TIMEOUT_S,
                max_pool_connections=TRANSFERS + 4,
                retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            ),
        )

    def _put_at_once(self, name: str, parts: Sequence[Buffer]) -> None:
        self._opened().put_object(
            Bucket=self._bucket, Key=name, Body=b"".join(parts), ChecksumAlgorithm="CRC32", IfNoneMatch="*"
        )

    def _put_in_parts(self, name: str, parts: Sequence[Buffer]) -> None:
        of = {"Bucket": self._bucket, "Key": name}
        client = self._opened()
        upload = of | {"UploadId": client.create_multipart_upload(**of, ChecksumAlgorithm="CRC32")["UploadId"]}
        slots = threading.Semaphore(TRANSFERS)

        def put_part(number: int, content: bytes) -> dict[str, Any]:
            try:
                answer = client.upload_part(**upload, PartNumber=number, Body=content, ChecksumAlgorithm="CRC32")
            finally:
                slots.release()
            # Not every store gives the checksum back.
            told = {field: answer[field] for field in ("ETag", "ChecksumCRC32") if field in answer}
            return {"PartNumber": number, **told}

        sent: list[Future[dict[str, Any]]] = []
        try:
            for number, content in enumerate(pieces(parts, self._part_bytes), 1):
                slots.acquire()  # Pieces are copies: only as many as there are transfers.
                sent.append(self._executor.submit(put_part, number, content))
            done = [future.result() for future in sent]
            client.complete_multipart_upload(**upload, MultipartUpload={"Parts": done}, IfNoneMatch="*")
        except BaseException:
            wait(sent)  # A part that lands after the upload is aborted would stay.
            # Parts cost money until they are aborted. Where this fails, too, the bucket's lifecycle removes them.
            with suppress(*_failures()):
                client.abort_multipart_upload(**upload)
            raise

    def _is_there(self, name: str) -> bool:
        try:
            self._opened().head_object(Bucket=self._bucket, Key=name)
        except _botocore().ClientError as error:
            if _code(error) in _ABSENT:
                return False
            raise
        return True

    def _compare(self, key: str, name: str, parts: Sequence[Buffer]) -> None:
        """Raises `BlobConflict` where the object holds anything but `parts`."""
        begin = 0
        with self._translated("GetObject", key):
            for piece in chain(pieces(parts, self._part_bytes), (b"",)):  # At last: nothing may be left.
                found, _ = self._range(name, begin, max(len(piece), 1))
                if found != piece:
                    raise BlobConflict(f"{self._url}: {key} holds other content already; blobs are immutable")
                begin += len(piece)

    def _range(self, name: str, start: int, length: int) -> tuple[bytes, int]:
        """The bytes that there are, and the object's size. Beyond its end that is `start`."""
        try:
            end = start + length - 1
            answer = self._opened().get_object(Bucket=self._bucket, Key=name, Range=f"bytes={start}-{end}")
        except _botocore().ClientError as error:
            if _code(error) in _PAST_THE_END:
                return b"", start
            raise
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        content = bytearray()
        for chunk in answer["Body"].iter_chunks(1 << 20):
            content += chunk
            if time.monotonic() > deadline_s:
                raise RelayUnavailable(f"{self._url}: {name}: no complete answer within {ANSWER_TIMEOUT_S} s")
        total = answer.get("ContentRange", "").rpartition("/")[2]
        return bytes(content), int(total) if total.isdigit() else start + len(content)

    @contextmanager
    def _translated(self, action: str, key: str) -> Iterator[None]:
        """What boto3 raises, as what a relay does; `key` is the blob's, or a prefix."""
        try:
            yield
        except _failures() as error:
            code, headers = _code(error), _headers(error)
            where = f"relay {self._url}: {action} {key}".rstrip()
            if code in _ABSENT:
                raise BlobNotFound(f"{where}: no such blob") from error
            raise _told(error, code, headers, where, self._bucket) from error


def _told(error: Exception, code: str, headers: Mapping[str, str], where: str, bucket: str) -> RelayError:
    """What to raise instead of `error`, with what to do about it."""
    exceptions = _botocore()
    region = headers.get("x-amz-bucket-region")
    if code == "NoSuchBucket":
        return RelayError(f"{where}: there is no bucket {bucket}; make it, or name another in weights.relay")
    if code == "RequestTimeTooSkewed":
        return RelayError(f"{where}: this machine's clock is off (the service's: {headers.get('date')}); set it")
    if code in _CREDENTIALS:
        return RelayError(f"{where}: the credentials are wrong or expired ({code}); renew them")
    if code in _ELSEWHERE and region:
        return RelayError(f"{where}: the bucket is in region {region}; add ?region={region} to weights.relay")
    if code in {"403", "AccessDenied", "AllAccessDisabled"}:
        return RelayError(
            f"{where}: access denied; is bucket {bucket} yours, and may these credentials do that, and s3:ListBucket, "
            "without which what is not there looks forbidden?"
        )
    if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        return RelayError(
            f"{where}: no credentials found ({error}); give this machine a role, or set AWS_PROFILE or a key, and name "
            "those variables in run.pass_env for the run's processes"
        )
    broken = exceptions.HTTPClientError, exceptions.ConnectionError, exceptions.IncompleteReadError, _unreadable()
    if code in _AGAIN or code.startswith("5") or isinstance(error, broken):
        return RelayUnavailable(f"{where}: {error}")
    return RelayError(f"{where}: {error}")


def _botocore() -> Any:
    return importlib.import_module("botocore.exceptions")


def _failures() -> tuple[type[Exception], ...]:
    """All that boto3 raises. Where it is not installed there is nothing to catch."""
    try:
        exceptions = _botocore()
    except ImportError:
        return ()
    return exceptions.ClientError, exceptions.BotoCoreError, _unreadable()


def _unreadable() -> type[Exception]:
    """An answer that is not the service's; botocore's only exception that is no `BotoCoreError`."""
    return importlib.import_module("botocore.parsers").ResponseParserError


def _code(error: Exception) -> str:
    return str((getattr(error, "response", None) or {}).get("Error", {}).get("Code", ""))


def _headers(error: Exception) -> dict[str, str]:
    return (getattr(error, "response", None) or {}).get("ResponseMetadata", {}).get("HTTPHeaders", {})
