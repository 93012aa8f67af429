// grouped_rows: which rows belong to whom. Tasks of a grouped product, its columns, and what
// becomes of the sums.
//
// Counts, offsets and slots are read here, on the device, and believed only after they were looked
// at: whatever they hold, no address outside the tensors comes of it.

#ifndef THREADS
#define THREADS 256
#endif
#define WARPS (THREADS / 32)

enum Activation { NONE, SWIGLU_CONCAT, SWIGLU_INTERLEAVED };

// low byte of the error word; the expert is above it
enum Fault { BAD_OFFSETS = 1, NO_SLOT, SLOT_OUT_OF_RANGE, BAD_GATHER, BAD_SCATTER };

// of places: the rows that count, begin and end; then the row of every route
#define PLACES_HEADER 4

struct Problem {
    const char* x;
    const char* weights;
    const int* offsets;
    const int* slots;
    const int* gather;
    const float* scale;
    const int* scatter;
    void* out;
    int* places;
    int* error;
    // in bytes
    i64 x_stride, slot_stride, weight_stride;
    // in elements
    i64 out_stride;
    int x_rows, rows, experts, n_slots, columns, depth, routes, activation;
};

struct Task {
    int expert, begin, end, slot, tile;  // slot -1: the rows become zeros
};

__device__ __forceinline__ int round_up_division(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ int out_columns(const Problem& p) {
    return p.activation == NONE ? p.columns : p.columns / 2;
}

__device__ __forceinline__ int slot_of(const Problem& p, int expert) {
    return p.slots ? p.slots[expert] : expert;
}

// what is wrong with an expert: 0 or a fault
__device__ __forceinline__ int look_at(const Problem& p, int begin, int end, int slot) {
    if (begin < 0 || end < begin || end > p.rows) return BAD_OFFSETS;
    if (begin == end) return 0;
    if (slot < 0) return NO_SLOT;
    return slot < p.n_slots ? 0 : SLOT_OUT_OF_RANGE;
}

// The tasks of one launch, expert by expert: a task is a tile of columns of rows of one expert.
// TASK_ROWS is the most rows of a task, 0 for all of an expert's.
template <int TASK_ROWS>
struct Tasks {
    int* first;  // shared memory: tasks before each turn, [experts + 1]
    int tiles;   // of columns
    bool are_offsets_bad;

    __device__ __forceinline__ int blocks_of(int rows) const {
        if (TASK_ROWS) return round_up_division(rows, TASK_ROWS ? TASK_ROWS : 1);
        return rows > 0;
    }

    // by all threads; sums: shared memory, a number for each warp
    __device__ void plan(const Problem& p, int* sums) {
        check(p);
        number(p, sums, [&](int e) { return p.offsets[e + 1] - p.offsets[e]; });
    }

    // by all threads
    __device__ __forceinline__ void check(const Problem& p) {
        int is_bad = 0;
        for (int e = threadIdx.x; e < p.experts; e += THREADS) {
            // three loads that do not wait for each other
            const int begin = p.offsets[e], end = p.offsets[e + 1], slot = slot_of(p, e);
            const int fault = look_at(p, begin, end, slot);
            is_bad |= fault == BAD_OFFSETS;
            if (fault && blockIdx.x == 0) report(p.error, fault | e << 8);
        }
        are_offsets_bad = __syncthreads_or(is_bad);
        if (p.routes && blockIdx.x == 0 && threadIdx.x == 0) {
            p.places[0] = are_offsets_bad ? 0 : p.offsets[0];
            p.places[1] = are_offsets_bad ? 0 : p.offsets[p.experts];
        }
    }

    // by all threads; rows_at: how many the expert has whose turn comes after so many others
    template <typename RowsAt>
    __device__ __forceinline__ void number(const Problem& p, int* sums, RowsAt rows_at) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (threadIdx.x == 0) first[0] = 0;
        int before = 0;
        for (int base = 0; base < p.experts; base += THREADS) {
            const int e = base + threadIdx.x;
            int count = 0;
            if (e < p.experts && !are_offsets_bad) count = blocks_of(rows_at(e)) * tiles;
            for (int distance = 1; distance < 32; distance *= 2) {
                const int other = from_lane_before(count, distance);
                if (lane >= distance) count += other;
            }
            if (lane == 31) sums[warp] = count;
            __syncthreads();
            int total = 0;
            for (int w = 0; w < WARPS; ++w) {
                if (w < warp) count += sums[w];
                total += sums[w];
            }
            if (e < p.experts) first[e + 1] = before + count;
            before += total;
            __syncthreads();
        }
    }

    // with bad offsets no expert has rows: all rows become zeros, or, where rows are combined, none
    __device__ __forceinline__ int count(const Problem& p) const {
        if (!are_offsets_bad) return first[p.experts];
        return p.routes ? 0 : blocks_of(p.rows) * tiles;
    }

    __device__ __forceinline__ Task find(const Problem& p, int task) const {
        int low = 0, high = p.experts;
        if (are_offsets_bad) return among({0, 0, p.rows, -1, 0}, task);
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (first[middle] <= task) low = middle;
            else high = middle;
        }
        const int slot = slot_of(p, low);
        return among({low, p.offsets[low], p.offsets[low + 1], slot < p.n_slots ? slot : -1, 0},
                     task - first[low]);
    }

    // tasks of the same columns follow each other: they share what they read of the weights
    __device__ __forceinline__ Task among(Task task, int n) const {
        const int blocks = blocks_of(task.end - task.begin);
        task.tile = n / blocks;
        if (TASK_ROWS) {
            task.begin += n % blocks * TASK_ROWS;
            task.end = min(task.end, task.begin + TASK_ROWS);
        }
        return task;
    }
};

// the row of x that a row of the product is made of; -1 where there is none
__device__ __forceinline__ const char* token_of(const Problem& p, const Task& task, int row) {
    if (row >= task.end || task.slot < 0) return nullptr;
    const int source = p.gather ? p.gather[row] : row;
    if (source >= 0 && source < p.x_rows) return p.x + source * p.x_stride;
    report(p.error, BAD_GATHER | task.expert << 8);
    return nullptr;
}

// the column of the weights that is number n of a tile WIDTH wide; -1 past the end
template <int WIDTH>
__device__ __forceinline__ int weight_column(const Problem& p, int tile, int n) {
    if (p.activation != SWIGLU_CONCAT) {
        const int column = tile * WIDTH + n;
        return column < p.columns ? column : -1;
    }
    const int half = WIDTH / 2, inner = p.columns / 2, column = tile * half + n % half;
    return column < inner ? n / half * inner + column : -1;
}

__device__ __forceinline__ void store(void* out, i64 at, float value, bool is_product) {
#if GEMM_PRECISION == 0
    if (!is_product) return void(static_cast<u16*>(out)[at] = to_bf16(value));
#elif GEMM_PRECISION == 1
    if (!is_product) return void(static_cast<u16*>(out)[at] = to_f16(value));
#endif
    static_cast<float*>(out)[at] = value;
}

__device__ __forceinline__ float swiglu(float gate, float up) {
    return multiply(gate / (1.0f + expf(-gate)), up);
}

// Finishes rows first_row ... of a task by all threads. sums [SLABS, tokens of a slab, PITCH] in
// shared memory: the slabs are added in order.
template <int WIDTH, int PITCH, int SLABS, int SLAB_ROWS>
__device__ void finish_rows(const Problem& p, const Task& task, int first_row, const float* sums) {
    const int count = min(SLAB_ROWS, task.end - first_row);
    const int width = p.activation == NONE ? WIDTH : WIDTH / 2;
    const int columns = out_columns(p);
    const auto sum_of = [&](int m, int n) {
        float total = sums[m * PITCH + n];
#pragma unroll
        for (int slab = 1; slab < SLABS; ++slab)
            total = add(total, sums[(slab * SLAB_ROWS + m) * PITCH + n]);
        return total;
    };
    for (int i = threadIdx.x; i < count * width; i += THREADS) {
        const int m = i / width, n = i % width, row = first_row + m, column = task.tile * width + n;
        if (column >= columns) continue;
        float value = 0.0f;
        if (task.slot >= 0) {
            if (p.activation == NONE) value = sum_of(m, n);
            else if (p.activation == SWIGLU_CONCAT)
                value = swiglu(sum_of(m, n), sum_of(m, n + width));
            else value = swiglu(sum_of(m, 2 * n), sum_of(m, 2 * n + 1));
            if (p.scale) value = multiply(value, p.scale[row]);
        }
        store(p.out, row * p.out_stride + column, value, p.routes > 0);
    }
    if (!p.routes || task.tile) return;
    for (int m = threadIdx.x; m < count; m += THREADS) {
        const int row = first_row + m, route = p.scatter[row];
        if (route >= 0 && route < p.routes) p.places[PLACES_HEADER + route] = row;
        else report(p.error, BAD_SCATTER | task.expert << 8);
    }
}
