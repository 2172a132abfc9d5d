// Fused kernels for the CPU. Plain C functions over raw pointers, called through ctypes: no torch headers, so that this
// compiles in seconds. Rows are converted into a buffer of the compute type that stays in the first cache, so every
// storage type (float, double, bfloat16, half) shares one piece of arithmetic. Compile with -ffp-contract=off: the
// update of the optimizer must round as separate operators do.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "mathematics.h"
#include "storage.h"

namespace {

enum Activation { SILU_GATED = 0, GELU_TANH = 1 };

template <class C>
void add_norm(const void* x, int tx, const void* add, int ta, const void* w, int tw, const void* b, void* sum,
              void* y, int ty, void* mean_out, void* rstd_out, int64_t rows, int64_t n, double eps, int threads) {
  std::vector<C> weight(n), bias(b ? n : 0);
  load<C>(w, tw, 0, n, weight.data());
  if (b) load<C>(b, tw, 0, n, bias.data());
  C* means = static_cast<C*>(mean_out);
  C* rstds = static_cast<C*>(rstd_out);
#pragma omp parallel num_threads(threads)
  {
    std::vector<C> row(n), other(n);
    C* r = row.data();
    C* o = other.data();
#pragma omp for
    for (int64_t i = 0; i < rows; i++) {
      load<C>(x, tx, i * n, n, r);
      if (add) {
        load<C>(add, ta, i * n, n, o);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) r[j] += o[j];
        store<C>(sum, tx, i * n, n, r);
        if (tx == BF16 || tx == F16) load<C>(sum, tx, i * n, n, r);  // what backward will read
      }
      C mean = 0, square = 0;
      if (means) {
#pragma omp simd reduction(+ : mean)
        for (int64_t j = 0; j < n; j++) mean += r[j];
        mean /= C(n);
        means[i] = mean;
      }
#pragma omp simd reduction(+ : square)
      for (int64_t j = 0; j < n; j++) square += (r[j] - mean) * (r[j] - mean);
      C rstd = C(1) / std::sqrt(square / C(n) + C(eps));
      rstds[i] = rstd;
      const C* wd = weight.data();
      const C* bd = bias.data();
      if (b) {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) o[j] = (r[j] - mean) * rstd * wd[j] + bd[j];
      } else {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) o[j] = (r[j] - mean) * rstd * wd[j];
      }
      store<C>(y, ty, i * n, n, o);
    }
  }
}

// dx = rstd (dy w - mean(dy w) - xhat mean(dy w xhat)) + dsum; without a mean, the middle term is absent.
template <class C>
void add_norm_backward(const void* dy, int ty, const void* dsum, const void* x, int tx, const void* w, int tw,
                       const void* mean_in, const void* rstd_in, void* dx, void* dw, void* db, int64_t rows, int64_t n,
                       int threads) {
  std::vector<C> weight(n);
  load<C>(w, tw, 0, n, weight.data());
  const C* means = static_cast<const C*>(mean_in);
  const C* rstds = static_cast<const C*>(rstd_in);
  std::vector<C> dw_all(n), db_all(n);
#pragma omp parallel num_threads(threads)
  {
    std::vector<C> gr(n), xr(n), extra(n), dwr(n), dbr(n);
    C *g = gr.data(), *h = xr.data(), *e = extra.data(), *pw = dwr.data(), *pb = dbr.data();
    const C* wd = weight.data();
#pragma omp for
    for (int64_t i = 0; i < rows; i++) {
      load<C>(dy, ty, i * n, n, g);
      load<C>(x, tx, i * n, n, h);
      C mean = means ? means[i] : C(0), rstd = rstds[i], total = 0, dot = 0;
#pragma omp simd reduction(+ : total, dot)
      for (int64_t j = 0; j < n; j++) {
        C xhat = (h[j] - mean) * rstd;
        pw[j] += g[j] * xhat;
        pb[j] += g[j];
        C gw = g[j] * wd[j];
        total += gw;
        dot += gw * xhat;
        h[j] = xhat;
        g[j] = gw;
      }
      C a = means ? total / C(n) : C(0), c = dot / C(n);
      if (dsum) {
        load<C>(dsum, tx, i * n, n, e);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) g[j] = (g[j] - a - h[j] * c) * rstd + e[j];
      } else {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) g[j] = (g[j] - a - h[j] * c) * rstd;
      }
      store<C>(dx, tx, i * n, n, g);
    }
#pragma omp critical
    for (int64_t j = 0; j < n; j++) {
      dw_all[j] += pw[j];
      db_all[j] += pb[j];
    }
  }
  if (dw) store<C>(dw, tw, 0, n, dw_all.data());
  if (db) store<C>(db, tw, 0, n, db_all.data());
}

// Rows of `x` are [gate | up] for a gated activation, and the bare inputs (plus a bias) for the others.
template <class C>
void activation(const void* x, int t, const void* bias, int tb, void* y, int64_t rows, int64_t n, int kind,
                int threads) {
  std::vector<C> shift(n);
  if (bias) load<C>(bias, tb, 0, n, shift.data());
#pragma omp parallel num_threads(threads)
  {
    std::vector<C> first(2 * n);
    C* g = first.data();
    C* u = g + n;
    const C* s = shift.data();
#pragma omp for
    for (int64_t i = 0; i < rows; i++) {
      if (kind == SILU_GATED) {
        load<C>(x, t, 2 * i * n, 2 * n, g);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) g[j] = g[j] * sigmoid(g[j]) * u[j];
      } else {
        load<C>(x, t, i * n, n, g);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
          C v = g[j] + s[j];
          g[j] = C(0.5) * v * (C(1) + tanh_of(C(kGelu) * (v + C(kCube) * v * v * v)));
        }
      }
      store<C>(y, t, i * n, n, g);
    }
  }
}

// `dx` may be `x` itself.
template <class C>
void activation_backward(const void* dy, const void* x, int t, const void* bias, int tb, void* dx, void* db,
                         int64_t rows, int64_t n, int kind, int threads) {
  std::vector<C> shift(n), db_all(n);
  if (bias) load<C>(bias, tb, 0, n, shift.data());
#pragma omp parallel num_threads(threads)
  {
    std::vector<C> first(2 * n), back(n), sums(n);
    C *g = first.data(), *u = g + n, *d = back.data(), *pb = sums.data();
    const C* s = shift.data();
#pragma omp for
    for (int64_t i = 0; i < rows; i++) {
      load<C>(dy, t, i * n, n, d);
      if (kind == SILU_GATED) {
        load<C>(x, t, 2 * i * n, 2 * n, g);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
          C sig = sigmoid(g[j]), silu = g[j] * sig, up = u[j];
          u[j] = d[j] * silu;
          g[j] = d[j] * up * (sig + silu * (C(1) - sig));
        }
        store<C>(dx, t, 2 * i * n, 2 * n, g);
      } else {
        load<C>(x, t, i * n, n, g);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
          C v = g[j] + s[j];
          C th = tanh_of(C(kGelu) * (v + C(kCube) * v * v * v));
          C slope = C(0.5) * (C(1) + th) +
                    C(0.5) * v * (C(1) - th * th) * C(kGelu) * (C(1) + C(3 * kCube) * v * v);
          g[j] = d[j] * slope;
          pb[j] += g[j];
        }
        store<C>(dx, t, i * n, n, g);
      }
    }
    if (db) {
#pragma omp critical
      for (int64_t j = 0; j < n; j++) db_all[j] += pb[j];
    }
  }
  if (db) store<C>(db, tb, 0, n, db_all.data());
}

// In place: x = softmax(scale x + bias[row % bias_rows]). The sum is over the compute type.
template <class C>
void softmax(void* x, int t, const void* bias, int tb, int64_t bias_rows, int64_t rows, int64_t n, double scale,
             int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<C> row(n), shift(n);
    C *r = row.data(), *s = shift.data();
#pragma omp for
    for (int64_t i = 0; i < rows; i++) {
      load<C>(x, t, i * n, n, r);
      if (bias) load<C>(bias, tb, (i % bias_rows) * n, n, s);
      C peak = -std::numeric_limits<C>::infinity(), total = 0;
      C factor = C(scale);
#pragma omp simd reduction(max : peak)
      for (int64_t j = 0; j < n; j++) { r[j] = r[j] * factor + s[j]; peak = r[j] > peak ? r[j] : peak; }
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < n; j++) {
        C e = r[j] - peak < C(-87) ? C(0) : exponential(r[j] - peak);
        r[j] = e;
        total += e;
      }
      C inverse = C(1) / total;
#pragma omp simd
      for (int64_t j = 0; j < n; j++) r[j] *= inverse;
      store<C>(x, t, i * n, n, r);
    }
  }
}

// In place: d = scale · p (d - Σ p d).
template <class C>
void softmax_backward(void* d, const void* p, int t, int64_t rows, int64_t n, double scale, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<C> row(n), prob(n);
    C *r = row.data(), *q = prob.data();
#pragma omp for
    for (int64_t i = 0; i < rows; i++) {
      load<C>(d, t, i * n, n, r);
      load<C>(p, t, i * n, n, q);
      C dot = 0, factor = C(scale);
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < n; j++) dot += r[j] * q[j];
#pragma omp simd
      for (int64_t j = 0; j < n; j++) r[j] = factor * q[j] * (r[j] - dot);
      store<C>(d, t, i * n, n, r);
    }
  }
}

// In place: the first `count` heads of each row turn by the angles of table row t % period; sign -1 turns back.
template <class C>
void rotate(void* x, int t, const void* cosine, const void* sine, int tt, int64_t rows, int64_t width, int64_t count,
            int64_t d, int64_t period, double sign, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<C> buffers(4 * d);
    C *r = buffers.data(), *c = r + d, *s = c + d, *o = s + d;
    int64_t half = d / 2;
#pragma omp for
    for (int64_t i = 0; i < rows; i++) {
      load<C>(cosine, tt, (i % period) * d, d, c);
      load<C>(sine, tt, (i % period) * d, d, s);
      for (int64_t h = 0; h < count; h++) {
        load<C>(x, t, i * width + h * d, d, r);
#pragma omp simd
        for (int64_t j = 0; j < half; j++) {
          o[j] = r[j] * c[j] + C(sign) * s[j] * r[j + half];
          o[j + half] = r[j + half] * c[j + half] + C(sign) * s[j + half] * r[j];
        }
        store<C>(x, t, i * width + h * d, d, o);
      }
    }
  }
}

// Token losses of rows of logits; the logits become softmax - onehot (zero where the label is negative).
template <class C>
double cross_entropy(void* x, int t, const int64_t* labels, int64_t rows, int64_t n, int gradient, int threads) {
  double loss = 0;
#pragma omp parallel num_threads(threads) reduction(+ : loss)
  {
    std::vector<C> row(n);
    C* r = row.data();
#pragma omp for
    for (int64_t i = 0; i < rows; i++) {
      int64_t label = labels[i];
      if (label < 0) {
        if (gradient) {
          std::memset(r, 0, n * sizeof(C));
          store<C>(x, t, i * n, n, r);
        }
        continue;
      }
      load<C>(x, t, i * n, n, r);
      C peak = -std::numeric_limits<C>::infinity(), total = 0, picked = r[label];
#pragma omp simd reduction(max : peak)
      for (int64_t j = 0; j < n; j++) peak = r[j] > peak ? r[j] : peak;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < n; j++) { r[j] = exponential(r[j] - peak); total += r[j]; }
      loss += double(std::log(total) + peak - picked);
      if (!gradient) continue;
      C inverse = C(1) / total;
#pragma omp simd
      for (int64_t j = 0; j < n; j++) r[j] *= inverse;
      r[label] -= C(1);
      store<C>(x, t, i * n, n, r);
    }
  }
  return loss;
}

}  // namespace

#define BOTH(wide, call_float, call_double) \
  if (wide) { call_double; } else { call_float; }

extern "C" {

void rl_add_norm(int wide, const void* x, int tx, const void* add, int ta, const void* w, int tw, const void* b,
                 void* sum, void* y, int ty, void* mean, void* rstd, int64_t rows, int64_t n, double eps, int threads) {
  BOTH(wide, add_norm<float>(x, tx, add, ta, w, tw, b, sum, y, ty, mean, rstd, rows, n, eps, threads),
       add_norm<double>(x, tx, add, ta, w, tw, b, sum, y, ty, mean, rstd, rows, n, eps, threads))
}

void rl_add_norm_backward(int wide, const void* dy, int ty, const void* dsum, const void* x, int tx, const void* w,
                          int tw, const void* mean, const void* rstd, void* dx, void* dw, void* db, int64_t rows,
                          int64_t n, int threads) {
  BOTH(wide, add_norm_backward<float>(dy, ty, dsum, x, tx, w, tw, mean, rstd, dx, dw, db, rows, n, threads),
       add_norm_backward<double>(dy, ty, dsum, x, tx, w, tw, mean, rstd, dx, dw, db, rows, n, threads))
}

void rl_activation(int wide, const void* x, int t, const void* bias, int tb, void* y, int64_t rows, int64_t n, int kind,
                   int threads) {
  BOTH(wide, activation<float>(x, t, bias, tb, y, rows, n, kind, threads),
       activation<double>(x, t, bias, tb, y, rows, n, kind, threads))
}

void rl_activation_backward(int wide, const void* dy, const void* x, int t, const void* bias, int tb, void* dx,
                            void* db, int64_t rows, int64_t n, int kind, int threads) {
  BOTH(wide, activation_backward<float>(dy, x, t, bias, tb, dx, db, rows, n, kind, threads),
       activation_backward<double>(dy, x, t, bias, tb, dx, db, rows, n, kind, threads))
}

void rl_softmax(int wide, void* x, int t, const void* bias, int tb, int64_t bias_rows, int64_t rows, int64_t n,
                double scale, int threads) {
  BOTH(wide, softmax<float>(x, t, bias, tb, bias_rows, rows, n, scale, threads),
       softmax<double>(x, t, bias, tb, bias_rows, rows, n, scale, threads))
}

void rl_softmax_backward(int wide, void* d, const void* p, int t, int64_t rows, int64_t n, double scale, int threads) {
  BOTH(wide, softmax_backward<float>(d, p, t, rows, n, scale, threads),
       softmax_backward<double>(d, p, t, rows, n, scale, threads))
}

void rl_rotate(int wide, void* x, int t, const void* cosine, const void* sine, int tt, int64_t rows, int64_t width,
               int64_t count, int64_t d, int64_t period, double sign, int threads) {
  BOTH(wide, rotate<float>(x, t, cosine, sine, tt, rows, width, count, d, period, sign, threads),
       rotate<double>(x, t, cosine, sine, tt, rows, width, count, d, period, sign, threads))
}

double rl_cross_entropy(int wide, void* x, int t, const int64_t* labels, int64_t rows, int64_t n, int gradient,
                        int threads) {
  return wide ? cross_entropy<double>(x, t, labels, rows, n, gradient, threads)
              : cross_entropy<float>(x, t, labels, rows, n, gradient, threads);
}

// One pass over everything: read the gradient, master and moments, write master, moments and the low weights.
void rl_adamw(void* low, int tl, float* master, const float* grad, float* m, float* v, int64_t n, double keep_,
              double beta1_rest_, double beta2_, double beta2_rest_, double eps_, double step_size_, double root_,
              int threads) {
  constexpr int64_t kPiece = 4096;
  const float keep = keep_, beta1_rest = beta1_rest_, beta2 = beta2_, beta2_rest = beta2_rest_, eps = eps_,
              step_size = step_size_, root = root_;
#pragma omp parallel for num_threads(threads)
  for (int64_t start = 0; start < n; start += kPiece) {
    int64_t size = n - start < kPiece ? n - start : kPiece;
    float *w = master + start, *a = m + start, *b = v + start;
    const float* g = grad + start;
#pragma omp simd
    for (int64_t j = 0; j < size; j++) {
      float p = w[j] * keep;
      float first = std::fma(beta1_rest, g[j] - a[j], a[j]);
      float second = std::fma(beta2_rest * g[j], g[j], b[j] * beta2);
      float denominator = std::sqrt(second) / root + eps;
      w[j] = p + (step_size * first) / denominator;
      a[j] = first;
      b[j] = second;
    }
    if (low) store<float>(low, tl, start, size, w);
  }
}

}  // extern "C"
