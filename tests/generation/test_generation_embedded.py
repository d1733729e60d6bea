"""What only the embedded engine has: stops, its cache, its admission checks, model modes, sizes."""

from __future__ import annotations

import gc
import weakref

import anyio
import numpy as np
import pytest
import torch
from generation_models import VOCABULARY, answered, assert_plain, generate_all, opened, policy_and_plain, request
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.texts import eos_token_ids
from asyncrl.errors import DivergenceError, GenerationError
from asyncrl.generation.embedded.cache import CacheShape, KVCache
from asyncrl.generation.embedded.engine import cache_shape
from asyncrl.generation.embedded.stops import StopStrings
from asyncrl.types import FinishReason


class Characters:
    """A tokenizer: one character per token, from a table in which some characters take two tokens, like bytes do."""

    eos_token_id = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        data = bytes(token + 32 if token < 90 else 0xC3 if token == 90 else 0xA0 + token for token in token_ids)
        return data.decode("utf-8", errors="replace")


async def test_stop_token_ids_end_a_completion_with_that_token() -> None:
    policy, _ = policy_and_plain("qwen3")
    async with opened(policy) as run:
        free = await run.engine.generate(request(5, 3, max_tokens=20))
        place = 6
        stop = int(free.token_ids[place])
        first = int(np.flatnonzero(free.token_ids == stop)[0])
        cut = await run.engine.generate(request(5, 3, max_tokens=20, stop_token_ids=(stop, 95, 96, 94)))
        exactly = await run.engine.generate(request(5, 3, max_tokens=first + 1, stop_token_ids=(stop,)))
    assert free.finish_reason is FinishReason.LENGTH
    assert cut.finish_reason is exactly.finish_reason is FinishReason.STOP  # also where it is the last token allowed
    assert cut.token_ids.tolist() == exactly.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    np.testing.assert_allclose(cut.logprobs, free.logprobs[: first + 1], atol=1e-5)


async def test_eos_of_model_and_tokenizer_and_ignore_eos() -> None:
    policy, _ = policy_and_plain("llama")
    async with opened(policy) as run:
        free = await run.engine.generate(request(5, 3, max_tokens=20))
    policy.module.generation_config.eos_token_id = [int(free.token_ids[4]), 3]
    tokenizer = Characters()
    tokenizer.eos_token_id = 2  # type: ignore[assignment]
    assert eos_token_ids(policy.module, tokenizer) == tuple(sorted({2, 3, int(free.token_ids[4])}))
    async with opened(policy, tokenizer) as run:
        cut = await run.engine.generate(request(5, 3, max_tokens=20))
        whole = await run.engine.generate(request(5, 3, max_tokens=20, ignore_eos=True))
    assert cut.finish_reason is FinishReason.STOP and cut.token_ids.size <= 5
    assert whole.token_ids.tolist() == free.token_ids.tolist()


async def test_stop_strings_end_a_completion_with_the_token_that_completes_them() -> None:
    policy, _ = policy_and_plain("qwen3")
    tokenizer = Characters()
    async with opened(policy, tokenizer) as run:
        free = await run.engine.generate(request(5, 11, max_tokens=40))
        decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)  # noqa: E731
        text = decode(free.token_ids.tolist())
        stop = text[7:10]
        assert stop not in text[:9]
        cut = await run.engine.generate(request(5, 11, max_tokens=40, stop=("never seen", stop)))
        others = await generate_all(run.engine, [request(5, seed, max_tokens=9) for seed in range(3)])
    assert cut.finish_reason is FinishReason.STOP
    assert decode(cut.token_ids.tolist()).endswith(stop)
    assert cut.token_ids.tolist() == free.token_ids[: cut.token_ids.size].tolist()
    assert all(answer.finish_reason is FinishReason.LENGTH for answer in others)


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 95), min_size=1, max_size=60),
    stop=st.sampled_from(["a", "abc", "é", "àé", "  ", "zz~", "xyxyxyxyxy"]),
)
def test_the_window_of_stop_strings_misses_nothing(tokens: list[int], stop: str) -> None:
    """Fed token by token, it fires at the first prefix whose whole text contains the string."""
    tokenizer = Characters()
    tokens = tokens + [ord(c) - 32 if ord(c) < 122 else 90 for c in "abc"] + [90, 9, 90, 9 + 0] + tokens
    search, array = StopStrings(tokenizer, (stop,)), np.array(tokens)
    for end in range(1, len(tokens) + 1):
        whole = stop in tokenizer.decode(tokens[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert (search.hit(array[:end]) == stop) == whole
        if whole:
            break


async def test_requests_that_would_disturb_others_are_refused() -> None:
    policy, _ = policy_and_plain("qwen3")
    async with opened(policy) as run:
        bad = request(4, 0)
        bad.prompt_ids[2] = VOCABULARY
        with pytest.raises(GenerationError, match=rf"ids from \d+ to {VOCABULARY}.*\[0, {VOCABULARY}\)"):
            await run.engine.generate(bad)
        with pytest.raises(GenerationError, match="no tokenizer"):
            await run.engine.generate(request(4, 0, stop=("x",)))
        assert (await run.engine.generate(request(4, 0))).token_ids.size == 12


async def test_weights_that_are_nan_end_the_engine_by_name() -> None:
    policy, _ = policy_and_plain("llama")

    def poison() -> None:
        policy.flat.master.fill_(float("nan"))
        policy.advance()

    with pytest.raises(DivergenceError, match="not finite"):
        async with opened(policy) as run:
            await run.lane.run(poison, name="train/finish")
            with pytest.raises(GenerationError, match="not finite"):
                await run.engine.generate(request(4, 0))
            await anyio.sleep_forever()


async def test_modes_are_set_in_the_closure_and_no_graph_is_kept() -> None:
    policy, plain = policy_and_plain("qwen3")
    async with opened(policy) as run:
        await run.lane.run(lambda: policy.module.train() and None, name="train/begin")
        asked = [request(4, 0)]
        answers = await generate_all(run.engine, asked)
        assert not policy.module.training
        assert not run.engine.core.cache.data.requires_grad
        assert float(policy.flat.grad.abs().sum()) == 0.0
    assert_plain(plain, asked, answers)


async def test_nothing_is_left_after_closing() -> None:
    policy, _ = policy_and_plain("qwen3")
    async with opened(policy) as run:
        await generate_all(run.engine, [request(4, seed, prefix_key="k") for seed in range(5)])
        cache = weakref.ref(run.engine.core.cache)
    del run
    gc.collect()
    assert cache() is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_cache_size_is_predicted_and_starts_as_zeros(dtype: str) -> None:
    policy, _ = policy_and_plain("qwen3", dtype)
    shape = cache_shape(policy.config, 4, 50)
    assert shape == CacheShape(layers=3, rows=4, heads=2, positions=50, head_size=16)
    cache = KVCache(shape, policy.dtype, policy.device)
    assert cache.data.dtype == policy.dtype
    assert cache.data.nbytes == shape.nbytes(policy.dtype)
    assert not torch.any(cache.data)


@pytest.mark.usefixtures("kernels")
async def test_rows_of_very_different_length_are_exact() -> None:
    policy, plain = policy_and_plain("qwen3")
    requests = [request(size, size, max_tokens=3 + size % 7) for size in (60, 58, 3, 2, 30, 5, 44)]
    assert_plain(plain, requests, await answered(policy, requests, max_sequences=5))
