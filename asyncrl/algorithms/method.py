"""The base class of *methods*: losses, terms that can be added to every loss, and the settings of an advantage estimator.

A method is a frozen dataclass. Its fields are its settings, each made by `setting`. The docstring of the class or of its `formula`
has the formula and the paper. From these declarations other modules make the schema of the configuration, `--help`,
`asyncrl explain`, the checks before a run, and the rules of a resume.
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
    """A field of a method.

    text: the sentence for `--help`.
    choices: the allowed strings; empty: no restriction.
    flat: the keyword argument of `build_loss` for this setting. By default SECTION_NAME.
    fixed: whether a resumed run must keep the value, because another value would change the objective.
    bounds: the value must be greater than `gt`, at least `ge`, less than `lt`, at most `le`.
    """
    if unknown := bounds.keys() - {"gt", "ge", "lt", "le"}:
        raise TypeError(f"setting() has no argument {min(unknown)!r}; a bound is gt, ge, lt or le")
    metadata = {"text": text, "choices": tuple(choices), "flat": flat, "fixed": fixed, "bounds": bounds}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of a setting. The docstring of `setting` explains the attributes."""

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
        """The name of the setting in the configuration."""
        return f"algorithm.{self.section}.{self.name}"


@dataclass(frozen=True, slots=True)
class CheckContext:
    """The configuration of a run, for checks of a method."""

    # A `LossMethod` and an `Estimator`. Imports of these types would be circular.
    loss: Any
    advantage: Any
    at: Callable[[str], Any]  # dotted name of a setting -> its value
    # Whether groups are trained before the number of tokens and sequences of the step is known.
    streaming: bool


@dataclass(frozen=True, slots=True)
class Conflict:
    """Values of a setting that are refused with the loss or advantage that declares this conflict.

    The message is `{name} is {value} but {method}, {reason}`. So `reason` begins with "which", and ends with what to do.
    """

    name: str  # dotted name of the setting
    reason: str
    when: Callable[[CheckContext], bool]  # true: refuse

    def message(self, method: str, context: CheckContext) -> str:
        """The message. `method`: kind and name of the method, such as "algorithm.loss is bnpo"."""
        value = context.at(self.name)
        return f"{self.name} is {str(value).lower() if isinstance(value, bool) else value} but {method}, {self.reason}"


@dataclass(frozen=True)
class Method:
    """Base class of losses and terms, and of the settings of an advantage estimator."""

    section: ClassVar[str] = ""  # the settings are algorithm.SECTION.*
    switches: ClassVar[tuple[str, ...]] = ()  # names of the settings that turn a term on
    # Completes the message "SETTING is VALUE but ...", for a setting of a term that is off.
    off: ClassVar[str] = ""
    # The function or module whose docstring `asyncrl explain` prints.
    formula: ClassVar[Any] = None

    @classmethod
    def settings(cls) -> tuple[Setting, ...]:
        """The declared and inherited settings, in order. Errors: TypeError for a field that `setting` did not make."""
        return _settings(cls)  # type: ignore[arg-type]  # mypy asks if instances are hashable

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Any:
        """An instance with its settings from `values`: flat name -> value. Ignores values of other methods. Checks no bounds."""
        return cls(**{setting.name: values[setting.flat] for setting in cls.settings() if setting.flat in values})

    @property
    def on(self) -> bool:
        """Whether a term is on. A term with settings besides its `switches` must override this property; other terms need not."""
        return True

    def derived(self) -> Mapping[str, Any]:
        """Name -> value in use, for settings whose default is None. If such a setting is None: the value that None stands for."""
        return {}

    def problems(self, context: CheckContext) -> Iterator[str]:
        """Error messages about these settings: the value, the reason, and what to do."""
        yield from ()

    def warnings(self, context: CheckContext) -> Iterator[str]:
        """Messages about settings that are allowed but probably not intended."""
        yield from ()


@cache
def _settings(cls: type[Method]) -> tuple[Setting, ...]:
    hints = get_type_hints(cls)
    names = {field_.name for field_ in fields(cls)}
    for name, hint in hints.items():
        if name not in names and get_origin(hint) is not ClassVar and hint is not ClassVar:
            raise TypeError(f"{cls.__name__}.{name} is no field: decorate the class with @dataclass(frozen=True)")
    settings = []
    for field_ in fields(cls):
        if "text" not in field_.metadata:
            raise TypeError(
                f"{cls.__name__}.{field_.name} is not made by `setting`; write {field_.name} = setting(...)"
            )
        metadata = dict(field_.metadata)
        metadata["flat"] = metadata["flat"] or f"{cls.section}_{field_.name}"
        settings.append(Setting(cls.section, field_.name, hints[field_.name], field_.default, **metadata))
    return tuple(settings)
