"""asyncio-native runtime for reinforcement-learning post-training of language models.

`__all__` has the public names. A name is imported on first use, so `import asyncrl` takes little time and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.algorithms.advantages import as_rewards, of_group, of_step
    from asyncrl.algorithms.base import LossInputs, token_ratio
    from asyncrl.algorithms.losses import LossMethod, Surrogate
    from asyncrl.algorithms.method import setting
    from asyncrl.config.load import load_config
    from asyncrl.config.schema import Config
    from asyncrl.data.texts import CompletionText
    from asyncrl.data.tokenizing import encode_text
    from asyncrl.environments.sandbox import Sandbox
    from asyncrl.environments.tools import Tool
    from asyncrl.ports import Environment
    from asyncrl.pumps.hooks import Hooks
    from asyncrl.rewards.forms import whole_group
    from asyncrl.rewards.judge import Judge
    from asyncrl.runtime.runtime import NotebookRuntime, Runtime
    from asyncrl.types import Generation, GenerationRequest, Group, Normaliser, Prompt, SamplingParams, Trajectory

__version__ = "0.1.0"

_NAMES = {
    "asyncrl.algorithms.advantages": "as_rewards of_group of_step",
    "asyncrl.algorithms.base": "LossInputs token_ratio",
    "asyncrl.algorithms.losses": "LossMethod Surrogate",
    "asyncrl.algorithms.method": "setting",
    "asyncrl.config.load": "load_config",
    "asyncrl.config.schema": "Config",
    "asyncrl.data.texts": "CompletionText",
    "asyncrl.data.tokenizing": "encode_text",
    "asyncrl.environments.sandbox": "Sandbox",
    "asyncrl.environments.tools": "Tool",
    "asyncrl.ports": "Environment",
    "asyncrl.pumps.hooks": "Hooks",
    "asyncrl.rewards.forms": "whole_group",
    "asyncrl.rewards.judge": "Judge",
    "asyncrl.runtime.runtime": "NotebookRuntime Runtime",
    "asyncrl.types": "Generation GenerationRequest Group Normaliser Prompt SamplingParams Trajectory",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [
    "CompletionText", "Config", "Environment", "Generation", "GenerationRequest", "Group", "Hooks", "Judge", "LossInputs",
    "LossMethod", "Normaliser", "NotebookRuntime", "Prompt", "Runtime", "SamplingParams", "Sandbox", "Surrogate", "Tool",
    "Trajectory", "as_rewards", "encode_text", "load_config", "of_group", "of_step", "setting", "token_ratio", "whole_group",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"asyncrl has no attribute {name!r}; public names: {', '.join(_MODULE_OF)}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
