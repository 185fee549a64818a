/* libnccl.so.2 between processes of one machine, each with a fake GPU: what torch asks NCCL for, in the order in which it asks.
 *
 * A collective waits for all ranks of its communicator, and a receive for its send, on the host: an order in which a GPU may take
 * them. A send waits for nothing, while NCCL's do where they are large. Ranks that ask for different things, where NCCL would hang or
 * mix up bytes, are told so; so is one that waits for more than FAKE_NCCL_SECONDS, 300 unless said. Up to MOVED bytes of a rank
 * arrive, longer ones are in the log alone. Sums are rounded once, where NCCL's are at each rank; of float8, which NCCL adds up on
 * some GPUs alone, there are none, nor any with a factor. */
#define _GNU_SOURCE
#include "fake_gpu.h"
#include "nccl_ranks.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BF16, E4M3, E5M2 };
enum { SUM, PROD, MAX, MIN, AVG };
enum { INVALID_ARGUMENT = 4, INVALID_USAGE };
static const int bytes_of[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static const char *const names[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64",
                                    "half", "float", "double", "bfloat16", "e4m3", "e5m2"};

/* By hand: GCC has _Float16 on x86 from version 12 on. */
static double of_half(unsigned short h) {
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double size = exponent == 31 ? (mantissa ? NAN : INFINITY) : ldexp(mantissa + (exponent ? 1024 : 0), (exponent ? exponent : 1) - 25);
    return h >> 15 ? -size : size;
}

static unsigned short to_half(double value) {
    double size = fabs(value);
    int exponent, sign = signbit(value) ? 0x8000 : 0;
    if (!size) return sign;
    if (size != size) return 0x7e00;
    if (size >= 65520) return sign | 0x7c00;
    frexp(size, &exponent);
    exponent = exponent < -13 ? -13 : exponent; /* of what is below 2^-14 too */
    return sign | (int)(((exponent + 13) << 10) + nearbyint(ldexp(size, 11 - exponent)));
}

static long double number(int type, const void *p, size_t i) {
    switch (type) {
    case INT8: return ((const signed char *)p)[i];
    case UINT8: return ((const unsigned char *)p)[i];
    case INT32: return ((const int *)p)[i];
    case UINT32: return ((const unsigned *)p)[i];
    case INT64: return ((const long *)p)[i];
    case UINT64: return ((const unsigned long *)p)[i];
    case FLOAT: return ((const float *)p)[i];
    case HALF: return of_half(((const unsigned short *)p)[i]);
    case BF16: return (union { unsigned bits; float value; }){(unsigned)((const unsigned short *)p)[i] << 16}.value;
    default: return ((const double *)p)[i];
    }
}

/* To the nearest, ties to even; NaN stays one. */
static unsigned short to_bf16(float value) {
    unsigned bits = (union { float value; unsigned bits; }){value}.bits;
    return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static void set_number(int type, void *p, size_t i, long double value) {
    switch (type) {
    case INT8: case UINT8: ((char *)p)[i] = (long)value; break;
    case INT32: case UINT32: ((int *)p)[i] = (long)value; break;
    case INT64: ((long *)p)[i] = value; break;
    case UINT64: ((unsigned long *)p)[i] = value; break;
    case FLOAT: ((float *)p)[i] = value; break;
    case HALF: ((unsigned short *)p)[i] = to_half(value); break;
    case BF16: ((unsigned short *)p)[i] = to_bf16(value); break;
    default: ((double *)p)[i] = value;
    }
}

/* Numbers `first` to `first` + `count` of what every rank sent, reduced. */
static void reduce(Comm *comm, const Call *call, size_t first, void *to) {
    int type = call->type, n = comm->ranks;
    for (size_t i = 0; i < call->count; i++) {
        long double found = number(type, data_of(comm, 0), first + i);
        for (int rank = 1; rank < n; rank++) {
            long double other = number(type, data_of(comm, rank), first + i);
            if (call->op == PROD) found *= other;
            else if (call->op == MAX) found = other > found || other != other ? other : found;
            else if (call->op == MIN) found = other < found || other != other ? other : found;
            else found += other;
        }
        set_number(type, to, i, call->op == AVG ? found / n : found);
    }
}

static int is(const Call *call, const char *name) { return !strcmp(call->name, name); }

/* One collective, once all ranks are there: bytes that are sent, then what each rank makes of them. */
static int collective(Comm *comm, const Call *call) {
    int n = comm->ranks, rank = comm->rank, reduces = strstr(call->name, "Reduce") != 0;
    int parts = is(call, "ncclReduceScatter") || is(call, "ncclAlltoAll") ? n : 1, root = call->root < 0 || call->root == rank;
    size_t bytes = call->count * bytes_of[call->type], sent = bytes * parts;
    if (reduces && (call->type > BF16 || call->op > AVG)) return INVALID_ARGUMENT;
    int moves = sent <= MOVED && sent, error = meet(comm, call, moves && (root || reduces) ? sent : 0);
    if (error) return error;
    char *to = call->to;
    if (moves && reduces) {
        if (root) reduce(comm, call, parts > 1 ? rank * call->count : 0, to);
    } else if (moves && is(call, "ncclBroadcast")) {
        memcpy(to, data_of(comm, call->root), bytes);
    } else if (moves) { /* ncclAllGather, ncclAlltoAll */
        for (int from = 0; from < n; from++)
            memcpy(to + from * bytes, (const char *)data_of(comm, from) + (parts > 1 ? rank * bytes : 0), bytes);
    }
    part(comm);
    return 0;
}

static int run(Comm *comm, const Call *call) {
    size_t bytes = call->count * bytes_of[call->type];
    if (is(call, "ncclSend")) return post(comm, call, bytes);
    if (is(call, "ncclRecv")) return take(comm, call, bytes);
    return collective(comm, call);
}

/* Calls between ncclGroupStart and ncclGroupEnd are one: nothing waits before the end, and sends go first. */
static __thread struct { Comm *comm; Call call; } group[4096];
static __thread int depth, grouped;

int ncclGroupStart(void) { return depth++, 0; }

int ncclGroupEnd(void) {
    if (--depth) return 0;
    int error = 0, n = grouped;
    grouped = 0;
    for (int sends = 1; sends >= 0; sends--)
        for (int i = 0; i < n && !error; i++)
            if (is(&group[i].call, "ncclSend") == sends) error = run(group[i].comm, &group[i].call);
    return error;
}

static int ask(const char *name, const void *from, void *to, size_t count, int type, int op, int root, Comm *comm) {
    char what[96];
    snprintf(what, sizeof what, "%s %zu %s, %d ranks", name, count, names[type], comm->ranks);
    fake_request("N", what);
    Call call = {.name = "", .from = from, .to = to, .count = count, .type = type, .op = op, .root = root};
    strncpy(call.name, name, sizeof call.name - 1);
    if (!depth) return run(comm, &call);
    if (grouped == sizeof group / sizeof *group) return INVALID_USAGE;
    group[grouped].comm = comm, group[grouped++].call = call;
    return 0;
}

#define ASKS(name, parameters, ...) int name parameters { return ask(#name, __VA_ARGS__); }
ASKS(ncclAllReduce, (const void *from, void *to, size_t n, int type, int op, Comm *comm, void *stream), from, to, n, type, op, -1, comm)
ASKS(ncclReduce, (const void *from, void *to, size_t n, int type, int op, int root, Comm *comm, void *stream), from, to, n, type, op,
     root, comm)
ASKS(ncclReduceScatter, (const void *from, void *to, size_t n, int type, int op, Comm *comm, void *stream), from, to, n, type, op, -1, comm)
ASKS(ncclAllGather, (const void *from, void *to, size_t n, int type, Comm *comm, void *stream), from, to, n, type, 0, -1, comm)
ASKS(ncclAlltoAll, (const void *from, void *to, size_t n, int type, Comm *comm, void *stream), from, to, n, type, 0, -1, comm)
ASKS(ncclBroadcast, (const void *from, void *to, size_t n, int type, int root, Comm *comm, void *stream), from, to, n, type, 0,
     root, comm)
ASKS(ncclSend, (const void *from, size_t n, int type, int peer, Comm *comm, void *stream), from, 0, n, type, 0, peer, comm)
ASKS(ncclRecv, (void *to, size_t n, int type, int peer, Comm *comm, void *stream), 0, to, n, type, 0, peer, comm)

int ncclBcast(void *data, size_t n, int type, int root, Comm *comm, void *stream) {
    return ncclBroadcast(data, data, n, type, root, comm, stream);
}

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, Comm *comm) { return *op = AVG + 1, 0; }

int ncclGetVersion(int *version) { return *version = 22809, 0; }
