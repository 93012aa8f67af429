// moe_grouped_gemm: rows of x times the weights of their expert, for all experts in one launch.
//
// Weights are the 16-row side of every product of the tensor cores, tokens its 8 columns. A lane
// (g = lane / 4, t = lane % 4) reads chunks of 16 bytes along the depth, of weights and tokens
// alike: which numbers of the depth meet in one instruction is free as long as both sides agree, so
// a chunk is a fragment as it is. The order of additions depends on depth and form only: a row's
// bits depend neither on its neighbours nor on where its expert lies.
//
// The host defines GEMM_NAME, GEMM_PRECISION (0 bf16, 1 f16, 2 ieee, 3 tf32x3, 4 tf32), GEMM_KN
// (weights [K, N]; else [N, K]), GEMM_TILES (16-row tiles of a warp: 1 or 4), GEMM_TOKENS (most
// rows of a pass), GEMM_BLOCKS (of a multiprocessor) and GEMM_RING (chunks of shared memory). It
// puts tensor_cores, grouped_rows, gemm_sums, and what says how a form works before this text.

// Strides count elements.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, GEMM_BLOCKS) GEMM_NAME(
    const void* x, const void* weights, const int* offsets, const int* slots, const int* gather,
    const float* scale, const int* scatter, void* out, int* places, int* error, i64 x_stride,
    i64 slot_stride, i64 weight_stride, i64 out_stride, int x_rows, int rows, int experts,
    int n_slots, int columns, int depth, int routes, int activation) {
    const Problem p{static_cast<const char*>(x), static_cast<const char*>(weights), offsets, slots,
                    gather, scale, scatter, out, places, error, x_stride * ELEMENT,
                    slot_stride * ELEMENT, weight_stride * ELEMENT, out_stride, x_rows, rows,
                    experts, n_slots, columns, depth, routes, activation};
    do_all(p);
}
