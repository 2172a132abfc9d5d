// A token for each row of logits: temperature, top-k, top-p and min-p as in serve/sampler.py, one uniform number a row.
//
// What is kept is a prefix of the row in the order of its logits, so only its last entry has to be found. Entries far
// below the largest cannot be in it; the others are gathered in one pass, and counted in buckets of their logits, of
// which one is put in order. The draw is in the order of the vocabulary.
#include <algorithm>
#include <limits>
#include <vector>

#include "mathematics.h"

namespace {

struct Choice {
  double temperature;  // 0: the largest
  double top_p, min_p, uniform;
  int64_t top_k;  // 0: no limit
};

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kChunk = 128;   // logits whose weights are summed together
constexpr int kBuckets = 1024;    // of candidates by their logits
constexpr int64_t kSorted = 256;  // candidates that are sorted without buckets

inline float weight_of(float x, float peak, float inverse) {
  const float d = (x - peak) * inverse;
  return d < -87.0f ? 0.0f : exponential(d);
}

// The first of the largest entries; -1 where there is none above -infinity.
int64_t largest(const float* x, int64_t n, float& peak) {
  peak = kNone;
#pragma omp simd reduction(max : peak)
  for (int64_t i = 0; i < n; i++) peak = x[i] > peak ? x[i] : peak;
  if (!(peak > kNone)) return -1;
  int64_t at = 0;
  for (; at + 16 <= n; at += 16) {
    int found = 0;
#pragma omp simd reduction(| : found)
    for (int64_t i = at; i < at + 16; i++) found |= x[i] == peak;
    if (found) break;
  }
  while (x[at] != peak) at++;
  return at;
}

// Entries of a row that may be kept, in the order of the vocabulary.
struct Candidates {
  std::vector<float> x, weight;
  std::vector<int32_t> id;
  int64_t count = 0;

  void room(int64_t n) {
    if (int64_t(x.size()) >= n) return;
    x.resize(n);
    weight.resize(n);
    id.resize(n);
  }
  double sum() const {
    double all = 0;
#pragma omp simd reduction(+ : all)
    for (int64_t i = 0; i < count; i++) all += weight[i];
    return all;
  }
};

struct Work {
  std::vector<double> sums;
  Candidates found;
  std::vector<int32_t> bucket, edge;
};

// Sums of the weights of chunks of a row; returns all of it.
double weigh(const float* x, int64_t n, float peak, float inverse, std::vector<double>& sums) {
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  if (int64_t(sums.size()) < chunks) sums.resize(chunks);
  double all = 0;
  for (int64_t c = 0; c < chunks; c++) {
    const int64_t end = std::min(n, (c + 1) * kChunk);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = c * kChunk; i < end; i++) sum += weight_of(x[i], peak, inverse);
    sums[c] = sum;
    all += sum;
  }
  return all;
}

int64_t draw(const float* x, int64_t n, float peak, float inverse, double uniform, Work& work) {
  const double aim = uniform * weigh(x, n, peak, inverse, work.sums);
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  double upto = 0;
  int64_t c = 0;
  while (c + 1 < chunks && upto + work.sums[c] <= aim) upto += work.sums[c++];
  int64_t last = -1;
  for (; c < chunks; c++)  // beyond its chunk only where rounding says so
    for (int64_t i = c * kChunk; i < std::min(n, (c + 1) * kChunk); i++) {
      const float w = weight_of(x[i], peak, inverse);
      if (w <= 0) continue;
      last = i;
      upto += w;
      if (upto > aim) return i;
    }
  while (last < 0) {  // nothing has weight behind: the last that has any before
    c--;
    for (int64_t i = c * kChunk; i < std::min(n, (c + 1) * kChunk); i++)
      if (weight_of(x[i], peak, inverse) > 0) last = i;
  }
  return last;
}

// Those within `depth` of the largest, with their weights.
void gather(const float* x, int64_t n, float peak, float inverse, float depth, Candidates& found) {
  const float lowest = -std::numeric_limits<float>::max();
  const float least = std::isinf(depth) ? lowest : std::max(lowest, peak - depth / inverse);
  found.room(n + 16);
  int64_t count = 0;
  float* values = found.x.data();
  int32_t* ids = found.id.data();
  for (int64_t at = 0; at < n; at += 16) {
    const int64_t end = std::min(n, at + 16);
    int any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = at; i < end; i++) any |= x[i] >= least;
    if (!any) continue;
    for (int64_t i = at; i < end; i++) {  // without a branch: overwritten unless it counts
      values[count] = x[i];
      ids[count] = int32_t(i);
      count += x[i] >= least;
    }
  }
  found.count = count;
  float* weights = found.weight.data();
#pragma omp simd
  for (int64_t i = 0; i < count; i++) weights[i] = weight_of(values[i], peak, inverse);
}

// Cut `found` to its prefix in the order of the logits that has `most` entries or reaches `mass`, whichever is shorter.
void cut(Work& work, float peak, int64_t most, double mass) {
  Candidates& found = work.found;
  std::vector<int32_t>& edge = work.edge;
  const int64_t n = found.count;
  int64_t count = 0;
  double sum = 0;
  edge.clear();
  if (n > kSorted) {
    float lowest = peak;
#pragma omp simd reduction(min : lowest)
    for (int64_t i = 0; i < n; i++) lowest = std::min(lowest, found.x[i]);
    const float scale = lowest < peak ? (kBuckets - 1) / (peak - lowest) : 0.0f;
    if (int64_t(work.bucket.size()) < n) work.bucket.resize(n);
    int32_t* bucket = work.bucket.data();
#pragma omp simd
    for (int64_t i = 0; i < n; i++) bucket[i] = int32_t((peak - found.x[i]) * scale);
    int64_t counts[kBuckets] = {};
    double masses[kBuckets] = {};
    for (int64_t i = 0; i < n; i++) {
      counts[bucket[i]]++;
      masses[bucket[i]] += found.weight[i];
    }
    int b = 0;
    while (b < kBuckets && count + counts[b] < most && sum + masses[b] < mass) {
      count += counts[b];
      sum += masses[b++];
    }
    if (b == kBuckets) return;
    for (int64_t i = 0; i < n; i++)
      if (bucket[i] == b) edge.push_back(int32_t(i));
  } else {
    for (int64_t i = 0; i < n; i++) edge.push_back(int32_t(i));
  }
  const float* x = found.x.data();
  std::sort(edge.begin(), edge.end(), [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
  size_t last = 0;
  for (; last + 1 < edge.size(); last++) {
    count++;
    sum += found.weight[edge[last]];
    if (count >= most || sum >= mass) break;
  }
  const float end = x[edge[last]];
  const int32_t end_at = edge[last];
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i++) {
    const bool stays = found.x[i] > end || (found.x[i] == end && int32_t(i) <= end_at);
    found.x[kept] = found.x[i];
    found.weight[kept] = found.weight[i];
    found.id[kept] = found.id[i];
    kept += stays;
  }
  found.count = kept;
}

int64_t choose(const float* x, int64_t n, const Choice& c, Work& work) {
  float peak;
  const int64_t best = largest(x, n, peak);
  if (best < 0 || c.temperature <= 0) return best;
  const float inverse = float(1.0 / c.temperature);
  if (!c.top_k && c.top_p >= 1 && c.min_p <= 0) return draw(x, n, peak, inverse, c.uniform, work);
  Candidates& found = work.found;
  const float infinite = std::numeric_limits<float>::infinity();
  // Without top-k, a nucleus is a share of the whole row; with it, of what top-k keeps before min-p.
  double whole = !c.top_k && c.top_p < 1 ? weigh(x, n, peak, inverse, work.sums) : 0;
  const float within = c.min_p > 0 ? float(-std::log(c.min_p)) : infinite;  // min-p is a distance from the largest
  const bool counts_all = c.top_k && c.top_p < 1;
  for (float depth = 8;; depth *= 3) {
    const float most = counts_all ? infinite : within;
    const bool all = depth > 80 || depth >= most;
    gather(x, n, peak, inverse, all ? most : depth, found);
    if (all || (c.top_k ? found.count >= c.top_k : found.sum() >= c.top_p * whole)) break;
  }
  if (c.top_k && found.count > c.top_k) cut(work, peak, c.top_k, infinite);
  if (counts_all) whole = found.sum();
  if (c.top_p < 1) cut(work, peak, std::numeric_limits<int64_t>::max(), c.top_p * whole);
  const float least = std::isinf(within) ? kNone : peak - within / inverse;
  double total = 0, upto = 0;
  for (int64_t i = 0; i < found.count; i++) total += found.x[i] >= least ? found.weight[i] : 0.0f;
  const double aim = c.uniform * total;
  int64_t last = 0;
  for (int64_t i = 0; i < found.count; i++) {
    if (!(found.x[i] >= least)) continue;
    upto += found.weight[last = i];
    if (upto > aim) break;
  }
  return found.id[last];
}

}  // namespace

extern "C" {

// Which of `rows` rows of `n` logits have neither NaN nor infinity as their largest.
void rl_finite(const float* logits, int64_t rows, int64_t n, int8_t* finite, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) if (rows * n > 1 << 16)
  for (int64_t i = 0; i < rows; i++) {
    const float* x = logits + i * n;
    float peak = -std::numeric_limits<float>::infinity(), faulty = 0;
#pragma omp simd reduction(max : peak) reduction(+ : faulty)
    for (int64_t j = 0; j < n; j++) {
      peak = x[j] > peak ? x[j] : peak;
      faulty += x[j] == x[j] ? 0.0f : 1.0f;
    }
    finite[i] = faulty == 0 && std::isfinite(peak);
  }
}

// A token for each of `rows` rows of `n` logits; -1 where nothing is above -infinity.
void rl_sample(const float* logits, int64_t rows, int64_t n, const Choice* choices, int64_t* tokens, int64_t threads) {
#pragma omp parallel num_threads(int(threads))
  {
    Work work;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < rows; i++) tokens[i] = choose(logits + i * n, n, choices[i], work);
  }
}

}  // extern "C"
