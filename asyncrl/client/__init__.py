"""Feed a running asyncrl from any process: scored trajectories in, the policy version out.

    from asyncrl.client import Client, Scored

    with Client.attach("my-run") as client:                     # the name under which the run opened its ring
        for group in range(1000):
            rollouts = play(client.policy_version)              # your environment, simulator, framework
            client.push(group, [Scored(tokens=r.ids, mask=r.mask, logprobs=r.logprobs, reward=r.score) for r in rollouts])

`AsyncClient` is the same with `await`. `push` returned means accepted: the trajectories lie in shared memory and survive
the death of either process. A full ring makes `push` wait (RingFull at its deadline, with nothing pushed). When the run ends
or is stopped, one `push` raises RingDetached, at once also where it waits; pushing on waits for the next run of that name, to
which the client attaches by itself.

Needs numpy and the standard library, nothing else: `pip install asyncrl-client` brings this module without torch (from a
checkout: `pip install ./client`). It is part of asyncrl too; install one of the two, not both.
"""

from __future__ import annotations

from .client import AsyncClient, Client
from .scored import Scored

__all__ = ["AsyncClient", "Client", "Scored"]
