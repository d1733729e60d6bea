"""Send scored trajectories to a running asyncrl from any process, and read the version of its policy.

    from asyncrl.client import Client, Scored

    with Client.attach("my-run") as client:                     # the name of the run's ring
        for group in range(1000):
            rollouts = play(client.policy_version)              # your environment, simulator, framework
            client.push(group, [Scored(tokens=r.ids, mask=r.mask, logprobs=r.logprobs, reward=r.score) for r in rollouts])

`AsyncClient` has the same methods with `await`. When `push` returns, the trajectories are accepted: they are in shared
memory and survive the death of either process. While the ring is full, `push` waits. After `timeout` seconds `push` raises
RingFull, and nothing was pushed. When the run ends or is stopped, a `push` that waits, or else the next `push`, raises
RingDetached at once. A later `push` waits for the next run of the same name and attaches to that run.

The module needs numpy and the standard library alone. `pip install asyncrl-client` installs it without torch (from a
checkout: `pip install ./client`). asyncrl contains the module too, so install only one of the two packages.
"""

from __future__ import annotations

from .client import AsyncClient, Client
from .scored import Scored

__all__ = ["AsyncClient", "Client", "Scored"]
