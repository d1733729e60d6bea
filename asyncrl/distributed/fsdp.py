"""FSDP2: one model's masters (the weights that the optimizer updates), gradients and optimizer state, sharded over ranks.

`torch.distributed.fsdp.fully_shard` shards each block, and then the root, which has the remaining parameters. FSDP2's division of
gradients by the number of ranks is switched off: the trainer divides by the loss denominator, known only at the end of a step.

    a block's        by default: for each microbatch        keep=True: for each step
    weights          gathered (in the compute dtype)        gathered after the optimizer step, and kept by every rank
                     before its forward and its backward
    gradients        reduce-scattered after its backward    added up on each rank, then reduce-scattered once (`reduce_`)

By default every forward and every backward of the root runs collectives. So all ranks must run the same number of forwards and
backwards, in the same order. A rank without work runs a microbatch of weight 0 (training/sharded.py).

    rank r of W holds rows [r c, (r + 1) c) of a parameter with n rows, c = ceil(n / W): `torch.chunk`'s cut, so the last
    ranks may hold fewer rows, or none

With `shards` below the number of ranks (HSDP), W = `shards` consecutive ranks hold one copy of the model. Gradients are summed over
all ranks, so over all copies.

The gradients of this rank's rows lie in one flat buffer. The `.grad` of each parameter is a view of this buffer, because FSDP2 adds
into an existing `.grad`. See Zhao et al., "PyTorch FSDP" (arXiv:2304.11277), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .collectives import NO_TIMEOUT, Collectives


def rows(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """The range [first, end) of the rows that `rank` holds, of a parameter with `count` rows."""
    per_rank = -(-count // ranks)
    return min(rank * per_rank, count), min((rank + 1) * per_rank, count)


class ShardedParameters:
    """Owns the shards of a module's parameters, and changes the module in place. Use it only on the lane, the device's thread.

    `grad`: this rank's gradients, one buffer in the master dtype. `ranks`: the number of ranks that hold one copy of the model
    together. `rank`: the index of this rank among them. `replica`: the index of their copy.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Sequence[nn.Module],
        device: torch.device,
        compute: torch.dtype,
        prefix: str = "",
        frozen: frozenset[str] = frozenset(),
        *,
        collectives: Collectives,
        shards: int | None = None,
        keep: bool = False,
    ) -> None:
        """`root`: with full weights in any dtype, on the host or on `device`; only its forward may be called from now on. `blocks`:
        the parts that are gathered one at a time. `compute`: dtype of the matrix products. `prefix`: removed from the names.
        `frozen`: names of weights that are not trained. `collectives`: of the ranks that train. `shards`: number of ranks that hold
        one copy of the model, a divisor of the number of ranks; None: all. `keep`: see the table in the module docstring.

        A collective. Errors: ValueError without a process group, even for a single rank.
        """
        self._collectives, group = collectives, collectives.group or dist.group.WORLD
        members = dist.get_process_group_ranks(group)
        assert group is not None
        self.ranks = shards or len(members)
        self.replica, self.rank = divmod(members.index(dist.get_rank()), self.ranks)
        self.keep, self.frozen = keep, frozen
        named = list(root.named_parameters())  # tied parameters once
        self.names = [name.removeprefix(prefix) for name, _ in named]
        self.shapes = [tuple(parameter.shape) for _, parameter in named]
        self.numel = sum(parameter.numel() for _, parameter in named)
        self.master_dtype = torch.float64 if compute == torch.float64 else torch.float32
        self.device = device
        names = {id(parameter): name for name, (_, parameter) in zip(self.names, named, strict=True)}
        full_names = [name for name, _ in named]
        # `named` would keep all full weights alive. After this `del`, `_shard` frees the full weights of each block in turn.
        del named
        self._mesh = _mesh(group, torch.tensor(members).view(-1, self.ranks), device.type)
        self._parts = _shard(root, blocks, device, self._mesh, compute, names, collectives)
        self._root: FSDPModule = root  # type: ignore[assignment]  # fully_shard changes its class in place
        sharded = dict(root.named_parameters())
        self._parameters: list[DTensor] = [sharded[name] for name in full_names]  # type: ignore[misc]  # DTensors since _shard
        with torch.no_grad():
            self._masters = [parameter.to_local() for parameter in self._parameters]
        self.grad, self._grads = _views([master.shape for master in self._masters], self.master_dtype, device)
        self._whole: Tensor | None = None
        if keep:
            self._keep_gathered()
        self.zero_grad()

    def _keep_gathered(self) -> None:
        """Gather all weights, and make every backward add into whole gradients on this rank. A collective."""
        self._whole, views = _views(self.shapes, self.master_dtype, self.device)
        self._whole_grads = dict(zip(self.names, views, strict=True))
        self._root.set_requires_gradient_sync(False)
        self._root.set_reshard_after_forward(False)
        self._root.set_reshard_after_backward(False)
        self._gather_kept()
        for _, owned in self._parts:
            for name, owner, leaf in owned:
                getattr(owner, leaf).register_post_accumulate_grad_hook(_adder(self._whole_grads[name]))

    def zero_grad(self) -> None:
        """Fill `grad` with zeros and bind its views to the parameters, so that FSDP2 adds into them."""
        self.grad.zero_()
        if self._whole is not None:
            self._whole.zero_()
        for parameter, local in zip(self._parameters, self._grads, strict=True):
            parameter.grad = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )

    def reduce_(self) -> None:
        """With `keep`: sum the whole gradients over all ranks, and write this rank's rows of the sums into `grad`. Each part takes
        one collective, or two if there are several copies of the model."""
        shards = self._mesh.get_group(self._mesh.ndim - 1)
        views = dict(zip(self.names, self._grads, strict=True))
        for _, owned in self._parts:
            whole = [_by_rank(self._whole_grads[name], self.ranks) for name, _, _ in owned]
            own = torch.empty(sum(each.shape[1] for each in whole), dtype=self.master_dtype, device=self.device)
            whole_by_rank = torch.cat(whole, dim=1).view(-1)
            self._collectives.reduce_scatter_(own, whole_by_rank, shards)
            if self._mesh.ndim == 2:
                self._collectives.reduce_gradients_(own, self._mesh.get_group(0))
            for (name, _, _), values in zip(owned, own.split([each.shape[1] for each in whole]), strict=True):
                views[name].copy_(values[: views[name].numel()].view(views[name].shape))

    def zero_frozen(self) -> None:
        """Zero the gradients of weights that are not trained."""
        for name, gradient in self.named_grads():
            if name in self.frozen:
                gradient.zero_()

    def reset(self) -> None:
        """After a forward or backward that raised: wait for its collectives and drop them. Gradients are not zeroed. A no-op before
        torch 2.13, which brought `reset_iter_state`: with an earlier torch the next forward may fail."""
        getattr(self._root, "reset_iter_state", lambda: None)()

    def release(self) -> None:
        """Drop every reference to the process group; masters and gradients stay. Call it before this rank leaves its world. A group
        that has references keeps its connections open. Then a rank that waits for this rank in a collective goes on waiting.

        The names below are private to torch. If torch renames them, the connections close when this process ends.
        """
        for part, _ in self._parts:
            group = getattr(part._get_fsdp_state(), "_fsdp_param_group", None)  # None: no parameters
            for info in (group.mesh_info, group.post_forward_mesh_info) if group else ():
                if info is not None:
                    info.shard_process_group = info.replicate_process_group = None
        getattr(self._mesh, "_pg_registry", {}).clear()

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's rows of the master) for each parameter. A rank may have no rows of a parameter."""
        yield from zip(self.names, self._masters, strict=True)

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's rows of the gradient) for each parameter. The rows are views of `grad`."""
        yield from zip(self.names, self._grads, strict=True)

    def local(self, full: Tensor) -> Tensor:
        """This rank's rows of a tensor with the shape of a whole parameter. A view."""
        first, end = rows(full.shape[0], self.rank, self.ranks)
        return full[first:end]

    def load_masters(self, state: Mapping[str, Tensor]) -> None:
        """Set the masters from whole tensors. With `keep` a collective. Errors: KeyError for a missing name or a wrong shape."""
        for name, shape, master in zip(self.names, self.shapes, self._masters, strict=True):
            full = state[name]
            if tuple(full.shape) != shape:
                raise KeyError(f"{name} has shape {tuple(full.shape)} in the state, not {shape}")
            master.copy_(self.local(full))
        if self.keep:
            self._gather_kept()

    def _gather_kept(self) -> None:
        for part, _ in self._parts:
            part.reshard()
            part.unshard()

    @torch.no_grad()
    def gather(self, write: Callable[[str, Tensor], None]) -> None:
        """Call `write(name, whole values in the compute dtype)` for every parameter, block by block. A collective."""
        for part, owned in self._parts:
            if self.keep:
                # Gather anew: the kept weights may be older than the last optimizer step.
                part.reshard()
            part.unshard()
            try:
                for name, owner, leaf in owned:
                    write(name, getattr(owner, leaf).detach())
            finally:
                if not self.keep:
                    part.reshard()


def _mesh(group: dist.ProcessGroup, grid: Tensor, device: str) -> DeviceMesh:
    """The mesh for FSDP2. `grid`: the ranks of `group`, [copies of the model, ranks of a copy]. A collective."""
    if len(grid) == 1:
        return DeviceMesh.from_group(group, device)
    rank = dist.get_rank()
    row_and_column = [next(ranks for ranks in lists if rank in ranks) for lists in (grid.tolist(), grid.T.tolist())]
    # Local synchronization: ranks outside of `group`, which only generate, need not take part.
    groups: list[Any] = [
        dist.new_group(each, use_local_synchronization=True, timeout=NO_TIMEOUT) for each in row_and_column
    ]
    return DeviceMesh.from_group(groups[::-1], device, mesh=grid, mesh_dim_names=("copy", "shard"))


def _views(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """(a buffer of zeros, views of it with these shapes, which cover the buffer in order)."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
    return buffer, [part.view(shape) for part, shape in zip(buffer.split(sizes), shapes, strict=True)]


def _adder(target: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds the gradient of a gathered parameter to `target`, and then frees the gradient."""

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        target.add_(parameter.grad)
        parameter.grad = None

    return add


def _by_rank(full: Tensor, ranks: int) -> Tensor:
    """The rows of each rank, padded with zeros to one length: [ranks, elements]."""
    padded_rows = rows(full.shape[0], 0, ranks)[1] * ranks
    padding = full.new_zeros(padded_rows - full.shape[0], *full.shape[1:])
    return torch.cat([full, padding]).view(ranks, -1)


def _shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device,
    mesh: DeviceMesh,
    compute: torch.dtype,
    names: Mapping[int, str],  # id of a parameter -> name
    collectives: Collectives,
) -> list[tuple[FSDPModule, list[tuple[str, nn.Module, str]]]]:
    """Shard all parts, with the weights of rank 0. Returns each part with the (name, module, attribute) of its parameters."""
    master = torch.float64 if compute == torch.float64 else torch.float32
    # Inputs are not cast, because some are temperatures. Gradients are summed in the master dtype.
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute, reduce_dtype=master, cast_forward_inputs=False
    )
    parts: list[tuple[Any, list[tuple[str, nn.Module, str]]]] = []  # `fully_shard` makes each module an FSDPModule
    seen: set[int] = set()
    for part in (*blocks, root):
        owned = []
        for module in part.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in seen and id(parameter) in names:
                    seen.add(id(parameter))
                    owned.append((names[id(parameter)], module, leaf))
        parts.append((part, owned))
    for part, owned in parts:
        for _, module, leaf in owned:
            parameter = getattr(module, leaf)
            # Cast on the device, a block at a time. Buffers keep their dtype: rotary tables stay as they were computed.
            if collectives.rank == 0:
                full = parameter.data.to(device).to(master).contiguous()
            else:
                full = torch.empty(parameter.shape, dtype=master, device=device)
            parameter.data = collectives.broadcast_(full)
        fully_shard(part, mesh=mesh, mp_policy=policy)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums
    return parts
