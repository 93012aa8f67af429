// gemm_warpgroup: the product by the warpgroups of sm_90a.
//
// Weights are the 64-row side of wgmma, tokens its columns: an expert's rows are shared out evenly
// to blocks of up to GEMM_TOKENS, each with just as many columns as its tokens need. One warpgroup
// copies ahead, also for the tasks to come; two multiply, half of the columns of the weights each.
// With few tokens a stage is small and the ring deep: weights stream. Copies of weights are boxes that the
// driver described: it is the box that lays eight gates before their eight ups, so that a thread
// has both sums of an activation. Rows of x are boxes too, unless they are gathered.
//
// The host defines GEMM_NAME, GEMM_PRECISION (0 bf16, 1 f16), GEMM_PAIRS, GEMM_COMBINED,
// GEMM_WIDTH (columns of the weights of a task), GEMM_TOKENS, GEMM_GRAIN (tokens that are added at
// once to what a task takes: 8 or 32) and GEMM_STAGES, and puts tensor_cores, warpgroups and
// grouped_rows before this text.

#define ELEMENT 2
#define V 8           // elements of a chunk
#define PANEL 8       // blocks of tokens that share what they read of the weights
#define STEP 128      // bytes of the depth that a stage holds of each row
#define HALVES (GEMM_WIDTH / 128)  // products of 64 columns that a warpgroup has under way
#define WEIGHT_BYTES (GEMM_WIDTH * STEP)
#define STAGE_BYTES (WEIGHT_BYTES + GEMM_TOKENS * STEP)
#define WARPGROUP 128
#define TURNS_OVER (GEMM_GRAIN == 32)  // elements of 16 bits on their way out
#define TURNED_BYTES 4096              // of 32 tokens by 64 columns
// of a thread; with 168 at the start, FEW + 2 MANY must not be above 3 * 168
#define FEW_REGISTERS 104
#define MANY_REGISTERS 200

// where everything lies in shared memory, in bytes; the ring first
#define TURNED_AT (GEMM_STAGES * STAGE_BYTES)
#define SCALES_AT (TURNED_AT + TURNS_OVER * 4 * TURNED_BYTES)
#define BARRIERS_AT (SCALES_AT + 2 * GEMM_TOKENS * 4)
#define TABLES_AT (BARRIERS_AT + 256)

// tasks of an expert in the order in which multiprocessors that work at once share most
struct SharedTasks : Tasks<GEMM_TOKENS> {
    // As ``keep`` left it. Made again for each task: registers are short where sums are many
    __device__ __forceinline__ explicit SharedTasks(const Problem& p) {
        first = table() + WARPS;
        tiles = round_up_division(p.columns, GEMM_WIDTH);
        are_offsets_bad = *table();
    }

    // in shared memory, [WARPS + 3 experts + 2]
    static __device__ __forceinline__ int* table() {
        return reinterpret_cast<int*>(ring_memory + TABLES_AT);
    }

    // By all threads: behind the tasks before each expert come the problem's offsets and slots (-1
    // beyond the bank), so that tasks are found without a look at device memory.
    __device__ __forceinline__ void keep(const Problem& p) {
        plan(p, table());
        int* const to = first + p.experts + 1;
        for (int e = threadIdx.x; e <= p.experts; e += THREADS) {
            to[e] = p.offsets[e];
            if (e == p.experts) continue;
            const int slot = slot_of(p, e);
            to[p.experts + 1 + e] = slot < p.n_slots ? slot : -1;
        }
        if (threadIdx.x == 0) *table() = are_offsets_bad;
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
            const int* const offsets = first + p.experts + 1;
            task = {low, offsets[low], offsets[low + 1], offsets[p.experts + 1 + low], 0};
            n -= first[low];
        }
        const int rows = task.end - task.begin, blocks = blocks_of(rows);
        const int size = round_up_division(round_up_division(rows, blocks), GEMM_GRAIN) * GEMM_GRAIN;
        const int panels = round_up_division(blocks, PANEL);
        const int most = round_up_division(blocks, panels), panel = n / (most * tiles);
        const int before = panel * most, here = min(most, blocks - before);
        n -= before * tiles;
        task.tile = n / here;
        task.begin += (before + n % here) * size;
        task.end = min(task.end, task.begin + size);
        return task;
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
    __device__ __forceinline__ void go_on() {
        if (++stage < GEMM_STAGES) return;
        stage = 0;
        phase ^= 1;
    }
};

__device__ __forceinline__ int steps_of(const Problem& p, const Task& task) {
    return task.slot < 0 ? 0 : round_up_division(p.depth, STEP / ELEMENT);
}

__device__ __forceinline__ int tokens_of(const Task& task) {
    return round_up_division(task.end - task.begin, GEMM_GRAIN) * GEMM_GRAIN;
}

__device__ __forceinline__ void copy_weights(
    const Problem& p, const TensorMap& map, const Task& task, int step, const Ring& ring) {
    const bool has_pairs = p.activation != NONE;
    copy_box(ring.memory(), map, step * (STEP / ELEMENT), has_pairs ? 0 : task.tile * GEMM_WIDTH, 0,
             has_pairs ? task.tile * (GEMM_WIDTH / 16) : 0, task.slot, ring.full());
}

// by one thread: everything in boxes
__device__ __forceinline__ void copy_boxes(
    const Problem& p, const TensorMap& weights, const TensorMap& x, Ring ring) {
#pragma unroll 1
    for (int n = own_block(); n < SharedTasks(p).count(p); n += gridDim.x) {
        const Task task = SharedTasks(p).find(p, n);
        const int steps = steps_of(p, task), tokens = tokens_of(task);
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.go_on()) {
            wait_for(ring.empty(), ring.phase ^ 1);
            arrive_expecting(ring.full(), WEIGHT_BYTES + tokens * STEP);
            copy_weights(p, weights, task, step, ring);
            for (int row = 0; row < tokens; row += GEMM_GRAIN)
                copy_box(ring.memory() + WEIGHT_BYTES + row * STEP, x, step * (STEP / ELEMENT),
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

// by a warpgroup: weights in boxes, rows of x chunk by chunk
__device__ __forceinline__ void copy_gathered(
    const Problem& p, const TensorMap& weights, Ring ring) {
    constexpr int ROWS = WARPGROUP / 8, PARTS = GEMM_TOKENS / ROWS;
    const int chunks = p.depth / V;
    const int own_row = threadIdx.x / 8, own_chunk = threadIdx.x % 8;
    const u32 place = WEIGHT_BYTES + own_row * STEP + (own_chunk ^ own_row % 8) * 16;
#pragma unroll 1
    for (int n = own_block(); n < SharedTasks(p).count(p); n += gridDim.x) {
        const Task task = SharedTasks(p).find(p, n);
        const int steps = steps_of(p, task), tokens = tokens_of(task);
        if (!steps) continue;
        int source[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
            source[i] = source_of(p, task, task.begin + own_row + i * ROWS);
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.go_on()) {
            wait_for(ring.empty(), ring.phase ^ 1);
            if (threadIdx.x == 0) {
                arrive_expecting(ring.full(), WEIGHT_BYTES);
                copy_weights(p, weights, task, step, ring);
            }
            const int chunk = step * (STEP / 16) + own_chunk;
            const u32 to = ring.memory() + place;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                if (i * ROWS >= tokens) break;
                const bool is_valid = source[i] >= 0 && chunk < chunks;
                const char* from = p.x + source[i] * p.x_stride + chunk * 16;
                copy_async(to + i * ROWS * STEP, is_valid ? from : p.x, is_valid);
            }
            arrive_after_copies(ring.full());
        }
    }
    wait_for_copies<0>();
}

// of a thread of the warpgroups that multiply
struct Worker {
    int group, warp, lane;

    __device__ __forceinline__ int thread() const { return warp * 32 + lane; }

    // where 32 tokens are turned over, one time and the next
    __device__ __forceinline__ char* turned(int turn) const {
        return ring_memory + TURNED_AT + (group * 2 + turn % 2) * TURNED_BYTES;
    }

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

// from registers as they are: F32 products that are to be combined, or elements of few tokens
template <bool HAS_PAIRS, int COUNT>
__device__ __forceinline__ void write_sums(
    const Problem& p, const Task& task, const Worker& worker, int half, const float (&sum)[COUNT]) {
    const int g = worker.lane / 4, t = worker.lane % 4;
    const int column =
        first_column<HAS_PAIRS>(task, worker, half) + worker.warp * (HAS_PAIRS ? 8 : 16);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (HAS_PAIRS && i & 2) continue;
        const int row = task.begin + i / 4 * 8 + 2 * t + i % 2, at = column + g + (i & 2 ? 8 : 0);
        if (row < task.end && at < out_columns(p))
            store(p.out, row * p.out_stride + at, sum[i], GEMM_COMBINED);
    }
}

__device__ __forceinline__ void write_chunk(
    const Problem& p, int row, int column, const char* from, bool is_wide) {
    u16* const to = static_cast<u16*>(p.out) + row * p.out_stride + column;
    const int count = min(V, out_columns(p) - column);
    if (is_wide && count == V) {
        *reinterpret_cast<Chunk*>(to) = *reinterpret_cast<const Chunk*>(from);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) to[i] = reinterpret_cast<const u16*>(from)[i];
}

// Elements of 16 bits: 32 tokens after the other are turned over in shared memory, where a row
// is a token's columns of this warpgroup, its chunks exchanged so that no two meet in a bank.
template <bool HAS_PAIRS, int COUNT>
__device__ __forceinline__ void write_elements(
    const Problem& p, const Task& task, const Worker& worker, int half, const float (&sum)[COUNT]) {
    constexpr int CHUNKS = HAS_PAIRS ? 4 : 8, ROUNDS = COUNT / 16;
    const int first = first_column<HAS_PAIRS>(task, worker, half), block = worker.lane / 8;
    const bool is_wide =
        (reinterpret_cast<u64>(p.out) | static_cast<u64>(p.out_stride) * ELEMENT) % 16 == 0;
    const auto place = [&](int token, int chunk) {
        return token * CHUNKS * 16 + (chunk ^ (HAS_PAIRS ? token / 2 % 4 : token % 8)) * 16;
    };
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        char* const turned = worker.turned(half * ROUNDS + round);
        const u32 to = shared_address(turned);
        const float* const part = sum + round * 16;
        if (HAS_PAIRS) {
            const int token = block * 8 + worker.lane % 8;
            store_turned(to + place(token, worker.warp), to_pair(part[0], part[1]),
                         to_pair(part[4], part[5]), to_pair(part[8], part[9]),
                         to_pair(part[12], part[13]));
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = i * 16 + block / 2 * 8 + worker.lane % 8;
                const float* const four = part + i * 8;
                store_turned(to + place(token, worker.warp * 2 + block % 2),
                             to_pair(four[0], four[1]), to_pair(four[2], four[3]),
                             to_pair(four[4], four[5]), to_pair(four[6], four[7]));
            }
        }
        wait_for_warpgroup(1 + worker.group);
#pragma unroll
        for (int i = 0; i < CHUNKS / 4; ++i) {
            const int n = i * WARPGROUP + worker.thread(), token = n / CHUNKS, chunk = n % CHUNKS;
            const int row = task.begin + round * 32 + token, column = first + chunk * V;
            if (row < task.end && column < out_columns(p))
                write_chunk(p, row, column, turned + place(token, chunk), is_wide);
        }
    }
}

template <bool HAS_PAIRS, int COUNT>
__device__ __forceinline__ void finish_block(
    const Problem& p, const Task& task, const Worker& worker, int half, float (&sum)[COUNT]) {
    const int t = worker.lane % 4;
    const bool has_scale = p.scale && task.slot >= 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (HAS_PAIRS) {
            if (i & 2) continue;
            const float gate = sum[i];
            sum[i] = multiply(multiply(gate, reciprocal(add(1.0f, exponential(-gate)))),
                              sum[i + 2]);
        }
        if (has_scale) sum[i] = multiply(sum[i], worker.scales()[i / 4 * 8 + 2 * t + i % 2]);
    }
    if constexpr (GEMM_COMBINED || !TURNS_OVER) write_sums<HAS_PAIRS>(p, task, worker, half, sum);
    else write_elements<HAS_PAIRS>(p, task, worker, half, sum);
}

template <int TOKENS>
__device__ __forceinline__ void do_block(
    const Problem& p, const Task& task, const Worker& worker, Ring& ring) {
    constexpr int SCALES = (GEMM_TOKENS + WARPGROUP - 1) / WARPGROUP;  // that a thread fetches
    const int steps = steps_of(p, task), count = task.end - task.begin;
    float scale[SCALES] = {};
    if (p.scale)
#pragma unroll
        for (int i = 0; i < SCALES; ++i) {
            const int token = worker.thread() + i * WARPGROUP;
            if (token < count) scale[i] = p.scale[task.begin + token];
        }
    float sum[HALVES][TOKENS / 2];
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sum[half][i] = 0.0f;
    u32 last = 0;  // the barrier of a stage that is being read
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.go_on()) {
        wait_for(ring.full(), ring.phase);
        if (p.gather) show_tensor_cores();
        const u64 a = describe(ring.memory() + worker.group * (WEIGHT_BYTES / 2));
        const u64 b = describe(ring.memory() + WEIGHT_BYTES);
        begin_products();
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int half = 0; half < HALVES; ++half)
                multiply_warpgroup(sum[half], a + half * (64 * STEP / 16) + 2 * k, b + 2 * k);
        commit_products();
        wait_for_products<1>();
        if (last && worker.lane == 0) arrive(last);
        last = ring.empty();
    }
    wait_for_products<0>();
#pragma unroll
    for (int half = 0; half < HALVES; ++half) hold(sum[half]);
    if (last && worker.lane == 0) arrive(last);
#pragma unroll
    for (int i = 0; i < SCALES; ++i)
        if (worker.thread() + i * WARPGROUP < GEMM_TOKENS)
            worker.scales()[worker.thread() + i * WARPGROUP] = scale[i];
    wait_for_warpgroup(1 + worker.group);
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
        finish_block<GEMM_PAIRS>(p, task, worker, half, sum[half]);
    // the factors of the next block come where these are
    if (GEMM_COMBINED || !TURNS_OVER) wait_for_warpgroup(1 + worker.group);
#if GEMM_COMBINED
    if (task.tile || worker.group) return;
    for (int m = worker.thread(); m < count; m += WARPGROUP) {
        const int row = task.begin + m, route = p.scatter[row];
        if (route >= 0 && route < p.routes) p.places[PLACES_HEADER + route] = row;
        else report(p.error, BAD_SCATTER | task.expert << 8);
    }
#endif
}

// tokens of so many grains, and not more than a task has: sizes that no task has are one
__device__ constexpr int most(int grains) {
    return grains * GEMM_GRAIN < GEMM_TOKENS ? grains * GEMM_GRAIN : GEMM_TOKENS;
}

__device__ __forceinline__ void multiply(
    const Problem& p, const Worker& worker, Ring ring) {
#pragma unroll 1
    for (int n = own_block(); n < SharedTasks(p).count(p); n += gridDim.x) {
        const Task task = SharedTasks(p).find(p, n);
        switch (tokens_of(task) / GEMM_GRAIN) {
            case 1: do_block<most(1)>(p, task, worker, ring); break;
            case 2: do_block<most(2)>(p, task, worker, ring); break;
            case 3: do_block<most(3)>(p, task, worker, ring); break;
            case 4: do_block<most(4)>(p, task, worker, ring); break;
            case 5: do_block<most(5)>(p, task, worker, ring); break;
            case 6: do_block<most(6)>(p, task, worker, ring); break;
            case 7: do_block<most(7)>(p, task, worker, ring); break;
            default: do_block<most(8)>(p, task, worker, ring);
        }
    }
}

// Strides count elements. The maps: of the weights, with axes depth, column, gate or up, group of
// eight columns (without an activation: one and one), slot; of x, with axes depth, row.
extern "C" __global__ void __launch_bounds__(THREADS, 1) GEMM_NAME(
    TENSOR_MAP weights_map, TENSOR_MAP x_map, const void* x, const void* weights,
    const int* offsets, const int* slots, const int* gather, const float* scale,
    const int* scatter, void* out, int* places, int* error, i64 x_stride, i64 slot_stride,
    i64 weight_stride, i64 out_stride, int x_rows, int rows, int experts, int n_slots, int columns,
    int depth, int routes, int activation) {
    const Problem p{static_cast<const char*>(x), static_cast<const char*>(weights), offsets, slots,
                    gather, scale, scatter, out, places, error, x_stride * ELEMENT,
                    slot_stride * ELEMENT, weight_stride * ELEMENT, out_stride, x_rows, rows,
                    experts, n_slots, columns, depth, routes, activation};
    const Ring ring{shared_address(ring_memory)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < GEMM_STAGES; ++i) {
            // all that copy; a lane of each warp that multiplies
            begin_barrier(ring.full() + i * 8, gather ? 1 + WARPGROUP : 1);
            begin_barrier(ring.empty() + i * 8, 2 * WARPGROUP / 32);
        }
        publish_barriers();
    }
    SharedTasks(p).keep(p);
    if (threadIdx.x < WARPGROUP) {
        give_registers<FEW_REGISTERS>();
        if (gather) copy_gathered(p, weights_map, ring);
        else if (threadIdx.x == 0) copy_boxes(p, weights_map, x_map, ring);
    } else {
        take_registers<MANY_REGISTERS>();
        const int group = threadIdx.x / WARPGROUP - 1;
        const Worker worker{group, static_cast<int>(threadIdx.x) / 32 % 4,
                            static_cast<int>(threadIdx.x) % 32};
        multiply(p, worker, ring);
    }
}
