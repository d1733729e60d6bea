"""Loading: directory, random weights, GGUF; what is refused; the policy's own calls against plain transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.loading import describe_module, load_model_config, load_policy, load_tokenizer_of, parameter_count
from asyncrl.models.native.norms import FusedRMSNorm
from asyncrl.models.parameters.flat import add_widened_
from asyncrl.models.paths import PLAIN
from asyncrl.models.policy import PolicyModel

SHAPE = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.4, "max_position_embeddings": 64,
}  # fmt: skip


def save_tokenizer(directory: Path) -> None:
    words = {f"w{i}": i for i in range(37)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0"))).save_pretrained(directory)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path


def configure(directory: Path, **changes: object) -> None:
    """In the model's configuration there."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3 with windows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loaded_policy_equals_a_plain_transformers_forward(tmp_path: Path, family: str, dtype: str) -> None:
    torch.manual_seed(0)
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} if "windows" in family else {}
    llama = family == "llama"
    module = LlamaForCausalLM(LlamaConfig(**SHAPE)) if llama else Qwen3ForCausalLM(Qwen3Config(**SHAPE, **windows))
    module.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    policy, tokenizer = load_policy(ModelConfig(path=str(tmp_path), dtype=dtype))
    assert policy.fused is not None
    assert tokenizer.convert_tokens_to_ids("w5") == 5
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    tokens = torch.arange(9) * 5 % 37
    with torch.no_grad():
        ours = policy.logits(policy.hidden(tokens, torch.arange(9), TreePlan([9])))
        theirs = plain(input_ids=tokens[None]).logits[0].float()
    assert ours.dtype == torch.float32
    tolerance = 1e-4 if dtype == "float32" else 0.05 * float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_random_init_is_keyed_by_the_seed_and_leaves_the_global_state_alone(directory: Path) -> None:
    config = ModelConfig(path=str(directory), dtype="float32", random_init=True)
    state = torch.random.get_rng_state()
    first, second, other = (load_policy(config, seed=seed)[0].flat.master for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_parameter_count_allocates_nothing_and_is_right(directory: Path) -> None:
    config = ModelConfig(path=str(directory), dtype="float32")
    assert parameter_count(config) == sum(p.numel() for p in load_policy(config)[0].flat.parameters)
    configure(directory, hidden_size=16384, intermediate_size=65536, num_hidden_layers=60, vocab_size=128000)
    assert parameter_count(config) > 10**11  # 400 GB of float32: would not fit here


def test_errors_accuse_precisely(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def load(path: Path | str | None, **kwargs: object) -> None:
        load_policy(ModelConfig(path=None if path is None else str(path), dtype="float32", **kwargs))

    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ConfigError, match=r"model\.path is not set"):
        load(None)
    with pytest.raises(ConfigError, match="there is no directory"):
        load(empty / "nowhere")
    with pytest.raises(ConfigError, match="no model configuration"):
        load(empty)
    with pytest.raises(ConfigError, match=r"no 'x\.gguf' in"):
        load(directory, gguf_file="x.gguf")
    with pytest.raises(ConfigError, match=r"model\.tokenizer"):
        load(directory, tokenizer=str(empty))
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="weights"):
        load(directory)


def test_code_beside_a_model_is_neither_run_nor_asked_about(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """transformers asks at the terminal whether it may, and runs it on a yes."""
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    configure(directory, model_type="own", auto_map=code)
    (directory / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ConfigError, match=r"brings code of its own .* which is not run; load the model in a function"):
        load_policy(ModelConfig(path=str(directory), dtype="float32"))
    assert "[y/N]" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 4}, r"k_proj.weight as \[16, 16\], where the configuration says \[32, 16\] \(4 such"),
        ({"num_hidden_layers": 3}, r"layers\.2"),
    ],
)
def test_weights_that_are_missing_or_of_another_size_are_named(
    directory: Path, change: dict[str, int], words: str
) -> None:
    configure(directory, **change)
    with pytest.raises(ConfigError, match=words):
        load_policy(ModelConfig(path=str(directory), dtype="float32"))


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "16"}, "no model configuration in .*hidden_size"),
        ({"model_type": "t5"}, "builds no causal language model from the configuration in .*T5Config"),
        ({"model_type": "nobody's"}, "no model configuration in .*nobody's"),
        ({"hidden_act": "none such"}, "builds no causal language model from the configuration in .*none such"),
    ],
    ids=["form", "encoder-decoder", "type", "activation"],
)
def test_a_configuration_of_something_else_is_refused_with_a_sentence(
    directory: Path, change: dict, words: str, random: bool
) -> None:
    """Also where only the form of the model is asked for: memory and `--dry-run` come before the weights."""
    configure(directory, **change)
    config = ModelConfig(path=str(directory), random_init=random, dtype="float32")
    with pytest.raises(ConfigError, match=words):
        describe_module(config)
    with pytest.raises(ConfigError, match=words if random else "T5Config|none such|nobody's|hidden_size"):
        load_policy(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"attention_dropout": 0.1}, "dropout"), ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention")],
)
def test_what_would_compute_something_else_is_refused(change: dict, message: str) -> None:
    config = LlamaConfig(**SHAPE)
    module = LlamaForCausalLM(config)
    for key, value in change.items():
        setattr(module.config, key, value)
    with pytest.raises(ConfigError, match=message):
        PolicyModel(module)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_model_loads_as_it_is(tmp_path: Path, dtype: str, tied: bool) -> None:
    policy = PolicyModel(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)), dtype)
    policy.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == policy.dtype
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, policy.module.state_dict()[name])


TEXT = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
LINEAR = {f"linear_{name}": 2 if name.startswith("num") else 16 for name in (
    "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim",
)}  # fmt: skip
EYES = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 14}


@pytest.mark.parametrize("family", ["Qwen3_5", "Gemma3"])
def test_a_model_with_a_tower_is_saved_whole(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every tensor, bit for bit, under the same class; of what its class does not load, the number is said."""
    import transformers
    from safetensors.torch import load_file, save_file

    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    text = TEXT | ({"num_hidden_layers": 4} | LINEAR if family == "Qwen3_5" else {"num_hidden_layers": 2})
    own = {"depth": 1, "out_hidden_size": 32} if family == "Qwen3_5" else {"num_hidden_layers": 1, "image_size": 28}
    eyes = EYES | own | ({} if family == "Qwen3_5" else {"num_attention_heads": 2})
    more = {} if family == "Qwen3_5" else {"mm_tokens_per_image": 4}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=eyes, **more)
    torch.manual_seed(0)
    kind(config).save_pretrained(tmp_path / "old")
    save_tokenizer(tmp_path / "old")
    file = tmp_path / "old" / "model.safetensors"
    before = load_file(file)
    save_file({**before, "mtp.layers.0.w": torch.ones(3), "other.w": torch.ones(2)}, file, metadata={"format": "pt"})
    policy, _ = load_policy(ModelConfig(path=str(tmp_path / "old"), dtype="float32"), choose=lambda _: PLAIN[0])
    [line] = [record.getMessage() for record in caplog.records if record.name == "asyncrl.models"]
    assert f"holds 2 tensors that are no part of the {kind.__name__}" in line and "mtp.layers.0.w" in line
    policy.save_pretrained(tmp_path / "new")
    after = load_file(tmp_path / "new" / "model.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["architectures"] == [kind.__name__]
    assert type(describe_module(ModelConfig(path=str(tmp_path / "old")))) is kind


def test_what_is_loaded_is_not_said_to_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GPT-2's class ignores `attn.bias`, which fits `c_attn.bias` as well."""
    config = GPT2Config(
        vocab_size=37, n_positions=64, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    load_policy(ModelConfig(path=str(tmp_path), dtype="float32"), choose=lambda _: PLAIN[0])
    assert not [record for record in caplog.records if record.name == "asyncrl.models"]


def test_add_widened_equals_a_plain_addition() -> None:
    target = torch.randn(600, 1000)
    source = torch.randn(600, 1000).to(torch.bfloat16)
    expected = target + source.float()
    add_widened_(target, source)
    assert torch.equal(target, expected)


def test_gguf(tmp_path: Path) -> None:
    """A tiny GGUF file: epsilon repaired, no quantization mark, equal to the model that it was written from."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    shape = {**SHAPE, "head_dim": 4, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
    shape["head_dim"] = 8
    module = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, rms_norm_eps=1e-5))
    writer = gguf.GGUFWriter(str(tmp_path / "tiny.gguf"), "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(37)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    state = module.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for layer in range(2):
        for ours, theirs in names.items():
            tensor = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):  # llama.cpp interleaves the rotary halves
                heads = 4 if theirs == "attn_q" else 2
                tensor = tensor.view(heads, 2, 4, 32).transpose(1, 2).reshape(tensor.shape)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_tokenizer(tmp_path / "tokenizer")
    config = ModelConfig(
        path=str(tmp_path), dtype="float32", gguf_file="tiny.gguf", tokenizer=str(tmp_path / "tokenizer")
    )
    policy, _ = load_policy(config)
    assert policy.config.rms_norm_eps == 1e-5 and not hasattr(policy.config, "quantization_config")
    assert {m.eps for m in policy.module.modules() if isinstance(m, FusedRMSNorm)} == {1e-5}
    assert parameter_count(config) == sum(p.numel() for p in policy.flat.parameters)
    for name, tensor in policy.module.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-6)
    policy.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


BUILDERS = """
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent

def load(seed):
    with (HERE / "calls.txt").open("a") as file:
        file.write("x")
    return AutoModelForCausalLM.from_pretrained(HERE), AutoTokenizer.from_pretrained(HERE)

def fails(seed):
    weights = {}
    return weights["gone"]

def no_seed():
    return load(0)

def backwards(seed):
    return AutoTokenizer.from_pretrained(HERE), 3

def wordless(seed):
    return AutoModelForCausalLM.from_pretrained(HERE), None

made = 3

def double(seed):
    return AutoModelForCausalLM.from_pretrained(HERE, dtype="float64"), AutoTokenizer.from_pretrained(HERE)
"""


@pytest.mark.parametrize("source", ["", "/builders.py:double"], ids=["files", "function"])
def test_masters_have_every_bit_of_float64_weights(directory: Path, source: str) -> None:
    (directory / "builders.py").write_text(BUILDERS)
    torch.manual_seed(0)
    module = LlamaForCausalLM(LlamaConfig(**SHAPE)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    module.save_pretrained(directory)
    policy, _ = load_policy(ModelConfig(path=f"{directory}{source}", dtype="float64"))
    masters = dict(policy.flat.named_masters())
    assert all(torch.equal(masters[name], value) for name, value in module.named_parameters())
    assert next(policy.module.buffers()).dtype == torch.float32  # rotary frequencies, as in every other run


def test_a_function_that_loads_weights_is_described_too(directory: Path) -> None:
    """It cannot be called on the meta device; it is really called, once for all descriptions, and its tokenizer is kept."""
    (directory / "builders.py").write_text(BUILDERS)
    config = ModelConfig(path=f"{directory}/builders.py:load")
    plain = ModelConfig(path=str(directory))
    for _ in range(3):
        module = describe_module(config)
        assert {p.device.type for p in module.parameters()} == {"meta"}
        assert [n for n, _ in module.named_parameters()] == [n for n, _ in describe_module(plain).named_parameters()]
    assert parameter_count(config) == parameter_count(plain)
    assert load_model_config(config).vocab_size == 37 and len(load_tokenizer_of(config)) == 37
    assert len((directory / "calls.txt").read_text()) == 2  # on the meta device, and really; then it is known


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fails", r"model\.path: .*builders\.py:fails raised KeyError: 'gone' \(.*builders\.py:14 in fails\)$"),
        (
            "no_seed",
            r"builders\.py:no_seed cannot be called with a seed \(too many positional arguments\); expected a func",
        ),
        ("backwards", r"backwards returned \(.*Tokenizer.*, int\); expected \(transformers model, tokenizer\)"),
        ("wordless", r"wordless returned \(.*, NoneType\); expected \(transformers model, tokenizer\)"),
        ("made", r"builders\.py:made is of type int; expected a function that takes a seed"),
    ],
)
def test_a_function_that_builds_no_model_is_told_in_one_line(directory: Path, name: str, words: str) -> None:
    (directory / "builders.py").write_text(BUILDERS)
    config = ModelConfig(path=f"{directory}/builders.py:{name}", dtype="float32")
    for call in (lambda: load_policy(config), lambda: describe_module(config), lambda: load_tokenizer_of(config)):
        with pytest.raises(ConfigError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
