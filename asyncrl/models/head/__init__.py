"""From hidden states to log-probs, without the logits of all tokens at once. Start in `logprobs.py`."""
