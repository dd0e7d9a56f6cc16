"""What the tests do on a local server, on a real account: `python tests/clouds/modal_account.py [--advertise HOST]`.

Deploys an app of its own, calls a reward function on it, and says what that cost by Modal's record; with `--advertise`,
by which Modal reaches this machine's ports 7433 and 7434, a short run of the frozen lake follows, with its rollouts on
Modal. Says what is left on the account, and stops the app.
Costs some cents; with `--gpu` what Modal takes for it.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from elastic.compose.modal_deployment import deploy
from elastic.system import modal as modal_platform
from functions.base import Call
from functions.modal import ModalFunctionPool

APP = "elastic-account-test"
CALLS, TIMEOUT_S = 20, 300.0
EXAMPLE = Path(__file__).parents[2] / "examples" / "frozenlake.toml"


async def rewards() -> dict[str, float]:
    """What calls of a function came to."""
    metered: list[Call] = []
    pool = ModalFunctionPool("math:sqrt", concurrency=4, idle_s=2, meter=metered.append, settings={"app": APP})
    await pool.start()
    try:
        found = await asyncio.gather(*(pool.invoke(f"key-{n}", n * n, TIMEOUT_S) for n in range(CALLS)))
    finally:
        await pool.aclose()
    assert found == [float(n) for n in range(CALLS)], found
    cold_starts = sum(call.cold_start_s > 0 for call in metered)
    return {"calls": len(metered), "usd": sum(call.usd for call in metered), "cold_starts": cold_starts}


def rollouts(advertise: str, gpu: str) -> dict[str, object]:
    """A short run's summary."""
    settings = [f"providers.modal.app={APP}", "providers.modal.max_workers=1", "run.steps=2", "rollout.groups=4"]
    if gpu:
        settings.append(f"providers.modal.gpu={gpu}")
    with tempfile.TemporaryDirectory() as directory:
        settings.append(f"run.directory={directory}")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "elastic.cli", "run", str(EXAMPLE), "--providers", "modal", "--json"),
                *("--listen", "0.0.0.0:7433", "--advertise", advertise),
                *(part for setting in settings for part in ("--set", setting)),
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    summary = json.loads(done.stdout.splitlines()[-1])
    return {"tokens": summary.get("tokens"), "providers": summary.get("providers")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advertise", default="", help="this machine's name or address, as Modal reaches it")
    parser.add_argument("--gpu", default="", help="kind of GPU of the rollout worker; else it computes on CPUs")
    arguments = parser.parse_args()
    print(deploy(APP))
    modal = modal_platform.modal()
    try:
        print({"rewards": asyncio.run(rewards())})
        if arguments.advertise:
            print({"rollouts": rollouts(arguments.advertise, arguments.gpu)})
    finally:
        subprocess.run([sys.executable, "-m", "modal", "container", "list"], check=False)
        subprocess.run([sys.executable, "-m", "modal", "app", "stop", APP, "--yes"], check=False)
        modal.Client.from_env().close()


if __name__ == "__main__":
    main()
