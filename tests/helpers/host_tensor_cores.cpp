// Stands in for tensor_cores.cu and for what CUDA C++ adds, on the host: threads of a block are
// fibers that take turns, so that barriers, shuffles and products of a whole warp are what they are
// on a device. Blocks of a cluster run at once, the others one after the other. Copies must lie in
// memory that was named, and at multiples of 16 bytes.

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <map>
#include <tuple>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(16) Chunk {
    u32 word[4];
};

template <typename T>
static T min(T a, T b) {
    return b < a ? b : a;
}

template <typename T>
static T max(T a, T b) {
    return a < b ? b : a;
}
static u32 max(int a, u32 b) { return a < (int)b ? b : a; }

// ---- threads -----------------------------------------------------------------------------------

static const int THREADS_AT_ONCE = 1024, CLUSTER_BLOCKS = 2;  // the most
static const int WARP = 32, STACK = 256 * 1024;
static int block_size, cluster_size, first_block;  // of this launch; of those that run now

struct Dim3 {
    unsigned x = 0, y = 0, z = 0;
};
static Dim3 gridDim;

struct Barrier {
    int arrived = 0, any = 0, result = 0;
    unsigned generation = 0;
};

struct Fiber {
    ucontext_t context;
    jmp_buf place;
    unsigned collectives = 0;
    bool is_started = false, is_done = false;
    char* stack = nullptr;
};

static Fiber fibers[THREADS_AT_ONCE];
static int current;  // block after block
static jmp_buf scheduler;
static void (*body)();
static Barrier cluster_barrier, block_barriers[CLUSTER_BLOCKS];
static Barrier warp_barriers[THREADS_AT_ONCE / WARP];
// what the lanes of a warp show each other; used in turn, so that one barrier is enough
static u32 shown[THREADS_AT_ONCE / WARP][2][WARP][6];
static int running[CLUSTER_BLOCKS];  // threads of each block that are not done

static int own_rank_of_fiber() { return current / block_size; }

struct ThreadIndex {
    struct {
        operator unsigned() const { return current % block_size; }
    } x;
};
static ThreadIndex threadIdx;

struct BlockIndex {
    struct {
        operator unsigned() const { return first_block + own_rank_of_fiber(); }
    } x;
};
static BlockIndex blockIdx;

// Threads that have a turn only in each of so many rounds, so that others run ahead of them.
struct Held {
    int first = 0, end = 0, rounds = 1;
};
static Held held;

static const int MOST_ROUNDS = 20000;  // in which nobody gets what it waits for: nobody ever will
static int rounds_in_vain;

static void give_way() {
    if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}

static int wait_at(Barrier& barrier, int size, int value) {
    const unsigned generation = barrier.generation;
    barrier.any |= value;
    if (++barrier.arrived == size) {
        barrier.result = barrier.any;
        barrier.arrived = barrier.any = 0;
        ++barrier.generation;
        rounds_in_vain = 0;
        return barrier.result;
    }
    while (barrier.generation == generation) give_way();
    return barrier.result;
}

static int wait_for_block(int value) {
    return wait_at(block_barriers[own_rank_of_fiber()], block_size, value);
}
static void __syncthreads() { wait_for_block(0); }
static int __syncthreads_or(int value) { return wait_for_block(value != 0); }
static void __syncwarp() { wait_at(warp_barriers[current / WARP], WARP, 0); }

static void end_block();  // of the thread that runs, when all its threads are done

static void enter() {
    body();
    fibers[current].is_done = true;
    rounds_in_vain = 0;
    if (!--running[own_rank_of_fiber()]) end_block();
    _longjmp(scheduler, 1);
}

// whether all threads came to their end
static bool run_cluster() {
    const int threads = block_size * cluster_size;
    for (int n = 0; n < threads; ++n) {
        Fiber& fiber = fibers[n];
        if (!fiber.stack) fiber.stack = (char*)malloc(STACK);
        fiber.is_started = fiber.is_done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    for (int& count : running) count = block_size;
    cluster_barrier = Barrier();
    for (Barrier& barrier : block_barriers) barrier = Barrier();
    for (Barrier& barrier : warp_barriers) barrier = Barrier();
    static bool is_left;
    static int round;
    is_left = true;
    rounds_in_vain = 0;
    for (round = 0; is_left; ++round) {
        is_left = false;
        if (++rounds_in_vain > MOST_ROUNDS) return false;
        for (current = 0; current < threads; ++current) {
            Fiber& fiber = fibers[current];
            if (fiber.is_done) continue;
            is_left = true;
            const bool is_held = current >= held.first && current < held.end;
            if (is_held && (round + 1) % held.rounds) continue;
            if (_setjmp(scheduler)) continue;
            if (fiber.is_started) _longjmp(fiber.place, 1);
            fiber.is_started = true;
            setcontext(&fiber.context);
        }
    }
    return true;
}

// ---- memory ------------------------------------------------------------------------------------

static const int SHARED_BYTES = 232448;  // the most that a listed device gives a block
static int shared_chunks;                // of this launch
alignas(1024) static Chunk shared_memories[CLUSTER_BLOCKS][SHARED_BYTES / 16];
#define shared_memory (shared_memories[own_rank_of_fiber()])

struct Range {
    const char *begin, *end;
};
static Range readable[2];
static i64 wrong_copies, copies;

static void copy_now(Chunk* to, const void* from, bool is_valid) {
    if (is_valid) memcpy(to, from, 16);
    else memset(to, 0, 16);
}

// Copies are made at once, or as late as may be: when whoever waits for them asks. So are products
// of warpgroups.
static bool is_late, are_products_late;
typedef std::vector<std::function<void()>> Copies;
// by each thread, and not waited for
static Copies begun[THREADS_AT_ONCE], committed[THREADS_AT_ONCE];

// whether a copy may be made; counted
static bool look_at_copy(const void* from, bool is_valid) {
    const char* at = (const char*)from;
    bool is_inside = (uintptr_t)at % 16 == 0;
    if (is_valid) {
        bool is_known = false;
        for (const Range& range : readable) is_known |= at >= range.begin && at + 16 <= range.end;
        is_inside &= is_known;
        ++copies;
    }
    if (!is_inside) ++wrong_copies;
    return is_valid && is_inside;
}

static void load_ahead(Chunk& to, const void* from, bool is_valid) {
    copy_now(&to, from, is_valid && look_at_copy(from, is_valid));
}

static void copy_async(Chunk* to, const void* from, bool is_valid) {
    if (to < shared_memory || to >= shared_memory + shared_chunks) ++wrong_copies;
    is_valid = look_at_copy(from, is_valid);
    if (!is_late) copy_now(to, from, is_valid);
    else begun[current].push_back([=] { copy_now(to, from, is_valid); });
}

static void copy_ahead(Chunk* to, const void* from, bool is_valid) {
    copy_async(to, from, is_valid);
}

static void commit_copies() {
    for (auto& copy : begun[current]) committed[current].push_back(std::move(copy));
    begun[current].clear();
}

// all groups, which is more than a device does
template <int LEFT>
static void wait_for_copies() {
    for (auto& copy : committed[current]) copy();
    committed[current].clear();
}

// a barrier in shared memory: how many arrivals make a turn, how many are missing, and the turn
struct Turns {
    u16 arrivals, missing;
    u32 turn;
};
static_assert(sizeof(Turns) == 8, "as large as a device's");
static std::map<u64*, std::vector<Copies>> to_arrive;

static void make_barrier(u64* barrier, int arrivals) {
    *(Turns*)barrier = {(u16)arrivals, (u16)arrivals, 0};
}

static void arrive(u64* barrier) {
    Turns& turns = *(Turns*)barrier;
    if (--turns.missing) return;
    turns.missing = turns.arrivals;
    ++turns.turn;
}

static void arrive_after_copies(u64* barrier) {
    to_arrive[barrier].push_back(std::move(begun[current]));
    begun[current].clear();
    if (is_late) return;
    arrive(barrier);
    to_arrive.erase(barrier);
}

static void wait_for(u64* barrier, int parity) {
    while (((Turns*)barrier)->turn % 2 == (u32)parity) {
        // not before every thread has begun what belongs to this turn
        auto found = to_arrive.find(barrier);
        if (found != to_arrive.end() && found->second.size() == ((Turns*)barrier)->missing) {
            const std::vector<Copies> due = std::move(found->second);
            to_arrive.erase(found);
            for (const Copies& copies : due) {
                for (auto& copy : copies) copy();
                arrive(barrier);
            }
        } else give_way();
    }
    rounds_in_vain = 0;
}

// ---- numbers -----------------------------------------------------------------------------------

static float as_float(u32 word) {
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static u32 as_word(float value) {
    u32 word;
    memcpy(&word, &value, 4);
    return word;
}

static float from_bf16(u16 half) { return as_float((u32)half << 16); }

static float from_f16(u16 half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const float size = exponent == 0    ? ldexpf(fraction, -24)
                       : exponent == 31 ? (fraction ? NAN : INFINITY)
                                        : ldexpf(fraction + 1024, exponent - 25);
    return half & 0x8000 ? -size : size;
}

static float cut_to_tf32(u32 word) { return as_float(word & 0xffffe000u); }

static u32 to_tf32(u32 word) {
    return isfinite(as_float(word)) ? (word + 0x1000u) & 0xffffe000u : word;
}

static float divide(float a, float b) { return a / b; }
static int without_history(int value) { return value; }
static float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
static float add(float a, float b) { return a + b; }
static float subtract(float a, float b) { return a - b; }
static float multiply(float a, float b) { return a * b; }

static u16 to_bf16(float value) {
    const u32 word = as_word(value);
    return isnan(value) ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

static u16 to_f16(float value) {
    const u16 sign = as_word(value) >> 16 & 0x8000;
    const float size = fabsf(value);
    if (isnan(value)) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent;
    frexpf(size, &exponent);
    if (size == 0 || exponent < -13) return sign | (u16)nearbyintf(ldexpf(size, 24));
    return sign | (u16)((exponent + 13) * 1024 + (int)nearbyintf(ldexpf(size, 11 - exponent)));
}

static u32 permute_bytes(u32 low, u32 high, u32 selector) {
    const u64 both = (u64)high << 32 | low;
    u32 result = 0;
    for (int n = 0; n < 4; ++n) {
        const int byte = selector >> 4 * n & 7;
        result |= (u32)(both >> 8 * byte & 255) << 8 * n;
    }
    return result;
}

// ---- what a warp does together -----------------------------------------------------------------

// shows these words to the warp; what all lanes show
static u32 (*show(const u32 (&words)[6]))[6] {
    const int warp = current / WARP;
    u32(*all)[6] = shown[warp][fibers[current].collectives++ % 2];
    memcpy(all[current % WARP], words, sizeof words);
    __syncwarp();
    return all;
}

// The element of A in row and depth, and of B, by the layouts of PTX: lane group * 4 + index.
struct Halves {
    static const int DEPTH = 16;
    static u16 half(u32 word, int k) { return word >> 16 * (k % 2); }
    static int lane(int row, int k) { return row % 8 * 4 + k % 8 / 2; }
    static u16 a(u32 (*all)[6], int row, int k) {
        return half(all[lane(row, k)][row / 8 + k / 8 * 2], k);
    }
    static u16 b(u32 (*all)[6], int k, int column) {
        return half(all[lane(column, k)][4 + k / 8], k);
    }
};

struct Words {
    static const int DEPTH = 8;
    static u32 a(u32 (*all)[6], int row, int k) {
        return all[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2];
    }
    static u32 b(u32 (*all)[6], int k, int column) { return all[column * 4 + k % 4][4 + k / 4]; }
};

template <typename Layout, typename Convert>
static void multiply_warp(
    float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1, const Convert& convert) {
    u32(*all)[6] = show({a[0], a[1], a[2], a[3], b0, b1});
    const int lane = current % WARP;
    for (int n = 0; n < 4; ++n) {
        const int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
        double total = sum[n];
        for (int k = 0; k < Layout::DEPTH; ++k)
            total += (double)convert(Layout::a(all, row, k)) * convert(Layout::b(all, k, column));
        sum[n] = total;
    }
}

static void multiply_bf16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_warp<Halves>(sum, a, b0, b1, from_bf16);
}
static void multiply_f16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_warp<Halves>(sum, a, b0, b1, from_f16);
}
static void multiply_tf32(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_warp<Words>(sum, a, b0, b1, cut_to_tf32);
}

static float from_lane_xor(float value, int mask) {
    return as_float(show({as_word(value)})[current % WARP ^ mask][0]);
}

static int from_lane_before(int value, int distance) {
    const int lane = current % WARP;
    return show({(u32)value})[lane >= distance ? lane - distance : lane][0];
}

static int from_lane(int value, int lane) { return show({(u32)value})[lane][0]; }
static float from_lane(float value, int lane) { return as_float(show({as_word(value)})[lane][0]); }

static int greatest_of_warp(int value) {
    u32(*all)[6] = show({(u32)value});
    for (int lane = 0; lane < WARP; ++lane) value = max(value, (int)all[lane][0]);
    return value;
}

static u32 lanes_with(bool value) {
    u32(*all)[6] = show({value});
    u32 lanes = 0;
    for (int lane = 0; lane < WARP; ++lane) lanes |= all[lane][0] << lane;
    return lanes;
}

static int count_bits(u32 word) { return __builtin_popcount(word); }
static int count_in_warp(bool value) { return count_bits(lanes_with(value)); }

static void report(int* error, int word) {
    if (word > *error) *error = word;
}

// ---- launches ----------------------------------------------------------------------------------

static const u32 POISON = 0x7fc0dead;  // not a number

static void begin_cluster();

// ``grid`` clusters of so many blocks, one of which is the usual case
template <typename Kernel, typename... Arguments>
static void launch(
    int grid, int cluster, int threads, int shared_bytes, Kernel kernel, Arguments... arguments) {
    static Kernel the_kernel;
    the_kernel = kernel;
    static std::tuple<Arguments...> given;
    given = {arguments...};
    body = [] { std::apply(the_kernel, given); };
    gridDim.x = grid * cluster;
    block_size = threads;
    cluster_size = cluster;
    shared_chunks = shared_bytes / 16;
    for (first_block = 0; first_block < grid * cluster; first_block += cluster) {
        for (int rank = 0; rank < cluster; ++rank)
            for (Chunk& chunk : shared_memories[rank])
                for (u32& word : chunk.word) word = POISON;
        to_arrive.clear();
        for (Copies& copies : begun) copies.clear();
        for (Copies& copies : committed) copies.clear();
        begin_cluster();
        if (!run_cluster()) ++wrong_copies;
        for (int rank = 0; rank < cluster; ++rank) {
            const u32* const begin = (const u32*)shared_memories[rank];
            for (int word = shared_bytes / 4; word < SHARED_BYTES / 4; ++word)
                if (begin[word] != POISON) ++wrong_copies;
        }
    }
}

extern "C" void allow_reads(const char* x, i64 x_bytes, const char* weights, i64 weight_bytes) {
    readable[0] = {x, x + x_bytes};
    readable[1] = {weights, weights + weight_bytes};
    wrong_copies = copies = 0;
}
extern "C" void be_late(int with_copies, int with_products) {
    is_late = with_copies;
    are_products_late = with_products;
}
extern "C" void hold_up(int first, int end, int rounds) { held = {first, end, rounds}; }
extern "C" i64 count_wrong_copies() { return wrong_copies; }
extern "C" i64 count_copies() { return copies; }
