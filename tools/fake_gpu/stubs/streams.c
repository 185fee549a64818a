/* Streams and events are numbers, work on them is done as it is asked for, a pair of events is 1 ms apart. Waits stand in the log.
 * CUDA graphs are refused: the names below return cudaErrorNotSupported. */
#define _GNU_SOURCE
#include "fake_gpu.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#undef cudaStreamGetCaptureInfo
#undef cudaGraphGetNodes

static long handle = 4096;

static void *new_handle(void) { return (void *)__sync_add_and_fetch(&handle, 16); }

#define ANSWERS(name, parameters, ...) cudaError_t name parameters { __VA_ARGS__; return 0; }
ANSWERS(cudaDeviceSynchronize, (void), fake_request("S", "cudaDeviceSynchronize"))
ANSWERS(cudaStreamSynchronize, (cudaStream_t stream), fake_request("S", "cudaStreamSynchronize"))
ANSWERS(cudaEventSynchronize, (cudaEvent_t event), fake_request("S", "cudaEventSynchronize"))
ANSWERS(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags), fake_request("E", "cudaStreamWaitEvent"))
ANSWERS(cudaEventCreate, (cudaEvent_t *event), *event = new_handle())
ANSWERS(cudaEventCreateWithFlags, (cudaEvent_t *event, unsigned flags), *event = new_handle())
ANSWERS(cudaEventElapsedTime, (float *ms, cudaEvent_t a, cudaEvent_t b), *ms = 1)
ANSWERS(cudaStreamCreate, (cudaStream_t *stream), *stream = new_handle())
ANSWERS(cudaStreamCreateWithPriority, (cudaStream_t *stream, unsigned flags, int priority), *stream = new_handle())
ANSWERS(cudaStreamGetPriority, (cudaStream_t stream, int *priority), *priority = 0)
ANSWERS(cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *status), *status = 0)
ANSWERS(cudaLaunchHostFunc, (cudaStream_t stream, cudaHostFn_t function, void *data), function(data))
ANSWERS(cudaStreamAddCallback, (cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags), function(stream, 0, data))

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    if (status) *status = 0;
    return 0;
}

int fake_refuse(void) { return cudaErrorNotSupported; }
#define REFUSED(name) __asm__(".globl " #name "\n.type " #name ",@function\n.set " #name ",fake_refuse\n");
REFUSED(cudaStreamBeginCapture)
REFUSED(cudaGraphInstantiateWithFlags)
REFUSED(cudaGraphLaunch)
REFUSED(cudaGraphGetNodes)
REFUSED(cudaGraphNodeGetDependencies)
REFUSED(cudaIpcGetMemHandle)
REFUSED(cudaIpcOpenMemHandle)
REFUSED(cudaIpcGetEventHandle)
REFUSED(cudaIpcOpenEventHandle)

const char *cudaGetErrorName(cudaError_t error) { return "fake"; }

const char *cudaGetErrorString(cudaError_t error) {
    static char said[32];
    snprintf(said, sizeof said, "fake CUDA error %d", error);
    return said;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    *found = driver ? dlsym(driver, name) : 0;
    if (result) *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *found ? 0 : cudaErrorSymbolNotFound;
}
