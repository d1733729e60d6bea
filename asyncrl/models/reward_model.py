"""A reward model: a sequence classifier of transformers, or another torch module that returns logits for each text.

    prompt, completion --chat template of the model--> ids [L] --padded on the right, with a mask--> logits [B, labels] --> scores

* Texts are tokenized with the reward model's tokenizer. With a chat template, a prompt string becomes a user message and a
  completion string an assistant message. Without a template, prompt and completion are concatenated, with special tokens.
* A text above `max_tokens` is never cut: it gets no score. The default is the smaller of the model's and the tokenizer's limits.
* Except for rounding, the score of a text does not depend on the other texts of its batch. Loading tests this with a short and a
  long row, alone and together, and refuses a module that ignores its mask. A text is never padded so far that the model would use
  other rotary frequencies (rotary.py) for it.
* A classifier of transformers scores at the last token that is not padding. If neither its configuration nor the tokenizer has a
  padding token, every text is a batch of its own. A padding token of the tokenizer that equals its end token does not count.

All methods run on the lane, the thread that owns the device. Shape legend: B texts, L tokens of the longest text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from asyncrl.config.hub import require_hub
from asyncrl.config.schema_rollouts import RewardModelConfig
from asyncrl.errors import ConfigError, RewardError, first_line
from asyncrl.types import Messages

from .loading import LOADING_ERRORS, NO_REMOTE_CODE, WITH_REPORT, require_all_weights
from .parameters.source import call_builder, is_import_path, reward_model_name
from .policy import DTYPES
from .rotary import frequencies_differ, reset_dynamic_frequencies

_UNLIMITED = 1 << 30  # tokenizers without a limit have 1e30
_PROBE_LENGTHS = (3, 8)  # of the two rows that are scored alone and together
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}  # relative to 1 + |score|

TokenIds = list[int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the weights, and of the activations of one forward."""

    weights: int
    activations: int


class RewardModel:
    """Tokenizes (`tokenize`), batches (`batches`) and scores texts (`scores`). Made by `load_reward_model`."""

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any,
        config: RewardModelConfig,
        dtype: str,
        device: torch.device,
        tokens: int,
    ) -> None:
        """`dtype`: of the weights. `tokens`: limit of a batch, padding included; a longer text is a batch of its own.

        Errors: ConfigError if the module returns no logits or ignores its mask, or if `label` chooses no output of the module."""
        self.name = reward_model_name(config)
        self.module = _moved(module, device, DTYPES[dtype]).eval().requires_grad_(False)
        self._tokenizer, self._label, self._device, self._tokens = tokenizer, config.label, device, tokens
        self.max_text_tokens = config.max_tokens or _longest_text(module, tokenizer)  # limit of the tokens of a text
        self._pad = _padding_token(module, tokenizer)
        self._check_probes(DTYPES[dtype])

    def digest(self) -> str:
        """A fingerprint of weights, vocabulary and chat template. Equal files have the same fingerprint on every device."""
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = [int(p.flatten().view(bits[p.itemsize]).sum(dtype=torch.int64)) for p in self.module.parameters()]
        vocabulary = sorted(getattr(self._tokenizer, "get_vocab", dict)().items())
        parts = sums, vocabulary, getattr(self._tokenizer, "chat_template", None)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def tokenize(self, prompt: str | Messages, completion: str | Messages) -> TokenIds:
        """Token ids. Errors: RewardError for messages if there is no chat template, or if the template refuses the messages."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            if not (isinstance(prompt, str) and isinstance(completion, str)):
                raise RewardError(
                    f"reward model {self.name!r}: prompt or completion is a list of messages, but its tokenizer has no chat "
                    "template to render them; use a tokenizer with a template, or prompts that are strings"
                )
            return list(self._tokenizer.encode(prompt + completion))
        try:
            rendered = self._tokenizer.apply_chat_template(_conversation(prompt, completion), tokenize=False)
        except Exception as error:
            # Errors of jinja, and errors that the template raises by raise_exception().
            raise RewardError(
                f"reward model {self.name!r}: its chat template refused the conversation: {type(error).__name__}: {error}"
            ) from error
        return list(self._tokenizer.encode(str(rendered), add_special_tokens=False))

    def batches(self, texts: Sequence[TokenIds]) -> Iterator[list[int]]:
        """Batches of indices of `texts`, short texts first. A text starts a new batch if the last batch is full, or if padding to
        the text's length would change the rotary frequencies of shorter texts."""
        batch, settings = list[int](), _text_config(self.module)
        for index in sorted(range(len(texts)), key=lambda i: len(texts[i])):
            length = len(texts[index])
            full = self._pad is None or length * (len(batch) + 1) > self._tokens
            if batch and (
                full or (settings is not None and frequencies_differ(settings, len(texts[batch[0]]), length))
            ):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def scores(self, texts: Sequence[TokenIds]) -> list[float]:
        """One score for each text. Errors: RewardError of `_chosen_output`, and any error of the module."""
        longest = max(len(text) for text in texts)
        pad = 0 if self._pad is None else self._pad
        ids_BL = torch.tensor([text + [pad] * (longest - len(text)) for text in texts], device=self._device)
        lengths_B1 = torch.tensor([[len(text)] for text in texts], device=self._device)
        mask_BL = (torch.arange(longest, device=self._device) < lengths_B1).long()
        with torch.no_grad():
            reset_dynamic_frequencies(self.module)
            output = self.module(input_ids=ids_BL, attention_mask=mask_BL)
        return [float(score) for score in self._chosen_output(getattr(output, "logits", output), len(texts))]

    def _chosen_output(self, logits: Any, count: int) -> Tensor:
        """Logits [B], [B, 1], or with a chosen label [B, labels] -> scores float32 [B] on the CPU."""
        if not isinstance(logits, Tensor) or logits.ndim not in (1, 2) or len(logits) != count:
            returned = f"the shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise RewardError(
                f"reward model {self.name!r} returned {returned} for {count} texts; expected logits [{count}] or [{count}, labels]"
            )
        if logits.ndim == 1:
            return logits.float().cpu()
        if problem := _label_problem(self.name, logits.shape[1], self._label):
            raise RewardError(problem)
        return logits[:, self._label or 0].float().cpu()

    def _probe(self, length: int) -> TokenIds:
        """Arbitrary token ids, none of which is padding."""
        ids = [1 + (7 * i) % max(len(self._tokenizer) - 1, 1) for i in range(min(length, self.max_text_tokens))]
        return [0 if token == self._pad else token for token in ids]

    def _check_probes(self, dtype: torch.dtype) -> None:
        rows = [self._probe(length) for length in _PROBE_LENGTHS]
        try:
            alone = [self.scores([row])[0] for row in rows]
            together = alone if self._pad is None else self.scores(rows)
        except RewardError as error:
            raise ConfigError(f"reward.model: {error}") from error
        # A module of the user may raise any exception.
        except Exception as error:
            raise ConfigError(
                f"reward.model: {self.name!r} raised {type(error).__name__} for the arguments input_ids and attention_mask: {error}"
            ) from error
        pairs, tolerance = zip(alone, together, strict=True), _TOLERANCE[dtype]
        # No comparison with NaN is true.
        if not all(abs(a - b) <= tolerance * (1 + abs(a)) for a, b in pairs):
            raise ConfigError(
                f"reward.model: {self.name!r} scores two texts {alone} alone and {together} together: a score would depend on "
                "the other texts of its batch; the module must use attention_mask, with padding on the right"
            )


def load_reward_model(
    config: RewardModelConfig, dtype: str, device: torch.device, tokens: int, seed: int = 0
) -> RewardModel:
    """`dtype`: of the weights, if `config` has no dtype. `tokens`: limit of a batch. `seed`: for a builder. Errors: ConfigError."""
    dtype = config.dtype or dtype
    if is_import_path(config.path):
        module, tokenizer = _call_builder(config.path, seed)
    else:
        module, tokenizer = _from_directory(config, dtype), _tokenizer_of(config.path)
    return RewardModel(module, tokenizer, config, dtype, device, tokens)


def predict_sizes(config: RewardModelConfig, dtype: str, tokens: int) -> Sizes:
    """Estimates the sizes, without weights: the model is built on the meta device. A builder that fails there is called again on
    the host, and its result is dropped. Errors: ConfigError."""
    width = DTYPES[config.dtype or dtype].itemsize
    if not is_import_path(config.path):
        settings = _model_config(config)
        try:
            with torch.device("meta"):
                module: nn.Module = AutoModelForSequenceClassification.from_config(settings)
        except LOADING_ERRORS as error:
            raise ConfigError(
                f"reward.model: transformers builds no sequence classifier from the configuration in {config.path!r} "
                f"({first_line(error)})"
            ) from error
    else:
        try:
            with torch.device("meta"):
                module, _ = _call_builder(config.path, 0)
        except ConfigError:  # also raised for any error of the builder
            module, _ = _call_builder(config.path, 0)
    weights = sum(parameter.numel() for parameter in module.parameters()) * width
    return Sizes(weights, _activation_bytes(module, width, tokens))


def _activation_bytes(module: nn.Module, width: int, tokens: int) -> int:
    """The most bytes of activations in one layer: six tensors of the hidden size (such as queries, keys and values), three of the
    size of the MLP (gate, up and their product), and two float32 tensors in a norm. 0 for a module without a configuration."""
    text = _text_config(module)
    if text is None:
        return 0
    hidden = int(getattr(text, "hidden_size", 0))
    inner = int(getattr(text, "intermediate_size", 0) or 4 * hidden)
    return tokens * ((6 * hidden + 3 * inner) * width + 8 * hidden)  # norms are computed in float32


def _model_config(config: RewardModelConfig) -> Any:
    """The model's configuration. Errors: ConfigError if it is missing, or if `label` does not choose one of the model's outputs."""
    require_hub(config.path, "reward.model")
    try:
        settings = AutoConfig.from_pretrained(config.path, **NO_REMOTE_CODE)
    except LOADING_ERRORS as error:
        raise ConfigError(f"reward.model: no model configuration in {config.path!r} ({first_line(error)})") from error
    if problem := _label_problem(config.path, settings.num_labels, config.label):
        raise ConfigError(f"reward.model: {problem}")
    return settings


def _from_directory(config: RewardModelConfig, dtype: str) -> PreTrainedModel:
    settings = _model_config(config)
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            config.path, config=settings, dtype=DTYPES[dtype], **WITH_REPORT, **NO_REMOTE_CODE
        )
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"reward.model: {config.path!r} could not be loaded as a sequence classifier ({first_line(error)}); for another module "
            "name a function `file.py:function` that returns (module, tokenizer)"
        ) from error
    module, report = loaded
    require_all_weights(report, f"reward.model: {config.path!r}", ": it is no sequence classifier")
    return module  # type: ignore[no-any-return]  # transformers: Any


def _tokenizer_of(path: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, **NO_REMOTE_CODE)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"reward.model: no tokenizer could be loaded from {path!r} ({first_line(error)}); put it beside the model"
        ) from error


def _call_builder(path: str, seed: int) -> tuple[nn.Module, Any]:
    built = call_builder(path, seed, "reward.model")
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)):
        raise ConfigError(f"reward.model: {path} returned {type(built).__name__}; expected (torch module, tokenizer)")
    return built


def _moved(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The module on the device in `dtype`. Buffers of transformers' models (rotary frequencies) keep their dtype."""
    if not isinstance(module, PreTrainedModel):
        return module.to(device, dtype)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return nn.Module.to(module, device)


def _text_config(module: nn.Module) -> Any:
    """The text configuration of a transformers model; None for any other module."""
    settings: Any = getattr(module, "config", None)
    return settings.get_text_config() if hasattr(settings, "get_text_config") else None


def _longest_text(module: nn.Module, tokenizer: Any) -> int:
    positions = getattr(_text_config(module), "max_position_embeddings", None)
    limits = positions, getattr(tokenizer, "model_max_length", None)
    return min((int(limit) for limit in limits if limit), default=_UNLIMITED)


def _padding_token(module: nn.Module, tokenizer: Any) -> int | None:
    """Id of the padding token. None: texts cannot be padded. Sets the id in the model's configuration if it is missing there."""
    token, text = getattr(tokenizer, "pad_token_id", None), _text_config(module)
    if text is None:
        return 0 if token is None else int(token)  # any id will do, because padding is masked
    if text.pad_token_id is None and token is not None and token != getattr(tokenizer, "eos_token_id", None):
        text.pad_token_id = token
    return None if text.pad_token_id is None else int(text.pad_token_id)


def _conversation(prompt: str | Messages, completion: str | Messages) -> Messages:
    """The messages of prompt and completion. Assistant messages at the prompt's end and the completion's start are joined."""
    before: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    after: Messages = (
        [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    )
    if before and after and before[-1]["role"] == after[0]["role"] == "assistant":
        unfinished = before.pop()
        after[0] = {**after[0], "content": (unfinished["content"] or "") + (after[0]["content"] or "")}
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in [*before, *after]]


def _label_problem(name: str, labels: int, label: int | None) -> str | None:
    """An error text if `label` (None: not given) does not choose one of the `labels` outputs. Else None."""
    if label is None and labels != 1:
        return f"{name!r} has {labels} outputs; set `label` to the output that is the score (0 to {labels - 1})"
    if label is not None and label >= labels:
        return f"{name!r} has {labels} output(s), but label is {label}; expected 0 to {labels - 1}"
    return None
