"""The reward of the step benchmark, used by both sides as it is. Cheap, and blind to length on average."""


def vowel_share(completions, **columns):  # type: ignore[no-untyped-def]
    """Share of vowels among the characters of each completion (TRL's form: strings, or lists of messages)."""
    scores = []
    for completion in completions:
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        scores.append(sum(letter in "aeiou" for letter in text) / max(len(text), 1))
    return scores
