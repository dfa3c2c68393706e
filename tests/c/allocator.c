/* The caller's allocator has no memory for one of the library's allocations, each in turn, on rank 0
 * of two: its call returns BURST_OUT_OF_MEMORY, the other rank's BURST_UNAVAILABLE with the reason,
 * neither waits for the other, and the context serves again. Under the address sanitizer also: no
 * message uses memory that was freed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "burst/c/burst.h"

enum { kRanks = 2, kLength = 512, kHeads = 2, kDim = 64, kCount = kLength * kHeads * kDim };
enum { kComputed = 10, kRanOut = 11, kWrong = 1 };

#define CHECK(call)                                                          \
  do {                                                                       \
    const burst_code code = (call);                                          \
    if (code != BURST_OK) {                                                  \
      fprintf(stderr, "%s: %d: %s\n", #call, (int)code, burst_last_error()); \
      _exit(kWrong);                                                         \
    }                                                                        \
  } while (0)

/* The allocation that fails, counted from 1; 0: none. */
typedef struct {
  int fails, made, held;
} Memory;

static void* Allocate(size_t bytes, void* user) {
  Memory* const memory = (Memory*)user;
  void* data = NULL;
  if (++memory->made == memory->fails || posix_memalign(&data, 64, bytes) != 0) return NULL;
  ++memory->held;
  return data;
}
static void Release(void* data, void* user) {
  --((Memory*)user)->held;
  free(data);
}

static burst_tensor Filled(int dims) {
  burst_tensor tensor;
  memset(&tensor, 0, sizeof(tensor));
  float* const data = (float*)malloc(kCount * sizeof(float));
  for (int i = 0; i < kCount; ++i) data[i] = (float)(i % 5) / 5;
  tensor.data = data;
  tensor.dtype = BURST_FLOAT32;
  tensor.dims = dims;
  const int64_t of4[4] = {1, kLength, kHeads, kDim}, of3[4] = {1, kHeads, kLength, 1};
  int64_t stride = 1;
  for (int i = dims - 1; i >= 0; --i) {
    tensor.shape[i] = dims == 4 ? of4[i] : of3[i];
    tensor.strides[i] = stride;
    stride *= tensor.shape[i];
  }
  return tensor;
}

static burst_code Attend(burst_context* context, burst_comm* comm, const char* strategy) {
  burst_attention_options options;
  memset(&options, 0, sizeof(options));
  options.struct_bytes = sizeof(options);
  options.strategy = strategy;
  burst_attention* attention = NULL;
  burst_schedule* schedule = NULL;
  burst_tensor t[8], lse = Filled(3);
  for (int i = 0; i < 8; ++i) t[i] = Filled(4);
  /* Of ulysses a collective: the other rank may be gone by then. */
  burst_code code = burst_attention_create(context, comm, &options, &attention);
  if (code == BURST_OK) {
    burst_sequences sequences;
    memset(&sequences, 0, sizeof(sequences));
    sequences.struct_bytes = sizeof(sequences);
    sequences.seqlen = comm == NULL ? kLength : kRanks * kLength;
    CHECK(burst_schedule_create(attention, &sequences, NULL, &schedule));
    const burst_call call = {
        .struct_bytes = sizeof(call), .schedule = schedule, .q = t[0], .k = t[1], .v = t[2]};
    const burst_result result = {.struct_bytes = sizeof(result), .out = t[3], .lse = lse};
    const burst_gradients gradients = {
        .struct_bytes = sizeof(gradients), .dout = t[4], .dq = t[5], .dk = t[6], .dv = t[7]};
    code = burst_forward(attention, &call, &result);
    if (code == BURST_OK) code = burst_backward(attention, &call, &result, &gradients);
  }
  for (int i = 0; i < 8; ++i) free(t[i].data); /* at once, as one does after an error */
  free(lse.data);
  if (schedule != NULL) burst_schedule_destroy(schedule);
  if (attention != NULL) burst_attention_destroy(attention);
  return code;
}

static int Rank(int rank, const burst_unique_id* id, int fails, const char* strategy) {
  Memory memory = {0, 0, 0};
  burst_context_options options;
  memset(&options, 0, sizeof(options));
  options.struct_bytes = sizeof(options);
  options.device = BURST_CPU;
  options.allocate = Allocate, options.release = Release, options.user = &memory;
  burst_context* context = NULL;
  burst_comm* comm = NULL;
  CHECK(burst_context_create(&options, &context));
  CHECK(burst_context_set_threads(context, 2));
  CHECK(burst_comm_create(context, id, rank, kRanks, 60, &comm));
  if (rank == 0) memory.fails = fails;
  memory.made = 0;
  const burst_code code = Attend(context, comm, strategy);
  memory.fails = 0;
  const burst_code wanted = code == BURST_OK ? BURST_OK
                            : rank == 0      ? BURST_OUT_OF_MEMORY
                                             : BURST_UNAVAILABLE;
  if (code != wanted || (code != BURST_OK && strstr(burst_last_error(), "out of memory") == NULL)) {
    fprintf(stderr, "rank %d: %d: %s\n", rank, (int)code, burst_last_error());
    return kWrong;
  }
  CHECK(Attend(context, NULL, "burst"));
  burst_comm_destroy(comm);
  burst_context_destroy(context);
  if (memory.held != 0) {
    fprintf(stderr, "rank %d: %d blocks are left\n", rank, memory.held);
    return kWrong;
  }
  return code == BURST_OK ? kComputed : kRanOut;
}

/* kComputed if no allocation failed, kRanOut if one did and all went as it should. */
static int RunRanks(int fails, const char* strategy) {
  int ends[2];
  if (pipe(ends) != 0) return kWrong;
  pid_t ranks[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks[rank] = fork();
    if (ranks[rank] != 0) continue;
    burst_unique_id id;
    alarm(100); /* a call that hangs */
    if (rank == 0) CHECK(burst_unique_id_create(NULL, &id));
    if (rank == 0 && write(ends[1], &id, sizeof(id)) != (ssize_t)sizeof(id)) _exit(kWrong);
    if (rank > 0 && read(ends[0], &id, sizeof(id)) != (ssize_t)sizeof(id)) _exit(kWrong);
    exit(Rank(rank, &id, fails, strategy)); /* a sanitizer's report is at the exit */
  }
  close(ends[0]), close(ends[1]);
  int first = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    int status = 0;
    waitpid(ranks[rank], &status, 0);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : kWrong;
    /* Rank 1 may have ended its calls before rank 0's last allocation. */
    if (code < kComputed || code > kRanOut) {
      fprintf(stderr, "%s, allocation %d: rank %d: exit code %d, signal %d\n", strategy, fails, rank,
              code, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
      return kWrong;
    }
    if (rank == 0) first = code;
  }
  return first;
}

int main(void) {
  const char* const strategies[] = {"burst", "ring", "ulysses"};
  for (int s = 0; s < 3; ++s) {
    int failed = 0;
    for (int fails = 1;; ++fails) {
      const int code = RunRanks(fails, strategies[s]);
      if (code == kWrong) return 1;
      if (code == kComputed) break; /* it needs fewer */
      ++failed;
    }
    fprintf(stderr, "%s: %d allocations, each failed once\n", strategies[s], failed);
    if (failed < 3) return 1;
  }
  return 0;
}
