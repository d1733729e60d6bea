"""The roles of the ranks: which ranks train, and which generate. `distributed.roles` gives counts or lists of ranks.

    {train: 2, generate: 6}                   ranks 0 and 1 train, ranks 2 to 7 generate
    {train: [0, 1], generate: [1, 2, 3]}      rank 1 does both
    {train: 2, generate: 0}                   both ranks train; nodes that join later generate (`distributed.listen`)
    absent                                    every rank does both

With `distributed.context: n` the training ranks, in order, form sets of n *siblings*, which train each sequence together. Groups
travel to the first rank of a set, its *leader*.

Rank 0 always trains, because it writes the checkpoints. It also has the ledger and the prompt cursor of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..config.schema import DistributedConfig, RolesConfig
from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Roles:
    """`train`: the ranks that train. `generate`: the ranks that generate. Both ascend, and a rank may be in both."""

    train: tuple[int, ...] = (0,)
    generate: tuple[int, ...] = (0,)
    listens: bool = False  # nodes may join, and only generate (`distributed.listen`)
    context: int = 1  # number of siblings in a set (`distributed.context`)

    @classmethod
    def resolve(cls, distributed: DistributedConfig, ranks: int) -> Roles:
        """The roles of a run with this many ranks. Errors: ConfigError."""
        context = distributed.context
        roles = cls._resolve(distributed.roles, ranks, listens=distributed.listen is not None)
        if len(roles.train) % context:
            raise ConfigError(
                f"distributed.context is {context} and the run has {len(roles.train)} training rank(s), which form no sets of "
                f"{context}; start a multiple of {context} training ranks, or choose a divisor of {len(roles.train)}"
            )
        return replace(roles, context=context)

    @classmethod
    def _resolve(cls, setting: RolesConfig, ranks: int, *, listens: bool) -> Roles:
        train, generate = setting.train, setting.generate
        if train is None and generate is None:
            return cls(tuple(range(ranks)), tuple(range(ranks)), listens)
        if train is None or generate is None:
            given, missing = ("generate", "train") if train is None else ("train", "generate")
            raise ConfigError(
                f"distributed.roles.{given} is set and distributed.roles.{missing} is not; set both, or leave both out: then "
                "every rank trains and generates"
            )
        if isinstance(train, int) and isinstance(generate, int):
            if min(train, generate) < 0:
                raise ConfigError(
                    f"distributed.roles is {{train: {train}, generate: {generate}}}; give counts of at least 0"
                )
            if train + generate != ranks:
                raise ConfigError(
                    f"distributed.roles is {{train: {train}, generate: {generate}}}, which are {train + generate} ranks, and the "
                    f"run has {ranks}; start {train + generate} ranks, or give counts whose sum is {ranks} (for ranks that do "
                    "both, give lists)"
                )
            roles = cls(tuple(range(train)), tuple(range(train, ranks)), listens)
        elif isinstance(train, tuple) and isinstance(generate, tuple):
            _check_list("train", train, ranks)
            _check_list("generate", generate, ranks)
            roles = cls(tuple(sorted(train)), tuple(sorted(generate)), listens)
        else:
            raise ConfigError(
                f"distributed.roles is {{train: {_shown(train)}, generate: {_shown(generate)}}}: give two counts, or two lists of "
                "ranks"
            )
        for name, chosen in (("train", roles.train), ("generate", roles.generate)):
            if not chosen and not (listens and name == "generate"):
                joins = ", or distributed.listen, so that generating nodes can join" if name == "generate" else ""
                raise ConfigError(
                    f"distributed.roles.{name} names no rank; a run needs one rank or more that can {name}{joins}"
                )
        if without := sorted(set(range(ranks)).difference(roles.train, roles.generate)):
            raise ConfigError(
                f"distributed.roles gives {_named(without)} no role, and the run has {ranks} ranks; add the missing ranks to "
                "train or generate, or start fewer ranks"
            )
        if roles.train[0] != 0:
            raise ConfigError(
                f"distributed.roles.train is {_shown(train)}; add rank 0, which writes the checkpoints and so must train"
            )
        return roles

    @staticmethod
    def ranks_named(distributed: DistributedConfig) -> int:
        """The number of ranks that `distributed.roles` needs. Without roles: `distributed.context`, the size of one sibling set."""
        setting, numbers = distributed.roles, [distributed.context - 1]
        for value in (setting.train, setting.generate):
            numbers += [value] if isinstance(value, int) else value or ()
        return max(numbers) + 1 if not isinstance(setting.train, int) else sum(numbers[1:])

    @property
    def differ(self) -> bool:
        """False: each rank trains and generates its own groups. True: a rank has one role, ranks share sequences, or nodes join."""
        return self.listens or self.context > 1 or self.train != self.generate

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each set of siblings. If no ranks share sequences, all training ranks."""
        return self.train[:: self.context]

    @property
    def sets(self) -> list[tuple[int, ...]]:
        """The ranks of each set of siblings, in the order of the leaders."""
        return [self.train[first : first + self.context] for first in range(0, len(self.train), self.context)]

    def siblings(self, rank: int) -> tuple[int, ...]:
        """The set of this rank; empty for a rank that does not train."""
        return next((ranks for ranks in self.sets if rank in ranks), ())

    def shared(self, rank: int) -> str:
        """For messages about a rank: a phrase that names its siblings; "" if the rank shares no sequences."""
        others = [other for other in self.siblings(rank) if other != rank]
        return f" ({_named([rank])} shares sequences with {_named(others)}: distributed.context)" if others else ""

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that only generate, and so receive weights."""
        return tuple(rank for rank in self.generate if rank not in self.train)

    @property
    def sends(self) -> bool:
        """Whether training ranks send weights to ranks that only generate."""
        return self.listens or bool(self.receivers)

    def trains(self, rank: int) -> bool:
        return rank in self.train

    def generates(self, rank: int) -> bool:
        return rank in self.generate

    def describe(self, rank: int) -> str:
        """A line for the terminal: what this rank does, and why."""
        does = [verb for verb, ranks in (("trains", self.train), ("generates", self.generate)) if rank in ranks]
        only = "" if len(does) == 2 else "only "
        roles = f"train {_named(self.train)}, generate {_named(self.generate)}"
        if self.context > 1 and rank in self.train:
            ranks = self.siblings(rank)
            roles += f"; distributed.context: {_named(ranks)} share sequences, led by {_named(ranks[:1])}"
        joining = "; distributed.listen: nodes that join generate" if self.listens else ""
        return f"rank {rank} {only}{' and '.join(does)} (distributed.roles: {roles}{joining})"


def _check_list(name: str, given: tuple[int, ...], ranks: int) -> None:
    if twice := sorted({rank for rank in given if given.count(rank) > 1}):
        raise ConfigError(f"distributed.roles.{name} names {_named(twice)} twice; name each rank once")
    if beyond := sorted(rank for rank in given if not 0 <= rank < ranks):
        raise ConfigError(
            f"distributed.roles.{name} names {_named(beyond)}, and the run has the ranks 0 to {ranks - 1}; name only those, or "
            "start more ranks"
        )


def _named(ranks: Iterable[int]) -> str:
    """The ranks as text: `rank 3`, or `ranks 0-2, 5`."""
    if not (numbers := sorted(ranks)):
        return "no rank"
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"


def _shown(value: int | tuple[int, ...]) -> str:
    return str(value) if isinstance(value, int) else str(list(value))
