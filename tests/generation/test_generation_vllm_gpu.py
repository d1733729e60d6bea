"""vLLM on a GPU, as far as a CPU shows it: the order of launches under a fake stream that runs late, the arguments that vLLM gets,
and on vLLM's build for CPUs the same copies in place over many versions."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from generation_cores import VOCABULARY, board_of, form_of, needs_vllm, opened_core, small_model
from generation_models import change_weights
from test_generation_vllm_engine import policy_and_plain
from torch import Tensor

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.errors import ConfigError
from asyncrl.generation.vllm.engine import CoreSpec, VllmEngine
from asyncrl.generation.vllm.versions import GPU_WORKSPACE, load_adapter
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.policy import PolicyModel
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board, record_event, weight_slab
from asyncrl.weights.sync import WeightReader

pytestmark = pytest.mark.filterwarnings("ignore")
GPU = torch.device("cuda", 1)
ELEMENTS = 64


class Stream:
    """A stream that runs nothing until an event on it is waited for, as a busy GPU may. `log`: what was asked, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.waiting_threads: set[int] = set()
        self._pending: list[Callable[[], object]] = []

    def launch(self, name: str, work: Callable[[], object]) -> None:
        self.log.append(name)
        self._pending.append(work)

    def run(self, count: int | None = None) -> None:
        done, self._pending = self._pending[:count], self._pending[len(self._pending[:count]) :]
        for work in done:
            work()

    def event(self, blocking: bool = False) -> Any:
        marked: list[Callable[[], object]] = []

        def record(stream: Stream) -> None:
            assert stream is self and blocking
            self.log.append("record")
            marked.extend(self._pending)

        def synchronize() -> None:
            self.log.append("wait")
            self.waiting_threads.add(threading.get_ident())
            self.run(len([work for work in marked if work in self._pending]))

        return SimpleNamespace(record=record, synchronize=synchronize)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """In place of the GPU's current stream. Waiting for the whole device is an error."""
    found = Stream()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the host waits for the device"))
    return found


class LaunchingCore:
    """A core that only launches: the copy of `bind` and the steps run when the stream runs."""

    def __init__(self, stream: Stream) -> None:
        self.parameter = torch.zeros(ELEMENTS)
        self.computed: list[float] = []
        self._stream = stream

    def bind(self, buffer: Tensor, version: int) -> None:
        self._stream.launch("copy", lambda: self.parameter.copy_(buffer))

    def step(self) -> list[Any]:
        self._stream.launch("step", lambda: self.computed.append(float(self.parameter.sum())))
        return []


def make_board(one_copy: bool, name: str) -> tuple[Board, Board]:
    slab = weight_slab(name, ELEMENTS, torch.float32, torch.device("cpu")) if one_copy else None
    owner = Board.create(ELEMENTS, torch.float32, "layout", slab)
    copy_to = torch.device("cpu") if one_copy else None
    return owner, Board.attach(owner.description, os.dup(owner.fd), "layout", copy_to, one_copy)


@pytest.mark.parametrize("one_copy", [False, True])
async def test_a_half_is_free_only_after_the_copies_that_were_launched_from_it(
    stream: Stream, one_copy: bool, tmp_path: Path
) -> None:
    """As soon as the worker answers, the trainer spoils the other half. Each step has to see the weights of its version."""
    owner, board = await anyio.to_thread.run_sync(make_board, one_copy, f"asyncrl-test-{os.getpid()}-vllm")
    board.reads_ended = lambda: record_event(GPU)  # type: ignore[method-assign]
    core, bound = LaunchingCore(stream), list[int]()

    def send(message: Any) -> None:
        bound.append(message["bound"])
        owner.half(1 - bound[-1] % 2).fill_(torch.nan)

    async with ThreadLane("worker0", Recorder(max_events=0)) as lane:
        spec = CoreSpec(torch.float32, VOCABULARY, ())
        limits = dict(max_sequences=2, max_context=8)
        engine = VllmEngine(lambda choose: core, spec, None, lane, Recorder(nvtx=False), **limits)
        await lane.run(engine.open_on_lane, name="engine/open")
        reader = WeightReader(board, engine, lane, send)
        for version in range(6):
            owner.write(version % 2, version, torch.full((ELEMENTS,), float(version)))
            await reader.move(version, version % 2, None)
            await lane.run(core.step, name="engine/decode")
        lane_thread = await lane.run(threading.get_ident, name="test")
    stream.run()
    assert bound == [*range(6)] and core.computed == [float(version * ELEMENTS) for version in range(6)]
    assert stream.log == ["copy", "record", "wait", "step"] * 6
    assert lane_thread not in stream.waiting_threads
    assert (board.half(0).data_ptr() == board.half(1).data_ptr()) == one_copy
    board.close()
    owner.close()


# -- vLLM's own code ---------------------------------------------------------------------------------------------------


def gpu_spec(**changes: Any) -> Any:
    """A model whose buffer would lie on the second GPU."""
    adapter = load_adapter()
    policy = PolicyModel(small_model("llama"), "bfloat16")
    weights = policy.weights
    buffer = SimpleNamespace(device=GPU, dtype=torch.bfloat16, nbytes=weights.size * 2, is_cuda=True)
    return (
        adapter,
        adapter.ModelSpec(form_of(policy) | changes, weights.layout(), buffer),
        adapter.CoreLimits(2, 64, 128, 64, 512),
    )


@pytest.fixture
def eighty_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))


@needs_vllm
def test_on_a_gpu_vllm_compiles_and_takes_the_memory_of_weights_and_cache(eighty_gib: None) -> None:
    adapter, spec, limits = gpu_spec()
    arguments = adapter._engine_arguments("/nowhere", spec, limits)
    assert not arguments.enforce_eager and arguments.moe_backend == "triton" and arguments.dtype == "bfloat16"
    assert arguments.tensor_parallel_size == 1
    cache = arguments.kv_cache_memory_bytes
    assert cache == (128 // 32 + 2 + 1) * 32 * 512
    assert arguments.gpu_memory_utilization == (spec.buffer.nbytes + cache + GPU_WORKSPACE) / (80 << 30)
    split = adapter._engine_arguments("/nowhere", spec, limits, 2)
    assert split.tensor_parallel_size == 2 and split.kv_cache_memory_bytes == cache
    assert split.gpu_memory_utilization == (spec.buffer.nbytes // 2 + cache + GPU_WORKSPACE) / (80 << 30)
    assert adapter.memory_share(spec, limits, 1 << 30) == 1.0
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"


@needs_vllm
@pytest.mark.parametrize("number", [1, 2])
def test_vllm_computes_on_the_device_of_the_buffer(eighty_gib: None, tmp_path: Path, number: int) -> None:
    """By the number that vLLM's own executor finds: two workers are on two cards."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    adapter, spec, limits = gpu_spec()
    spec.buffer.device = torch.device("cuda", number)
    config = adapter._engine_config(adapter.write_config(spec.config, str(tmp_path)), spec, limits)
    _, rank, local_rank = UniProcExecutor._distributed_args(SimpleNamespace(vllm_config=config))
    assert (rank, local_rank) == (0, number)


@needs_vllm
def test_each_process_of_a_split_engine_computes_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process gets the number of its card, opens the board on that card, and reads a copy."""
    load_adapter()
    from asyncrl.generation.vllm import v0_32_split
    from asyncrl.generation.vllm.v0_32_split import Split, SplitExecutor

    sent = list[Any]()
    process = SimpleNamespace(wait=lambda: 0)
    ends = SimpleNamespace(send=sent.append), SimpleNamespace(fileno=lambda: 5, close=lambda: None)
    monkeypatch.setattr(v0_32_split, "Pipe", lambda: ends)
    monkeypatch.setattr(v0_32_split.subprocess, "Popen", lambda *_, **__: process)
    executor: Any = object.__new__(SplitExecutor)
    board: Any = SimpleNamespace(description={}, fd=9, layout="digest")
    executor.split = Split(board, [torch.device("cuda", index) for index in (0, 3)], [False, True])
    executor.config, executor.layout, executor.vllm_config = {}, None, None
    executor._channels, executor._processes, executor._watchers = [], [], []
    executor._arguments, executor._closing = ("file:///group", 0, 0), False
    executor._start(1)
    (_, _, _, copy_to), _, _, device, options = sent[0]
    assert copy_to == device == torch.device("cuda", 3)
    assert (options["rank"], options["local_rank"], options["distributed_init_method"]) == (1, 3, "file:///group")


@needs_vllm
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, "quantized weights"),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 16,
             "q_lora_rank": 16, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
            "multi-head latent attention (MLA)",
        ),
    ],
)  # fmt: skip
def test_weights_that_vllm_keeps_in_another_form_are_refused_before_they_are_loaded(
    eighty_gib: None, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    adapter, spec, limits = gpu_spec(**changes)
    with pytest.raises(ConfigError) as found:
        adapter._engine_config(adapter.write_config(spec.config, str(tmp_path)), spec, limits)
    assert f"vllm, which computes {text} from copies" in str(found.value)


@needs_vllm
def test_only_experts_of_the_triton_kernel_are_served_on_a_gpu() -> None:
    """FlashInfer's kernel re-lays the weights in place: all addresses stay."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    adapter = load_adapter()
    served = []
    for backend in UnquantizedMoeBackend:
        method = object.__new__(UnquantizedFusedMoEMethod)
        method.unquantized_backend = backend
        if adapter._computes_in_place(SimpleNamespace(quant_method=method), GPU):
            served.append(backend)
    assert served == [UnquantizedMoeBackend.TRITON]
    assert not adapter._computes_in_place(SimpleNamespace(quant_method=object()), GPU)


@needs_vllm
def test_a_build_for_another_device_is_refused() -> None:
    adapter, spec, limits = gpu_spec()
    with pytest.raises(ConfigError, match=r"build of vLLM computes on cpu here, while the worker is on cuda:1"):
        adapter.VllmCore(spec, limits, lambda names, logits: logits.argmax(-1))


@needs_vllm
def test_compiled_code_is_found_again(tmp_path: Path) -> None:
    """Its key has the folder's path: one folder for one configuration, whoever writes it."""
    adapter = load_adapter()
    one, again = (adapter.write_config(config, str(tmp_path)) for config in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    other = adapter.write_config({"a": 1, "b": 3}, str(tmp_path))
    assert one == again != other
    assert [each.name for each in Path(one).iterdir()] == ["config.json"]
    assert json.loads(Path(one, "config.json").read_text()) == {"a": 1, "b": 2}


@needs_vllm
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
async def test_fifty_versions_are_copied_in_place_and_each_is_the_trainers(architecture: str) -> None:
    """Every address stays, also of buffers, and the log-probs of the fixed row are the trainer's after each version. A version that
    was written only in part is refused."""
    policy, plain = policy_and_plain(architecture)
    sent = list[Any]()
    async with opened_core("vllm", policy, plain) as made, board_of(policy) as (owner, board):
        reader = WeightReader(board, made.engine, made.lane, sent.append)
        model = made.cores[0].model

        def addresses() -> dict[str, int]:
            return {name: each.data_ptr() for name, each in (*model.named_parameters(), *model.named_buffers())}

        places = addresses()
        for seed in range(50):
            version = change_weights(policy, seed, scale=0.02)
            owner.write(version % 2, version, policy.weights.working)
            await reader.move(version, version % 2, fixed_logprobs(policy))
            assert sent.pop() == {"bound": version} and not sent
            assert addresses() == places
        version = change_weights(policy, 50)
        before = board.half(1 - version % 2).clone()
        owner.write(version % 2, version, policy.weights.working)
        owner.half(version % 2)[: before.numel() // 2] = before[: before.numel() // 2]
        await reader.move(version, version % 2, fixed_logprobs(policy))
        assert (
            sent[0] == {"bound": version}
            and "the worker computes log-probs of a fixed row that are" in sent[1]["wrong"]
        )
        owner.clear(version % 2)
        await reader.move(version, version % 2, None)
        assert sent[2] == {"wrong": f"the board holds version None where version {version} was announced"}


KILLED = """
import json, sys
sys.path[:0] = json.loads(sys.argv[3])
from generation_cores import small_model, vllm_core
from asyncrl.generation.vllm.versions import load_adapter
from asyncrl.models.policy import PolicyModel
from asyncrl.transport.memory.board import Board

policy = PolicyModel(small_model("llama"), "float32")
core = vllm_core(policy, lambda names, logits: logits.argmax(-1), sequences=2, context=64, positions=128)
description = json.loads(sys.argv[1])
board = Board.attach(description, int(sys.argv[2]), description["layout"])
adapter, filled = load_adapter(), []
fill = adapter.fill

def fill_some(*arguments):
    if len(filled) == 4:
        print("in the middle of a copy", flush=True)
        sys.stdin.read()
    filled.append(fill(*arguments))

adapter.fill = fill_some
core.bind(board.half(1), 1)
"""


@needs_vllm
async def test_a_kill_during_a_copy_leaves_the_half_to_the_next_worker() -> None:
    policy, plain = policy_and_plain("llama")
    async with board_of(policy) as (owner, board):
        version = change_weights(policy)
        owner.write(1, version, policy.weights.working)
        before = owner.half(1).clone()
        fd = os.dup(owner.fd)
        arguments = [json.dumps(owner.description), str(fd), json.dumps([str(Path(__file__).parent)])]
        child = await anyio.open_process([sys.executable, "-c", KILLED, *arguments], pass_fds=[fd], stderr=None)
        assert child.stdout is not None
        said = ""
        with anyio.fail_after(120):
            async for part in child.stdout:
                said += part.decode()
                if "in the middle of a copy" in said:
                    child.kill()
        assert await child.wait() == -signal.SIGKILL
        os.close(fd)
        assert torch.equal(owner.half(1), before) and board.version(1) == version
        sent = list[Any]()
        async with opened_core("vllm", policy, plain) as made:
            await WeightReader(board, made.engine, made.lane, sent.append).move(1, 1, fixed_logprobs(policy))
        assert sent == [{"bound": 1}]
