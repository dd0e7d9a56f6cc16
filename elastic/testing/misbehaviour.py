"""What users' code may do to an env worker: the conformance suite of environments has it done in each kind.

It imports nothing of Elastic's: whatever process the kind runs users' code in may have this.
"""

import math
import os
import sys
import time
from typing import Any

BIG_CHARACTERS = 10_000_000


def behave(answer: str) -> Any:
    """What users' code does with an answer of the policy: it returns a reward, or it misbehaves.

    At `truncate` an environment of several steps is to end the episode at a limit of its own."""
    match answer.strip().casefold():
        case "raise":
            raise ValueError("no such tool")
        case "leave":
            sys.exit(0)
        case "exit":
            os._exit(0)
        case "hang":
            time.sleep(3600)
        case "nan":
            return math.nan
        case "text":
            return "good"
        case "huge":
            return 10**400
        case "secret":
            print(dict(os.environ), flush=True)
        case "flood":
            print("x" * 10 * BIG_CHARACTERS)
        case _:
            pass
    return 1.0
