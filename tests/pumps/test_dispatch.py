"""Rank 0's cursor, evaluations and reports for ranks that generate, over a real line."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl.config.schema import Config, DataConfig
from asyncrl.data.prompts import REROLLS, PromptSource
from asyncrl.data.store import Store
from asyncrl.distributed.ledger import LocalLedger
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.distributed.reservation import Reservation
from asyncrl.errors import DataError, RankLost
from asyncrl.pumps.book import GroupBook
from asyncrl.pumps.dispatch import Dispatch
from asyncrl.pumps.evaluate import Sample
from asyncrl.pumps.follow import EngineVersion, FollowPump, Remote
from asyncrl.pumps.metrics import COUNTED
from asyncrl.pumps.pace import Pace
from asyncrl.runtime.build import ByteTokenizer
from asyncrl.telemetry.recorder import Recorder

ROWS = [{"prompt": f"prompt {number}"} for number in range(8)]


def source(rows: Sequence[dict[str, str]] = ROWS, **options: Any) -> PromptSource:
    return PromptSource(rows, ByteTokenizer(), DataConfig(shuffle=False), **options)


class Ranks:
    """Rank 0 with a `Dispatch`, and ranks that are connected to it."""

    def __init__(self, dispatch: Dispatch, server: LineServer, remotes: dict[str, tuple[Remote, LineClient]]) -> None:
        self.dispatch, self.server, self.remotes = dispatch, server, remotes

    def remote(self, rank: int) -> Remote:
        return self.remotes[f"rank {rank}"][0]

    async def kill(self, rank: int) -> None:
        await self.remotes.pop(f"rank {rank}")[1].aclose()


@asynccontextmanager
async def connected(
    *ranks: int,
    play: Callable[[int, Sequence[int]], Any] | None = None,
    prompts: PromptSource | None = None,
    in_order: bool = False,
) -> AsyncIterator[Ranks]:
    recorder = Recorder(max_events=0)
    async with AsyncExitStack() as stack:
        server = LineServer("the secret of a test", on_end=lambda peer, lost: house.dispatch.lose(peer, ()))
        remotes: dict[str, tuple[Remote, LineClient]] = {}
        house = Ranks(
            Dispatch(server, recorder, [f"rank {rank}" for rank in ranks], in_order=in_order), server, remotes
        )
        await stack.enter_async_context(server)
        for rank in ranks:
            client = LineClient(server.address, "the secret of a test", f"rank {rank}")
            remote = Remote(client)
            remotes[f"rank {rank}"] = remote, await stack.enter_async_context(client)
            ports = SimpleNamespace(
                recorder=Recorder(max_events=0),
                engine=SimpleNamespace(statistics=lambda: {"tokens": 7.0}),
                book=SimpleNamespace(end_count=rank, reasons=Counter({"dropped: no signal": rank})),
                trainer=SimpleNamespace(version=0),
                builds_steps=False,
                follows=False,
                generates=True,
            )

            async def reached(version: int) -> None:
                await anyio.lowlevel.checkpoint()

            evaluate = None if play is None else SimpleNamespace(play=play)
            remote.start(ports, prompts or source(), evaluate, reached)  # type: ignore[arg-type]  # what it uses of them
            await remote.arrive()
        await house.dispatch.wait_connected([*remotes])
        yield house


async def take(remote: Remote) -> int | None:
    prompt = await remote.next()
    if prompt is not None:
        await remote.admitted()
    return None if prompt is None else prompt.group_id


async def test_all_ranks_take_the_prompts_of_one_cursor_in_its_order() -> None:
    async with connected(1, 2, 3) as ranks:
        cursor = source(max_epochs=1)
        ranks.dispatch.start(cursor, LocalLedger(Reservation(4, 1)))
        taken = [await take(ranks.remote(1 + number % 3)) for number in range(9)]
        assert taken == [*range(8), None]
        assert await ranks.remote(1).next() is None and cursor.next() is None


async def test_every_rank_learns_how_long_a_group_takes_on_the_other_ranks() -> None:
    async with connected(1, 2, 3) as ranks:
        ranks.dispatch.start(source(), LocalLedger(Reservation(4, 1)))
        one, two, three = (ranks.remote(number) for number in (1, 2, 3))
        await one.next([2.0, 4.0])
        await two.next([9.0])
        await three.next([])
        assert (one.others_mean_s, two.others_mean_s, three.others_mean_s) == (0.0, 3.0, 6.0)
        ranks.dispatch.lose("rank 2", [])
        await three.next([])
        assert three.others_mean_s == 3.0


async def test_a_prompt_counts_as_handed_until_its_group_is_admitted() -> None:
    async with connected(1, 2) as ranks:
        ranks.dispatch.start(source(), LocalLedger(Reservation(4, 1)))
        first = await ranks.remote(1).next()
        assert first is not None and first.prompt == "prompt 0" and ranks.dispatch.unadmitted() == {0}
        # The answer to a request that was cancelled may be lost, so the next request gets it again.
        again = await ranks.remote(1).next()
        assert again is not None and again.group_id == 0 and await take(ranks.remote(2)) == 1
        await ranks.remote(1).admitted()
        assert await take(ranks.remote(1)) == 2
        await all_handled(ranks)
        assert ranks.dispatch.unadmitted() == set()


async def test_a_rank_that_joins_learns_what_was_told_and_is_asked_once_it_generates() -> None:
    async def play(version: int, rows: Sequence[int]) -> list[Sample]:
        return [Sample(row, 0, 1.0, {}, {}, 1) for row in rows]

    async with connected(1, play=play) as ranks:
        await ranks.dispatch.update_weights(4)
        await ranks.dispatch.send_trained()
        client = LineClient(ranks.server.address, "the secret of a test", "rank 7")
        newcomer = Remote(client, joins=True)
        async with client:
            await newcomer.arrive()
            await newcomer.trained.wait()
            assert await newcomer.wait_sent_version(4) == 4 and ranks.dispatch.trained
            # Its engine starts, and no evaluation waits for it.
            assert len(await ranks.dispatch.evaluate(4, [0, 1, 2], play)) == 3
            await newcomer.begin()
            while "rank 7" not in ranks.dispatch._generating_ranks:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            with anyio.move_on_after(0.1) as waiting:
                await ranks.dispatch.wait_finished([])
            assert waiting.cancelled_caught
        await ranks.kill(1)
        await ranks.dispatch.wait_finished([])
        assert ranks.dispatch._generating_ranks == []


async def test_in_order_a_prompt_waits_until_the_prompts_before_it_are_admitted() -> None:
    """Else another rank could pass the rank with the earlier prompt, and two runs would train different steps."""
    async with connected(1, 2, in_order=True) as ranks, anyio.create_task_group() as tasks:
        ranks.dispatch.start(source(), LocalLedger(Reservation(4, 1)))
        assert (first := await ranks.remote(1).next()) is not None and first.group_id == 0
        taken: list[int | None] = []

        async def take_second() -> None:
            taken.append(await take(ranks.remote(2)))

        tasks.start_soon(take_second)
        # Rank 1 asks again on the way: the answer is its own prompt, and the other rank still waits.
        assert (again := await ranks.remote(1).next()) is not None and again.group_id == 0 and not taken
        await ranks.remote(1).admitted()
    assert taken == [1]


async def test_requests_wait_until_the_cursor_is_restored() -> None:
    async with connected(1) as ranks, anyio.create_task_group() as tasks:
        taken: list[int | None] = []
        answered = anyio.Event()

        async def ask() -> None:
            taken.append(await take(ranks.remote(1)))
            answered.set()

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        cursor = source()
        assert [cursor.next() for _ in range(3)] and not taken
        ranks.dispatch.start(cursor, LocalLedger(Reservation(4, 1)))
        await answered.wait()
        assert taken == [3]


async def test_prompts_of_a_lost_rank_are_played_by_others() -> None:
    async with connected(1, 2) as ranks:
        ranks.dispatch.start(source(), LocalLedger(Reservation(4, 1)))
        assert [await take(ranks.remote(1)) for _ in range(3)] == [0, 1, 2]
        await ranks.remote(1).next()
        ranks.dispatch.lose("rank 1", [1, 2 + REROLLS * 0])
        assert [await take(ranks.remote(2)) for _ in range(4)] == [1, 2, 3, 4]
        # The other rank may play as many groups at a time as both did.
        assert (ranks.remote(1).generating_count, ranks.remote(2).generating_count) == (2, 1)
        pace = Pace(6, lambda: 0)
        pace.limit = 3.0
        pace.set_max_playing(12)
        assert pace.limit == 6.0


async def test_prompts_of_a_lost_rank_come_back_after_the_last_one() -> None:
    """A rank that got no prompt would end, and nobody would play the prompts that come back."""
    ledger, cursor = LocalLedger(Reservation(4, 1)), source(max_epochs=1)
    assert all(cursor.next() for _ in range(5))
    async with connected(1, 2) as ranks, anyio.create_task_group() as tasks:
        ranks.dispatch.start(cursor, ledger)
        taken, takes = anyio.create_memory_object_stream[int | None](9)

        async def take_all() -> None:
            async with taken:
                while (group_id := await take(ranks.remote(1))) is not None:
                    await taken.send(group_id)

        with takes, anyio.fail_after(30):
            assert await take(ranks.remote(2)) == 5 and await ranks.remote(2).next()
            first, last = await ledger.admit(5), await ledger.admit(99)
            assert first is not None and last is not None
            tasks.start_soon(take_all)
            assert await takes.receive() == 7
            await ledger.end(first, "dropped", "its rank is lost")
            ranks.dispatch.lose("rank 2", [5])
            assert [await takes.receive(), await takes.receive()] == [5, 6]
            # Until no group is live, a rank may be lost.
            await ledger.end(last, "dropped", "no signal")
            assert [group_id async for group_id in takes] == []
    assert ranks.dispatch.reasons["dropped: rank lost"] == 1


async def test_a_rank_that_reads_other_prompts_is_refused() -> None:
    other = source([{"prompt": f"other {number}"} for number in range(8)])
    async with connected(1, prompts=other) as ranks:
        ranks.dispatch.start(source(), LocalLedger(Reservation(4, 1)))
        with pytest.raises(DataError, match="are not those of rank 0"):
            await ranks.remote(1).next()


async def play(version: int, rows: Sequence[int]) -> list[Sample]:
    return [Sample(row, 0, row / 3, {"f": None, "g": 0.1 * row}, {"h": 2.0}, version) for row in rows]


async def test_an_evaluation_is_spread_over_the_ranks_and_every_bit_arrives() -> None:
    shares: list[Sequence[int]] = []

    async def counted(version: int, rows: Sequence[int]) -> list[Sample]:
        shares.append(rows)
        return await play(version, rows)

    async with connected(1, 2, 3, play=counted) as ranks:
        scored = await ranks.dispatch.evaluate(5, range(8), play)
        assert sorted(scored) == await play(5, range(8))
        assert sorted(map(len, shares)) == [2, 3, 3]


async def test_a_rank_that_plays_fewer_groups_gets_fewer_rows_of_an_evaluation() -> None:
    shares: dict[int, int] = {}

    async with connected(1, 2, 3, play=play) as ranks:
        ranks.dispatch.start(source(), LocalLedger(Reservation(4, 1)))
        for rank, groups in ((1, 9), (2, 9), (3, 0)):

            async def counted(version: int, rows: Sequence[int], rank: int = rank) -> list[Sample]:
                shares[rank] = len(rows)
                return await play(version, rows)

            ranks.remote(rank)._evaluate = SimpleNamespace(play=counted)  # type: ignore[assignment]  # counts
            await ranks.remote(rank).next([1.0] * groups)
        for expected in ({1: 20, 2: 20, 3: 2}, {1: 14, 2: 14, 3: 14}):
            scored = await ranks.dispatch.evaluate(5, range(42), play)
            assert sorted(scored) == await play(5, range(42))
            assert shares == expected


async def test_the_rows_of_a_rank_that_dies_in_an_evaluation_go_to_the_others() -> None:
    async with connected(1, 2, play=play) as ranks, anyio.create_task_group() as tasks:
        hangs = anyio.Event()

        async def hang(version: int, rows: Sequence[int]) -> list[Sample]:
            hangs.set()
            await anyio.sleep_forever()
            return []

        ranks.remote(2)._evaluate = SimpleNamespace(play=hang)  # type: ignore[assignment]  # a pump that never ends

        async def kill() -> None:
            await hangs.wait()
            await ranks.kill(2)

        tasks.start_soon(kill)
        scored = await ranks.dispatch.evaluate(1, range(5), play)
        assert sorted(scored) == await play(1, range(5))


async def test_without_a_rank_that_generates_an_evaluation_is_an_error() -> None:
    async with connected() as ranks:
        with pytest.raises(RankLost, match="no rank that generates is left"):
            await ranks.dispatch.evaluate(1, range(5), play)


async def test_reports_add_counts_samples_and_reasons() -> None:
    async with connected(1, 2) as ranks:
        for rank in (1, 2):
            recorder = ranks.remote(rank)._ports.recorder
            recorder.count("groups/dropped/no signal", rank)
            recorder.observe("time/reward", 4.0 * rank)
            await ranks.remote(rank).report()
        await ranks.remote(1).report()  # nothing is counted twice
        await all_handled(ranks)
        metrics = ranks.dispatch._recorder.drain()
        assert metrics["groups/dropped/no signal"] == 3 and metrics["time/reward"] == 6.0
        assert ranks.dispatch.reasons == Counter({"dropped: no signal": 3})
        assert ranks.dispatch.progress == (7.0, 1, 7.0, 2)


async def test_a_rank_that_trains_reports_its_reasons_and_no_count_that_the_parts_of_steps_have() -> None:
    async with connected(1, 2) as ranks:
        ports = ranks.remote(1)._ports
        ports.builds_steps, ports.generates = True, False
        for name in ("train/skipped_groups", "engine/tokens", "time/wait_for_group"):
            ports.recorder.count(name)
        await ranks.remote(1).report()
        for_the_next_part = {"train/skipped_groups": 1, "engine/tokens": 1}
        assert ports.recorder.take_counts(COUNTED) == for_the_next_part
        assert ports.recorder.take_counts(("time/",)) == {"time/wait_for_group": 1}
        ports.book.reasons["failed: a loss"] = 3
        await all_handled(ranks)
        assert ranks.dispatch._recorder.drain() == {}
        assert ranks.dispatch.reasons["failed: a loss"] == 3


async def all_handled(ranks: Ranks) -> None:
    """Wait until rank 0 has handled what the ranks have sent: the line keeps the order of a rank's messages."""
    ranks.dispatch.dismiss()
    for rank in (1, 2):
        await ranks.remote(rank).leave()


async def test_rank_0_closes_the_books_after_all_ranks_have_left_and_before_they_end() -> None:
    async with connected(1, 2) as ranks, anyio.create_task_group() as tasks:
        ended: list[int] = []

        async def leave(rank: int) -> None:
            await ranks.remote(rank).leave()
            ended.append(rank)

        tasks.start_soon(leave, 1)
        with anyio.move_on_after(0.1) as too_early:
            await ranks.dispatch.wait_finished(["rank 1", "rank 2"])
        assert too_early.cancelled_caught
        tasks.start_soon(leave, 2)
        await ranks.dispatch.wait_finished(["rank 1", "rank 2"])
        assert not ended
        ranks.dispatch.dismiss()


async def test_a_rank_reports_in_time_also_if_the_watchdog_looks_seldom() -> None:
    async with connected(1) as ranks, anyio.create_task_group() as tasks:
        remote = ranks.remote(1)
        remote._ports.config = Config.model_validate({"watchdog": {"interval_s": 600, "stall_timeout_s": 0.1}})
        reported = anyio.Event()

        async def report() -> None:
            reported.set()

        remote.report = report  # type: ignore[method-assign, assignment]
        tasks.start_soon(remote.report_often)
        with anyio.fail_after(30):
            await reported.wait()
        tasks.cancel_scope.cancel()


async def test_ranks_hear_of_the_end() -> None:
    async with connected(1) as ranks:
        remote = ranks.remote(1)
        await ranks.dispatch.update_weights(4)
        assert await remote.wait_sent_version(3) == 4
        await ranks.dispatch.send_trained()
        await remote.trained.wait()
        assert not remote.ended.is_set()
        await ranks.dispatch.send_ended(9)
        await remote.ended.wait()
        assert remote.last_version == 9


async def test_a_rank_that_only_generates_drops_groups_past_their_deadline() -> None:
    versions, reports = iter([1, 2]), []
    dropped = anyio.Event()

    async def next_version() -> int:
        return next(versions, None) or await anyio.sleep_forever()  # type: ignore[func-returns-value, return-value]

    async def report() -> None:
        reports.append(ports.recorder.take_counts(("staleness/",)))

    async with LocalLedger(Reservation(1, 1, "drop")) as ledger:
        ports: Any = SimpleNamespace(
            config=Config.model_validate({"rollout": {"late": "drop"}}),
            ledger=ledger,
            recorder=Recorder(max_events=0),
            turn_of=lambda version: version,
            note=lambda text: None,
        )
        book = ports.book = GroupBook(ledger, Store())
        book.on_end = lambda ids: dropped.set()
        late = await ledger.admit(0)
        assert late is not None
        book.add(late)
        for group_id in (1, 2):
            ticket = await ledger.admit(group_id)
            assert ticket is not None
            assert (await ledger.claim([ticket]))[1] == ticket
            await ledger.commit()
            await ledger.release(group_id - 1)
        remote: Any = SimpleNamespace(report=report, ended=anyio.Event(), trained=anyio.Event(), joins=False)
        pump = FollowPump(ports, remote, EngineVersion(next_version))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pump.run)
            with anyio.fail_after(30):
                await dropped.wait()
            tasks.cancel_scope.cancel()
    assert not book.tickets and book.reasons == {"dropped: past its deadline": 1}
