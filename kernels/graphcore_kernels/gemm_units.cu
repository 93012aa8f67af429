// gemm_units: columns of weights in units of 16, which a warp multiplies at once.
//
// A unit's first 8 rows and its last 8 are columns one after the other, or gate and up.

#define UNIT 16

__device__ __forceinline__ int units_of(const Problem& p) {
    return p.activation == NONE ? round_up_division(p.columns, UNIT)
                                : round_up_division(p.columns / 2, UNIT / 2);
}

// the weights' column of row g + 8 * half of a unit
__device__ __forceinline__ int column_of_unit(const Problem& p, int unit, int half, int g) {
    if (p.activation == NONE) return unit * UNIT + half * 8 + g;
    const int column = unit * (UNIT / 2) + g;
    return p.activation == SWIGLU_CONCAT ? column + half * (p.columns / 2) : 2 * column + half;
}

// where the product of a row lies
__device__ __forceinline__ void note_route(const Problem& p, int expert, int row) {
    const int route = p.scatter[row];
    if (route >= 0 && route < p.routes) p.places[PLACES_HEADER + route] = row;
    else report(p.error, BAD_SCATTER | expert << 8);
}
