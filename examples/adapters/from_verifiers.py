"""An environment of verifiers as an episode (verifiers 0.4, `verifiers.v1`).

    vf.load_environment(config)   ->   rows, episode = from_verifiers(lambda: vf.load_environment(config))

The environment's harness talks to `policy.base_url`, so the run records every token of any harness. Each episode makes its own
environment and closes it at the end.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from statistics import fmean
from typing import Any

import verifiers.v1 as vf


def from_verifiers(make: Callable[[], vf.Env[Any]]) -> tuple[Callable[[], list[dict[str, Any]]], Any]:
    """(function for `data.train`, episode)."""
    tasks = list(make().taskset)

    def rows() -> list[dict[str, Any]]:
        return [{"prompt": task.data.prompt_text or "-", "number": number} for number, task in enumerate(tasks)]

    async def episode(task: dict[str, Any], policy: Any) -> float:
        # verifiers reads a key from an environment variable.
        variable = f"EPISODE_{secrets.token_hex(8)}_API_KEY"
        os.environ[variable] = policy.api_key
        try:
            environment = make()
            client = vf.EvalClientConfig(base_url=policy.base_url, api_key_var=variable)
            async with environment.serving():
                played = await environment.run_episode(tasks[task["number"]], vf.ModelContext("policy", client))
        finally:
            del os.environ[variable]
        if not played.ok:
            errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            raise RuntimeError(f"verifiers: {errors[-1].type}: {errors[-1].message}")
        trained = [trace for trace in played.traces if trace.agent.trainable]
        for name in {name for trace in trained for name in trace.metrics}:
            values = [trace.metrics[name] for trace in trained if trace.metrics.get(name) is not None]
            if values:
                policy.note(name, fmean(values))
        return fmean(trace.reward for trace in trained)

    return rows, episode
