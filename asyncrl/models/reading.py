"""Builds the policy of a worker (a process that only generates), if possible without reading weight files.

The modules are built on the meta device from the configuration. The weights come from the weight board: two halves of memory, of
which workers read one while the trainer writes the other. The trainer's process sends the buffers and the transform of the logits.
A model that has tensors besides parameters and buffers is loaded from its files.
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

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError, first_line

from .head.output import HeadTransform
from .loading import describe_module, hold_rotary, load_reader
from .outputs import fixed_logprobs
from .parameters.layout import Layout
from .paths import ModelPath
from .policy import DTYPES, PolicyModel

logger = logging.getLogger("asyncrl.models")

# The buffers are sent in one message, which must not be large.
_MAX_BUFFER_BYTES = 4 << 20


def describe_extras(policy: PolicyModel) -> dict[str, Any] | None:
    """Buffers and logits transform of the model as JSON values. None if the buffers are too large for a message."""
    buffers = dict(policy.module.named_buffers(remove_duplicate=False))
    if sum(buffer.nbytes for buffer in buffers.values()) > _MAX_BUFFER_BYTES:
        return None
    return {
        "buffers": {name: _to_json(buffer) for name, buffer in buffers.items()},
        "transform": asdict(policy.transform),
    }


def _to_json(tensor: Tensor) -> list[Any]:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64.b64encode(data.tobytes()).decode()]


def _from_json(fields: list[Any]) -> Tensor:
    dtype, shape, data = fields
    values = np.frombuffer(bytearray(base64.b64decode(data)), np.uint8)
    return torch.from_numpy(values).view(getattr(torch, dtype)).view(shape)


class ModelSkeleton:
    """A model on the meta device. `complete` turns the model into a policy."""

    def __init__(self, config: ModelConfig) -> None:
        """Errors: ConfigError if the model cannot be built from its configuration."""
        self.config = config
        self.module = describe_module(config)
        self.layout = Layout.of(self.module.named_parameters())

    def digest(self) -> str:
        """Equal to `FlatWeights.layout_digest` of the completed policy."""
        return self.layout.digest(DTYPES[self.config.dtype])

    def complete(
        self, half: Tensor, extras: Mapping[str, Any] | None, path: ModelPath, longest: int
    ) -> PolicyModel | None:
        """A policy for sequences of at most `longest` tokens, or None if the model must be loaded from its files.

        `half` is one half of the weight board. The trainer may be writing to it, so the weights can be a mixture of two versions.
        The caller must call `policy.flat.move_to` before the policy samples. `extras`: the result of `describe_extras`."""
        values = (value for part in self.module.modules() for value in vars(part).values())
        if extras is None or any(isinstance(value, Tensor) for value in values):
            return None
        buffers = {name: _from_json(fields).to(half.device) for name, fields in extras["buffers"].items()}
        if not dict(self.module.named_buffers(remove_duplicate=False)).keys() <= buffers.keys():
            return None
        _set_parameters(self.module, dict(self.layout.views(half)))
        # `hold_rotary` runs the rotary modules, which need real buffers and overwrite them. So the buffers are set twice.
        _set_buffers(self.module, buffers)
        hold_rotary(self.module, longest)
        _set_buffers(self.module, buffers)
        policy = PolicyModel(
            self.module, self.config.dtype, head_kernel="torch", served=True, path=path,
            transform=HeadTransform(**extras["transform"]),
        )  # fmt: skip
        # Infinite log-probs or NaN mean that the module needs more than its parameters and buffers.
        return policy if all(map(math.isfinite, fixed_logprobs(policy))) else None


def open_reader(
    skeleton: ModelSkeleton, half: Tensor, extras: Mapping[str, Any] | None, path: ModelPath, longest: int, seed: int
) -> PolicyModel:
    """The result of `skeleton.complete`, or the model loaded from its files. `seed`: for random weights. Errors: ConfigError."""
    try:
        policy = skeleton.complete(half, extras, path, longest)
    except (ConfigError, RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, KeyError) as error:
        # A class of transformers may need more than parameters and buffers, and may then raise any of these errors.
        policy = None
        logger.warning("cannot build the model without its files, so the weights are loaded: %s", first_line(error))
    return policy or load_reader(skeleton.config, half.device, seed, path, longest)


def _set_parameters(module: nn.Module, views: Mapping[str, Tensor]) -> None:
    """Replaces each matrix by its view and each vector by a float32 copy. `PolicyModel` copies all of them to a flat buffer."""
    replacements: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        view = views[name]
        replacements[id(parameter)] = nn.Parameter(view.float() if view.ndim < 2 else view, requires_grad=False)
    # Tied parameters are one object in several modules.
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None:
                part._parameters[name] = replacements[id(old)]


def _set_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        owner, _, buffer_name = name.rpartition(".")
        part = module.get_submodule(owner)
        if buffer_name in part._buffers:
            part._buffers[buffer_name] = buffer.clone()
        else:
            part.register_buffer(buffer_name, buffer.clone(), persistent=False)
