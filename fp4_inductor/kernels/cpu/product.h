// The one inner product: 16 rows of a packed weight by the activations of up to Lanes::kMaxTokens tokens.
#pragma once

#include "lanes.h"

// Codes are fetched into the first cache so many bytes ahead of use. Long before, whoever multiplies has them fetched
// into the second: it knows where it goes on, and processors that follow a stream by themselves stop where a page ends.
constexpr int kNear = 2048;

constexpr int block_columns(ScaleKind kind) { return kind == ScaleKind::kE8m0 ? 32 : 16; }

// Where sixteen rows stand.
struct Rows {
  const uint8_t* codes;   // [columns / 8] chunks
  const uint8_t* scales;  // [columns / block][16]
};

// Weights are decoded in registers and never stored; the sum over a block is multiplied by the block's scale.
//
// ahead: rows to fetch meanwhile; panel: [columns / 8][steps][tokens]; factors, bias: [16], of rows; out: [tokens][16].
template <ScaleKind kind, int tokens>
void multiply(const Rows& rows, const Rows& ahead, const Lanes::Input* panel, int64_t columns, const float* factors,
              const float* bias, float* out) {
  constexpr int kVectors = Lanes::kVectors, kLanes = Lanes::kCount * kVectors;
  // Products wait for the one before them in their chain: few tokens take several chains.
  constexpr int kChains = tokens == 1 ? 4 : tokens * 7 <= Lanes::kMaxTokens * 4 ? 2 : 1;
  const int64_t codes_ahead = ahead.codes - rows.codes, scales_ahead = ahead.scales - rows.scales;
  for (int lane = 0; lane < kRows; lane += kLanes) {
    const uint8_t* code = rows.codes + lane * (kChunkBytes / kRows);
    const uint8_t* scale = rows.scales + lane;
    const Lanes::Input* input = panel;
    Lanes::Sum sum[tokens][kVectors];
    for (auto& of_token : sum)
      for (auto& s : of_token) s = Lanes::zero();
#pragma GCC unroll 1
    for (int64_t column = 0; column < columns; column += block_columns(kind), scale += kRows) {
      Lanes::Sum part[kChains][tokens][kVectors];
      for (auto& chain : part)
        for (auto& of_token : chain)
          for (auto& s : of_token) s = Lanes::zero();
      for (int chunk = 0; chunk < block_columns(kind) / kColumns; ++chunk, code += kChunkBytes) {
        __builtin_prefetch(code + kNear);
        __builtin_prefetch(code + codes_ahead, 0, 2);
        Lanes::Codes packed[kVectors];
        for (int v = 0; v < kVectors; ++v) packed[v] = Lanes::load(code + v * Lanes::kCount * (kChunkBytes / kRows));
#pragma GCC unroll 8
        for (int step = 0; step < Lanes::kSteps; ++step, input += tokens) {
          Lanes::Weights weights[kVectors];
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) weights[v] = Lanes::weights(packed[v], step);
#pragma GCC unroll 16
          for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v)
              part[step % kChains][t][v] = Lanes::add_product(part[step % kChains][t][v], weights[v], input[t]);
        }
      }
      __builtin_prefetch(scale + scales_ahead);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const Lanes::Scale factor = Lanes::scale<kind>(scale + v * Lanes::kCount);
#pragma GCC unroll 16
        for (int t = 0; t < tokens; ++t) {
          for (int chain = 1; chain < kChains; ++chain) part[0][t][v] = Lanes::add(part[0][t][v], part[chain][t][v]);
          sum[t][v] = Lanes::add_scaled(sum[t][v], part[0][t][v], factor);
        }
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const int at = lane + v * Lanes::kCount;
        const Lanes::Sum scaled = Lanes::add_scaled(Lanes::floats(bias + at), sum[t][v], Lanes::floats(factors + at));
        Lanes::store(out + t * kRows + at, scaled);
      }
  }
}
