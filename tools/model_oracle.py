"""What the product computes of one small model against transformers' untouched eager model: the oracle of model_sweep.py.

    training    a packed microbatch (ragged rows of 3 to 40 tokens, shared prompts, two temperatures) through `PolicyForward`:
                log-probs, and the gradients of a random-weighted sum of them; the same with gradient checkpointing
    sampler     requests with shared prompts and different lengths through `EmbeddedEngine`; again with new weights on the way

The eager side is a copy of the model that was built separately, one row at a time, without a cache. It shares nothing with
the runtime's own gate but the models.

Shape legend: S scored tokens, L tokens of a row, V vocabulary.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import small_models
import torch
from small_models import Unbuildable
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.config.schema import Config
from asyncrl.data.packing import pack_groups
from asyncrl.errors import ConfigError
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.models.loading import load_policy
from asyncrl.models.policy import PolicyModel
from asyncrl.runtime.gate import check_run_model
from asyncrl.telemetry.recorder import Recorder
from asyncrl.training.passes import PolicyForward
from asyncrl.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    Group,
    Microbatch,
    Prompt,
    SamplingParams,
    Ticket,
    Trajectory,
)

NATS, RELATIVE = 1e-4, 1e-4  # most that log-probs and gradients may differ
MAX_PROMPT, MAX_COMPLETION = 20, 38
_GROUPS = ((9, (31, 12, 2)), (2, (1, 38)), (16, (5, 17)), (1, (10,)))  # (prompt, completions) in tokens
_TEMPERATURES = (1.0, 0.7, 1.0, 1.0)
# (prompt tokens, prompt, max_tokens)
_REQUESTS = ((7, 0, 25), (7, 0, 3), (7, 0, 12), (20, 1, 15), (20, 1, 4), (1, 2, 6))
_ROWS, _PREFILL, _UPDATE_AT = 4, 16, 6
_TINY = 1e-3  # of the largest gradient: what is smaller is measured by this


@dataclass(slots=True)
class Measured:
    """What became of one row. status: right, WRONG, refused, inner error, not buildable."""

    name: str
    kind: str = ""  # class of the model
    path: str = ""
    status: str = "right"
    logprobs: float | None = None  # nats, largest difference
    gradients: float | None = None  # relative, largest of a tensor
    parameter: str = ""  # where
    sampler: float | None = None  # nats
    updated: float | None = None  # nats, with new weights on the way
    checkpointing: str = ""
    remark: str = ""
    notes: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """`WRONG` where a number is too large, or none."""
        apart = []
        for label, value in (
            ("log-probs", self.logprobs), ("sampler", self.sampler), ("sampler after update", self.updated)
        ):  # fmt: skip
            if value is None or not value <= NATS:
                apart.append(f"{label} {value:.2g} nats")
        if self.gradients is None or not self.gradients <= RELATIVE:
            apart.append(f"gradients {self.gradients:.2g} ({self.parameter})")
        if self.checkpointing.startswith("WRONG"):
            apart.append(f"checkpointing {self.checkpointing.removeprefix('WRONG ')}")
        if apart:
            self.status, self.remark = "WRONG", ", ".join(apart)


class Wanted(NamedTuple):
    """A microbatch, weights of its log-probs in the sum whose gradients are taken, and what transformers computes of them."""

    batch: Microbatch
    weights_S: Tensor
    logp_S: Tensor
    gradients: dict[str, Tensor]


def open_policy(config: Config) -> PolicyModel:
    """As a run does (runtime/real.py). Errors: ConfigError."""
    longest = MAX_PROMPT + MAX_COMPLETION
    return load_policy(config.model, "cpu", config.seed, lambda module: check_run_model(config, module).path, longest)[
        0
    ]


def examine(name: str) -> Measured:
    """Never raises: whatever goes wrong is a status."""
    transformers_logging.set_verbosity_error()
    found = _attempt(name, 0, "float32")
    if found.status != "WRONG":
        return found
    if (own := _not_causal(small_models.small_model(name, 0))) > NATS:
        found.notes.append(
            f"the class itself is not causal: its first tokens move by {own:.2g} nats when others follow"
        )
        return found
    exact = _attempt(name, 0, "float64")
    if exact.status == "right":
        exact.remark = f"in float64; float32 rounds to {found.remark}"
        return exact
    if exact.status == "WRONG":
        found.notes.append(f"float64 as well: {exact.remark}")
        return found
    others = [_attempt(name, seed, "float32") for seed in (1, 2)]
    found.notes.append(f"no float64 ({exact.remark}); other seeds: {', '.join(other.status for other in others)}")
    return found


def _attempt(name: str, seed: int, dtype: str) -> Measured:
    measured = Measured(name)
    stage = "its own model"
    try:
        eager = small_models.small_model(name, seed)
        measured.kind = type(eager).__name__
        small_models.finite(eager)
        eager.double() if dtype == "float64" else None
        batch, rows = microbatch(_vocabulary(eager))
        generator = torch.Generator().manual_seed(seed + 1)
        weights_S = torch.randn(len(batch.target), generator=generator, dtype=torch.float64)
        wanted = Wanted(batch, weights_S, *_own(eager, rows, weights_S))
        stage = "load"
        policy = open_policy(_config(name, seed, dtype, False))
        measured.path = str(policy.path)
        stage = "training"
        measured.logprobs, measured.gradients, measured.parameter = _train(policy, False, wanted)
        stage = "sampler"
        anyio.run(_sample, measured, policy, eager)
        stage = "checkpointing"
        measured.checkpointing = _checkpointed(name, seed, dtype, wanted)
    except Unbuildable as error:
        measured.status, measured.remark = "not buildable", str(error)
    except ConfigError as error:
        where = "" if stage == "load" else f"in {stage}: "
        measured.status, measured.remark = "refused", where + _refusal(error)
    except Exception as error:
        measured.status, measured.remark = "inner error", f"{stage}: {_short(error)}"
    if measured.status == "right":
        measured.judge()
    return measured


def _config(name: str, seed: int, dtype: str, checkpointing: bool) -> Config:
    os.environ[small_models.ROW] = name
    builder = f"{Path(small_models.__file__).resolve()}:build"
    return Config.model_validate(
        {
            "seed": seed,
            "model": {"path": builder, "dtype": dtype},
            "data": {"max_prompt_tokens": MAX_PROMPT},
            "rollout": {"max_tokens": MAX_COMPLETION},
            "train": {"gradient_checkpointing": checkpointing},
        }
    )


def _vocabulary(model: PreTrainedModel) -> int:
    return min(model.get_input_embeddings().weight.shape[0], small_models.VOCABULARY)  # type: ignore[union-attr]


# -- training ----------------------------------------------------------------------------------------------------------


def microbatch(
    vocabulary: int, groups: Sequence[tuple[int, tuple[int, ...]]] = _GROUPS
) -> tuple[Microbatch, list[Any]]:
    """One microbatch, and its trajectories in the order of its sequences."""
    rng = np.random.default_rng(5)
    made: list[tuple[Group, np.ndarray]] = []
    for number, (prompt, completions) in enumerate(groups):
        prompt_ids = rng.integers(3, vocabulary, prompt).astype(np.int32)
        members = []
        for member, length in enumerate(completions):
            tokens = np.concatenate([prompt_ids, rng.integers(3, vocabulary, length).astype(np.int32)])
            mask = np.arange(tokens.size) >= prompt
            mask[prompt + length // 3] = length < 3  # a hole, as a tool's answer leaves
            nothing = np.zeros(tokens.size, np.float32)
            members.append(
                Trajectory(
                    number, member, len(completions), prompt, tokens, mask, nothing, nothing,
                    np.where(mask, 0, -1).astype(np.int32), _TEMPERATURES[number], FinishReason.STOP,
                )
            )  # fmt: skip
        group = Group(Ticket(number, 0, 1), Prompt(number, prompt_ids, ""), tuple(members))
        made.append((group, np.ones(len(members))))
    (batch,) = pack_groups(made, 10_000)
    rows = [made[g][0].trajectories[m] for g, m in zip(batch.group_ids, batch.members, strict=True)]
    return batch, rows


@torch.no_grad()
def _not_causal(eager: PreTrainedModel) -> float:
    """How far log-probs of a row's first tokens move with what follows them, in nats; a top-k with ties does that."""
    _, rows = microbatch(_vocabulary(eager))
    tokens = torch.from_numpy(max(rows, key=lambda row: row.tokens.size).tokens.astype(np.int64))[None]
    whole = eager(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
    shorter = [
        eager(input_ids=tokens[:, :length], use_cache=False).logits[0].log_softmax(-1)
        for length in range(4, tokens.shape[1])
    ]
    return max(_apart(part, whole[: len(part)]) for part in shorter)


def _own(eager: PreTrainedModel, rows: list[Trajectory], weights_S: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs [S] of the scored tokens and gradients by name. Errors: Unbuildable where the class fails by itself."""
    eager.requires_grad_(True)
    try:
        parts = []
        for row in rows:
            logits_LV = _logits(eager, row.tokens)
            parts.append(_picked(logits_LV, row.tokens, np.flatnonzero(row.mask), row.temperature))
        logp_S = torch.cat(parts)
        (logp_S * weights_S.to(logp_S.dtype)).sum().backward()
    except Exception as error:
        raise Unbuildable(f"its own forward and backward: {_short(error)}") from error
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in eager.named_parameters()
    }
    eager.zero_grad(set_to_none=True)
    return logp_S.detach(), gradients


def _logits(eager: PreTrainedModel, tokens: np.ndarray) -> Tensor:
    """[L, V] by the class itself. Where it chooses rotary frequencies by the length of a row, of a row that is continued to the
    longest length that the settings allow."""
    row = torch.from_numpy(tokens.astype(np.int64))
    rope = str(getattr(eager.config.get_text_config(), "rope_parameters", None))
    if "'longrope'" in rope or "'dynamic'" in rope:
        row = torch.cat([row, row.new_full((MAX_PROMPT + MAX_COMPLETION - len(row),), 3)])
    return eager(input_ids=row[None], use_cache=False).logits[0, : len(tokens)]  # type: ignore[no-any-return]  # transformers: Any


def _picked(logits_LV: Tensor, tokens: np.ndarray, places: np.ndarray, temperature: float) -> Tensor:
    wide = logits_LV if logits_LV.dtype == torch.float64 else logits_LV.float()
    index = torch.from_numpy(places)
    logp = torch.log_softmax(wide[index - 1] / float(np.float32(temperature)), -1)
    return logp.gather(1, torch.from_numpy(tokens[places].astype(np.int64))[:, None])[:, 0]


def _train(policy: PolicyModel, checkpointing: bool, wanted: Wanted) -> tuple[float, float, str]:
    """(largest difference of a log-prob in nats, largest relative one of a gradient, its parameter)."""
    forward = PolicyForward(policy, checkpointing)
    policy.flat.zero_grad()
    with torch.no_grad():
        quiet_S, _ = forward(wanted.batch)
    logp_S, _ = forward(wanted.batch)
    (logp_S * wanted.weights_S.to(logp_S.dtype)).sum().backward()
    logprobs = max(_apart(quiet_S, wanted.logp_S), _apart(logp_S.detach(), wanted.logp_S))
    found = dict(policy.flat.named_grads())
    if found.keys() != wanted.gradients.keys():
        raise RuntimeError(f"parameters {sorted(found.keys() ^ wanted.gradients.keys())[:4]} are on one side only")
    floor = _TINY * max(float(gradient.norm()) for gradient in wanted.gradients.values())
    worst, where = 0.0, ""
    for name, gradient in wanted.gradients.items():
        size = max(float(gradient.norm()), floor, 1e-30)
        difference = float((found[name].double() - gradient.double()).norm()) / size
        if not difference <= worst:
            worst, where = difference, name
    return logprobs, worst, where


def _apart(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape or not torch.isfinite(ours).all():
        return float("inf")
    return float((ours.double() - theirs.double()).abs().max())


def _checkpointed(name: str, seed: int, dtype: str, wanted: Wanted) -> str:
    try:
        policy = open_policy(_config(name, seed, dtype, True))
        logprobs, gradients, where = _train(policy, True, wanted)
    except ConfigError:
        return "refused"
    if logprobs <= NATS and gradients <= RELATIVE:
        return "right"
    return f"WRONG {logprobs:.2g} nats, gradients {gradients:.2g} ({where})"


# -- sampler -----------------------------------------------------------------------------------------------------------


async def _sample(measured: Measured, policy: PolicyModel, eager: PreTrainedModel) -> None:
    requests = _requests(_vocabulary(eager))
    measured.sampler = await _sampled(policy, {policy.version: eager}, requests, update=False)
    measured.updated = await _sampled(policy, {policy.version: eager}, requests, update=True)


def _requests(vocabulary: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(6)
    prompts = {which: rng.integers(3, vocabulary, length).astype(np.int32) for length, which, _ in _REQUESTS}
    return [
        GenerationRequest(
            prompts[which], SamplingParams(max_tokens=longest, ignore_eos=True), seed, prefix_key=f"prompt {which}"
        )
        for seed, (_, which, longest) in enumerate(_REQUESTS)
    ]


async def _sampled(
    policy: PolicyModel, models: dict[int, PreTrainedModel], requests: list[GenerationRequest], update: bool
) -> float:
    """Largest difference in nats. `update`: the weights change after some tokens; each token counts by its own version's."""
    recorder = Recorder(nvtx=False)
    answers: dict[int, Generation] = {}
    async with (
        ThreadLane("sweep", recorder) as lane,
        EmbeddedEngine(
            policy, None, lane, recorder, max_sequences=_ROWS, max_context=MAX_PROMPT + MAX_COMPLETION,
            prefill_tokens=_PREFILL, kv_after_update="recompute",
        ) as engine,
    ):  # fmt: skip

        async def generate(index: int) -> None:
            answers[index] = await engine.generate(requests[index])

        async def change() -> None:
            while engine.statistics()["decode_steps"] < _UPDATE_AT:
                await lane.run(lambda: None, name="tick")
            version = await lane.run(lambda: _advance(policy, models), name="train/finish", priority=1)
            await engine.update_weights(version)

        async with anyio.create_task_group() as tasks:
            for index in range(len(requests)):
                tasks.start_soon(generate, index)
            if update:
                tasks.start_soon(change)
    if update and len({int(version) for answer in answers.values() for version in answer.versions}) < 2:
        raise RuntimeError("no token was sampled by the new weights")
    return max(_distance(models, requests[index], answer) for index, answer in answers.items())


def _advance(policy: PolicyModel, models: dict[int, PreTrainedModel]) -> int:
    """Every weight moves, as by an optimizer step that matters; the eager copy of the new version goes into `models`."""
    generator = torch.Generator().manual_seed(9)
    eager = copy.deepcopy(models[policy.version])
    targets = dict(eager.named_parameters())
    with torch.no_grad():
        for name, master in policy.flat.named_masters():
            noise = torch.randn(master.shape, generator=generator).to(master.dtype)
            master.add_(noise * 0.1 * float(master.abs().mean()))
            targets[name].copy_(master)
    version = policy.advance()
    models[version] = eager
    return version


@torch.no_grad()
def _distance(models: dict[int, PreTrainedModel], asked: GenerationRequest, answer: Generation) -> float:
    tokens = np.concatenate([asked.prompt_ids, answer.token_ids])
    if answer.token_ids.size != asked.sampling.max_tokens:
        raise RuntimeError(f"{answer.token_ids.size} tokens where {asked.sampling.max_tokens} were asked for")
    places = np.arange(asked.prompt_ids.size, tokens.size)
    worst = 0.0
    for version in {int(v) for v in answer.versions}:
        logits_LV = _logits(models[version], tokens)
        own = answer.versions == version
        expected = _picked(logits_LV, tokens, places[own], 1.0)
        worst = max(worst, _apart(torch.from_numpy(answer.logprobs[own]), expected))
    return worst


def _refusal(error: ConfigError) -> str:
    """In one line; where the gate lists what each path computes, that list alone, each reason once."""
    first, *listed = str(error).removeprefix("model.path: ").splitlines()
    reasons: dict[str, list[str]] = {}
    for line in listed:
        path, _, reason = line.strip().partition(": ")
        reasons.setdefault(reason, []).append(path)
    return "; ".join(f"{', '.join(paths)}: {reason}" for reason, paths in reasons.items()) or first


def _short(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
