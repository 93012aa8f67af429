// arrivals: barriers in shared memory on which copies arrive by themselves, and what lanes show
// each other, a function each; beside tensor_cores everything that is not plain C++.
//
// A barrier is passed in turns; whoever waits for one names the parity of the turn that must be
// over. One that was just made answers at once for parity 1.

__device__ __forceinline__ u32 shared_address(const void* at) {
    return static_cast<u32>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ void make_barrier(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(
                     shared_address(barrier))
                 : "memory");
}

// as copy_async, where the next bytes of the row are wanted next
__device__ __forceinline__ void copy_ahead(Chunk* to, const void* from, bool is_valid) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(is_valid ? 16 : 0)
                 : "memory");
}

// one chunk into registers; zeros where it is not valid, and then nothing is read
__device__ __forceinline__ void load_ahead(Chunk& to, const void* from, bool is_valid) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; "
                 "mov.b32 %2, 0; mov.b32 %3, 0; "
                 "@p ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4]; }"
                 : "=&r"(to.word[0]), "=&r"(to.word[1]), "=&r"(to.word[2]), "=&r"(to.word[3])
                 : "l"(from), "r"(int(is_valid)));
}

// as soon as all that this thread copies is there
__device__ __forceinline__ void arrive_after_copies(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ bool has_passed(u64* barrier, int parity) {
    u32 answer;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; "
                 "selp.u32 %0, 1, 0, p; }"
                 : "=r"(answer)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; "
                 "selp.u32 %0, 1, 0, p; }"
                 : "=r"(answer)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#endif
    return answer;
}

__device__ __forceinline__ void wait_for(u64* barrier, int parity) {
    while (!has_passed(barrier, parity)) {
    }
}

__device__ __forceinline__ int from_lane(int value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

__device__ __forceinline__ float from_lane(float value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

__device__ __forceinline__ int greatest_of_warp(int value) {
    return __reduce_max_sync(0xffffffffu, value);
}

__device__ __forceinline__ u32 lanes_with(bool value) { return __ballot_sync(0xffffffffu, value); }

__device__ __forceinline__ int count_bits(u32 word) { return __popc(word); }

__device__ __forceinline__ int count_in_warp(bool value) { return count_bits(lanes_with(value)); }

// quick rather than exact, but the same everywhere
__device__ __forceinline__ float divide(float a, float b) { return __fdividef(a, b); }

// The value, of which the compiler knows nothing more: what is added to it stays an offset of the
// instruction that uses it, where it would else be a register of its own.
__device__ __forceinline__ int without_history(int value) {
    asm volatile("" : "+r"(value));
    return value;
}
