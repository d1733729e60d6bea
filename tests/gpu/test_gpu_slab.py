"""The slab on a card: two processes, one device. Skipped without CUDA; run with `pytest -m gpu`."""

from __future__ import annotations

import gc

import pytest
import torch
from transport_helpers import line, living, own_name

from asyncrl.errors import OutOfMemory, PlatformError
from asyncrl.transport.memory.slab import Slab
from asyncrl.transport.memory.slab_cuda import CudaMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LOOK = """
import sys
from asyncrl.transport.memory.slab import Slab

with Slab.attach(sys.argv[1]) as slab:
    tensor = slab.tensor()
    print(int(tensor.sum()), flush=True)
    tensor += 1
    print(int(tensor.sum()), flush=True)
    del tensor
"""

EXPANDABLE = """
import sys
import torch
from asyncrl.transport.memory.slab import Slab

torch.zeros(1 << 22, device="cuda")
with Slab.create(sys.argv[1], 1 << 20) as slab:
    tensor = slab.tensor()[:64].view(torch.float32)
    tensor.fill_(2)
    print(float(tensor.sum()), flush=True)
"""


name = pytest.fixture(own_name, name="name")


def test_another_process_reads_and_writes_the_memory(name: str) -> None:
    with Slab.create(name, 1 << 20) as slab:
        slab.tensor().fill_(3)
        torch.cuda.synchronize()
        with living(LOOK, name) as process:
            assert [line(process), line(process)] == [str(3 << 20), str(4 << 20)] and process.wait(60) == 0
        assert slab.tensor().eq(4).all()


def test_a_slab_works_with_expandable_segments(name: str) -> None:
    with living(EXPANDABLE, name, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as process:
        assert line(process) == "32.0"
        assert process.wait(60) == 0


def test_the_memory_goes_with_the_last_tensor_and_too_much_is_refused(name: str) -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    size = 1 << 28
    before = torch.cuda.mem_get_info()[0]
    slab = Slab.create(name, size)
    tensor = slab.tensor()[: 1 << 20].view(torch.float32)
    slab.close()
    gc.collect()
    tensor.fill_(1)
    assert tensor.sum().item() == 1 << 18
    assert torch.cuda.mem_get_info()[0] <= before - size
    del tensor
    gc.collect()
    assert torch.cuda.mem_get_info()[0] > before - size // 2
    with pytest.raises(OutOfMemory, match="has no piece of"):
        Slab.create(name, 2 * torch.cuda.mem_get_info()[1])


def test_the_handle_of_another_machine_or_a_dead_process_is_refused(name: str) -> None:
    memory = CudaMemory.allocate(torch.device("cuda"), 1 << 16)
    described = memory.description
    with pytest.raises(PlatformError, match="cannot be opened here"):
        CudaMemory.open(1 << 16, described[:64] + bytes(64) + described[128:])
    with pytest.raises(PlatformError, match="this process sees"):
        CudaMemory.open(1 << 16, b"GPU-elsewhere".ljust(64, b"\0") + described[64:])
