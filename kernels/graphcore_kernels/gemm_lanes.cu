// gemm_lanes: the product for many rows an expert in F32 arithmetic.
//
// Tiles of WIDTH columns by GEMM_TOKENS tokens, through a ring of stages that the whole block
// copies and shares. A thread has HELD columns by TURNS tokens, every TOKENS_AT_ONCE-th: a tile of
// few tokens takes all warps alike, and fewer turns. What is multiplied next is read from shared
// memory while the last is multiplied, across stages too.

#define WIDTH 128
#define PITCH (WIDTH + (GEMM_KN ? 1 : 8))  // sums on their way out meet in no bank
#define STAGE_DEPTH 8  // chunks along the depth
#define WEIGHTS (WIDTH * STAGE_DEPTH)
#define STAGE ((WEIGHTS + GEMM_TOKENS * STAGE_DEPTH) * 16)  // bytes
#define STAGES (GEMM_RING * 16 / STAGE)
#define TOKENS_AT_ONCE (WARPS / 2 * 4)
#define TURNS (GEMM_TOKENS / TOKENS_AT_ONCE)
#define AHEAD 2  // tokens that a thread reads ahead
#define ROW_CHUNKS (WIDTH / V)  // of a row of [K, N]
#define ROW_BYTES (ROW_CHUNKS * 16)

static_assert(IS_IEEE && HELD == 8, "F32, and eight columns a thread");
static_assert(STAGES >= 3, "of a stage, the one before and the one behind, none is copied to");
static_assert(GEMM_TOKENS * PITCH * 4 <= STAGES * STAGE, "the sums lie in the ring");

// Where a chunk of a row lies. Rows that are equal modulo 8 differ by whole rows.
__device__ __forceinline__ int place_of(int row, int chunk) {
    return row * STAGE_DEPTH + (chunk ^ ((row & 1) << 2 | (row >> 1 & 3)));
}

// the chunk that lies so many bytes behind the beginning of the ring
__device__ __forceinline__ Chunk chunk_at(int bytes, int beyond) {
    const char* const ring = reinterpret_cast<const char*>(shared_memory);
    return *reinterpret_cast<const Chunk*>(ring + bytes + beyond);
}

// Of a thread. Warps are 2 (columns) by WARPS / 2 (tokens), lanes 8 (g) by 4 (t). Shared memory
// answers a half of a warp at once where lanes i and i ^ 1, or i and i ^ 2, read the same chunk:
// the former do so of weights, the latter of tokens. Places are bytes in a stage.
struct Place {
    int g, first_column, first_token;
    int weights, token;          // of chunk 0
    int weights_odd, token_odd;  // from an even chunk to the next

    __device__ __forceinline__ Place() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        g = lane / 2 % 8;
        first_column = warp % 2 * 64;
        first_token = warp / 2 * 4 + lane / 16 * 2 + lane % 2;
        weights = (GEMM_KN ? first_column / V + g : place_of(first_column + g, 0)) * 16;
        token = (WEIGHTS + place_of(first_token, 0)) * 16;
        weights_odd = GEMM_KN ? V * ROW_BYTES : (weights ^ 16) - weights;
        token_odd = (token ^ 16) - token;
    }

    __device__ __forceinline__ int weights_of(int chunk) const {
        return GEMM_KN ? weights + chunk * (V * ROW_BYTES) : weights ^ chunk * 16;
    }

    static __device__ __forceinline__ Chunk weight(int at, int i) {
        return GEMM_KN ? chunk_at(at, i % V * ROW_BYTES + i / V * 128)
                       : chunk_at(at, i * 8 * STAGE_DEPTH * 16);
    }

    static __device__ __forceinline__ Chunk token_chunk(int at, int turn) {
        return chunk_at(at, turn * TOKENS_AT_ONCE * STAGE_DEPTH * 16);
    }
};

// What a thread copies of each stage: parts of weights, then of tokens.
struct StageCopies {
    static constexpr int ROWS = THREADS / STAGE_DEPTH;  // at once
    static constexpr int PARTS = WEIGHTS / THREADS;
    static constexpr int ALL = PARTS + GEMM_TOKENS / ROWS;
    const char* from[ALL];
    int left[ALL];  // of the depth, from the part of stage 0 on; 0 where there is no such row
    int steps;
#if GEMM_KN
    i64 step;  // of weights, from stage to stage
#else
    static constexpr i64 step = STAGE_DEPTH * 16;
#endif

    __device__ __forceinline__ StageCopies(const Problem& p, const Task& task) {
        const int thread = threadIdx.x, row = thread / STAGE_DEPTH, chunk = thread % STAGE_DEPTH;
        steps = task.slot < 0 ? 0 : round_up_division(p.depth / V, STAGE_DEPTH);
        const char* const expert = p.weights + task.slot * p.slot_stride;
#if GEMM_KN
        const int column = weight_column<WIDTH>(p, task.tile, thread % ROW_CHUNKS * V);
        step = STAGE_DEPTH * V * p.weight_stride;
#endif
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
#if GEMM_KN
            const int k = thread / ROW_CHUNKS + i * (THREADS / ROW_CHUNKS);
            from[i] = column < 0 ? p.weights : expert + k * p.weight_stride + column * ELEMENT;
            left[i] = column < 0 ? 0 : p.depth - k;
#else
            const int column = weight_column<WIDTH>(p, task.tile, row + i * ROWS);
            from[i] = column < 0 ? p.weights : expert + column * p.weight_stride + chunk * 16;
            left[i] = column < 0 ? 0 : p.depth - chunk * V;
#endif
        }
#pragma unroll
        for (int i = PARTS; i < ALL; ++i) {
            const char* const token = token_of(p, task, task.begin + row + (i - PARTS) * ROWS);
            from[i] = token ? token + chunk * 16 : p.x;
            left[i] = token ? p.depth - chunk * V : 0;
        }
    }

    // stage n, into the ring at so many bytes
    __device__ __forceinline__ void begin(int n, int at) const {
        const int thread = threadIdx.x, depth = n * STAGE_DEPTH * V;
        char* const ring = reinterpret_cast<char*>(shared_memory);
        Chunk* const stage = reinterpret_cast<Chunk*>(ring + at);
        Chunk* const rows = stage + place_of(thread / STAGE_DEPTH, thread % STAGE_DEPTH);
#pragma unroll
        for (int i = 0; i < ALL; ++i)
            copy_async((GEMM_KN && i < PARTS ? stage + thread : rows) + i * THREADS,
                       from[i] + n * (i < PARTS ? step : STAGE_DEPTH * 16), depth < left[i]);
    }
};

// where a thread reads chunks of weights and tokens
struct Source {
    int weights, tokens;
};

// A half of the products of one chunk of the depth, for COUNT tokens a thread; meanwhile the
// weights (in the first half) and first tokens (in the second) of the next chunk are read.
template <int COUNT, int HALF>
__device__ __forceinline__ void add_half(LaneSums<TURNS>& sums, const Chunk (&w)[HELD],
                                         Chunk (&next_w)[HELD], Chunk (&x)[AHEAD],
                                         const Source& own, const Source& next) {
#pragma unroll
    for (int m = HALF * COUNT / 2; m < (HALF + 1) * COUNT / 2; ++m) {
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (i * (COUNT / 2) / HELD == m) next_w[i] = Place::weight(next.weights, i);
        const Chunk token = x[m % AHEAD];
        x[m % AHEAD] = m + AHEAD < COUNT ? Place::token_chunk(own.tokens, m + AHEAD)
                                         : Place::token_chunk(next.tokens, m + AHEAD - COUNT);
        sums.add_products(w, m, token);
    }
}

template <int COUNT>
__device__ __forceinline__ void add_stages(
    LaneSums<TURNS>& sums, const Place& place, const StageCopies& copies) {
    Chunk w[2][HELD], x[AHEAD];
    int stage = 0, old = (STAGES - 1) * STAGE;  // where this stage lies, and the one before
    Source even{place.weights, place.token};
    wait_for_copies<STAGES - 2>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HELD; ++i) w[0][i] = Place::weight(even.weights, i);
#pragma unroll
    for (int m = 0; m < AHEAD; ++m) x[m] = Place::token_chunk(even.tokens, m);
#pragma unroll 1
    for (int n = 0; n < copies.steps; ++n) {
        int next = stage;
#pragma unroll 1
        for (int chunk = 0; chunk < STAGE_DEPTH; chunk += 2) {
            const bool is_last = chunk == STAGE_DEPTH - 2;
            const Source odd{even.weights + place.weights_odd, even.tokens + place.token_odd};
            add_half<COUNT, 0>(sums, w[0], w[1], x, even, odd);
            // what few turns do also keeps the compiler from reading weights later than this
            if (is_last && n + 1 < copies.steps) {
                wait_for_copies<STAGES - 3>();
                __syncthreads();
                next = stage == (STAGES - 1) * STAGE ? 0 : stage + STAGE;
            }
            add_half<COUNT, 1>(sums, w[0], w[1], x, even, odd);
            const int then = (chunk + 2) % STAGE_DEPTH;
            even = {next + place.weights_of(then), next + (place.token ^ then * 16)};
            add_half<COUNT, 0>(sums, w[1], w[0], x, odd, even);
            if (is_last && n + STAGES - 1 < copies.steps) copies.begin(n + STAGES - 1, old);
            add_half<COUNT, 1>(sums, w[1], w[0], x, odd, even);
        }
        commit_copies();
        old = stage;
        stage = next;
    }
}

__device__ __forceinline__ void do_task(const Problem& p, const Task& task) {
    const int count = task.end - task.begin;
    const Place place;
    const StageCopies copies(p, task);
#pragma unroll
    for (int n = 0; n < STAGES - 1; ++n) {
        if (n < copies.steps) copies.begin(n, n * STAGE);
        commit_copies();
    }
    LaneSums<TURNS> sums;
    if (copies.steps) {
        if (count > GEMM_TOKENS / 2) add_stages<TURNS>(sums, place, copies);
        else if (count > GEMM_TOKENS / 4) add_stages<TURNS / 2>(sums, place, copies);
        else add_stages<(TURNS > 4 ? TURNS / 4 : 2)>(sums, place, copies);
    }
    wait_for_copies<0>();
    __syncthreads();
    float* const all = reinterpret_cast<float*>(shared_memory);
    float* const own = all + place.first_token * PITCH + place.first_column;
#pragma unroll
    for (int m = 0; m < TURNS; ++m)
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            own[m * TOKENS_AT_ONCE * PITCH + column_of(place.g, i)] = sums.sum[m][i];
    __syncthreads();
    finish_rows<WIDTH, PITCH, 1, GEMM_TOKENS>(p, task, task.begin, all);
    __syncthreads();
}

#define TASK_ROWS GEMM_TOKENS
