"""Real parts of a run with a tap on them: trainer, book and ledger write down what was asked of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.config.resolve import turns_bound
from asyncrl.config.schema import Config
from asyncrl.data.store import Store
from asyncrl.distributed.ledger import LocalLedger
from asyncrl.distributed.reservation import Reservation
from asyncrl.pumps.book import GroupBook
from asyncrl.training.dry_run import DryRunTrainer
from asyncrl.types import ClaimState, LedgerStatistics, Microbatch, StepResult, Ticket

if TYPE_CHECKING:
    from pumps_house import House


class RecordingTrainer:
    """The dry-run trainer with a log, a tap on every microbatch, and failures on request."""

    def __init__(self, house: House, inner: DryRunTrainer) -> None:
        self.house, self.inner = house, inner
        self.calls: dict[str, int] = {}
        self.open = False  # whether the real state machine has an open step
        self.old_logprobs_given: list[bool] = []

    @property
    def version(self) -> int:
        return self.inner.version

    def _called(self, call: str, groups: Iterable[int] = ()) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        self.house.note(call, *groups, version=self.version)
        failure = self.house.plan.trainer_fails.get((call, self.calls[call]))
        if failure is not None:
            raise failure

    async def begin_train_step(self, loss: Any) -> None:
        self._called("begin")
        await self.inner.begin_train_step(loss)

    async def survey(self, loss: Any, batches: Sequence[Microbatch]) -> tuple[Any, list[Microbatch]]:
        self._called("survey")
        return await self.inner.survey(loss, batches)

    async def train_microbatch(self, batch: Microbatch) -> None:
        groups = list(dict.fromkeys(batch.group_ids.tolist()))
        self.old_logprobs_given.append(batch.old_logprobs is not None)
        self._called("microbatch", groups)
        self.house.tokens_trained.append((self.version, batch))
        await self.inner.train_microbatch(batch)

    async def finish_train_step(self) -> StepResult:
        self._called("finish")
        result = await self.inner.finish_train_step()
        self.house.note("finished", version=result.version)
        return result

    async def abort_train_step(self) -> None:
        self._called("abort")
        await self.inner.abort_train_step()

    async def compute_logprobs(self, batch: Microbatch, model: Any = "policy") -> Any:
        self._called("logprobs", dict.fromkeys(batch.group_ids.tolist()))
        return await self.inner.compute_logprobs(batch, model)

    @property
    def step_open(self) -> bool:
        return self.inner._open is not None


class RecordingBook(GroupBook):
    """The real book; the groups whose rows are cleared after their step are written down."""

    def __init__(self, house: House, ledger: LocalLedger, store: Store) -> None:
        super().__init__(ledger, store)
        self.house = house

    def clear(self, group_ids: Iterable[int]) -> None:
        ids = tuple(group_ids)
        self.house.note("clear", *ids)
        rows = self.store.statistics().rows
        super().clear(ids)
        assert rows - self.store.statistics().rows == len(ids) * self.house.config.rollout.group_size


class AuditedLedger(LocalLedger):
    """The local ledger; its books are added up after every transition, and every ending is written down."""

    def __init__(self, house: House, config: Config) -> None:
        rollout = config.rollout
        bounds = rollout.groups_per_step, turns_bound(config), rollout.late
        super().__init__(Reservation(*bounds, warmup=rollout.sync_warmup_steps))
        self.house = house
        self.admissions: Counter[int] = Counter()  # by group id; an embedding program may submit one again
        self.endings: dict[int, list[str]] = {}  # by group id: every way in which it ended
        self._claims: list[int] = []

    async def admit(self, group_id: int, oldest: int | None = None) -> Ticket | None:
        ticket = await super().admit(group_id, oldest)
        if ticket is not None:
            self.admissions[group_id] += 1
            self.house.note("admit", group_id)
        return ticket

    async def claim(self, ready: Sequence[Ticket]) -> tuple[ClaimState, Ticket | None]:
        state, ticket = await super().claim(ready)
        if ticket is not None:
            self._claims.append(ticket.group_id)
            self.house.note("claim", ticket.group_id)
        return state, ticket

    async def commit(self) -> int:
        turn = await super().commit()
        for group_id in self._claims:
            self.endings.setdefault(group_id, []).append("trained")
        self.house.note("commit", *self._claims)
        self._claims = []
        return turn

    async def rollback(self) -> list[Ticket]:
        self._claims = []
        self.house.note("rollback")
        return await super().rollback()

    async def release(self, turn: int) -> None:
        await super().release(turn)
        self.house.note("release", version=turn)

    async def end(self, ticket: Ticket, outcome: Any, reason: str) -> None:
        await super().end(ticket, outcome, reason)
        self.endings.setdefault(ticket.group_id, []).append(outcome)
        self.house.note(outcome, ticket.group_id)

    def _changed(self) -> None:
        super()._changed()
        self.audit()

    def audit(self) -> LedgerStatistics:
        books = self.statistics()
        assert books.live + books.claimed + books.held <= books.slots, books
        ended = books.trained + books.dropped + books.failed
        assert books.admitted == books.live + books.claimed + books.held + ended, books
        return books
