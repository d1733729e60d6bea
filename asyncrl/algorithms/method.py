"""What a method declares about itself, as data: its settings, what they must not be, and what may change on a resume. No torch.

A method is a frozen dataclass: its fields are its settings, each made by `setting`, its docstring has formula and paper. The
configuration's schema, `--help`, `asyncrl explain`, the checks before a run and what a resume may change are made of these
declarations (`config/methods.py`), so nothing is said about a method anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, get_origin, get_type_hints


def setting(
    default: Any,
    text: str,
    *,
    choices: Iterable[str] = (),
    flat: str | None = None,
    fixed: bool = False,
    **bounds: float,
) -> Any:
    """A field of a method: default, the sentence for `--help`, bounds (`gt`, `ge`, `lt`, `le`), or the names to choose from.

    `flat`: its short spelling, `algorithm.FLAT`, and the keyword of `build_loss`; SECTION_NAME by default. `fixed`: another
    value would be another objective, so it may not change when a run goes on.
    """
    about = {"text": text, "choices": tuple(choices), "flat": flat, "fixed": fixed, "bounds": bounds}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a method, as declared."""

    section: str
    name: str
    annotation: Any
    default: Any
    text: str
    choices: tuple[str, ...]
    flat: str
    fixed: bool
    bounds: Mapping[str, float]

    @property
    def dotted(self) -> str:
        """Its name in the configuration."""
        return f"algorithm.{self.section}.{self.name}"


@dataclass(frozen=True, slots=True)
class CheckContext:
    """What a check may look at beside its own method."""

    # A `losses.loss.LossMethod`, which is a method itself: named here it would be a circle.
    loss: Any
    advantage: Any  # an `estimator.Estimator`, likewise
    at: Callable[[str], Any]  # the value of any dotted name of the configuration
    # Groups are trained as they arrive, before the step's number of tokens and sequences is known.
    streaming: bool
    by_tokens: tuple[str, ...] = ()  # the losses that are divided by tokens


@dataclass(frozen=True, slots=True)
class Conflict:
    """What a loss or an advantage cannot be combined with: `{name} is {its value} but {kind} is {method}, {reason}`."""

    name: str  # dotted
    reason: str  # begins with "which"; says the way out
    when: Callable[[CheckContext], bool]

    def message(self, method: str, around: CheckContext) -> str:
        """The sentence, with the value that is set; `method` is the method's kind and name."""
        value = around.at(self.name)
        return f"{self.name} is {str(value).lower() if isinstance(value, bool) else value} but {method}, {self.reason}"


@dataclass(frozen=True)
class Method:
    """Base of all that has settings of its own in the `algorithm` section."""

    section: ClassVar[str] = ""  # the settings are algorithm.SECTION.*
    switches: ClassVar[tuple[str, ...]] = ()  # of a term: the settings that turn it on
    # Of a term: what is said where another of its settings is given while it is off.
    off: ClassVar[str] = ""
    # What `explain` prints beside the docstring: a function or a module.
    formula: ClassVar[Any] = None

    @classmethod
    def settings(cls) -> tuple[Setting, ...]:
        """The settings that this class declares and inherits, in order. Errors: TypeError for a field that is no setting."""
        return _settings(cls)  # type: ignore[arg-type]  # mypy asks whether its instances can be hashed

    @classmethod
    def made(cls, numbers: Mapping[str, Any]) -> Any:
        """An instance with what `numbers` has under the flat names. The configuration has checked them against the bounds."""
        return cls(**{each.name: numbers[each.flat] for each in cls.settings() if each.flat in numbers})

    @property
    def on(self) -> bool:
        """Of a term: whether it does anything."""
        return True

    def derived(self) -> Mapping[str, Any]:
        """What the settings that were left out come to, by name."""
        return {}

    def problems(self, around: CheckContext) -> Iterator[str]:
        """What contradicts itself: the value, the reason, the way out."""
        yield from ()

    def warnings(self, around: CheckContext) -> Iterator[str]:
        """What is allowed but seldom meant."""
        yield from ()


@cache
def _settings(cls: type[Method]) -> tuple[Setting, ...]:
    hints = get_type_hints(cls)
    known = {each.name for each in fields(cls)}
    for name, hint in hints.items():
        if name not in known and get_origin(hint) is not ClassVar and hint is not ClassVar:
            raise TypeError(f"{cls.__name__}.{name} is no field: decorate the class with @dataclass(frozen=True)")
    found = []
    for each in fields(cls):
        if "text" not in each.metadata:
            raise TypeError(f"{cls.__name__}.{each.name} is not made by `setting`")
        about = dict(each.metadata)
        about["flat"] = about["flat"] or f"{cls.section}_{each.name}"
        found.append(Setting(cls.section, each.name, hints[each.name], each.default, **about))
    return tuple(found)
