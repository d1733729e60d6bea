"""One rank of the sharded train step: `python training_sharded.py RANK WORLD PORT OUT`.

A line on stdin is one case: `{"where": [[rank, microbatch], ...], "rounds": [[n, ...] per rank], ...}` (see `Case`). The answer
is the file `OUT/RANK.pt`, then a line on stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from training_helpers import MAX_LENGTH, everything, make_group, tiny_module, train_step, with_columns, with_routes
from training_partition import groups, part

from asyncrl.algorithms.base import Loss
from asyncrl.algorithms.registry import build_loss
from asyncrl.checkpoint.manifest import STATE
from asyncrl.checkpoint.shards import join_shards
from asyncrl.config.schema import LoraConfig, TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.distributed.world import SomeRanks, World
from asyncrl.errors import ConfigError, DataError, DivergenceError
from asyncrl.models.paths import FUSED, PACKED, PLAIN
from asyncrl.models.policy import PolicyModel
from asyncrl.pumps.building import microbatch_of_counts
from asyncrl.training.passes import forward_routes
from asyncrl.training.sharded import ShardedTrainer
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import Microbatch


@dataclass
class Case:
    name: str = "grpo"  # of the loss, every term on
    seed: int = 7
    where: list[list[int]] = field(default_factory=list)  # by sequence: [rank, microbatch]
    rounds: list[int] = field(default_factory=list)  # before which of its microbatches each rank comes to a round
    kind: str = "llama"
    tied: bool = True
    checkpointing: bool = False
    dtype: str = "float64"
    steps: int = 2
    silent: list[int] = field(default_factory=list)  # by rank: groups without advantages, counted and not run
    routes: bool = False  # recorded ones of experts
    shards: int | None = None  # ranks that hold one copy of the model
    keep: bool = False  # weights stay gathered, gradients are reduced once
    # After the first step the state is saved and loaded by a trainer with these values of `shards` and `keep`.
    then: list[Any] | None = None
    flat: bool = False  # not sharded: every rank has all masters
    # Before this step one bit of a master flips on this rank, in the last element: [rank, step, tensor].
    flip: list[Any] | None = None
    plain: bool = False  # every term of the loss is a multiple of the advantage
    context: int = 1  # ranks that share each microbatch; `where` names their sets
    path: str | None = None
    lora: int = 0  # the rank of adapters
    spoilt: str = ""  # one token has an unknown "token" or "route"
    few: bool = False  # each sequence has two tokens
    counted: bool = False  # collectives are counted, for which torch calls Python at each operation
    surveyed: bool = False
    lr: float = 0.01
    eps: float = 1e-8  # of AdamW

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def silent_groups(count: int, rank: int, run: bool) -> list[Microbatch]:
    rng = np.random.default_rng(100 + rank)
    groups = [make_group(rng, 50 + 10 * rank + i) for i in range(count)]
    if run:
        return [with_columns(b) for b in pack_groups([(group, 0 * values) for group, values in groups], 10_000)]
    return [microbatch_of_counts([group for group, _ in groups])] if groups else []


def few_tokens(case: Case, rank: int) -> list[Microbatch]:
    """Microbatches of one token for the forward, and of two: a group whose members share the prompt of one token, and two."""
    pairs = []
    for group, advantages in groups(case.seed)[:2]:
        short = tuple(
            replace(
                t, prompt_length=1, mask=np.array([False, True]),
                **{name: getattr(t, name)[t.prompt_length - 1 :][:2] for name in ("tokens", "logprobs", "sampled_logprobs")},
                versions=np.array([-1, 0], np.int32),
            )
            for t in group.trajectories
        )  # fmt: skip
        pairs.append((replace(group, trajectories=short), advantages))
    chunks = [pairs[:1], pairs] if rank == 0 else [pairs[1:]]
    return [with_columns(batch) for chunk in chunks for batch in pack_groups(chunk, 1000)]


def batches_of(case: Case, rank: int, run_all: bool = False) -> list[Microbatch]:
    mine = part(case.seed, case.where, rank) if not case.few else few_tokens(case, rank)
    mine = [with_routes(batch) for batch in mine] if case.routes else mine
    if case.spoilt == "token":
        mine[0].tokens[1] = 10**6
    elif case.spoilt:
        mine[0].routes[1, 0] = 100
    return [*mine, *silent_groups(case.silent[rank] if case.silent else 0, rank, run_all)]


def loss_of(case: Case) -> Loss:
    if case.surveyed:
        return everything(case.name, top=0.4)
    return build_loss(case.name) if case.plain else everything(case.name, entropy_coef=0.0)


def policy_of(case: Case, served: bool = False) -> PolicyModel:
    path = next((path for path in (FUSED, PACKED, *PLAIN) if path.name == case.path), None)
    lora = LoraConfig(rank=case.lora, alpha=5) if case.lora else None
    return PolicyModel(tiny_module(case.kind, case.tied), case.dtype, served=served, path=path, lora=lora)


def settings(case: Case) -> TrainConfig:
    return TrainConfig(
        lr=case.lr, eps=case.eps, weight_decay=0.1, grad_clip=0.05, gradient_checkpointing=case.checkpointing
    )


def replicate(case: Case, run_all: bool = False) -> dict[str, Any]:
    """The same step on one rank that holds everything, with the flat layout. `run_all`: groups without advantages, too."""
    trainer = make_flat(None, case)
    policy = trainer.policy
    ranks = range(len(case.silent) or 1 + max(rank for rank, _ in case.where))
    batches = [batch for rank in ranks for batch in batches_of(case, rank, run_all)]
    numbers, before = [], exact_logprobs(trainer, batches)
    for _ in range(case.steps):
        numbers.append(summary(train_step(trainer, batches, loss_of(case))))
    return {
        "numbers": numbers,
        "gradient": {name: grad.clone() for name, grad in policy.flat.named_grads()},
        "masters": {name: master.clone() for name, master in policy.flat.named_masters()},
        "logprobs": [trainer.compute_logprobs(batch) for batch in batches if batch.scored],
        "exact": [before, exact_logprobs(trainer, batches)],
        "optimizer": trainer.optimizer.state_dict(),
    }


KEPT = ("version", "loss", "grad_norm", "tokens", "sequences")  # by a skip; means of metrics are over what was run


def summary(result: Any) -> dict[str, float]:
    return {f"step/{name}": float(getattr(result, name)) for name in KEPT} | result.metrics


SETS: dict[int, SomeRanks] = {}  # of this rank, by their size


def siblings(world: World | None, case: Case) -> SomeRanks | None:
    size = case.context
    if world is None or size == 1:
        return None
    if size not in SETS:
        sets = [tuple(range(first, first + size)) for first in range(0, world.world_size, size)]
        groups = [dist.new_group(list(ranks)) for ranks in sets]
        SETS[size] = SomeRanks(world, groups[world.rank // size], sets[world.rank // size])
    return SETS[size]


def make_sharded(world: Any, case: Case) -> ShardedTrainer:
    return ShardedTrainer(
        policy_of(case, served=True),
        tiny_module(case.kind, case.tied),
        settings(case),
        world,
        max_completion_length=MAX_LENGTH,
        shards=case.shards,
        keep=case.keep,
        siblings=siblings(world, case),
    )


@torch.no_grad()
def exact_logprobs(trainer: TorchTrainer, batches: list[Microbatch]) -> list[torch.Tensor]:
    """Not rounded to float32."""
    routing, ranks = trainer.policy.routing, trainer.siblings
    return [
        trainer.forward(batch, routes=forward_routes(batch, routing, ranks))[0] for batch in batches if batch.scored
    ]


class CollectiveCount(TorchDispatchMode):
    """Counts collectives by name, those of FSDP2 too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def make_flat(world: Any, case: Case) -> TorchTrainer:
    ranks = siblings(world, case)
    return TorchTrainer(policy_of(case), settings(case), world, max_completion_length=MAX_LENGTH, siblings=ranks)


def reopened(world: Any, case: Case, trainer: ShardedTrainer, out: Path) -> ShardedTrainer:
    """A trainer with the cut of `case.then` and the state of `trainer`, by way of the files of a checkpoint."""
    assert case.then is not None
    state = trainer.state_dict()
    (out / STATE).mkdir(exist_ok=True)
    if world.rank < trainer.shards:
        torch.save(state, out / STATE / f"shard_{world.rank}.pt")
    world.all_gather_bytes(b"written")
    first = torch.load(out / STATE / "shard_0.pt", weights_only=True)
    other = make_sharded(world, replace(case, shards=case.then[0], keep=case.then[1]))
    other.load_state_dict(join_shards(out, first))
    world.all_gather_bytes(b"read")
    return other


def sharded(world: Any, case: Case, rank: int, out: Path) -> dict[str, Any]:
    trainer: Any = make_sharded(world, case) if not case.flat else make_flat(world, case)
    batches = batches_of(case, rank // case.context)
    numbers, collectives, before = [], [], exact_logprobs(trainer, batches)
    for step in range(case.steps):
        if step == 1 and case.then is not None:
            trainer = reopened(world, case, trainer, out)
        if case.flip is not None and case.flip[:2] == [rank, step]:
            dict(trainer.parameters.named_masters())[case.flip[2]].view(-1)[-1:].view(torch.int64).bitwise_xor_(1)
        if case.surveyed:
            numbers.append(summary(train_step(trainer, batches, loss_of(case))))
            continue
        with CollectiveCount() if case.counted else contextlib.nullcontext(CollectiveCount()) as counter:
            trainer.begin_train_step(loss_of(case))
            for number, batch in enumerate(batches):
                for _ in range(case.rounds.count(number)):
                    trainer.train_round()
                trainer.train_microbatch(batch)
            for _ in [at for at in case.rounds if at >= len(batches)]:
                trainer.train_round()
            numbers.append(summary(trainer.finish_train_step()))
        collectives.append(dict(counter.counts))
    parameters, served = trainer.parameters, trainer.policy.flat
    return {
        "numbers": numbers,
        "collectives": collectives,
        "gradient": {name: grad.clone() for name, grad in parameters.named_grads()},
        "masters": {name: master.clone() for name, master in parameters.named_masters()},
        "served": {name: values.clone() for name, values in served.named_masters()},
        "logprobs": [trainer.compute_logprobs(batch) for batch in batches if batch.scored],
        "exact": [before, exact_logprobs(trainer, batches)],
        "optimizer": trainer.state_dict()["optimizer"],
    }


def main() -> None:
    rank, size, port, out = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with World.from_env(os.environ).open(torch.device("cpu"), timeout_s=60, single_rank_group=True) as world:
        for line in sys.stdin:
            case = Case(**json.loads(line))
            try:
                found = sharded(world, case, int(rank), Path(out))
            except (DivergenceError, DataError, ConfigError) as error:
                found = {"error": str(error)}
            torch.save(found, Path(out) / f"{rank}.pt")
            print("done", flush=True)


if __name__ == "__main__":
    main()
