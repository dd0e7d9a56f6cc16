"""What EC2 has for a configuration, and what keeps a run from it: asked once, without ordering anything."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from providers.base import CapacityNow, Examination, ProviderUnavailable, VendorFinding
from providers.ec2_api import SET_CLOCK, Ec2Api, Ec2Error, clock_words, installed
from providers.ec2_market import Ec2Market, Ec2Settings

SKEW_S_MAX = 60.0
"""Notices tell times of day; signed requests are refused from five minutes on."""
VCPUS_MIN = 1.0


def examine(name: str, settings: Ec2Settings) -> Examination:
    api = Ec2Api(settings, "examination", name)
    market = Ec2Market(name, settings)
    try:
        installed()
    except ProviderUnavailable as error:
        missing = VendorFinding(what=f"{name}: boto3", ok=False, found="not installed", mend=str(error))
        return Examination(findings=(missing,))
    findings = list(_findings(name, api, market))
    return Examination(findings=tuple(findings), capacity=tuple(_capacity(market)))


def _findings(name: str, api: Ec2Api, market: Ec2Market) -> Iterator[VendorFinding]:
    def ask(what: str, question: Callable[[], str]) -> VendorFinding:
        try:
            return VendorFinding(what=f"{name}: {what}", ok=True, found=question())
        except Ec2Error as error:
            said, _, mend = str(error).partition("; ")
            return VendorFinding(what=f"{name}: {what}", ok=False, found=said, mend=mend)

    def reach() -> str:
        api.check()
        return f"{api.where} answers; image, types and queue are there"

    def quotas() -> str:
        found = api.quotas()
        low = [quota for quota in found if quota.vcpus < VCPUS_MIN]
        if low:
            raise Ec2Error(
                f"{name}: quotas of {api.where}", "MaxSpotInstanceCountExceeded", f"{low[0].what} is 0 vCPUs"
            )
        return ", ".join(f"{quota.what}: {quota.vcpus:g} vCPUs" for quota in found)

    def prices() -> str:
        market.priced(api.prices())
        market.scores = api.scores()
        if not market.usable():
            raise Ec2Error(f"{name}: prices of {api.where}", "NothingToBeHad", market.why_nothing())
        best = market.usable()[0]
        usd = market.usd_now(best) / market.settings.gpus_per_worker
        return f"{len(market.usable())} pools; first {best} at ${usd:.3f} per GPU and hour"

    yield ask("credentials and reach", reach)
    yield ask("spot quota", quotas)
    yield ask("capacity", prices)
    skew_s = api.skew_s
    yield VendorFinding(
        what=f"{name}: clock",
        ok=abs(skew_s) <= SKEW_S_MAX,
        found=clock_words(skew_s),
        mend=SET_CLOCK,
    )


def _capacity(market: Ec2Market) -> Iterator[CapacityNow]:
    usable, gpus = market.usable(), market.settings.gpus_per_worker
    for pool in [*usable, *(pool for pool in sorted(market.pools()) if pool not in usable)]:
        point = market.prices[pool][-1]
        yield CapacityNow(
            place=str(pool),
            usd_per_gpu_hour=point.usd_per_hour / gpus,
            gpus_per_worker=gpus,
            usable=pool in usable,
            why="" if pool in usable else "dearer than usd_per_gpu_hour_max",
            score=market.scores.get(pool.zone),
            since=datetime.fromtimestamp(point.at_s, UTC).strftime("%Y-%m-%d %H:%M"),
        )
