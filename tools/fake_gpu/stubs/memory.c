/* Device memory: mapped host memory without pages, until a copy or memset touches it. Those of up to MOVED bytes move bytes, longer
 * ones are in the log alone: the weights of an 8B model need no memory of the machine. */
#define _GNU_SOURCE
#include "fake_gpu.h"
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#define MOVED (4ul << 20)

size_t fake_allocated; /* bytes; read by recorder.py */

static struct { char *start; size_t size; int device; } *blocks;
static int count, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

cudaError_t cudaMalloc(void **found, size_t bytes) {
    size_t size = (bytes + 4095) & ~4095ul;
    pthread_mutex_lock(&lock);
    cudaError_t said = cudaErrorMemoryAllocation;
    if (fake_allocated + size <= FAKE_MEMORY) {
        *found = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (*found != MAP_FAILED) {
            if (count == room) blocks = realloc(blocks, (room = 2 * room + 1024) * sizeof *blocks);
            blocks[count].start = *found, blocks[count].device = fake_device(), blocks[count++].size = size;
            fake_allocated += size;
            said = cudaSuccess;
        }
    }
    pthread_mutex_unlock(&lock);
    return said;
}

cudaError_t cudaFree(void *start) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++)
        if (blocks[i].start == start) {
            munmap(start, blocks[i].size);
            fake_allocated -= blocks[i].size;
            blocks[i] = blocks[--count];
            break;
        }
    pthread_mutex_unlock(&lock);
    return 0;
}

/* The device of an address; -1 of the host's. */
static int device_of(const void *p) {
    int found = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count && found < 0; i++)
        if ((char *)p >= blocks[i].start && (char *)p < blocks[i].start + blocks[i].size) found = blocks[i].device;
    pthread_mutex_unlock(&lock);
    return found;
}

cudaError_t cudaMallocAsync(void **found, size_t bytes, cudaStream_t stream) { return cudaMalloc(found, bytes); }
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    *total = FAKE_MEMORY, *left = FAKE_MEMORY - fake_allocated;
    return 0;
}

/* Pinned memory: torch asks which kind a pointer is, so that its blocks are remembered too. */
static struct { char *start; size_t size; } pinned[1 << 14];
static int pins;

cudaError_t cudaHostAlloc(void **found, size_t bytes, unsigned flags) {
    size_t size = (bytes + 4095) & ~4095ul;
    *found = aligned_alloc(4096, size);
    if (pins < 1 << 14) pinned[pins].start = *found, pinned[pins++].size = size;
    return 0;
}

cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned flags) {
    if (pins < 1 << 14) pinned[pins].start = start, pinned[pins++].size = bytes;
    return 0;
}

cudaError_t cudaHostUnregister(void *start) {
    for (int i = 0; i < pins; i++)
        if (pinned[i].start == start) {
            pinned[i] = pinned[--pins];
            break;
        }
    return 0;
}

cudaError_t cudaFreeHost(void *start) {
    cudaHostUnregister(start);
    free(start);
    return 0;
}

static int is_pinned(const void *p) {
    for (int i = 0; i < pins; i++)
        if ((char *)p >= pinned[i].start && (char *)p < pinned[i].start + pinned[i].size) return 1;
    return 0;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *p) {
    memset(found, 0, sizeof *found);
    int device = device_of(p);
    if (device >= 0) found->type = cudaMemoryTypeDevice, found->devicePointer = (void *)p, found->device = device;
    else found->type = is_pinned(p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered, found->hostPointer = (void *)p;
    return 0;
}

/* Copies: "H" pageable host memory, "P" pinned, "D" the device. */
static char side(const void *p) { return device_of(p) >= 0 ? 'D' : is_pinned(p) ? 'P' : 'H'; }

static cudaError_t copied(void *to, const void *from, size_t bytes, cudaStream_t stream) {
    char what[64];
    snprintf(what, sizeof what, "%c2%c %zu%s", side(from), side(to), bytes, stream ? " on another stream" : "");
    fake_request("C", what);
    if (bytes <= MOVED) memmove(to, from, bytes);
    return 0;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    fake_request("S", "cudaMemcpy");
    return copied(to, from, bytes, 0);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copied(to, from, bytes, stream);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, cudaStream_t stream) {
    return copied(to, from, bytes, stream);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    fake_request("C", "2D");
    return 0;
}

cudaError_t cudaMemsetAsync(void *start, int value, size_t bytes, cudaStream_t stream) {
    char what[32];
    snprintf(what, sizeof what, "%zu", bytes);
    fake_request("M", what);
    if (bytes <= MOVED) memset(start, value, bytes);
    return 0;
}

cudaError_t cudaMemset(void *start, int value, size_t bytes) { return cudaMemsetAsync(start, value, bytes, 0); }

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (void *)8;
    return 0;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(long *)value = 0;
    return 0;
}

cudaError_t cudaGetSymbolAddress(void **found, const void *symbol) {
    *found = calloc(1, 65536);
    return 0;
}
