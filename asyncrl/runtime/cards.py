"""The GPUs of a machine: those that torch sees, or those that `--dry-run --assume-devices` names."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

GIB = 1 << 30
# Memory in GiB according to the data sheet, and compute capability.
KNOWN = {
    "A10": (24, (8, 6)), "A100": (80, (8, 0)), "A100-40": (40, (8, 0)), "B200": (180, (10, 0)), "H100": (80, (9, 0)),
    "H200": (141, (9, 0)), "L4": (24, (8, 9)), "L40S": (48, (8, 9)), "RTX4090": (24, (8, 9)), "T4": (16, (7, 5)),
    "V100": (32, (7, 0)),
}  # fmt: skip
# The part of a GPU's memory that tensors can use: the driver and the CUDA context take the rest.
_USABLE = 0.97


class Cards:
    """The GPUs that torch sees in this process."""

    @property
    def count(self) -> int:
        """Number of GPUs of this machine."""
        return torch.cuda.device_count()

    def describe(self, device: torch.device) -> tuple[str, tuple[int, int]]:
        """The name of a GPU and its compute capability."""
        return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)

    def memory(self, device: torch.device) -> int:
        """All bytes of a GPU, in use or not. The number is the same on all GPUs of one kind."""
        return int(torch.cuda.get_device_properties(device).total_memory)

    def free(self, device: torch.device) -> int:
        """Unused bytes of a GPU."""
        return int(torch.cuda.mem_get_info(device)[0])


@dataclass(frozen=True, slots=True)
class AssumedCards(Cards):
    """`nodes` machines with `per_node` GPUs each, of the kind `name`, a key of KNOWN. This machine need not have such a GPU."""

    nodes: int
    per_node: int
    name: str

    @classmethod
    def parse(cls, text: str) -> AssumedCards:
        """From `8xH100`, or `2x8xH100` for two machines. Errors: ConfigError."""
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(.+)", text)
        kinds = {name.lower(): name for name in KNOWN}
        if match is None or match[3].lower() not in kinds or 0 in (int(match[1] or 1), int(match[2])):
            raise ConfigError(
                f"--assume-devices is {text!r}; write COUNTxCARD or NODESxCOUNTxCARD, for example 8xH100 or 2x8xH100, with one "
                f"of the cards {', '.join(KNOWN)}"
            )
        return cls(int(match[1] or 1), int(match[2]), kinds[match[3].lower()])

    @property
    def count(self) -> int:
        return self.per_node

    def describe(self, device: torch.device) -> tuple[str, tuple[int, int]]:
        return self.name, KNOWN[self.name][1]

    def memory(self, device: torch.device) -> int:
        return KNOWN[self.name][0] * GIB

    def free(self, device: torch.device) -> int:
        return int(_USABLE * self.memory(device))

    def ranks(self, config: Config) -> int:
        """Ranks of one machine: one for each GPU that `generation.devices` does not name. Errors: ConfigError."""
        if config.train.kind != "torch" or config.model.device not in ("auto", "cuda"):
            raise ConfigError(
                f"--assume-devices is given, and train.kind is {config.train.kind} on model.device {config.model.device}, which "
                "gives no GPU to a rank; leave --assume-devices out, or set train.kind=torch model.device=auto"
            )
        taken = {name for name in config.generation.devices if name.startswith("cuda:")}
        if len(taken) >= self.per_node:
            raise ConfigError(
                f"generation.devices names {len(taken)} GPU(s), and --assume-devices gives each machine {self.per_node}: none is "
                "left to train on; name fewer GPUs in generation.devices, or more in --assume-devices"
            )
        return self.per_node - len(taken)
