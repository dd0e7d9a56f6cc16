"""Checks submissions completely before anything is kept. They may name installed components and their project's
files only."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import traces
from elastic.compose.plan import RunPlan, acquisitions, check_live, resolve, reward_calls, unpriced
from elastic.compose.scheduling import short_limits
from elastic.config import Config, ConfigError, ConfigProblem, RunConfig, validate
from elastic.protocol.api import UPLOAD_SCHEME, DryRun, ProblemError, Submission, SubmissionExample, WouldAcquire
from elastic.server.intake.path_keys import names_code, names_file
from elastic.server.intake.prices import LowPrice, settle_prices
from elastic.server.intake.upload_files import named
from elastic.server.problems import ApiProblem, configuration_errors, invalid_configuration
from elastic.server.quotas.needs import RunNeeds, needs_of
from elastic.server.settings import ServerSettings
from elastic.server.store.quotas import TRAINER, QuotaRow
from elastic.server.store.runs import NewRun
from elastic.system.named_code import in_file

_WHERE = "config"
_SERVERS_OWN = (
    *("run.directory", "run.host", "run.port", "run.advertise", "run.certificate", "run.certificate_key"),
    *("environment.container", "environment.network"),
    *("environment.python", "run.pass_env", "weights.port", "weights.relay", "front.host", "front.port"),
    *("front.upstream", "front.upstream_key_env", "job.files"),
)
"""Keys that the server sets itself: where a run listens, what it inherits, where it and its files are."""
_RUNNERS_OWN = ("budget_usd", "caps", "host", "advertise")
"""Keys of the section `run` that the runner sets as it starts a process."""
_REFUSED_KEYS = frozenset({"address", "arguments", "endpoint_url", "urls"})
"""Keys of providers and engines that are refused: hosts to dial, or arbitrary engine arguments."""
NO_MODELS = (
    "this server has no base policy: `elastic prepare examples/frozenlake.toml` makes one in .cache, where the server "
    "looks unless `elastic serve --models DIRECTORY` names others; or send one by `elastic uploads put DIRECTORY`"
)
NAMES_TOLD = 20
_PATH_LIKE = re.compile(r"[/\\\0]|^~|^\.\.?$")
_LISTENING = "elastic serve --runs-listen HOST, and --runs-advertise HOST"
_NO_PATHS_IN = ("simulation",)
"""Sections that live runs ignore."""
CHECKPOINTS = ("model.checkpoint", "trainer.reference")
"""Keys that name a policy, which may be one of the server's models."""


def check(settings: ServerSettings, submission: Submission, project: str) -> tuple[NewRun, RunPlan]:
    """The run that is asked for, and its plan. The submission's sections are used up: prices and paths are put there.

    Raises `ApiProblem` with all faults that can be told at once.
    """
    raw = submission.config
    low = list(settle_prices(raw, submission.providers, settings.prices))
    problems = [*_forbidden(raw), *map(_too_low, low), *_settle_paths(raw, settings, project)]
    names = [*submission.providers, *(["reserved"] if "reserved" in raw.get("providers", {}) else [])]
    plan: RunPlan | None = None
    try:
        config = validate(Config, settings.placed(raw), _WHERE)
        if not problems:
            plan = resolve(config, submission.providers, _WHERE)
            check_live(plan, _LISTENING)
    except ConfigError as error:
        problems += error.problems
    told = (one._replace(detail=settings.without_places(one.detail, project)) for one in problems)
    errors = configuration_errors(told)
    errors += [
        ProblemError(pointer=f"#/caps/{name}", detail=f"names no provider of this run; allowed: {', '.join(names)}")
        for name in {**_caps_in(raw), **submission.caps}
        if name not in names
    ]
    if errors or plan is None:
        raise invalid_configuration(errors)
    own = plan.config.run
    settled = own.model_copy(update={key: RunConfig.model_fields[key].default for key in _RUNNERS_OWN})
    run = NewRun(
        project=project,
        name=own.name,
        config=plan.config.model_copy(update={"run": settled}),
        providers=list(plan.providers),
        labels=submission.labels,
        budget_usd=own.budget_usd if submission.budget_usd is None else submission.budget_usd,
        caps={**own.caps, **submission.caps},
        max_restarts=submission.max_restarts,
        needs=needs_of(plan),
    )
    return run, plan


def dry_run(plan: RunPlan) -> DryRun:
    """Return what the run would hold at most, and what that costs."""
    acquired, calls = acquisitions(plan), reward_calls(plan)
    return DryRun(
        config=plan.resolved(),
        would_acquire=[WouldAcquire(**msgspec.to_builtins(row)) for row in acquired],
        would_call=None if calls is None else msgspec.to_builtins(calls),
        usd_per_hour_max=sum(row.usd_per_hour_max or 0.0 for row in acquired),
        warnings=[*short_limits(plan.config), *unpriced(acquired)],
    )


def _caps_in(raw: Mapping[str, Any]) -> dict[str, Any]:
    section = raw.get("run")
    caps = section.get("caps") if isinstance(section, dict) else None
    return caps if isinstance(caps, dict) else {}


def refuse_beyond(quota: QuotaRow, needs: RunNeeds) -> None:
    """Raises `ApiProblem` for a run that could never begin, or never have what it names, under this quota."""
    faults: list[ProblemError] = []
    if quota.runs_max == 0:
        faults.append(ProblemError(pointer="#/project", detail="the project may have no runs"))
    trainers = quota.gpus.get(TRAINER, needs.trainer_gpus)
    if needs.trainer_gpus > trainers:
        words = f"its trainer takes {needs.trainer_gpus} GPUs; the project may have {trainers} in trainers"
        faults.append(ProblemError(pointer="#/config/trainer/gpus", detail=words))
    for name, one in needs.providers.items():
        allowed = quota.gpus.get(one.kind, one.unit)
        if one.gpus > 0 and allowed < one.unit:
            words = f"a lease has {one.unit} GPUs of {one.kind}; the project may have {allowed}"
            faults.append(ProblemError(pointer=f"#/config/providers/{name}", detail=words))
        if quota.spending and one.gpus > 0 and not one.priced:
            words = f"{name}: its price is not known here, and the project has a budget; usd_per_gpu_hour_max bounds it"
            faults.append(ProblemError(pointer=f"#/config/providers/{name}/usd_per_gpu_hour_max", detail=words))
    if faults:
        raise ApiProblem("quota-exceeded", "; ".join(one.detail for one in faults), faults)


def _too_low(price: LowPrice) -> ConfigProblem:
    detail = f"found {price.own:g}; allowed: at least this server's price, {price.floor:g} (elastic serve --price)"
    return ConfigProblem(detail, price.place)


def _forbidden(raw: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    for key in _SERVERS_OWN:
        section, _, name = key.partition(".")
        if isinstance(raw.get(section), dict) and name in raw[section]:
            yield ConfigProblem("is the server's to choose; leave it out", (section, name))
    evaluation = raw.get("evaluation")
    splits = evaluation.get("splits") if isinstance(evaluation, dict) else None
    for place, several in ((("environments",), raw.get("environments")), (("evaluation", "splits"), splits)):
        for number, environment in enumerate(several if isinstance(several, list) else ()):
            for name in ("python", "container", "network"):
                if isinstance(environment, dict) and name in environment:
                    yield ConfigProblem("is the server's to choose; leave it out", (*place, str(number), name))
    for top in ("engine", "providers", "trainer"):
        for path, _ in _leaves(raw.get(top), (top,)):
            if _REFUSED_KEYS & set(path):
                yield ConfigProblem("cannot be set in a run on a server; leave it out", path)


def code_in(raw: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the keys of a submission that name code, which its run would carry out."""
    for path, value in _leaves(raw, ()):
        if in_file(value) is not None or (isinstance(value, str) and value and names_code(raw, path, value)):
            yield path


def _settle_paths(raw: dict[str, Any], settings: ServerSettings, project: str) -> Iterator[ConfigProblem]:
    """Put what lies in the project's storage, or for checkpoints in `models`, in the place of its name."""
    storage = settings.storage(project).resolve()
    for path, value in list(_leaves({k: v for k, v in raw.items() if k not in _NO_PATHS_IN}, ())):
        is_checkpoint = ".".join(path) in CHECKPOINTS
        code = in_file(value)
        if code is not None:
            is_file, value, name = True, code.place, f":{code.name}"
        else:
            is_file, name = names_file(raw, path) if isinstance(value, str) else False, ""
        if is_file is False:
            continue
        if value.startswith(UPLOAD_SCHEME):
            found = named(settings, project, value)
            if found is None:
                detail = f"no complete upload {value!r} in the project; allowed: upload:ID, upload:ID/FILE"
                yield ConfigProblem(detail, path)
            else:
                _put(raw, path, f"{found}{name}")
            continue
        if not (is_file or _could_be_a_path(value)):
            continue
        found = _inside(value, (storage,)) or (_model(value, settings.models) if is_checkpoint else None)
        if found is not None:
            _put(raw, path, f"{found}{name}")
        elif (is_file and value not in traces.shipped()) or _PATH_LIKE.search(value):
            what = "no base policy" if is_checkpoint else "no file"
            where = "the project's storage"
            if is_checkpoint:
                where += f" or the server's models ({', '.join(_names_of(settings.models)) or 'it has none'})"
            yield ConfigProblem(f"{what} {value!r} in {where}", path)


def example(settings: ServerSettings) -> SubmissionExample:
    """Return a submission that any project may make here."""
    names = _names_of(settings.models)
    if not names:
        return SubmissionExample(submission=None, says=NO_MODELS)
    name = min(names, key=lambda one: (one != "frozenlake-base", one))
    config = {
        "run": {"name": "frozenlake", "steps": 100},
        "model": {"checkpoint": name},
        "providers": {"spot": {"trace": "rlboost-a", "max_workers": 2}},
    }
    submission = {"config": config, "providers": ["spot"]}
    return SubmissionExample(submission=submission, says=f"base policies of this server: {', '.join(names)}")


def _names_of(models: Sequence[Path]) -> list[str]:
    """Return the names of base policies that every project may start from, of very many the first."""
    return sorted({config.parent.name for root in models for config in root.glob("*/config.json")})[:NAMES_TOLD]


def _inside(name: str, roots: Sequence[Path]) -> Path | None:
    """Return the file of this name in one of the roots, with links resolved; None if it lies elsewhere.

    Names are relative to the roots, and to nothing else of the server's.
    """
    if not name or "\0" in name:
        return None
    for root in roots:
        try:
            found = (root / name).resolve()
            if found.is_relative_to(root.resolve()) and found != root.resolve() and found.exists():
                return found
        except (OSError, ValueError):
            continue
    return None


def _model(name: str, models: Sequence[Path]) -> Path | None:
    """Return the checkpoint of this name in one of the server's models.

    `.cache/base` is `base` in `--models .cache`, too, so that a configuration can be submitted that also runs on disk.
    """
    found = _inside(name, models)
    top, _, rest = name.removeprefix("./").partition("/")
    return found or _inside(rest, [root for root in models if root.name == top])


def _could_be_a_path(value: str) -> bool:
    return _PATH_LIKE.search(value) is not None or bool(Path(value).suffix)


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*path, str(number)))
    else:
        yield path, value


def _put(raw: Any, path: Sequence[str], value: str) -> None:
    for part in path[:-1]:
        raw = raw[int(part)] if isinstance(raw, list) else raw[part]
    last = path[-1]
    raw[int(last) if isinstance(raw, list) else last] = value
