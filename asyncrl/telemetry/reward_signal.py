"""For each of three faults, counts how many of the last steps in a row had the fault, and warns with a likely reason.

* `reward/steps_without_signal`: no completion had a reward, or all rewards were equal. If advantages are computed within groups:
  also if no group had two different rewards.
* `completions/steps_clipped`: almost every completion was cut.
* `time/reward_steps`: the device waited for reward functions.

The metrics of the step give the reason, so the report finds the same reason later. `known`: reasons found at the start of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

WITHOUT_SIGNAL = "reward/steps_without_signal"
CLIPPED = "completions/steps_clipped"
WAITED = "time/reward_steps"
# A `completions/clipped_ratio` of at least this is worth a warning, even if the rewards differ.
LARGE_CLIPPED_RATIO = 0.9
# Metrics that count what the text of a completion leaves out -> (what is missing, what to do). See data/texts.py.
LACKING: Mapping[str, tuple[str, str]] = {
    "text/openings_left_out": (
        "what the chat template opens in the prompt, such as <think>, of {} completions",
        "reward.text.opened=true puts it in front",
    ),
    "text/stops_left_out": ("the stop string or token that ended {} completions", "reward.text.stop=true keeps it"),
    "text/special_tokens_left_out": ("{} special tokens", "reward.text.special_tokens=true keeps them"),
}
_MOST_WARNINGS = 100  # in a report
# A warning comes after this many steps in a row with a fault, and again at every doubling.
FIRST = 3
# An `idle/reward` of at least this is worth a warning.
LARGE_WAIT = 0.25
# Estimators that use raw rewards, the whole step or reward components. Their advantages may differ from 0 even if the rewards
# within every group are equal.
_ACROSS_GROUPS = ("none", "reinforce_pp", "gdpo")

_FIRST_TOKEN_REASON = (
    "every completion ends with its first token; `asyncrl prompts` shows whether the prompts end where an answer begins"
)

Metrics = Mapping[str, float]


class FaultCounts:
    """Counts the three faults. Call `step` for every step, in order. `advantage` and `group_size` are settings.
    `completions_should_end`: False if every completion is meant to be cut (`rollout.ignore_eos`)."""

    def __init__(self, advantage: str, group_size: int, completions_should_end: bool = True) -> None:
        self._within_groups = group_size > 1 and advantage not in _ACROSS_GROUPS
        self._completions_should_end = completions_should_end
        self._flat_steps = self._clipped_steps = self._waiting_steps = 0

    def step(self, metrics: Metrics) -> dict[str, float]:
        """Add a step. Returns the counts after the step; empty if the step trained no completion."""
        if "reward/applicable" not in metrics:
            return {}
        flat = metrics["reward/applicable"] == 0 or metrics["reward/min"] == metrics["reward/max"]
        if self._within_groups and not flat:
            flat = metrics["frac_reward_zero_std"] == 1
        self._flat_steps = self._flat_steps + 1 if flat else 0
        clipped = self._completions_should_end and metrics.get("completions/clipped_ratio", 0.0) >= LARGE_CLIPPED_RATIO
        self._clipped_steps = self._clipped_steps + 1 if clipped else 0
        self._waiting_steps = self._waiting_steps + 1 if metrics.get("idle/reward", 0.0) >= LARGE_WAIT else 0
        steps = {WITHOUT_SIGNAL: self._flat_steps, CLIPPED: self._clipped_steps, WAITED: self._waiting_steps}
        return {name: float(count) for name, count in steps.items()}


def warnings(metrics: Metrics, known: Sequence[str] = ()) -> Iterator[str]:
    """The warnings that are due after a step. `known`: reasons why completions do not end, which the run found at its start."""
    for name, describes in _DESCRIBED.items():
        if _is_due(metrics.get(name, 0.0)):
            yield f"warning: {describes(metrics, known)}"


def _is_due(count: float) -> bool:
    times, rest = divmod(int(count), FIRST)
    return rest == 0 and times > 0 and times & (times - 1) == 0  # a power of two


def lacking_note(metrics: Metrics, reported: set[str]) -> Iterator[str]:
    """A line about what the texts of completions leave out. `reported`: metrics of earlier lines; those of this line are added."""
    found = [name for name in LACKING if metrics.get(name) and name not in reported]
    reported.update(found)
    if found:
        lines = (f"{LACKING[name][0].format(int(metrics[name]))} ({LACKING[name][1]})" for name in found)
        yield f"note: until now the texts for reward functions lack {'; '.join(lines)}; the metrics text/* go on counting"


def describe_without_signal(metrics: Metrics, known: Sequence[str] = ()) -> str:
    """A sentence on the rewards of a step without a signal: their value, for how many steps, and the likely reason."""
    count = int(metrics[WITHOUT_SIGNAL])
    steps = f"for {count} steps in a row" if count > 1 else "in this step"
    applicable = metrics["reward/applicable"]
    if applicable == 0:
        what = f"no completion had a reward {steps} (every score was None)"
    elif metrics["reward/min"] == metrics["reward/max"]:
        what = f"every reward was {metrics['reward/max']:g} {steps}"
    else:
        what = f"no group had two different rewards {steps}"
    return f"{what}, so nothing is learned from them; likely reason: {'; or '.join(_reasons(metrics, known))}"


def _describe_share_cut(metrics: Metrics, known: Sequence[str]) -> str:
    advice = "raise the limit, or see in rollouts/ what the completions end with (rollout.stop, rollout.stop_token_ids)"
    ratio = metrics["completions/clipped_ratio"]
    share = "every completion was" if ratio == 1 else f"{ratio:.0%} of the completions were"
    limits = "rollout.max_tokens (of an agent also rollout.max_context)"
    return f"{share} cut at {limits} before the end of an answer: {'; '.join(known) or advice}"


def _describe_clipped(metrics: Metrics, known: Sequence[str] = ()) -> str:
    return f"for {metrics[CLIPPED]:.0f} steps in a row {_describe_share_cut(metrics, known)}"


def _describe_waited(metrics: Metrics, known: Sequence[str] = ()) -> str:
    queued = metrics.get("time/reward_queue", 0.0) > metrics.get("time/reward", 0.0) / 10
    advice = (
        "calls wait for a worker: raise reward.workers, or for `async def` functions reward.concurrency"
        if queued
        else "no call waits for a worker, so the functions themselves take that long: make them faster, or let more groups be "
        "under way (rollout.max_staleness, rollout.groups_per_step)"
    )
    return (
        f"for {metrics[WAITED]:.0f} steps in a row the device stood still for rewards, {metrics['idle/reward']:.0%} of the last "
        f"step's {metrics['time/step']:.1f} s; {advice}"
    )


_DESCRIBED = {WITHOUT_SIGNAL: describe_without_signal, CLIPPED: _describe_clipped, WAITED: _describe_waited}


def _reasons(metrics: Metrics, known: Sequence[str]) -> list[str]:
    failed = [name for name, n in metrics.items() if name.startswith("reward/") and name.endswith("/errors") and n]
    if failed:
        names = ", ".join(name.removeprefix("reward/").removesuffix("/errors") for name in failed)
        return [f"calls of {names} failed, and reward.on_error replaced their scores; the log has the errors"]
    if metrics.get("completions/max_length", 2.0) <= 1:
        return [_FIRST_TOKEN_REASON]
    many_cut = metrics.get("completions/clipped_ratio", 0.0) >= LARGE_CLIPPED_RATIO
    reasons = [_describe_share_cut(metrics, known)] if many_cut else []
    if limited := metrics.get("rollout/limited"):
        reasons.append(
            f"{limited:.0f} episodes ran into rollout.max_turns or rollout.max_context: raise the setting, or end episodes earlier"
        )
    reasons += [
        f"the text that the functions read lacks {what.format(int(metrics[name]))} ({fix})"
        for name, (what, fix) in LACKING.items()
        if metrics.get(name)
    ]
    return reasons or [_reason_by_rewards(metrics)]


def _reason_by_rewards(metrics: Metrics) -> str:
    advice = "; compare completions in rollouts/ with what the function looks for"
    if metrics["reward/applicable"] == 0:
        return f"the functions find nothing that they apply to (a column, or a form of the answer){advice}"
    if metrics["reward/min"] != metrics["reward/max"]:
        return (
            "all completions of a prompt are alike (a temperature or top_p that is too low, a model that collapsed), or the "
            "prompts are each far too easy or too hard (rollout.filter.dynamic_sampling replaces such groups)"
        )
    if metrics["reward/max"] > 0:
        return f"the prompts are solved already, or the function gives the same reward for every text{advice}"
    return f"the prompts are too hard, or the function expects another form of the answer{advice}"


class Warnings:
    """For the report: one warning for each series of `FIRST` or more steps with a fault, made from the metrics of its last step."""

    def __init__(self) -> None:
        self._found: deque[str] = deque(maxlen=_MOST_WARNINGS)
        self._last: Metrics = {}  # the last row that had counts

    def add(self, row: Metrics) -> None:
        """Add the metrics of the next step; a row without counts is ignored."""
        if WITHOUT_SIGNAL not in row:
            return
        for name, describes in _DESCRIBED.items():
            before = self._last.get(name, 0.0)
            # The count did not grow, so the series has ended.
            if row.get(name, 0.0) <= before and before >= FIRST:
                self._found.append(f"Until step {self._last['step']}: {describes(self._last)}.")
        self._last = row

    def finish(self) -> list[str]:
        """The warnings, one sentence each. Call it after the last row."""
        self.add({WITHOUT_SIGNAL: 0.0})
        return list(self._found)
