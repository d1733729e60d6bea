"""The environment `single_turn`: one completion for each prompt."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.data.texts import CompletionText
from asyncrl.ports import Generate
from asyncrl.types import GenerationRequest, Messages, Prompt, SamplingParams, Trajectory


def episode_seed(seed: int, group_id: int, member: int) -> int:
    """The seed of one episode, in [0, 2**63): a hash of the run's `seed`, group and member. The seed is equal on every machine."""
    return hashed_seed(struct.pack("<Qqq", seed % (1 << 64), group_id, member), b"asyncrl-episode")


def hashed_seed(data: bytes, purpose: bytes) -> int:
    """A seed in [0, 2**63). Equal `data` with different `purpose` gives independent seeds. `purpose`: at most 16 bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=purpose).digest(), "little") >> 1


class SingleTurn:
    """Samples one completion for the prompt. Every sampled token is trained, including a token that ends the completion.

    If the prompt is a string, the completion is a string; else it is `[{"role": "assistant", "content": text}]`.
    """

    def __init__(self, tokenizer: Any, sampling: SamplingParams, seed: int, text: CompletionText | None = None) -> None:
        """`text`: decodes completions; None: as the defaults of `reward.text` say."""
        self._text = text or CompletionText(tokenizer)
        self._sampling = sampling
        self._seed = seed

    async def run(self, prompt: Prompt, member: int, group_size: int, generate: Generate) -> Trajectory:
        """Errors: those of `generate`."""
        request = GenerationRequest(
            prompt_ids=prompt.ids,
            sampling=self._sampling,
            seed=episode_seed(self._seed, prompt.group_id, member),
            prefix_key=str(prompt.group_id),
        )
        generation = await generate(request)
        text = self._text(generation, prompt.ids)
        completion: str | Messages = text
        if not isinstance(prompt.prompt, str):
            completion = [{"role": "assistant", "content": text}]
        return Trajectory(
            group_id=prompt.group_id,
            member=member,
            group_size=group_size,
            prompt_length=int(prompt.ids.size),
            tokens=np.concatenate([prompt.ids, generation.token_ids]).astype(np.int32, copy=False),
            mask=_after_prompt(prompt, False, np.ones(generation.token_ids.size, dtype=np.bool_)),
            logprobs=_after_prompt(prompt, 0.0, generation.logprobs.astype(np.float32, copy=False)),
            sampled_logprobs=_after_prompt(prompt, 0.0, generation.sampled_logprobs.astype(np.float32, copy=False)),
            versions=_after_prompt(prompt, -1, generation.versions.astype(np.int32, copy=False)),
            temperature=self._sampling.temperature,
            finish_reason=generation.finish_reason,
            completion=completion,
            routed_experts=generation.routed_experts,
        )


def _after_prompt(prompt: Prompt, filler: float, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[P + C]: `filler` for each of the prompt's P tokens, then `column` [C]."""
    return np.concatenate([np.full(prompt.ids.size, filler, dtype=column.dtype), column])
