"""Admission to a pool's process: node agents by one-time tickets and sessions, jobs by the token of their placement.

- Every token is derived from the secret in the pool's directory. So a restarted process knows all tokens, and none is
  stored or logged.
- A newer connection replaces an older one of the same node agent or job.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import structlog

from elastic.core.cluster.types import JobId, NodeId
from elastic.core.types import NS_PER_S
from elastic.pool import messages as w
from elastic.pool.connection import FROM_DIALLER, FromDialler, PoolLink
from elastic.pool.journal import PoolJournal
from elastic.pool.pool_files import FilePrograms, PoolFiles
from elastic.pool.shell import PoolShell
from elastic.protocol.admission import Admission, is_secret
from elastic.protocol.connection import SessionRefused
from elastic.protocol.frames import RefusedFrame, WireError
from elastic.protocol.tls import Certificate
from elastic.system.host import here
from elastic.system.isolation import IsolatedLoop

log = structlog.get_logger(__name__)


class PoolTokens:
    """Tokens of node agents and jobs, all derived from one secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def ticket(self, node: NodeId, number: int) -> str:
        return self._derived("ticket", node, str(number))

    def session(self, node: NodeId, number: int) -> str:
        return self._derived("session", node, str(number))

    def job(self, job: JobId, placement: int) -> str:
        return self._derived("job", job, str(placement))

    def pool(self) -> str:
        """Return what tells this pool from others of its name, and is no secret."""
        return self._derived("pool")[:16]

    def files(self, job: JobId, placement: int, node: NodeId) -> str:
        return self._derived("files", job, str(placement), node)

    def ranks(self, job: JobId, worker: str) -> str:
        """Return by what ranks of a trainer prove to its first one that they are its own."""
        return self._derived("ranks", job, worker)

    def _derived(self, *what: str) -> str:
        return hmac.new(self._secret, "\0".join(what).encode(), hashlib.sha256).hexdigest()


class PoolGateway:
    """Serves connections for a shell while it is open. Node agents get `welcome` with their sessions."""

    def __init__(
        self, tokens: PoolTokens, journal: PoolJournal, welcome: w.NodeAgentWelcome, isolated: IsolatedLoop
    ) -> None:
        self._tokens, self._journal, self._welcome = tokens, journal, welcome
        self._isolated = isolated
        self._admission = Admission(FROM_DIALLER, self._greet)
        self._shell: PoolShell | None = None
        self._files: PoolFiles | None = None
        self._node_agents: dict[NodeId, PoolLink[FromDialler]] = {}
        self._jobs: dict[JobId, PoolLink[FromDialler]] = {}

    async def start(self, host: str, port: int, certificate: Certificate | None) -> str:
        """Listen; returns `host:port`. No peer is let in before `serve`. Raises `OSError`."""
        return await self._admission.start(host, port, certificate)

    def serve(self, shell: PoolShell, programs: FilePrograms) -> None:
        """Let peers in. `programs` says which files jobs have."""
        self._shell, self._files = shell, PoolFiles(programs, shell, self._isolated, self._welcome.orphan_s)

    async def aclose(self) -> None:
        self._shell = None
        if self._files is not None:
            for node in self._node_agents:
                self._files.left(node)
        for links in (self._node_agents, self._jobs):
            links.clear()
        await self._admission.aclose()

    def send_to_node_agent(self, node: NodeId, message: w.ToNodeAgent) -> None:
        if node in self._node_agents:
            self._node_agents[node].send(message)

    def send_to_job(self, job: JobId, message: msgspec.Struct) -> None:
        if job in self._jobs:
            self._jobs[job].send(message)

    def cut_job(self, job: JobId) -> None:
        link = self._jobs.pop(job, None)
        if link is not None:
            link.abort()

    def cut_node_agent(self, node: NodeId) -> None:
        link = self._node_agents.pop(node, None)
        if link is not None:
            link.abort()
        if self._files is not None:
            self._files.left(node)

    def _greet(self, link: PoolLink[FromDialler], hello: FromDialler) -> None:
        if not isinstance(hello, w.NodeAgentHello | w.JobHello):
            raise SessionRefused("the first message is a hello")
        if self._shell is None:
            raise SessionRefused("the pool's process is not ready yet", retry=True)
        if hello.protocol_version != w.POOL_PROTOCOL_VERSION:
            raise SessionRefused(
                f"it speaks version {hello.protocol_version} of the pool's protocol; allowed: {w.POOL_PROTOCOL_VERSION}"
            )
        refusal: SessionRefused | None = None
        with self._isolated.attempt("connection") as attempt:
            try:
                if isinstance(hello, w.NodeAgentHello):
                    self._let_node_agent_in(link, hello, self._shell)
                else:
                    self._let_job_in(link, hello, self._shell)
            except SessionRefused as refused:
                refusal = refused
        if attempt.fault:
            link.abort()
        if refusal is not None:
            raise refusal

    async def dismiss(self, nodes: Iterable[NodeId], reason: str, within_s: float) -> None:
        """Tell node agents to end, and wait until they have, or that long."""
        links = [self._node_agents[node] for node in nodes if node in self._node_agents]
        for link in links:
            link.send(RefusedFrame(reason, retry=False))
        if links:
            await asyncio.wait([link.lost for link in links], timeout=within_s)

    def _let_node_agent_in(self, link: PoolLink[FromDialler], hello: w.NodeAgentHello, shell: PoolShell) -> None:
        name = hello.node
        number, spent = self._journal.ticket(name)
        session = self._tokens.session(name, number)
        by_ticket = is_secret(hello.token, self._tokens.ticket(name, number))
        if not by_ticket and not is_secret(hello.token, session):
            raise SessionRefused("unknown node or wrong token: is it of this pool?")
        terms = self._journal.joined().get(name)
        if by_ticket and (spent or (terms is not None and here().unix_ns() >= terms.expires_s * NS_PER_S)):
            how = "was used already" if spent else "has expired"
            raise SessionRefused(f"the ticket of node {name} {how}; `elastic pool ticket` mints another")
        if terms is not None and terms.drained and name not in shell.nodes:
            raise SessionRefused(f"node {name} was drained; `elastic pool ticket` lets a machine in again")
        if terms is not None:
            if other := "the pool is stopping" if shell.stopping else shell.held_by_other(hello):
                raise SessionRefused(other, retry=True)
            if refused := shell.refuses_machine(hello):
                raise SessionRefused(refused)
        if by_ticket:
            self._journal.spend_ticket(name)
        former = self._node_agents.get(name)
        if former is not None:
            former.abort()
        say = link.send

        def heard(name: NodeId, message: w.FromNodeAgent) -> None:
            if isinstance(message, w.NodeNotice):
                if terms is None:
                    return
                # Its ticket is void from now on: it does not come back, and its name is free once it is gone.
                self._journal.change_terms(name, msgspec.structs.replace(terms, drained=True))
            if not isinstance(message, w.OfFiles):
                shell.node_agent_heard(name, message)
            elif self._files is not None and terms is not None:
                try:
                    self._files.heard(name, message, say)
                except WireError as error:
                    log.warning("a node agent is cut off", node=name, cause=str(error))
                    link.abort()

        def left(name: NodeId) -> None:
            if self._files is not None:
                self._files.left(name)
            shell.node_agent_left(name)

        self._seat(link, self._node_agents, name, heard, left)
        link.send(msgspec.structs.replace(self._welcome, session=session))
        if refused := shell.node_agent_joined(hello):
            self._node_agents.pop(name, None)
            raise SessionRefused(refused)
        link.watch(self._welcome.silence_s)

    def _let_job_in(self, link: PoolLink[FromDialler], hello: w.JobHello, shell: PoolShell) -> None:
        job = hello.job
        if not is_secret(hello.token, self._tokens.job(job, hello.placement)):
            raise SessionRefused("unknown job or wrong token")
        answer = shell.job_joined(hello)
        if isinstance(answer, w.RefusedFrame):
            raise SessionRefused(answer.reason, retry=answer.retry)
        former = self._jobs.get(job)
        self._seat(link, self._jobs, job, shell.job_heard, shell.job_left)
        if former is not None:
            former.abort()
        link.send(answer)
        link.watch(answer.silence_s)
        shell.settle()

    def _seat(
        self,
        link: PoolLink[FromDialler],
        links: dict[str, PoolLink[FromDialler]],
        key: str,
        hear: Callable[[str, Any], None],
        left: Callable[[str], None],
    ) -> None:
        """Hear this connection for the node agent or job from now on, and no other."""

        def heard(messages: list[FromDialler]) -> None:
            for message in messages:
                if links.get(key) is link:
                    with self._isolated.attempt(f"message of {key}"):
                        hear(key, message)

        def ended(cause: Exception) -> None:
            if links.get(key) is link:
                log.info("connection lost", who=key, cause=str(cause))
                del links[key]
                with self._isolated.attempt("connection"):
                    left(key)

        links[key] = link
        link.take_over(key, heard, ended)
