// strided_copy: moves elements between two strided layouts, word by word, whatever they mean.
//
// Three forms. contiguous: one run of bytes. shared: one set of axes, a stride of each side per
// axis. split: each side has axes of its own, over the same row-major order of words. Every form
// comes for words of 1 to 16 bytes; the last two for 32- and 64-bit index arithmetic. Grids are
// free: every kernel strides over its words, so the same launch shape does any number of rows.
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
#define THREADS 256

// sizes, then the multiplier and shift that divide by them, then strides; counted in words
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

// splits n into n / size[k], which stays in n, and the remainder; n is below half of Index's range
template <typename Index, typename Offset>
__device__ __forceinline__ Offset take(const Side<Index, Offset>& side, u32 k, Index& n) {
    const Index outer = (high(n, side.magic[k]) + n) >> side.shift[k];
    const Index inner = n - outer * side.size[k];
    n = outer;
    return Offset(inner);
}

// the offset of COUNT words from n on, step apart; axis by axis, so that the chains overlap
template <int COUNT, typename Index, typename Offset>
__device__ __forceinline__ void place(
    const Side<Index, Offset>& side, u32 rank, Index n, Index step, Offset (&offset)[COUNT]) {
    Index left[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) left[j] = n + j * step, offset[j] = 0;
#pragma unroll 1
    for (u32 k = rank - 1; k > 0; --k)
#pragma unroll
        for (int j = 0; j < COUNT; ++j) offset[j] += take(side, k, left[j]) * side.stride[k];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) offset[j] += Offset(left[j]) * side.stride[0];
}

template <typename Index, typename Offset>
struct SharedFinder {
    using Place = Offset;
    const SharedAxes<Index, Offset>& axes;
    u32 rank;

    template <int COUNT>
    __device__ __forceinline__ void operator()(
        Index n, Index step, Offset (&dst)[COUNT], Offset (&src)[COUNT]) const {
        Index left[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; ++j) left[j] = n + j * step, dst[j] = 0, src[j] = 0;
#pragma unroll 1
        for (u32 k = rank - 1; k > 0; --k)
#pragma unroll
            for (int j = 0; j < COUNT; ++j) {
                const Offset inner = take(axes.dst, k, left[j]);
                dst[j] += inner * axes.dst.stride[k];
                src[j] += inner * axes.src_stride[k];
            }
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            dst[j] += Offset(left[j]) * axes.dst.stride[0];
            src[j] += Offset(left[j]) * axes.src_stride[0];
        }
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
    const Index step = Index(gridDim.x) * THREADS;
    Index n = Index(blockIdx.x) * THREADS + threadIdx.x;
    // nothing wraps: count is below half of Index's range, and a grid far below an eighth of it
#pragma unroll 1
    for (; n + (AHEAD - 1) * step < count; n += AHEAD * step)
        move_words<AHEAD>(dst, src, n, step, find);
#pragma unroll 1
    for (; n < count; n += step) move_words<1>(dst, src, n, step, find);
}

template <typename Word>
__device__ __forceinline__ void move_run(
    u8* __restrict__ dst, const u8* __restrict__ src, u64 head, u64 count, u64 tail) {
    const u64 step = u64(gridDim.x) * THREADS;
    const u64 first = u64(blockIdx.x) * THREADS + threadIdx.x;
    // head and tail are shorter than a word, so one thread a byte of the first block does them
    if (first < head) dst[first] = src[first];
    if (first < tail) {
        const u64 at = head + count * sizeof(Word) + first;
        dst[at] = src[at];
    }
    Word* to = reinterpret_cast<Word*>(dst + head);
    const Word* from = reinterpret_cast<const Word*>(src + head);
    u64 n = first;
#pragma unroll 1
    for (; n + (AHEAD - 1) * step < count; n += AHEAD * step) {
        Word words[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) words[k] = from[n + k * step];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) to[n + k * step] = words[k];
    }
#pragma unroll 1
    for (; n < count; n += step) to[n] = from[n];
}

#define STRIDED_KERNELS(BYTES, WORD, BITS, INDEX, OFFSET)                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                       \
        strided_copy_shared_w##BYTES##_i##BITS(                                                 \
            void* dst, const void* src, u64 count,                                              \
            const __grid_constant__ SharedAxes<INDEX, OFFSET> axes, u32 rank) {                 \
        move(static_cast<WORD*>(dst), static_cast<const WORD*>(src), INDEX(count),              \
             SharedFinder<INDEX, OFFSET>{axes, rank});                                          \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS)                                       \
        strided_copy_split_w##BYTES##_i##BITS(                                                  \
            void* dst, const void* src, u64 count,                                              \
            const __grid_constant__ SplitAxes<INDEX, OFFSET> axes, u32 dst_rank,                \
            u32 src_rank) {                                                                     \
        move(static_cast<WORD*>(dst), static_cast<const WORD*>(src), INDEX(count),              \
             SplitFinder<INDEX, OFFSET>{axes, dst_rank, src_rank});                             \
    }

#define KERNELS(BYTES, WORD)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS) strided_copy_contiguous_w##BYTES(     \
        void* dst, const void* src, u64 head, u64 count, u64 tail) {                            \
        move_run<WORD>(static_cast<u8*>(dst), static_cast<const u8*>(src), head, count, tail);  \
    }                                                                                           \
    STRIDED_KERNELS(BYTES, WORD, 32, u32, i32)                                                  \
    STRIDED_KERNELS(BYTES, WORD, 64, u64, i64)

KERNELS(1, u8)
KERNELS(2, u16)
KERNELS(4, u32)
KERNELS(8, u64)
KERNELS(16, u128)
