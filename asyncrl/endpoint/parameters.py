"""The parameters of each route. They act as in OpenAI's, Anthropic's or vLLM's API. A parameter's description names differences.

These pydantic models validate bodies and make the OpenAPI document, so both agree. Text such as "1" is no number. 5.0 counts as 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, with_config
from typing_extensions import TypedDict

from asyncrl.types import Messages, SamplingParams

MOST_CHOICES = 64


def ignored(why: str) -> Any:
    """A parameter that may have any value and has no effect."""
    return Field(None, description=f"Ignored: {why}")


def refused(why: str) -> Any:
    """A parameter whose only allowed value is null."""
    return Field(None, description=why)


@dataclass
class SampleRequest:
    """The parsed body of any route: the arguments for `Session.chat` (with `messages`) or `Session.sample` (with `prompts`)."""

    sampling: SamplingParams
    messages: Messages | None = None
    prompts: list[str | list[int]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None  # None: the tools of the row
    n: int = 1  # choices for each prompt
    stream: bool = False
    usage: bool = False  # end a stream with a chunk about the usage
    logprobs: bool = False
    top_logprobs: int = 0  # return this many most probable first tokens
    top_tokens: Sequence[tuple[int, float]] = ()  # (token id, log-prob) of these tokens; set after sampling
    ids: bool = False  # return token ids


@with_config(ConfigDict(extra="forbid", strict=True))
class Closed(TypedDict):
    """A JSON object for which further keys are an error."""


@with_config(ConfigDict(extra="ignore", strict=True))
class Loose(TypedDict):
    """A JSON object whose further keys, such as `cache_control` or `annotations`, are ignored."""


class TextPart(Loose):
    """A text in the list of parts of a message's content."""

    type: Literal["text"]
    text: str


Text = str | list[TextPart]


class _CalledFunction(Loose):
    name: str
    arguments: NotRequired[str | dict[str, Any]]


class _ChatCall(Loose):
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: _CalledFunction


class _TextMessage(Loose):
    role: Literal["system", "developer", "user", "tool"]
    content: Text
    name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]


class _ReplyMessage(Loose):
    role: Literal["assistant"]
    content: NotRequired[Text | None]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[list[_ChatCall] | None]


def _equal(allowed: bool) -> AfterValidator:
    def check(value: bool) -> bool:
        if value is not allowed:
            raise ValueError(f"only {str(allowed).lower()} is supported")
        return value

    return AfterValidator(check)


# Not `Literal[False]`, which would accept 0.
OnlyTrue = Annotated[bool, _equal(True), WithJsonSchema({"const": True})]
OnlyFalse = Annotated[bool, _equal(False), WithJsonSchema({"const": False})]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class ToolFunction(Loose):
    """A function that the policy may call."""

    name: ToolName
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]


class _ChatTool(Loose):
    type: Literal["function"]
    function: ToolFunction


class _StreamOptions(Loose):
    include_usage: NotRequired[bool | None]


class PlainFormat(Loose):
    """The format `text`, the only one that is supported."""

    type: Literal["text"]


SEED = (
    "Not supported: the random numbers follow from the run's seed, the episode and the conversation; with a seed of the client all "
    "members of a group would be equal. Leave it out."
)
SAMPLED_ALONE = "0: log-probs of the sampled tokens, the only log-probs of a trajectory."
GRAMMAR = "Not supported: no grammar constrains the tokens. Leave it out."
TOKENS = Field(None, ge=1, le=1 << 30, description="At most this many tokens, and never more than rollout.max_tokens.")
TOOL_CHOICE: Any = Field(
    None, description="auto; none: no tools are offered. A call cannot be forced: no grammar constrains the tokens."
)
Stop = Annotated[str, Field(min_length=1, max_length=512)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
_Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias], Field(json_schema_extra={"additionalProperties": False})
]

# Parameters that have the same name and type in `SamplingParams`.
_PLAIN: tuple[str, ...] = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos")
_PLAIN += ("frequency_penalty", "presence_penalty", "repetition_penalty")


class Body(BaseModel):
    """Parameters that the routes have in common. On vLLM's route they are in `sampling_params`, and some also outside of it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = Field(None, description="Ignored: the policy answers, and the answer names it.")
    stream: bool | None = Field(
        None, description="Answer with server-sent events, all sent when the whole answer is sampled."
    )
    return_token_ids: bool | None = Field(None, description="Return the token ids of prompt and answer.")
    temperature: float | None = Field(None, ge=0, le=2, description="The same in all requests of an episode.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1 << 30)
    metadata: Any = ignored("nothing is stored.")
    service_tier: Any = ignored("all requests are served alike.")

    def _ask(self, defaults: SamplingParams, given: Mapping[str, Any], **further: Any) -> SampleRequest:
        """`given`: fields of `SamplingParams` that the body has in another form. `further`: fields of `SampleRequest`."""
        sent = {name: getattr(self, name, None) for name in _PLAIN} | dict(given)
        named: dict[str, Any] = {name: value for name, value in sent.items() if value is not None}
        if "max_tokens" in named:
            named["max_tokens"] = min(named["max_tokens"], defaults.max_tokens)
        sampling = replace(defaults, **named)
        sampling = replace(sampling, min_tokens=min(sampling.min_tokens, sampling.max_tokens))
        fields = {"sampling": sampling, "stream": bool(self.stream), "ids": bool(self.return_token_ids), **further}
        return SampleRequest(**fields)


class OpenAiBody(Body):
    """The parameters that OpenAI's routes have in common."""

    user: Any = ignored("the key names the episode.")
    store: Any = ignored("nothing is stored.")
    safety_identifier: Any = ignored("the key names the episode.")
    prompt_cache_key: Any = ignored("the cache of an episode's earlier requests is found by their tokens.")
    prompt_cache_retention: Any = ignored("the cache of an episode's earlier requests is found by their tokens.")


class SamplingBody(OpenAiBody):
    """Sampling parameters of OpenAI's chat and text completions, and of vLLM."""

    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    logit_bias: _Biases | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = TOKENS
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: None = refused(SEED)
    stream_options: _StreamOptions | None = None
    skip_special_tokens: Any = ignored("the text keeps control tokens, but not one that ended the answer.")

    def _complete(self, defaults: SamplingParams, max_tokens: int | None, **further: Any) -> SampleRequest:
        """Makes the `SampleRequest`. `further`: fields of `SampleRequest` that differ between these routes."""
        given: dict[str, Any] = {
            "max_tokens": max_tokens,
            "stop": (self.stop,) if isinstance(self.stop, str) else None if self.stop is None else tuple(self.stop),
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "logit_bias": self.logit_bias and {int(token): bias for token, bias in self.logit_bias.items()},
        }
        usage = bool(self.stream_options and self.stream_options.get("include_usage"))
        return self._ask(defaults, given, n=self.n or 1, usage=usage, **further)


def _check_top(top: int | None, info: Any) -> int | None:
    # `info.data` has the values of the fields that `ChatBody` declares before `top_logprobs`.
    if top and not (info.data.get("logprobs") and info.data.get("max_tokens") == 1):
        raise ValueError("a value above 0 needs logprobs=true and max_tokens=1")
    return top


# The rule of `_check_top` as JSON Schema.
_TOP: Any = {
    "if": {"properties": {"top_logprobs": {"type": "integer", "minimum": 1}}, "required": ["top_logprobs"]},
    "then": {
        "properties": {"logprobs": {"const": True}, "max_tokens": {"const": 1}},
        "required": ["logprobs", "max_tokens"],
    },
}


class ChatBody(SamplingBody):
    """Parameters of `POST /v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra=_TOP)

    messages: Annotated[list[Annotated[_TextMessage | _ReplyMessage, Field(discriminator="role")]], Field(min_length=1)]
    tools: list[_ChatTool] | None = None
    tool_choice: Literal["auto", "none"] | None = TOOL_CHOICE
    parallel_tool_calls: OnlyTrue | None = Field(None, description="The policy may call any number of tools.")
    max_completion_tokens: int | None = TOKENS
    logprobs: bool | None = Field(None, description="Log-probs of the sampled tokens, at the temperature (at 1 if 0).")
    top_logprobs: Annotated[int | None, AfterValidator(_check_top)] = Field(
        None, ge=0, le=20, description="Above 0 only with logprobs and max_tokens 1: measured by further requests."
    )
    response_format: PlainFormat | None = Field(None, description=GRAMMAR)
    modalities: list[Literal["text"]] | None = None
    functions: None = refused("Not supported: use tools.")
    audio: None = refused("Not supported: models are trained on text alone.")
    reasoning_effort: None = refused("Not supported: set data.chat_template_kwargs of the run, as its template needs.")
    web_search_options: None = refused("Not supported: give the policy a tool.")
    prediction: None = refused("Not supported. Leave it out.")
    verbosity: None = refused("Not supported. Leave it out.")
    chat_template_kwargs: None = refused("Not supported: set data.chat_template_kwargs of the run.")

    def ask(self, defaults: SamplingParams) -> SampleRequest:
        max_tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        tools: Any = [] if self.tool_choice == "none" else self.tools
        fields = {"messages": self.messages, "tools": tools, "top_logprobs": self.top_logprobs or 0}
        return self._complete(defaults, max_tokens, logprobs=bool(self.logprobs), **fields)


Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[str, Field(min_length=1)]


class CompletionsBody(SamplingBody):
    """Parameters of `POST /v1/completions`."""

    prompt: Prompt | Ids | Annotated[list[Prompt | Ids], Field(min_length=1, max_length=MOST_CHOICES)]
    logprobs: int | None = Field(None, ge=0, le=0, description=SAMPLED_ALONE)
    echo: OnlyFalse | None = None
    best_of: None = refused("Not supported: use n.")
    suffix: None = refused("Not supported. Leave it out.")
    response_format: PlainFormat | None = Field(None, description=GRAMMAR)

    def ask(self, defaults: SamplingParams) -> SampleRequest:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        prompts = self.prompt if several else [self.prompt]
        return self._complete(defaults, self.max_tokens, prompts=prompts, logprobs=self.logprobs is not None)


class GenerateParameters(SamplingBody):
    """The value of `sampling_params` in `GenerateBody`, as in vLLM."""

    logprobs: int | None = Field(None, ge=0, le=1, description="Log-probs of the sampled tokens are always returned.")
    stream: OnlyFalse | None = None
    stream_options: None = refused("Not supported: the answer is sent as a whole.")
    return_token_ids: Any = ignored("the answer always has token ids.")
    min_tokens: int | None = Field(None, ge=0, le=1 << 30)
    detokenize: Any = ignored("the answer has no text.")
    spaces_between_special_tokens: Any = ignored("the answer has no text.")
    include_stop_str_in_output: Any = ignored("the answer has all sampled tokens.")
    routed_experts_prompt_start: Any = ignored("the session records experts itself.")
    reasoning_effort: None = refused("Not supported: render the prompt as its template needs.")


class GenerateBody(BaseModel):
    """Parameters of `POST /inference/v1/generate`, vLLM's route with token ids as input and output."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    token_ids: Ids
    sampling_params: GenerateParameters = GenerateParameters.model_validate({})
    model: str | None = Field(None, description="Ignored: the policy answers, and the answer names it.")
    stream: OnlyFalse | None = None
    return_token_ids: Any = ignored("the answer always has token ids.")
    request_id: Any = ignored("the answer has an id of its own.")
    cache_salt: Any = ignored("an episode continues the cache of its own tokens.")
    priority: Any = ignored("requests start by the deadlines of their groups, then by arrival.")
    features: None = refused("Not supported: models are trained on text alone.")
    content_parts: None = refused("Not supported: models are trained on text alone.")

    def ask(self, defaults: SamplingParams) -> SampleRequest:
        given = self.sampling_params
        return given._complete(defaults, given.max_tokens, prompts=[self.token_ids], logprobs=True, ids=True)


def describe(error: ValidationError, body: type[BaseModel]) -> tuple[str, str]:
    """(message, name of the parameter) for the error whose place in the body has the longest path."""
    # A union has an error for each of its types. The error of the type that fits best has the longest path.
    deepest = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
    path = [str(part) for part in deepest["loc"]]
    name = path[0] if path else "body"
    where = ".".join(path) or name
    if deepest["type"] == "extra_forbidden":
        return f"{where} is not supported by this endpoint; leave it out (docs/endpoint.md lists the parameters)", name
    fields, description = body.model_fields, None
    for part in path:
        if part not in fields:
            break
        description, kind = fields[part].description, fields[part].annotation
        fields = kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}
    return f"{where}: {deepest['msg']}. {description or ''}".strip(), name


def with_integers(value: Any) -> Any:
    """A copy of a JSON value in which floats without a fraction are integers."""
    if isinstance(value, dict):
        return {key: with_integers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_integers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def joined(content: Any) -> str:
    """The content of a message as one text. `content`: a text, or a list of parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def as_tools(functions: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The functions as tools in OpenAI's form. None stays None."""
    return functions and [{"type": "function", "function": function} for function in functions]
