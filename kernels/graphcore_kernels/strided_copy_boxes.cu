// strided_copy's boxes, read in the order of src and written in that of dst; it follows
// strided_copy.cu.

#define TILE_BYTES 16384

// one axis that boxes divide: box c begins at min(c * extent, last), so none is cut off
struct TileStep {
    i64 dst, src;  // strides, in bytes
    u32 count, extent, last;
    u32 groups, magic, shift;  // boxes of neighbours go together, 2^bits of them along this axis
    u32 bits, unused;
};

struct TileAxes {
    Side<u32, i64> load;   // of units of load_bytes: where in src
    Side<u32, i64> store;  // of units of store_bytes: where in dst
    Side<u32, i64> batch;  // of boxes: where in dst
    i64 batch_src[MAX_AXES];
    u32 place[MAX_AXES];  // of store's axes: where in shared memory
    TileStep step[2];
    u32 load_rank, store_rank, batch_rank;
    u32 load_units, store_units;
    u32 load_bytes, store_bytes;
    u32 gather;  // bytes in shared memory between words that lie side by side in dst
    u32 swizzle_from, swizzle_mask, swizzle_to;
    u32 boxes;
};

// spreads words that a warp reads together over the banks; `at` and the result are bytes
__device__ __forceinline__ u32 swizzled(const TileAxes& tile, u32 at) {
    return at ^ ((at >> tile.swizzle_from & tile.swizzle_mask) << tile.swizzle_to);
}

template <typename Word, typename Unit, bool IS_WIDER>
struct Choice {
    using Type = Unit;
};
template <typename Word, typename Unit>
struct Choice<Word, Unit, false> {
    using Type = Word;
};
// Unit, or Word where that is wider: a branch that is never taken must still compile
template <typename Word, typename Unit>
using Wider = typename Choice<Word, Unit, (sizeof(Unit) > sizeof(Word))>::Type;

template <typename Unit, int COUNT>
__device__ __forceinline__ void load_box(u8* box, const u8* __restrict__ src, const TileAxes& tile) {
#pragma unroll 1
    for (u32 n = threadIdx.x; n < tile.load_units; n += COUNT * blockDim.x) {
        i64 from[COUNT];
        place(tile.load, tile.load_rank, n, u32(blockDim.x), from);
        Unit units[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            if (n + j * blockDim.x < tile.load_units)
                units[j] = *reinterpret_cast<const Unit*>(src + from[j]);
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            if (n + j * blockDim.x < tile.load_units) {
                const u32 at = swizzled(tile, (n + j * blockDim.x) * u32(sizeof(Unit)));
                *reinterpret_cast<Unit*>(box + at) = units[j];
            }
    }
}

__device__ __forceinline__ u32 low_bits(u8 word) { return word; }
__device__ __forceinline__ u32 low_bits(u16 word) { return word; }
template <typename Word>
__device__ __forceinline__ u32 low_bits(const Word&) { return 0; }  // of wide words nobody asks

// the words that make a unit, put together in registers
template <typename Word, typename Unit>
__device__ __forceinline__ Unit gathered(const u8* box, const TileAxes& tile, u32 at) {
    constexpr int WORDS = sizeof(Unit) / sizeof(Word);
    constexpr bool IS_PACKED = sizeof(Word) < 4 && sizeof(Unit) >= 4;
    constexpr int EACH = IS_PACKED ? 4 / sizeof(Word) : 1;
    union {
        Unit unit;
        u32 parts[(sizeof(Unit) + 3) / 4];
        Word words[WORDS];
    } made;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const Word word =
            *reinterpret_cast<const Word*>(box + swizzled(tile, at + i * tile.gather));
        if (IS_PACKED) {
            const u32 bits = low_bits(word) << (8 * sizeof(Word) % 32 * (i % EACH));
            made.parts[i / EACH] = i % EACH ? made.parts[i / EACH] | bits : bits;
        } else {
            made.words[i] = word;
        }
    }
    return made.unit;
}

template <typename Word, typename Unit, int COUNT>
__device__ __forceinline__ void store_box(
    u8* __restrict__ dst, const u8* box, const TileAxes& tile) {
#pragma unroll 1
    for (u32 n = threadIdx.x; n < tile.store_units; n += COUNT * blockDim.x) {
        i64 to[COUNT];
        u32 at[COUNT];
        place_both(tile.store, tile.place, tile.store_rank, n, u32(blockDim.x), to, at);
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            if (n + j * blockDim.x < tile.store_units)
                *reinterpret_cast<Unit*>(dst + to[j]) = gathered<Word, Unit>(box, tile, at[j]);
    }
}

// a box of this axis: its number taken from n, in which its group is what is divided off
__device__ __forceinline__ u32 box_along(const TileStep& step, u32 inside, u32& n) {
    const u32 outer = divide(n, step.magic, step.shift);
    const u32 box = ((n - outer * step.groups) << step.bits) + inside;
    n = outer;
    return box;
}

template <typename Word>
__device__ __forceinline__ void move_boxes(
    u8* __restrict__ dst, const u8* __restrict__ src, const TileAxes& tile) {
    constexpr int WRITES = sizeof(Word) < 4 ? 1 : 2;  // at a time: what is packed takes registers
    alignas(128) __shared__ u8 box[TILE_BYTES];
    const TileStep &first = tile.step[0], &second = tile.step[1];
#pragma unroll 1
    for (u32 number = blockIdx.x; number < tile.boxes; number += gridDim.x) {
        const u32 inside = number & ((1u << first.bits + second.bits) - 1);
        u32 left = number >> first.bits + second.bits;
        const u32 one = box_along(first, inside & ((1u << first.bits) - 1), left);
        const u32 two = box_along(second, inside >> first.bits, left);
        if (one >= first.count || two >= second.count) continue;  // all threads of the block
        const i64 starts[2] = {
            i64(min(one * first.extent, first.last)), i64(min(two * second.extent, second.last))};
        i64 to[1], from[1];
        place_both(tile.batch, tile.batch_src, tile.batch_rank, left, 0u, to, from);
        u8* dst_box = dst + to[0] + starts[0] * first.dst + starts[1] * second.dst;
        const u8* src_box = src + from[0] + starts[0] * first.src + starts[1] * second.src;

        if (tile.load_bytes == 16)
            load_box<u128, 4>(box, src_box, tile);
        else if (sizeof(Word) < 16 && tile.load_bytes == 8)
            load_box<Wider<Word, u64>, 4>(box, src_box, tile);
        else if (sizeof(Word) < 8 && tile.load_bytes == 4)
            load_box<Wider<Word, u32>, 4>(box, src_box, tile);
        else if (sizeof(Word) < 4)
            load_box<Word, 4>(box, src_box, tile);
        __syncthreads();
        if (tile.store_bytes == 16)
            store_box<Word, u128, WRITES>(dst_box, box, tile);
        else if (sizeof(Word) < 16 && tile.store_bytes == 8)
            store_box<Word, Wider<Word, u64>, WRITES>(dst_box, box, tile);
        else if (sizeof(Word) < 8 && tile.store_bytes == 4)
            store_box<Word, Wider<Word, u32>, WRITES>(dst_box, box, tile);
        else if (sizeof(Word) < 4)
            store_box<Word, Word, WRITES>(dst_box, box, tile);
        __syncthreads();
    }
}

// 256 threads at most: their registers hold more than those of 1024
#define TILE_KERNEL(NAME, WORD)                                                                 \
    extern "C" __global__ void __launch_bounds__(256, sizeof(WORD) < 4 ? 3 : 4) NAME(           \
        void* dst, const void* src, const __grid_constant__ TileAxes tile) {                    \
        move_boxes<WORD>(static_cast<u8*>(dst), static_cast<const u8*>(src), tile);             \
    }
