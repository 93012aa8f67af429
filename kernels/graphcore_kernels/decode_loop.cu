// The two ends of a loop that decodes a whole generation in one launch: what stands before a WHILE
// node, and what stands behind the decode step in its body. One block each. They decide on the
// device whether another token is decoded, and hand each token to the host while the launch runs.
// No header: NVRTC has none on its path.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

extern "C" __device__ void cudaGraphSetConditional(u64 handle, u32 value);

// words of the control block in pinned host memory; the host writes the first two
enum Control { BUDGET = 0, STOP = 1, PUBLISHED = 2, OVER = 3 };
// words on the device
enum Progress { MADE = 0, ALLOWED = 1 };

// Also a barrier: what every thread has done before is done.
static __device__ bool all_finished(const bool* finished, u32 rows) {
    int all = 1;
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x) all = all && finished[row];
    return __syncthreads_and(all);
}

static __device__ void decide(u64 handle, bool more, volatile i64* control) {
    if (!more) {
        __threadfence_system();  // whoever sees the end sees every token
        control[OVER] = 1;
    }
    cudaGraphSetConditional(handle, more ? 1u : 0u);
}

extern "C" __global__ void begin_decode_loop(
    u64 handle, const bool* finished, i64* progress, u64 control_address, u32 rows) {
    volatile i64* control = reinterpret_cast<volatile i64*>(control_address);
    bool all = all_finished(finished, rows);
    if (threadIdx.x != 0) return;
    i64 allowed = control[BUDGET];
    progress[MADE] = 0;
    progress[ALLOWED] = allowed;
    decide(handle, allowed > 0 && !all && control[STOP] == 0, control);
}

extern "C" __global__ void end_decode_step(
    u64 handle, const i64* token, const bool* finished, i64* progress, u64 ring_address,
    u64 control_address, u32 rows) {
    volatile i64* control = reinterpret_cast<volatile i64*>(control_address);
    i64 made = progress[MADE];
    volatile i64* slot = reinterpret_cast<volatile i64*>(ring_address) + made * rows;
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x) slot[row] = token[row];
    __threadfence_system();  // the tokens reach the host before their number does
    bool all = all_finished(finished, rows);
    if (threadIdx.x != 0) return;
    __threadfence_system();  // those of the other threads too
    made += 1;
    progress[MADE] = made;
    control[PUBLISHED] = made;
    decide(handle, made < progress[ALLOWED] && !all && control[STOP] == 0, control);
}
