/* Log of requests: every launch, copy, memset and wait of a program or a stream, a line each while fake_recording is set.
 *
 *     K <mangled name>   a kernel of torch        T <name>    a Triton kernel      G <function>   a product of cuBLAS
 *     C D2H <bytes>      a copy, by direction     M <bytes>   a memset             S <function>   the host waits
 *     N <function> <count> <dtype>, <ranks> ranks      a collective, a send or a receive of NCCL
 *     E <function>       a stream waits for an event; behind a copy stands "on another stream" where it is not on the default one
 *
 * Python reads the four variables below by name (recorder.py). fake_observer is called on the thread that asks, for the kinds in
 * fake_observed alone: a kernel is launched with locks of torch held now and then, and a call into Python waits for its lock. */
#define _GNU_SOURCE
#include "fake_gpu.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int fake_recording;
char fake_observed[8];
void (*fake_observer)(const char *kind, const char *what);

static char *text;
static size_t used, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fake_request(const char *kind, const char *what) {
    if (!fake_recording) return;
    pthread_mutex_lock(&lock);
    size_t needed = used + strlen(kind) + strlen(what) + 3;
    if (needed > room) text = realloc(text, room = 2 * needed + 65536);
    used += sprintf(text + used, "%s %s\n", kind, what);
    pthread_mutex_unlock(&lock);
    if (fake_observer && strstr(fake_observed, kind)) fake_observer(kind, what);
}

void fake_clear(void) { used = 0; }

const char *fake_requests(void) { return used ? text : ""; }
