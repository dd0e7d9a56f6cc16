"""Bad input: one message that says what, where and what is allowed; exit code 2; nothing left behind."""

import json
import shutil
import socket
from pathlib import Path

import msgspec
import pytest
import torch

from elastic.compose.incarnations import past_incarnations
from elastic.compose.plan import check_policy, resolve
from elastic.compose.run_endings import OUTAGE, ending_of, world
from elastic.compose.runs import new_run_dir
from elastic.config import ConfigError, TrainerConfig, load_config
from elastic.engine.model.checkpoint import load_model, model_tensors, read_config, write_checkpoint
from elastic.engine.model.qwen3 import Qwen3
from elastic.runtime.journal import RUNNING, UNEXPECTED, RunDirectory
from elastic.system.outages import EXIT_OUTAGE
from elastic.worker.trainer.embedded.trainer import GRPOTrainer


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "run.nosuch=1",
            (
                "run.nosuch",
                "unknown key",
                "allowed: advertise, budget_usd, caps, certificate, certificate_key, directory, host, name, ",
            ),
        ),
        ("nosuch.key=1", ("nosuch", "unknown key", "engine, environment")),
        ("run.steps=many", ("run.steps", "valid integer", "'many'")),
        ("run.steps=true", ("run.steps", "valid integer", "found True")),
        ("run.steps='3'", ("run.steps", "valid integer", "'3'")),
        ("rollout.temperature=true", ("rollout.temperature", "valid number", "found True")),
        ("rollout.temperature='0.5'", ("rollout.temperature", "valid number", "'0.5'")),
        ("rollout.dynamic_sampling=1", ("rollout.dynamic_sampling", "valid boolean", "found 1")),
        ("providers.spot.speed=true", ("providers.spot.speed", "valid number", "found True")),
        ("environment.settings.sizes=[true]", ("environment.settings.sizes.0", "valid integer", "found True")),
        ("run.host=0.0.0.0", ("run.advertise is missing", "run.host = 0.0.0.0", "--advertise HOST")),
        ("run.advertise=https://gpu-7", ("run.advertise", "allowed: HOST or HOST:PORT", "'https://gpu-7'")),
        ("run.certificate=cert.pem", ("run.certificate and run.certificate_key belong together",)),
        ("run.steps=-1", ("run.steps", "greater than or equal to 0", "found -1")),
        ("trainer.step_timeout_s=1e300", ("trainer.step_timeout_s", "at most 31536000 seconds", "found 1e+300")),
        ("trainer.threads=1025", ("trainer.threads", "less than or equal to 1024", "found 1025")),
        ("trainer={kind='transformers', transformers={seeding='vllm'}}", ("trainer.transformers.seeding", "'torch'")),
        ("run.steps=0", ("run.steps must be at least 1", "found 0")),
        ("run.steps.x=1", ("steps is not a section",)),
        ("run=3", ("run: must be a section", "found 3")),
        ("run", ("expected section.key=value",)),
        ("run.name='a/b'", ("run.name", "pattern", "'a/b'")),
        ("trainer.usd_per_gpu_hour=-1", ("trainer.usd_per_gpu_hour", "greater than or equal to 0", "found -1")),
        ("providers.spot.usd_per_gpu_hour=-1", ("providers.spot.usd_per_gpu_hour", "found -1")),
        ("providers.spot.nosuch=1", ("providers.spot.nosuch", "unknown key", "usd_per_gpu_hour")),
        ("providers.serving.load.nosuch=1", ("providers.serving.load.nosuch", "unknown key", "speed")),
        (
            "providers.nosuch.max_workers=1",
            ("small.toml: providers.nosuch: unknown provider", "serving-replay, spot, spot-replay"),
        ),
        ("rewards.name=nosuch", ("small.toml: rewards.name: unknown reward 'nosuch'", "frozenlake")),
        ("providers.spot.trace=nosuch", ("providers.spot.trace", "no trace 'nosuch'", "rlboost-a")),
        ("environment.name=nosuch", ("small.toml: environment.name: unknown environment 'nosuch'", "frozenlake")),
        ("environment.settings.sizes=[0]", ("environment.settings.sizes", "from 2 to 10", "[0]")),
        ("engine.kind=nosuch", ("small.toml: engine.kind: unknown engine 'nosuch'", "torch")),
        ("engine.kv_blocks=1", ("engine.kv_blocks", "engine.max_context_tokens = 192", "found 16")),
        ("rollout.max_tokens_per_turn=192", ("rollout.max_tokens_per_turn", "below engine.max_context_tokens")),
        ("trainer.updates_per_step=9", ("trainer.updates_per_step", "at most rollout.groups = 2", "found 9")),
        ("trainer.betas=[0.9, 1.0]", ("trainer.betas.1", "less than 1", "found 1.0")),
        ("rollout.temperature=inf", ("rollout.temperature", "finite", "found inf")),
        ("rollout.temperature=Infinity", ("rollout.temperature", "valid number", "'Infinity'")),
        ("trainer.learning_rate=nan", ("trainer.learning_rate", "found nan")),
        ("trainer.weight_decay=inf", ("trainer.weight_decay", "finite")),
        ("engine.pacing.decode_step_s={1 = inf}", ("engine.pacing.decode_step_s.1", "finite")),
        ("providers.serving.poll_s=inf", ("providers.serving.poll_s", "finite")),
        ("providers.spot.speed=inf", ("providers.spot.speed", "finite")),
        ("environment.settings.hole_probability=nan", ("environment.settings.hole_probability", "found nan")),
        ("trainer.gpus=8", ("trainer.gpus", "found 8", "allowed in live runs: 1", "elastic simulate")),
        ("model.checkpoint=nosuch", ("model.checkpoint", "nosuch", "elastic prepare")),
        ("logging.to=['nosuch']", ("logging.to.0", "'trackio', 'tensorboard', 'wandb' or 'mlflow'", "'nosuch'")),
        ("logging.to=['wandb']", ("logging.to: found 'wandb'", "not installed", "pip install wandb")),
        ("run.directory=''", ("run.directory", "must be a path", "found ''")),
        ("rollout={refill = false, refill_most = 1}", ("refill_most needs refill = true", "found 1")),
        ("rollout.staleness_drop=token", ("staleness_drop = 'token' needs staleness_bound", "found 0")),
        ("run.directory=/proc/nosuch", ("run.directory", "/proc/nosuch", "cannot be made")),
        ("run.directory=/dev/null", ("run.directory", "/dev/null", "Not a directory")),
    ],
)
def test_keys_and_values(refused, elastic, config: Path, override: str, words: tuple[str, ...]) -> None:
    refused(elastic("run", config, "--set", override), *words)
    assert not (config.parent / "runs").exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_link_beside_the_weights_that_leads_nowhere(refused, elastic, config: Path, name: str) -> None:
    policy = shutil.copytree(load_config(config).model.checkpoint, config.parent / "policy")
    (policy / name).unlink(missing_ok=True)
    (policy / name).symlink_to("../../blobs/gone")
    ended = elastic("run", config, "--set", f"model.checkpoint={policy}")
    refused(ended, f"model.checkpoint: {policy / name}: a link to ../../blobs/gone", "`hf download` fetches it")


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("rollout.groups=4", "allowed: 0 or nothing, since others train"),
        ("trainer.kind=embedded", "'imported' or nothing, since others train"),
        ("doors.plain=['10.0.0.0/8']", "--plain says it"),
        ("doors.idle_s=0", "greater than 0"),
    ],
)
def test_what_others_decide_of_a_run_that_others_train(
    refused, elastic, tmp_path: Path, override: str, allowed: str
) -> None:
    config = tmp_path / "rollouts.toml"
    config.write_text("[model]\ncheckpoint = 'policy'\n[providers.spot]\nkind = 'spot-replay'\n")
    served = elastic("serve-rollouts", config, "--providers", "spot", "--weights-root", tmp_path, "--set", override)
    refused(served, override.partition("=")[0], allowed)


def test_a_model_of_another_kind_names_its_config_and_the_trainer_for_it(refused, elastic, config: Path) -> None:
    policy = shutil.copytree(load_config(config).model.checkpoint, config.parent / "policy")
    raw = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**raw, "model_type": "warp"}))
    (policy / "generation_config.json").write_text("{}")
    ended = elastic("run", config, "--set", f"model.checkpoint={policy}")
    refused(ended, f"{policy / 'config.json'}: model_type: only 'qwen3'", "found 'warp'", "'transformers' trains other")


def test_agents_without_a_tokenizer(refused, elastic, config: Path) -> None:
    outside = ("--set", "environment.name=outside", "--set", "front={}", "--set", "environment.settings={}")
    ended = elastic("run", config, *outside)
    refused(ended, "model.checkpoint: ", "tokenizer.json: cannot be read", "agents need the policy's tokenizer")


def test_what_is_installed_and_cannot_be_loaded(
    refused, elastic, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "site" / "broken-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    named = {"missing": "nosuch.module:Order", "raising": "raising:Order", "number": "number:order"}
    orders = "".join(f"curriculum.{name} = {value}\n" for name, value in named.items())
    kinds = "[elastic.engines]\nwarp = raising:Warp\nthree = number:order\nbare = bare:Bare\n"
    trainers = "[elastic.trainers]\nodd = odd:Kind\nbare = bare:Bare\n"
    (about / "entry_points.txt").write_text(f"[elastic.policies]\n{orders}{kinds}{trainers}")
    bare = "from pydantic import BaseModel\nclass Bare:\n    class Settings(BaseModel): pass\n"
    (tmp_path / "site" / "bare.py").write_text(bare)
    (tmp_path / "site" / "raising.py").write_text("class Order:\n    table = [][0]\n")
    (tmp_path / "site" / "number.py").write_text("order = 3\n")
    (tmp_path / "site" / "odd.py").write_text("raise SystemExit('not today')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say."}\n')
    data = f"data = {{source = '{tmp_path}/rows.jsonl', order = "
    chat = f"environment={{name = 'chat', settings = {{rewards = ['mine:worth']}}, {data}"
    for name, words in {
        "missing": (
            " of the package broken 1, whose nosuch.module:Order cannot be loaded by",
            "No module named 'nosuch'",
        ),
        "raising": ("IndexError: list index out of range", "raising.py, line 2"),
        "number": (
            "of the package broken 1, whose number:order is 3 (int)",
            "allowed: a frozen msgspec.Struct or dataclass with order",
        ),
    }.items():
        ended = elastic("run", config, "--set", f"{chat}'{name}'}}}}")
        refused(ended, f"environment.data.order: found 'curriculum.{name}'", *words)
    refused(elastic("run", config, "--set", "engine.kind=warp"), "engine.kind: found 'warp'", "raising.py, line 2")
    refused(
        elastic("run", config, "--set", "engine.kind=three"),
        "found 'three' of the package broken 1, whose number:order is 3 (int)",
    )
    refused(elastic("run", config, "--set", "trainer.kind=odd"), "trainer.kind: found 'odd'", "SystemExit: not today")
    for key, lacking, contract in ("engine", "unfit", "EngineKind"), ("trainer", "seeding_engines", "TrainerKind"):
        ended = elastic("run", config, "--dry-run", "--set", f"{key}.kind=bare")
        refused(
            ended, f"{key}.kind: found 'bare'", "of the package broken 1, whose bare:Bare has no", lacking, contract
        )
    assert not (config.parent / "runs").exists()


def test_a_dry_run_promises_nothing_that_a_run_refuses(refused, elastic, config: Path) -> None:
    refused(elastic("run", config, "--dry-run", "--set", "trainer.gpus=8"), "trainer.gpus", "found 8")


def test_unknown_provider(refused, elastic, config: Path) -> None:
    ended = elastic("run", config, "--providers", "spot,nosuch")
    refused(ended, "--providers: unknown provider 'nosuch'", "serving-replay, spot, spot-replay")


def test_a_pool_that_has_not_started_the_run(refused, elastic, config: Path) -> None:
    ended = elastic("run", config, "--providers", "pool")
    refused(ended, "--providers pool", "no pool's job", "elastic pool start", "elastic jobs submit")


def test_every_problem_has_a_line(refused, elastic, config: Path) -> None:
    ended = elastic("run", config, "--set", "run.steps=-1", "--set", "rollout.groups=x", "--set", "nosuch=1")
    refused(ended, "run.steps", "rollout.groups", "nosuch")
    assert len(ended.err.strip().splitlines()) == 3


def test_options_of_another_type(refused, elastic, config: Path) -> None:
    refused(elastic("run", config, "--seed", "x"), "--seed", "valid integer")
    refused(elastic("run", config, "--seed", "-1"), "run.seed", "found -1")
    refused(elastic("run", config, "--nosuch"), "--nosuch")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("cannot be read", "No such file")),
        ("x = [", ("not valid TOML", "end of document")),
        ("[run]\nsteps = 1\n", ("model", "required but missing")),
        (b"\xff\xfe", ("not valid TOML", "UTF-8")),
    ],
)
def test_configuration_files(
    refused, elastic, tmp_path: Path, content: str | bytes | None, words: tuple[str, ...]
) -> None:
    path = tmp_path / "odd.toml"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    refused(elastic("run", path), str(path), *words)


def test_a_saved_configuration_that_is_no_section(refused, elastic, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text("[1]")
    refused(elastic("run", path, "--set", "run.steps=1"), str(path), "section of keys", "found [1]")


def test_a_run_needs_a_configuration(refused, elastic) -> None:
    refused(elastic("run"), "configuration file", "--resume")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1,add", (":3", "1,add")),
        ("soon,add,b", (":3", "soon")),
        ("1,vanish,b", (":3", "vanish", "add")),
        ("-1,add,b", (":3", "-1")),
    ],
)
def test_malformed_trace_line(refused, elastic, config: Path, line: str, words: tuple[str, ...]) -> None:
    trace = config.parent / "market.csv"
    trace.write_text(f"time_s,event,instance_id\n0,add,a\n{line}\n")
    refused(elastic("run", config, "--providers", "spot"), "providers.spot.trace", str(trace), *words)


class TestBasePolicy:
    @pytest.fixture
    def broken(self, config: Path, checkpoint: Path) -> Path:
        """A copy of the checkpoint to break, which the configuration names."""
        copy = config.parent / "broken"
        shutil.copytree(checkpoint, copy)
        config.write_text(config.read_text().replace(str(checkpoint), str(copy)))
        return copy

    def change(self, checkpoint: Path, **fields: object) -> None:
        path = checkpoint / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    def test_of_another_shape_than_its_config_says(self, refused, elastic, config: Path, broken: Path) -> None:
        self.change(broken, hidden_size=32)
        refused(elastic("run", config), "model.checkpoint", str(broken), "shape")

    def test_with_too_small_a_vocabulary(self, refused, elastic, config: Path, checkpoint: Path, broken: Path) -> None:
        small = msgspec.structs.replace(read_config(checkpoint), vocab_size=8)
        with torch.random.fork_rng(devices=[]):
            write_checkpoint(broken, small, model_tensors(Qwen3(small)))
        refused(elastic("run", config), "model.checkpoint", "vocabulary of 8", "'frozenlake' needs at least")

    def test_whose_config_is_not_json(self, refused, elastic, config: Path, broken: Path) -> None:
        (broken / "config.json").write_text("{")
        refused(elastic("run", config), "model.checkpoint", "config.json", "JSON")

    def test_of_another_architecture(self, refused, elastic, config: Path, broken: Path) -> None:
        self.change(broken, architectures=["LlamaForCausalLM"], model_type="llama")
        refused(elastic("run", config), "model.checkpoint", "llama", "qwen3")

    def test_that_no_worker_could_pull_in_time(self, refused, elastic, config: Path) -> None:
        ended = elastic("run", config, "--set", "weights.link_gbps=1e-6")
        refused(ended, "weights.pull_timeout_s: found 30", "weights.link_gbps = 1e-06")
        ended = elastic("run", config, "--set", "scheduler.load_timeout_s=20")
        refused(ended, "scheduler.load_timeout_s: found 20", "from weights.pull_timeout_s = 30 on")

    def test_with_truncated_weights(self, refused, elastic, config: Path, broken: Path) -> None:
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        refused(elastic("run", config), "model.checkpoint", "model.safetensors")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_on_a_device_that_is_not_there(self, refused, elastic, config: Path) -> None:
        refused(elastic("run", config, "--set", "engine.device=cuda"), "engine.device", "'cuda'", "'cpu'")


class TestRunsAsked:
    def test_unknown_run(self, refused, elastic, config: Path) -> None:
        refused(elastic("run", config, "--resume", "nosuch"), "no run 'nosuch'", "none")
        elsewhere = ("--set", f"run.directory={config.parent / 'elsewhere'}")
        for asked in (("run", config), ("run",)):
            refused(elastic(*asked, "--resume", "latest", *elsewhere), "no run 'latest'", "elsewhere")
        refused(elastic("report", "nosuch", "--directory", config.parent), "no run 'nosuch'")
        refused(elastic("report", "--directory", config.parent), "no run 'latest'")

    def test_run_without_a_journal(self, elastic, tmp_path: Path) -> None:
        (tmp_path / "run-1").mkdir()
        (tmp_path / "run-1" / "config.json").write_text("{}")
        code, out, err = elastic("report", "run-1", "--directory", tmp_path)
        assert (code, out) == (1, "")
        assert "journal.sqlite: no such journal" in err

    def test_run_whose_configuration_is_broken(self, refused, elastic, tmp_path: Path) -> None:
        (tmp_path / "run-1").mkdir()
        (tmp_path / "run-1" / "config.json").write_text("{")
        refused(elastic("run", "--resume", tmp_path / "run-1"), "config.json", "not valid JSON")


class TestCheckpointToResume:
    @pytest.fixture
    def run(self, config: Path, checkpoint: Path) -> Path:
        """A run that was interrupted, with a checkpoint of its trainer."""
        settings = load_config(config)
        run = new_run_dir(settings)
        GRPOTrainer(TrainerConfig(), load_model(checkpoint), 2, 1.0).save(run / "checkpoints" / "00000001.safetensors")  # type: ignore[call-arg]
        return run

    def test_is_damaged(self, refused, elastic, run: Path) -> None:
        (saved,) = (run / "checkpoints").iterdir()
        saved.write_bytes(saved.read_bytes()[:1000])
        refused(elastic("run", "--resume", run), "--resume", str(saved), "cannot be read", "removed")

    def test_has_a_flipped_bit(self, refused, elastic, run: Path) -> None:
        (saved,) = (run / "checkpoints").iterdir()
        raw = bytearray(saved.read_bytes())
        raw[-1] ^= 0x40
        saved.write_bytes(raw)
        refused(
            elastic("run", "--resume", run), "--resume", str(saved), "damaged", "is not as it was written", "removed"
        )

    def test_is_damaged_and_the_one_before_is_not(self, config: Path, run: Path) -> None:
        older = run / "checkpoints" / "00000001.safetensors"
        (run / "checkpoints" / "00000002.safetensors").write_bytes(older.read_bytes()[:1000])
        plan = resolve(load_config(config), [], "")
        check_policy(plan, run)
        older.write_bytes(b"")
        with pytest.raises(ConfigError, match=r"00000002\..* cannot be read .*; .*00000001\..* cannot be read"):
            check_policy(plan, run)

    def test_is_of_another_model(self, refused, elastic, run: Path, checkpoint: Path, tmp_path: Path) -> None:
        wider = msgspec.structs.replace(read_config(checkpoint), intermediate_size=48)
        with torch.random.fork_rng(devices=[]):
            write_checkpoint(tmp_path / "wider", wider, model_tensors(Qwen3(wider)))
        (saved,) = (run / "checkpoints").iterdir()
        ended = elastic("run", "--resume", run, "--set", f"model.checkpoint={tmp_path / 'wider'}")
        refused(ended, "--resume", str(saved), "does not fit the model", "shape")


class TestWorker:
    def test_needs_its_ticket(self, refused, elastic, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("ELASTIC_JOIN", "ELASTIC_RUN", "ELASTIC_WORKER", "ELASTIC_JOIN_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        refused(elastic("worker", "--join", "localhost:1"), "ELASTIC_RUN, ELASTIC_WORKER, ELASTIC_JOIN_TOKEN not set")

    def test_address(self, refused, elastic, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ELASTIC_RUN", "r")
        monkeypatch.setenv("ELASTIC_WORKER", "w")
        monkeypatch.setenv("ELASTIC_JOIN_TOKEN", "t")
        for address in ("nowhere", "host:", ":1", "host:x", "host:0", "host:99999"):
            refused(elastic("worker", "--join", address), "HOST:PORT", repr(address))


@pytest.mark.parametrize("address", ["[::]", "::1:7433", "0.0.0.0:port", "0.0.0.0:99999"])
def test_address_to_listen_on(refused, elastic, config: Path, address: str) -> None:
    refused(elastic("run", config, "--listen", address), "--listen", repr(address), "allowed: HOST:PORT", "[::]:7433")


def test_port_in_use(refused, elastic, config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = elastic("run", config, "--set", f"run.port={port}")
    refused(ended, f"127.0.0.1:{port}", "in use", "free port, or 0")
    assert not list((config.parent / "runs").iterdir())


CLOUDS = {"ec2": ["--set", "providers.ec2.image=ami-0123456789abcdef0"], "modal": [], "ray": []}


@pytest.mark.parametrize("kind", CLOUDS)
@pytest.mark.parametrize("where", [[], ["--dry-run"], ["--listen", "0.0.0.0:0", "--advertise", "127.0.0.1"]])
def test_nothing_is_rented_that_could_never_join(refused, elastic, config: Path, kind: str, where: list[str]) -> None:
    own = [*CLOUDS[kind], *(["--set", "providers.ray.address=ray://10.0.0.1:10001"] if kind == "ray" else [])]
    ended = elastic("run", config, "--providers", kind, *own, *where)
    refused(ended, f"providers.{kind}", "on other machines", "--listen HOST:PORT")
    assert "--runs-listen" not in ended.err
    assert not (config.parent / "runs").exists()


def test_what_may_pass_at_a_restart_ends_no_run(elastic, config: Path) -> None:
    run_dir = new_run_dir(load_config(config))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = elastic("run", "--resume", run_dir, "--providers", "spot", "--set", f"run.port={port}")
    assert ended.code == EXIT_OUTAGE
    assert "this may pass, and the run is as it was" in ended.err
    (run_dir / "log").write_text(ended.err)
    ending = ending_of(run_dir, Path("log"), 0, world(), ended.code)
    assert (ending.how, f"127.0.0.1:{port}" in ending.cause) == (OUTAGE, True)
    assert past_incarnations(RunDirectory(run_dir)).status in ("", RUNNING, UNEXPECTED)


def test_port_in_use_while_weights_are_served(refused, elastic, config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = elastic("run", config, "--set", f"run.port={port}", "--set", "weights.relay=http")
    refused(ended, f"127.0.0.1:{port}", "in use")
    assert not list((config.parent / "runs").iterdir())


def test_address_at_which_weights_cannot_be_served(refused, elastic, config: Path) -> None:
    ended = elastic("run", config, "--set", "run.host=192.0.2.1")
    refused(ended, "cannot serve weights on 192.0.2.1", "run.host")
    assert not list((config.parent / "runs").iterdir())


def test_provider_that_has_nothing_to_give(refused, elastic, config: Path, processes_of) -> None:
    refused(elastic("run", config, "--providers", "serving", "--set", "providers.serving.hosts=0"), "serving", "hosts")
    assert not list((config.parent / "runs").iterdir())


@pytest.mark.nightly
@pytest.mark.slow
def test_full_disk(start, config: Path, small_disk: Path, processes_of) -> None:
    """Real commands on a real device that is always full."""
    (small_disk / "ballast").write_bytes(bytes(470 * 1024))
    process = start("run", config, "--set", f"run.directory={small_disk}", "--set", "run.steps=100000")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "full" in err or "No space left" in err
    assert "elastic run --resume" in err
    (run_dir,) = (path.parent for path in small_disk.glob("*/config.json"))
    assert not processes_of(run_dir.name)
    assert not list((run_dir / "leases").glob("*.json"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--oidc-client-id", "x"], ("--oidc-issuer", "give it")),
        (["--oidc-issuer", "https://id.example.com"], ("--oidc-client-id",)),
        (
            ["--oidc-issuer", "http://id.example.com", "--oidc-client-id", "x"],
            ("--oidc-issuer", "allowed: an https URL"),
        ),
        (["--oidc-issuer", "id.example.com", "--oidc-client-id", "x"], ("--oidc-issuer", "'id.example.com'")),
        (["--oidc-client-secret-file", "nosuch"], ("--oidc-client-secret-file: nosuch", "No such file")),
        (["--oidc-member", "groups=rl:agents"], ("--oidc-member", "CLAIM=VALUE:PROJECT:ROLE")),
        (["--oidc-member", "groups=rl:agents:owner"], ("--oidc-member", "viewer, runner, admin")),
        (["--oidc-member", "=rl:agents:admin"], ("--oidc-member",)),
    ],
)
def test_identity_providers(refused, elastic, tmp_path: Path, options: list[str], words: tuple[str, ...]) -> None:
    if not {"--oidc-issuer", "--oidc-client-id"} & set(options):
        options = ["--oidc-issuer", "https://id.example.com", "--oidc-client-id", "x", *options]
    refused(elastic("serve", "--home", tmp_path / "home", "--port", "0", *options), *words)
    assert not (tmp_path / "home").exists()


def test_a_model_of_the_hub_is_no_directory_and_said_so(elastic, refused, config: Path) -> None:
    wanted = ("--set", "model.checkpoint='Qwen/Qwen3-0.6B'")
    for asked in (("run", config, *wanted), ("run", config, *wanted, "--dry-run")):
        refused(elastic(*asked), "found 'Qwen/Qwen3-0.6B', a name as on the Hugging Face Hub", "hf download")


def test_a_dry_run_refuses_a_policy_that_a_run_would_refuse(elastic, refused, config: Path, tmp_path: Path) -> None:
    nothing = ("--set", f"model.checkpoint='{tmp_path / 'nothing'}'")
    refused(elastic("run", config, "--dry-run", *nothing), "config.json cannot be read", "elastic prepare")


def test_a_provider_that_is_nearly_one_is_named(elastic, refused, config: Path) -> None:
    refused(elastic("run", config, "--providers", "spott"), "did you mean 'spot'?", "serving, serving-replay, spot,")
    kind = ("--set", "providers.own.kind='spot'", "--providers", "own", "--dry-run")
    refused(elastic("run", config, *kind), "unknown provider 'spot'", "did you mean 'spot-replay'?")


def test_the_version_is_told(elastic) -> None:
    code, out, err = elastic("--version")
    assert (code, err) == (0, "")
    assert out.startswith("elastic ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--fair-share-period-s", "inf"], ("--fair-share-period-s", "31536000")),
        (["--runs-listen", "nosuchhost.invalid"], ("--runs-listen: nosuchhost.invalid cannot be listened on",)),
        (["--runs-listen", "192.0.2.1"], ("--runs-listen: 192.0.2.1 cannot be listened on", "assign")),
        (["--models", "/nosuch"], ("--models: /nosuch: no such directory",)),
        (["--database", "postgresql://u:p@127.0.0.1:99999/x"], ("--database: found port 99999", "65535")),
        (["--home", "/dev/null"], ("--home: /dev/null cannot be a server's home",)),
        (["--home", "/proc/x"], ("--home: /proc/x cannot be a server's home",)),
    ],
)
def test_odd_settings_of_a_server(refused, elastic, tmp_path: Path, options: list[str], words: tuple[str, ...]) -> None:
    refused(elastic("serve", "--home", tmp_path / "home", "--port", "0", *options), *words)
