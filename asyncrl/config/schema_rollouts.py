"""Part of the schema (`schema.py`): rewards, groups from other processes, the endpoint for agents, rollouts, reroll and replay."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, StrictInt, StrictStr, model_validator

from asyncrl.types import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE

from .section import LocalPath, SettingsSection, Untyped, field


class _ShortFormSection(SettingsSection):
    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """A string is short for a section in which only the first field (`function`, `text` or `path`) is set."""
        return {next(iter(cls.model_fields)): value} if isinstance(value, str) else value


class RewardFunctionConfig(_ShortFormSection):
    """A reward function and the weight of its scores."""

    function: LocalPath = Field(
        description="`file.py:function` or `module:function`, with the signature that TRL, verl or reasoning-gym expects."
    )
    weight: float = field(1.0, "Weight in the sum of the components.")
    name: str | None = field(None, "Name in metrics; default: the name of the function.")
    components: dict[str, float] = field(
        {},
        "For a function that returns mappings: name in a mapping -> weight of the component `NAME/name`, times `weight`.",
    )


class CriterionConfig(_ShortFormSection):
    """One criterion of a judge."""

    text: str = Field(description="What a completion must be or do for the highest score.", min_length=1)
    weight: float = field(1.0, "Weight in the sum of the components.")


class JudgeConfig(SettingsSection):
    """A language model that scores completions, behind an OpenAI-compatible endpoint."""

    url: str = Field(description="Base address of the endpoint, with `/v1`; or `policy`: the policy of this run.")
    criteria: dict[str, CriterionConfig] | str = Field(
        description="One text, or name -> text. Each named criterion is a component `NAME/name` of the reward. A criterion may be "
        "`{text: ..., weight: ...}`.",
        min_length=1,
    )
    name: str = field("judge", "Name in metrics.", min_length=1)
    weight: float = field(1.0, "Weight in the sum of the components; the weights of criteria are multiplied by this.")
    model: str | None = field(None, "Name of the model at the endpoint; null: requests name no model.")
    key_env: str | None = field(None, "Name of the environment variable with the endpoint's key; null: no key.")
    reference: str | None = field(None, "Column with a reference answer, which the judge gets with the completion.")
    scale: int = field(10, "The judge gives whole numbers from 0 to this. A score is the number divided by this.", ge=1)
    request: Untyped = field({}, "Further fields of each request, such as temperature and max_tokens.")


class RewardModelConfig(_ShortFormSection):
    """One reward model: a classifier whose output is a reward."""

    path: LocalPath = Field(
        description="Directory or hub id of a sequence classifier, or `file.py:function` that takes a seed and returns "
        "(torch module, tokenizer)."
    )
    weight: float = field(1.0, "Weight in the sum of the components.")
    name: str | None = field(None, "Name in metrics; default: the last part of the path.")
    dtype: Literal["float32", "bfloat16", "float64"] | None = field(
        None, "Dtype of the reward model's weights; default: model.dtype."
    )
    label: int | None = field(None, "Index from 0 of the output that is the score; required for several outputs.", ge=0)
    max_tokens: int | None = field(
        None,
        "Longest text, in the model's tokens; default: the limit of the model. `on_error` applies to a longer text.",
        ge=1,
    )


class OverlongConfig(SettingsSection):
    """Soft overlong punishment (DAPO): a component of the reward, `overlong`."""

    cache: int | None = field(
        None, "The component `overlong` falls from 0 to -1 over this many tokens before max_length; null is off.", ge=1
    )
    max_length: int | None = field(
        None,
        "`overlong` is -1 from this number of sampled tokens on, over all requests of an episode. Default for single_turn: "
        "rollout.max_tokens. Required for other environments and for groups of other processes.",
        ge=1,
    )
    weight: float = field(1.0, "Weight of the component `overlong` in the sum.", ge=0)


class TextConfig(SettingsSection):
    """How the text for rewards is made from the sampled tokens. A special token that ended the completion is always omitted."""

    special_tokens: bool = field(
        True, "Keep special tokens that were sampled before the end of the completion. TRL removes them (false)."
    )
    stop: bool = field(
        True, "Keep the stop string or token that ended the completion, as TRL does. A special token is always omitted."
    )
    opened: bool = field(
        False,
        "Begin the text with the part of the answer that the chat template wrote into the prompt, such as <think>. TRL does not.",
    )


class RewardConfig(SettingsSection):
    """The reward functions and reward models, the processes that run them, and the treatment of their scores."""

    functions: tuple[RewardFunctionConfig, ...] = field((), "The reward functions.")
    judge: tuple[JudgeConfig, ...] = field(
        (),
        "Judges: language models behind an endpoint, which score by criteria. Their scores are added to those of the functions.",
    )
    model: tuple[RewardModelConfig, ...] = field(
        (), "Reward models, on the run's device: a path or a list. Their scores are added to those of the functions."
    )
    workers: int = field(1, "Number of processes of each rank that run the reward functions.", ge=1)
    concurrency: int = field(
        512, "Limit of completions that coroutines of one worker score at a time; a call with more runs alone.", ge=1
    )
    timeout_s: float = field(
        30.0,
        "Seconds for a function call or a judge's request. A late `async def` call is cancelled; other late calls kill the worker.",
        gt=0,
    )
    retries: int = field(
        2,
        "Retries of each request of a judge, and of an `async def` call that failed or missed its deadline (after up to 1, 2, 4, "
        "... seconds). Other functions are not retried, because they would fail again.",
        ge=0,
    )
    on_error: Literal["fail", "none", "zero"] = field(
        "fail",
        "fail: end the run; none: the function is not applicable; zero: score 0. Errors are a function that raised, crashed or "
        "timed out, a score that is not finite (of that completion only), a judge that gave no score, and a text that a reward "
        "model cannot score. For groups of other processes, fail ends the run at the second error.",
    )
    worker_max_mib: int | None = field(
        2048,
        "Replace a worker whose memory has grown by more than this since its first calls. The old worker runs until the new one "
        "has started. null: never.",
        ge=1,
    )
    worker_max_calls: int | None = field(None, "Replace a worker after this many calls; null: never.", ge=1)
    batch: Literal["auto", "group", "trajectory"] = field(
        "auto",
        "Call the functions once per group, or once per finished completion; auto: group if the environment is single_turn, if "
        "keep_viable is true, or if a function has `whole_group`; trajectory in all other cases. An error or a missed deadline "
        "affects all completions of the call.",
    )
    scale_adv_by_len: bool = field(
        False, "Multiply every reward by the number of sampled tokens of its completion (Atropos)."
    )
    text: TextConfig = TextConfig()
    overlong: OverlongConfig = OverlongConfig()

    @property
    def scores(self) -> bool:
        """Whether the configuration has reward functions, judges or reward models."""
        return bool(self.functions or self.judge or self.model)

    @property
    def judge_deadline_s(self) -> float:
        """Upper bound of the seconds for all tries of a judge, with the longest pause, 60 s, after each try."""
        return (self.retries + 1) * (self.timeout_s + 60.0)


class DoorConfig(SettingsSection):
    """Groups from other processes: `asyncrl.client` through shared memory, Atropos environments over HTTP."""

    ring: str | None = field(
        None,
        "Open a record ring of this name in shared memory. All groups then arrive through the ring, and data.train must be unset. "
        "With several ranks, rank r > 0 has the ring `name-r`; all members of a group must be sent to the same ring.",
    )
    ring_mib: int = field(256, "Shared memory of the ring in MiB, for all producers together.", ge=1)
    producer_mib: int = field(16, "Shared memory of one producer in MiB. A larger record is refused.", ge=1)
    producer_records: int = field(256, "Limit of the records that one producer has in the ring.", ge=1)
    timeout_s: float | None = field(
        600.0, "Seconds that an incomplete group waits for its members, from the first member on; null: no limit.", gt=0
    )
    on_timeout: Literal["drop", "partial", "error"] = field(
        "drop", "After timeout_s: drop the group, train the members that arrived (at least two), or end the run."
    )
    reconnect_s: float = field(
        30.0,
        "Seconds for a reconnect after all producers of an epoch (`Client.attach`) left. Then the epoch's incomplete groups end.",
        ge=0,
    )
    http_port: int | None = field(
        None,
        "Serve Atropos' API on this port of the machine (extra [http]), for the rings of all its ranks; 0: any free port.",
        ge=0,
        le=65535,
    )
    http_host: str = field(
        "127.0.0.1", "Address to listen at. Nothing is encrypted: use another address only in a network that you trust."
    )
    http_key: str | None = field(
        None,
        "Secret of 16 to 256 letters, digits or . _ ~ - that clients send: first part of the URL's path, or `Authorization: "
        'Bearer SECRET`. null: each run makes a new key and prints the URL with the key. "": no key, only on a loopback address.',
        exclude=True,
    )
    http_names: tuple[str, ...] = field(
        (),
        "Further host names in clients' URLs. `http_host` is always accepted; with 0.0.0.0 also the machine's name and addresses.",
    )


class EndpointConfig(SettingsSection):
    """`policy.base_url`: the policy over HTTP, for agents with a client of OpenAI or Anthropic (extra [http]).

    The endpoint opens at its first use, by an episode or a reward function. Each episode has a key of its own."""

    host: str = field(
        "127.0.0.1", "Address to listen at. Nothing is encrypted: use another address only in a network that you trust."
    )
    port: int = field(0, "Port of the endpoint; 0: any free port, as several ranks on a machine need.", ge=0, le=65535)
    names: tuple[str, ...] = field(
        (),
        "Further host names in clients' URLs. `host` is always accepted; with 0.0.0.0 also the machine's name and addresses.",
    )


class FilterConfig(SettingsSection):
    """Filters of groups. A dropped group is replaced by a newly sampled group (DAPO's dynamic sampling)."""

    dynamic_sampling: bool = field(
        False,
        "Replace groups without a learning signal (mostly: all rewards equal), as DAPO does. `overlong` does not count.",
    )
    min_mean_reward: float | None = field(
        None, "Drop and replace groups whose mean reward is below this: too hard to learn from."
    )
    max_mean_reward: float | None = field(
        None, "Drop and replace groups whose mean reward is above this: too easy to learn from."
    )
    by: str = field(
        "reward",
        "The number that these filters compare: `reward`, the weighted sum without `overlong`, or the name of a component.",
    )
    max_refills: int = field(
        8, "Limit of dropped groups per step and rank, in multiples of groups_per_step. Later groups are kept.", ge=0
    )


class RolloutConfig(SettingsSection):
    """The groups: number, size, largest age, and how their tokens are sampled."""

    group_size: int = field(8, "Completions per prompt.", ge=1)
    groups_per_step: int = field(8, "Groups (prompts) per step, over all ranks.", ge=1)
    max_staleness: int | None = field(
        None,
        "Largest age of a group at its training, in steps: the number of batches that are generated ahead (prefetch_depth in "
        "axolotl and TRL). Presets sync, one_off, async: 0, 1, 2.",
        ge=0,
    )
    streaming: bool | None = field(
        None, "true: train each group as it arrives (preset async). false: train whole steps, in prompt order."
    )
    weight_sync_interval: int = field(
        1,
        "Send new weights to the engines every k steps. The largest age grows by k - 1. An evaluation and the end of the run send "
        "weights earlier.",
        ge=1,
    )
    sync_warmup_steps: int = field(
        0, "In the first n steps no batch is generated ahead: their groups have age 0.", ge=0
    )
    streaming_min_groups: int = field(
        1, "If streaming: train as soon as this many groups are ready. The last groups of a step may be fewer.", ge=1
    )
    late: Literal["wait", "drop"] = field(
        "wait", "wait: the step waits for an untrained group past its deadline. drop: the group is dropped and counted."
    )
    temperature: float = field(1.0, "Sampling temperature.", ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)
    top_p: float = field(1.0, "Nucleus filter; 1 is off.", gt=0, le=1)
    top_k: int = field(0, "Top-k filter; 0 is off.", ge=0)
    min_p: float = field(
        0.0,
        "After top_k and top_p: exclude tokens with less than min_p times the largest probability; 0 is off.",
        ge=0,
        le=1,
    )
    repetition_penalty: float = field(
        1.0,
        "For tokens of the prompt and completion, divide positive logits by this and multiply negative logits; 1 is off.",
        gt=0,
    )
    presence_penalty: float = field(
        0.0, "Subtracted from the logits of tokens that the completion already contains (OpenAI, vLLM).", ge=-2, le=2
    )
    frequency_penalty: float = field(
        0.0, "Subtracted from a token's logit once per occurrence in the completion (OpenAI, vLLM).", ge=-2, le=2
    )
    logit_bias: dict[StrictInt | StrictStr, float] = field(
        {},
        "Token -> number from -100 (in practice never sampled) to 100 that is added to its logit, before the penalties. A token "
        "is an id (a number, also in quotes as in OpenAI's API) or the text of a single token.",
    )
    bad_words: tuple[str, ...] = field(
        (),
        "Texts that are not sampled. As in vLLM, a text is tokenized without leading spaces, and also with a leading space "
        "if both forms have equally many tokens. The last token is excluded right after the tokens before it.",
    )
    min_tokens: int = field(
        0,
        "Shortest completion in tokens. Until then stop strings are ignored, and stop and end tokens are not sampled.",
        ge=0,
    )
    max_tokens: int = field(256, "Longest completion in tokens.", ge=1)
    stop: tuple[str, ...] = field((), "Strings that end a completion.")
    stop_token_ids: tuple[int | str, ...] = field(
        (), "Tokens that end a completion, by id or text, in addition to those of the tokenizer and the model."
    )
    ignore_eos: bool = field(
        False, "Continue after the end-of-sequence token up to max_tokens, for benchmarks of fixed length."
    )
    max_context: int | None = field(
        None,
        "Agents: limit of a request's prompt and reply in tokens. A reply at the limit ends with `length`; a prompt "
        "without room for a reply raises an EpisodeLimit. Default: data.max_prompt_tokens + rollout.max_tokens.",
        ge=2,
    )
    max_turns: int | None = field(
        None, "Agents: limit of an episode's replies; one more request raises an EpisodeLimit. null: no limit.", ge=1
    )
    timeout_s: float = field(
        3600.0,
        "Time limit of an episode in seconds, including retries and waits for the engine. A longer episode counts as failed.",
        gt=0,
    )
    retries: int = field(
        2,
        "Number of retries of a failed episode, with the same random numbers. If all fail, the group has failed.",
        ge=0,
    )
    keep_viable: bool = field(
        False,
        "If a member fails in all attempts: true trains the other members, at least two, and scores them in one call; false "
        "replaces the whole group, because the other members may be a biased choice.",
    )
    max_failed_groups: int | None = field(
        None,
        "Limit of failed groups. More failed groups end the run. A new prompt replaces each failed group. Default: a tenth of "
        "the admitted groups, at least groups_per_step.",
        ge=0,
    )
    environment: LocalPath = field(
        "single_turn",
        "`single_turn`, or `file.py:name` / `module:name` of a coroutine function `episode(task, policy)` or an Environment class.",
    )
    tool_timeout_s: float = field(
        60.0, "Deadline of one call of a tool in seconds. After the deadline the model gets the text of an error.", gt=0
    )
    tool_max_chars: int = field(
        8192, "Longest result of a tool in characters. A longer result is cut, with a note for the model.", ge=1
    )
    filter: FilterConfig = FilterConfig()


class RerollConfig(SettingsSection):
    """Prompts that are played again because all their completions failed."""

    start_fraction: float = field(
        1.0,
        "Fraction of the run after which prompts that have failed at any time are played again; 1: never.",
        ge=0,
        le=1,
    )
    groups_per_step: int = field(1, "At most this many failed prompts replace new prompts, per step and rank.", ge=1)
    attempts: int = field(1, "A prompt is played again at most this many times.", ge=1)
    reward_at_most: float = field(0.0, "A completion with at most this reward has failed.")


class ReplayConfig(SettingsSection):
    """Trained groups that are trained again, once or more, instead of groups without a learning signal."""

    size: int = field(
        0,
        "How many trained groups with a strong signal each rank keeps, to replace groups without a signal; 0 is off.",
        ge=0,
    )
    max_age: int = field(8, "Largest age of a replayed token in policy versions; max_staleness does not apply.", ge=0)
