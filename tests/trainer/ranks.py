"""A trainer of several ranks in a process of its own, which may be made to die, and the tests that ask it.

`python -m tests.trainer.ranks` is that process: it is told one order a line, and answers each with one.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

GROUPS = 4
STEPS = 4


def config_of(model: Path, gpus: int, own: dict[str, object] | None = None, **settings: object) -> dict[str, Any]:
    """A run's configuration, of CPU ranks."""
    return {
        "model": {"checkpoint": str(model)},
        "run": {"steps": STEPS},
        "environment": {"name": "frozenlake"},
        "engine": {"device": "cpu"},
        "rollout": {"groups": GROUPS, "group_size": 4},
        "trainer": {
            "kind": "transformers",
            "gpus": gpus,
            "updates_per_step": 2,
            "warmup_updates": 0,
            "mismatch_max": 1e9,
            "learning_rate": 1e-2,
            "adam_epsilon": 1e-4,
            "micro_batch_tokens": 45,
            "transformers": own or {},
        }
        | settings,
    }


class RankedProcess:
    """The process; orders are the methods of `_Orders`."""

    def __init__(self, config: dict[str, Any], pass_fds: Sequence[int] = (), **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.ranks", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
            env=os.environ | environment,
        )
        self.pids: list[int] = []
        """Of the further ranks."""
        try:
            self.pids = self.ask("pids")
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, *arguments: object, one: bool = False) -> Any:
        """`one` asks a trainer of one rank in the same process. Raises `ConnectionError` where the process has ended,
        `ValueError` where it refuses, and `RuntimeError` where it fails."""
        given, said = self._process.stdin, self._process.stdout
        assert given is not None
        assert said is not None
        given.write(json.dumps([what, one, *arguments]) + "\n")
        given.flush()
        beside = ""
        for line in said:
            if line.startswith("["):
                how, found = json.loads(line)
                if how == "refused":
                    raise ValueError(found)
                if how == "failed":
                    raise RuntimeError(found)
                return found
            beside = line
        raise ConnectionError(f"the first rank ended with status {self._process.wait()}: {beside}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Orders:
    """What a trainer is told. It is made as it is first needed."""

    def __init__(self, config: dict[str, Any]) -> None:
        from elastic.config import Config
        from elastic.worker.trainer import create_trainer

        self._trainer: Any = create_trainer(Config.model_validate(config))
        self._puller: Any = None
        self._published = 0

    def pids(self) -> list[int]:
        return self._trainer.pids

    def train(self, seed: int, spoilt: int | None = None) -> dict[str, Any]:
        """A step of groups drawn by `seed`, of which one may have log-probabilities that are no numbers."""
        from msgspec.structs import replace

        from tests.trainer.conftest import random_group

        rng = random.Random(seed)
        for index in range(GROUPS):
            group = random_group(index, rng, [1.0, 0.0, 0.0, 1.0])
            if index == spoilt:
                last = group.trajectories[-1]
                odd = replace(last.sampled, logprobs=bytearray(b"\0\0\xc0\x7f" * last.sampled.tokens))
                group = replace(group, trajectories=[*group.trajectories[:-1], replace(last, sampled=odd)])
            self._trainer.train_group(group)
        metrics = self._trainer.update()
        checks = [[one.worker, one.tokens, one.log_ratio] for one in self._trainer.take_checks()]
        return {"metrics": metrics, "unusable": dict(self._trainer.unusable), "checks": checks}

    def weights(self, path: str) -> None:
        """Of several ranks as a worker has them: these publish the next version, which is pulled."""
        from safetensors.torch import save_file

        tensors = self._trainer.tensors() or self._pulled(Path(path).with_name(f"relay-{os.getpid()}"))
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)

    def _pulled(self, relay: Path) -> Any:
        from elastic.weights.directory import DirectoryRelay
        from elastic.weights.puller import Puller
        from elastic.weights.signing import SigningKey
        from elastic.worker.publication import PublishingTerms, RelayPlace

        self._trainer.hold(in_host_memory=False)
        if self._puller is None:
            key = SigningKey()
            relay.mkdir()
            relay.with_suffix(".key").write_text(key.public)
            self._trainer.begin_publishing(PublishingTerms("run", {}, RelayPlace(str(relay), "", ""), 1.0, key.secret))
            self._puller = Puller(DirectoryRelay(relay), key.trust("run"))
        self._published += 1
        self._trainer.publish(self._published, ())
        return self._puller.pull(self._published)

    def save(self, path: str) -> None:
        self._trainer.save(Path(path))

    def load(self, path: str) -> int:
        self._trainer.load(Path(path))
        return self._trainer.version

    def park(self) -> list[float]:
        return list(self._trainer.park())

    def resume(self) -> list[float]:
        return list(self._trainer.resume())

    def signal_when(self, function: str, number: int, rank: int, path: str) -> None:
        """Send a rank a signal as soon as this function begins here: ranks do the same at the same time. When that was
        stands in a file then."""

        def kill() -> None:
            Path(path).write_text(str(time.time()))
            os.kill(self._trainer.pids[rank - 1], number)

        _when(function, kill)

    def fail_when(self, function: str) -> None:
        """Have this function fail here, and on no other rank."""

        def fail() -> None:
            raise OSError("the disk is gone")

        _when(function, fail)


def _when(function: str, then: Callable[[], None]) -> None:
    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_qualname == function:
            sys.setprofile(None)
            then()

    sys.setprofile(look)


def main(config: dict[str, Any]) -> None:
    from elastic.engine.model.stored import CheckpointError

    of_one = config | {"trainer": config["trainer"] | {"gpus": 1}}
    made: dict[bool, _Orders] = {}
    for line in sys.stdin:
        what, one, *arguments = json.loads(line)
        if one not in made:
            made[one] = _Orders(of_one if one else config)
        order: Callable[..., Any] = getattr(made[one], what)
        try:
            answer = ["done", order(*arguments)]
        except (CheckpointError, ValueError) as error:
            answer = ["refused", str(error)]
        except Exception as error:
            answer = ["failed", f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
