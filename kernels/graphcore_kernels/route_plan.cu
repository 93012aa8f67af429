// The plan of one step over the slots of one group: which experts the routes name, where each of
// them sits, whose slot a missing one takes, and in which order the grouped product has its rows.
// One block. Everything is decided on copies in shared memory and written at the end, so that a
// step that is refused leaves the tables as they were. Same input, same output: atomics only count
// and take minima, which no order can change. No header: NVRTC has none on its path.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long long i64;

enum Status { OK, CLOSED, TOO_MANY_ROUTES, INVALID_ROUTE, INVALID_STATE };
enum Pending { IS_PENDING, UNIQUE, ROUTES, MISSES };
enum Weights { NO_WEIGHTS, F32, F16, BF16 };

static const u32 WARP = 32;
static const u32 ALL_LANES = 0xffffffffu;
static const i32 EPOCH_SHIFT = 4;
static const i32 MOST_FREQUENCY = 0x7fffffff;

struct Tables {
    i32 *slot_for_expert, *expert_for_slot;
    i64* last_used;
    i32 *frequency, *frequency_epoch;
    i64 *clock, *step;
    const i32 *pinned, *is_open;
    i32 *pending, *pending_expert, *pending_slot, *miss_expert, *miss_slot, *miss_count;
    i64* totals;
    i32* fault;
};

struct Outputs {
    i32 *route_slots, *offsets, *slots, *gather, *scatter;
    float* scale;
    i32* report;
};

struct Sizes {
    u32 routes, top_k, experts, slots, uses_frequency, weight_type;
    i64 clock_bound, step_bound;
};

extern __shared__ i64 shared_words[];

// Shared memory; the launcher counts its bytes. Legend: S slots, E experts, W warps.
struct Work {
    i64* last_used;        // [S]
    i32* expert_for_slot;  // [S]
    i32* frequency;        // [S]
    i32* epoch;            // [S]
    i32* rank;             // [S]: -1 where the step may not take the slot, else its counter
    i32* unique;           // [S]: the expert
    i32* chosen;           // [S]: the slot of a unique expert
    i32* missed;           // [S]: which of the unique experts
    i32* slot_for_expert;  // [E]
    i32* index_of;         // [E]: among the unique experts
    i32* offsets;          // [E + 1]
    i32* in_warp;          // [W, E]: routes of the expert, then where its next row goes
    i32* scratch;          // [WARP + 4]
    i32* word;             // the last four of scratch

    __device__ Work(const Sizes& size, u32 warps) {
        u32 s = size.slots, e = size.experts;
        last_used = shared_words;
        expert_for_slot = (i32*)(last_used + s);
        frequency = expert_for_slot + s;
        epoch = frequency + s;
        rank = epoch + s;
        unique = rank + s;
        chosen = unique + s;
        missed = chosen + s;
        slot_for_expert = missed + s;
        index_of = slot_for_expert + e;
        offsets = index_of + e;
        in_warp = offsets + e + 1;
        scratch = in_warp + warps * e;
        word = scratch + WARP;
    }
};

static __device__ __forceinline__ u32 lanes_before() { return (1u << (threadIdx.x % WARP)) - 1; }

// The sum of ``value`` over the threads before this one; all of them call it. A barrier, twice.
static __device__ i32 sum_before(i32 value, i32* scratch, i32* total) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    i32 sum = value;
    for (u32 step = 1; step < WARP; step *= 2) {
        i32 other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == WARP - 1) scratch[warp] = sum;
    __syncthreads();
    i32 before = 0, all = 0;
    for (u32 each = 0; each < warps; ++each) {
        if (each < warp) before += scratch[each];
        all += scratch[each];
    }
    __syncthreads();
    *total = all;
    return before + sum - value;
}

static __device__ __forceinline__ i32 effective(i32 frequency, i32 epoch, i64 step) {
    i64 passed = (step >> EPOCH_SHIFT) - epoch;
    return passed >= 0 && passed < 32 ? frequency >> passed : 0;
}

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

static __device__ void load(const Tables& table, const Sizes& size, const Work& work) {
    for (u32 slot = threadIdx.x; slot < size.slots; slot += blockDim.x) {
        i32 expert = table.expert_for_slot[slot];
        work.expert_for_slot[slot] = expert;
        work.last_used[slot] = expert < 0 ? 0 : table.last_used[slot];
        work.frequency[slot] = expert < 0 ? 0 : table.frequency[slot];
        work.epoch[slot] = expert < 0 ? 0 : table.frequency_epoch[slot];
        work.rank[slot] = 0;
    }
    for (u32 expert = threadIdx.x; expert < size.experts; expert += blockDim.x) {
        work.slot_for_expert[expert] = table.slot_for_expert[expert];
        work.index_of[expert] = 0;
    }
    if (threadIdx.x == 0) {
        work.word[0] = (i32)size.routes;
        work.word[1] = 0;
    }
    __syncthreads();
}

// Whether the maps are each other's inverse.
static __device__ bool maps_agree(const Sizes& size, const Work& work) {
    int bad = 0;
    for (u32 expert = threadIdx.x; expert < size.experts; expert += blockDim.x) {
        i32 slot = work.slot_for_expert[expert];
        bad |= slot < -1 || slot >= (i32)size.slots;
        if (!bad && slot >= 0) bad |= work.expert_for_slot[slot] != (i32)expert;
    }
    for (u32 slot = threadIdx.x; slot < size.slots; slot += blockDim.x) {
        i32 expert = work.expert_for_slot[slot];
        bad |= expert < -1 || expert >= (i32)size.experts;
        if (!bad && expert >= 0) bad |= work.slot_for_expert[expert] != (i32)slot;
    }
    return !__syncthreads_or(bad);
}

// Whether what the step before decided can be committed: each expert and each slot once, and an
// expert that has a slot has this one.
static __device__ bool pending_agrees(const Tables& table, const Sizes& size, const Work& work) {
    i32 is_pending = table.pending[IS_PENDING], unique = table.pending[UNIQUE];
    i32 routes = table.pending[ROUTES], misses = table.pending[MISSES];
    if (is_pending == 0) return true;
    if (is_pending != 1 || unique < 0 || unique > (i32)size.slots || routes < unique) return false;
    int bad = 0;
    for (i32 index = threadIdx.x; index < unique; index += blockDim.x) {
        i32 expert = table.pending_expert[index], slot = table.pending_slot[index];
        bool is_inside = expert >= 0 && expert < (i32)size.experts && slot >= 0 &&
                         slot < (i32)size.slots;
        bad |= !is_inside;
        if (!is_inside) continue;
        i32 now = work.slot_for_expert[expert];
        bad |= now != -1 && now != slot;
        bad |= atomicAdd(&work.rank[slot], 1) != 0;
        bad |= atomicAdd(&work.index_of[expert], 1) != 0;
        if (now < 0) atomicAdd(&work.word[1], 1);
    }
    if (__syncthreads_or(bad)) return false;
    return work.word[1] == misses;
}

// Ages or epochs that come to their bound are renumbered; their order stays. Ends in a barrier.
static __device__ void refresh(const Sizes& size, const Work& work, i32 routes, i64* clock,
                               i64* step) {
    if (*step >= size.step_bound) {
        for (u32 slot = threadIdx.x; slot < size.slots; slot += blockDim.x) {
            work.frequency[slot] = effective(work.frequency[slot], work.epoch[slot], *step);
            work.epoch[slot] = 0;
        }
        *step &= (1 << EPOCH_SHIFT) - 1;
    }
    if (*clock > size.clock_bound - routes) {
        for (u32 slot = threadIdx.x; slot < size.slots; slot += blockDim.x) {
            i32 place = work.expert_for_slot[slot] >= 0;
            for (u32 other = 0; place && other < size.slots; ++other)
                place += work.expert_for_slot[other] >= 0 &&
                         work.last_used[other] < work.last_used[slot];
            work.rank[slot] = place;
        }
        __syncthreads();
        for (u32 slot = threadIdx.x; slot < size.slots; slot += blockDim.x)
            work.last_used[slot] = work.rank[slot];
        *clock = size.slots;
    }
    __syncthreads();
}

// Makes what the step before decided the state, in shared memory. Ends in a barrier.
static __device__ void commit(const Tables& table, const Sizes& size, const Work& work, i64* clock,
                              i64* step) {
    i32 unique = table.pending[UNIQUE], routes = table.pending[ROUTES];
    refresh(size, work, routes, clock, step);
    for (i32 index = threadIdx.x; index < unique; index += blockDim.x) {
        i32 expert = table.pending_expert[index], slot = table.pending_slot[index];
        i32 count = effective(work.frequency[slot], work.epoch[slot], *step);
        if (work.slot_for_expert[expert] != slot) {
            i32 old = work.expert_for_slot[slot];
            if (old >= 0) work.slot_for_expert[old] = -1;
            work.slot_for_expert[expert] = slot;
            work.expert_for_slot[slot] = expert;
            count = 0;
        }
        work.frequency[slot] = count < MOST_FREQUENCY ? count + 1 : count;
        work.epoch[slot] = (i32)(*step >> EPOCH_SHIFT);
        work.last_used[slot] = *clock + index + 1;
    }
    *clock += routes;
    *step += 1;
    __syncthreads();
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
