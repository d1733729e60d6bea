"""vLLM's engine inside a generation worker: no server, no child process, token ids in and token ids out.

    versions.py   which vLLM is installed, and whether it is one that we know
    recording.py  from the board's layout to vLLM's parameters: recorded while vLLM's own loader runs, not guessed
    v0_32*.py     the adapter for vLLM 0.32, everything that touches its inside. Each minor version has files of its own
    engine.py     the engine that a worker serves with

vLLM schedules, caches and computes logits; tokens are drawn by the embedded engine's sampler, with the same random keys.
Start reading in `engine.py`.
"""
