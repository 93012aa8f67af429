// gemm_direct: the product for a row or a few an expert; weights go from memory straight into the
// registers that multiply them.
//
// Units of 16 columns go round the blocks. The warps of a block have a part of the depth each, and
// their sums are added in order. A warp always has AHEAD steps under way: what was multiplied makes
// room for what comes next, be it of another expert. Nobody waits for a table but once.

#define SPLIT 4
#define BLOCK_THREADS (SPLIT * 32)
#define AHEAD GEMM_AHEAD  // steps of a round: 4 chunks of each row of a unit, that is 64 bytes
#define MOST_WORDS 16     // of 32 experts
#define PITCH (UNIT + 4)
#define SUMS (SPLIT * GEMM_TOKENS * PITCH)

#if IS_IEEE
typedef LaneSums<GEMM_TOKENS> Sums;
#else
typedef WarpSums<1> Sums;
#endif

static_assert(GEMM_TOKENS == 8 && BLOCK_THREADS == UNIT * GEMM_TOKENS, "a thread has one sum");
static_assert(GEMM_RING == SPLIT * 2 * AHEAD * 32, "tokens of two rounds");

// shared memory: tokens of two rounds of each warp, sums of two passes, and the tables
struct Known {
    float sums[2][SUMS];
    u32 hits[MOST_WORDS];  // a bit for each expert that has rows
    struct {
        int begin, end, slot;
    } list[1];  // [experts]
};

__device__ __forceinline__ Known& known() {
    return *reinterpret_cast<Known*>(shared_memory + GEMM_RING);
}

// by all threads; whether offsets are bad
__device__ __forceinline__ bool read_tables(const Problem& p) {
    int is_bad = 0;
    for (int base = 0; base < p.experts; base += BLOCK_THREADS) {
        const int e = base + threadIdx.x;
        bool is_hit = false;
        if (e < p.experts) {
            const int begin = p.offsets[e], end = p.offsets[e + 1], slot = slot_of(p, e);
            const int fault = look_at(p, begin, end, slot);
            if (fault && blockIdx.x == 0) report(p.error, fault | e << 8);
            is_bad |= fault == BAD_OFFSETS;
            is_hit = begin < end;
            known().list[e] = {begin, end, slot < p.n_slots ? slot : -1};
        }
        const u32 hits = lanes_with(is_hit);
        if (threadIdx.x % 32 == 0) known().hits[(base + threadIdx.x) / 32] = hits;
    }
    return __syncthreads_or(is_bad);
}

// rows first ... of a unit of an expert, at most GEMM_TOKENS, and how far along the depth
struct Pass {
    int number, expert, first, end, slot, unit, round;
};

// The rounds of a block, in order; every warp walks for itself.
struct Walk {
    u32 hits;             // a word of each lane
    int before, count;    // experts with rows, before those of the lane and in all
    int units, rounds;    // of an expert, of a pass
    bool are_offsets_bad;

    __device__ __forceinline__ void begin(const Problem& p, bool is_bad, int steps) {
        const int lane = threadIdx.x % 32;
        const int words = round_up_division(p.experts, BLOCK_THREADS) * SPLIT;
        hits = lane < words ? known().hits[lane] : 0;
        int through = count_bits(hits);
        for (int distance = 1; distance < words; distance *= 2) {
            const int other = from_lane_before(through, distance);
            if (lane >= distance) through += other;
        }
        before = lane < words ? through - count_bits(hits) : 1 << 30;
        // with bad offsets no expert has rows: all rows become zeros, or, where rows are combined,
        // none
        count = is_bad ? p.routes == 0 : from_lane(through, words - 1);
        units = units_of(p), rounds = round_up_division(steps, AHEAD);
        are_offsets_bad = is_bad;
    }

    // false past the last
    __device__ __forceinline__ bool find(const Problem& p, Pass& pass) const {
        if (pass.number >= count * units) return false;
        const int n = pass.number / units, lane = threadIdx.x % 32;
        pass.unit = pass.number - n * units, pass.round = 0;
        if (are_offsets_bad) {
            pass.expert = pass.first = 0, pass.end = p.rows, pass.slot = -1;
            return true;
        }
        const int word = count_in_warp(before <= n) - 1, rank = n - from_lane(before, word);
        const u32 bits = from_lane(int(hits), word);
        const int bit = count_in_warp(count_bits(bits & ((2u << lane) - 1)) <= rank);
        pass.expert = word * 32 + bit;
        const auto& found = known().list[pass.expert];
        pass.first = found.begin, pass.end = found.end, pass.slot = found.slot;
        return true;
    }

    __device__ __forceinline__ bool next(const Problem& p, Pass& pass) const {
        if (++pass.round < rounds) return true;
        pass.round = 0, pass.first += GEMM_TOKENS;
        if (pass.first < pass.end) return true;
        pass.number += gridDim.x;
        return find(p, pass);
    }
};

// What a lane reads: chunks of two rows of weights and of a token.
struct Sources {
    const char *weights[HELD], *token;
    int left, token_left;  // chunks from here to the end of the warp's part of the depth

    // begin, end: chunks of this warp
    __device__ __forceinline__ void aim(const Problem& p, const Pass& pass, int begin, int end) {
        const int lane = threadIdx.x % 32, g = lane / 4, chunk = begin + lane % 4;
        left = pass.slot < 0 ? 0 : end - chunk;
#pragma unroll
        for (int half = 0; half < HELD; ++half) {
            // what a column that does not exist would have is not stored
            const int column = min(column_of_unit(p, pass.unit, half, g), p.columns - 1);
            weights[half] = p.weights + max(pass.slot, 0) * p.slot_stride +
                            column * p.weight_stride + chunk * 16ll;
        }
    }

    __device__ __forceinline__ void aim_at_token(const Problem& p, const Pass& pass, int begin) {
        const int lane = threadIdx.x % 32, row = pass.first + lane / 4;
        token = token_of(p, {pass.expert, pass.first, pass.end, pass.slot, 0}, row);
        token_left = token ? left : 0;
        token = (token ? token : p.x) + (begin + lane % 4) * 16ll;
    }

    __device__ __forceinline__ void load(Chunk (&w)[HELD], int step) const {
#pragma unroll
        for (int half = 0; half < HELD; ++half)
            load_ahead(w[half], weights[half] + step * 64, step * 4 < left);
    }

    __device__ __forceinline__ void copy(Chunk* to, int step) const {
        copy_async(to + step * 32, token + step * 64, step * 4 < token_left);
    }

    __device__ __forceinline__ void advance() {
#pragma unroll
        for (int half = 0; half < HELD; ++half) weights[half] += AHEAD * 64;
        token += AHEAD * 64;
        left -= AHEAD * 4, token_left -= AHEAD * 4;
    }
};

// Adds the warps' sums and stores them, a thread each. sums: room for all, not used by the last pass.
__device__ __forceinline__ void finish_pass(
    const Problem& p, const Pass& pass, const Sums& own, float scale, float* sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    own.write(sums + warp * GEMM_TOKENS * PITCH, PITCH, lane / 4, lane % 4);
    __syncthreads();
    const int width = p.activation == NONE ? UNIT : UNIT / 2;
    const int n = threadIdx.x % UNIT, m = threadIdx.x / UNIT, row = pass.first + m;
    const int column = pass.unit * width + n;
    if (row >= pass.end) return;
    const auto sum_of = [&](int at) {
        float total = sums[m * PITCH + at];
#pragma unroll
        for (int w = 1; w < SPLIT; ++w) total = add(total, sums[(w * GEMM_TOKENS + m) * PITCH + at]);
        return total;
    };
    if (n < width && column < out_columns(p)) {
        float value = sum_of(n);
        if (p.activation != NONE) value = swiglu(value, sum_of(n + UNIT / 2));
        if (p.scale) value = multiply(value, scale);
        if (pass.slot < 0) value = 0.0f;
        store(p.out, row * p.out_stride + column, value, p.routes > 0);
    }
    if (p.routes && column == 0) note_route(p, pass.expert, row);
}

__device__ __forceinline__ void do_all(const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool is_bad = read_tables(p);
    if (p.routes && blockIdx.x == 0 && threadIdx.x == 0) {
        p.places[0] = is_bad ? 0 : p.offsets[0];
        p.places[1] = is_bad ? 0 : p.offsets[p.experts];
    }
    const int chunks = p.depth / V, steps = round_up_division(round_up_division(chunks, 4), SPLIT);
    const int begin = warp * steps * 4, end = min(chunks, begin + steps * 4);
    Walk walk;
    walk.begin(p, is_bad, steps);
    Pass next{int(blockIdx.x)};
    if (!walk.find(p, next)) return;

    Chunk* tokens = shared_memory + warp * 2 * AHEAD * 32 + lane;  // of this round
    Chunk w[AHEAD][HELD];
    Sources sources;
    sources.aim(p, next, begin, end);
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) sources.load(w[step], step);
    sources.aim_at_token(p, next, begin);
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) sources.copy(tokens, step);
    commit_copies();
    Sums sums;
    int turn = 0, passes = 0;
    bool is_left = true;
#pragma unroll 1
    while (is_left) {
        const Pass now = next;
        is_left = walk.next(p, next);
        if (!is_left) sources.left = sources.token_left = 0;
        else if (next.round) sources.advance();
        else sources.aim(p, next, begin, end), sources.aim_at_token(p, next, begin);
        const bool is_last = now.round + 1 == walk.rounds;
        const int row = now.first + int(threadIdx.x) / UNIT;
        const float scale = p.scale && is_last && row < now.end ? p.scale[row] : 0.0f;
        Chunk* const here = tokens + turn * AHEAD * 32;
        turn ^= 1;
        Chunk* const there = tokens + turn * AHEAD * 32;
        wait_for_copies<0>();
        // lanes see each other's tokens, and none still reads what is overwritten next
        if (IS_IEEE) __syncwarp();
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) {
#if IS_IEEE
#pragma unroll
            for (int m = 0; m < GEMM_TOKENS; ++m) {
                if (m >= now.end - now.first) break;
                sums.add_products(w[step], m, here[step * 32 + m * 4 + lane % 4 - lane]);
            }
#else
            const Chunk x[1] = {here[step * 32]};
            sums.add_products(w[step], x);
#endif
            sources.load(w[step], step);
            sources.copy(there, step);
        }
        commit_copies();
        if (!is_last) continue;
        finish_pass(p, now, sums, scale, known().sums[passes++ % 2]);
        sums = {};
    }
    wait_for_copies<0>();
}
