// gemm_stream: the product for few rows an expert; each weight is read once.
//
// Every warp takes each eighth step along the depth, its lanes copy ahead what they themselves will
// use, and the warps' sums are added in order at the end. A task has all rows of an expert: those
// beyond one pass find the weights in the L2 cache.

#define WIDTH (16 * GEMM_TILES)
#define PITCH (WIDTH + 4)
#define RING (GEMM_RING / WARPS)  // chunks of a warp

template <int NT>
__device__ __forceinline__ void multiply_rows(const Problem& p, const Task& task, int first_row) {
    constexpr int SIZE = HELD + NT, FITTING = RING / 32 / SIZE, STAGES = FITTING < 8 ? FITTING : 8;
    static_assert(STAGES >= 2, "a stage is copied while another is used");
    static_assert(WARPS * NT * 8 * PITCH * 4 <= WARPS * RING * 16, "the sums lie in the ring");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    Chunk* const ring = shared_memory + warp * RING;

    const char* tokens[NT];
#pragma unroll
    for (int q = 0; q < NT; ++q) tokens[q] = token_of(p, task, first_row + q * 8 + g);
    // [N, K]: the first of each half of the rows; [K, N]: the first of each group of V rows
    constexpr int STARTS = GEMM_KN ? HELD / V : 2;
    const char* starts[STARTS];
    int left[STARTS];  // columns from the start to the end of the weights (of gate or up)
#pragma unroll
    for (int h = 0; h < STARTS; ++h) {
        const int n = GEMM_KN ? (h * 8 + g) * V : g + 8 * GEMM_TILES * h;
        const int column = weight_column<WIDTH>(p, task.tile, n);
        const int end = p.activation == SWIGLU_CONCAT && column < p.columns / 2 ? p.columns / 2
                                                                                : p.columns;
        left[h] = column < 0 ? 0 : end - column;
        starts[h] = p.weights + task.slot * p.slot_stride +
                    (column < 0 ? 0 : column * (GEMM_KN ? ELEMENT : p.weight_stride));
    }
    const int chunks = p.depth / V, steps = round_up_division(chunks, 4);
    const int mine = task.slot < 0 ? 0 : (steps - warp + WARPS - 1) / WARPS;

    const auto begin_copies = [&](int n) {
        if (n < mine) {
            Chunk* const stage = ring + n % STAGES * SIZE * 32 + lane;
            const int chunk = (n * WARPS + warp) * 4 + t;
            const bool is_inside = chunk < chunks;
#pragma unroll
            for (int j = 0; j < HELD; ++j) {
#if GEMM_KN
                const bool is_valid = is_inside && left[j / V] > 0;
                const char* from = starts[j / V] + (chunk * V + j % V) * p.weight_stride;
#else
                const bool is_valid = is_inside && left[j / GEMM_TILES] > j % GEMM_TILES * 8;
                const char* from =
                    starts[j / GEMM_TILES] + j % GEMM_TILES * 8 * p.weight_stride + chunk * 16ll;
#endif
                copy_async(stage + j * 32, is_valid ? from : p.weights, is_valid);
            }
#pragma unroll
            for (int q = 0; q < NT; ++q) {
                const bool is_valid = is_inside && tokens[q];
                copy_async(
                    stage + (HELD + q) * 32, is_valid ? tokens[q] + chunk * 16ll : p.x, is_valid);
            }
        }
        commit_copies();
    };

#if IS_IEEE
    LaneSums<8 * NT> sums;
#else
    WarpSums<NT> sums;
#endif
#pragma unroll
    for (int n = 0; n < STAGES - 1; ++n) begin_copies(n);
    for (int n = 0; n < mine; ++n) {
        wait_for_copies<STAGES - 2>();
        // lanes see each other's tokens, and none still reads what is overwritten next
        if (IS_IEEE) __syncwarp();
        const Chunk* const stage = ring + n % STAGES * SIZE * 32;
        Chunk w[HELD];
#pragma unroll
        for (int j = 0; j < HELD; ++j) w[j] = stage[j * 32 + lane];
#if IS_IEEE
        begin_copies(n + STAGES - 1);
#pragma unroll
        for (int m = 0; m < 8 * NT; ++m)
            sums.add_products(w, m, stage[(HELD + m / 8) * 32 + m % 8 * 4 + t]);
#else
        Chunk x[NT];
#pragma unroll
        for (int q = 0; q < NT; ++q) x[q] = stage[(HELD + q) * 32 + lane];
        begin_copies(n + STAGES - 1);
        sums.add_products(w, x);
#endif
    }
    wait_for_copies<0>();
    __syncthreads();
    float* const all = reinterpret_cast<float*>(shared_memory);
    float* const own = all + warp * NT * 8 * PITCH;
    sums.write(own, PITCH, g, t);
    __syncthreads();
    finish_rows<WIDTH, PITCH, WARPS, NT * 8>(p, task, first_row, all);
    __syncthreads();
}

#define TASK_ROWS 0

__device__ __forceinline__ void do_task(const Problem& p, const Task& task) {
    int row = task.begin;
#if GEMM_TOKENS > 16
#pragma unroll 1
    for (; task.end - row > 16; row += 32) multiply_rows<4>(p, task, row);
#else
#pragma unroll 1
    for (; task.end - row > 16; row += 16) multiply_rows<2>(p, task, row);
#endif
    if (task.end - row > 8) multiply_rows<2>(p, task, row);
    else if (task.end > row) multiply_rows<1>(p, task, row);
}
