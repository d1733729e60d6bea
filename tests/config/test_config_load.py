"""Composition of files and overrides, and what a wrong configuration is told."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.check_unread import own_to_a_method
from asyncrl.config.describe import to_yaml
from asyncrl.config.fields import knobs, nearest_name, sections
from asyncrl.config.load import load_config
from asyncrl.config.other_names import NOT_HERE, OTHER_NAMES
from asyncrl.config.schema import Config
from asyncrl.config.text import dump, parse_file
from asyncrl.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def complaint(*overrides: str, files: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    return str(caught.value)


def test_nothing_given_is_the_default() -> None:
    assert load_config() == Config()


def test_files_compose_left_to_right_and_overrides_come_last(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "train: {lr: 1e-4, warmup_steps: 3}\nrollout:\n  stop: [a, b]\nseed: 1\n")
    second = write(tmp_path / "b.yaml", "train:\n  lr: 2e-4\nrollout: {stop: [c]}\n")
    config = load_config([first, second], ["seed=7"])
    assert (config.train.lr, config.train.warmup_steps, config.rollout.stop, config.seed) == (2e-4, 3, ("c",), 7)


@pytest.mark.parametrize(
    "arguments", [["--rollout.group-size", "16"], ["--rollout.group_size=16"], ["rollout.group-size=16"]]
)
def test_forms_of_an_override(arguments: list[str]) -> None:
    assert load_config([], arguments).rollout.group_size == 16


def test_a_switch_needs_no_value_and_does_not_eat_the_next_override() -> None:
    config = load_config([], ["--resume", "seed=3", "--run.overwrite", "false"])
    assert (config.resume, config.seed, config.run.overwrite) == (True, 3, False)
    assert load_config([], ["--resume"]).resume is True and load_config([], []).resume == "auto"


def test_values_of_text_and_list_knobs_are_taken_as_typed() -> None:
    config = load_config(
        [],
        [
            "run.name=5",
            "data.system_prompt=You are: terse",
            "data.train=on",
            "rollout.stop=END",
            "telemetry.sinks=wandb",
        ],
    )
    assert (config.run.name, config.data.system_prompt, config.data.train) == ("5", "You are: terse", "on")
    assert (config.rollout.stop, config.telemetry.sinks) == (("END",), ("wandb",))
    assert (
        load_config([], ["data.system_prompt=null", "algorithm.importance.cap=null"]).algorithm.importance.cap is None
    )
    assert load_config([], ['rollout.stop=["\\n", "5"]']).rollout.stop == ("\n", "5")


TEXTS = [
    "End with #### 42",
    "### ",
    "one\ntwo\n\nfour",
    " spaced ",
    "\n\n",
    "{x}",
    "no",
    "1e-3",
    "a: b",
    "'",
    "%d",
    "\ta\r\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_taken_as_it_stands_and_read_back_from_the_written_configuration(tmp_path: Path, text: str) -> None:
    names = ("data.system_prompt", "rollout.stop", "data.prompt_column")
    config = load_config([], [f"{name}={text}" for name in names])
    assert (config.data.system_prompt, config.rollout.stop, config.data.prompt_column) == (text, (text,), text)
    assert load_config([write(tmp_path / "config.yaml", to_yaml(config))]) == config
    assert complaint(f"data.system_prompt={text}\udcff").endswith("not valid UTF-8")


@pytest.mark.parametrize(
    "text",
    ["no", "Off", "YES", "on", "false", "True", "'no'", '"false"', "[no, 'no', {a: off}]", "{a: {b: on}}", "null", "7"],
)
def test_a_value_without_a_type_is_false_where_it_says_no(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "x.yaml", f"data: {{chat_template_kwargs: {{switch: {text}}}}}")
    for config in (
        load_config([file]),
        load_config([], [f"data.chat_template_kwargs.switch={text}"]),
        load_config([], [f"data.chat_template_kwargs={{switch: {text}}}"]),
    ):
        assert config.data.chat_template_kwargs == {"switch": yaml.safe_load(text)}
        assert load_config([write(tmp_path / "config.yaml", to_yaml(config))]) == config


def test_words_of_an_argument_are_kept_and_of_a_setting_of_text_too(tmp_path: Path) -> None:
    for note in ("End with #### 42", "one\n\ntwo", " spaced ", "#"):
        config = load_config([], [f"data.chat_template_kwargs.note={note}"])
        assert config.data.chat_template_kwargs == {"note": note}
    assert complaint("data.chat_template_kwargs.note=a: b: c").endswith("put text in quotes")
    text = "resume: no\nrun: {name: no}\nrollout: {stop: [no, on], logit_bias: {yes: -1}, streaming: off}\n"
    config = load_config([write(tmp_path / "x.yaml", text)])
    assert (config.resume, config.run.name, config.rollout.streaming) == (False, "no", False)
    assert (config.rollout.stop, config.rollout.logit_bias) == (("no", "on"), {"yes": -1})


def test_yaml_traps(tmp_path: Path) -> None:
    text = "preset: async\ntrain: {lr: 1e-6}\ntelemetry: {live: off}\n"
    text += "run: {name: 2026-11-21, dir: 1:30}\ndata: {train: no}\n"
    config = load_config([write(tmp_path / "x.yaml", text)])
    assert (config.preset, config.train.lr, config.telemetry.live) == ("async", 1e-6, "off")
    assert (config.run.name, config.run.dir, config.data.train) == ("2026-11-21", "1:30", "no")
    assert load_config([], ["train.lr=1e-6"]).train.lr == 1e-6


def test_short_forms_of_the_reward(tmp_path: Path) -> None:
    base = write(tmp_path / "x.yaml", "reward: {timeout_s: 5, functions: [one:f, {function: two:g, weight: 0.5}]}\n")
    config = load_config([base])
    assert [(f.function, f.weight) for f in config.reward.functions] == [("one:f", 1.0), ("two:g", 0.5)]
    config = load_config([base, write(tmp_path / "y.yaml", "reward: three:h\n")])
    assert ([f.function for f in config.reward.functions], config.reward.timeout_s) == (["three:h"], 5)
    assert load_config([base], ["reward=four:i"]).reward.functions[0].function == "four:i"
    assert load_config([], ["reward.functions={function: a:b, weight: 2}"]).reward.functions[0].weight == 2
    assert load_config([], ["reward.model=org/classifier"]).reward.model[0].path == "org/classifier"
    models = load_config([base, write(tmp_path / "z.yaml", "reward: {model: [a/b, {path: c/d, label: 1}]}\n")]).reward
    assert [(m.path, m.label) for m in models.model] == [("a/b", None), ("c/d", 1)] and len(models.functions) == 2


def test_paths_are_found_next_to_their_file_or_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "examples"
    folder.mkdir()
    for name in ("train.jsonl", "rewards.py", "env.py"):
        write(folder / name, "")
    (folder / "model").mkdir()
    text = (
        "data: {train: train.jsonl, eval: 'rewards.py:rows'}\nmodel: {path: model, tokenizer: org/hub}\nrun: {dir: model}\n"
        "reward: [rewards.py:f, other.py:g, {function: rewards.py:h}, 'package.module:i']\n"
        "rollout: {environment: 'env.py:E'}\n"
    )
    config_file = write(folder / "x.yaml", text)
    monkeypatch.chdir(tmp_path)
    config = load_config([config_file.relative_to(tmp_path)])
    assert config.data.train == str(folder / "train.jsonl")
    assert config.data.eval == f"{folder}/rewards.py:rows"
    assert (config.model.path, config.model.tokenizer) == (str(folder / "model"), "org/hub")
    assert config.run.dir == "model"
    functions = [f.function for f in config.reward.functions]
    assert functions == [f"{folder}/rewards.py:f", "other.py:g", f"{folder}/rewards.py:h", "package.module:i"]
    assert config.rollout.environment == f"{folder}/env.py:E"
    text = "reward: {model: [model, org/hub, {path: 'rewards.py:f'}]}\n"
    models = load_config([write(folder / "z.yaml", text)]).reward.model
    assert [m.path for m in models] == [str(folder / "model"), "org/hub", f"{folder}/rewards.py:f"]
    assert load_config([config_file], ["data.train=train.jsonl"]).data.train == "train.jsonl"


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.lrr=1", "train.lr"),
        ("lr=1", "train.lr"),
        ("trian.lr=1", "train.lr"),
        ("rollout.max_token=1", "rollout.max_tokens"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, nearest: str) -> None:
    text = complaint(override)
    assert f"unknown key {override.split('=')[0]!r}" in text
    assert f"the nearest is {nearest!r}" in text and repr(override) in text


# What somebody types who comes from TRL's GRPOConfig or from verl, or who guesses; and what is meant.
MEANT = {
    "learning_rate": "train.lr",
    "kl_beta": "algorithm.kl.coef",
    "kl": "algorithm.kl.coef",
    "clip_range": "algorithm.clip.epsilon",
    "algo": "algorithm.loss",
    "save_interval": "checkpoint.every",
    "checkpoint_interval": "checkpoint.every",
    "eval_interval": "evaluate.every",
    "reward_fn": "reward.functions",
    "reward_file": "reward.functions",
    "pretrained": "model.path",
    "max_length": "rollout.max_tokens",
    "max_seq_length": "rollout.max_tokens",
    "prompts_per_batch": "rollout.groups_per_step",
    "test_file": "data.eval",
    "filter_groups": "rollout.filter.dynamic_sampling",
    "peft": "model.lora.rank",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "beta": "algorithm.kl.coef",
    "num_train_epochs": "train.max_epochs",
    "max_steps": "train.max_steps",
    "output_dir": "run.dir",
    "save_steps": "checkpoint.every",
    "eval_steps": "evaluate.every",
    "warmup_steps": "train.warmup_steps",
    "warmup_ratio": "train.warmup_steps",
    "max_grad_norm": "train.grad_clip",
    "lr_scheduler_type": "train.schedule",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "epsilon_high": "algorithm.clip.epsilon_high",
    "loss_type": "algorithm.loss",
    "scale_rewards": "algorithm.advantage",
    "mask_truncated_completions": "algorithm.mask.truncated",
    "bf16": "model.dtype",
    "torch_dtype": "model.dtype",
    "report_to": "telemetry.sinks",
    "run_name": "run.name",
    "resume_from_checkpoint": "resume",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "num_iterations": "algorithm.updates_per_batch",
    "adam_beta1": "train.beta1",
    "adam_epsilon": "train.eps",
    "save_total_limit": "checkpoint.keep",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.functions",
    "model_name_or_path": "model.path",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.target_modules",
    "per_device_train_batch_size": "rollout.groups_per_step",
    "train_dataset": "data.train",
    "eval_dataset": "data.eval",
    "weight_decay": "train.weight_decay",
    "importance_sampling_level": "algorithm.importance.mode",
    "train.learning_rate": "train.lr",
    "trainer.lr": "train.lr",
    "optimizer.lr": "train.lr",
    "actor_rollout_ref.actor.optim.lr": "train.lr",
    "actor_rollout_ref.model.path": "model.path",
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_batch_size": "rollout.groups_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_tokens",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "algorithm.adv_estimator": "algorithm.advantage",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coef",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl.coef",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.clip.epsilon",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip.epsilon_high",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy.coef",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.updates_per_batch",
    "trainer.total_epochs": "train.max_epochs",
    "trainer.total_training_steps": "train.max_steps",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "evaluate.every",
    "trainer.experiment_name": "run.name",
    "trainer.logger": "telemetry.sinks",
    "trainer.default_local_dir": "run.dir",
    "actor_rollout_ref.actor.grad_clip": "train.grad_clip",
    "custom_reward_function.path": "reward.functions",
    "trainer.resume_mode": "resume",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "train.tokens_per_microbatch",
    "data.prompt_key": "data.prompt_column",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.rollout.top_k": "rollout.top_k",
    "eval_every": "evaluate.every",
    "save_every": "checkpoint.every",
    "trian.lr": "train.lr",
    "rollout.grup_size": "rollout.group_size",
    "max_tokens": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "batch_size": "rollout.groups_per_step",
    "gradient_clip": "train.grad_clip",
    "clip_grad_norm": "train.grad_clip",
    "kl_coefficient": "algorithm.kl.coef",
    "epochs": "train.max_epochs",
    "steps": "train.max_steps",
    "num_epochs": "train.max_epochs",
    "group_size": "rollout.group_size",
    "staleness": "rollout.max_staleness",
    "model.name": "model.path",
    "model_path": "model.path",
    "train_file": "data.train",
    "data.path": "data.train",
    "device": "model.device",
    "dtype": "model.dtype",
    "checkpoint_every": "checkpoint.every",
    "steps_per_generation": "algorithm.minibatches",
    "stepz_per_generation": "algorithm.minibatches",
    "learning_rat": "train.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.minibatches",
    "actor_rollout_ref.rollout.val_kwargs.n": "evaluate.samples",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl.coef",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl.estimator",
    "algorithm.filter_groups.enable": "rollout.filter.dynamic_sampling",
    "generation_batch_size": "rollout.groups_per_step",
    "rollout_batch_size": "rollout.groups_per_step",
    "n_samples_per_prompt": "rollout.group_size",
    "num_generations_eval": "evaluate.samples",
    "vllm_importance_sampling_clip_max": "algorithm.importance.cap",
    "multi_objective_aggregation": "algorithm.advantage",
    "log_completions": "telemetry.rollouts_per_step",
    "use_vllm": "generation.engine",
    "vllm_mode": "generation.placement",
    "max_seq_len": "rollout.max_tokens",
    "model_name": "model.path",
    "dataset_path": "data.train",
    "max_async_level": "rollout.max_staleness",
}


@pytest.mark.parametrize("name", MEANT)
def test_a_name_of_another_code_base_finds_ours(name: str) -> None:
    """Words before letters: those of `learning_rate` are like `engine`, and `train.lr` is meant."""
    assert nearest_name(name) == MEANT[name]


def test_every_name_that_is_looked_up_leads_somewhere() -> None:
    assert set(OTHER_NAMES.values()) <= {*knobs(), *sections()}
    assert not NOT_HERE & {*knobs(), *OTHER_NAMES}
    assert not set(OTHER_NAMES) & set(knobs()), "a knob of ours is no unknown key"


@pytest.mark.parametrize("name", ["optim", "gamma", "num_gpus", "disable_dropout", "logging_steps", "ref_model"])
def test_what_is_not_here_is_not_guessed(name: str) -> None:
    assert nearest_name(name) is None


def test_unknown_keys_of_a_file_name_the_line_and_are_all_told_at_once(tmp_path: Path) -> None:
    file = write(tmp_path / "x.yaml", "seed: 1\ntrain:\n  lr: 1\n  warmup: 3\nrolout:\n  group_size: 4\n")
    text = complaint(files=(file,))
    assert "'train.warmup'" in text and "x.yaml line 4" in text and "'train.warmup_steps'" in text
    assert "'rolout.group_size'" in text and "x.yaml line 6" in text and "'rollout.group_size'" in text


def test_a_key_like_nothing() -> None:
    assert "nothing similar exists" in complaint("zzqq9=1")
    assert nearest_name("zzqq9") is None


def test_a_dotted_key_in_a_file_is_told_how_to_nest(tmp_path: Path) -> None:
    assert "write `train: {lr: ...}`" in complaint(files=(write(tmp_path / "x.yaml", "train.lr: 1\n"),))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rollout.group_size=many", ("rollout.group_size is 'many'", "expected an integer >= 1")),
        ("rollout.group_size=0", ("rollout.group_size is 0", "expected an integer >= 1")),
        ("rollout.group_size=true", ("rollout.group_size is true", "an integer")),
        ("train.lr=on", ("train.lr is 'on'", "expected a number >= 0")),
        ("preset=synk", ("expected one of sync, one_off, async", "did you mean sync?")),
        ("rollout.top_p=1.5", ("> 0 and <= 1",)),
        ("train=5", ("train is 5", "expected a mapping")),
        ("train.lr={a: 1}", ("train.lr is a mapping",)),
        ("reward.functions=[{function: a:b, wieght: 1}]", ("reward.functions[0].wieght", "weight")),
        ("reward.functions=[{weight: 1}]", ("reward.functions[0].function is missing", "file.py:function")),
        ("reward.functions=[3]", ("reward.functions", "a list of {function")),
        ("reward.model=[{path: a, wieght: 1}]", ("reward.model[0].wieght", "a reward model has path, weight")),
        ("reward.model=[{weight: 1}]", ("reward.model[0].path is missing", "a hub id")),
        ("reward.model=[{path: a, dtype: half}]", ("reward.model[0].dtype is 'half'", "one of float32, bfloat16")),
        ("train.lr=[", ("not valid YAML",)),
        ("train.lr", ("write a.b=value",)),
        ("--train.lr", ("has no value",)),
        ("--train.lrr", ("the nearest is 'train.lr'",)),
    ],
)
def test_a_wrong_value_names_key_value_and_expectation(override: str, parts: tuple[str, ...]) -> None:
    text = complaint(override)
    assert all(part in text for part in parts), text


def test_a_number_where_a_string_belongs(tmp_path: Path) -> None:
    assert "put it in quotes" in complaint(files=(write(tmp_path / "x.yaml", "run: {name: 5}\n"),))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("seed: 1\ntrain: {lr: 1}\nseed: 2\n", ("line 3", "'seed'", "first on line 1")),
        ("train:\n  lr: 1\n  lr: 2\n", ("line 3", "'train.lr'")),
        ("reward:\n- {function: a, function: b}\n", ("'reward.0.function'",)),
        ("- 1\n", ("expected a mapping",)),
        ("a: [\n", ("x.yaml line 2 column 1 is not valid YAML: while parsing a flow node, expected",)),
        ("train: {lr: 1\n", ("line 2 column 1 is not valid YAML: ", "that begins on line 1, expected ',' or '}'")),
        ("train:\n\tlr: 1\n", ("line 2 column 1 is not valid YAML: ", "'\\t' that cannot start any token: indent by")),
        ("a: 1\n---\nb: 2\n", ("not valid YAML",)),
        ("train: &x {lr: *x}\n", ("alias",)),
        ("{a: 1}: 2\n", ("plain word",)),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    said = complaint(files=(write(tmp_path / "x.yaml", text),))
    assert "x.yaml" in said and all(part in said for part in parts) and "\n" not in said, said


def test_a_missing_file_and_an_unreadable_one(tmp_path: Path) -> None:
    assert "does not exist" in complaint(files=(tmp_path / "none.yaml",))
    assert "cannot be read" in complaint(files=(tmp_path,))
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}")
    assert "cannot be read" in complaint(files=(tmp_path / "latin.yaml",))


def test_an_empty_file_and_an_empty_section_change_nothing(tmp_path: Path) -> None:
    assert load_config([write(tmp_path / "x.yaml", "# nothing\n"), write(tmp_path / "y.yaml", "train:\n")]) == Config()


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    file = write(tmp_path / "x.yaml", "train: &t {lr: 1e-3}\nevaluate:\n  every: 5\n")
    assert load_config([file]).train.lr == 1e-3


scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()
trees = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1), trees, max_size=4))
def test_what_is_dumped_is_read_back(value: dict[str, object]) -> None:
    assert parse_file(dump(value), "x")[0] == value


def test_every_knob_has_a_sentence_and_there_are_not_too_many(record_property: Callable[[str, object], None]) -> None:
    """At most a hundred that everybody may have to look at; those of a method are refused while it is not chosen."""
    assert all(knob.text and knob.expected for knob in knobs().values())
    own = [name for name in knobs() if own_to_a_method(name)]
    found = f"{len(knobs()) - len(own)} settings outside of methods, {len(own)} of methods"
    record_property("settings", found)
    print(found)
    # About a hundred. The last ones are limits without which a run was brought down: the time of an episode and of a stage, the
    # wear of reward workers, key and names of the HTTP door.
    # How many coroutines of rewards share a worker, how often one is tried again; which component passes in pass@k.
    # Who writes control tokens: a default that is safe, and the other for those whose data holds them on purpose.
    # How often an episode that failed is played again: rollouts of agents fail by chance, and each costs time.
    # Seven ways to sample that every sampler has: min-p, three penalties, biases, bad words, a minimum of tokens.
    # Who may decide what only its user can know: whether norms are decayed, what of a text rewards read, how tokens are filtered.
    # The date of a template: two runs, or one and what it is evaluated with, read the same prompts.
    # The tokens that end a completion, where a template ends turns with another one.
    assert len(knobs()) - len(own) <= 126, found


def test_a_section_that_is_no_mapping_is_named(tmp_path: Path) -> None:
    assert "algorithm.sapo is null" in complaint(files=(write(tmp_path / "x.yaml", "algorithm: {sapo: null}\n"),))
    assert "algorithm.sapo is 3" in complaint("algorithm.sapo=3")


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e999"])
def test_no_setting_takes_infinity_or_nan(value: str) -> None:
    for name, knob in knobs().items():
        if not (knob.takes_text or knob.takes_texts):
            assert name in complaint(f"{name}={value}")
    assert complaint(f"train.lr={value}").endswith("expected a number >= 0, and finite")
    assert "weight is" in complaint(f"reward.functions=[{{function: 'a.py:f', weight: {value}}}]")
