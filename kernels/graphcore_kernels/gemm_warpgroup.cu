// gemm_warpgroup: the product of elements of 16 bits by the warpgroups of sm_90a.
//
// One warpgroup copies ahead; two multiply, half of the columns of the weights each. With few tokens
// a stage is small and the ring deep: weights stream.

#define GATHERERS WARPGROUP  // threads
// of a thread; with 168 at the start, FEW + 2 MANY must not be above 3 * 168
#define FEW_REGISTERS 104
#define MANY_REGISTERS 200

// by a warpgroup: weights in boxes, rows of x chunk by chunk
__device__ __forceinline__ void copy_gathered(
    const Problem& p, const TensorMap& weights, Ring ring) {
    constexpr int ROWS = WARPGROUP / 8, PARTS = GEMM_TOKENS / ROWS;
    const int chunks = p.depth / V;
    const int own_row = threadIdx.x / 8, own_chunk = threadIdx.x % 8;
    const u32 place = WEIGHT_BYTES + own_row * STEP + (own_chunk ^ own_row % 8) * 16;
#pragma unroll 1
    for (Turn turn; turn.task < SharedTasks(p).count(p); turn.go_on()) {
        const Task task = SharedTasks(p).find(p, turn.task);
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

__device__ __forceinline__ void begin_other_barriers(const Ring&) {}

__device__ __forceinline__ void copy_all(
    const Problem& p, const TensorMap& weights, const TensorMap& x, const Ring& ring) {
    if (p.gather) copy_gathered(p, weights, ring);
    else if (threadIdx.x == 0) copy_boxes(p, weights, x, ring);
}

// where 32 tokens are turned over, one time and the next
__device__ __forceinline__ char* turned_of(const Worker& worker, int turn) {
    return ring_memory + TURNED_AT + (worker.group * 2 + turn % 2) * TURNED_BYTES;
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
        char* const turned = turned_of(worker, half * ROUNDS + round);
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
    if constexpr (GEMM_COMBINED || !TURNS_OVER) write_sums<HAS_PAIRS>(p, task, worker, half, 0, sum);
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
        if (last) give_back(p, last, worker.lane);
        last = ring.empty();
    }
    wait_for_products<0>();
#pragma unroll
    for (int half = 0; half < HALVES; ++half) hold(sum[half]);
    if (last) give_back(p, last, worker.lane);
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

__device__ __forceinline__ void do_block_of(
    const Problem& p, int number, const Worker& worker, Ring& ring) {
    const Task task = SharedTasks(p).find(p, number);
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
