"""Engines sample tokens from the policy. All implement `ports.Engine`.

Start reading in `owner.py` (the base of all engines but `worker/`) and `embedded/engine.py` (the engine of this package).

    embedded/    continuous batching, on the trainer's model or on a worker's
    worker/      an engine whose requests are served by worker processes
    vllm/        vLLM in a worker process, with an adapter for each supported version
    dry_run      an engine without a model; its tokens are random
"""
