"""What a request must be like, whichever engine serves it."""

from __future__ import annotations

from asyncrl.errors import GenerationError
from asyncrl.types import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, GenerationRequest


def check_request(request: GenerationRequest, max_context: int) -> None:
    """`max_context`: longest prompt + max_tokens that the engine has room for. Errors: GenerationError."""
    sampling, size = request.sampling, int(request.prompt_ids.size)
    problem = None
    if size < 1:
        problem = "the prompt is empty"
    elif sampling.max_tokens < 1:
        problem = f"max_tokens is {sampling.max_tokens}, expected at least 1"
    elif size + sampling.max_tokens > max_context:
        problem = (
            f"{size} prompt tokens and max_tokens={sampling.max_tokens} are {size + sampling.max_tokens} tokens, "
            f"but a sequence has room for max_context={max_context}: shorten the prompt, lower max_tokens, or "
            "open the engine with a larger max_context"
        )
    elif sampling.temperature != 0 and not LOWEST_TEMPERATURE <= sampling.temperature <= HIGHEST_TEMPERATURE:
        problem = (
            f"temperature is {sampling.temperature}, expected {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}, or 0: "
            "greedy"
        )
    elif not (0 < sampling.top_p <= 1):
        problem = f"top_p is {sampling.top_p}, expected 0 < top_p <= 1"
    elif sampling.top_k < 0:
        problem = f"top_k is {sampling.top_k}, expected at least 0"
    if problem is not None:
        raise GenerationError(f"this request cannot be served: {problem}")


def check_tokens(request: GenerationRequest, vocabulary: int, has_tokenizer: bool) -> None:
    """Of an engine with a model. Errors: GenerationError for ids beyond the vocabulary, and stop strings without a tokenizer."""
    low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
    if low < 0 or high >= vocabulary:
        raise GenerationError(
            f"this request cannot be served: its prompt holds token ids from {low} to {high}, but the model's "
            f"vocabulary is [0, {vocabulary}): was it made with another tokenizer?"
        )
    if any(request.sampling.stop) and not has_tokenizer:
        raise GenerationError("this request cannot be served: it has stop strings, but the engine has no tokenizer")
