/* Communicators of the fake NCCL: a file in shared memory for each, which is nameless once all ranks have it. */
#define _GNU_SOURCE
#include "nccl_ranks.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define RING 16 /* messages from a rank to another that wait to be taken */
enum { SYSTEM_ERROR = 2, INVALID_USAGE = 5, REMOTE_ERROR = 6 };

typedef struct { Call call; char data[MOVED]; } Message;
typedef struct { unsigned posted, taken; Message ring[RING]; } Mail;
typedef struct { unsigned asked, parted; Message message; } Place;
struct Shared { Place places[1]; /* one a rank, then the mail of each to each */ };

static char said_last[400];

static Place *place(const Comm *comm, int rank) { return &comm->shared->places[rank]; }
static Mail *mail(const Comm *comm, int from, int to) { return (Mail *)place(comm, comm->ranks) + from * comm->ranks + to; }

const void *data_of(const Comm *comm, int rank) { return place(comm, rank)->message.data; }

static void describe(char *said, size_t room, const Call *call) {
    snprintf(said, room, "%s of %zu, type %d, op %d, root or peer %d", call->name, call->count, call->type, call->op, call->root);
}

/* Wait until the counter of `rank` is at `least`. */
static int until(Comm *comm, const unsigned *counter, unsigned least, int rank, const Call *call) {
    const char *limit = getenv("FAKE_NCCL_SECONDS");
    time_t end = time(0) + (limit ? atoi(limit) : 300);
    for (unsigned spins = 0; (int)(__atomic_load_n(counter, __ATOMIC_ACQUIRE) - least) < 0; spins++) {
        if (spins > 1000) usleep(100);
        if (!comm->aborted && time(0) <= end) continue;
        char said[160];
        describe(said, sizeof said, call);
        snprintf(said_last, sizeof said_last, "fake NCCL: rank %d of %d waited for rank %d in %s", comm->rank, comm->ranks, rank, said);
        return REMOTE_ERROR;
    }
    return 0;
}

static int same(const Call *a, const Call *b) {
    return !strcmp(a->name, b->name) && a->count == b->count && a->type == b->type && a->op == b->op && a->root == b->root;
}

static int differ(Comm *comm, const Call *ours, const Call *theirs, int rank) {
    char a[160], b[160];
    describe(a, sizeof a, ours), describe(b, sizeof b, theirs);
    snprintf(said_last, sizeof said_last, "fake NCCL: rank %d of %d asks for %s, rank %d for %s", comm->rank, comm->ranks, a, rank, b);
    return INVALID_USAGE;
}

int meet(Comm *comm, const Call *call, size_t bytes) {
    unsigned number = ++comm->calls;
    for (int rank = 0, error; rank < comm->ranks; rank++) /* none reads our last data any more */
        if ((error = until(comm, &place(comm, rank)->parted, number - 1, rank, call))) return error;
    Place *own = place(comm, comm->rank);
    own->message.call = *call;
    if (bytes) memcpy(own->message.data, call->from, bytes);
    __atomic_store_n(&own->asked, number, __ATOMIC_RELEASE);
    for (int rank = 0, error; rank < comm->ranks; rank++) {
        if ((error = until(comm, &place(comm, rank)->asked, number, rank, call))) return error;
        if (!same(call, &place(comm, rank)->message.call)) return differ(comm, call, &place(comm, rank)->message.call, rank);
    }
    return 0;
}

void part(Comm *comm) { __atomic_store_n(&place(comm, comm->rank)->parted, comm->calls, __ATOMIC_RELEASE); }

int post(Comm *comm, const Call *call, size_t bytes) {
    Mail *box = mail(comm, comm->rank, call->root);
    int error = until(comm, &box->taken, box->posted + 1 - RING, call->root, call);
    if (error) return error;
    Message *message = &box->ring[box->posted % RING];
    message->call = *call;
    if (bytes <= MOVED) memcpy(message->data, call->from, bytes);
    __atomic_store_n(&box->posted, box->posted + 1, __ATOMIC_RELEASE);
    return 0;
}

int take(Comm *comm, const Call *call, size_t bytes) {
    Mail *box = mail(comm, call->root, comm->rank);
    int error = until(comm, &box->posted, box->taken + 1, call->root, call);
    if (error) return error;
    const Message *message = &box->ring[box->taken % RING];
    if (message->call.count != call->count || message->call.type != call->type) return differ(comm, call, &message->call, call->root);
    if (bytes <= MOVED) memcpy(call->to, message->data, bytes);
    __atomic_store_n(&box->taken, box->taken + 1, __ATOMIC_RELEASE);
    return 0;
}

typedef struct { char name[128]; } Id;

int ncclGetUniqueId(Id *id) {
    unsigned long random[2];
    memset(id, 0, sizeof *id);
    if (getrandom(random, sizeof random, 0) < 0) return SYSTEM_ERROR;
    sprintf(id->name, "/nccl-%016lx%08lx", random[0], random[1] & 0xffffffff);
    return 0;
}

int ncclCommInitRankConfig(Comm **made, int ranks, Id id, int rank, void *config) {
    Comm *comm = *made = calloc(1, sizeof *comm);
    comm->ranks = ranks, comm->rank = rank;
    strncpy(comm->id, id.name, sizeof comm->id - 1);
    size_t size = ranks * sizeof(Place) + (size_t)ranks * ranks * sizeof(Mail);
    int file = shm_open(comm->id, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, size)) return SYSTEM_ERROR;
    comm->shared = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (comm->shared == MAP_FAILED) return SYSTEM_ERROR;
    Call call = {.name = "ncclCommInitRank", .count = ranks};
    int error = meet(comm, &call, 0);
    part(comm);
    if (!rank) shm_unlink(comm->id);
    return error;
}

int ncclCommInitRank(Comm **made, int ranks, Id id, int rank) { return ncclCommInitRankConfig(made, ranks, id, rank, 0); }

int ncclCommInitRankScalable(Comm **made, int ranks, int rank, int n, Id *ids, void *config) {
    return ncclCommInitRankConfig(made, ranks, *ids, rank, config);
}

/* The ranks of one colour, by key, in a communicator that is named after its parent and its first rank. */
int ncclCommSplit(Comm *comm, int colour, int key, Comm **made, void *config) {
    int own[2] = {colour, key}, ranks = 0, rank = 0, first = -1;
    Call call = {.name = "ncclCommSplit", .from = own, .count = ++comm->splits};
    int error = meet(comm, &call, sizeof own);
    if (error) return error;
    for (int other = 0; other < comm->ranks; other++) {
        const int *theirs = data_of(comm, other);
        if (theirs[0] != colour) continue;
        if (first < 0) first = other;
        rank += theirs[1] < key || (theirs[1] == key && other < comm->rank), ranks++;
    }
    part(comm);
    *made = 0;
    if (colour < 0) return 0;
    Id id = {{0}};
    unsigned long hash = 14695981039346656037ul;
    for (const char *c = comm->id; *c; c++) hash = (hash ^ *c) * 1099511628211ul;
    sprintf(id.name, "/nccl-%016lx-%x-%x", hash, comm->splits, first);
    return ncclCommInitRankConfig(made, ranks, id, rank, config);
}

int ncclCommCount(const Comm *comm, int *count) { return *count = comm->ranks, 0; }
int ncclCommUserRank(const Comm *comm, int *rank) { return *rank = comm->rank, 0; }
int ncclCommGetAsyncError(Comm *comm, int *error) { return *error = 0, 0; }
int ncclCommAbort(Comm *comm) { return comm->aborted = 1, 0; }
const char *ncclGetLastError(Comm *comm) { return said_last; }

const char *ncclGetErrorString(int error) {
    return error == INVALID_USAGE ? "ranks ask for different things" : error == REMOTE_ERROR ? "a rank did not come" : "fake NCCL error";
}
