"""Data types that several packages use: prompts, generations, trajectories, groups, microbatches, step results.

This module does not import torch: environments, rewards and other processes may run without torch. Arrays are one-dimensional
numpy arrays on the host, unless a shape says otherwise. The lane, the thread that owns the device, makes tensors of the arrays.

Shape legend: L tokens and t replies of one trajectory, C tokens of one completion, P tokens of a prompt, G trajectories of a group,
T packed tokens of a microbatch, S scored tokens (loss mask 1), B sequences and N nodes of a microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
# [L, layers, k]: the k experts that each layer chose for each token. -1: not known (records/check.py).
RoutesArray: TypeAlias = npt.NDArray[np.signedinteger[Any]]
Messages: TypeAlias = list[dict[str, Any]]


# Bounds of temperatures, except 0 for greedy sampling. Logits and gradients are divided by the temperature in float32, and stay
# finite within these bounds. Training needs a temperature above 0, because logits divided by 0 have no log-probs.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-6, 1e6


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or rollout.max_context reached
    ABORT = "abort"  # another process cancelled the request


class Normaliser(StrEnum):
    """The divisor of the sum of a loss term or metric. Sums are divided when the whole step is known."""

    TOKENS = "tokens"  # number of tokens with loss mask 1
    SEQUENCES = "sequences"  # number of all sequences, even fully masked
    SEQUENCES_X_MAX_LENGTH = "sequences_x_max_length"  # number of sequences x the configured max completion length
    # Number of microbatches of all ranks. For a loss that adds one mean per microbatch (bnpo). Not with rollout.streaming.
    MICROBATCHES = "microbatches"
    NONE = "none"  # not divided


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. Temperature 0 is greedy. Filters, penalties and bans are off by default. Order: bias, repetition penalty,
    frequency and presence penalty, bans (`bad_words`; stop tokens before `min_tokens`), temperature, filters (top_k, top_p, min_p).

    logit_bias: token id -> number from -100 to 100 that is added to the logit of the token. repetition_penalty: for tokens in
    prompt and completion, as in transformers and vLLM. frequency_penalty, presence_penalty: for tokens in the completion, as in
    OpenAI's API. bad_words: the token ids of each banned text; the last id is not sampled right after the ids before it.
    min_tokens: no stop token or stop string ends a shorter completion.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0

    @property
    def changes_logits(self) -> bool:
        """Whether a bias, penalty or ban is set. Temperature and filters do not count."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0) or bool(self.logit_bias or self.bad_words or self.min_tokens)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to sample. Requests with equal `prefix_key` must have equal `prompt_ids`: the engine prefills the prompt once.

    The random numbers of a request depend on `seed` alone, not on its arrival or its neighbours in the batch. Waiting requests
    start by `priority`, the smallest first, then by arrival. A running request is not stopped for another request.

    Requests of one `session` continue each other, or branch from a common beginning. The engine may keep the keys and values of a
    finished request for the next request, at most until `Engine.end_session`.
    """

    prompt_ids: Int32Array  # [P]
    sampling: SamplingParams
    seed: int
    prefix_key: str | None = None
    priority: int = 0
    # Id of the group of this request. With `preset: sync` the id determines the worker.
    group: int | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A sampled completion. If a stop token was sampled, `token_ids` ends with it."""

    token_ids: Int32Array  # [C]
    # [C] nats, of the softmax over the whole vocabulary before bias and penalties, at the temperature (greedy: at temperature 1).
    logprobs: Float32Array
    # [C] nats, of the distribution after bias, penalties, bans and filters (greedy: all 0).
    sampled_logprobs: Float32Array
    versions: Int32Array  # [C] policy version whose weights sampled the token
    finish_reason: FinishReason
    # [P + C, layers, k], prompt included. -1 for the last token, which went through no layer.
    routed_experts: RoutesArray | None = None
    stop: str | None = None  # the stop string that ended the completion


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A reply to an agent: a message in OpenAI's form (arguments of tool calls are JSON texts), and its tokens."""

    message: dict[str, Any]
    generation: Generation
    prompt_ids: Int32Array  # [P]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenized row. `group_id`: the row's ordinal; above all ordinals if rerolled or submitted; negative in evaluations."""

    group_id: int
    ids: Int32Array  # [P]
    prompt: str | Messages  # as the user wrote it, or decoded from given token ids
    columns: Mapping[str, Any] = field(default_factory=dict)  # the other columns of the row, for the rewards
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The tokens of one episode. Per-token columns are aligned to `tokens`. Log-probs: 0 where `mask` is False; NaN: not known.

    `reward` is None until it is computed, and if no component applies. A component that does not apply is None in `components`.

    An episode whose texts branch (sub-agents, a rewritten history) is a tree. `tokens` is then cut into segments, and `branches`
    says which token each segment follows. A token that several texts share is in `tokens` once, with one mask and version.
    The path of a token is the text that the model read to predict the token, and the token itself. Without `branches` all tokens
    are one text.
    """

    group_id: int
    member: int
    group_size: int
    # P. The first P tokens are the prompt, and lie in the first segment. A group has one prompt, unless agents write prompts.
    prompt_length: int
    tokens: Int32Array  # [L]
    # [L] True where the policy sampled the token and the loss may train it.
    mask: BoolArray
    logprobs: Float32Array  # [L] the sampler's, whole vocabulary, at `temperature`
    sampled_logprobs: Float32Array  # [L] the sampler's, after bias, penalties, bans, filters
    versions: Int32Array  # [L] policy version of the sampler; -1: none or not known
    temperature: float
    finish_reason: FinishReason
    completion: str | Messages = ""
    reward: float | None = None
    components: Mapping[str, float | None] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)  # `FUNCTION/name` -> value that FUNCTION logged
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # [L, layers, k] experts that the sampler chose for each token; None: not recorded.
    routed_experts: RoutesArray | None = None
    # [n, 2] rows (start, after), starts ascending: a segment begins at token `start`, and follows token `after` < start. If `after`
    # is -1, the segment begins a new text, whose first token is not sampled. The first segment begins at token 0 and has no row.
    branches: Int32Array | None = None
    # [t] index of the first sampled token of each reply, ascending. None: all sampled tokens are one reply.
    turns: Int32Array | None = None
    # [t] the reward of each reply. The last reply also gets `reward` minus the sum of `turn_rewards`.
    turn_rewards: tuple[float, ...] | None = None

    def segments(self) -> list[tuple[int, int, int]]:
        """(start, end, after) of each segment, which has the tokens [start, end) and follows the token `after` (-1: none)."""
        rows = [] if self.branches is None else self.branches.tolist()
        starts, after = [0, *(start for start, _ in rows)], [-1, *(after for _, after in rows)]
        return list(zip(starts, [*starts[1:], int(self.tokens.size)], after, strict=True))

    def positions(self) -> Int64Array:
        """[L] the number of tokens before each token on its path."""
        positions = np.arange(self.tokens.size, dtype=np.int64)
        for start, end, after in self.segments()[1:]:
            positions[start:end] += (positions[after] + 1 if after >= 0 else 0) - start
        return positions

    def path(self, token: int) -> Int64Array:
        """The indices of the tokens on the path of `token`, in order. `path(-1)` is the path of the last token."""
        end, parts = token % self.tokens.size + 1, []
        for start, _, after in reversed(self.segments()):
            if start < end:
                parts.append(np.arange(start, end, dtype=np.int64))
                end = after + 1
        return np.concatenate(parts[::-1])

    @property
    def longest_path(self) -> int:
        """Number of tokens of the longest path. Without branches this is the number of all tokens."""
        return int(self.tokens.size) if self.branches is None else int(self.positions().max()) + 1

    @property
    def completion_ids(self) -> Int32Array:
        """The tokens on the path of the last token, without the prompt. The prompt is the first `prompt_length` tokens, or, if the
        path does not begin with these, all tokens of the path before its first sampled token."""
        if self.branches is None:
            return self.tokens[self.prompt_length :]
        path, sampled = self.path(-1), np.flatnonzero(self.mask[self.path(-1)])
        shared = path.size > self.prompt_length and path[self.prompt_length - 1] == self.prompt_length - 1
        prompt = self.prompt_length if shared else int(sampled[0]) if sampled.size else path.size
        return self.tokens[path[prompt:]]

    @property
    def oldest_version(self) -> int:
        """The oldest known policy version that sampled a trained token. -1 if none is known, or no token is trained."""
        known = self.versions[self.mask & (self.versions >= 0)]
        return int(known.min()) if known.size else -1

    @property
    def newest_version(self) -> int:
        """The newest policy version that sampled a trained token. -1 if no token is trained, or no version is known."""
        sampled = self.versions[self.mask]
        return int(sampled.max()) if sampled.size else -1

    @property
    def completion_length(self) -> int:
        """Number of tokens after the prompt, in all branches, with mask True or False. A shared token counts once."""
        return int(self.tokens.size) - self.prompt_length

    @property
    def sampled_length(self) -> int:
        """Number of tokens with mask True, so without tokens of tools. Length penalties, filters and metrics use this number."""
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True)
class Ticket:
    """The ledger's permission for one admitted group to exist, with the deadline of its training."""

    group_id: int
    # The earliest turn whose weights can have sampled a token of the group. Here a turn is the training of one batch, not a reply.
    # With one optimizer step per batch a turn is a version.
    oldest: int
    # `oldest` + `turns_bound` (config/resolve.py): the last turn at which the group may be trained.
    deadline: int


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one group, sorted by member."""

    ticket: Ticket
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]  # [G]

    @property
    def group_id(self) -> int:
        """The group id of the ticket."""
        return self.ticket.group_id

    @property
    def oldest_version(self) -> int:
        """The smallest `oldest_version` that is not -1 among the members; -1 if every member has -1."""
        return min((t.oldest_version for t in self.trajectories if t.oldest_version >= 0), default=-1)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Packed token trees for one forward and backward.

    A node has one or more adjacent tokens. Nodes are in depth-first preorder, and their tokens in the order of the nodes. So the
    tokens of a node's descendants come right after the node's tokens. A token attends to the tokens of its node up to itself, and
    to all tokens of all ancestors. Its position is the number of tokens that it attends to, without itself. A sequence is a
    trajectory and has the tokens of one node or more. Only the S tokens with loss mask 1 are scored: `source[s]` is the packed
    index of the token whose hidden state predicts `target[s]`. Several scored tokens may have the same source.
    """

    tokens: Int64Array  # [T]
    positions: Int64Array  # [T]
    node_length: Int64Array  # [N]
    node_parent: Int64Array  # [N] the parent of each node; -1: none
    # [K] pairs, ascending: sequence `member_sequence` has the tokens of node `member_node`. If two branches of a sequence have
    # equal tokens, the pair is there twice.
    member_sequence: Int64Array
    member_node: Int64Array
    source: Int64Array  # [S]
    target: Int64Array  # [S]
    sequence: Int64Array  # [S] index of the sequence, in [0, B), non-decreasing
    sampler_logprobs: Float32Array  # [S] over the whole vocabulary, at `temperature`
    temperature: Float32Array  # [S] > 0
    advantages: Float32Array  # [S]
    versions: Int32Array  # [S]
    group_ids: Int64Array  # [B]
    members: Int64Array  # [B]
    old_logprobs: Float32Array | None = None  # [S] None: from the training forward, detached
    reference_logprobs: Float32Array | None = None  # [S]
    # [T, layers, k] experts for each packed token; None: the routers choose.
    routes: RoutesArray | None = None
    # [S] True: the surrogate loss uses the token. None: it uses all. Unused tokens still count in the divisor of the loss.
    keep: BoolArray | None = None
    # Scored tokens and sequences of groups that are not packed, because their gradient is zero. The divisor counts them.
    skipped_tokens: int = 0
    skipped_sequences: int = 0

    @property
    def sequences(self) -> int:
        """B, the number of trajectories."""
        return int(self.group_ids.size)

    @property
    def scored(self) -> int:
        """S, the number of tokens with loss mask 1."""
        return int(self.source.size)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of `finish_train_step`. Metrics are divided by their normalisers over all ranks."""

    version: int  # the new policy version
    loss: float
    grad_norm: float  # after the division by the normaliser, before clipping
    lr: float  # of this step
    tokens: int  # scored tokens of all ranks
    sequences: int  # of all ranks
    microbatches: int  # of this rank
    metrics: Mapping[str, float] = field(default_factory=dict)


class PostedVersion(NamedTuple):
    """A version on the weight board, and the half of the board that has its weights. `outputs`: the trainer's log-probs of a fixed
    row of tokens (models/outputs.py). None: workers do not compare this version."""

    version: int
    half: int
    outputs: Sequence[float] | None


class ClaimState(StrEnum):
    """The ledger's answer to a claim."""

    GRANTED = "granted"  # the group has a place in the open step
    # The free places are reserved for groups with earlier deadlines, or another rank must claim first.
    WAIT = "wait"
    FULL = "full"  # no further group can get a place in the step


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """Numbers of groups. Always `admitted == live + claimed + held + trained + dropped + failed`."""

    turn: int  # of the open step
    live: int  # admitted, not yet claimed
    claimed: int  # in the open step
    held: int  # trained, but the weights of the step are not yet sent
    admitted: int
    trained: int  # weights of the step sent, slot released
    dropped: int
    failed: int
    slots: int  # the limit of live + claimed + held
