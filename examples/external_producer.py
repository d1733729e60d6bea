"""A producer outside of the run: it plays, scores, and pushes groups through shared memory. It needs numpy, not torch.

    asyncrl run examples/external_run.yaml                # then, in another terminal (any number of them):
    python examples/external_producer.py                  # attaches by name, waits for the run, ends with it

The task is the quickstart's: `c7=` asks for the letter `c` seven times. The player guesses and knows its log-probs; a real
producer samples from a server of the run's policy, or brings what another policy played (the importance weights see to it).
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


def play(asked: str, draw: random.Random) -> tuple[str, float]:
    """A letter and its log-prob: the one that was asked for, or any of them, by the toss of a coin."""
    letter = asked if draw.random() < 0.5 else draw.choice(LETTERS)
    return letter, math.log(0.5 / len(LETTERS) + 0.5 * (letter == asked))


def member(asked: str, count: int, version: int, draw: random.Random) -> Scored:
    prompt = f"{asked}{count}="
    answer, logprobs = zip(*(play(asked, draw) for _ in range(count)), strict=True)
    return Scored(
        tokens=[IDS[character] for character in (*prompt, *answer)],
        prompt_length=len(prompt),
        mask=[0] * len(prompt) + [1] * count,
        logprobs=[0.0] * len(prompt) + list(logprobs),
        versions=[-1] * len(prompt) + [version] * count,
        reward=answer.count(asked) / count,
        messages="".join(answer),
    )


def main(ring: str = "external", seed: int = 0, timeout: float = 60.0) -> int:
    """Returns how many groups were accepted before the run ended."""
    draw, group = random.Random(seed), 0
    with Client.attach(ring, timeout=timeout) as client:
        while True:
            asked, count, version = draw.choice(LETTERS), draw.randint(1, 9), max(client.policy_version, 0)
            try:
                client.push(group, [member(asked, count, version, draw) for _ in range(MEMBERS)], timeout=5.0)
            except (RingFull, RingDetached):
                if client.statistics().attached:  # the run has no room yet: play anew, by the policy of now
                    continue
                print(f"the run is over at version {client.policy_version}; {group} groups were accepted")
                return group  # pushing on would wait for the next run of this name
            group += 1


if __name__ == "__main__":
    main(*sys.argv[1:2])
