// Finds NCCL's functions when the first of them is called: in the NCCL that the process has loaded,
// or else in libnccl.so.2. A library (burst/c) links this file instead of NCCL. It must share NCCL
// with the program around it, and work without NCCL on one GPU.
#include <dlfcn.h>
#include <nccl.h>

namespace {

void* Library() {
  static void* const library = [] {
    void* const loaded = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    return loaded != nullptr ? loaded : dlopen("libnccl.so.2", RTLD_NOW);
  }();
  return library;
}

template <typename Function>
Function* Find(const char* name) {
  return Library() == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(Library(), name));
}

constexpr char kNone[] = "there is no libnccl.so.2, which ranks on GPUs need";

}  // namespace

// NCCL's own declaration of `name`, defined by the function of the library.
#define BURST_NCCL(name, parameters, arguments)                        \
  extern "C" ncclResult_t name parameters {                            \
    static auto* const function = Find<decltype(name)>(#name);         \
    return function == nullptr ? ncclSystemError : function arguments; \
  }

BURST_NCCL(ncclGetUniqueId, (ncclUniqueId * id), (id))
BURST_NCCL(ncclCommInitRankConfig,
           (ncclComm_t * comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config),
           (comm, size, id, rank, config))
BURST_NCCL(ncclCommDestroy, (ncclComm_t comm), (comm))
BURST_NCCL(ncclCommAbort, (ncclComm_t comm), (comm))
BURST_NCCL(ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t* error), (comm, error))
BURST_NCCL(ncclGroupStart, (), ())
BURST_NCCL(ncclGroupEnd, (), ())
BURST_NCCL(ncclSend,
           (const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
            cudaStream_t stream),
           (data, count, type, peer, comm, stream))
BURST_NCCL(ncclRecv,
           (void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
            cudaStream_t stream),
           (data, count, type, peer, comm, stream))
BURST_NCCL(ncclAllReduce,
           (const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
            ncclComm_t comm, cudaStream_t stream),
           (from, to, count, type, op, comm, stream))
BURST_NCCL(ncclAllGather,
           (const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
            cudaStream_t stream),
           (from, to, count, type, comm, stream))
BURST_NCCL(ncclReduceScatter,
           (const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
            ncclComm_t comm, cudaStream_t stream),
           (from, to, count, type, op, comm, stream))

extern "C" const char* ncclGetErrorString(ncclResult_t result) {
  static auto* const function = Find<decltype(ncclGetErrorString)>("ncclGetErrorString");
  return function == nullptr ? kNone : function(result);
}

extern "C" const char* ncclGetLastError(ncclComm_t comm) {
  static auto* const function = Find<decltype(ncclGetLastError)>("ncclGetLastError");
  return function == nullptr ? "" : function(comm);
}
