// warpgroups: the instructions of sm_90a that a product of warpgroups is made of, a function each.
//
// Everything of the form "warpgroup" that is not plain C++ is here. Shared memory is addressed in
// bytes of its window, as barriers, copies and descriptors have it. A descriptor that the compiler
// could know breaks NVRTC 13.0, so descriptors come from addresses of the running block.

#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error the form "warpgroup" needs -arch=sm_90a
#endif

// what the driver encoded: a tensor of up to five axes, and the box that a copy takes of it
struct alignas(64) TensorMap {
    u64 word[16];
};

#define TENSOR_MAP const __grid_constant__ TensorMap

// the block's, as groups of eight rows of 128 bytes want it
extern __shared__ __align__(1024) char ring_memory[];

__device__ __forceinline__ u32 shared_address(const void* at) {
    return static_cast<u32>(__cvta_generic_to_shared(at));
}

// ---- barriers in shared memory -----------------------------------------------------------------

__device__ __forceinline__ void begin_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

// makes new barriers known to the copy engine; before the block's own barrier
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At the barrier of this place in a block of the cluster, by who has read and written nothing: with
// .release.cluster it is a fence of the whole device, and all takes 1.3 to 1.6 times as long.
__device__ __forceinline__ void arrive_at(int rank, u32 barrier) {
    asm volatile(
        "{\n.reg .b32 its;\n"
        "mapa.shared::cluster.u32 its, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [its];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// arrives, and lets the phase also wait for this many bytes of copies
__device__ __forceinline__ void arrive_expecting(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
    u32 is_over;
    do {
        asm volatile(
            "{\n.reg .pred is_over;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 is_over, [%1], %2;\n"
            "selp.u32 %0, 1, 0, is_over;\n}"
            : "=r"(is_over)
            : "r"(barrier), "r"(phase)
            : "memory");
    } while (!is_over);
}

// of the 128 threads of one warpgroup
__device__ __forceinline__ void wait_for_warpgroup(int id) {
    asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

// of all threads of the blocks of a cluster
__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// ---- copies ------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_box(
    u32 to, const TensorMap& map, int k, int i, int j, int group, int slot, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
        "l"(&map), "r"(k), "r"(i), "r"(j), "r"(group), "r"(slot), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void copy_box(
    u32 to, const TensorMap& map, int k, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(k), "r"(row), "r"(barrier)
        : "memory");
}

// the same to this place of each block of the cluster, whose own barriers are told
__device__ __forceinline__ void copy_box_to_all(
    u32 to, const TensorMap& map, int k, int row, u32 barrier) {
    constexpr u16 ALL = (1 << GEMM_CLUSTER) - 1;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(k), "r"(row), "r"(barrier), "h"(ALL)
        : "memory");
}

__device__ __forceinline__ void copy_async(u32 to, const void* from, bool is_valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(is_valid ? 16 : 0)
                 : "memory");
}

// arrives once this thread's copies of before are done
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ Chunk load_chunk(u32 from) {
    Chunk found;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.word[0]), "=r"(found.word[1]), "=r"(found.word[2]), "=r"(found.word[3])
                 : "r"(from)
                 : "memory");
    return found;
}

__device__ __forceinline__ void store_chunk(u32 to, const Chunk& chunk) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(chunk.word[0]),
                 "r"(chunk.word[1]), "r"(chunk.word[2]), "r"(chunk.word[3])
                 : "memory");
}

// 16 rows of 8 words, as the tensor cores want them of a warp: lanes 8 i ... 8 i + 7 say where rows
// of four words lie, whose words go to register i of four lanes each
__device__ __forceinline__ void load_fragment(u32 (&words)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
}

// between writes of threads and reads of the tensor cores
__device__ __forceinline__ void show_tensor_cores() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- products ----------------------------------------------------------------------------------

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// blockIdx.x, read and not kept: a register less from before the parts of a block
__device__ __forceinline__ int own_block() {
    int block;
    asm volatile("mov.u32 %0, %ctaid.x;" : "=r"(block));
    return block;
}

// before the first product on registers that were written otherwise
__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// keeps the compiler from moving what it does with sums before the wait for them
template <int COUNT>
__device__ __forceinline__ void hold(float (&sum)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

// Rows of 128 bytes in groups of eight, chunks of 16 bytes exchanged within a group by the row's
// number: the layout that copies with a swizzle of 128 bytes make.
__device__ __forceinline__ u64 describe(u32 address) {
    return (address & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#if GEMM_PRECISION == 0
#define PRODUCT_TYPES "f32.bf16.bf16"
#elif GEMM_PRECISION == 1
#define PRODUCT_TYPES "f32.f16.f16"
#endif

#if GEMM_PRECISION < 2
// sum += a * b: 64 rows of a by COLUMNS rows of b, 16 of the depth; layouts as PTX has them
#define DEFINE_PRODUCT(COLUMNS, COUNT, A, B, PLACES, ...)                                         \
    __device__ __forceinline__ void multiply_warpgroup(float (&d)[COUNT], u64 a, u64 b) {         \
        asm volatile("{\n.reg .pred adds;\nsetp.eq.u32 adds, 1, 1;\n"                             \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16." PRODUCT_TYPES " {" PLACES \
                     "}, %" #A ", %" #B ", adds, 1, 1, 0, 0;\n}"                                  \
                     : __VA_ARGS__                                                                \
                     : "l"(a), "l"(b));                                                           \
    }
#else
// the same of TF32 and 8 of the depth, a from registers; where it adds nothing, sum = a * b
#define DEFINE_PRODUCT(COLUMNS, COUNT, A0, A1, A2, A3, B, ADDS, PLACES, ...)                      \
    __device__ __forceinline__ void multiply_warpgroup(                                           \
        float (&d)[COUNT], const u32 (&a)[4], u64 b, bool adds) {                                 \
        asm volatile("{\n.reg .pred adds;\nsetp.ne.u32 adds, %" #ADDS ", 0;\n"                    \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k8.f32.tf32.tf32 {" PLACES      \
                     "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", adds, 1, 1;\n}"       \
                     : __VA_ARGS__                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(u32(adds)));       \
    }
#endif
#define SUM_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUM_16(i) SUM_4(i), SUM_4(i + 4), SUM_4(i + 8), SUM_4(i + 12)
#define PLACES_OF_8 "%0,%1,%2,%3"
#define PLACES_OF_16 PLACES_OF_8 ",%4,%5,%6,%7"
#define PLACES_OF_24 PLACES_OF_16 ",%8,%9,%10,%11"
#define PLACES_OF_48 PLACES_0 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define PLACES_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define PLACES_1 PLACES_0 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PLACES_2 PLACES_1 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define PLACES_3 PLACES_2 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PLACES_4 PLACES_3 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define PLACES_5 PLACES_4 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define PLACES_6 PLACES_5 \
    ",%96,%97,%98,%99,%100,%101,%102,%103," \
    "%104,%105,%106,%107,%108,%109,%110,%111"
#define PLACES_7 PLACES_6 \
    ",%112,%113,%114,%115,%116,%117,%118,%119," \
    "%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS_0 SUM_16(0)
#define SUMS_1 SUMS_0, SUM_16(16)
#define SUMS_2 SUMS_1, SUM_16(32)
#define SUMS_3 SUMS_2, SUM_16(48)
#define SUMS_4 SUMS_3, SUM_16(64)
#define SUMS_5 SUMS_4, SUM_16(80)
#define SUMS_6 SUMS_5, SUM_16(96)
#define SUMS_7 SUMS_6, SUM_16(112)
#if GEMM_PRECISION < 2
DEFINE_PRODUCT(8, 4, 4, 5, PLACES_OF_8, SUM_4(0))
DEFINE_PRODUCT(16, 8, 8, 9, PLACES_OF_16, SUM_4(0), SUM_4(4))
DEFINE_PRODUCT(24, 12, 12, 13, PLACES_OF_24, SUM_4(0), SUM_4(4), SUM_4(8))
DEFINE_PRODUCT(32, 16, 16, 17, PLACES_0, SUMS_0)
DEFINE_PRODUCT(40, 20, 20, 21, PLACES_0 ",%16,%17,%18,%19", SUMS_0, SUM_4(16))
DEFINE_PRODUCT(48, 24, 24, 25, PLACES_OF_48, SUMS_0, SUM_4(16), SUM_4(20))
DEFINE_PRODUCT(56, 28, 28, 29, PLACES_OF_48 ",%24,%25,%26,%27", SUMS_0, SUM_4(16), SUM_4(20), SUM_4(24))
DEFINE_PRODUCT(64, 32, 32, 33, PLACES_1, SUMS_1)
DEFINE_PRODUCT(96, 48, 48, 49, PLACES_2, SUMS_2)
DEFINE_PRODUCT(128, 64, 64, 65, PLACES_3, SUMS_3)
DEFINE_PRODUCT(160, 80, 80, 81, PLACES_4, SUMS_4)
DEFINE_PRODUCT(192, 96, 96, 97, PLACES_5, SUMS_5)
DEFINE_PRODUCT(224, 112, 112, 113, PLACES_6, SUMS_6)
DEFINE_PRODUCT(256, 128, 128, 129, PLACES_7, SUMS_7)
#else
DEFINE_PRODUCT(32, 16, 16, 17, 18, 19, 20, 21, PLACES_0, SUMS_0)
DEFINE_PRODUCT(48, 24, 24, 25, 26, 27, 28, 29, PLACES_OF_48, SUMS_0, SUM_4(16), SUM_4(20))
DEFINE_PRODUCT(64, 32, 32, 33, 34, 35, 36, 37, PLACES_1, SUMS_1)
#endif

// ---- finishing ---------------------------------------------------------------------------------

// four blocks of 8 by 8 elements of 16 bits, turned over: lanes 8 i ... 8 i + 7 say where the rows
// of block i go
__device__ __forceinline__ void store_turned(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     to),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

#if GEMM_PRECISION < 2
// low to the lower half
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 pair;
#if GEMM_PRECISION == 0
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}
#endif

// e to the value, and 1 over it: to about 2 units in the last place
__device__ __forceinline__ float exponential(float value) {
    float result;
    asm("ex2.approx.f32 %0, %1;" : "=f"(result) : "f"(value * 1.4426950408889634f));
    return result;
}

__device__ __forceinline__ float reciprocal(float value) {
    float result;
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}
