// gemm_flow: the product for few rows an expert, as one flow of weights that ends with the launch.
//
// Some warps copy, the others multiply, and a ring of stages lies between: the copies of the next
// columns and experts are under way while the last ones are multiplied and stored. A warp multiplies
// whole columns, all rows of a pass, over the whole depth; nothing is added up between warps. Rows
// beyond a pass find the weights in the L2 cache.

#define COPIERS 2  // warps that copy weights; one more copies tokens
#define BLOCK_THREADS ((MULTIPLIERS + COPIERS + 1) * 32)
#define SLICE GEMM_SLICE  // chunks of each row in a stage
#define MOST_STAGES 16
#define STORED_ROWS 32  // of a unit's sums that a warp puts in order at a time
#define STORED_PITCH (UNIT + 4)
#define STORED (STORED_ROWS * STORED_PITCH)

static_assert(GEMM_RING / ((MOST_UNITS * UNIT + GEMM_TOKENS) * SLICE) >= 2,
              "a stage is copied while another is used");

// shared memory: the ring, sums of each warp, barriers, and what the block knows
#define BARRIERS (GEMM_RING + MULTIPLIERS * STORED / 4)

__device__ __forceinline__ u64* full(int stage) {
    return reinterpret_cast<u64*>(shared_memory + BARRIERS) + stage;
}

__device__ __forceinline__ u64* empty(int stage) { return full(MOST_STAGES + stage); }

__device__ __forceinline__ Shares& known() {
    return *reinterpret_cast<Shares*>(full(2 * MOST_STAGES));
}

// a ring of stages, and how far a warp is
struct Ring {
    int stages, size;  // size: chunks of a stage
    int tokens;        // where they begin in a stage
    int at, parity;

    __device__ __forceinline__ Chunk* wait_until_full() const {
        wait_for(full(at), parity);
        return shared_memory + at * size;
    }

    __device__ __forceinline__ Chunk* wait_until_empty() const {
        wait_for(empty(at), parity ^ 1);
        return shared_memory + at * size;
    }

    __device__ __forceinline__ void advance() {
        if (++at == stages) at = 0, parity ^= 1;
    }

    // by a warp that has read what it needs
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(empty(at));
        advance();
    }
};

// neither copies nor reads meet in a bank: rows of SLICE chunks
__device__ __forceinline__ int place_in_slice(int row, int chunk) {
    return row * SLICE + (chunk ^ (row & 1) << 2);
}

__device__ __forceinline__ int slices_of(const Problem& p, const Piece& piece) {
    return piece.slot < 0 ? 0 : round_up_division(p.depth / V, SLICE);
}

// Weights of all pieces, by one of COPIERS * 32 threads.
__device__ __forceinline__ void copy_weights(
    const Problem& p, Walk walk, Ring ring, int thread, int pass) {
    constexpr int ROWS = COPIERS * 32 / SLICE;  // at once
    constexpr int PARTS = UNIT / ROWS;          // of a unit, one after the other
    static_assert(8 % ROWS == 0, "a part lies in one half of a unit");
    const int chunk = thread % SLICE, row = thread / SLICE, chunks = p.depth / V;
    const i64 step = (p.activation == SWIGLU_CONCAT ? UNIT / 2 : UNIT) * p.weight_stride;
    Piece piece;
    while (walk.next(p, known(), piece)) {
        const char* starts[PARTS];
        int units = piece.units;      // that have all rows
        bool is_inside[PARTS] = {};  // in a last one that has not
        const int last = piece.unit + units - 1;
#pragma unroll
        for (int k = 0; k < PARTS; ++k) {
            const int r = row + k * ROWS, half = r / 8, g = r % 8;
            starts[k] = p.weights + max(piece.slot, 0) * p.slot_stride +
                        column_of_unit(p, piece.unit, half, g) * p.weight_stride + chunk * 16;
            const int end = p.activation == SWIGLU_CONCAT ? p.columns / 2 * (half + 1) : p.columns;
            is_inside[k] = column_of_unit(p, last, half, g) < end;
        }
        if ((last + 1) * (p.activation == NONE ? UNIT : UNIT / 2) > out_columns(p)) --units;
        for (int first = piece.begin; first < piece.end; first += pass)
            for (int n = 0; n < slices_of(p, piece); ++n) {
                Chunk* to = ring.wait_until_empty() + place_in_slice(row, chunk);
                const bool is_within = n * SLICE + chunk < chunks;
                const char* from[PARTS];
#pragma unroll
                for (int k = 0; k < PARTS; ++k)
                    from[k] = is_within ? starts[k] + n * (SLICE * 16) : p.weights;
                const i64 next = is_within ? step : 0;
                const auto copy_units = [&](int count) {
#pragma unroll
                    for (int i = 0; i < count; ++i)
#pragma unroll
                        for (int k = 0; k < PARTS; ++k) {
                            copy_ahead(to + (i * UNIT + k * ROWS) * SLICE, from[k], is_within);
                            from[k] += next;
                        }
                    to += count * UNIT * SLICE;
                };
                int unit = 0;
#pragma unroll 1
                for (; unit + 4 <= units; unit += 4) copy_units(4);
#pragma unroll 1
                for (; unit < units; ++unit) copy_units(1);
                if (unit < piece.units)
#pragma unroll
                    for (int k = 0; k < PARTS; ++k)
                        if (is_inside[k]) copy_ahead(to + k * ROWS * SLICE, from[k], is_within);
                arrive_after_copies(full(ring.at));
                ring.advance();
            }
    }
}

// Tokens of all pieces, by one warp.
__device__ __forceinline__ void copy_tokens(const Problem& p, Walk walk, Ring ring, int pass) {
    constexpr int ROWS = 32 / SLICE, TURNS = GEMM_TOKENS / ROWS;  // ROWS: at once
    const int lane = threadIdx.x % 32, chunk = lane % SLICE, row = lane / SLICE;
    const int chunks = p.depth / V;
    Piece piece;
    while (walk.next(p, known(), piece)) {
        for (int first = piece.begin; first < piece.end; first += pass) {
            const int count = min(pass, piece.end - first);
            int sources[TURNS];  // rows of x, -1 where there is none: its products are zero
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                const int m = i * ROWS + row;
                sources[i] = m >= count || piece.slot < 0 ? -1 : p.gather ? p.gather[first + m]
                                                                          : first + m;
            }
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                if (sources[i] >= 0 && sources[i] < p.x_rows) continue;
                if (i * ROWS + row < count && piece.slot >= 0)
                    report(p.error, BAD_GATHER | piece.expert << 8);
                sources[i] = -1;
            }
            for (int n = 0; n < slices_of(p, piece); ++n) {
                Chunk* const to = ring.wait_until_empty() + ring.tokens + place_in_slice(row, chunk);
                const bool is_within = n * SLICE + chunk < chunks;
                const char* const from = p.x + (n * SLICE + chunk) * 16;
#pragma unroll
                for (int i = 0; i < TURNS; ++i) {
                    if (i * ROWS >= count) break;
                    const bool is_valid = is_within && sources[i] >= 0;
                    copy_ahead(to + i * ROWS * SLICE,
                               is_valid ? from + sources[i] * p.x_stride : p.x, is_valid);
                }
                arrive_after_copies(full(ring.at));
                ring.advance();
            }
        }
    }
}

// Stores up to STORED_ROWS rows of a unit whose sums lie in order, [rows, STORED_PITCH]: the halves
// of a unit are columns, or gate and up. scale: of the row whose number the lane has.
__device__ __forceinline__ void store_rows(const Problem& p, const Piece& piece, int unit, int first,
                                           int count, float scale, const float* sums) {
    const int lane = threadIdx.x % 32, width = p.activation == NONE ? UNIT : UNIT / 2;
    const int n = lane % width, column = unit * width + n;
    const bool is_inside = column < out_columns(p);
#pragma unroll 1
    for (int base = 0; base < count; base += 32 / width) {
        const int m = base + lane / width;
        const float factor = from_lane(scale, m % 32);
        if (m >= count || !is_inside) continue;
        float value = sums[m * STORED_PITCH + n];
        if (p.activation != NONE) value = swiglu(value, sums[m * STORED_PITCH + n + UNIT / 2]);
        if (p.scale) value = multiply(value, factor);
        if (piece.slot < 0) value = 0.0f;
        store(p.out, (first + m) * p.out_stride + column, value, p.routes > 0);
    }
}

// Puts a warp's sums in order and stores them: rows first ... of a pass of PARTS * NT * 8 at most.
template <int PARTS, int NT>
__device__ __forceinline__ void store_unit(const Problem& p, const Piece& piece, int unit, int first,
                                           int count, const WarpSums<NT> (&sums)[PARTS],
                                           const float (&scales)[GEMM_TOKENS / STORED_ROWS]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float* const own = reinterpret_cast<float*>(shared_memory + GEMM_RING) + warp * STORED;
    float* const lanes = own + without_history(2 * t * STORED_PITCH + g);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        sums[part].write(lanes, STORED_PITCH, 0, 0);
        __syncwarp();
        const int past = part * STORED_ROWS;
        store_rows(p, piece, unit, first + past, min(count - past, STORED_ROWS), scales[part], own);
        __syncwarp();
    }
}

// One pass over a piece: UNITS units of this warp by up to PARTS * NT * 8 tokens.
template <int UNITS, int PARTS, int NT>
__device__ __forceinline__ void multiply_pass(
    const Problem& p, const Piece& piece, Ring& ring, int first, int count) {
    static_assert(PARTS == 1 || NT * 8 == STORED_ROWS, "parts are stored one by one");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float scales[GEMM_TOKENS / STORED_ROWS];  // of the rows of a lane
#pragma unroll
    for (int i = 0; i < GEMM_TOKENS / STORED_ROWS; ++i) {
        const int m = i * STORED_ROWS + lane;
        scales[i] = p.scale && m < count ? p.scale[first + m] : 0.0f;
    }
    WarpSums<NT> sums[UNITS][PARTS];
    const int places[2] = {without_history(place_in_slice(g, t)),
                           without_history(place_in_slice(g, 4 + t))};
    const int slices = slices_of(p, piece);
#pragma unroll 1
    for (int n = 0; n < slices; ++n) {
        const Chunk* const stage = ring.wait_until_full();
        const Chunk* const tokens = stage + ring.tokens;
        const Chunk* const weights = stage + warp * UNIT * SLICE;
#pragma unroll
        for (int group = 0; group < SLICE / 4; ++group) {
            const int place = places[group % 2] + group / 2 * 8;
            Chunk w[UNITS][HELD];
#pragma unroll
            for (int i = 0; i < UNITS * HELD; ++i)
                w[i / HELD][i % HELD] =
                    weights[(i / HELD * MULTIPLIERS * UNIT + i % HELD * 8) * SLICE + place];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                Chunk x[NT];
#pragma unroll
                for (int q = 0; q < NT; ++q) x[q] = tokens[(part * NT + q) * 8 * SLICE + place];
#pragma unroll
                for (int u = 0; u < UNITS; ++u) sums[u][part].add_products(w[u], x);
            }
        }
        ring.release();
    }
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
        store_unit(p, piece, piece.unit + warp + u * MULTIPLIERS, first, count, sums[u], scales);
}

template <int UNITS>
__device__ __forceinline__ void multiply_units(
    const Problem& p, const Piece& piece, Ring& ring, int first, int count) {
    if (count <= 8) multiply_pass<UNITS, 1, 1>(p, piece, ring, first, count);
    else if (count <= 16) multiply_pass<UNITS, 1, 2>(p, piece, ring, first, count);
    else if (count <= 32) multiply_pass<UNITS, 1, 4>(p, piece, ring, first, count);
    else multiply_pass<UNITS, 2, 4>(p, piece, ring, first, count);
}

// by the warp that has the expert's first unit
__device__ __forceinline__ void note_routes(
    const Problem& p, const Piece& piece, int first, int count) {
    for (int m = threadIdx.x % 32; m < count; m += 32) note_route(p, piece.expert, first + m);
}

// The products of all pieces, by one of MULTIPLIERS warps.
__device__ __forceinline__ void multiply_pieces(const Problem& p, Walk walk, Ring ring, int pass) {
    const int warp = threadIdx.x / 32;
    Piece piece;
    while (walk.next(p, known(), piece))
        for (int first = piece.begin; first < piece.end; first += pass) {
            const int count = min(pass, piece.end - first);
            if (p.routes && piece.unit + warp == 0) note_routes(p, piece, first, count);
            if (GEMM_UNITS > 1 && warp + MULTIPLIERS < piece.units)
                multiply_units<GEMM_UNITS>(p, piece, ring, first, count);
            else if (warp < piece.units) multiply_units<1>(p, piece, ring, first, count);
            else
                for (int n = slices_of(p, piece); n > 0; --n) {
                    ring.wait_until_full();  // or this warp's turns would run ahead of the others'
                    ring.release();
                }
        }
}

__device__ __forceinline__ void do_all(const Problem& p) {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x < MOST_STAGES) {
        make_barrier(full(threadIdx.x), (COPIERS + 1) * 32);
        make_barrier(empty(threadIdx.x), MULTIPLIERS);
    }
    if (warp == MULTIPLIERS) list_shares(p, known());
    __syncthreads();
    Walk walk;
    int most_units, most_rows;
    walk.begin(p, known(), most_units, most_rows);
    // the stages of a block are as large as its largest piece needs
    const int pass = min(GEMM_TOKENS, round_up_division(max(most_rows, 1), 8) * 8);
    // as many rows as a pass reads, or it would read what is being copied to the next stage
    const int rows = pass <= 16 ? pass : pass <= 32 ? 32 : GEMM_TOKENS;
    const int tokens = most_units * UNIT * SLICE, size = tokens + rows * SLICE;
    const Ring ring{min(MOST_STAGES, GEMM_RING / size), size, tokens, 0, 0};
    if (warp < MULTIPLIERS) multiply_pieces(p, walk, ring, pass);
    else if (warp < MULTIPLIERS + COPIERS)
        copy_weights(p, walk, ring, threadIdx.x - MULTIPLIERS * 32, pass);
    else copy_tokens(p, walk, ring, pass);
}
