#include "train/config/config.h"

#include "absl/strings/str_cat.h"
#include "burst/base/enum_names.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "train/checkpoint/kept_checkpoints.h"

namespace burst {
namespace {

constexpr EnumName<CommChoice> kComms[] = {{CommChoice::kAuto, "auto"},
                                           {CommChoice::kThreads, "threads"},
                                           {CommChoice::kTcp, "tcp"},
                                           {CommChoice::kMpi, "mpi"},
                                           {CommChoice::kNccl, "nccl"}};

constexpr EnumName<DeviceChoice> kDevices[] = {
    {DeviceChoice::kAuto, "auto"}, {DeviceChoice::kCpu, "cpu"}, {DeviceChoice::kCuda, "cuda"}};

constexpr EnumName<Precision> kPrecisions[] = {{Precision::kAuto, "auto"},
                                               {Precision::kFp32, "fp32"},
                                               {Precision::kTf32, "tf32"},
                                               {Precision::kBf16, "bf16"},
                                               {Precision::kFp8, "fp8"}};

constexpr EnumName<CheckpointFiles> kCheckpointFiles[] = {{CheckpointFiles::kAuto, "auto"},
                                                          {CheckpointFiles::kOne, "one"},
                                                          {CheckpointFiles::kRanks, "ranks"}};

constexpr EnumName<Resume> kResumes[] = {
    {Resume::kNo, "false"}, {Resume::kYes, "true"}, {Resume::kAuto, "auto"}};

constexpr EnumName<Offload> kOffloads[] = {{Offload::kNone, "none"},
                                           {Offload::kActivations, "activations"},
                                           {Offload::kOptimizer, "optimizer"},
                                           {Offload::kAll, "all"}};
absl::StatusOr<Offload> ParseOffload(absl::string_view text) {
  return ParseName("offload", text, kOffloads);
}

absl::StatusOr<CheckpointFiles> ParseCheckpointFiles(absl::string_view text) {
  return ParseName("number of files", text, kCheckpointFiles);
}

absl::StatusOr<Resume> ParseResume(absl::string_view text) {
  bool flag = false;
  if (ParseOption(text, &flag).ok()) return flag ? Resume::kYes : Resume::kNo;
  return ParseName("choice", text, kResumes);
}

absl::StatusOr<CommChoice> ParseComm(absl::string_view text) {
  return ParseName("transport", text, kComms);
}

absl::StatusOr<Precision> ParsePrecision(absl::string_view text) {
  return ParseName("precision", text, kPrecisions);
}

}  // namespace

const char* Name(CommChoice comm) { return NameOf(comm, kComms); }
const char* Name(Resume resume) { return NameOf(resume, kResumes); }
const char* Name(Offload offload) { return NameOf(offload, kOffloads); }
const char* Name(CheckpointFiles files) { return NameOf(files, kCheckpointFiles); }
const char* Name(DeviceChoice device) { return NameOf(device, kDevices); }
const char* Name(Precision precision) { return NameOf(precision, kPrecisions); }

absl::StatusOr<DeviceChoice> ParseDeviceChoice(absl::string_view text) {
  return ParseName("device", text, kDevices);
}

OptionTable TrainOptions(TrainConfig* c) {
  // A resumed run may change how long, how fast and on what it trains, and what it shows. With
  // another value of a kMustAgree option it would be another run.
  constexpr OnResume kMustAgree = OnResume::kMustAgree, kMayChange = OnResume::kMayChange,
                     kNotSaved = OnResume::kNotSaved;
  // The processes of a job must have equal values of all but those with another scope.
  OptionTable t;
  t.Group("Data");
  t.Add("data", &c->data, kMayChange,
        "What to train on: a text file, a folder whose files are documents, files named .jsonl "
        "whose "
        "lines are documents, or a pattern of llm.c .bin shards. kjv: the King James Bible, which "
        "is "
        "built in.")
      .scope = Scope::kHost;
  t.Add("val_data", &c->val_data, kMayChange,
        "What to validate on, of the same kind. Without it: the last tenth of --data.")
      .scope = Scope::kHost;
  t.Add("field", &c->field, kMayChange, "Of lines of JSON (.jsonl): the key of the text.");
  t.Add("tokenizer", &c->tokenizer, kMustAgree,
        "char (the characters of the text), byte, or a file: tokenizer.model (Llama 2, Mistral, "
        "...), "
        "tokenizer.json (Llama 3, Qwen, ...), or a folder with one of them or with GPT-2's "
        "encoder.json and vocab.bpe. auto: the own tokenizer of a model that --model brings with "
        "weights, else char. Shards have tokens already; with the file that they were made with, "
        "there "
        "is a sample of text.")
      .scope = Scope::kHost;
  t.Add(
      "packed", &c->packed, kMustAgree,
      "Attention ends at documents: files of a folder, lines of .jsonl, blocks between blank lines "
      "of a single text, end-of-text tokens of shards. The end of a document is learned where "
      "there is an end-of-text token.");
  t.Add("data_cache", &c->data_cache, kMayChange,
        "Folder for what is computed from the data once: a text's tokens, two bytes each, and what "
        "a scan of shards finds. Without it: .data-cache beside the run's folder. The eight files "
        "used last are kept.")
      .scope = Scope::kHost;

  t.Group("Model");
  t.Add("model", &c->model, kMayChange,
        "A preset (llama_tiny, nanogpt_cpu, nanogpt_gpu, d12, ...); a JSON file (or JSON itself) "
        "with family, layers, width, heads; unless the defaults will do also kv_heads, head_dim, "
        "ffn, "
        "vocab, context, tied_embeddings, dropout, attention_dropout, "
        "attention_softcap, attention_sinks, qkv_bias, qk_norm, rope_theta, rope_scaling, "
        "norm_eps, init_std; or a folder with weights to start from: a Hugging Face directory, or "
        "the "
        "folder of an import or a run.")
      .scope = Scope::kHost;
  t.Add("dropout", &c->dropout, kMustAgree, "Dropout in [0, 1). -1: the model's own.");
  t.Add("attention_dropout", &c->attention_dropout, kMustAgree,
        "Dropout of attention's weights, in [0, 1). -1: the model's own. Not with --exact and "
        "--attention_fp8.");
  t.Add("attention_softcap", &c->attention_softcap, kMustAgree,
        "c: attention's scores s become c tanh(s / c), in training, evaluation and generation, as "
        "in Gemma 2. 0: they stay. -1: the model's own. Not with --exact and --attention_fp8.");
  t.Add("attention_sinks", &c->attention_sinks, kMustAgree,
        "A learned logit of each query head takes part in attention's softmax and has no value, as "
        "in gpt-oss. false: as the model has it.");
  t.Add("seqlen", &c->seqlen, kMustAgree,
        "Tokens of a sequence; any number, also one that the ranks do not divide.");
  t.Add("window", &c->window, kMustAgree,
        "Sliding-window attention: keys a query sees, itself included. 0: all. -1: as many as the "
        "model that --model brings with weights; else all.");

  t.Group("Optimization");
  t.Add("batch", &c->batch, kMustAgree, "Sequences of a micro-batch, over all ranks.");
  t.Add("accumulate", &c->accumulate, kMustAgree,
        "Micro-batches of a step, whose gradients are accumulated.");
  t.Add("steps", &c->steps, kMayChange, "Optimizer steps.");
  t.Add("lr", &c->lr, kMayChange, "Highest learning rate.");
  t.Add("min_lr", &c->min_lr, kMayChange, "Learning rate at the end. -1: lr / 10.");
  t.Add("warmup", &c->warmup, kMayChange,
        "Steps over which the learning rate rises. -1: steps / 20, at most 100.");
  t.Add("schedule", &c->schedule, ParseLrShape, kMayChange,
        "cosine, linear, constant, or wsd (stable, then a linear decay over the last fifth).");
  t.Add("weight_decay", &c->weight_decay, kMustAgree,
        "AdamW's decoupled weight decay, on matrices and embeddings.");
  t.Add("beta1", &c->beta1, kMustAgree, "AdamW's decay of the gradients' mean.");
  t.Add("beta2", &c->beta2, kMustAgree, "AdamW's decay of the squared gradients' mean.");
  t.Add("eps", &c->eps, kMustAgree, "AdamW's epsilon.");
  t.Add("clip", &c->clip, kMayChange, "Largest norm of the gradient; 0: no clipping.");
  t.Add("seed", &c->seed, kMustAgree,
        "Of the initial weights, the order of the data, dropout and the sample.");

  t.Group("Devices and ranks");
  t.Add("device", &c->device, ParseDeviceChoice, kMayChange,
        "cpu, cuda, or auto: cuda where a GPU is found.");
  t.Add("precision", &c->precision, ParsePrecision, kMayChange,
        "fp32, tf32 (fp32 whose GEMMs round their factors), bf16 (with fp32 master weights, "
        "accumulators and gradients), or fp8 (bf16 whose layers round the factors of their linear "
        "products to 8 bits, with a scale for each tensor). auto: bf16 on GPUs, fp32 on the CPU.");
  t.Add(
      "recompute", &c->recompute, ParseRecompute, kMayChange,
      "What the backward pass computes again, to save memory: none; full: each layer, of which "
      "only the input is stored; selective: the same but for attention, whose result is stored, "
      "too; sequence: the same, but of the sequence's later half alone, for the earlier half is a "
      "quarter of the attention. Results do not depend on it, with sequence to rounding.");
  t.Removed("recompute_every", "give --recompute_segment, or --recompute=selective");
  t.Add(
      "recompute_segment", &c->recompute_segment, kMayChange,
      "With --recompute: of so many layers in a row only the input of the first one is stored. The "
      "backward pass computes the row again, of which each layer then stores what --recompute "
      "says, for its own backward. Results do not depend on it.");
  t.Add("ffn_chunk", &c->ffn_chunk, kMayChange,
        "Feed-forwards take so many tokens at a time and store nothing; the backward pass computes "
        "them again. Memory then does not grow with tokens times ffn. Results change by roundings. "
        "0: all tokens at once.");
  t.Add(
      "head_chunk", &c->head_chunk, kMayChange,
      "Attention takes so many KV heads, with their query heads, at a time, from their projection "
      "on; the backward pass projects them again. What attention needs besides its result then is "
      "that of these heads. Results change by roundings. 0: all heads at once.");
  t.Add(
      "offload", &c->offload, ParseOffload, kMayChange,
      "On cuda, what is in the host's memory. activations, with --recompute: what layers keep "
      "waits there for the backward; the copies run beside the kernels. optimizer: AdamW's moments "
      "and the fp32 master weights; the update streams them through the GPU. all: both. none: all "
      "stays on the GPU. Results do not depend on it.");
  t.Add(
      "zero", &c->zero, kMayChange,
      "What the ranks that have the same parameters divide between them, to save memory (ZeRO). 1: "
      "what the optimizer keeps; 2: gradients, too; 3: and the parameters themselves. 0: nothing. "
      "Ranks of --tp have different ones.");
  t.Add("ranks", &c->ranks, kMayChange,
        "Ranks: threads of this process (on cuda each owns one GPU), or a launcher's processes. "
        "-1: dp times pp times sp times tp; without them 2 threads (cuda: 1), or as many as there "
        "are processes.");
  t.Add(
      "dp", &c->dp, kMayChange,
      "Data parallel: groups of ranks, each with its share of the batch. -1: ranks / (pp sp tp).");
  t.Add("sp", &c->sp, kMayChange,
        "Sequence parallel: ranks of a group, the ring that shares every sequence. -1: ranks / (dp "
        "pp tp).");
  t.Add("tp", &c->tp, kMayChange,
        "Tensor parallel: ranks of a group, which share the weights, the heads and the hidden "
        "channels of the layers, and between the layers the tokens (as --strategy=tp+sp). Beside "
        "--sp every rank of the ring is such a group. -1: 1, or with --strategy=tp and tp+sp "
        "--sp, or ranks / (dp pp).");
  t.Add("pp", &c->pp, kMayChange,
        "Pipeline parallel: stages, each with a part of the layers. Micro-batches (--accumulate) "
        "pass them one behind another; a stage is idle for (pp - 1) / (accumulate pp_chunks) of "
        "the time in which it computes. dp times pp times sp times tp are the ranks.");
  t.Add("pp_chunks", &c->pp_chunks, kMayChange,
        "Runs of layers of each stage of --pp. 1: the schedule 1F1B. More: the interleaved one, "
        "which is idle for less time and sends more messages; --pp divides --accumulate.");
  t.Add("comm", &c->comm, ParseComm, kMayChange,
        "threads of this process; or processes that mpirun, torchrun or srun started: tcp (CPUs, "
        "sockets), mpi (CPUs, mpirun alone), nccl (each owns one GPU). auto: threads; under a "
        "launcher nccl on GPUs and tcp on CPUs. Processes on several hosts need BURST_TOKEN "
        "(SECURITY.md) unless MPI connects them.");
  t.Add("strategy", &c->strategy, ParseStrategy, kMayChange,
        "How a sequence's attention is spread over its ranks: single (one rank), burst (a ring), "
        "ring (RingAttention), ulysses (all-to-all over heads) or burst+ulysses (all-to-all in "
        "groups, a ring of groups); or not at all: tp (all ranks are tensor parallel, as in "
        "Megatron-LM) or tp+sp (the same, with the tokens spread between the layers). --tp beside "
        "single, burst and ring is both.");
  t.Add("ulysses", &c->ulysses, kMayChange,
        "Ranks of a group of burst+ulysses, which share the heads. -1: as many as divide the "
        "ranks and the KV heads.");
  t.Add("ranks_per_node", &c->ranks_per_node, kMayChange,
        "A double ring, for clusters: so many neighboring ranks of a sequence are on one node; "
        "blocks go around inside the nodes while others are sent to the next node. 0: one flat "
        "ring. -1: what a launcher says of its hosts.");
  t.Add("layout", &c->layout, ParseLayout, kMayChange,
        "How a sequence is spread over ranks: contiguous, zigzag, striped or, with --packed, "
        "balanced (whole documents where that gives every rank nearly the same work; else "
        "zigzag).");
  t.Add("ring_backward", &c->ring_backward, ParseBackwardDirection, kMayChange,
        "What goes around the ring in the backward pass of burst and burst+ulysses: queries "
        "(burst), keys and values (ring), or auto: what is fewer bytes.");
  t.Add("ring_grad_dtype", &c->ring_grad_dtype, ParseRingGradDType, kMayChange,
        "Type of the gradients that go around a ring: fp32 or, where activations are bf16, bf16 "
        "(fewer bytes, a rounding at every transfer; accumulators stay fp32).");
  t.Add("threads", &c->threads, kMayChange, "Threads of each rank on the CPU. -1: cores / ranks.")
      .scope = Scope::kProcess;
  t.Add("deterministic", &c->deterministic, kMayChange,
        "Bitwise equal from run to run. CPU kernels always are; others may be faster without.");
  t.Add("attention_fp8", &c->attention_fp8, kMayChange,
        "Attention's forward in 8 bits (e4m3), its backward in bf16: faster where sequences are "
        "long, "
        "with the error that docs/kernels.md shows. On Hopper GPUs, with --precision=bf16 and a "
        "head_dim from 72 to 128; not with --exact.");
  t.Add("exact", &c->exact, kMustAgree,
        "The same bits on any number of ranks, in any layout: losses, gradients and weights, also "
        "of a run that is resumed on other ranks. Costs time, and memory for the keys and values "
        "of all tokens and for a second gradient in fp64 (docs/training/several_gpus.md). For "
        "--strategy burst and single; not for --zero=2 and 3, --head_chunk and "
        "--recompute=sequence.");
  t.Add("exact_chunk", &c->exact_chunk, kMustAgree,
        "With --exact: the tokens of a chunk, which no rank divides. The bits depend on it. A "
        "multiple of 16 that divides --seqlen, or a multiple of that: whole sequences, for data "
        "parallel ranks. Longer chunks are faster. 0: the largest divisor up to 8192 that leaves 8 "
        "chunks or more; where there is none, the smallest.");
  t.Add("patience", &c->patience, kMayChange,
        "Seconds without progress on any rank after which the run ends and says where every rank "
        "is. 0: it waits without end. Processes of a launcher wait as long for one another to "
        "come, at most 180.")
      .scope = Scope::kProcess;

  t.Add("plan", &c->plan, kMayChange,
        "On cuda, a step that does not fit a GPU's memory is refused before the first one, with "
        "what to change (//train:plan). On cpu, a model whose weights, gradients and moments alone "
        "do not fit. --noplan: it is tried.");

  t.Group("Output");
  t.Add("out", &c->out, kNotSaved,
        "Folder for metrics.jsonl, config.json, checkpoints and loss.svg. Without it: "
        "runs/<model>-<number>.")
      .scope = Scope::kHost;
  t.AddSwitch(
      "resume", &c->resume_mode, ParseResume, kNotSaved,
      "Continue the run in --out, with its configuration and what is given here. Waits up to a "
      "minute for a run that is still at work there. A run that has made its steps ends at once, "
      "with 0. auto: start the run where --out has no checkpoint, else continue it.");
  t.Add("config", &c->config, kNotSaved, "A JSON file with options as keys; the command line wins.")
      .scope = Scope::kHost;
  t.Add("eval_every", &c->eval_every, kMayChange, "Steps between evaluations; 0: none.");
  t.Add("eval_batches", &c->eval_batches, kMayChange,
        "Batches of an evaluation, spread evenly over the validation data; 0: all of it.");
  t.Add("checkpoint_every", &c->checkpoint_every, kMayChange,
        "Steps between checkpoints; 0: one at the end.");
  t.Add(
      "checkpoint_files", &c->checkpoint_files, ParseCheckpointFiles, kMayChange,
      "one: rank 0 writes a checkpoint as one file; ranks: each rank writes its share of it, into "
      "a folder that all ranks see; with several ranks. auto: ranks with --zero or tensor "
      "parallelism, else one. Any run continues from either.");
  t.Add("keep", &c->keep, kMayChange,
        "Checkpoints to keep, the newest ones; and the best by validation loss of those that are "
        "saved right after an evaluation.");
  t.Add("log_every", &c->log_every, kMayChange,
        "Steps between lines when the output is not a terminal.");
  t.Add("tensorboard", &c->tensorboard, kMayChange,
        "Also write the metrics as an event file of TensorBoard into the run's folder.");
  t.Add("profile_steps", &c->profile_steps, kNotSaved,
        "Steps to profile on a GPU, FIRST-LAST or one: the CUDA profiler runs during them, with an "
        "NVTX range for each step, phase, layer and op; for `nsys profile "
        "--capture-range=cudaProfilerApi`.")
      .scope = Scope::kProcess;
  t.Add("sample", &c->sample, kMayChange,
        "Tokens to generate at the end. -1: 256; none for shards without --tokenizer, and with "
        "--zero=3, where rank 0 would load the whole model for it.");
  return t;
}

absl::StatusOr<TrainConfig> TrainConfigFromArguments(int argc, char** argv) {
  TrainConfig config;
  OptionTable options = TrainOptions(&config);
  // The command line is read once to find the files, and again to win over them.
  BURST_RETURN_IF_ERROR(options.ParseArguments(argc, argv));
  const std::string out = ResolvePath(config.out), file = ResolvePath(config.config);
  const bool has_run = !out.empty() && HoldsCheckpoints(out);
  config.resume =
      config.resume_mode == Resume::kYes || (config.resume_mode == Resume::kAuto && has_run);
  if (config.resume && !out.empty()) {
    const absl::Status status = options.ParseFile(out + "/config.json");
    if (!status.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat("--resume: ", out, " holds no run to continue: ", status.message()));
    }
  }
  if (!file.empty()) {
    const absl::Status status = options.ParseFile(file);
    if (!status.ok()) return InvalidOption("config", status.message());
  }
  BURST_RETURN_IF_ERROR(options.ParseArguments(argc, argv));
  return config;
}

std::string TrainHelp() {
  TrainConfig defaults;
  return TrainOptions(&defaults).Help(
      "Trains a Transformer whose attention runs over a ring of ranks (BurstAttention).\n"
      "\n"
      "  bazel run //train                                   a small model on a book, two minutes\n"
      "  bazel run //train -- --data=my.txt --ranks=4        your text, four ranks\n"
      "  bazel run //train -- --resume --out=runs/NAME       continue a run\n"
      "  bazel run //train -- --resume=auto --out=runs/NAME  start it, or continue it\n"
      "  bazel run //train:generate -- --checkpoint=runs/NAME --prompt='In the beginning'\n"
      "\n"
      "Options, with their defaults. Relative paths start where the command is given. Ctrl-C\n"
      "(or SIGTERM, SIGUSR1) finishes the step, writes a checkpoint and exits with 130.\n");
}

std::string ResolvedConfig::ToJson() const {
  TrainConfig given = given_;
  return TrainOptions(&given).ToJson();
}

std::vector<AgreedItem> ResolvedConfig::AgreedOptions(bool one_host) const {
  TrainConfig given = given_;
  std::vector<AgreedItem> items = burst::AgreedOptions(TrainOptions(&given), one_host);
  // What this host made of options that leave a choice.
  items.push_back({"--device", Name(device)});
  items.push_back({"--precision", tf32 ? "tf32" : Name(dtype)});
  items.push_back({"--dp, --pp, --sp and --tp", absl::StrCat(mesh.data, ", ", mesh.stages, ", ",
                                                             mesh.sequence, " and ", mesh.tensor)});
  items.push_back({"--checkpoint_files", checkpoint_sets ? "ranks" : "one"});
  return items;
}

absl::Status ResolvedConfig::CheckResume(absl::string_view config_json) const {
  TrainConfig before, after = given_;
  OptionTable options = TrainOptions(&before);
  BURST_RETURN_IF_ERROR(options.ParseJson(config_json));
  return OptionTable::CheckResume(options, TrainOptions(&after));
}

}  // namespace burst
