"""Presets, derived values and the contradictions that are refused."""

from typing import Any

import pytest

from asyncrl.config.describe import FREE_ON_RESUME, check_resume, diff, help_text, refusal, to_yaml
from asyncrl.config.fields import config_fields
from asyncrl.config.load import load_config
from asyncrl.config.methods import SETTINGS
from asyncrl.config.resolve import PRESETS, last_version, resolve, row_limit, slots, staleness_bound, warnings
from asyncrl.config.schema import Config
from asyncrl.environments.session import EpisodeLimits
from asyncrl.errors import ConfigError

RUN = ("model.path=m", "data.train=t.jsonl", "reward=r:f", "train.max_steps=10")


def config(*overrides: str) -> Config:
    return load_config([], [*RUN, *overrides])


def refused(*overrides: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(config(*overrides), world_size)
    return str(caught.value)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_presets_fill_in_what_is_not_given(preset: str) -> None:
    resolved = resolve(config(f"preset={preset}"))
    assert (resolved.rollout.max_staleness, resolved.rollout.streaming) == PRESETS[preset]
    assert resolve(resolved) == resolved
    assert slots(resolved) == (PRESETS[preset][0] + 1) * 8 == slots(config(f"preset={preset}"))


def test_explicit_values_win_over_a_preset() -> None:
    resolved = resolve(config("preset=one_off", "rollout.max_staleness=3", "rollout.streaming=true"))
    assert (resolved.rollout.max_staleness, resolved.rollout.streaming) == (3, True)


def test_derived_values() -> None:
    resolved = resolve(config("algorithm.clip.epsilon=0.3", "rollout.temperature=0.7"), world_size=5)
    assert resolved.algorithm.clip.epsilon_high == 0.3
    assert resolved.evaluate.temperature == 0.7
    assert resolved.engine.max_sequences == 5 * 8  # 24 slots over 5 ranks, rounded up, times the group size
    kept = resolve(config("engine.max_sequences=7", "algorithm.clip.epsilon_high=0.28", "evaluate.temperature=0"))
    assert (kept.engine.max_sequences, kept.algorithm.clip.epsilon_high, kept.evaluate.temperature) == (7, 0.28, 0)


def test_a_cache_has_room_for_one_sequence() -> None:
    lengths = ("data.max_prompt_tokens=100", "rollout.max_tokens=20")
    assert resolve(config(*lengths, "engine.kv_positions=120")).engine.kv_positions == 120
    assert resolve(config(*lengths)).engine.kv_positions is None  # by the prompts, which only a run knows
    assert "engine.kv_positions is 119; expected at least 120" in refused(*lengths, "engine.kv_positions=119")


def test_a_prefix_that_is_kept_between_turns_is_no_older_than_a_trained_token() -> None:
    def age(*overrides: str) -> int | None:
        resolved = resolve(config(*overrides))
        assert resolve(resolved) == resolved
        return resolved.engine.kept_prefix_max_age

    assert age("preset=sync") == 0 and age("preset=one_off") == 1 and age() == staleness_bound(config()) == 2
    assert age("rollout.max_staleness=3", "algorithm.updates_per_batch=2") == 2 * 3 + 1
    assert age("rollout.max_staleness=0") == age("engine.kv_after_update=recompute") == 1
    assert age("engine.kept_prefix_max_age=0") == 0 and age("engine.kept_prefix_max_age=9") == 9
    assert age("engine.kept_prefix_max_age=0", "preset=sync") == 0
    text = refused("engine.kept_prefix_max_age=1", "preset=sync")
    assert "engine.kept_prefix_max_age is 1 but preset is sync" in text and "how long tools take" in text
    text = refused("engine.kept_prefix_max_age=2", "engine.kv_after_update=recompute")
    assert "engine.kept_prefix_max_age is 2 but engine.kv_after_update is recompute" in text


def test_the_context_of_an_agent_is_the_longest_row() -> None:
    agent = ("data.max_prompt_tokens=100", "rollout.max_tokens=20", "rollout.environment=agent.py:episode")
    resolved = resolve(config(*agent, "rollout.max_context=40000", "rollout.max_turns=9"))
    assert row_limit(resolved) == resolved.train.tokens_per_microbatch == 40000
    assert EpisodeLimits.of(resolved) == EpisodeLimits(40000, 9, 40000)
    assert EpisodeLimits.of(resolve(config(*agent))) == EpisodeLimits(120, None, 2048)
    assert "rollout.max_context is 119; expected at least" in refused(*agent, "rollout.max_context=119")
    assert "expected at least rollout.max_context = 150" in refused(
        *agent, "rollout.max_context=150", "train.tokens_per_microbatch=149"
    )
    assert "engine.kv_positions is 149" in refused(*agent, "rollout.max_context=150", "engine.kv_positions=149")
    for name in ("max_turns", "max_context"):
        # Nothing reads them without an agent. A program may play one.
        assert f"rollout.{name} is 2000 but rollout.environment is single_turn" in refused(f"rollout.{name}=2000")
        resolve(config(f"rollout.{name}=2000"), embedding=True)


@pytest.mark.parametrize(
    ("overrides", "last"),
    [
        (["train.max_epochs=3"], 19),  # of 25 rows in steps of 4 groups: 75 groups, and 3 in the last step
        (["train.max_epochs=3", "train.partial_final_step=false"], 18),
        (["train.max_epochs=0.1"], 1),
        (["train.max_epochs=1.12"], 7),  # 28.000000000000004 rows
        (["train.max_epochs=3", "train.max_steps=null", "algorithm.updates_per_batch=2"], 38),
        (["train.max_epochs=9"], 20),
        (["train.max_epochs=3", "reroll.start_fraction=0.5"], 20),  # its groups are not known
    ],
)
def test_the_first_limit_of_a_run_is_its_last_version(overrides: list[str], last: int) -> None:
    given = config("train.max_steps=20", "rollout.groups_per_step=4", *overrides)
    assert last_version(given, 5, rows=25) == last + 5
    without = None if given.train.max_steps is None else 20
    assert last_version(given) == without


def test_a_schedule_that_the_run_may_not_finish_is_named() -> None:
    def notes(*overrides: str) -> list[str]:
        return [text for text in warnings(resolve(config("train.max_steps=20", *overrides)), 25) if "schedule" in text]

    assert notes("train.time_limit_s=9") == notes("train.schedule=linear") == []
    for limit, step in (("train.max_epochs=1", 4), ("train.time_limit_s=9", 20)):
        [text] = notes("train.schedule=linear", limit, "rollout.groups_per_step=8")
        assert f"train.schedule=linear ends at optimizer step {step}." in text and "train.time_limit_s" in text


@pytest.mark.parametrize(("updates", "staleness", "bound"), [(1, 0, 0), (1, 2, 2), (2, 0, 1), (3, 2, 8)])
def test_staleness_bound(updates: int, staleness: int, bound: int) -> None:
    given = config(f"algorithm.updates_per_batch={updates}", f"rollout.max_staleness={staleness}")
    assert staleness_bound(given) == bound == staleness_bound(resolve(given))


def test_the_two_corrections_are_never_applied_together() -> None:
    assert resolve(config("algorithm.old_logprobs=sampler")).algorithm.importance.cap is None
    assert resolve(config()).algorithm.importance.cap == 2.0
    assert "importance.cap=null" in refused("algorithm.old_logprobs=sampler", "algorithm.importance.cap=2")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["preset=sync", "rollout.max_staleness=1"], ("rollout.max_staleness is 1", "preset=one_off")),
        (["data.train=null", "door.ring=a", "door.ring_mib=16"], ("door.producer_mib is 16", "above")),
        (["door.http_port=8000"], ("door.http_port is 8000", "door.ring is not set")),
        (["door.ring=x", "door.http_host=0.0.0.0", 'door.http_key=""'], ("door.http_key", "0.0.0.0", "everybody")),
        (["door.ring=x", "door.http_key=guessed"], ("door.http_key has 7 characters", "16 to 256")),
        (
            ["data.train=null", "door.ring=x", "door.http_port=8000", "algorithm.router_replay=true"],
            ("door.http_port is 8000 but algorithm.router_replay is true", "no routes", "asyncrl.client"),
        ),
        (["door.ring=a", "data.train=x.jsonl"], ("door.ring is a and data.train is x.jsonl",)),
        (["data.train=null", "door.ring=a", "train.max_epochs=1"], ("train.max_epochs is 1",)),
        (["data.train=null", "door.ring=a", "reroll.start_fraction=0.5"], ("reroll plays prompts again",)),
        (
            ["data.train=null", "door.ring=a", "door.timeout_s=null", "door.on_timeout=partial"],
            ("door.on_timeout is partial", "ever times out"),
        ),
        (["preset=sync", "rollout.streaming=true"], ("rollout.streaming is true", "preset=async")),
        (["train.tokens_per_microbatch=1279"], ("is 1279", "1024 + 256 = 1280")),
        (
            ["rollout.weight_sync_interval=2"],
            ("weight_sync_interval is 2", "generation.placement is auto", "placement=worker"),
        ),
        (["rollout.weight_sync_interval=2", "preset=sync"], ("preset is sync", "preset=one_off")),
        (["rollout.streaming_min_groups=9"], ("streaming_min_groups is 9", "groups_per_step = 8")),
        (
            ["rollout.filter.min_mean_reward=0.9", "rollout.filter.max_mean_reward=0.1"],
            ("min_mean_reward is 0.9", "at most rollout.filter.max_mean_reward = 0.1"),
        ),
        (
            ["rollout.filter.dynamic_sampling=true", "algorithm.advantage=zero"],
            ("dynamic_sampling", "advantage is zero"),
        ),
        (["reward.overlong.cache=9", "rollout.environment=a.py:Loop"], ("a.py:Loop", "set reward.overlong.max_length")),
        (["reward.overlong.cache=9", "door.ring=r"], ("outside of single_turn", "set reward.overlong.max_length")),
        (['rollout.stop=["END", ""]'], ("rollout.stop has an empty string",)),
        (["reward.overlong.cache=257"], ("overlong.cache is 257", "max_length = 256")),
        (["reroll.start_fraction=0.5", "train.max_steps=null", "train.time_limit_s=9"], ("start_fraction is 0.5",)),
        (["train.skip_zero_advantage=true", "algorithm.kl.coef=0.1"], ("skip_zero_advantage", "kl.coef=0.1")),
        (["train.skip_zero_advantage=true", "algorithm.entropy.coef=0.1"], ("skip_zero_advantage", "entropy.coef")),
        (["train.skip_zero_advantage=true", "algorithm.entropy.target=0.2"], ("skip_zero_advantage", "entropy.target")),
        (
            ["algorithm.entropy.coef=0.1", "algorithm.entropy.coef_delta=0.1"],
            ("coef_delta is 0.1", "entropy.target is not set"),
        ),
        (["algorithm.entropy.target=0.2", "algorithm.entropy.coef=2", "preset=sync"], ("within [0, 1]",)),
        (["algorithm.entropy.target=0.2", "algorithm.loss=grpo"], ("entropy.target is 0.2", "streaming=false")),
        (
            ["train.skip_zero_advantage=true", "preset=one_off", "algorithm.loss=bnpo"],
            ("loss is bnpo", "each microbatch"),
        ),
        (["replay.size=4", "algorithm.importance.cap=null"], ("replay.size is 4", "importance.cap")),
        (["replay.size=4", "preset=one_off", "algorithm.advantage=gdpo"], ("replay.size is 4", "gdpo")),
        (["train.max_steps=null"], ("train.max_steps, train.max_epochs, train.time_limit_s",)),
        (["generation.engine=vllm", "algorithm.router_replay=true"], ("router_replay is true", "engine=embedded")),
        (["reward.functions=[]"], ("reward.functions is empty", "file.py:function")),
        (["reward.model=org/rm", "train.kind=dry_run", "engine.kind=dry_run"], ("reward.model is org/rm", "dry_run")),
        (["data.train=null"], ("data.train is not set",)),
        (["model.path=null"], ("model.path is not set", "engine.kind=dry_run and train.kind=dry_run")),
        (["train.kind=dry_run"], ("engine.kind is embedded", "train.kind is dry_run")),
        (["evaluate.every=5"], ("data.eval is not set",)),
        (["evaluate.limit=5"], ("evaluate.limit is 5 but data.eval is not set",)),
        (["resume=true", "run.overwrite=true"], ("resume", "overwrite")),
        (["rollout.group_size=1"], ("rollout.group_size is 1", "at least 2")),
        (
            [
                "rollout.group_size=1",
                "algorithm.advantage=reinforce_pp",
                "rollout.streaming=false",
                "rollout.filter.dynamic_sampling=true",
            ],
            ("dynamic_sampling is true but rollout.group_size is 1", "each group would be dropped"),
        ),
        (["algorithm.clip.epsilon=1"], ("algorithm.clip.epsilon is 1.0",)),
        (["watchdog.stall_timeout_s=5"], ("stall_timeout_s is 5.0", "interval_s", "reward.timeout_s = 30:")),
        (
            ["reward.judge={url: policy, criteria: x}", "reward.timeout_s=140"],
            ("expected more than the time of all tries of a judge", "= 600: a slow judge"),
        ),
        (["reward.judge={url: policy, criteria: x}"], ("reward.judge has url policy", "set rollout.max_context")),
        (
            ["train.max_steps=null", "train.time_limit_s=9", "train.schedule=cosine"],
            ("train.schedule is cosine", "set train.max_steps or train.max_epochs"),
        ),
        (
            ["train.max_epochs=9", "train.schedule=cosine", "reroll.start_fraction=0.5"],
            ("train.schedule is cosine", "reroll plays prompts again"),
        ),
    ],
)
def test_contradictions_are_refused(overrides: list[str], parts: tuple[str, ...]) -> None:
    text = refused(*overrides)
    assert all(part in text for part in parts), text


def test_with_roles_engines_have_weights_of_their_own() -> None:
    given = ["rollout.weight_sync_interval=2", "distributed.roles.train=[0]"]
    resolve(config(*given, "distributed.roles.generate=[1]"))
    assert "generation.placement=worker" in refused(*given, "distributed.roles.generate=[0]")


def test_ranks() -> None:
    assert "at least the number of ranks that train, 9" in refused(world_size=9)
    resolve(config(), world_size=8)


@pytest.mark.parametrize("name", ["grpo_batch", "gdpo", "reinforce_pp", "reinforce_pp_baseline"])
def test_statistics_of_the_step_are_refused_where_the_step_is_not_there(name: str) -> None:
    chosen = f"algorithm.advantage={name}"
    text = refused(chosen)
    assert f"algorithm.advantage is {name}" in text and "rollout.streaming=false" in text and "dr_grpo" in text
    resolve(config(chosen, "preset=one_off"))
    resolve(config(chosen, "preset=one_off"), world_size=2)
    resolve(config(chosen, "algorithm.updates_per_batch=2"))  # a batch is kept for its second update: it is whole


def test_a_group_of_one_where_the_estimator_says_what_it_means() -> None:
    resolve(config("rollout.group_size=1", "algorithm.advantage=grpo_atropos"))
    assert "at least 2" in refused("rollout.group_size=1", "algorithm.advantage=rloo")


def test_several_contradictions_are_told_at_once() -> None:
    assert len(refused("preset=sync", "rollout.streaming=true", "reward.functions=[]").splitlines()) == 2


def test_embedding_and_dry_runs_need_less() -> None:
    resolve(load_config([], ["model.path=m"]), embedding=True)
    dry = ["engine.kind=dry_run", "train.kind=dry_run", "train.max_steps=3"]
    resolve(load_config([], dry))
    with pytest.raises(ConfigError, match="has no end"):
        resolve(load_config([], dry[:2]))
    resolve(config("reward.functions=[]", "rollout.environment=e:E"))
    resolve(config("reward.functions=[]", "reward.model=org/rm"))


def test_warnings_do_not_refuse() -> None:
    assert warnings(resolve(config())) == []
    assert warnings(resolve(config("preset=sync", "algorithm.updates_per_batch=2", "train.warmup_steps=19"))) == []
    for override, word in [
        ("rollout.top_p=0.9", "whole vocabulary"),
        ("rollout.top_k=5", "top_k=5"),
        ("algorithm.loss=gspo", "3e-4"),
        ("algorithm.importance.cap=null", "nothing corrects"),
        ("train.warmup_steps=10", "never reached"),
        ("data.eval=e.jsonl", "nothing will be evaluated"),
    ]:
        assert [word in text for text in warnings(resolve(config(override)))] == [True], override


def test_help_names_every_setting_with_its_default_and_sentence() -> None:
    text = help_text()
    for field in config_fields().values():
        assert f"\n{field.name}  ({field.expected}; " in text
        assert field.text.split()[0] in text
    assert all(f"preset={name}" in text for name in PRESETS)


def test_config_yaml_round_trips(tmp_path: Any) -> None:
    resolved = resolve(config("rollout.stop=[END, 'off', '1e5']", "run.name=1e5", "data.system_prompt=a\nb: c # d"))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(resolved), encoding="utf-8")
    assert load_config([path]) == resolved
    assert resolve(load_config([path])) == resolved
    assert Config.model_validate(resolved.model_dump()) == resolved


def test_diff_and_resume() -> None:
    old = resolve(config())
    new = resolve(config("train.lr=1e-5", "train.max_steps=20", "resume=true"))
    assert diff(old, new).items() >= {"train.max_steps": "10 -> 20", "resume": "auto -> true"}.items()
    assert diff(config(), config("rollout.stop=[a]")) == {"rollout.stop": "[] -> [a]"}
    assert check_resume(old, new) == ["train.lr: 1e-06 -> 1e-05", "train.max_steps: 10 -> 20"]
    assert check_resume(old, old) == []
    with pytest.raises(ConfigError) as caught:
        check_resume(old, resolve(config("seed=1", "rollout.group_size=4", "train.lr=1")))
    text = str(caught.value)
    assert "seed: 0 -> 1 (all random" in text and "rollout.group_size: 8 -> 4" in text and "train.lr" not in text
    with pytest.raises(ConfigError, match=r"reward\.functions"):
        check_resume(old, resolve(config("reward=other:f")))


def test_what_a_resume_may_change() -> None:
    free = {name for name in config_fields() if refusal(name) is None}
    assert {name for name in SETTINGS if not SETTINGS[name].fixed} == free & {*SETTINGS}
    assert {"train.lr", "door.ring", "rollout.filter.by", "telemetry.profile.from"} <= free
    reasons = {name: refusal(name) or "" for name in config_fields()}
    for name, why in {
        "seed": "random numbers",
        "data.shuffle": "other rows",
        "rollout.group_size": "counts of groups",
        "model.lora.rank": "saved weights",
        "train.beta1": "saved weights",
        "rollout.environment": "another objective",
        "reward.functions": "another objective",
        "reward.text.stop": "another objective",
        "algorithm.loss": "another objective",
    }.items():
        assert why in reasons[name]
    names = {part for name in reasons for part in (name, name.partition(".")[0], name.rpartition(".")[0])}
    assert names >= FREE_ON_RESUME


def test_the_bound_on_the_mismatch_is_by_dtype_and_off_where_others_sample() -> None:
    def bound(submitted: bool = False, **sections: Any) -> Any:
        tree = {"model": {"path": "m"}, "data": {"train": "x.jsonl"}, "reward": {"functions": [{"function": "a.py:f"}]}}
        tree |= {"train": {"max_steps": 1}, **sections}
        return resolve(Config.model_validate(tree), submitted=submitted).algorithm.mismatch_gate

    # auto: the device decides, before.
    for dtype, nats in (("float32", 1e-3), ("bfloat16", 0.1), ("auto", "auto")):
        assert bound(model={"path": "m", "dtype": dtype}) == nats
    assert bound(submitted=True) is None
    assert bound(submitted=True, algorithm={"mismatch_gate": 0.5}) == 0.5
    assert bound(algorithm={"mismatch_gate": None}) is None
