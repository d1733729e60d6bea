"""The regression guard that is no timed test: work of fixed tiny jobs, counted and held against what is needed.

The bounds leave about a tenth over what was counted when they were written. A change that breaks one does more work than
before: find out why, and raise the bound only for something that is worth it.
"""

from __future__ import annotations

from functools import partial

import pytest
from bench_counting import Work, count, python_calls
from bench_jobs import GROUPS, MEMBERS, PROMPT, VOCABULARY, Training, decoding

from asyncrl.models.head.logprobs import token_logprobs

DTYPES = ("float32", "bfloat16")
MORE = 1.02  # products beyond the needed ones: a matrix has to be a little padded at most
# (allocations, bytes allocated, bytes copied); in bfloat16 attention gathers its rows, which is faster for short ones
TRAIN = {"float32": (750, 15_000_000, 9_000_000), "bfloat16": (1_000, 21_500_000, 11_700_000)}
DECODE_ALLOCATIONS = 95  # of a step with two layers
# A step draws and reads apart, hands arrays to its device, and looks for kept rows that need its room.
# A layer is asked for norms behind its halves and its terms.
CALLS, CALLS_PER_LAYER = 118, 52


def train_work(training: Training) -> Work:
    training.step()  # buffers that are kept, and packed weights, are made once
    return count(training.step)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_train_step_computes_what_is_needed_and_copies_and_allocates_no_more_than_it_did(dtype: str) -> None:
    training = Training.of(dtype)
    work = train_work(training)
    assert training.needed_flop <= work.product_flop <= MORE * training.needed_flop
    allocations, allocated, copied = TRAIN[dtype]
    assert work.copied_bytes <= copied
    assert work.allocations <= allocations and work.allocated_bytes <= allocated
    assert count(training.step) == work, "every step does the same: nothing grows"


def test_the_guard_sees_prompts_that_run_once_per_completion() -> None:
    training = Training.of(share=False)
    assert train_work(training).product_flop > 1.5 * training.needed_flop


def test_the_guard_sees_logits_that_fit_and_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.training.passes.token_logprobs", partial(token_logprobs, keep_logits=0))
    training = Training.of()
    assert train_work(training).product_flop > 1.1 * training.needed_flop


def test_the_guard_sees_log_probs_that_are_computed_again() -> None:
    training = Training.of()
    training.step()

    def careless() -> None:
        for batch in training.batches:
            training.trainer.compute_logprobs(batch)
        training.step()

    assert count(careless).product_flop == pytest.approx(training.needed_flop * 8 / 6, rel=0.02)


# -- generation --------------------------------------------------------------------------------------------------------


def body_parameters() -> int:
    model = Training.of().trainer.policy
    return model.matmul_parameters - model.head.weight.numel()


def test_a_prompt_is_prefilled_once_per_group() -> None:
    needed = 2.0 * body_parameters() * GROUPS * (PROMPT - 1)  # the last token of a prompt is the first that decodes
    shared, own = (decoding(GROUPS * MEMBERS, share=share) for share in (True, False))
    assert needed <= count(shared.prefill).product_flop <= MORE * needed
    assert not shared.needs_prefill, "one closure was enough"
    assert count(own.prefill).product_flop > 7 * needed, "the guard sees prompts that run once per completion"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decode_step_computes_what_is_needed(dtype: str) -> None:
    core = decoding(16, dtype=dtype)
    core.prefill()
    core.decode()
    needed = 2.0 * (body_parameters() + VOCABULARY * 64) * 16
    assert needed <= count(core.decode).product_flop <= MORE * needed


def decode_work(sequences: int, context: int) -> Work:
    core = decoding(sequences, context=context)
    while core.needs_prefill:
        core.prefill()
    core.decode()
    return count(core.decode)


def test_what_a_decode_step_copies_does_not_grow_with_the_context() -> None:
    """The cache is read where it lies: no copy of it, and no head of it expanded for the queries that share it."""
    short, long = decode_work(16, 40), decode_work(16, 400)
    keys_and_values = (
        2 * 2 * 16 * 360 * 2 * 16 * 4
    )  # layers, both, sequences, positions more, key heads, head size, bytes
    assert short.copied_bytes == long.copied_bytes
    assert long.allocated_bytes - short.allocated_bytes < keys_and_values / 4, "attention scores at most"


def test_a_decode_step_allocates_as_often_for_many_sequences_as_for_few() -> None:
    few, many = decode_work(16, 40), decode_work(64, 40)
    assert few.allocations == many.allocations <= DECODE_ALLOCATIONS
    logits = 64 * VOCABULARY * 4
    assert many.allocated_bytes <= 6 * logits, "logits, and what a vocabulary-wide pass over them makes"


def decode_calls(sequences: int, layers: int) -> int:
    core = decoding(sequences, layers=layers)
    core.prefill()
    core.decode()
    return python_calls(core.decode)


def test_python_runs_per_step_and_layer_but_never_per_sequence() -> None:
    """At 64 sequences a sampled token costs a few calls; the number of layers counts once, not squared."""
    two, four, six = (decode_calls(64, layers) for layers in (2, 4, 6))
    assert decode_calls(16, 2) == two, "the same for fewer sequences"
    assert six - four == four - two <= 2 * CALLS_PER_LAYER
    assert two <= CALLS + 2 * CALLS_PER_LAYER
    assert two / 64 <= 3.5
