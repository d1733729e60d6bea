"""What rank 0 does for the other ranks if ranks have different roles (`distributed.roles`). Other ranks run `follow.py`.

    rank 0                       messages on the line (TCP)      another rank
    one prompt cursor      ◀── prompts/next, prompts/admitted ── rollout pump
    evaluate pump          ── evaluate: rows, version ─────────▶ plays and scores these rows
    recorder, summary      ◀── report: counts, reasons ───────── recorder, book of groups
    end of the training    ── run/trained, run/ended ──────────▶ ends its pumps, then sends run/left
    lists of ranks         ◀── run/here ──────────────────────── has connected
                           ◀── run/begun ─────────────────────── joined the run, and generates from now on
    trainer without a model ─ run/version ─────────────────────▶ engine without a model

One cursor gives all prompts, so the prompts of a run do not depend on the number of ranks. After a rank has taken a prompt,
`Dispatch` keeps the prompt's id until the ledger has admitted the group. So a resume neither skips a prompt nor trains it twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

from asyncrl.concurrency.supervisor import plain_task_group, spawn
from asyncrl.data.prompts import PromptSource
from asyncrl.distributed.exchange import Answer
from asyncrl.distributed.line import LineServer
from asyncrl.errors import EngineClosed, RankLost
from asyncrl.ports import Ledger
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.samples import Samples
from asyncrl.types import Prompt

from .evaluate import Play, Sample

NEXT, ADMITTED, REPORT, EVALUATE = "prompts/next", "prompts/admitted", "report", "evaluate"
HERE, VERSION, TRAINED, ENDED, LEFT = "run/here", "run/version", "run/trained", "run/ended", "run/left"
BEGUN = "run/begun"
_AVERAGED = 16  # `_mean_s` is a moving mean of about this many groups


class Dispatch:
    """See the module docstring. Create a `Dispatch` before a rank can connect, and call `start` when the cursor is restored."""

    def __init__(
        self, line: LineServer, recorder: Recorder, peers: Sequence[str], *, in_order: bool, listens: bool = False
    ) -> None:
        """`peers`: the ranks that generate, by their names on the line; "" is this rank.
        `in_order`: give a prompt only when the ledger has admitted all earlier prompts. So each step has the same groups in every
        run. `listens`: the run accepts new ranks, and waits for a new rank if no rank that generates is left."""
        self._line = line
        self._listens = listens
        self._recorder = recorder
        self._generating_ranks = list(peers)
        self._in_order = in_order
        self._prompts: PromptSource | None = None
        self._ledger: Ledger | None = None
        self._started = asyncio.Event()
        # Rank -> group id of its newest prompt, until the rank reports that the ledger has admitted the group.
        self._unadmitted: dict[str, int] = {}
        self._lost = Counter[str]()  # reason -> number of groups that lost ranks had
        self.reports: dict[str, Mapping[str, Any]] = {}  # rank -> its newest `Remote.report`
        self._mean_s: dict[str, float] = {}  # rank -> mean duration of its newest groups
        self._sum_s = 0.0  # sum of the values of `_mean_s`
        self._played = Counter[str]()  # rank -> played groups
        self._played_lately = Counter[str]()  # rank -> played groups since the last `_take_shares`
        line.on(NEXT, self._next)
        line.on(ADMITTED, self._admitted)
        line.on(REPORT, self._report)
        line.on(HERE, self._on_here)
        line.on(LEFT, self._on_left)
        line.on(BEGUN, self._on_begun)
        self._connected: set[str] = set()
        # Kind -> header of the newest message of this kind to all ranks, for ranks that connect later.
        self._broadcasts: dict[str, Any] = {}
        self._finished: set[str] = set()  # ranks whose pumps have ended, and lost ranks
        self._changed = asyncio.Event()
        self.dismissed = asyncio.Event()

    def start(self, prompts: PromptSource, ledger: Ledger) -> None:
        """Give prompts of this cursor from now on."""
        self._prompts, self._ledger = prompts, ledger
        self._started.set()

    async def _take(self, peer: str) -> Prompt | None:
        await self._started.wait()
        assert self._prompts is not None and self._ledger is not None
        # A rank that asks again did not get the answer to its last request, so it gets the same prompt.
        while peer not in self._unadmitted:
            prompt = None if self._in_order and self._unadmitted else self._prompts.next()
            if prompt is not None:
                self._unadmitted[peer] = prompt.group_id
                return prompt
            # The cursor is at its end, or `in_order` forbids a prompt now. Wait: prompts of lost ranks return to the cursor.
            if self._unadmitted:
                await self._changed.wait()
            elif self._ledger.statistics().live:
                await self._ledger.wait_changed(self._ledger.changes)
            else:
                return None
        return self._prompts.prompt_for(self._unadmitted[peer])

    async def _next(self, peer: str, header: Any, _: Sequence[Any]) -> Answer:
        self._note_durations(peer, header["played_s"])
        prompt = await self._take(peer)
        assert self._prompts is not None
        group = None if prompt is None else prompt.group_id
        pace = {"others_mean_s": self._others_mean_s(peer), "generating": self.generating_count}
        return {"group": group, "digest": self._prompts.digest, **pace}, ()

    def _note_durations(self, peer: str, played_s: Sequence[float]) -> None:
        for seconds in played_s:
            self._played[peer] += 1
            self._played_lately[peer] += 1
            change_s = (seconds - self._mean_s.get(peer, 0.0)) / min(self._played[peer], _AVERAGED)
            self._mean_s[peer] = self._mean_s.get(peer, 0.0) + change_s
            self._sum_s += change_s

    def _others_mean_s(self, peer: str) -> float:
        others = len(self._mean_s) - (peer in self._mean_s)
        return (self._sum_s - self._mean_s.get(peer, 0.0)) / others if others else 0.0

    @property
    def others_mean_s(self) -> float:
        """Mean duration of a group on the other ranks. 0: unknown."""
        return self._others_mean_s("")

    async def _admitted(self, peer: str, header: Any, _: Sequence[Any]) -> None:
        self._unadmitted.pop(peer, None)
        self._notify()

    async def next(self, played_s: Sequence[float] = ()) -> Prompt | None:
        """The next prompt for this rank; None if no prompt is left."""
        self._note_durations("", played_s)
        return await self._take("")

    async def admitted(self) -> None:
        """Call after the ledger has admitted the group of this rank's newest prompt."""
        await self._admitted("", None, ())

    @property
    def generating_count(self) -> int:
        """The number of ranks that generate."""
        return len(self._generating_ranks)

    @property
    def lacks_ranks(self) -> bool:
        """Whether further steps need groups, but no rank generates and no new rank may join."""
        return not (self._generating_ranks or self.trained or self._listens)

    def unadmitted(self) -> set[int]:
        """Group ids of the prompts that ranks have taken, and that the ledger has perhaps not admitted yet."""
        return set(self._unadmitted.values())

    def lose(self, peer: str, group_ids: Sequence[int]) -> None:
        """A rank is lost: other ranks play the prompts of its groups again. `group_ids`: the result of the ledger's
        `lose_generator`. Between that call and this call there must be no `await`: a checkpoint there would miss these prompts."""
        self._generating_ranks = [other for other in self._generating_ranks if other != peer]
        self._lost["dropped: rank lost"] += len(group_ids)
        again = {*group_ids, self._unadmitted.pop(peer, -1)} - {-1}
        self._finished.add(peer)
        self._sum_s -= self._mean_s.pop(peer, 0.0)
        self._notify()
        if self._prompts is not None:
            self._prompts.requeue(again)

    async def _report(self, peer: str, header: Any, _: Sequence[Any]) -> None:
        self.reports[peer] = header
        for name, value in header["counts"].items():
            self._recorder.count(name, value)
        for name, state in header["samples"].items():
            self._recorder.merge(name, Samples.from_json(state))

    @property
    def progress(self) -> tuple[float, ...]:
        """Numbers that change as long as other ranks generate, for the watchdog."""
        return tuple(number for _, report in sorted(self.reports.items()) for number in report["progress"])

    @property
    def reasons(self) -> Counter[str]:
        """Outcome and reason, such as "dropped: rank lost" -> number of groups of other ranks that were dropped or failed."""
        total = +self._lost
        for report in self.reports.values():
            total.update(report["reasons"])
        return total

    async def evaluate(self, version: int, rows: Sequence[int], play: Play) -> list[Sample]:
        """Play these held-out rows on all ranks that generate. `play` plays the share of this rank. If a rank is lost, other ranks
        play its rows. Errors: RankLost if no rank that generates is left, and no new rank may join."""
        scored: list[Sample] = []
        unplayed, ending = list(rows), set[str]()
        while unplayed:
            peers = [peer for peer in self._generating_ranks if peer not in ending]
            if not peers and self._listens and not self.trained:
                await self._changed.wait()
                continue
            if not peers:
                raise RankLost(f"version {version} cannot be evaluated: no rank that generates is left")
            shares = self._take_shares(unplayed, peers)
            unplayed = []

            async def ask(peer: str, share: Sequence[int], unplayed: list[int] = unplayed) -> None:
                if not peer:
                    scored.extend(await play(version, share))
                    return
                try:
                    answer, _ = await self._line.ask(peer, EVALUATE, {"version": version, "rows": share})
                except (RankLost, EngineClosed):
                    # EngineClosed: the rank is ending, but may be reported as lost only later. Until then `ending` excludes it.
                    ending.add(peer)
                    unplayed.extend(share)
                else:
                    scored.extend(Sample(*sample) for sample in answer)

            async with plain_task_group() as tasks:
                for peer, share in shares.items():
                    if share:
                        spawn(tasks, f"evaluation on {peer or 'this rank'}", ask, peer, share)
        return scored

    def _take_shares(self, rows: Sequence[int], peers: Sequence[str]) -> dict[str, Sequence[int]]:
        """Rank -> its rows, in proportion to 1 + the groups that it has played since the last call. Resets these counts."""
        parts = [*accumulate(1 + self._played_lately[peer] for peer in peers)]
        ends = [0, *(len(rows) * part // parts[-1] for part in parts)]
        self._played_lately.clear()
        return {peer: rows[first:end] for peer, (first, end) in zip(peers, pairwise(ends), strict=True)}

    async def update_weights(self, version: int) -> None:
        """Send the number of the version to the other ranks, which have no model (`train.kind=dry_run`). See `ports.WeightSink`."""
        await self._broadcast(VERSION, {"version": version})

    async def send_trained(self) -> None:
        """Notify the other ranks that no step follows, so they stop generating."""
        await self._broadcast(TRAINED, {})

    async def send_ended(self, version: int) -> None:
        """Notify the other ranks that the run has ended at this version. They end once their engines have the version."""
        await self._broadcast(ENDED, {"version": version})

    @property
    def trained(self) -> bool:
        """Whether no step follows."""
        return TRAINED in self._broadcasts

    async def wait_finished(self, peers: Sequence[str]) -> None:
        """Wait until these ranks, and all ranks that generate, have ended their pumps or are lost. `dismiss` lets them exit."""
        while not self._finished.issuperset((*peers, *filter(None, self._generating_ranks))):
            await self._changed.wait()

    def dismiss(self) -> None:
        """Let the other ranks exit. Call this after every group has ended in the ledger."""
        self.dismissed.set()

    async def _on_left(self, peer: str, header: Any, _: Sequence[Any]) -> None:
        self._finished.add(peer)
        self._notify()
        await self.dismissed.wait()

    async def wait_connected(self, peers: Sequence[str]) -> None:
        """Wait until these ranks are connected or lost. Before that no message can be sent to them."""
        while not (self._connected | self._finished).issuperset(peers):
            await self._changed.wait()

    async def _on_here(self, peer: str, header: Any, _: Sequence[Any]) -> None:
        self._connected.add(peer)
        self._notify()
        for kind, message in [*self._broadcasts.items()]:
            await self._line.tell(peer, kind, message)

    async def _on_begun(self, peer: str, header: Any, _: Sequence[Any]) -> None:
        """A rank that joined the run generates from now on, and plays a part of each evaluation."""
        if peer not in self._generating_ranks:
            self._generating_ranks.append(peer)
        self._notify()

    def generates(self, peer: str) -> bool:
        """Whether the rank `peer` generates. False for a lost rank, and for a rank that joined and has not begun."""
        return peer in self._generating_ranks

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _broadcast(self, kind: str, header: Any) -> None:
        self._broadcasts[kind] = header
        self._notify()
        for peer in sorted({*filter(None, self._generating_ranks), *self._connected} - self._finished):
            with suppress(RankLost):
                await self._line.tell(peer, kind, header)
