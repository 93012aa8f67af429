/* A libcuda.so.1 without a device: enough of the driver API to run every call of
 * graphcore.driver.cuda once and look at what arrived.
 *
 * It keeps graphs, nodes and captures as plain structures, copies parameters as bytes, moves host
 * memory for copies, and on a graph launch runs host nodes only. It checks little: what the real
 * driver does is tested on a device. Tests steer it with stub_fail() and read stub_calls(); the
 * environment variable STUB_CUDA_VERSION says which CUDA it is for (13000).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void *H;
typedef unsigned int U;
typedef size_t Z;

enum { INVALID_VALUE = 1, NO_FUNCTION = 500, UNSUPPORTED = 801, UPDATE_FAILURE = 910 };
enum { KERNEL, MEMCPY, MEMSET, HOST, CHILD, EMPTY, WAIT_EVENT, RECORD_EVENT, ALLOC = 10, FREE,
       CONDITIONAL = 13, MAX = 512, ARGUMENTS = 3 };

typedef struct { unsigned char from_port, to_port, type, reserved[5]; } EdgeData;
typedef struct { H func; U grid[3], block[3], shared; void **params, **extra; H kern, ctx; } Kernel;
typedef struct { void (*fn)(void *); void *data; } Host;
typedef struct { uint64_t handle; U type, size; H *bodies; H ctx; } Conditional;
typedef struct { U type, reserved[3]; union { Conditional conditional; char pad[232]; }; } NodeParams;
typedef struct { int type, pad; char value[64]; } Attribute;
typedef struct { U grid[3], block[3], shared; H stream; Attribute *attrs; U count; } LaunchConfig;
typedef struct { int references; void (*destroy)(void *); void *data; } UserObject;
typedef struct Graph Graph;
typedef struct {
    U type; Graph *graph; int enabled;
    Kernel kernel; char bytes[ARGUMENTS][8]; void *pointers[ARGUMENTS];
    char attributes[20][64], copy[200], fill[40], alloc[120];
    Host host; H handle; Conditional conditional; H bodies[8];
} Node;
struct Graph {
    Node *nodes[MAX]; Z node_count;
    Node *from[MAX], *to[MAX]; EdgeData data[MAX]; Z edge_count;
    UserObject *objects[MAX]; Z object_count;
};
typedef struct { U flags; int status; uint64_t id; Graph *graph; Node *frontier[8]; Z frontier_count; }
    Stream;

static const Z offsets[ARGUMENTS] = {0, 8, 16}, sizes[ARGUMENTS] = {8, 8, 4};
static struct { const char *name; int calls, fail; } seen[256];
static int seen_count, driver_version = 13000, devices = 1, mode_now;
static H current_context;
static uint64_t next_capture = 1;
static struct { char *start; Z size; uint64_t id; } blocks[MAX];
static uint64_t next_block = 1;

LaunchConfig stub_launch;
Attribute stub_attributes[8];
char stub_arguments[ARGUMENTS][8];

static int entry(const char *name) {
    for (int i = 0; i < seen_count; i++)
        if (!strcmp(seen[i].name, name)) return i;
    seen[seen_count].name = strdup(name);
    return seen_count++;
}
static int enter(const char *name, int *slot) {
    int i = *slot >= 0 ? *slot : (*slot = entry(name)), code = seen[i].fail;
    seen[i].calls++;
    seen[i].fail = 0;
    return code;
}
void stub_fail(const char *name, int code) { seen[entry(name)].fail = code; }
int stub_calls(const char *name) { return seen[entry(name)].calls; }
__attribute__((constructor)) static void begin(void) {
    if (getenv("STUB_CUDA_VERSION")) driver_version = atoi(getenv("STUB_CUDA_VERSION"));
}
void stub_set(int version, int device_count) { driver_version = version; devices = device_count; }

#define ENTERED ({ static int slot_ = -1; enter(__func__, &slot_); })
#define ENTER do { int code_ = ENTERED; if (code_) return code_; } while (0)
#define CALL(name, ...) int name(__VA_ARGS__)
#define NOTHING(name, ...) CALL(name, __VA_ARGS__) { ENTER; return 0; }

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags, int *status) {
    H self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    (void)flags;
    *function = version <= driver_version ? dlsym(self, name) : NULL;
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : NO_FUNCTION;
}
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    return cuGetProcAddress(name, function, version, flags, status);
}

/* ---- tensor maps: the address first, as devices have it ---- */
CALL(cuTensorMapEncodeTiled, uint64_t *map, int type, U axes, uint64_t address, const uint64_t *sizes,
     const uint64_t *steps, const U *box, const U *every, int interleave, int swizzle, int promotion,
     int fill) {
    ENTER;
    if ((uintptr_t)map % 64) return INVALID_VALUE;
    memset(map, 0, 128);
    map[0] = address;
    map[1] = type | axes << 8 | interleave << 16 | swizzle << 20 | promotion << 24 | fill << 28;
    for (U i = 0; i < axes; i++) {
        map[2 + i] = sizes[i];
        if (i) map[6 + i] = steps[i - 1];
        map[11] |= (uint64_t)box[i] << 10 * i;
        map[12] |= (uint64_t)every[i] << 10 * i;
    }
    return 0;
}

/* ---- device ---- */
NOTHING(cuInit, U flags)
/* NVRTC looks for this one and takes no for an answer */
CALL(cuGetExportTable, void **table, const void *id) { return UNSUPPORTED; }
CALL(cuDriverGetVersion, int *version) { ENTER; *version = driver_version; return 0; }
CALL(cuDeviceGetCount, int *count) { ENTER; *count = devices; return 0; }
CALL(cuDeviceGet, int *device, int ordinal) { ENTER; *device = ordinal; return 0; }
CALL(cuDeviceGetName, char *name, int size, int d) { ENTER; strncpy(name, "Stub", size); return 0; }
CALL(cuDeviceTotalMem, Z *bytes, int d) { ENTER; *bytes = 1 << 30; return 0; }
CALL(cuDeviceGetAttribute, int *value, int which, int d) { ENTER; *value = which == 75 ? 9 : which == 16 ? 132 : 0; return 0; }
CALL(cuDevicePrimaryCtxRetain, H *context, int d) { ENTER; *context = (H)(Z)(0x1000 + d); return 0; }
CALL(cuCtxGetCurrent, H *context) { ENTER; *context = current_context; return 0; }
CALL(cuCtxSetCurrent, H context) { ENTER; current_context = context; return 0; }
CALL(cuCtxGetId, H context, uint64_t *id) { ENTER; *id = (Z)context - 0xfff; return 0; }
NOTHING(cuCtxSynchronize, void)
CALL(cuMemGetInfo, Z *free_, Z *total) { ENTER; *free_ = 1 << 20; *total = 1 << 30; return 0; }
CALL(cuGetErrorName, int code, const char **name) { ENTER; *name = "CUDA_ERROR_STUB"; return 0; }
CALL(cuGetErrorString, int code, const char **text) { ENTER; *text = "stub sentence"; return 0; }

/* ---- streams, events ---- */
CALL(cuStreamCreateWithPriority, Stream **stream, U flags, int priority) {
    ENTER; *stream = calloc(1, sizeof **stream); (*stream)->flags = flags; return 0;
}
CALL(cuStreamDestroy, Stream *stream) { ENTER; free(stream); return 0; }
NOTHING(cuStreamSynchronize, H stream)
NOTHING(cuStreamQuery, H stream)
CALL(cuStreamGetFlags, Stream *stream, U *flags) { ENTER; *flags = stream->flags; return 0; }
CALL(cuStreamIsCapturing, Stream *stream, int *status) { ENTER; *status = stream->status; return 0; }
CALL(cuStreamGetDevice, H stream, int *device) { ENTER; *device = 0; return 0; }
NOTHING(cuStreamWaitEvent, H stream, H event, U flags)
CALL(cuEventCreate, H *event, U flags) { ENTER; *event = malloc(8); return 0; }
CALL(cuEventDestroy, H event) { ENTER; free(event); return 0; }
NOTHING(cuEventRecordWithFlags, H event, H stream, U flags)
NOTHING(cuEventSynchronize, H event)
NOTHING(cuEventQuery, H event)
CALL(cuEventElapsedTime, float *ms, H start, H end) { ENTER; *ms = 1.5f; return 0; }

/* ---- memory ---- */
static int add_block(void **address, Z size) {
    if (!size) return INVALID_VALUE;
    for (int i = 0; i < MAX; i++)
        if (!blocks[i].start) {
            *address = blocks[i].start = calloc(1, size);
            blocks[i].size = size;
            blocks[i].id = next_block++;
            return 0;
        }
    return 2;
}
static int drop_block(void *address) {
    for (int i = 0; i < MAX; i++)
        if (address && blocks[i].start == address) {
            free(address);
            blocks[i].start = NULL;
            return 0;
        }
    return INVALID_VALUE;
}
CALL(cuMemAlloc, void **address, Z size) { ENTER; return add_block(address, size); }
CALL(cuMemFree, void *address) { ENTER; return drop_block(address); }
CALL(cuMemHostAlloc, void **address, Z size, U flags) { ENTER; return add_block(address, size); }
CALL(cuMemFreeHost, void *address) { ENTER; return drop_block(address); }
#define MOVE(name, ...) CALL(name, void *to, void *from, Z size __VA_ARGS__) \
    { ENTER; memmove(to, from, size); return 0; }
MOVE(cuMemcpyAsync, , H stream)
MOVE(cuMemcpyDtoDAsync, , H stream)
MOVE(cuMemcpyHtoDAsync, , H stream)
MOVE(cuMemcpyDtoHAsync, , H stream)
MOVE(cuMemcpyDtoH)
MOVE(cuMemcpyHtoD)
NOTHING(cuMemcpy3DAsync, void *copy, H stream)
#define FILL(bits, type) \
    CALL(cuMemsetD##bits##Async, type *to, type value, Z count, H stream) \
    { ENTER; for (Z i = 0; i < count; i++) to[i] = value; return 0; } \
    CALL(cuMemsetD2D##bits##Async, char *to, Z pitch, type value, Z width, Z height, H stream) { \
        ENTER; \
        for (Z y = 0; y < height; y++) \
            for (Z x = 0; x < width; x++) ((type *)(to + y * pitch))[x] = value; \
        return 0; \
    }
FILL(8, unsigned char)
FILL(16, unsigned short)
FILL(32, U)
CALL(cuPointerGetAttributes, U count, int *which, void **data, char *address) {
    ENTER;
    for (U k = 0; k < count; k++) {
        uint64_t value = 0;
        for (int i = 0; i < MAX; i++)
            if (blocks[i].start && address >= blocks[i].start
                && address < blocks[i].start + blocks[i].size)
                value = which[k] == 11 ? (Z)blocks[i].start : which[k] == 12 ? blocks[i].size
                      : which[k] == 7 ? blocks[i].id : which[k] == 2 ? 2 : 0;
        memcpy(data[k], &value, which[k] == 11 || which[k] == 12 || which[k] == 7 ? 8 : 4);
    }
    return 0;
}

/* ---- functions: each takes two pointers and an int ---- */
CALL(cuModuleLoadData, H *module, const void *image) { ENTER; *module = malloc(8); return 0; }
CALL(cuModuleGetFunction, H *function, H module, const char *name) {
    ENTER; *function = strdup(name); return 0;
}
CALL(cuFuncGetName, const char **name, H function) { ENTER; *name = function; return 0; }
CALL(cuFuncGetModule, H *module, H function) { ENTER; *module = (H)0x77; return 0; }
CALL(cuFuncGetParamInfo, H function, Z index, Z *offset, Z *size) {
    ENTER;
    if (index >= ARGUMENTS) return INVALID_VALUE;
    *offset = offsets[index];
    if (size) *size = sizes[index];
    return 0;
}
CALL(cuFuncGetAttribute, int *value, int which, H function) { ENTER; *value = 0; return 0; }
NOTHING(cuFuncSetAttribute, H function, int which, int value)
CALL(cuKernelGetFunction, H *function, H kernel) { ENTER; *function = kernel; return 0; }

/* ---- graphs ---- */
static Node *new_node(Graph *graph, U type, Node **before, const EdgeData *data, Z count) {
    Node *node = calloc(1, sizeof *node);
    node->type = type;
    node->graph = graph;
    node->enabled = 1;
    graph->nodes[graph->node_count++] = node;
    for (Z i = 0; i < count; i++) {
        graph->from[graph->edge_count] = before[i];
        graph->to[graph->edge_count] = node;
        if (data) graph->data[graph->edge_count] = data[i];
        graph->edge_count++;
    }
    return node;
}
static void set_kernel(Node *node, const Kernel *kernel) {
    node->kernel = *kernel;
    for (int i = 0; i < ARGUMENTS; i++) {
        memcpy(node->bytes[i], kernel->params[i], sizes[i]);
        node->pointers[i] = node->bytes[i];
    }
    node->kernel.params = node->pointers;
}
static void drop_objects(Graph *graph) {
    for (Z i = 0; i < graph->object_count; i++) {
        UserObject *object = graph->objects[i];
        if (!--object->references) { object->destroy(object->data); free(object); }
    }
}
static Graph *copy_graph(Graph *source) {
    Graph *copy = malloc(sizeof *copy);
    *copy = *source;
    for (Z i = 0; i < copy->object_count; i++) copy->objects[i]->references++;
    for (Z i = 0; i < copy->node_count; i++) {
        copy->nodes[i] = malloc(sizeof(Node));
        *copy->nodes[i] = *source->nodes[i];
        copy->nodes[i]->graph = copy;
        if (copy->nodes[i]->type == KERNEL) {
            void *params[ARGUMENTS];
            Kernel kernel = copy->nodes[i]->kernel;
            for (int k = 0; k < ARGUMENTS; k++) params[k] = source->nodes[i]->bytes[k];
            kernel.params = params;
            set_kernel(copy->nodes[i], &kernel);
        }
    }
    return copy;
}
CALL(cuGraphCreate, Graph **graph, U flags) { ENTER; *graph = calloc(1, sizeof **graph); return 0; }
CALL(cuGraphDestroy, Graph *graph) { ENTER; drop_objects(graph); return 0; }
CALL(cuGraphClone, Graph **clone, Graph *graph) { ENTER; *clone = copy_graph(graph); return 0; }
CALL(cuGraphDestroyNode, Node *node) {
    ENTER;
    Graph *graph = node->graph;
    for (Z i = 0; i < graph->node_count; i++)
        if (graph->nodes[i] == node) graph->nodes[i] = graph->nodes[--graph->node_count];
    return 0;
}
#define ADD(name, kind, param, body) \
    CALL(name, Node **out, Graph *graph, Node **before, Z count, param) \
    { ENTER; Node *node = new_node(graph, kind, before, NULL, count); body; *out = node; return 0; }
#define COMMA ,
ADD(cuGraphAddKernelNode, KERNEL, Kernel *params, set_kernel(node, params))
ADD(cuGraphAddMemcpyNode, MEMCPY, void *params COMMA H ctx, memcpy(node->copy, params, 200))
ADD(cuGraphAddMemsetNode, MEMSET, void *params COMMA H ctx, memcpy(node->fill, params, 40))
ADD(cuGraphAddHostNode, HOST, Host *params, node->host = *params)
ADD(cuGraphAddChildGraphNode, CHILD, Graph *child, node->handle = copy_graph(child))
ADD(cuGraphAddEventRecordNode, RECORD_EVENT, H event, node->handle = event)
ADD(cuGraphAddEventWaitNode, WAIT_EVENT, H event, node->handle = event)
ADD(cuGraphAddMemFreeNode, FREE, H address, node->handle = address)
CALL(cuGraphAddEmptyNode, Node **out, Graph *graph, Node **before, Z count) {
    ENTER; *out = new_node(graph, EMPTY, before, NULL, count); return 0;
}
CALL(cuGraphAddMemAllocNode, Node **out, Graph *graph, Node **before, Z count, char *params) {
    ENTER;
    *out = new_node(graph, ALLOC, before, NULL, count);
    add_block((void **)(params + 112), *(Z *)(params + 104));
    memcpy((*out)->alloc, params, 120);
    return 0;
}
CALL(cuGraphAddNode, Node **out, Graph *graph, Node **before, EdgeData *data, Z count,
     NodeParams *params) {
    ENTER;
    if (params->type != CONDITIONAL) return UNSUPPORTED;
    Node *node = *out = new_node(graph, CONDITIONAL, before, data, count);
    for (U i = 0; i < params->conditional.size; i++) node->bodies[i] = calloc(1, sizeof(Graph));
    params->conditional.bodies = node->bodies;
    node->conditional = params->conditional;
    return 0;
}
CALL(cuGraphNodeGetParams, Node *node, NodeParams *params) {
    ENTER; params->type = node->type; params->conditional = node->conditional; return 0;
}
CALL(cuGraphConditionalHandleCreate, uint64_t *handle, Graph *graph, H ctx, U value, U flags) {
    ENTER; *handle = 0x100 + value * 2 + flags; return 0;
}
CALL(cuGraphAddDependencies, Graph *graph, Node **from, Node **to, EdgeData *data, Z count) {
    ENTER;
    for (Z i = 0; i < count; i++, graph->edge_count++) {
        /* as the driver does: what came before a wrong edge stays */
        for (Z k = 0; k < graph->edge_count; k++)
            if (graph->from[k] == from[i] && graph->to[k] == to[i]) return INVALID_VALUE;
        graph->from[graph->edge_count] = from[i];
        graph->to[graph->edge_count] = to[i];
        graph->data[graph->edge_count] = data ? data[i] : (EdgeData){0};
    }
    return 0;
}
CALL(cuGraphRemoveDependencies, Graph *graph, Node **from, Node **to, EdgeData *data, Z count) {
    ENTER;
    for (Z i = 0; i < count; i++)
        for (Z k = 0; k < graph->edge_count; k++)
            if (graph->from[k] == from[i] && graph->to[k] == to[i]) {
                Z last = --graph->edge_count;
                graph->from[k] = graph->from[last];
                graph->to[k] = graph->to[last];
                graph->data[k] = graph->data[last];
            }
    return 0;
}
CALL(cuGraphGetNodes, Graph *graph, Node **nodes, Z *count) {
    ENTER;
    for (Z i = 0; nodes && i < *count; i++) nodes[i] = i < graph->node_count ? graph->nodes[i] : NULL;
    *count = graph->node_count;
    return 0;
}
CALL(cuGraphGetEdges, Graph *graph, Node **from, Node **to, EdgeData *data, Z *count) {
    ENTER;
    /* not in the order in which they were added */
    for (Z i = 0; from && i < graph->edge_count && i < *count; i++) {
        Z k = graph->edge_count - 1 - i;
        from[i] = graph->from[k];
        to[i] = graph->to[k];
        if (data) data[i] = graph->data[k];
    }
    *count = graph->edge_count;
    return 0;
}
CALL(cuGraphNodeGetDependencies, Node *node, Node **sources, EdgeData *data, Z *count) {
    ENTER;
    Z found = 0;
    for (Z k = 0; k < node->graph->edge_count; k++) {
        if (node->graph->to[k] != node) continue;
        if (sources && found < *count) {
            sources[found] = node->graph->from[k];
            if (data) data[found] = node->graph->data[k];
        }
        found++;
    }
    *count = found;
    return 0;
}
CALL(cuGraphNodeGetType, Node *node, U *type) { ENTER; *type = node->type; return 0; }
#define BOTH(get, set, type, read, write) \
    CALL(get, Node *node, type *params) { ENTER; read; return 0; } \
    CALL(set, Node *node, type *params) { ENTER; write; return 0; }
BOTH(cuGraphKernelNodeGetParams, cuGraphKernelNodeSetParams, Kernel, *params = node->kernel,
     set_kernel(node, params))
BOTH(cuGraphMemcpyNodeGetParams, cuGraphMemcpyNodeSetParams, void, memcpy(params, node->copy, 200),
     memcpy(node->copy, params, 200))
BOTH(cuGraphMemsetNodeGetParams, cuGraphMemsetNodeSetParams, void, memcpy(params, node->fill, 40),
     memcpy(node->fill, params, 40))
BOTH(cuGraphHostNodeGetParams, cuGraphHostNodeSetParams, Host, *params = node->host,
     node->host = *params)
#define GET(name) CALL(name, Node *node, H *handle) { ENTER; *handle = node->handle; return 0; }
GET(cuGraphChildGraphNodeGetGraph)
GET(cuGraphEventRecordNodeGetEvent)
GET(cuGraphEventWaitNodeGetEvent)
GET(cuGraphMemFreeNodeGetParams)
CALL(cuGraphEventRecordNodeSetEvent, Node *node, H event) { ENTER; node->handle = event; return 0; }
CALL(cuGraphEventWaitNodeSetEvent, Node *node, H event) { ENTER; node->handle = event; return 0; }
CALL(cuGraphMemAllocNodeGetParams, Node *node, void *params) {
    ENTER; memcpy(params, node->alloc, 120); return 0;
}
CALL(cuGraphKernelNodeGetAttribute, Node *node, int which, void *value) {
    ENTER; memcpy(value, node->attributes[which], 64); return 0;
}
CALL(cuGraphKernelNodeSetAttribute, Node *node, int which, void *value) {
    ENTER; memcpy(node->attributes[which], value, 64); return 0;
}
CALL(cuGraphKernelNodeCopyAttributes, Node *to, Node *from) {
    ENTER; memcpy(to->attributes, from->attributes, sizeof to->attributes); return 0;
}
CALL(cuUserObjectCreate, UserObject **out, void *data, void (*destroy)(void *), U count, U flags) {
    ENTER; *out = malloc(sizeof **out); **out = (UserObject){(int)count, destroy, data}; return 0;
}
CALL(cuGraphRetainUserObject, Graph *graph, UserObject *object, U count, U flags) {
    ENTER; graph->objects[graph->object_count++] = object; return 0;
}

/* ---- launches and capture ---- */
static Node *captured(Stream *stream, U type) {
    if (!stream || (Z)stream <= 2 || stream->status != 1) return NULL;
    Node *node = new_node(stream->graph, type, stream->frontier, NULL, stream->frontier_count);
    stream->frontier[0] = node;
    stream->frontier_count = 1;
    return node;
}
CALL(cuLaunchKernelEx, LaunchConfig *config, H function, void **params, void **extra) {
    ENTER;
    stub_launch = *config;
    for (U i = 0; i < config->count; i++) stub_attributes[i] = config->attrs[i];
    for (int i = 0; i < ARGUMENTS; i++) memcpy(stub_arguments[i], params[i], sizes[i]);
    Node *node = captured(config->stream, KERNEL);
    if (node) {
        Kernel kernel = {.func = function, .shared = config->shared, .params = params};
        memcpy(kernel.grid, config->grid, sizeof kernel.grid);
        memcpy(kernel.block, config->block, sizeof kernel.block);
        set_kernel(node, &kernel);
        for (U i = 0; i < config->count; i++)
            memcpy(node->attributes[config->attrs[i].type], config->attrs[i].value, 64);
    }
    return 0;
}
CALL(cuLaunchHostFunc, H stream, void (*fn)(void *), void *data) { ENTER; fn(data); return 0; }
CALL(cuStreamBeginCapture, Stream *stream, int mode) {
    ENTER;
    stream->status = 1;
    stream->id = next_capture++;
    stream->graph = calloc(1, sizeof(Graph));
    stream->frontier_count = 0;
    return 0;
}
CALL(cuStreamBeginCaptureToGraph, Stream *stream, Graph *graph, Node **nodes, EdgeData *data,
     Z count, int mode) {
    ENTER;
    stream->status = 1;
    stream->id = next_capture++;
    stream->graph = graph;
    stream->frontier_count = 0;
    return 0;
}
CALL(cuStreamEndCapture, Stream *stream, Graph **graph) {
    int code = ENTERED;
    stream->status = 0;
    *graph = code ? NULL : stream->graph;
    return code;
}
CALL(cuStreamGetCaptureInfo, Stream *stream, int *status, uint64_t *id, Graph **graph,
     Node ***nodes, EdgeData **data, Z *count) {
    static EdgeData none[8];
    ENTER;
    *status = (Z)stream > 2 ? stream->status : 0;
    if (!*status) return 0;
    if (id) *id = stream->id;
    if (graph) *graph = stream->graph;
    if (nodes) *nodes = stream->frontier;
    if (data) *data = none;
    if (count) *count = stream->frontier_count;
    return 0;
}
CALL(cuStreamUpdateCaptureDependencies, Stream *stream, Node **nodes, EdgeData *data, Z count,
     U flags) {
    ENTER;
    if (flags != 1) return INVALID_VALUE;
    for (Z i = 0; i < count; i++) stream->frontier[i] = nodes[i];
    stream->frontier_count = count;
    return 0;
}
CALL(cuThreadExchangeStreamCaptureMode, int *mode) {
    ENTER; int before = mode_now; mode_now = *mode; *mode = before; return 0;
}

/* ---- executables: a copy of the graph ---- */
typedef struct { uint64_t flags; H upload; Node *node; int result; } Instantiate;
typedef struct { int result; Node *node, *from; } UpdateInfo;
CALL(cuGraphInstantiateWithParams, Graph **exec, Graph *graph, Instantiate *params) {
    int code = ENTERED;
    params->node = code ? graph->nodes[0] : NULL;
    params->result = code ? 4 : 0;
    if (!code) *exec = copy_graph(graph);
    return code;
}
CALL(cuGraphExecDestroy, Graph *exec) { ENTER; drop_objects(exec); return 0; }
CALL(cuGraphLaunch, Graph *exec, H stream) {
    ENTER;
    for (Z i = 0; i < exec->node_count; i++) {
        Node *node = exec->nodes[i];
        if (node->type == HOST) node->host.fn(node->host.data);
    }
    return 0;
}
NOTHING(cuGraphUpload, H exec, H stream)
CALL(cuGraphExecUpdate, Graph *exec, Graph *graph, UpdateInfo *info) {
    ENTER;
    if (exec->node_count != graph->node_count) {
        *info = (UpdateInfo){2, NULL, NULL};
        return UPDATE_FAILURE;
    }
    for (Z i = 0; i < graph->node_count; i++)
        if (graph->nodes[i]->type != exec->nodes[i]->type) {
            *info = (UpdateInfo){3, graph->nodes[i], graph->nodes[0]};
            return UPDATE_FAILURE;
        }
    *info = (UpdateInfo){0, NULL, NULL};
    return 0;
}
static Node *in_exec(Graph *exec, Node *node) {
    for (Z i = 0; i < node->graph->node_count; i++)
        if (node->graph->nodes[i] == node) return exec->nodes[i];
    abort();
}
#define EXEC_SET(name, param, body) \
    CALL(name, Graph *exec, Node *source, param) \
    { ENTER; Node *node = in_exec(exec, source); body; return 0; }
EXEC_SET(cuGraphExecKernelNodeSetParams, Kernel *params, set_kernel(node, params))
EXEC_SET(cuGraphExecMemcpyNodeSetParams, void *params COMMA H ctx, memcpy(node->copy, params, 200))
EXEC_SET(cuGraphExecMemsetNodeSetParams, void *params COMMA H ctx, memcpy(node->fill, params, 40))
EXEC_SET(cuGraphExecHostNodeSetParams, Host *params, node->host = *params)
EXEC_SET(cuGraphExecChildGraphNodeSetParams, Graph *child, node->handle = copy_graph(child))
EXEC_SET(cuGraphExecEventRecordNodeSetEvent, H event, node->handle = event)
EXEC_SET(cuGraphExecEventWaitNodeSetEvent, H event, node->handle = event)
EXEC_SET(cuGraphNodeSetEnabled, U enabled, node->enabled = (int)enabled)
CALL(cuGraphNodeGetEnabled, Graph *exec, Node *node, U *enabled) {
    ENTER; *enabled = (U)in_exec(exec, node)->enabled; return 0;
}
/* the n-th kernel node of an executable, for tests that look at what an update wrote */
const char *stub_exec_argument(Graph *exec, int node, int index) {
    return exec->nodes[node]->bytes[index];
}
