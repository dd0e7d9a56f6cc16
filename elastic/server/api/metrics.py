"""Metrics in Prometheus' text format. Labels have few values: projects, phases, providers, and runs while they live.

What is known of runs' engines stands a second time under vLLM's names, for boards and controllers that look for these:
a run's workers of one provider are one engine, and the run's name is the model's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from elastic.protocol.api import ENDED, RunFigures
from elastic.server.store import Store
from elastic.server.store.tables import projects, runs
from elastic.system.isolation import LoopFaults

_RUN_GAUGES: Mapping[str, tuple[str, str]] = {
    "elastic_run_step": ("step", "training step that the run is at"),
    "elastic_run_success_ratio": ("last_success_rate", "share of the last step's trajectories with a reward above 0"),
    "elastic_run_mean_reward": ("last_mean_reward", "mean reward of the last step's trajectories"),
    "elastic_run_tokens_per_second": ("tokens_per_s", "accepted tokens a second"),
    "elastic_run_cost_dollars": ("usd", "what the run has cost"),
    "elastic_run_queued_turns": ("queued_turns", "turns that wait for a worker"),
    "elastic_run_trajectories_running": ("trajectories_running", "trajectories that are under way"),
}
_PROVIDER_GAUGES: Mapping[str, tuple[str, str]] = {
    "elastic_provider_workers_ready": ("ready", "workers that take turns"),
    "elastic_provider_workers_booting": ("booting", "workers on their way"),
    "elastic_provider_cost_dollars": ("usd", "what its leases have cost"),
    "elastic_provider_dollars_per_hour": ("usd_per_hour", "price of what is held now"),
}
_VLLM: Mapping[str, tuple[str, str, str]] = {
    "vllm:num_requests_running": ("gauge", "running_turns", "turns in execution"),
    "vllm:generation_tokens_total": ("counter", "tokens", "accepted tokens"),
}


def exposition(store: Store, project: str | None) -> str:
    """The metrics of one project's runs, or of all."""
    where = [runs.c.project == project] if project is not None else []
    named = sa.select(runs.c.id, runs.c.name, runs.c.phase, runs.c.figures, projects.c.name.label("project")).join(
        projects, projects.c.id == runs.c.project
    )
    with store.reading() as connection:
        counted = sa.select(projects.c.name, runs.c.phase, sa.func.count()).join(
            projects, projects.c.id == runs.c.project
        )
        counts = Counter(
            {(name, phase): number for name, phase, number in connection.execute(
                counted.where(*where).group_by(projects.c.name, runs.c.phase)
            )}
        )  # fmt: skip
        ended = [phase.value for phase in ENDED]
        living = list(connection.execute(named.where(*where, runs.c.phase.not_in(ended))).mappings())
    lines = list(
        _family(
            "elastic_runs",
            "runs by phase",
            ((f'project="{_escaped(n)}",phase="{p}"', c) for (n, p), c in counts.items()),
        )
    )
    read = [(row, RunFigures.model_validate(row["figures"])) for row in living]
    for name, (field, words) in _RUN_GAUGES.items():
        values = ((_labels(row), getattr(figures, field)) for row, figures in read)
        lines += _family(name, words, values)
    for name, (field, words) in _PROVIDER_GAUGES.items():
        by_provider = (
            (f'{_labels(row)},provider="{_escaped(provider)}"', getattr(one, field))
            for row, figures in read
            for provider, one in figures.providers.items()
        )
        lines += _family(name, words, by_provider)
    for name, (kind, field, words) in _VLLM.items():
        by_engine = (
            (_engine(row, provider), getattr(one, field))
            for row, figures in read
            for provider, one in figures.providers.items()
        )
        lines += _family(name, words, by_engine, kind)
    waiting = ((_engine(row, "queue"), figures.queued_turns) for row, figures in read)
    lines += _family("vllm:num_requests_waiting", "turns that wait for a worker", waiting)
    return "".join(f"{line}\n" for line in lines)


def loop_faults(faults: LoopFaults) -> list[str]:
    """The unexpected exceptions of the server's loops, of which each went on."""
    words = "unexpected exceptions of a loop of the server, which went on"
    counted = ((f'loop="{_escaped(loop)}"', count) for loop, count in sorted(faults.counts().items()))
    return list(_family("elastic_loop_faults_total", words, counted, "counter"))


def _labels(row: sa.RowMapping) -> str:
    return f'project="{_escaped(row["project"])}",run="{row["id"]}",name="{_escaped(row["name"])}"'


def _engine(row: sa.RowMapping, engine: str) -> str:
    model, run = _escaped(row["name"]), row["id"]
    return f'model_name="{model}",engine="{_escaped(engine)}",run="{run}"'


def _family(name: str, words: str, values: Iterable[tuple[str, float | None]], kind: str = "gauge") -> Iterable[str]:
    told = [f"{name}{{{labels}}} {value:.15g}" for labels, value in values if value is not None]
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}", *told] if told else []


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
