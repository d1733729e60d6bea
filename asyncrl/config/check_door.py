"""Groups from outside: what their door is given, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from .http_door import key_problem
from .schema import Config


def check_door(config: Config) -> Iterator[str]:
    """What is wrong with the section `door`, a sentence each."""
    door = config.door
    if door.producer_mib >= door.ring_mib:
        yield (
            f"door.producer_mib is {door.producer_mib} and door.ring_mib {door.ring_mib}: no producer would fit; expected a "
            "ring_mib above producer_mib times the number of producers"
        )
    if door.timeout_s is None and door.on_timeout != "drop":
        yield f"door.on_timeout is {door.on_timeout} but door.timeout_s is null: that time is never up; give one"
    if door.ring is None:
        if door.http_port is not None:
            yield f"door.http_port is {door.http_port} but door.ring is not set; name the ring that it feeds"
        return
    if problem := key_problem(door.http_host, door.http_key):
        yield problem
    if door.http_port is not None and config.algorithm.router_replay:
        yield (
            f"door.http_port is {door.http_port} but algorithm.router_replay is true, and groups that are posted bring no routes "
            "of experts; leave one of them out, or push groups with asyncrl.client, whose trajectories hold routed_experts"
        )
    for name, given in (("data.train", config.data.train), ("train.max_epochs", config.train.max_epochs)):
        if given is not None:
            yield (
                f"door.ring is {door.ring} and {name} is {given}: groups come from other processes or from prompts, not from "
                "both; leave one of them out"
            )
    if config.reroll.start_fraction < 1:
        yield "reroll plays prompts again, and with door.ring there are none; leave reroll.start_fraction out"
    if (
        config.evaluate.every is not None
        and not config.reward.functions
        and not config.reward.model
        and config.rollout.environment == "single_turn"
    ):
        yield "evaluate.every is set but reward.functions is empty: nothing would score the held-out completions"
