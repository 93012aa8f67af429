// gemm_tasks: a launch of forms that do task after task, each by the whole block.
//
// Shared memory: the ring, a word for each warp, experts + 1 words.

#define BLOCK_THREADS THREADS

__device__ __forceinline__ void do_all(const Problem& p) {
    int* const sums = reinterpret_cast<int*>(shared_memory + GEMM_RING);
    const int width = p.activation == NONE ? WIDTH : WIDTH / 2;
    Tasks<TASK_ROWS> tasks{sums + WARPS, round_up_division(out_columns(p), width), false};
    tasks.plan(p, sums);
    const int count = tasks.count(p);
#pragma unroll 1
    for (int n = blockIdx.x; n < count; n += gridDim.x) do_task(p, tasks.find(p, n));
}
