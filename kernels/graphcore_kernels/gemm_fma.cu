// gemm_fma: the product of F32 for many rows an expert, in F32 arithmetic.
//
// Tiles of 128 columns by up to 256 tokens, 8 by 16 of them a thread, through a ring of stages that
// the whole block copies and shares. Four of the depth lie in a chunk, so that 24 reads of shared
// memory make 512 products. Every thread has each sixteenth token: a tile with fewer tokens takes
// all warps alike, and less time. Columns lie in units of 16: a thread has gate and up.

#define WIDTH 128
#define STAGE_DEPTH 4  // chunks along the depth
#define WEIGHTS (WIDTH * STAGE_DEPTH)
#define STAGE (WEIGHTS + GEMM_TOKENS * STAGE_DEPTH)
#define STAGES (GEMM_RING / STAGE)
#define TURNS (GEMM_TOKENS / 16)  // tokens of a thread

static_assert(IS_IEEE && !GEMM_KN && HELD == 8, "F32 in layout nk, and eight columns a thread");
static_assert(STAGES >= 3, "two stages are copied while another is used");

// Where a chunk lies: eight lanes that read a chunk of consecutive rows never meet in a bank.
__device__ __forceinline__ int place_of(int row, int chunk) {
    return row * STAGE_DEPTH + (chunk ^ (row >> 1 & 3));
}

// the weights' column of row n of a tile, -1 past the end
__device__ __forceinline__ int column_of_row(const Problem& p, int tile, int n) {
    const int unit = tile * (WIDTH / UNIT) + n / UNIT, g = n % 8;
    const int end = p.activation == NONE ? p.columns : p.columns / 2;
    const int column = p.activation == NONE ? unit * UNIT + n % UNIT : unit * (UNIT / 2) + g;
    return column < end ? column_of_unit(p, unit, n / 8 % 2, g) : -1;
}

// of a thread: warps are 2 (columns) by 4 (tokens), lanes 8 by 4
struct Place {
    int first_row, first_token;

    __device__ __forceinline__ Place() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        first_row = warp % 2 * 64 + lane % 8;
        first_token = warp / 2 * 4 + lane / 8;
    }
};

__device__ __forceinline__ void read_weights(
    Chunk (&w)[HELD], const Chunk* stage, const Place& place, int chunk) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) w[i] = stage[place_of(place.first_row + 8 * i, chunk)];
}

__device__ __forceinline__ void add_chunk(LaneSums<TURNS>& sums, const Chunk (&w)[HELD],
                                          const Chunk* rows, const Place& place, int chunk,
                                          int count) {
#pragma unroll
    for (int m = 0; m < TURNS; ++m) {
        if (m * 16 >= count) break;
        sums.add_products(w, m, rows[place_of(place.first_token + 16 * m, chunk)]);
    }
}

__device__ __forceinline__ void store_sums(
    const Problem& p, const Task& task, const Place& place, const LaneSums<TURNS>& sums) {
    const int unit = task.tile * (WIDTH / UNIT) + place.first_row / UNIT, g = place.first_row % 8;
    const bool has_pairs = p.activation != NONE;
#pragma unroll
    for (int m = 0; m < TURNS; ++m) {
        const int row = task.begin + place.first_token + 16 * m;
        if (row >= task.end) break;
        const float scale = p.scale ? p.scale[row] : 1.0f;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (has_pairs && i % 2) continue;
            const int column = has_pairs ? (unit + i / 2) * (UNIT / 2) + g
                                         : (unit + i / 2) * UNIT + i % 2 * 8 + g;
            if (column >= out_columns(p)) continue;
            float value = sums.sum[m][i];
            if (has_pairs) value = swiglu(value, sums.sum[m][i | 1]);
            if (p.scale) value = multiply(value, scale);
            if (task.slot < 0) value = 0.0f;
            store(p.out, row * p.out_stride + column, value, p.routes > 0);
        }
    }
}

__device__ __forceinline__ void do_task(const Problem& p, const Task& task) {
    constexpr int ROWS = THREADS / STAGE_DEPTH;  // copied at once
    constexpr int PARTS = WIDTH / ROWS, TOKEN_PARTS = GEMM_TOKENS / ROWS;
    const int own_row = threadIdx.x / STAGE_DEPTH, own_chunk = threadIdx.x % STAGE_DEPTH;
    const int chunks = p.depth / V, count = task.end - task.begin;
    const int steps = task.slot < 0 ? 0 : round_up_division(chunks, STAGE_DEPTH);
    const Place place;

    const char *tokens[TOKEN_PARTS], *weights[PARTS];
#pragma unroll
    for (int i = 0; i < TOKEN_PARTS; ++i)
        tokens[i] = token_of(p, task, task.begin + own_row + i * ROWS);
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const int column = column_of_row(p, task.tile, own_row + i * ROWS);
        weights[i] = column < 0 ? nullptr
                                : p.weights + task.slot * p.slot_stride + column * p.weight_stride;
    }

    const auto begin_copies = [&](int n) {
        if (n < steps) {
            Chunk* const to = shared_memory + n % STAGES * STAGE + place_of(own_row, own_chunk);
            const int chunk = n * STAGE_DEPTH + own_chunk;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const bool is_valid = weights[i] && chunk < chunks;
                copy_async(to + i * ROWS * STAGE_DEPTH,
                           is_valid ? weights[i] + chunk * 16ll : p.weights, is_valid);
            }
#pragma unroll
            for (int i = 0; i < TOKEN_PARTS; ++i) {
                if (i * ROWS >= count) break;
                const bool is_valid = tokens[i] && chunk < chunks;
                copy_async(to + WEIGHTS + i * ROWS * STAGE_DEPTH,
                           is_valid ? tokens[i] + chunk * 16ll : p.x, is_valid);
            }
        }
        commit_copies();
    };

    LaneSums<TURNS> sums;
#pragma unroll
    for (int n = 0; n < STAGES - 1; ++n) begin_copies(n);
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        begin_copies(n + STAGES - 1);
        const Chunk* const stage = shared_memory + n % STAGES * STAGE;
        Chunk w[2][HELD];  // of one chunk of the depth and of the next
        read_weights(w[0], stage, place, 0);
#pragma unroll 1
        for (int chunk = 0; chunk < STAGE_DEPTH; chunk += 2) {
            read_weights(w[1], stage, place, chunk + 1);
            add_chunk(sums, w[0], stage + WEIGHTS, place, chunk, count);
            read_weights(w[0], stage, place, (chunk + 2) % STAGE_DEPTH);
            add_chunk(sums, w[1], stage + WEIGHTS, place, chunk + 1, count);
        }
    }
    wait_for_copies<0>();
    __syncthreads();
    store_sums(p, task, place, sums);
    if (!p.routes || task.tile) return;
    for (int m = threadIdx.x; m < count; m += THREADS)
        note_route(p, task.expert, task.begin + m);
}

#define TASK_ROWS GEMM_TOKENS
