"""Detached actors of a Ray cluster, each of which keeps a process on its node: found by name, asked, and ended.

An actor ends with its process, and that process with its actor. The functions are called on a thread: they block.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import structlog
from pydantic import BaseModel, ConfigDict, Field

from elastic.system.plain_values import told
from providers.ray_connection import NODE_VARIABLE, ray

log = structlog.get_logger(__name__)

LINGER_S = 60.0
"""How long an actor waits after its process's end for somebody to ask how it ended."""

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RayClusterSettings(BaseModel):
    """Where a cluster is, and what of a node's resources is asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    address: str = Field("ray://127.0.0.1:10001", pattern=r"^ray://.+", description="of the cluster's client server")
    namespace: str = Field("elastic", min_length=1, description="of the actors' names")
    num_cpus: Amount = Field(1.0, description="CPUs of a node that are taken")
    num_gpus: Amount | None = Field(None, description="GPUs that Ray counts for it, where that differs from its own")
    resources: dict[str, Amount] = Field(default_factory=dict, description="… and what Ray calls custom resources")
    poll_s: float = Field(2.0, gt=0, description="time between two looks at the cluster")
    answer_timeout_s: float = Field(60.0, gt=0, description="longest time that the cluster's head may take to answer")

    def asked_with(self, gpus: float) -> dict[str, float]:
        """Return the resources in Ray's names, for what has so many GPUs unless `num_gpus` says otherwise."""
        asked = {"CPU": self.num_cpus, "GPU": gpus if self.num_gpus is None else self.num_gpus, **self.resources}
        return {name: amount for name, amount in asked.items() if amount}


def places(available: Mapping[str, float], asked: Mapping[str, float]) -> int:
    """Return how many workers fit into the available resources, if these are not too fragmented."""
    return int(min((available.get(name, 0.0) / amount for name, amount in asked.items()), default=0))


class ActorStatus(NamedTuple):
    """An actor's word on its process: the exit status after its end, None if it could not start; and its last line."""

    runs: bool
    status: int | None = None
    words: str = ""


class WorkerActor:
    """The actor that starts a process on a node, a worker's, and waits for its end."""

    stderr: int | None = None

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._said = ActorStatus(runs=True)
        threading.Thread(target=self._work, args=(command, environment), daemon=True).start()

    def said(self) -> "ActorStatus":
        return self._said

    def _work(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        cluster = ray().get_runtime_context().gcs_address
        status: int | None = None
        # Of this thread's death its child is told, and it lives as long as the actor does.
        with contextlib.suppress(OSError):
            process = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **environment, NODE_VARIABLE: cluster},
                stderr=self.stderr,
                preexec_fn=_die_with_parent,
            )
            self._began(process)
            status = process.wait()
        self._said = ActorStatus(runs=False, status=status, words=self._last_words())
        time.sleep(LINGER_S)
        self._over()
        os._exit(0)

    def _began(self, process: "subprocess.Popen[bytes]") -> None:
        pass

    def _last_words(self) -> str:
        return ""

    def _over(self) -> None:
        pass


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class ActorsSaid(NamedTuple):
    """What actors say of their processes, by name. Of one that is `gone` there is Ray's reason; of one that does not
    answer at the moment, nothing."""

    said: Mapping[str, ActorStatus]
    gone: Mapping[str, str]


class ActorQuestions:
    """The open questions to actors of a namespace: each gets one at a time, for on a lost node none answers until Ray
    knows. An actor is looked up once: for each look-up Ray's client has a process of the cluster tell what it can."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._open: dict[str, Any] = {}
        self._actors: dict[str, Any] = {}

    def forget(self) -> None:
        """Forget them all, as of a connection that is lost."""
        self._open, self._actors = {}, {}

    def ask(self, names: Iterable[str], within_s: float) -> ActorsSaid:
        """Return what these actors answer in time. A thread whose caller no longer waits may be at it, too."""
        exceptions, questions, actors = ray().exceptions, self._open, self._actors
        found = ActorsSaid(said := {}, gone := {})
        names = [*names]
        for name in {*actors}.difference(names):
            actors.pop(name, None)
            questions.pop(name, None)
        for name in names:
            try:
                if (actor := actors.get(name)) is None:
                    actor = actors[name] = ray().get_actor(name, namespace=self._namespace)
                if name not in questions:
                    questions[name] = actor.said.remote()
            except ValueError:
                gone[name] = "no actor has this name any more"
        asked = {reference: name for name, reference in questions.copy().items()}
        answered = ray().wait(list(asked), num_returns=len(asked), timeout=within_s)[0] if asked else []
        for reference in answered:
            name = asked[reference]
            questions.pop(name, None)
            try:
                said[name] = ray().get(reference, timeout=within_s)
            except exceptions.ActorUnavailableError as error:
                log.debug("an actor does not answer", actor=name, error=told(error))
            except exceptions.RayActorError as error:
                actors.pop(name, None)
                gone[name] = str(error).partition("\n")[0]
        return found


def node_resources() -> list[dict[str, float]]:
    """Return the resources of each living node."""
    return [node["Resources"] for node in ray().nodes() if node["Alive"]]


def named_actors(namespace: str, prefix: str) -> frozenset[str]:
    named = ray().util.list_named_actors(all_namespaces=True)
    return frozenset(one["name"] for one in named if one["namespace"] == namespace and one["name"].startswith(prefix))


def end_actor(name: str, namespace: str, timeout_s: float) -> None:
    """Kill an actor, and return once none has its name. Raises `TimeoutError`."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            ray().kill(ray().get_actor(name, namespace=namespace), no_restart=True)
        except ValueError:
            return
        time.sleep(0.1)
    raise TimeoutError(f"Ray still knows actor {name} after {timeout_s:g} s")


def told_resources(resources: Mapping[str, float]) -> str:
    own = {name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store"))}
    words = {name: f"{amount / 1e9:.1f} GB" if name == "memory" else f"{amount:g}" for name, amount in own.items()}
    return ", ".join(f"{name} {amount}" for name, amount in sorted(words.items())) or "nothing"
