"""The policy: a causal language model of transformers, computed in the fastest way that agrees with transformers.

Start reading in `policy.py` and `paths.py`.

    loading, reading        a policy from files; a worker's policy from the memory to which the trainer writes the weights
    parameters/             one flat buffer for all weights; adapters
    fused/                  decoder layers of known parts, forward and backward written by hand
    attention/              attention over packed prefix trees
    plain                   transformers' own forward, for models that neither fused/ nor attention/ can run
    head/                   from hidden states to log-probs, without the logits of all tokens at once
    routing, routes         the experts that routers chose for each token: recorded, and replayed
    rotary                  rotary frequencies that depend on the length of a row
    probe                   a small copy of a model, on which the gate (runtime/gate.py) compares each path with transformers
    outputs                 log-probs of a fixed row, by which two processes check that they have the same weights
    reward_model            a model that scores texts
    native/                 optional kernels: C++ for CPUs, Triton for GPUs
"""
