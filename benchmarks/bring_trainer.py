"""Other people's trainers at the doors of a run, by `elastic serve-rollouts` as users run it, with the embedded engine.

- `doors`: of each peer its calls, in its order, three updates long. It has `passed` if every call was answered as the
  peer needs it, each turn has all of its tokens from the version that was offered last, by the name that the peer gave
  it, and the version that workers pull then has the tensors of the last directory, bit for bit.
- `update`: 1.3 % of 61 M weights have changed. `answered_s` is from the call that names their directory to its answer,
  each once the version before was pulled, as trainers take longer than that; `ratio` that over reading the files and
  publishing the version by the library alone; `wire_share` is what a worker pulls of it, of the directory's bytes.
  Medians of three. The quick run leaves it out.
- `churn`: requests of 32 tokens, 16 at a time, while a worker is killed every 5 s, the importer and a front once, and
  five versions are offered. `repeated_tokens` were accepted and answered to nobody, `older_than_answered` are requests
  with a token of an older version than had been answered as they were asked first; `p99_over_calm` compares their
  latency with that of requests before.
- `tokens_per_s_over_run`: tokens a second of requests, over those of a run's own rollouts on the same two workers of a
  modelled device, in turns of 64 tokens, of which there are as many as those workers can have; of both what the run has
  accepted while all workers were full (`tokens_per_s`, the median of three pairs). The quick run leaves it out.

`--hours N` measures churn alone, for so long: `memory_growth` and `journal_growth` are of the run's process and files,
from the second third of that time to the last.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from safetensors.torch import load_file

from benchmarks._churn import WORKERS, measured_churn, measured_hours
from benchmarks._common import Arguments, Figures, benchmark, option, skipped_without_vllm
from benchmarks._offered import measured_update
from benchmarks._peers import PEERS, TIMEOUT_S, TOKENS, WITH_ADAPTERS, CallFailed, FrontSeen, PeerTurn, Play
from benchmarks._processes import IN_MEMORY
from benchmarks._rates import measured_rates
from benchmarks._served import DoorsRun, write_adapter, write_version
from benchmarks._shapes import write_chat_policy
from elastic.protocol.http_clients import sync_client
from elastic.protocol.run_secrets import RunSecrets

MODEL = "policy"
OPTIONS = ("--model-name", MODEL, "--plain", "127.0.0.0/8")
VLLM_START_S = 600.0
UPDATES = 3
FORGET_MB = 1.0
"""Of the journal, where hours are measured: often enough for it to be seen in minutes."""
LEFT_OUT = {
    "ratio": None,
    "skipped_because": "a policy of 61 M parameters takes longer to begin than a quick run lasts",
}
RATES_LEFT_OUT: Figures = {
    "tokens_per_s_over_run": None,
    "tokens_per_s": {"skipped_because": "two more runs take longer to begin than a quick run has left"},
}
REQUESTS, QUICK_REQUESTS = 2000, 200


def measured_doors(run: DoorsRun) -> Figures:
    """Every peer, one after the other."""
    secrets = RunSecrets.of(run.run_dir)
    front = FrontSeen(run.url(), MODEL, secrets.control_key(), secrets.requests_key())
    run.until("a turn", lambda: _answers(front))
    return {name: _played(run, front, number, play) for number, (name, play) in enumerate(PEERS.items())}


def measured_adapters(directory: Path, *, quick: bool = False) -> Figures:
    """Every peer that offers adapters, at a run on vLLM, where that is installed and there is the time to start it."""
    if why := skipped_without_vllm() or ("--quick" if quick else ""):
        return {name: {"calls": 0, "passed": None, "skipped_because": why} for name in WITH_ADAPTERS}
    base = write_chat_policy(directory / "base", "smallest-for-vllm")
    with DoorsRun(directory, options=OPTIONS, kind="adapted", policy=base) as run:
        secrets = RunSecrets.of(run.run_dir)
        front = FrontSeen(run.url(), MODEL, secrets.control_key(), secrets.requests_key())
        run.until("a turn of the base", lambda: _answers(front), VLLM_START_S)
        return {
            name: _played(run, front, number, play, write_adapter, _with_adapters)
            for number, (name, play) in enumerate(WITH_ADAPTERS.items())
        }


def _answers(front: FrontSeen) -> bool:
    headers = {"Authorization": f"Bearer {front.requests_key}"}
    body = {"prompt": [1], "max_tokens": 1}
    try:
        with sync_client(front.url, by_proxy=False, headers=headers, timeout=TIMEOUT_S) as client:
            answer = client.post(f"{front.url}/v1/completions", json=body)
    except httpx.TransportError:
        return False
    return answer.status_code == 200


def _played(
    run: DoorsRun,
    front: FrontSeen,
    number: int,
    play: Play,
    write: Callable[[DoorsRun, int], Path] = write_version,
    checked: Callable[[Sequence[PeerTurn], Sequence[Path]], bool] = lambda told, offered: _of_last(told, offered),
) -> Figures:
    offered = [write(run, UPDATES * number + update) for update in range(1, UPDATES + 1)]
    try:
        calls, told = asyncio.run(play(front, offered))
    except CallFailed as failure:
        return {"calls": None, "passed": False, "failed": str(failure)}
    [file] = offered[-1].glob("*.safetensors")
    served = load_file(file)
    found = run.pulled(UPDATES * (number + 1))
    same = found.keys() == served.keys() and all(bool((found[name] == served[name]).all()) for name in served)
    return {"calls": calls, "passed": same and checked(told, offered), "skipped_because": ""}


def _of_last(told: Sequence[PeerTurn], offered: Sequence[Path]) -> bool:
    """Whether each turn is whole, and of the directory before it: by its name, its number, or the name of its copy."""
    for number, (turn, directory) in enumerate(zip(told, offered, strict=True), 1):
        names = {directory.name, str(number)}
        whole = len(turn.ids) == len(turn.logprobs) == TOKENS
        of_it = all(name in names or name.endswith(f"-{number:06d}") for name in turn.versions or ())
        if not (whole and of_it):
            return False
    return True


def _with_adapters(told: Sequence[PeerTurn], offered: Sequence[Path]) -> bool:
    """Whether each turn is whole, and all of it by one adapter's name."""
    whole = all(len(turn.ids) == len(turn.logprobs) == TOKENS for turn in told)
    return whole and len(told) == len(offered) and all(len({*turn.versions}) == 1 for turn in told if turn.versions)


def main(arguments: Arguments) -> Figures:
    place = arguments.scratch
    if arguments.hours:
        with DoorsRun(place, f"journal.forget_mb={FORGET_MB}", workers=WORKERS, options=OPTIONS) as run:
            return {"hours": measured_hours(run, 0, arguments.hours)}
    requests = QUICK_REQUESTS if arguments.quick else REQUESTS
    whole, adapters = place / "whole", place / "adapters"
    whole.mkdir()
    adapters.mkdir()
    with DoorsRun(whole, workers=WORKERS, options=OPTIONS) as run:
        doors = measured_doors(run)
        churn = measured_churn(run, UPDATES * len(PEERS), requests)
    update = LEFT_OUT if arguments.quick else _updates(place)
    doors |= measured_adapters(adapters, quick=arguments.quick)
    rates = RATES_LEFT_OUT if arguments.quick else measured_rates(place)
    return {"doors": doors, "update": update, "churn": churn, **rates}


def _updates(place: Path) -> Figures:
    (own := place / "update").mkdir()
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as memory:
        return measured_update(own, Path(memory))


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--hours", type=float, default=0.0, help="churn alone, for so long, and what grows meanwhile"),
    )
