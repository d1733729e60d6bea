// Elementwise kernels, softmax of the head, and decode attention, for x86-64 with AVX2 or AVX-512.
//
// The kernels are optional. Without them, and for other dtypes and sizes, the callers run torch code, the reference of the tests.
// Each kernel replaces three to eight passes of torch over memory. In bfloat16 torch also converts before and after each pass.
// All arithmetic here is float32, and a bfloat16 result is rounded once, at the end. Norms and SwiGLU need rows of a multiple of 16
// values, and the rotation half a head of a multiple of 16. Decode attention has heads of 16, 32, 64 or 128. The head's kernels,
// row_softmax, row_softmax_backward and add_widened take any size. library.py checks the sizes (`takes`, `attends`).
//
// No function allocates, keeps state or throws. The result of one row does not depend on the number of threads.
//
// setup.py builds this file for x86-64-v3 and for -v4, and library.py chooses one. ctypes calls the C functions, so the build
// depends neither on Python's nor on torch's ABI.

#include "vectors.h"

namespace {

// 1 / sqrt(mean(x^2) + eps), from the sum of squares.
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

// Adds the gradient of x to `out`. Thread t adds its weight gradient to parts[t] ([threads, size]; null for a frozen weight).
template <class T>
void norm_backward_rows(const T* grad, long ldg, const T* x, long ldx, const T* weight, float offset, float eps,
                        float* parts, T* out, long ldo, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int t = 0; t < threads; ++t) {
    float* weight_grad = parts ? parts + t * size : nullptr;
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
        if (weight_grad) store(weight_grad + i, load(weight_grad + i) + slope * normed);
        store(into + i, load(into + i) + (slope * (load(weight + i) + offset) - normed * mean) * scale);
      }
    }
  }
}

// Rotary embedding in place: each head has 2 * half values. `sign` -1 applies the inverse rotation.
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

// Overwrites gate and up with their gradients, and writes silu(gate) * up into `product`.
template <class T>
void swiglu_backward_rows(T* gate_up, long ld, const T* grad, long ldg, T* product, long ldp, long rows, long size,
                          int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; ++r) {
    T *gate = gate_up + r * ld, *up = gate + size;
    for (long i = 0; i < size; i += W) {
      v16 g = load(gate + i), u = load(up + i), slope = load(grad + r * ldg + i);
      v16 sigmoid = 1.0f / (1.0f + exp(-g));
      v16 active = g * sigmoid;
      store(product + r * ldp + i, active * u);
      store(up + i, active * slope);
      store(gate + i, slope * u * sigmoid * (1.0f + g * (1.0f - sigmoid)));
    }
  }
}

// For z = logits * inverse: log softmax at the target, log-sum-exp and entropy of each row.
template <class T>
void head_statistics_rows(const T* logits, long ld, const float* inverse, const int64_t* target, float* logp, float* lse,
                          float* entropy, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; ++r) {
    const T* in = logits + r * ld;
    const float factor = inverse[r];
    const long vector_end = size / W * W, tail = size - vector_end;
    v16 lane_maximum = broadcast(-__builtin_inff());
    for (long i = 0; i < vector_end; i += W) lane_maximum = max(load(in + i) * factor, lane_maximum);
    // Unused lanes hold the row's first logit, which cannot change the maximum.
    if (tail) lane_maximum = max(load_some(in + vector_end, tail, to_float(in[0])) * factor, lane_maximum);
    const float maximum = largest(lane_maximum);
    v16 lane_sum = {}, lane_weighted = {};
    for (long i = 0; i < vector_end; i += W) {
      v16 shifted = load(in + i) * factor - maximum, weight = exp(shifted);
      lane_sum += weight;
      lane_weighted += weight * shifted;
    }
    float total = sum(lane_sum), weighted = sum(lane_weighted);
    for (long i = vector_end; i < size; ++i) {
      float shifted = to_float(in[i]) * factor - maximum, weight = __builtin_expf(shifted);
      total += weight;
      weighted += weight * shifted;
    }
    const float log_total = __builtin_logf(total);
    logp[r] = to_float(in[target[r]]) * factor - maximum - log_total;
    lse[r] = log_total + maximum;
    entropy[r] = log_total - weighted / total;
  }
}

// Overwrites the logits with their gradient: -p (outer (log p + entropy) + slope), + slope at the target. `slope` and `outer` are
// the gradients of log-prob and entropy, divided by the temperature. `outer` may be null.
template <class T>
void head_gradient_rows(T* logits, long ld, const float* inverse, const int64_t* target, const float* lse,
                        const float* slope, const float* outer, const float* entropy, long rows, long size,
                        int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; ++r) {
    T* in = logits + r * ld;
    const float factor = inverse[r], row_lse = lse[r], row_slope = slope[r];
    const float row_outer = outer ? outer[r] : 0.0f, row_entropy = outer ? entropy[r] : 0.0f;
    auto gradient = [&](v16 x) {
      v16 log_p = x * factor - row_lse, p = exp(log_p);
      return outer ? -p * ((log_p + row_entropy) * row_outer + row_slope) : -p * row_slope;
    };
    // Computed before the loop overwrites the logit of the target.
    const float at_target = gradient(broadcast(to_float(in[target[r]])))[0] + row_slope;
    const long vector_end = size / W * W, tail = size - vector_end;
    for (long i = 0; i < vector_end; i += W) store(in + i, gradient(load(in + i)));
    if (tail) store_some(in + vector_end, tail, gradient(load_some(in + vector_end, tail, 0.0f)));
    store_some(in + target[r], 1, broadcast(at_target));
  }
}

void add_widened_range(float* into, const bf16* from, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < size / W; ++i) store(into + i * W, load(into + i * W) + load(from + i * W));
  for (long i = size / W * W; i < size; ++i) into[i] += to_float(from[i]);
}

// The visible scores of one query: [0, prefix) and [context, context + own).
struct VisibleScores {
  long prefix, context, own;
  // Calls f(start, count) for vectors of at most W scores.
  template <class F>
  void for_each_vector(F f) const {
    for (long i = 0; i < prefix; i += W) f(i, prefix - i < W ? prefix - i : W);
    for (long i = 0; i < own; i += W) f(context + i, own - i < W ? own - i : W);
  }
};

inline v16 load_scores(const float* p, long count) {
  return count == W ? load(p) : load_some(p, count, -__builtin_inff());
}

// Softmax of one query. Scores that are not visible get weight 0. Exponentials are computed twice if they exceed the buffer.
constexpr long LINE = 2048;
template <class T>
void softmax_of_query(const float* in, T* out, VisibleScores visible, long size) {
  float exponentials[LINE + W];
  const bool fits = size <= LINE;
  v16 lane_maximum = broadcast(-__builtin_inff());
  visible.for_each_vector([&](long i, long count) { lane_maximum = max(load_scores(in + i, count), lane_maximum); });
  const float maximum = largest(lane_maximum);
  v16 total = {};
  visible.for_each_vector([&](long i, long count) {
    const v16 e = exp(load_scores(in + i, count) - maximum);
    if (fits) store(exponentials + i, e);
    // exp of -inf is 1.6e-38 and not 0, so lanes behind `count` are left out.
    if (count == W)
      total += e;
    else
      for (long j = 0; j < count; ++j) total[j] += e[j];
  });
  const float factor = 1.0f / sum(total);
  visible.for_each_vector([&](long i, long count) {
    const v16 e = fits ? load(exponentials + i) : exp(load_scores(in + i, count) - maximum);
    if (count == W)
      store(out + i, e * factor);
    else
      store_some(out + i, count, e * factor);
  });
  std::memset(out + visible.prefix, 0, (visible.context - visible.prefix) * sizeof(T));
  std::memset(out + visible.context + visible.own, 0, (size - visible.context - visible.own) * sizeof(T));
}

// Softmax of scores [count rows, heads, length, group, context + length], the layout of `RowAttention`. Query l of row r sees the
// first prefix[r] keys of the prefix, and its own keys 0..l, of which there are own[r].
template <class T>
void row_softmax(const float* scores, T* out, const int64_t* prefix, const int64_t* own, long count, long heads,
                 long length, long group, long context, int threads) {
  const long size = context + length, queries = length * group;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long q = 0; q < count * heads * queries; ++q) {
    const long r = q / (heads * queries), l = q / group % length;
    const VisibleScores visible = {prefix[r], context, l + 1 < own[r] ? l + 1 : own[r]};
    softmax_of_query(scores + q * size, out + q * size, visible, size);
  }
}

// Overwrites `slope` [rows, size], the gradient of the softmax weights, with `scale` times the gradient of the scores.
template <class T>
void row_softmax_backward(const T* weights, T* slope, float scale, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; ++r) {
    const T* w = weights + r * size;
    T* g = slope + r * size;
    const long end = size / W * W, tail = size - end;
    v16 dots = {};
    for (long i = 0; i < end; i += W) dots += load(w + i) * load(g + i);
    if (tail) dots += load_some(w + end, tail, 0) * load_some(g + end, tail, 0);
    const float mean = sum(dots);
    for (long i = 0; i < end; i += W) store(g + i, load(w + i) * (load(g + i) - mean) * scale);
    if (tail) store_some(g + end, tail, load_some(w + end, tail, 0) * (load_some(g + end, tail, 0) - mean) * scale);
  }
}

// Attention of G query heads over the keys and values of one row. The softmax runs over blocks of positions and is rescaled
// when the maximum grows (Milakov and Gimelshein, arXiv:1805.02867). The G queries share each loaded key.
template <class T, int D, int G>
void attend_group(const T* query, const T* keys, const T* values, long length, float scale, T* out) {
  constexpr int V = D / W, BLOCK = 64;
  v16 q[G][V], sums[G][V];
  float maximum[G], total[G];
  for (int g = 0; g < G; ++g) {
    maximum[g] = -__builtin_inff();
    total[g] = 0;
    for (int i = 0; i < V; ++i) {
      q[g][i] = load(query + g * D + i * W) * scale;
      sums[g][i] = broadcast(0);
    }
  }
  float scores[G][BLOCK];
  for (long start = 0; start < length; start += BLOCK) {
    const int count = length - start < BLOCK ? length - start : BLOCK;
    for (int j = 0; j < count; ++j) {
      const T* key = keys + (start + j) * D;
      v16 dots[G];
      for (int g = 0; g < G; ++g) dots[g] = broadcast(0);
      for (int i = 0; i < V; ++i) {
        const v16 k = load(key + i * W);
        for (int g = 0; g < G; ++g) dots[g] += q[g][i] * k;
      }
      for (int g = 0; g < G; ++g) scores[g][j] = sum(dots[g]);
    }
    for (int g = 0; g < G; ++g) {
      for (int j = count; j < BLOCK; ++j) scores[g][j] = -__builtin_inff();
      v16 high = broadcast(maximum[g]);
      for (int j = 0; j < BLOCK; j += W) high = max(load(&scores[g][j]), high);
      const float new_maximum = largest(high), shrink = exp(broadcast(maximum[g] - new_maximum))[0];
      v16 added = {};
      for (int j = 0; j < BLOCK; j += W) {
        v16 weight = exp(load(&scores[g][j]) - new_maximum);
        store(&scores[g][j], weight);
        added += weight;
      }
      total[g] = total[g] * shrink + sum(added);
      maximum[g] = new_maximum;
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
  while (group) {
    // More than four heads would not fit the registers.
    const long heads = group > 4 ? 4 : group;
    if (heads == 4) attend_group<T, D, 4>(query, keys, values, length, scale, out);
    if (heads == 3) attend_group<T, D, 3>(query, keys, values, length, scale, out);
    if (heads == 2) attend_group<T, D, 2>(query, keys, values, length, scale, out);
    if (heads == 1) attend_group<T, D, 1>(query, keys, values, length, scale, out);
    query += heads * D, out += heads * D, group -= heads;
  }
}

// Writes key and value of row r into the cache at position[r], then attends over the positions 0..position[r].
template <class T>
void decode_rows(const T* query, long ldq, const T* key, long ldk, const T* value, long ldv, T* keys, T* values,
                 long row_stride, long head_stride, const int64_t* position, float scale, T* out, long rows, long heads,
                 long group, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
  for (long item = 0; item < rows * heads; ++item) {
    const long r = item / heads, h = item % heads, last = position[r];
    T *k = keys + r * row_stride + h * head_stride, *v = values + r * row_stride + h * head_stride;
    std::memcpy(k + last * size, key + r * ldk + h * size, size * sizeof(T));
    std::memcpy(v + last * size, value + r * ldv + h * size, size * sizeof(T));
    const T* q = query + r * ldq + h * group * size;
    T* into = out + (r * heads + h) * group * size;
    if (size == 16) attend_heads<T, 16>(q, k, v, last + 1, group, scale, into);
    if (size == 32) attend_heads<T, 32>(q, k, v, last + 1, group, scale, into);
    if (size == 64) attend_heads<T, 64>(q, k, v, last + 1, group, scale, into);
    if (size == 128) attend_heads<T, 128>(q, k, v, last + 1, group, scale, into);
  }
}

}  // namespace

// Calls `function` for bfloat16 tensors if `narrow`, else for float32. Sizes and row strides (ldx: of x) count elements.
#define BOTH(function, ...)       \
  if (narrow) {                   \
    typedef bf16 T;               \
    function<T>(__VA_ARGS__);     \
  } else {                        \
    typedef float T;              \
    function<T>(__VA_ARGS__);     \
  }

extern "C" {

// Checksum of the sources, from setup.py. library.py refuses a build of other sources.
uint32_t asyncrl_source() { return ASYNCRL_SOURCE; }

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
