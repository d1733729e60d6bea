"""Losses and advantages of the user's by address: settings, refusals, resume, and the trial before a run."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import pytest
import torch
from support.pages import blocks

from asyncrl import setting
from asyncrl.algorithms.base import LossInputs
from asyncrl.algorithms.registry import build_advantage, build_loss
from asyncrl.cli.explain import explain
from asyncrl.config.check_losses import needs_reference
from asyncrl.config.describe import check_resume, to_yaml
from asyncrl.config.load import load_config
from asyncrl.config.methods import flat_values
from asyncrl.config.resolve import resolve
from asyncrl.config.schema import Config, schema_of
from asyncrl.errors import ConfigError
from asyncrl.runtime.inputs import check_inputs, try_loss

OTHERS = '''
import sys
import numpy as np
from dataclasses import dataclass
from asyncrl import LossMethod, Normaliser, Surrogate, as_rewards, of_group, of_step, setting, token_ratio
from asyncrl.algorithms.losses import Clipped
from asyncrl.algorithms.method import Conflict, Method


class Base(LossMethod):
    normaliser = Normaliser.TOKENS

    def surrogate(self, inputs):
        ratio_S = token_ratio(inputs)
        return Surrogate(-inputs.advantage_S * self.factor(inputs, ratio_S), ratio_S)


def loss(name, factor, **more):
    return type(name, (Base,), {"name": name.lower(), "factor": factor, **more})


Right = loss("Right", lambda _, inputs, r_S: inputs.spread(inputs.sequence_mean(r_S)), normaliser=Normaliser.SEQUENCES)
Mean = loss("Mean", lambda _, inputs, r_S: r_S / max(len(r_S), 1))
# The sum is right, its gradient is not.
OfTheRest = loss("OfTheRest", lambda _, inputs, r_S: r_S * len(r_S) - (r_S * (len(r_S) - 1)).detach())
NotFinite = loss("NotFinite", lambda _, inputs, r_S: (r_S - 1).abs().sqrt())
Sampler = loss("Sampler", lambda _, inputs, r_S: r_S - inputs.sampler_logp_S)
Detached = loss("Detached", lambda _, inputs, r_S: r_S.detach())
# It reads what it has not asked for.
Reference = loss("Undeclared", lambda _, inputs, r_S: r_S - inputs.reference_logp_S)
Leaves = loss("Leaves", lambda _, inputs, r_S: sys.exit(0))


class Nameless(LossMethod):
    pass


class Undecorated(Base):
    name = "undecorated"
    slope: float = setting(1.0, "None.")


@dataclass(frozen=True)
class Taken(Base):
    name = "kl"
    slope: float = setting(1.0, "None.")


@dataclass(frozen=True)
class Hyphened(Base):
    name = "my-loss"
    slope: float = setting(1.0, "None.")


@dataclass(frozen=True)
class Unbounded(Base):
    name = "unbounded"
    slope: float = setting(-1.0, "None.", gt=0)


@dataclass(frozen=True)
class Derived(Clipped):
    """A default and a setting of its own beside those of PPO's clip."""

    name, normaliser = "derived", Normaliser.TOKENS
    epsilon: float = setting(0.3, "Lower.", flat="epsilon", gt=0)
    more: float = setting(1.0, "More.", gt=0)


@dataclass(frozen=True)
class Toy(Base):
    """Declares all that a class can."""

    name, needs_reference = "toy", True
    conflicts = (
        Conflict("algorithm.mask.truncated", "which wants every token", lambda a: a.at("algorithm.mask.truncated")),
    )
    strength: float = setting(2.0, "How much of it.", gt=0, le=8)
    kind: str = setting("plain", "Which of them.", choices=("plain", "fancy"), fixed=True)

    def factor(self, inputs, ratio_S):
        return self.strength * ratio_S

    def problems(self, context):
        if self.kind == "fancy" and self.strength > 4:
            yield f"algorithm.toy.strength is {self.strength}; too fancy"


@dataclass(frozen=True)
class Shift(Method):
    section = "shifted"
    by: float = setting(0.5, "What is taken off a reward.")


@of_group(alone=True, settings=Shift)
def shifted(rewards, settings):
    """`r - by`."""
    return as_rewards(rewards) - settings.by


@dataclass(frozen=True)
class Clip(Method):
    section = "clip"
    by: float = setting(0.5, "What is taken off a reward.")


@of_group(settings=Clip)
def clipped(rewards, settings):
    return as_rewards(rewards) - settings.by


def means(rewards):
    return np.asarray(rewards, float) - np.mean(np.asarray(rewards, float))


def short(rewards):
    return np.nan_to_num(as_rewards(rewards))[1:]


def unread(rewards):
    return np.array(rewards)  # of objects, because a reward may be None


def listed(rewards):
    return [0.0 for _ in rewards]


@of_step()
def by_component(groups):
    return [np.nan_to_num(as_rewards(group.components["style"]) * group.weights["style"]) for group in groups]


@of_step()
def one_only(groups):
    return [np.zeros(len(groups[0].rewards))]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`my.py` as docs/algorithms.md writes it, and `others.py`."""
    made = tmp_path_factory.mktemp("own")
    loss, settings, rest = blocks("own methods")
    (made / "my.py").write_text(f"{loss.text}\n\n{rest.text}")
    (made / "x.yaml").write_text(settings.text)
    (made / "others.py").write_text(OTHERS)
    return made


def made(*overrides: str, files: tuple[Path, ...] = ()) -> Config:
    base = ["engine.kind=dry_run", "train.kind=dry_run", "train.max_steps=1"]
    return resolve(load_config(files, [*base, *overrides]), embedding=True)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as found:
        config = made("preset=sync", *overrides)
        try_loss(config)
        check_inputs(config)
    return str(found.value)


def test_the_documented_loss_and_advantage_are_trained_with_their_numbers(folder: Path) -> None:
    config = made(files=(folder / "x.yaml",))  # the addresses count from the file
    loss = build_loss(config.algorithm.loss, **flat_values(config.algorithm))
    logp_S = torch.tensor([-1.0, -0.5], dtype=torch.float64, requires_grad=True)
    old_S, advantage_S = torch.tensor([[-1.2, -0.5], [2.0, -1.0]], dtype=torch.float64)
    total = loss(LossInputs(logp_S, None, old_S, advantage_S, torch.tensor([0, 0]), 1, old_logp_S=old_S)).total
    total.backward()
    ratio = math.exp(-1.0 + 1.2)
    assert float(total.detach()) == pytest.approx(-2 * math.tanh(3 * (ratio - 1)) / 3)
    assert logp_S.grad is not None
    assert logp_S.grad.tolist() == pytest.approx([-2 * ratio / math.cosh(3 * (ratio - 1)) ** 2, 1.0])
    advantage = build_advantage(config.algorithm.advantage, **flat_values(config.algorithm))
    assert advantage([1.0, None, 0.0]).tolist() == [0.5, 0.0, -0.5]
    try_loss(config)
    check_inputs(config)


def test_its_settings_are_read_back_and_compared_as_ours(folder: Path, tmp_path: Path) -> None:
    config = made(files=(folder / "x.yaml",))
    assert "flat:\n    slope: 3.0" in to_yaml(config)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert resolve(load_config([tmp_path / "config.yaml"]), embedding=True) == config
    plain = config.model_dump(mode="json")
    assert schema_of(plain).model_validate(plain) == config
    tree = {"loss": f"{folder}/my.py:Flat", "flat": {"slope": 3.0}, "advantage": f"{folder}/my.py:centred"}
    in_code = Config(algorithm=tree)
    assert in_code == Config(algorithm=in_code.algorithm) and type(in_code) is type(config)
    assert pickle.loads(pickle.dumps(config)) == config
    assert in_code.algorithm == load_config([folder / "x.yaml"]).algorithm
    with pytest.raises(ConfigError, match=r"algorithm\.loss: cannot load .*my\.py has no 'Flut'; did you mean 'Flat'"):
        Config(algorithm={"loss": f"{folder}/my.py:Flut"})
    other = made("algorithm.flat.slope=1", files=(folder / "x.yaml",))
    assert check_resume(config, other) == ["algorithm.flat.slope: 3.0 -> 1.0"]
    with pytest.raises(ConfigError, match=r"algorithm\.loss: .*my\.py:Flat -> dapo \(the run would go on with another"):
        check_resume(config, made("algorithm.loss=dapo"))
    text = explain(f"{folder}/my.py:Flat") + explain(f"{folder}/my.py:centred")
    assert "limits on both sides" in text and "algorithm.flat.*: slope=2.0" in text and "can be streamed: yes" in text


def test_what_a_class_declares_reaches_explain_the_run_the_refusals_and_the_resume(folder: Path) -> None:
    own = (f"algorithm.loss={folder}/others.py:Toy", f"algorithm.advantage={folder}/others.py:shifted")
    config = made(*own, "algorithm.toy.strength=3", "algorithm.shifted.by=1")
    ones_S = torch.ones(4, dtype=torch.float64)
    inputs = LossInputs(-ones_S, None, -ones_S, ones_S, torch.zeros(4, dtype=torch.int64), 1)
    loss = build_loss(config.algorithm.loss, **flat_values(config.algorithm))
    assert float(loss(inputs).total) == -12.0 and loss.needs_reference and needs_reference(config.algorithm)
    advantage = build_advantage(config.algorithm.advantage, **flat_values(config.algorithm))
    assert advantage([1.0, 3.0]).tolist() == [0.0, 2.0]
    text = explain(config.algorithm.loss) + explain(config.algorithm.advantage)
    assert "algorithm.toy.*: strength=2.0, kind=plain" in text and "algorithm.shifted.*: by=0.5" in text
    assert "reference log-probs" in text and "which wants every token" in text
    assert "one of plain, fancy" in refusal(*own, "algorithm.toy.kind=other")
    assert "<= 8" in refusal(*own, "algorithm.toy.strength=9")
    assert "is 5.0; too fancy" in refusal(*own, "algorithm.toy.kind=fancy", "algorithm.toy.strength=5")
    said = refusal(*own, "algorithm.mask.truncated=true")
    assert said.startswith("algorithm.mask.truncated is true but algorithm.loss is ") and said.endswith("every token")
    changes = ["algorithm.toy.strength: 3.0 -> 2.0", "algorithm.shifted.by: 1.0 -> 0.5"]
    assert check_resume(config, made(*own)) == changes
    with pytest.raises(ConfigError, match=r"toy\.kind: plain -> fancy \(the run would go on with another objective"):
        check_resume(config, made(*own, "algorithm.toy.kind=fancy"))


def test_a_class_that_derives_from_ours_keeps_our_settings(folder: Path) -> None:
    loss = f"algorithm.loss={folder}/others.py:Derived"
    config = made(loss, "algorithm.clip.more=2", "algorithm.clip.delta=1.5")
    found = flat_values(config.algorithm)
    assert (found["epsilon"], found["epsilon_high"], found["clip_more"], found["delta"]) == (0.3, 0.3, 2.0, 1.5)
    assert flat_values(made().algorithm)["epsilon"] == 0.2
    assert "expected more than 1 + epsilon_high = 1.3" in refusal(loss, "algorithm.clip.delta=1.1")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("flat.slope=0", "algorithm.flat.slope is 0 (override 'algorithm.flat.slope=0'); expected a number > 0"),
        ("flat.slope=true", "algorithm.flat.slope is true"),
        ("flat.slop=1", "the nearest is 'algorithm.flat.slope'"),
        ("clip.epsilon=0.1", "which does not read it"),
        ("loss=dapo", "unknown key 'algorithm.flat.slope'"),
        ("loss=nowhere.py:Loss", "algorithm.loss: cannot load 'nowhere.py:Loss': there is no file"),
    ],
)
def test_its_settings_are_checked_as_ours(folder: Path, override: str, words: str) -> None:
    own = (f"algorithm.loss={folder}/my.py:Flat", "algorithm.flat.slope=3")
    assert words in refusal(*own, f"algorithm.{override}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Mean", "the sum of the batch changes if the batch is cut into microbatches"),
        ("OfTheRest", "the gradient of the batch changes if the batch is cut"),
        ("NotFinite", "numbers of its gradient are not finite"),
        ("Sampler", "its sum is nan"),
        ("Detached", "does not require grad"),
        ("Reference", "others.py:"),
        ("Leaves", "SystemExit: 0"),
        ("Nameless", "must have `name`, `normaliser` and `surrogate`"),
        ("Undecorated", "decorate the class with @dataclass(frozen=True)"),
        ("Taken", "would be algorithm.kl.*, which are taken"),
        ("Hyphened", "the section 'my-loss'; use letters, digits and _"),
        ("Unbounded", "whose setting slope has the default -1.0: Input should be greater than 0"),
        ("means", "no class derived from asyncrl.LossMethod"),
    ],
)
def test_a_loss_without_the_properties_of_ours_is_refused(folder: Path, name: str, words: str) -> None:
    text = refusal(f"algorithm.loss={folder}/others.py:{name}")
    assert f"others.py:{name}'" in text and words in text


def test_a_bound_that_nothing_checks_is_refused() -> None:
    with pytest.raises(TypeError, match="no argument 'minimum'; a bound is gt, ge, lt or le"):
        setting(1.0, "None.", minimum=0)


def test_a_loss_of_sequences_and_an_advantage_of_a_component_have_them(folder: Path) -> None:
    others = (f"algorithm.loss={folder}/others.py:Right", f"algorithm.advantage={folder}/others.py:by_component")
    config = made(*others, "preset=sync")
    try_loss(config)
    check_inputs(config)
    assert f"algorithm.advantage is {folder}/others.py:by_component, whose statistics span the whole step" in refusal(
        *others, "preset=async"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("means", "0 where the reward is None"),
        ("short", "a finite number for each member"),
        ("unread", "a finite number for each member"),
        ("listed", "expected a numpy array"),
        ("one_only", "zip() argument 2 is shorter"),
        ("Right", "which is no advantage function"),
        ("clipped", "would be algorithm.clip.*, which are taken"),
    ],
)
def test_an_advantage_without_a_number_for_each_member_is_refused(folder: Path, name: str, words: str) -> None:
    text = refusal(f"algorithm.advantage={folder}/others.py:{name}", "rollout.group_size=4")
    assert f"algorithm.advantage is '{folder}/others.py:{name}'" in text and words in text
