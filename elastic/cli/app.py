"""Every command of `elastic`, with its options and one example each."""

import functools
import importlib.metadata
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic.cli import access, deferred, hosted, modal, pooled, quotas
from elastic.cli.output import EXIT_FAILED, bad_input, prepare_streams, say, whole_output
from elastic.cli.whole_help import WholeHelp
from elastic.config import Config, ConfigError, RunConfig, apply_override, given_path, load_config, validate
from elastic.protocol.endpoint import Address
from elastic.protocol.proxies import HttpSettingsError
from elastic.runtime.journal import JournalError
from elastic.system.logs import STANDARD_ERROR, log_to

app = typer.Typer(
    name="elastic",
    cls=WholeHelp,
    help="Train agentic RL policies on GPUs that come and go.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_GIVEN = ("COMMANDLINE", "ENVIRONMENT")
"""The sources of an option's value that mean that the user gave it."""
OURS = ("elastic.", "functions.", "policies.", "providers.", "traces.")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as run.steps=10.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Remote = Annotated[bool, typer.Option("--remote", help="On the server of `elastic api login`.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's name or path, or `latest`.")]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        "--budget-usd",
        metavar="USD",
        help="What the run may cost in all, its trainer and functions included: it stops in time (run.budget_usd).",
    ),
]
RunsDirectory = Annotated[Path, typer.Option("--directory", help="Where runs are kept.")]


app.add_typer(hosted.runs)
app.add_typer(hosted.api)
app.add_typer(hosted.projects)
app.add_typer(hosted.uploads)
app.add_typer(quotas.providers)
app.add_typer(access.keys)
app.add_typer(access.secrets)
app.add_typer(access.webhooks)
configuration = typer.Typer(
    cls=WholeHelp,
    name="config",
    help="Say what the keys of a configuration mean.\n\nExample: elastic config explain trainer.learning_rate",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@configuration.command("explain")
def explain(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A key, such as rollout.groups, or a section: trainer, providers.ec2.")
    ],
    as_json: AsJson = False,
) -> None:
    """Explain a key, or all of a section: what it means, its unit, default and bounds.

    Example: elastic config explain trainer.learning_rate
    """
    deferred.configuration.explain_command(key, as_json=as_json)


app.add_typer(configuration)
app.add_typer(modal.modal)
app.add_typer(pooled.pool)
app.add_typer(pooled.jobs)
app.command()(access.audit)
app.command()(hosted.logs)
app.command()(hosted.stop)
app.command()(hosted.serve)
app.command()(hosted.runner)
app.command()(hosted.support_bundle)
app.command("pool-run", hidden=True)(pooled.pool_run)
app.command("pool-host", hidden=True)(pooled.pool_host)


def main() -> None:
    """Entry point: bad input ends with one message and exit code 2, never with a traceback."""
    prepare_streams()
    log_to(STANDARD_ERROR)
    try:
        with whole_output():
            app(prog_name="elastic")
    except (ConfigError, JournalError, HttpSettingsError) as error:
        bad_input(str(error))
    except BrokenPipeError:
        sys.exit(EXIT_FAILED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        say(f"error: {where}{error.strerror or str(error) or _origin(error)}")
        sys.exit(EXIT_FAILED)


def _origin(error: OSError) -> str:
    """Describe an error without a message, such as a timeout: its type, and the function that was waiting."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    ours = [frame.f_code.co_qualname for frame in frames if frame.f_globals.get("__name__", "").startswith(OURS)]
    return " in ".join([type(error).__name__, *ours[-1:]])


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"elastic {importlib.metadata.version('elastic-rl')}")
        raise typer.Exit


@app.callback()
def elastic(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train agentic RL policies on GPUs that come and go."""


@app.command()
def run(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="The run's TOML file.", show_default=False)
    ] = None,
    providers: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Comma-separated: serving,spot. Without any, the trainer's own device does all."
        ),
    ] = None,
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Same as --set run.seed=N.")] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where workers join, such as 0.0.0.0:7433; beyond loopback by TLS, and weights by HTTPS, one port up.",
        ),
    ] = "",
    advertise: Annotated[
        str, typer.Option(metavar="HOST[:PORT]", help="Where workers elsewhere dial to get there.")
    ] = "",
    resume: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Go on with a run (its name, its path or `latest`) from its journal, or if it had ended from its last "
            "checkpoint, with its configuration and providers; CONFIG then only says where runs are kept.",
        ),
    ] = "",
    supervised: Annotated[
        bool, typer.Option("--supervise", help="Start the orchestrator again when it dies, and go on with the run.")
    ] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often, with --supervise.")] = 10,
    budget_usd: BudgetOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the resolved configuration and what would be acquired; start nothing."),
    ] = False,
    remote: Annotated[
        bool, typer.Option("--remote", help="Run on the server of `elastic api login`, and follow it; Ctrl-C detaches.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="With --remote: submit, and do not follow.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a policy, with rollouts on borrowed and preemptible capacity.

    Example: elastic run examples/frozenlake.toml --providers serving,spot
    """
    if remote:
        raise typer.Exit(
            _submit(
                context, config, providers, [*(overrides or []), *_budget(budget_usd)], seed, dry_run, detach, as_json
            )
        )
    if detach:
        raise ConfigError("elastic run: --detach is for --remote")
    overrides = [*(overrides or []), *_listening(listen, advertise), *_budget(budget_usd)]
    settings, run_dir, names = _run_settings(config, providers, overrides, seed, resume)
    if dry_run:
        deferred.run.dry_run_command(settings, names, str(config or run_dir), as_json=as_json)
    elif supervised:
        changed = [*overrides, *([f"run.seed={seed}"] if seed is not None else [])]
        options = [*(word for change in changed for word in ("--set", change)), *(["--json"] if as_json else [])]
        raise typer.Exit(
            deferred.supervise.supervise_command(
                settings, names, str(config or run_dir), run_dir, options, max_restarts
            )
        )
    else:
        raise typer.Exit(deferred.run.run_command(settings, names, str(config or run_dir), run_dir, as_json=as_json))


def _submit(
    context: typer.Context,
    config: Path | None,
    providers: str | None,
    overrides: list[str],
    seed: int | None,
    dry_run: bool,
    detach: bool,
    as_json: bool,
) -> int:
    """`elastic run --remote`; returns the exit code."""
    _refuse_all_but(
        context,
        "--remote",
        "CONFIG",
        "--providers",
        "--set",
        "--seed",
        "--budget-usd",
        "--dry-run",
        "--detach",
        "--json",
    )
    if config is None:
        raise ConfigError(
            "elastic run --remote: give a configuration file; `elastic runs resume RUN` goes on with a run"
        )
    changed = [*overrides, *([f"run.seed={seed}"] if seed is not None else [])]
    return deferred.remote.submit_command(
        config, _names(providers), changed, dry_run=dry_run, detach=detach, as_json=as_json
    )


def _names(providers: str | None) -> list[str]:
    return [name.strip() for name in (providers or "").split(",") if name.strip()]


def _budget(usd: float | None) -> list[str]:
    """Return the settings of --budget-usd."""
    return [] if usd is None else [f"run.budget_usd={usd}"]


def _listening(listen: str, advertise: str) -> list[str]:
    """Return the settings of --listen and --advertise."""
    found = [f"run.advertise='{advertise}'"] if advertise else []
    if listen:
        try:
            host, port = Address.parse(listen)
        except ValueError as error:
            raise ConfigError(f"--listen: {error}, such as 0.0.0.0:7433 or [::]:7433") from None
        found += [f"run.host='{host}'", f"run.port={port}"]
    return found


def _run_settings(
    config: Path | None, providers: str | None, overrides: list[str], seed: int | None, resume: str
) -> tuple[Config, Path | None, list[str]]:
    """The configuration, the directory of the run to resume (if any), and the providers' names."""
    from elastic.compose.incarnations import past_incarnations
    from elastic.compose.runs import load_run_config
    from elastic.runtime.journal import DirectoryStore

    if seed is not None:
        overrides = [*overrides, f"run.seed={seed}"]
    names = _names(providers)
    if resume:
        run = DirectoryStore(_kept_in(config, overrides)).find(resume)
        if providers is None:
            names = list(past_incarnations(run).providers)
        return load_run_config(run.path, overrides), run.path, names
    if config is None:
        raise ConfigError("elastic run: give a configuration file, or --resume RUN")
    return load_config(config, overrides), None, names


def _kept_in(config: Path | None, overrides: list[str]) -> Path:
    """Return the directory of runs: the last one on the command line, else the configuration's."""
    said = [override for override in overrides if override.partition("=")[0].strip() == "run.directory"]
    if config:
        return load_config(config, said).run.directory
    raw: dict[str, dict[str, object]] = {"run": {}}
    for override in said:
        apply_override(raw, override)
    return validate(RunConfig, raw["run"], "--set", "run").directory


@app.command()
def simulate(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="The run's TOML file.", show_default=False)
    ] = None,
    providers: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Comma-separated: serving,spot. Without any, those of [simulation]."),
    ] = None,
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Same as --set run.seed=N; with --faults the first seed.")] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[PROVIDER=]NAME",
            help="Devices: H100/Qwen3-8B, H20/Qwen3-32B:tp2, …, `local`, or a file; for one provider, or `trainer`, "
            "with its name before: spot=H20/Qwen3-8B.",
        ),
    ] = None,
    turns_from: Annotated[
        str, typer.Option(metavar="RUN", help="Take turn lengths from a live run, or from `claude-code-sessions`.")
    ] = "",
    environment_times: Annotated[
        bool, typer.Option("--environment-times", help="With --turns-from RUN: environments take as long as there.")
    ] = False,
    budget_usd: BudgetOption = None,
    frame_s: Annotated[float | None, typer.Option(help="Longest that tokens wait to be sent.", hidden=True)] = None,
    hours: Annotated[float, typer.Option(help="Virtual time after which a run that has no end is given up.")] = 2160.0,
    faults: Annotated[
        bool, typer.Option(help="Instead of CONFIG: small worlds full of faults drawn from seeds.")
    ] = False,
    worlds: Annotated[int, typer.Option(min=1, help="With --faults: how many seeds, from --seed on.")] = 1,
    world: Annotated[
        str, typer.Option(metavar="NAME", help="With --faults: core, run, pool, pool-shell (docs/simulation.md).")
    ] = "core",
    only: Annotated[
        str, typer.Option(metavar="KINDS", help="With --world run or pool: draw only faults of these kinds.")
    ] = "",
    keep: Annotated[
        str, typer.Option(metavar="NUMBERS", help="With --world run or pool: of the faults drawn only these, or none.")
    ] = "",
    shrink_within: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="With --world run: so long leave out faults that a failure needs not."),
    ] = 0.0,
    log: Annotated[bool, typer.Option("--log", help="With --world run or pool: print what processes log.")] = False,
    jobs: Annotated[
        Path | None,
        typer.Option(
            metavar="WORKLOAD",
            help="Instead of CONFIG: many jobs on one pool, as a TOML file says.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="With --jobs: ours, weave, solo, gavel, random, most_idle, naive.")
    ] = "ours",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="With --jobs: the page to write, an HTML file.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a run would cost and how fast it would be: the same scheduler on virtual time, with modelled devices.

    Example: elastic simulate examples/frozenlake.toml --providers serving,spot
    Example: elastic simulate --jobs examples/jobs.toml --policy ours
    """
    if jobs is not None:
        _refuse_all_but(context, "--jobs", "--policy", "--output", "--json")
        raise typer.Exit(deferred.job_simulation.simulate_jobs_command(jobs, policy, output, as_json=as_json))
    for option in ("policy", "output"):
        source = context.get_parameter_source(option)
        if source is not None and source.name in _GIVEN:
            raise ConfigError(f"elastic simulate: --{option} is for --jobs")
    if faults:
        of_faults = ("--seed", "--worlds", "--world", "--only", "--keep", "--shrink-within", "--log")
        _refuse_all_but(context, "--faults", *of_faults, "--json")
        from elastic.testing.faults.worlds import WorldOptions

        options = WorldOptions(only=only, keep=keep, shrink_s=shrink_within, tell=say if log else None)
        raise typer.Exit(deferred.faults.faults_command(world, seed or 0, worlds, options, as_json=as_json))

    from elastic.simulation.run import Experiment

    if config is None:
        raise ConfigError("elastic simulate: give a configuration file, or --faults")
    for option in ("worlds", "world", "only", "keep", "shrink_within", "log"):
        source = context.get_parameter_source(option)
        if source is not None and source.name in _GIVEN:
            raise ConfigError(f"elastic simulate: --{option.replace('_', '-')} is for --faults")
    settings, _, names = _run_settings(config, providers, [*(overrides or []), *_budget(budget_usd)], seed, "")
    if providers is None:
        names = list(settings.simulation.providers)
    default, by_provider = deferred.simulate.split_profiles(profile or [])
    experiment = Experiment(
        profile=default,
        profiles=by_provider,
        turns=turns_from,
        environment_times=environment_times,
        frame_s=frame_s,
        horizon_s=hours * 3600,
    )
    raise typer.Exit(deferred.simulate.simulate_command(settings, names, str(config), experiment, as_json=as_json))


def _refuse_all_but(context: typer.Context, mode: str, *allowed: str) -> None:
    """Refuse options that have no meaning with the option `mode`, so that none is ignored."""
    refused: list[str] = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        is_option = parameter.param_type_name == "option"
        name = parameter.opts[0] if is_option else (parameter.name or "").upper()
        if source is not None and source.name in _GIVEN and name not in (mode, *allowed):
            refused.append(name)
    if refused:
        named, do = ", ".join(refused), "does" if len(refused) == 1 else "do"
        raise ConfigError(f"elastic {context.info_name} {mode}: {named} {do} not apply; allowed: {', '.join(allowed)}")


@app.command()
def profile(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The profile to write, a TOML file for `elastic simulate --profile`."),
    ],
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A live run's name or path, or `latest`: the latest live one."),
    ] = "",
    engine: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="Drive the engine of this TOML file and measure how fast it is."),
    ] = None,
    overrides: Overrides = None,
    base: Annotated[
        str, typer.Option(metavar="NAME", help="A profile whose numbers stand in, as estimates, for what was not seen.")
    ] = "local",
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Measure a machine, as a profile to simulate runs with: its engine, everything around it in a live run, or both.

    With RUN alone the engine's speeds are those of the run's `engine.pacing`, or fitted to what its workers reported.

    Example: elastic profile latest --engine examples/frozenlake.toml -o machine.toml
    """
    from elastic.compose.plan import resolve

    if not name and engine is None:
        raise ConfigError("elastic profile: give a RUN, --engine CONFIG, or both")
    if overrides and engine is None:
        raise ConfigError("elastic profile: --set overrides keys of --engine CONFIG, which is not given")
    settings = load_config(engine, overrides or []) if engine else None
    if settings is not None:
        resolve(settings, [], str(engine))
    deferred.profile.profile_command(name, directory, settings, output, base, as_json=as_json)


@app.command()
def prepare(
    config: ConfigPath,
    overrides: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Make it anew, although it is there.")] = False,
) -> None:
    """Make an example's base policy by a short supervised warm-up, once.

    Example: elastic prepare examples/frozenlake.toml
    """
    deferred.run.prepare_command(load_config(config, overrides or []), str(config), force=force)


@app.command()
def report(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's name or path, or `latest`; or a pool's, or a pool's job's.")
    ] = "latest",
    output: Annotated[Path | None, typer.Option(help="Write the HTML here instead of into the run.")] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="A run to hold it against, as a rule of the same seed without providers."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--md", help="Print Markdown instead.")] = False,
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
    pools: Annotated[Path, typer.Option(help="Where pools are kept.")] = Path("pools"),
) -> None:
    """Write a run's report: what it cost, what it gained, where every GPU-second went.

    Of a pool: every node's turns, cycles, bubbles, slowdowns, switches and bills; of a job on it, its part of these.

    Example: elastic report latest --compare frozenlake-20260101-120000
    Example: elastic report lab
    """
    if remote or deferred.remote.is_hosted(name):
        _refuse_all_but(context, "--remote", "RUN", "--output", "--md", "--json", "NAME")
        deferred.remote.report_command(name, output, markdown=markdown, as_json=as_json)
        return
    shared = deferred.pool_report.pooled(name, pools)
    if shared is not None:
        _refuse_all_but(context, "of a pool or of its job", "--output", "--json", "--pools", "--directory", "NAME")
        raise typer.Exit(deferred.pool_report.pool_report_command(shared, output, as_json=as_json))
    deferred.report.report_command(name, directory, output, compare, markdown=markdown, as_json=as_json)


@app.command()
def cap(
    name: RunName,
    provider: Annotated[
        str, typer.Argument(metavar="PROVIDER=GPUS", help="Such as spot=8, or spot=none to lift the cap.")
    ],
    command_id: hosted.CommandIdOption = "",
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Limit how many GPUs of a provider a run holds from now on: what exceeds that drains, and no token is lost.

    Example: elastic cap latest spot=8
    """
    if remote or deferred.remote.is_hosted(name):
        deferred.remote.cap_hosted_command(name, provider, as_json=as_json)
        return
    raise typer.Exit(
        deferred.control.cap_command(
            deferred.account.run_on_disk(directory, name), provider, command_id, as_json=as_json
        )
    )


@app.command()
def budget(
    name: RunName,
    usd: Annotated[
        str, typer.Argument(metavar="USD", help="In dollars, all that the run has cost included; `none` for no limit.")
    ],
    command_id: hosted.CommandIdOption = "",
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Set what a run may cost in all: it stops in time, and can be resumed with more.

    Example: elastic budget latest 25
    """
    if remote or deferred.remote.is_hosted(name):
        deferred.remote.budget_hosted_command(name, usd, as_json=as_json)
        return
    raise typer.Exit(
        deferred.control.budget_command(deferred.account.run_on_disk(directory, name), usd, command_id, as_json=as_json)
    )


@app.command()
def worker(
    join: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to dial, if elsewhere than the ticket says.")
    ] = "",
    ticket_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A ticket of `elastic ticket`; else ELASTIC_TICKET holds one.")
    ] = None,
    trainer: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="Be the run's trainer.", hidden=True)] = None,
    pace: Annotated[
        bool, typer.Option("--pace", help="Of a ticket: log, too, how an engine holds the speed that it models.")
    ] = False,
    resume: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve rollout turns to a run: dial its orchestrator and generate until the lease ends.

    Three ways to start one. By hand, on any machine that can dial the run, with a ticket of `elastic ticket`:

      elastic worker --ticket-file FILE

    In a container, with the image of infra/worker.Dockerfile:

      docker run --gpus all -e ELASTIC_TICKET="$(cat FILE)" elastic-worker

    By a provider of the run, which hands over a lease's one-time token in the environment.

    Example: elastic worker --join trainer.example:7433 --ticket-file FILE
    """
    deferred.worker.worker_command(join, ticket_file, trainer, resume=resume, pace=pace)


@app.command()
def ticket(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or path, or `latest`.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the ticket here; else it is printed.")
    ] = None,
    label: Annotated[str, typer.Option(help="Whose machine it is for.")] = "",
    usd_per_gpu_hour: Annotated[
        float | None, typer.Option(min=0, help="What it is paid; else as the provider says whose kind is `joined`.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, max=10_080, help="Until when it must be used.")] = 60.0,
    revoke: Annotated[str, typer.Option(metavar="TICKET", help="Instead: have this one let nobody in any more.")] = "",
    listed: Annotated[bool, typer.Option("--list", help="Instead: list the run's tickets.")] = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> None:
    """Mint a ticket with which one worker joins a run that goes on, from any machine. It is shown once.

    Example: elastic ticket latest -o machine.ticket --label "the lab's 4090"
    """
    from elastic.runtime.journal import DirectoryStore

    run = DirectoryStore(directory).find(name)
    if listed:
        deferred.ticket.list_tickets(run, as_json=as_json)
    elif revoke:
        deferred.ticket.revoke_ticket(run, revoke, as_json=as_json)
    else:
        deferred.ticket.mint_ticket(run, output, label, usd_per_gpu_hour, minutes * 60, as_json=as_json)


@app.command("serving-host", hidden=True)
def serving_host() -> None:
    """Be a serving host with a replayed load, and lend its idle time to runs.

    Example: ELASTIC_SERVING_HOST='{…}' elastic serving-host
    """
    raise typer.Exit(deferred.worker.serving_host_command())


@app.command("pool-resident", hidden=True)
def pool_resident(
    _: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of the job's run, by which people find it.")] = Path(),
) -> None:
    """Be a job's resident on a node of a pool; its keeper says when it has the device, and as which worker.

    Example: ELASTIC_KEEPER_FD=3 elastic pool-resident runs/one
    """
    deferred.worker.pool_resident_command()


@app.command()
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A run's TOML file, whose limits to look at too.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check what this machine has, and with CONFIG what the clouds of its providers say: credentials, quotas, reach.

    Example: elastic doctor examples/frozenlake.toml
    """
    settings = load_config(config) if config is not None else None
    raise typer.Exit(deferred.doctor.doctor_command(settings, as_json=as_json))


def _expand_paths(commands: typer.Typer) -> None:
    """Have every command get its paths with `~` expanded: shells leave it where it follows a `=`."""
    for command in (*commands.registered_commands, commands.registered_callback):
        if command is not None and command.callback is not None:
            command.callback = _with_paths_expanded(command.callback)
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _expand_paths(group.typer_instance)


def _with_paths_expanded(callback: Callable[..., Any]) -> Callable[..., Any]:
    def settled(value: Any) -> Any:
        if isinstance(value, list):
            return [settled(one) for one in value]
        return given_path(str(value)) if isinstance(value, Path) else value

    @functools.wraps(callback)
    def called(*arguments: Any, **named: Any) -> Any:
        return callback(*map(settled, arguments), **{name: settled(value) for name, value in named.items()})

    return called


_expand_paths(app)
