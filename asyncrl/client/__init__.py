"""Send trajectories to a run from other processes of the same machine, and read the version of the run's policy.

    from asyncrl.client import Client, Scored

    with Client.attach("my-run") as client:                     # the name of the run's shared-memory ring
        for group in range(1000):
            rollouts = play(client.policy_version)              # your environment, simulator, framework
            client.push(group, [Scored(tokens=r.ids, mask=r.mask, logprobs=r.logprobs, reward=r.score) for r in rollouts])

`AsyncClient` has the same methods; `attach`, `push` and `close` are coroutines. When `push` returns, the trajectories are
accepted: they are in shared memory, and survive the death of the client or of the run. While the ring is full, `push` waits. After
`timeout` seconds `push` raises RingFull. Then nothing was pushed, except perhaps if the run has ended. When the run ends or is
stopped, the waiting or the next `push` attaches to a new run with the same ring name. If there is no such run, this `push` raises
RingDetached at once. Later calls of `push` wait for such a run, and raise RingDetached after `timeout` seconds.

This module imports only numpy and the standard library. `pip install asyncrl-client` installs it without torch (from a
checkout: `pip install ./client`). The package `asyncrl` contains this module too, so install only one of the two packages.
"""

from __future__ import annotations

from .client import AsyncClient, Client
from .scored import Scored

__all__ = ["AsyncClient", "Client", "Scored"]
