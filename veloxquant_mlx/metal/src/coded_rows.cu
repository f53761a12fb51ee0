// How rows are stored, for `coded_attend`: what a lane loads of a row (`fetch`), and the 16 channels that it makes of that (`build`).
// norm is a factor of the row; centred and mean_part say what the mean of values adds, which is summed apart.

namespace kvtool {

__device__ __forceinline__ bool coded_aligned(const void* pointer) {
  return (reinterpret_cast<size_t>(pointer) & 15) == 0;
}

// The float whose upper half these bits are.
__device__ __forceinline__ float coded_bfloat(uint32_t bits) {
  return __uint_as_float(bits << 16);
}

// Copy a table into shared memory, for the whole block.
__device__ __forceinline__ void coded_stage(const float* source, float* table, int count, uint32_t thread_, uint32_t threads) {
  for (uint32_t i = thread_; i < uint32_t(count); i += threads) {
    table[i] = source[i];
  }
  __syncthreads();
}

// 16 bits as a word: the load fills it, where C++ would convert what was loaded, and wait for that.
__device__ __forceinline__ uint32_t coded_short(const void* from) {
  uint32_t word;
  asm("ld.global.nc.u16 %0, [%1];" : "=r"(word) : "l"(from));
  return word;
}

// A number of bytes as little-endian words.
template <int BYTES>
__device__ __forceinline__ void coded_words(uint32_t* words, const uint8_t* from, bool aligned) {
  if (aligned && BYTES % 8 == 0) {
    ATTEND_UNROLL
    for (int w = 0; w < BYTES / 4; w += 2) {
      const uint2 pair = __ldg(reinterpret_cast<const uint2*>(from) + w / 2);
      words[w] = pair.x;
      words[w + 1] = pair.y;
    }
  } else if (aligned && BYTES % 4 == 0) {
    ATTEND_UNROLL
    for (int w = 0; w < BYTES / 4; w++) {
      words[w] = __ldg(reinterpret_cast<const uint32_t*>(from) + w);
    }
  } else if (aligned && BYTES == 2) {
    words[0] = coded_short(from);
  } else {
    ATTEND_UNROLL
    for (int b = 0; b < BYTES; b++) {
      const uint32_t byte = uint32_t(__ldg(from + b)) << (b % 4 * 8);
      words[b / 4] = b % 4 ? words[b / 4] | byte : byte;
    }
  }
}

// 16 codes of a lane in a packed row of D: two runs of 8.
template <int D, int BITS>
struct CodedCodes {
  static constexpr int WORDS = (BITS + 3) / 4;
  uint32_t words[2 * WORDS];

  __device__ __forceinline__ void load(const uint8_t* codes, size_t row, int c, bool used, bool aligned) {
    const uint8_t* from = codes + row * (D / 8 * BITS) + (used ? c : 0) * BITS;
    coded_words<BITS>(words, from, aligned);
    coded_words<BITS>(words + WORDS, from + D / 16 * BITS, aligned);
  }

  __device__ __forceinline__ uint32_t at(int e) const {
    const int word = e / 8 * WORDS + e % 8 * BITS / 32;
    const int shift = e % 8 * BITS % 32;
    uint32_t code = words[word] >> shift;
    if (shift + BITS > 32) {
      code |= words[word + 1] << (32 - shift);
    }
    return code & ((1u << BITS) - 1);
  }
};

// |scale| (table1[code1] + table2[code2]) and, where the sign bit of the scale is 0, the mean: of a table of 2^BITS points each, BITS2
// 0 for one. MEAN 0: there is none; 1: added to the row, the head's in shared memory; 2: summed apart, (H, D) in memory.
template <int D, int BITS1, int BITS2, int MEAN>
struct CodedTable {
  static constexpr bool TWO = BITS2 > 0;

  const uint8_t* codes1;
  const uint8_t* codes2;
  const uint16_t* scales;
  const float* table;
  const float* head_mean;
  const float* means;
  bool aligned;

  struct Stored {
    CodedCodes<D, BITS1> one;
    CodedCodes<D, TWO ? BITS2 : 1> two;
    uint32_t scale;
  };

  __device__ __forceinline__ void fetch(Stored& stored, int head, int rows, int j, int c, bool used) const {
    const size_t row = size_t(head) * rows + j;
    stored.one.load(codes1, row, c, used, aligned);
    if (TWO) {
      stored.two.load(codes2, row, c, used, aligned);
    }
    stored.scale = __ldg(scales + row);
  }

  __device__ __forceinline__ void build(float (&x)[CODED_E], const Stored& stored, int, int c, bool used) const {
    const float scale = coded_bfloat(stored.scale & 0x7fffu);
    const float with_mean = centred(stored);
    ATTEND_UNROLL
    for (int e = 0; e < CODED_E; e++) {
      float y = table[stored.one.at(e)];
      if (TWO) {
        y += table[(1 << BITS1) + stored.two.at(e)];
      }
      if (MEAN == 1) {
        y = fmaf(with_mean, used ? head_mean[e / 8 * (D / 2) + 8 * c + e % 8] : 0.0f, scale * y);
      }
      x[e] = used ? y : 0.0f;
    }
  }

  __device__ __forceinline__ float norm(const Stored& stored) const {
    return MEAN == 1 ? 1.0f : coded_bfloat(stored.scale & 0x7fffu);
  }

  __device__ __forceinline__ float centred(const Stored& stored) const {
    return MEAN && stored.scale < 0x8000u ? 1.0f : 0.0f;
  }

  __device__ __forceinline__ float mean_part(float weight, int head, int d) const {
    return MEAN == 2 ? weight * means[size_t(head) * D + d] : 0.0f;
  }
};

// scale code + zero, one pair for GROUP tokens of a channel, or (PER_TOKEN) for GROUP channels of a token.
template <int D, int BITS, int GROUP, bool PER_TOKEN>
struct CodedAffine {
  static constexpr int SIDES = PER_TOKEN ? (D + GROUP - 1) / GROUP : D;

  const uint8_t* codes;
  const uint16_t* scales;
  const uint16_t* zeros;
  bool aligned;
  int side = -1;            // which sides are kept
  uint32_t pairs[CODED_E];  // scale in the upper half, zero in the lower one

  struct Stored {
    CodedCodes<D, BITS> codes;
    int side;
  };

  __device__ __forceinline__ void fetch(Stored& stored, int head, int rows, int j, int c, bool used) const {
    stored.codes.load(codes, size_t(head) * rows + j, c, used, aligned);
    stored.side = PER_TOKEN ? head * rows + j : head * ((rows - 1) / GROUP + 1) + j / GROUP;
  }

  __device__ __forceinline__ void build(float (&x)[CODED_E], const Stored& stored, int, int c, bool used) {
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
        pairs[e] = uint32_t(__ldg(scales + at)) << 16 | __ldg(zeros + at);
      }
    }
    ATTEND_UNROLL
    for (int e = 0; e < CODED_E; e++) {
      const float code = __uint_as_float(0x4b000000u | stored.codes.at(e)) - 8388608.0f;
      const float y = fmaf(code, __uint_as_float(pairs[e] & 0xffff0000u), coded_bfloat(pairs[e]));
      x[e] = used ? y : 0.0f;
    }
  }

  __device__ __forceinline__ float norm(const Stored&) const {
    return 1;
  }
  __device__ __forceinline__ float centred(const Stored&) const {
    return 0;
  }
  __device__ __forceinline__ float mean_part(float, int, int) const {
    return 0;
  }
};

// Rows as they are.
template <int D, typename T>
struct CodedPlain {
  const T* data;
  bool aligned;

  struct Stored {
    uint32_t words[CODED_E * sizeof(T) / 4];
  };

  __device__ __forceinline__ void fetch(Stored& stored, int head, int rows, int j, int c, bool used) const {
    const T* row = data + (size_t(head) * rows + j) * D + 8 * (used ? c : 0);
    ATTEND_UNROLL
    for (int half = 0; half < 2; half++) {
      const T* from = row + half * (D / 2);
      ATTEND_UNROLL
      for (int i = 0; i < int(8 * sizeof(T) / 16); i++) {
        uint32_t* to = stored.words + half * int(2 * sizeof(T)) + 4 * i;
        if (aligned) {
          const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + i);
          to[0] = four.x;
          to[1] = four.y;
          to[2] = four.z;
          to[3] = four.w;
        } else {
          ATTEND_UNROLL
          for (int w = 0; w < 8; w++) {
            const uint32_t part = __ldg(reinterpret_cast<const uint16_t*>(from) + 8 * i + w);
            to[w / 2] = w % 2 ? to[w / 2] | part << 16 : part;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void build(float (&x)[CODED_E], const Stored& stored, int, int, bool used) const {
    ATTEND_UNROLL
    for (int e = 0; e < CODED_E; e++) {
      float y;
      if (sizeof(T) == 4) {
        y = __uint_as_float(stored.words[e]);
      } else {
        const uint16_t bits = uint16_t(stored.words[e / 2] >> (e % 2 * 16));
        y = float(*reinterpret_cast<const T*>(&bits));
      }
      x[e] = used ? y : 0.0f;
    }
  }

  __device__ __forceinline__ float norm(const Stored&) const {
    return 1;
  }
  __device__ __forceinline__ float centred(const Stored&) const {
    return 0;
  }
  __device__ __forceinline__ float mean_part(float, int, int) const {
    return 0;
  }
};

// A word of SUB channels, 4 or 8, for each code. One table of 2^BITS words in shared memory for all rows, or (OWN) one in memory for
// every place of a row of every head, of halves.
template <int D, int SUB, int BITS, bool OWN>
struct CodedVectors {
  static constexpr int EACH = 8 / SUB;                   // codes of a run
  static constexpr int WIDTH = (D / SUB * BITS + 7) / 8;  // bytes of a row

  const uint8_t* codes;
  const float* words;
  const __half* own_words;

  struct Stored {
    uint32_t code[2 * EACH];
  };

  __device__ __forceinline__ void fetch(Stored& stored, int head, int rows, int j, int c, bool used) const {
    const uint8_t* row = codes + (size_t(head) * rows + j) * WIDTH;
    ATTEND_UNROLL
    for (int i = 0; i < 2 * EACH; i++) {
      const int bit = (i / EACH * (D / 2 / SUB) + (used ? c : 0) * EACH + i % EACH) * BITS;
      uint32_t window = __ldg(row + bit / 8);
      if (BITS % 8 && bit % 8 + BITS > 8) {
        window |= uint32_t(__ldg(row + bit / 8 + 1)) << 8;
      }
      stored.code[i] = window >> (bit % 8) & ((1u << BITS) - 1);
    }
  }

  __device__ __forceinline__ void build(float (&x)[CODED_E], const Stored& stored, int head, int c, bool used) const {
    ATTEND_UNROLL
    for (int i = 0; i < 2 * EACH; i++) {
      if (OWN) {
        const int place = i / EACH * (D / 2 / SUB) + (used ? c : 0) * EACH + i % EACH;
        const __half* from = own_words + ((size_t(head) * (D / SUB) + place) * (1 << BITS) + stored.code[i]) * SUB;
        uint32_t pairs[SUB / 2];
        coded_words<2 * SUB>(pairs, reinterpret_cast<const uint8_t*>(from), coded_aligned(own_words));
        ATTEND_UNROLL
        for (int e = 0; e < SUB; e++) {
          const uint16_t bits = uint16_t(pairs[e / 2] >> (e % 2 * 16));
          x[i * SUB + e] = used ? float(*reinterpret_cast<const __half*>(&bits)) : 0.0f;
        }
      } else {
        ATTEND_UNROLL
        for (int e = 0; e < SUB; e++) {
          x[i * SUB + e] = used ? words[stored.code[i] * SUB + e] : 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ float norm(const Stored&) const {
    return 1;
  }
  __device__ __forceinline__ float centred(const Stored&) const {
    return 0;
  }
  __device__ __forceinline__ float mean_part(float, int, int) const {
    return 0;
  }
};

// Scores that are there already, (query rows, rows) in log2, in place of keys.
struct CodedScores {
  const float* scores;

  struct Stored {};

  __device__ __forceinline__ void fetch(Stored&, int, int, int, int, bool) const {}
  __device__ __forceinline__ void build(float (&)[CODED_E], const Stored&, int, int, bool) const {}
  __device__ __forceinline__ float norm(const Stored&) const {
    return 1;
  }
};

__device__ __forceinline__ constexpr bool coded_scored(const CodedScores&) {
  return true;
}
__device__ __forceinline__ float coded_score(const CodedScores& keys, size_t row, int count, int j) {
  return __ldg(keys.scores + row * count + j);
}

}  // namespace kvtool
