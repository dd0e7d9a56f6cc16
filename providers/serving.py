"""A serving cluster that lends its GPUs while it does not need them, and always goes first.

Hosts are processes with a load of their own (`elastic serving-host`): `hosts` of them are started here, as the
stand-in for a cluster, and those at `urls` are there already. A lease is one host's loan to one run; the worker
starts inside the host. How much a lent host takes on changes with its load, through the worker's credits.
Source: ROSE §4.
"""

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Set
from statistics import fmean
from typing import ClassVar

import httpx
import msgspec
import structlog

from elastic.core.types import EndCause, LeaseId, WorkerId
from elastic.protocol.http_clients import async_client
from elastic.system.supervision import RecordedProcesses, end_left_over, records
from providers.base import Emit, KnownLease, LeaseRequest, ProviderContext, ProviderUnavailable
from providers.base_provider import BaseProvider, Found, LeaseHandle
from providers.markets import LeaseEnding, ServingMarket
from providers.processes import ProcessGroup, check_command, new_record
from providers.serving_messages import (
    HOST_VARIABLE,
    SERVICE_NOTE,
    HostSettings,
    LendOrder,
    LoadReport,
    ReturnOrder,
    ServingSettings,
)

log = structlog.get_logger(__name__)


class HostUnreachable(Exception):
    """A host does not answer, or not as a serving host does."""


class HostRefused(HostUnreachable):
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
        local: ProcessGroup | None,
        patience_s: float,
        looks: int,
        note: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self._note = note
        self.local = local
        self.report: LoadReport | None = None
        self.kv_used_shares: deque[float] = deque(maxlen=looks)
        """As reported, the latest last."""
        self.gone = asyncio.Event()
        self._http = async_client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=patience_s)

    @property
    def lendable(self) -> bool:
        return self.report is not None and not self.report.lent_worker and not self.report.pressed

    @property
    def kv_used_share(self) -> float:
        """The share of KV memory in recent use by a host that has reported."""
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
        except (httpx.HTTPError, msgspec.DecodeError, HostRefused) as error:
            self.report = None
            if isinstance(error, HostRefused):
                raise
            raise HostUnreachable(f"{self.name} does not answer as a serving host: {error!r}") from error
        self.kv_used_shares.append(self.report.kv_used_share)
        if self.report.service is not None:
            self._note(f"{SERVICE_NOTE}{self.name}", msgspec.json.encode(self.report.service).decode())
        return self.report


class _LentHost:
    """A lease's `LeaseHandle`."""

    def __init__(self, host: _Host, worker: str, settings: ServingSettings, release_timeout_s: float) -> None:
        self._host = host
        self._worker = worker
        self._settings = settings
        self._release_timeout_s: float | None = release_timeout_s

    async def keep(self) -> LeaseEnding:
        """Look at the host until its worker has ended, or the host is gone or silent for too long."""
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while not await self._gone_within(self._settings.poll_s):
            try:
                report = await self._host.look()
            except HostUnreachable as error:
                if loop.time() - heard_s > self._settings.lost_after_s:
                    self._release_timeout_s = None  # It has been waited for; once more will do.
                    return LeaseEnding(EndCause.LOST, str(error))
                continue
            heard_s = loop.time()
            if report.lent_worker != self._worker:
                own = report.ended_worker == self._worker
                error = report.ended_error if own else "the host was lent otherwise"
                cause = EndCause.LOST if error else EndCause.RELEASED
                return LeaseEnding(cause, error or "the worker ended", error if own else "")
        return LeaseEnding(EndCause.LOST, f"{self._host.name} died")

    async def give_back(self) -> None:
        """Return the host. One of ours that does not obey is killed; at another's, the worker ends by itself once
        it is fenced."""
        try:
            if not self._host.gone.is_set():
                await self._host.take_back(self._worker, self._release_timeout_s)
        except HostUnreachable as error:
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


class ServingProvider(BaseProvider[ServingSettings]):
    """Lends the host whose KV cache was used least of late, of those that answer, are free and not under pressure."""

    Settings: ClassVar[type[ServingSettings]] = ServingSettings

    def __init__(self, name: str, settings: ServingSettings, context: ProviderContext) -> None:
        self.hosts: dict[str, _Host] = {}
        """Those that answer, or did, by name."""
        market = ServingMarket(name, settings, self.hosts)
        self._lent = market.lent
        super().__init__(market, context)

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Found]:
        recorded = RecordedProcesses.found(records(self.context.run_dir), self.context.run, self.name)
        wanted = [one for one in recorded if one.name in self._host_names and one.processes]
        await end_left_over([one for one in recorded if one not in wanted], self.context.release_timeout_s)
        secret, context = self.context.secret, self.context
        hosts = self._remote_hosts()
        hosts += [self._host(h.name, h.kept["url"], secret(h.name), ProcessGroup(context, h)) for h in wanted]
        workers = {lease.request.tickets[0].worker: lease_id for lease_id, lease in known.items()}
        loans = await asyncio.gather(*(self._stock(host, set(workers)) for host in hosts))
        return {
            workers[worker]: Found(self._loan(host, worker), host.name)
            for host, worker in zip(hosts, loans, strict=True)
            if worker is not None
        }

    async def _stock(self, host: _Host, workers: Set[WorkerId]) -> WorkerId | None:
        """Take over a host that an earlier process of the run used; returns which of `workers` is, or was last, on it.

        A worker that has ended counts as well, for its lease has not been told. Returns None for a host that is given
        up.
        """
        try:
            report = await host.look()
            ours = report.lent_run == self.context.run
            worker = report.lent_worker if ours else report.ended_worker
            if ours and worker not in workers:
                await host.take_back(worker, self.context.release_timeout_s)
                log.warning("left over from an earlier process", what=worker, host=host.name)
        except HostUnreachable as error:
            log.warning("host not found again", host=host.name, error=str(error))
            if host.local is not None:
                await host.aclose()
                return None
            worker = ""
        self.hosts[host.name] = host
        return worker if worker in workers else None

    async def start(self, emit: Emit) -> None:
        if not (self.settings.hosts or self.settings.urls):
            raise ProviderUnavailable(f"{self.name}: no hosts: set hosts (to start some here) or urls")
        for host in self._remote_hosts():
            self.hosts.setdefault(host.name, host)
        if self.settings.hosts:
            check_command("a serving host", self.context.host_command)
        try:
            for number, name in enumerate(self._host_names):
                if name not in self.hosts:
                    self.hosts[name] = await self._start_host(number, name)
        except OSError as error:
            await self.aclose()
            raise ProviderUnavailable(f"{self.name}: a serving host could not be started: {error}") from error
        await super().start(emit)
        for host in self.hosts.values():
            self.run_in_background(self._watch(host), f"watch {host.name}")
            if host.local is not None:
                self.run_in_background(self._mourn(host, host.local), f"mourn {host.name}")

    async def launch(self, request: LeaseRequest, place: str) -> LeaseHandle:
        host = self.hosts[place]
        (ticket,) = request.tickets
        loan = self._loan(host, ticket.worker)
        endpoint = self.context.endpoint if host.local is None else self.context.endpoint.here()
        order = LendOrder(
            self.context.run, endpoint.address, ticket.worker, ticket.token, fingerprint=endpoint.fingerprint
        )
        try:
            await host.lend(order, self.context.acquire_timeout_s)
        except HostRefused:
            raise
        except BaseException:
            # Whether the order reached the host is not known.
            await loan.give_back()
            raise
        return loan

    async def aclose(self) -> str:
        left = await super().aclose()
        hosts = list(self.hosts.values())
        self.hosts.clear()
        await asyncio.gather(*(host.aclose() for host in hosts))
        return left

    @property
    def _host_names(self) -> list[str]:
        return [f"{self.name}-host-{number}" for number in range(self.settings.hosts)]

    def _loan(self, host: _Host, worker: WorkerId) -> _LentHost:
        return _LentHost(host, worker, self.settings, self.context.release_timeout_s)

    def _remote_hosts(self) -> list[_Host]:
        variable = self.settings.token_variable
        token = os.environ.get(variable, "")
        if self.settings.urls and not token:
            raise ProviderUnavailable(f"{self.name}: set {variable} to the token of the hosts at urls")
        return [self._host(url, url, token, None) for url in self.settings.urls]

    def _host(self, name: str, url: str, token: str, local: ProcessGroup | None) -> _Host:
        looks = max(1, round(self.settings.kv_window_s / self.settings.poll_s))
        return _Host(name, url, token, local, self.settings.lost_after_s, looks, self.context.note)

    async def _start_host(self, number: int, name: str) -> _Host:
        """Start a host on a socket that we opened, so that its address is known at once and cannot be taken."""
        token = self.context.secret(name)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            group = ProcessGroup(self.context, new_record(self.context, self.name, name, url=url))
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
                group.start(name, self.context.host_command, environment, (listener.fileno(),))
            except BaseException:
                await group.kill()
                raise
            return self._host(name, url, token, group)

    async def _watch(self, host: _Host) -> None:
        """Keep the offer true while the host is not lent; a lent one is looked at by its lease."""
        while True:
            if not self.holds(self._lent.get(host.name, "")) and not host.gone.is_set():
                with contextlib.suppress(HostUnreachable):
                    await host.look()
                self.announce()
            await asyncio.sleep(self.settings.poll_s)

    async def _mourn(self, host: _Host, group: ProcessGroup) -> None:
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
