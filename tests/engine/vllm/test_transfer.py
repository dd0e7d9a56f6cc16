"""A vLLM that others start takes versions from a relay by itself, in place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

TIMEOUT_S = 900.0
PLUGIN = "[vllm.general_plugins]\nelastic = elastic.engine.vllm.plugin:register\n"

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


def test_three_deltas_are_served_bit_for_bit_and_a_forged_one_is_refused(tmp_path: Path) -> None:
    """Also in an environment that Elastic was installed in before it had the plugin."""
    about = tmp_path / "site" / "elastic_plugin-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: elastic-plugin\nVersion: 1\n")
    (about / "entry_points.txt").write_text(PLUGIN)
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    path = os.pathsep.join(map(str, (about.parent, Path(__file__).parent / "kernels", Path(__file__).parents[3])))
    served = subprocess.run(
        [sys.executable, "-m", "tests.engine.vllm.vllm_of_others", str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "KERNELS": "torch",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PROMETHEUS_MULTIPROC_DIR": str(metrics),
        },
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert served.returncode == 0, (served.stdout + served.stderr)[-4000:]
    [refused] = [line for line in served.stdout.splitlines() if line.startswith("refused: ")]
    assert "sign" in refused, refused
