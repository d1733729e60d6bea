"""Chunked log-probs: equal to the naive full-vocabulary computation, exact gradients, bounded memory."""

from __future__ import annotations

import pytest
import torch

from asyncrl.models.head.logprobs import Spare, token_logprobs

S, E, V = 37, 6, 29


def case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, E, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, E, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    target = torch.randint(0, V, (S,), generator=generator)
    temperature = torch.rand(S, generator=generator) + 0.5
    return hidden, weight, target, temperature


def naive(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: torch.Tensor) -> tuple:
    logits = (hidden @ weight.t()).to(torch.promote_types(weight.dtype, torch.float32))
    logp = torch.log_softmax(logits / temperature.to(logits.dtype)[:, None], -1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("chunk", [1, 8, 37, 512])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_equals_naive_in_value_and_gradient(chunk: int, entropy_grad: bool) -> None:
    inputs = case()
    logp, entropy = token_logprobs(*inputs, chunk=chunk, entropy_grad=entropy_grad)
    naive_logp, naive_entropy = naive(*inputs)
    torch.testing.assert_close(logp, naive_logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, naive_entropy, rtol=0, atol=1e-12)
    assert entropy.requires_grad == entropy_grad
    weights = torch.linspace(-1, 1, S, dtype=torch.float64)
    total, expected = (logp * weights).sum(), (naive_logp * weights).sum()
    if entropy_grad:
        total, expected = total + (entropy * weights**2).sum(), expected + (naive_entropy * weights**2).sum()
    for ours, theirs in zip(
        torch.autograd.grad(total, inputs[:2]), torch.autograd.grad(expected, inputs[:2]), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_gradcheck(entropy_grad: bool) -> None:
    hidden, weight, target, temperature = case()

    def fn(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return token_logprobs(h, w, target[:7], temperature[:7], chunk=3, entropy_grad=entropy_grad)[: 1 + entropy_grad]

    assert torch.autograd.gradcheck(fn, (hidden[:7].detach().requires_grad_(), weight))


def test_grad_buffer_takes_the_weight_gradient_and_autograd_none() -> None:
    hidden, weight, target, temperature = case()
    buffer = torch.ones(V, E, dtype=torch.float64)
    token_logprobs(hidden, weight, target, temperature, grad_buffer=buffer, chunk=8)[0].sum().backward()
    assert weight.grad is None
    (expected,) = torch.autograd.grad(naive(hidden, weight, target, temperature)[0].sum(), weight)
    torch.testing.assert_close(buffer - 1, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("kernels")
def test_bfloat16_products_with_float32_softmax_and_sums() -> None:
    hidden, weight, target, temperature = case(torch.bfloat16)
    buffer = torch.zeros(V, E)
    logp, entropy = token_logprobs(hidden, weight, target, temperature, grad_buffer=buffer, chunk=8)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp, naive(hidden, weight, target, temperature)[0], rtol=0, atol=1e-5)
    for _ in range(300):  # a bfloat16 sum would have stopped growing long before
        token_logprobs(hidden, weight, target, temperature, grad_buffer=buffer)[0].sum().backward()
    once = torch.zeros(V, E)
    token_logprobs(hidden, weight, target, temperature, grad_buffer=once)[0].sum().backward()
    torch.testing.assert_close(buffer / 300, once, rtol=1e-4, atol=1e-5)


def test_temperature_is_per_row_and_large_logits_stay_finite() -> None:
    hidden, weight, target, temperature = case()
    logp, _ = token_logprobs(hidden * 1e4, weight, target, temperature)
    assert torch.isfinite(logp).all()
    half = token_logprobs(hidden, weight, target, temperature * 0.5)[0]
    torch.testing.assert_close(half, token_logprobs(hidden * 2, weight, target, temperature)[0], rtol=0, atol=1e-12)


def test_no_rows() -> None:
    hidden, weight, target, temperature = case()
    logp, entropy = token_logprobs(hidden[:0], weight, target[:0], temperature[:0])
    (grad,) = torch.autograd.grad(logp.sum(), weight)
    assert logp.shape == entropy.shape == (0,) and not grad.any()


def test_never_more_logits_than_one_chunk_unless_all_of_them_fit() -> None:
    hidden, weight, target, temperature = case()
    for keep_logits, passes in ((0, 2), (S * V - 1, 2), (S * V, 1)):
        rows: list[int] = []

        def project(x: torch.Tensor, rows: list[int] = rows) -> torch.Tensor:
            rows.append(x.shape[0])
            return x @ weight.detach().t()

        logp, _ = token_logprobs(hidden, weight, target, temperature, chunk=8, keep_logits=keep_logits, project=project)
        logp.sum().backward()
        assert max(rows) == 8 and sum(rows) == passes * S


@pytest.mark.parametrize("keep_logits", [0, 1 << 30])
def test_kept_logits_change_no_gradient(keep_logits: int) -> None:
    hidden, weight, target, temperature = case()
    logp, _ = token_logprobs(hidden, weight, target, temperature, chunk=8, keep_logits=keep_logits)
    logp.square().sum().backward()
    expected = torch.autograd.functional.jacobian(
        lambda h: torch.log_softmax(h @ weight.detach().t() / temperature[:, None], 1)
        .gather(1, target[:, None]).square().sum(),
        hidden.detach(),
    )  # fmt: skip
    torch.testing.assert_close(hidden.grad, expected)


def test_logits_that_wait_never_share_memory() -> None:
    """Two forwards before the first backward: the second finds the spare memory lent out. Afterwards it is used again."""
    hidden, weight, target, temperature = (tensor.detach() for tensor in case())
    spare = Spare()
    inputs = [(hidden * scale).requires_grad_() for scale in (1.0, 2.0)]
    losses = [token_logprobs(h, weight, target, temperature, spare=spare)[0].sum() for h in inputs]
    for loss in losses:
        loss.backward()
    for h in inputs:
        fresh = h.detach().requires_grad_()
        token_logprobs(fresh, weight, target, temperature)[0].sum().backward()
        assert torch.equal(h.grad, fresh.grad)
    first = spare.take(S, V, weight)
    spare.give(first)
    assert spare.take(S, V, weight).data_ptr() == first.data_ptr()
    assert spare.take(S, V, weight).data_ptr() != first.data_ptr()  # lent out


@pytest.mark.parametrize("keep_logits", [0, 1 << 30])
def test_backward_gives_the_memory_back(keep_logits: int) -> None:
    """Chunks that are computed again use what once waited: the two never lie beside each other."""
    hidden, weight, target, temperature = case()
    spare = Spare()
    memory = spare.take(S, V, weight)
    place = memory.data_ptr()
    spare.give(memory)
    for _ in range(2):
        logp, _ = token_logprobs(hidden, weight, target, temperature, chunk=8, keep_logits=keep_logits, spare=spare)
        logp.sum().backward()
        again = spare.take(S, V, weight)
        assert again.data_ptr() == place
        spare.give(again)


def test_targets_may_be_strided_and_narrow() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 16), torch.randn(41, 16)
    wide = torch.arange(0, 40, 5)
    expected = token_logprobs(hidden, weight, wide[::2].clone(), torch.ones(4))[0]
    assert torch.equal(token_logprobs(hidden, weight, wide[::2], torch.ones(4))[0], expected)
    assert torch.equal(token_logprobs(hidden, weight, wide[::2].int(), torch.ones(4))[0], expected)
