"""Computes log-probs from hidden states without the logits of all tokens at once. Start in `logprobs.py`."""
