"""A producer in a process of its own, which makes groups and pushes them into a run through shared memory.

    asyncrl run examples/external_run.yaml
    python examples/external_producer.py

Start the run in one terminal and any number of producers in other terminals. A producer waits for the run and ends when
the run ends. Producers need numpy and no torch.

The task is the quickstart's: `c7=` asks for the letter `c` seven times. `play` draws the letters itself and knows their
log-probs. A real producer samples from a server of the run's policy. A producer may also push samples of another policy:
the importance weights correct for the difference.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

from asyncrl.client import Client, Scored
from asyncrl.errors import RingDetached, RingFull

sys.path.insert(0, str(Path(__file__).parent))
from quickstart_model import LETTERS, VOCABULARY

IDS = {token: i for i, token in enumerate(VOCABULARY)}
MEMBERS = 8


def play(wanted: str, draw: random.Random) -> tuple[str, float]:
    """A letter and its log-prob. The letter is `wanted` with probability 1/2, else any of the four letters."""
    letter = wanted if draw.random() < 0.5 else draw.choice(LETTERS)
    return letter, math.log(0.5 / len(LETTERS) + 0.5 * (letter == wanted))


def member(wanted: str, count: int, version: int, draw: random.Random) -> Scored:
    prompt = f"{wanted}{count}="
    answer, logprobs = zip(*(play(wanted, draw) for _ in range(count)), strict=True)
    return Scored(
        tokens=[IDS[character] for character in (*prompt, *answer)],
        prompt_length=len(prompt),
        mask=[0] * len(prompt) + [1] * count,
        logprobs=[0.0] * len(prompt) + list(logprobs),
        versions=[-1] * len(prompt) + [version] * count,
        reward=answer.count(wanted) / count,
        messages="".join(answer),
    )


def main(ring: str = "external", seed: int = 0, timeout: float = 60.0) -> int:
    """Push groups until the run ends. Returns the number of accepted groups. `timeout`: seconds to wait for the run."""
    draw, group = random.Random(seed), 0
    with Client.attach(ring, timeout=timeout) as client:
        while True:
            wanted, count, version = draw.choice(LETTERS), draw.randint(1, 9), max(client.policy_version, 0)
            try:
                client.push(group, [member(wanted, count, version, draw) for _ in range(MEMBERS)], timeout=5.0)
            except (RingFull, RingDetached):
                if client.statistics().attached:
                    # The run has no room yet. Make a new group with the current policy version.
                    continue
                print(f"the run is over at version {client.policy_version}; {group} groups were accepted")
                # Return: another push would wait for the next run of this name.
                return group
            group += 1


if __name__ == "__main__":
    main(*sys.argv[1:2])
