// The row statistics and their gradient of fused_rl/cpu/logprob.py, one read forward, one read and one write backward.
//
// A block of a row goes through the first cache as fp32; lanes of a fixed number sum its exponentials in fp32, and a row
// adds up its blocks in fp64: the bits of a row depend on nothing but the row. Vectors are the compiler's own
// (GCC, Clang), on any processor.
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 512, LANES = 16 };
enum { FP32, BF16, FP16 };

typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES)));
typedef float short_vec __attribute__((vector_size(32)));
typedef double wide_vec __attribute__((vector_size(64)));

// ---------------------------------------------------------------- values of any dtype, a block at a time

static float loaded(const void *x, int64_t i, int dtype) {
    if (dtype == FP32) return ((const float *)x)[i];
    if (dtype == FP16) return (float)((const _Float16 *)x)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void load(float *block, const void *x, int64_t i, int n, int dtype) {
    if (dtype == FP32) {
        memcpy(block, (const float *)x + i, 4 * n);
    } else if (dtype == BF16) {
        const uint16_t *from = (const uint16_t *)x + i;
        int j = 0;
        for (; j + LANES <= n; j += LANES) {
            half_vec h;
            memcpy(&h, from + j, sizeof h);
            uvec bits = __builtin_convertvector(h, uvec) << 16;
            memcpy(block + j, &bits, sizeof bits);
        }
        for (; j < n; j++) block[j] = loaded(from, j, BF16);
    } else {
        for (int j = 0; j < n; j++) block[j] = (float)((const _Float16 *)x)[i + j];
    }
}

// The next columns of a row in fp32, filled up to whole vectors with what adds nothing; how many are the row's.
static int loaded_block(float *block, const void *x, int64_t offset, int64_t left, int dtype) {
    int n = left < BLOCK ? (int)left : BLOCK;
    load(block, x, offset, n, dtype);
    for (int j = n; j % LANES; j++) block[j] = -INFINITY;
    return n;
}

static void store(void *out, int64_t i, const float *block, int n, int dtype) {
    if (dtype == FP32) {
        memcpy((float *)out + i, block, 4 * n);
    } else if (dtype == BF16) {
        uint16_t *to = (uint16_t *)out + i;
        for (int j = 0; j < n; j += LANES) {  // round to nearest even; a NaN stays one
            uvec bits;
            memcpy(&bits, block + j, sizeof bits);
            uvec nan = (uvec)((bits & 0x7fffffff) > 0x7f800000);
            uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            half_vec h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), half_vec);
            memcpy(to + j, &h, 2 * (n - j < LANES ? n - j : LANES));
        }
    } else {
        for (int j = 0; j < n; j++) ((_Float16 *)out)[i + j] = (_Float16)block[j];
    }
}

// ---------------------------------------------------------------- arithmetic

static const float LOWEST = -87.0f;  // exp of less is 0; a product with it is 0 too, where -inf would give NaN

static inline vec at_least(vec s, float low) {  // NaN stays
    ivec below = s < low;
    return (vec)(((ivec)s & ~below) | ((ivec)(low - (vec){0}) & below));
}

// exp(s) of s from LOWEST to 0, within 1 ulp, exactly 1 at 0; exactly 0 at LOWEST
static inline vec exponential(vec s) {
    const float shift = 0x1.8p23f;  // rounds to a whole number, whose bits it leaves in the lowest places
    vec n = s * 0x1.715476p+0f + shift;
    ivec power = (((ivec)n) + 127) << 23;
    n -= shift;
    vec r = s - n * 0x1.62e4p-1f;  // ln 2 in two parts
    r -= n * 0x1.7f7d1cp-20f;
    vec p = r * 0x1.a01a02p-13f + 0x1.6c16c2p-10f;
    p = p * r + 0x1.111112p-7f;
    p = p * r + 0x1.555556p-5f;
    p = p * r + 0x1.555556p-3f;
    p = p * r + 0.5f;
    p = p * (r * r) + r;
    p = (p + 1) * (vec)power;
    return (vec)((ivec)p & ~(s <= LOWEST));
}

static float sum_of(vec v) {
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) v[j] += v[j + width];
    return v[0];
}

// ---------------------------------------------------------------- one row

typedef struct {
    double m, ties, others, t;  // maximum, how many equal it; sums of exp(s) over the others, and of exp(s) s
} State;

static float maximum(const float *block, int filled) {  // NaN may be lost: the sums show it
    vec top = *(vec *)block;
    for (int j = LANES; j < filled; j += LANES) {
        vec v = *(vec *)(block + j);
        ivec above = v > top;
        top = (vec)(((ivec)v & above) | ((ivec)top & ~above));
    }
    float m = top[0];
    for (int j = 1; j < LANES; j++) m = top[j] > m ? top[j] : m;
    return m;
}

static State statistics(const void *x, int64_t offset, int64_t vocab, int dtype, double inv_t) {
    State row = {-INFINITY, 0, 0, 0};
    float block[BLOCK] __attribute__((aligned(64)));
    for (int64_t i = 0; i < vocab; i += BLOCK) {
        int n = loaded_block(block, x, offset + i, vocab - i, dtype);
        int filled = (n + LANES - 1) / LANES * LANES;

        // what stands so far, seen from a new maximum
        float m = maximum(block, filled);
        if (m > row.m) {
            if (row.m != -INFINITY) {
                double d = (row.m - m) * inv_t, alpha = exp(d), mass = row.ties + row.others;
                row.t = alpha * (row.t + d * mass);
                row.others = alpha * mass;
                row.ties = 0;
            }
            row.m = m;
        }

        // the block's sums; what equals the maximum is counted, so that it does not drown the others
        float origin = row.m == -INFINITY ? 0 : (float)row.m, scale = (float)inv_t;
        vec others = {0}, t = {0};
        ivec ties = {0};
        for (int j = 0; j < filled; j += LANES) {
            vec s = at_least((*(vec *)(block + j) - origin) * scale, LOWEST);
            vec p = exponential(s);
            ivec tie = s == 0;
            ties -= tie;
            others += (vec)((ivec)p & ~tie);
            t += p * s;
        }
        for (int j = 0; j < LANES; j++) row.ties += ties[j];
        row.others += sum_of(others);
        row.t += sum_of(t);
    }
    return row;
}

static void gradient(const void *x, int64_t x_offset, void *out, int64_t offset, int64_t vocab, int dtype,
                     int out_dtype, float m, float inv_t, float scale, float mean, float a, float b) {
    float block[BLOCK] __attribute__((aligned(64)));
    for (int64_t i = 0; i < vocab; i += BLOCK) {
        int n = loaded_block(block, x, x_offset + i, vocab - i, dtype);
        for (int j = 0; j < n; j += LANES) {
            vec s = at_least((*(vec *)(block + j) - m) * inv_t, LOWEST);
            *(vec *)(block + j) = exponential(s) * scale * (a - b * (s - mean));
        }
        store(out, offset + i, block, n, out_dtype);
    }
}

// ---------------------------------------------------------------- all rows; a null pointer: none given

void logprob_fwd(const void *x, int64_t stride, int dtype, int64_t n, int64_t vocab, const int64_t *targets,
                 const uint8_t *mask, const float *inv_temperatures, double inv_temperature, float *logprobs,
                 float *entropy, float *lse, float *m, float *rest, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < n; i++) {
        if (mask && !mask[i]) {
            logprobs[i] = entropy[i] = lse[i] = m[i] = rest[i] = 0;
            continue;
        }
        double inv_t = inv_temperatures ? inv_temperatures[i] : inv_temperature;
        State row = statistics(x, i * stride, vocab, dtype, inv_t);
        double others = row.others + (row.ties > 1 ? row.ties - 1 : 0), log1p_others = log1p(others);
        double origin = row.m == -INFINITY ? 0 : row.m;
        logprobs[i] = (loaded(x, i * stride + targets[i], dtype) - origin) * inv_t - log1p_others;
        entropy[i] = log1p_others - row.t / (1 + others);
        lse[i] = row.m * inv_t + log1p_others;
        m[i] = row.m;
        rest[i] = others;
    }
}

void logprob_bwd(const float *dlogprobs, const float *dentropy, const float *dlse, const void *x, int64_t stride,
                 void *out, int64_t out_stride, int dtype, int out_dtype, int64_t n, int64_t vocab,
                 const int64_t *targets, const uint8_t *mask, const float *entropy, const float *m, const float *rest,
                 const float *inv_temperatures, double inv_temperature, int threads) {
    const int size = out_dtype == FP32 ? 4 : 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < n; i++) {
        if ((mask && !mask[i]) || m[i] == -INFINITY) {
            memset((char *)out + i * out_stride * size, 0, vocab * size);
            continue;
        }
        double inv_t = inv_temperatures ? inv_temperatures[i] : inv_temperature;
        double dlp = dlogprobs ? dlogprobs[i] : 0, dh = dentropy ? dentropy[i] : 0, dl = dlse ? dlse[i] : 0;
        double log1p_rest = log1p(rest[i]), mean = log1p_rest - entropy[i];  // of s: log p + H = s - mean

        // the target's column apart: 1 - p there is exact also when p is next to 1; the logits may be overwritten
        double s = (loaded(x, i * stride + targets[i], dtype) - (double)m[i]) * inv_t;
        s = s < -200 ? -200 : s;
        double logp = s - log1p_rest, dp = dl - dh * (s - mean);
        float at_target = (dlp * -expm1(logp) + exp(logp) * dp) * inv_t;

        gradient(x, i * stride, out, i * out_stride, vocab, dtype, out_dtype, m[i], inv_t, 1 / (1 + (double)rest[i]),
                 mean, (dl - dlp) * inv_t, dh * inv_t);
        float block[LANES] = {at_target};
        store(out, i * out_stride + targets[i], block, 1, out_dtype);
    }
}

// ---------------------------------------------------------------- no rows: a tensor as one vector

enum { SPAN = 1 << 16 };

// sums[i] is the sum of the squares of span i in fp64: the same bits for any number of threads.
void squares(const void *x, int dtype, int64_t n, double *sums, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t begin = 0; begin < n; begin += SPAN) {
        int64_t end = begin + SPAN < n ? begin + SPAN : n;
        float block[BLOCK] __attribute__((aligned(64)));
        wide_vec total[BLOCK / 64] = {{0}};  // enough of them that no sum waits for the one before
        for (int64_t i = begin; i < end; i += BLOCK) {
            int count = end - i < BLOCK ? (int)(end - i) : BLOCK;
            const float *values = block;
            if (dtype == FP32 && count == BLOCK) {
                values = (const float *)x + i;
            } else {
                load(block, x, i, count, dtype);
                for (int j = count; j < BLOCK; j++) block[j] = 0;
            }
            for (int j = 0; j < BLOCK; j += 8) {
                short_vec v;
                memcpy(&v, values + j, sizeof v);
                wide_vec wide = __builtin_convertvector(v, wide_vec);
                total[j / 8 % (BLOCK / 64)] += wide * wide;
            }
        }
        double sum = 0;
        for (int k = 0; k < BLOCK / 64; k++)
            for (int j = 0; j < 8; j++) sum += total[k][j];
        sums[begin / SPAN] = sum;
    }
}
