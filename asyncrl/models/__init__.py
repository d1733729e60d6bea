"""The policy: a causal language model of transformers, run in the fastest way that computes what the model itself does.

Start reading in `policy.py` and `paths.py`.

    loading, parameters/    weights: where they come from, one buffer for all, adapters
    fused/                  the decoder written out, for layers of known parts
    attention/              attention over packed prefix trees
    plain                   transformers' own forward, for everything else
    head/                   from hidden states to log-probs, without the logits of all tokens at once
    routing, routes         which experts a token goes to: recorded, and replayed
    rotary                  the frequencies of a run, where they depend on the length of its rows
    probe, copying          a few layers of a model, for the gate (runtime/gate.py)
    native/                 optional kernels of the CPU
"""
