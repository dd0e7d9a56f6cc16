"""In the place of vLLM's process: the other end of the socket, which does as `STUB` says."""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from elastic.engine.vllm import messages as m

line = m.Line.of_vllm(Connection(int(os.environ["ELASTIC_VLLM_SOCKET"])))
does, _, words = os.environ["STUB"].partition(":")
line.receive()
if does == "fails":
    line.send(m.Failed(words))
    sys.exit(1)
if does == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if does == "hangs":
    time.sleep(600)
line.send(m.Up("cpu", 256, 32, 64, "0.32.0"))
while not isinstance(line.receive(), m.Submit):
    pass
sys.exit(3)
