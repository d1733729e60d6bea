"""Tiny models, random groups, and the one-shot gradient that everything else is compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support.trajectories import trajectory
from support.trees import lines_of, random_tree
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from asyncrl.algorithms.base import Loss, LossInputs
from asyncrl.algorithms.registry import LOSSES, build_loss
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.models.policy import PolicyModel
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import Group, Microbatch, Normaliser, Prompt, StepResult, Ticket

VOCABULARY = 41
MAX_LENGTH = 12
EXPERTS = 5

_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.4,
}  # fmt: skip
_CAPPED = {"final_logit_softcapping": 2.0, "layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 8}
_EXPERTS = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True,
    "output_router_logits": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip
_WINDOW = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
_KINDS: dict[str, tuple[type[PretrainedConfig], dict[str, object]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {}),
    "narrow": (Qwen3Config, {"head_dim": 4}),
    "six heads": (LlamaConfig, {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}),
    # Experts that an auxiliary loss balances.
    "moe": (Qwen3MoeConfig, _EXPERTS),
    # Windows with capped scores, and with sinks and experts.
    "window": (Gemma2Config, _WINDOW | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "sinks": (GptOssConfig, _WINDOW | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    # What a model may do around its head: soft-capped logits, logits that are divided, a bias.
    "capped": (Gemma3TextConfig, _CAPPED),
    "scaled": (GraniteConfig, {"logits_scaling": 0.25}),
    "biased": (PhiConfig, {"partial_rotary_factor": 0.5}),
}
HEADS = ("capped", "scaled", "biased")


class WideRouter(Qwen3MoeTopKRouter):
    """Computes as transformers' router, which takes the softmax in float32, but in float64 for float64 logits."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        probs = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        top, experts = torch.topk(probs, self.top_k, dim=-1)
        return logits, (top / top.sum(-1, keepdim=True)).to(logits.dtype), experts


def tiny_module(kind: str = "llama", tied: bool = True, seed: int = 0) -> PreTrainedModel:
    family, settings = _KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(
            family(**_SHAPE | settings, tie_word_embeddings=tied)
        )
        if kind == "biased":
            torch.nn.init.normal_(module.get_output_embeddings().bias)
        for name, parameter in module.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for part in module.modules():
        if isinstance(part, Qwen3MoeTopKRouter):
            part.__class__ = WideRouter
    return module


def tiny_policy(dtype: str = "float64", kind: str = "llama", tied: bool = True, seed: int = 0) -> PolicyModel:
    return PolicyModel(tiny_module(kind, tied, seed), dtype)


def make_group(
    rng: np.random.Generator,
    group_id: int,
    size: int = 4,
    masked: tuple[int, ...] = (),
    holes: bool = False,
    temperature: float = 0.8,
    version: int = 0,
) -> tuple[Group, np.ndarray]:
    """A group with random tokens, sampler log-probs and advantages (float32 values). `masked` members score nothing."""
    prompt_ids = rng.integers(0, VOCABULARY, rng.integers(1, 7)).astype(np.int32)
    trajectories = []
    for member in range(size):
        completion = rng.integers(0, VOCABULARY, rng.integers(1, MAX_LENGTH + 1)).astype(np.int32)
        tokens = np.concatenate([prompt_ids, completion])
        mask = np.arange(tokens.size) >= prompt_ids.size
        if holes:
            mask &= rng.random(tokens.size) < 0.6
        if member in masked:
            mask[:] = False
        given = {"prompt_length": prompt_ids.size, "mask": mask, "version": version, "temperature": temperature}
        logprob = -rng.random(tokens.size) * 5 - 0.1
        trajectories.append(trajectory(group_id, member, size, tokens, **given, logprob=logprob))
    prompt = Prompt(group_id, prompt_ids, "")
    advantages = rng.standard_normal(size).astype(np.float32).astype(np.float64)
    return Group(Ticket(group_id, 0, 2), prompt, tuple(trajectories)), advantages


def make_trees(rng: np.random.Generator, group_id: int, size: int = 3) -> tuple[Group, np.ndarray]:
    """A group of few ids, so that branches and members share sampled tokens; its last member is one line."""
    prompt = rng.integers(1, 4, rng.integers(1, 7)).tolist()
    members = tuple(
        random_tree(
            rng, group_id, i, size, prompt=prompt, segments=0 if i == size - 1 else 4, vocabulary=4, temperature=0.8
        )
        for i in range(size)
    )
    advantages = rng.standard_normal(size).astype(np.float32).astype(np.float64)
    return Group(Ticket(group_id, 0, 2), Prompt(group_id, members[0].tokens[: len(prompt)], ""), members), advantages


LOSS = build_loss("grpo")


def microbatches(seed: int = 0, groups: int = 3, **kwargs: object) -> list[Microbatch]:
    rng = np.random.default_rng(seed)
    return [m for i in range(groups) for m in pack_groups([make_group(rng, i, **kwargs)], 1000)]


def make_trainer(dtype: str = "float64", world: object = None, **config: object) -> TorchTrainer:
    settings = TrainConfig(**{"lr": 0.01, **config})
    return TorchTrainer(tiny_policy(dtype), settings, world, max_completion_length=MAX_LENGTH)


def weights(core: TorchTrainer) -> torch.Tensor:
    return core.policy.flat.master.clone()


def train_step(core: Any, batches: list[Microbatch] | None = None, loss: Loss = LOSS) -> StepResult:
    batches = microbatches() if batches is None else batches
    if loss.needs_whole_step:
        entropies = [core.compute_entropies(batch) for batch in batches] if loss.top_entropy_quantile < 1 else []
        loss, batches = core.survey(loss, batches, entropies)
    core.begin_train_step(loss)
    for batch in batches:
        core.train_microbatch(batch)
    return core.finish_train_step()


STREAMED = tuple(sorted(set(LOSSES) - {"bnpo"}))


def everything(name: str, *, top: float = 1.0, entropy_coef: float = 0.05) -> Loss:
    """The loss with every term that can be had at once."""
    return build_loss(
        name, epsilon=0.1, cispo_high=1.5,
        importance_mode="token_mask" if name == "vespo" else "sequence_mask_tis", importance_cap=3.0, importance_floor=0.2,
        importance_veto=0.01, importance_log_clamp=5.0, off_policy_mask_threshold=0.5, kl_coef=0.05,
        use_bias_correction_kl=True, entropy_coef=entropy_coef, top_entropy_quantile=top,
    )  # fmt: skip


def old_and_reference(sampler: np.ndarray) -> dict[str, np.ndarray]:
    """Columns that belong to a token wherever it is packed."""
    return {"old_logprobs": sampler * np.float32(0.9), "reference_logprobs": sampler * np.float32(1.1)}


def with_columns(batch: Microbatch) -> Microbatch:
    return replace(batch, **old_and_reference(batch.sampler_logprobs))


def with_routes(batch: Microbatch) -> Microbatch:
    """That belong to a token wherever it is packed; every seventh is not known."""
    start = batch.tokens * 3 + batch.positions
    first = (start[:, None] + np.arange(2)) % EXPERTS
    routes = np.stack([first, (first + 1 + start[:, None] % (EXPERTS - 1)) % EXPERTS], -1).astype(np.int8)
    routes[start % 7 == 0] = -1
    return replace(batch, routes=routes)


def _scored_columns(
    logits: torch.Tensor, ids: torch.Tensor, groups: list[tuple[Group, np.ndarray]]
) -> dict[str, torch.Tensor]:
    """Every column [S] of the scored tokens, from logits [R, L, V] of the lines of all trajectories."""
    trajectories = [t for group, _ in groups for t in group.trajectories]
    advantages = [a for _, values in groups for a in values]
    columns: dict[str, list[torch.Tensor]] = {n: [] for n in ("logp", "entropy", "sampler", "advantage", "sequence")}
    first = 0
    for row, t in enumerate(trajectories):
        lines = lines_of(t)
        logp = torch.log_softmax(logits[first : first + len(lines)] / float(np.float32(t.temperature)), -1)
        index = np.flatnonzero(t.mask)
        # A token is trained once, in the first line that has it.
        at = [next((n, line.index(i)) for n, line in enumerate(lines) if i in line) for i in index.tolist()]
        line, place = torch.tensor(at, dtype=torch.int64).reshape(-1, 2).T
        columns["logp"].append(logp[line, place - 1, ids[first + line, place]])
        columns["entropy"].append(-(logp.exp() * logp).sum(-1)[line, place - 1])
        first += len(lines)
        columns["sampler"].append(torch.from_numpy(t.logprobs[t.mask]))
        columns["advantage"].append(torch.full((index.size,), float(advantages[row]), dtype=torch.float64))
        columns["sequence"].append(torch.full((index.size,), row))
    return {name: torch.cat(values) for name, values in columns.items()}


def oracle_gradient(
    module: PreTrainedModel,
    groups: list[tuple[Group, np.ndarray]],
    loss: Loss,
    max_length: int = MAX_LENGTH,
    columns_too: bool = False,
    top: float = 1.0,
) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) of the whole batch at once: a plain transformers forward over padded rows [R, L], no packing. A trajectory
    with branches has a row for each of its paths.

    `columns_too`: with the old and reference columns of `old_and_reference`. `top`: share of the top-entropy mask.
    """
    module = module.double()
    module.set_attn_implementation("sdpa")  # the eager one computes its softmax in float32
    trajectories = [t for group, _ in groups for t in group.trajectories]
    rows = [t.tokens[line].astype(np.int64) for t in trajectories for line in lines_of(t)]
    ids = torch.zeros(len(rows), max(row.size for row in rows), dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : row.size] = torch.from_numpy(row)
        attention[number, : row.size] = 1
    joined = _scored_columns(module(input_ids=ids, attention_mask=attention, use_cache=False).logits, ids, groups)
    extra: dict[str, torch.Tensor] = {}
    if columns_too:
        found = old_and_reference(joined["sampler"].numpy())
        extra = {
            "old_logp_S": torch.from_numpy(found["old_logprobs"]).double(),
            "reference_logp_S": torch.from_numpy(found["reference_logprobs"]).double(),
        }
    kept = joined["logp"].numel()
    if top < 1:
        entropy_S = joined["entropy"].detach()
        extra["keep_S"] = entropy_S >= entropy_S.quantile(1 - top)
        kept = int(extra["keep_S"].sum())
    inputs = LossInputs(
        logp_S=joined["logp"],
        entropy_S=joined["entropy"],
        sampler_logp_S=joined["sampler"].double(),
        advantage_S=joined["advantage"],
        sequence_S=joined["sequence"],
        sequences=len(trajectories),
        **extra,
    )
    count = {
        Normaliser.TOKENS: float(joined["logp"].numel()),
        Normaliser.SEQUENCES: float(len(trajectories)),
        Normaliser.SEQUENCES_X_MAX_LENGTH: float(len(trajectories) * max_length),
        Normaliser.MICROBATCHES: 1.0,
        Normaliser.NONE: 1.0,
    }
    # The entropy bonus is a mean over the tokens that it acts on.
    value = loss.with_bonus_scale(count[loss.normaliser] / kept)(inputs).total / count[loss.normaliser]
    module.zero_grad()
    value.backward()
    return float(value.detach()), {n: p.grad.clone() for n, p in module.named_parameters() if p.requires_grad}
