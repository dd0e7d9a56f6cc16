"""A small run of conversations: a checkpoint with a tokenizer, and a journal with what the policy said."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from elastic.config import JournalConfig
from elastic.core.ids import is_evaluated, parse_trajectory
from elastic.core.steps import CUT_OFF
from elastic.front.rendering.renderer import TemplateRenderer
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.front.tiny import EOS, write_tokenizer
from elastic.protocol.sampled import Sampled, SampledBranch, SampledRun, pack_ids, pack_logprobs
from elastic.runtime.journal import EvaluatedRow, JournalRecord, RunDirectory, TrajectoryRow

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
MARKUP = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'"
CONTROLS = "\x1b[2J\x00\x07\u202eevil\u2066\x9b31m\r\nnext line"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


class ChatRun:
    """Writes the run's journal. `policy` is the directory of its checkpoint."""

    def __init__(self, run_dir: Path, policy: Path) -> None:
        write_tokenizer(policy)
        self.directory = RunDirectory(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.config: dict[str, Any] = {
            "model": {"checkpoint": str(policy)},
            "environment": {"name": "chat"},
            "front": {"tool_parser": "hermes", "reasoning_parser": "qwen3"},
        }
        notes = {"run": run_dir.name, "config": json.dumps(self.config), "status": "finished"}
        self._journal = self.directory.begin_journal(JournalConfig.model_validate({}), notes=notes)
        self._tokenizer = Tokenizer(policy)
        self._renderer = TemplateRenderer(self._tokenizer, "hermes", "qwen3")

    def close(self) -> RunDirectory:
        self._journal.durable().result(10)
        self._journal.close()
        return self.directory

    def append(self, row: JournalRecord) -> None:
        self._journal.append(row)

    def answer(self, text: str) -> list[int]:
        """Tokens of what the policy says; control tokens in the text are such."""
        return self._tokenizer.encode_coded(self._tokenizer.coded(text + EOS))

    def spoken(self, question: str, *turns: tuple[str, Sequence[str]]) -> tuple[list[int], Sampled]:
        """A context: a question, and the policy's answers, each with what tools say to it."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        ids, sampled = self._renderer.prompt(messages, TOOLS, {}), Sampled()
        for number, (text, results) in enumerate(turns):
            own = self.answer(text)
            logprobs = [-0.01 - 0.9 * (place % 7) for place in range(len(own))]
            half = len(own) // 2
            runs = [SampledRun(number, "spot-1", half), SampledRun(number + 1, "spot-2", len(own) - half)]
            sampled.take(len(ids), pack_logprobs(logprobs), runs)
            ids += own
            messages.append({"role": "assistant", "content": text})
            told = [{"role": "tool", "content": result} for result in results]
            if told:
                ids += self._renderer.more([*messages, *told], len(messages), TOOLS, {}, ids, len(own)) or []
                messages += told
        return ids, sampled

    def trajectory(
        self,
        name: str,
        context: tuple[list[int], Sampled],
        reward: float | None = 1.0,
        *,
        branches: Sequence[tuple[list[int], Sampled]] = (),
        metrics: dict[str, float] | None = None,
        cause: str = "",
        truncated: bool = False,
        task: bytes = b"",
    ) -> None:
        ids, sampled = context
        sampled.reward = reward or 0.0
        further = [SampledBranch(number, bytearray(pack_ids(one)), of) for number, (one, of) in enumerate(branches, 1)]
        self.append(
            (EvaluatedRow if is_evaluated(name) else TrajectoryRow)(
                trajectory=name,
                step=parse_trajectory(name).step,
                group=name.rpartition("/")[0],
                started_ns=0,
                ended_ns=10**9,
                reward=reward,
                cause=cause,
                turns=len(sampled.spans) + sum(len(of.spans) for _, of in branches),
                policy_tokens=sampled.tokens + sum(of.tokens for _, of in branches),
                token_ids=pack_ids(ids),
                truncated=truncated,
                sampled=msgspec.msgpack.encode(sampled),
                branches=msgspec.msgpack.encode(further) if further else b"",
                task=task,
                environment="chat",
                metrics=msgspec.msgpack.encode(metrics) if metrics else b"",
            )
        )

    def small(self) -> None:
        """Three steps, a trajectory of every kind in the last one."""
        self.trajectory("1/0/4", self.spoken("1 + 1?"), None, cause=CUT_OFF)
        for step in range(3):
            for member in range(4):
                text = f"<think>\nTwo.\n</think>\n\nIt is {member}."
                self.trajectory(f"{step}/0/{member}", self.spoken("1 + 1?", (text, ())), member / 4)
        called = self.spoken("What is 1 + 1?", (f"Let me add.\n{CALL}", ["2"]), ("It is 2.", ()))
        other = self.spoken("What is 1 + 1?", (f"Let me add.\n{CALL}", ["3"]), ("It is 3.", ()))
        other[1].policy, other[1].policy_reward = "critic", 0.25
        self.trajectory(
            "2/1/0",
            called,
            1.1,
            branches=[other],
            metrics={"rewards/right": 1.0, "rewards/short": 0.1, "calls": 1.0},
            task=b'{"row": 7}',
        )
        self.trajectory("2/1/1", self.spoken(MARKUP, (MARKUP, ())), -1.0)
        self.trajectory("2/1/2", self.spoken(CONTROLS, (CONTROLS, ())), 0.0, truncated=True)
        self.trajectory("2/1/3", self.spoken("1 + 1?", ("It", ())), None, cause=f"raised {MARKUP}")
