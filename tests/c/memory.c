/* Memory that runs out in calls of burst.h, on one to four threads: under a limit of addresses that
 * is a little above what the process has, every call returns BURST_OK or BURST_OUT_OF_MEMORY with a
 * sentence, and once the limit is gone the same context serves again. Each limit has a process of
 * its own. Prints what the calls returned; exits with 0, or says which limit went wrong. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "burst/c/burst.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { kHasLimits = 0 }; /* sanitizers take addresses by the terabyte */
#else
enum { kHasLimits = 1 };
#endif

enum { kLength = 64, kHeads = 2, kSmall = 16, kLarge = 6000, kMessage = 4096 };
enum { kComputed = 10, kRanOut = 11, kWrong = 1 };

/* q, k, v, out, dout, dq, dk, dv of [1, length, kHeads, head_dim], and lse; ones. */
typedef struct {
  burst_tensor tensors[8], lse;
} Arrays;

static burst_tensor MakeTensor(int dims, int64_t a, int64_t b, int64_t c, int64_t d) {
  burst_tensor tensor;
  memset(&tensor, 0, sizeof(tensor));
  const int64_t shape[4] = {a, b, c, d};
  int64_t count = 1;
  tensor.dtype = BURST_FLOAT32;
  tensor.dims = dims;
  for (int i = dims - 1; i >= 0; --i) {
    tensor.shape[i] = shape[i];
    tensor.strides[i] = count;
    count *= shape[i];
  }
  float* const data = (float*)malloc((size_t)count * sizeof(float));
  if (data == NULL) exit(kWrong);
  for (int64_t i = 0; i < count; ++i) data[i] = 1;
  tensor.data = data;
  return tensor;
}

static Arrays MakeArrays(int64_t length, int64_t head_dim) {
  Arrays arrays;
  for (int i = 0; i < 8; ++i) arrays.tensors[i] = MakeTensor(4, 1, length, kHeads, head_dim);
  arrays.lse = MakeTensor(3, 1, kHeads, length, 0);
  return arrays;
}

/* A forward and a backward, and all that they need. What is left after an error is destroyed. */
static burst_code Attend(burst_context* context, const Arrays* a, int64_t length) {
  burst_attention_options options;
  memset(&options, 0, sizeof(options));
  options.struct_bytes = sizeof(options);
  burst_attention* attention = NULL;
  burst_schedule* schedule = NULL;
  const burst_tensor* t = a->tensors;
  burst_code code = burst_attention_create(context, NULL, &options, &attention);
  burst_sequences sequences;
  memset(&sequences, 0, sizeof(sequences));
  sequences.struct_bytes = sizeof(sequences);
  sequences.seqlen = length;
  if (code == BURST_OK) code = burst_schedule_create(attention, &sequences, NULL, &schedule);
  const burst_call call = {
      .struct_bytes = sizeof(call), .schedule = schedule, .q = t[0], .k = t[1], .v = t[2]};
  const burst_result result = {.struct_bytes = sizeof(result), .out = t[3], .lse = a->lse};
  const burst_gradients gradients = {
      .struct_bytes = sizeof(gradients), .dout = t[4], .dq = t[5], .dk = t[6], .dv = t[7]};
  if (code == BURST_OK) code = burst_forward(attention, &call, &result);
  if (code == BURST_OK) code = burst_backward(attention, &call, &result, &gradients);
  if (schedule != NULL) burst_schedule_destroy(schedule);
  if (attention != NULL) burst_attention_destroy(attention);
  return code;
}

static void Limit(rlim_t bytes) {
  struct rlimit limit;
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = bytes;
  if (setrlimit(RLIMIT_AS, &limit) != 0) exit(kWrong);
}

static rlim_t Used(void) {
  long pages = 0;
  FILE* const file = fopen("/proc/self/statm", "r");
  if (file == NULL || fscanf(file, "%ld", &pages) != 1) exit(kWrong);
  fclose(file);
  return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

/* The stack has to be there before the limit: the kernel ends a process whose stack cannot grow. */
static int UseStack(void) {
  volatile char room[1 << 20];
  for (size_t i = 0; i < sizeof(room); i += 4096) room[i] = 1;
  return room[0];
}

/* 1 if the code is one that may be. */
static int IsFine(const char* what, burst_code code) {
  char message[kMessage];
  if (code == BURST_OK) return 1;
  strncpy(message, burst_last_error(), sizeof(message) - 1);
  message[sizeof(message) - 1] = '\0';
  if (code == BURST_OUT_OF_MEMORY && strstr(message, "memory") != NULL &&
      strstr(message, "check failed") == NULL) {
    return 1;
  }
  fprintf(stderr, "%s: %d: %s\n", what, (int)code, message);
  return 0;
}

/* threads_first: the pool of threads is there before the limit, or made under it. */
static int RunUnder(long kib, int threads, int threads_first, const Arrays* small,
                    const Arrays* large) {
  burst_context_options options;
  memset(&options, 0, sizeof(options));
  options.struct_bytes = sizeof(options);
  options.device = BURST_CPU;
  burst_context* context = NULL;
  if (burst_context_create(&options, &context) != BURST_OK) return kWrong;
  if (threads_first && burst_context_set_threads(context, threads) != BURST_OK) return kWrong;
  if (Attend(context, small, kLength) != BURST_OK) return kWrong;
  (void)UseStack();
  Limit(Used() + (rlim_t)kib * 1024);
  burst_code made = BURST_OK;
  if (!threads_first) made = burst_context_set_threads(context, threads);
  int fine = IsFine("threads", made);
  const burst_code code = Attend(context, large, kLength);
  fine &= IsFine("attention", code);
  Limit(RLIM_INFINITY);
  if (Attend(context, small, kLength) != BURST_OK ||
      burst_context_set_threads(context, threads) != BURST_OK ||
      Attend(context, small, kLength) != BURST_OK) {
    fprintf(stderr, "afterwards: %s\n", burst_last_error());
    fine = 0;
  }
  burst_context_destroy(context);
  if (!fine) return kWrong;
  return code == BURST_OK && made == BURST_OK ? kComputed : kRanOut;
}

int main(void) {
  if (!kHasLimits) {
    printf("not under a sanitizer\n");
    return 0;
  }
  const Arrays small = MakeArrays(kLength, kSmall), large = MakeArrays(kLength, kLarge);
  int computed = 0, ran_out = 0, failed = 0;
  for (int threads = 1; threads <= 4; ++threads) {
    for (int threads_first = 0; threads_first < 2; ++threads_first) {
      /* From nothing to more than enough. */
      for (long kib = 0; kib < 600000; kib = kib < 64 ? kib + 16 : kib * 7 / 5) {
        const pid_t child = fork();
        if (child < 0) return 1;
        if (child == 0) {
          alarm(60); /* a call that hangs */
          _exit(RunUnder(kib, threads, threads_first, &small, &large));
        }
        int status = 0;
        waitpid(child, &status, 0);
        computed += WIFEXITED(status) && WEXITSTATUS(status) == kComputed;
        ran_out += WIFEXITED(status) && WEXITSTATUS(status) == kRanOut;
        if (WIFEXITED(status) && WEXITSTATUS(status) >= kComputed &&
            WEXITSTATUS(status) <= kRanOut) {
          continue;
        }
        fprintf(stderr, "%ld KiB, %d threads, made %s: exit code %d, signal %d\n", kib, threads,
                threads_first ? "before" : "under the limit",
                WIFEXITED(status) ? WEXITSTATUS(status) : 0,
                WIFSIGNALED(status) ? WTERMSIG(status) : 0);
        failed = 1;
      }
    }
  }
  printf("%d computed, %d ran out of memory\n", computed, ran_out);
  return failed || computed == 0 || ran_out == 0;
}
