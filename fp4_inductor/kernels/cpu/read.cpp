// The yardstick of the kernel: read every byte of the routed experts once, sum it, and do nothing else.
#include <algorithm>
#include <cstdint>
#include <vector>

// tensors: one a weight, each of expert_words[i] words an expert. ids: [num_ids]; others than experts do not count.
extern "C" uint64_t fp4_read(const uint64_t* const* tensors, const int64_t* expert_words, int64_t num_tensors,
                             const int64_t* ids, int64_t num_ids, int64_t num_experts, int32_t num_threads) {
  constexpr int64_t kPiece = 1 << 14;  // words that a thread takes at once
  struct Piece {
    const uint64_t* begin;
    int64_t words;
  };
  std::vector<bool> routed(num_experts, false);
  for (int64_t i = 0; i < num_ids; ++i)
    if (ids[i] >= 0 && ids[i] < num_experts) routed[ids[i]] = true;
  std::vector<Piece> pieces;
  for (int64_t tensor = 0; tensor < num_tensors; ++tensor) {
    const int64_t words = expert_words[tensor];
    for (int64_t expert = 0; expert < num_experts; ++expert)
      for (int64_t at = 0; routed[expert] && at < words; at += kPiece)
        pieces.push_back({tensors[tensor] + expert * words + at, std::min(kPiece, words - at)});
  }
  uint64_t sum = 0;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) reduction(+ : sum)
  for (size_t i = 0; i < pieces.size(); ++i) {
    uint64_t lanes[32] = {};
    int64_t at = 0;
    for (; at + 32 <= pieces[i].words; at += 32)
      for (int lane = 0; lane < 32; ++lane) lanes[lane] += pieces[i].begin[at + lane];
    for (; at < pieces[i].words; ++at) lanes[0] += pieces[i].begin[at];
    for (const uint64_t lane : lanes) sum += lane;
  }
  return sum;
}
