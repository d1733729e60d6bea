"""The policy of a process that only generates, made without its weights: they lie on the weight board, and what a model has beside
them (buffers, what it does around its head) another process says that has loaded it.

The modules are built on the meta device, from the configuration alone. A model that cannot be completed so (a module that keeps
tensors which are neither parameters nor buffers, say) is loaded as everywhere else.
"""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError, first_line

from .head.output import HeadTransform
from .loading import describe_module, hold_rotary, load_reader
from .outputs import fixed_logprobs
from .parameters.layout import Layout
from .paths import ModelPath
from .policy import DTYPES, PolicyModel

logger = logging.getLogger("asyncrl.models")

_MOST_BYTES = 4 << 20  # of all buffers: they travel in a message


def describe_rest(policy: PolicyModel) -> dict[str, Any] | None:
    """What a model has beside its weights, as JSON takes it; None: too much for a message, so it has to be loaded."""
    buffers = dict(policy.module.named_buffers(remove_duplicate=False))
    if sum(buffer.nbytes for buffer in buffers.values()) > _MOST_BYTES:
        return None
    return {
        "buffers": {name: _to_text(buffer) for name, buffer in buffers.items()},
        "transform": asdict(policy.transform),
    }


def _to_text(tensor: Tensor) -> list[Any]:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64.b64encode(data.tobytes()).decode()]


def _from_text(text: list[Any]) -> Tensor:
    dtype, shape, data = text
    values = np.frombuffer(bytearray(base64.b64decode(data)), np.uint8)
    return torch.from_numpy(values).view(getattr(torch, dtype)).view(shape)


class Outline:
    """A model on the meta device, to be completed."""

    def __init__(self, config: ModelConfig) -> None:
        """Errors: ConfigError where it cannot be built."""
        self.config = config
        self.module = describe_module(config)
        self.layout = Layout.of(self.module.named_parameters())

    def digest(self) -> str:
        """As `FlatWeights.layout_digest` of the policy."""
        return self.layout.digest(DTYPES[self.config.dtype])

    def complete(
        self, half: Tensor, rest: Mapping[str, Any] | None, path: ModelPath, longest: int
    ) -> PolicyModel | None:
        """The policy, whose weights are a copy of what lies in `half` now, of whatever version, or of two: it is to be moved to the
        board before it samples. `rest`: see `describe_rest`. None: it has to be loaded."""
        if rest is None or _other_tensors(self.module):
            return None
        buffers = {name: _from_text(text).to(half.device) for name, text in rest["buffers"].items()}
        if not dict(self.module.named_buffers(remove_duplicate=False)).keys() <= buffers.keys():
            return None
        _set_parameters(self.module, dict(self.layout.views(half)))
        _set_buffers(self.module, buffers)
        hold_rotary(self.module, longest)
        _set_buffers(self.module, buffers)
        policy = PolicyModel(
            self.module, self.config.dtype, head_kernel="torch", served=True, path=path,
            transform=HeadTransform(**rest["transform"]),
        )  # fmt: skip
        return policy if all(map(math.isfinite, fixed_logprobs(policy))) else None


def open_reader(
    outline: Outline, half: Tensor, rest: Mapping[str, Any] | None, path: ModelPath, longest: int, seed: int
) -> PolicyModel:
    """Completed, or loaded. `seed`: for random weights. Errors: ConfigError."""
    try:
        policy = outline.complete(half, rest, path, longest)
    except (ConfigError, RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, KeyError) as error:
        # Its modules need more than was said of them: whatever they raise, they are loaded.
        policy = None
        logger.warning("the weights are loaded, though the board has them: %s", first_line(error))
    return policy or load_reader(outline.config, half.device, seed, path, longest)


def _other_tensors(module: PreTrainedModel) -> bool:
    return any(isinstance(value, Tensor) for part in module.modules() for value in vars(part).values())


def _set_parameters(module: nn.Module, views: Mapping[str, Tensor]) -> None:
    """Matrices read `views` where they lie; vectors are float32 copies, because norms are compared in that. Tied ones stay so."""
    given = {
        id(parameter): nn.Parameter(view.float() if view.ndim < 2 else view, requires_grad=False)
        for (name, parameter), view in ((pair, views[pair[0]]) for pair in module.named_parameters())
    }
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = given[id(parameter)]


def _set_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        place, _, own = name.rpartition(".")
        part = module.get_submodule(place)
        if own in part._buffers:
            part._buffers[own] = buffer.clone()
        else:
            part.register_buffer(own, buffer.clone(), persistent=False)
