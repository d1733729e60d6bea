"""The policy: a causal language model of transformers, run in the fastest way that gives the model's own numbers.

Start reading in `policy.py` and `paths.py`.

    loading, reading        a policy from files, or in a worker from the weight board
    parameters/             one flat buffer for all weights; adapters
    fused/                  decoder layers of known parts, forward and backward written by hand
    attention/              attention over packed prefix trees
    plain                   transformers' own forward, for every other model
    head/                   from hidden states to log-probs, without the logits of all tokens at once
    routing, routes         the experts of each token: recorded, and replayed
    rotary                  rotary frequencies that depend on the length of a row
    probe, outputs          a small copy of a model, which the gate (runtime/gate.py) compares; log-probs of a fixed row
    reward_model            a model that scores texts
    native/                 optional CPU kernels in C++
"""
