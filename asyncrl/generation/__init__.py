"""Engines: sampling tokens from the policy, behind `ports.Engine`.

Start reading in `owner.py`, what every engine of a process shares, and `embedded/engine.py`, the one that decodes by itself.

    embedded/    continuous batching, on the trainer's model or on a worker's
    worker/      an engine in a process beside the trainer: requests, sequences, weights, deaths
    vllm/        vLLM's core in a worker, an adapter for each of its versions
    dry_run      made-up tokens
"""
