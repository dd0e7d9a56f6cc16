"""Schemathesis against an API that describes itself, in an environment of its own (`make fuzz`)."""

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks._common import Figures

FUZZER = ROOT / ".cache" / "fuzz" / "bin" / "schemathesis"
WITHOUT = "schemathesis is not installed here: `make fuzz` sets up an environment"
EXAMPLES, EXAMPLES_QUICK = 60, 4
"""Generated for each operation, at least one more in each phase."""
QUICK_S = 30
TIMEOUT_S = 3 * 3600.0
REQUEST_TIMEOUT_S = 15.0
SEED = 18
MISSING = ["400", "401", "403", "406", "415", "422", "428"]


class Fuzzed(NamedTuple):
    """An API at `url`, whose description is at `/openapi.json`, and a key of it; what its paths' parameters are `known`
    to be; the statuses with which what its description allows may be `accepted`."""

    url: str
    key: str
    known: Mapping[str, Sequence[str]]
    accepted: Sequence[str]


def fuzz(api: Fuzzed, directory: Path, seed: int, *, quick: bool, within_s: int = 0) -> Figures:
    """One run of the fuzzer, and its report; both are kept in the directory."""
    config, report, output = (directory / f"fuzz-{seed}.{suffix}" for suffix in ("toml", "json", "txt"))
    config.write_text(_config(api))
    limit_s = QUICK_S if quick else within_s
    command = [str(FUZZER), "--config-file", str(config), "run", f"{api.url}/openapi.json"]
    command += ["--report", "json", "--report-json-path", str(report)]
    command += ["--seed", str(seed), "-n", str(EXAMPLES_QUICK if quick else EXAMPLES), "--continue-on-failure"]
    command += ["--request-timeout", str(REQUEST_TIMEOUT_S), "--warnings", "off", "--no-shrink"]
    command += ["--max-time", str(limit_s)] if limit_s else []
    with output.open("w") as said:
        subprocess.run(command, stdout=said, stderr=said, cwd=directory, timeout=TIMEOUT_S, check=False)
    if not report.exists():
        raise RuntimeError(f"schemathesis made no report: {output.read_text()[-2000:]}")
    return json.loads(report.read_text())


def failures(report: Mapping[str, Any]) -> Counter[str]:
    """How often each kind of failure was found, by its name and its operations."""
    found: Counter[str] = Counter()
    for failure in (*report["failures"], *report["errors"]):
        found[f"{failure['title']}: {', '.join(failure.get('operations', []))}"] += failure["count"]
    return found


def tested(report: Mapping[str, Any]) -> int:
    """How many operations there were requests to."""
    return (report["operations"] or {}).get("tested", 0)


def _config(api: Fuzzed) -> str:
    lines: list[str] = []
    for name, values in {**api.known, "etag": ["*"]}.items():
        lines += [f"[dictionaries.{name}]", f"values = {json.dumps(values)}"]
    lines += ["[auth.openapi.key]", f"bearer = {json.dumps(api.key)}", "[parameters]"]
    lines += [f'"path.{name}" = {{ dictionary = "{name}", probability = 0.7 }}' for name in api.known]
    lines += ['"header.if-match" = { dictionary = "etag", probability = 1.0 }']
    lines += ["[checks.positive_data_acceptance]", f"expected-statuses = {json.dumps(api.accepted)}"]
    lines += ["[checks.missing_required_header]", f"expected-statuses = {json.dumps(MISSING)}"]
    return "\n".join(lines) + "\n"
