"""What an operator applies: Terraform and Packer that are valid, and roles that may do what a run does, and no more."""

import contextlib
import importlib
import json
import re
import shutil
import subprocess
import urllib.request
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.weights.s3 import S3Relay
from providers.ec2_api import Ec2Api, Ec2Error, NoAccess
from providers.ec2_market import Ec2Settings, SpotPool
from tests.clouds.aws.policies import NAMES, POLICIES, actions, allows, policy
from tests.clouds.aws_server.cloud import Cloud

boto3 = pytest.importorskip("boto3")

pytestmark = pytest.mark.clouds

AWS = POLICIES.parent
RUN = "lake-20261123-091500-0a1b2c3d"
ORDERED = {"ec2:RunInstances", "ec2:CreateTags", "iam:PassRole", "secretsmanager:TagResource"}
"""What AWS asks for beside the call that a run makes: an order launches, tags and gives a role; a secret has tags."""
UNASKED = {"sts:GetCallerIdentity"}
"""Needs no permission."""
ACTIONS = {
    "HeadObject": "s3:GetObject",
    "ListObjectsV2": "s3:ListBucket",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "DeleteMessageBatch": "sqs:DeleteMessage",
}
"""Operations whose action has another name."""
UNANSWERED = {"NoSuchResourceException", "ResponseParser"}
"""What moto says where it cannot answer."""
FREE = {
    *("aws_vpc", "aws_internet_gateway", "aws_route_table", "aws_subnet", "aws_route_table_association"),
    *("aws_vpc_endpoint", "aws_security_group", "aws_launch_template", "aws_iam_role", "aws_iam_role_policy"),
    *("aws_iam_instance_profile", "aws_sqs_queue", "aws_sqs_queue_policy", "aws_cloudwatch_event_rule"),
    *("aws_cloudwatch_event_target", "aws_s3_bucket", "aws_s3_bucket_public_access_block"),
    *("aws_s3_bucket_lifecycle_configuration", "aws_budgets_budget"),
}
"""Kinds of resources that cost nothing while nobody uses them. A VPC endpoint is free for being S3's gateway."""


def parsed() -> dict[str, Any]:
    hcl2 = importlib.import_module("hcl2")
    return {path.name: hcl2.loads(path.read_text()) for path in sorted(AWS.glob("*.tf"))}


def bare(name: str) -> str:
    return name.strip('"')


def test_terraform_finds_it_valid(tmp_path: Path) -> None:
    """All but what AWS's provider has only had since its fourth version: the one that can be had offline is older."""
    packages = [importlib.import_module(f"cloudrail.{name}") for name in ("terraform_0_15", "terraform_plugins")]
    binaries, plugins = (Path(next(iter(package.__path__))) for package in packages)
    terraform = tmp_path / "terraform"
    shutil.copy(binaries / "terraform", terraform)
    terraform.chmod(0o755)
    place = tmp_path / "plugins/registry.terraform.io/hashicorp/aws/3.39.0/linux_amd64"
    place.mkdir(parents=True)
    with zipfile.ZipFile(plugins / "terraform-provider-aws_3.39.0_linux_amd64.zip") as archive:
        archive.extractall(place)
    for file in place.iterdir():
        file.chmod(0o755)
    work = tmp_path / "aws"
    shutil.copytree(AWS, work)
    for newer in ("lifecycle.tf", "guard.tf"):
        (work / newer).unlink()
    versions = work / "versions.tf"
    versions.write_text(versions.read_text().replace(">= 4.0", ">= 3.39"))

    def run(*arguments: str) -> str:
        ended = subprocess.run([terraform, *arguments], cwd=work, capture_output=True, text=True, timeout=120)
        errors = [line for line in ended.stderr.splitlines() if not line.startswith("[")]
        assert ended.returncode == 0, "\n".join(errors[-40:])
        return ended.stdout

    run("init", "-backend=false", f"-plugin-dir={tmp_path / 'plugins'}")
    assert "valid" in run("validate", "-no-color")
    assert run("fmt", "-check") == ""


def test_packer_finds_the_image_well_formed() -> None:
    packer = shutil.which("packer")
    if packer is None:
        pytest.skip("Packer is not installed (apt-get install packer)")
    command = [packer, "validate", "-syntax-only", AWS / "worker.pkr.hcl"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_whatever_is_referred_to_is_declared_and_every_variable_is_used() -> None:
    files = parsed()
    declared: dict[str, set[str]] = defaultdict(set)
    for content in files.values():
        for variable in content.get("variable", []):
            declared["var"] |= {bare(name) for name in variable if not name.startswith("__")}
        for block in content.get("locals", []):
            declared["local"] |= {name for name in block if not name.startswith("__")}
        for block in content.get("resource", []):
            for kind, named in block.items():
                declared[bare(kind)] |= {bare(name) for name in named}
        for block in content.get("data", []):
            for kind, named in block.items():
                declared[f"data.{bare(kind)}"] |= {bare(name) for name in named}
    text = "\n".join(re.sub(r"(?m)#.*$", "", path.read_text()) for path in AWS.glob("*.tf"))
    used = set(re.findall(r"\b(var|local|aws_\w+)\.(\w+)", text))
    used = {(kind if f"data.{kind}.{name}" not in text else f"data.{kind}", name) for kind, name in used}
    assert [f"{kind}.{name}" for kind, name in used if name not in declared[kind]] == []
    assert declared["var"] == {name for kind, name in used if kind == "var"}


def test_policies_name_what_terraform_gives_them() -> None:
    names = re.search(r"names = \{(.*?)\}\n", (AWS / "iam.tf").read_text(), re.DOTALL)
    assert names is not None
    given_names = set(re.findall(r"(?m)^\s*(\w+)\s*=", names[1]))
    assert given_names == NAMES.keys()


def test_nothing_here_costs_while_no_run_goes_on() -> None:
    kinds = {bare(kind) for content in parsed().values() for block in content.get("resource", []) for kind in block}
    assert kinds <= FREE
    template = (AWS / "workers.tf").read_text()
    assert 'instance_initiated_shutdown_behavior = "terminate"' in template
    assert re.search(r"delete_on_termination\s+= true", template)
    assert 'com.amazonaws.${var.region}.s3"' in (AWS / "network.tf").read_text()


def test_the_lifecycle_is_that_for_buckets_made_elsewhere() -> None:
    rules = json.loads((AWS.parent / "s3-lifecycle.json").read_text())["Rules"]
    text = (AWS / "lifecycle.tf").read_text()
    assert re.findall(r'id\s+= "([\w-]+)"', text) == [rule["ID"] for rule in rules]
    assert set(re.findall(r'prefix = "([^"]+)"', text)) == {rule["Filter"]["Prefix"] for rule in rules}
    days = [rules[0]["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"], rules[1]["Expiration"]["Days"]]
    days.append(rules[1]["NoncurrentVersionExpiration"]["NoncurrentDays"])
    assert [int(found) for found in re.findall(r"\w*days\w*\s+= (\d+)", text)] == days


def test_what_it_tells_to_configure_are_the_providers_keys() -> None:
    told = (AWS / "outputs.tf").read_text().partition("[providers.ec2]")[2].partition("[weights]")[0]
    assert set(re.findall(r"(?m)^\s+(\w+) = ", told)) <= set(Ec2Settings.model_fields)


@pytest.mark.filterwarnings("ignore")  # Parliament's own.
@pytest.mark.parametrize("name", ["orchestrator", "worker"])
def test_parliament_finds_nothing_amiss(name: str) -> None:
    parliament = importlib.import_module("parliament")
    findings = parliament.analyze_policy_string(json.dumps(policy(name))).findings
    assert [str(finding) for finding in findings] == []


class Calls:
    """A run's calls, as its own code makes them, by IAM's names of them."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def note(self, model: Any, **_: Any) -> None:
        service = {"service-quotas": "servicequotas"}.get(model.service_model.service_name, "")
        service = service or model.service_model.service_name
        self.made.add(ACTIONS.get(model.name, f"{service}:{model.name}"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of all clients that are made from now on."""
    noted = Calls()
    session = boto3.Session

    class Noting(session):
        def client(self, *arguments: Any, **options: Any) -> Any:
            made = super().client(*arguments, **options)
            made.meta.events.register("before-call", noted.note)
            return made

    monkeypatch.setattr("boto3.Session", Noting)
    monkeypatch.setattr("boto3.session.Session", Noting)
    return noted


def uses_of_ec2(api: Ec2Api, pools: list[SpotPool]) -> Iterator[Callable[[], object]]:
    """All that the provider asks of AWS, in its order."""
    yield from (api.check, api.make_template, api.prices, api.scores, api.quotas)
    yield lambda: api.put_secret("ec2-1", "a ticket")
    yield lambda: api.launch("ec2-1", pools, "#!/bin/bash\ntrue\n", 1.0)
    yield lambda: api.instances("ec2-1")
    yield lambda: api.terminate([one.id for one in api.instances("ec2-1")])
    yield lambda: api.discard(api.notices(0))
    yield lambda: api.delete_secret("ec2-1")
    yield api.delete_template


def use_s3(url: str) -> None:
    """All that the relay asks of it: blobs in one piece and in parts, there already, and a put that fails midway."""
    relay = S3Relay(url, part_bytes=5 << 20)
    with contextlib.closing(relay):
        relay.put("versions/1/small", b"content")
        relay.put("versions/1/small", b"content")
        relay.put("versions/1/large", bytes(11 << 20))
        relay.put("versions/1/large", bytes(11 << 20))
        assert len(relay.get("versions/1/large")) == 11 << 20
        assert relay.list_keys() == ["versions/1/large", "versions/1/small"]
        relay.delete("versions/1/large")
        relay.delete("versions/1/small")


def settings_with_template(aws: Cloud) -> Ec2Settings:
    made = aws.client("ec2").create_launch_template(
        LaunchTemplateName=f"operators-{len(aws.books.rented)}-{id(aws)}",
        LaunchTemplateData={"ImageId": aws.image, "InstanceInitiatedShutdownBehavior": "terminate"},
    )["LaunchTemplate"]["LaunchTemplateId"]
    own = aws.settings(image="", launch_template=made, secret_prefix="elastic/")
    return Ec2Settings.model_validate(own)


def test_every_call_is_allowed_and_whatever_is_allowed_is_called(
    aws: Cloud, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_with_template(aws)
    aws.client("sqs").send_message(QueueUrl=aws.queue.replace(aws.url, aws.moto_url), MessageBody="{}")
    for use in uses_of_ec2(Ec2Api(settings, RUN, "ec2"), sorted(SpotPool(*pool) for pool in aws.books.capacity)):
        use()
    aws.client("s3").create_bucket(Bucket="weights")
    use_s3(f"s3://weights/elastic/{RUN}?region=us-east-1&endpoint_url={aws.moto_url}")
    called = calls.made | ORDERED | {"s3:AbortMultipartUpload"}
    assert called - UNASKED - {"iam:PassRole"} - actions(policy("orchestrator")) == set()
    assert actions(policy("orchestrator")) - called == set()


names = st.from_regex(r"\A[a-z][a-z0-9-]{0,12}\Z")
ARN = "arn:aws:ec2:us-east-1:123456789012"


@given(run=names, tag=st.sampled_from(["lake", "lake-20261123-091500", "river"]))
def test_a_role_ends_instances_of_its_runs_and_no_others(run: str, tag: str) -> None:
    own = policy("orchestrator")
    for name, mine in ((f"{tag}-{run}", True), (run, run.startswith(f"{tag}-")), (f"{tag}{run}", run.startswith("-"))):
        context = {"aws:PrincipalTag/elastic:run": tag, "aws:ResourceTag/elastic:run": name}
        assert allows(own, "ec2:TerminateInstances", f"{ARN}:instance/i-1", context) is mine, name
        order = {"aws:PrincipalTag/elastic:run": tag, "aws:RequestTag/elastic:run": name}
        assert allows(own, "ec2:RunInstances", f"{ARN}:instance/*", order) is mine, name


def test_nobody_makes_an_instance_his_own_by_tagging_it() -> None:
    own, principal = policy("orchestrator"), {"aws:PrincipalTag/elastic:run": "lake"}
    instance = f"{ARN}:instance/i-of-somebody-else"
    assert not allows(own, "ec2:CreateTags", instance, principal | {"aws:RequestTag/elastic:run": RUN})
    assert allows(own, "ec2:CreateTags", instance, principal | {"ec2:CreateAction": "CreateFleet"})
    assert not allows(own, "ec2:TerminateInstances", instance, principal)
    assert not allows(own, "ec2:TerminateInstances", instance, {"aws:ResourceTag/elastic:run": RUN})
    assert not allows(own, "ec2:RunInstances", f"{ARN}:instance/*", principal)
    assert not allows(own, "ec2:CreateFleet", f"{ARN}:launch-template/lt-of-somebody-else", principal)


def test_a_worker_reads_its_runs_weights_and_asks_for_keyframes() -> None:
    own, blobs = policy("worker"), f"arn:aws:s3:::weights/elastic/{RUN}"
    assert allows(own, "s3:GetObject", f"{blobs}/versions/1/manifest.json", {})
    assert allows(own, "s3:PutObject", f"{blobs}/requests/keyframe-1", {})
    assert allows(own, "s3:ListBucket", "arn:aws:s3:::weights", {"s3:prefix": f"elastic/{RUN}/versions/"})
    assert not allows(own, "s3:ListBucket", "arn:aws:s3:::weights", {"s3:prefix": ""})
    assert not allows(own, "s3:PutObject", f"{blobs}/versions/1/manifest.json", {})
    assert not allows(own, "s3:DeleteObject", f"{blobs}/requests/keyframe-1", {})
    assert not allows(own, "s3:GetObject", "arn:aws:s3:::weights/elastic/river-1/versions/1/manifest.json", {})
    secret = "arn:aws:secretsmanager:us-east-1:123456789012:secret:elastic/"
    assert allows(own, "secretsmanager:GetSecretValue", f"{secret}{RUN}/ec2-1-AbCdEf", {})
    assert not allows(own, "secretsmanager:GetSecretValue", f"{secret}river-1/ec2-1-AbCdEf", {})
    assert not {action for action in actions(own) if action.startswith(("ec2:", "iam:"))}


@pytest.fixture
def enforced(aws: Cloud) -> Iterator[dict[str, str]]:
    """Credentials of a user with the orchestrator's policy; meanwhile the server asks everybody for permission."""
    iam = aws.client("iam")
    iam.create_user(UserName="orchestrator")
    iam.put_user_policy(
        UserName="orchestrator", PolicyName="elastic", PolicyDocument=json.dumps(widened(policy("orchestrator")))
    )
    key = iam.create_access_key(UserName="orchestrator")["AccessKey"]

    def ask_for_permission(after: float) -> None:
        body = str(after).encode()
        plain = {"content-type": "text/plain"}
        request = urllib.request.Request(f"{aws.moto_url}/moto-api/reset-auth", body, plain, method="POST")
        urllib.request.urlopen(request, timeout=30).close()

    ask_for_permission(0)
    try:
        yield {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
    finally:
        ask_for_permission(float("inf"))
        with contextlib.suppress(Exception):
            iam.delete_access_key(UserName="orchestrator", AccessKeyId=key["AccessKeyId"])
            iam.delete_user_policy(UserName="orchestrator", PolicyName="elastic")
            iam.delete_user(UserName="orchestrator")


def widened(document: dict[str, Any]) -> dict[str, Any]:
    """The actions alone: moto knows other accounts, and no tags of who asks. Resources and tags are judged above."""
    return {
        "Version": document["Version"],
        "Statement": [
            {"Effect": "Allow", "Action": statement["Action"], "Resource": "*"}
            for statement in document["Statement"]
            if statement["Effect"] == "Allow"
        ],
    }


def test_with_the_roles_actions_alone_all_calls_succeed(
    aws: Cloud, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    aws.client("s3").create_bucket(Bucket="enforced")
    template = settings_with_template(aws).launch_template
    subnets = aws.proxy.subnets
    queue = aws.queue.replace(aws.url, aws.moto_url)
    for name, value in request.getfixturevalue("enforced").items():
        monkeypatch.setenv(name, value)
    own = {"endpoint_url": aws.moto_url, "image": "", "launch_template": template, "secret_prefix": "elastic/"}
    settings = Ec2Settings.model_validate(
        aws.settings(**own, queue=queue, subnets=subnets, instance_types=["t3.micro"])
    )
    api = Ec2Api(settings, RUN, "ec2")
    for use in uses_of_ec2(api, [SpotPool("t3.micro", "us-east-1a")]):
        try:
            use()
        except NoAccess:
            raise
        except Ec2Error as error:
            if error.code not in UNANSWERED:
                raise
    use_s3(f"s3://enforced/elastic/{RUN}?region=us-east-1&endpoint_url={aws.moto_url}")
    for forbidden in ("describe_volumes", "describe_vpcs"):
        with pytest.raises(NoAccess):
            api._call("ec2", forbidden)
