// warpgroup_launch: a launch of a form of warpgroups: one copies, two multiply block after block.

__device__ __forceinline__ void multiply(
    const Problem& p, const Worker& worker, Ring ring) {
#pragma unroll 1
    for (Turn turn; turn.task < SharedTasks(p).count(p); turn.go_on())
        do_block_of(p, turn.task, worker, ring);
}

#if GEMM_CLUSTER > 1
#define CLUSTER __cluster_dims__(GEMM_CLUSTER, 1, 1)
#else
#define CLUSTER
#endif

// Strides count elements. The maps: of the weights, with axes depth, column, gate or up, group of
// eight columns (without an activation: one and one), slot; of x, with axes depth, row.
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1) GEMM_NAME(
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
            begin_barrier(ring.full() + i * 8, gather ? 1 + GATHERERS : 1);
            begin_barrier(ring.empty() + i * 8,
                          2 * WARPGROUP / 32 * (gather ? 1 : GEMM_CLUSTER));
        }
        begin_other_barriers(ring);
        publish_barriers();
    }
    SharedTasks(p).keep(p);
    if (GEMM_CLUSTER > 1) wait_for_cluster();
    if (threadIdx.x < WARPGROUP) {
        give_registers<FEW_REGISTERS>();
        copy_all(p, weights_map, x_map, ring);
    } else {
        take_registers<MANY_REGISTERS>();
        const int group = threadIdx.x / WARPGROUP - 1;
        const Worker worker{group, static_cast<int>(threadIdx.x) / 32 % 4,
                            static_cast<int>(threadIdx.x) % 32};
        multiply(p, worker, ring);
    }
    // copies and arrivals of another block may still be on their way here
    if (GEMM_CLUSTER > 1) wait_for_cluster();
}
