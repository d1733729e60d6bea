"""Reward models: the score of a text is what transformers gives for it alone, whatever lies beside it in a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models_reward
import pytest
import torch
from models_reward import Mean, make_classifier, make_tokenizer, save

from asyncrl.config.schema_rollouts import RewardModelConfig
from asyncrl.errors import ConfigError, RewardError
from asyncrl.models.reward_model import RewardModel, load_reward_model, predict_sizes

HERE = models_reward.__file__
CPU = torch.device("cpu")
TEXTS = [("ab?", "c" * n + "12=") for n in (1, 17, 4, 30, 9, 0, 30)]


def load(path: str | Path, dtype: str = "float32", tokens: int = 64, **settings: Any) -> RewardModel:
    return load_reward_model(RewardModelConfig(path=str(path), **settings), dtype, CPU, tokens)


def together(model: RewardModel, texts: list[list[int]]) -> list[float]:
    found: dict[int, float] = {}
    for batch in model.batches(texts):
        found |= dict(zip(batch, model.scores([texts[place] for place in batch]), strict=True))
    return [found[place] for place in range(len(texts))]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "bert"])
@pytest.mark.parametrize("pad", ["both", "tokenizer alone", "none"])
def test_scores_are_those_of_transformers_for_each_text_alone(tmp_path: Path, kind: str, pad: str) -> None:
    """Whether a padding token is known or not: then rows go one by one."""
    tokenizer = make_tokenizer(pad=None if pad == "none" else "<pad>")
    raw = make_classifier(kind, pad=0 if pad == "both" else None)
    model = load(save(tmp_path, raw, tokenizer), tokens=90)
    texts = [model.tokenize(*text) for text in TEXTS]
    expected = []
    for prompt, completion in TEXTS:
        rendered = f"<u>{prompt}<e><a>{completion}<e>"
        ids = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected.append(float(raw(input_ids=ids).logits[0, 0]))
    assert together(model, texts) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len({round(score, 3) for score in expected}) > 4  # it does look at the text
    sizes = [len(batch) for batch in model.batches(texts)]
    assert max(sizes) == 1 if pad == "none" else max(sizes) > 1


@pytest.mark.parametrize(("dtype", "most"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.05)])
def test_a_score_does_not_depend_on_the_batch(tmp_path: Path, dtype: str, most: float) -> None:
    model = load(save(tmp_path, make_classifier("qwen2"), make_tokenizer()), dtype, tokens=1000)
    texts = [model.tokenize(*text) for text in TEXTS]
    assert len(list(model.batches(texts))) == 1
    assert together(model, texts) == pytest.approx([model.scores([text])[0] for text in texts], abs=most)
    assert together(model, texts) == together(model, texts)
    assert {p.dtype for p in model.module.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_frequencies_are_those_of_each_text(tmp_path: Path, kind: str) -> None:
    """Past the original context `dynamic` has others for each length, and keeps them after a long text."""
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 100.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16}
    raw = make_classifier(context=64 if kind == "longrope" else 16, rope=rope)
    model = load(save(tmp_path, raw, make_tokenizer()), tokens=1000, max_tokens=64)
    texts = [[7 + (3 * i + n) % 40 for i in range(n)] for n in (40, 3, 16, 17, 40, 20, 12)]
    expected = []
    for text in texts:
        fresh = load(tmp_path, max_tokens=64)
        expected.append(fresh.scores([text])[0])
    assert together(model, texts) == pytest.approx(expected, abs=1e-5)
    assert together(model, texts) == pytest.approx(expected, abs=1e-5)  # after long ones
    past = [[3], [5], [0, 4]] if kind == "dynamic" else [[3, 5, 0, 4]]
    assert list(model.batches(texts)) == [[1, 6, 2], *past]


def test_a_batch_holds_no_more_tokens_than_it_may(tmp_path: Path) -> None:
    model = load(save(tmp_path, make_classifier(), make_tokenizer()), tokens=48)
    texts = [[7] * length for length in (3, 60, 20, 24, 5, 24)]
    batches = list(model.batches(texts))
    assert sorted(place for batch in batches for place in batch) == [0, 1, 2, 3, 4, 5]
    assert all(len(batch) == 1 or len(batch) * max(len(texts[i]) for i in batch) <= 48 for batch in batches)
    assert batches == [[0, 4], [2, 3], [5], [1]]


def test_messages_are_rendered_by_the_models_own_template(tmp_path: Path) -> None:
    model = load(save(tmp_path, make_classifier(), make_tokenizer()))
    tokenizer = make_tokenizer()

    def words(*text: Any) -> str:
        return "".join(tokenizer.convert_ids_to_tokens(model.tokenize(*text)))

    chat = [{"role": "system", "content": "x"}, {"role": "user", "content": "ab"}]
    assert words("ab", "c1") == "<u>ab<e><a>c1<e>"
    assert words(chat, [{"role": "assistant", "content": "c1"}]) == "<s>x<e><u>ab<e><a>c1<e>"
    begun = [*chat, {"role": "assistant", "content": "so "}]  # an answer that the prompt begins is one message
    assert words(begun, [{"role": "assistant", "content": "c1"}]) == "<s>x<e><u>ab<e><a>so c1<e>"
    assert words([*chat, {"role": "assistant", "content": None}], "c1") == "<s>x<e><u>ab<e><a>c1<e>"


def test_without_a_template_strings_follow_each_other_and_messages_are_refused(tmp_path: Path) -> None:
    model = load(save(tmp_path, make_classifier(), make_tokenizer(template=None)))
    assert make_tokenizer().convert_ids_to_tokens(model.tokenize("ab", "c1")) == list("abc1")
    with pytest.raises(RewardError, match="no chat template"):
        model.tokenize([{"role": "user", "content": "ab"}], [{"role": "assistant", "content": "c1"}])


def test_several_outputs_need_a_choice(tmp_path: Path) -> None:
    path = save(tmp_path, make_classifier(labels=3), make_tokenizer())
    with pytest.raises(ConfigError, match=r"has 3 outputs; set `label` to the output that is the score \(0 to 2\)"):
        load(path)
    with pytest.raises(ConfigError, match=r"3 output.*label is 3"):
        load(path, label=3)
    with pytest.raises(ConfigError, match="has 3 outputs"):
        load(f"{HERE}:wide")
    for model in (load(path, label=2), load(f"{HERE}:wide", label=2)):
        row = model.tokenize("ab", "c")
        with torch.no_grad():
            found = model.module(
                input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row), dtype=torch.int64)
            )
        assert model.scores([row]) == pytest.approx([float(getattr(found, "logits", found)[0, 2])])


def test_any_module_by_its_address(tmp_path: Path) -> None:
    model = load(f"{HERE}:mean")
    assert model.name == "mean" and load(f"{HERE}:mean", name="judge").name == "judge"
    row = model.tokenize("ab", "c")
    raw = Mean()
    with torch.no_grad():
        expected = float(raw(torch.tensor([row]), torch.ones(1, len(row))))
    assert model.scores([row, row + row])[0] == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_a_reward_model_is_refused(tmp_path: Path) -> None:
    for name in ("careless", "nan_if_padded"):
        with pytest.raises(ConfigError, match=r"depend on the other texts of its batch.*attention_mask"):
            load(f"{HERE}:{name}")
    with pytest.raises(
        ConfigError, match=r"reward.model: .*raised TypeError for the arguments input_ids and attention_mask"
    ):
        load(f"{HERE}:without_mask")
    with pytest.raises(ConfigError, match=r"returned str; expected \(torch module, tokenizer\)"):
        load(f"{HERE}:nothing")
    with pytest.raises(ConfigError, match=r"there is no directory .*nowhere.*no id of a model"):
        load(tmp_path / "nowhere")
    from transformers import LlamaForCausalLM

    settings = make_classifier().config
    causal = save(tmp_path / "causal", LlamaForCausalLM(settings), make_tokenizer())
    with pytest.raises(ConfigError, match=r"holds no weights for.*score\.weight.*no sequence classifier"):
        load(causal)


def test_the_longest_text(tmp_path: Path) -> None:
    path = save(tmp_path, make_classifier(context=40), make_tokenizer(length=32))
    assert load(path).max_text_tokens == 32 and load(path, max_tokens=20).max_text_tokens == 20
    assert load(f"{HERE}:mean").max_text_tokens > 10**6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_memory_is_predicted(tmp_path: Path, dtype: str) -> None:
    path = save(tmp_path, make_classifier("qwen2"), make_tokenizer())
    sizes = predict_sizes(RewardModelConfig(path=str(path)), dtype, tokens=512)
    model = load(path, dtype, tokens=512)
    assert sizes.weights == sum(p.numel() * p.element_size() for p in model.module.parameters())
    assert sizes.activations > 0
    built = predict_sizes(RewardModelConfig(path=f"{HERE}:mean", dtype="float64"), dtype, tokens=512)
    assert built.weights == (47 * 8 + 9) * 8
