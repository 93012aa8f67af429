// The plan of one step over the slots of one group: which experts the routes name, where each of
// them sits, whose slot a missing one takes, and in which order the grouped product has its rows.
// One block. Everything is decided on copies in shared memory (route_state.cu, which comes before)
// and written at the end, so that a step that is refused leaves the tables as they were.

static __device__ float weight_of(const void* weights, u32 type, u32 route) {
    if (type == F32) return ((const float*)weights)[route];
    u32 bits = ((const u16*)weights)[route];
    if (type == BF16) {
        bits <<= 16;
        return *(float*)&bits;
    }
    u32 sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, fraction = bits & 0x3ffu;
    if (exponent == 0) {  // zero, or a denormal: exact as a product
        float value = (float)fraction * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    exponent = exponent == 31 ? 255 : exponent + 112;
    bits = sign | (exponent << 23) | (fraction << 13);
    return *(float*)&bits;
}

// Counts the routes of each expert, and where each warp's rows of it begin. Each warp has a run of
// routes of its own, so that rows of one expert stay in the order of the routes.
template <typename Id>
static __device__ void count_routes(const Id* ids, const Sizes& size, const Work& work, u32 begin,
                                    u32 end) {
    u32 warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    for (u32 place = threadIdx.x; place < warps * size.experts; place += blockDim.x)
        work.in_warp[place] = 0;
    __syncthreads();
    i32* mine = work.in_warp + warp * size.experts;
    for (u32 base = begin; base < end; base += WARP) {
        u32 route = base + lane;
        i32 expert = route < end ? (i32)ids[route] : -1;
        u32 peers = __match_any_sync(ALL_LANES, expert);
        if (expert >= 0 && !(peers & lanes_before())) mine[expert] += __popc(peers);
        __syncwarp();
    }
    __syncthreads();
    i32 carry = 0;
    for (u32 base = 0; base < size.experts; base += blockDim.x) {
        u32 expert = base + threadIdx.x;
        i32 count = 0, all;
        for (u32 each = 0; each < warps && expert < size.experts; ++each) {
            i32* place = work.in_warp + each * size.experts + expert;
            i32 here = *place;
            *place = count;
            count += here;
        }
        i32 before = sum_before(count, work.scratch, &all);
        if (expert < size.experts) work.offsets[expert] = carry + before;
        carry += all;
    }
    if (threadIdx.x == 0) work.offsets[size.experts] = carry;
    __syncthreads();
}

// Writes the rows of the product, and lists the unique experts in the order of their first routes;
// returns how many. Ends in a barrier.
template <typename Id>
static __device__ i32 sort_routes(const Id* ids, const void* weights, const Outputs& out,
                                  const Sizes& size, const Work& work, u32 begin, u32 end) {
    u32 warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    i32* mine = work.in_warp + warp * size.experts;
    i32 found = 0;  // unique experts whose first route this warp has met
    for (u32 base = begin; base < end; base += WARP) {
        u32 route = base + lane;
        i32 expert = route < end ? (i32)ids[route] : -1;
        u32 peers = __match_any_sync(ALL_LANES, expert);
        bool is_first = false;
        if (expert >= 0) {
            i32 row = work.offsets[expert] + mine[expert] + __popc(peers & lanes_before());
            is_first = row == work.offsets[expert];
            out.gather[row] = (i32)(route / size.top_k);
            out.scatter[row] = (i32)route;
            if (size.weight_type != NO_WEIGHTS)
                out.scale[row] = weight_of(weights, size.weight_type, route);
        }
        u32 firsts = __ballot_sync(ALL_LANES, is_first);
        if (is_first)
            work.index_of[expert] = (i32)(warp << 16) + found + __popc(firsts & lanes_before());
        found += __popc(firsts);
        __syncwarp();  // all lanes have read the counts
        if (expert >= 0 && !(peers & lanes_before())) mine[expert] += __popc(peers);
        __syncwarp();
    }
    if (lane == 0) work.scratch[warp] = found;
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < size.experts; expert += blockDim.x) {
        if (work.offsets[expert] == work.offsets[expert + 1]) continue;
        i32 code = work.index_of[expert], index = code & 0xffff;
        for (i32 each = 0; each < code >> 16; ++each) index += work.scratch[each];
        work.index_of[expert] = index;
        work.unique[index] = (i32)expert;
    }
    i32 unique = 0;
    for (u32 each = 0; each < warps; ++each) unique += work.scratch[each];
    __syncthreads();
    return unique;
}

// Lists the unique experts without a slot, in their order; returns how many. Ends in a barrier.
static __device__ i32 list_misses(const Work& work, i32 unique) {
    i32 misses = 0;
    for (i32 base = 0; base < unique; base += blockDim.x) {
        i32 index = base + threadIdx.x, all;
        i32 slot = index < unique ? work.slot_for_expert[work.unique[index]] : 0;
        i32 before = sum_before(slot < 0, work.scratch, &all);
        if (index < unique) work.chosen[index] = slot;
        if (slot < 0) work.missed[misses + before] = index;
        misses += all;
    }
    __syncthreads();
    return misses;
}

// Gives each miss the slot that goes first; false where too few may go. Ends in a barrier.
static __device__ bool choose_victims(const Tables& table, const Sizes& size, const Work& work,
                                      i32 misses, i64 step) {
    i32 free = 0;
    for (u32 slot = threadIdx.x; slot < size.slots; slot += blockDim.x) {
        i32 expert = work.expert_for_slot[slot], count = 0;
        if (expert >= 0) {
            bool is_used = work.offsets[expert] != work.offsets[expert + 1];
            if (is_used || table.pinned[expert])
                count = -1;
            else if (size.uses_frequency)
                count = effective(work.frequency[slot], work.epoch[slot], step);
        }
        work.rank[slot] = count;
        free += count >= 0;
    }
    i32 all;
    sum_before(free, work.scratch, &all);
    if (all < misses) return false;
    for (u32 slot = threadIdx.x; slot < size.slots; slot += blockDim.x) {
        i32 count = work.rank[slot], place = 0;
        if (count < 0) continue;
        i64 age = work.last_used[slot];
        for (u32 other = 0; other < size.slots && place < misses; ++other) {
            i32 theirs = work.rank[other];
            if (theirs < 0 || theirs > count) continue;
            i64 used = work.last_used[other];
            place += theirs < count || used < age || (used == age && other < slot);
        }
        if (place < misses) work.chosen[work.missed[place]] = (i32)slot;
    }
    __syncthreads();
    return true;
}

static __device__ void store(const Tables& table, const Sizes& size, const Work& work, i32 unique,
                             i32 misses, i64 clock, i64 step) {
    for (u32 slot = threadIdx.x; slot < size.slots; slot += blockDim.x) {
        table.expert_for_slot[slot] = work.expert_for_slot[slot];
        table.last_used[slot] = work.last_used[slot];
        table.frequency[slot] = work.frequency[slot];
        table.frequency_epoch[slot] = work.epoch[slot];
    }
    for (u32 expert = threadIdx.x; expert < size.experts; expert += blockDim.x)
        table.slot_for_expert[expert] = work.slot_for_expert[expert];
    for (i32 index = threadIdx.x; index < unique; index += blockDim.x) {
        table.pending_expert[index] = work.unique[index];
        table.pending_slot[index] = work.chosen[index];
    }
    for (i32 miss = threadIdx.x; miss < misses; miss += blockDim.x) {
        table.miss_expert[miss] = work.unique[work.missed[miss]];
        table.miss_slot[miss] = work.chosen[work.missed[miss]];
    }
    if (threadIdx.x != 0) return;
    *table.clock = clock;
    *table.step = step;
    table.pending[IS_PENDING] = 1;
    table.pending[UNIQUE] = unique;
    table.pending[ROUTES] = (i32)size.routes;
    table.pending[MISSES] = misses;
    *table.miss_count = misses;
    table.totals[0] += 1;
    table.totals[1] += size.routes;
    table.totals[2] += unique - misses;
    table.totals[3] += misses;
}

static __device__ void report(const Outputs& out, i32 status, i32 unique, i32 misses, i32 detail) {
    if (threadIdx.x != 0) return;
    out.report[0] = status;
    out.report[1] = unique;
    out.report[2] = misses;
    out.report[3] = detail;
}

// What follows in the graph then has no rows and copies nothing.
static __device__ void refuse(const Tables& table, const Outputs& out, const Sizes& size,
                              i32 status, i32 detail) {
    for (u32 route = threadIdx.x; route < size.routes; route += blockDim.x) {
        out.route_slots[route] = out.gather[route] = out.scatter[route] = -1;
        out.scale[route] = 0.0f;
    }
    for (u32 expert = threadIdx.x; expert < size.experts; expert += blockDim.x) {
        out.offsets[expert] = 0;
        out.slots[expert] = -1;
    }
    report(out, status, 0, 0, detail);
    if (threadIdx.x != 0) return;
    out.offsets[size.experts] = 0;
    *table.miss_count = 0;
    if (table.fault[0] == OK) {
        table.fault[0] = status;
        table.fault[1] = detail;
    }
    if (table.fault[2] < MOST_FREQUENCY) table.fault[2] += 1;
}

// The lowest route whose expert does not exist; the number of routes where there is none.
template <typename Id>
static __device__ i32 first_bad_route(const Id* ids, const Sizes& size, const Work& work) {
    for (u32 route = threadIdx.x; route < size.routes; route += blockDim.x) {
        i64 expert = ids[route];
        if (expert < 0 || expert >= (i64)size.experts) atomicMin(&work.word[0], (i32)route);
    }
    __syncthreads();
    return work.word[0];
}

template <typename Id>
static __device__ void plan(const Id* ids, const void* weights, const Tables& table,
                            const Outputs& out, const Sizes& size) {
    u32 warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    Work work(size, warps);
    u32 needed = size.routes < size.experts ? size.routes : size.experts;
    if (*table.is_open == 0) return refuse(table, out, size, CLOSED, -1);
    if (needed > size.slots) return refuse(table, out, size, TOO_MANY_ROUTES, (i32)needed);
    load(table, size, work);
    i32 bad = first_bad_route(ids, size, work);
    if (bad < (i32)size.routes) return refuse(table, out, size, INVALID_ROUTE, bad);
    if (!maps_agree(size, work) || !pending_agrees(table, size, work))
        return refuse(table, out, size, INVALID_STATE, -1);

    i64 clock = *table.clock, step = *table.step;
    if (table.pending[IS_PENDING]) commit(table, size, work, &clock, &step);

    u32 run = (size.routes + blockDim.x - 1) / blockDim.x * WARP;
    u32 begin = warp * run < size.routes ? warp * run : size.routes;
    u32 end = begin + run < size.routes ? begin + run : size.routes;
    count_routes(ids, size, work, begin, end);
    i32 unique = sort_routes(ids, weights, out, size, work, begin, end);
    i32 misses = list_misses(work, unique);
    if (misses > 0 && !choose_victims(table, size, work, misses, step)) {
        __syncthreads();  // the rows are overwritten
        return refuse(table, out, size, TOO_MANY_ROUTES, misses);
    }
    for (u32 expert = threadIdx.x; expert < size.experts; expert += blockDim.x) {
        bool is_used = work.offsets[expert] != work.offsets[expert + 1];
        out.slots[expert] = is_used ? work.chosen[work.index_of[expert]] : -1;
        out.offsets[expert] = work.offsets[expert];
    }
    if (threadIdx.x == 0) out.offsets[size.experts] = (i32)size.routes;
    for (u32 route = threadIdx.x; route < size.routes; route += blockDim.x)
        out.route_slots[route] = work.chosen[work.index_of[(i32)ids[route]]];
    store(table, size, work, unique, misses, clock, step);
    report(out, OK, unique, misses, -1);
}

#define ROUTE_PLAN(NAME, ID)                                                                      \
    extern "C" __global__ void NAME(                                                              \
        const ID* ids, const void* weights, i32* slot_for_expert, i32* expert_for_slot,           \
        i64* last_used, i32* frequency, i32* frequency_epoch, i64* clock, i64* step,              \
        const i32* pinned, const i32* is_open, i32* pending, i32* pending_expert,                 \
        i32* pending_slot, i32* miss_expert, i32* miss_slot, i32* miss_count, i64* totals,        \
        i32* fault, i32* route_slots, i32* offsets, i32* slots, i32* gather, i32* scatter,        \
        float* scale, i32* report, u32 routes, u32 top_k, u32 expert_count, u32 slot_count,       \
        u32 uses_frequency, u32 weight_type, i64 clock_bound, i64 step_bound) {                   \
        Tables table = {slot_for_expert, expert_for_slot, last_used, frequency, frequency_epoch,  \
                        clock, step, pinned, is_open, pending, pending_expert, pending_slot,      \
                        miss_expert, miss_slot, miss_count, totals, fault};                       \
        Outputs out = {route_slots, offsets, slots, gather, scatter, scale, report};              \
        Sizes size = {routes, top_k, expert_count, slot_count, uses_frequency, weight_type,       \
                      clock_bound, step_bound};                                                   \
        plan(ids, weights, table, out, size);                                                     \
    }

ROUTE_PLAN(route_plan_i32, i32)
ROUTE_PLAN(route_plan_i64, i64)
