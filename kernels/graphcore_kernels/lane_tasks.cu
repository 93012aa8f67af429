// lane_tasks: a launch of tiles that take the longer the more rows they have, the longest first.
//
// Blocks take tasks in turn, down the line of blocks and up again. They end at about the same time
// where the last tasks are short: whole tiles of all experts come first, then what is left of each
// expert's rows, by its size. Tasks are numbered anew for each size, in the same table: about 1 us.
//
// Shared memory: the ring, a word for each warp, experts + 1 words.

#define BLOCK_THREADS THREADS

// Tiles of one size: of more rows than most - TASK_STEP, and no more than most. What ``number``
// counts as rows are blocks of rows.
struct SizedTasks : Tasks<1> {
    int most;

    __device__ __forceinline__ bool are_largest() const { return most == GEMM_TOKENS; }

    // of an expert with so many rows
    __device__ __forceinline__ int blocks_of(int rows) const {
        const int left = rows % GEMM_TOKENS;
        const int whole = are_largest() ? rows / GEMM_TOKENS : 0;
        return whole + (left > most - TASK_STEP && left <= most);
    }

    // by all threads; sums: shared memory, a number for each warp
    __device__ __forceinline__ void plan(const Problem& p, int* sums) {
        number(p, sums, [&](int e) { return blocks_of(p.offsets[e + 1] - p.offsets[e]); });
    }

    // with bad offsets no expert has rows: all rows become zeros, or, where rows are combined, none
    __device__ __forceinline__ int count(const Problem& p) const {
        if (!are_offsets_bad) return first[p.experts];
        return p.routes ? 0 : blocks_of(p.rows) * tiles;
    }

    // tasks of the same columns follow each other: they share what they read of the weights
    __device__ __forceinline__ Task find(const Problem& p, int n) const {
        int low = 0, high = p.experts;
        Task task{0, 0, p.rows, -1, 0};
        if (!are_offsets_bad) {
            while (high - low > 1) {
                const int middle = (low + high) / 2;
                if (first[middle] <= n) low = middle;
                else high = middle;
            }
            const int slot = slot_of(p, low);
            task = {low, p.offsets[low], p.offsets[low + 1], slot < p.n_slots ? slot : -1, 0};
            n -= first[low];
        }
        const int rows = task.end - task.begin, blocks = blocks_of(rows);
        task.tile = n / blocks;
        task.begin += (are_largest() ? n % blocks : rows / GEMM_TOKENS) * GEMM_TOKENS;
        task.end = min(task.end, task.begin + GEMM_TOKENS);
        return task;
    }
};

__device__ __forceinline__ void do_all(const Problem& p) {
    int* const sums = reinterpret_cast<int*>(shared_memory + GEMM_RING);
    const int width = p.activation == NONE ? WIDTH : WIDTH / 2;
    SizedTasks tasks{{sums + WARPS, round_up_division(out_columns(p), width), false}, GEMM_TOKENS};
    tasks.check(p);
    const int blocks = gridDim.x;
    int n = blockIdx.x, before = 0;  // the task, and those of larger sizes
#pragma unroll 1
    for (; tasks.most > 0; tasks.most -= TASK_STEP) {
        tasks.plan(p, sums);
#pragma unroll 1
        while (n - before < tasks.count(p)) {
            do_task(p, tasks.find(p, n - before));
            n = (2 * (n / blocks) + 2) * blocks - 1 - n;
        }
        before += tasks.count(p);
    }
}
