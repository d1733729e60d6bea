// Elementwise kernels, the softmax of the head, the attention of decoding and the layout of packed weights, for x86-64 with AVX2
// or AVX-512.
//
// Optional: where this was not built, or for another dtype or size, the torch code of the callers runs; it is the
// reference of the tests. What is won is passes over memory: torch needs three to eight for each function here, and in
// bfloat16 a conversion before and after each. All arithmetic is float32; bfloat16 is rounded once, at the end.
//
// Built twice, for x86-64-v3 and -v4 (setup.py); native.py picks. Plain C interface, called through ctypes, so that it
// depends neither on Python's nor on torch's ABI. Row sizes (E, F, D, D / 2) are multiples of 16 except the vocabulary.
// No function allocates, keeps state or throws; the work of one row does not depend on the number of threads.

#include "vectors.h"

namespace {

inline float root_scale(float squares, long size, float eps) { return 1.0f / __builtin_sqrtf(squares / size + eps); }

template <class T>
float squares_of(const T* x, long size) {
  v16 total = {};
  for (long i = 0; i < size; i += W) {
    v16 v = load(x + i);
    total += v * v;
  }
  return sum(total);
}

template <class T>
void norm_rows(const T* x, long ldx, const T* weight, float offset, float eps, T* out, long ldo, long rows, long size,
               int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; ++r) {
    const T* in = x + r * ldx;
    float scale = root_scale(squares_of(in, size), size, eps);
    for (long i = 0; i < size; i += W) {
      store(out + r * ldo + i, load(in + i) * scale * (load(weight + i) + offset));
    }
  }
}

// `parts` [threads, size]: the weight's gradient of each thread's rows, added to; null where the weight is frozen.
template <class T>
void norm_backward_rows(const T* grad, long ldg, const T* x, long ldx, const T* weight, float offset, float eps,
                        float* parts, T* out, long ldo, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int t = 0; t < threads; ++t) {
    float* own = parts ? parts + t * size : nullptr;
    for (long r = rows * t / threads; r < rows * (t + 1) / threads; ++r) {
      const T *in = x + r * ldx, *g = grad + r * ldg;
      v16 squares = {}, dots = {};
      for (long i = 0; i < size; i += W) {
        v16 v = load(in + i);
        squares += v * v;
        dots += load(g + i) * (load(weight + i) + offset) * v;
      }
      float scale = root_scale(sum(squares), size, eps);
      float mean = sum(dots) * scale / size;
      T* into = out + r * ldo;
      for (long i = 0; i < size; i += W) {
        v16 normed = load(in + i) * scale, slope = load(g + i);
        if (own) store(own + i, load(own + i) + slope * normed);
        store(into + i, load(into + i) + (slope * (load(weight + i) + offset) - normed * mean) * scale);
      }
    }
  }
}

template <class T>
void rotate_rows(T* heads, long ld, long count, long half, const T* cosine, const T* sine, float sign, long rows,
                 int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; ++r)
    for (long h = 0; h < count; ++h) {
      T *first = heads + r * ld + h * 2 * half, *second = first + half;
      for (long i = 0; i < half; i += W) {
        v16 c = load(cosine + r * half + i), s = load(sine + r * half + i) * sign;
        v16 a = load(first + i), b = load(second + i);
        store(first + i, a * c - b * s);
        store(second + i, b * c + a * s);
      }
    }
}

template <class T>
void swiglu_rows(const T* gate_up, long ld, T* out, long ldo, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; ++r) {
    const T *gate = gate_up + r * ld, *up = gate + size;
    for (long i = 0; i < size; i += W) {
      v16 g = load(gate + i);
      store(out + r * ldo + i, g * (1.0f / (1.0f + exp(-g))) * load(up + i));
    }
  }
}

template <class T>
void swiglu_backward_rows(T* gate_up, long ld, const T* grad, long ldg, T* product, long ldp, long rows, long size,
                          int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; ++r) {
    T *gate = gate_up + r * ld, *up = gate + size;
    for (long i = 0; i < size; i += W) {
      v16 g = load(gate + i), u = load(up + i), slope = load(grad + r * ldg + i);
      v16 gateway = 1.0f / (1.0f + exp(-g));
      v16 active = g * gateway;
      store(product + r * ldp + i, active * u);
      store(up + i, active * slope);
      store(gate + i, slope * u * gateway * (1.0f + g * (1.0f - gateway)));
    }
  }
}

// z = logits / T: log softmax at the target, log-sum-exp and entropy of each row.
template <class T>
void head_statistics_rows(const T* logits, long ld, const float* inverse, const int64_t* target, float* logp, float* lse,
                          float* entropy, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; ++r) {
    const T* in = logits + r * ld;
    const float turn = inverse[r];
    const long whole = size / W * W;
    v16 most = all(-__builtin_inff());
    for (long i = 0; i < whole; i += W) most = max(load(in + i) * turn, most);
    if (whole < size) most = max(load_some(in + whole, size - whole, get(in[0])) * turn, most);
    const float top = largest(most);
    v16 total = {}, mean = {};
    for (long i = 0; i < whole; i += W) {
      v16 shifted = load(in + i) * turn - top, weight = exp(shifted);
      total += weight;
      mean += weight * shifted;
    }
    float sums = sum(total), means = sum(mean);
    for (long i = whole; i < size; ++i) {
      float shifted = get(in[i]) * turn - top, weight = __builtin_expf(shifted);
      sums += weight;
      means += weight * shifted;
    }
    const float log_total = __builtin_logf(sums);
    logp[r] = get(in[target[r]]) * turn - top - log_total;
    lse[r] = log_total + top;
    entropy[r] = log_total - means / sums;
  }
}

// Logits become their gradient: -p (outer (log p + entropy) + slope), + slope at the target. `outer` may be null.
template <class T>
void head_gradient_rows(T* logits, long ld, const float* inverse, const int64_t* target, const float* lse,
                        const float* slope, const float* outer, const float* entropy, long rows, long size,
                        int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; ++r) {
    T* in = logits + r * ld;
    const float turn = inverse[r], base = lse[r], own = slope[r];
    const float bend = outer ? outer[r] : 0.0f, bulk = outer ? entropy[r] : 0.0f;
    auto gradient = [&](v16 x) {
      v16 log_weight = x * turn - base, weight = exp(log_weight);
      return outer ? -weight * ((log_weight + bulk) * bend + own) : -weight * own;
    };
    const float at_target = gradient(all(get(in[target[r]])))[0] + own;
    const long whole = size / W * W;
    for (long i = 0; i < whole; i += W) store(in + i, gradient(load(in + i)));
    if (whole < size) store_some(in + whole, size - whole, gradient(load_some(in + whole, size - whole, 0.0f)));
    v16 last = all(at_target);
    store_some(in + target[r], 1, last);
  }
}

void add_widened_range(float* into, const bf16* from, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < size / W; ++i) store(into + i * W, load(into + i * W) + load(from + i * W));
  for (long i = size / W * W; i < size; ++i) into[i] += get(from[i]);
}

// The scores that one query sees: keys [0..first) of the prefix and [context..context + own) of its own row.
struct Seen {
  long first, context, own;
  template <class F>  // f(place, count) for vectors of at most W scores
  void each(F f) const {
    for (long i = 0; i < first; i += W) f(i, first - i < W ? first - i : W);
    for (long i = 0; i < own; i += W) f(context + i, own - i < W ? own - i : W);
  }
};

inline v16 load_scores(const float* p, long count) {
  return count == W ? load(p) : load_some(p, count, -__builtin_inff());
}

// Softmax of one query; what it does not see gets weight 0. Exponentials wait in `line`, so that each is computed once.
constexpr long LINE = 2048;
template <class T>
void softmax_of_query(const float* in, T* out, Seen seen, long size) {
  float line[LINE + W];
  const bool fits = size <= LINE;
  v16 most = all(-__builtin_inff());
  seen.each([&](long i, long count) { most = max(load_scores(in + i, count), most); });
  const float top = largest(most);
  v16 total = {};
  seen.each([&](long i, long count) {
    const v16 e = exp(load_scores(in + i, count) - top);
    if (fits) store(line + i, e);
    if (count == W)
      total += e;
    else
      for (long j = 0; j < count; ++j) total[j] += e[j];
  });
  const float share = 1.0f / sum(total);
  seen.each([&](long i, long count) {
    const v16 e = fits ? load(line + i) : exp(load_scores(in + i, count) - top);
    if (count == W)
      store(out + i, e * share);
    else
      store_some(out + i, count, e * share);
  });
  std::memset(out + seen.first, 0, (seen.context - seen.first) * sizeof(T));
  std::memset(out + seen.context + seen.own, 0, (size - seen.context - seen.own) * sizeof(T));
}

// Softmax of the scores of rows behind a shared prefix, as `RowAttention` lays them out: [count, heads, length, group, P + L].
// Query l of row r sees the first `prefix[r]` keys and own keys 0..l of `own[r]`.
template <class T>
void row_softmax(const float* scores, T* out, const int64_t* prefix, const int64_t* own, long count, long heads,
                 long length, long group, long context, int threads) {
  const long size = context + length, queries = length * group;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long q = 0; q < count * heads * queries; ++q) {
    const long r = q / (heads * queries), l = q / group % length;
    const Seen seen = {prefix[r], context, l + 1 < own[r] ? l + 1 : own[r]};
    softmax_of_query(scores + q * size, out + q * size, seen, size);
  }
}

// `slope` [rows, size], the gradient of softmax weights, becomes that of the scores times `scale`.
template <class T>
void row_softmax_backward(const T* weights, T* slope, float scale, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; ++r) {
    const T* w = weights + r * size;
    T* g = slope + r * size;
    const long whole = size / W * W, rest = size - whole;
    v16 dots = {};
    for (long i = 0; i < whole; i += W) dots += load(w + i) * load(g + i);
    if (rest) dots += load_some(w + whole, rest, 0) * load_some(g + whole, rest, 0);
    const float mean = sum(dots);
    for (long i = 0; i < whole; i += W) store(g + i, load(w + i) * (load(g + i) - mean) * scale);
    if (rest)
      store_some(g + whole, rest, load_some(w + whole, rest, 0) * (load_some(g + whole, rest, 0) - mean) * scale);
  }
}

// One query head group over one row's keys and values: softmax over blocks of positions, rescaled as the maximum grows
// (Milakov and Gimelshein, arXiv:1805.02867). G queries share every key that is read.
template <class T, int D, int G>
void attend_group(const T* query, const T* keys, const T* values, long length, float scale, T* out) {
  constexpr int V = D / W, BLOCK = 64;
  v16 q[G][V], sums[G][V];
  float most[G], total[G];
  for (int g = 0; g < G; ++g) {
    most[g] = -__builtin_inff();
    total[g] = 0;
    for (int i = 0; i < V; ++i) {
      q[g][i] = load(query + g * D + i * W) * scale;
      sums[g][i] = all(0);
    }
  }
  float scores[G][BLOCK];
  for (long start = 0; start < length; start += BLOCK) {
    const int count = length - start < BLOCK ? length - start : BLOCK;
    for (int j = 0; j < count; ++j) {
      const T* key = keys + (start + j) * D;
      v16 dots[G];
      for (int g = 0; g < G; ++g) dots[g] = all(0);
      for (int i = 0; i < V; ++i) {
        const v16 k = load(key + i * W);
        for (int g = 0; g < G; ++g) dots[g] += q[g][i] * k;
      }
      for (int g = 0; g < G; ++g) scores[g][j] = sum(dots[g]);
    }
    for (int g = 0; g < G; ++g) {
      for (int j = count; j < BLOCK; ++j) scores[g][j] = -__builtin_inff();
      v16 high = all(most[g]);
      for (int j = 0; j < BLOCK; j += W) high = max(load(&scores[g][j]), high);
      const float top = largest(high), shrink = exp(all(most[g] - top))[0];
      v16 added = {};
      for (int j = 0; j < BLOCK; j += W) {
        v16 weight = exp(load(&scores[g][j]) - top);
        store(&scores[g][j], weight);
        added += weight;
      }
      total[g] = total[g] * shrink + sum(added);
      most[g] = top;
      for (int i = 0; i < V; ++i) sums[g][i] *= shrink;
    }
    for (int j = 0; j < count; ++j) {
      const T* value = values + (start + j) * D;
      for (int i = 0; i < V; ++i) {
        const v16 v = load(value + i * W);
        for (int g = 0; g < G; ++g) sums[g][i] += v * scores[g][j];
      }
    }
  }
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < V; ++i) store(out + g * D + i * W, sums[g][i] / total[g]);
}

template <class T, int D>
void attend_heads(const T* query, const T* keys, const T* values, long length, long group, float scale, T* out) {
  while (group) {  // by at most four: more would not fit the registers
    const long now = group > 4 ? 4 : group;
    if (now == 4) attend_group<T, D, 4>(query, keys, values, length, scale, out);
    if (now == 3) attend_group<T, D, 3>(query, keys, values, length, scale, out);
    if (now == 2) attend_group<T, D, 2>(query, keys, values, length, scale, out);
    if (now == 1) attend_group<T, D, 1>(query, keys, values, length, scale, out);
    query += now * D, out += now * D, group -= now;
  }
}

// Row r writes its key and value at `position[r]` and attends over [0..position[r]].
template <class T>
void decode_rows(const T* query, long ldq, const T* key, long ldk, const T* value, long ldv, T* keys, T* values,
                 long row_stride, long head_stride, const int64_t* position, float scale, T* out, long rows, long heads,
                 long group, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
  for (long item = 0; item < rows * heads; ++item) {
    const long r = item / heads, h = item % heads, here = position[r];
    T *k = keys + r * row_stride + h * head_stride, *v = values + r * row_stride + h * head_stride;
    std::memcpy(k + here * size, key + r * ldk + h * size, size * sizeof(T));
    std::memcpy(v + here * size, value + r * ldv + h * size, size * sizeof(T));
    const T* q = query + r * ldq + h * group * size;
    T* into = out + (r * heads + h) * group * size;
    if (size == 16) attend_heads<T, 16>(q, k, v, here + 1, group, scale, into);
    if (size == 32) attend_heads<T, 32>(q, k, v, here + 1, group, scale, into);
    if (size == 64) attend_heads<T, 64>(q, k, v, here + 1, group, scale, into);
    if (size == 128) attend_heads<T, 128>(q, k, v, here + 1, group, scale, into);
  }
}

}  // namespace

// `narrow`: the tensors are bfloat16, else float32. Strides and sizes count elements.
#define BOTH(function, ...)       \
  if (narrow) {                   \
    typedef bf16 T;               \
    function<T>(__VA_ARGS__);     \
  } else {                        \
    typedef float T;              \
    function<T>(__VA_ARGS__);     \
  }

extern "C" {

uint32_t asyncrl_source() { return ASYNCRL_SOURCE; }  // checksum of this file, from setup.py

void asyncrl_rms_norm(int narrow, const void* x, long ldx, const void* weight, float offset, float eps, void* out,
                      long ldo, long rows, long size, int threads) {
  BOTH(norm_rows, (const T*)x, ldx, (const T*)weight, offset, eps, (T*)out, ldo, rows, size, threads)
}

void asyncrl_rms_norm_backward(int narrow, const void* grad, long ldg, const void* x, long ldx, const void* weight,
                               float offset, float eps, float* parts, void* out, long ldo, long rows, long size,
                               int threads) {
  BOTH(norm_backward_rows, (const T*)grad, ldg, (const T*)x, ldx, (const T*)weight, offset, eps, parts, (T*)out, ldo,
       rows, size, threads)
}

void asyncrl_rotate(int narrow, void* heads, long ld, long count, long half, const void* cosine, const void* sine,
                    float sign, long rows, int threads) {
  BOTH(rotate_rows, (T*)heads, ld, count, half, (const T*)cosine, (const T*)sine, sign, rows, threads)
}

void asyncrl_swiglu(int narrow, const void* gate_up, long ld, void* out, long ldo, long rows, long size, int threads) {
  BOTH(swiglu_rows, (const T*)gate_up, ld, (T*)out, ldo, rows, size, threads)
}

void asyncrl_swiglu_backward(int narrow, void* gate_up, long ld, const void* grad, long ldg, void* product, long ldp,
                             long rows, long size, int threads) {
  BOTH(swiglu_backward_rows, (T*)gate_up, ld, (const T*)grad, ldg, (T*)product, ldp, rows, size, threads)
}

void asyncrl_head_statistics(int narrow, const void* logits, long ld, const float* inverse, const int64_t* target,
                             float* logp, float* lse, float* entropy, long rows, long size, int threads) {
  BOTH(head_statistics_rows, (const T*)logits, ld, inverse, target, logp, lse, entropy, rows, size, threads)
}

void asyncrl_head_gradient(int narrow, void* logits, long ld, const float* inverse, const int64_t* target,
                           const float* lse, const float* slope, const float* outer, const float* entropy, long rows,
                           long size, int threads) {
  BOTH(head_gradient_rows, (T*)logits, ld, inverse, target, lse, slope, outer, entropy, rows, size, threads)
}

void asyncrl_row_softmax(int narrow, const float* scores, void* out, const int64_t* prefix, const int64_t* own,
                         long count, long heads, long length, long group, long context, int threads) {
  BOTH(row_softmax, scores, (T*)out, prefix, own, count, heads, length, group, context, threads)
}

void asyncrl_row_softmax_backward(int narrow, const void* weights, void* slope, float scale, long rows, long size,
                                  int threads) {
  BOTH(row_softmax_backward, (const T*)weights, (T*)slope, scale, rows, size, threads)
}

void asyncrl_add_widened(float* into, const void* from, long size, int threads) {
  add_widened_range(into, (const bf16*)from, size, threads);
}

void asyncrl_decode_attention(int narrow, const void* query, long ldq, const void* key, long ldk, const void* value,
                              long ldv, void* keys, void* values, long row_stride, long head_stride,
                              const int64_t* position, float scale, void* out, long rows, long heads, long group,
                              long size, int threads) {
  BOTH(decode_rows, (const T*)query, ldq, (const T*)key, ldk, (const T*)value, ldv, (T*)keys, (T*)values, row_stride,
       head_stride, position, scale, (T*)out, rows, heads, group, size, threads)
}

}  // extern "C"
