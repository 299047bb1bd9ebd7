// The row statistics and their gradient of fused_rl/cpu/logprob.py, one read forward, one read and one write backward;
// and the divergences of two rows of fused_rl/cpu/kl.py and jensen_shannon.py.
//
// A block of a row goes through the first cache as fp32; lanes of a fixed number sum its exponentials in fp32, and a row
// adds up its blocks in fp64: the bits of a row depend on nothing but the row. Vectors are the compiler's own
// (GCC, Clang), on any processor.
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 512, LANES = 16 };
enum { WIDTH = __BIGGEST_ALIGNMENT__ / 4, VECTORS = LANES / WIDTH };  // of the processor: 4 for SSE and NEON, 8, 16
enum { FP32, BF16, FP16 };

typedef float vec __attribute__((vector_size(4 * WIDTH), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t half_vec __attribute__((vector_size(2 * WIDTH)));

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
        for (; j + WIDTH <= n; j += WIDTH) {
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
        for (int j = 0; j < n; j += WIDTH) {  // round to nearest even; a NaN stays one
            uvec bits;
            memcpy(&bits, block + j, sizeof bits);
            uvec nan = (uvec)((bits & 0x7fffffff) > 0x7f800000);
            uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            half_vec h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), half_vec);
            memcpy(to + j, &h, 2 * (n - j < WIDTH ? n - j : WIDTH));
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

static inline vec pick(ivec where, vec a, vec b) { return (vec)(((ivec)a & where) | ((ivec)b & ~where)); }

static inline vec absolute(vec v) { return (vec)((ivec)v & 0x7fffffff); }

// exp(-u) - 1 + u of |u| <= 1 (Chebyshev fit, 1.2e-7 relative), where exp would cancel
static inline vec excess(vec u) {
    vec p = u * 2.5358644e-05f - 2.0329202e-04f;
    p = p * u + 1.3885394e-03f;
    p = p * u - 8.3308844e-03f;
    p = p * u + 4.1666735e-02f;
    p = p * u - 1.6666697e-01f;
    return (p * u + 0.5f) * u * u;
}

static float sum_of(const vec *lanes) {
    float v[LANES];
    memcpy(v, lanes, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) v[j] += v[j + width];
    return v[0];
}

// ---------------------------------------------------------------- one row

typedef struct {
    double m, ties, below_max, t;  // maximum, how many equal it; sums of exp(s) below it, and of exp(s) s
} State;

static float maximum(const float *block, int filled) {  // NaN may be lost: the sums show it
    vec top = *(vec *)block;
    for (int j = WIDTH; j < filled; j += WIDTH) {
        vec v = *(vec *)(block + j);
        top = pick(v > top, v, top);
    }
    float m = top[0];
    for (int j = 1; j < WIDTH; j++) m = top[j] > m ? top[j] : m;
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
                double d = (row.m - m) * inv_t, alpha = exp(d), mass = row.ties + row.below_max;
                row.t = alpha * (row.t + d * mass);
                row.below_max = alpha * mass;
                row.ties = 0;
            }
            row.m = m;
        }

        // the block's sums; what equals the maximum is counted, so that it does not drown the others
        float origin = row.m == -INFINITY ? 0 : (float)row.m, scale = (float)inv_t;
        vec below_max[VECTORS] = {{0}}, t[VECTORS] = {{0}};
        ivec ties = {0};
        for (int j = 0; j < filled; j += LANES)
            for (int k = 0; k < VECTORS; k++) {
                vec s = at_least((*(vec *)(block + j + k * WIDTH) - origin) * scale, LOWEST);
                vec p = exponential(s);
                ivec tie = s == 0;
                ties -= tie;
                below_max[k] += (vec)((ivec)p & ~tie);
                t[k] += p * s;
            }
        for (int j = 0; j < WIDTH; j++) row.ties += ties[j];
        row.below_max += sum_of(below_max);
        row.t += sum_of(t);
    }
    return row;
}

static void gradient(const void *x, int64_t x_offset, void *out, int64_t offset, int64_t vocab, int dtype,
                     int out_dtype, float m, float inv_t, float scale, float mean, float a, float b) {
    float block[BLOCK] __attribute__((aligned(64)));
    for (int64_t i = 0; i < vocab; i += BLOCK) {
        int n = loaded_block(block, x, x_offset + i, vocab - i, dtype);
        for (int j = 0; j < n; j += WIDTH) {
            vec s = at_least((*(vec *)(block + j) - m) * inv_t, LOWEST);
            *(vec *)(block + j) = exponential(s) * scale * (a - b * (s - mean));
        }
        store(out, offset + i, block, n, out_dtype);
    }
}

// ---------------------------------------------------------------- two rows, P of x and Q of y: see kl.py

static const float BANNED = -1e20f, FLOOR = -9.999999e19f, MOST = 1e19f;  // as in the kernels

typedef struct {
    const void *x, *y;
    int64_t x_at, y_at, vocab;
    int dtype;
    double inverse_temperature;
    float p_share, q_share;  // of the mixture
    float m, n, p_scale, q_scale, inv_t, offset, rest;
} Pair;

// Sets the normalisers, and log(p / q) = (x - y - apart) inv_t - constant: what is subtracted before x - y is scaled
// costs it no bits.
static void normalise(Pair *row, double m, double n, double p_mass, double q_mass, double apart, double constant) {
    row->m = m;
    row->n = n;
    row->p_scale = p_mass ? 1 / p_mass : 0;
    row->q_scale = q_mass ? 1 / q_mass : 0;
    row->inv_t = row->inverse_temperature;
    double full_offset = apart + constant / row->inverse_temperature;
    row->offset = full_offset;
    row->rest = full_offset - row->offset;
}

typedef struct {
    vec p, q, delta, excess, expm1;  // delta = log(p / q); exp(-delta) - 1 + delta and exp(-delta) - 1, if it is near
    ivec near, banned_in_q;          // |delta| < 1; Q bans what P does not
} Columns;

static inline Columns columns(const float *x, const float *y, const Pair *row) {
    Columns columns;
    vec a = at_least(*(vec *)x, BANNED), b = at_least(*(vec *)y, BANNED);
    columns.p = exponential(at_least((a - row->m) * row->inv_t, LOWEST)) * row->p_scale;
    columns.q = exponential(at_least((b - row->n) * row->inv_t, LOWEST)) * row->q_scale;
    vec d = a - b, back = d - a, rounded_off = (a - (d - back)) - (b + back);  // Knuth's TwoSum
    columns.delta = ((d - row->offset) + (rounded_off - row->rest)) * row->inv_t;
    columns.near = absolute(columns.delta) < 1;
    columns.excess = excess(columns.delta);
    columns.expm1 = columns.excess - columns.delta;
    columns.banned_in_q = (b <= BANNED) & (a > BANNED);
    return columns;
}

static int loaded_blocks(float *xs, float *ys, const Pair *row, int64_t i) {
    loaded_block(xs, row->x, row->x_at + i, row->vocab - i, row->dtype);
    return loaded_block(ys, row->y, row->y_at + i, row->vocab - i, row->dtype);
}

typedef struct {
    double excess, expm1;  // sums of p (exp(-delta) - 1 + delta) and of p (exp(-delta) - 1)
    int banned_in_q;
} KLSums;

static KLSums kl_sums(const Pair *row) {
    KLSums sums = {0};
    ivec banned_in_q = {0};
    float xs[BLOCK] __attribute__((aligned(64))), ys[BLOCK] __attribute__((aligned(64)));
    for (int64_t i = 0; i < row->vocab; i += BLOCK) {
        int n = loaded_blocks(xs, ys, row, i);
        vec excess[VECTORS] = {{0}}, expm1[VECTORS] = {{0}};
        for (int j = 0; j < n; j += LANES)
            for (int k = 0; k < VECTORS; k++) {
                Columns at = columns(xs + j + k * WIDTH, ys + j + k * WIDTH, row);
                vec q_less_p = at.q - at.p;
                excess[k] += pick(at.near, at.p * at.excess, q_less_p + at.p * at.delta);
                expm1[k] += pick(at.near, at.p * at.expm1, q_less_p);
                banned_in_q |= at.banned_in_q;
            }
        sums.excess += sum_of(excess);
        sums.expm1 += sum_of(expm1);
    }
    for (int j = 0; j < WIDTH; j++) sums.banned_in_q |= banned_in_q[j];
    return sums;
}

static double sum_of_p_delta(const Pair *row) {
    double sum = 0;
    float xs[BLOCK] __attribute__((aligned(64))), ys[BLOCK] __attribute__((aligned(64)));
    for (int64_t i = 0; i < row->vocab; i += BLOCK) {
        int n = loaded_blocks(xs, ys, row, i);
        vec of_block[VECTORS] = {{0}};
        for (int j = 0; j < n; j += LANES)
            for (int k = 0; k < VECTORS; k++) {
                Columns at = columns(xs + j + k * WIDTH, ys + j + k * WIDTH, row);
                of_block[k] += at.p * at.delta;
            }
        sum += sum_of(of_block);
    }
    return sum;
}

// log1p(t) / 2 - z for t = 2 z / (1 - z), |z| < 0.4626: 4e-8 of t - log1p(t)
static inline vec cubic(vec z) {
    vec w = z * z, series = w * 0.1485572f + 0.0991994976f;
    series = series * w + 0.143808395f;
    series = series * w + 0.199974044f;
    series = series * w + 0.333333445f;
    return z * w * series;
}

typedef struct {
    vec a, b, term;  // log(p / m) and log(q / m) of the mixture m; p_share p a + q_share q b
} Mixed;

static inline Mixed mixed(Columns at, const Pair *row) {
    const vec zero = {0}, p_share = zero + row->p_share, q_share = zero + row->q_share;
    ivec above = at.delta > 0;
    vec share = pick(above, p_share, q_share), other = pick(above, q_share, p_share);  // of the larger one
    vec distance = absolute(at.delta), ratio = exponential(at_least(-distance, LOWEST));
    vec less = pick(at.near, excess(distance) - distance, ratio - 1);

    // log(share + other ratio), which is log1p(t); where t is near -1, from the exponent and the mantissa. Near, t is
    // above 1/e - 1, and the terms below need z of t itself.
    vec t = other * less, sum = share + other * ratio;
    ivec by_series = at.near | (t > -0.63f), exponent = ((ivec)sum - 0x3f3504f3) >> 23;  // mantissas from sqrt(1 / 2) on
    vec mantissa = (vec)((ivec)sum - (exponent << 23));
    vec power = pick(by_series, zero, __builtin_convertvector(exponent, vec) * 0x1.62e43p-1f);
    vec argument = pick(by_series, t, mantissa - 1), z = argument / (argument + 2), of_z = cubic(z);
    vec larger = -2 * (z + of_z) - power, smaller = larger - distance;

    // near, the terms of the two sides would cancel
    vec z_other = -share * less / ((2 - share) * less + 2);
    vec of_both = share * of_z + other * (less + 1) * cubic(z_other);
    vec near = pick(above, at.p, at.q) * (t * share * (z - z_other) - 2 * of_both);
    Mixed logs = {pick(above, larger, smaller), pick(above, smaller, larger)};
    logs.term = pick(at.near, near, p_share * at.p * logs.a + q_share * at.q * logs.b);
    return logs;
}

typedef struct {
    double term, p_a, q_b;
} MixedSums;

static MixedSums mixed_sums(const Pair *row) {
    MixedSums sums = {0};
    float xs[BLOCK] __attribute__((aligned(64))), ys[BLOCK] __attribute__((aligned(64)));
    for (int64_t i = 0; i < row->vocab; i += BLOCK) {
        int n = loaded_blocks(xs, ys, row, i);
        vec term[VECTORS] = {{0}}, p_a[VECTORS] = {{0}}, q_b[VECTORS] = {{0}};
        for (int j = 0; j < n; j += LANES)
            for (int k = 0; k < VECTORS; k++) {
                Columns at = columns(xs + j + k * WIDTH, ys + j + k * WIDTH, row);
                Mixed log = mixed(at, row);
                term[k] += log.term;
                p_a[k] += at.p * log.a;
                q_b[k] += at.q * log.b;
            }
        sums.term += sum_of(term);
        sums.p_a += sum_of(p_a);
        sums.q_b += sum_of(q_b);
    }
    return sums;
}

typedef enum { KL_DX, KL_DY, JS_DX, JS_DY } Kind;

// `mean`: of log(p / m), or of log(q / m). For KL_DX the row's constant is such that delta has a mean of 0.
static inline __attribute__((always_inline)) void pair_gradient(const Pair *row, Kind kind, float g, float mean,
                                                                void *out, int64_t out_at) {
    float xs[BLOCK] __attribute__((aligned(64))), ys[BLOCK] __attribute__((aligned(64)));
    for (int64_t i = 0; i < row->vocab; i += BLOCK) {
        int n = loaded_blocks(xs, ys, row, i);
        for (int j = 0; j < n; j += WIDTH) {
            Columns at = columns(xs + j, ys + j, row);
            vec slope;
            if (kind == KL_DX) slope = at.p * at.delta;
            if (kind == KL_DY) slope = pick(at.near, at.p * at.expm1, at.q - at.p);
            if (kind == JS_DX) slope = at.p * (mixed(at, row).a - mean);
            if (kind == JS_DY) slope = at.q * (mixed(at, row).b - mean);
            *(vec *)(xs + j) = slope * g;
        }
        store(out, out_at + i, xs, n, row->dtype);
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
        double row_rest = row.below_max + (row.ties > 1 ? row.ties - 1 : 0), log1p_rest = log1p(row_rest);
        double origin = row.m == -INFINITY ? 0 : row.m;
        logprobs[i] = (loaded(x, i * stride + targets[i], dtype) - origin) * inv_t - log1p_rest;
        entropy[i] = log1p_rest - row.t / (1 + row_rest);
        lse[i] = row.m * inv_t + log1p_rest;
        m[i] = row.m;
        rest[i] = row_rest;
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
        float block[WIDTH] = {at_target};
        store(out, i * out_stride + targets[i], block, 1, out_dtype);
    }
}

typedef struct {  // `Pair` of native.py: two tensors (batch, length, vocab), n = batch length rows
    const void *x;
    int64_t x_batch, x_stride;
    const void *y;
    int64_t y_batch, y_stride, dtype, n, length, vocab;
    const uint8_t *mask;
    const float *inv_temperatures;
    double inv_temperature, p_share, q_share;
} Tensors;

static Pair pair_at(const Tensors *all, int64_t i) {
    int64_t batch = i / all->length, position = i % all->length;
    Pair row = {all->x, all->y};
    row.x_at = batch * all->x_batch + position * all->x_stride;
    row.y_at = batch * all->y_batch + position * all->y_stride;
    row.vocab = all->vocab;
    row.dtype = all->dtype;
    row.inverse_temperature = all->inv_temperatures ? all->inv_temperatures[i] : all->inv_temperature;
    row.p_share = all->p_share;
    row.q_share = all->q_share;
    return row;
}

enum { M, W, W_ALL, OFFSET, C, N, F, S, K, NUMBERS };  // of `KLState`, n each

void kl_fwd(const Tensors *all, float *kl, float *state, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < all->n; i++) {
        if (all->mask && !all->mask[i]) {
            kl[i] = 0;
            for (int j = 0; j < NUMBERS; j++) state[j * all->n + i] = 0;
            continue;
        }
        Pair row = pair_at(all, i);
        double inv_t = row.inverse_temperature;
        State p = statistics(row.x, row.x_at, row.vocab, row.dtype, inv_t);
        State q = statistics(row.y, row.y_at, row.vocab, row.dtype, inv_t);
        int p_some = p.m > BANNED, q_some = q.m > BANNED, some = p_some && q_some;
        double w = p_some ? p.below_max + p.ties : 0 * p.below_max, s = q_some ? q.below_max + q.ties : 0 * q.below_max;

        // The constant is off by the rounding of the sums, which shows in the mass of Q: exp(-delta) of mean 1 is exact.
        int banned_in_q = p_some && !q_some;
        double apart = 0, constant = 0, divergence = 0, k = -1e10;
        if (some) {
            apart = p.m - q.m;
            constant = log1p(p.below_max + p.ties - 1) - log1p(q.below_max + q.ties - 1);
            normalise(&row, p.m, q.m, w, s, apart, constant);
            KLSums sums = kl_sums(&row);
            banned_in_q = sums.banned_in_q;
            if (!banned_in_q) {
                double shift = log1p(sums.expm1);
                constant -= shift;
                divergence = sums.excess - (sums.expm1 - shift);
                divergence = divergence < 0 ? 0 : divergence;
            }
            if (divergence > 1) {  // large delta were rounded: once more, about their mean
                normalise(&row, p.m, q.m, w, s, apart, constant + divergence);
                divergence += sum_of_p_delta(&row);
            }
            k = divergence;
        }

        // of logits that are not finite; what is small beside so large a distance may be rounding alone
        double distance = fabs(apart) * inv_t;
        double bad = p.m > MOST || q.m > MOST ? NAN : (w - w) + (s - s);
        if (distance > 1e7 && divergence < 0.01 * distance && !banned_in_q) bad = NAN;
        double mean = apart + (constant + divergence) / inv_t;
        float offset = mean;
        float numbers[NUMBERS] = {
            [M] = p.m < FLOOR ? FLOOR : p.m, [W] = some ? w : 0, [W_ALL] = w, [OFFSET] = offset,
            [C] = (mean - offset) * inv_t, [N] = q.m < FLOOR ? FLOOR : q.m, [F] = -s * expm1(-divergence), [S] = s,
            [K] = k + bad,
        };
        for (int j = 0; j < NUMBERS; j++) state[j * all->n + i] = numbers[j];
        kl[i] = banned_in_q ? INFINITY + bad : divergence + bad;
    }
}

// As `normalise`, from what kl_fwd left; where P and Q are far apart, k and the mean would cancel.
static void normalise_by_state(Pair *row, const float *state, int64_t n, int64_t i) {
    const float *of = state + i;
    double m = of[M * n], y_m = of[N * n], w = of[W_ALL * n], s = of[S * n], k = of[K * n];
    if (k > 8) normalise(row, m, y_m, w, s, m - y_m, log(w / s));
    else normalise(row, m, y_m, w, s, of[OFFSET * n], of[C * n] - k);
}

void js_fwd(const Tensors *all, const float *state, float *sums, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < all->n; i++) {
        MixedSums of_row = {0};
        if (!all->mask || all->mask[i]) {
            Pair row = pair_at(all, i);
            normalise_by_state(&row, state, all->n, i);
            of_row = mixed_sums(&row);
        }
        sums[i] = of_row.term;
        sums[all->n + i] = of_row.p_a;
        sums[2 * all->n + i] = of_row.q_b;
    }
}

// `out` (n, vocab) is the gradient of x or of y; `means` (n,) those of log(p / m) or log(q / m), null for KL.
void pair_bwd(const Tensors *all, const float *g, const float *divergence, const float *state, const float *means,
              int of_y, void *out, int threads) {
    const int64_t n = all->n, vocab = all->vocab, size = all->dtype == FP32 ? 4 : 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < n; i++) {
        // no step would make such a divergence finite, or less than 0, and none would change what P bans throughout
        int no_step = divergence[i] == INFINITY || divergence[i] == 0 || state[W_ALL * n + i] == 0;
        if (no_step || (all->mask && !all->mask[i])) {
            memset((char *)out + i * vocab * size, 0, vocab * size);
            continue;
        }
        Pair row = pair_at(all, i);
        double slope = g[i] * row.inverse_temperature;
        normalise_by_state(&row, state, n, i);
        if (means) {
            if (of_y) pair_gradient(&row, JS_DY, slope * row.q_share, means[i], out, i * vocab);
            else pair_gradient(&row, JS_DX, slope * row.p_share, means[i], out, i * vocab);
        } else if (of_y) {
            pair_gradient(&row, KL_DY, slope, 0, out, i * vocab);
        } else {
            row.offset = state[OFFSET * n + i];
            row.rest = state[C * n + i] / row.inverse_temperature;
            pair_gradient(&row, KL_DX, slope, 0, out, i * vocab);
        }
    }
}
