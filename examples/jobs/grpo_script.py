"""GRPO in plain torch: a policy learns to cross small frozen lakes. A script of its own, with its own checkpoints.

    python examples/jobs/grpo_script.py --directory runs/grpo
    elastic jobs submit examples/jobs/script.toml -- .venv/bin/python examples/jobs/grpo_script.py --directory runs/grpo

Alone it runs as ever; in a pool its phases take turns with other jobs'. The same seed gives the same policy, alone, in
a pool, and where it goes on from its checkpoint.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import elastic
from elastic.environments.frozenlake import ACTIONS, VOCABULARY, FrozenLakeSettings, Lake, encode

LAKES = FrozenLakeSettings(sizes=(3,), hole_probability=0.2)


class Policy(nn.Module):
    """Reads an episode's text; says after each token how good the four moves are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), width)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, len(ACTIONS))

    def forward(self, tokens: Tensor) -> Tensor:
        read, _ = self.reader(self.embedding(tokens))
        return self.head(read).log_softmax(-1)


class Episodes:
    """Groups of episodes that begin alike. `texts` grow turn by turn; a move stands at each of `moves`."""

    def __init__(self, step: int, arguments: argparse.Namespace) -> None:
        starts = [(step * arguments.groups + group) % arguments.maps for group in range(arguments.groups)]
        seeds = [start for start in starts for _ in range(arguments.group_size)]
        self.lakes = [Lake(LAKES, seed) for seed in seeds]
        self.texts = [encode(lake.prompt) for lake in self.lakes]
        self.moves: list[list[int]] = [[] for _ in seeds]
        self.rewards = torch.zeros(len(seeds))
        self.going = list(range(len(seeds)))

    def padded(self, which: list[int]) -> Tensor:
        texts = [torch.tensor(self.texts[index]) for index in which]
        return nn.utils.rnn.pad_sequence(texts, batch_first=True)

    def move(self, index: int, action: int) -> None:
        observation, done, reward = self.lakes[index].move(ACTIONS[action])
        self.moves[index].append(len(self.texts[index]))
        self.texts[index] += encode(ACTIONS[action] + observation)
        self.rewards[index] = reward
        if done:
            self.going.remove(index)


class Grpo:
    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(arguments.seed)
        self.arguments = arguments
        self.policy = Policy(arguments.width)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=arguments.learning_rate)
        self.step = 0
        self.checkpoint = arguments.directory / "checkpoint.pt"
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint)
            self.policy.load_state_dict(saved["policy"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step = saved["step"]

    def train(self) -> None:
        rollout = elastic.phase("rollout", state=[self.policy], name="rollout")
        update = elastic.phase("train", state=[self.policy, self.optimizer], name="update")
        while self.step < self.arguments.steps:
            with rollout:
                began_s = time.monotonic()
                episodes = self.roll_out()
                pause(began_s, self.arguments.rollout_s)
            with update:
                began_s = time.monotonic()
                loss = self.update(episodes)
                self.step += 1
                self.save()
                digest = self.digest()
                pause(began_s, self.arguments.train_s)
            elastic.steps_done(self.step)
            reward = float(episodes.rewards.mean())
            print(json.dumps({"step": self.step, "reward": reward, "loss": loss, "policy": digest}), flush=True)

    @torch.no_grad()
    def roll_out(self) -> Episodes:
        noise = torch.Generator().manual_seed(self.arguments.seed * 1_000_003 + self.step)
        episodes = Episodes(self.step, self.arguments)
        for _ in range(self.arguments.turns):
            which = list(episodes.going)
            if not which:
                break
            scores = self.policy(episodes.padded(which))
            for row, index in enumerate(which):
                chances = scores[row, len(episodes.texts[index]) - 1].exp()
                episodes.move(index, int(torch.multinomial(chances, 1, generator=noise)))
            elastic.progress(len(episodes.lakes) - len(episodes.going), len(episodes.lakes))
        return episodes

    def update(self, episodes: Episodes) -> float:
        rewards = episodes.rewards.view(-1, self.arguments.group_size)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        scores = self.policy(episodes.padded(list(range(len(episodes.texts)))))
        terms = []
        for index, (advantage, moves) in enumerate(zip(advantages.flatten(), episodes.moves, strict=True)):
            at = torch.tensor(moves)
            taken = torch.tensor([ACTIONS.index(VOCABULARY[episodes.texts[index][place]]) for place in moves])
            terms.append(-(scores[index, at - 1, taken] * advantage).mean())
        loss = torch.stack(terms).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def save(self) -> None:
        """Whole or not at all, and while the states are on the device."""
        partial = self.checkpoint.with_suffix(".partial")
        states = {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(states, partial)
        os.replace(partial, self.checkpoint)

    def digest(self) -> str:
        found = hashlib.sha256()
        for parameter in self.policy.parameters():
            found.update(parameter.detach().numpy().tobytes())
        return found.hexdigest()[:16]


def pause(began_s: float, least_s: float) -> None:
    """A phase may be made to last as long as a larger model's would."""
    time.sleep(max(0.0, began_s + least_s - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on frozen lakes, in plain torch")
    parser.add_argument("--directory", type=Path, default=Path("runs/grpo-script"), help="of its checkpoint")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--maps", type=int, default=4, help="so many lakes there are")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--rollout-s", type=float, default=0.0, help="a rollout phase lasts at least so long")
    parser.add_argument("--train-s", type=float, default=0.0, help="a training phase lasts at least so long")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    Grpo(arguments).train()


if __name__ == "__main__":
    main()
