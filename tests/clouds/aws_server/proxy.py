"""What stands between boto3 and moto: AWS's rules that moto does not have, and AWS's bad days.

It adds to moto: client tokens (one order, one instance; other parameters are refused), CreateFleet's errors inside a
good answer, capacity and a quota, the refusal of unknown images and types and of user data beyond 16 KiB, zones,
prices, placement scores, why and when an instance ended, a delay until an instance is listed, wrong credentials, and
a clock that is another than the client's.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import random
import re
import time
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any
from xml.etree import ElementTree

import aiohttp
from aiohttp import web

from tests.clouds.aws_server.record import BY_ITSELF, MESSAGES, ORDERED, TAKEN, USD_ON_DEMAND, Books, Rented

NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
USER_DATA_BYTES = 16_384
SIGNED_S = 300.0
"""How far a signature's time may be off."""
LISTS = {
    "DescribeInstances": "reservationSet",
    "DescribeInstanceTypes": "instanceTypeSet",
    "DescribeImages": "imagesSet",
    "DescribeLaunchTemplateVersions": "launchTemplateVersionSet",
    "DescribeSpotPriceHistory": "spotPriceHistorySet",
    "GetSpotPlacementScores": "spotPlacementScoreSet",
}
"""Which part of EC2's answers comes in pages."""
PASSING_HEADERS = ("authorization", "content-type", "x-amz-target", "x-amz-date", "x-amz-security-token", "user-agent")


@dataclass
class Faults:
    """Each share of all calls, drawn anew for each. `late_s` is how late an answer is."""

    error: float = 0.0
    throttled: float = 0.0
    torn_before: float = 0.0
    torn_after: float = 0.0
    late: float = 0.0
    late_s: float = 0.3
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def draw(self) -> str:
        at = self.rng.random()
        for name in ("error", "throttled", "torn_before", "torn_after", "late"):
            at -= getattr(self, name)
            if at < 0:
                return name
        return ""


class Refused(Exception):
    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


class Proxy:
    """`launched` and `ended` hear of instances, the second before the answer goes out. Runs on one event loop."""

    def __init__(
        self, books: Books, moto: str, launched: Callable[[Rented], None], ended: Callable[[str], None]
    ) -> None:
        self.books = books
        self.faults = Faults()
        self.calls: Counter[str] = Counter()
        self.images: set[str] = set()
        self.subnets: dict[str, str] = {}
        self.zone_ids: dict[str, str] = {}
        self.keys: set[str] | None = None
        """Access keys that are known; None for any."""
        self.unknown = "AuthFailure"
        """The code by which others are refused."""
        self.clock_s = 0.0
        """How much later AWS's clock is than this machine's."""
        self.unseen_s = 0.0
        """How long a new instance is neither known nor listed yet."""
        self.page: int | None = None
        """How many items an answer to a list has at the most; None for all."""
        self.remembered_s = 3600.0
        """How long an ended instance still is."""
        self.hold: Callable[[str], Awaitable[None]] | None = None
        """Called with each action once it is done, before it is answered; a ConnectionResetError loses the answer."""
        self.account_scores = True
        self.denied: set[str] = set()
        self.templates: dict[str, Mapping[str, str]] = {}
        self._tokens: dict[str, tuple[str, bytes]] = {}
        self._pages: dict[str, tuple[ElementTree.Element, ElementTree.Element, list[Any]]] = {}
        """What is left of answers that come in pages, by the token of the next one."""
        self._imds_tokens: dict[str, str] = {}
        self._moto = moto
        self._launched, self._ended = launched, ended
        self._ordering = asyncio.Lock()
        self._http: aiohttp.ClientSession | None = None

    async def start(self, port: int) -> None:
        self._http = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/imds/{instance}/{path:.*}", self._imds)
        app.router.add_post("/power-off/{instance}", self._power_off)
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self._runner = runner

    async def stop(self) -> None:
        await self._runner.cleanup()
        if self._http is not None:
            await self._http.close()

    # AWS

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        answer = await self._served(request)
        answer.headers["Date"] = formatdate(time.time() + self.clock_s, usegmt=True)
        return answer

    async def _served(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        form = _form(body) if not request.headers.get("X-Amz-Target") else {}
        action = form.get("Action") or request.headers.get("X-Amz-Target", "").rpartition(".")[2] or request.method
        self.calls[action] += 1
        fault = self.faults.draw()
        if fault == "torn_before":
            return self._tear(request)
        if fault in ("error", "throttled"):
            code, status = ("InternalError", 500) if fault == "error" else ("RequestLimitExceeded", 503)
            return _refusal(request, Refused(code, "a bad day", status))
        try:
            self._authorise(request, action)
            answer = await self._answer(request, action, form, body)
        except Refused as refused:
            return _refusal(request, refused)
        if fault == "late":
            await asyncio.sleep(self.faults.late_s)
        if self.hold is not None:
            try:
                await self.hold(action)
            except ConnectionResetError:
                return self._tear(request)
        return self._tear(request) if fault == "torn_after" else answer

    def _tear(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)

    def _authorise(self, request: web.Request, action: str) -> None:
        found = re.search(r"Credential=([^/]+)/", request.headers.get("Authorization", ""))
        key = found[1] if found else ""
        if self.keys is not None and key not in self.keys:
            raise Refused(self.unknown, "AWS was not able to validate the provided access credentials", 401)
        self._check_clock(request)
        if action in self.denied:
            raise Refused("UnauthorizedOperation", f"You are not authorized to perform: {action}", 403)

    def _check_clock(self, request: web.Request) -> None:
        """Each service has its own words for a signature that is too old."""
        signed = request.headers.get("X-Amz-Date", "")
        if not signed:
            return
        at_s = datetime.strptime(signed, "%Y%m%dT%H%M%S%z").timestamp()
        if abs(at_s - time.time() - self.clock_s) <= SIGNED_S:
            return
        service = re.search(r"/([a-z0-9-]+)/aws4_request", request.headers.get("Authorization", ""))
        if service is not None and service[1] == "ec2":
            raise Refused("AuthFailure", "AWS was not able to validate the provided access credentials", 401)
        code = "SignatureDoesNotMatch" if service is not None and service[1] == "sts" else "InvalidSignatureException"
        raise Refused(code, f"Signature expired: {signed} is now earlier than the server's time", 403)

    async def _answer(self, request: web.Request, action: str, form: Mapping[str, str], body: bytes) -> web.Response:
        own: dict[str, Callable[[Mapping[str, str]], str]] = {
            "DescribeSpotPriceHistory": self._price_history,
            "GetSpotPlacementScores": self._scores,
        }
        if "NextToken" in form:
            return self._page(*self._pages[form["NextToken"]])
        if action in own:
            return self._paged(action, web.Response(body=own[action](form).encode(), content_type="text/xml"))
        if action == "GetServiceQuota":
            quota = {"QuotaName": "All Spot Instance Requests", "Value": float(self.books.quota)}
            return web.json_response({"Quota": quota}, content_type="application/x-amz-json-1.1")
        if action == "CreateFleet":
            return web.Response(body=await self._create_fleet(request, form), content_type="text/xml")
        if action == "CreateLaunchTemplate":
            image = form.get("LaunchTemplateData.ImageId", "")
            if image not in self.images:
                raise Refused("InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist")
            self.templates[form["LaunchTemplateName"]] = form
        if action == "DescribeInstanceTypes":
            for key, name in form.items():
                if key.startswith("InstanceType.") and name not in USD_ON_DEMAND:
                    raise Refused("InvalidInstanceType", f"These instance types do not exist: [{name}]")
        if action == "DescribeInstances" and (wanted := self._wanted(form)) is not None:
            if not wanted:
                return _xml(_told("DescribeInstances", "<reservationSet/>"))
            asked = {**form, **{f"InstanceId.{n}": one for n, one in enumerate(wanted, 1)}}
            body = urllib.parse.urlencode(asked).encode()
        if action == "TerminateInstances":
            self._know([value for key, value in form.items() if key.startswith("InstanceId.")])
        if action == "ListSecrets" and self.page is not None:
            body = json.dumps({**json.loads(body), "MaxResults": self.page}).encode()
        status, headers, answer = await self._forward(request, body)
        if action == "DescribeInstances" and status == 200:
            answer = self._described(answer)
        if action == "TerminateInstances" and status == 200:
            for key, instance in form.items():
                if key.startswith("InstanceId."):
                    await self.end(instance, ORDERED)
        return self._paged(action, web.Response(body=answer, status=status, headers=headers))

    def _know(self, instances: list[str]) -> None:
        """Raise `Refused` for the whole call if one of these instances is not known yet."""
        new = [one for one in instances if one in self.books.rented and time.time() < self.books.rented[one].visible_s]
        if new:
            raise Refused("InvalidInstanceID.NotFound", f"The instance ID '{new[0]}' does not exist")

    def _paged(self, action: str, answer: web.Response) -> web.Response:
        """The first page of EC2's answer, if it comes in pages."""
        items = LISTS.get(action)
        if self.page is None or items is None or answer.status != 200 or not isinstance(answer.body, bytes):
            return answer
        root = ElementTree.fromstring(re.sub(rb' xmlns="[^"]*"', b"", answer.body, count=1))
        listed = root.find(items)
        return answer if listed is None else self._page(root, listed, list(listed))

    def _page(self, root: ElementTree.Element, listed: ElementTree.Element, left: list[Any]) -> web.Response:
        """A page of what is left of an answer; its token stands for the rest."""
        listed[:], rest = left[: self.page], left[self.page :]
        token = uuid.uuid4().hex if rest else ""
        self._pages[token] = root, listed, rest
        _put(root, "nextToken", token)
        root.set("xmlns", NAMESPACE)
        return web.Response(body=ElementTree.tostring(root), content_type="text/xml")

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        assert self._http is not None
        headers = {name: request.headers[name] for name in PASSING_HEADERS if name in request.headers}
        url = self._moto + request.rel_url.path_qs
        async with self._http.request(request.method, url, data=body, headers=headers) as answer:
            content = await answer.read()
            kept = {
                n: v for n, v in answer.headers.items() if n.lower() in ("content-type", "date", "x-amzn-requestid")
            }
            return answer.status, kept, content

    async def end(self, instance: str, reason: str) -> None:
        if self.books.end(instance, reason):
            await asyncio.to_thread(self._ended, instance)

    # Orders

    async def _create_fleet(self, request: web.Request, form: Mapping[str, str]) -> bytes:
        token = form.get("ClientToken", "")
        told = hashlib.sha256(json.dumps(sorted(form.items())).encode()).hexdigest()
        async with self._ordering:
            if token in self._tokens:
                former, answer = self._tokens[token]
                if former != told:
                    raise Refused("IdempotentParameterMismatch", "The client token was used with other parameters")
                return answer
            answer = await self._order(request, form)
            if token:
                self._tokens[token] = told, answer
            return answer

    async def _order(self, request: web.Request, form: Mapping[str, str]) -> bytes:
        config = "LaunchTemplateConfigs.1."
        spec = config + "LaunchTemplateSpecification."
        user_data = base64.b64decode(form.get(spec + "LaunchTemplateSpecificationUserData", ""))
        if len(user_data) > USER_DATA_BYTES:
            raise Refused("InvalidParameterValue", f"User data is limited to {USER_DATA_BYTES} bytes")
        overrides: list[dict[str, str]] = []
        while any(key.startswith(f"{config}Overrides.{len(overrides) + 1}.") for key in form):
            prefix = f"{config}Overrides.{len(overrides) + 1}."
            overrides.append({k.removeprefix(prefix): v for k, v in form.items() if k.startswith(prefix)})
        if not overrides:
            raise Refused("MissingParameter", "no overrides")
        errors: list[tuple[dict[str, str], str, str]] = []
        for override in sorted(overrides, key=lambda o: float(o.get("Priority", 0))):
            refusal = self._refuses(override)
            if refusal is None:
                return await self._launch(request, form, override, user_data.decode(), errors)
            errors.append((override, *refusal))
        return _fleet_answer(None, errors)

    def _refuses(self, override: Mapping[str, str]) -> tuple[str, str] | None:
        kind, zone = override.get("InstanceType", ""), override.get("AvailabilityZone", "")
        if kind not in USD_ON_DEMAND:
            return "InvalidParameterValue", f"Invalid instance type: {kind}"
        if zone not in self.subnets:
            return "InvalidParameterValue", f"Invalid availability zone: [{zone}]"
        price = self.books.prices.at(kind, zone, time.time())
        if "MaxPrice" in override and float(override["MaxPrice"]) < price:
            return "SpotMaxPriceTooLow", f"Your Spot request price of {override['MaxPrice']} is lower than {price}"
        if len(self.books.living()) >= self.books.quota:
            return "MaxSpotInstanceCountExceeded", "Max spot instance count exceeded"
        if self.books.free((kind, zone)) <= 0:
            return "InsufficientInstanceCapacity", "There is no Spot capacity available that matches your request."
        return None

    async def _launch(
        self,
        request: web.Request,
        form: Mapping[str, str],
        override: Mapping[str, str],
        user_data: str,
        errors: list[tuple[dict[str, str], str, str]],
    ) -> bytes:
        asked_ns = time.monotonic_ns()
        config = "LaunchTemplateConfigs.1.Overrides."
        one = {k: v for k, v in form.items() if not k.startswith(config)}
        one |= {
            f"{config}1.InstanceType": override["InstanceType"],
            f"{config}1.SubnetId": self.subnets[override["AvailabilityZone"]],
        }
        status, _, answer = await self._forward(request, urllib.parse.urlencode(one).encode())
        found = re.search(rb"<item>(i-[0-9a-f]+)</item>", answer)
        if status != 200 or found is None:
            raise Refused("InternalError", answer.decode()[:300], 500 if status >= 500 else status)
        instance = found[1].decode()
        rented = Rented(
            id=instance,
            pool=(override["InstanceType"], override["AvailabilityZone"]),
            tags=_tags(form),
            user_data=user_data,
            began_s=int(time.time()),
            visible_s=time.time() + self.unseen_s,
            asked_ns=asked_ns,
        )
        with self.books.lock:
            self.books.rented[instance] = rented
        self._launched(rented)
        return _fleet_answer((instance, override), errors)

    # What is told

    def _wanted(self, form: Mapping[str, str]) -> list[str] | None:
        """The instances with the tags that are asked for, but for those that ended too long ago: moto never forgets
        one, and takes longer for each. None where it is not by tags that they are asked for."""
        tags = {
            name.removeprefix("tag:"): form.get(key.removesuffix("Name") + "Value.1", "")
            for key, name in form.items()
            if re.fullmatch(r"Filter\.\d+\.Name", key) and name.startswith("tag:")
        }
        if not tags:
            return None
        since_s = time.time() - self.remembered_s
        with self.books.lock:
            return [
                one.id
                for one in self.books.rented.values()
                if tags.items() <= dict(one.tags).items() and (one.ended_s is None or one.ended_s >= since_s)
            ]

    def _described(self, answer: bytes) -> bytes:
        root = ElementTree.fromstring(re.sub(rb' xmlns="[^"]*"', b"", answer, count=1))
        for reservation in root.findall("reservationSet/item"):
            instances = reservation.find("instancesSet")
            if instances is None:
                continue
            for item in list(instances):
                one = self.books.rented.get(item.findtext("instanceId", ""))
                if one is None:
                    continue
                if time.time() < one.visible_s:
                    instances.remove(item)
                    continue
                _put(item, "launchTime", _iso(one.began_s))
                _put(item, "placement/availabilityZone", one.pool[1])
                _put(item, "instanceLifecycle", "spot")
                if one.ended_s is not None:
                    at = datetime.fromtimestamp(one.ended_s, UTC).strftime("%Y-%m-%d %H:%M:%S GMT")
                    who = "Server.SpotInstanceTermination" if one.reason == TAKEN else "User initiated"
                    _put(item, "instanceState/code", "48")
                    _put(item, "instanceState/name", "terminated")
                    _put(item, "reason", f"{who} ({at})")
                    _put(item, "stateReason/code", one.reason)
                    _put(item, "stateReason/message", MESSAGES[one.reason])
                else:
                    _put(item, "instanceState/code", "16")
                    _put(item, "instanceState/name", "running")
        root.set("xmlns", NAMESPACE)
        return ElementTree.tostring(root)

    def _price_history(self, form: Mapping[str, str]) -> str:
        since = datetime.fromisoformat(form.get("StartTime", "2000-01-01T00:00:00Z").replace("Z", "+00:00"))
        items: list[str] = []
        for key, kind in form.items():
            if not key.startswith("InstanceType.") or kind not in USD_ON_DEMAND:
                continue
            for pool in sorted(p for p in self.books.capacity if p[0] == kind):
                past = [point for point in self.books.prices.history(*pool) if point[0] <= time.time()]
                standing = [point for point in past if point[0] <= since.timestamp()][-1:]
                for at_s, usd in [*standing, *(p for p in past if p[0] > since.timestamp())]:
                    items.append(
                        f"<item><instanceType>{kind}</instanceType><productDescription>Linux/UNIX</productDescription>"
                        f"<spotPrice>{usd:.6f}</spotPrice><timestamp>{_iso(at_s)}</timestamp>"
                        f"<availabilityZone>{pool[1]}</availabilityZone></item>"
                    )
        return _told("DescribeSpotPriceHistory", f"<spotPriceHistorySet>{''.join(items)}</spotPriceHistorySet>")

    def _scores(self, form: Mapping[str, str]) -> str:
        if not self.account_scores:
            raise Refused("UnauthorizedOperation", "You are not authorized to perform this operation.", 403)
        items = [
            f"<item><region>us-east-1</region><availabilityZoneId>{self.zone_ids[zone]}</availabilityZoneId>"
            f"<score>{9 - n}</score></item>"
            for n, zone in enumerate(sorted(self.zone_ids))
        ]
        return _told("GetSpotPlacementScores", f"<spotPlacementScoreSet>{''.join(items)}</spotPlacementScoreSet>")

    # The instances' own

    async def _imds(self, request: web.Request) -> web.Response:
        one, path = self.books.rented.get(request.match_info["instance"]), request.match_info["path"]
        if one is None:
            return web.Response(status=404)
        if path == "latest/api/token":
            if request.method != "PUT" or "X-aws-ec2-metadata-token-ttl-seconds" not in request.headers:
                return web.Response(status=400)
            token = self._imds_tokens.setdefault(one.id, uuid.uuid4().hex)
            return web.Response(text=token)
        if request.headers.get("X-aws-ec2-metadata-token") != self._imds_tokens.get(one.id):
            return web.Response(status=401)
        if path == "latest/meta-data/spot/instance-action" and one.action_s is not None:
            return web.json_response({"action": "terminate", "time": _iso(one.action_s)})
        if path == "latest/meta-data/events/recommendations/rebalance" and one.advised_s is not None:
            return web.json_response({"noticeTime": _iso(one.advised_s)})
        if path == "latest/meta-data/instance-id":
            return web.Response(text=one.id)
        return web.Response(status=404)

    async def _power_off(self, request: web.Request) -> web.Response:
        await self.end(request.match_info["instance"], BY_ITSELF)
        return web.Response()


def _form(body: bytes) -> dict[str, str]:
    with contextlib.suppress(UnicodeDecodeError):
        return dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
    return {}


def _tags(form: Mapping[str, str]) -> dict[str, str]:
    """Of instances."""
    found: dict[str, str] = {}
    for key, value in form.items():
        match = re.fullmatch(r"TagSpecification(?:s)?\.(\d+)\.Tag\.(\d+)\.Key", key)
        if match and form.get(key[: key.index(".Tag.")] + ".ResourceType") == "instance":
            found[value] = form.get(key.removesuffix("Key") + "Value", "")
    return found


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _put(item: ElementTree.Element, path: str, text: str) -> None:
    at = item
    for name in path.split("/"):
        below = at.find(name)
        at = ElementTree.SubElement(at, name) if below is None else below
    at.text = text


def _told(action: str, content: str) -> str:
    return f'<{action}Response xmlns="{NAMESPACE}"><requestId>{uuid.uuid4()}</requestId>{content}</{action}Response>'


def _xml(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/xml")


def _override(override: Mapping[str, str]) -> str:
    return (
        "<launchTemplateAndOverrides><overrides>"
        f"<instanceType>{override.get('InstanceType', '')}</instanceType>"
        f"<availabilityZone>{override.get('AvailabilityZone', '')}</availabilityZone>"
        "</overrides></launchTemplateAndOverrides><lifecycle>spot</lifecycle>"
    )


def _fleet_answer(
    launched: tuple[str, Mapping[str, str]] | None, errors: list[tuple[dict[str, str], str, str]]
) -> bytes:
    failed = "".join(
        f"<item>{_override(o)}<errorCode>{code}</errorCode><errorMessage>{said}</errorMessage></item>"
        for o, code, said in errors
    )
    there = ""
    if launched is not None:
        instance, override = launched
        there = (
            f"<item>{_override(override)}<instanceIds><item>{instance}</item></instanceIds>"
            f"<instanceType>{override['InstanceType']}</instanceType></item>"
        )
    sets = f"<errorSet>{failed}</errorSet><fleetInstanceSet>{there}</fleetInstanceSet>"
    return _told("CreateFleet", f"<fleetId>fleet-{uuid.uuid4()}</fleetId>{sets}").encode()


def _refusal(request: web.Request, refused: Refused) -> web.Response:
    if request.headers.get("X-Amz-Target"):
        body: Any = {"__type": refused.code, "message": str(refused)}
        return web.json_response(body, status=refused.status, content_type="application/x-amz-json-1.0")
    text = (
        f"<Response><Errors><Error><Code>{refused.code}</Code><Message>{refused}</Message></Error></Errors>"
        f"<RequestID>{uuid.uuid4()}</RequestID></Response>"
    )
    return web.Response(text=text, status=refused.status, content_type="text/xml")
