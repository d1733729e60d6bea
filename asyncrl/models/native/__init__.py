"""Elementwise parts of a layer in one pass over memory: optional kernels of the CPU, with torch beside them."""
