/* The device: an H200, or with FAKE_CC=100 in the environment a GPU of compute capability 10.0; FAKE_GPUS of them, one unless said. */
#include "fake_gpu.h"
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int major = 9, minor;
static __thread int current;

int fake_device(void) { return current; }

/* Ranks that are forked from one process have their environment later than its libraries. */
int fake_devices(void) {
    const char *devices = getenv("FAKE_GPUS");
    return devices ? atoi(devices) : 1;
}

__attribute__((constructor)) static void read_environment(void) {
    const char *capability = getenv("FAKE_CC");
    if (capability) major = atoi(capability) / 10, minor = atoi(capability) % 10;
}

int fake_attribute(int attribute) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return major;
    case cudaDevAttrComputeCapabilityMinor: return minor;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrL2CacheSize: return 62914560;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth: return 6144;
    default: return 1;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = fake_attribute(attribute);
    return 0;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, major == 9 ? "NVIDIA H200" : "NVIDIA B200");
    p->major = major, p->minor = minor, p->totalGlobalMem = FAKE_MEMORY;
    p->multiProcessorCount = 132, p->warpSize = 32, p->maxThreadsPerMultiProcessor = 2048, p->maxThreadsPerBlock = 1024;
    p->maxBlocksPerMultiProcessor = 32, p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
    p->l2CacheSize = 62914560, p->totalConstMem = 65536, p->memoryBusWidth = 6144, p->textureAlignment = 512;
    for (int i = 0; i < 3; i++) p->maxThreadsDim[i] = i < 2 ? 1024 : 64, p->maxGridSize[i] = i ? 65535 : 2147483647;
    p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = p->managedMemory = 1, p->asyncEngineCount = 3;
    return 0;
}

#define ANSWERS(name, parameters, ...) cudaError_t name parameters { __VA_ARGS__; return 0; }
ANSWERS(cudaRuntimeGetVersion, (int *version), *version = 13000)
ANSWERS(cudaDriverGetVersion, (int *version), *version = 13000)
ANSWERS(cudaGetDeviceCount, (int *count), *count = fake_devices())
ANSWERS(cudaGetDevice, (int *device), *device = current)
ANSWERS(cudaSetDevice, (int device), current = device)
ANSWERS(cudaDeviceCanAccessPeer, (int *can, int a, int b), *can = 0)
ANSWERS(cudaDeviceGetPCIBusId, (char *id, int room, int device), snprintf(id, room, "0000:%02x:00.0", device))
ANSWERS(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest), *least = 0, *greatest = -5)
