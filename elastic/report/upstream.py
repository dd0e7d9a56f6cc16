"""What agents' calls of models elsewhere have come to, by model and trajectory."""

import msgspec

from elastic.core import events as e
from elastic.core.ids import agent_id
from elastic.core.ledger import NANO_USD_PER_USD
from elastic.report.history import History
from elastic.runtime.agents import notes
from elastic.runtime.agents.upstream import UpstreamUse


class UpstreamUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one model in one trajectory; a driver's own calls are in none.

    Tokens are those that the upstream has told. `bounded` calls, of which nobody knows what they came to, are counted
    as the dearest that they could be. Those that are still `open` are not in `usd`, and may cost `held_usd` at the
    most.
    """

    model: str
    trajectory: str
    calls: int
    failed: int
    bounded: int
    open: int
    prompt_tokens: int
    answer_tokens: int
    duration_s: float
    usd: float
    held_usd: float


def upstream_of(history: History) -> list[UpstreamUsage]:
    uses: dict[tuple[str, str], UpstreamUse] = {}
    asked: dict[int, notes.UpstreamAsked] = {}
    for _, event in history.events_of(e.AgentNoted):
        note = notes.decode_note(event.note)
        if isinstance(note, notes.UpstreamAsked):
            asked[note.call] = note
        elif isinstance(note, notes.UpstreamTold) and (call := asked.pop(note.call, None)) is not None and note.status:
            uses.setdefault((call.model, call.trajectory), UpstreamUse()).add(note)
    held: dict[tuple[str, str], list[int]] = {}
    for call in asked.values():
        held.setdefault((call.model, call.trajectory), []).append(call.nano_usd)
    return [
        UpstreamUsage(
            model=model,
            trajectory=agent_id(trajectory) if trajectory else "",
            calls=use.calls,
            failed=use.failed,
            bounded=use.bounded,
            open=len(held.get((model, trajectory), ())),
            prompt_tokens=use.prompt_tokens,
            answer_tokens=use.answer_tokens,
            duration_s=use.duration_s,
            usd=use.nano_usd / NANO_USD_PER_USD,
            held_usd=sum(held.get((model, trajectory), ())) / NANO_USD_PER_USD,
        )
        for model, trajectory in sorted({*uses, *held})
        for use in [uses.get((model, trajectory), UpstreamUse())]
    ]
