// How rows are stored, for `coded_attend`: what a lane loads of a row (`fetch`), and the 16 channels that it makes of that (`build`).
// norm is a factor of the row; centred and mean_part say what the mean of values adds, which is summed apart.

namespace kvtool {

// The float whose upper half these bits are.
METAL_FUNC float coded_bfloat(uint bits) {
  return as_type<float>(bits << 16);
}

// Copy a table into threadgroup memory, for the whole threadgroup.
METAL_FUNC void coded_stage(const device float* source, threadgroup float* table, int count, uint thread_, uint threads) {
  for (uint i = thread_; i < uint(count); i += threads) {
    table[i] = source[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A number of bytes as little-endian words.
template <int BYTES>
METAL_FUNC void coded_words(thread uint* words, const device uint8_t* from) {
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

// 16 codes of a lane in a packed row of D: two runs of 8.
template <int D, int BITS>
struct CodedCodes {
  static constant constexpr int WORDS = (BITS + 3) / 4;
  uint words[2 * WORDS];

  METAL_FUNC void load(const device uint8_t* codes, size_t row, int c, bool used) {
    const device uint8_t* from = codes + row * (D / 8 * BITS) + (used ? c : 0) * BITS;
    coded_words<BITS>(words, from);
    coded_words<BITS>(words + WORDS, from + D / 16 * BITS);
  }

  METAL_FUNC uint at(int e) const {
    const int word = e / 8 * WORDS + e % 8 * BITS / 32;
    const int shift = e % 8 * BITS % 32;
    uint code = words[word] >> shift;
    if (shift + BITS > 32) {
      code |= words[word + 1] << (32 - shift);
    }
    return code & ((1u << BITS) - 1);
  }
};

// |scale| (table1[code1] + table2[code2]) and, where the sign bit of the scale is 0, the mean: of a table of 2^BITS points each, BITS2
// 0 for one. MEAN 0: there is none; 1: added to the row, the head's in threadgroup memory; 2: summed apart, (H, D) in memory.
template <int D, int BITS1, int BITS2, int MEAN>
struct CodedTable {
  static constant constexpr bool TWO = BITS2 > 0;

  const device uint8_t* codes1;
  const device uint8_t* codes2;
  const device uint16_t* scales;
  const threadgroup float* table;
  const threadgroup float* head_mean;
  const device float* means;

  struct Stored {
    CodedCodes<D, BITS1> one;
    CodedCodes<D, TWO ? BITS2 : 1> two;
    uint scale;
  };

  METAL_FUNC void fetch(thread Stored& stored, int head, int rows, int j, int c, bool used) const {
    const size_t row = size_t(head) * rows + j;
    stored.one.load(codes1, row, c, used);
    if (TWO) {
      stored.two.load(codes2, row, c, used);
    }
    stored.scale = scales[row];
  }

  METAL_FUNC void build(thread float* x, const thread Stored& stored, int, int c, bool used) const {
    const float scale = coded_bfloat(stored.scale & 0x7fffu);
    const float with_mean = centred(stored);
    ATTEND_UNROLL
    for (int e = 0; e < CODED_E; e++) {
      float y = table[stored.one.at(e)];
      if (TWO) {
        y += table[(1 << BITS1) + stored.two.at(e)];
      }
      if (MEAN == 1) {
        y = metal::fma(with_mean, used ? head_mean[e / 8 * (D / 2) + 8 * c + e % 8] : 0.0f, scale * y);
      }
      x[e] = used ? y : 0.0f;
    }
  }

  METAL_FUNC float norm(const thread Stored& stored) const {
    return MEAN == 1 ? 1.0f : coded_bfloat(stored.scale & 0x7fffu);
  }

  METAL_FUNC float centred(const thread Stored& stored) const {
    return MEAN && stored.scale < 0x8000u ? 1.0f : 0.0f;
  }

  METAL_FUNC float mean_part(float weight, int head, int d) const {
    return MEAN == 2 ? weight * means[size_t(head) * D + d] : 0.0f;
  }
};

// scale code + zero, one pair for GROUP tokens of a channel, or (PER_TOKEN) for GROUP channels of a token.
template <int D, int BITS, int GROUP, bool PER_TOKEN>
struct CodedAffine {
  static constant constexpr int SIDES = PER_TOKEN ? (D + GROUP - 1) / GROUP : D;

  const device uint8_t* codes;
  const device uint16_t* scales;
  const device uint16_t* zeros;
  int side = -1;            // which sides are kept
  uint pairs[CODED_E];  // scale in the upper half, zero in the lower one

  struct Stored {
    CodedCodes<D, BITS> codes;
    int side;
  };

  METAL_FUNC void fetch(thread Stored& stored, int head, int rows, int j, int c, bool used) const {
    stored.codes.load(codes, size_t(head) * rows + j, c, used);
    stored.side = PER_TOKEN ? head * rows + j : head * ((rows - 1) / GROUP + 1) + j / GROUP;
  }

  METAL_FUNC void build(thread float* x, const thread Stored& stored, int, int c, bool used) {
    if (side != stored.side) {
      side = stored.side;
      ATTEND_UNROLL
      for (int e = 0; e < CODED_E; e++) {
        const int d = used ? e / 8 * (D / 2) + 8 * c + e % 8 : 0;
        if (PER_TOKEN && GROUP % 8 == 0 && e % 8) {
          pairs[e] = pairs[e - 1];
          continue;
        }
        const size_t at = size_t(side) * SIDES + (PER_TOKEN ? d / GROUP : d);
        pairs[e] = uint(scales[at]) << 16 | zeros[at];
      }
    }
    ATTEND_UNROLL
    for (int e = 0; e < CODED_E; e++) {
      const float code = as_type<float>(0x4b000000u | stored.codes.at(e)) - 8388608.0f;
      const float y = metal::fma(code, as_type<float>(pairs[e] & 0xffff0000u), coded_bfloat(pairs[e]));
      x[e] = used ? y : 0.0f;
    }
  }

  METAL_FUNC float norm(const thread Stored&) const {
    return 1;
  }
  METAL_FUNC float centred(const thread Stored&) const {
    return 0;
  }
  METAL_FUNC float mean_part(float, int, int) const {
    return 0;
  }
};

// Four elements, of 32 bits or of 16.
METAL_FUNC float4 coded_four(const device float* from) {
  return float4(*(const device packed_float4*)from);
}
template <typename T>
METAL_FUNC metal::vec<T, 4> coded_four(const device T* from) {
  return as_type<metal::vec<T, 4>>(ushort4(*(const device packed_ushort4*)from));
}

// Rows as they are.
template <int D, typename T>
struct CodedPlain {
  const device T* data;

  struct Stored {
    T x[CODED_E];
  };

  METAL_FUNC void fetch(thread Stored& stored, int head, int rows, int j, int c, bool used) const {
    const device T* row = data + (size_t(head) * rows + j) * D + 8 * (used ? c : 0);
    ATTEND_UNROLL
    for (int e = 0; e < CODED_E; e += 4) {
      const metal::vec<T, 4> four = coded_four(row + e / 8 * (D / 2) + e % 8);
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        stored.x[e + i] = four[i];
      }
    }
  }

  METAL_FUNC void build(thread float* x, const thread Stored& stored, int, int, bool used) const {
    ATTEND_UNROLL
    for (int e = 0; e < CODED_E; e++) {
      x[e] = used ? float(stored.x[e]) : 0.0f;
    }
  }

  METAL_FUNC float norm(const thread Stored&) const {
    return 1;
  }
  METAL_FUNC float centred(const thread Stored&) const {
    return 0;
  }
  METAL_FUNC float mean_part(float, int, int) const {
    return 0;
  }
};

// A word of SUB channels, 4 or 8, for each code. One table of 2^BITS words in threadgroup memory for all rows, or (OWN) one in memory for
// every place of a row of every head, of halves.
template <int D, int SUB, int BITS, bool OWN>
struct CodedVectors {
  static constant constexpr int EACH = 8 / SUB;                   // codes of a run
  static constant constexpr int WIDTH = (D / SUB * BITS + 7) / 8;  // bytes of a row

  const device uint8_t* codes;
  const threadgroup float* words;
  const device half* own_words;

  struct Stored {
    uint code[2 * EACH];
  };

  METAL_FUNC void fetch(thread Stored& stored, int head, int rows, int j, int c, bool used) const {
    const device uint8_t* row = codes + (size_t(head) * rows + j) * WIDTH;
    ATTEND_UNROLL
    for (int i = 0; i < 2 * EACH; i++) {
      const int bit = (i / EACH * (D / 2 / SUB) + (used ? c : 0) * EACH + i % EACH) * BITS;
      uint window = row[bit / 8];
      if (BITS % 8 && bit % 8 + BITS > 8) {
        window |= uint(row[bit / 8 + 1]) << 8;
      }
      stored.code[i] = window >> (bit % 8) & ((1u << BITS) - 1);
    }
  }

  METAL_FUNC void build(thread float* x, const thread Stored& stored, int head, int c, bool used) const {
    ATTEND_UNROLL
    for (int i = 0; i < 2 * EACH; i++) {
      if (OWN) {
        const int place = i / EACH * (D / 2 / SUB) + (used ? c : 0) * EACH + i % EACH;
        const device half* from = own_words + ((size_t(head) * (D / SUB) + place) * (1 << BITS) + stored.code[i]) * SUB;
        ATTEND_UNROLL
        for (int e = 0; e < SUB; e += 4) {
          const half4 four = half4(*(const device packed_half4*)(from + e));
          x[i * SUB + e] = used ? float(four.x) : 0.0f;
          x[i * SUB + e + 1] = used ? float(four.y) : 0.0f;
          x[i * SUB + e + 2] = used ? float(four.z) : 0.0f;
          x[i * SUB + e + 3] = used ? float(four.w) : 0.0f;
        }
      } else {
        ATTEND_UNROLL
        for (int e = 0; e < SUB; e += 4) {
          const float4 four = float4(*(const threadgroup packed_float4*)(words + stored.code[i] * SUB + e));
          ATTEND_UNROLL
          for (int r = 0; r < 4; r++) {
            x[i * SUB + e + r] = used ? four[r] : 0.0f;
          }
        }
      }
    }
  }

  METAL_FUNC float norm(const thread Stored&) const {
    return 1;
  }
  METAL_FUNC float centred(const thread Stored&) const {
    return 0;
  }
  METAL_FUNC float mean_part(float, int, int) const {
    return 0;
  }
};

// Scores that are there already, (query rows, rows) in log2, in place of keys.
struct CodedScores {
  const device float* scores;

  struct Stored {};

  METAL_FUNC void fetch(thread Stored&, int, int, int, int, bool) const {}
  METAL_FUNC void build(thread float*, const thread Stored&, int, int, bool) const {}
  METAL_FUNC float norm(const thread Stored&) const {
    return 1;
  }
};

METAL_FUNC bool coded_scored(const thread CodedScores&) {
  return true;
}
METAL_FUNC float coded_score(const thread CodedScores& keys, size_t row, int count, int j) {
  return keys.scores[row * count + j];
}

}  // namespace kvtool
