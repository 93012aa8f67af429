// Lists the experts that have rows, in their order, in chunks that pass through a few rows of
// scratch memory: who is copied with each chunk, and where its rows of the product begin. One block.
// No header: NVRTC has none on its path.

typedef unsigned int u32;
typedef int i32;
typedef long long i64;

static const u32 WARP = 32;
static const u32 ALL_LANES = 0xffffffffu;

extern __shared__ i64 shared_words[];

extern "C" __global__ void stage_plan(const i32* offsets, i32* experts, i32* starts, i32* counts,
                                      u32 expert_count, u32 room, u32 chunks) {
    i32* sums = (i32*)shared_words;  // [warps]
    const u32 warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    const i32 end = offsets[expert_count];
    i32 hits = 0;
    for (u32 base = 0; base < expert_count; base += blockDim.x) {
        const u32 expert = base + threadIdx.x;
        bool is_hit = false;
        i32 begin = end;
        if (expert < expert_count) {
            begin = offsets[expert];
            is_hit = begin < offsets[expert + 1];
        }
        const u32 lanes = __ballot_sync(ALL_LANES, is_hit);
        if (lane == 0) sums[warp] = __popc(lanes);
        __syncthreads();
        i32 index = __popc(lanes & ((1u << lane) - 1));
        i32 found = 0;
        for (u32 each = 0; each < warps; ++each) {
            if (each == warp) index += hits + found;
            found += sums[each];
        }
        // more than there is room for come only of offsets that route_plan does not write
        if (is_hit && index < (i32)room) {
            experts[index] = (i32)expert;
            starts[index] = begin;
        }
        hits += found;
        __syncthreads();  // all have read the sums
    }
    for (u32 index = threadIdx.x; index <= room; index += blockDim.x) {
        if ((i32)index < hits && index < room) continue;
        starts[index] = end;
        if (index < room) experts[index] = -1;
    }
    const i32 each = (i32)(room / chunks);
    for (u32 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
        const i32 left = hits - (i32)chunk * each;
        counts[chunk] = left < 0 ? 0 : left < each ? left : each;
    }
}
