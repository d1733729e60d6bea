"""examples/pairwise.py with a server that compares: the longer answer is the better one."""

import json
import re
from pathlib import Path

import pytest
from rewards_helpers import pool_of, prompt, trajectories
from support.judge_server import JudgeServer

from asyncrl.rewards.calls import RewardSpec

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/pairwise.py"


async def test_the_better_of_a_pair_wins_whatever_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compares(JudgeServer):
        def reply(self, system, user):
            a, b = (len(re.search(rf"\[answer {name} (\w+)\]\n(.*)\n\[end of", user)[2]) for name in "AB")
            self.texts.append((a, b))
            # The judge has no opinion about the shortest.
            return "none" if 1 in (a, b) else json.dumps({"score": 10 * (a > b)})

    server = Compares()
    async with server.serve() as url:
        monkeypatch.setenv("JUDGE_URL", url)
        monkeypatch.setenv("JUDGE_MODEL", "m")
        async with pool_of([RewardSpec(f"{EXAMPLE}:wins")], timeout_s=60) as pool:
            assert [function.whole_group for function in pool.functions] == [True]
            scored = await pool.score(prompt(), trajectories("aaa", "aaaa", "aa", "a"))
            [alone] = await pool.score(prompt(), trajectories("aaa"))
    assert [t.reward for t in scored] == pytest.approx([3 / 6, 5 / 6, 1 / 6, 3 / 6])
    assert scored[0].extras["wins/undecided"] == 6 and alone.reward is None
    assert {*server.texts} == {(a, b) for a in range(1, 5) for b in range(1, 5) if a != b}
