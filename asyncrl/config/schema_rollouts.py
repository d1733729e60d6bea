"""The sections about what is trained on: rewards, rollouts, groups from outside, replay. Part of the schema (`schema.py`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, StrictInt, StrictStr, model_validator

from asyncrl.types import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE

from .section import LocalPath, SettingsSection, field


class _Scorer(SettingsSection):
    @model_validator(mode="before")
    @classmethod
    def _address(cls, value: Any) -> Any:
        """A text is one with nothing but its address, the first field."""
        return {next(iter(cls.model_fields)): value} if isinstance(value, str) else value


class RewardFunctionConfig(_Scorer):
    """A reward function, and how its scores count."""

    function: LocalPath = Field(
        description="`file.py:function` or `module:function`, in the form of TRL, verl or reasoning-gym."
    )
    weight: float = field(1.0, "Weight in the sum of the components.")
    name: str | None = field(None, "Name in metrics; the function's own by default.")


class RewardModelConfig(_Scorer):
    """One reward model: a classifier whose output is a reward."""

    path: LocalPath = Field(
        description="Directory or hub id of a sequence classifier, or `file.py:function` that takes a seed and returns "
        "(torch module, tokenizer)."
    )
    weight: float = field(1.0, "Weight in the sum of the components.")
    name: str | None = field(None, "Name in metrics; the last part of the path by default.")
    dtype: Literal["float32", "bfloat16", "float64"] | None = field(
        None, "Dtype of its weights; model.dtype by default."
    )
    label: int | None = field(None, "Which output is the score, counted from 0; needed where there are several.", ge=0)
    max_tokens: int | None = field(
        None,
        "Longest text in its tokens; what its configuration allows by default. A longer one is never cut: `on_error` says "
        "what it means.",
        ge=1,
    )


class OverlongConfig(SettingsSection):
    """Soft overlong punishment (DAPO): a component of the reward, `overlong`."""

    cache: int | None = field(
        None,
        "Soft overlong punishment (DAPO): the component `overlong` falls from 0 to -1 over the last n tokens before "
        "max_length; null is off.",
        ge=1,
    )
    max_length: int | None = field(
        None,
        "Sampled tokens of a whole episode, all its requests together, from which on `overlong` is -1. single_turn: "
        "rollout.max_tokens; must be given for other environments and for groups from outside.",
        ge=1,
    )
    weight: float = field(1.0, "Weight of that component in the sum.", ge=0)


class TextConfig(SettingsSection):
    """What of a completion's sampled tokens is in the text that rewards read. The special token that ended it never is."""

    special_tokens: bool = field(
        True, "Special tokens that the policy wrote before the end are in the text; TRL leaves them out: false."
    )
    stop: bool = field(
        True, "The stop string, or the plain stop token, that ended the completion is in the text, as in TRL."
    )
    opened: bool = field(
        False,
        "What the prompt has already opened of the answer, as a chat template does with <think>, stands in front of the text; TRL: "
        "false.",
    )


class RewardConfig(SettingsSection):
    """What scores completions, and what is made of the scores."""

    functions: tuple[RewardFunctionConfig, ...] = field((), "The reward functions.")
    model: tuple[RewardModelConfig, ...] = field(
        (), "Reward models, on the run's device: a path, or a list; their scores are added to those of the functions."
    )
    workers: int = field(1, "Worker processes.", ge=1)
    concurrency: int = field(64, "Calls of `async def` functions that one worker runs at a time.", ge=1)
    timeout_s: float = field(
        30.0,
        "Deadline of one call in seconds. A coroutine that misses it is cancelled; else its worker is killed.",
        gt=0,
    )
    retries: int = field(
        2,
        "How often a call of an `async def` function that failed or missed its deadline is tried again, after about 1, 2, 4, ... "
        "seconds. Other functions are never tried again: they would fail alike.",
        ge=0,
    )
    on_error: Literal["fail", "none", "zero"] = field(
        "fail",
        "A function that raised, crashed or timed out, a score that is no finite number (of that completion alone), a text "
        "that a reward model cannot score: end the run (of groups of other processes, the second time), count as not "
        "applicable, or count as 0.",
    )
    worker_max_mib: int | None = field(
        2048,
        "Replace a worker that has gained more memory than this since the first calls of its functions; its successor starts "
        "beside it. null: never.",
        ge=1,
    )
    worker_max_calls: int | None = field(None, "Replace a worker after so many calls, likewise; null: never.", ge=1)
    batch: Literal["auto", "group", "trajectory"] = field(
        "auto",
        "One call of the functions per group, or one per completion as soon as it is there; auto: group for single_turn. "
        "A failure or a missed deadline concerns everything in the call.",
    )
    scale_adv_by_len: bool = field(
        False, "Multiply every reward by the scored tokens of its completion before a group is compared (Atropos)."
    )
    text: TextConfig = TextConfig()
    overlong: OverlongConfig = OverlongConfig()


class DoorConfig(SettingsSection):
    """Groups from other processes: `asyncrl.client` through shared memory, Atropos environments over HTTP."""

    ring: str | None = field(
        None,
        "Open a record ring of this name in shared memory; every group comes through it and none from data.train. With "
        "several ranks each has its own, rank r > 0 `name-r`; all members of a group go to one of them.",
    )
    ring_mib: int = field(256, "Shared memory of the ring in MiB, for all producers together.", ge=1)
    producer_mib: int = field(16, "Part of one producer in MiB; no record can be larger: it is refused.", ge=1)
    producer_records: int = field(256, "Records that one producer can have in its part.", ge=1)
    timeout_s: float | None = field(
        600.0, "How long an incomplete group waits for its members, from its first one; null: without end.", gt=0
    )
    on_timeout: Literal["drop", "partial", "error"] = field(
        "drop", "Then: drop it, train the members that came (at least two), or end the run with an error."
    )
    reconnect_s: float = field(
        30.0,
        "When the last producer of an epoch is gone, its incomplete groups end after this long, unless one comes with "
        "the same epoch.",
        ge=0,
    )
    http_port: int | None = field(
        None,
        "Speak Atropos' API on this port too (extra [http]); 0: any free one. One port a machine; what comes is spread "
        "over the rings of the ranks there.",
        ge=0,
        le=65535,
    )
    http_host: str = field(
        "127.0.0.1", "The address of that port. Nothing is encrypted: beyond this machine only networks that you trust."
    )
    http_key: str | None = field(
        None,
        "What clients must know, as the first part of the path of their URL or as `Authorization: Bearer`: 16 characters or "
        'more. Left out: made anew for each run, which prints the whole URL. "": none, on 127.0.0.1 only.',
        exclude=True,
    )
    http_names: tuple[str, ...] = field(
        (), "Names by which clients call this machine (their Host header), besides `http_host` and its own name."
    )


class FilterConfig(SettingsSection):
    """Groups that are dropped, and others sampled in their place (DAPO's dynamic sampling)."""

    dynamic_sampling: bool = field(
        False,
        "Drop groups without a learning signal (all rewards equal) and sample others in their place (DAPO). A punishment by "
        "reward.overlong is no signal.",
    )
    min_mean_reward: float | None = field(
        None, "Drop and replace groups whose mean reward is below this: too hard to learn from."
    )
    max_mean_reward: float | None = field(
        None, "Drop and replace groups whose mean reward is above this: too easy to learn from."
    )
    by: str = field(
        "reward",
        "What these three filters look at: `reward`, the weighted sum before reward.overlong, or the name of one component.",
    )
    max_refills: int = field(
        8, "Groups that the filters may drop in one step, in multiples of groups_per_step; further ones are kept.", ge=0
    )


class RolloutConfig(SettingsSection):
    """The groups: how many, how large, how old they may become, and how their tokens are sampled."""

    group_size: int = field(8, "Completions per prompt.", ge=1)
    groups_per_step: int = field(8, "Groups (prompts) per optimizer step, over all ranks.", ge=1)
    max_staleness: int | None = field(
        None,
        "Largest age, in steps, at which a group may be trained; so many batches are generated ahead (axolotl, TRL: "
        "prefetch_depth). Preset: 0, 1, 2.",
        ge=0,
    )
    streaming: bool | None = field(
        None, "Train each group as it arrives (preset async), or wait for the whole step and train it in prompt order."
    )
    weight_sync_interval: int = field(
        1,
        "Hand new weights to the engines every k steps, counted since the last time; k - 1 is added to the age that "
        "max_staleness allows. Evaluations and the end of the run hand over sooner.",
        ge=1,
    )
    sync_warmup_steps: int = field(
        0, "First steps for which nothing is generated ahead, so that all their groups have age 0.", ge=0
    )
    streaming_min_groups: int = field(
        1,
        "Groups of a step that wait for each other before they are trained, where streaming; the last may be fewer.",
        ge=1,
    )
    late: Literal["wait", "drop"] = field(
        "wait", "A group at its deadline: the step waits for it, or drops and counts it."
    )
    temperature: float = field(1.0, "Sampling temperature.", ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)
    top_p: float = field(1.0, "Nucleus filter; 1 is off.", gt=0, le=1)
    top_k: int = field(0, "Top-k filter; 0 is off.", ge=0)
    min_p: float = field(
        0.0,
        "Tokens with less than this share of the largest probability are not sampled, behind top_k and top_p; 0 is off.",
        ge=0,
        le=1,
    )
    repetition_penalty: float = field(
        1.0,
        "Logits of tokens in prompt or completion are divided by it where positive, multiplied where negative; 1 is off.",
        gt=0,
    )
    presence_penalty: float = field(
        0.0, "Taken off the logits of tokens that stand in the completion (OpenAI, vLLM).", ge=-2, le=2
    )
    frequency_penalty: float = field(
        0.0, "The same, times how often the token stands there (OpenAI, vLLM).", ge=-2, le=2
    )
    logit_bias: dict[StrictInt | StrictStr, float] = field(
        {},
        "Added to the logits of tokens, before the penalties: -100 (all but never sampled) to 100 by token id (a number, also in "
        "quotes, as OpenAI has it) or by the text of one token.",
    )
    bad_words: tuple[str, ...] = field(
        (),
        "Texts that a completion never holds as the tokens that the tokenizer makes of them, alone and behind a space (vLLM): the "
        "last of these is not sampled behind the others.",
    )
    min_tokens: int = field(
        0,
        "No stop string, stop token or end of sequence ends a completion of fewer tokens (and none is sampled).",
        ge=0,
    )
    max_tokens: int = field(256, "Longest completion in tokens.", ge=1)
    stop: tuple[str, ...] = field((), "Strings that end a completion.")
    stop_token_ids: tuple[int | str, ...] = field(
        (), "Tokens that end a completion, by id or by their text, beside those of the tokenizer and the model."
    )
    ignore_eos: bool = field(
        False, "Sample on after the end-of-sequence token, to max_tokens: benchmarks of fixed length."
    )
    timeout_s: float = field(
        3600.0,
        "Longest episode of one completion, waits for the engine included; one that takes longer has failed.",
        gt=0,
    )
    retries: int = field(
        2,
        "How often an episode that failed is played again, with the same random numbers, before its group has failed.",
        ge=0,
    )
    max_failed_groups: int | None = field(
        None,
        "Groups that may fail before the run ends; another prompt takes the place of each. Default: a tenth of all groups so "
        "far, and at least those of a step.",
        ge=0,
    )
    environment: LocalPath = field(
        "single_turn", "`single_turn`, or `file.py:Class` / `module:Class` of an Environment."
    )
    filter: FilterConfig = FilterConfig()


class RerollConfig(SettingsSection):
    """Prompts that are played again because all their completions failed."""

    start_fraction: float = field(
        1.0,
        "Part of the run after which prompts of which every completion failed, since its first step, are played again; 1 is "
        "never.",
        ge=0,
        le=1,
    )
    groups_per_step: int = field(1, "Such prompts per step and rank, in place of fresh ones.", ge=1)
    attempts: int = field(1, "How often a prompt is played again at most.", ge=1)
    reward_at_most: float = field(0.0, "A completion with at most this reward has failed.")


class ReplayConfig(SettingsSection):
    """Trained groups that are trained a second time, in the place of groups that have no signal."""

    size: int = field(
        0,
        "Trained groups with a strong signal that are kept, per rank, to take the place of groups without any; 0 is off.",
        ge=0,
    )
    max_age: int = field(
        8,
        "Oldest token of a replayed group, in policy versions: the exception to max_staleness, with a bound of its own.",
        ge=0,
    )
