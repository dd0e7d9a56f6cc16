"""A serving cluster that lends its GPUs while it does not need them, and always goes first.

Hosts are processes with a load of their own (`elastic serving-host`): `hosts` of them are started here, as the
stand-in for a cluster, and those at `urls` are there already. A lease is one host's loan to one run; the worker
starts inside the host. How much a lent host takes on changes with its load, through the worker's credits.
Source: ROSE §4.
"""

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Annotated, ClassVar

import httpx
import msgspec
import structlog
from pydantic import AfterValidator, Field

from elastic.core.types import EndCause, LeaseId
from elastic.processes import RecordedProcesses, end_left_over, records
from providers import processes
from providers.base import Emit, KnownLease, LeaseRequest, ProviderContext, ProviderSettings, ProviderUnavailable
from providers.keeper import Ending, Holding, LeaseKeeper, Refusal
from providers.serving_messages import (
    HOST_VARIABLE,
    SERVICE_NOTE,
    DeviceSettings,
    ExecutorSettings,
    HostSettings,
    LendingSettings,
    LendOrder,
    LoadReport,
    LoadSettings,
    ReturnOrder,
)

log = structlog.get_logger(__name__)


def _safe(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(str(error)) from error
    if not (parsed.host and (parsed.scheme == "https" or (parsed.scheme == "http" and _loopback(parsed.host)))):
        raise ValueError("must begin with https://, or with http:// on this machine: tokens pass here")
    return url


def _loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class ServingSettings(ProviderSettings):
    max_workers: int = Field(2, ge=0, le=10_000, description="most hosts to borrow at once")
    hosts: int = Field(2, ge=0, le=64, description="hosts to start on this machine")
    urls: tuple[Annotated[str, AfterValidator(_safe)], ...] = Field((), description="hosts that are there already")
    token_variable: str = Field(
        "ELASTIC_SERVING_TOKEN", min_length=1, description="environment variable with the token of the hosts at urls"
    )
    load: LoadSettings = Field(default_factory=LoadSettings)  # type: ignore[arg-type]
    device: DeviceSettings = Field(default_factory=DeviceSettings)  # type: ignore[arg-type]
    lending: LendingSettings = Field(default_factory=LendingSettings)  # type: ignore[arg-type]
    executor: ExecutorSettings | None = Field(None, description="a real serving model on the hosts started here")
    poll_s: float = Field(0.5, gt=0, description="time between two looks at a host")
    kv_window_s: float = Field(30.0, gt=0, description="time over which a host's KV use decides who is borrowed")
    lost_after_s: float = Field(3.0, gt=0, description="silence after which a lent host counts as lost")


class HostUnreachable(Exception):
    """A host does not answer, or not as a serving host does."""


class HostRefused(Exception):
    """A host will not do what it was asked to; the message is its own."""


class _Host:
    """One serving host, seen from here. `report` is its last, None while it does not answer.

    `patience_s` is how long an answer may take that costs the host nothing, `looks` how many reports make up its KV
    use of late.
    """

    def __init__(
        self,
        name: str,
        url: str,
        token: str,
        local: processes.ProcessGroup | None,
        patience_s: float,
        looks: int,
        note: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self._note = note
        self.local = local
        self.lease: LeaseId | None = None
        self.barred = False
        """A worker on it has lied."""
        self.report: LoadReport | None = None
        self.kv_used_shares: deque[float] = deque(maxlen=looks)
        """As reported, the latest last."""
        self.gone = asyncio.Event()
        self._http = httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=patience_s
        )

    @property
    def offered(self) -> bool:
        report = self.report
        free = self.lease is None and not self.barred
        return free and report is not None and not report.lent_worker and not report.pressed

    @property
    def kv_used_share(self) -> float:
        """Of late; of a host that has reported."""
        return fmean(self.kv_used_shares)

    async def look(self) -> LoadReport:
        return await self._ask("GET", "/load", None)

    async def lend(self, order: LendOrder, timeout_s: float) -> LoadReport:
        return await self._ask("POST", "/lend", order, timeout_s)

    async def take_back(self, worker: str, timeout_s: float | None) -> LoadReport:
        return await self._ask("POST", "/return", ReturnOrder(worker), timeout_s)

    async def aclose(self) -> None:
        if self.local is not None:
            await self.local.kill()
        await self._http.aclose()

    async def _ask(
        self, method: str, path: str, order: LendOrder | ReturnOrder | None, timeout_s: float | None = None
    ) -> LoadReport:
        """One exchange; `report` is what it brought. Raises `HostUnreachable` or `HostRefused`."""
        body = msgspec.json.encode(order) if order is not None else None
        timeout = timeout_s or httpx.USE_CLIENT_DEFAULT
        try:
            answer = await self._http.request(method, path, content=body, timeout=timeout)
            if not answer.is_success:
                raise HostRefused(f"{self.name} refused ({answer.status_code}): {_reason(answer)}")
            self.report = msgspec.json.decode(answer.content, type=LoadReport)
            self.kv_used_shares.append(self.report.kv_used_share)
        except HostRefused:
            self.report = None
            raise
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            self.report = None
            raise HostUnreachable(f"{self.name} does not answer as a serving host: {error!r}") from error
        if self.report.service is not None:
            self._note(f"{SERVICE_NOTE}{self.name}", msgspec.json.encode(self.report.service).decode())
        return self.report


class _LentHost:
    """A lease's `Holding`."""

    def __init__(self, host: _Host, worker: str, settings: ServingSettings, release_timeout_s: float) -> None:
        self._host = host
        self._worker = worker
        self._settings = settings
        self._release_timeout_s: float | None = release_timeout_s

    async def keep(self) -> Ending:
        """Look at the host until its worker has ended, or the host is gone or silent for too long."""
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while not await self._gone_within(self._settings.poll_s):
            try:
                report = await self._host.look()
            except (HostUnreachable, HostRefused) as error:
                if loop.time() - heard_s > self._settings.lost_after_s:
                    self._release_timeout_s = None  # It has been waited for; once more will do.
                    return Ending(EndCause.LOST, str(error))
                continue
            heard_s = loop.time()
            if report.lent_worker != self._worker:
                error = report.ended_error if report.ended_worker == self._worker else "the host was lent otherwise"
                cause = EndCause.LOST if error else EndCause.RELEASED
                return Ending(cause, error or "the worker ended")
        return Ending(EndCause.LOST, f"{self._host.name} died")

    async def give_back(self) -> None:
        """Return the host. One of ours that does not obey is killed; at another's, the worker ends by itself once
        it is fenced."""
        try:
            if not self._host.gone.is_set():
                await self._host.take_back(self._worker, self._release_timeout_s)
        except (HostUnreachable, HostRefused) as error:
            log.warning("host not returned", host=self._host.name, error=str(error))
            if self._host.local is not None:
                self._host.gone.set()
        if self._host.gone.is_set() and self._host.local is not None:
            await self._host.local.kill()

    async def _gone_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._host.gone.wait()
        return self._host.gone.is_set()


class ServingProvider(LeaseKeeper[ServingSettings]):
    """Lends the host whose KV cache was used least of late, of those that answer, are free and not under pressure."""

    Settings: ClassVar[type[ServingSettings]] = ServingSettings

    def __init__(self, name: str, settings: ServingSettings, context: ProviderContext) -> None:
        super().__init__(name, settings, context)
        self._hosts: list[_Host] = []

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Holding]:
        leases = {lease.request.tickets[0].worker: lease_id for lease_id, lease in known.items()}
        recorded = RecordedProcesses.found(records(self.context.run_dir), self.context.run, self.name)
        wanted = [one for one in recorded if one.name in self._host_names and one.processes]
        await end_left_over([one for one in recorded if one not in wanted], self.context.release_timeout_s)
        hosts = [
            *(self._host(one.name, one.kept["url"], self.context.secret(one.name), self._group(one)) for one in wanted),
            *self._remote_hosts(),
        ]
        self._hosts += [host for host in await asyncio.gather(*(self._found(host, leases) for host in hosts)) if host]
        return {
            host.lease: self._lent(host, known[host.lease].request.tickets[0].worker)
            for host in self._hosts
            if host.lease is not None
        }

    async def _found(self, host: _Host, leases: Mapping[str, LeaseId]) -> _Host | None:
        """A host as it stands after nobody has looked at it for a while; None if it has to go.

        A loan that has ended is a lease's all the same, which has yet to hear of it.
        """
        try:
            report = await host.look()
            if report.lent_run != self.context.run:
                host.lease = leases.get(report.ended_worker)
            elif (lease := leases.get(report.lent_worker)) is not None:
                host.lease = lease
            else:
                await host.take_back(report.lent_worker, self.context.release_timeout_s)
                log.warning("left over from an earlier process", what=report.lent_worker, host=host.name)
        except (HostUnreachable, HostRefused) as error:
            log.warning("host not found again", host=host.name, error=str(error))
            if host.local is not None:
                await host.aclose()
                return None
        return host

    async def start(self, emit: Emit) -> None:
        if not (self.settings.hosts or self.settings.urls):
            raise ProviderUnavailable(f"{self.name}: no hosts: set hosts (to start some here) or urls")
        there = {host.name for host in self._hosts}
        self._hosts += [host for host in self._remote_hosts() if host.name not in there]
        if self.settings.hosts:
            processes.check_command("a serving host", self.context.host_command)
        try:
            for number, name in enumerate(self._host_names):
                if name not in there:
                    self._hosts.append(await self._start_host(number, name))
        except OSError as error:
            await self.aclose()
            raise ProviderUnavailable(f"{self.name}: a serving host could not be started: {error}") from error
        await super().start(emit)
        for host in self._hosts:
            self.run_in_background(self._watch(host), f"watch {host.name}")
            if host.local is not None:
                self.run_in_background(self._mourn(host, host.local), f"mourn {host.name}")

    def free(self) -> int:
        return sum(host.offered for host in self._hosts)

    async def take(self, request: LeaseRequest) -> Holding:
        free = [host for host in self._hosts if host.offered]
        if not free:
            raise Refusal(f"no host of {self.name} is free")
        host = min(free, key=lambda host: host.kv_used_share)
        (ticket,) = request.tickets
        lent = self._lent(host, ticket.worker)
        order = LendOrder(self.context.run, self.context.join, ticket.worker, ticket.token)
        host.lease = request.lease
        try:
            await host.lend(order, self.context.acquire_timeout_s)
        except BaseException as error:
            # Whether the order reached the host is not known unless it said no.
            if not isinstance(error, HostRefused):
                await lent.give_back()
            self.forget(request.lease)
            raise
        return lent

    def forget(self, lease: LeaseId, *, barred: bool = False) -> None:
        for host in self._hosts:
            if host.lease == lease:
                host.lease = None
                host.barred = barred

    async def aclose(self) -> None:
        await super().aclose()
        hosts, self._hosts = self._hosts, []
        await asyncio.gather(*(host.aclose() for host in hosts))

    @property
    def _host_names(self) -> list[str]:
        return [f"{self.name}-host-{number}" for number in range(self.settings.hosts)]

    def _lent(self, host: _Host, worker: str) -> _LentHost:
        return _LentHost(host, worker, self.settings, self.context.release_timeout_s)

    def _group(self, recorded: RecordedProcesses) -> processes.ProcessGroup:
        return processes.ProcessGroup(self.context, self.name, recorded.name, recorded=recorded)

    def _remote_hosts(self) -> list[_Host]:
        variable = self.settings.token_variable
        token = os.environ.get(variable, "")
        if self.settings.urls and not token:
            raise ProviderUnavailable(f"{self.name}: set {variable} to the token of the hosts at urls")
        return [self._host(url, url, token, None) for url in self.settings.urls]

    def _host(self, name: str, url: str, token: str, local: processes.ProcessGroup | None) -> _Host:
        looks = max(1, round(self.settings.kv_window_s / self.settings.poll_s))
        return _Host(name, url, token, local, self.settings.lost_after_s, looks, self.context.note)

    async def _start_host(self, number: int, name: str) -> _Host:
        """Start a host on a socket that we opened, so that its address is known at once and cannot be taken."""
        token = self.context.secret(name)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            group = processes.ProcessGroup(self.context, self.name, name, {"url": url})
            settings = HostSettings(
                token=token,  # type: ignore[arg-type]
                name=name,
                phase=number,
                load=self.settings.load,
                device=self.settings.device,
                lending=self.settings.lending,
                executor=self.settings.executor,
                listen_fd=listener.fileno(),
                orchestrator_timeout_s=self.context.orchestrator_timeout_s,
            )
            environment = {HOST_VARIABLE: settings.to_json()}
            try:
                await group.start(name, self.context.host_command, environment, (listener.fileno(),))
            except BaseException:
                await group.kill()
                raise
            return self._host(name, url, token, group)

    async def _watch(self, host: _Host) -> None:
        """Keep the offer true while the host is not lent; a lent one is looked at by its lease."""
        while True:
            if host.lease is None and not host.gone.is_set():
                with contextlib.suppress(HostUnreachable, HostRefused):
                    await host.look()
                self.announce()
            await asyncio.sleep(self.settings.poll_s)

    async def _mourn(self, host: _Host, group: processes.ProcessGroup) -> None:
        end = await group.wait()
        log.error("serving host died", host=host.name, how=str(end))
        host.report = None
        host.gone.set()
        self.announce()


def _reason(answer: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(answer.content)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return answer.text[:200]
