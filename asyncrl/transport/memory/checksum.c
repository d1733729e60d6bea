// Copy and checksum of the weight board in one pass over memory; what it computes, and why, stands in checksum.py, whose numpy
// code is its reference. Optional. Plain C interface, called through ctypes: neither Python's ABI nor torch's.
//
// Stores are streaming ones: a copy that filled the caches would read every line before it overwrites it, half as much traffic
// again, and would push out what the trainer works on. They are weakly ordered, so a fence stands before the first (the word
// that says "not whole" must be seen before them) and behind the last.

#include <immintrin.h>
#include <stdint.h>

#if !defined(__x86_64__)
#error "the store order that the board relies on is x86-64's"
#endif

enum { STEP = 64, WORDS = STEP / 4 };  // bytes of one turn of the loop, which two registers take

typedef struct {
  __m256i low, high, low_sums, high_sums;  // of the even words, of the odd ones; and the sums of these sums over the steps
} Lanes;

__attribute__((target("avx2"))) static inline void add(Lanes *lanes, __m256i words) {
  lanes->low = _mm256_add_epi64(lanes->low, _mm256_and_si256(words, _mm256_set1_epi64x(0xffffffff)));
  lanes->high = _mm256_add_epi64(lanes->high, _mm256_srli_epi64(words, 32));
  lanes->low_sums = _mm256_add_epi64(lanes->low_sums, lanes->low);
  lanes->high_sums = _mm256_add_epi64(lanes->high_sums, lanes->high);
}

// A word of step t stands (steps - t) times in a sum of sums: from that, each word times its place, all modulo 2^64.
__attribute__((target("avx2"))) static void gather(const Lanes *lanes, uint64_t steps, int place, uint64_t *sums) {
  uint64_t sum[2][4], of_sums[2][4];
  _mm256_storeu_si256((__m256i *)sum[0], lanes->low);
  _mm256_storeu_si256((__m256i *)sum[1], lanes->high);
  _mm256_storeu_si256((__m256i *)of_sums[0], lanes->low_sums);
  _mm256_storeu_si256((__m256i *)of_sums[1], lanes->high_sums);
  for (int odd = 0; odd < 2; ++odd)
    for (int i = 0; i < 4; ++i) {
      uint64_t weight = (uint64_t)(place + 2 * i + odd + 1);
      sums[0] += sum[odd][i];
      sums[1] += WORDS * (steps * sum[odd][i] - of_sums[odd][i]) + weight * sum[odd][i];
    }
}

// Eight floats -> bfloat16 in the low halves of eight words: to nearest, ties to even; NaN stays NaN.
__attribute__((target("avx2"))) static inline __m256i rounded(const float *from) {
  __m256 x = _mm256_loadu_ps(from);
  __m256i bits = _mm256_castps_si256(x);
  __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0), nan);
}

__attribute__((target("avx2"))) static inline __m256i narrowed(const float *from) {
  __m256i pairs = _mm256_packus_epi32(rounded(from), rounded(from + 8));  // of 128 bits each, from both in turn
  return _mm256_permute4x64_epi64(pairs, 0xd8);
}

// `bytes` of the target, or, where that is null, of the source alone. `cast`: they are made of floats, twice as many.
__attribute__((target("avx2"), always_inline)) static inline void pass(const char *source, char *target, long bytes,
                                                                       uint64_t *sums, int cast) {
  Lanes first = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  Lanes second = first;
  for (long at = 0; at < bytes; at += STEP) {
    const char *low = source + (cast ? 2 * at : at), *high = low + (cast ? STEP : STEP / 2);
    __m256i a = cast ? narrowed((const float *)low) : _mm256_loadu_si256((const __m256i *)low);
    __m256i b = cast ? narrowed((const float *)high) : _mm256_loadu_si256((const __m256i *)high);
    if (target) {
      _mm256_stream_si256((__m256i *)(target + at), a);
      _mm256_stream_si256((__m256i *)(target + at + 32), b);
    }
    add(&first, a);
    add(&second, b);
  }
  sums[0] = sums[1] = 0;
  gather(&first, (uint64_t)bytes / STEP, 0, sums);
  gather(&second, (uint64_t)bytes / STEP, 8, sums);
}

__attribute__((target("avx2"))) static void bucket(const char *source, char *target, long bytes, uint64_t *sums) {
  pass(source, target, bytes, sums, 0);
}

__attribute__((target("avx2"))) static void cast_bucket(const char *source, char *target, long bytes, uint64_t *sums) {
  pass(source, target, bytes, sums, 1);
}

// All buckets of `size` bytes of the target, or of the source alone.
static void all(const char *source, char *target, long bytes, long size, uint64_t *sums, int threads, int cast) {
  _mm_sfence();
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long at = 0; at < bytes; at += size) {
    long some = bytes - at < size ? bytes - at : size;
    char *to = target ? target + at : 0;
    uint64_t *own = sums + at / size * 2;
    if (cast)
      cast_bucket(source + 2 * at, to, some, own);
    else
      bucket(source + at, to, some, own);
    _mm_sfence();
  }
}

int asyncrl_runs(void) { return __builtin_cpu_supports("avx2") != 0; }

uint32_t asyncrl_source(void) { return ASYNCRL_SOURCE; }

void asyncrl_sums(const char *source, long bytes, uint64_t *sums) { bucket(source, 0, bytes, sums); }

// `sums` [buckets, 2]. All sizes are multiples of 64. `target`: aligned to 64 bytes; null: the checksums alone.
void asyncrl_copy(const char *source, char *target, long bytes, long size, uint64_t *sums, int threads) {
  all(source, target, bytes, size, sums, threads, 0);
}

// As `asyncrl_copy`, of bfloat16 that are made of floats; `bytes` and `size` are those of the target.
void asyncrl_narrow(const char *source, char *target, long bytes, long size, uint64_t *sums, int threads) {
  all(source, target, bytes, size, sums, threads, 1);
}
