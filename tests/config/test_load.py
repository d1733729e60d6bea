"""Composition of files and overrides, and what a wrong configuration is told."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.checks import SWITCHED
from asyncrl.config.describe import to_yaml
from asyncrl.config.fields import OTHER_NAMES, config_fields, nearest_name, sections
from asyncrl.config.load import load_config
from asyncrl.config.methods import SETTINGS
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


def test_values_of_text_and_list_settings_are_taken_as_typed() -> None:
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


@pytest.mark.parametrize("text", ["false", "True", '"false"', "[1, 'x', {a: false}]", "{a: {b: true}}", "null", "7"])
def test_a_value_without_a_type_is_what_yaml_makes_of_it(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "x.yaml", f"data: {{chat_template_kwargs: {{switch: {text}}}}}")
    for config in (
        load_config([file]),
        load_config([], [f"data.chat_template_kwargs.switch={text}"]),
        load_config([], [f"data.chat_template_kwargs={{switch: {text}}}"]),
    ):
        assert config.data.chat_template_kwargs == {"switch": yaml.safe_load(text)}
        assert load_config([write(tmp_path / "config.yaml", to_yaml(config))]) == config


@pytest.mark.parametrize("text", ["no", "Off", "'on'", "[YES]", "{a: {b: no}}"])
def test_a_text_that_a_template_would_take_for_true_is_refused(text: str) -> None:
    assert "expected true or false instead of " in complaint(f"data.chat_template_kwargs.switch={text}")


@pytest.mark.parametrize("name", ["rollout.stop_token_ids", "rollout.logit_bias", "distributed.roles.train"])
def test_true_and_false_are_no_numbers_in_a_list_or_mapping_either(name: str) -> None:
    value = "{5: true}" if name == "rollout.logit_bias" else "[1, false]"
    assert "expected a number, not true or false" in complaint(f"{name}={value}")


def test_an_integer_that_no_machine_holds_is_refused() -> None:
    for override in (f"train.max_steps={10**400}", f"rollout.stop_token_ids=[{2**64}]"):
        assert "expected an integer of at most 64 bits" in complaint(override)
    assert load_config([], [f"seed={2**64 - 1}"]).seed == 2**64 - 1


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


def test_the_name_of_a_built_in_method_is_no_path(tmp_path: Path) -> None:
    for name in ("grpo", "single_turn"):
        (tmp_path / name).mkdir()
    text = "algorithm: {loss: grpo, advantage: grpo}\nrollout: {environment: single_turn}\n"
    config = load_config([write(tmp_path / "x.yaml", text)])
    assert (config.algorithm.loss, config.algorithm.advantage) == ("grpo", "grpo")
    assert config.rollout.environment == "single_turn"


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
MEANT = """
train.lr=learning_rate,learning_rat,trainer.lr,actor_rollout_ref.actor.optim.lr train.max_steps=max_steps
train.max_epochs=num_epochs train.warmup_steps=warmup_ratio train.beta1=adam_beta1
train.gradient_checkpointing=gradient_checkpointing
rollout.group_size=num_generations,actor_rollout_ref.rollout.n,rollout.grup_size
rollout.groups_per_step=per_device_train_batch_size,data.train_batch_size
rollout.max_tokens=max_completion_length,max_length,data.max_response_length
rollout.min_tokens=generation.min_new_tokens rollout.temperature=actor_rollout_ref.rollout.temperature
rollout.max_staleness=rollout.prefetch_depth,staleness
rollout.filter.dynamic_sampling=algorithm.filter_groups.enable,rollout.dynamic_sampling
algorithm.minibatches=steps_per_generation,stepz_per_generation
algorithm.updates_per_batch=actor_rollout_ref.actor.ppo_epochs
algorithm.kl.coef=beta,algorithm.kl_coef,algorithm.kl_ctrl.kl_coef
algorithm.clip.epsilon_high=actor_rollout_ref.actor.clip_ratio_high,epsilon_high algorithm.loss=loss_type
algorithm.importance.mode=importance_sampling_level algorithm.mask.truncated=mask_truncated_completions
algorithm.sapo.temperature_pos=sapo_temperature_pos reward.functions=reward_fn,custom_reward_function.path
reward.overlong.cache=reward.overlong_cache model.path=model_name_or_path,model_path model.lora.alpha=lora_alpha
model.device=device data.train=train_dataset data.eval=data.val_files
evaluate.samples=actor_rollout_ref.rollout.val_kwargs.n evaluate.every=eval_every checkpoint.every=checkpoint_every
run.dir=output_dir run.name=run_name resume=resume_from_checkpoint generation.engine=use_vllm
"""


@pytest.mark.parametrize("meant", MEANT.split())
def test_a_name_of_another_code_base_finds_ours(meant: str) -> None:
    """A table before letters: those of `learning_rate` are like `engine`, and `train.lr` is meant."""
    ours, _, names = meant.partition("=")
    assert {name: nearest_name(name) for name in names.split(",")} == dict.fromkeys(names.split(","), ours)


def test_every_name_that_is_looked_up_leads_somewhere() -> None:
    assert set(OTHER_NAMES.values()) <= {*config_fields(), *sections()}
    assert not set(OTHER_NAMES) & set(config_fields()), "a field of ours is no unknown key"


@pytest.mark.parametrize("name", ["optim", "gamma", "num_gpus", "disable_dropout", "logging_steps", "ref_model"])
def test_what_is_not_here_is_not_guessed(name: str) -> None:
    assert nearest_name(name) is None


def test_unknown_keys_of_a_file_name_the_line_and_are_all_told_at_once(tmp_path: Path) -> None:
    file = write(tmp_path / "x.yaml", "seed: 1\ntrain:\n  lr: 1\n  warmup: 3\nrolout:\n  group_size: 4\n")
    text = complaint(files=(file,))
    assert "'train.warmup'" in text and "x.yaml line 4" in text and "'train.warmup_steps'" in text
    assert "'rolout.group_size'" in text and "x.yaml line 6" in text and "'rollout.group_size'" in text


@pytest.mark.parametrize(
    ("text", "name"), [("1: 2\n", "1"), ("train: {1: 2}\n", "train.1"), ("reward: [{1: a}]\n", "reward.functions[0].1")]
)
def test_a_key_that_is_no_text(tmp_path: Path, text: str, name: str) -> None:
    assert f"unknown key {name!r} (" in complaint(files=(write(tmp_path / "x.yaml", text),))


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
        ("rollout.stop_token_ids=true", ("rollout.stop_token_ids is true", "each item an integer")),
        ("train.lr=on", ("train.lr is 'on'", "expected a number >= 0")),
        ("preset=synk", ("expected one of sync, one_off, async", "did you mean sync?")),
        ("rollout.top_p=1.5", ("> 0 and <= 1",)),
        ("train=5", ("train is 5", "expected a mapping")),
        ("train.lr={a: 1}", ("train.lr is a mapping",)),
        ("reward.functions=[{function: a:b, wieght: 1}]", ("reward.functions[0].wieght", "weight")),
        ("reward.functions=[{weight: 1}]", ("reward.functions[0].function is missing", "file.py:function")),
        ("reward.functions=[3]", ("reward.functions", "a list of {function")),
        ("reward.model=[{path: a, wieght: 1}]", ("reward.model[0].wieght", "an item has path, weight")),
        ("reward.model=[{weight: 1}]", ("reward.model[0].path is missing", "or hub id")),
        ("reward.model=[{path: a, dtype: half}]", ("reward.model[0].dtype is 'half'", "one of float32, bfloat16")),
        ("data.date=tomorrow", ("data.date is 'tomorrow' (override", "expected a date like 2026-01-31")),
        ("train.lr=[", ("not valid YAML",)),
        ("train.lr=" + "[" * 2000, ("not valid YAML", "recursion")),
        ("train.lr=1" + "0" * 5000, ("not valid YAML", "Exceeds the limit")),
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
    # A secret is not shown.
    text = complaint(files=(write(tmp_path / "x.yaml", "door: {http_key: 1234567890123456}\n"),))
    assert "door.http_key is a value that is not shown" in text and "put it in quotes" in text and "1234" not in text


@pytest.mark.parametrize(
    "text",
    [
        "door={http_key: 12345678901234567890}", "door={http_key: 1234x, rign: 1}", "door={http_key: 1234x", "door=http_key=1234",
        "door={http_key: 1234x, http_key: 1}", "door.http_key=1234\udc80", "--door.htp-key=1234", "--dor.http-key 1234",
        "door: {http_key: 1234, http_key: 1}", "door: {http_key: 1234,\n http_key: 123\\\n 4}", "door: http_key 1234",
        "door: {http_key: *1234}", "door: {http_key: !1234 x}", "door: {http_key: !1234!x y}",
    ],
)  # fmt: skip
def test_no_error_shows_a_secret(tmp_path: Path, text: str) -> None:
    is_file = text.startswith("door: ")
    said = (
        complaint(files=(write(tmp_path / "x.yaml", text),))
        if is_file
        else complaint(*text.split(" ") if text[:5] == "--dor" else [text])
    )
    assert "1234" not in said.replace(str(tmp_path), "") and (
        "x.yaml line" in said if is_file else "override '" in said
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("seed: 1\ntrain: {lr: 1}\nseed: 2\n", ("line 3 column 1", 'begins on line 1, found duplicate key "seed"')),
        ("train:\n  lr: 1\n  lr: 2\n", ("line 3 column 3", 'found duplicate key "lr"')),
        ("reward:\n- {function: a, function: b}\n", ("line 2", 'duplicate key "function"')),
        ("- 1\n", ("expected a mapping",)),
        ("a: [\n", ("x.yaml line 2 column 1 is not valid YAML: while parsing a flow node, expected",)),
        ("train: {lr: 1\n", ("line 2 column 1 is not valid YAML: ", "that begins on line 1, expected ',' or '}'")),
        ("train:\n\tlr: 1\n", ("line 2 column 1 is not valid YAML: ", "'\\t' that cannot start any token: indent by")),
        ("a: 1\n---\nb: 2\n", ("not valid YAML",)),
        ("train: {lr: 1" + "0" * 5000 + "}\n", ("not valid YAML", "Exceeds the limit")),
        ("a: " + "[" * 2000 + "]" * 2000, ("not valid YAML", "recursion")),
        ("train: &x {lr: *x}\n", ("alias",)),
        ("train: [&x [*x]]\n", ("alias",)),
        ("{a: 1}: 2\n", ("unhashable key",)),
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
    text = "train: &t {lr: 1e-3}\nrollout: {filter: &f {by: a}}\nreplay: {<<: {size: 3}}\n"
    config = load_config([write(tmp_path / "x.yaml", text)])
    assert (config.train.lr, config.rollout.filter.by, config.replay.size) == (1e-3, "a", 3)


scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()
trees = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1), trees, max_size=4))
def test_what_is_dumped_is_read_back(value: dict[str, object]) -> None:
    assert parse_file(dump(value), "x")[0] == value


def test_every_setting_has_a_text_and_few_exist(record_property: Callable[[str, object], None]) -> None:
    """Settings of a method, and of a section that is switched off, are refused: nobody has to look at them."""
    assert all(field.text and field.expected for field in config_fields().values())
    own = [name for name in config_fields() if name in SETTINGS or name.rpartition(".")[0] in SWITCHED]
    found = f"{len(config_fields()) - len(own)} settings outside of methods, {len(own)} of methods"
    record_property("settings", found)
    print(found)
    assert len(config_fields()) - len(own) <= 136, found


def test_a_section_that_is_no_mapping_is_named(tmp_path: Path) -> None:
    assert "algorithm.sapo is null" in complaint(files=(write(tmp_path / "x.yaml", "algorithm: {sapo: null}\n"),))
    assert "algorithm.sapo is 3" in complaint("algorithm.sapo=3")


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e999"])
def test_no_setting_takes_infinity_or_nan(value: str) -> None:
    for name, field in config_fields().items():
        if not (field.takes("string") or field.takes_texts):
            assert name in complaint(f"{name}={value}")
    assert complaint(f"train.lr={value}").endswith("expected a number >= 0, and finite")
    assert "weight is" in complaint(f"reward.functions=[{{function: 'a.py:f', weight: {value}}}]")
