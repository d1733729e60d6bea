"""Compares a path (models/paths.py) with transformers' unmodified eager model, on a probe: a small model of the same class.

    training    the path's forward and backward of a packed microbatch (ragged rows, shared prompts, completions that begin alike,
                a row longer than each window, with `long_rows` also longer than the original context), against the eager model
    sampler     the engine's cache with a shared prompt, prompts longer than a prefill (not on the plain path), rows that end at
                different tokens, and a new version in between, against an eager forward over prompt and completion

All comparisons are in float32. The eager side shares only the weights with the path, and has no cache. The eager side computes
each row alone, because a model's class may mix the rows of a batch.

Shape legend: S tokens with mask 1, L tokens of a row, B rows, V vocabulary; O outputs and I inputs of a linear layer, r rank of its
adapter, E stacked layers (experts).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.config.schema import LoraConfig
from asyncrl.data.packing import pack_groups
from asyncrl.errors import ConfigError, first_line
from asyncrl.generation.embedded.engine import open_core
from asyncrl.models.parameters.frozen import unreached_families
from asyncrl.models.parameters.merge import as_stack, factors
from asyncrl.models.paths import ModelPath
from asyncrl.models.policy import PolicyModel
from asyncrl.models.probe import max_positions
from asyncrl.models.rotary import hold_frequencies, original_context
from asyncrl.training.passes import PolicyForward
from asyncrl.types import (
    FinishReason,
    GenerationRequest,
    Group,
    Int32Array,
    Int64Array,
    Microbatch,
    Prompt,
    SamplingParams,
    Ticket,
    Trajectory,
)

# (prompt, completions) in tokens. A row of 28 tokens is longer than the probe's windows and original context. The first two
# completions of a group have `_SHARED` tokens in common, so a tree has three levels.
_GROUPS = ((7, (13, 9, 4)), (2, (26,)))
_SHARED = 4
# (tokens of the prompt, tokens of the completion, whether the prompt is that of the previous request). Every prefill has 12 tokens,
# because compiling a matrix product of a new size takes long. A row's last token is not prefilled, and a shared prompt is prefilled
# once: first 16 + 8 = 2 x 12 tokens. After the new version each row has 4 more tokens: 16 + 8 + 3 x 4 = 3 x 12.
_REQUESTS = ((17, 5, False), (17, 6, True), (9, 5, False))
_PREFILL = 12  # tokens of a prefill, so that longer prompts take several
# For the plain path: both prompts of 17 tokens in one prefill, so that their rows share a cache and end at different steps.
_PLAIN_PREFILL = 64
_NEW_VERSION = 4  # decode steps before the new version
_LONGEST = 40  # most tokens of a row
NATS = 1e-4  # largest allowed difference of a log-prob
RELATIVE = 1e-4  # largest allowed relative error of a gradient


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a path is from the eager model. logprobs, sampler: largest difference in nats. gradients: largest norm(error) /
    norm(eager gradient) of a parameter. The divisor is at least 0.001 of the largest such norm: tiny gradients count less."""

    logprobs: float
    gradients: float
    sampler: float
    parameter: str = ""  # with the largest relative error

    @property
    def agrees(self) -> bool:
        """Whether all distances are within their limits; False for NaN."""
        return self.logprobs <= NATS and self.sampler <= NATS and self.gradients <= RELATIVE

    def __str__(self) -> str:
        return f"training log-probs {self.logprobs:.1g} nats, gradients {self.gradients:.1g}, sampler {self.sampler:.1g} nats"


class Trial:
    """The eager side, computed by the constructor, and its comparison with a path."""

    def __init__(
        self,
        probe: PreTrainedModel,
        *,
        long_rows: bool = False,
        lora: LoraConfig | None = None,
        checkpointing: bool = False,
        dtype: str = "float32",
    ) -> None:
        """`probe`, `long_rows`: as in models/probe.py. `lora`, `checkpointing`, `dtype`: the run's settings. Errors: any exception
        of the model's class."""
        self.probe = probe
        self._untouched = copy.deepcopy(probe)  # copied for each path: some models keep state
        self._lora = lora
        self._checkpointing = checkpointing
        self._dtype = dtype
        self._random = np.random.default_rng(0)
        self._long_rows = long_rows
        limits = [] if long_rows else [original_context(probe.config), max_positions(probe.config)]
        self._longest = min([_LONGEST, *(limit for limit in limits if limit is not None)])
        self._vocabulary = int(probe.config.get_text_config().vocab_size)
        # Tokens repeat, so a layer that chooses keys has to choose among equal keys.
        self._test_row = self._tokens(6)[self._random.integers(0, 6, self._longest)]
        with torch.no_grad():
            self._test_logits_LV = self._logits(self._test_row)
        # Softens the distribution. In a sharp distribution, rounding and the choice of a token could hide every other difference.
        self.temperature = max(1.0, round(float(self._test_logits_LV.std(-1).mean()) / 2, 1))
        self.rows = self._make_rows()
        self.batch: Microbatch = pack_groups(self.rows, 1 << 20)[0]
        self._weight_S = torch.from_numpy(self._random.standard_normal(self.batch.scored)).float()
        # Log-probs [S] in the batch's order; parameter name -> gradient of `sum(weight_S * logp_S)`.
        self.logp_S, self._gradients = self._compute_eager()

    def _compute_eager(self) -> tuple[Tensor, dict[str, Tensor]]:
        probe, batch = self.probe, self.batch
        probe.requires_grad_(True)
        logp_S = torch.zeros(batch.scored)
        by_key = {(t.group_id, t.member): t for group, _ in self.rows for t in group.trajectories}
        for number, key in enumerate(zip(batch.group_ids.tolist(), batch.members.tolist(), strict=True)):
            row, place = by_key[key], torch.from_numpy(np.flatnonzero(batch.sequence == number))
            logp = self._logprobs(row.tokens, row.prompt_length, self._logits(row.tokens))
            (logp * self._weight_S[place].to(probe.device)).sum().backward()
            logp_S[place] = logp.detach().cpu()
        found = {name: parameter.grad for name, parameter in probe.named_parameters()}
        # Families of parameters to which text gives no gradient (models/parameters/frozen.py).
        self.families_without_gradient = unreached_families(found)
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in probe.named_parameters()}
        probe.requires_grad_(False)
        return logp_S, gradients

    def _logits(self, tokens: Int32Array | Int64Array) -> Tensor:
        """[L] tokens -> [L, V]. With `long_rows` the row is padded to `_longest`, because the class chooses its rotary frequencies
        by the length of the row. The padding changes nothing in a causal model (`check_causal`)."""
        length = self._longest if self._long_rows else tokens.size
        padded = np.pad(tokens.astype(np.int64), (0, length - tokens.size), mode="edge")
        inputs = torch.from_numpy(padded)[None].to(self.probe.device)
        logits_BLV: Tensor = self.probe(input_ids=inputs, use_cache=False, return_dict=True).logits.float()
        return logits_BLV[0, : tokens.size]

    def _logprobs(self, tokens: Int32Array | Int64Array, prompt: int, logits_LV: Tensor) -> Tensor:
        """[L] tokens and their logits [L, V] -> log-probs [L - prompt]."""
        targets = torch.from_numpy(tokens[prompt:].astype(np.int64)).to(logits_LV.device)
        logp_LV = (logits_LV[prompt - 1 : -1] / self.temperature).log_softmax(-1)
        return logp_LV.gather(1, targets[:, None]).squeeze(1)

    @torch.no_grad()
    def check_causal(self) -> None:
        """Errors: ConfigError if later tokens change the log-probs of earlier tokens: a sampler does not know the later tokens."""
        tokens, length = self._test_row, self._test_row.size
        whole = self._logprobs(tokens, 1, self._test_logits_LV)
        for part in (length // 4, length - 3):
            logits_LV = self._logits(tokens[:part])
            distance = _largest(self._logprobs(tokens[:part], 1, logits_LV) - whole[: part - 1])
            if not distance <= NATS:
                raise ConfigError(
                    f"the model's own forward is not causal: the log-prob of one of {part} tokens moves by {distance:.1g} nats "
                    f"when {length - part} more tokens follow"
                )

    def has_fixed_frequencies(self) -> bool:
        """Whether the rotary frequencies can be the same for rows of every length."""
        return not self._long_rows or hold_frequencies(copy.deepcopy(self._untouched), self._longest)

    def run(self, path: ModelPath) -> Distance:
        """How far the path is from the eager model. Errors: ConfigError if the path refuses the model; any error of the model."""
        distance = self._run(path, "float32")
        if path.name == "plain" and self._dtype != "float32" and distance.agrees:
            # Some classes fail in other dtypes than float32. Without this call they would fail in the middle of a run.
            try:
                self._run(path, self._dtype)
            except Exception as error:
                raise ConfigError(f"fails in {self._dtype} ({first_line(error)}); model.dtype=float32 works") from error
        return distance

    def _run(self, path: ModelPath, dtype: str) -> Distance:
        module = copy.deepcopy(self._untouched)
        hold_frequencies(module, self._longest)
        policy = PolicyModel(module, dtype, path=path, lora=self._lora)
        logp_S = self._train(policy)
        sampler = self._sampler_distance(self._sample(policy))
        gradients, parameter = self._gradient_distance(policy)
        return Distance(_largest(logp_S - self.logp_S), gradients, sampler, parameter)

    def _train(self, policy: PolicyModel) -> Tensor:
        """The path's log-probs [S]; its gradients are in `policy.flat`."""
        forward = PolicyForward(policy, self._checkpointing)
        logp_S, _ = forward(self.batch)
        (logp_S * self._weight_S.to(logp_S.device)).sum().backward()
        policy.set_training(False)
        return logp_S.detach().cpu()

    def _sample(self, policy: PolicyModel) -> list[tuple[GenerationRequest, Int64Array, Tensor]]:
        """(request, prompt and completion [L], log-probs of the completion) of each row."""
        requests = self._make_requests()
        longest = max(int(request.prompt_ids.size) + request.sampling.max_tokens for request in requests)
        core = open_core(
            policy,
            max_sequences=len(requests),
            max_context=longest,
            kv_positions=len(requests) * longest,
            prefill_tokens=_PLAIN_PREFILL if policy.path.name == "plain" else _PREFILL,
            recompute=True,
        )
        by_slot = {core.add(request, ()): request for request in requests}
        ended: list[tuple[GenerationRequest, Int64Array, Tensor]] = []
        decoded = 0
        while len(ended) < len(requests):
            while core.needs_prefill:
                core.prefill()
            step = core.decode()
            decoded += bool(step.rows)
            for slot in step.ended:
                generation, request = core.sequences.generation(slot, FinishReason.LENGTH), by_slot[slot]
                row = np.concatenate([request.prompt_ids, generation.token_ids]).astype(np.int64)
                ended.append((request, row, torch.from_numpy(generation.logprobs)))
                core.remove(slot)
            if decoded == _NEW_VERSION:
                # The engine now computes its caches again, as after an update. The weights are the same.
                policy.version += 1
        return ended

    def _gradient_distance(self, policy: PolicyModel) -> tuple[float, str]:
        """(the largest relative error of a gradient, the name of its parameter). Call after `_train`."""
        computed = dict(policy.flat.named_grads())
        if policy.lora is None:
            pairs = {name: (computed[name], self._gradients[name]) for name in computed}
        else:
            pairs = _adapter_pairs(policy, computed, self._gradients)
        largest = max(float(expected.norm()) for _, expected in pairs.values())
        errors = {
            name: float((gradient - expected).norm()) / max(float(expected.norm()), 1e-3 * largest, 1e-30)
            for name, (gradient, expected) in pairs.items()
        }
        # NaN counts as the largest error.
        worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
        return errors[worst], worst

    @torch.no_grad()
    def _sampler_distance(self, sampled: list[tuple[GenerationRequest, Int64Array, Tensor]]) -> float:
        """The largest difference of a log-prob. `sampled`: the result of `_sample`."""
        expected = [self._logprobs(row, int(each.prompt_ids.size), self._logits(row)).cpu() for each, row, _ in sampled]
        return _largest(torch.cat([logprobs for *_, logprobs in sampled]) - torch.cat(expected))

    def _make_rows(self) -> list[tuple[Group, list[float]]]:
        groups = []
        for number, (prompt, lengths) in enumerate(_GROUPS):
            start = self._tokens(prompt)
            completions = [self._tokens(min(length, self._longest - prompt)) for length in lengths]
            if len(completions) > 1:
                completions[1][:_SHARED] = completions[0][:_SHARED]
            rows = tuple(self._trajectory(number, i, len(lengths), start, c) for i, c in enumerate(completions))
            groups.append((Group(Ticket(number, 0, 0), Prompt(number, start, ""), rows), [0.0] * len(rows)))
        return groups

    def _trajectory(
        self, group: int, member: int, members: int, prompt: Int32Array, completion: Int32Array
    ) -> Trajectory:
        size = prompt.size + completion.size
        mask = np.arange(size) >= prompt.size
        zeros = np.zeros(size, np.float32)
        return Trajectory(
            group_id=group,
            member=member,
            group_size=members,
            prompt_length=int(prompt.size),
            tokens=np.concatenate([prompt, completion]),
            mask=mask,
            logprobs=zeros,
            sampled_logprobs=zeros,
            versions=np.where(mask, 0, -1).astype(np.int32),
            temperature=self.temperature,
            finish_reason=FinishReason.LENGTH,
        )

    def _make_requests(self) -> list[GenerationRequest]:
        requests: list[GenerationRequest] = []
        for number, (prompt, length, shared) in enumerate(_REQUESTS):
            ids = requests[-1].prompt_ids if shared else self._tokens(min(prompt, self._longest - 1))
            limit = min(length, self._longest - int(ids.size))
            key = "shared" if number < 2 else None  # of a cached prompt
            sampling = SamplingParams(temperature=self.temperature, max_tokens=limit, ignore_eos=True)
            requests.append(GenerationRequest(ids, sampling, number, key))
        return requests

    def _tokens(self, count: int) -> Int32Array:
        return self._random.integers(0, self._vocabulary, count).astype(np.int32)


def _adapter_pairs(
    policy: PolicyModel, computed: dict[str, Tensor], gradients: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Name of an adapter's B -> (computed gradient, expected gradient `scale dW A'`), see models/parameters/lora.py.
    A is not compared: its gradient is 0, because B is 0 at first."""
    lora = policy.lora
    assert lora is not None
    names = {id(parameter): name for name, parameter in policy.module.named_parameters()}
    pairs, masters = {}, dict(policy.flat.named_masters())
    for number, target in enumerate(lora.targets):
        first, name = lora.names[2 * number : 2 * number + 2]
        a_ErI, computed_EOr = factors(masters[first], computed[name], target.shape)
        gradient_EOI = as_stack(gradients[names[id(target.weight)]], target.transposed)
        pairs[name] = computed_EOr, lora.scale * gradient_EOI @ a_ErI.transpose(1, 2)
    return pairs


def _largest(difference: Tensor) -> float:
    """The largest absolute value; NaN if one of the values is NaN."""
    return float(difference.abs().max())
