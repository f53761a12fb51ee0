"""Which back end can run a kernel here. Asked of MLX, never found out by failing."""

import mlx.core as mx


def metal_available() -> bool:
    """Whether Metal kernels can be dispatched: this build of MLX has the back end and the machine has the GPU."""
    return mx.metal.is_available()


def cuda_available() -> bool:
    """Whether CUDA kernels can be dispatched: this build of MLX has the back end and the machine has the GPU."""
    return mx.cuda.is_available()
