"""The policy: a causal language model of transformers, run in the fastest way that computes what the model itself does.

Start reading in `policy.py` and `paths.py`.

    loading, flat, lora                     weights: where they come from, one buffer for all, adapters
    fused*, kernels, packed, norms          the decoder written out, and the proof that it may be used
    attention, *_attention, row_bins        attention over packed prefix trees
    plain                                   transformers' own forward, for everything else
    head, logprobs, liger_head, head_triton from hidden states to log-probs, without the logits of all tokens at once
    probe                                   a few layers of a model, for the gate (runtime/gate.py)
    native.py, native.cpp                   optional kernels of the CPU
"""
