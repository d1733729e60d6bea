"""asyncio-native runtime for reinforcement-learning post-training of language models.

The public names are those of `__all__`; they are imported on first use, so that `import asyncrl` costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config.load import load_config as load_config
    from asyncrl.config.schema import Config as Config
    from asyncrl.data.texts import CompletionText as CompletionText
    from asyncrl.data.tokenizing import encode_text as encode_text
    from asyncrl.pumps.hooks import Hooks as Hooks
    from asyncrl.runtime.notebook import NotebookRuntime as NotebookRuntime
    from asyncrl.runtime.runtime import Runtime as Runtime
    from asyncrl.types import SamplingParams as SamplingParams
    from asyncrl.types import Trajectory as Trajectory

__version__ = "0.1.0"

_PLACES = {
    "Runtime": "asyncrl.runtime.runtime",
    "NotebookRuntime": "asyncrl.runtime.notebook",
    "load_config": "asyncrl.config.load",
    "Config": "asyncrl.config.schema",
    "Hooks": "asyncrl.pumps.hooks",
    "CompletionText": "asyncrl.data.texts",
    "encode_text": "asyncrl.data.tokenizing",
    "SamplingParams": "asyncrl.types",
    "Trajectory": "asyncrl.types",
}
__all__ = [
    "CompletionText",
    "Config",
    "Hooks",
    "NotebookRuntime",
    "Runtime",
    "SamplingParams",
    "Trajectory",
    "encode_text",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"asyncrl has no attribute {name!r}; public names: {', '.join(_PLACES)}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
