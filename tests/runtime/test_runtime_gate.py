"""The gate: models are run the way that agrees with themselves, and what computes something else is not let in."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_gated import GATED, SMALL, built, llama
from runtime_helpers import MODEL, REAL, config_of, metrics_of, rollouts_of, write_yaml
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MiniMaxConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    PhimoeConfig,
    PreTrainedModel,
)
from transformers.models.lfm2.modeling_lfm2 import Lfm2ForCausalLM, Lfm2Model
from transformers.models.llama import modeling_llama

from asyncrl.cli.app import main as cli
from asyncrl.config.resolve import resolve
from asyncrl.config.schema import LoraConfig
from asyncrl.errors import ConfigError
from asyncrl.generation.embedded import plain_core, plans
from asyncrl.generation.embedded.cache import KVCache
from asyncrl.models import plain
from asyncrl.models.attention.interface import AttentionTerms
from asyncrl.models.fused.decoder import FusedDecoder
from asyncrl.models.fused.layers import Norm
from asyncrl.models.paths import FUSED, PACKED, PLAIN
from asyncrl.models.policy import PolicyModel
from asyncrl.models.probe import build_probe
from asyncrl.runtime import gate_trial
from asyncrl.runtime.gate import RELATIVE, check_model, check_run_model
from asyncrl.runtime.gate_trial import Trial
from asyncrl.runtime.plan import announcement, plan
from asyncrl.runtime.runtime import Runtime


def gpt_oss() -> PreTrainedModel:
    model = built(GptOssConfig(**GATED, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8))
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    return model


def stateful() -> PreTrainedModel:
    return built(Lfm2Config(**GATED, layer_types=["conv", "full_attention"]))


# -- which path ---------------------------------------------------------------------------------------------------------


def test_the_first_path_that_agrees_is_used() -> None:
    assert check_model(llama()).path == FUSED
    assert check_model(gpt_oss()).path == FUSED
    assert check_model(llama(hidden_act="relu")).path == PACKED
    assert check_model(built(BloomConfig(**SMALL))).path in PLAIN
    assert check_model(stateful()).path in PLAIN
    with torch.device("meta"):
        without_weights = llama()
    # The class is compared.
    assert check_model(without_weights).path == FUSED


def test_the_model_is_left_as_it_was() -> None:
    model = llama()
    before = copy.deepcopy(model.state_dict()), model.config.to_dict(), model.config._attn_implementation
    random, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        check_model(model)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    after = model.state_dict(), model.config.to_dict(), model.config._attn_implementation
    assert after[1:] == before[1:] and all(torch.equal(after[0][name], before[0][name]) for name in before[0])
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_near_zero_hide_nothing() -> None:
    """A model of the scale of random weights, where a lost layer moves no log-prob: the probe's are of a size that shows."""
    model = llama(initializer_range=1e-6)
    probe = build_probe(model)
    lost = PolicyModel(copy.deepcopy(probe), path=PACKED)
    with_layers_off = Trial(probe)
    for layer in lost.module.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    assert float((with_layers_off._train(lost) - with_layers_off.logp_S).abs().max()) > 0.1


# -- refused ------------------------------------------------------------------------------------------------------------


def test_encoder_decoders_are_refused() -> None:
    sizes = {"vocab_size": 64, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, **sizes)
    with pytest.raises(ConfigError, match="BartForConditionalGeneration is an encoder-decoder"):
        check_model(BartForConditionalGeneration(config))


class ForgetfulModel(Lfm2Model):
    """Right in one forward; its cache loses the first token of every sequence."""

    def forward(self, input_ids: Any = None, **given: Any) -> Any:
        output = super().forward(input_ids=input_ids, **given)
        for layer in output.past_key_values.layers if output.past_key_values is not None else ():
            if getattr(layer, "keys", None) is not None:
                layer.keys[:, :, 0] = 0
        return output


def around(decoder: type[nn.Module], kind: type[PreTrainedModel], **settings: Any) -> PreTrainedModel:
    """A model of a class like `kind` whose decoder is another one."""

    def init(self: Any, config: Any) -> None:
        kind.__init__(self, config)
        self.model = decoder(config)

    return type("OddForCausalLM", (kind,), {"__init__": init})(kind.config_class(**GATED, **settings))


def test_a_cache_that_forgets_is_not_used() -> None:
    verdict = check_model(around(ForgetfulModel, Lfm2ForCausalLM, layer_types=["conv", "full_attention"]))
    with_cache = [result.distance for result in verdict.results if result.path in PLAIN and result.path.cached]
    assert len(with_cache) == 3
    for distance in with_cache:
        assert distance is not None and distance.logprobs < 1e-5 and distance.gradients < 1e-5
        assert distance.sampler > 1e-3
    assert not verdict.path.cached
    assert any("each token costs a forward over its row" in line for line in verdict.lines())


class MixingModel(LlamaModel):
    """Right with one row. In a batch each row is given the tokens of another one; `batches`: it has none at all."""

    batches = True

    def forward(self, input_ids: Any = None, **given: Any) -> Any:
        if input_ids.shape[0] > 1 and not self.batches:
            raise ValueError("one row at a time")
        return super().forward(input_ids=input_ids.roll(1, 0), **given)


@pytest.mark.parametrize("batches", [True, False])
def test_a_class_that_mixes_the_rows_of_a_batch_is_compared_by_rows_alone(
    monkeypatch: pytest.MonkeyPatch, batches: bool
) -> None:
    monkeypatch.setattr(MixingModel, "batches", batches)
    model = around(MixingModel, LlamaForCausalLM)
    for paths, taken in (((FUSED, PACKED), FUSED), (PLAIN, PLAIN[2])):
        verdict = check_model(model, paths=paths)
        assert verdict.path == taken and verdict.chosen is not None
        found = verdict.chosen.distance
        assert found is not None and max(found.logprobs, found.gradients, found.sampler) < 1e-5, str(verdict.chosen)
        assert verdict.probe_layers == 2


class ShiftedForCausalLM(LlamaForCausalLM):
    """Its decoder is not given the tokens that the model is given."""

    def forward(self, input_ids: Any = None, **given: Any) -> Any:
        return super().forward(input_ids=(input_ids + 1) % self.config.vocab_size, **given)


def test_what_no_path_computes_is_refused_with_what_was_compared() -> None:
    verdict = check_model(ShiftedForCausalLM(LlamaConfig(**GATED)))
    with pytest.raises(ConfigError) as caught:
        _ = verdict.path
    text = str(caught.value)
    assert "ShiftedForCausalLM is refused" in text and "2 of 2 layers" in text
    for name in ("fused:", "packed:", "plain (sdpa", "plain (eager", "without a cache"):
        assert name in text
    assert all(result.distance is not None and result.distance.logprobs > 0.1 for result in verdict.results)
    assert "refused" in verdict.lines()[0]


class LookingModel(LlamaModel):
    """Every token sees how many there are."""

    def forward(self, input_ids: Any = None, **given: Any) -> Any:
        output = super().forward(input_ids=input_ids, **given)
        output.last_hidden_state = output.last_hidden_state.clone()
        output.last_hidden_state[..., 0] += 0.01 * input_ids.shape[1]
        return output


def test_a_class_that_fails_in_the_dtype_of_the_run_is_refused_for_that_dtype() -> None:
    """transformers' linear attention keeps a state in float32, and multiplies it with bfloat16."""
    layers = {"layer_types": ["full_attention", "linear_attention"], "num_local_experts": 2}
    model = built(MiniMaxConfig(**GATED, **layers, head_dim=8, block_size=4))
    with pytest.raises(ConfigError, match=r"fails in bfloat16 \(RuntimeError.*\); model.dtype=float32 works"):
        _ = check_model(model, dtype="bfloat16").path
    assert check_model(model).path in PLAIN
    assert check_model(stateful(), dtype="bfloat16").path in PLAIN


def test_a_model_that_is_not_causal_is_refused() -> None:
    with pytest.raises(ConfigError, match="own forward is not causal: the log-prob of one of 10 tokens moves by"):
        check_model(around(LookingModel, LlamaForCausalLM))


class AdaptedLinear(nn.Linear):
    """As a library of adapters puts it in the place of a layer's own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_model_into_which_other_parts_were_put_is_refused(layer: int) -> None:
    """What is compared is what the class builds: it would not see them."""
    model = llama()
    own = model.model.layers[layer].self_attn.q_proj
    model.model.layers[layer].self_attn.q_proj = AdaptedLinear(own.in_features, own.out_features, bias=False)
    with pytest.raises(ConfigError, match=rf"its model.layers.{layer}.self_attn.q_proj is a .*AdaptedLinear, but its"):
        check_model(model)


def test_a_model_that_cannot_be_built_small_is_refused_with_a_sentence() -> None:
    class OddForCausalLM(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            if config.vocab_size < 512:
                raise RuntimeError("not so small")
            super().__init__(config)

    words = r"a small copy of the model fails in transformers \(RuntimeError: not so small\)"
    with pytest.raises(ConfigError, match=words):
        check_model(OddForCausalLM(LlamaConfig(**GATED | {"vocab_size": 512})))


# -- made wrong on purpose: each break is in what the product runs, and the eager side does not have it -----------------


def break_scale(patch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A model with a scale of its own in its eager attention, which ours is not told of."""
    eager = modeling_llama.eager_attention_forward

    def scaled(*given: Any, scaling: float, **more: Any) -> Any:
        return eager(*given, scaling=0.5 * scaling, **more)

    patch.setattr(modeling_llama, "eager_attention_forward", scaled)
    return llama(hidden_act="relu")


def break_mask(patch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Windows are one token too wide."""
    within = AttentionTerms.simplified_for
    patch.setattr(AttentionTerms, "simplified_for", lambda self, longest: replace(within(self, longest), window=9))
    return built(MistralConfig(**GATED, sliding_window=8))


def break_cache(patch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A prompt that others have computed is not copied."""
    patch.setattr(KVCache, "copy_row", lambda self, source, target, length: None)
    return llama()


def break_rows(patch: pytest.MonkeyPatch) -> PreTrainedModel:
    """The plain path pads on the left, and says nothing of it."""
    forward = plain.PlainForward._forward

    def unmasked(self: Any, tokens_T: Any, batch: Any, length: int) -> Any:
        return forward(self, tokens_T, [row[::-1].copy() if row.size < length else row for row in batch], length)

    patch.setattr(plain.PlainForward, "_forward", unmasked)
    return stateful()


def break_leaving(patch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Rows that stay in a shared cache are taken from its beginning, whichever has left."""
    select = plain_core._select_rows
    patch.setattr(plain_core, "_select_rows", lambda cache, index: select(cache, torch.arange(len(index))))
    return stateful()


def break_groups(patch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Of query heads that share a key head, those past the fourth are given the numbers of the first."""
    attend = plans.DecodePlan.attend

    def wrong(self: Any, layer: int, query: Any, key: Any, *others: Any) -> Any:
        out_nHD = attend(self, layer, query, key, *others)
        grouped = out_nHD.unflatten(1, (key.shape[1], -1)).clone()
        grouped[:, :, 4:] = grouped[:, :, :1]
        return grouped.flatten(1, 2)

    patch.setattr(plans.DecodePlan, "attend", wrong)
    return llama(hidden_size=160, num_attention_heads=10, num_key_value_heads=2)


def break_mode(patch: pytest.MonkeyPatch) -> PreTrainedModel:
    """All modules train, as transformers' checkpointing is usually switched on: the router adds noise."""
    patch.setattr(PolicyModel, "set_training", lambda self, training: self.module.train(training))
    return built(MixtralConfig(**GATED, num_local_experts=4, router_jitter_noise=0.3))


def break_wide_window(patch: pytest.MonkeyPatch) -> PreTrainedModel:
    """As `break_mask`, in front of experts."""
    break_mask(patch)
    return gpt_oss()


def break_sinks(patch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Heads have each other's sinks."""
    within = AttentionTerms.simplified_for

    def wrong(self: AttentionTerms, longest: int) -> AttentionTerms:
        terms = within(self, longest)
        return terms if terms.sinks is None else replace(terms, sinks=terms.sinks.flip(0))

    patch.setattr(AttentionTerms, "simplified_for", wrong)
    return gpt_oss()


def break_experts(patch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Experts are given what is not normed."""
    add = FusedDecoder._add_experts
    patch.setattr(FusedDecoder, "_add_experts", lambda self, layer, x, normed, plan: add(self, layer, x, x, plan))
    return gpt_oss()


@pytest.mark.parametrize(
    ("broken", "path", "what"),
    [
        (break_scale, PACKED, ["logprobs"]),
        (break_mask, PACKED, ["logprobs", "sampler"]),
        (break_cache, FUSED, ["sampler"]),
        (break_rows, PLAIN[0], ["logprobs"]),
        (break_leaving, PLAIN[0], ["sampler"]),
        (break_groups, FUSED, ["sampler"]),
        (break_mode, FUSED, ["logprobs"]),
        (break_wide_window, FUSED, ["logprobs", "sampler"]),
        (break_sinks, FUSED, ["logprobs", "sampler"]),
    ],
)
def test_what_is_made_wrong_on_purpose_is_caught(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], PreTrainedModel], path: Any, what: list[str]
) -> None:
    with monkeypatch.context() as patch:
        wrong = check_model(broken(patch), checkpointing=True, paths=[path])
    distance = wrong.results[0].distance
    assert wrong.chosen is None and distance is not None, wrong.results
    assert all(getattr(distance, each) > 1e-3 for each in what), distance
    with monkeypatch.context() as patch:
        model = broken(patch)
    assert check_model(model, checkpointing=True, paths=[path]).path == path  # it was that, and nothing else


def test_experts_that_are_run_otherwise_than_by_the_model_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Already the proof of a layer says so."""
    with monkeypatch.context() as patch:
        model = break_experts(patch)
        verdict = check_model(model, paths=[FUSED, PACKED])
    assert "the fused decoder does not support" in verdict.results[0].reason and verdict.path == PACKED
    assert check_model(model, paths=[FUSED, PACKED]).path == FUSED


@pytest.mark.parametrize(("lost", "model"), [("experts", gpt_oss), ("attention", gpt_oss), ("norm", llama)])
def test_a_gradient_that_is_lost_is_caught(
    monkeypatch: pytest.MonkeyPatch, lost: str, model: Callable[[], PreTrainedModel]
) -> None:
    add = FusedDecoder._add_experts
    back = FusedDecoder.attend_backward
    if lost == "experts":
        monkeypatch.setattr(FusedDecoder, "_add_experts", lambda *given: add(*given[:3], given[3].detach(), given[4]))
    elif lost == "attention":
        monkeypatch.setattr(FusedDecoder, "attend_backward", lambda *given: 0.9 * back(*given))
    else:

        def wrong(norm: Norm, grad: Any, x: Any, out: Any = None, scale: Any = None) -> Any:
            return grad if out is None else out.add_(grad)

        monkeypatch.setattr(Norm, "backward", wrong)
    verdict = check_model(model())
    distance = verdict.results[0].distance
    assert distance is not None and distance.logprobs < 1e-5 and distance.gradients > 100 * RELATIVE
    assert lost != "norm" or "norm" in distance.parameter or "proj" in distance.parameter
    assert verdict.path == PACKED


# -- with what else a run asks for --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "path"),
    [(gpt_oss, "fused"), (lambda: llama(hidden_act="relu"), "packed"), (stateful, "plain")],
    ids=["gpt-oss", "relu", "lfm2"],
)
def test_adapters_and_checkpointing_are_compared_too(make: Callable[[], PreTrainedModel], path: str) -> None:
    assert check_model(make(), lora=LoraConfig(rank=2, alpha=4), checkpointing=True).path.name == path


def test_a_model_cut_over_ranks_needs_the_packed_path() -> None:
    assert check_model(llama(), sharded=True).path == FUSED
    assert check_model(llama(hidden_act="relu"), sharded=True).path == PACKED
    assert check_model(gpt_oss(), sharded=True).path == FUSED
    verdict = check_model(stateful(), sharded=True)
    assert all(result.path.name != "plain" for result in verdict.results)
    with pytest.raises(ConfigError, match="is refused"):
        _ = verdict.path


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_frequencies_are_those_of_the_longest_row_that_the_run_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config = resolve(config_of(tmp_path, "data.max_prompt_tokens=12", "rollout.max_tokens=8"), 1)
    rope: dict[str, Any] = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [1.0 + n for n in range(8)]} if kind == "longrope" else {}
    within = check_run_model(config, llama(rope_parameters=dict(rope), max_position_embeddings=20))
    assert within.path == FUSED and f"rotary ({kind}): rows of up to 20 tokens stay within" in within.lines()[1]
    past = llama(rope_parameters=dict(rope), max_position_embeddings=19)
    verdict = check_run_model(config, past)
    assert verdict.path == FUSED and "rows may grow to 20 tokens, past the original context of 19" in verdict.lines()[1]
    said = "must use the rotary frequencies named above"
    assert any(said in line for line in announcement(config, None, verdict, "", rows=None))
    assert not any(said in line for line in announcement(config, None, verdict, "", rows=9))
    monkeypatch.setattr(gate_trial, "hold_frequencies", lambda module, longest: True)  # as if each row had its own
    wrong = check_model(past, longest=20, paths=[FUSED]).results[0].distance
    assert wrong is not None and max(wrong.logprobs, wrong.sampler) > 1e-3


def test_frequencies_that_nobody_can_hold_are_refused_for_rows_past_the_original_context(tmp_path: Path) -> None:
    config = resolve(config_of(tmp_path, "data.max_prompt_tokens=12", "rollout.max_tokens=8"), 1)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.1, "long_mscale": 1.3}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 19}
    phimoe = PhimoeConfig(**GATED, num_local_experts=2, max_position_embeddings=64, rope_parameters=rope)
    words = "rows of 20 tokens are past its original context of 19; it can be trained if"
    with pytest.raises(ConfigError, match=words):
        check_run_model(config, built(phimoe))


@pytest.mark.parametrize("kind", ["gpt2", "mpt"])
def test_rows_that_a_table_of_positions_does_not_hold_are_refused(tmp_path: Path, kind: str) -> None:
    """The class would fail with an index in the middle of a run, when the first row grows so long."""
    config = resolve(config_of(tmp_path, "data.max_prompt_tokens=12", "rollout.max_tokens=8"), 1)
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}

    def of(positions: int) -> PreTrainedModel:
        settings = SMALL | no_dropout | {"n_positions": positions}
        return built(GPT2Config(**settings) if kind == "gpt2" else MptConfig(**SMALL, max_seq_len=positions))

    words = r"it has positions for 19 tokens, and rows may have 20; make rollout\.max_context at most 19"
    with pytest.raises(ConfigError, match=words):
        check_run_model(config, of(19))
    assert check_run_model(config, of(20)).path == (PACKED if kind == "gpt2" else PLAIN[1])
    assert check_run_model(config, llama(max_position_embeddings=19)).path == FUSED  # rotary angles go on


def test_keys_of_old_weights_are_not_kept_on_the_plain_path(tmp_path: Path) -> None:
    keep = resolve(config_of(tmp_path, "engine.kv_after_update=keep"), 1)
    with pytest.raises(ConfigError, match="to recompute, or leave the setting out"):
        check_run_model(keep, stateful())
    assert check_run_model(keep, llama()).path == FUSED
    for setting in ("recompute", "null"):
        config = resolve(config_of(tmp_path, f"engine.kv_after_update={setting}"), 1)
        assert any("rebuilds caches after an update" in line for line in check_run_model(config, stateful()).lines())


# -- as users meet it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "path", "preset"),
    [
        ("stateful", "plain", "async"),
        ("windowed", "fused", "sync"),
        pytest.param("stateful", "plain", "sync", marks=pytest.mark.slow),
        pytest.param("windowed", "fused", "async", marks=pytest.mark.slow),
    ],
)
async def test_sampler_and_trainer_say_the_same_over_six_steps(
    tmp_path: Path, model: str, path: str, preset: str
) -> None:
    """Of a model with a state, and of one whose rows are longer than its window."""
    own = f"model.path={MODEL}:build_{model}", f"preset={preset}", "train.max_steps=6"
    async with Runtime(config_of(tmp_path, *own)) as runtime:
        assert runtime.built.policy is not None and runtime.built.policy.path.name == path
        await runtime.run()
    lines = metrics_of(tmp_path / "runs/run")
    assert len(lines) == 6
    exact = [line["mismatch/current_max"] for line in lines if "mismatch/current_max" in line]
    assert exact and max(exact) < 1e-4
    lengths = [row["prompt_length"] + row["completion_length"] for row in rollouts_of(tmp_path / "runs/run")]
    assert max(lengths) > 8  # twice the window


def test_check_model_a_dry_run_and_a_run_say_which_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["check-model", f"{MODEL}:build_stateful"]) == 0
    output = capsys.readouterr().out
    assert (
        "model: Lfm2ForCausalLM on the plain path" in output
        and "fused: Lfm2ForCausalLM has layers of type conv" in output
    )
    assert cli(["check-model", "/no/such/model"]) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert cli(["check-model", f"{MODEL}:build_broken"]) == 2
    assert "gives logits that are not finite" in capsys.readouterr().err

    text = plan(config_of(tmp_path, f"model.path={MODEL}:build_stateful"))
    assert "model: Lfm2ForCausalLM on the plain path" in text
    with pytest.raises(ConfigError, match="kv_after_update is keep"):
        plan(config_of(tmp_path, f"model.path={MODEL}:build_stateful", "engine.kv_after_update=keep"))
    assert REAL["model"]["path"].endswith(":build")

    file = write_yaml(tmp_path, REAL | {"telemetry": {"live": "plain"}})
    assert cli(["run", str(file), f"run.dir={tmp_path}/runs", "train.max_steps=1"]) == 0
    first, _, _ = capsys.readouterr().out.partition("\nstep 1/1")
    said = r"^model: Qwen3ForCausalLM on the fused path; against its eager pass .*, 1 of 1 layers, float32$"
    assert re.search(said, first, re.MULTILINE), first


def test_check_model_tries_rows_within_the_original_context_and_past_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["check-model", f"{MODEL}:build_stretched"]) == 0
    within, past = capsys.readouterr().out.split("rows past 8 tokens:\n")
    fused = "model: LlamaForCausalLM on the fused path"
    assert within.startswith(f"rows of up to 8 tokens:\n{fused}") and "stay" in within
    assert past.startswith(fused) and "all rows use the frequencies of a row of " in past
    # A model that is refused past its original context can be trained within it.
    assert cli(["check-model", f"{MODEL}:build_own_scale"]) == 0
    within, past = capsys.readouterr().out.split("rows past 16 tokens: ")
    assert within.startswith("rows of up to 16 tokens:\nmodel: PhimoeForCausalLM on the ")
    assert past.startswith("PhimoeForCausalLM is refused: it chooses rotary frequencies")
    assert past.endswith("is within that context\n")


def test_mistral_windows_reach_the_comparison() -> None:
    """The window in the configuration is longer than any row that a test can afford: the probe's is not."""
    model = built(MistralConfig(**GATED, head_dim=16, sliding_window=4096))
    assert build_probe(model).config.sliding_window == 8
    assert check_model(model).chosen is not None
