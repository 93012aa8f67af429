// gemm_warpgroup_f32: the product of F32 by the warpgroups of sm_90a, in one product of TF32 an
// element ("tf32") or in three ("tf32x3").
//
// Of the first warpgroup one warp copies ahead, and three read the tokens of each stage: for one
// product they round them where they lie, for three they put the low parts behind them. Tensor
// cores cut words of 32 bits off to TF32, so that the high part is the word itself. Two warpgroups
// multiply; they take weights from the ring through registers, where these are rounded or split,
// each once. Tensor cores also cut off where they add, so three products an element are summed
// there over 16 of the depth only, small ones first; then the F32 units add. A warpgroup has two
// such sums in turn: while the one is added, the other is made.

#define IS_SPLIT (GEMM_PRECISION == 3)
#define GATHERERS 32               // threads
#define ROUNDERS (WARPGROUP - 32)  // threads
#define BATCH 6                    // chunks that a thread rounds at a time
#define BLOCK_DEPTH 2              // products of 8 of the depth between two waits
#define BLOCKS (STEP / 32 / BLOCK_DEPTH)  // of a stage
// of a thread; with 168 at the start, FEW + 2 MANY must not be above 3 * 168
#define FEW_REGISTERS (IS_SPLIT ? 56 : 72)
#define MANY_REGISTERS (IS_SPLIT ? 224 : 216)

// What tensor cores cut off of a word, itself cut off by them: with that, 2^-22 of the word is lost
// at most. Both parts are cut off towards zero, and nobody adds the product of two low parts: 2
// units in the last place make up for that on average. NaN where the word is NaN or infinite, and
// not finite where it is one of the two greatest numbers.
__device__ __forceinline__ u32 low_part(u32 word) {
    return as_word(subtract(as_float(word + 2), as_float(word & 0xffffe000)));
}

// By the first warp: weights in boxes, rows of x chunk by chunk. Which rows stands in shared memory.
__device__ __forceinline__ void copy_gathered(
    const Problem& p, const TensorMap& weights, Ring ring) {
    constexpr int ROWS = GATHERERS / 8;
    int* const sources = reinterpret_cast<int*>(ring_memory + SCALES_AT);
    const int lane = threadIdx.x, own_row = lane / 8, own_chunk = lane % 8;
    const int chunks = p.depth / V;
#pragma unroll 1
    for (Turn turn; turn.task < SharedTasks(p).count(p); turn.go_on()) {
        const Task task = SharedTasks(p).find(p, turn.task);
        const int steps = steps_of(p, task), tokens = tokens_of(task);
        if (!steps) continue;
        __syncwarp();
        for (int m = lane; m < tokens; m += GATHERERS)
            sources[m] = source_of(p, task, task.begin + m);
        __syncwarp();
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.go_on()) {
            wait_for(ring.empty(), ring.phase ^ 1);
            if (lane == 0) {
                arrive_expecting(ring.full(), WEIGHT_BYTES);
                copy_weights(p, weights, task, step, ring);
            }
            const int chunk = step * (STEP / 16) + own_chunk;
            const u32 to = ring.memory() + WEIGHT_BYTES;
#pragma unroll 4
            for (int m = own_row; m < tokens; m += ROWS) {
                const int source = sources[m];
                const bool is_valid = source >= 0 && chunk < chunks;
                const char* from = p.x + source * p.x_stride + chunk * 16;
                copy_async(to + m * STEP + (own_chunk ^ m % 8) * 16, is_valid ? from : p.x,
                           is_valid);
            }
            arrive_after_copies(ring.full());
        }
    }
    wait_for_copies<0>();
}

// By the other warps of the first warpgroup, each 32 chunks at a time
__device__ __forceinline__ void round_tokens(const Problem& p, Ring ring) {
    constexpr int WARPS_OF_THESE = ROUNDERS / 32, BYTES = 32 * 16;
    const int own = (threadIdx.x - GATHERERS) / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (Turn turn; turn.task < SharedTasks(p).count(p); turn.go_on()) {
        const Task task = SharedTasks(p).find(p, turn.task);
        const int steps = steps_of(p, task), turns = tokens_of(task) * STEP / BYTES;
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.go_on()) {
            wait_for(ring.full(), ring.phase);
            const u32 tokens = ring.memory() + WEIGHT_BYTES + lane * 16;
#pragma unroll 1
            for (int first = own; first < turns; first += BATCH * WARPS_OF_THESE) {
                Chunk word[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int turn = first + i * WARPS_OF_THESE;
                    if (turn < turns) word[i] = load_chunk(tokens + turn * BYTES);
                }
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int turn = first + i * WARPS_OF_THESE;
#pragma unroll
                    for (int e = 0; e < V; ++e) {
                        u32& own_word = word[i].word[e];
                        own_word = IS_SPLIT ? low_part(own_word) : to_tf32(own_word);
                    }
                    if (turn < turns)
                        store_chunk(tokens + IS_SPLIT * TOKEN_BYTES + turn * BYTES, word[i]);
                }
            }
            show_tensor_cores();
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(ring.ready());
        }
    }
}

__device__ __forceinline__ void begin_other_barriers(const Ring& ring) {
    for (int i = 0; i < GEMM_STAGES; ++i) begin_barrier(ring.ready() + i * 8, ROUNDERS / 32);
}

__device__ __forceinline__ void copy_all(
    const Problem& p, const TensorMap& weights, const TensorMap& x, const Ring& ring) {
    if (threadIdx.x >= GATHERERS) round_tokens(p, ring);
    else if (p.gather) copy_gathered(p, weights, ring);
    else if (threadIdx.x == 0) copy_boxes(p, weights, x, ring);
}

// 64 columns of the weights of a warpgroup by BLOCK_DEPTH times 8 of the depth
struct Fragments {
    u32 high[BLOCK_DEPTH][4], low[BLOCK_DEPTH][4];

    // from: the lane's row and chunk of the first eight of the depth of the stage
    __device__ __forceinline__ void load(u32 from, int block) {
#pragma unroll
        for (int k = 0; k < BLOCK_DEPTH; ++k) {
            load_fragment(high[k], from ^ (block * BLOCK_DEPTH + k) << 5);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (IS_SPLIT) low[k][i] = low_part(high[k][i]);
                else high[k][i] = to_tf32(high[k][i]);
            }
        }
    }
};

// One block of the depth: added to sum, or, where products are three, all that sum then is.
template <int COUNT>
__device__ __forceinline__ void multiply_block(
    float (&sum)[COUNT], const Fragments& weights, u64 high, u64 low) {
    begin_products();
    if (IS_SPLIT) {
#pragma unroll
        for (int k = 0; k < BLOCK_DEPTH; ++k)
            multiply_warpgroup(sum, weights.low[k], high + 2 * k, k > 0);
#pragma unroll
        for (int k = 0; k < BLOCK_DEPTH; ++k)
            multiply_warpgroup(sum, weights.high[k], low + 2 * k, true);
    }
#pragma unroll
    for (int k = 0; k < BLOCK_DEPTH; ++k)
        multiply_warpgroup(sum, weights.high[k], high + 2 * k, true);
    commit_products();
}

template <int COUNT>
__device__ __forceinline__ void add_part(float (&sum)[COUNT], float (&part)[COUNT]) {
    hold(part);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] = add(sum[i], part[i]);
}

template <int COUNT>
__device__ __forceinline__ void finish_group(const Problem& p, const Task& task,
                                             const Worker& worker, int half, int first,
                                             float (&sum)[COUNT]) {
    const int t = worker.lane % 4;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (GEMM_PAIRS && i & 2) continue;
        if (GEMM_PAIRS) sum[i] = swiglu(sum[i], sum[i + 2]);
        const int row = task.begin + first + i / 4 * 8 + 2 * t + i % 2;
        if (p.scale && task.slot >= 0 && row < task.end) sum[i] = multiply(sum[i], p.scale[row]);
    }
    write_sums<GEMM_PAIRS>(p, task, worker, half, first, sum);
}

template <int TOKENS>
__device__ __forceinline__ void do_block(
    const Problem& p, int number, const Worker& worker, Ring& ring) {
    // what a warpgroup multiplies in turn: halves of its weights, or of the tokens
    constexpr int GROUPS = 2, COLUMNS = TOKENS / (HALVES == 2 ? 1 : GROUPS), COUNT = COLUMNS / 2;
    const int steps = steps_of(p, SharedTasks(p).find(p, number));
    const int row = worker.group * (GEMM_WIDTH / 2) + worker.warp * 16 + worker.lane % 16;
    const u32 own = row * STEP + (worker.lane / 16 ^ row % 8) * 16;
    float sum[GROUPS][COUNT], part[2][COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[0][i] = sum[1][i] = 0.0f;
    Fragments weights[2];
    u32 last = 0;  // the barrier of a stage that is being read
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.go_on()) {
        wait_for(ring.full(), ring.phase);
        const u32 from = ring.memory() + own;
        const u64 high = describe(ring.memory() + WEIGHT_BYTES), low = high + TOKEN_BYTES / 16;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            if (HALVES == 1) weights[block % 2].load(from, block);
            if (block == 0) {
                wait_for(ring.ready(), ring.phase);
                if (p.gather) show_tensor_cores();
            }
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const int turn = block * GROUPS + group;
                // what began two turns ago is over
                wait_for_products<1>();
                if (!IS_SPLIT && turn == 1 && last && worker.lane == 0) arrive(last);
                if (HALVES == 2) weights[group].load(from + group * 64 * STEP, block);
                const Fragments& own_weights = weights[HALVES == 2 ? group : block % 2];
                const int at = 2 * BLOCK_DEPTH * block +
                               (HALVES == 2 ? 0 : group * COLUMNS * (STEP / 16));
                if (IS_SPLIT && turn > 1) add_part(sum[group], part[group]);
                multiply_block(IS_SPLIT ? part[group] : sum[group], own_weights, high + at,
                               low + at);
            }
        }
        last = ring.empty();
        if (!IS_SPLIT) continue;
        wait_for_products<1>();
        add_part(sum[0], part[0]);
        wait_for_products<0>();
        if (worker.lane == 0) arrive(last);
        add_part(sum[1], part[1]);
    }
    wait_for_products<0>();
    if (!IS_SPLIT && last && worker.lane == 0) arrive(last);
    const Task task = SharedTasks(p).find(p, number);  // found anew: registers were short
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        if (!IS_SPLIT) hold(sum[group]);
        finish_group(p, task, worker, HALVES == 2 ? group : 0,
                     HALVES == 2 ? 0 : group * COLUMNS, sum[group]);
    }
    if (!p.routes || task.tile || worker.group) return;
    for (int m = worker.thread(); m < task.end - task.begin; m += WARPGROUP) {
        const int at = task.begin + m, route = p.scatter[at];
        if (route >= 0 && route < p.routes) p.places[PLACES_HEADER + route] = at;
        else report(p.error, BAD_SCATTER | task.expert << 8);
    }
}

// Two sizes, since registers are short where there are more: tokens that a block lacks are whatever
// the ring holds, in sums that are not stored.
__device__ __forceinline__ void do_block_of(
    const Problem& p, int number, const Worker& worker, Ring& ring) {
    constexpr int SMALL = GEMM_TOKENS == 64 ? 32 : GEMM_TOKENS / 4 * 3;
    const int tokens = tokens_of(SharedTasks(p).find(p, number));
    if (tokens <= SMALL) do_block<SMALL>(p, number, worker, ring);
    else do_block<GEMM_TOKENS>(p, number, worker, ring);
}
