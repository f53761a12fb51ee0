// Readers for `attend`: how a lane gets elements [d0, d0 + E) of a token's key or value from what is stored; 0 from D on.
//
// Codes of a row: LAYOUT 0 one an element, 1 "lsb8" (a little-endian bit stream), 2 "lsb32" (32 / BITS a word from the lowest bit on).
// Codes beyond a table are clamped to its last entry. Where a lane's codes are whole bytes or words of a row they are loaded as vectors,
// packed ones, which need the alignment of their element only.

namespace kvtool {

// An index as it is stored, as an unsigned one; negative ones are clamped.
METAL_FUNC uint code_of(uint8_t code) {
  return code;
}
METAL_FUNC uint code_of(uint16_t code) {
  return code;
}
METAL_FUNC uint code_of(uint32_t code) {
  return code;
}
METAL_FUNC uint code_of(int32_t code) {
  return uint(metal::max(code, 0));
}

METAL_FUNC uint4 four_codes(const device uint16_t* from) {
  return uint4(ushort4(*(const device packed_ushort4*)from));
}
METAL_FUNC uint4 four_codes(const device uint32_t* from) {
  return uint4(*(const device packed_uint4*)from);
}
METAL_FUNC uint4 four_codes(const device int32_t* from) {
  const uint4 four = uint4(*(const device packed_uint4*)from);
  return uint4(code_of(int32_t(four.x)), code_of(int32_t(four.y)), code_of(int32_t(four.z)), code_of(int32_t(four.w)));
}

// Bytes as little-endian words.
template <int BYTES>
METAL_FUNC void load_words(thread uint* words, const device uint8_t* from) {
  ATTEND_UNROLL
  for (int b = 0; b < BYTES; b += 4) {
    words[b / 4] = 0;
    if (b + 4 <= BYTES) {
      words[b / 4] = as_type<uint>(uchar4(*(const device packed_uchar4*)(from + b)));
      continue;
    }
    ATTEND_UNROLL
    for (int i = b; i < BYTES; i++) {
      words[b / 4] |= uint(from[i]) << (i % 4 * 8);
    }
  }
}

template <int BYTES>
METAL_FUNC void load_words(thread uint* words, const device uint* from) {
  constexpr int COUNT = BYTES / 4;
  ATTEND_UNROLL
  for (int w = 0; w < COUNT; w += 2) {
    if (w + 2 <= COUNT) {
      const uint2 pair = uint2(*(const device packed_uint2*)(from + w));
      words[w] = pair.x;
      words[w + 1] = pair.y;
    } else {
      words[w] = from[w];
    }
  }
}

template <int LAYOUT, int BITS>
struct Codes {
  static METAL_FUNC constexpr int width(int count) {
    return LAYOUT == 1 ? (count * BITS + 7) / 8 : (count + 32 / BITS - 1) / (32 / BITS);
  }

  template <typename T>
  static METAL_FUNC uint at(const device T* row, int i) {
    return unpack<BITS>(row, uint(i));
  }

  // Codes [i, i + E) of a row of COUNT, i a multiple of E; 0 from COUNT on.
  template <int COUNT, int E>
  static METAL_FUNC void load(thread uint* code, const device uint8_t* row, int i) {
    constexpr bool WHOLE = COUNT % E == 0 && E * BITS % 8 == 0;
    uint words[(E * BITS + 31) / 32] = {};
    if (WHOLE && i < COUNT) {
      load_words<E * BITS / 8>(words, row + i * BITS / 8);
    }
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      const int word = e * BITS / 32;
      const int shift = e * BITS % 32;
      uint window = words[word] >> shift;
      if (shift + BITS > 32) {
        window |= words[word + 1] << (32 - shift);
      }
      code[e] = WHOLE ? window & ((1u << BITS) - 1) : i + e < COUNT ? at(row, i + e) : 0;
    }
  }

  template <int COUNT, int E>
  static METAL_FUNC void load(thread uint* code, const device uint* row, int i) {
    constexpr int PER = 32 / BITS;
    constexpr bool WHOLE = COUNT % E == 0 && (E % PER == 0 || PER % E == 0);
    constexpr int WORDS = (E + PER - 1) / PER;
    uint words[WORDS] = {};
    if (WHOLE && i < COUNT) {
      load_words<4 * WORDS>(words, row + i / PER);
    }
    const int first = i % PER * BITS;
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      code[e] = WHOLE ? words[e / PER] >> (first + e % PER * BITS) & ((1u << BITS) - 1) : i + e < COUNT ? at(row, i + e) : 0;
    }
  }
};

template <int BITS>
struct Codes<0, BITS> {
  static METAL_FUNC constexpr int width(int count) {
    return count;
  }

  template <typename T>
  static METAL_FUNC uint at(const device T* row, int i) {
    return code_of(row[i]);
  }

  template <int COUNT, int E>
  static METAL_FUNC void load(thread uint* code, const device uint8_t* row, int i) {
    Codes<1, 8>::load<COUNT, E>(code, row, i);
  }

  template <int COUNT, int E, typename T>
  static METAL_FUNC void load(thread uint* code, const device T* row, int i) {
    if (E % 4 == 0 && COUNT % E == 0) {
      ATTEND_UNROLL
      for (int e = 0; e < E; e += 4) {
        uint4 four = uint4(0, 0, 0, 0);
        if (i < COUNT) {
          four = four_codes(row + i + e);
        }
        ATTEND_UNROLL
        for (int c = 0; c < 4 && e + c < E; c++) {
          code[e + c] = four[c];
        }
      }
      return;
    }
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      code[e] = i + e < COUNT ? at(row, i + e) : 0;
    }
  }
};

// Copy a table into threadgroup memory, for the whole threadgroup.
METAL_FUNC void stage(const device float* source, threadgroup float* table, int count, uint thread_, uint threads) {
  for (uint i = thread_; i < uint(count); i += threads) {
    table[i] = source[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// x[d] = table[code[d]]
template <int D, int E, int LAYOUT, int BITS, typename T>
struct TableReader {
  const device T* codes;
  const threadgroup float* table;
  int entries;
  int tokens;

  METAL_FUNC void load(thread float* x, int head, int j, int d0) {
    uint code[E];
    Codes<LAYOUT, BITS>::template load<D, E>(code, codes + (size_t(head) * tokens + j) * Codes<LAYOUT, BITS>::width(D), d0);
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      x[e] = d0 + e < D ? table[metal::min(code[e], uint(entries - 1))] : 0.0f;
    }
  }
};

// x[d] = table1[code1[d]] + table2[code2[d]]; one look-up among the sums of all pairs where those are at most 256.
template <int D, int E, int LAYOUT, int BITS1, int BITS2, typename T>
struct TwoStageReader {
  const device T* codes1;
  const device T* codes2;
  const threadgroup float* table;
  int tokens;

  METAL_FUNC void load(thread float* x, int head, int j, int d0) {
    const size_t token = size_t(head) * tokens + j;
    uint first[E];
    uint second[E];
    Codes<LAYOUT, BITS1>::template load<D, E>(first, codes1 + token * Codes<LAYOUT, BITS1>::width(D), d0);
    Codes<LAYOUT, BITS2>::template load<D, E>(second, codes2 + token * Codes<LAYOUT, BITS2>::width(D), d0);
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      const uint a = metal::min(first[e], (1u << BITS1) - 1);
      const uint b = metal::min(second[e], (1u << BITS2) - 1);
      if (d0 + e >= D) {
        x[e] = 0;
      } else if (BITS1 + BITS2 <= 8) {
        x[e] = table[a + (b << BITS1)];
      } else {
        x[e] = table[a] + table[b + (1 << BITS1)];
      }
    }
  }
};

// The table of a TwoStageReader, for the whole threadgroup.
template <int BITS1, int BITS2>
METAL_FUNC void stage_stages(
    const device float* centroids1, const device float* centroids2, threadgroup float* table, uint thread_, uint threads) {
  if (BITS1 + BITS2 > 8) {
    stage(centroids1, table, 1 << BITS1, thread_, threads);
    stage(centroids2, table + (1 << BITS1), 1 << BITS2, thread_, threads);
    return;
  }
  for (uint i = thread_; i < 1u << (BITS1 + BITS2); i += threads) {
    table[i] = centroids1[i % (1 << BITS1)] + centroids2[i >> BITS1];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// x[d] = codebook[code[d / SUB]][d % SUB]
template <int D, int E, int SUB, int LAYOUT, int BITS, typename T, bool NEAR>
struct VectorReader {
  const device T* codes;
  typename Table<NEAR>::pointer codebook;
  int entries;
  int tokens;

  METAL_FUNC void load(thread float* x, int head, int j, int d0) {
    constexpr bool WHOLE = E % SUB == 0;  // each lane has sub-vectors of its own
    constexpr int STEP = E % 4 == 0 && SUB % 4 == 0 ? 4 : 1;
    const device T* row = codes + (size_t(head) * tokens + j) * Codes<LAYOUT, BITS>::width(D / SUB);
    uint code[(E + SUB - 1) / SUB];
    if (WHOLE) {
      Codes<LAYOUT, BITS>::template load<D / SUB, (E + SUB - 1) / SUB>(code, row, d0 / SUB);
    }
    typename Table<NEAR>::pointer entry = codebook;
    ATTEND_UNROLL
    for (int e = 0; e < E; e += STEP) {
      const int d = d0 + e;
      if (d >= D) {
        for (int i = e; i < E; i++) {
          x[i] = 0;
        }
        return;
      }
      if (WHOLE ? e % SUB == 0 : e == 0 || d % SUB == 0) {
        const uint index = WHOLE ? code[e / SUB] : Codes<LAYOUT, BITS>::at(row, d / SUB);
        entry = codebook + size_t(metal::min(index, uint(entries - 1))) * SUB;
      }
      if (STEP == 4) {
        const float4 four = Table<NEAR>::four(entry + d % SUB);
        ATTEND_UNROLL
        for (int i = 0; i < 4 && e + i < E; i++) {
          x[e + i] = four[i];
        }
      } else {
        x[e] = entry[d % SUB];
      }
    }
  }
};

// x[d] = code[d] scale[j / GROUP][d] + zero[j / GROUP][d]; a lane keeps the scales of the group it is in.
template <int D, int E, int GROUP, int LAYOUT, int BITS, typename T, typename A>
struct ChannelAffineReader {
  const device T* codes;
  const device A* scales;
  const device A* zeros;
  int tokens;
  int group = -1;
  float scale[E];
  float zero[E];

  METAL_FUNC void load(thread float* x, int head, int j, int d0) {
    if (j / GROUP != group) {
      group = j / GROUP;
      const size_t base = (size_t(head) * ((tokens - 1) / GROUP + 1) + group) * D + d0;
      ATTEND_UNROLL
      for (int e = 0; e < E; e++) {
        scale[e] = d0 + e < D ? float(scales[base + e]) : 0.0f;
        zero[e] = d0 + e < D ? float(zeros[base + e]) : 0.0f;
      }
    }
    uint code[E];
    Codes<LAYOUT, BITS>::template load<D, E>(code, codes + (size_t(head) * tokens + j) * Codes<LAYOUT, BITS>::width(D), d0);
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      x[e] = metal::fma(float(code[e]), scale[e], zero[e]);
    }
  }
};

// x[d] = code[d] scale[j][d / GROUP] + zero[j][d / GROUP]
template <int D, int E, int GROUP, int LAYOUT, int BITS, typename T, typename A>
struct TokenAffineReader {
  const device T* codes;
  const device A* scales;
  const device A* zeros;
  int tokens;

  METAL_FUNC void load(thread float* x, int head, int j, int d0) {
    const size_t token = size_t(head) * tokens + j;
    uint code[E];
    Codes<LAYOUT, BITS>::template load<D, E>(code, codes + token * Codes<LAYOUT, BITS>::width(D), d0);
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
      if (e == 0 || (GROUP % E != 0 && d % GROUP == 0)) {
        scale = float(scales[base + d / GROUP]);
        zero = float(zeros[base + d / GROUP]);
      }
      x[e] = metal::fma(float(code[e]), scale, zero);
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
    METAL_FUNC void load(const device Q* row, int d0) {
      ATTEND_UNROLL
      for (int e = 0; e < E; e++) {
        x[e] = d0 + e < D ? float(row[d0 + e]) : 0.0f;
      }
    }

    METAL_FUNC float dot(thread const Key& key) const {
      float sum = 0;
      ATTEND_UNROLL
      for (int e = 0; e < E; e++) {
        sum = metal::fma(x[e], key.x[e], sum);
      }
      return sum;
    }
  };

  METAL_FUNC void load(thread Key& key, int head, int j, int d0) {
    reader.load(key.x, head, j, d0);
  }
};

// Keys of signs, 8 a byte, bit t of byte b for element 8 b + t; the product is D - 2 hamming with the signs (>= 0) of the query.
// D and E are multiples of 8.
template <int D, int E>
struct SignKeys {
  const device uint8_t* bits;
  int tokens;

  struct Key {
    uint x[(E + 31) / 32];
  };

  struct Query {
    uint x[(E + 31) / 32];
    int elements;

    template <typename Q>
    METAL_FUNC void load(const device Q* row, int d0) {
      elements = metal::clamp(D - d0, 0, E);
      ATTEND_UNROLL
      for (int w = 0; w < (E + 31) / 32; w++) {
        x[w] = 0;
      }
      ATTEND_UNROLL
      for (int e = 0; e < E; e++) {
        x[e / 32] |= d0 + e < D && float(row[d0 + e]) >= 0 ? 1u << (e % 32) : 0u;
      }
    }

    METAL_FUNC float dot(thread const Key& key) const {
      int different = 0;
      ATTEND_UNROLL
      for (int w = 0; w < (E + 31) / 32; w++) {
        different += int(metal::popcount(x[w] ^ key.x[w]));
      }
      return float(elements - 2 * different);
    }
  };

  METAL_FUNC void load(thread Key& key, int head, int j, int d0) {
    const device uint8_t* row = bits + (size_t(head) * tokens + j) * (D / 8);
    ATTEND_UNROLL
    for (int w = 0; w < (E + 31) / 32; w++) {
      key.x[w] = 0;
    }
    if (D % E == 0) {
      if (d0 < D) {
        load_words<E / 8>(key.x, row + d0 / 8);
      }
      return;
    }
    ATTEND_UNROLL
    for (int e = 0; e < E; e += 8) {
      key.x[e / 32] |= d0 + e < D ? uint(row[(d0 + e) / 8]) << (e % 32) : 0u;
    }
  }
};

}  // namespace kvtool
