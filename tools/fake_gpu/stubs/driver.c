/* libcuda.so.1, the driver, as far as Triton, torch and Transformer Engine call it: a module is a number, a function its name, a launch a request. */
#include "fake_gpu.h"
#include <cuda.h>
#include <string.h>
#undef cuDevicePrimaryCtxRelease
#undef cuStreamGetCtx

#define HANDLE ((void *)16)
#define ANSWERS(name, parameters, ...) CUresult name parameters { __VA_ARGS__; return 0; }
ANSWERS(cuDriverGetVersion, (int *version), *version = 13000)
ANSWERS(cuDeviceGetCount, (int *count), *count = fake_devices())
ANSWERS(cuDeviceGet, (CUdevice *device, int i), *device = i)
ANSWERS(cuDeviceGetAttribute, (int *value, CUdevice_attribute a, CUdevice device), *value = fake_attribute(a))
ANSWERS(cuCtxGetCurrent, (CUcontext *context), *context = HANDLE)
ANSWERS(cuCtxGetDevice, (CUdevice *device), *device = fake_device())
ANSWERS(cuCtxGetLimit, (size_t *value, CUlimit limit), *value = 0)
ANSWERS(cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device), *context = HANDLE)
ANSWERS(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active), *flags = 0, *active = 1)
ANSWERS(cuDevicePrimaryCtxRelease, (CUdevice device), )
ANSWERS(cuGetErrorString, (CUresult error, const char **text), *text = "fake driver error")
ANSWERS(cuPointerGetAttribute, (void *value, CUpointer_attribute a, CUdeviceptr p), *(void **)value = (void *)p)
ANSWERS(cuMemGetAddressRange, (CUdeviceptr *start, size_t *size, CUdeviceptr p), *start = p, *size = 1 << 30)
ANSWERS(cuStreamGetCtx, (CUstream stream, CUcontext *context), *context = HANDLE)
ANSWERS(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *status), *status = 0)
ANSWERS(cuModuleLoad, (CUmodule *module, const char *file), *module = HANDLE)
ANSWERS(cuModuleLoadData, (CUmodule *module, const void *image), *module = HANDLE)
ANSWERS(cuModuleLoadDataEx, (CUmodule *module, const void *image, unsigned n, CUjit_option *o, void **v), *module = HANDLE)
ANSWERS(cuModuleGetFunction, (CUfunction *f, CUmodule module, const char *name), *f = (CUfunction)strdup(name))
ANSWERS(cuLibraryLoadData, (CUlibrary *library, const void *code, CUjit_option *o, void **v, unsigned n, CUlibraryOption *lo, void **lv,
                            unsigned ln), *library = HANDLE)
ANSWERS(cuLibraryGetKernel, (CUkernel *kernel, CUlibrary library, const char *name), *kernel = (CUkernel)strdup(name))
ANSWERS(cuKernelGetFunction, (CUfunction *f, CUkernel kernel), *f = (CUfunction)kernel)
ANSWERS(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *blocks, CUfunction f, int size, size_t shared), *blocks = 2)
ANSWERS(cuOccupancyMaxActiveClusters, (int *clusters, CUfunction f, const CUlaunchConfig *config), *clusters = 66)
ANSWERS(cuFuncGetAttribute, (int *value, CUfunction_attribute a, CUfunction f),
        *value = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0)
ANSWERS(cuLaunchKernel, (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                         CUstream stream, void **args, void **extra), fake_request("T", (char *)f))
ANSWERS(cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction f, void **args, void **extra), fake_request("T", (char *)f))
ANSWERS(cuLaunchCooperativeKernel, (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                    unsigned shared, CUstream stream, void **args), fake_request("T", (char *)f))

CUresult cuGetProcAddress(const char *symbol, void **found, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *result) {
    *found = 0;
    return CUDA_ERROR_NOT_FOUND;
}
