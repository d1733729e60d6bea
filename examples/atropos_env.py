"""A stock Atropos environment that feeds `examples/atropos_run.py`: nothing in it knows of asyncrl.

    pip install atroposlib
    python examples/atropos_env.py serve --env.use_wandb false --env.rollout_server_url URL --env.tokenizer_name FOLDER

The run prints both, URL and FOLDER, when it starts; the environment ends with it.

The task is the quickstart's: `c7=` asks for the letter `c` seven times. The answers come from a player that guesses and
knows its log-probs, so that the example needs no inference server. A real environment samples from one that
serves the run's policy (`self.server.managed_server()` gives tokens, masks and log-probs) and returns the same fields.
"""

from __future__ import annotations

import math
import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

LETTERS = "abcd"
NOT_TRAINED = -100


def logprob(letter: str, asked: str) -> float:
    return math.log(0.5 / len(LETTERS) + 0.5 * (letter == asked))


class RepeatEnv(BaseEnv):
    name = "repeat"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = BaseEnvConfig(group_size=8, max_token_length=32, steps_per_eval=0, use_wandb=False, total_steps=-1)
        # No server is asked for anything here; Atropos wants one to be named.
        return config, [APIServerConfig(base_url="http://localhost:9/v1", api_key="none", health_check=False)]

    async def setup(self) -> None:
        self._draw = random.Random(0)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def get_next_item(self) -> dict[str, Any]:
        return {"letter": self._draw.choice(LETTERS), "count": self._draw.randint(1, 9)}

    async def collect_trajectories(self, item: dict[str, Any]) -> tuple[ScoredDataGroup, list[Any]]:
        prompt = self.tokenizer.encode(f"{item['letter']}{item['count']}=")
        group: dict[str, list[Any]] = {name: [] for name in ("tokens", "masks", "scores", "inference_logprobs")}
        for _ in range(self.config.group_size):
            answer = "".join(self._play(item["letter"]) for _ in range(item["count"]))
            ids = self.tokenizer.encode(answer)
            group["tokens"].append(prompt + ids)
            group["masks"].append([NOT_TRAINED] * len(prompt) + ids)
            group["scores"].append(answer.count(item["letter"]) / item["count"])
            group["inference_logprobs"].append([1.0] * len(prompt) + [logprob(a, item["letter"]) for a in answer])
        return ScoredDataGroup(**group), []

    def _play(self, letter: str) -> str:
        """The player tosses a coin: the letter that was asked for, or any of them."""
        return letter if self._draw.random() < 0.5 else self._draw.choice(LETTERS)


if __name__ == "__main__":
    RepeatEnv.cli()
