// warpgroup_tasks: what the forms of warpgroups share, whatever they multiply: where everything
// lies in shared memory, tasks, the ring of copies, and results that go out as registers have them.
//
// Weights are the 64-row side of wgmma, tokens its columns: an expert's rows are shared out evenly
// to blocks of up to GEMM_TOKENS, each with just as many columns as its tokens need. A task is a
// cluster's, whose blocks of threads have the same tokens, and columns of the weights side by side;
// past the last column boxes are zeros, and nothing is stored. Copies of weights are boxes that the
// driver described: it is the box that lays eight gates before their eight ups, so that a thread
// has both sums of an activation. Rows of x are boxes too, unless they are gathered. Copies run
// ahead, also for the tasks to come.
//
// The host defines GEMM_NAME, GEMM_PRECISION (0 bf16, 1 f16, 3 tf32x3, 4 tf32), GEMM_PAIRS,
// GEMM_COMBINED, GEMM_CLUSTER (blocks of one), GEMM_WIDTH (columns of the weights that a block
// takes of a task), GEMM_TOKENS, GEMM_GRAIN (tokens that are added at once to what a task takes, a
// multiple of 8), GEMM_BOX (rows of x of a copy, some grains) and GEMM_STAGES, and puts
// tensor_cores, warpgroups and grouped_rows before this text; gemm_warpgroup or gemm_warpgroup_f32
// and then warpgroup_launch come behind it.

#define ELEMENT (GEMM_PRECISION < 2 ? 2 : 4)
#define V (16 / ELEMENT)  // elements of a chunk
#define PANEL 8           // blocks of tokens that share what they read of the weights
#define STEP 128          // bytes of the depth that a stage holds of each row
#define HALVES (GEMM_WIDTH / 128)  // products of 64 columns that a warpgroup has under way
#define WEIGHT_BYTES (GEMM_WIDTH * STEP)
#define TOKEN_BYTES (GEMM_TOKENS * STEP)
// tokens of three products lie in two parts: rounded, and what that took
#define STAGE_BYTES (WEIGHT_BYTES + (GEMM_PRECISION == 3 ? 2 : 1) * TOKEN_BYTES)
#define WARPGROUP 128
#define TURNS_OVER (ELEMENT == 2 && GEMM_GRAIN == 32)  // elements on their way out
#define TURNED_BYTES 4096                              // of 32 tokens by 64 columns

// where everything lies in shared memory, in bytes; the ring first
#define TURNED_AT (GEMM_STAGES * STAGE_BYTES)
#define SCALES_AT (TURNED_AT + TURNS_OVER * 4 * TURNED_BYTES)
#define BARRIERS_AT (SCALES_AT + 2 * GEMM_TOKENS * 4)
#define TABLES_AT (BARRIERS_AT + 256)

struct alignas(16) Expert {
    int number, begin, end, slot;  // -1: no slot of the bank
};

// of this block in its cluster
__device__ __forceinline__ int own_rank() {
    return GEMM_CLUSTER > 1 ? own_block() % GEMM_CLUSTER : 0;
}

// tasks of an expert in the order in which multiprocessors that work at once share most
struct SharedTasks : Tasks<GEMM_TOKENS> {
    // As ``keep`` left it. Made again for each task: registers are short where sums are many
    __device__ __forceinline__ explicit SharedTasks(const Problem& p) {
        first = sums(p) + WARPS;
        tiles = round_up_division(p.columns, GEMM_WIDTH * GEMM_CLUSTER);
        are_offsets_bad = *sums(p);
    }

    // Shared memory: the experts in the order of their turns, so that tasks are found without a look
    // at device memory; then WARPS + experts + 1 words and what fills the last chunk: the
    // compiler reads four at a time.
    static __device__ __forceinline__ Expert* turns() {
        return reinterpret_cast<Expert*>(ring_memory + TABLES_AT);
    }
    static __device__ __forceinline__ int* sums(const Problem& p) {
        return reinterpret_cast<int*>(turns() + p.experts);
    }

    // tokens of a block where an expert has so many rows
    __device__ __forceinline__ int size_of(int rows, int blocks) const {
        return round_up_division(round_up_division(rows, blocks), GEMM_GRAIN) * GEMM_GRAIN;
    }

    // by all threads
    __device__ __forceinline__ void keep(const Problem& p) {
        check(p);
        sort(p);
        number(p, sums(p), [&](int n) { return turns()[n].end - turns()[n].begin; });
        if (threadIdx.x == 0) *sums(p) = are_offsets_bad;
        __syncthreads();
    }

    // By all threads: experts with large blocks first, and of equal ones in their order. Blocks of
    // threads that take tasks up and down this line (Turn) then end at about the same time.
    __device__ __forceinline__ void sort(const Problem& p) {
        for (int e = threadIdx.x; e < p.experts; e += THREADS) {
            const int rows = are_offsets_bad ? 0 : p.offsets[e + 1] - p.offsets[e];
            first[e] = rows > 0 ? size_of(rows, blocks_of(rows)) : 0;
        }
        __syncthreads();
        for (int e = threadIdx.x; e < p.experts; e += THREADS) {
            const int own = 2 * first[e], slot = slot_of(p, e);
            int before = 0;
#pragma unroll 4
            for (int other = 0; other < p.experts; ++other)
                before += 2 * first[other] + (other < e) > own;
            turns()[before] = {e, p.offsets[e], p.offsets[e + 1], slot < p.n_slots ? slot : -1};
        }
        __syncthreads();
    }

    __device__ __forceinline__ Task find(const Problem& p, int n) const {
        int low = 0, high = p.experts;
        Task task{0, 0, p.rows, -1, 0};
        if (!are_offsets_bad) {
            while (high - low > 1) {
                const int middle = (low + high) / 2;
                if (first[middle] <= n) low = middle;
                else high = middle;
            }
            const Expert found = turns()[low];
            task = {found.number, found.begin, found.end, found.slot, 0};
            n -= first[low];
        }
        const int rows = task.end - task.begin, blocks = blocks_of(rows);
        const int size = size_of(rows, blocks);
        const int panels = round_up_division(blocks, PANEL);
        const int most = round_up_division(blocks, panels), panel = n / (most * tiles);
        const int before = panel * most, here = min(most, blocks - before);
        n -= before * tiles;
        task.tile = n / here * GEMM_CLUSTER + own_rank();
        task.begin += (before + n % here) * size;
        task.end = min(task.end, task.begin + size);
        return task;
    }
};

// A cluster's tasks: as many clusters as there are take one each, in their order, then the next as
// many the other way round, and so on.
struct Turn {
    int task = own_block() / GEMM_CLUSTER;

    __device__ __forceinline__ void go_on() {
        const int blocks = gridDim.x / GEMM_CLUSTER;
        task = (2 * (task / blocks) + 2) * blocks - 1 - task;
    }
};

// the stage that is next, and how often the ring was passed, to the last bit
struct Ring {
    u32 start;
    int stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ u32 memory() const { return start + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 full() const { return start + BARRIERS_AT + stage * 8; }
    __device__ __forceinline__ u32 empty() const { return full() + GEMM_STAGES * 8; }
    __device__ __forceinline__ u32 ready() const { return empty() + GEMM_STAGES * 8; }
    __device__ __forceinline__ void go_on() {
        if (++stage < GEMM_STAGES) return;
        stage = 0;
        phase ^= 1;
    }
};

__device__ __forceinline__ int steps_of(const Problem& p, const Task& task) {
    return task.slot < 0 ? 0 : round_up_division(p.depth, STEP / ELEMENT);
}

__device__ __forceinline__ int round_up(int count, int step) {
    return round_up_division(count, step) * step;
}

__device__ __forceinline__ int tokens_of(const Task& task) {
    return round_up(task.end - task.begin, GEMM_GRAIN);
}

__device__ __forceinline__ void copy_tokens(
    u32 to, const TensorMap& map, int k, int row, u32 barrier) {
#if GEMM_CLUSTER > 1
    copy_box_to_all(to, map, k, row, barrier);
#else
    copy_box(to, map, k, row, barrier);
#endif
}

// By a warp that has read a stage. Rows that are gathered are no other block's.
__device__ __forceinline__ void give_back(const Problem& p, u32 empty, int lane) {
#if GEMM_CLUSTER > 1
    if (!p.gather) {
        if (lane < GEMM_CLUSTER) arrive_at(lane, empty);
        return;
    }
#endif
    if (lane == 0) arrive(empty);
}

__device__ __forceinline__ void copy_weights(
    const Problem& p, const TensorMap& map, const Task& task, int step, const Ring& ring) {
    const bool has_pairs = p.activation != NONE;
    copy_box(ring.memory(), map, step * (STEP / ELEMENT), has_pairs ? 0 : task.tile * GEMM_WIDTH, 0,
             has_pairs ? task.tile * (GEMM_WIDTH / 16) : 0, task.slot, ring.full());
}

// By one thread: everything in boxes. The blocks of a cluster have the same tokens, of which each
// copies its share for all.
__device__ __forceinline__ void copy_boxes(
    const Problem& p, const TensorMap& weights, const TensorMap& x, Ring ring) {
#pragma unroll 1
    for (Turn turn; turn.task < SharedTasks(p).count(p); turn.go_on()) {
        const Task task = SharedTasks(p).find(p, turn.task);
        const int steps = steps_of(p, task), tokens = round_up(task.end - task.begin, GEMM_BOX);
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.go_on()) {
            wait_for(ring.empty(), ring.phase ^ 1);
            arrive_expecting(ring.full(), WEIGHT_BYTES + tokens * STEP);
            copy_weights(p, weights, task, step, ring);
            for (int row = own_rank() * GEMM_BOX; row < tokens; row += GEMM_CLUSTER * GEMM_BOX)
                copy_tokens(ring.memory() + WEIGHT_BYTES + row * STEP, x, step * (STEP / ELEMENT),
                            task.begin + row, ring.full());
        }
    }
}

// the row of x that a row of the product is made of; -1 where there is none
__device__ __forceinline__ int source_of(const Problem& p, const Task& task, int row) {
    if (row >= task.end) return -1;
    const int source = p.gather[row];
    if (source >= 0 && source < p.x_rows) return source;
    report(p.error, BAD_GATHER | task.expert << 8);
    return -1;
}

// of a thread of the warpgroups that multiply
struct Worker {
    int group, warp, lane;

    __device__ __forceinline__ int thread() const { return warp * 32 + lane; }

    __device__ __forceinline__ float* scales() const {
        return reinterpret_cast<float*>(ring_memory + SCALES_AT) + group * GEMM_TOKENS;
    }
};

// the first column of out of one of a warpgroup's products
template <bool HAS_PAIRS>
__device__ __forceinline__ int first_column(const Task& task, const Worker& worker, int half) {
    constexpr int COLUMNS = HAS_PAIRS ? 32 : 64;
    return ((task.tile * 2 + worker.group) * HALVES + half) * COLUMNS;
}

// from registers as they are, tokens from number first of the task on
template <bool HAS_PAIRS, int COUNT>
__device__ __forceinline__ void write_sums(const Problem& p, const Task& task, const Worker& worker,
                                           int half, int first, const float (&sum)[COUNT]) {
    const int g = worker.lane / 4, t = worker.lane % 4;
    const int column =
        first_column<HAS_PAIRS>(task, worker, half) + worker.warp * (HAS_PAIRS ? 8 : 16);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (HAS_PAIRS && i & 2) continue;
        const int row = task.begin + first + i / 4 * 8 + 2 * t + i % 2;
        const int at = column + g + (i & 2 ? 8 : 0);
        if (row < task.end && at < out_columns(p))
            store(p.out, row * p.out_stride + at, sum[i], GEMM_COMBINED);
    }
}
