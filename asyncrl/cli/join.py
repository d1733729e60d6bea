"""`asyncrl join HOST:PORT`: this machine generates for a run that listens there (`distributed.listen`), until the run ends."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

USAGE = """\
asyncrl join HOST:PORT [a.b=value ...]: generate for the run that listens at HOST:PORT (distributed.listen), until the run ends.
The environment variable ASYNCRL_SECRET must have the same value as for the run. The run sends its configuration and the weights of
the model. This machine must have the files and the code that the configuration names. If their paths differ here, give these paths
as a.b=value. Ctrl-C and SIGTERM end this node, and the run goes on.
A node may set: """
# Settings that a node may set: its devices, processes and engine limits, and where it finds the run's files and code.
LOCAL = (
    "model.device", "threads", "generation.workers", "generation.threads", "generation.devices", "generation.tensor_parallel",
    "engine.max_sequences", "engine.kv_positions", "reward.workers", "model.path", "model.tokenizer", "data.train", "data.eval",
    "reward.functions", "rollout.environment", "hooks",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0; 2 without an address; the exit code of an error; 128 + the signal that ended this node."""
    if not arguments or arguments[0].startswith("-"):
        print(USAGE + ", ".join(LOCAL))
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    from asyncrl.main import report_errors

    return report_errors(lambda: _join(*arguments))


def _join(address: str, *overrides: str) -> int:
    from asyncrl.config.load import parse_overrides
    from asyncrl.distributed.joining import ask_to_join, require_secret
    from asyncrl.errors import ConfigError

    if not (found := re.fullmatch(r"[^\s/]+:(\d{1,5})", address)) or not 0 < int(found[1]) < 1 << 16:
        raise ConfigError(
            f"asyncrl join: the address is {address!r}; expected HOST:PORT, as the first lines of the run show it"
        )
    for name, _, typed in parse_overrides(overrides):
        if name not in LOCAL:
            raise ConfigError(f"override {typed!r}: a node that joins cannot set {name}, only {', '.join(LOCAL)}")
    secret = require_secret("asyncrl join connects with the secret of the run")
    print(f"asyncrl: joining the run at {address}", file=sys.stderr, flush=True)
    joined = asyncio.run(ask_to_join(address, secret))
    config = configuration(joined.config, overrides)
    print(f"asyncrl: this node is rank {joined.rank}; importing torch and transformers", file=sys.stderr, flush=True)
    from asyncrl.distributed.roles import Roles
    from asyncrl.distributed.world import World
    from asyncrl.main import run

    roles = Roles(joined.train, (*joined.generate, joined.rank), listens=True, context=config.distributed.context)
    return run(config, world=World(joined.rank, restart=joined.restart, roles=roles, joined=joined))


def configuration(tree: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """The configuration of this node: that of the run (`tree`), changed by `overrides`. Error messages of `load_config` show the
    name of the temporary file. Errors: ConfigError."""
    from asyncrl.config.load import load_config

    node_tree = {**tree, "resume": False, "distributed": {**tree["distributed"], "listen": None}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "configuration of the run")
        path.write_text(json.dumps(node_tree), encoding="utf-8")
        return load_config([path], overrides)
