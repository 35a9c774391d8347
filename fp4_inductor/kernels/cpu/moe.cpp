// A mixture-of-experts block on packed FP4 weights. Every byte of a routed expert comes from memory once a call, or
// once in kMaxSlots slots, and no byte of another expert does.
//
// Slots, the (token, expert) pairs, are sorted by expert and cut into panels of up to Lanes::kMaxTokens slots of one
// expert, whose activations stand step by step: [columns / 8][steps][slots]. Threads first gather the hidden states
// into panels, then share the rows of w13 and write h into panels of the same slots, then share the rows of w2, expert
// by expert as soon as its h is whole. A thread owns the output rows that it computes, and adds experts in their order:
// results depend on no thread count.
#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "activation.h"
#include "call.h"
#include "product.h"

namespace {

using Input = Lanes::Input;
constexpr bool kPairs = Lanes::kPairs;

constexpr int64_t kMaxSlots = 1 << 14;     // whose activations are held at once: beyond, tokens take turns
constexpr int64_t kAheadBytes = 16384;     // of codes that are fetched before they are multiplied, at least
constexpr int64_t kSerialBytes = 1 << 18;  // of codes by slots, below which threads cost more than they bring

using Multiply = void (*)(const Rows&, const Rows&, const Input*, int64_t, const float*, const float*, float*);

template <ScaleKind kind, int... tokens>
constexpr std::array<Multiply, sizeof...(tokens)> products(std::integer_sequence<int, tokens...>) {
  return {multiply<kind, tokens + 1>...};
}

template <ScaleKind kind>
constexpr auto kProducts = products<kind>(std::make_integer_sequence<int, Lanes::kMaxTokens>());

constexpr float kOnes[kRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, kZeros[kRows] = {};

// Where one weight's rows stand, and how they are multiplied.
class Matrix {
 public:
  Matrix(const Weight& weight, int64_t rows, int64_t columns, ScaleKind kind)
      : weight_(weight),
        rows_(rows),
        columns_(columns),
        scale_columns_(columns / block_columns(kind)),
        products_(kind == ScaleKind::kE8m0 ? kProducts<ScaleKind::kE8m0>.data() : kProducts<ScaleKind::kE4m3>.data()) {}

  Rows rows(int64_t expert, int64_t block) const {
    const int64_t row = expert * rows_ + block * kRows;
    return {weight_.codes + row * columns_ / 2, weight_.scales + row * scale_columns_};
  }

  // Sixteen rows of an expert by a panel, with row factors and biases, while others are fetched: out [slots][16].
  void multiply_block(int64_t expert, int64_t block, const Rows& ahead, const Input* panel, int64_t slots,
                      float* out) const {
    const int64_t row = expert * rows_ + block * kRows;
    products_[slots - 1](rows(expert, block), ahead, panel, columns_, weight_.factors ? weight_.factors + row : kOnes,
                         weight_.bias ? weight_.bias + row : kZeros, out);
  }

  // How many blocks ahead of use the codes of one are fetched.
  int64_t blocks_ahead() const { return 1 + kAheadBytes / (columns_ * kRows / 2 + 1); }

 private:
  Weight weight_;
  int64_t rows_, columns_, scale_columns_;
  const Multiply* products_;
};

struct Panel {
  int64_t expert, first, slots;  // first of the sorted slots
};

struct Routes {
  std::vector<int64_t> slots;            // sorted by expert, and by token where it is the same
  std::vector<int64_t> tokens;           // of each slot
  std::vector<Panel> panels;
  std::vector<int64_t> expert_panels;    // where each routed expert's panels begin, and the end
};

Routes sort_slots(const int64_t* ids, int64_t num_slots, int64_t top_k, int64_t num_experts) {
  std::vector<int64_t> end(num_experts + 1, 0);
  auto known = [&](int64_t id) { return id >= 0 && id < num_experts; };
  for (int64_t i = 0; i < num_slots; ++i)
    if (known(ids[i])) ++end[ids[i] + 1];
  for (int64_t expert = 0; expert < num_experts; ++expert) end[expert + 1] += end[expert];
  Routes routes;
  routes.slots.resize(end[num_experts]);
  for (int64_t i = 0; i < num_slots; ++i)
    if (known(ids[i])) routes.slots[end[ids[i]]++] = i;
  routes.tokens.reserve(routes.slots.size());
  for (const int64_t slot : routes.slots) routes.tokens.push_back(slot / top_k);
  int64_t first = 0;
  for (int64_t expert = 0; expert < num_experts; first = end[expert++]) {
    const int64_t count = end[expert] - first;
    if (!count) continue;
    routes.expert_panels.push_back(static_cast<int64_t>(routes.panels.size()));
    const int64_t parts = (count + Lanes::kMaxTokens - 1) / Lanes::kMaxTokens;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = count * part / parts;
      routes.panels.push_back({expert, first + begin, count * (part + 1) / parts - begin});
    }
  }
  routes.expert_panels.push_back(static_cast<int64_t>(routes.panels.size()));
  return routes;
}

// Inputs of one slot in a panel for so many columns.
constexpr int64_t inputs_of(int64_t columns) { return columns / kColumns * Lanes::kSteps; }

void gather_panel(const Call& call, const Routes& routes, const Panel& panel, int64_t first_token, Input* inputs) {
  constexpr int64_t kAhead = 512;  // inputs, whose memory is made ready to be written
  const int64_t columns = call.hidden_size;
  const int64_t* tokens = routes.tokens.data() + panel.first;
  for (int64_t column = 0; column < columns; column += kRows) {
    for (int64_t slot = 0; slot < panel.slots; ++slot) {
      const int64_t from = (first_token + tokens[slot]) * columns + column;
      Input found[inputs_of(kRows)];
      if constexpr (kPairs) {
        std::memcpy(found, static_cast<const uint16_t*>(call.hidden) + from, sizeof found);
      } else if (call.hidden_is_bfloat16) {
        float values[kRows];
        const uint16_t* given = static_cast<const uint16_t*>(call.hidden) + from;
        for (int i = 0; i < kRows; ++i) values[i] = float_of(uint32_t{given[i]} << 16);
        Lanes::to_inputs(values, found);
      } else {
        Lanes::to_inputs(static_cast<const float*>(call.hidden) + from, found);
      }
      Input* group = inputs + inputs_of(column) * panel.slots;
      __builtin_prefetch(group + slot * inputs_of(kRows) + kAhead, 1);
      for (int64_t i = 0; i < inputs_of(kRows); ++i) group[slot + i * panel.slots] = found[i];
    }
  }
}

// Rows [block * 16, block * 16 + 16) of h for one slot, which are columns of w2.
FP4_INLINE void put_rows(const float* rows, int64_t block, const Panel& panel, int64_t slot, Input* inputs) {
  Input found[inputs_of(kRows)];
  Lanes::to_inputs(rows, found);
  Input* to = inputs + inputs_of(block * kRows) * panel.slots + slot;
  for (int64_t i = 0; i < inputs_of(kRows); ++i) to[i * panel.slots] = found[i];
}

struct Range {
  int64_t begin, end;

  int64_t size() const { return end - begin; }
  bool empty() const { return begin >= end; }
};

// Pieces of work in order, each smaller than the one before, so that threads end at about the same time.
class Work {
 public:
  Work(int64_t count, int64_t threads) : count_(count), shares_(threads * 2) {}

  // The next; an empty one where nothing is left.
  Range claim() {
    constexpr int64_t kSmallest = 4;
    int64_t begin = next_.load(std::memory_order_relaxed), end;
    do {
      if (begin >= count_) return {count_, count_};
      end = std::min(count_, begin + std::max(kSmallest, (count_ - begin) / shares_));
    } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return {begin, end};
  }

 private:
  const int64_t count_, shares_;
  std::atomic<int64_t> next_{0};
};

class Layer {
 public:
  explicit Layer(const Call& call)
      : call_(call),
        w13_(call.w13, call.intermediate_size * (call.activation.gated ? 2 : 1), call.hidden_size, call.scale_kind),
        w2_(call.w2, call.hidden_size, call.intermediate_size, call.scale_kind),
        activate_(choose_activation(call.activation.kind)),
        blocks_(call.intermediate_size / kRows),
        done_(new std::atomic<int64_t>[call.num_experts]) {}

  void run(int64_t first_token, int64_t num_tokens) {
    const int64_t slots = num_tokens * call_.top_k;
    first_token_ = first_token;
    num_tokens_ = num_tokens;
    routes_ = sort_slots(call_.ids + first_token * call_.top_k, slots, call_.top_k, call_.num_experts);
    experts_ = static_cast<int64_t>(routes_.expert_panels.size()) - 1;
    gathered_ = static_cast<Input*>(call_.scratch);
    h_ = gathered_ + slots * inputs_of(call_.hidden_size);
    sums_ = call_.out_is_bfloat16 ? reinterpret_cast<float*>(h_ + slots * inputs_of(call_.intermediate_size))
                                  : static_cast<float*>(call_.out) + first_token * call_.hidden_size;
    for (int64_t expert = 0; expert < experts_; ++expert) done_[expert].store(0, std::memory_order_relaxed);
    const auto panels = static_cast<int64_t>(routes_.panels.size());
    const bool gathers = std::any_of(routes_.panels.begin(), routes_.panels.end(),
                                     [&](const Panel& panel) { return !stands(panel); });
    const int64_t rows = call_.intermediate_size * (call_.activation.gated ? 3 : 2);
    const int64_t threads = slots * rows * call_.hidden_size / 2 < kSerialBytes ? 1 : call_.num_threads;
    Work first(experts_ * blocks_, threads), second(call_.hidden_size / kRows, threads);
#pragma omp parallel num_threads(threads)
    {
      if (gathers) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t p = 0; p < panels; ++p)
          if (!stands(routes_.panels[p]))
            gather_panel(call_, routes_, routes_.panels[p], first_token, gathered_ + at(p, call_.hidden_size));
      }
      second_products(second, first_products(first, second));
    }
  }

 private:
  int64_t at(int64_t panel, int64_t columns) const { return routes_.panels[panel].first * inputs_of(columns); }

  // Bfloat16 hidden states of one slot are a panel where they stand.
  bool stands(const Panel& panel) const {
    return kPairs && panel.slots == 1 && reinterpret_cast<uintptr_t>(call_.hidden) % sizeof(Input) == 0;
  }

  const Input* hidden(int64_t p) const {
    const Panel& panel = routes_.panels[p];
    if (!stands(panel)) return gathered_ + at(p, call_.hidden_size);
    return static_cast<const Input*>(call_.hidden) +
           (first_token_ + routes_.tokens[panel.first]) * inputs_of(call_.hidden_size);
  }

  // The number of the expert that is routed so many others after the first.
  int64_t number(int64_t expert) const { return routes_.panels[routes_.expert_panels[expert]].expert; }

  // Rows of w13, experts one after the other, until none are left; returns the first rows of w2 to go on with.
  Range first_products(Work& work, Work& then) {
    const int64_t rows = call_.activation.gated ? 2 : 1;
    const int64_t ahead = (w13_.blocks_ahead() + rows - 1) / rows;
    Range piece = work.claim(), next = work.claim(), out{};
    if (next.empty()) out = then.claim();
    for (; !piece.empty(); piece = next, next = work.claim()) {
      if (next.empty() && out.empty()) out = then.claim();
      for (int64_t i = piece.begin; i < piece.end; ++i) {
        int64_t to = i + ahead;
        if (to >= piece.end) to += next.begin - piece.end;
        Rows fetch[2];
        for (int64_t row = 0; row < rows; ++row) {
          if (to < std::max(piece.end, next.end))
            fetch[row] = w13_.rows(number(to / blocks_), to % blocks_ * rows + row);
          else
            fetch[row] = w2_.rows(number(0), std::min(out.begin, call_.hidden_size / kRows - 1));
        }
        first_product(i / blocks_, i % blocks_, fetch);
        done_[i / blocks_].fetch_add(1, std::memory_order_release);
      }
    }
    return out;
  }

  // h for sixteen rows of one expert, or for as many of gate and of up.
  void first_product(int64_t expert, int64_t block, const Rows* fetch) {
    float gate[Lanes::kMaxTokens * kRows], up[Lanes::kMaxTokens * kRows];
    const bool gated = call_.activation.gated;
    const int64_t first = routes_.expert_panels[expert];
    for (int64_t p = first; p < routes_.expert_panels[expert + 1]; ++p) {
      const Panel& panel = routes_.panels[p];
      Input* h = h_ + at(p, call_.intermediate_size);
      Input* to = h + inputs_of(block * kRows) * panel.slots;
      for (int64_t i = 0; i < inputs_of(kRows) * panel.slots; i += 16) __builtin_prefetch(to + i, 1);
      for (int64_t row = 0; row <= gated; ++row) {
        const int64_t at = gated ? 2 * block + row : block;
        const Rows& ahead = p == first ? fetch[row] : w13_.rows(panel.expert, at);
        w13_.multiply_block(panel.expert, at, ahead, hidden(p), panel.slots, row ? up : gate);
      }
      for (int64_t slot = 0; slot < panel.slots; ++slot) {
        activate_(call_.activation, gate + slot * kRows, up + slot * kRows);
        put_rows(gate + slot * kRows, block, panel, slot, h);
      }
    }
  }

  // Output rows of all tokens, from those of ``piece`` on, until none are left.
  void second_products(Work& work, Range piece) {
    const int64_t ahead = w2_.blocks_ahead();
    for (Range next; !piece.empty(); piece = next) {
      next = work.claim();
      const int64_t row = piece.begin * kRows, rows = piece.size() * kRows;
      for (int64_t token = 0; token < num_tokens_; ++token)
        std::fill_n(sums_ + token * call_.hidden_size + row, rows, 0.f);
      for (int64_t expert = 0; expert < experts_; ++expert) {
        for (int64_t polls = 1; done_[expert].load(std::memory_order_acquire) < blocks_; ++polls)
          if (polls % 64 == 0) std::this_thread::yield();
        for (int64_t block = piece.begin; block < piece.end; ++block) {
          const int64_t to = expert * piece.size() + block - piece.begin + ahead;
          const int64_t after = to - experts_ * piece.size();
          second_product(expert, block,
                         after < 0 ? w2_.rows(number(to / piece.size()), piece.begin + to % piece.size())
                                   : w2_.rows(number(0), after < next.size() ? next.begin + after : block));
        }
      }
      if (call_.out_is_bfloat16) round_sums(row, rows);
    }
  }

  // Sixteen rows of one expert's product, added to the sums of its tokens.
  void second_product(int64_t expert, int64_t block, const Rows& fetch) {
    float product[Lanes::kMaxTokens * kRows];
    const float* weights = call_.weights + first_token_ * call_.top_k;
    const int64_t first = routes_.expert_panels[expert];
    for (int64_t p = first; p < routes_.expert_panels[expert + 1]; ++p) {
      const Panel& panel = routes_.panels[p];
      const int64_t* slots = routes_.slots.data() + panel.first;
      const int64_t* tokens = routes_.tokens.data() + panel.first;
      auto sum = [&](int64_t slot) { return sums_ + tokens[slot] * call_.hidden_size + block * kRows; };
      for (int64_t slot = 0; slot < panel.slots; ++slot) __builtin_prefetch(sum(slot), 1);
      const Rows& ahead = p == first ? fetch : w2_.rows(panel.expert, block);
      w2_.multiply_block(panel.expert, block, ahead, h_ + at(p, call_.intermediate_size), panel.slots, product);
      for (int64_t slot = 0; slot < panel.slots; ++slot) {
        float* to = sum(slot);
        for (int i = 0; i < kRows; ++i) to[i] += weights[slots[slot]] * product[slot * kRows + i];
      }
    }
  }

  void round_sums(int64_t row, int64_t rows) {
    for (int64_t token = 0; token < num_tokens_; ++token) {
      const float* sum = sums_ + token * call_.hidden_size + row;
      uint16_t* out = static_cast<uint16_t*>(call_.out) + (first_token_ + token) * call_.hidden_size + row;
      for (int64_t i = 0; i < rows; ++i) out[i] = bfloat16_of(sum[i]);
    }
  }

  const Call& call_;
  Matrix w13_, w2_;
  ActivateRows activate_;
  const int64_t blocks_;  // of sixteen rows of h
  Routes routes_;
  int64_t experts_ = 0, first_token_ = 0, num_tokens_ = 0;
  std::unique_ptr<std::atomic<int64_t>[]> done_;  // blocks of each routed expert's h
  Input* gathered_ = nullptr;                     // panels of hidden states
  Input* h_ = nullptr;                            // panels of what w13 and the activation made of them
  float* sums_ = nullptr;                         // [tokens, H]
};

// Tokens whose activations are held at once.
int64_t tokens_at_once(const Call& call) {
  return std::max(int64_t{1}, std::min(call.num_tokens, kMaxSlots / call.top_k));
}

// Panels of hidden states and of h, and float32 sums where the output has none.
int64_t scratch_bytes(const Call& call) {
  constexpr int64_t kInputBytes = sizeof(Input), kSumBytes = sizeof(float);
  const int64_t inputs = call.top_k * (inputs_of(call.hidden_size) + inputs_of(call.intermediate_size));
  const int64_t sums = call.out_is_bfloat16 ? call.hidden_size : 0;
  return tokens_at_once(call) * (inputs * kInputBytes + sums * kSumBytes);
}

void run(const Call& call) {
  Layer layer(call);
  const int64_t tokens = tokens_at_once(call);
  for (int64_t first = 0; first < call.num_tokens; first += tokens)
    layer.run(first, std::min(tokens, call.num_tokens - first));
}

}  // namespace

extern "C" const Kernel* fp4_kernel() {
  static constexpr Kernel kKernel{scratch_bytes, run};
  return &kKernel;
}
