"""The whole control API, as its OpenAPI describes it, under requests that schemathesis makes up.

A server with its runner, and a project with runs that end by themselves, a webhook, a secret and further keys. All
phases (examples, coverage, fuzzing, stateful), with all default checks: no 5xx, no answer that the description does not
have, no authentication that is ignored, what is valid accepted, what is not refused. Schemathesis has an environment of
its own (`make fuzz`).

One check is told more than its defaults: of requests that the description allows, these answers count as accepted, too.

- 400: what no schema says. A submission names what is not installed, or no file of its project; a webhook leads to a
  private address; a secret is called as a variable of the system's own; both cursors of a list are given; two files of
  an upload have one path; a scope is not the role's.
- 410: the place in a stream after which is asked is of no event; 412: the tag is not that of what is there.
- 422: an Idempotency-Key came with another request before.

Where `If-Match` is missing 428 is the answer, as RFC 6585 has it.

- `requests`: that the server answered; `operations`: of the description, tested.
- `failures`: kinds of failures by operation, and errors of the fuzzer; `server_errors`: answers 5xx, as logged.
"""

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks._common import Arguments, Figures, benchmark, option
from benchmarks._fuzzer import FUZZER, REQUEST_TIMEOUT_S, SEED, WITHOUT, Fuzzed, failures, fuzz, tested
from benchmarks._hosted import CONFIG, HostedSite
from elastic.protocol.http_clients import sync_client

REQUESTS = 20_000
JOB_S = 0.5
ACCEPTED = ["2xx", "400", "401", "403", "404", "409", "410", "412", "422"]
RUNS = 3


def main(parsed: Arguments) -> Figures:
    if not FUZZER.exists():
        return {"skipped_because": WITHOUT}
    figures: Figures = {"requests": 0, "operations": 0, "failures": 0, "server_errors": 0}
    found: Counter[str] = Counter()
    with HostedSite.up(JOB_S, JOB_S, JOB_S) as site:
        api = Fuzzed(site.url, site.secret, _populate(site), ACCEPTED)
        for number in range(100):
            report = fuzz(api, site.home, parsed.seed + number, quick=parsed.quick, within_s=parsed.within_s)
            figures["requests"] = _answered(site)
            figures["operations"] = max(figures["operations"], tested(report))
            found += failures(report)
            if parsed.quick or parsed.within_s or figures["requests"] >= REQUESTS:
                break
        figures["failures"] = len(found)
        figures["server_errors"] = sum(line["status"] >= 500 for line in _requests(site))
        if parsed.keep:
            parsed.keep.mkdir(parents=True, exist_ok=True)
            for path in (*site.home.glob("*.log"), *site.home.glob("fuzz-*")):
                shutil.copy(path, parsed.keep)
    for failure, count in found.most_common():
        print(f"{count} x {failure}", file=sys.stderr)
    return figures


def _populate(site: HostedSite) -> dict[str, list[str]]:
    """Things for requests to be about: values of path parameters."""
    headers = {"authorization": f"Bearer {site.secret}"}
    with sync_client(site.url, by_proxy=False, base_url=site.url, headers=headers, timeout=REQUEST_TIMEOUT_S) as client:

        def post(path: str, body: dict[str, Any]) -> str:
            return client.post(path, json=body).raise_for_status().json()["id"]

        runs = [post("/v1/runs", {"config": CONFIG, "providers": ["spot"]}) for _ in range(RUNS)]
        project = post("/v1/projects", {"name": "fuzzed"})
        return {
            "run": runs,
            "project": [project, "default"],
            "key": [post("/v1/keys", {"name": f"key-{number}", "role": "viewer"}) for number in range(RUNS)],
            "webhook": [post("/v1/webhooks", {"url": "https://example.com/x", "events": ["run.finished"]})],
        }


def _requests(site: HostedSite) -> list[dict[str, Any]]:
    return [line for line in site.logged("api") if line["event"] == "request"]


def _answered(site: HostedSite) -> int:
    return len(_requests(site))


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--within-s", type=int, default=0, help="stop after so long, however few requests there were"),
        option("--keep", type=Path, help="keep the fuzzer's report and the server's log here"),
        option("--seed", type=int, default=SEED, help="of what is made up first"),
    )
