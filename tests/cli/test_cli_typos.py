"""A typo is answered before torch and transformers are imported, which takes most of the time until then; so is the first line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROWS = '{"prompt": "a", "answer": "b"}\n'
REWARDS = """
def correct(completions, answer, **columns): ...
def of_solution(completions, solution, **columns): ...
"""
CONFIG = """
model: {path: model.py:build}
data: {train: rows.jsonl}
reward: rewards.py:correct
rollout: {group_size: 2, groups_per_step: 2, max_tokens: 4}
train: {max_steps: 1}
"""
# What is typed behind `asyncrl run run.yaml`, and words of the answer.
SETTINGS = {
    "trian.lr=1": "the nearest is 'train.lr'",
    "train.lr=fast": "train.lr is 'fast'",
    "algorithm.loss=grpoo": "did you mean grpo?",
    "rollout.group_size=1": "rollout.group_size is 1",
    "model.path=./modell": "model.path: there is no directory './modell'",
    "model.tokenizer=Qwen/Qwen3-0.6B": "which returns model and tokenizer by itself; leave model.tokenizer out",
    "model.random_init=true": "leave model.random_init out, or implement the setting in the function",
    "model.path=nope.py:build": "model.path: there is no file nope.py",
    "model.path=model.py:buil": "model.path: cannot load 'model.py:buil': model.py has no 'buil'; did you mean 'build'?",
    "data.train=nope.jsonl": "data.train: the prompt file nope.jsonl does not exist",
    "data.train=model.py:rosw": "data.train: cannot load 'model.py:rosw': model.py has no 'rosw'; did you mean 'rows'?",
    "data.prompt_column=promt": "row 1 has no column 'promt'; found prompt, answer",
    "reward=nope.py:correct": "reward.functions: there is no file nope.py",
    "reward=rewards.py:corect": "reward.functions: cannot load 'rewards.py:corect': rewards.py has no 'corect'; did you",
    "reward=broken.py:correct": "reward.functions: cannot load 'broken.py:correct': SyntaxError: '(' was never closed",
    "reward=rewards.py:of_solution": "of_solution: it needs 'solution'; the columns of the data are: answer; a reward",
    "reward.model=nope.py:judge": "reward.model: there is no file nope.py",
    "rollout.environment=model.py:Plai": "rollout.environment: cannot load 'model.py:Plai'",
    "hooks=nope.py:hooks": "hooks: there is no file nope.py",
}
OTHERS = {
    "run nope.yaml": "the configuration file nope.yaml does not exist",
    "run broken.yaml": "broken.yaml line 2 column 1 is not valid YAML",
    "run run.yaml --dry-run data.train=nope.jsonl": "data.train: the prompt file nope.jsonl does not exist",
    "prompts run.yaml data.train=nope.jsonl": "data.train: the prompt file nope.jsonl does not exist",
    "prompts": "usage: asyncrl prompts CONFIG.yaml",
    "prompts run.yaml -n": "-n is ''; expected a number of prompts",
    "prompts run.yaml -n 0": "-n is '0'; expected a number of prompts",
    "prompts run.yaml -n 1" + "0" * 5000: "expected a number of prompts",
    "prompts gone.yaml": "gone.yaml does not exist",
    "prompts bare.yaml": "data.train is not set",
    "prompts run.yaml data.chat_template_kwargs=3": "data.chat_template_kwargs is 3",
    "prompts run.yaml model.path=./modell": "model.path: there is no directory './modell'",
    "check-model ./modell": "model.path: there is no directory './modell'",
    "check nope": "nope is neither a run directory nor a checkpoint",
    "report nope": "nope is not a run directory",
    "explain grpoo": "did you mean 'grpo'?",
    "shm lits": "invalid choice: 'lits'",
    "bench stepp": "there is no 'stepp'",
    "nope": "there is no command 'nope'",
}
PROGRAM = """
import contextlib, io, json, sys
from asyncrl.cli.app import main

HEAVY = {"torch", "transformers"}

class Lines(io.StringIO):
    schema = None  # whether the first line came after the settings' schema was imported
    def write(self, text):
        if self.schema is None:
            self.schema = "pydantic" in sys.modules
        return super().write(text)

answers = {}
for line in json.load(sys.stdin):
    lines = Lines()
    with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(lines):
        try:
            code = main(line.split())
        except SystemExit as left:
            code = left.code
    answers[line] = code, lines.getvalue(), lines.schema, sorted(HEAVY & sys.modules.keys())
print(json.dumps(answers))
"""


def test_a_typo_is_answered_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "model.py").write_text("import torch\n\ndef build(seed): ...\ndef rows(): ...\nclass Play: ...\n")
    (tmp_path / "broken.py").write_text("def correct(completions:\n")
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "bare.yaml").write_text("model: {path: nowhere}\n")
    (tmp_path / "broken.yaml").write_text("train: {lr: [\n")
    typed = {"run nope.yaml": "", **{f"run run.yaml {each}": words for each, words in SETTINGS.items()}, **OTHERS}
    program = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(program, input=json.dumps([*typed]), capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    answers = json.loads(ended.stdout)
    for line, words in typed.items():
        code, said, _, heavy = answers[line]
        assert code == 2 and words in said and not heavy, (line, code, said, heavy)
        assert "importing torch" not in said and "Traceback" not in said
    # The first line of a run comes before the schema, which takes a third of a second.
    assert answers["run nope.yaml"][2] is False
