// Expert activations in float32, as ``ActivationSpec`` defines them.
#pragma once

#include <cmath>

#include "lanes.h"

// To half a unit in the last place or so, in operations that compilers turn into vectors. Without a branch: a NaN
// stays one, and what is too large or too small ends at the largest or smallest normal number.
FP4_INLINE float exponential(float x) {
  x = x > 88.37f ? 88.37f : x;
  x = x < -87.3f ? -87.3f : x;
  constexpr float kShift = 0x1.8p23f;  // adding it rounds to an integer, which stands in the low bits
  const float shifted = x * 1.44269504f + kShift;
  const float power = shifted - kShift;
  const float r = (x - power * 0.693145752f) - power * 1.42860677e-6f;  // ln 2 in two parts
  float y = 1.98412698e-4f;
  for (const float coefficient : {1.38888889e-3f, 8.33333333e-3f, 4.16666667e-2f, 1.66666667e-1f, .5f, 1.f, 1.f})
    y = y * r + coefficient;
  return y * float_of((bits_of(shifted) + 127) << 23);
}

FP4_INLINE float sigmoid(float x) { return 1.f / (1.f + exponential(-x)); }
FP4_INLINE float softcap(float x, float limit) { return std::tanh(x / limit) * limit; }

// x * s(x), with another factor in the place of x.
template <Kind kind>
FP4_INLINE float activate(float x, float factor, float alpha) {
  if constexpr (kind == kSilu) return factor * sigmoid(x * alpha);
  if constexpr (kind == kGelu) return factor * (.5f * (1.f + std::erf(x * .707106781f)));
  if constexpr (kind == kGeluTanh) return factor * sigmoid(1.59576912f * (x + .044715f * x * x * x));
  if constexpr (kind == kRelu) return x > 0.f ? factor : 0.f;
  return factor * (x < 0.f ? 0.f : x);
}

// Sixteen rows of one token: gate becomes the result. Comparisons are such that a NaN passes.
template <Kind kind>
void activate_rows(const Activation& act, float* gate, const float* up) {
  float cap[kRows];
  for (int i = 0; i < kRows; ++i) {
    float x = gate[i];
    if (act.bound == kClamp) x = x > act.limit ? act.limit : x;
    cap[i] = gate[i] = x;
  }
  if (act.bound == kSoftcap && act.limit < INFINITY)
    for (int i = 0; i < kRows; ++i) cap[i] = softcap(cap[i], act.limit);
  for (int i = 0; i < kRows; ++i) gate[i] = activate<kind>(gate[i], cap[i], act.alpha);
  if (act.bound == kClampActivated)
    for (int i = 0; i < kRows; ++i) gate[i] = gate[i] > act.limit ? act.limit : gate[i];
  if (!act.gated) return;
  if (act.bound == kSoftcap && act.up_limit < INFINITY) {
    for (int i = 0; i < kRows; ++i) gate[i] *= softcap(up[i], act.up_limit) + act.beta;
  } else {
    for (int i = 0; i < kRows; ++i) {
      float x = up[i];
      x = x > act.up_limit ? act.up_limit : x;
      x = x < -act.up_limit ? -act.up_limit : x;
      gate[i] *= x + act.beta;
    }
  }
}

using ActivateRows = void (*)(const Activation&, float*, const float*);

inline ActivateRows choose_activation(Kind kind) {
  constexpr ActivateRows kChoices[] = {activate_rows<kSilu>, activate_rows<kGelu>, activate_rows<kGeluTanh>,
                                       activate_rows<kRelu>, activate_rows<kRelu2>};
  return kChoices[kind];
}
