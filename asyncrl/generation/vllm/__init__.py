"""vLLM's engine core in the process of a generation worker, without a server. Requests and results are token ids.

    versions.py   checks that the installed vLLM has an adapter
    recording.py  maps the weight board to vLLM's parameters, by recording the copies of vLLM's own loader
    v0_32*.py     the adapter for vLLM 0.32 and 0.33. Only adapters use vLLM's internals
    temporary.py  vLLM's temporary files
    engine.py     the engine that a worker serves with

vLLM schedules, caches and computes logits. The embedded engine's sampler draws the tokens, with the same random numbers.
Start reading in `engine.py`.
"""
