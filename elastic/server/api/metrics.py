"""Metrics in Prometheus' text format. Labels have few values: projects, phases, providers, and runs while they live.

What is known of runs' engines stands a second time under vLLM's names, for boards and controllers that look for these:
a run's workers of one provider are one engine, and the run's name is the model's.
"""

from collections import Counter
from collections.abc import Mapping

import sqlalchemy as sa

from elastic.protocol.api import ENDED, RunFigures
from elastic.protocol.metrics import (
    COUNTER,
    GENERATION_TOKENS,
    PROVIDER,
    RUN,
    RUNNING,
    WAITING,
    Family,
    escaped,
    family,
    labelled,
)
from elastic.server.store import Store
from elastic.server.store.tables import projects, runs
from elastic.system.isolation import LoopFaults

_RUNS = Family("elastic_runs", "runs by phase")
_FAULTS = Family("elastic_loop_faults_total", "unexpected exceptions of a loop of the server, which went on", COUNTER)
_VLLM: Mapping[str, Family] = {"running_turns": RUNNING, "tokens": GENERATION_TOKENS}
"""By the figure of a provider."""


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
    lines = list(family(_RUNS, ((labelled(project=n, phase=p), count) for (n, p), count in counts.items())))
    read = [(row, RunFigures.model_validate(row["figures"])) for row in living]
    for field, told in RUN.items():
        lines += family(told, ((_labels(row), getattr(figures, field)) for row, figures in read))
    for field, told in PROVIDER.items():
        by_provider = (
            (f'{_labels(row)},provider="{escaped(provider)}"', getattr(one, field))
            for row, figures in read
            for provider, one in figures.providers.items()
        )
        lines += family(told, by_provider)
    for field, told in _VLLM.items():
        by_engine = (
            (_engine(row, provider), getattr(one, field))
            for row, figures in read
            for provider, one in figures.providers.items()
        )
        lines += family(told, by_engine)
    lines += family(WAITING, ((_engine(row, "queue"), figures.queued_turns) for row, figures in read))
    return "".join(f"{line}\n" for line in lines)


def loop_faults(faults: LoopFaults) -> list[str]:
    """The unexpected exceptions of the server's loops, of which each went on."""
    return list(family(_FAULTS, ((labelled(loop=loop), count) for loop, count in sorted(faults.counts().items()))))


def _labels(row: sa.RowMapping) -> str:
    return labelled(project=row["project"], run=row["id"], name=row["name"])


def _engine(row: sa.RowMapping, engine: str) -> str:
    return labelled(model_name=row["name"], engine=engine, run=row["id"])
