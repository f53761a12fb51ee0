// What kernels and the scheduler share.
#pragma once

typedef unsigned int uint3 __attribute__((ext_vector_type(3)));

struct EmuThread {
  uint3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid, threads_per_grid, threads_per_threadgroup,
      dispatch_threads_per_threadgroup, threadgroups_per_grid, grid_size, grid_origin;
  unsigned int thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup,
      dispatch_simdgroups_per_threadgroup, threads_per_simdgroup, thread_execution_width;
};

enum EmuOperation {
  OP_SUM = 1, OP_PRODUCT, OP_MAX, OP_MIN, OP_AND, OP_OR, OP_XOR, OP_PREFIX_INCLUSIVE, OP_PREFIX_EXCLUSIVE, OP_SHUFFLE, OP_SHUFFLE_XOR,
  OP_SHUFFLE_DOWN, OP_SHUFFLE_UP, OP_ROTATE_DOWN, OP_ROTATE_UP, OP_BROADCAST, OP_BROADCAST_FIRST, OP_BALLOT, OP_ALL, OP_ANY, OP_MATRIX,
  OP_BARRIER
};
enum EmuMemory { MEMORY_DEVICE = 1, MEMORY_THREADGROUP = 2 };
