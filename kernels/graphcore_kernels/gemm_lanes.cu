// gemm_lanes: the product for many rows an expert in F32 arithmetic.
//
// Tiles of WIDTH columns by GEMM_TOKENS tokens, through a ring of stages that the whole block
// copies and shares. A thread has HELD columns by TURNS tokens, every TOKENS_AT_ONCE-th: a tile of
// few tokens takes all warps alike, and fewer turns. What is multiplied next is read from shared
// memory while the last is multiplied, across stages too. Of two blocks of a multiprocessor one
// multiplies where the other waits, begins or stores; each has half of the registers.

#define WIDTH 128
#define PITCH (WIDTH + (GEMM_KN ? 1 : 8))  // sums on their way out meet in no bank
#define IS_ALONE (GEMM_BLOCKS == 1)     // on its multiprocessor
#define STAGE_DEPTH (IS_ALONE ? 8 : 4)  // chunks along the depth
#define WEIGHTS (WIDTH * STAGE_DEPTH)
#define STAGE ((WEIGHTS + GEMM_TOKENS * STAGE_DEPTH) * 16)  // bytes
#define STAGES (GEMM_RING * 16 / STAGE)
#define TOKENS_AT_ONCE (WARPS / 2 * 4)
#define TURNS (GEMM_TOKENS / TOKENS_AT_ONCE)
#define AHEAD (IS_ALONE ? 2 : 1)  // tokens that a thread reads ahead
#define ROW_CHUNKS (WIDTH / V)  // of a row of [K, N]
#define ROW_BYTES (ROW_CHUNKS * 16)

static_assert(IS_IEEE && HELD == 8, "F32, and eight columns a thread");
static_assert(TURNS % 2 == 0, "tokens are read ahead by twos");
static_assert(STAGES >= 3, "of a stage, the one before and the one behind, none is copied to");
static_assert(GEMM_TOKENS * PITCH * 4 <= STAGES * STAGE, "the sums lie in the ring");

// Where a chunk of a row lies. Rows that are equal modulo 8 differ by whole rows.
__device__ __forceinline__ int place_of(int row, int chunk) {
    return row * STAGE_DEPTH + (chunk ^ ((IS_ALONE ? (row & 1) << 2 : 0) | (row >> 1 & 3)));
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
    int weights, token;  // of chunk 0

    __device__ __forceinline__ Place() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        g = lane / 2 % 8;
        first_column = warp % 2 * 64;
        first_token = warp / 2 * 4 + lane / 16 * 2 + lane % 2;
        weights = (GEMM_KN ? first_column / V + g : place_of(first_column + g, 0)) * 16;
        token = (WEIGHTS + place_of(first_token, 0)) * 16;
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

// Where a row lies, and how far it is from stage to stage: a pointer and bytes, or, since two blocks
// have no registers for that, chunks behind the first row. The host lets two blocks have nothing
// that goes backwards or is longer than 64 GiB.
#if GEMM_BLOCKS == 1
typedef const char* Row;
typedef i64 Step;
#define STEP_BYTES 1

__device__ __forceinline__ Row row_at(const char*, const char* at) { return at; }
__device__ __forceinline__ const char* chunk_of(const char*, Row row, Step step) {
    return row + step;
}
#else
typedef u32 Row, Step;
#define STEP_BYTES 16

__device__ __forceinline__ Row row_at(const char* first, const char* at) {
    return static_cast<u32>((at - first) / 16);
}
__device__ __forceinline__ const char* chunk_of(const char* first, Row row, Step step) {
    return first + i64(row + step) * 16;
}
#endif

// What a thread copies of each stage: parts of weights, then of tokens.
struct StageCopies {
    static constexpr int ROWS = THREADS / STAGE_DEPTH;  // at once
    static constexpr int PARTS = WEIGHTS / THREADS;
    static constexpr int ALL = PARTS + GEMM_TOKENS / ROWS;
    static constexpr Step token_step = STAGE_DEPTH * 16 / STEP_BYTES;
    const char *weights, *x;
    Row from[ALL];
    u32 are_rows = 0;  // a bit for each part: there is such a row
    int steps, left;   // left: of the depth, from the thread's part of stage 0 on
#if GEMM_KN
    static constexpr int ROWS_KN = THREADS / ROW_CHUNKS;
    Step weight_step;
    int weights_left;
#else
    static constexpr Step weight_step = token_step;
#endif

    __device__ __forceinline__ StageCopies(const Problem& p, const Task& task) {
        const int thread = threadIdx.x, row = thread / STAGE_DEPTH, chunk = thread % STAGE_DEPTH;
        steps = task.slot < 0 ? 0 : round_up_division(p.depth / V, STAGE_DEPTH);
        left = p.depth - chunk * V;
        weights = p.weights + task.slot * p.slot_stride;
        x = p.x;
#if GEMM_KN
        const int column = weight_column<WIDTH>(p, task.tile, thread % ROW_CHUNKS * V);
        weight_step = static_cast<Step>(STAGE_DEPTH * V * p.weight_stride / STEP_BYTES);
        weights_left = p.depth - thread / ROW_CHUNKS;
#endif
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
#if GEMM_KN
            const int k = thread / ROW_CHUNKS + i * ROWS_KN;
            note(i, column >= 0, weights, weights + k * p.weight_stride + column * ELEMENT);
#else
            const int column = weight_column<WIDTH>(p, task.tile, row + i * ROWS);
            note(i, column >= 0, weights, weights + column * p.weight_stride + chunk * 16);
#endif
        }
#pragma unroll
        for (int i = PARTS; i < ALL; ++i) {
            const char* const token = token_of(p, task, task.begin + row + (i - PARTS) * ROWS);
            note(i, token != nullptr, x, token + chunk * 16);
        }
    }

    __device__ __forceinline__ void note(int i, bool is_row, const char* first, const char* at) {
        from[i] = row_at(first, is_row ? at : first);
        are_rows |= is_row ? 1u << i : 0u;
    }

    // stage n, into the ring at so many bytes
    __device__ __forceinline__ void begin(int n, int at) const {
        const int thread = threadIdx.x, depth = n * STAGE_DEPTH * V;
        const u32 are_valid = depth < left ? are_rows : 0u;
        char* const ring = reinterpret_cast<char*>(shared_memory);
        Chunk* const stage = reinterpret_cast<Chunk*>(ring + at);
        Chunk* const rows = stage + place_of(thread / STAGE_DEPTH, thread % STAGE_DEPTH);
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const char* const row = chunk_of(weights, from[i], n * weight_step);
#if GEMM_KN
            const bool is_valid = (are_rows >> i & 1) && depth + i * ROWS_KN < weights_left;
            copy_async(stage + thread + i * THREADS, row, is_valid);
#else
            copy_async(rows + i * THREADS, row, are_valid >> i & 1);
#endif
        }
#pragma unroll
        for (int i = PARTS; i < ALL; ++i)
            copy_async(rows + i * THREADS, chunk_of(x, from[i], n * token_step),
                       are_valid >> i & 1);
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

// where the stage lies that comes two before another
__device__ __forceinline__ int two_before(int stage) {
    return stage >= 2 * STAGE ? stage - 2 * STAGE : stage + (STAGES - 2) * STAGE;
}

template <int COUNT>
__device__ __forceinline__ void add_stages(
    LaneSums<TURNS>& sums, const Place& place, const StageCopies& copies) {
    Chunk w[2][HELD], x[AHEAD];
    int stage = 0, copied = STAGES - 1;  // where the stage lies in the ring; how many were copied
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
            const Source odd{stage + place.weights_of(chunk + 1),
                             stage + (place.token ^ (chunk + 1) * 16)};
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
            if (is_last && copied < copies.steps) copies.begin(copied++, two_before(next));
            add_half<COUNT, 1>(sums, w[1], w[0], x, odd, even);
        }
        commit_copies();
        stage = next;
    }
}

// as many turns as so many tokens need, two at a time
template <int COUNT>
__device__ __forceinline__ void add_needed(
    int tokens, LaneSums<TURNS>& sums, const Place& place, const StageCopies& copies) {
    if constexpr (COUNT > 2) {
        if (tokens <= (COUNT - 2) * TOKENS_AT_ONCE)
            return add_needed<COUNT - 2>(tokens, sums, place, copies);
    }
    add_stages<COUNT>(sums, place, copies);
}

__device__ __forceinline__ void do_task(const Problem& p, const Task& task) {
    const Place place;
    const StageCopies copies(p, task);
#pragma unroll
    for (int n = 0; n < STAGES - 1; ++n) {
        if (n < copies.steps) copies.begin(n, n * STAGE);
        commit_copies();
    }
    LaneSums<TURNS> sums;
    if (copies.steps) add_needed<TURNS>(task.end - task.begin, sums, place, copies);
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

#define TASK_STEP (2 * TOKENS_AT_ONCE)  // a task takes the longer the more of it its rows need
