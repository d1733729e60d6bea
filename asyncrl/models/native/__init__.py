"""Optional kernels (C++ for CPUs, Triton for GPUs) for parts of a layer, the head and decode attention; fallback: torch."""
