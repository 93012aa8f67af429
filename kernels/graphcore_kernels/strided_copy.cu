// strided_copy: moves elements between two strided layouts, word by word, whatever they mean.
//
// contiguous: one run of bytes. few: few words of rows, told by 40 bytes of arguments, since those are
// most of what a short kernel waits for. shared: one set of axes, a stride of each side per axis.
// split: each side has axes of its own, over the same row-major order of words. rows, packed and
// repeat (strided_copy_rows.cu): runs of bytes that begin anywhere; such runs made one; words that are
// read once and written often. tile (strided_copy_boxes.cu): boxes that pass through shared memory, so that both sides
// move long runs. Grids and blocks are free: every kernel strides over its work, so the same launch
// shape does any number of rows.
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

__device__ __forceinline__ u64 first_word() {
    return u64(blockIdx.x) * blockDim.x + threadIdx.x;
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

// rows of words that lie side by side
struct RowFinder {
    using Place = i32;
    u32 row, magic, shift;
    i32 dst_stride, src_stride;  // from one row to the next

    template <int COUNT>
    __device__ __forceinline__ void operator()(
        u32 n, u32 step, i32 (&dst)[COUNT], i32 (&src)[COUNT]) const {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const u32 at = n + j * step, outer = divide(at, magic, shift), inner = at - outer * row;
            dst[j] = i32(inner) + i32(outer) * dst_stride;
            src[j] = i32(inner) + i32(outer) * src_stride;
        }
    }
};

template <typename Word>
__device__ __forceinline__ void move_few(
    Word* __restrict__ dst, const Word* __restrict__ src, u32 count, const RowFinder& find) {
    const u32 step = u32(words_at_once()), n = u32(first_word());
    if (count > step) {
        move(dst, src, count, find);
    } else if (n < count) {
        move_words<1>(dst, src, n, step, find);
    }
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

// ---- kernels: 1024 threads at most. The host appends the one that it wants to this text, behind the
// file of its form where it has one: together they would take the compiler long.

#define CONTIGUOUS_KERNEL                                                                       \
    extern "C" __global__ void __launch_bounds__(1024) strided_copy_contiguous(                 \
        void* dst, const void* src, u64 head, u64 count, u64 tail) {                            \
        move_run(static_cast<u8*>(dst), static_cast<const u8*>(src), head, count, tail);        \
    }

#define FEW_KERNEL(NAME, WORD)                                                                  \
    extern "C" __global__ void __launch_bounds__(1024) NAME(                                    \
        void* dst, const void* src, u32 count, u32 row, u32 magic, u32 shift, i32 dst_stride,   \
        i32 src_stride) {                                                                       \
        move_few(static_cast<WORD*>(dst), static_cast<const WORD*>(src), count,                 \
                 RowFinder{row, magic, shift, dst_stride, src_stride});                         \
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
