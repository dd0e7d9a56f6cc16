"""The hosted control API's client: typed, synchronous, on httpx. Needs no part of the server.

    with Client("http://127.0.0.1:7430", key) as api:
        run = api.submit(config, providers=["spot"])
        for event in api.events(run.id):
            print(event.type, event.data)

- A server that does not answer, or says that it cannot now, is asked again for `patience_s`, no sooner than it says
  (`Retry-After`). Submissions too, for they have an Idempotency-Key.
- Streams go on behind the last event that was received, however often the connection is lost.
- What the server refuses raises `ApiError`, with the problem that it named.
"""

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from elastic.protocol.api import (
    AccessRole,
    ApiKey,
    AuditEntry,
    AwsCredentials,
    Checkpoint,
    CreatedKey,
    CreatedWebhook,
    DryRun,
    HostedAgents,
    HostedJob,
    HostedLease,
    HostedPool,
    HostedRun,
    HostedRunDetail,
    HostedTrajectory,
    HostedTrajectoryDetail,
    HostedWorker,
    JobPlacement,
    JobSubmission,
    Listed,
    LogLine,
    Me,
    MemberChange,
    Metrics,
    ModalCredentials,
    NewKey,
    NewMember,
    NewOwnKey,
    NewProject,
    NewUpload,
    NewWebhook,
    Problem,
    Project,
    ProjectChange,
    ProjectCredentials,
    ProjectMember,
    ProjectQuota,
    ProjectSecret,
    ProviderChange,
    ProviderKind,
    QuotaChange,
    ResumeRequest,
    RetentionChange,
    RetentionPlan,
    RetentionPolicy,
    RunBudget,
    RunChange,
    RunEvent,
    SecretValue,
    ServerInfo,
    StopRequest,
    Submission,
    Upload,
    UploadFile,
    Webhook,
    WebhookChange,
    WebhookDelivery,
    revealed,
)
from elastic.protocol.http_clients import sync_client
from elastic.protocol.proxies import HttpSettingsError, through
from elastic.system.host import here

_DATA = TypeAdapter(dict[str, Any])
"""Of a stream's event."""
R = TypeVar("R", bound=BaseModel)

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
STREAM_SILENCE_S = 45.0
"""Three times what the server lets pass between two pings: then the connection is taken for lost."""
PATIENCE_S = 60.0
"""How long a server that does not answer is asked again: longer than one takes to start anew."""
RETRY_BASE_S, RETRY_MAX_S = 0.2, 5.0
_AGAIN = (502, 503, 504)
PAGE = 100


class ClientError(Exception):
    """The server could not be asked.

    ClientError
    ├── ServerUnreachable   no answer
    └── ApiError            the server says no, and why
    """


class ServerUnreachable(ClientError):
    pass


class ApiError(ClientError):
    """`problem.type` says what happened: `/problems/not-found`, and so on."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail or problem.title)
        self.problem = problem

    @property
    def kind(self) -> str:
        return self.problem.type.rpartition("/")[2]


class Client:
    """One server, as one key sees it. Threads may share it.

    `on_wait` is told why, whenever something is to be asked again.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        patience_s: float = PATIENCE_S,
        on_wait: Callable[[str], None] = lambda _: None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if not (key.isascii() and key.isprintable()):
            raise HttpSettingsError("API key: found characters that no key has; allowed: printable ASCII")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._on_wait = on_wait
        self._http = sync_client(
            self.url, by_proxy=True, transport=transport, base_url=self.url, headers=headers, timeout=timeout
        )
        self._through = "" if transport is not None else through(self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # The server

    def info(self) -> ServerInfo:
        return self._get("/v1", ServerInfo)

    def me(self) -> Me:
        return self._get("/v1/me", Me)

    def providers(self) -> list[ProviderKind]:
        return self._get("/v1/providers", Listed[ProviderKind]).data

    def change_provider(self, provider: str, change: ProviderChange) -> ProviderKind:
        return self._edit(f"/v1/providers/{provider}", ProviderKind, change)

    # Runs

    def submit(
        self,
        config: Mapping[str, Any],
        providers: Sequence[str] = (),
        *,
        idempotency_key: str = "",
        **options: Any,
    ) -> HostedRun:
        """Submit a run; `options` are the other fields of a `Submission`. Once this returns, the run is never lost."""
        body = Submission(config=dict(config), providers=list(providers), **options)
        return self._post("/v1/runs", HostedRun, body, idempotency_key)

    def dry_run(self, config: Mapping[str, Any], providers: Sequence[str] = (), **options: Any) -> DryRun:
        return self._post(
            "/v1/runs/dry-run", DryRun, Submission(config=dict(config), providers=list(providers), **options)
        )

    def runs(self, **filters: str | Sequence[str]) -> Iterator[HostedRun]:
        """Every run, newest first; `filters` are `phase`, one or several, and `project`."""
        return self._pages("/v1/runs", HostedRun, filters)

    def run(self, run: str) -> HostedRunDetail:
        return self._get(f"/v1/runs/{run}", HostedRunDetail)

    def change(self, run: str, change: RunChange) -> HostedRun:
        return self._edit(f"/v1/runs/{run}", HostedRun, change)

    def stop(self, run: str, *, force: bool = False) -> HostedRun:
        return self._post(f"/v1/runs/{run}/stop", HostedRun, StopRequest(force=force))

    def resume(self, run: str, *, steps: int | None = None, budget_usd: float | None = None) -> HostedRun:
        return self._post(f"/v1/runs/{run}/resume", HostedRun, ResumeRequest(steps=steps, budget_usd=budget_usd))

    def delete(self, run: str) -> None:
        self._request("DELETE", f"/v1/runs/{run}")

    def budget(self, run: str) -> RunBudget:
        return self._get(f"/v1/runs/{run}/budget", RunBudget)

    # Pools that jobs share

    def pools(self) -> list[HostedPool]:
        return self._get("/v1/pools", Listed[HostedPool]).data

    def pool(self, pool: str) -> HostedPool:
        return self._get(f"/v1/pools/{pool}", HostedPool)

    def drain_node(self, pool: str, node: str) -> HostedPool:
        """Let a node of another machine go, once its jobs are at their step's end."""
        return self._post(f"/v1/pools/{pool}/nodes/{node}/drain", HostedPool, None)

    def jobs(self, pool: str) -> Iterator[HostedJob]:
        """Every job of a pool, newest first."""
        return self._pages(f"/v1/pools/{pool}/jobs", HostedJob, {})

    def job(self, pool: str, job: str) -> HostedJob:
        return self._get(f"/v1/pools/{pool}/jobs/{job}", HostedJob)

    def submit_job(
        self,
        pool: str,
        config: Mapping[str, Any],
        providers: Sequence[str] = (),
        *,
        idempotency_key: str = "",
        **options: Any,
    ) -> HostedJob:
        """Submit a job; `options` are the other fields of a `JobSubmission`. Once this returns, it is never lost."""
        body = JobSubmission(config=dict(config), providers=list(providers), **options)
        return self._post(f"/v1/pools/{pool}/jobs", HostedJob, body, idempotency_key)

    def dry_run_job(
        self, pool: str, config: Mapping[str, Any], providers: Sequence[str] = (), **options: Any
    ) -> JobPlacement:
        body = JobSubmission(config=dict(config), providers=list(providers), **options)
        return self._post(f"/v1/pools/{pool}/jobs/dry-run", JobPlacement, body)

    def cancel_job(self, pool: str, job: str) -> HostedJob:
        return self._post(f"/v1/pools/{pool}/jobs/{job}/cancel", HostedJob, None)

    def resubmit_job(self, pool: str, job: str) -> HostedJob:
        return self._post(f"/v1/pools/{pool}/jobs/{job}/resubmit", HostedJob, None)

    # What they come to

    def metrics(self, run: str) -> Metrics:
        return self._get(f"/v1/runs/{run}/metrics", Metrics)

    def trajectories(self, run: str, **filters: Any) -> Iterator[HostedTrajectory]:
        """Those that are over; `filters` are those of the API: `step`, `group`, `truncated`, `order`, …."""
        return self._pages(f"/v1/runs/{run}/trajectories", HostedTrajectory, filters)

    def trajectory(self, run: str, trajectory: str) -> HostedTrajectoryDetail:
        return self._get(f"/v1/runs/{run}/trajectories/{trajectory}", HostedTrajectoryDetail)

    def agents(self, run: str, driver: str = "main") -> HostedAgents:
        return self._get(f"/v1/runs/{run}/agents?driver={driver}", HostedAgents)

    def workers(self, run: str) -> Iterator[HostedWorker]:
        return self._pages(f"/v1/runs/{run}/workers", HostedWorker, {})

    def leases(self, run: str) -> Iterator[HostedLease]:
        return self._pages(f"/v1/runs/{run}/leases", HostedLease, {})

    def checkpoints(self, run: str) -> Iterator[Checkpoint]:
        return self._pages(f"/v1/runs/{run}/checkpoints", Checkpoint, {})

    def report(self, run: str) -> dict[str, Any]:
        return self._request("GET", f"/v1/runs/{run}/report").json()

    def report_text(self, run: str, format: str) -> str:
        """The report as `html` or `markdown`."""
        return self._request("GET", f"/v1/runs/{run}/report?format={format}").text

    # Streams

    def events(self, run: str, after: str = "", *, follow: bool = True) -> Iterator[RunEvent]:
        """What happens in a run, behind the event of this id; until the run is over, or all that is there now."""
        final = "run.ended" if follow else ""
        for id_, kind, data in self._stream(f"/v1/runs/{run}/events", after, {"follow": _flag(follow)}, final):
            yield RunEvent(id=id_, type=kind, at_s=float(data.pop("at_s", 0.0)), data=data)

    def logs(
        self, run: str, after: str = "", *, source: str = "process", tail: int | None = None, follow: bool = True
    ) -> Iterator[LogLine]:
        """A log's lines; until the run is over, or all that is there now."""
        return self._lines(f"/v1/runs/{run}/logs", after, source, tail, follow=follow)

    def job_logs(
        self,
        pool: str,
        job: str,
        after: str = "",
        *,
        source: str = "process",
        tail: int | None = None,
        follow: bool = True,
    ) -> Iterator[LogLine]:
        """The lines of a log of a pool's job, as a run's."""
        return self._lines(f"/v1/pools/{_part(pool)}/jobs/{_part(job)}/logs", after, source, tail, follow=follow)

    def _lines(self, path: str, after: str, source: str, tail: int | None, *, follow: bool) -> Iterator[LogLine]:
        asked = {"follow": _flag(follow), "source": source, **({"tail": str(tail)} if tail is not None else {})}
        for id_, _, data in self._stream(path, after, asked, "log.ended" if follow else ""):
            if "line" in data:
                with _understood(self.url + path):
                    line = LogLine(id=id_, line=data["line"])
                yield line

    # Uploads

    def uploads(self) -> Iterator[Upload]:
        return self._pages("/v1/uploads", Upload, {})

    def upload(self, source: Path, name: str, project: str | None = None) -> Upload:
        """Send a file, or a directory's files. Repeated within a day, it goes on with what is missing.

        Raises `ValueError` for names that no upload has, and `OSError`.
        """
        found = upload_files(source)
        new = NewUpload(name=name, project=project, files=[file for file, _ in found])
        again = hashlib.sha256(new.model_dump_json().encode()).hexdigest()
        made = self._post("/v1/uploads", Upload, new, again)
        try:
            made = self._get(f"/v1/uploads/{made.id}", Upload)
        except ApiError as error:
            if error.kind != "not-found":
                raise
            made = self._post("/v1/uploads", Upload, new)  # What was made under that key is deleted by now.
        paths = {file.sha256: path for file, path in found}
        for digest in made.missing:
            made = self._send(f"/v1/uploads/{made.id}/files/{digest}", paths[digest])
        return made

    def fetch_upload(self, upload: str, target: Path) -> list[Path]:
        """Write an upload's files below a directory, whole and checked. Raises `OSError`."""
        written: list[Path] = []
        for file in self._get(f"/v1/uploads/{_part(upload)}", Upload).files:
            path = target / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            draft, seen = path.with_name(f".{path.name}.{secrets.token_hex(4)}"), hashlib.sha256()
            try:
                with self._http.stream("GET", f"/v1/uploads/{_part(upload)}/files/{file.sha256}") as answer:
                    if not answer.is_success:
                        answer.read()
                    _checked(answer, self._through)
                    with draft.open("xb") as output:
                        for chunk in answer.iter_bytes():
                            seen.update(chunk)
                            output.write(chunk)
                if seen.hexdigest() != file.sha256:
                    raise ServerUnreachable(f"{self.url}: {file.path} did not come whole")
                draft.replace(path)
            except httpx.HTTPError as error:
                raise ServerUnreachable(f"{self.url}: {self._words(error)}") from error
            finally:
                draft.unlink(missing_ok=True)
            written.append(path)
        return written

    def delete_upload(self, upload: str) -> None:
        self._request("DELETE", f"/v1/uploads/{_part(upload)}")

    def _send(self, path: str, file: Path) -> Upload:
        def sent() -> httpx.Response:
            with file.open("rb") as content:
                size = {"content-length": str(file.stat().st_size), "content-type": "application/octet-stream"}
                return self._http.put(path, content=content, headers=size)

        return _read(Upload, self._asked(sent))

    # Projects, keys

    def projects(self) -> list[Project]:
        return self._get("/v1/projects", Listed[Project]).data

    def create_project(self, name: str, unix_user: str | None = None) -> Project:
        return self._post("/v1/projects", Project, NewProject(name=name, unix_user=unix_user))

    def change_project(self, project: str, change: ProjectChange) -> Project:
        return self._edit(f"/v1/projects/{_part(project)}", Project, change)

    def members(self, project: str) -> Iterator[ProjectMember]:
        return self._pages(f"/v1/projects/{_part(project)}/members", ProjectMember, {})

    def add_member(self, project: str, email: str, role: AccessRole) -> ProjectMember:
        return self._post(f"/v1/projects/{_part(project)}/members", ProjectMember, NewMember(email=email, role=role))

    def change_member(self, project: str, member: str, role: AccessRole) -> ProjectMember:
        """Give a member another role, whatever theirs is now."""
        path = f"/v1/projects/{_part(project)}/members/{_part(member)}"
        return self._edit(path, ProjectMember, MemberChange(role=role))

    def remove_member(self, project: str, member: str) -> None:
        self._request("DELETE", f"/v1/projects/{_part(project)}/members/{_part(member)}")

    def quota(self, project: str) -> ProjectQuota:
        return self._get(f"/v1/projects/{_part(project)}/quota", ProjectQuota)

    def change_quota(self, project: str, change: QuotaChange) -> ProjectQuota:
        return self._edit(f"/v1/projects/{_part(project)}/quota", ProjectQuota, change)

    def retention(self, project: str | None) -> RetentionPolicy:
        """A project's policy, or the server's."""
        return self._get(_retention(project), RetentionPolicy)

    def change_retention(self, project: str | None, change: RetentionChange) -> RetentionPolicy:
        return self._edit(_retention(project), RetentionPolicy, change)

    def retention_plan(self, project: str | None) -> RetentionPlan:
        """What would go now."""
        return self._get(f"{_retention(project)}/dry-run", RetentionPlan)

    def keys(self) -> Iterator[ApiKey]:
        return self._pages("/v1/keys", ApiKey, {})

    def create_key(self, key: NewKey) -> CreatedKey:
        """The key's secret is in this answer and nowhere else."""
        return self._post("/v1/keys", CreatedKey, key)

    def revoke_key(self, key: str) -> None:
        self._request("DELETE", f"/v1/keys/{_part(key)}")

    def own_keys(self) -> Iterator[ApiKey]:
        """Yield the keys of the person who asks, in the project that they are in."""
        return self._pages("/v1/me/keys", ApiKey, {})

    def create_own_key(self, key: NewOwnKey) -> CreatedKey:
        return self._post("/v1/me/keys", CreatedKey, key)

    def revoke_own_key(self, key: str) -> None:
        self._request("DELETE", f"/v1/me/keys/{_part(key)}")

    # Secrets, webhooks

    def secrets(self, project: str) -> list[ProjectSecret]:
        """Without their values."""
        return self._get(f"/v1/projects/{_part(project)}/secrets", Listed[ProjectSecret]).data

    def put_secret(self, project: str, name: str, value: SecretValue) -> ProjectSecret:
        said = json.dumps({"value": value.value.get_secret_value()})
        path = f"/v1/projects/{_part(project)}/secrets/{_part(name)}"
        return _read(ProjectSecret, self._request("PUT", path, said))

    def delete_secret(self, project: str, name: str) -> None:
        self._request("DELETE", f"/v1/projects/{_part(project)}/secrets/{_part(name)}")

    def credentials(self, project: str) -> list[ProjectCredentials]:
        """Without their fields."""
        return self._get(f"/v1/projects/{_part(project)}/credentials", Listed[ProjectCredentials]).data

    def put_credentials(self, project: str, credentials: AwsCredentials | ModalCredentials) -> ProjectCredentials:
        vendor = "aws" if isinstance(credentials, AwsCredentials) else "modal"
        path = f"/v1/projects/{_part(project)}/credentials/{vendor}"
        return _read(ProjectCredentials, self._request("PUT", path, revealed(credentials)))

    def delete_credentials(self, project: str, vendor: str) -> None:
        self._request("DELETE", f"/v1/projects/{_part(project)}/credentials/{_part(vendor)}")

    def webhooks(self) -> Iterator[Webhook]:
        return self._pages("/v1/webhooks", Webhook, {})

    def create_webhook(self, webhook: NewWebhook) -> CreatedWebhook:
        """The secret of its signatures is in this answer and nowhere else."""
        return self._post("/v1/webhooks", CreatedWebhook, webhook)

    def change_webhook(self, webhook: str, change: WebhookChange) -> Webhook:
        return self._edit(f"/v1/webhooks/{_part(webhook)}", Webhook, change)

    def try_webhook(self, webhook: str) -> WebhookDelivery:
        headers = {"idempotency-key": secrets.token_hex(16)}
        return _read(WebhookDelivery, self._request("POST", f"/v1/webhooks/{_part(webhook)}/test", headers=headers))

    def deliveries(self, webhook: str) -> Iterator[WebhookDelivery]:
        return self._pages(f"/v1/webhooks/{_part(webhook)}/deliveries", WebhookDelivery, {})

    def delete_webhook(self, webhook: str) -> None:
        self._request("DELETE", f"/v1/webhooks/{_part(webhook)}")

    # The audit log

    def audit(self) -> Iterator[AuditEntry]:
        return self._pages("/v1/audit", AuditEntry, {})

    # How it is asked

    def _get(self, path: str, kind: type[R]) -> R:
        return _read(kind, self._request("GET", path))

    def _post(self, path: str, kind: type[R], body: BaseModel | None, idempotency_key: str = "") -> R:
        headers = {"idempotency-key": idempotency_key or secrets.token_hex(16)}
        content = None if body is None else body.model_dump_json(exclude_unset=True)
        return _read(kind, self._request("POST", path, content, headers))

    def _edit(self, path: str, kind: type[R], change: BaseModel) -> R:
        """Edit what is there now, whatever it is."""
        etag = self._request("GET", path).headers["etag"]
        return _read(kind, self._request("PATCH", path, change.model_dump_json(exclude_unset=True), {"if-match": etag}))

    def _pages(self, path: str, kind: type[R], filters: Mapping[str, Any]) -> Iterator[R]:
        after = ""
        while True:
            asked = {"limit": PAGE, **filters, **({"starting_after": after} if after else {})}
            page = _read(Listed[kind], self._request("GET", f"{path}?{httpx.QueryParams(asked)}"))
            yield from page.data
            if not page.has_more or not page.data:
                return
            after = str(getattr(page.data[-1], "id"))  # noqa: B009 - every resource on a page has one

    def _request(
        self, method: str, path: str, content: str | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Raises `ClientError`."""
        said = {**(headers or {}), **({"content-type": "application/json"} if content is not None else {})}
        return self._asked(
            lambda: self._http.request(method, path, content=content, headers=said), repeatable=method != "PATCH"
        )

    def _words(self, error: httpx.HTTPError) -> str:
        return f"{str(error) or type(error).__name__}{self._through}"

    def _asked(self, ask: Callable[[], httpx.Response], *, repeatable: bool = True) -> httpx.Response:
        """Ask until there is an answer, or patience ends. What is not repeatable is, where it never arrived.

        Raises `ClientError`.
        """
        patience = _Patience(self._patience_s, self._on_wait)
        while True:
            try:
                answer = ask()
            except httpx.HTTPError as error:
                again = repeatable or isinstance(error, httpx.ConnectError)
                if not again or not patience.wait(f"{self.url}: {self._words(error)}"):
                    raise ServerUnreachable(f"{self.url}: {self._words(error)}") from error
            else:
                later = answer.status_code in _AGAIN or (answer.status_code == 429 and "retry-after" in answer.headers)
                if not later or not patience.wait(
                    f"{self.url}: HTTP {answer.status_code}{self._through}", _retry_after_s(answer)
                ):
                    return _checked(answer, self._through)

    def _stream(
        self, path: str, after: str, asked: Mapping[str, str], final: str
    ) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """The events of a stream: id, type, data. A connection that is lost is made again, behind the last event; so is
        one that ends before the `final` type of event, if there is one."""
        patience, asking = _Patience(self._patience_s, self._on_wait), dict(asked)
        timeout = httpx.Timeout(STREAM_SILENCE_S, connect=CONNECT_TIMEOUT_S)
        while True:
            headers = {"last-event-id": after} if after else {}
            lost, wait_s = f"{self.url}: {path} ends again and again before its end", 0.0
            began_s = here().monotonic()
            try:
                with self._http.stream("GET", path, params=asking, headers=headers, timeout=timeout) as answer:
                    if answer.status_code == 204:
                        return
                    if answer.status_code in _AGAIN:
                        lost, wait_s = f"{self.url}: HTTP {answer.status_code}{self._through}", _retry_after_s(answer)
                    else:
                        if answer.status_code != 200:
                            answer.read()
                        _checked(answer, self._through)
                        for id_, kind, said in _sse(answer.iter_lines()):
                            with _understood(self.url + path):
                                data = _DATA.validate_json(said)
                            if kind == "error":
                                lost = f"{self.url}: {data.get('detail', 'the stream cannot go on')}"
                                break
                            patience.begin()
                            after = id_ or after
                            if after:
                                asking.pop("tail", None)
                            yield id_, kind, data
                            if kind == final:
                                return
                        else:
                            if not final:
                                return
            except httpx.HTTPError as error:
                lost = f"{self.url}: {self._words(error)}"
            if here().monotonic() - began_s > RETRY_MAX_S:
                patience.begin()
            if not patience.wait(lost, wait_s):
                raise ServerUnreachable(lost)


class _Patience:
    """How long a server is asked again that does not answer, with growing waits."""

    def __init__(self, patience_s: float, on_wait: Callable[[str], None]) -> None:
        self._patience_s = patience_s
        self._on_wait = on_wait
        self.begin()

    def begin(self) -> None:
        """It has answered."""
        self._failures = 0
        self._until_s: float | None = None

    def wait(self, why: str, least_s: float = 0.0) -> bool:
        """Wait until it is time to ask again; at once False where patience ends before that."""
        wait_s = max(least_s, min(RETRY_BASE_S * 2**self._failures, RETRY_MAX_S))
        if self._until_s is None:
            self._until_s = here().monotonic() + self._patience_s
        if here().monotonic() + wait_s > self._until_s:
            return False
        self._failures += 1
        self._on_wait(why)
        here().sleep(wait_s)
        return True


def _retry_after_s(answer: httpx.Response) -> float:
    """How long the server asks to be left alone. A date is left to the growing waits."""
    said = answer.headers.get("retry-after", "")
    return float(said) if said.isdecimal() and len(said) < 6 else 0.0


def upload_files(source: Path) -> list[tuple[UploadFile, Path]]:
    """What of a file or a directory is sent, each with its checksum; hidden files are not. Raises `OSError`, and
    `ValueError` for a name that no upload has."""
    if source.is_file():
        paths = {source.name: source}
    else:
        every = (path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file())
        paths = {path.as_posix(): source / path for path in every if not any(p.startswith(".") for p in path.parts)}
    if not paths:
        raise ValueError(f"{source}: has no files")
    found: list[tuple[UploadFile, Path]] = []
    for name, path in paths.items():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            found.append((UploadFile(path=name, bytes=path.stat().st_size, sha256=digest), path))
        except ValidationError:
            raise ValueError(f"{path}: a name in an upload has letters, digits, '.', '_', '+', '-'") from None
    return found


def _part(name: str) -> str:
    """A name as one part of a path, whatever is in it: also `..`, which would lead to another path."""
    part = quote(name, safe="", errors="surrogateescape")
    return part if part.strip(".") else part.replace(".", "%2E")


def _retention(project: str | None) -> str:
    return "/v1/retention" if project is None else f"/v1/projects/{_part(project)}/retention"


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _sse(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    """Server-sent events out of their lines; one that was cut is left out."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            if name:
                fields[name] = value.removeprefix(" ")
            continue
        if "data" in fields:
            yield fields.get("id", ""), fields.get("event", "message"), fields["data"]
        fields = {}


def _checked(answer: httpx.Response, by: str) -> httpx.Response:
    """The answer, if it is one. `by` says which way it came. Raises `ApiError`."""
    if answer.is_success:
        return answer
    try:
        problem = Problem.model_validate_json(answer.content)
    except ValidationError:
        problem = Problem(
            type="about:blank",
            title=answer.reason_phrase,
            status=answer.status_code,
            detail=f"{answer.request.url}: HTTP {answer.status_code} {answer.reason_phrase}{by}",
            instance=answer.request.url.path,
        )
    raise ApiError(problem)


def _read(kind: type[R], answer: httpx.Response) -> R:
    with _understood(answer.request.url):
        return kind.model_validate_json(answer.content)


@contextlib.contextmanager
def _understood(url: httpx.URL | str) -> Iterator[None]:
    """Raises `ServerUnreachable` where what is read in the body is none of the API's."""
    try:
        yield
    except ValidationError as error:
        raise ServerUnreachable(f"{url} is no elastic server: its answer is none of the API's") from error
