/* Burst for other languages and frameworks: attention over a sequence that is spread over ranks,
 * each a process with a CPU or a GPU. C99; the library is libburst.so. burst/attention says what is
 * computed; the names here are those of its headers.
 *
 *   burst_context* context;   a device, the caller's stream and, if wanted, the caller's memory
 *   burst_comm* comm;         the ranks of one group, from an id that the caller distributes
 *   burst_attention* ring;    what to compute and how to spread it
 *   burst_schedule* tokens;   which tokens each rank has, and which keys each query sees
 *   burst_forward(ring, tokens, &q, &k, &v, &out, &lse);
 *   burst_backward(ring, tokens, &q, &k, &v, &out, &lse, &dout, NULL, &dq, &dk, &dv);
 *
 * Every function that can fail returns a burst_code; burst_last_error() says why. Nothing is
 * thrown, and the library does not end the process.
 *
 * A comm belongs to one set of ranks, and all of them make the same calls on it, and on what was
 * made from it, in the same order; those marked "collective" wait for one another. A context, and
 * all that was made from it, is used by one thread at a time, not always the same one; a thread
 * that comes meanwhile waits. But burst_comm_abort may be called while another thread is in a call,
 * and any thread may destroy an object that none uses, at any time, without a lock: what then needs
 * the device is freed when the call that uses it ends. Objects can be destroyed in any order: each
 * keeps what it was made from. A process that was forked must not use or destroy its parent's
 * objects, except that destroying them does nothing there.
 *
 * On a GPU calls queue work on the context's stream and return; the memory of their tensors must
 * stay as it is until that work is done. Of a lost rank all others learn at their next call, within
 * half a minute; what their GPUs computed meanwhile is undefined.
 */
#ifndef BURST_C_BURST_H_
#define BURST_C_BURST_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Grows with every change; what a program compiled for an older number uses stays as it was.
 * Structs begin with their size, so that later fields can be told to be absent. */
#define BURST_C_VERSION 1
int32_t burst_c_version(void);         /* of the library */
const char* burst_version(void);       /* "0.1.0" */
int32_t burst_cuda_device_count(void); /* GPUs; 0 also in a library built without CUDA */

typedef enum burst_code {
  BURST_OK = 0,
  BURST_INVALID_ARGUMENT = 1, /* nothing was done */
  BURST_UNAVAILABLE = 2, /* a rank was lost, gave up or did not come; the comm is of no more use */
  BURST_OUT_OF_MEMORY = 3, /* of the device or the host; as below. A smaller call may succeed, of
                            * ranks on a new comm */
  BURST_UNSUPPORTED = 4,   /* by this build or machine */
  BURST_INTERNAL = 5       /* an error of CUDA or of the library; of a comm the other ranks learn */
} burst_code;

/* What the last call of this thread that failed said; until the next one that fails. */
const char* burst_last_error(void);

/* ---- Context */

typedef enum burst_device { BURST_CPU = 0, BURST_CUDA = 1 } burst_device;
typedef enum burst_dtype {
  BURST_FLOAT32 = 0,
  BURST_FLOAT64 = 1,
  BURST_BFLOAT16 = 2, /* on GPUs */
  BURST_FLOAT16 = 3   /* on GPUs */
} burst_dtype;

typedef struct burst_context burst_context;

typedef struct burst_context_options {
  size_t struct_bytes; /* sizeof(burst_context_options) */
  burst_device device;
  int32_t index; /* of the GPU, among those that the process sees */
  /* For memory between and during calls; both null: the library's own pool. allocate returns memory
   * of the device, aligned to 64 bytes (GPU: 256), or null. On a GPU the memory is used on the
   * stream that is current then; blocks of up to 1 MiB are kept for later calls, until the context
   * and all that was made from it are gone. `user` is given to both. */
  void* (*allocate)(size_t bytes, void* user);
  void (*release)(void* data, void* user);
  void* user;
} burst_context_options;

burst_code burst_context_create(const burst_context_options* options, burst_context** context);
void burst_context_destroy(burst_context* context);

/* GPU: the stream (a cudaStream_t) for what is queued from here on. It waits for what was queued on
 * the one before. At first it is CUDA's default stream. BURST_UNSUPPORTED, here and in calls, while
 * the stream is captured in a CUDA graph; the capture goes on. */
burst_code burst_context_set_stream(burst_context* context, void* stream);
/* CPU: threads that compute, the caller included; at first 1. Results do not depend on it. */
burst_code burst_context_set_threads(burst_context* context, int32_t threads);

/* ---- Ranks */

/* Names a group that is about to meet. Made by its rank 0; the caller brings it to the others, and
 * to nobody else: it holds the secret by which they know each other. For one burst_comm_create. */
typedef struct burst_unique_id {
  char bytes[192];
} burst_unique_id;

/* In the process that will be rank 0. `address`: a numeric address of this host that the hosts of
 * the other ranks can reach; null: all ranks are on this host, where they meet in a folder. */
burst_code burst_unique_id_create(const char* address, burst_unique_id* id);

typedef struct burst_comm burst_comm;

/* Collective. The ranks are connected by Unix sockets on one host and by TCP, encrypted, between
 * hosts; on GPUs also by NCCL, each with a GPU of its own: the NCCL that the process has loaded,
 * else libnccl.so.2. `timeout_s`: how long ranks wait for one another, here and in later calls,
 * before the group fails; 0: three minutes here, later for ever. */
burst_code burst_comm_create(burst_context* context, const burst_unique_id* id, int32_t rank,
                             int32_t size, double timeout_s, burst_comm** comm);
/* Waits, on a GPU, for work that uses it. The other ranks can finish what does not need this one.
 */
void burst_comm_destroy(burst_comm* comm);
/* This rank makes no more calls: frees what it keeps for the others, of the attentions made from
 * `comm` too, and lets them know that it was not lost. Later calls on these return
 * BURST_INVALID_ARGUMENT. Before a process ends, this or the destruction of all of them. */
burst_code burst_comm_finish(burst_comm* comm);
/* Tells the other ranks that this one cannot go on; their calls return BURST_UNAVAILABLE. */
burst_code burst_comm_abort(burst_comm* comm, const char* reason);
/* Collective. `bytes` of every rank, in host memory, in order of rank: all is size * bytes long. */
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
  int32_t ranks_per_node;      /* > 0: a double ring of nodes of so many ranks; 0: a flat ring */
  int32_t fp8_forward; /* 1: the forward's products in 8 bits (e4m3): Hopper GPUs, 16-bit tensors, a
                        * head_dim from 72 to 128 */
  /* What follows does not go with fp8_forward; burst/kernels/scores.h has the equations. */
  double softcap;      /* > 0: scores s become softcap tanh(s / softcap); 0: none */
  int64_t alibi_heads; /* the length of alibi_slopes: query heads, on all ranks of ulysses, too */
  const float* alibi_slopes; /* in the host's memory, copied: a score loses its head's slope times
                              * the distance of the tokens; null: none */
  double dropout;            /* the probability that a weight is dropped, below 1; 0: none */
  int32_t max_logits;        /* 1: burst_max_logits has something to give */
} burst_attention_options;

typedef struct burst_attention burst_attention;

/* Collective if `comm` is given; null: one rank, which has the whole sequence. The attentions of a
 * comm share its connections, and the ring's buffers, which it keeps between calls: one more
 * attention costs no memory of the device. */
burst_code burst_attention_create(burst_context* context, burst_comm* comm,
                                  const burst_attention_options* options,
                                  burst_attention** attention);
void burst_attention_destroy(burst_attention* attention);
/* Which weights the calls of burst_forward from here on drop, and those of burst_backward, which
 * must have the seed of their forward: a function of the seed and of a weight's row of the batch,
 * head and positions. The same on all ranks of a sequence; another one for every layer and step. At
 * first 0. */
burst_code burst_attention_set_dropout_seed(burst_attention* attention, uint64_t seed);

/* ---- Masks */

/* The queries at the positions [q_begin, q_end) see keys at [k_begin, k_end), which may reach
 * beyond the sequence. Slices may overlap. */
typedef enum burst_slice_kind {
  BURST_SLICE_FULL = 0,
  BURST_SLICE_CAUSAL = 1,         /* of these keys p those with p - k_end <= q - q_end */
  BURST_SLICE_INVERSE_CAUSAL = 2, /* p - k_begin >= q - q_begin */
  BURST_SLICE_BAND = 3            /* both */
} burst_slice_kind;
typedef struct burst_slice {
  int32_t q_begin, q_end, k_begin, k_end;
  int32_t kind;
} burst_slice;

/* Which keys a query sees, by positions in the whole sequence; all zero but the size: every key. A
 * list has the rows of a batch, or one row for all of them, or none: 0 rows. Row r has counts[r]
 * entries, which follow those of the rows before. */
typedef struct burst_mask {
  size_t struct_bytes; /* sizeof(burst_mask) */
  int32_t causal;      /* a token sees itself and earlier ones */
  int64_t window; /* > 0: it sees tokens less than this number of positions away; 0: no limit */
  /* Packed documents: a token sees its own only. Their first positions, increasing; position 0
   * always starts one. */
  int64_t document_rows;
  const int64_t* document_counts;
  const int32_t* document_starts;
  /* Spans: tokens that see one another, whatever else the mask says. A begin and an end for each,
   * increasing and disjoint, within a document. */
  int64_t span_rows;
  const int64_t* span_counts;
  const int32_t* span_bounds;
  /* The whole mask as a union of slices, in place of all that. Null counts: no slices. */
  int64_t slice_rows;
  const int64_t* slice_counts;
  const burst_slice* slices;
} burst_mask;

/* Slices of masks by name (burst/mask/slices.h), into `slices`, and their number; null `slices`:
 * the number only. Causal answers to one causal prompt, by their numbers of tokens: */
burst_code burst_slices_tree(int32_t prompt, int64_t answers, const int32_t* lengths,
                             int64_t* count, burst_slice* slices);
/* A window with global tokens (positions in any order), which see all and are seen by all: */
burst_code burst_slices_window_with_global_tokens(int32_t seqlen, int32_t window,
                                                  int64_t global_tokens, const int32_t* positions,
                                                  int32_t causal, int64_t* count,
                                                  burst_slice* slices);
/* Sparse blocks of size x size tokens: the queries of block i see the key blocks of counts[i]
 * numbers, which follow those of the blocks before in `key_blocks`. */
burst_code burst_slices_blocks(int32_t seqlen, int32_t size, int64_t query_blocks,
                               const int64_t* counts, const int32_t* key_blocks, int32_t causal,
                               int64_t* count, burst_slice* slices);
/* The slopes of ALiBi's paper, one for each head. */
burst_code burst_alibi_slopes(int64_t heads, float* slopes);

/* ---- Schedules */

/* The tokens of the ranks. */
typedef struct burst_sequences {
  size_t struct_bytes; /* sizeof(burst_sequences) */
  int64_t seqlen;      /* the tokens of the sequence, as the attention's layout spreads them */
  /* In place of seqlen, for tokens that no layout describes: rank r has lengths[r] of them, at
   * positions that increase and follow those of the ranks before. All together are [0, seqlen),
   * each once. Null lengths: by the layout. */
  const int64_t* lengths;
  const int32_t* positions;
  /* Cross-attention: the queries are of the sequence above, the keys of another. */
  int32_t is_cross;
  int64_t key_seqlen;     /* its tokens */
  const char* key_layout; /* null: the attention's */
} burst_sequences;

typedef struct burst_schedule burst_schedule;

/* No communication; the same on every rank. Null `mask`: every query sees every key, as in
 * cross-attention, which takes slices, too. */
burst_code burst_schedule_create(const burst_attention* attention, const burst_sequences* sequences,
                                 const burst_mask* mask, burst_schedule** schedule);
void burst_schedule_destroy(burst_schedule* schedule);

/* The positions of a rank's tokens under a layout, increasing; null `positions`: their number only.
 * Of the layout "balanced" without documents, and their number with them. */
burst_code burst_positions(const char* layout, int64_t seqlen, int32_t rank, int32_t size,
                           int64_t* length, int32_t* positions);

/* The positions of a rank's tokens under the layout "balanced", which deals the documents of a mask
 * to the ranks by their work. `group_size`: ranks that divide the heads (of ulysses all, of
 * burst+ulysses those of a group, else 1). */
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

/* Collective.
 *   q         [batch, length, heads, head_dim] of this rank's tokens, in order of position; last
 *             stride 1
 *   k, v      [batch, length, kv_heads, head_dim]; kv_heads divides heads; of cross-attention, of
 *             this rank's keys
 *   out       like q; assigned
 *   lse       [batch, heads, length], contiguous, of float32 for tensors of 16 bits, else of q's
 * dtype: the natural log of the softmax's denominator, -inf where no key is seen; assigned */
burst_code burst_forward(burst_attention* attention, const burst_schedule* schedule,
                         const burst_tensor* q, const burst_tensor* k, const burst_tensor* v,
                         const burst_tensor* out, const burst_tensor* lse);
/* Of the last burst_forward of an attention with `max_logits`: the largest score of each head,
 * after softcap and ALiBi, over the queries and keys of all ranks; -inf where no query sees a key.
 * Assigns max_logits [batch, heads], contiguous, float32; dims: 2. The same on all ranks. */
burst_code burst_max_logits(const burst_attention* attention, const burst_tensor* max_logits);
/* Collective. What burst_forward was given and gave; dout, like out; dlse, like lse, or null: zero.
 * Assigns dq, dk and dv, like q, k and v. */
burst_code burst_backward(burst_attention* attention, const burst_schedule* schedule,
                          const burst_tensor* q, const burst_tensor* k, const burst_tensor* v,
                          const burst_tensor* out, const burst_tensor* lse,
                          const burst_tensor* dout, const burst_tensor* dlse,
                          const burst_tensor* dq, const burst_tensor* dk, const burst_tensor* dv);

#ifdef __cplusplus
}
#endif

#endif /* BURST_C_BURST_H_ */
