// The state of one group's slots as one block has it: copies of the tables in shared memory, whether
// they agree with each other, and how the decisions of the step before become the state. Atomics
// only count and take minima, which no order can change. route_plan.cu follows in the same source.
// No header: NVRTC has none on its path.

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
