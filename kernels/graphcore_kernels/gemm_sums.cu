// gemm_sums: fragments of weights and tokens, and the sums of their products, of one warp.
//
// GEMM_PRECISION and GEMM_KN choose; see moe_grouped_gemm.cu.

#define WORDS_ARE_F32 (GEMM_PRECISION >= 2)
#define IS_IEEE (GEMM_PRECISION == 2)
#define ELEMENT (WORDS_ARE_F32 ? 4 : 2)
#define V (16 / ELEMENT)       // elements of a chunk
#define HELD (2 * GEMM_TILES)  // chunks of weights that a lane holds for 4 * V of the depth

// the column, in the tile of a warp, of a lane's i-th row of weights
__device__ __forceinline__ int column_of(int g, int i) {
    return GEMM_KN ? i / V * 8 * V + g * V + i % V : g + 8 * i;
}

// 32-bit word number e of the depth (two elements of 16 bits), of a lane's i-th row of weights
__device__ __forceinline__ u32 weight_word(const Chunk (&w)[HELD], int i, int e) {
#if !GEMM_KN
    return w[i].word[e];
#elif WORDS_ARE_F32
    return w[i / V * V + e].word[i % V];
#else
    return permute_bytes(w[2 * e].word[i / 2], w[2 * e + 1].word[i / 2], i % 2 ? 0x7632 : 0x5410);
#endif
}

#if !IS_IEEE
// sums of a warp: GEMM_TILES * 16 columns of weights by NT * 8 tokens
template <int NT>
struct WarpSums {
    float sum[GEMM_TILES][NT][4] = {};

    __device__ __forceinline__ void add_products(const Chunk (&w)[HELD], const Chunk (&x)[NT]) {
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int tile = 0; tile < GEMM_TILES; ++tile) {
                u32 a[4];
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    a[k] = weight_word(w, 2 * tile + k % 2, 2 * step + k / 2);
                add_tile(tile, a, x, 2 * step);
            }
    }

    __device__ __forceinline__ void add_tile(
        int tile, u32 (&a)[4], const Chunk (&x)[NT], int first) {
#if GEMM_PRECISION == 3
        u32 rest[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) split(a[k], rest[k]);
#elif GEMM_PRECISION == 4
#pragma unroll
        for (int k = 0; k < 4; ++k) a[k] = to_tf32(a[k]);
#endif
#pragma unroll
        for (int q = 0; q < NT; ++q) {
            u32 b0 = x[q].word[first], b1 = x[q].word[first + 1];
#if GEMM_PRECISION == 0
            multiply_bf16(sum[tile][q], a, b0, b1);
#elif GEMM_PRECISION == 1
            multiply_f16(sum[tile][q], a, b0, b1);
#elif GEMM_PRECISION == 4
            multiply_tf32(sum[tile][q], a, to_tf32(b0), to_tf32(b1));
#else
            // the small terms first; added by the F32 units, because the tensor cores cut off
            u32 rest0, rest1;
            split(b0, rest0), split(b1, rest1);
            float part[4] = {};
            multiply_tf32(part, rest, b0, b1);
            multiply_tf32(part, a, rest0, rest1);
            multiply_tf32(part, a, b0, b1);
#pragma unroll
            for (int k = 0; k < 4; ++k) sum[tile][q][k] = add(sum[tile][q][k], part[k]);
#endif
        }
    }

    static __device__ __forceinline__ void split(u32& word, u32& rest) {
        const u32 rounded = to_tf32(word);
        rest = to_tf32(as_word(add(as_float(word), -as_float(rounded))));
        word = rounded;
    }

    __device__ __forceinline__ void write(float* sums, int pitch, int g, int t) const {
#pragma unroll
        for (int tile = 0; tile < GEMM_TILES; ++tile)
#pragma unroll
            for (int q = 0; q < NT; ++q)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    sums[(q * 8 + 2 * t + k % 2) * pitch + column_of(g, 2 * tile + k / 2)] =
                        sum[tile][q][k];
    }
};
#else
// sums of a lane: its HELD columns of weights by COUNT tokens
template <int COUNT>
struct LaneSums {
    float sum[COUNT][HELD] = {};

    __device__ __forceinline__ void add_products(
        const Chunk (&w)[HELD], int token, const Chunk& x) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int i = 0; i < HELD; ++i)
                sum[token][i] = multiply_add(
                    as_float(weight_word(w, i, e)), as_float(x.word[e]), sum[token][i]);
    }

    // where the four lanes of a g have a part of the depth each
    __device__ __forceinline__ void write(float* sums, int pitch, int g, int t) const {
#pragma unroll
        for (int m = 0; m < COUNT; ++m)
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                float total = sum[m][i];
                total = add(total, from_lane_xor(total, 1));
                total = add(total, from_lane_xor(total, 2));
                if (t == m % 4) sums[m * pitch + column_of(g, i)] = total;
            }
    }
};
#endif
