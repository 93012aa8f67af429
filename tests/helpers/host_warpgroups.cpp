// Stands in for warpgroups.cu on the host, behind host_tensor_cores.cpp. Swizzles are done on the
// bits of addresses, as a device does them. Copies and products are done at once, or as late as
// they may be: what is right must be right all ways. Shared memory, and barriers in it, are those
// of the thread's block, or of the block of its cluster that an instruction goes to.

#define __grid_constant__
#define __cluster_dims__(...)
#define TENSOR_MAP TensorMap

static int target = -1;  // the rank of the block that an instruction goes to; -1: the thread's own
static int rank_now() { return target < 0 ? own_rank_of_fiber() : target; }
#define ring_memory ((char*)shared_memories[rank_now()])

// does this to the block of this rank; nothing where that has ended
template <typename Action>
static void at_rank(int rank, const Action& action) {
    if (rank >= cluster_size || !running[rank]) return void(++wrong_copies);
    target = rank;
    action();
    target = -1;
}

static u32 shared_address(const void* at) { return (u32)((const char*)at - ring_memory); }

// what the emulated driver packs
struct TensorMap {
    u64 address;
    u32 axes, element;
    u64 steps[4], sizes[5];
    u32 box[5];
    char filled[20];
};

// Chunks that threads have written and the tensor cores may not see yet: those of a thread until it
// shows them, those that copies of threads brought until anybody does.
static bool is_hidden[CLUSTER_BLOCKS][SHARED_BYTES / 16];
static std::vector<u32> hidden_by[THREADS_AT_ONCE], brought[CLUSTER_BLOCKS];

static void hide(u32 address, std::vector<u32>& by) {
    is_hidden[rank_now()][address / 16] = true;
    by.push_back(address / 16);
}

static void show_all(std::vector<u32>& chunks) {
    for (u32 chunk : chunks) is_hidden[rank_now()][chunk] = false;
    chunks.clear();
}

static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

static void wrong() { ++wrong_copies; }

// ---- barriers in shared memory -----------------------------------------------------------------

struct Bytes {
    u32 to, count;
    const char* from;  // none: zeros
};

struct SharedBarrier {
    int arrivals = 0, left = 0, bytes = 0;
    u32 phase = 0;
    bool is_seen = true;  // somebody went on because of the last phase that is over
    std::vector<Bytes> late;
    std::vector<Copies> late_arrivals;  // of threads, behind their copies
};
static SharedBarrier shared_barriers[CLUSTER_BLOCKS][SHARED_BYTES / 8];
static std::vector<u32> begun_barriers[CLUSTER_BLOCKS];

static SharedBarrier& barrier_at(u32 address) {
    if (address % 8 || address >= shared_chunks * 16u) wrong(), address = 0;
    return shared_barriers[rank_now()][address / 8];
}

static void do_bytes(const Bytes& copy) {
    if (copy.to + copy.count > shared_chunks * 16u) return wrong();
    is_hidden[rank_now()][copy.to / 16] = false;
    if (copy.from) memcpy(ring_memory + copy.to, copy.from, copy.count);
    else memset(ring_memory + copy.to, 0, copy.count);
}

static void look(SharedBarrier& barrier) {
    if (barrier.left || barrier.bytes) return;
    if (!barrier.is_seen) wrong();  // one phase after the other, and nobody waited
    barrier.is_seen = false;
    barrier.left = barrier.arrivals;
    barrier.phase ^= 1;
}

static void land(SharedBarrier& barrier) {
    for (const auto& copies : barrier.late_arrivals) {
        for (auto& copy : copies) copy();
        --barrier.left;
    }
    barrier.late_arrivals.clear();
    for (const Bytes& copy : barrier.late) {
        do_bytes(copy);
        barrier.bytes -= copy.count;
    }
    barrier.late.clear();
}

static void begin_barrier(u32 barrier, int arrivals) {
    barrier_at(barrier) = SharedBarrier();
    barrier_at(barrier).arrivals = barrier_at(barrier).left = arrivals;
    begun_barriers[rank_now()].push_back(barrier);
}

static void publish_barriers() {}

// of a block that has ended nothing may be left over, and nothing be on its way there
static void end_block() {
    for (u32 at : begun_barriers[rank_now()]) {
        const SharedBarrier& barrier = barrier_at(at);
        const bool has_late = !barrier.late.empty() || !barrier.late_arrivals.empty();
        if (has_late || barrier.bytes || barrier.left != barrier.arrivals) wrong();
    }
}

static void arrive(u32 at) {
    SharedBarrier& barrier = barrier_at(at);
    if (!barrier.left) return wrong();  // one too many, or at no barrier at all
    --barrier.left;
    look(barrier);
}

static void arrive_at(int rank, u32 barrier) {
    at_rank(rank, [=] { arrive(barrier); });
}

static void arrive_expecting(u32 at, int bytes) {
    barrier_at(at).bytes += bytes;
    arrive(at);
}

static void wait_for(u32 at, u32 phase) {
    SharedBarrier& barrier = barrier_at(at);
    while (barrier.phase == phase) {
        const bool has_late = !barrier.late.empty() || !barrier.late_arrivals.empty();
        if (has_late && barrier.left == (int)barrier.late_arrivals.size()) {
            land(barrier);
            look(barrier);
            continue;
        }
        give_way();
    }
    barrier.is_seen = true;
    rounds_in_vain = 0;
}

static Barrier group_barriers[CLUSTER_BLOCKS][16];
static void wait_for_warpgroup(int id) { wait_at(group_barriers[rank_now()][id], 128, 0); }

static void wait_for_cluster() { wait_at(cluster_barrier, cluster_size * block_size, 0); }

// ---- copies ------------------------------------------------------------------------------------

static void copy_tensor(
    u32 to, const TensorMap& map, const int (&at)[5], u32 barrier, bool is_counted = true) {
    if (to % 1024 || map.box[0] * map.element != 128) return wrong();
    u32 row = 0;
    SharedBarrier& told = barrier_at(barrier);
    if (!told.arrivals) return wrong();
    for (u32 n4 = 0; n4 < map.box[4]; ++n4)
        for (u32 n3 = 0; n3 < map.box[3]; ++n3)
            for (u32 n2 = 0; n2 < map.box[2]; ++n2)
                for (u32 n1 = 0; n1 < map.box[1]; ++n1, ++row) {
                    const i64 index[5] = {0, at[1] + n1, at[2] + n2, at[3] + n3, at[4] + n4};
                    const char* from = (const char*)map.address;
                    bool is_inside = true;
                    for (int axis = 1; axis < 5; ++axis) {
                        is_inside &= index[axis] >= 0 && index[axis] < (i64)map.sizes[axis];
                        from += index[axis] * (i64)map.steps[axis - 1];
                    }
                    for (int chunk = 0; chunk < 8; ++chunk) {
                        const i64 element = at[0] + chunk * 16 / (i64)map.element;
                        const char* source = from + element * map.element;
                        const bool is_valid = is_inside && element < (i64)map.sizes[0];
                        bool is_known = !is_valid;
                        for (const Range& range : readable)
                            is_known |= source >= range.begin && source + 16 <= range.end;
                        if (!is_known) wrong();
                        copies += is_valid && is_counted;
                        const Bytes copy{swizzled(to + row * 128 + chunk * 16), 16,
                                         is_valid && is_known ? source : nullptr};
                        if (is_late) {
                            told.late.push_back(copy);
                        } else {
                            do_bytes(copy);
                            told.bytes -= 16;
                        }
                    }
                }
    look(told);
}

static void copy_box(
    u32 to, const TensorMap& map, int k, int i, int j, int group, int slot, u32 barrier) {
    if (map.axes != 5) wrong();
    copy_tensor(to, map, {k, i, j, group, slot}, barrier);
}

static void copy_box(u32 to, const TensorMap& map, int k, int row, u32 barrier) {
    if (map.axes != 2) wrong();
    copy_tensor(to, map, {k, row, 0, 0, 0}, barrier);
}

static void copy_box_to_all(u32 to, const TensorMap& map, int k, int row, u32 barrier) {
    if (map.axes != 2) wrong();
    for (int rank = 0; rank < cluster_size; ++rank)
        at_rank(rank, [&] { copy_tensor(to, map, {k, row, 0, 0, 0}, barrier, rank == 0); });
}

static void copy_async(u32 to, const void* from, bool is_valid) {
    if (to % 16) wrong();
    is_valid = look_at_copy(from, is_valid);
    const auto copy = [=] {
        do_bytes({to, 16, is_valid ? (const char*)from : nullptr});
        hide(to, brought[rank_now()]);
    };
    if (is_late) begun[current].push_back(copy);
    else copy();
}

static void arrive_after_copies(u32 at) {
    if (!is_late) return arrive(at);
    SharedBarrier& barrier = barrier_at(at);
    if (barrier.left <= (int)barrier.late_arrivals.size()) wrong();
    barrier.late_arrivals.push_back(begun[current]);
    begun[current].clear();
}

static bool is_place(u32 at) {
    const bool is_inside = at % 16 == 0 && at + 16 <= shared_chunks * 16u;
    if (!is_inside) wrong();
    return is_inside;
}

static Chunk load_chunk(u32 from) {
    Chunk found{};
    if (is_place(from)) memcpy(&found, ring_memory + from, 16);
    return found;
}

static void store_chunk(u32 to, const Chunk& chunk) {
    if (!is_place(to)) return;
    memcpy(ring_memory + to, &chunk, 16);
    hide(to, hidden_by[current]);
}

static void load_fragment(u32 (&words)[4], u32 from) {
    u32(*all)[6] = show({from});
    const int lane = current % WARP;
    for (int i = 0; i < 4; ++i) {
        const u32 row = all[i * 8 + lane / 4][0];
        if (is_place(row)) memcpy(&words[i], ring_memory + row + lane % 4 * 4, 4);
    }
}

static void show_tensor_cores() {
    show_all(hidden_by[current]);
    show_all(brought[rank_now()]);
}

// ---- products ----------------------------------------------------------------------------------

template <int COUNT>
static void take_registers() {}
template <int COUNT>
static void give_registers() {}

static int own_block() { return blockIdx.x; }
static void begin_products() {}

// a lane's share of a product: sum += a * b
struct Product {
    float* sum;
    int count;
    u64 a, b;      // in shared memory; of TF32 only b
    int depth;     // 16, or 8 of TF32
    bool is_f16, adds;
    float rows[2][8];  // of TF32: the lane's two rows of a
    const u32* own;    // and the registers that it gave, which must stay as they were
    u32 given[4];
};
static std::vector<std::vector<Product>> products_under_way[THREADS_AT_ONCE];
static std::vector<Product> products_begun[THREADS_AT_ONCE];

static u32 word_of(u64 descriptor, int row, int byte) {
    if (descriptor >> 62 != 1) wrong();
    const u32 start = (descriptor & 0x3fff) << 4, group = (descriptor >> 32 & 0x3fff) << 4;
    const u32 at = swizzled(start + row / 8 * group + row % 8 * 128 + byte);
    if (at + 4 > shared_chunks * 16u || is_hidden[rank_now()][at / 16]) return wrong(), 0;
    u32 word;
    memcpy(&word, ring_memory + at, 4);
    return word;
}

static float element_of(u64 descriptor, int row, int k, bool is_f16) {
    const u16 half = word_of(descriptor, row, k / 2 * 4) >> k % 2 * 16;
    return is_f16 ? from_f16(half) : from_bf16(half);
}

// to F32, towards zero, as the tensor cores add
static float cut(double value) {
    const float near = value;
    return fabs(near) > fabs(value) ? nextafterf(near, 0) : near;
}

static void do_product(const Product& product) {
    const int lane = current % 32, warp = current / 32 % 4;
    const bool is_tf32 = product.depth == 8;
    if (is_tf32 && memcmp(product.own, product.given, 16)) wrong();
    for (int i = 0; i < product.count; ++i) {
        const int half = i / 2 % 2, row = warp * 16 + lane / 4 + half * 8;
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        double total = product.adds ? product.sum[i] : 0;
        for (int k = 0; k < product.depth; ++k)
            total += is_tf32 ? (double)product.rows[half][k] *
                                   cut_to_tf32(word_of(product.b, column, k * 4))
                             : (double)element_of(product.a, row, k, product.is_f16) *
                                   element_of(product.b, column, k, product.is_f16);
        product.sum[i] = is_tf32 ? cut(total) : total;
    }
}

static void begin_product(const Product& product) {
    if (are_products_late) products_begun[current].push_back(product);
    else do_product(product);
}

// by the precision of the kernel's namespace
template <int PRECISION, int COUNT>
static void multiply_of(float (&sum)[COUNT], u64 a, u64 b) {
    begin_product({sum, COUNT, a, b, 16, PRECISION == 1, true});
}

template <int PRECISION, int COUNT>
static void multiply_of(float (&sum)[COUNT], const u32 (&a)[4], u64 b, bool adds) {
    static_assert(PRECISION >= 3, "of TF32");
    Product product{sum, COUNT, 0, b, 8, false, adds};
    u32(*all)[6] = show({a[0], a[1], a[2], a[3]});
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 8; ++k)
            if (row % 8 == current % WARP / 4)
                product.rows[row / 8][k] = cut_to_tf32(Words::a(all, row, k));
    product.own = a;
    memcpy(product.given, a, 16);
    begin_product(product);
}

#define multiply_warpgroup(...) multiply_of<GEMM_PRECISION>(__VA_ARGS__)
#define to_pair(low, high)                                                                  \
    (GEMM_PRECISION ? (u32)to_f16(high) << 16 | to_f16(low) : (u32)to_bf16(high) << 16 | to_bf16(low))

static void commit_products() {
    products_under_way[current].push_back(products_begun[current]);
    products_begun[current].clear();
}

template <int LEFT>
static void wait_for_products() {
    auto& groups = products_under_way[current];
    while ((int)groups.size() > LEFT) {
        for (const Product& product : groups.front()) do_product(product);
        groups.erase(groups.begin());
    }
}

template <int COUNT>
static void hold(float (&sum)[COUNT]) {
    asm volatile("" ::"r"(sum) : "memory");
}

static u64 describe(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// ---- finishing ---------------------------------------------------------------------------------

static void store_turned(u32 to, u32 a, u32 b, u32 c, u32 d) {
    u32(*all)[6] = show({a, b, c, d});
    const int lane = current % WARP, block = lane / 8, row = lane % 8;
    if (to % 16 || to + 16 > shared_chunks * 16u) return wrong();
    for (int n = 0; n < 8; ++n) {
        const u16 half = all[n * 4 + row / 2][block] >> row % 2 * 16;
        memcpy(ring_memory + to + n * 2, &half, 2);
    }
}

static float exponential(float value) { return expf(value); }
static float reciprocal(float value) { return 1.0f / value; }

// ---- launches ----------------------------------------------------------------------------------

static void begin_cluster() {
    memset(is_hidden, 0, sizeof is_hidden);
    for (auto& chunks : brought) chunks.clear();
    for (auto& chunks : hidden_by) chunks.clear();
    for (auto& groups : products_under_way) groups.clear();
    for (auto& products : products_begun) products.clear();
    for (auto& of_block : group_barriers)
        for (Barrier& barrier : of_block) barrier = Barrier();
    for (int rank = 0; rank < CLUSTER_BLOCKS; ++rank) {
        for (u32 at : begun_barriers[rank]) shared_barriers[rank][at / 8] = SharedBarrier();
        begun_barriers[rank].clear();
    }
}
