"""AWS on this machine: a moto server, a proxy before it, and instances that are processes.

Everything that a client sees goes over HTTP. The stand-in's own side (`warn`, `take_back`, `books`) is what AWS would
do or know by itself.
"""

import asyncio
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from tests.clouds.aws_server.machines import Machines
from tests.clouds.aws_server.proxy import Proxy
from tests.clouds.aws_server.record import TAKEN, Books, Prices, Rented

T = TypeVar("T")

REGION = "us-east-1"
KEY = "AKIASTANDIN"
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0


class Cloud:
    """Use `cloud(...)`."""

    def __init__(self, directory: Path, capacity: dict[tuple[str, str], int], boot_s: float, prices: Prices) -> None:
        self.books = Books(prices, capacity)
        self._moto_port, port = _free_port(), _free_port()
        self.moto_url, self.url = f"http://127.0.0.1:{self._moto_port}", f"http://127.0.0.1:{port}"
        self.machines = Machines(directory, port, boot_s)
        self._log = (directory / "moto.log").open("ab")
        self._moto = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._moto_port)],
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"MOTO_EC2_LOAD_DEFAULT_AMIS": "true", "MOTO_ENABLE_ISO_REGIONS": "false"},
            start_new_session=True,
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.proxy = Proxy(self.books, self.moto_url, self.machines.start, self.machines.kill)
        self._run(self.proxy.start(port))
        self._clients: dict[str, Any] = {}
        self.queue = ""
        self.image = ""

    def set_up(self) -> None:
        """What an operator would: an image, subnets by zone, and a queue to which EC2's notices go."""
        self._until_moto_answers()
        ec2 = self.client("ec2")
        self.image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
        self.proxy.images.add(self.image)
        subnets = ec2.describe_subnets()["Subnets"]
        self.proxy.subnets.update({one["AvailabilityZone"]: one["SubnetId"] for one in subnets})
        zones = ec2.describe_availability_zones()["AvailabilityZones"]
        self.proxy.zone_ids.update({one["ZoneName"]: one["ZoneId"] for one in zones})
        sqs, events = self.client("sqs"), self.client("events")
        self.queue = sqs.create_queue(QueueName="elastic-notices")["QueueUrl"].replace(self.moto_url, self.url)
        arn = sqs.get_queue_attributes(QueueUrl=self.queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        events.put_rule(Name="elastic", EventPattern=json.dumps({"source": ["aws.ec2"]}))
        events.put_targets(Rule="elastic", Targets=[{"Id": "queue", "Arn": arn}])

    def client(self, service: str) -> Any:
        """Straight to moto, past the proxy."""
        if service not in self._clients:
            boto3 = importlib.import_module("boto3")
            self._clients[service] = boto3.client(
                service,
                endpoint_url=self.moto_url,
                region_name=REGION,
                aws_access_key_id=KEY,
                aws_secret_access_key="stand-in",
            )
        return self._clients[service]

    # What EC2 does by itself

    def warn(self, instance: str, notice_s: float) -> None:
        """Both ways: the metadata at once, the event as EventBridge delivers it. The instance goes on."""
        self.books.rented[instance].action_s = time.time() + notice_s
        self._event("EC2 Spot Instance Interruption Warning", {"instance-id": instance, "instance-action": "terminate"})

    def age(self, instance: str, seconds: float) -> None:
        """As if the instance had begun so much earlier."""
        with self.books.lock:
            self.books.rented[instance].began_s -= round(seconds)

    def advise(self, instance: str) -> None:
        """To rebalance: no end is named."""
        self.books.rented[instance].advised_s = time.time()
        self._event("EC2 Instance Rebalance Recommendation", {"instance-id": instance})

    def take(self, instance: str) -> None:
        """At once, whatever was said before."""
        self._run(self.proxy.end(instance, TAKEN))
        with contextlib.suppress(Exception):
            self.client("ec2").terminate_instances(InstanceIds=[instance])

    def take_back(self, instance: str, notice_s: float) -> None:
        """With notice, if it is more than 0; returns once the instance is gone."""
        if notice_s:
            self.warn(instance, notice_s)
            time.sleep(notice_s)
        self.take(instance)

    def living(self) -> list[Rented]:
        return self.books.living()

    def until(self, what: str, condition: Callable[[], T], timeout_s: float = 60.0) -> T:
        deadline_s = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not within {timeout_s:g} s: {what}")
            time.sleep(0.02)
        return found

    def settings(self, **more: Any) -> dict[str, Any]:
        """Of a provider that asks here, quick as tests are."""
        kinds = list(dict.fromkeys(kind for kind, _ in self.books.capacity))
        return {
            "endpoint_url": self.url,
            "region": REGION,
            "image": self.image,
            "instance_types": kinds,
            "queue": self.queue,
            "poll_s": 0.3,
            "reconcile_s": 0.5,
            "retry_s": 0.5,
            "boot_s": 1.0,
            **more,
        }

    def close(self) -> None:
        self.machines.close()
        self._run(self.proxy.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self._moto.terminate()
        self._moto.wait()
        self._log.close()

    def _event(self, kind: str, detail: dict[str, str]) -> None:
        entry = {"Source": "aws.ec2", "DetailType": kind, "Detail": json.dumps(detail), "Time": datetime.now(UTC)}
        self.client("events").put_events(Entries=[entry])

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(ANSWER_TIMEOUT_S)

    def _until_moto_answers(self) -> None:
        def answers() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._moto_port), 1):
                return True
            return False

        self.until("moto answers", answers, START_TIMEOUT_S)


@contextlib.contextmanager
def cloud(
    directory: Path,
    capacity: dict[tuple[str, str], int] | None = None,
    *,
    boot_s: float = 0.0,
    prices: Prices | None = None,
) -> Iterator[Cloud]:
    """With these pools, by (instance type, zone). Credentials of this process are the stand-in's meanwhile."""
    pools = capacity or {("g5.xlarge", "us-east-1a"): 4, ("g5.xlarge", "us-east-1b"): 4}
    names = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": "stand-in", "AWS_EC2_METADATA_DISABLED": "true"}
    former = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    made = Cloud(directory, pools, boot_s, prices or Prices())
    try:
        made.set_up()
        yield made
    finally:
        made.close()
        for name, value in former.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
