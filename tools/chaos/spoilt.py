# ruff: noqa: E501 - a table, one attack a line
"""What `records` sends: groups as they should be, and ways to spoil one.

A record attack changes the trajectories of a good group or the sections of its record; an HTTP attack changes the body of a
good request. Each says what must become of it: `REFUSED` by name, `TRAINED`, or `EITHER` (the run's to decide).
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncrl.records.layout import Section
from asyncrl.types import FinishReason, Trajectory

REFUSED, TRAINED, EITHER = "refused", "trained", "either"
VOCABULARY = 20  # ids of a good group are below it; the model may have more
LONGEST = 20  # tokens: data.max_prompt_tokens + rollout.max_tokens
SURROGATE = "\ud800"
Extra = dict[int, Any]


def nested(levels: int) -> Any:
    return functools.reduce(lambda inner, _: [inner], range(levels), "deep")


def raw(levels: int) -> bytes:
    return b'{"a":' + b"[" * levels + b"]" * levels + b"}"


def good(number: int, random_: random.Random) -> list[Trajectory]:
    """Members of one group that answer one prompt; `number` names it in the metadata. Of no version: none is ever too old."""
    size, prompt = random_.randint(1, 4), [random_.randrange(2, VOCABULARY) for _ in range(random_.randint(1, 8))]
    members = []
    for member in range(size):
        completion = [random_.randrange(2, VOCABULARY) for _ in range(random_.randint(1, 8))]
        tokens = np.array(prompt + completion, np.int32)
        mask = np.arange(tokens.size) >= len(prompt)
        logprobs = np.where(mask, np.float32(-random_.uniform(0.1, 6)), np.float32(0))
        members.append(
            Trajectory(
                group_id=number,
                member=member,
                group_size=size,
                prompt_length=len(prompt),
                tokens=tokens,
                mask=mask,
                logprobs=logprobs,
                sampled_logprobs=logprobs,
                versions=np.full(tokens.size, -1, np.int32),
                temperature=random_.choice([1.0, 0.7, 2.0]),
                finish_reason=FinishReason.STOP,
                completion="done",
                reward=random_.random(),
                metadata={"number": number},
            )
        )
    return members


@dataclass(frozen=True)
class Attack:
    name: str
    expect: str
    spoil: Callable[[list[Trajectory], Extra], None]  # in place: the members, and sections of the record beside them
    ring_only: bool = False  # `Runtime.submit` takes it: an agent's own episodes may be longer


def _field(name: str, expect: str, value: Any) -> Attack:
    """`value`, or what it makes of the last member."""

    def spoil(members: list[Trajectory], extra: Extra) -> None:
        found = value(members[-1]) if callable(value) else value
        members[-1] = replace(members[-1], **(found if isinstance(found, dict) and name == "" else {name: found}))

    shown = "changed" if callable(value) else repr(value)[:40]
    return Attack(f"{name or 'several'} {shown}", expect, spoil)


def _named(name: str, attack: Attack) -> Attack:
    return replace(attack, name=name)


def _section(name: str, section: Section, expect: str, value: Callable[[int], Any]) -> Attack:
    def spoil(members: list[Trajectory], extra: Extra) -> None:
        extra[section] = value(len(members))

    return Attack(name, expect, spoil)


def _at(column: str, value: float) -> Callable[[Trajectory], Any]:
    """The column with `value` at the last token, which is trained."""

    def change(t: Trajectory) -> Any:
        array = getattr(t, column).copy()
        array[-1] = value
        return array

    return change


def _long(t: Trajectory, size: int) -> dict[str, Any]:
    columns = {c: np.resize(getattr(t, c), size) for c in ("tokens", "logprobs", "sampled_logprobs")}
    mask = np.arange(size) >= 1
    return {**columns, "mask": mask, "versions": np.full(size, -1, np.int32), "prompt_length": 1}


def _texts(name: str, section: Section) -> list[Attack]:
    """Of the raw JSON of a section, one text a member."""
    bad = {
        "900 levels": raw(900),
        "100 levels": raw(100),
        "5000 levels": raw(5000),
        "a lone surrogate": b'{"a": "\\ud800"}',
        "a lone surrogate as key": b'{"\\udfff": 1}',
        "an integer of 400 digits": b'{"a": 1' + b"0" * 400 + b"}",
        "an integer of 5000 digits": b'{"a": 1' + b"0" * 5000 + b"}",
        "no UTF-8": b'{"a": "\xff\xfe"}',
        "a number": b"3",
        "nothing": b"",
    }
    fine = {"60 levels": raw(60), "NaN": b'{"a": NaN}', "emoji": '{"a": "\U0001f600"}'.encode()}
    found = []
    if section is Section.GROUP_METADATA:  # it is written nowhere
        fine["an integer of 400 digits"] = bad.pop("an integer of 400 digits")
    for expect, texts in ((REFUSED, bad), (TRAINED, fine)):
        for said, text in texts.items():
            json_text = b"[" + text + b"]" if section is Section.MESSAGES and text[:1] == b"{" else text
            one = section is Section.GROUP_METADATA
            value = functools.partial(lambda text, one, n: text if one else [text] * n, json_text, one)
            found.append(_section(f"{name} with {said}", section, expect, value))
    return found


def _names(text: str) -> Callable[[int], bytes]:
    return lambda n: json.dumps({"names": json.loads(text), "held": [json.loads(text)] * n}).encode()


def _components(name: str, names: str, expect: str, values: tuple[float, ...] = (0.5, 1.0)) -> Attack:
    def spoil(members: list[Trajectory], extra: Extra) -> None:
        extra[Section.COMPONENTS] = np.tile(np.array(values), (len(members), 1))
        extra[Section.COMPONENT_NAMES] = _names(names)(len(members))

    return Attack(name, expect, spoil)


def _same_for_all(name: str, expect: str, **changes: Any) -> Attack:
    def spoil(members: list[Trajectory], extra: Extra) -> None:
        members[:] = [replace(t, **changes) for t in members]

    return Attack(name, expect, spoil)


def _unmasked(members: list[Trajectory], extra: Extra) -> None:
    """As a client's defaults once were: nothing of it is a prompt."""
    members[:] = [replace(t, prompt_length=0, mask=np.ones(t.tokens.size, bool)) for t in members]


def _far_apart(members: list[Trajectory], extra: Extra) -> None:
    members[:] = [replace(t, reward=1.7e308 * (-1) ** i) for i, t in enumerate(members)]


def _unscored(members: list[Trajectory], extra: Extra) -> None:
    members[:] = [replace(t, reward=None) for t in members]
    extra[Section.GROUP_METADATA] = b'{"answer": "a"}'  # the reward function asks for it


def _advantages(members: list[Trajectory], extra: Extra) -> None:
    extra[Section.ADVANTAGES] = [t.logprobs for t in members]


RECORDS: list[Attack] = [
    Attack("prompt_length 0, mask all ones", REFUSED, _unmasked),
    *(_field("temperature", REFUSED, t) for t in (0.0, -1.0, math.nan, math.inf, -math.inf, 1e-46, 1e-40, 9e-7, 1e38)),
    *(_field("temperature", TRAINED, t) for t in (1e-6, 0.1, 100.0)),
    *(_field("prompt_length", REFUSED, n) for n in (0, -1, -(2**31), 21, 2**31 - 1)),
    _named("mask trains the prompt", _field("mask", REFUSED, lambda t: np.ones(t.tokens.size, bool))),
    _named("mask trains nothing", _field("mask", REFUSED, lambda t: np.zeros(t.tokens.size, bool))),
    *(_named(f"token {v}", _field("tokens", REFUSED, _at("tokens", v))) for v in (-1, -(2**31), 2**31 - 1, 5000)),
    _named("no tokens", _field("", REFUSED, lambda t: _long(t, 0) | {"prompt_length": 1})),
    replace(_named("too many tokens", _field("", REFUSED, lambda t: _long(t, LONGEST + 1))), ring_only=True),
    _named("as many tokens as there may be", _field("", TRAINED, lambda t: _long(t, LONGEST))),
    *(
        _named(f"{c} {v}", _field(c, REFUSED, _at(c, v)))
        for c in ("logprobs", "sampled_logprobs")
        for v in (0.5, math.inf, -math.inf, -1e4, -1e30, -3e38)
    ),
    *(_named(f"version {v}", _field("versions", REFUSED, _at("versions", v))) for v in (-2, -(2**31), 2**31 - 1, 10**6)),
    *(_named(f"version {v}", _field("versions", EITHER, _at("versions", v))) for v in (0, 1)),
    *(_section(f"reward {v}", Section.REWARDS, REFUSED, lambda n, v=v: [v] * n) for v in (math.inf, -math.inf, 1e308, -1e20)),
    Attack("rewards 1.7e308 apart", REFUSED, _far_apart),
    Attack("no reward: the run scores it", TRAINED, _unscored),
    _same_for_all("equal rewards", TRAINED, reward=0.5),
    _same_for_all("every member silent", TRAINED, metadata={"set_advantage_to_zero": True}),
    *(_section(f"finish reason {v}", Section.FINISH_REASONS, REFUSED, lambda n, v=v: [v] * n) for v in (0, 4, 255)),
    _components("components", '["a", "b"]', TRAINED),
    _components("component 1e300", '["a", "b"]', REFUSED, (1e300, 0.0)),
    _components("component infinite", '["a", "b"]', REFUSED, (math.inf, 0.0)),
    _components("components named by numbers", '["a", 1]', REFUSED),
    _components("components named by nothing", '[null, "a"]', REFUSED),
    _components("components named by lists", '[["a"], "b"]', REFUSED),
    _components("components with a surrogate", '["\\ud800", "b"]', REFUSED),
    _components("too few names", '["a"]', REFUSED),
    *_texts("messages", Section.MESSAGES),
    *_texts("metadata", Section.METADATA),
    *_texts("group metadata", Section.GROUP_METADATA),
    Attack("advantages of its own", REFUSED, _advantages),
]  # fmt: skip


# -- over HTTP


def body(members: list[Trajectory]) -> dict[str, Any]:
    """Atropos' `ScoredDataGroup`."""
    return {
        "tokens": [t.tokens.tolist() for t in members],
        "masks": [np.where(t.mask, t.tokens, -100).tolist() for t in members],
        "scores": [t.reward for t in members],
        "inference_logprobs": [np.where(t.mask, t.logprobs, 1.0).tolist() for t in members],
    }


@dataclass(frozen=True)
class Request:
    name: str
    expect: str
    make: Callable[[dict[str, Any]], bytes]  # of a good body
    headers: tuple[tuple[str, str], ...] = ()


def _with(name: str, expect: str, **fields: Any) -> Request:
    return Request(name, expect, lambda item: json.dumps({**item, **fields}).encode())


def _first(name: str, field: str, value: Any, expect: str = REFUSED) -> Request:
    """`value` in the place of what the first member has in `field`."""
    return Request(name, expect, lambda item: json.dumps({**item, field: [value, *item[field][1:]]}).encode())


def _text(name: str, text: bytes, expect: str = REFUSED) -> Request:
    return Request(name, expect, lambda item: text)


def _patched(name: str, field: str, text: bytes) -> Request:
    """JSON that no writer makes, as the value of a field."""
    return Request(name, REFUSED, lambda item: json.dumps({**item, field: "HERE"}).encode().replace(b'"HERE"', text))


_DEEP = [{"role": "user", "content": nested(900)}]
HTTP: list[Request] = [
    _with("as it should be", TRAINED),
    *(
        _with(f"{place} temperature {t}", REFUSED, **{place: {"temperature": t}})
        for place in ("generation_params", "group_overrides")
        for t in (0, -1, 1e-46, 1e-40, 9e-7, 1e38, 1e300, "hot", True, [], {})
    ),
    *(_with(f"temperature {t}", TRAINED, generation_params={"temperature": t}) for t in (1e-6, 0.5, 2, None)),
    *(_with(f"{f} 900 deep", REFUSED, **{f: nested(900)}) for f in ("env_id", "another", "generation_params", "overrides", "messages", "scores", "tokens", "masks", "inference_logprobs")),
    Request("messages 900 deep", REFUSED, lambda item: json.dumps({**item, "messages": [_DEEP] * len(item["tokens"])}).encode()),
    Request("another field 50 deep", TRAINED, lambda item: json.dumps({**item, "another": nested(50)}).encode()),
    *(_patched(f"{f} with a lone surrogate", f, b'["\\ud800"]') for f in ("env_id", "messages", "another")),
    *(_patched(f"{f} that is NaN", f, b"NaN") for f in ("scores", "generation_params", "another")),
    *(_patched(f"{f} of 400 digits", f, b"1" + b"0" * 400) for f in ("scores", "env_id", "tokens")),
    *(_first(f"score {v}", "scores", v) for v in (1e308, -1e30, None, "1", True, [1])),
    *(_first(f"tokens {str(v)[:20]}", "tokens", v) for v in ([], None, [5000], [-1, 3], [2**40, 3], [2**70], [1.5, 2], "abc", [[1]], [True, False], {})),
    *(_first(f"masks {str(v)[:20]}", "masks", v) for v in ([], None, [0], [-100] * 99, [2**70], "abc", [None])),
    *(_first(f"inference_logprobs {str(v)[:20]}", "inference_logprobs", v) for v in ([], None, [-1], [-1e300] * 99, ["a"])),
    *(_with(f"{f} is {str(v)[:20]}", REFUSED, **{f: v}) for f in ("tokens", "masks", "scores") for v in (None, [], {}, "x", 3)),
    *(_with(f"policy_version {v}", REFUSED, group_overrides={"policy_version": v}) for v in (-1, 10**6, 2**40, 1.5, "new", True)),
    Request("ref_logprobs", REFUSED, lambda item: json.dumps({**item, "ref_logprobs": item["inference_logprobs"]}).encode()),
    Request("advantages", REFUSED, lambda item: json.dumps({**item, "advantages": item["inference_logprobs"]}).encode()),
    Request("no log-probs", TRAINED, lambda item: json.dumps({**item, "inference_logprobs": None}).encode()),
    Request("too long", REFUSED, lambda item: json.dumps({"tokens": [[3] * 40], "masks": [[-100] + [3] * 39], "scores": [1]}).encode()),
    _with("env_id is text", EITHER, env_id="me"),
    _with("env_id is large", EITHER, env_id=2**63),
    _with("several in one", EITHER, overrides=[{}, {}, {}]),
    *(_text(f"body {str(t)[:20]}", t) for t in (b"", b"{", b"[1, 2]", b"null", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000, b"{}", b"NaN")),
    _text("an empty list", b"[]", EITHER),
    Request("gzip that is none", REFUSED, lambda item: b"abc", (("Content-Encoding", "gzip"),)),
    Request("an unknown encoding", REFUSED, lambda item: b"abc", (("Content-Encoding", "deflate"),)),
]  # fmt: skip
