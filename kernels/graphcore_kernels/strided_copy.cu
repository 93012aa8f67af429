// strided_copy: moves elements between two strided layouts, word by word, whatever they mean.
//
// Six forms. contiguous: one run of bytes. rows: runs of bytes that begin anywhere. repeat: words
// that are read once and written often. tile: boxes that pass through shared memory, so that both
// sides move long runs. shared: one set of axes, a stride of each side per axis. split: each side
// has axes of its own, over the same row-major order of words. Grids and blocks are free: every
// kernel strides over its work, so the same launch shape does any number of rows.
// The host (copy_plan.py) guarantees aligned words, sides that do not overlap, and 1 to 8 axes.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct alignas(16) u128 {
    u32 x, y, z, w;
};

#define MAX_AXES 8
#define AHEAD 4  // loads in flight per thread
#define TILE_BYTES 16384

// sizes, then the multiplier and shift that divide by them, then strides; the fastest axis first
template <typename Index, typename Offset>
struct Side {
    Index size[MAX_AXES], magic[MAX_AXES], shift[MAX_AXES];
    Offset stride[MAX_AXES];
};

template <typename Index, typename Offset>
struct SharedAxes {
    Side<Index, Offset> dst;
    Offset src_stride[MAX_AXES];
};

template <typename Index, typename Offset>
struct SplitAxes {
    Side<Index, Offset> dst, src;
};

__device__ __forceinline__ u32 high(u32 a, u32 b) { return __umulhi(a, b); }
__device__ __forceinline__ u64 high(u64 a, u64 b) { return __umul64hi(a, b); }

// n / a size; n is below half of Index's range
template <typename Index>
__device__ __forceinline__ Index divide(Index n, Index magic, Index shift) {
    return (high(n, magic) + n) >> shift;
}

// splits n into n / size[k], which stays in n, and the remainder
template <typename Index, typename Offset>
__device__ __forceinline__ Index take(const Side<Index, Offset>& side, u32 k, Index& n) {
    const Index outer = divide(n, side.magic[k], side.shift[k]);
    const Index inner = n - outer * side.size[k];
    n = outer;
    return inner;
}

// A warp takes 32 words in a row, the next ones go to the next block: few words are spread over
// all multiprocessors.
__device__ __forceinline__ u64 first_word() {
    const u32 warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    return u64(warp) * 32 + threadIdx.x % 32;
}
__device__ __forceinline__ u64 words_at_once() { return u64(gridDim.x) * blockDim.x; }

// adds the offsets of COUNT words from n on, step apart; axis by axis, so that the chains overlap
template <int COUNT, typename Index, typename Offset>
__device__ __forceinline__ void place(
    const Side<Index, Offset>& side, u32 rank, Index n, Index step, Offset (&offset)[COUNT]) {
    Index left[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) left[j] = n + j * step, offset[j] = 0;
#pragma unroll 1
    for (u32 k = 0; k + 1 < rank; ++k)
#pragma unroll
        for (int j = 0; j < COUNT; ++j) offset[j] += Offset(take(side, k, left[j])) * side.stride[k];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) offset[j] += Offset(left[j]) * side.stride[rank - 1];
}

// the same of two sides with one set of axes
template <int COUNT, typename Index, typename Offset, typename Other>
__device__ __forceinline__ void place_both(
    const Side<Index, Offset>& side, const Other (&other)[MAX_AXES], u32 rank, Index n, Index step,
    Offset (&offset)[COUNT], Other (&second)[COUNT]) {
    Index left[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) left[j] = n + j * step, offset[j] = 0, second[j] = 0;
    const u32 last = rank - 1;
    const Offset last_stride = side.stride[last];
    const Other last_other = other[last];
#pragma unroll 1
    for (u32 k = 0; k < last; ++k)
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const Index inner = take(side, k, left[j]);
            offset[j] += Offset(inner) * side.stride[k];
            second[j] += Other(inner) * other[k];
        }
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        offset[j] += Offset(left[j]) * last_stride;
        second[j] += Other(left[j]) * last_other;
    }
}

template <typename Index, typename Offset>
struct SharedFinder {
    using Place = Offset;
    const SharedAxes<Index, Offset>& axes;
    u32 rank;

    template <int COUNT>
    __device__ __forceinline__ void operator()(
        Index n, Index step, Offset (&dst)[COUNT], Offset (&src)[COUNT]) const {
        place_both(axes.dst, axes.src_stride, rank, n, step, dst, src);
    }
};

template <typename Index, typename Offset>
struct SplitFinder {
    using Place = Offset;
    const SplitAxes<Index, Offset>& axes;
    u32 dst_rank, src_rank;

    template <int COUNT>
    __device__ __forceinline__ void operator()(
        Index n, Index step, Offset (&dst)[COUNT], Offset (&src)[COUNT]) const {
        place(axes.dst, dst_rank, n, step, dst);
        place(axes.src, src_rank, n, step, src);
    }
};

template <int COUNT, typename Word, typename Index, typename Finder>
__device__ __forceinline__ void move_words(
    Word* __restrict__ dst, const Word* __restrict__ src, Index n, Index step, const Finder& find) {
    typename Finder::Place to[COUNT], from[COUNT];
    find(n, step, to, from);
    Word words[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) words[j] = src[from[j]];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) dst[to[j]] = words[j];
}

template <typename Word, typename Index, typename Finder>
__device__ __forceinline__ void move(
    Word* __restrict__ dst, const Word* __restrict__ src, Index count, const Finder& find) {
    const Index step = Index(words_at_once());
    Index n = Index(first_word());
    // nothing wraps: count is below half of Index's range, and a grid far below an eighth of it
#pragma unroll 1
    for (; n + (AHEAD - 1) * step < count; n += AHEAD * step)
        move_words<AHEAD>(dst, src, n, step, find);
#pragma unroll 1
    for (; n < count; n += step) move_words<1>(dst, src, n, step, find);
}

__device__ __forceinline__ void move_run(
    u8* __restrict__ dst, const u8* __restrict__ src, u64 head, u64 count, u64 tail) {
    const u64 step = words_at_once();
    const u64 first = first_word();
    // head and tail are shorter than a word, so one thread a byte of the first warp does them
    if (first < head) dst[first] = src[first];
    if (first < tail) {
        const u64 at = head + count * sizeof(u128) + first;
        dst[at] = src[at];
    }
    u128* to = reinterpret_cast<u128*>(dst + head);
    const u128* from = reinterpret_cast<const u128*>(src + head);
    u64 n = first;
#pragma unroll 1
    for (; n + (AHEAD - 1) * step < count; n += AHEAD * step) {
        u128 words[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) words[k] = from[n + k * step];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) to[n + k * step] = words[k];
    }
#pragma unroll 1
    for (; n < count; n += step) to[n] = from[n];
}

// ---- rows: 16-byte writes that are aligned in dst, made of two aligned reads where src is not

template <typename Word>
union Granule {
    u128 whole;
    Word words[sizeof(u128) / sizeof(Word)];
};

// the 16 bytes that begin `skew` bytes (whole Words) into low and high
template <typename Word>
__device__ __forceinline__ u128 shifted(const u128& low, const u128& high, u32 skew) {
    u32 q[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) q[i] = skew & 8 ? q[i + 2] : q[i];
    if (sizeof(Word) <= 4) {
#pragma unroll
        for (int i = 0; i < 5; ++i) q[i] = skew & 4 ? q[i + 1] : q[i];
    }
    if (sizeof(Word) < 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = __funnelshift_r(q[i], q[i + 1], (skew & 3) * 8);
    }
    return u128{q[0], q[1], q[2], q[3]};
}

// 16 bytes of dst that begin at a multiple of 16, as far as they lie in their row
template <typename Word>
struct Piece {
    u8* to;
    i64 at, row;  // where it begins in its row, and the bytes of that
    Granule<Word> low;
    u128 high;
    u32 skew;
    bool is_whole;  // the piece, and both reads, lie within the row

    __device__ __forceinline__ bool has(int word) const {
        const i64 begin = at + word * i64(sizeof(Word));
        return begin >= 0 && begin < row;
    }
    __device__ __forceinline__ void read(u8* dst_row, const u8* src_row, i64 index, i64 bytes) {
        at = index * i64(sizeof(u128)) - i64(reinterpret_cast<u64>(dst_row) % sizeof(u128));
        row = bytes;
        to = dst_row + at;
        const u8* from = src_row + at;
        skew = u32(reinterpret_cast<u64>(from)) % sizeof(u128);
        const i64 end = at - skew + (skew ? 32 : 16);
        is_whole = at - skew >= 0 && end <= row && at + i64(sizeof(u128)) <= row;
        if (is_whole) {
            const u128* aligned = reinterpret_cast<const u128*>(from - skew);
            low.whole = aligned[0];
            high = aligned[skew ? 1 : 0];
        } else {
#pragma unroll
            for (int i = 0; i < int(sizeof(u128) / sizeof(Word)); ++i)
                if (has(i)) low.words[i] = reinterpret_cast<const Word*>(from)[i];
        }
    }
    __device__ __forceinline__ void write() const {
        if (is_whole) {
            *reinterpret_cast<u128*>(to) = shifted<Word>(low.whole, high, skew);
        } else {
#pragma unroll
            for (int i = 0; i < int(sizeof(u128) / sizeof(Word)); ++i)
                if (has(i)) reinterpret_cast<Word*>(to)[i] = low.words[i];
        }
    }
};

template <int COUNT, typename Word, typename Index>
__device__ __forceinline__ void move_pieces(
    u8* __restrict__ dst, const u8* __restrict__ src, i64 row,
    const SharedAxes<Index, i64>& axes, u32 rank, Index n, Index step) {
    i64 to[COUNT], from[COUNT], index[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        Index left = n + j * step;
        index[j] = i64(take(axes.dst, 0, left));
        to[j] = from[j] = 0;
#pragma unroll 1
        for (u32 k = 1; k < rank; ++k) {
            const i64 inner = i64(k + 1 < rank ? take(axes.dst, k, left) : left);
            to[j] += inner * axes.dst.stride[k];
            from[j] += inner * axes.src_stride[k];
        }
    }
    Piece<Word> pieces[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) pieces[j].read(dst + to[j], src + from[j], index[j], row);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) pieces[j].write();
}

template <typename Word, typename Index>
__device__ __forceinline__ void move_rows(
    u8* __restrict__ dst, const u8* __restrict__ src, Index count, i64 row,
    const SharedAxes<Index, i64>& axes, u32 rank) {
    const Index step = Index(words_at_once());
    Index n = Index(first_word());
#pragma unroll 1
    for (; n + step < count; n += 2 * step)
        move_pieces<2, Word>(dst, src, row, axes, rank, n, step);
    if (n < count) move_pieces<1, Word>(dst, src, row, axes, rank, n, step);
}

// ---- repeat: each of `count` words of src goes to `copies` places of dst, `apart` words apart, but
// none further than `last`

__device__ __forceinline__ void repeat(
    u128* __restrict__ dst, const u128* __restrict__ src, u32 count, u64 copies, i64 apart, i64 last,
    const SharedAxes<u32, i64>& axes, u32 rank) {
    // blocks divide the words into parts; where those are fewer than blocks, the copies too
    const u32 parts = (count + blockDim.x - 1) / blockDim.x;
    const u32 shares = parts == 1 ? gridDim.x : max(1u, gridDim.x * 8 / parts);
#pragma unroll 1
    for (u64 job = blockIdx.x; job < u64(parts) * shares; job += gridDim.x) {
        const u32 share = u32(job / parts), part = u32(job - u64(share) * parts);
        const u32 n = part * blockDim.x + threadIdx.x;
        if (n >= count) continue;
        i64 to[1], from[1];
        place_both(axes.dst, axes.src_stride, rank, n, 0u, to, from);
        const u128 word = src[from[0]];
        i64 place = to[0] + i64(share) * apart;
        const i64 furthest = to[0] + last, step = i64(shares) * apart;
#pragma unroll 4
        for (u64 copy = share; copy < copies; copy += shares, place += step)
            dst[min(place, furthest)] = word;
    }
}

// ---- tile: boxes of words, read in the order of src and written in that of dst

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

// ---- kernels: 1024 threads at most, 256 of boxes, whose registers hold more. The host appends the
// one that it wants to this text: together they would take the compiler long.

#define CONTIGUOUS_KERNEL                                                                       \
    extern "C" __global__ void __launch_bounds__(1024) strided_copy_contiguous(                 \
        void* dst, const void* src, u64 head, u64 count, u64 tail) {                            \
        move_run(static_cast<u8*>(dst), static_cast<const u8*>(src), head, count, tail);        \
    }

#define ROWS_KERNEL(NAME, WORD, INDEX)                                                          \
    extern "C" __global__ void __launch_bounds__(1024) NAME(                                    \
        void* dst, const void* src, u64 count, i64 row,                                         \
        const __grid_constant__ SharedAxes<INDEX, i64> axes, u32 rank) {                        \
        move_rows<WORD>(static_cast<u8*>(dst), static_cast<const u8*>(src), INDEX(count), row,  \
                        axes, rank);                                                            \
    }

#define REPEAT_KERNEL                                                                           \
    extern "C" __global__ void __launch_bounds__(1024) strided_copy_repeat(                     \
        void* dst, const void* src, u32 count, u64 copies, i64 apart, i64 last,                 \
        const __grid_constant__ SharedAxes<u32, i64> axes, u32 rank) {                          \
        repeat(static_cast<u128*>(dst), static_cast<const u128*>(src), count, copies, apart,    \
               last, axes, rank);                                                               \
    }

#define TILE_KERNEL(NAME, WORD)                                                                 \
    extern "C" __global__ void __launch_bounds__(256, sizeof(WORD) < 4 ? 3 : 4) NAME(           \
        void* dst, const void* src, const __grid_constant__ TileAxes tile) {                    \
        move_boxes<WORD>(static_cast<u8*>(dst), static_cast<const u8*>(src), tile);             \
    }

#define SHARED_KERNEL(NAME, WORD, INDEX, OFFSET)                                                \
    extern "C" __global__ void __launch_bounds__(1024) NAME(                                    \
        void* dst, const void* src, u64 count,                                                  \
        const __grid_constant__ SharedAxes<INDEX, OFFSET> axes, u32 rank) {                     \
        move(static_cast<WORD*>(dst), static_cast<const WORD*>(src), INDEX(count),              \
             SharedFinder<INDEX, OFFSET>{axes, rank});                                          \
    }

#define SPLIT_KERNEL(NAME, WORD, INDEX, OFFSET)                                                 \
    extern "C" __global__ void __launch_bounds__(1024) NAME(                                    \
        void* dst, const void* src, u64 count,                                                  \
        const __grid_constant__ SplitAxes<INDEX, OFFSET> axes, u32 dst_rank, u32 src_rank) {    \
        move(static_cast<WORD*>(dst), static_cast<const WORD*>(src), INDEX(count),              \
             SplitFinder<INDEX, OFFSET>{axes, dst_rank, src_rank});                             \
    }
