// Inference kernels: products with quantized weights, attention over a paged cache, and whole decoder layers for a few
// rows (one new token of each sequence) by one team of threads (Deep-Fusion of DeepSpeed-Inference, arXiv:2207.00032).
// Everything between two barriers is fused; sums and what one part hands to the next are fp32.
#include <limits>

#include "dense.h"
#include "lowbit.h"
#include "mathematics.h"
#include "paged.h"

namespace {

// ---- linear layers ---------------------------------------------------------------------------------------------------

enum Kind { DENSE = 0, FLOATS4 = 2, NIBBLES = 4, BYTES = 8 };

struct Linear {
  int64_t kind;
  const void* weight;  // dense [out, width] of type `type`, or codes
  const void* scale;   // [out, width / group] of type `type`
  const void* zero;    // the same, or null
  const float* bias;   // [out] or null
  int64_t type, out, width, group;
};

// Products of one input with several weights. Inputs are coded once for all that have the same groups.
struct Team {
  Scratch own;
  std::vector<uint16_t> low;
  Inputs in{};
  int64_t coded = -1;  // the group that the input's codes were made for

  void read(InputStore& store, const float* x, int64_t rows, const Linear& t) {
    if (t.kind == DENSE) return;
    const int64_t wanted = t.group < t.width ? t.group : 0;
    if (coded == wanted) return;
#pragma omp barrier
    in = store.make(rows, t.width, t.group);  // there is room: nothing moves
    team_code(in, x, F32, false, own);
    coded = wanted;
  }
  // The product of `some` rows from `first` of the `rows` that are coded together.
  void product(InputStore& store, const float* x, int64_t rows, const Linear& t, const Output& o, int64_t first,
               int64_t some) {
    read(store, x, rows, t);
    const Inputs all = in;
    in.rows = some;
    in.codes += first * in.stride;
    in.scale += first * in.groups;
    in.sum += first * in.groups;
    multiply(x + first * t.width, some, t, o);
    in = all;
  }
  void product(InputStore& store, const float* x, int64_t rows, const Linear& t, const Output& o) {
    read(store, x, rows, t);
    multiply(x, rows, t, o);
  }
  void multiply(const float* x, int64_t rows, const Linear& t, const Output& o) {
    if (t.kind == DENSE) return team_dense(int(t.type), t.weight, t.out, t.width, x, rows, o, low);
    const Weight w{static_cast<const uint8_t*>(t.weight), t.scale, t.zero, int(t.type), t.out, t.width / t.group};
    if (t.kind == NIBBLES) team_product<Nibbles>(w, in, o, own);
    else if (t.kind == FLOATS4) team_product<Floats4>(w, in, o, own);
    else team_product<Bytes>(w, in, o, own);
  }
};

// ---- whole layers ----------------------------------------------------------------------------------------------------

struct Norm {
  const void* weight;  // [size] of `type`
  const void* bias;    // or null
  int64_t type, centered;  // centered: LayerNorm, else RMSNorm
  double eps;
};

enum Act { SILU = 0, GELU_TANH_ACT = 1, GELU = 2, RELU = 3 };

struct Layer {
  Norm attention_norm, mlp_norm, q_norm, k_norm;  // the last two may have no weight
  Linear q, k, v, o, gate, up, down;              // gate may have no weight; of a mixture, those of one expert's shape
  Linear router;                                  // of a mixture: [experts, hidden]; without a weight there is none
  const Linear* experts;                          // gate, up and down of each expert
  int64_t chosen, normalized;                     // experts of a row; whether their weights sum to 1
  Cache keys, values;
  int64_t window;
  Changes changes;
};

struct Step {
  float* x;                  // [rows, hidden]: the residual stream, in place
  const void *cosine, *sine;  // [places, width] of type `turns`, or null: no rotary embedding; as in nn/model/rotary.py
  const int64_t *at, *slots;  // [rows]: positions, and where the new keys and values go
  Pages pages;
  int64_t rows, hidden, heads, groups, width, inner, act, turns;
  double query_scale, residual;
};

void norm_row(const float* x, const Norm& n, int64_t size, float* y, float* weight) {
  float mean = 0, square = 0;
  if (n.centered) {
#pragma omp simd reduction(+ : mean)
    for (int64_t i = 0; i < size; i++) mean += x[i];
    mean /= float(size);
  }
#pragma omp simd reduction(+ : square)
  for (int64_t i = 0; i < size; i++) square += (x[i] - mean) * (x[i] - mean);
  const float inverse = 1.0f / std::sqrt(square / float(size) + float(n.eps));
  load<float>(n.weight, int(n.type), 0, size, weight);
#pragma omp simd
  for (int64_t i = 0; i < size; i++) y[i] = (x[i] - mean) * inverse * weight[i];
  if (!n.bias) return;
  load<float>(n.bias, int(n.type), 0, size, weight);
#pragma omp simd
  for (int64_t i = 0; i < size; i++) y[i] += weight[i];
}

void turn(float* x, const float* cosine, const float* sine, int64_t width, float* other) {
  const int64_t half = width / 2;
  std::memcpy(other, x, width * sizeof(float));
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    x[i] = other[i] * cosine[i] + other[i + half] * sine[i];
    x[i + half] = other[i + half] * cosine[i + half] + other[i] * sine[i + half];
  }
}

inline float activated(float v, int64_t act) {
  switch (act) {
    case SILU: return v * sigmoid(v);
    case GELU_TANH_ACT: return 0.5f * v * (1.0f + tanh_of(float(kGelu) * (v + float(kCube) * v * v * v)));
    case GELU: return 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
    default: return v > 0 ? v : 0;
  }
}

// Which rows of a step each expert of a mixture computes.
struct Routes {
  std::vector<int64_t> order, first;  // pairs (row · chosen + place) by expert, and where each expert's begin
  std::vector<int32_t> expert;        // of each pair
  std::vector<float> weight;          // of each pair

  void choose(const float* logits, int64_t rows, int64_t experts, int64_t chosen, bool normalized) {
    const int64_t pairs = rows * chosen;
    order.resize(pairs);
    expert.resize(pairs);
    weight.resize(pairs);
    first.assign(experts + 1, 0);
    std::vector<float> p(experts);
    for (int64_t i = 0; i < rows; i++) {
      const float* x = logits + i * experts;
      const float peak = *std::max_element(x, x + experts);
      float all = 0, taken = 0;
      for (int64_t e = 0; e < experts; e++) all += p[e] = std::exp(x[e] - peak);
      for (int64_t j = 0; j < chosen; j++) {
        const int64_t best = std::max_element(p.begin(), p.end()) - p.begin();
        expert[i * chosen + j] = int32_t(best);
        taken += weight[i * chosen + j] = p[best] / all;
        p[best] = -1;
        first[best + 1]++;
      }
      if (normalized)
        for (int64_t j = 0; j < chosen; j++) weight[i * chosen + j] /= taken;
    }
    for (int64_t e = 0; e < experts; e++) first[e + 1] += first[e];
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t at = 0; at < pairs; at++) order[next[expert[at]]++] = at;
  }
};

struct Rooms {  // shared by a team
  std::vector<float> normed, q, k, v, mixed, gate, up, logits, gathered, results;
  InputStore codes;
  Routes routes;
};

// By a team: up = act(gate) · up, or act(up) without a gate.
void activate(const float* gate, float* up, int64_t n, bool gated, int64_t act) {
#pragma omp for
  for (int64_t at = 0; at < n; at += 64) {
    const int64_t end = std::min(n, at + 64);
    if (gated && act == SILU) {
#pragma omp simd
      for (int64_t i = at; i < end; i++) up[i] *= gate[i] * sigmoid(gate[i]);
    } else if (gated) {
      for (int64_t i = at; i < end; i++) up[i] *= activated(gate[i], act);
    } else {
      for (int64_t i = at; i < end; i++) up[i] = activated(up[i], act);
    }
  }
}

// By a team: a mixture's feed-forward part, added to the residual stream. Each expert's weights are read once.
void mixture(const Step& s, const Layer& layer, Rooms& rooms, Team& team, const float* normed, float* gate, float* up) {
  const int64_t experts = layer.router.out, pairs = s.rows * layer.chosen;
  Routes& routes = rooms.routes;
#pragma omp single
  {
    at_least(rooms.logits, s.rows * experts);
    at_least(rooms.gathered, pairs * s.hidden);
    at_least(rooms.results, pairs * s.hidden);
  }
  float *logits = rooms.logits.data(), *gathered = rooms.gathered.data(), *results = rooms.results.data();
  team.product(rooms.codes, normed, s.rows, layer.router, {logits, F32, layer.router.bias});
#pragma omp barrier
#pragma omp single
  routes.choose(logits, s.rows, experts, layer.chosen, layer.normalized);
#pragma omp for
  for (int64_t at = 0; at < pairs; at++)
    std::memcpy(gathered + at * s.hidden, normed + routes.order[at] / layer.chosen * s.hidden, s.hidden * sizeof(float));
  auto each = [&](int which, const float* x, float* y) {  // one projection of every expert
    team.coded = -1;
    for (int64_t e = 0; e < experts; e++) {
      const int64_t first = routes.first[e], some = routes.first[e + 1] - first;
      const Linear& t = layer.experts[3 * e + which];
      if (some) team.product(rooms.codes, x, pairs, t, {y + first * t.out, F32, t.bias}, first, some);
    }
  };
  if (layer.gate.weight) each(0, gathered, gate);
  each(1, gathered, up);
#pragma omp barrier
  activate(gate, up, pairs * s.inner, layer.gate.weight, s.act);
  each(2, up, results);
#pragma omp barrier
  float* weights = at_least(team.own.row, pairs);  // in the order of the results
  std::vector<int64_t> place(pairs);
  for (int64_t at = 0; at < pairs; at++) place[routes.order[at]] = at;
  std::copy(routes.weight.begin(), routes.weight.end(), weights);
#pragma omp for
  for (int64_t i = 0; i < s.rows; i++)
    for (int64_t j = 0; j < layer.chosen; j++) {
      const float factor = weights[i * layer.chosen + j] * float(s.residual);
      const float* from = results + place[i * layer.chosen + j] * s.hidden;
#pragma omp simd
      for (int64_t h = 0; h < s.hidden; h++) s.x[i * s.hidden + h] += factor * from[h];
    }
}

void layers(const Step& s, const Layer* all, int64_t count, Rooms& rooms, int threads) {
  const int64_t rows = s.rows, queries = s.heads * s.width, others = s.groups * s.width, repeat = s.heads / s.groups;
  float* normed = at_least(rooms.normed, rows * s.hidden);
  int64_t most = 1;  // experts that compute a row
  for (int64_t l = 0; l < count; l++) most = std::max(most, all[l].chosen);
  float *q = at_least(rooms.q, rows * queries), *k = at_least(rooms.k, rows * others),
        *v = at_least(rooms.v, rows * others), *mixed = at_least(rooms.mixed, rows * queries),
        *gate = at_least(rooms.gate, rows * most * s.inner),
        *up = at_least(rooms.up, rows * most * s.inner);
  rooms.codes.reserve(rows * most, std::max({s.hidden, queries, s.inner}));
#pragma omp parallel num_threads(threads)
  {
    Team team;
    std::vector<float> room(std::max(s.hidden, 3 * s.width)), scores;
    auto norm = [&](const Norm& n) {
      team.coded = -1;
#pragma omp for
      for (int64_t i = 0; i < rows; i++) norm_row(s.x + i * s.hidden, n, s.hidden, normed + i * s.hidden, room.data());
    };
    auto product = [&](const Linear& t, const float* x, const Output& o) { team.product(rooms.codes, x, rows, t, o); };
    auto adds = [&](const Linear& t) { return Output{s.x, F32, t.bias, true, float(s.residual)}; };
    for (int64_t l = 0; l < count; l++) {
      const Layer& layer = all[l];
      norm(layer.attention_norm);
      product(layer.q, normed, {q, F32, layer.q.bias});
      product(layer.k, normed, {k, F32, layer.k.bias});
      product(layer.v, normed, {v, F32, layer.v.bias});
#pragma omp barrier
#pragma omp for collapse(2)
      for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < s.heads + 2 * s.groups; h++) {
          const bool query = h < s.heads, key = !query && h < s.heads + s.groups;
          const int64_t g = h - s.heads - (key ? 0 : s.groups);
          float* one = query ? q + i * queries + h * s.width : (key ? k : v) + i * others + g * s.width;
          const Norm& n = query ? layer.q_norm : layer.k_norm;
          if ((query || key) && n.weight) norm_row(one, n, s.width, one, room.data());
          if ((query || key) && s.cosine) {
            float *cosine = room.data() + s.width, *sine = cosine + s.width;
            load<float>(s.cosine, int(s.turns), s.at[i] * s.width, s.width, cosine);
            load<float>(s.sine, int(s.turns), s.at[i] * s.width, s.width, sine);
            turn(one, cosine, sine, s.width, room.data());
          }
          if (query) {
#pragma omp simd
            for (int64_t j = 0; j < s.width; j++) one[j] *= float(s.query_scale);
          } else {
            const int64_t at = g * s.pages.slots + i * s.pages.sequence + s.slots[i];
            put_cached(key ? layer.keys : layer.values, at, s.width, one);
          }
        }
#pragma omp for collapse(2) schedule(dynamic)
      for (int64_t i = 0; i < rows; i++)
        for (int64_t g = 0; g < s.groups; g++) {
          const int64_t at = i * queries + g * repeat * s.width;
          attend(q + at, mixed + at, repeat, s.width, layer.keys, layer.values, s.pages, i, g, layer.window, layer.changes,
                 scores);
        }
      team.coded = -1;
      product(layer.o, mixed, adds(layer.o));
#pragma omp barrier
      norm(layer.mlp_norm);
      if (layer.router.weight) {
        mixture(s, layer, rooms, team, normed, gate, up);
        continue;
      }
      if (layer.gate.weight) product(layer.gate, normed, {gate, F32, layer.gate.bias});
      product(layer.up, normed, {up, F32, layer.up.bias});
#pragma omp barrier
      activate(gate, up, rows * s.inner, layer.gate.weight, s.act);
      team.coded = -1;
      product(layer.down, up, adds(layer.down));
#pragma omp barrier
    }
  }
}

}  // namespace

extern "C" {

// y[rows, out] = x[rows, width] · Wᵀ + bias. `kind`: 4 (two codes a byte, as Nibbles), 2 (E2M1 numbers in the same order)
// or 8 (a byte each), in tiles as lowbit.h reads them.
// `group`: inputs that share a scale, a multiple of 32 that divides the width, or the width itself. `zero` less the code of
// zero, in steps, or null. `exact`: inputs are whole numbers up to 32639.
void rl_lowbit_linear(const Linear* t, const void* x, int64_t tx, void* y, int64_t ty, int64_t rows, int64_t exact,
                      int64_t threads) {
  static thread_local InputStore held;
  const Inputs in = held.make(rows, t->width, t->group);
  const Weight w{static_cast<const uint8_t*>(t->weight), t->scale, t->zero, int(t->type), t->out, t->width / t->group};
  const Output o{y, int(ty), t->bias};
#pragma omp parallel num_threads(int(threads))
  {
    Scratch own;
    team_code(in, x, int(tx), exact, own);
    if (t->kind == NIBBLES) team_product<Nibbles>(w, in, o, own);
    else if (t->kind == FLOATS4) team_product<Floats4>(w, in, o, own);
    else team_product<Bytes>(w, in, o, own);
  }
}

// Rows `start` to `stop` of a weight in codes as numbers, to y [stop - start, width] of type ty.
void rl_lowbit_expand(const Linear* t, int64_t start, int64_t stop, void* y, int64_t ty, int64_t threads) {
  const Weight w{static_cast<const uint8_t*>(t->weight), t->scale, t->zero, int(t->type), t->out, t->width / t->group};
#pragma omp parallel num_threads(int(threads))
  {
    if (t->kind == NIBBLES) team_expand<Nibbles>(w, t->width, start, stop, y, int(ty));
    else if (t->kind == FLOATS4) team_expand<Floats4>(w, t->width, start, stop, y, int(ty));
    else team_expand<Bytes>(w, t->width, start, stop, y, int(ty));
  }
}

// y[rows, out] of type ty = x[rows, width] (fp32) · Wᵀ + bias of a dense weight.
void rl_dense_linear(const Linear* t, const float* x, void* y, int64_t ty, int64_t rows, int64_t threads) {
#pragma omp parallel num_threads(int(threads))
  {
    std::vector<uint16_t> low;
    team_dense(int(t->type), t->weight, t->out, t->width, x, rows, {y, int(ty), t->bias}, low);
  }
}

// out[rows, heads, width] (fp32) of queries q (fp32, scaled) over the cache of their sequences.
void rl_paged_attention(const float* q, float* out, const Cache* keys, const Cache* values, const Pages* pages,
                        int64_t rows, int64_t heads, int64_t groups, int64_t width, int64_t window,
                        const Changes* changes, int64_t threads) {
  const int64_t repeat = heads / groups;
#pragma omp parallel num_threads(int(threads))
  {
    std::vector<float> room;
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (i * heads + g * repeat) * width;
        attend(q + at, out + at, repeat, width, *keys, *values, *pages, i, g, window, *changes, room);
      }
  }
}

// y[rows, size] = norm of x[rows, size], of few rows.
void rl_norm(const Norm* n, const float* x, float* y, int64_t rows, int64_t size) {
  static thread_local std::vector<float> room;
  for (int64_t i = 0; i < rows; i++) norm_row(x + i * size, *n, size, y + i * size, at_least(room, size));
}

// Decoder layers on the newest token of each sequence, in place.
void rl_decode(const Step* step, const Layer* all, int64_t count, int64_t threads) {
  static thread_local Rooms rooms;
  layers(*step, all, count, rooms, int(threads));
}

}  // extern "C"
