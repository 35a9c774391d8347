// A call of the kernel: plain data and plain functions, the same for every instruction set.
#pragma once

#include <cstdint>

enum Kind : int32_t { kSilu, kGelu, kGeluTanh, kRelu, kRelu2 };
enum Bound : int32_t { kClamp, kClampActivated, kSoftcap };

// Block scales as float32 lanes. e8m0 bytes are exponents; 255, which stands for NaN, becomes an infinity, and codes
// are zero there, so that products with it are NaN. e4m3 bytes are magnitudes without a sign, in which 255 stands for
// NaN; their lanes are 2**8 times too small, as a float16 of the same bits, and row factors make up for it.
enum class ScaleKind : int32_t { kE8m0, kE4m3 };

struct Activation {
  Kind kind;
  Bound bound;
  bool gated;
  float alpha;
  float beta;
  float limit;     // infinite where there is none
  float up_limit;  // likewise
};

struct Weight {
  const uint8_t* codes;   // [E, N / 16, K / 8, 16, 4]
  const uint8_t* scales;  // [E, N / 16, K / block, 16]
  const float* factors;   // [E, N] or null
  const float* bias;      // [E, N] or null
};

struct Call {
  Weight w13;  // rows of gate and up in turn, sixteen each, where it is gated
  Weight w2;
  const void* hidden;    // [T, H] bfloat16 or float32
  const int64_t* ids;    // [T, k]; others than experts count for nothing
  const float* weights;  // [T, k]
  void* out;             // [T, H] bfloat16 or float32
  void* scratch;         // so many bytes as the kernel asks for
  int64_t num_tokens, top_k, num_experts, hidden_size, intermediate_size;
  ScaleKind scale_kind;
  bool hidden_is_bfloat16, out_is_bfloat16;
  int32_t num_threads;
  Activation activation;
};

struct Kernel {
  int64_t (*scratch_bytes)(const Call&);
  void (*run)(const Call&);
};
