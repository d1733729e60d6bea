"""An Atropos environment that sends groups to `examples/atropos_run.py`. This file imports nothing of asyncrl.

    pip install atroposlib
    python examples/atropos_env.py serve --env.use_wandb false --env.rollout_server_url URL --env.tokenizer_name FOLDER

The run prints URL and FOLDER when it starts. The environment ends when the run ends.

The task is the quickstart's: `c7=` asks for the letter `c` seven times. This example needs no inference server, because
`_play` draws the letters itself and `logprob` knows their log-probs. A real environment samples from a server of the run's
policy: `self.server.managed_server()` gives tokens, masks and log-probs. The fields of the returned group stay the same.
"""

from __future__ import annotations

import math
import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

LETTERS = "abcd"
NOT_TRAINED = -100


def logprob(letter: str, wanted: str) -> float:
    return math.log(0.5 / len(LETTERS) + 0.5 * (letter == wanted))


class RepeatEnv(BaseEnv):
    name = "repeat"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = BaseEnvConfig(group_size=8, max_token_length=32, steps_per_eval=0, use_wandb=False, total_steps=-1)
        # Atropos requires the name of a server. This example never calls that server.
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
        """Return `letter` with probability 1/2, else any of the four letters."""
        return letter if self._draw.random() < 0.5 else self._draw.choice(LETTERS)


if __name__ == "__main__":
    RepeatEnv.cli()
