"""Credit of episodes with several replies: returns and advantages by hand, and at which tokens they are trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.trajectories import trajectory

from asyncrl.algorithms.advantages import GroupRewards
from asyncrl.algorithms.credit import only_last_turn, returns, turn_advantages
from asyncrl.algorithms.registry import ADVANTAGES
from asyncrl.config.load import load_config
from asyncrl.config.resolve import resolve
from asyncrl.data.packing import pack_groups
from asyncrl.data.store import TURN_ADVANTAGES
from asyncrl.errors import ConfigError
from asyncrl.pumps.building import RewardReader
from asyncrl.records.check import SILENT
from asyncrl.types import Group, Prompt, Ticket, Trajectory

# Two prompt tokens; replies are the tokens 2 3, then 5, then 7 8. What is between them is not sampled.
MASK = [False, False, True, True, False, True, False, True, True]


def episode(
    member: int, turns: int, rewards: tuple[float, ...] | None, reward: float | None, size: int = 3
) -> Trajectory:
    tokens = [1, 2, *(10 * (member + 1) + np.arange(7))]
    begins = [2, 5, 7][:turns]
    mask = np.array(MASK) & (np.arange(9) < [4, 6, 9][turns - 1])
    return trajectory(
        0, member, size, tokens, mask=mask, turns=np.array(begins, np.int32), turn_rewards=rewards, reward=reward
    )


def group_of(*members: Trajectory) -> Group:
    return Group(Ticket(0, 0, 0), Prompt(0, members[0].tokens[:2], ""), members)


def checked(settings: list[str]) -> None:
    resolve(load_config([], ["model.path=m", "data.train=t.jsonl", "reward=r:f", "train.max_steps=10", *settings]))


def test_returns_by_hand() -> None:
    assert returns(episode(0, 3, (1.0, 0.0, 2.0), 3.0), 0.5) == pytest.approx([1.5, 1.0, 2.0])
    assert returns(episode(0, 3, (1.0, 0.0, 2.0), 3.0), 0.0) == pytest.approx([1.0, 0.0, 2.0])
    # The reward of an episode alone is that of its last reply, and so is a penalty.
    assert returns(episode(0, 3, None, 1.0), 0.5) == pytest.approx([0.25, 0.5, 1.0])
    assert returns(episode(0, 3, (1.0, 0.0, 2.0), 2.5), 1.0) == pytest.approx([2.5, 1.5, 1.5])
    assert returns(episode(0, 3, (1.0, 0.0, 2.0), None), 1.0) is None
    assert returns(replace(episode(0, 3, None, 2.0), turns=None), 0.5) == pytest.approx([2.0])


def test_the_same_replies_are_compared() -> None:
    members = [episode(0, 3, (0.0, 0.0, 1.0), 1.0), episode(1, 3, None, 0.0), episode(2, 2, (0.5, 0.5), 1.0)]
    found = turn_advantages(ADVANTAGES["dr_grpo"], members, 0.5)
    # Returns: 0.25 0.5 1 and 0 0 0 and 0.75 0.5. The third replies are those of two members.
    expected = [[0.25 - 1 / 3, 1 / 6, 0.5], [-1 / 3, -1 / 3, -0.5], [0.75 - 1 / 3, 1 / 6]]
    for values, wanted in zip(found, expected, strict=True):
        assert values == pytest.approx(wanted)
    unscored = [members[0], replace(members[1], reward=None), members[2]]
    assert turn_advantages(ADVANTAGES["dr_grpo"], unscored, 0.5)[1].tolist() == [0.0, 0.0, 0.0]


def test_equal_sums_of_rewards_are_no_signal() -> None:
    members = [
        episode(0, 3, (0.1, 0.2, 0.0), 0.1 + 0.2),
        episode(1, 3, (0.3, 0.0, 0.0), 0.3),
        episode(2, 1, (0.3,), 0.3),
    ]
    assert turn_advantages(ADVANTAGES["grpo"], members, 1.0)[0][0] == 0.0


def test_an_advantage_is_at_the_tokens_of_its_reply() -> None:
    group = group_of(episode(0, 3, (0.0, 0.0, 1.0), 1.0), episode(1, 3, None, 0.0), episode(2, 2, (0.5, 0.5), 1.0))
    reader = RewardReader(ADVANTAGES["dr_grpo"], {}, False, 0.5)
    turns, means = reader.turn_advantages(group), reader.advantages([group])[0]
    assert turns is not None and means == pytest.approx([values.mean() for values in turns])
    (batch,) = pack_groups([(group, means)], 1000, [{TURN_ADVANTAGES: turns}])
    for row, member in enumerate(batch.members.tolist()):
        a = np.float32(turns[member])
        expected = [a[0], a[0], a[1], a[2], a[2]] if member < 2 else [a[0], a[0], a[1]]
        assert batch.advantages[batch.sequence == row].tolist() == expected


def test_signal_and_silence_count_every_reply() -> None:
    """The rewards of the episodes are equal, and those of their replies are not."""
    members = [episode(0, 2, (1.0, 0.0), 1.0, 2), replace(episode(1, 2, (0.0, 1.0), 1.0, 2), metadata={SILENT: True})]
    reader = RewardReader(ADVANTAGES["dr_grpo"], {}, False, 0.0)
    assert reader.has_signal(group_of(*members)) and not replace(reader, gamma=None).has_signal(group_of(*members))
    found = reader.turn_advantages(group_of(*members))
    assert found is not None and [values.tolist() for values in found] == [[0.5, -0.5], [0.0, 0.0]]
    scaled = replace(reader, scale_by_length=True).turn_advantages(group_of(*members))
    assert scaled is not None and scaled[0].tolist() == [1.5, -1.5]


def test_the_last_reply_alone_is_trained() -> None:
    assert np.flatnonzero(only_last_turn(episode(0, 3, None, 1.0)).mask).tolist() == [7, 8]
    assert np.flatnonzero(only_last_turn(episode(0, 2, None, 1.0)).mask).tolist() == [5]
    one = replace(episode(0, 3, None, 1.0), turns=None)
    assert only_last_turn(one) is one


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_every_estimator_takes_returns_or_is_refused_by_name(name: str) -> None:
    settings = [f"algorithm.advantage={name}", "algorithm.credit=discounted", "rollout.streaming=false"]
    members = [episode(0, 3, (0.0, 0.0, 1.0), 1.0), episode(1, 3, None, 0.0), episode(2, 2, (0.5, 0.5), 1.0)]
    if ADVANTAGES[name].needs_whole_step:
        with pytest.raises(ConfigError, match=f"algorithm.credit is discounted but advantage is {name}"):
            checked(settings)
    else:
        checked(settings)
        # One reply an episode: the advantages are those of the rewards.
        alone = [replace(t, turns=None, turn_rewards=None) for t in members]
        found = turn_advantages(ADVANTAGES[name], alone, 0.5)
        expected = ADVANTAGES[name].of_step([GroupRewards([t.reward for t in members])])[0]
        assert [values.item() for values in found] == pytest.approx(expected.tolist())


def test_a_discount_that_nothing_reads_is_refused() -> None:
    for credit in ("episode", "last_turn"):
        with pytest.raises(ConfigError, match=f"algorithm.credit is {credit}, which discounts nothing"):
            checked(["algorithm.discount=0.9", f"algorithm.credit={credit}"])
    checked(["algorithm.discount=0.9", "algorithm.credit=discounted"])
