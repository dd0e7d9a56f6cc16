"""What becomes of instances and leases when AWS, the network, the run or the configuration fails: judged by the books
of the stand-in, which nobody else writes."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from elastic.core.events import (
    LeaseEnded,
    LeaseGranted,
    LeaseNotice,
    LeaseRefused,
    LeaseRepriced,
    OfferChanged,
    StraysBilled,
)
from elastic.core.types import EndCause
from elastic.testing.providers import ProviderRecorder, lease_request
from providers.base import KnownLease, ProviderContext, ProviderUnavailable
from providers.ec2 import Ec2Provider
from providers.ec2_examination import examine
from providers.ec2_market import Ec2Settings
from tests.clouds.aws_server.cloud import Cloud
from tests.clouds.aws_server.proxy import Faults
from tests.clouds.aws_server.record import BY_ITSELF, Books
from tests.providers.conftest import context_of

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(240)]

ZONES = ("us-east-1a", "us-east-1b")
A, B = (("g5.xlarge", zone) for zone in ZONES)


def usd_of(house: "House") -> float:
    """The price of every offer so far: prices are still here."""
    (usd,) = {event.offer.usd_per_gpu_hour for event in house.recorder.of(OfferChanged)}
    return usd


def usd_by_the_books(house: "House", instance: str) -> float:
    books = house.aws.books
    return Books(books.prices, {}, rented={instance: books.rented[instance]}).usd()


class House:
    """A run's provider on the stand-in, and what it emits."""

    def __init__(self, aws: Cloud, directory: Path, name: str = "") -> None:
        self.aws, self._run_dir = aws, directory / (name or directory.name)
        self._run_dir.mkdir()
        self.recorder = ProviderRecorder()
        self.loop = asyncio.get_running_loop()
        self.began_ns = time.monotonic_ns()
        self.notes: dict[str, str] = {}
        self.calls_before = aws.proxy.calls.copy()
        self.providers: list[Ec2Provider] = []

    def provider(self, worker: str = "", spent_usd: float = 0.0, **settings: Any) -> Ec2Provider:
        context = context_of(f"run-{os.getpid()}-{self._run_dir.name}", self._run_dir, self.began_ns)
        context = ProviderContext(
            **{
                **{field: getattr(context, field) for field in context.__struct_fields__},
                "note": self.notes.__setitem__,
                "spent_usd": lambda provider: spent_usd,
            }
        )
        given = self.aws.settings(**{"max_workers": 3, **settings})
        made = Ec2Provider("ec2", Ec2Settings.model_validate(given), context)
        self.providers.append(made)
        return made

    async def started(self, **settings: Any) -> Ec2Provider:
        made = self.provider(**settings)
        await made.adopt([], self.recorder.emit)
        await made.start(self.recorder.emit)
        return made

    async def grant(self, provider: Ec2Provider, number: int = 1) -> str:
        return (await self.recorder.leased(provider, number)).lease

    def of_another_run(self) -> "House":
        """One whose directory lies beside this one's; nobody else closes it."""
        return House(self.aws, self._run_dir.parent, name="another")

    async def refusal(self, provider: Ec2Provider, number: int = 1) -> str:
        request = lease_request(number)
        await provider.acquire(request)
        answer = await self.recorder.answered(request.lease)
        assert isinstance(answer, LeaseRefused), answer
        return answer.reason

    def instance(self, lease: str) -> str:
        (one,) = [one for one in self.aws.living() if one.tags["elastic:lease"] == lease]
        return one.id

    async def until(self, condition: Callable[[], object], timeout_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        for provider in self.providers:
            await provider.aclose()


@pytest.fixture
async def house(aws: Cloud, tmp_path: Path) -> AsyncIterator[House]:
    made = House(aws, tmp_path)
    yield made
    aws.proxy.faults = Faults()
    aws.proxy.keys, aws.proxy.clock_s = None, 0.0
    await made.close()
    assert aws.living() == [], "orphans, by the server's own record"


async def test_an_order_whose_answer_is_torn_is_carried_out_once(house: House) -> None:
    provider = await house.started()
    torn = 0

    async def tear(action: str) -> None:
        nonlocal torn
        if action == "CreateFleet" and torn < 2:
            torn += 1
            raise ConnectionResetError

    house.aws.proxy.hold = tear
    await house.grant(provider)
    assert torn == 2
    assert len(house.aws.living()) == 1


async def test_what_fails_in_one_pool_is_had_in_another_and_each_refusal_says_why(house: House) -> None:
    house.aws.books.capacity = {A: 0, B: 1}
    provider = await house.started()
    await house.grant(provider, 1)
    assert house.aws.living()[0].pool == B
    reason = await house.refusal(provider, 2)
    for word in ("ec2", "g5.xlarge in us-east-1a: InsufficientInstanceCapacity", "us-east-1b", "EC2 in us-east-1"):
        assert word in reason, reason
    house.aws.books.capacity = {A: 1, B: 1}
    await house.until(lambda: house.recorder.available > 0)
    await house.grant(provider, 3)


async def test_what_was_passed_over_is_remarked_though_another_pool_had_it(house: House) -> None:
    house.aws.books.capacity = {A: 0, B: 3}
    provider = await house.started(retry_s=0.05)
    for number in (1, 2):
        await house.until(lambda: A in {tuple(pool) for pool in provider.market.usable()})  # type: ignore[attr-defined]
        await house.grant(provider, number)
    (words,) = [text for key, text in house.notes.items() if key.startswith("remark: ec2: ")]
    assert "g5.xlarge in us-east-1a was passed over 2 times: InsufficientInstanceCapacity" in words


async def test_an_instance_that_never_joins_is_ended_and_the_next_one_is_had_elsewhere(house: House) -> None:
    provider = await house.started(retry_s=60.0)
    lease = await house.grant(provider, 1)
    (silent,) = house.aws.living()
    assert silent.pool == A
    await provider.release(lease, "boot_timeout")
    end = await house.recorder.ended(lease)
    assert end.cause is EndCause.BOOT_TIMEOUT
    for word in (silent.id, "g5.xlarge in us-east-1a", "get-console-output", "run.advertise"):
        assert word in end.detail
    assert house.aws.living() == []
    await house.grant(provider, 2)
    assert [one.pool for one in house.aws.living()] == [B]


async def test_where_no_instance_joins_nothing_is_offered_for_longer_each_time(house: House) -> None:
    house.aws.books.capacity = {A: 4}
    provider = await house.started(retry_s=2.0, max_workers=1)
    waited_s: list[float] = []
    for number in range(3):
        lease = await house.grant(provider, number)
        await provider.release(lease, "boot_timeout")
        await house.recorder.ended(lease)
        began_s = time.monotonic()
        assert "NeverJoined" in await house.refusal(provider, 100 + number)
        await house.until(lambda: house.recorder.available > 0)
        waited_s.append(time.monotonic() - began_s)
    assert waited_s[2] > 2 * waited_s[0]
    lease = await house.grant(provider, 3)
    await provider.release(lease)
    await house.recorder.ended(lease)
    assert provider.market.failures == {}  # type: ignore[attr-defined]


async def test_a_notice_without_an_end_ends_the_lease_as_it_says(house: House) -> None:
    """The instance lives on after its notice's deadline; the run gives it back then, and pays for it."""
    provider = await house.started()
    lease = await house.grant(provider)
    await asyncio.to_thread(house.aws.warn, house.instance(lease), 0.5)
    await house.recorder.until(lambda r: r.of(LeaseNotice, lease))
    await provider.release(lease, "the lease expires")
    end = await house.recorder.ended(lease)
    assert end.cause is EndCause.PREEMPTED
    assert end.billed_ns
    assert house.aws.living() == []


async def test_the_launch_template_of_an_operator_is_used(house: House) -> None:
    provider = await house.started(image="", launch_template=await template(house, "terminate"))
    lease = await house.grant(provider)
    assert "ELASTIC_JOIN_TOKEN" in house.aws.living()[0].user_data
    await provider.release(lease)
    await house.recorder.ended(lease)
    assert "CreateLaunchTemplate" not in house.aws.proxy.calls - house.calls_before


@pytest.mark.parametrize("version", ["", ":2", ":$Latest"])
async def test_a_launch_template_whose_instances_would_only_stop_is_refused(house: House, version: str) -> None:
    name = await template(house, "terminate" if version else "stop", *(["stop"] if version else []))
    with pytest.raises(ProviderUnavailable, match=r"InstanceInitiatedShutdownBehavior.*'stop'.*set it to \"terminate"):
        await house.started(image="", launch_template=name + version)


async def template(house: House, *behaviours: str) -> str:
    """A launch template with a version of each."""
    ec2, made = house.aws.client("ec2"), ""
    for number, behaviour in enumerate(behaviours):
        data = {"ImageId": house.aws.image, "InstanceInitiatedShutdownBehavior": behaviour}
        if number:
            await asyncio.to_thread(ec2.create_launch_template_version, LaunchTemplateId=made, LaunchTemplateData=data)
        else:
            name = f"operator-{time.monotonic_ns()}"
            answer = await asyncio.to_thread(
                ec2.create_launch_template, LaunchTemplateName=name, LaunchTemplateData=data
            )
            made = answer["LaunchTemplate"]["LaunchTemplateId"]
    return made


async def test_interruptions_are_known_to_the_next_run(house: House) -> None:
    provider = await house.started()
    pools = [str(pool) for pool in provider.market.usable()]  # type: ignore[attr-defined]
    assert pools == ["g5.xlarge in us-east-1a", "g5.xlarge in us-east-1b"]
    lease = await house.grant(provider)
    (one,) = house.aws.living()
    await asyncio.sleep(1.1)
    await asyncio.to_thread(house.aws.take, one.id)
    await house.recorder.ended(lease)
    next_run = house.of_another_run()
    later = await next_run.started(boot_s=60.0)
    assert one.ended_s is not None
    assert later.market.expected_life_s() == pytest.approx(one.ended_s - one.began_s)
    assert later.market.history.keys() == {one.pool}  # type: ignore[attr-defined]
    await next_run.close()


@pytest.mark.parametrize("clock_s", [-900.0, 900.0])
async def test_a_clock_that_is_off_is_told_from_wrong_credentials(house: House, clock_s: float) -> None:
    off = rf"this machine's clock is (899|900|901) s {'behind' if clock_s > 0 else 'ahead of'} AWS's"
    provider = await house.started()
    house.aws.proxy.clock_s = clock_s
    reason = await house.refusal(provider)
    assert re.search(rf"^ec2: create_fleet of EC2 in us-east-1 .*AuthFailure.*{off}.*chrony", reason), reason
    with pytest.raises(ProviderUnavailable, match=rf"ec2: .*{off}: set it"):
        await house.started()
    found = await asyncio.to_thread(examine, "ec2", Ec2Settings.model_validate(house.aws.settings()))
    clock = found.findings[-1]
    assert not clock.ok
    assert re.search(off, clock.found)
    house.aws.proxy.clock_s = 0.0
    await house.until(lambda: house.recorder.available > 0)


async def test_a_start_that_was_refused_has_nothing_to_say_at_the_end(house: House) -> None:
    with structlog.testing.capture_logs() as logged:
        refused: list[dict[str, Any]] = [{"image": "ami-00000000"}, {"profile": "nobody"}, {"gpus_per_worker": 4}]
        for settings in refused:
            provider = house.provider(**settings)
            with pytest.raises(ProviderUnavailable):
                await provider.start(house.recorder.emit)
            await provider.aclose()
    assert logged == []


async def test_a_quota_is_named(house: House) -> None:
    house.aws.books.quota = 0
    reason = await house.refusal(await house.started())
    assert "MaxSpotInstanceCountExceeded" in reason


async def test_both_notices_come_and_what_was_taken_is_preempted_and_free_in_its_first_hour(house: House) -> None:
    before = house.aws.books.usd()
    provider = await house.started()
    lease = await house.grant(provider)
    instance = house.instance(lease)
    await asyncio.to_thread(house.aws.advise, instance)
    await house.recorder.until(lambda r: r.of(LeaseNotice, lease))
    assert house.recorder.of(LeaseNotice, lease)[0].deadline_ns is None
    await asyncio.to_thread(house.aws.warn, instance, 120.0)
    await house.recorder.until(lambda r: len(r.of(LeaseNotice, lease)) == 2)
    deadline_ns = house.recorder.of(LeaseNotice, lease)[1].deadline_ns
    assert deadline_ns is not None
    left_s = (deadline_ns - (time.monotonic_ns() - house.began_ns)) / 1e9
    assert 100 < left_s <= 121
    await asyncio.to_thread(house.aws.take, instance)
    end = await house.recorder.ended(lease)
    assert (end.cause, end.billed_ns) == (EndCause.PREEMPTED, 0)
    assert house.aws.books.usd() == before


async def test_an_end_without_notice_and_one_by_the_instance_itself_are_told_apart(house: House) -> None:
    provider = await house.started()
    first, second = [await house.grant(provider, number) for number in (1, 2)]
    await asyncio.to_thread(house.aws.take, house.instance(first))
    own = house.instance(second)
    asyncio.run_coroutine_threadsafe(house.aws.proxy.end(own, BY_ITSELF), house.aws.loop)
    assert (await house.recorder.ended(first)).cause is EndCause.PREEMPTED
    end = await house.recorder.ended(second)
    assert end.cause is EndCause.LOST
    assert "get-console-output" in end.detail


async def test_a_lease_costs_what_the_server_bills(house: House) -> None:
    before = house.aws.books.usd()
    provider = await house.started()
    leases = [await house.grant(provider, number) for number in range(3)]
    await asyncio.sleep(1.5)
    for lease in leases:
        await provider.release(lease)
    usd = 0.0
    for lease in leases:
        end = await house.recorder.ended(lease)
        assert isinstance(end.billed_ns, int)
        usd += end.billed_ns / 3.6e12 * usd_of(house)
    assert usd == pytest.approx(house.aws.books.usd() - before, rel=1e-3)


async def test_the_next_process_takes_over_what_was_ordered_and_ends_what_nobody_wants(house: House) -> None:
    former = await house.started()
    kept = await house.grant(former, 1)
    await house.grant(former, 2)
    house.providers.clear()  # As if its process had been killed: nobody closes it.
    for task in tuple(former.tasks):
        task.cancel()
    successor, recorder = house.provider(), ProviderRecorder()
    known = [
        KnownLease(request=lease_request(1), granted=False),
        KnownLease(request=lease_request(3), granted=False),
    ]
    assert await successor.adopt(known, recorder.emit) == ["lease-3"]
    await successor.start(recorder.emit)
    assert isinstance(await recorder.answered(kept), LeaseGranted)
    assert [one.tags["elastic:lease"] for one in house.aws.living()] == [kept]
    await successor.release(kept)
    end = await recorder.ended(kept)
    assert end.billed_ns


@pytest.mark.parametrize("release", [True, False])
async def test_what_is_not_known_yet_has_not_ended(house: House, *, release: bool) -> None:
    house.aws.proxy.unseen_s = 3.0
    provider = await house.started()
    lease = await house.grant(provider)
    if release:
        await provider.release(lease)
        assert (await house.recorder.ended(lease)).billed_ns
        assert house.aws.living() == []
    await provider.aclose()
    assert house.aws.living() == []
    assert house.recorder.of(LeaseEnded, lease)


async def test_an_end_waits_for_what_came_of_a_lost_order_and_says_so(house: House) -> None:
    provider = await house.started()
    patient_s, provider.answer_s = provider.answer_s, 1.0
    ordered, answered = asyncio.Event(), asyncio.Event()

    async def lose(action: str) -> None:
        if action == "CreateFleet":
            house.loop.call_soon_threadsafe(ordered.set)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answered.wait(), house.loop))

    house.aws.proxy.hold, house.aws.proxy.unseen_s = lose, 4.0
    await provider.acquire(lease_request(1))
    await ordered.wait()
    closing = asyncio.create_task(provider.aclose())
    await house.until(lambda: "the order of lease-1" in provider.waits_for)
    assert provider.closing_s > 60
    provider.answer_s = patient_s
    answered.set()
    assert await closing == ""
    assert house.aws.living() == []


async def test_what_is_not_proven_gone_is_told(house: House) -> None:
    provider = await house.started()
    house.aws.proxy.faults = Faults(torn_before=1.0)
    left = await provider.aclose()
    assert "describe-instances" in left


async def test_the_next_process_waits_for_what_was_granted_and_is_not_listed_yet(house: House) -> None:
    house.aws.proxy.unseen_s = 3.0
    former = await house.started()
    lease = await house.grant(former)
    house.providers.clear()
    for task in tuple(former.tasks):
        task.cancel()
    successor, recorder = house.provider(), ProviderRecorder()
    granted_at_ns = former.context.now_ns()
    known = KnownLease(request=lease_request(1), granted=True, granted_at_ns=granted_at_ns)
    assert await successor.adopt([known], recorder.emit) == []
    await successor.start(recorder.emit)
    await successor.release(lease)
    assert (await recorder.ended(lease)).billed_ns


async def test_whatever_is_listed_comes_in_pages(house: House) -> None:
    house.aws.proxy.page = 1
    provider = await house.started(secret_prefix="elastic/", instance_profile="worker", max_workers=4)
    assert len(provider.market.pools()) == 2  # type: ignore[attr-defined]
    for number in range(3):
        await house.grant(provider, number)
    assert len(await asyncio.to_thread(provider.api.instances)) == 3
    for number in range(12):
        await asyncio.to_thread(provider.api.put_secret, f"of a former process {number}", "token")
    await provider.aclose()
    secrets = house.aws.client("secretsmanager")
    assert (await asyncio.to_thread(secrets.list_secrets))["SecretList"] == []
    assert house.aws.living() == []


async def test_instances_of_no_lease_are_ended_and_those_of_other_runs_are_not(house: House) -> None:
    provider = await house.started(reconcile_s=0.2)
    stray = await house.grant(provider, 1)
    other = await house.grant(provider, 2)
    tags = house.aws.client("ec2").create_tags
    await asyncio.to_thread(tags, Resources=[house.instance(other)], Tags=[{"Key": "elastic:run", "Value": "another"}])
    leased = provider._held.pop(stray)
    await house.until(lambda: leased.instance not in {one.id for one in house.aws.living()})
    assert [one.tags["elastic:lease"] for one in house.aws.living()] == [other]
    assert any(key.startswith("remark: ec2: i-") for key in house.notes)


async def test_the_cap_ends_leases_in_time(house: House) -> None:
    usd_max = 0.16
    provider = await house.started(usd_max=usd_max, poll_s=0.1, max_workers=4)
    leases = [await house.grant(provider, number) for number in (1, 2)]
    left_s = (usd_max / 2 / usd_of(house)) * 3600 - 50
    for lease in leases:
        house.aws.age(house.instance(lease), left_s)
    await house.recorder.until(lambda r: all(r.of(LeaseNotice, lease) for lease in leases))
    assert "usd_max = $0.16" in house.recorder.of(LeaseNotice, leases[0])[0].reason
    assert house.recorder.available == 0
    assert "usd_max = $0.16" in await house.refusal(provider, 3)


async def test_a_restart_spends_what_the_cap_has_left(house: House) -> None:
    provider = house.provider(usd_max=0.5, spent_usd=0.495)
    await provider.adopt([], house.recorder.emit)
    await provider.start(house.recorder.emit)
    assert house.recorder.available == 0
    assert "$0.49" in await house.refusal(provider) or "$0.50" in await house.refusal(provider, 2)


async def test_the_run_hears_what_a_lease_costs_by_ec2s_own_account(house: House) -> None:
    provider = await house.started(poll_s=0.1, price_s=0.3)
    lease = await house.grant(provider)
    first_usd = house.recorder.of(LeaseRepriced, lease)[0].usd_per_gpu_hour
    house.aws.age(house.instance(lease), 3590.0)
    house.aws.books.prices.change(2.0)
    await house.recorder.until(lambda r: r.of(LeaseRepriced, lease)[-1].usd_per_gpu_hour > 1.9 * first_usd)
    told = house.recorder.of(LeaseRepriced, lease)[-1]
    assert told.usd >= usd_by_the_books(house, house.instance(lease)) - 1e-3
    house.aws.books.prices.change(0.5)


async def test_what_no_lease_had_is_billed_to_the_run(house: House) -> None:
    provider = await house.started(reconcile_s=0.2, poll_s=0.1)
    lease = await house.grant(provider)
    instance = house.instance(lease)
    provider._held.pop(lease)
    house.aws.age(instance, 7200.0)
    await house.recorder.until(lambda r: r.of(StraysBilled))
    first, *_ = house.recorder.of(StraysBilled)
    assert first.usd >= usd_by_the_books(house, instance) - 1e-3, "the run knows before the instance is ended"
    await house.recorder.until(lambda r: len(r.of(StraysBilled)) == 2)
    usd = sum(event.usd for event in house.recorder.of(StraysBilled))
    assert usd == pytest.approx(usd_by_the_books(house, instance), rel=1e-3)


async def test_while_ec2_cannot_be_asked_nothing_is_offered_and_nothing_is_lost(house: House) -> None:
    provider = await house.started(answer_timeout_s=6.0)
    lease = await house.grant(provider)
    house.aws.proxy.faults = Faults(torn_before=1.0)
    await house.recorder.until(lambda r: r.available == 0)
    assert not house.recorder.of(LeaseEnded, lease)
    house.aws.proxy.faults = Faults()
    await house.recorder.until(lambda r: r.available == 2)


async def test_tickets_by_secrets_manager_are_in_no_user_data_and_gone_with_the_lease(house: House) -> None:
    provider = await house.started(secret_prefix="elastic/", instance_profile="worker")
    lease = await house.grant(provider)
    (one,) = house.aws.living()
    assert "secret-1" not in one.user_data
    secrets = house.aws.client("secretsmanager")
    held = await asyncio.to_thread(secrets.list_secrets)
    assert [s["Name"].rpartition("/")[2] for s in held["SecretList"]] == [lease]
    await provider.release(lease)
    await house.recorder.ended(lease)
    held = await asyncio.to_thread(secrets.list_secrets)
    assert held["SecretList"] == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"image": "ami-00000000"}, ("ami-00000000", "providers.ec2.image")),
        ({"instance_types": ["x9.mega"]}, ("InvalidInstanceType", "providers.ec2.instance_types")),
        ({"launch_template": "lt-00000000", "image": ""}, ("launch_template", "providers.ec2.launch_template")),
        ({"zones": ["us-east-1z"]}, ("no spot price", "providers.ec2.zones")),
        ({"gpus_per_worker": 4}, ("1 GPUs", "gpus_per_worker is 4")),
        ({"endpoint_url": "http://127.0.0.1:9", "answer_timeout_s": 5.0}, ("ec2", "http://127.0.0.1:9")),
        ({"profile": "nobody"}, ("ProfileNotFound", "providers.ec2.profile")),
        ({"queue": "http://127.0.0.1:9/1/none"}, ("QueueDoesNotExist", "providers.ec2.queue")),
    ],
)
async def test_what_can_never_work_is_said_at_the_start(
    house: House, settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ProviderUnavailable) as refused:
        await house.started(**settings)
    for word in ("ec2", *words):
        assert word in str(refused.value)


async def test_wrong_credentials_are_named_at_the_start_and_later(house: House) -> None:
    house.aws.proxy.keys = {"another"}
    with pytest.raises(ProviderUnavailable, match=r"AuthFailure.*aws configure"):
        await house.started()
    house.aws.proxy.keys = None
    provider = await house.started()
    house.aws.proxy.denied = {"CreateFleet"}
    assert "the role lacks this action" in await house.refusal(provider)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("ExpiredToken", "aws sso login"),
        ("RequestExpired", "credentials have expired"),
        ("InvalidClientTokenId", "these credentials are wrong"),
        ("OptInRequired", "no EC2 in this region"),
    ],
)
async def test_credentials_that_expire_while_a_run_goes_on_take_no_worker_along(
    house: House, code: str, words: str
) -> None:
    provider = await house.started()
    lease = await house.grant(provider)
    house.aws.proxy.keys, house.aws.proxy.unknown = {"another"}, code
    await house.recorder.until(lambda r: r.available == 0)
    reason = await house.refusal(provider, 2)
    for word in ("ec2: ", code, words):
        assert word in reason, reason
    assert not house.recorder.of(LeaseEnded, lease)
    house.aws.proxy.keys = None
    await house.recorder.until(lambda r: r.available > 0)
    await house.grant(provider, 3)


async def test_prices_above_the_limit_are_told_though_nobody_asks(house: House) -> None:
    with structlog.testing.capture_logs() as logged:
        provider = await house.started(usd_per_gpu_hour_max=0.01)
        assert house.recorder.available == 0
        reason = await house.refusal(provider)
    (warned,) = logged
    remark = house.notes["remark: ec2: nothing"]
    for said in (reason, str(warned["why"]), remark):
        assert "g5.xlarge in us-east-1a: $" in said
        assert "above usd_per_gpu_hour_max" in said
    assert house.aws.living() == []


async def test_user_data_that_is_too_large_refuses_the_lease(house: House) -> None:
    provider = await house.started(install=["x" * 1000] * 20)
    assert "16384" in await house.refusal(provider)


async def test_an_examination_says_what_could_be_had_and_orders_nothing(house: House) -> None:
    found = await asyncio.to_thread(examine, "ec2", Ec2Settings.model_validate(house.aws.settings()))
    assert all(finding.ok for finding in found.findings), found
    assert [one.place for one in found.capacity] == ["g5.xlarge in us-east-1a", "g5.xlarge in us-east-1b"]
    assert found.capacity[0].score == 9
    house.aws.proxy.denied = {"DescribeSpotPriceHistory"}
    found = await asyncio.to_thread(examine, "ec2", Ec2Settings.model_validate(house.aws.settings()))
    assert [finding.ok for finding in found.findings] == [True, True, False, True]
    assert house.aws.living() == []


@pytest.mark.timeout(900)
async def test_hundreds_of_leases_on_bad_days_leave_nothing_and_cost_what_is_billed(house: House) -> None:
    """More than two thousand calls, of which one in seven or so goes wrong in some way."""
    aws, at_once, leases = house.aws, 16, 500
    aws.books.capacity = {A: 20, B: 20}
    aws.proxy.remembered_s = 10.0
    calls_before, rented_before = aws.proxy.calls.total(), len(aws.books.rented)
    provider = await house.started(max_workers=at_once, reconcile_s=1.0, retry_s=0.1, retry_max_s=0.2, poll_s=0.1)
    aws.proxy.faults = Faults(error=0.05, throttled=0.002, torn_before=0.03, torn_after=0.03, late=0.04)
    numbers, billed_ns = iter(range(leases)), list[int]()

    async def come_and_go() -> None:
        for number in numbers:
            lease = await house.grant(provider, number)
            await provider.release(lease)
            end = await house.recorder.ended(lease)
            assert isinstance(end.billed_ns, int)
            billed_ns.append(end.billed_ns)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(come_and_go())
    aws.proxy.faults = Faults()
    await provider.aclose()
    rented = list(aws.books.rented.values())[rented_before:]
    assert aws.proxy.calls.total() - calls_before > 4 * leases
    assert len(rented) == len({one.tags["elastic:lease"] for one in rented}) == len(billed_ns) == leases
    assert aws.living() == []
    bill = Books(aws.books.prices, {}, rented={one.id: one for one in rented})
    assert sum(billed_ns) / 3.6e12 * usd_of(house) == pytest.approx(bill.usd(), rel=1e-3)
