"""A game of textarena as an episode (textarena 0.7).

    ta.make("TicTacToe-v0-raw").reset(num_players=2)   ->   episode = from_textarena("TicTacToe-v0-raw", players=2)

The policy plays one seat, chosen by the column `seat` of the row (default 0), and `opponent(text) -> action` plays the others.
Without an opponent the policy plays all seats: each seat has its own conversation, and the reward is that of `seat`.
Use the games whose names end with `-raw`: they show only what is new since the last move. Other games repeat the whole game each
turn, so each turn would have a new conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import textarena as ta


def from_textarena(env_id: str, players: int = 1, opponent: Callable[[str], str] | None = None, **options: Any) -> Any:
    async def episode(task: dict[str, Any], policy: Any) -> float:
        # One thread for each game: its calls may block, and `close` waits until a cancelled call has returned.
        thread = ThreadPoolExecutor(1)
        call = partial(asyncio.get_running_loop().run_in_executor, thread)
        made, seat, done = [], int(task.get("seat", 0)), False
        conversations: dict[int, list[Any]] = {player: [] for player in range(players)}
        voices = {player: policy if player == seat else policy.branch(f"player {player}") for player in range(players)}
        try:
            # The thread stores the game, because a cancelled call returns nothing.
            await call(lambda: made.append(ta.make(env_id, **options)))
            [game] = made
            # A seed would also seed Python's own generator, for all episodes of the process.
            await call(partial(game.reset, num_players=players))
            while not done:
                player, news = await call(game.get_observation)
                text = "\n".join(message for _, message, _ in news)
                if player != seat and opponent is not None:
                    action = await call(opponent, text)
                else:
                    messages = conversations[player]
                    messages.append({"role": "user", "content": text})
                    reply = await voices[player].chat(messages)
                    messages.append(reply.message)
                    action = reply.text
                done, _ = await call(game.step, action)
            rewards, info = await call(lambda: made.pop().close())
            policy.note("invalid_moves", float(info[seat].get("invalid_move", False)))
            return float(rewards[seat])
        finally:
            try:
                await call(lambda: [each.close() for each in made])
            finally:
                thread.shutdown(wait=False)

    return episode
