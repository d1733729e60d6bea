"""Environments as users write them, for the tests of loading."""


class Mine:
    def __init__(self, tokenizer, seed, bonus=1.0):
        self.tokenizer = tokenizer
        self.seed = seed

    async def run(self, prompt, member, group_size, generate):
        return prompt, member, group_size


class Everything(Mine):
    def __init__(self, **given):
        self.given = given


class NoRun:
    pass


class BlockingRun:
    def run(self, prompt, member, group_size, generate):
        return None


def plain_episode(task, policy):
    return 1.0


class Demanding(Mine):
    def __init__(self, tokenizer, api_key):
        pass


class Broken(Mine):
    def __init__(self):
        raise OSError("no licence")


NOT_A_CLASS = 3
WITHOUT_SIGNATURE = dict
