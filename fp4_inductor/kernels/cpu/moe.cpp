// A mixture-of-experts block on packed FP4 weights. Every byte of a routed expert comes from memory once a call, or
// once in max_tokens tokens, and no byte of another expert does.
//
// Slots, the (token, expert) pairs, are sorted by expert and cut into panels of up to Lanes::kMaxTokens slots of one
// expert, whose activations stand step by step: [columns / 8][steps][slots]. Threads first gather the hidden states
// into panels, then share the rows of w13 and write h into panels of the same slots, then share the rows of w2. A
// thread owns the output rows that it computes, and adds experts in their order: results depend on no thread count.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "activation.h"
#include "product.h"

namespace {

using Input = Lanes::Input;
constexpr bool kPairs = Lanes::kPairs;

// Pieces of work for each thread: more even out what threads are delayed by, fewer are longer streams of memory.
constexpr int64_t kShares = 8;
constexpr int64_t kOutShares = 2;  // these take equally long
constexpr int64_t kSerialBytes = 1 << 18;  // of codes by slots, below which threads cost more than they bring

}  // namespace

extern "C" struct Weight {
  const uint8_t* codes;   // [E, N / 16, K / 8, 16, 4]
  const uint8_t* scales;  // [E, N / 16, K / block, 16]
  const float* factors;   // [E, N] or null
  const float* bias;      // [E, N] or null
};

extern "C" struct Call {
  Weight w13;               // rows of gate and up in turn, sixteen each, where it is gated
  Weight w2;
  const void* hidden;       // [T, H]
  const int64_t* ids;       // [T, k]; others than experts count for nothing
  const float* weights;     // [T, k]
  void* out;                // [T, H]
  void* scratch;            // panels of hidden states and of h, and float32 sums [tokens, H] if out is bfloat16
  int64_t num_tokens, max_tokens, top_k, num_experts, hidden_size, intermediate_size;
  int32_t scale_kind, hidden_is_bfloat16, out_is_bfloat16, num_threads;
  Activation activation;
};

namespace {

using Multiply = void (*)(const uint8_t*, const uint8_t*, const Input*, int64_t, float*);

template <ScaleKind kind, int... tokens>
constexpr std::array<Multiply, sizeof...(tokens)> products(std::integer_sequence<int, tokens...>) {
  return {multiply<kind, tokens + 1>...};
}

template <ScaleKind kind>
constexpr auto kProducts = products<kind>(std::make_integer_sequence<int, Lanes::kMaxTokens>());

// Where one weight's rows stand, and how they are multiplied.
class Matrix {
 public:
  Matrix(const Weight& weight, int64_t rows, int64_t columns, ScaleKind kind)
      : weight_(weight),
        rows_(rows),
        columns_(columns),
        scale_columns_(columns / block_columns(kind)),
        products_(kind == ScaleKind::kE8m0 ? kProducts<ScaleKind::kE8m0>.data() : kProducts<ScaleKind::kE4m3>.data()) {}

  // Sixteen rows of an expert by a panel, with row factors and biases: out [slots][16].
  void multiply_block(int64_t expert, int64_t block, const Input* panel, int64_t slots, float* out) const {
    const int64_t row = expert * rows_ + block * kRows;
    const uint8_t* codes = weight_.codes + row * columns_ / 2;
    products_[slots - 1](codes, weight_.scales + row * scale_columns_, panel, columns_, out);
    if (!weight_.factors && !weight_.bias) return;
    for (int64_t slot = 0; slot < slots; ++slot, out += kRows) {
      if (weight_.factors)
        for (int i = 0; i < kRows; ++i) out[i] *= weight_.factors[row + i];
      if (weight_.bias)
        for (int i = 0; i < kRows; ++i) out[i] += weight_.bias[row + i];
    }
  }

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

class Layer {
 public:
  explicit Layer(const Call& call)
      : call_(call),
        w13_(call.w13, call.intermediate_size * (call.activation.gated ? 2 : 1), call.hidden_size, kind()),
        w2_(call.w2, call.hidden_size, call.intermediate_size, kind()),
        activate_(choose_activation(call.activation.kind)) {}

  void run(int64_t first_token, int64_t num_tokens) {
    const int64_t slots = num_tokens * call_.top_k;
    routes_ = sort_slots(call_.ids + first_token * call_.top_k, slots, call_.top_k, call_.num_experts);
    const auto panels = static_cast<int64_t>(routes_.panels.size());
    const auto experts = static_cast<int64_t>(routes_.expert_panels.size()) - 1;
    const int64_t blocks = call_.intermediate_size / kRows, out_blocks = call_.hidden_size / kRows;
    const int64_t group = group_size(blocks, experts * blocks, kShares);
    const int64_t out_group = group_size(out_blocks, out_blocks, kOutShares);
    const int64_t groups = (blocks + group - 1) / group, out_groups = (out_blocks + out_group - 1) / out_group;
    gathered_ = static_cast<Input*>(call_.scratch);
    h_ = gathered_ + slots * inputs_of(call_.hidden_size);
    sums_ = call_.out_is_bfloat16 ? reinterpret_cast<float*>(h_ + slots * inputs_of(call_.intermediate_size))
                                  : static_cast<float*>(call_.out) + first_token * call_.hidden_size;
    const int64_t rows = call_.intermediate_size * (call_.activation.gated ? 3 : 2);
    [[maybe_unused]] const bool serial = slots * rows * call_.hidden_size / 2 < kSerialBytes;
#pragma omp parallel num_threads(serial ? 1 : call_.num_threads)
    {
#pragma omp for schedule(dynamic, 1)
      for (int64_t p = 0; p < panels; ++p)
        gather_panel(call_, routes_, routes_.panels[p], first_token, gathered_ + at(p, call_.hidden_size));
#pragma omp for schedule(dynamic, 1)
      for (int64_t item = 0; item < experts * groups; ++item) {
        const int64_t begin = item % groups * group;
        first_product(item / groups, begin, std::min(begin + group, blocks));
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t item = 0; item < out_groups; ++item) {
        const int64_t begin = item * out_group;
        second_product(first_token, num_tokens, experts, begin, std::min(begin + out_group, out_blocks));
      }
    }
  }

 private:
  ScaleKind kind() const { return static_cast<ScaleKind>(call_.scale_kind); }
  int64_t at(int64_t panel, int64_t columns) const { return routes_.panels[panel].first * inputs_of(columns); }

  // Blocks of one expert that a thread takes at once, of all that there are.
  int64_t group_size(int64_t blocks, int64_t all, int64_t shares) const {
    return std::clamp<int64_t>(all / (call_.num_threads * shares), 1, blocks);
  }

  // h for rows [begin * 16, end * 16) of one expert.
  void first_product(int64_t expert, int64_t begin, int64_t end) {
    float gate[Lanes::kMaxTokens * kRows], up[Lanes::kMaxTokens * kRows];
    const bool gated = call_.activation.gated;
    for (int64_t block = begin; block < end; ++block) {
      for (int64_t p = routes_.expert_panels[expert]; p < routes_.expert_panels[expert + 1]; ++p) {
        const Panel& panel = routes_.panels[p];
        const Input* input = gathered_ + at(p, call_.hidden_size);
        w13_.multiply_block(panel.expert, gated ? 2 * block : block, input, panel.slots, gate);
        if (gated) w13_.multiply_block(panel.expert, 2 * block + 1, input, panel.slots, up);
        for (int64_t slot = 0; slot < panel.slots; ++slot) {
          activate_(call_.activation, gate + slot * kRows, up + slot * kRows);
          put_rows(gate + slot * kRows, block, panel, slot, h_ + at(p, call_.intermediate_size));
        }
      }
    }
  }

  // Output rows [begin * 16, end * 16) of all tokens.
  void second_product(int64_t first_token, int64_t num_tokens, int64_t experts, int64_t begin, int64_t end) {
    float product[Lanes::kMaxTokens * kRows];
    const int64_t row = begin * kRows, rows = (end - begin) * kRows, hidden_size = call_.hidden_size;
    const float* weights = call_.weights + first_token * call_.top_k;
    for (int64_t token = 0; token < num_tokens; ++token)
      std::fill_n(sums_ + token * hidden_size + row, rows, 0.f);
    for (int64_t expert = 0; expert < experts; ++expert) {
      for (int64_t block = begin; block < end; ++block) {
        for (int64_t p = routes_.expert_panels[expert]; p < routes_.expert_panels[expert + 1]; ++p) {
          const Panel& panel = routes_.panels[p];
          const int64_t* slots = routes_.slots.data() + panel.first;
          const int64_t* tokens = routes_.tokens.data() + panel.first;
          auto sum = [&](int64_t slot) { return sums_ + tokens[slot] * hidden_size + block * kRows; };
          for (int64_t slot = 0; slot < panel.slots; ++slot) __builtin_prefetch(sum(slot), 1);
          w2_.multiply_block(panel.expert, block, h_ + at(p, call_.intermediate_size), panel.slots, product);
          for (int64_t slot = 0; slot < panel.slots; ++slot) {
            float* to = sum(slot);
            for (int i = 0; i < kRows; ++i) to[i] += weights[slots[slot]] * product[slot * kRows + i];
          }
        }
      }
    }
    if (!call_.out_is_bfloat16) return;
    for (int64_t token = 0; token < num_tokens; ++token) {
      const float* sum = sums_ + token * hidden_size + row;
      uint16_t* out = static_cast<uint16_t*>(call_.out) + (first_token + token) * hidden_size + row;
      for (int64_t i = 0; i < rows; ++i) out[i] = bfloat16_of(sum[i]);
    }
  }

  const Call& call_;
  Matrix w13_, w2_;
  ActivateRows activate_;
  Routes routes_;
  Input* gathered_ = nullptr;  // panels of hidden states
  Input* h_ = nullptr;         // panels of what w13 and the activation made of them
  float* sums_ = nullptr;      // [tokens, H]
};

}  // namespace

extern "C" void fp4_moe(const Call* call) {
  Layer layer(*call);
  for (int64_t first = 0; first < call->num_tokens; first += call->max_tokens)
    layer.run(first, std::min(call->max_tokens, call->num_tokens - first));
}

extern "C" int64_t fp4_call_bytes() { return sizeof(Call); }
