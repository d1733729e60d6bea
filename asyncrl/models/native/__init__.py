"""Optional CPU kernels for norms, activations, softmax and decode attention. Torch is the fallback."""
