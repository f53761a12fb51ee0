// MLX writes the signature of the kernel: this bounds its registers, so that a block of 16 warps fits on a multiprocessor.
#undef __global__
#define __global__ __attribute__((global)) __attribute__((launch_bounds(512, 1)))
