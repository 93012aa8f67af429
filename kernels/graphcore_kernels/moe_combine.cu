// moe_combine: the rows of a grouped product, added up for each token, choice by choice.
//
// A route is token * choices + choice. places says which row a route's product lies in; it is
// believed only where scatter agrees, so its memory needs no clearing. The order of additions is
// the router's, wherever the experts lie.

extern "C" __global__ void __launch_bounds__(THREADS) GEMM_NAME(
    const float* products, const int* places, const int* scatter, const int* offsets, void* out,
    int* error, i64 out_stride, int tokens, int choices, int columns, int experts) {
    const int begin = places[0], end = places[1];
    const i64 first = i64(blockIdx.x) * THREADS + threadIdx.x, step = i64(gridDim.x) * THREADS;
    const int groups = columns / 4;
    for (i64 i = first; i < i64(tokens) * groups; i += step) {
        const int token = i / groups, column = i % groups * 4;
        float total[4] = {};
        for (int choice = 0; choice < choices; ++choice) {
            const int route = token * choices + choice, row = places[PLACES_HEADER + route];
            if (row < begin || row >= end || scatter[row] != route) continue;
            const Chunk part =
                *reinterpret_cast<const Chunk*>(products + i64(row) * columns + column);
#pragma unroll
            for (int k = 0; k < 4; ++k) total[k] = add(total[k], as_float(part.word[k]));
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) store(out, token * out_stride + column + k, total[k], false);
    }
    // a route that two rows name has the place of one of them
    for (i64 row = begin + first; row < end; row += step) {
        const int route = scatter[row];
        if (route < 0 || route >= tokens * choices) continue;  // the product has reported it
        if (places[PLACES_HEADER + route] == row) continue;
        int expert = 0;
        while (expert + 1 < experts && offsets[expert + 1] <= row) ++expert;
        report(error, BAD_SCATTER | expert << 8);
    }
}
