// A program: the CPU kernel alone, on odd shapes, against sums in double of weights read one by one. No Python, so that
// it runs under valgrind and on emulated processors. It prints the largest error of a token, and exits with 1 if that
// is too large.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "moe.cpp"

namespace {

std::mt19937 rng(7);

struct Packed {
  int64_t experts, rows, columns, block;
  bool e4m3;
  std::vector<uint8_t> codes, scales;
  std::vector<float> factors, bias;

  Packed(int64_t experts, int64_t rows, int64_t columns, bool e4m3, bool with_bias)
      : experts(experts), rows(rows), columns(columns), block(e4m3 ? 16 : 32), e4m3(e4m3) {
    codes.resize(experts * rows * columns / 2);
    scales.resize(experts * rows * columns / block);
    for (auto& each : codes) each = static_cast<uint8_t>(rng());
    for (auto& each : scales) each = static_cast<uint8_t>(e4m3 ? 0x20 + rng() % 0x28 : 116 + rng() % 8);
    if (e4m3) factors.assign(experts * rows, 256.f * .03125f);
    if (with_bias)
      for (int64_t i = 0; i < experts * rows; ++i) bias.push_back(static_cast<float>(rng() % 100) / 100 - .5f);
  }

  Weight weight() const {
    auto pointer = [](const std::vector<float>& values) { return values.empty() ? nullptr : values.data(); };
    return {codes.data(), scales.data(), pointer(factors), pointer(bias)};
  }

  double value(int64_t expert, int64_t row, int64_t column) const {
    static const double kValues[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    const int64_t first = expert * rows + row / kRows * kRows;
    const uint8_t* word = codes.data() + first * columns / 2 + column / kColumns * kChunkBytes + row % kRows * 4;
    const int64_t nibble = column % kColumns / 2 + column % 2 * 4;
    const int code = word[nibble / 2] >> (nibble % 2 * 4) & 15;
    const int bits = scales[first * columns / block + column / block * kRows + row % kRows];
    const double scale = !e4m3      ? std::ldexp(1., bits - 127)
                         : bits < 8 ? std::ldexp(bits, -9)
                                    : std::ldexp(8 + bits % 8, bits / 8 - 10);
    return (code & 8 ? -1 : 1) * kValues[code & 7] * scale * (e4m3 ? .03125 : 1.);
  }

  double dot(int64_t expert, int64_t row, const double* with) const {
    double sum = bias.empty() ? 0. : bias[expert * rows + row];
    for (int64_t i = 0; i < columns; ++i) sum += value(expert, row, i) * with[i];
    return sum;
  }
};

// The largest relative error of a token.
double check(int64_t tokens, int64_t hidden_size, int64_t intermediate_size, bool e4m3, bool gated, bool bfloat16) {
  const int64_t experts = 3, top_k = 2;
  const Packed w13(experts, intermediate_size * (gated ? 2 : 1), hidden_size, e4m3, gated);
  const Packed w2(experts, hidden_size, intermediate_size, e4m3, gated);
  std::vector<float> hidden(tokens * hidden_size), weights(tokens * top_k), out(tokens * hidden_size, NAN);
  std::vector<uint16_t> hidden16(hidden.size()), out16(out.size(), 0x7FC0);
  std::vector<int64_t> ids(tokens * top_k);
  for (size_t i = 0; i < hidden.size(); ++i) {
    hidden16[i] = bfloat16_of(static_cast<float>(rng() % 2001) / 1000 - 1);
    hidden[i] = float_of(uint32_t{hidden16[i]} << 16);
  }
  for (auto& each : ids) each = static_cast<int64_t>(rng() % (experts + 1)) - 1;  // -1 is no expert
  for (auto& each : weights) each = static_cast<float>(rng() % 1000 + 1) / 1000;
  const Activation activation{kSilu, kClamp, gated, 1.7f, 1.f, 7.f, 7.f};
  const ScaleKind scale_kind = e4m3 ? ScaleKind::kE4m3 : ScaleKind::kE8m0;
  Call call{w13.weight(), w2.weight(), bfloat16 ? static_cast<void*>(hidden16.data()) : hidden.data(), ids.data(),
            weights.data(), bfloat16 ? static_cast<void*>(out16.data()) : out.data(), nullptr, tokens, top_k, experts,
            hidden_size, intermediate_size, scale_kind, bfloat16, bfloat16, 2, activation};
  const std::unique_ptr<uint8_t[]> scratch(new uint8_t[fp4_kernel()->scratch_bytes(call)]);  // not initialised
  call.scratch = scratch.get();
  fp4_kernel()->run(call);
  double worst = 0;
  std::vector<double> h(intermediate_size), x(hidden_size), expected(hidden_size);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t i = 0; i < hidden_size; ++i) x[i] = hidden[token * hidden_size + i];
    expected.assign(hidden_size, 0.);
    for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
      if (ids[slot] < 0) continue;
      for (int64_t i = 0; i < intermediate_size; ++i) {
        const int64_t row = gated ? i / kRows * 2 * kRows + i % kRows : i;
        const double gate = std::fmin(w13.dot(ids[slot], row, x.data()), 7.);
        h[i] = gate / (1 + std::exp(-1.7f * gate));
        if (gated) h[i] *= std::fmax(std::fmin(w13.dot(ids[slot], row + kRows, x.data()), 7.), -7.) + 1;
      }
      for (int64_t i = 0; i < hidden_size; ++i) expected[i] += weights[slot] * w2.dot(ids[slot], i, h.data());
    }
    double error = 0, norm = 1e-30;
    for (int64_t i = 0; i < hidden_size; ++i) {
      const int64_t at = token * hidden_size + i;
      const double got = bfloat16 ? float_of(uint32_t{out16[at]} << 16) : out[at];
      error += (got - expected[i]) * (got - expected[i]);
      norm += expected[i] * expected[i];
    }
    worst = std::fmax(worst, std::sqrt(error / norm));
    if (error != error) worst = INFINITY;
  }
  return worst;
}

}  // namespace

int main() {
  double worst[2] = {};
  for (const bool bfloat16 : {false, true})
    for (const bool e4m3 : {false, true})
      for (const bool gated : {false, true})
        for (const int64_t tokens : {1, 2, 7, 15, 33}) {
          if (kPairs && !bfloat16) continue;
          worst[bfloat16] = std::fmax(worst[bfloat16], check(tokens, 96, 32, e4m3, gated, bfloat16));
          worst[bfloat16] = std::fmax(worst[bfloat16], check(tokens, 32, 160, e4m3, gated, bfloat16));
        }
  std::printf("%g %g\n", worst[0], worst[1]);
  return worst[0] < 3e-5 && worst[1] < 1.5e-2 ? EXIT_SUCCESS : EXIT_FAILURE;
}
