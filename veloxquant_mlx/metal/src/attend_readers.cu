// Readers for `attend`: how a lane gets elements [d0, d0 + E) of a token's key or value from what is stored; 0 from D on.
//
// Codes of a row: LAYOUT 0 one an element, 1 "lsb8" (a little-endian bit stream), 2 "lsb32" (32 / BITS a word from the lowest bit on).
// Codes beyond a table are clamped to its last entry.

namespace kvtool {

// An index as it is stored, as an unsigned one; negative ones are clamped.
__device__ __forceinline__ uint32_t code_of(uint8_t code) {
  return code;
}
__device__ __forceinline__ uint32_t code_of(uint16_t code) {
  return code;
}
__device__ __forceinline__ uint32_t code_of(uint32_t code) {
  return code;
}
__device__ __forceinline__ uint32_t code_of(int32_t code) {
  return uint32_t(max(code, 0));
}

template <int LAYOUT, int BITS>
struct Codes {
  static constexpr __device__ __forceinline__ int width(int count) {
    return LAYOUT == 1 ? (count * BITS + 7) / 8 : (count + 32 / BITS - 1) / (32 / BITS);
  }

  template <typename T>
  static __device__ __forceinline__ uint32_t at(const T* row, int i) {
    return unpack<BITS>(row, uint32_t(i));
  }
};

template <int BITS>
struct Codes<0, BITS> {
  static constexpr __device__ __forceinline__ int width(int count) {
    return count;
  }

  template <typename T>
  static __device__ __forceinline__ uint32_t at(const T* row, int i) {
    return code_of(row[i]);
  }
};

// Copy a table into shared memory, for the whole block.
__device__ __forceinline__ void stage(const float* source, float* table, int count, uint32_t thread_, uint32_t threads) {
  for (uint32_t i = thread_; i < uint32_t(count); i += threads) {
    table[i] = source[i];
  }
  __syncthreads();
}

// x[d] = table[code[d]]
template <int D, int E, int LAYOUT, int BITS, typename T>
struct TableReader {
  const T* codes;
  const float* table;
  int entries;
  int tokens;

  __device__ __forceinline__ void load(float* x, int head, int j, int d0) {
    const T* row = codes + (size_t(head) * tokens + j) * Codes<LAYOUT, BITS>::width(D);
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      x[e] = d0 + e < D ? table[min(Codes<LAYOUT, BITS>::at(row, d0 + e), uint32_t(entries - 1))] : 0.0f;
    }
  }
};

// x[d] = table1[code1[d]] + table2[code2[d]]
template <int D, int E, int LAYOUT, int BITS1, int BITS2, typename T>
struct TwoStageReader {
  TableReader<D, E, LAYOUT, BITS1, T> first;
  TableReader<D, E, LAYOUT, BITS2, T> second;

  __device__ __forceinline__ void load(float* x, int head, int j, int d0) {
    float y[E];
    first.load(x, head, j, d0);
    second.load(y, head, j, d0);
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      x[e] += y[e];
    }
  }
};

// x[d] = codebook[code[d / SUB]][d % SUB]
template <int D, int E, int SUB, int LAYOUT, int BITS, typename T>
struct VectorReader {
  const T* codes;
  const float* codebook;
  int entries;
  int tokens;

  __device__ __forceinline__ void load(float* x, int head, int j, int d0) {
    const T* row = codes + (size_t(head) * tokens + j) * Codes<LAYOUT, BITS>::width(D / SUB);
    const float* entry = codebook;
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      const int d = d0 + e;
      if (d >= D) {
        x[e] = 0;
        continue;
      }
      if (e == 0 || d % SUB == 0) {
        entry = codebook + size_t(min(Codes<LAYOUT, BITS>::at(row, d / SUB), uint32_t(entries - 1))) * SUB;
      }
      x[e] = entry[d % SUB];
    }
  }
};

// x[d] = code[d] scale[j / GROUP][d] + zero[j / GROUP][d]; a lane keeps the scales of the group it is in.
template <int D, int E, int GROUP, int LAYOUT, int BITS, typename T, typename A>
struct ChannelAffineReader {
  const T* codes;
  const A* scales;
  const A* zeros;
  int tokens;
  int group = -1;
  float scale[E];
  float zero[E];

  __device__ __forceinline__ void load(float* x, int head, int j, int d0) {
    if (j / GROUP != group) {
      group = j / GROUP;
      const size_t base = (size_t(head) * ((tokens - 1) / GROUP + 1) + group) * D + d0;
      ATTEND_UNROLL
      for (int e = 0; e < E; e++) {
        scale[e] = d0 + e < D ? float(scales[base + e]) : 0.0f;
        zero[e] = d0 + e < D ? float(zeros[base + e]) : 0.0f;
      }
    }
    const T* row = codes + (size_t(head) * tokens + j) * Codes<LAYOUT, BITS>::width(D);
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      x[e] = d0 + e < D ? fmaf(float(Codes<LAYOUT, BITS>::at(row, d0 + e)), scale[e], zero[e]) : 0.0f;
    }
  }
};

// x[d] = code[d] scale[j][d / GROUP] + zero[j][d / GROUP]
template <int D, int E, int GROUP, int LAYOUT, int BITS, typename T, typename A>
struct TokenAffineReader {
  const T* codes;
  const A* scales;
  const A* zeros;
  int tokens;

  __device__ __forceinline__ void load(float* x, int head, int j, int d0) {
    const size_t token = size_t(head) * tokens + j;
    const T* row = codes + token * Codes<LAYOUT, BITS>::width(D);
    const size_t base = token * ((D - 1) / GROUP + 1);
    float scale = 0;
    float zero = 0;
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      const int d = d0 + e;
      if (d >= D) {
        x[e] = 0;
        continue;
      }
      if (e == 0 || d % GROUP == 0) {
        scale = float(scales[base + d / GROUP]);
        zero = float(zeros[base + d / GROUP]);
      }
      x[e] = fmaf(float(Codes<LAYOUT, BITS>::at(row, d)), scale, zero);
    }
  }
};

// Keys of floats: the product with a query is a dot product.
template <typename Reader, int D, int E>
struct DenseKeys {
  Reader reader;

  struct Key {
    float x[E];
  };

  struct Query {
    float x[E];

    template <typename Q>
    __device__ __forceinline__ void load(const Q* row, int d0) {
      ATTEND_UNROLL
      for (int e = 0; e < E; e++) {
        x[e] = d0 + e < D ? float(row[d0 + e]) : 0.0f;
      }
    }

    __device__ __forceinline__ float dot(const Key& key) const {
      float sum = 0;
      ATTEND_UNROLL
      for (int e = 0; e < E; e++) {
        sum = fmaf(x[e], key.x[e], sum);
      }
      return sum;
    }
  };

  __device__ __forceinline__ void load(Key& key, int head, int j, int d0) {
    reader.load(key.x, head, j, d0);
  }
};

// Keys of signs, 8 a byte, bit t of byte b for element 8 b + t; the product is D - 2 hamming with the signs (>= 0) of the query.
// D and E are multiples of 8.
template <int D, int E>
struct SignKeys {
  const uint8_t* bits;
  int tokens;

  struct Key {
    uint32_t x[(E + 31) / 32];
  };

  struct Query {
    uint32_t x[(E + 31) / 32];
    int elements;

    template <typename Q>
    __device__ __forceinline__ void load(const Q* row, int d0) {
      elements = min(max(D - d0, 0), E);
      ATTEND_UNROLL
      for (int w = 0; w < (E + 31) / 32; w++) {
        x[w] = 0;
      }
      ATTEND_UNROLL
      for (int e = 0; e < E; e++) {
        x[e / 32] |= d0 + e < D && float(row[d0 + e]) >= 0 ? 1u << (e % 32) : 0u;
      }
    }

    __device__ __forceinline__ float dot(const Key& key) const {
      int different = 0;
      ATTEND_UNROLL
      for (int w = 0; w < (E + 31) / 32; w++) {
        different += int(__popc(x[w] ^ key.x[w]));
      }
      return float(elements - 2 * different);
    }
  };

  __device__ __forceinline__ void load(Key& key, int head, int j, int d0) {
    const uint8_t* row = bits + (size_t(head) * tokens + j) * (D / 8);
    ATTEND_UNROLL
    for (int w = 0; w < (E + 31) / 32; w++) {
      key.x[w] = 0;
    }
    ATTEND_UNROLL
    for (int e = 0; e < E; e += 8) {
      key.x[e / 32] |= d0 + e < D ? uint32_t(row[(d0 + e) / 8]) << (e % 32) : 0u;
    }
  }
};

}  // namespace kvtool
