"""A script that takes turns on a pool and, while a file is there, holds more host memory after every training."""

import sys
import time
from pathlib import Path

import elastic

PHASE_S = 0.4
GROWS_BYTES = 96 << 20
held: list[bytes] = []
grows = Path(sys.argv[1])

while True:
    with elastic.phase("rollout"):
        time.sleep(PHASE_S)
    with elastic.phase("train"):
        time.sleep(PHASE_S)
        if grows.exists():
            held.append(b"\1" * GROWS_BYTES)
