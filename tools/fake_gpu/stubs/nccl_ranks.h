/* Communicators of the fake NCCL: the memory that its ranks share, and where they meet. */
#pragma once
#include <stddef.h>

#define MOVED (4ul << 20) /* bytes of a call, and of a message */

/* What a rank asks for; `root` is the root or the peer, -1 where there is none. Ranks of a collective must agree on all but the addresses. */
typedef struct { char name[24]; const void *from; void *to; size_t count; int type, op, root; } Call;

typedef struct Comm Comm;
struct Comm { int ranks, rank, aborted; unsigned calls, splits; struct Shared *shared; char id[40]; };

/* Wait until every rank asks for `call`, with `bytes` of what this one sends; after it data_of() each until this rank parts. Errors
 * are those of ncclResult_t, and ncclGetLastError has the words. */
int meet(Comm *comm, const Call *call, size_t bytes);
const void *data_of(const Comm *comm, int rank);
void part(Comm *comm);

/* A message to call->root, which does not wait for it, and one from there. */
int post(Comm *comm, const Call *call, size_t bytes);
int take(Comm *comm, const Call *call, size_t bytes);
