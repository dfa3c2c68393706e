/* Burst from C: processes that share a sequence, each with a part of it, and compare what they get
 * with the whole sequence on one rank. argv[1]: the number of processes. Prints "ok" and exits with
 * 0, or says what is wrong. */
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "burst/c/burst.h"

enum { kBatch = 2, kSeqlen = 37, kHeads = 4, kKvHeads = 2, kHeadDim = 8, kValueDim = 12 };

#define CHECK(call)                                                                      \
  do {                                                                                   \
    const burst_code code = (call);                                                      \
    if (code != BURST_OK) {                                                              \
      fprintf(stderr, "%s: %d: %s\n", #call, (int)code, burst_last_error());             \
      exit(1);                                                                           \
    }                                                                                    \
  } while (0)

/* Any fixed numbers: of the tensor, the batch row, the position, the head and the channel. */
static double Value(int tensor, int64_t row, int64_t position, int64_t head, int64_t channel) {
  return sin(1.0 + tensor + 3.7 * (double)row + 1.3 * (double)position + 0.9 * (double)head +
             0.31 * (double)(channel * channel));
}

typedef struct {
  burst_tensor view;
  double* data;
} Array;

static Array Make(int64_t length, int64_t heads, int64_t columns) {
  Array array;
  memset(&array, 0, sizeof(array));
  const int64_t shape[4] = {kBatch, length, heads, columns};
  array.data = (double*)calloc((size_t)(kBatch * length * heads * columns + 1), sizeof(double));
  array.view.data = array.data;
  array.view.dtype = BURST_FLOAT64;
  array.view.dims = 4;
  for (int i = 3; i >= 0; --i) {
    array.view.shape[i] = shape[i];
    array.view.strides[i] = i == 3 ? 1 : array.view.strides[i + 1] * shape[i + 1];
  }
  return array;
}

static Array MakeLse(int64_t length) {
  Array array = Make(length, kHeads, 1);
  const int64_t shape[3] = {kBatch, kHeads, length};
  array.view.dims = 3;
  for (int i = 2; i >= 0; --i) {
    array.view.shape[i] = shape[i];
    array.view.strides[i] = i == 2 ? 1 : array.view.strides[i + 1] * shape[i + 1];
  }
  return array;
}

static Array Filled(int tensor, const int32_t* positions, int64_t length, int64_t heads,
                    int64_t columns) {
  Array array = Make(length, heads, columns);
  double* at = array.data;
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t i = 0; i < length; ++i)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t c = 0; c < columns; ++c) *at++ = Value(tensor, b, positions[i], h, c);
  return array;
}

/* The schedule of kSeqlen tokens. */
static burst_code Schedule(const burst_attention* attention, int causal,
                           burst_schedule** schedule) {
  burst_sequences sequences;
  memset(&sequences, 0, sizeof(sequences));
  sequences.struct_bytes = sizeof(sequences);
  sequences.seqlen = kSeqlen;
  burst_mask mask;
  memset(&mask, 0, sizeof(mask));
  mask.struct_bytes = sizeof(mask);
  mask.causal = causal;
  return burst_schedule_create(attention, &sequences, &mask, schedule);
}

/* out, dq, dk, dv of this rank's tokens. */
typedef struct {
  int64_t length;
  int32_t positions[kSeqlen];
  Array results[4];
  float largest; /* of the heads' largest scores, a sum with weights */
  double dsinks[kHeads];
} Attended;

/* v has another width than q and k. changed: with softcap, ALiBi, dropout and sinks. */
static Attended Attend(burst_context* context, burst_comm* comm, int rank, int size, int changed) {
  Attended attended;
  burst_attention_options options;
  memset(&options, 0, sizeof(options));
  options.struct_bytes = sizeof(options);
  float slopes[kHeads] = {0.5f, 0.25f, 0, 1};
  if (changed) {
    options.softcap = 1.5;
    options.dropout = 0.3;
    options.alibi_slopes = slopes;
    options.alibi_heads = kHeads;
  }
  options.deterministic = 1;
  burst_attention* attention = NULL;
  burst_schedule* schedule = NULL;
  CHECK(burst_attention_create(context, comm, &options, &attention));
  memset(slopes, 0, sizeof(slopes)); /* they were copied */
  CHECK(Schedule(attention, 1, &schedule));
  CHECK(burst_positions("zigzag", kSeqlen, rank, size, &attended.length, attended.positions));
  const int64_t n = attended.length;
  const Array q = Filled(0, attended.positions, n, kHeads, kHeadDim);
  const Array k = Filled(1, attended.positions, n, kKvHeads, kHeadDim);
  const Array v = Filled(2, attended.positions, n, kKvHeads, kValueDim);
  const Array dout = Filled(3, attended.positions, n, kHeads, kValueDim);
  const Array out = Make(n, kHeads, kValueDim), lse = MakeLse(n), dq = Make(n, kHeads, kHeadDim);
  const Array dk = Make(n, kKvHeads, kHeadDim), dv = Make(n, kKvHeads, kValueDim);
  float largest[kBatch * kHeads];
  double sinks[kHeads] = {0.5, -1, 2, 0};
  burst_call call = {.struct_bytes = sizeof(call),
                     .schedule = schedule,
                     .dropout_seed = 11,
                     .wants_max_logits = changed,
                     .q = q.view,
                     .k = k.view,
                     .v = v.view};
  burst_result result = {.struct_bytes = sizeof(result), .out = out.view, .lse = lse.view};
  burst_gradients gradients = {.struct_bytes = sizeof(gradients),
                               .dout = dout.view,
                               .dlse = lse.view,
                               .dq = dq.view,
                               .dk = dk.view,
                               .dv = dv.view};
  if (changed) {
    result.max_logits = (burst_tensor){.data = largest,
                                       .dtype = BURST_FLOAT32,
                                       .dims = 2,
                                       .shape = {kBatch, kHeads},
                                       .strides = {kHeads, 1}};
    call.sinks = (burst_tensor){
        .data = sinks, .dtype = BURST_FLOAT64, .dims = 1, .shape = {kHeads}, .strides = {1}};
    gradients.dsinks = call.sinks;
    gradients.dsinks.data = attended.dsinks;
  }
  CHECK(burst_check(attention, &call));
  CHECK(burst_forward(attention, &call, &result));
  CHECK(burst_backward(attention, &call, &result, &gradients));
  attended.results[0] = out;
  attended.results[1] = dq;
  attended.results[2] = dk;
  attended.results[3] = dv;
  /* An error of the arguments is a code and a sentence that names the argument. */
  burst_call wrong = call;
  wrong.k.shape[3] = kHeadDim - 1;
  if (burst_check(attention, &wrong) != BURST_INVALID_ARGUMENT ||
      burst_forward(attention, &wrong, &result) != BURST_INVALID_ARGUMENT ||
      strncmp(burst_last_error(), "k: must be ", 11) != 0) {
    fprintf(stderr, "a wrong k: %s\n", burst_last_error());
    exit(1);
  }
  attended.largest = 0;
  for (int i = 0; changed && i < kBatch * kHeads; ++i) attended.largest += largest[i] * (1 + i);
  wrong = call;
  wrong.wants_max_logits = 1;
  result.max_logits.dims = 0;
  if (burst_forward(attention, &wrong, &result) != BURST_INVALID_ARGUMENT ||
      strstr(burst_last_error(), "max_logits") == NULL) {
    fprintf(stderr, "there is no room for the largest scores: %s\n", burst_last_error());
    exit(1);
  }
  burst_schedule_destroy(schedule);
  burst_attention_destroy(attention);
  /* What needs a Hopper GPU is refused by name. */
  memset(&options, 0, sizeof(options));
  options.struct_bytes = sizeof(options);
  options.fp8_forward = 1;
  CHECK(burst_attention_create(context, comm, &options, &attention));
  CHECK(Schedule(attention, 1, &schedule));
  call.schedule = schedule, call.wants_max_logits = 0;
  if (burst_forward(attention, &call, &result) != BURST_INVALID_ARGUMENT ||
      strstr(burst_last_error(), "fp8") == NULL) {
    fprintf(stderr, "fp8 on a CPU: %s\n", burst_last_error());
    exit(1);
  }
  burst_schedule_destroy(schedule);
  burst_attention_destroy(attention);
  free(q.data), free(k.data), free(v.data), free(dout.data), free(lse.data);
  return attended;
}

static int64_t allocated = 0;
static void* Allocate(size_t bytes, void* user) {
  void* data = NULL;
  if (posix_memalign(&data, 64, bytes) != 0) return NULL;
  *(int64_t*)user += (int64_t)malloc_usable_size(data);
  return data;
}
static void Release(void* data, void* user) {
  *(int64_t*)user -= (int64_t)malloc_usable_size(data);
  free(data);
}

static burst_context* MakeContext(int own_memory) {
  burst_context_options options;
  memset(&options, 0, sizeof(options));
  options.struct_bytes = sizeof(options);
  options.device = BURST_CPU;
  if (own_memory) {
    options.allocate = Allocate;
    options.release = Release;
    options.user = &allocated;
  }
  burst_context* context = NULL;
  CHECK(burst_context_create(&options, &context));
  CHECK(burst_context_set_threads(context, 2));
  return context;
}

/* Of one scale: an attention that is kept, what it computed, and its part of the tokens. */
typedef struct {
  burst_attention* attention;
  burst_schedule* schedule;
  Array q, k, v, dout, lse;
  burst_call call;
  burst_result result;
  Attended attended;
} Scaled;

static void ScaledForward(burst_context* context, burst_comm* comm, int rank, int size,
                          const char* strategy, double scale, Scaled* s) {
  burst_attention_options options;
  memset(&options, 0, sizeof(options));
  options.struct_bytes = sizeof(options);
  options.strategy = strategy;
  options.softmax_scale = scale;
  CHECK(burst_attention_create(context, comm, &options, &s->attention));
  CHECK(Schedule(s->attention, 1, &s->schedule));
  CHECK(burst_positions("zigzag", kSeqlen, rank, size, &s->attended.length, s->attended.positions));
  const int64_t n = s->attended.length;
  const int32_t* const positions = s->attended.positions;
  s->q = Filled(0, positions, n, kHeads, kHeadDim);
  s->k = Filled(1, positions, n, kKvHeads, kHeadDim);
  s->v = Filled(2, positions, n, kKvHeads, kHeadDim);
  s->dout = Filled(3, positions, n, kHeads, kHeadDim);
  s->lse = MakeLse(n);
  for (int r = 0; r < 4; ++r) {
    s->attended.results[r] = Make(n, r < 2 ? kHeads : kKvHeads, kHeadDim);
  }
  s->call = (burst_call){.struct_bytes = sizeof(s->call),
                         .schedule = s->schedule,
                         .q = s->q.view,
                         .k = s->k.view,
                         .v = s->v.view};
  s->result = (burst_result){.struct_bytes = sizeof(s->result),
                             .out = s->attended.results[0].view,
                             .lse = s->lse.view};
  CHECK(burst_forward(s->attention, &s->call, &s->result));
}

static void ScaledBackward(Scaled* s) {
  Array* const r = s->attended.results;
  const burst_gradients gradients = {.struct_bytes = sizeof(gradients),
                                     .dout = s->dout.view,
                                     .dq = r[1].view,
                                     .dk = r[2].view,
                                     .dv = r[3].view};
  CHECK(burst_backward(s->attention, &s->call, &s->result, &gradients));
}

static void DiscardScaled(Scaled* s) {
  burst_schedule_destroy(s->schedule);
  burst_attention_destroy(s->attention);
  free(s->q.data), free(s->k.data), free(s->v.data), free(s->dout.data), free(s->lse.data);
  for (int r = 0; r < 4; ++r) free(s->attended.results[r].data);
}

static double Difference(const Attended* part, const Attended* whole);

/* Attentions of one comm that differ in their options share its buffers: a hundred of them, all
 * kept, hold as much of the caller's memory as two; and the backward of each, in any order, is that
 * of its own forward. Returns the largest difference from one rank. */
static double Shared(burst_context* context, burst_comm* comm, int rank, int size,
                     const char* strategy) {
  enum { kScales = 100 };
  static Scaled scaled[kScales];
  int64_t held = 0;
  for (int i = 0; i < kScales; ++i) {
    ScaledForward(context, comm, rank, size, strategy, 0.05 * (i + 1), &scaled[i]);
    if (i > 1) continue;
    ScaledBackward(&scaled[i]);
    Scaled whole; /* its memory for a call, too, is kept for later ones */
    ScaledForward(context, NULL, 0, 1, NULL, 1, &whole);
    ScaledBackward(&whole);
    DiscardScaled(&whole);
    held = allocated;
  }
  double worst = 0;
  for (int i = kScales - 1; i >= 0; i -= 11) {
    ScaledBackward(&scaled[i]);
    Scaled whole;
    ScaledForward(context, NULL, 0, 1, NULL, 0.05 * (i + 1), &whole);
    ScaledBackward(&whole);
    worst = fmax(worst, Difference(&scaled[i].attended, &whole.attended));
    DiscardScaled(&whole);
  }
  if (allocated > held) {
    fprintf(stderr, "%s: 100 attentions hold %ld bytes, two held %ld\n", strategy,
            (long)allocated, (long)held);
    exit(1);
  }
  for (int i = 0; i < kScales; ++i) DiscardScaled(&scaled[i]);
  return worst;
}

/* The largest difference of a rank's part from the whole. */
static double Difference(const Attended* part, const Attended* whole) {
  double worst = 0;
  for (int r = 0; r < 4; ++r) {
    const burst_tensor* const view = &part->results[r].view;
    const int64_t width = view->shape[2] * view->shape[3];
    for (int64_t b = 0; b < kBatch; ++b)
      for (int64_t i = 0; i < part->length; ++i)
        for (int64_t c = 0; c < width; ++c) {
          const double have = part->results[r].data[(b * part->length + i) * width + c];
          const double want =
              whole->results[r].data[(b * kSeqlen + part->positions[i]) * width + c];
          worst = fmax(worst, fabs(have - want));
        }
  }
  return worst;
}

static void Discard(Attended* attended) {
  for (int r = 0; r < 4; ++r) free(attended->results[r].data);
}

/* Errors of masks name the field; slices by name are those of burst/mask/slices.h. */
static void CheckMasks(burst_context* context) {
  burst_attention_options options;
  memset(&options, 0, sizeof(options));
  options.struct_bytes = sizeof(options);
  burst_attention* attention = NULL;
  CHECK(burst_attention_create(context, NULL, &options, &attention));
  const int32_t answers[2] = {3, 20};
  burst_slice slices[8];
  int64_t count = 0, counted = 0;
  CHECK(burst_slices_tree(14, 2, answers, &counted, NULL));
  CHECK(burst_slices_tree(14, 2, answers, &count, slices));
  burst_sequences sequences;
  memset(&sequences, 0, sizeof(sequences));
  sequences.struct_bytes = sizeof(sequences);
  sequences.seqlen = kSeqlen;
  burst_mask mask;
  memset(&mask, 0, sizeof(mask));
  mask.struct_bytes = sizeof(mask);
  mask.slice_rows = 1;
  mask.slice_counts = &count;
  mask.slices = slices;
  burst_schedule* schedule = NULL;
  CHECK(burst_schedule_create(attention, &sequences, &mask, &schedule));
  burst_schedule_destroy(schedule);
  const burst_slice last = {17, 37, 17, 37, BURST_SLICE_CAUSAL};
  if (count != 5 || counted != count || memcmp(&slices[4], &last, sizeof(last)) != 0) {
    fprintf(stderr, "%ld slices\n", (long)count);
    exit(1);
  }
  mask.window = 3;
  if (burst_schedule_create(attention, &sequences, &mask, &schedule) != BURST_INVALID_ARGUMENT ||
      strncmp(burst_last_error(), "window: must be off with slices", 31) != 0) {
    fprintf(stderr, "a window with slices: %s\n", burst_last_error());
    exit(1);
  }
  mask.struct_bytes = 8;
  if (burst_schedule_create(attention, &sequences, &mask, &schedule) != BURST_INVALID_ARGUMENT ||
      strncmp(burst_last_error(), "burst_mask: struct_bytes", 24) != 0) {
    fprintf(stderr, "a short struct: %s\n", burst_last_error());
    exit(1);
  }
  burst_attention_destroy(attention);
}

static int Rank(int rank, int size, int id_from) {
  burst_unique_id id;
  if (id_from >= 0 && read(id_from, &id, sizeof(id)) != (ssize_t)sizeof(id)) return 1;
  burst_context* context = MakeContext(rank % 2);
  burst_comm* comm = NULL;
  CHECK(burst_comm_create(context, &id, rank, size, 30, &comm));
  int32_t ranks[64];
  const int32_t mine = rank;
  CheckMasks(context);
  CHECK(burst_comm_all_gather(comm, &mine, sizeof(mine), ranks));
  Attended part = Attend(context, comm, rank, size, 0), whole = Attend(context, NULL, 0, 1, 0);
  double worst = Difference(&part, &whole);
  Attended changed = Attend(context, comm, rank, size, 1);
  const double change = Difference(&changed, &whole);
  Discard(&part), Discard(&whole);
  whole = Attend(context, NULL, 0, 1, 1);
  worst = fmax(worst, Difference(&changed, &whole));
  worst = fmax(worst, fabs(changed.largest - whole.largest));
  double dsinks[64][kHeads];
  CHECK(burst_comm_all_gather(comm, changed.dsinks, sizeof(changed.dsinks), dsinks));
  for (int h = 0; h < kHeads; ++h) {
    double sum = 0;
    for (int r = 0; r < size; ++r) sum += dsinks[r][h];
    worst = fmax(worst, fabs(sum - whole.dsinks[h]));
  }
  Discard(&changed), Discard(&whole);
  worst = fmax(worst, Shared(context, comm, rank, size, "burst"));
  if (kHeads % size == 0) worst = fmax(worst, Shared(context, comm, rank, size, "ulysses"));
  /* An attention that is left does not keep the others waiting once this rank has finished. */
  burst_attention_options options;
  memset(&options, 0, sizeof(options));
  options.struct_bytes = sizeof(options);
  burst_attention* left = NULL;
  burst_schedule* schedule = NULL;
  CHECK(burst_attention_create(context, comm, &options, &left));
  CHECK(burst_comm_finish(comm));
  if (Schedule(left, 0, &schedule) != BURST_INVALID_ARGUMENT ||
      burst_comm_all_gather(comm, &mine, sizeof(mine), ranks) != BURST_INVALID_ARGUMENT ||
      strcmp(burst_last_error(), "comm: it has finished (burst_comm_finish)") != 0) {
    fprintf(stderr, "after burst_comm_finish: %s\n", burst_last_error());
    return 1;
  }
  burst_attention_destroy(left);
  burst_context_destroy(context); /* in any order */
  burst_comm_destroy(comm);
  if (worst > 1e-13 || change < 1e-3 || ranks[size - 1] != size - 1 || allocated != 0) {
    fprintf(stderr, "rank %d: off by %g, changed by %g, %ld bytes are left\n", rank, worst, change,
            (long)allocated);
    return 1;
  }
  return 0;
}

int main(int argc, char** argv) {
  const int size = argc > 1 ? atoi(argv[1]) : 3;
  if (burst_c_version() != BURST_C_VERSION || size < 1 || size > 64) return 2;
  int pipes[64];
  pid_t children[64];
  for (int rank = 1; rank < size; ++rank) {
    int ends[2];
    if (pipe(ends) != 0) return 1;
    pipes[rank] = ends[1];
    children[rank] = fork();
    if (children[rank] == 0) return Rank(rank, size, ends[0]);
  }
  /* After the forks: threads of the library do not survive one. */
  burst_unique_id id;
  CHECK(burst_unique_id_create(NULL, &id));
  int own[2];
  if (pipe(own) != 0) return 1;
  pipes[0] = own[1];
  for (int rank = 0; rank < size; ++rank)
    if (write(pipes[rank], &id, sizeof(id)) != (ssize_t)sizeof(id)) return 1;
  int failed = Rank(0, size, own[0]);
  for (int rank = 1; rank < size; ++rank) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    failed |= status != 0;
  }
  if (!failed) printf("ok\n");
  return failed;
}
