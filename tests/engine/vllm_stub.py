"""In the place of vLLM's process: the other end of the socket, which does as `STUB` says. Imports little."""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import msgspec

line = Connection(int(os.environ["ELASTIC_VLLM_SOCKET"]))


def send(*message: object) -> None:
    """As `elastic.engine.vllm.messages` has it: the message's name, and its fields."""
    line.send_bytes(msgspec.msgpack.encode(message))


does, _, words = os.environ["STUB"].partition(":")
line.recv_bytes()
if does == "fails":
    send("Failed", words)
    sys.exit(1)
if does == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if does == "hangs":
    time.sleep(600)
if does == "obeys":
    send("Up", "cuda", 256, 64)
    while True:
        try:
            name, call, *_ = msgspec.msgpack.decode(line.recv_bytes())
        except EOFError:
            sys.exit()
        with open(words, "a") as told:
            told.write(f"{name}\n")
        send("Reply", call, "", "", None, True, [], 77)
send("Up", "cpu", 256, 64)
while msgspec.msgpack.decode(line.recv_bytes())[0] != "Submit":
    pass
sys.exit(3)
