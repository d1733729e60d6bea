"""One vLLM engine over two processes, by the tensor parallelism of vLLM's build for CPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from generation_cores import board_of, needs_vllm, opened_core
from generation_models import change_weights
from test_generation_vllm_engine import policy_and_plain

from asyncrl.errors import ConfigError, TransportError
from asyncrl.generation.vllm.versions import load_adapter
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.types import GenerationRequest, SamplingParams
from asyncrl.weights.sync import WeightReader

pytestmark = [needs_vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(("architecture", "copies"), [("llama", False), ("qwen2", True), ("qwen3_moe", False)])
async def test_each_process_copies_its_part_of_each_version_in_place(architecture: str, copies: bool) -> None:
    """Every address stays in both processes, each has a part of the layers, and the log-probs of the fixed row are the trainer's
    after each version. `copies`: the second process fetches a version before it copies its part, as on another GPU."""
    policy, plain = policy_and_plain(architecture)
    sent = list[Any]()

    def addresses(worker: Any) -> dict[str, tuple[int, int]]:
        model = worker.get_model()
        return {name: (each.data_ptr(), each.numel()) for name, each in model.named_parameters()}

    async with board_of(policy) as (owner, board):
        owner.write(0, policy.version, policy.weights.working)
        async with opened_core("vllm", policy, plain, split=(board, copies)) as made:
            reader = WeightReader(board, made.engine, made.lane, sent.append)
            executor = made.cores[0]._core.model_executor

            async def places() -> list[dict[str, tuple[int, int]]]:
                found: list[dict[str, tuple[int, int]]] = await made.lane.run(
                    lambda: executor.collective_rpc(cloudpickle.dumps(addresses)), name="test"
                )
                return found

            before = await places()
            assert len(before) == 2
            parts = [sum(numel for _, numel in each.values()) for each in before]
            assert parts[0] == parts[1] < 0.75 * policy.weights.size
            for seed in range(6):
                version = change_weights(policy, seed, scale=0.02)
                owner.write(version % 2, version, policy.weights.working)
                await reader.move(version, version % 2, fixed_logprobs(policy))
                assert sent == [{"bound": version}]
                sent.clear()
            assert await places() == before
            prompt = np.arange(8, dtype=np.int32)
            sampling = SamplingParams(max_tokens=16, ignore_eos=True)
            generated = await made.engine.generate(GenerationRequest(prompt, sampling, 5))
            row = torch.from_numpy(np.concatenate([prompt, generated.token_ids]).astype(np.int64))
            views = dict(policy.weights.layout().views(policy.weights.working))
            with torch.no_grad():
                for name, parameter in plain.named_parameters():
                    parameter.copy_(views[name])
                logprobs = plain(input_ids=row[None], use_cache=False).logits[0, 7:-1].log_softmax(-1)
            expected = logprobs.gather(1, row[8:, None])[:, 0].numpy()
            np.testing.assert_allclose(generated.logprobs, expected, atol=2e-4)
            # A half that was written only in part.
            version = change_weights(policy, 50)
            old = board.half(1 - version % 2).clone()
            owner.write(version % 2, version, policy.weights.working)
            owner.half(version % 2)[: old.numel() // 2] = old[: old.numel() // 2]
            await reader.move(version, version % 2, fixed_logprobs(policy))
            assert "the worker computes log-probs of a fixed row that are" in sent[1]["wrong"]


def test_a_version_that_the_board_does_not_hold_is_refused() -> None:
    load_adapter()
    from asyncrl.generation.vllm.v0_32_split import BoardSource, BoardTransfer

    transfer = object.__new__(BoardTransfer)
    board: Any = SimpleNamespace(version=lambda half: (3, None)[half])
    transfer.init_transfer_engine(BoardSource(board, [], False))
    with pytest.raises(TransportError, match="the weight board holds no version 4"):
        transfer.update_weights({"version": 4})


async def test_heads_that_do_not_divide_are_refused() -> None:
    policy, plain = policy_and_plain("llama")
    async with board_of(policy) as (_, board):
        with pytest.raises(ConfigError, match=r"heads \(4\) must be divisible by tensor parallel size \(3\)"):
            async with opened_core("vllm", policy, plain, split=(board, False), parts=3):
                pytest.fail("it was opened")
