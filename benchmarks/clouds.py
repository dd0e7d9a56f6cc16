"""Runs on clouds that stand in for the real ones on this machine: what is lost, left over and billed, and how long a
lease takes to its first token.

Each cloud is a server that speaks the vendor's protocol to the vendor's own client, and whose instances are processes
here; `--json` has one object for each. Runs are `elastic run` with small settings; instances are taken back with notice
and without, workers are killed inside them, and the orchestrator is killed, half of the times between its order of an
instance and the answer, and resumed. `tokens_lost` is judged by replaying the journals; `orphans` are what still lives
by the server's own record once a run is over. `usd` is the runs' own account, and `usd_by_their_bill` what the server
computes from its record of starts, ends and prices. `first_token_s` has the medians of what a lease's first token waits
for: `request` until it is granted, `boot` until the worker's process begins, `join`, `pull` of the weights, and `warm`.

Where a vendor's client is missing: `skipped_because`; `make test-clouds` makes an environment that has them.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks import _clouds_ec2, _clouds_modal
from benchmarks._common import Arguments, Figures, benchmark, option

PROVIDERS: dict[str, Callable[[bool], Figures]] = {"ec2": _clouds_ec2.measure, "modal": _clouds_modal.measure}
"""Each is told whether it is to be quick."""


def main(parsed: Arguments) -> Figures:
    wanted = [parsed.only] if parsed.only else list(PROVIDERS)
    # Quick ones mostly wait for processes to start: all clouds at once. Full ones are judged by their times.
    with ThreadPoolExecutor(len(wanted) if parsed.quick else 1) as threads:
        measured = {name: threads.submit(PROVIDERS[name], parsed.quick) for name in wanted}
        return {name: one.result() for name, one in measured.items()}


if __name__ == "__main__":
    benchmark(__doc__, main, option("--only", choices=list(PROVIDERS), help="measure one cloud alone"))
