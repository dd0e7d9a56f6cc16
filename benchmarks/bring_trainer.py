"""Other people's trainers at the doors of a run, by `elastic serve-rollouts` as users run it, with the embedded engine.

- `doors`: of each peer its calls, in its order, three updates long. It has `passed` if every call was answered as the
  peer needs it, each turn has all of its tokens from the version that was offered last, by the name that the peer gave
  it, and the version that workers pull then has the tensors of the last directory, bit for bit.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from _common import emit, parse_arguments
from _peers import PEERS, SKIPPED, TIMEOUT_S, TOKENS, CallFailed, FrontSeen, PeerTurn, Play
from _served import DoorsRun, under_way, write_version
from safetensors.torch import load_file

from elastic.protocol.http_clients import sync_client
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.journal import PUBLISHER, RunDirectory
from elastic.weights.puller import Puller
from elastic.weights.relay import open_relay
from elastic.weights.signing import Trust

MODEL = "policy"
UPDATES = 3


def measured_doors(directory: Path) -> dict[str, Any]:
    """Every peer at one run, one after the other."""
    options = ("--model-name", MODEL, "--plain", "127.0.0.0/8")
    with under_way(directory, options=options) as run:
        secrets = RunSecrets.of(run.run_dir)
        front = FrontSeen(run.url(), MODEL, secrets.control_key(), secrets.requests_key())
        run.until("a turn", lambda: _answers(front))
        played = {name: _played(run, front, number, play) for number, (name, play) in enumerate(PEERS.items())}
    return played | {name: {"calls": 0, "passed": None, "skipped_because": why} for name, why in SKIPPED.items()}


def _answers(front: FrontSeen) -> bool:
    headers = {"Authorization": f"Bearer {front.requests_key}"}
    body = {"prompt": [1], "max_tokens": 1}
    try:
        with sync_client(front.url, by_proxy=False, headers=headers, timeout=TIMEOUT_S) as client:
            answer = client.post(f"{front.url}/v1/completions", json=body)
    except httpx.TransportError:
        return False
    return answer.status_code == 200


def _played(run: DoorsRun, front: FrontSeen, number: int, play: Play) -> dict[str, Any]:
    offered = [write_version(run, UPDATES * number + update) for update in range(1, UPDATES + 1)]
    try:
        calls, told = asyncio.run(play(front, offered))
    except CallFailed as failure:
        return {"calls": None, "passed": False, "failed": str(failure)}
    served = load_file(offered[-1] / "model.safetensors")
    found = on_the_relay(run, UPDATES * (number + 1))
    same = found.keys() == served.keys() and all(bool((found[name] == served[name]).all()) for name in served)
    return {"calls": calls, "passed": same and _of_last(told, offered), "skipped_because": ""}


def _of_last(told: Sequence[PeerTurn], offered: Sequence[Path]) -> bool:
    """Whether each turn is whole, and of the directory before it: by its name, its number, or the name of its copy."""
    for number, (turn, directory) in enumerate(zip(told, offered, strict=True), 1):
        names = {directory.name, str(number)}
        whole = len(turn.ids) == len(turn.logprobs) == TOKENS
        of_it = all(name in names or name.endswith(f"-{number:06d}") for name in turn.versions or ())
        if not (whole and of_it):
            return False
    return True


def on_the_relay(run: DoorsRun, version: int) -> Mapping[str, Any]:
    """The version's tensors, as workers pull them."""
    with RunDirectory(run.run_dir).newest_journal() as journal:
        key = journal.meta()[PUBLISHER]
    return Puller(open_relay(str(run.run_dir / "weights")), Trust(run.run_dir.name, key)).pull(version, TIMEOUT_S)


def main() -> None:
    arguments = parse_arguments(__doc__)
    with tempfile.TemporaryDirectory() as directory:
        emit({"doors": measured_doors(Path(directory))}, arguments)


if __name__ == "__main__":
    main()
