"""AWS and Modal on this machine, side by side, for a run that has leases from both and from a serving cluster.

As a script (`make run-clouds`) it does so with the example: one run, one report. With `--serve` it only starts the two
and tells how to use them from another terminal, as in
`elastic doctor CONFIG`, `elastic providers offers CONFIG`, `elastic run CONFIG --providers serving,ec2,modal`.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.clouds.aws_server.cloud import Cloud, cloud
from tests.clouds.modal_server import Bench, bench

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "frozenlake.toml"
POLL_S = 0.2
PROVIDERS = "serving,ec2,modal"
ONE_OF_EACH: Mapping[str, Mapping[str, Any]] = {
    "serving": {"hosts": 1, "max_workers": 1},
    "ec2": {"max_workers": 1},
    "modal": {"max_workers": 1, "gpu": "A10", "cores": 4, "memory_mb": 16384, "cold_start_s": 10, "reconcile_s": 5},
}
"""Of a run on two cores. An A10 is about what a g5.xlarge has."""


class LocalClouds(NamedTuple):
    """`sections` are what a run's configuration has to say of its providers there."""

    aws: Cloud
    modal: Bench
    sections: Mapping[str, Mapping[str, Any]]

    def config(self, example: str) -> str:
        """The example's, with these sections in place of its own."""
        head = example.partition("[providers.")[0]
        tables = [
            "\n".join([f"[providers.{name}]", *(f"{key} = {toml(value)}" for key, value in section.items())])
            for name, section in self.sections.items()
        ]
        return head + "\n\n".join(tables).replace("[providers.serving]", '[providers.serving]\nkind = "serving-replay"')


@contextlib.contextmanager
def local_clouds(directory: Path) -> Iterator[LocalClouds]:
    """Both, with Elastic's app deployed. Credentials of this process are theirs meanwhile."""
    with contextlib.ExitStack() as undo:
        aws = undo.enter_context(cloud(directory / "aws", boot_s=0.5))
        modal = undo.enter_context(bench(directory / "modal"))
        former = {name: os.environ.get(name) for name in modal.environment}
        undo.callback(_restore, former)
        os.environ.update(modal.environment)
        elastic("modal", "deploy")
        sections = {**ONE_OF_EACH, "ec2": aws.settings(**ONE_OF_EACH["ec2"])}
        yield LocalClouds(aws, modal, sections)


def sets(sections: Mapping[str, Mapping[str, Any]], *more: str) -> list[str]:
    """Providers' sections and more settings, as arguments of a command."""
    own = [f"providers.{name}.{key}={toml(value)}" for name, s in sections.items() for key, value in s.items()]
    return [part for setting in (*own, *more) for part in ("--set", setting)]


def toml(value: Any) -> str:
    """As a configuration has it."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(one) for one in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def elastic(*arguments: str) -> int:
    """A command as a user has it; returns its exit status. Raises `CalledProcessError` but for a run's."""
    command = [sys.executable, "-m", "elastic.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, check=arguments[0] != "run").returncode


def _restore(former: Mapping[str, str | None]) -> None:
    for name, value in former.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _serve(clouds: LocalClouds, directory: Path) -> None:
    config = directory / "clouds.toml"
    config.write_text(clouds.config(EXAMPLE.read_text()))
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", *clouds.modal.environment)
    told = {name: os.environ[name] for name in names}
    print("export", *(f"{name}={shlex.quote(value)}" for name, value in told.items()))
    print(f"cd {ROOT}; export PATH={Path(sys.executable).parent}:$PATH; alias elastic='python -m elastic.cli'")
    print(f"elastic run {config} --providers {PROVIDERS}", flush=True)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    while not over.wait(POLL_S):
        pass


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--serve", action="store_true", help="start the clouds alone, until ^C")
    options.add_argument("--steps", type=int, default=40, help="of the run (default: %(default)s)")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as name, local_clouds(Path(name)) as clouds:
        if arguments.serve:
            _serve(clouds, Path(name))
            return 0
        elastic("prepare", str(EXAMPLE))
        signal.signal(signal.SIGINT, lambda *_: None)  # ^C is the run's, which ends in order.
        steps = f"run.steps={arguments.steps}"
        return elastic(
            "run", str(EXAMPLE), "--providers", PROVIDERS, *sets(clouds.sections, steps, "seeding.window_s=0.0")
        )


if __name__ == "__main__":
    sys.exit(main())
