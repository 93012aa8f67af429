// gemm_shares: which columns of which experts a block computes, so that all blocks have as much to
// do, whoever has how many rows.
//
// A unit of columns costs what its weights take to stream, or,
// with many rows, what it takes to multiply; all units of all experts stand in a line that is cut
// into as many parts as there are blocks. One warp reads the tables, once; all others read its list.

#define TOGETHER 4      // experts that a lane reads at once
#define MULTIPLIERS 8   // warps that multiply, GEMM_UNITS at most at a time
#define MOST_UNITS (MULTIPLIERS * GEMM_UNITS)
#define STREAM_COST 64  // rows that are multiplied while the weights of a unit come

// an expert that has rows
struct Share {
    u32 first;  // cost of one unit of each expert before it
    int expert, begin, end, slot;  // slot -1: the rows become zeros
};

// what the block knows of all, in shared memory
struct Shares {
    i64 low, high;  // of the line, what is this block's
    int count;
    Share list[1];  // [experts + 1]; the one behind the last has the cost of all
};

// units of one expert for a block at a time, all its rows
struct Piece {
    int expert, begin, end, slot, unit, units;
};

__device__ __forceinline__ u32 cost_of(int rows) { return max(rows, STREAM_COST); }

__device__ __forceinline__ u32 sum_before(u32 value, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u32 other = from_lane_before(value, distance);
        if (lane >= distance) value += other;
    }
    return value;
}

// where parts meet, both neighbours compute the same: the order of numbers is all that counts
__device__ __forceinline__ i64 cut(i64 total, double part, int n) {
    return n == int(gridDim.x) ? total : i64(double(total) * (double(n) * part));
}

// by one warp
__device__ void list_shares(const Problem& p, Shares& shares) {
    const double part = 1.0 / double(gridDim.x);
    const int lane = threadIdx.x % 32;
    const bool is_first = blockIdx.x == 0;
    int count = 0, is_bad = 0;
    u32 cost = 0;
    for (int base = 0; base < p.experts; base += 32 * TOGETHER) {
        const int expert = base + lane * TOGETHER;
        int ends[TOGETHER + 1], slots[TOGETHER];  // loads that do not wait for each other
#pragma unroll
        for (int i = 0; i <= TOGETHER; ++i) ends[i] = p.offsets[min(expert + i, p.experts)];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) slots[i] = slot_of(p, min(expert + i, p.experts - 1));
        u32 found = 0, costs = 0;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (expert + i >= p.experts) continue;
            const int fault = look_at(p, ends[i], ends[i + 1], slots[i]);
            if (fault && is_first) report(p.error, fault | (expert + i) << 8);
            if (fault == BAD_OFFSETS) is_bad = 1;
            else if (ends[i] < ends[i + 1]) ++found, costs += cost_of(ends[i + 1] - ends[i]);
        }
        const u32 found_before = sum_before(found, lane), cost_before = sum_before(costs, lane);
        Share* to = shares.list + count + (found_before - found);
        u32 first = cost + (cost_before - costs);
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (expert + i >= p.experts || ends[i] >= ends[i + 1]) continue;
            if (look_at(p, ends[i], ends[i + 1], slots[i]) == BAD_OFFSETS) continue;
            *to++ = {first, expert + i, ends[i], ends[i + 1],
                     slots[i] < p.n_slots ? slots[i] : -1};
            first += cost_of(ends[i + 1] - ends[i]);
        }
        count += from_lane(int(found_before), 31);
        cost += u32(from_lane(int(cost_before), 31));
    }
    // with bad offsets no expert has rows: all rows become zeros, or, where rows are combined, none
    is_bad = greatest_of_warp(is_bad);
    __syncwarp();
    if (lane) return;
    if (is_bad) {
        shares.list[0] = {0, 0, 0, p.rows, -1};
        count = p.routes ? 0 : 1, cost = p.routes ? 0 : cost_of(p.rows);
    }
    shares.list[count].first = cost;
    shares.count = count;
    const i64 total = i64(cost) * units_of(p);
    shares.low = cut(total, part, blockIdx.x), shares.high = cut(total, part, blockIdx.x + 1);
    if (p.routes && is_first) {
        p.places[0] = is_bad ? 0 : p.offsets[0];
        p.places[1] = is_bad ? 0 : p.offsets[p.experts];
    }
}

// The pieces of a block, in order; every warp walks for itself.
struct Walk {
    int at, left, unit, end;

    static __device__ __forceinline__ i64 start_of(const Problem& p, const Shares& shares, int n) {
        return i64(shares.list[n].first) * units_of(p);
    }

    // the unit of share n that begins at a place of the line or before it
    static __device__ __forceinline__ int unit_at(
        const Problem& p, const Shares& shares, i64 place, int n) {
        const i64 past = place - start_of(p, shares, n);
        const u32 cost = cost_of(shares.list[n].end - shares.list[n].begin);
        const int units = units_of(p);
        if (past <= 0) return 0;
        if (past >= i64(cost) * units) return units;
        return min(int(divide(float(past), float(cost))), units);
    }

    // by one warp; most_units, most_rows: of any piece
    __device__ __forceinline__ void begin(
        const Problem& p, const Shares& shares, int& most_units, int& most_rows) {
        const int lane = threadIdx.x % 32, count = shares.count;
        const i64 low = shares.low, high = shares.high;
        at = -1, left = unit = end = most_units = most_rows = 0;
        for (int base = 0; base < count; base += 32) {
            const int n = base + lane;
            const bool is_past = n < count && start_of(p, shares, n + 1) <= low;
            at += count_in_warp(is_past);
            if (n >= count || is_past || start_of(p, shares, n) >= high) continue;
            const int units = unit_at(p, shares, high, n) - unit_at(p, shares, low, n);
            if (!units) continue;
            const int pieces = round_up_division(units, MOST_UNITS);
            most_units = max(most_units, round_up_division(units, pieces));
            most_rows = max(most_rows, shares.list[n].end - shares.list[n].begin);
        }
        most_units = greatest_of_warp(most_units), most_rows = greatest_of_warp(most_rows);
    }

    __device__ __forceinline__ bool next(const Problem& p, const Shares& shares, Piece& piece) {
        while (!left) {
            if (++at >= shares.count || start_of(p, shares, at) >= shares.high) return false;
            unit = unit_at(p, shares, shares.low, at), end = unit_at(p, shares, shares.high, at);
            left = round_up_division(end - unit, MOST_UNITS);
        }
        const Share& share = shares.list[at];
        const int units = round_up_division(end - unit, left--);
        piece = {share.expert, share.begin, share.end, share.slot, unit, units};
        unit += units;
        return true;
    }
};
