// NCCL's interface over MPI: the part of it that this project uses, under the real names, for machines
// without a GPU and for many ranks that share one. It behaves as NCCL does where a program can tell:
//
// - a call returns at once; the operation runs in stream order, a send when its receive is there, a
//   collective when all ranks have come; what would deadlock with NCCL deadlocks here;
// - operations between ncclGroupStart and ncclGroupEnd are one operation of their communicator;
// - a communicator's operations run one after the other; those of one rank start in the order in which the
//   host issued them, over all its communicators, and then run side by side (NCCL_LAUNCH_ORDER_IMPLICIT=1);
// - what NCCL leaves undefined is an error: counts, types, operators or roots that differ between ranks (by
//   ncclCommGetAsyncError; the streams stay held until ncclCommAbort), and buffers that overlap other than
//   in NCCL's in-place forms (at the call).
//
// Sums are formed in rank order, of bfloat16 and half in float and rounded once, and are the same bits on all
// ranks. The program initialises MPI, with MPI_THREAD_MULTIPLE. Environment: NCCL_CPU_LINK and its sisters
// (modelled_link.h), NCCL_DEBUG=WARN prints errors; with NCCL_CPU_SERIAL_LAUNCHES set, operations of a rank
// run one after the other, as where NCCL was built with a CUDA before 12.3.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

// This is not NCCL itself.
#define NCCL_OVER_MPI 1

#define NCCL_VERSION_CODE 22800
#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_CONFIG_UNDEF_INT (-2147483647 - 1)
#define NCCL_CONFIG_INITIALIZER \
  {}

using ncclComm_t = struct ncclComm*;

struct ncclUniqueId {
  char internal[NCCL_UNIQUE_ID_BYTES];
};

// Of NCCL's configuration: `blocking`, which must stay undefined or 1, and how many thread blocks an
// operation takes: maxCTAs limits how many operations of a group have a channel of their own
// (modelled_link.h).
//
// NCCL has nothing like the last two, which make a communicator of a folded world, in a dry run: some of its
// ranks are absent. [ranks]: where each one sits, in a world that is larger than MPI_COMM_WORLD; and its rank
// there, or -1 if it is absent. Those that are there meet, and an operation takes as long as if all did. That
// is near enough where an absent rank does nearly the same as one that is there (07_combined_5d/fold.h).
// Nobody waits for the messages of absent ones.
struct ncclConfig_t {
  int blocking = NCCL_CONFIG_UNDEF_INT, maxCTAs = NCCL_CONFIG_UNDEF_INT;
  const int *world_ranks = nullptr, *processes = nullptr;
};

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclNumResults = 8
};

// ncclProd and ncclAvg are refused: the project's gradients are plain sums.
// Of type int, as in C: another number is refused, and is no undefined behaviour.
enum ncclRedOp_t : int { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclAvg = 4, ncclNumOps = 5 };

enum ncclDataType_t : int {
  ncclInt32 = 2,
  ncclFloat16 = 6,
  ncclHalf = 6,
  ncclFloat32 = 7,
  ncclFloat = 7,
  ncclFloat64 = 8,
  ncclDouble = 8,
  ncclBfloat16 = 9,
  ncclNumTypes = 10
};

// ---- Communicators ----------------------------------------------------------------------------------------

ncclResult_t ncclGetVersion(int* version);

// The rank that makes the id must be one of the communicator's ranks.
ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config);
// Waits for the operations issued so far, then for all ranks. (NCCL waits for those of its node.)
ncclResult_t ncclCommDestroy(ncclComm_t comm);
// Ends pending operations, lets the streams that they hold go on, and destroys the communicator.
ncclResult_t ncclCommAbort(ncclComm_t comm);

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error);

const char* ncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);  // what went wrong last in this process, in words

// ---- Operations -------------------------------------------------------------------------------------------
// Buffers are device memory. n is the number of ranks.

// send[count] -> receive[count] on all ranks; in place if send == receive
ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);
// send[n * count] -> receive[count]; in place if receive == send + rank * count
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
// send[count] -> receive[n * count]; in place if send == receive + rank * count
ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream);
// send[count] of the root -> receive[count] on all ranks; in place if send == receive
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);

ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
