// Copies the experts that a plan found missing into their slots: a row of each bank of the group,
// from memory that the device reads where it lies (pinned host memory) or from its own. How many,
// which and where to is read on the device; the grid is the same for any of it. Words are moved,
// not numbers. No header: NVRTC has none on its path.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

static const u32 MOST_BANKS = 12;
static const u64 CHUNK = 16384;  // bytes that a block copies before it looks for more

struct alignas(16) Quad {
    u32 x, y, z, w;
};

struct Bank {
    const u8* source;
    u8* slots;
    u64 source_stride, slot_stride, row_bytes;
};

struct Banks {
    Bank bank[MOST_BANKS];
};

// Four words in flight for each thread: the way to the host is long.
template <typename Word>
static __device__ __forceinline__ void copy_words(u8* to, const u8* from, u64 count) {
    Word* dst = (Word*)to;
    const Word* src = (const Word*)from;
    u64 index = threadIdx.x, stride = blockDim.x;
    for (; index + 3 * stride < count; index += 4 * stride) {
        Word a = src[index], b = src[index + stride];
        Word c = src[index + 2 * stride], d = src[index + 3 * stride];
        dst[index] = a;
        dst[index + stride] = b;
        dst[index + 2 * stride] = c;
        dst[index + 3 * stride] = d;
    }
    for (; index < count; index += stride) dst[index] = src[index];
}

// Bytes up to where both are aligned to the word, words, and the bytes that are left.
template <typename Word>
static __device__ __forceinline__ void copy_by(u8* to, const u8* from, u64 bytes) {
    u64 head = (0 - (u64)from) & (sizeof(Word) - 1);
    if (head > bytes) head = bytes;
    u64 words = (bytes - head) / sizeof(Word), tail = head + words * sizeof(Word);
    if (threadIdx.x < head) to[threadIdx.x] = from[threadIdx.x];
    copy_words<Word>(to + head, from + head, words);
    if (threadIdx.x < bytes - tail) to[tail + threadIdx.x] = from[tail + threadIdx.x];
}

static __device__ void copy_bytes(u8* to, const u8* from, u64 bytes) {
    u64 apart = (u64)to ^ (u64)from;
    if (!(apart & 15))
        copy_by<Quad>(to, from, bytes);
    else if (!(apart & 7))
        copy_by<u64>(to, from, bytes);
    else if (!(apart & 3))
        copy_by<u32>(to, from, bytes);
    else if (!(apart & 1))
        copy_by<u16>(to, from, bytes);
    else
        copy_by<u8>(to, from, bytes);
}

extern "C" __global__ void expert_gather(
    const __grid_constant__ Banks banks, const i32* miss_expert, const i32* miss_slot,
    const i32* miss_count, u32 bank_count, u32 experts, u32 slots) {
    i32 misses = *miss_count;
    if (misses <= 0) return;
    if (misses > (i32)slots) misses = (i32)slots;
    u64 chunks = 0;  // of one expert
    for (u32 index = 0; index < bank_count; ++index)
        chunks += (banks.bank[index].row_bytes + CHUNK - 1) / CHUNK;
    for (u64 item = blockIdx.x; item < chunks * (u64)misses; item += gridDim.x) {
        i32 expert = miss_expert[item / chunks], slot = miss_slot[item / chunks];
        // a list that was damaged leads nowhere
        if ((u32)expert >= experts || (u32)slot >= slots) continue;
        u64 chunk = item % chunks;
        for (u32 index = 0; index < bank_count; ++index) {
            const Bank& bank = banks.bank[index];
            u64 here = (bank.row_bytes + CHUNK - 1) / CHUNK;
            if (chunk >= here) {
                chunk -= here;
                continue;
            }
            u64 begin = chunk * CHUNK, left = bank.row_bytes - begin;
            copy_bytes(
                bank.slots + (u64)slot * bank.slot_stride + begin,
                bank.source + (u64)expert * bank.source_stride + begin, left < CHUNK ? left : CHUNK);
            break;
        }
    }
}
