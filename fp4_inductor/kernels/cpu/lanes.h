// Lanes: what a processor gives the kernel. One lane is one row of a weight; a sum is a vector of float32 lanes.
//
// A chunk of codes is 16 rows by 8 columns: one 32-bit word a row, whose low half holds the columns 0, 2, 4, 6 and
// whose high half 1, 3, 5, 7, lowest nibble first. A step multiplies what one nibble of each half holds (bfloat16
// pairs), or one nibble of the word (float32), by the activations of one token, which all lanes share.
#pragma once

#include <cstdint>
#include <cstring>

#include "call.h"

#if defined(FP4_AVX512BF16) || defined(FP4_AVX512) || defined(FP4_AVX2)
#include <immintrin.h>
#endif

#define FP4_INLINE inline __attribute__((always_inline))

constexpr int kRows = 16;    // of a chunk
constexpr int kColumns = 8;  // of a chunk
constexpr int kChunkBytes = kRows * kColumns / 2;

FP4_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

FP4_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Rounds to nearest even; a NaN stays one.
FP4_INLINE uint16_t bfloat16_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(value == value ? rounded : (bits >> 16) | 0x40);
}

constexpr uint32_t kE8m0Smallest = 0x00400000;  // 2**-127, which has no exponent bits

// What lanes have in common that multiply float32: a step takes one nibble of a word.
struct FloatInputs {
  static constexpr int kSteps = 8;
  static constexpr bool kPairs = false;
  using Input = float;

  // Sixteen columns in the order of their nibbles.
  static FP4_INLINE void to_inputs(const float* columns, Input* inputs) {
    for (int i = 0; i < 2 * kColumns; ++i) inputs[i / kColumns * kColumns + i % kColumns / 2 + i % 2 * 4] = columns[i];
  }
};

#if defined(FP4_AVX512BF16) || defined(FP4_AVX512)

// What both ways of AVX-512 to multiply have in common.
struct Avx512Lanes {
  static constexpr int kCount = 16;
  static constexpr int kVectors = 1;     // of rows, multiplied at once
  static constexpr int kMaxTokens = 14;  // whose sums, twice, fit the registers
  using Sum = __m512;
  using Scale = __m512;
  using Codes = __m512i;

  static FP4_INLINE Sum zero() { return _mm512_setzero_ps(); }
  static FP4_INLINE Sum floats(const float* values) { return _mm512_loadu_ps(values); }
  static FP4_INLINE Codes load(const uint8_t* codes) { return _mm512_loadu_si512(codes); }

  template <ScaleKind kind>
  static FP4_INLINE Scale scale(const uint8_t* scales) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
    if constexpr (kind == ScaleKind::kE4m3) {
      return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7));
    } else {
      const __m512i exponent = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
      return _mm512_castsi512_ps(_mm512_max_epu32(exponent, _mm512_set1_epi32(kE8m0Smallest)));
    }
  }

  static FP4_INLINE Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
  static FP4_INLINE Sum add_scaled(Sum sum, Sum block, Scale scale) { return _mm512_fmadd_ps(block, scale, sum); }
  static FP4_INLINE void store(float* out, Sum sum) { _mm512_storeu_ps(out, sum); }
};

#endif

#if defined(FP4_AVX512BF16)

// Products of bfloat16 pairs, exact, summed in float32. Every e2m1 value times a block scale is exact in bfloat16.
struct Lanes : Avx512Lanes {
  static constexpr int kSteps = 4;
  static constexpr bool kPairs = true;
  using Input = uint32_t;  // two bfloat16
  using Weights = __m512i;

  // Bit 4 of an index is the next nibble's: the table holds the sixteen values twice, so it need not be cleared.
  static FP4_INLINE Weights weights(Codes codes, int step) {
    const __m512i table = _mm512_set_epi64(
        0xC0C0C080C040C000, 0xBFC0BF80BF008000, 0x40C0408040404000, 0x3FC03F803F000000,
        0xC0C0C080C040C000, 0xBFC0BF80BF008000, 0x40C0408040404000, 0x3FC03F803F000000);
    return _mm512_permutexvar_epi16(step ? _mm512_srli_epi16(codes, 4 * step) : codes, table);
  }

  // Compilers make two instructions of the intrinsics, of which a core that shares its front end runs a fifth fewer.
  static FP4_INLINE Sum add_product(Sum sum, Weights pairs, const Input& input) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(pairs), "m"(input));
    return sum;
  }

  // Sixteen columns as pairs, rounded to nearest even.
  static FP4_INLINE void to_inputs(const float* columns, Input* inputs) {
    const __m512 values = _mm512_loadu_ps(columns);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(inputs), (__m256i)_mm512_cvtneps_pbh(values));
  }
};

#elif defined(FP4_AVX512)

struct Lanes : Avx512Lanes, FloatInputs {
  using Weights = __m512;

  static FP4_INLINE Weights weights(Codes codes, int step) {
    const __m512 table = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f,
                                        -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f);
    return _mm512_permutexvar_ps(step ? _mm512_srli_epi32(codes, 4 * step) : codes, table);
  }

  static FP4_INLINE Sum add_product(Sum sum, Weights weights, const Input& input) {
    return _mm512_fmadd_ps(weights, _mm512_set1_ps(input), sum);
  }
};

#elif defined(FP4_AVX2)

struct Lanes : FloatInputs {
  static constexpr int kCount = 8;
#if defined(__clang__)  // which keeps no two vectors of weights and their sums in registers
  static constexpr int kVectors = 1;
  static constexpr int kMaxTokens = 7;
#else
  static constexpr int kVectors = 2;  // share what is loaded of a token
  static constexpr int kMaxTokens = 6;
#endif
  using Sum = __m256;
  using Scale = __m256;
  using Codes = __m256i;
  using Weights = __m256;

  static FP4_INLINE Sum zero() { return _mm256_setzero_ps(); }
  static FP4_INLINE Sum floats(const float* values) { return _mm256_loadu_ps(values); }

  static FP4_INLINE Codes load(const uint8_t* codes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  }

  template <ScaleKind kind>
  static FP4_INLINE Scale scale(const uint8_t* scales) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
    const __m256 unit = _mm256_set1_ps(0x1p-25f);  // of weights()
    if constexpr (kind == ScaleKind::kE4m3) {
      return _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7)), unit);
    } else {
      const __m256i exponent = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
      const __m256i bits = _mm256_max_epu32(exponent, _mm256_set1_epi32(kE8m0Smallest));
      return _mm256_mul_ps(_mm256_castsi256_ps(bits), unit);
    }
  }

  // Bytes of twice the values, shifted to the top of their words: 2**25 times the weights, as integers.
  static FP4_INLINE Weights weights(Codes codes, int step) {
    const __m256i table = _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
                                           0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m256i index = _mm256_and_si256(step % 2 ? _mm256_srli_epi16(codes, 4) : codes, _mm256_set1_epi8(15));
    const __m256i bytes = _mm256_shuffle_epi8(table, index);
    const int byte = step / 2;  // of each word
    if (byte == 0) return _mm256_cvtepi32_ps(_mm256_slli_epi32(bytes, 24));
    if (byte == 3) return _mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(0xFF000000)));
    const __m256i words = _mm256_setr_epi32(0, 4 << 24, 8 << 24, 12 << 24, 0, 4 << 24, 8 << 24, 12 << 24);
    const __m256i to_top = _mm256_or_si256(words, _mm256_set1_epi32(byte << 24 | 0x808080));  // and zeros below
    return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(bytes, to_top));
  }

  static FP4_INLINE Sum add_product(Sum sum, Weights weights, const Input& input) {
    return _mm256_fmadd_ps(weights, _mm256_set1_ps(input), sum);
  }

  static FP4_INLINE Sum add(Sum a, Sum b) { return _mm256_add_ps(a, b); }
  static FP4_INLINE Sum add_scaled(Sum sum, Sum block, Scale scale) { return _mm256_fmadd_ps(block, scale, sum); }
  static FP4_INLINE void store(float* out, Sum sum) { _mm256_storeu_ps(out, sum); }
};

#else

// Any processor, by the vectors that GCC and Clang make of four lanes.
struct Lanes : FloatInputs {
  static constexpr int kCount = 4;
  static constexpr int kVectors = 1;
  static constexpr int kMaxTokens = 7;
  typedef float Sum __attribute__((vector_size(16)));
  typedef uint32_t Codes __attribute__((vector_size(16)));
  using Scale = Sum;
  using Weights = Sum;

  static FP4_INLINE Sum zero() { return Sum{}; }

  static FP4_INLINE Sum floats(const float* values) {
    Sum lanes;
    std::memcpy(&lanes, values, sizeof lanes);
    return lanes;
  }

  static FP4_INLINE Codes load(const uint8_t* codes) {
    Codes words;
    std::memcpy(&words, codes, sizeof words);
    return words;
  }

  template <ScaleKind kind>
  static FP4_INLINE Scale scale(const uint8_t* scales) {
    Scale lanes;
    for (int i = 0; i < kCount; ++i) {
      const uint32_t byte = scales[i];
      uint32_t bits = byte ? byte << 23 : kE8m0Smallest;
      if (kind == ScaleKind::kE4m3) {
        bits = byte < 8 ? bits_of(static_cast<float>(byte) * 0x1p-17f) : (byte << 20) + (112u << 23);
        if (byte == 255) bits = 0x7FC00000;
      }
      lanes[i] = float_of(bits);
    }
    return lanes;
  }

  // The three bits are exponent and mantissa of a float, but for the codes 0 and 1: zero and one half.
  static FP4_INLINE Weights weights(Codes codes, int step) {
    const Codes code = codes >> (4 * step);
    const Codes magnitude = code & 7;
    Codes bits = (magnitude << 22) + 0x3F000000;
    bits -= reinterpret_cast<Codes>(magnitude == 1) & 0x00400000;
    bits &= reinterpret_cast<Codes>(magnitude != 0);
    bits |= (code & 8) << 28;
    return reinterpret_cast<Weights>(bits);
  }

  static FP4_INLINE Sum add_product(Sum sum, Weights weights, const Input& input) { return sum + weights * input; }
  static FP4_INLINE Sum add(Sum a, Sum b) { return a + b; }
  static FP4_INLINE Sum add_scaled(Sum sum, Sum block, Scale scale) { return sum + block * scale; }
  static FP4_INLINE void store(float* out, Sum sum) { std::memcpy(out, &sum, sizeof sum); }
};

#endif
