/* What other threads may do while one calls: destroy objects that none uses, and abort a comm. For
 * the thread sanitizer; without it, that nothing crashes and the results stay what they were. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "burst/c/burst.h"

enum { kCalls = 300, kLength = 32, kDim = 16, kQueue = 64 };

#define CHECK(call)                                                          \
  do {                                                                       \
    const burst_code code = (call);                                          \
    if (code != BURST_OK) {                                                  \
      fprintf(stderr, "%s: %d: %s\n", #call, (int)code, burst_last_error()); \
      exit(1);                                                               \
    }                                                                        \
  } while (0)

/* Objects that the calling thread has left, for the other one. */
typedef struct {
  pthread_mutex_t mutex;
  burst_attention* attentions[kQueue];
  burst_schedule* schedules[kQueue];
  int count, done;
} Left;

static void* DestroyLeft(void* argument) {
  Left* const left = (Left*)argument;
  for (int done = 0; !done;) {
    burst_attention* attentions[kQueue];
    burst_schedule* schedules[kQueue];
    pthread_mutex_lock(&left->mutex);
    const int count = left->count;
    memcpy(attentions, left->attentions, sizeof(attentions));
    memcpy(schedules, left->schedules, sizeof(schedules));
    left->count = 0;
    done = left->done;
    pthread_mutex_unlock(&left->mutex);
    for (int i = 0; i < count; ++i) {
      burst_schedule_destroy(schedules[i]);
      burst_attention_destroy(attentions[i]);
    }
  }
  return NULL;
}

static void* Allocate(size_t bytes, void* user) {
  void* data = NULL;
  __atomic_fetch_add((int64_t*)user, 1, __ATOMIC_RELAXED);
  return posix_memalign(&data, 64, bytes) == 0 ? data : NULL;
}
static void Release(void* data, void* user) {
  __atomic_fetch_sub((int64_t*)user, 1, __ATOMIC_RELAXED);
  free(data);
}

static burst_tensor View(float* data, int dims) {
  burst_tensor tensor;
  memset(&tensor, 0, sizeof(tensor));
  tensor.data = data;
  tensor.dtype = BURST_FLOAT32;
  tensor.dims = dims;
  tensor.shape[0] = 1, tensor.shape[1] = dims == 4 ? kLength : 1;
  tensor.shape[2] = dims == 4 ? 1 : kLength, tensor.shape[3] = kDim;
  tensor.strides[0] = kLength * kDim, tensor.strides[1] = kDim, tensor.strides[2] = kDim;
  tensor.strides[3] = 1;
  if (dims == 3) tensor.strides[0] = tensor.strides[1] = kLength, tensor.strides[2] = 1;
  return tensor;
}

int main(void) {
  int64_t allocated = 0;
  burst_context_options options;
  memset(&options, 0, sizeof(options));
  options.struct_bytes = sizeof(options);
  options.device = BURST_CPU;
  options.allocate = Allocate, options.release = Release, options.user = &allocated;
  burst_context* context = NULL;
  CHECK(burst_context_create(&options, &context));

  static Left left = {PTHREAD_MUTEX_INITIALIZER, {0}, {0}, 0, 0};
  pthread_t other;
  if (pthread_create(&other, NULL, DestroyLeft, &left) != 0) return 1;
  static float q[kLength * kDim], out[kLength * kDim], first[kLength * kDim], lse[kLength];
  for (int i = 0; i < kLength * kDim; ++i) q[i] = (float)(i % 7) / 7;
  const burst_tensor in = View(q, 4), to = View(out, 4), sums = View(lse, 3);
  int failed = 0;
  for (int i = 0; i < kCalls; ++i) {
    burst_attention_options how;
    memset(&how, 0, sizeof(how));
    how.struct_bytes = sizeof(how);
    burst_attention* attention = NULL;
    burst_schedule* schedule = NULL;
    CHECK(burst_context_set_threads(context, 1 + i % 3));
    CHECK(burst_attention_create(context, NULL, &how, &attention));
    burst_sequences sequences;
    memset(&sequences, 0, sizeof(sequences));
    sequences.struct_bytes = sizeof(sequences);
    sequences.seqlen = kLength;
    CHECK(burst_schedule_create(attention, &sequences, NULL, &schedule));
    const burst_call call = {
        .struct_bytes = sizeof(call), .schedule = schedule, .q = in, .k = in, .v = in};
    const burst_result result = {.struct_bytes = sizeof(result), .out = to, .lse = sums};
    CHECK(burst_forward(attention, &call, &result));
    if (i == 0) memcpy(first, out, sizeof(out));
    failed |= memcmp(first, out, sizeof(out)) != 0;
    for (int taken = 0; !taken;) { /* waits where the other thread is behind */
      pthread_mutex_lock(&left.mutex);
      if (left.count < kQueue) {
        left.attentions[left.count] = attention;
        left.schedules[left.count++] = schedule;
        taken = 1;
      }
      pthread_mutex_unlock(&left.mutex);
    }
  }
  pthread_mutex_lock(&left.mutex);
  left.done = 1;
  pthread_mutex_unlock(&left.mutex);
  pthread_join(other, NULL);
  burst_context_destroy(context);
  if (failed) fprintf(stderr, "results changed\n");
  if (allocated != 0) fprintf(stderr, "%ld blocks are left\n", (long)allocated);
  if (!failed && allocated == 0) printf("ok\n");
  return failed || allocated != 0;
}
