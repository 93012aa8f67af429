// gemm_tile: the product for many rows an expert, by tensor cores.
//
// Tiles of WIDTH columns by GEMM_TOKENS tokens, through a ring of stages that the whole block
// copies and shares; warps are 2 (columns) by 4 (tokens).

#define WIDTH 128
#define PITCH (WIDTH + 4)
#define STAGE_DEPTH 8  // chunks along the depth
#define WEIGHTS (WIDTH * STAGE_DEPTH)
#define STAGE (WEIGHTS + GEMM_TOKENS * STAGE_DEPTH)
#define STAGES (GEMM_RING / STAGE)
#define PER_WARP (GEMM_TOKENS / 4)  // tokens
#define ROW_CHUNKS (WIDTH / V)      // of a row of [K, N]

// Where a chunk lies, so that neither copies nor reads of any form meet in a bank: rows of eight
// chunks; of [K, N] rows of ROW_CHUNKS.
__device__ __forceinline__ int place_of(int row, int chunk) {
    return row * STAGE_DEPTH + (chunk ^ ((row & 1) << 2 | (row >> 1 & 3)));
}

__device__ __forceinline__ int place_of_kn(int row, int chunk) {
    return row * ROW_CHUNKS + (chunk ^ (row / V & 3) << 1);
}

__device__ __forceinline__ void read_weights(
    Chunk (&w)[HELD], const Chunk* stage, int column_warp, int g, int chunk) {
#pragma unroll
    for (int j = 0; j < HELD; ++j)
        w[j] = GEMM_KN
                   ? stage[place_of_kn(chunk * V + j % V, column_warp * (64 / V) + j / V * 8 + g)]
                   : stage[place_of(column_warp * 64 + g + 8 * j, chunk)];
}

__device__ __forceinline__ void do_task(const Problem& p, const Task& task) {
    constexpr int PARTS = WEIGHTS / THREADS, TOKEN_PARTS = GEMM_TOKENS * STAGE_DEPTH / THREADS;
    static_assert(STAGES >= 3, "two stages are copied while another is used");
    static_assert(GEMM_TOKENS * PITCH * 4 <= STAGES * STAGE * 16, "the sums lie in the ring");
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int g = lane / 4, t = lane % 4;
    const int column_warp = warp % 2, token_warp = warp / 2;
    const int chunks = p.depth / V;
    const int steps = task.slot < 0 ? 0 : round_up_division(chunks, STAGE_DEPTH);

    const char* tokens[TOKEN_PARTS];
#pragma unroll
    for (int i = 0; i < TOKEN_PARTS; ++i)
        tokens[i] = token_of(p, task, task.begin + thread / 8 + i * (THREADS / 8));
    const char* const expert = p.weights + task.slot * p.slot_stride;
#if GEMM_KN
    const int column = weight_column<WIDTH>(p, task.tile, thread % ROW_CHUNKS * V);
#else
    int columns[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
        columns[i] = weight_column<WIDTH>(p, task.tile, thread / 8 + i * (THREADS / 8));
#endif

    const auto begin_copies = [&](int n) {
        if (n < steps) {
            Chunk* const stage = shared_memory + n % STAGES * STAGE;
            const int chunk = n * STAGE_DEPTH + thread % 8;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
#if GEMM_KN
                const int row = thread / ROW_CHUNKS + i * (THREADS / ROW_CHUNKS);
                const int k = n * STAGE_DEPTH * V + row;
                const bool is_valid = column >= 0 && k < p.depth;
                const char* from = expert + k * p.weight_stride + column * ELEMENT;
                Chunk* const to = stage + place_of_kn(row, thread % ROW_CHUNKS);
#else
                const bool is_valid = columns[i] >= 0 && chunk < chunks;
                const char* from = expert + columns[i] * p.weight_stride + chunk * 16ll;
                Chunk* const to = stage + place_of(thread / 8 + i * (THREADS / 8), thread % 8);
#endif
                copy_async(to, is_valid ? from : p.weights, is_valid);
            }
#pragma unroll
            for (int i = 0; i < TOKEN_PARTS; ++i) {
                const bool is_valid = tokens[i] && chunk < chunks;
                copy_async(stage + WEIGHTS + place_of(thread / 8 + i * (THREADS / 8), thread % 8),
                           is_valid ? tokens[i] + chunk * 16ll : p.x, is_valid);
            }
        }
        commit_copies();
    };

    WarpSums<PER_WARP / 8> sums;
    // a warp whose tokens are all past the end has nothing to do but to copy
    const bool is_needed = task.begin + token_warp * PER_WARP < task.end;
#pragma unroll
    for (int n = 0; n < STAGES - 1; ++n) begin_copies(n);
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        begin_copies(n + STAGES - 1);
        if (!is_needed) continue;
        const Chunk* const stage = shared_memory + n % STAGES * STAGE;
        const Chunk* const rows = stage + WEIGHTS;
        Chunk w[HELD];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Chunk x[PER_WARP / 8];
            read_weights(w, stage, column_warp, g, half * 4 + t);
#pragma unroll
            for (int q = 0; q < PER_WARP / 8; ++q)
                x[q] = rows[place_of(token_warp * PER_WARP + q * 8 + g, half * 4 + t)];
            sums.add_products(w, x);
        }
    }
    wait_for_copies<0>();
    __syncthreads();
    float* const all = reinterpret_cast<float*>(shared_memory);
    float* const own = all + token_warp * PER_WARP * PITCH + column_warp * 64;
    sums.write(own, PITCH, g, t);
    __syncthreads();
    finish_rows<WIDTH, PITCH, 1, GEMM_TOKENS>(p, task, task.begin, all);
    __syncthreads();
}

#define TASK_ROWS GEMM_TOKENS
