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

struct Candidate {
  float x, weight;
  int32_t id;
};

inline bool before(const Candidate& a, const Candidate& b) { return a.x > b.x || (a.x == b.x && a.id < b.id); }

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

struct Work {
  std::vector<double> sums;
  std::vector<Candidate> found, edge;
  std::vector<int32_t> bucket;
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

// Those within `depth` of the largest, in the order of the vocabulary; returns the sum of their weights.
double gather(const float* x, int64_t n, float peak, float inverse, float depth, std::vector<Candidate>& found) {
  const float least = std::isinf(depth) ? kNone : peak - depth / inverse;
  found.clear();
  double sum = 0;
  for (int64_t at = 0; at < n; at += 16) {
    const int64_t end = std::min(n, at + 16);
    int any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = at; i < end; i++) any |= x[i] >= least;
    if (!any) continue;
    for (int64_t i = at; i < end; i++)
      if (x[i] >= least && x[i] > kNone) found.push_back({x[i], 0, int32_t(i)});
  }
  const int64_t count = int64_t(found.size());
  for (int64_t i = 0; i < count; i++) found[i].weight = weight_of(found[i].x, peak, inverse);
  for (const Candidate& c : found) sum += c.weight;
  return sum;
}

// Cut `found` to its prefix in the order of the logits that has `most` entries or reaches `mass`, whichever is shorter;
// what is left keeps its order.
void cut(Work& work, float peak, int64_t most, double mass) {
  std::vector<Candidate>&found = work.found, &edge = work.edge;
  const int64_t n = int64_t(found.size());
  edge.clear();
  int64_t count = 0;
  double sum = 0;
  if (n > kSorted) {
    float lowest = peak;
    for (const Candidate& c : found) lowest = std::min(lowest, c.x);
    const float scale = lowest < peak ? (kBuckets - 1) / (peak - lowest) : 0.0f;
    work.bucket.resize(n);
    int64_t counts[kBuckets] = {};
    double masses[kBuckets] = {};
    for (int64_t i = 0; i < n; i++) {
      const int b = std::min(kBuckets - 1, int((peak - found[i].x) * scale));
      work.bucket[i] = b;
      counts[b]++;
      masses[b] += found[i].weight;
    }
    int b = 0;
    while (b < kBuckets && count + counts[b] < most && sum + masses[b] < mass) {
      count += counts[b];
      sum += masses[b++];
    }
    if (b == kBuckets) return;
    for (int64_t i = 0; i < n; i++)
      if (work.bucket[i] == b) edge.push_back(found[i]);
  } else {
    edge = found;
  }
  std::sort(edge.begin(), edge.end(), before);
  size_t last = 0;
  for (; last + 1 < edge.size(); last++) {
    count++;
    sum += edge[last].weight;
    if (count >= most || sum >= mass) break;
  }
  const Candidate end = edge[last];
  found.erase(std::remove_if(found.begin(), found.end(), [&](const Candidate& c) { return before(end, c); }), found.end());
}

int64_t choose(const float* x, int64_t n, const Choice& c, Work& work) {
  float peak;
  const int64_t best = largest(x, n, peak);
  if (best < 0 || c.temperature <= 0) return best;
  const float inverse = float(1.0 / c.temperature);
  if (!c.top_k && c.top_p >= 1 && c.min_p <= 0) return draw(x, n, peak, inverse, c.uniform, work);
  std::vector<Candidate>& found = work.found;
  const float infinite = std::numeric_limits<float>::infinity();
  // Without top-k, a nucleus is a share of the whole row.
  const double whole = !c.top_k && c.top_p < 1 ? weigh(x, n, peak, inverse, work.sums) : 0;
  const float within = c.min_p > 0 ? float(-std::log(c.min_p)) : infinite;  // min-p is a distance from the largest
  for (float depth = 8;; depth *= 3) {
    const bool all = depth > 80 || depth >= within;
    const double sum = gather(x, n, peak, inverse, all ? within : depth, found);
    if (all || (c.top_k ? int64_t(found.size()) >= c.top_k : sum >= c.top_p * whole)) break;
  }
  if (c.top_k && int64_t(found.size()) > c.top_k) cut(work, peak, c.top_k, infinite);
  if (c.top_p < 1) {
    double sum = whole;
    if (c.top_k) {
      sum = 0;
      for (const Candidate& one : found) sum += one.weight;
      if (c.min_p > 0 && int64_t(found.size()) < c.top_k) {  // what min-p removed counts in the share
        std::vector<Candidate> kept;
        kept.swap(found);
        gather(x, n, peak, inverse, infinite, found);
        if (int64_t(found.size()) > c.top_k) cut(work, peak, c.top_k, infinite);
        sum = 0;
        for (const Candidate& one : found) sum += one.weight;
        found.swap(kept);
      }
    }
    cut(work, peak, std::numeric_limits<int64_t>::max(), c.top_p * sum);
  }
  double total = 0, upto = 0;
  for (const Candidate& one : found) total += one.weight;
  const double aim = c.uniform * total;
  for (const Candidate& one : found) {
    upto += one.weight;
    if (upto > aim) return one.id;
  }
  return found.back().id;
}

}  // namespace

extern "C" {

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
