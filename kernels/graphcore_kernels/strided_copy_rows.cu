// strided_copy's rows that begin anywhere, such rows made one run, and words that are read once and
// written often; it follows strided_copy.cu.

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

// ---- packed: rows of 4-byte words that begin anywhere and make one run of dst, whose pieces of 16
// bytes are aligned wherever rows begin. A piece needs two aligned reads of src; the second is the
// next lane's first. Pieces that no two reads of their row make go word by word.

__device__ __forceinline__ u128 of_next_lane(const u128& word) {
    return u128{__shfl_down_sync(~0u, word.x, 1), __shfl_down_sync(~0u, word.y, 1),
                __shfl_down_sync(~0u, word.z, 1), __shfl_down_sync(~0u, word.w, 1)};
}

// where word n of the run lies in src; `at` bytes into its row
template <typename Index>
__device__ __forceinline__ const u8* word_of(
    const u8* src, const SharedAxes<Index, i64>& axes, u32 rank, Index n, i64& at) {
    at = i64(take(axes.dst, 0, n)) * i64(sizeof(u32));
    i64 row = 0;
#pragma unroll 1
    for (u32 k = 1; k < rank; ++k)
        row += i64(k + 1 < rank ? take(axes.dst, k, n) : n) * axes.src_stride[k];
    return src + row + at;
}

// the words of a piece that the run has
template <typename Index>
__device__ __forceinline__ void move_single_words(
    u32* __restrict__ dst, const u8* __restrict__ src, const SharedAxes<Index, i64>& axes, u32 rank,
    Index piece, Index skip, Index count) {
    u32 words[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const Index n = piece * 4 + i;
        i64 at;
        if (n >= skip && n - skip < count)
            words[i] = *reinterpret_cast<const u32*>(word_of(src, axes, rank, n - skip, at));
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const Index n = piece * 4 + i;
        if (n >= skip && n - skip < count) dst[n - skip] = words[i];
    }
}

template <typename Index>
__device__ __forceinline__ void move_packed(
    u32* __restrict__ dst, const u8* __restrict__ src, Index count, i64 row,
    const SharedAxes<Index, i64>& axes, u32 rank) {
    const Index skip = Index(reinterpret_cast<u64>(dst) % 16 / 4);  // words of the first piece
    const Index pieces = (count + skip + 3) / 4, step = Index(words_at_once());
    u128* to = reinterpret_cast<u128*>(dst - skip);
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (Index base = Index(first_word()) - lane; base < pieces; base += step) {  // a whole warp
        const Index piece = base + lane;
        const bool is_in = piece < pieces && piece * 4 >= skip;
        i64 at;
        const u8* from = word_of(src, axes, rank, is_in ? piece * 4 - skip : Index(0), at);
        const u32 skew = u32(reinterpret_cast<u64>(from) % 16);
        const bool has_low = is_in && at >= skew && at - skew + 16 <= row;
        const bool is_whole = has_low && at + 16 <= row && at - skew + (skew ? 32 : 16) <= row;
        const u128* aligned = reinterpret_cast<const u128*>(from - skew);
        u128 low{}, high{};
        if (has_low) low = aligned[0];
        if (is_whole && skew && lane == 31) high = aligned[1];
        const u128 next = of_next_lane(low);
        if (lane != 31) high = next;
        if (is_whole)
            to[piece] = shifted<u32>(low, high, skew);
        else if (piece < pieces)
            move_single_words(dst, src, axes, rank, piece, skip, count);
    }
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

// ---- kernels

#define ROWS_KERNEL(NAME, WORD, INDEX)                                                          \
    extern "C" __global__ void __launch_bounds__(1024) NAME(                                    \
        void* dst, const void* src, u64 count, i64 row,                                         \
        const __grid_constant__ SharedAxes<INDEX, i64> axes, u32 rank) {                        \
        move_rows<WORD>(static_cast<u8*>(dst), static_cast<const u8*>(src), INDEX(count), row,  \
                        axes, rank);                                                            \
    }

#define PACKED_KERNEL(NAME, INDEX)                                                              \
    extern "C" __global__ void __launch_bounds__(1024) NAME(                                    \
        void* dst, const void* src, u64 count, i64 row,                                         \
        const __grid_constant__ SharedAxes<INDEX, i64> axes, u32 rank) {                        \
        move_packed(static_cast<u32*>(dst), static_cast<const u8*>(src), INDEX(count), row,     \
                    axes, rank);                                                                \
    }

#define REPEAT_KERNEL                                                                           \
    extern "C" __global__ void __launch_bounds__(1024) strided_copy_repeat(                     \
        void* dst, const void* src, u32 count, u64 copies, i64 apart, i64 last,                 \
        const __grid_constant__ SharedAxes<u32, i64> axes, u32 rank) {                          \
        repeat(static_cast<u128*>(dst), static_cast<const u128*>(src), count, copies, apart,    \
               last, axes, rank);                                                               \
    }
