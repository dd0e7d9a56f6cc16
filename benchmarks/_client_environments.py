"""The released clients that are measured and tested, each in an environment of its own: `.cache/clients-NAME`.

    python benchmarks/_client_environments.py NAME…

makes those environments that are not there.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import ROOT

OPENAI_3 = "openai==3.57.0"
LITELLM = ("litellm==1.106.2", "mcp==2.3.0")
"""It imports `mcp` where a call has tools, and does not require it."""
VLLM_BENCH = "vllm bench serve"


class ReleasedClient(NamedTuple):
    """pins: what is installed; without dependencies where it says so, which are then the repository's own.
    script: below `benchmarks/_clients`.
    borrows: whether the repository's packages are found, too, behind the environment's own: its tests run there.
    opens: how many trajectories the script opens by itself; where none, it is given the key of one.
    """

    pins: tuple[str, ...]
    script: str
    borrows: bool = False
    dependencies: bool = True
    opens: int = 0

    @property
    def trajectories(self) -> int:
        return self.opens or 1


CLIENTS: Mapping[str, ReleasedClient] = {
    "openai2": ReleasedClient(
        ("openai==2.54.0", "distro==1.9.0", "jiter==0.19.0", "sniffio==1.3.1"), "openai_client", True, False
    ),
    "openai3": ReleasedClient((OPENAI_3, "jiter==0.19.0", "sniffio==1.3.1"), "openai_client", True, False),
    "openai-agents": ReleasedClient(("openai-agents==0.24.0", OPENAI_3), "agents_client", True),
    "anthropic": ReleasedClient(("anthropic==2.14.0",), "anthropic_client", True),
    "litellm": ReleasedClient(LITELLM, "litellm_client", True),
    "langchain": ReleasedClient(("langchain-openai==1.7.4",), "langchain_client"),
    "inspect-ai": ReleasedClient(("inspect-ai==0.3.285", OPENAI_3), "inspect_client"),
    "mini-swe-agent": ReleasedClient(("mini-swe-agent==2.4.6", *LITELLM), "mini_swe_client"),
    "renderers": ReleasedClient(("renderers[transformers]==0.1.12", "httpx==0.28.1"), "renderers_client"),
    "verifiers": ReleasedClient(("verifiers==0.4.0",), "verifiers_client", opens=2),
    VLLM_BENCH: ReleasedClient((), "vllm_bench"),
}


def environment(name: str) -> Path:
    return ROOT / ".cache" / ("vllm-venv" if name == VLLM_BENCH else f"clients-{name}")


def python_of(name: str) -> Path:
    return environment(name) / "bin" / "python"


def why_missing(name: str) -> str:
    """Why a client is not measured; empty where it is installed."""
    if name == VLLM_BENCH:
        return "" if python_of(name).exists() else "vLLM is not installed: `make test-vllm` sets up .cache/vllm-venv"
    if (environment(name) / "installed").exists():
        return ""
    return f"not installed: --install makes .cache/clients-{name}, and `make test-clients` those that tests need"


def make_environment(place: Path, *packages: str) -> str:
    """Make an environment with these packages. Returns why they do not install, if they do not."""
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(place)], [*pip, *packages]):
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            lines = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")] or [ended.stderr[-200:]]
            return f"{' '.join(packages)} does not install: {lines[-1]}"
    return ""


def install(name: str) -> str:
    """Make the environment, unless it is there with these pins. Returns why there is none, if it does not install."""
    client, place = CLIENTS[name], environment(name)
    pinned = "\n".join(client.pins) + "\n"
    if not client.pins or (not why_missing(name) and (place / "installed").read_text() == pinned):
        return why_missing(name)
    if why := make_environment(place, *([] if client.dependencies else ["--no-deps"]), *client.pins):
        return why
    if client.borrows:
        for site in place.glob("lib/python3*/site-packages"):
            ours = ROOT / ".venv" / site.relative_to(place)
            (site / "elastic.pth").write_text(f"{ours}\n{ROOT}\n")
    (place / "installed").write_text(pinned)
    return ""


if __name__ == "__main__":
    failed = {name: why for name in sys.argv[1:] if (why := install(name))}
    if failed:
        sys.exit("\n".join(f"{name}: {why}" for name, why in failed.items()))
