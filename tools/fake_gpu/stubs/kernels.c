/* Kernels of torch: registered by name as its libraries are loaded, and launched, which does nothing but stand in the log. */
#include "fake_gpu.h"
#include <cuda_runtime_api.h>

/* Names by the host function that stands for a kernel: an open hash table. torch 2.11 registers about 60,000. */
#define SLOTS (1u << 18)
static struct { const void *host; const char *name; } kernels[SLOTS];

static unsigned slot_of(const void *host) {
    unsigned i = ((unsigned long)host * 0x9E3779B97F4A7C15ul) >> 46;
    while (kernels[i].host && kernels[i].host != host) i = (i + 1) % SLOTS;
    return i;
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}

char __cudaInitModule(void **handle) { return 1; }

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *thread, void *block,
                            void *block_dim, void *grid_dim, int *warp_size) {
    unsigned i = slot_of(host);
    kernels[i].host = host, kernels[i].name = name;
}

/* <<<grid, block>>> pushes its configuration and the host function pops it. */
static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed[16];
static __thread int depth;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed[depth].grid = grid, pushed[depth].block = block, pushed[depth].shared = shared, pushed[depth].stream = stream;
    depth++;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    depth--;
    *grid = pushed[depth].grid, *block = pushed[depth].block, *shared = pushed[depth].shared;
    *(void **)stream = pushed[depth].stream;
    return 0;
}

static cudaError_t launch(const void *host) {
    const char *name = kernels[slot_of(host)].name;
    fake_request("K", name ? name : "?");
    return 0;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    *kernel = (cudaKernel_t)host;
    return 0;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return launch((const void *)kernel);
}

cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return launch(host);
}

cudaError_t cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return launch(host);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **args) { return launch(host); }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *host) {
    *found = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90,
                                         .maxDynamicSharedSizeBytes = 232448};
    return 0;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int size, size_t shared) {
    *blocks = 2;
    return 0;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int size, size_t shared, unsigned flags) {
    *blocks = 2;
    return 0;
}
