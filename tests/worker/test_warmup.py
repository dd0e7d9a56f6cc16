import subprocess
import sys

import pytest

LEND = """
import sys
import msgspec
from elastic.compose import processes
from elastic.config import EngineConfig
from elastic.worker import agent, serving_host
from elastic.worker.warmup import warm_up

warm_up()
before = set(sys.modules)

from elastic.engine import create_engine
from elastic.engine.model.config import Qwen3Config
from elastic.weights.puller import Puller
from elastic.weights.relay import open_relay
from elastic.weights.signing import Trust
from elastic.weights.peer_cache import PeerCacheRelay

create_engine(msgspec.to_builtins(Qwen3Config()) | {"model_type": "qwen3"}, EngineConfig())
trust = Trust("run", "")
Puller(PeerCacheRelay(open_relay("/tmp"), open_relay("/tmp"), "w", trust), trust)
print(sorted(name for name in set(sys.modules) - before if name.partition(".")[0] in ("elastic", "torch", "numba")))
"""


@pytest.mark.nightly
def test_a_loan_finds_everything_imported() -> None:
    done = subprocess.run([sys.executable, "-c", LEND], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
