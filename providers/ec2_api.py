"""EC2, SQS and Secrets Manager as the provider `ec2` uses them: each method is one question or order, and blocks.

botocore repeats calls that failed for a cause that passes (adaptive mode: it also slows down where AWS throttles), with
the same client token, so that an order whose answer was lost is carried out once.
"""

import base64
import hashlib
import importlib
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import msgspec

from elastic.protocol.proxies import proxies_of_boto
from providers.base import ProviderUnavailable
from providers.ec2_market import Ec2Settings, PricePoint, SpotPool

RUN_TAG, PROVIDER_TAG, LEASE_TAG, PRICE_TAG = "elastic:run", "elastic:provider", "elastic:lease", "elastic:usd"
"""Tags of an instance. `PRICE_TAG` holds the price of a GPU's hour at which the lease is booked."""
SPOT_QUOTAS = {"g": "L-3819A6DF", "p": "L-7212CCBC", "standard": "L-34B43A08"}
"""Service quotas on vCPUs of running spot instances, by families: G and VT, P, and most CPU types."""
CONNECT_TIMEOUT_S = 5.0
MAX_ATTEMPTS = 5
SIGNED_S = 240.0
"""AWS refuses signatures beyond this clock skew: five minutes, less the possible error of a measured skew."""
HISTORY_HOURS = 1
LIVING = frozenset({"pending", "running"})
TAKEN_CODES = frozenset({"Server.SpotInstanceTermination", "Server.SpotInstanceShutdown"})

_TIME_IN_REASON = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?) (?:GMT|UTC)\)")


class Ec2Error(Exception):
    """AWS has refused a request. `code` is AWS's; the message names the request, AWS's answer and a remedy."""

    def __init__(self, asked: str, code: str, said: str, mend: str = "") -> None:
        mend = mend or next((text for part, text in _MENDS.items() if part in code), "")
        super().__init__(f"{asked}: {code}: {said.rstrip('.')}" + (f"; {mend}" if mend else ""))
        self.code = code

    @property
    def passing(self) -> bool:
        """Whether a repeated request may succeed, since the cause lies with AWS or the network."""
        return self.code in _PASSING or self.code.startswith("5") or "Timeout" in self.code or "Connection" in self.code


class NoAccess(Ec2Error):
    """These credentials, or this region, allow no requests at all."""


_NO_CREDENTIALS = "set them (`aws configure`, AWS_PROFILE, or a role), or providers.ec2.profile"
_MENDS = {
    "NoCredentials": _NO_CREDENTIALS,
    "ProfileNotFound": "providers.ec2.profile names none of the shared configuration's profiles",
    "AuthFailure": "these credentials are wrong, or this machine's clock is: " + _NO_CREDENTIALS,
    "InvalidClientTokenId": "these credentials are wrong: " + _NO_CREDENTIALS,
    "SignatureDoesNotMatch": "the secret key is wrong, or this machine's clock is off: compare it with `date -u`",
    "RequestTimeTooSkewed": "this machine's clock is off: compare it with `date -u`",
    "RequestExpired": "this machine's clock is off, or the credentials have expired: compare it with `date -u`",
    "ExpiredToken": "the credentials have expired: log in again (`aws sso login`)",
    "UnauthorizedOperation": "the role lacks this action; infra/aws has the policy that it needs",
    "AccessDenied": "the role lacks this action; infra/aws has the policy that it needs",
    "OptInRequired": "the account has no EC2 in this region",
    "InvalidAMIID.NotFound": "providers.ec2.image names no AMI of this region; AMIs are copied to each",
    "InvalidAMIID.Malformed": "providers.ec2.image names no AMI",
    "InvalidInstanceType": "providers.ec2.instance_types names a type that EC2 does not have here",
    "InvalidLaunchTemplateId.NotFound": "providers.ec2.launch_template names none of this region",
    "InvalidLaunchTemplateId.VersionNotFound": "providers.ec2.launch_template has no such version",
    "InvalidSubnetID.NotFound": "providers.ec2.subnets names a subnet of another region or account",
    "ShutdownBehavior": 'set it to "terminate": an instance whose worker is gone would only stop',
    "EndpointConnection": "can this machine reach it (network, proxy, providers.ec2.region)?",
    "ConnectTimeout": "can this machine reach it (network, proxy, providers.ec2.region)?",
    "MaxSpotInstanceCountExceeded": "ask AWS for a higher spot quota, or lower max_workers",
    "VcpuLimitExceeded": "ask AWS for a higher quota, or lower max_workers",
    "AWS.SimpleQueueService.NonExistentQueue": "providers.ec2.queue is no queue of this region",
    "QueueDoesNotExist": "providers.ec2.queue is no queue of this region",
    "InvalidLaunchTemplateName": "another run has this name",
    "NotAuthorized": "the role lacks this action",
}
"""What to do, by a part of the code."""
_PASSING = frozenset(
    {
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "EC2ThrottledException",
        "InternalError",
        "InternalFailure",
        "ServiceUnavailable",
        "Unavailable",
        "ResponseParser",
        "IncompleteRead",
        "RequestInProgress",
    }
)
SET_CLOCK = "set it (chrony, systemd-timesyncd)"
_CLOCK_CODES = frozenset(
    {"AuthFailure", "InvalidSignatureException", "RequestExpired", "RequestTimeTooSkewed", "SignatureDoesNotMatch"}
)
"""Codes by which the services refuse a signature for its time."""
_NO_ACCESS = _CLOCK_CODES | {
    "NoCredentials",
    "ProfileNotFound",
    "InvalidClientTokenId",
    "ExpiredToken",
    "ExpiredTokenException",
    "UnauthorizedOperation",
    "OptInRequired",
    "AccessDenied",
    "AccessDeniedException",
}


class Instance(NamedTuple):
    """An instance as EC2 describes it. Times are Unix time; `ended_s` is None while the instance lives."""

    id: str
    lease: str
    pool: SpotPool
    state: str
    began_s: float
    ended_s: float | None
    usd_per_gpu_hour: float
    """The price at which its lease is booked; 0 if the instance has no tag of it."""
    reason: str
    """EC2's code for the last change of state; empty if there was none."""
    said: str

    @property
    def lives(self) -> bool:
        return self.state in LIVING

    @property
    def taken(self) -> bool:
        """Whether EC2 has interrupted the instance for lack of capacity."""
        return self.reason in TAKEN_CODES


class Refusal(NamedTuple):
    """Why EC2 launched nothing in a pool."""

    pool: SpotPool
    code: str
    message: str


class Launch(NamedTuple):
    """The outcome of an order: an instance or None, and the refusals of the pools that were tried first."""

    instance: str | None
    pool: SpotPool | None
    refusals: tuple[Refusal, ...] = ()


class QueueNotice(NamedTuple):
    """EventBridge's notice of an instance. `at_s` is when EC2 sent it; `kind` is empty for other messages."""

    receipt: str
    kind: str
    instance: str
    at_s: float


class _Detail(msgspec.Struct, rename="kebab"):
    instance_id: str = ""


class _EventBody(msgspec.Struct, rename="kebab"):
    """The fields of EventBridge's messages that this module reads."""

    detail_type: str
    time: datetime
    detail: _Detail


class Quota(NamedTuple):
    what: str
    vcpus: float


class Ec2Api:
    """A client of one run's provider. `skew_s` is how far AWS's clock is ahead of this machine's."""

    def __init__(self, settings: Ec2Settings, run: str, provider: str) -> None:
        self._settings = settings
        self.run, self._provider = run, provider
        self._clients: dict[str, Any] = {}
        self._making = threading.Lock()
        self.skew_s = 0.0
        self.closed = False
        """Whether reading has ended. An open call for notices then puts back whatever it still receives."""

    @property
    def where(self) -> str:
        return f"EC2 in {self._settings.region}" + (
            f" at {self._settings.endpoint_url}" if self._settings.endpoint_url else ""
        )

    def token(self, lease: str) -> str:
        """Return the client token of the lease's only launch. It is the same in each process of the run."""
        return hashlib.sha256(f"{self.run}\0{self._provider}\0{lease}".encode()).hexdigest()

    # Launching and ending

    def launch(self, lease: str, pools: Sequence[SpotPool], script: str, usd_per_gpu_hour: float) -> Launch:
        """Launch the lease's instance. Repeated calls launch no second one. Raises `Ec2Error`."""
        own = {LEASE_TAG: lease, PRICE_TAG: repr(usd_per_gpu_hour)}
        tags = [{"Key": k, "Value": v} for k, v in (self._own_tags() | own).items()]
        strategy = {"AllocationStrategy": "capacity-optimized-prioritized", "InstanceInterruptionBehavior": "terminate"}
        answer = self._call(
            "ec2",
            "create_fleet",
            Type="instant",
            ClientToken=self.token(lease),
            SpotOptions=strategy,
            TargetCapacitySpecification={"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
            TagSpecifications=[{"ResourceType": kind, "Tags": tags} for kind in ("instance", "fleet", "volume")],
            LaunchTemplateConfigs=[
                {
                    "LaunchTemplateSpecification": {
                        **self._template_version(),
                        "LaunchTemplateSpecificationUserData": base64.b64encode(script.encode()).decode(),
                    },
                    "Overrides": [self._override(pool, rank) for rank, pool in enumerate(pools)],
                }
            ],
        )
        refusals = tuple(
            Refusal(
                SpotPool(
                    (o := e.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})).get("InstanceType", ""),
                    self._zone_of(o),
                ),
                e.get("ErrorCode", "Unknown"),
                e.get("ErrorMessage", ""),
            )
            for e in answer.get("Errors", ())
        )
        for launched in answer.get("Instances", ()):
            override = launched.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
            pool = SpotPool(
                launched.get("InstanceType") or override.get("InstanceType", ""),
                launched.get("AvailabilityZone") or self._zone_of(override),
            )
            for instance in launched.get("InstanceIds", ()):
                return Launch(instance, pool, refusals)
        return Launch(None, None, refusals)

    def terminate(self, instances: Sequence[str]) -> frozenset[str]:
        """Terminate instances, and return those that EC2 does not know: new ones it may not know yet.

        EC2 has begun with the others by then, and bills them no more. Raises `Ec2Error`.
        """
        try:
            self._call("ec2", "terminate_instances", InstanceIds=list(instances))
        except Ec2Error as error:
            if error.code != "InvalidInstanceID.NotFound":
                raise
            # One that is unknown refuses the whole call.
            alone = len(instances) == 1
            return frozenset(instances) if alone else frozenset().union(*(self.terminate([one]) for one in instances))
        return frozenset()

    def instances(self, lease: str = "") -> list[Instance]:
        """Return the instances of this run and provider, or of one lease, that EC2 still lists, by launch time."""
        wanted = self._own_tags() | ({LEASE_TAG: lease} if lease else {})
        filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in wanted.items()]
        pages = self._pages("ec2", "describe_instances", Filters=filters)
        found = [_instance(i) for page in pages for r in page["Reservations"] for i in r["Instances"]]
        return sorted(found, key=lambda instance: (instance.began_s, instance.id))

    def make_template(self) -> None:
        """Create the run's launch template of an AMI, or find the existing one. Raises `Ec2Error`."""
        s = self._settings
        if not s.image:
            return
        data: dict[str, Any] = {
            "ImageId": s.image,
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        }
        if s.security_groups:
            data["SecurityGroupIds"] = list(s.security_groups)
        if s.instance_profile:
            data["IamInstanceProfile"] = {"Name": s.instance_profile}
        tags = [{"Key": k, "Value": v} for k, v in self._own_tags().items()]
        try:
            self._call(
                "ec2",
                "create_launch_template",
                LaunchTemplateName=self._template_name,
                ClientToken=self.token("template"),
                LaunchTemplateData=data,
                TagSpecifications=[{"ResourceType": "launch-template", "Tags": tags}],
            )
        except Ec2Error as error:
            if error.code != "InvalidLaunchTemplateName.AlreadyExistsException":
                raise

    def delete_template(self) -> bool:
        """Return whether EC2 knew the run's own launch template, if the run has one. Raises `Ec2Error`."""
        if not self._settings.image:
            return True
        try:
            self._call("ec2", "delete_launch_template", LaunchTemplateName=self._template_name)
        except Ec2Error as error:
            if "NotFound" not in error.code:
                raise
            return False
        return True

    # Tickets by Secrets Manager

    def secret_name(self, lease: str) -> str:
        return f"{self._settings.secret_prefix}{self.run}/{lease}"

    def put_secret(self, lease: str, token: str) -> None:
        tags = [{"Key": k, "Value": v} for k, v in (self._own_tags() | {LEASE_TAG: lease}).items()]
        try:
            self._call(
                "secretsmanager",
                "create_secret",
                Name=self.secret_name(lease),
                ClientRequestToken=self.token(lease),
                SecretString=token,
                Tags=tags,
            )
        except Ec2Error as error:
            if error.code != "ResourceExistsException":
                raise

    def delete_secret(self, lease: str) -> bool:
        """Return whether Secrets Manager knew the lease's secret. Raises `Ec2Error`."""
        name = self.secret_name(lease)
        try:
            self._call("secretsmanager", "delete_secret", SecretId=name, ForceDeleteWithoutRecovery=True)
        except Ec2Error as error:
            if error.code != "ResourceNotFoundException":
                raise
            return False
        return True

    def secrets(self) -> list[str]:
        """Return the leases of this run and provider that have a secret. Raises `Ec2Error`."""
        prefix, filters = self.secret_name(""), [{"Key": "tag-value", "Values": [self.run]}]
        pages = self._pages("secretsmanager", "list_secrets", Filters=filters)
        names = [secret["Name"] for page in pages for secret in page.get("SecretList", ())]
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    # What could be had

    def prices(self, since_s: float | None = None) -> dict[SpotPool, list[PricePoint]]:
        """Return each pool's prices since `since_s` (or an hour ago), with the price at that time. Raises
        `Ec2Error`."""
        now = datetime.now(UTC)
        since = now - timedelta(hours=HISTORY_HOURS) if since_s is None else datetime.fromtimestamp(since_s, UTC)
        pages = self._pages(
            "ec2",
            "describe_spot_price_history",
            InstanceTypes=list(self._settings.instance_types),
            ProductDescriptions=["Linux/UNIX"],
            StartTime=since,
        )
        found: dict[SpotPool, list[PricePoint]] = {}
        for page in pages:
            for one in page["SpotPriceHistory"]:
                pool = SpotPool(one["InstanceType"], one["AvailabilityZone"])
                found.setdefault(pool, []).append(PricePoint(one["Timestamp"].timestamp(), float(one["SpotPrice"])))
        return found

    def scores(self) -> dict[str, int]:
        """Return placement scores by zone; none if EC2 does not tell them. Calls count against a daily limit."""
        s = self._settings
        try:
            zones = {
                z["ZoneId"]: z["ZoneName"]
                for page in self._pages("ec2", "describe_availability_zones")
                for z in page["AvailabilityZones"]
            }
            pages = self._pages(
                "ec2",
                "get_spot_placement_scores",
                InstanceTypes=list(s.instance_types),
                TargetCapacity=max(1, s.max_workers),
                SingleAvailabilityZone=True,
                RegionNames=[s.region],
            )
            scored = [one for page in pages for one in page.get("SpotPlacementScores", ())]
        except Ec2Error:
            return {}
        return {zones[o["AvailabilityZoneId"]]: o["Score"] for o in scored if o.get("AvailabilityZoneId") in zones}

    def check(self) -> None:
        """Check what every launch needs: credentials, AMI, types, template, queue. Raises `Ec2Error`."""
        s = self._settings
        self._call("sts", "get_caller_identity")
        images = self._pages("ec2", "describe_images", ImageIds=[s.image]) if s.image else ()
        if s.image and not any(page.get("Images") for page in images):
            raise Ec2Error(self._asked("describe_images"), "InvalidAMIID.NotFound", f"no AMI {s.image}")
        pages = self._pages("ec2", "describe_instance_types", InstanceTypes=list(s.instance_types))
        for one in (one for page in pages for one in page["InstanceTypes"]):
            gpus = sum(gpu.get("Count", 0) for gpu in one.get("GpuInfo", {}).get("Gpus", ()))
            if gpus and gpus != s.gpus_per_worker:
                raise Ec2Error(
                    self._asked("describe_instance_types"),
                    "GpusPerWorker",
                    f"{one['InstanceType']} has {gpus} GPUs; "
                    f"providers.{self._provider}.gpus_per_worker is {s.gpus_per_worker}",
                )
        if s.launch_template:
            self._check_template()
        if s.queue:
            self._call("sqs", "get_queue_attributes", QueueUrl=s.queue, AttributeNames=["QueueArn"])

    def _check_template(self) -> None:
        """Check that an instance of the template terminates when it shuts itself down, as user data needs."""
        asked = "describe_launch_template_versions"
        pages = self._pages("ec2", asked, **self._template_query())
        (version, *_) = [one for page in pages for one in page["LaunchTemplateVersions"]] or [{}]
        found = version.get("LaunchTemplateData", {}).get("InstanceInitiatedShutdownBehavior", "stop")
        if found != "terminate":
            said = f"InstanceInitiatedShutdownBehavior of {self._settings.launch_template} is {found!r}"
            raise Ec2Error(self._asked(asked), "ShutdownBehavior", said)

    def quotas(self) -> list[Quota]:
        """Return the quotas on spot instances' vCPUs for the requested families. Raises `Ec2Error`."""
        families = {t[0] if t[0] in SPOT_QUOTAS else "standard" for t in self._settings.instance_types}
        found: list[Quota] = []
        for family in sorted(families):
            answer = self._call(
                "service-quotas", "get_service_quota", ServiceCode="ec2", QuotaCode=SPOT_QUOTAS[family]
            )["Quota"]
            found.append(Quota(answer["QuotaName"], answer["Value"]))
        return found

    # Notices

    def notices(self, wait_s: int) -> list[QueueNotice]:
        """Return notices from the queue. The caller discards each, or puts it back. Raises `Ec2Error`."""
        answer = self._call(
            "sqs",
            "receive_message",
            QueueUrl=self._settings.queue,
            MaxNumberOfMessages=10,
            WaitTimeSeconds=wait_s,
        )
        read: list[QueueNotice] = []
        for message in answer.get("Messages", ()):
            receipt = message["ReceiptHandle"]
            try:
                event = msgspec.json.decode(message["Body"], type=_EventBody)
            except msgspec.DecodeError:
                read.append(QueueNotice(receipt, "", "", 0.0))  # Not EC2's: nobody would read it.
                continue
            at = event.time if event.time.tzinfo else event.time.replace(tzinfo=UTC)
            read.append(QueueNotice(receipt, event.detail_type, event.detail.instance_id, at.timestamp()))
        if self.closed:
            self.put_back(read, 0)
            return []
        return read

    def discard(self, notices: Sequence[QueueNotice]) -> None:
        entries = [{"Id": str(n), "ReceiptHandle": one.receipt} for n, one in enumerate(notices)]
        if entries:
            self._call("sqs", "delete_message_batch", QueueUrl=self._settings.queue, Entries=entries)

    def put_back(self, notices: Sequence[QueueNotice], after_s: int) -> None:
        """Make notices visible again to other readers of the queue after `after_s`."""
        entries = [
            {"Id": str(n), "ReceiptHandle": one.receipt, "VisibilityTimeout": after_s} for n, one in enumerate(notices)
        ]
        if entries:
            self._call("sqs", "change_message_visibility_batch", QueueUrl=self._settings.queue, Entries=entries)

    # How it is asked

    def _own_tags(self) -> dict[str, str]:
        return {RUN_TAG: self.run, PROVIDER_TAG: self._provider}

    @property
    def _template_name(self) -> str:
        return f"elastic-{self.run}-{self._provider}"

    def _template_version(self) -> dict[str, str]:
        template, _, version = self._settings.launch_template.partition(":")
        if template:
            return {"LaunchTemplateId": template, "Version": version or "$Default"}
        return {"LaunchTemplateName": self._template_name, "Version": "$Latest"}

    def _template_query(self) -> dict[str, Any]:
        template, _, version = self._settings.launch_template.partition(":")
        return {"LaunchTemplateId": template, "Versions": [version or "$Default"]}

    def _override(self, pool: SpotPool, rank: int) -> dict[str, Any]:
        subnet = self._settings.subnets.get(pool.zone)
        place = {"SubnetId": subnet} if subnet else {"AvailabilityZone": pool.zone}
        return {"InstanceType": pool.instance_type, "Priority": float(rank), **place}

    def _zone_of(self, override: Mapping[str, Any]) -> str:
        if zone := override.get("AvailabilityZone"):
            return zone
        zones = {subnet: zone for zone, subnet in self._settings.subnets.items()}
        return zones.get(override.get("SubnetId", ""), "")

    def _asked(self, operation: str) -> str:
        return f"{self._provider}: {operation} of {self.where}"

    def _pages(self, service: str, operation: str, **arguments: Any) -> Iterator[Mapping[str, Any]]:
        """Ask for a list, all pages of it. Everything that lists is asked for through here. Raises `Ec2Error`."""
        token: str | None = None
        while True:
            more = {"NextToken": token} if token else {}
            page = self._call(service, operation, **arguments, **more)
            yield page
            if not (token := page.get("NextToken")):
                return

    def _call(self, service: str, operation: str, **arguments: Any) -> Any:
        exceptions = importlib.import_module("botocore.exceptions")
        asked = self._asked(operation)
        try:
            answer = getattr(self._client(service), operation)(**arguments)
        except exceptions.ClientError as error:
            self._note_clock(error.response)
            said = error.response.get("Error", {})
            code, message = said.get("Code", "Unknown"), said.get("Message", "")
            if code in _CLOCK_CODES and abs(self.skew_s) > SIGNED_S:
                raise NoAccess(asked, code, message, f"{clock_words(self.skew_s)}: {SET_CLOCK}") from error
            kind = NoAccess if code in _NO_ACCESS else Ec2Error
            raise kind(asked, code, message) from error
        except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
            raise NoAccess(asked, "NoCredentials", str(error)) from error
        except exceptions.ProfileNotFound as error:
            raise NoAccess(asked, "ProfileNotFound", str(error)) from error
        # An answer that is not AWS's is botocore's only exception that is no `BotoCoreError`.
        except (exceptions.BotoCoreError, importlib.import_module("botocore.parsers").ResponseParserError) as error:
            raise Ec2Error(asked, type(error).__name__.removesuffix("Error"), str(error)) from error
        self._note_clock(answer)
        return answer

    def _note_clock(self, answer: Mapping[str, Any]) -> None:
        date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        if date:
            self.skew_s = parsedate_to_datetime(date).timestamp() - time.time()

    def _client(self, service: str) -> Any:
        with self._making:
            if service not in self._clients:
                self._clients[service] = self._new_client(service)
            return self._clients[service]

    def _new_client(self, service: str) -> Any:
        s = self._settings
        boto3, config = importlib.import_module("boto3"), importlib.import_module("botocore.config")
        session = boto3.Session(profile_name=s.profile or None, region_name=s.region)
        return session.client(
            service,
            endpoint_url=s.endpoint_url or None,
            config=config.Config(
                proxies=proxies_of_boto(s.endpoint_url),
                retries={"mode": "adaptive", "total_max_attempts": MAX_ATTEMPTS},
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=s.answer_timeout_s,
                user_agent_extra="elastic-rl",
                max_pool_connections=32,
            ),
        )


def clock_words(skew_s: float) -> str:
    return f"this machine's clock is {abs(skew_s):.0f} s {'behind' if skew_s > 0 else 'ahead of'} AWS's"


def installed() -> None:
    """Import boto3. Raises `ProviderUnavailable` if it is not installed."""
    try:
        importlib.import_module("boto3")
    except ImportError as error:
        raise ProviderUnavailable(
            "boto3 is not installed here; pip install -e '.[aws]' in a clone of elastic"
        ) from error


def _instance(described: Mapping[str, Any]) -> Instance:
    tags = {tag["Key"]: tag["Value"] for tag in described.get("Tags", ())}
    reason = described.get("StateReason", {})
    state = described["State"]["Name"]
    ended_s = None if state in LIVING else _ended_s(described)
    return Instance(
        described["InstanceId"],
        tags.get(LEASE_TAG, ""),
        SpotPool(described["InstanceType"], described.get("Placement", {}).get("AvailabilityZone", "")),
        state,
        described["LaunchTime"].timestamp(),
        ended_s,
        float(tags.get(PRICE_TAG, "") or 0.0),
        "" if state in LIVING else reason.get("Code", ""),
        reason.get("Message", ""),
    )


def _ended_s(described: Mapping[str, Any]) -> float:
    """Return an instance's end from the reason's text, EC2's only source of it; else the present time."""
    found = _TIME_IN_REASON.search(described.get("StateTransitionReason", ""))
    if found is None:
        return time.time()
    return datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()


def of_leases(instances: Iterable[Instance]) -> dict[str, list[Instance]]:
    found: dict[str, list[Instance]] = {}
    for instance in instances:
        found.setdefault(instance.lease, []).append(instance)
    return found
