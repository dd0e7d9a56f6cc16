"""A run's secrets, all derived from one secret file, so that the run's next process has the same ones.

Nothing of them is journaled, so that a journal can be shown around.
"""

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64encode
from pathlib import Path

from elastic.core.ids import agent_id, parse_agent_id, tagged
from elastic.core.types import TrajectoryId
from elastic.protocol.front_messages import AgentCaller
from elastic.system.files import write_whole

FILE = "secret"
ROOT_BYTES = 32
AGENT, DRIVER, VIEWER = "agent", "driver", "viewer"
"""How the keys begin that agents, drivers and viewers show to a run's fronts."""
REQUESTS, CONTROL = "requests", "control"
"""How the keys begin that somebody else's trainer shows to a run's doors."""


class RunSecrets:
    """The credentials of workers, relays and hosts of one run. All are derived from the secret `root`."""

    def __init__(self, root: bytes) -> None:
        self._root = root

    @classmethod
    def of(cls, run_dir: Path) -> "RunSecrets":
        """Read the secrets of the run in this directory; create them, in a file for its owner alone, if there are
        none. Raises `OSError`, and `ValueError` if the file holds no secret."""
        path = run_dir / FILE
        try:
            root = path.read_bytes()
        except FileNotFoundError:
            root = secrets.token_bytes(ROOT_BYTES)
            write_whole(path, root)
        if len(root) != ROOT_BYTES:
            raise ValueError(f"{path}: found {len(root)} bytes; a run's secret has {ROOT_BYTES}")
        return cls(root)

    def join_token(self, worker: str) -> str:
        """Return the one-time token with which a worker opens its session."""
        return self._derived("join", worker)

    def session_key(self, worker: str) -> str:
        """Return the key with which a worker resumes its session."""
        return self._derived("session", worker)

    def relay_token(self, worker: str) -> str:
        """Return the token with which a worker reads from the weights' relay."""
        return self._derived("relay", worker)

    def relay_owner(self) -> str:
        """Return the token with which the trainer may do everything on the weights' relay."""
        return self._derived("relay owner", "")

    def host_token(self, host: str) -> str:
        """Return the token that a serving host of the run expects."""
        return self._derived("host", host)

    def agent_key(self, trajectory: TrajectoryId, restart: int) -> str:
        """Return the key of an agent that plays the trajectory for this time: it names both."""
        return self._naming(AGENT, agent_id(trajectory), str(restart))

    def driver_key(self, driver: str) -> str:
        """Return the key of a program that opens trajectories and gives rewards; its name is letters, digits, `_`."""
        return self._naming(DRIVER, driver)

    def viewer_key(self, viewer: str = "main") -> str:
        """Return the viewer's key, which may only chat with the run's policy; its name is a driver's."""
        return self._naming(VIEWER, viewer)

    def requests_key(self) -> str:
        """Return the key that may only have requests generated at the run's doors."""
        return self._naming(REQUESTS)

    def control_key(self) -> str:
        """Return the key of a trainer, which offers weights and pauses the run, and may have requests generated."""
        return self._naming(CONTROL)

    def may_request(self, key: str) -> bool:
        """Tell whether who has this key may have requests generated at the run's doors."""
        return self.may_control(key) or self._proven(key) == [REQUESTS]

    def may_control(self, key: str) -> bool:
        """Tell whether who has this key may offer weights and pause the run."""
        return self._proven(key) == [CONTROL]

    def caller_of(self, key: str) -> AgentCaller | None:
        """Return in whose name a caller with this key asks; None if it is no key of the run."""
        match self._proven(key):
            case [kind, name, restart] if kind == AGENT:
                return AgentCaller(trajectory=parse_agent_id(name), restart=int(restart))
            case [kind, name] if kind == DRIVER:
                return AgentCaller(driver=name)
            case [kind, name] if kind == VIEWER:
                return AgentCaller(viewer=name)
            case _:
                return None

    def _proven(self, key: str) -> list[str]:
        """Return the kind of a key that names what it is of, and those names; empty if it is no key of the run."""
        said = key.split(".")[:-1]
        made = self._naming(*said) if said else ""
        return said if hmac.compare_digest(made.encode(), key.encode(errors="replace")) and said else []

    def _naming(self, *named: str) -> str:
        """Return a key that tells its kind and what it is of, with a proof of it."""
        said = ".".join(named)
        return f"{said}.{self._derived('key', said)}"

    def tag(self, run: str) -> str:
        """Return the run's name with a hash of its secret, which marks resources as this run's and no namesake's."""
        return tagged(run, self._derived("tag", ""))

    def _derived(self, purpose: str, name: str) -> str:
        message = f"{purpose}\0{name}".encode()
        return urlsafe_b64encode(hmac.digest(self._root, message, hashlib.sha256)).rstrip(b"=").decode()
