/* Burst for other languages and frameworks: attention over a sequence that is spread over ranks,
 * each a process with a CPU or a GPU. C99; the library is libburst.so. The names here
 * are the names of the headers in burst/attention, which say what is computed.
 *
 *   burst_context* context;   a device, the caller's stream and, if wanted, the caller's memory
 *   burst_comm* comm;         the ranks of one group, from an id that the caller distributes
 *   burst_attention* ring;    what to compute and how to spread it
 *   burst_schedule* tokens;   which tokens each rank has, and which keys each query sees
 *   burst_call call;          the schedule and this rank's q, k and v
 *   burst_result result;      its out and lse
 *   burst_gradients grads;    dout, and dq, dk and dv
 *   burst_forward(ring, &call, &result);
 *   burst_backward(ring, &call, &result, &grads);
 *
 * Every function that can fail returns a burst_code; burst_last_error() says why. The library
 * throws nothing and does not end the process.
 *
 * Ranks: a comm belongs to one set of ranks. All of them make the same calls on it, and on objects
 * made from it, in the same order. In calls marked "collective" they wait for one another.
 *
 * Threads: one thread at a time uses a context and the objects made from it; another thread waits.
 * There are two exceptions. burst_comm_abort may be called while another thread is in a call. Any
 * thread may destroy an unused object at any time, without a lock; memory of the device is then
 * freed when the current call ends.
 *
 * Objects can be destroyed in any order, because each keeps the objects that it was made from. A
 * forked process must not use its parent's objects; destroying them there does nothing.
 *
 * On a GPU, calls queue work on the context's stream and return. The memory of their tensors must
 * not change until that work is done. If a rank is lost, all others learn it at their next call,
 * within half a minute; results of their GPUs since then are undefined.
 */
#ifndef BURST_C_BURST_H_
#define BURST_C_BURST_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The number grows with every change. A program compiled for an older number keeps working: structs
 * begin with their size, which tells whether later fields are present. */
#define BURST_C_VERSION 1
int32_t burst_c_version(void);         /* of the library */
const char* burst_version(void);       /* "0.1.0" */
int32_t burst_cuda_device_count(void); /* GPUs; 0 also in a library built without CUDA */

typedef enum burst_code {
  BURST_OK = 0,
  BURST_INVALID_ARGUMENT = 1, /* nothing was done */
  BURST_UNAVAILABLE = 2,      /* a rank was lost, gave up or did not come; the comm is unusable */
  BURST_OUT_OF_MEMORY = 3,    /* of the device or the host; as below. A smaller call may succeed, of
                               * ranks on a new comm */
  BURST_UNSUPPORTED = 4,      /* by this build or machine */
  BURST_INTERNAL = 5 /* an error of CUDA or of the library; of a comm the other ranks learn */
} burst_code;

/* Returns the message of this thread's last failed call. Valid until the next failure. */
const char* burst_last_error(void);

/* ---- Context */

typedef enum burst_device { BURST_CPU = 0, BURST_CUDA = 1 } burst_device;
typedef enum burst_dtype {
  BURST_FLOAT32 = 0,
  BURST_FLOAT64 = 1,
  BURST_BFLOAT16 = 2,
  BURST_FLOAT16 = 3
} burst_dtype;

typedef struct burst_context burst_context;

typedef struct burst_context_options {
  size_t struct_bytes; /* sizeof(burst_context_options) */
  burst_device device;
  int32_t index; /* of the GPU, among those that the process sees */
  /* The allocator for memory between and during calls; both null: the library's own pool. allocate
   * returns memory of the device, aligned to 64 bytes (GPU: 256), or null. On a GPU the memory is
   * used on the current stream. Blocks of up to 1 MiB are kept for later calls, until the context
   * and all objects made from it are destroyed. `user` is passed to both functions. */
  void* (*allocate)(size_t bytes, void* user);
  void (*release)(void* data, void* user);
  void* user;
} burst_context_options;

burst_code burst_context_create(const burst_context_options* options, burst_context** context);
void burst_context_destroy(burst_context* context);

/* Sets the GPU stream (a cudaStream_t) for later work. It waits for earlier work on the stream
 * before. The first stream is CUDA's default stream. Returns BURST_UNSUPPORTED, as calls do, while
 * the stream is captured in a CUDA graph; the capture continues. */
burst_code burst_context_set_stream(burst_context* context, void* stream);
/* Sets the number of CPU threads that compute, the caller included; at first 1. Results do not
 * depend on it. */
burst_code burst_context_set_threads(burst_context* context, int32_t threads);

/* ---- Ranks */

/* Names a group that is about to meet. Rank 0 makes it, and the caller brings it to the other ranks
 * and to nobody else, because it holds the secret by which they know each other. It serves one
 * burst_comm_create. */
typedef struct burst_unique_id {
  char bytes[192];
} burst_unique_id;

/* Makes an id, in the process that will be rank 0. `address`: a numeric address of this host that
 * the other ranks' hosts can reach. Null: all ranks are on this host and meet in a folder. */
burst_code burst_unique_id_create(const char* address, burst_unique_id* id);

typedef struct burst_comm burst_comm;

/* Connects the ranks. Collective. They use Unix sockets on one host and encrypted TCP between
 * hosts. Ranks on GPUs need a GPU each and also use NCCL: the one that the process has loaded, else
 * libnccl.so.2. On one host CUDA IPC carries short messages, if all ranks have BURST_IPC=1 in their
 * environment. `timeout_s`: how long ranks wait for one another, here and in later calls, before
 * the group fails; 0: three minutes here, later for ever. */
burst_code burst_comm_create(burst_context* context, const burst_unique_id* id, int32_t rank,
                             int32_t size, double timeout_s, burst_comm** comm);
/* Destroys a comm. On a GPU it waits for work that uses the comm. The other ranks can finish work
 * that does not need this rank. */
void burst_comm_destroy(burst_comm* comm);
/* Ends this rank's calls. Frees the memory of `comm` and of the attentions made from it, and tells
 * the other ranks that this one was not lost. Later calls on these objects return
 * BURST_INVALID_ARGUMENT. Call it before a process ends, or destroy all these objects. */
burst_code burst_comm_finish(burst_comm* comm);
/* Tells the other ranks that this one cannot go on; their calls return BURST_UNAVAILABLE. */
burst_code burst_comm_abort(burst_comm* comm, const char* reason);
/* Gathers `bytes` bytes of host memory from every rank, in order of rank; `all` has size * bytes.
 * Collective. */
burst_code burst_comm_all_gather(burst_comm* comm, const void* mine, int64_t bytes, void* all);

/* ---- Attention */

typedef struct burst_attention_options {
  size_t struct_bytes;         /* sizeof(burst_attention_options) */
  const char* strategy;        /* "burst", "ring", "ulysses", "burst+ulysses"; null: "burst" */
  const char* layout;          /* "zigzag", "contiguous", "striped"; null: "zigzag" */
  const char* backward;        /* "auto", "burst", "ring"; null: "auto" */
  const char* ring_grad_dtype; /* "fp32", "bf16"; null: "fp32" */
  double softmax_scale;        /* 0: 1 / sqrt(head_dim) */
  int32_t deterministic;       /* 0: a faster backward on GPUs, whose last bits vary */
  int32_t group_size;          /* burst+ulysses: ranks that divide the heads */
  int32_t ranks_per_node;      /* > 0: a double ring of nodes of N ranks; 0: a flat ring */
  int32_t fp8_forward; /* 1: the forward's products in 8 bits (e4m3): Hopper GPUs, 16-bit tensors, a
                        * head_dim from 72 to 128 */
  /* The next options do not go with fp8_forward; burst/kernels/scores.h has the equations. */
  double softcap;      /* > 0: scores s become softcap tanh(s / softcap); 0: none */
  int64_t alibi_heads; /* the length of alibi_slopes: query heads, on all ranks of ulysses, too */
  const float* alibi_slopes; /* in the host's memory, copied: a score loses its head's slope times
                              * the distance of the tokens; null: none */
  double dropout;            /* the probability that a weight is dropped, below 1; 0: none */
} burst_attention_options;

typedef struct burst_attention burst_attention;

/* Makes an attention. Collective if `comm` is given; null: one rank, which has the whole sequence.
 * The attentions of a comm share its connections and the ring's buffers, which it keeps between
 * calls, so another attention costs no memory of the device. */
burst_code burst_attention_create(burst_context* context, burst_comm* comm,
                                  const burst_attention_options* options,
                                  burst_attention** attention);
void burst_attention_destroy(burst_attention* attention);

/* ---- Masks */

/* The queries at the positions [q_begin, q_end) see keys at [k_begin, k_end), which may reach
 * beyond the sequence. Slices may overlap. */
typedef enum burst_slice_kind {
  BURST_SLICE_FULL = 0,
  BURST_SLICE_CAUSAL = 1,         /* only keys p with p - k_end <= q - q_end */
  BURST_SLICE_INVERSE_CAUSAL = 2, /* p - k_begin >= q - q_begin */
  BURST_SLICE_BAND = 3            /* both */
} burst_slice_kind;
typedef struct burst_slice {
  int32_t q_begin, q_end, k_begin, k_end;
  int32_t kind;
} burst_slice;

/* Says which keys a query sees, by positions in the whole sequence. If all fields but the size are
 * zero, it sees every key. A list has a row for each row of the batch, or one row for all, or 0
 * rows for no list. Row r has counts[r] entries, stored after the entries of the rows before. */
typedef struct burst_mask {
  size_t struct_bytes; /* sizeof(burst_mask) */
  int32_t causal;      /* a token sees itself and earlier ones */
  int64_t window; /* > 0: it sees tokens less than this number of positions away; 0: no limit */
  /* Packed documents, of which a token sees its own only: their first positions, increasing.
   * Position 0 always starts a document. */
  int64_t document_rows;
  const int64_t* document_counts;
  const int32_t* document_starts;
  /* Spans: tokens that see one another, whatever else the mask says. A begin and an end for each,
   * increasing and disjoint, within a document. */
  int64_t span_rows;
  const int64_t* span_counts;
  const int32_t* span_bounds;
  /* The whole mask as a union of slices, instead of the fields above. Null counts: no slices. */
  int64_t slice_rows;
  const int64_t* slice_counts;
  const burst_slice* slices;
} burst_mask;

/* The next functions write the slices of a mask (burst/mask/slices.h) and their number. Null
 * `slices`: only the number. The first makes causal answers to one causal prompt, by their numbers
 * of tokens. */
burst_code burst_slices_tree(int32_t prompt, int64_t answers, const int32_t* lengths,
                             int64_t* count, burst_slice* slices);
/* Makes a window with global tokens (positions in any order), which see all and are seen by all. */
burst_code burst_slices_window_with_global_tokens(int32_t seqlen, int32_t window,
                                                  int64_t global_tokens, const int32_t* positions,
                                                  int32_t causal, int64_t* count,
                                                  burst_slice* slices);
/* Makes sparse blocks of size x size tokens. The queries of block i see counts[i] key blocks, whose
 * numbers follow those of the blocks before in `key_blocks`. */
burst_code burst_slices_blocks(int32_t seqlen, int32_t size, int64_t query_blocks,
                               const int64_t* counts, const int32_t* key_blocks, int32_t causal,
                               int64_t* count, burst_slice* slices);
/* Writes the slopes of ALiBi's paper, one for each head. */
burst_code burst_alibi_slopes(int64_t heads, float* slopes);

/* ---- Schedules */

/* The tokens of the ranks. */
typedef struct burst_sequences {
  size_t struct_bytes; /* sizeof(burst_sequences) */
  int64_t seqlen;      /* the tokens of the sequence, as the attention's layout spreads them */
  /* Instead of seqlen, for tokens that no layout describes. Rank r has lengths[r] tokens. Their
   * positions increase and are stored after those of the ranks before. All positions together are
   * [0, seqlen), each once. Null lengths: the layout decides. */
  const int64_t* lengths;
  const int32_t* positions;
  /* Cross-attention: the queries belong to the sequence above, the keys to another. */
  int32_t is_cross;
  int64_t key_seqlen;     /* its tokens */
  const char* key_layout; /* null: the attention's */
} burst_sequences;

typedef struct burst_schedule burst_schedule;

/* Makes a schedule, without communication; give every rank the same arguments. Null `mask`: every
 * query sees every key, as in cross-attention, which takes slices, too. */
burst_code burst_schedule_create(const burst_attention* attention, const burst_sequences* sequences,
                                 const burst_mask* mask, burst_schedule** schedule);
void burst_schedule_destroy(burst_schedule* schedule);

/* Writes the positions of a rank's tokens under a layout, increasing; null `positions`: only their
 * number. For the layout "balanced", these are the positions without documents; the number is the
 * same with documents. */
burst_code burst_positions(const char* layout, int64_t seqlen, int32_t rank, int32_t size,
                           int64_t* length, int32_t* positions);

/* Writes the positions of a rank's tokens under the layout "balanced", which deals the documents of
 * a mask to the ranks by their work. `group_size`: the number of ranks that divide the heads
 * (ulysses: all ranks; burst+ulysses: the ranks of a group; else 1). */
burst_code burst_balanced_positions(const burst_mask* mask, int64_t seqlen, int32_t rank,
                                    int32_t size, int32_t group_size, int64_t* length,
                                    int32_t* positions);

/* A tensor on the context's device. Strides in elements; unused dimensions are ignored. */
typedef struct burst_tensor {
  void* data;
  burst_dtype dtype;
  int32_t dims;
  int64_t shape[4];
  int64_t strides[4];
} burst_tensor;

/* ---- Calls. The library remembers nothing from one call to the next. A tensor with dims 0 is left
 * out. */

typedef struct burst_call {
  size_t struct_bytes; /* sizeof(burst_call) */
  const burst_schedule* schedule;
  /* Decides which weights are dropped, with a weight's row of the batch, head and positions. Give
   * all ranks of a sequence the same seed, and every layer and step another. */
  uint64_t dropout_seed;
  int32_t wants_max_logits; /* 1: the forward writes burst_result's; not with fp8_forward */
  burst_tensor q; /* [batch, length, heads, head_dim] of this rank's tokens, in order of position;
                   * last stride 1 */
  burst_tensor k; /* [batch, length, kv_heads, head_dim]; kv_heads divides heads; of
                   * cross-attention, of this rank's keys */
  burst_tensor v; /* [batch, length of k, kv_heads, value_dim]; burst_check says whether the kernels
                   * serve another value_dim than head_dim */
  /* [heads] of lse's dtype: a logit of each head that takes part in the softmax and has no value;
   * may be left out. */
  burst_tensor sinks;
} burst_call;

typedef struct burst_result {
  size_t struct_bytes; /* sizeof(burst_result) */
  burst_tensor out;    /* [batch, length, heads, value_dim] */
  /* [batch, heads, length], contiguous, of float32 for tensors of 16 bits, else of q's dtype: the
   * natural log of the softmax's denominator, -inf where no key is seen. */
  burst_tensor lse;
  /* If the call wants it, [batch, heads] of float32 in the host's memory: the largest score of each
   * head over the queries and keys of all ranks, after softcap and ALiBi, without sinks; -inf where
   * no query sees a key. All ranks get the same values. */
  burst_tensor max_logits;
} burst_result;

typedef struct burst_gradients {
  size_t struct_bytes;     /* sizeof(burst_gradients) */
  burst_tensor dout;       /* given, like out */
  burst_tensor dlse;       /* given, like lse; left out: zero */
  burst_tensor dq, dk, dv; /* like q, k and v */
  burst_tensor dsinks; /* like sinks; its sum over the ranks is their gradient; may be left out */
} burst_gradients;

/* Returns BURST_OK if burst_forward takes the call, else BURST_INVALID_ARGUMENT. Not collective. */
burst_code burst_check(burst_attention* attention, const burst_call* call);
/* Computes attention, and writes the result. Collective. */
burst_code burst_forward(burst_attention* attention, const burst_call* call,
                         const burst_result* result);
/* Computes the gradients, and writes dq, dk, dv and dsinks. Collective. The call and the result are
 * the forward's. */
burst_code burst_backward(burst_attention* attention, const burst_call* call,
                          const burst_result* result, const burst_gradients* gradients);

#ifdef __cplusplus
}
#endif

#endif /* BURST_C_BURST_H_ */
