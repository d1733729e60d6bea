"""Optional CPU kernels that compute elementwise parts of a layer in one pass over memory. Torch is the fallback."""
