"""The report's pictures of learning by step; none of what a run has not measured."""

from collections.abc import Callable, Sequence

from elastic.report import svg, units
from elastic.report.charts import HALF_WIDTH, LEFT, PERCENT
from elastic.report.diagnoses import PLACES, DiagnosisKind
from elastic.report.document import Chart
from elastic.report.learning import StepLearning

Line = tuple[str, Sequence[tuple[float, float]]]
"""A name and its points, by step."""

RIGHT = 104
"""What names and values at the ends of lines take."""


def charts_of(learning: Sequence[StepLearning]) -> list[Chart]:
    found = [
        Chart(
            title=PLACES[DiagnosisKind.ENTROPY_COLLAPSE],
            picture=_one("Entropy by training step", learning, "nats a token", [("", _of(learning, "entropy"))]),
            caption="Of the policy's tokens, as the trainer computes it.",
        ),
        Chart(
            title=PLACES[DiagnosisKind.MISMATCH_GROWTH],
            picture=_one(
                "Mismatch of engines and trainer by training step",
                learning,
                "nats a token",
                [("mean", _of(learning, "mismatch_mean")), ("KL", _of(learning, "mismatch_kl"))],
            ),
            caption="The mean difference of engines' and the trainer's log-probabilities with the same weights; "
            "dashed: the KL of all that was trained on.",
        ),
        Chart(
            title=PLACES[DiagnosisKind.LENGTH_AGAINST_REWARD],
            picture=_length(learning),
            caption="Means of the trajectories launched in a step. A score is a reward between the lowest (0 %) and "
            "the highest (100 %) that the run has seen in its environment.",
        ),
        Chart(
            title=PLACES[DiagnosisKind.GROUPS_WITHOUT_SIGNAL],
            picture=_signal(learning),
            caption="Groups whose members all got the same reward; the highest, or dashed: a lower one.",
        ),
    ]
    return [chart for chart in found if chart.picture is not None]


def _of(learning: Sequence[StepLearning], figure: str) -> list[tuple[float, float]]:
    values = ((step.step, getattr(step, figure)) for step in learning)
    return [(at, value) for at, value in values if value is not None]


def _share(learning: Sequence[StepLearning], share: Callable[[StepLearning], float]) -> list[tuple[float, float]]:
    return [(step.step, 100 * share(step)) for step in learning if step.groups]


def _length(learning: Sequence[StepLearning]) -> svg.Picture | None:
    lengths, scores = _of(learning, "tokens_a_turn"), _of(learning, "score")
    if not lengths:
        return None
    x = _steps(learning)
    return _plots(
        "Length and reward by training step",
        learning,
        [
            _plot(x, "tokens a turn", [("", lengths)], bottom=134, height=96),
            _plot(
                x,
                "score, %",
                [("", [(at, 100 * score) for at, score in scores])],
                bottom=274,
                height=96,
                levels=PERCENT,
            ),
        ],
    )


def _signal(learning: Sequence[StepLearning]) -> svg.Picture | None:
    solved = _share(learning, lambda step: step.solved / step.groups)
    unsolved = _share(learning, lambda step: step.unsolved / step.groups)
    lines = [("highest", solved), ("lower", unsolved)]
    return _one("Groups without signal by training step", learning, "groups, %", lines, levels=PERCENT)


def _one(
    label: str, learning: Sequence[StepLearning], quantity: str, lines: Sequence[Line], levels: svg.Ticks = ()
) -> svg.Picture | None:
    known = [line for line in lines if line[1]]
    if not known:
        return None
    return _plots(label, learning, [_plot(_steps(learning), quantity, lines, bottom=204, height=170, levels=levels)])


def _steps(learning: Sequence[StepLearning]) -> svg.Scale:
    return svg.Scale(learning[0].step, learning[-1].step, LEFT, HALF_WIDTH - RIGHT)


def _plots(label: str, learning: Sequence[StepLearning], plots: Sequence[svg.Plot]) -> svg.Plots:
    ticks = svg.whole_ticks(learning[0].step, learning[-1].step, 6)
    return svg.Plots(label=label, width=HALF_WIDTH, plots=plots, ticks=ticks, title="training step")


def _plot(
    x: svg.Scale, quantity: str, lines: Sequence[Line], *, bottom: float, height: float, levels: svg.Ticks = ()
) -> svg.Plot:
    """Lines with their names and last values at their ends, the second one dashed."""
    levels = levels or svg.ticks_to(max(value for _, points in lines for _, value in points), lambda v: f"{v:g}")
    y = svg.Scale(0.0, levels[-1][0], bottom, bottom - height)
    labels: list[svg.Label] = []
    for name, points in lines:
        if points:
            at, last = points[-1]
            value = units.share(last / 100) if levels is PERCENT else f"{last:.2g}"
            labels.append(svg.Label(x(at) + 8, y(last) + 4, f"{name} {value}".strip()))
    return svg.Plot(
        x=x,
        y=y,
        levels=levels,
        title=quantity,
        paths=[
            (f"M{svg.path(x, y, points)}", class_)
            for (_, points), class_ in zip(lines, ("line", "line faint"), strict=False)
            if points
        ],
        dots=[points[-1] for _, points in lines if points],
        labels=svg.apart(labels),
    )
