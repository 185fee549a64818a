/* libcudnn.so.9: a graph of operations is always supported, by one engine without a workspace; running it stands in the log.
 * The version is 8.9, which torch has no attention for, unless FAKE_CUDNN says another. */
#include "fake_gpu.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HANDLE ((void *)64)
/* Of cudnn_graph.h: the results of a heuristic, how many engines there are to choose by number, and the types of numbers. */
enum { ENGINEHEUR_RESULTS = 202, ENGINE_GLOBAL_COUNT = 802, INT64 = 3, INT32 = 23 };

size_t cudnnGetVersion(void) {
    const char *version = getenv("FAKE_CUDNN");
    return version ? atoi(version) : 8900;
}

/* 0, 1 and 2: the major, the minor number and the patch. */
int cudnnGetProperty(int part, int *value) {
    size_t version = cudnnGetVersion(), major = version < 90000 ? 1000 : 10000;
    *value = part == 0 ? version / major : part == 1 ? version % major / 100 : version % 100;
    return 0;
}

int cudnnCreate(void **handle) { return *handle = HANDLE, 0; }

int cudnnGetStream(void *handle, void **stream) { return *stream = 0, 0; }

void cudnnGetLastErrorString(char *said, size_t room) { strncpy(said, "", room); }

int cudnnBackendCreateDescriptor(int type, void **descriptor) { return *descriptor = HANDLE, 0; }

/* A heuristic has one result, an engine has no notes and no knobs, other numbers are 0. */
int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t requested, int64_t *count, void *found) {
    int number = type == INT64 || type == INT32;
    if (count) *count = name == ENGINEHEUR_RESULTS || (number && requested == 1);
    if (found && type == INT64) *(int64_t *)found = name == ENGINE_GLOBAL_COUNT ? 1024 : 0;
    if (found && type == INT32) *(int32_t *)found = 0;
    return 0;
}

int cudnnBackendExecute(void *handle, void *plan, void *tensors) { return fake_request("G", "cudnnBackendExecute"), 0; }
