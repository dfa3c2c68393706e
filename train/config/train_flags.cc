#include "train/config/train_flags.h"

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"

// Defaults repeat those of TrainConfig; tests/config_test.cc holds them together.
ABSL_FLAG(std::string, data, "kjv",
          "What to train on: a text file, a folder whose files are documents, or a pattern of "
          "llm.c .bin shards. kjv: the King James Bible, which is built in.");
ABSL_FLAG(std::string, val_data, "",
          "What to validate on, of the same kind. Without it: the last tenth of --data.");
ABSL_FLAG(std::string, tokenizer, "auto", "auto, char (the characters of the text) or byte.");
ABSL_FLAG(bool, packed, false,
          "Attention ends at documents: files of a folder, blocks between blank lines of a single "
          "text, end-of-text tokens of shards.");

ABSL_FLAG(std::string, model, "llama_tiny",
          "A preset (llama_tiny, nanogpt_cpu, nanogpt_gpu, d12, ...), or a JSON file (or JSON "
          "itself) with family, layers, width, heads; unless the defaults will do also kv_heads, "
          "ffn, vocab, context, tied_embeddings, dropout, rope_theta, norm_eps, init_std.");
ABSL_FLAG(double, dropout, -1, "Dropout in [0, 1). -1: the model's own.");
ABSL_FLAG(int64_t, seqlen, 256,
          "Tokens of a sequence; any number, also one the ranks don't divide.");
ABSL_FLAG(int64_t, window, 0,
          "Sliding-window attention: keys a query sees, itself included. 0: all.");

ABSL_FLAG(int64_t, batch, 8, "Sequences of a forward and backward pass, over all ranks.");
ABSL_FLAG(int64_t, accumulate, 1, "Passes whose gradients are summed into one step.");
ABSL_FLAG(int64_t, steps, 1000, "Optimizer steps.");
ABSL_FLAG(double, lr, 2e-3, "Highest learning rate.");
ABSL_FLAG(double, min_lr, -1, "Learning rate at the end. -1: lr / 10.");
ABSL_FLAG(int64_t, warmup, -1,
          "Steps over which the learning rate rises. -1: steps / 20, at most 100.");
ABSL_FLAG(std::string, schedule, "cosine",
          "cosine, linear, constant, or wsd (stable, then a linear decay over the last fifth).");
ABSL_FLAG(double, weight_decay, 0.1, "AdamW's decoupled weight decay, on matrices and embeddings.");
ABSL_FLAG(double, beta1, 0.9, "AdamW's decay of the gradients' mean.");
ABSL_FLAG(double, beta2, 0.95, "AdamW's decay of the squared gradients' mean.");
ABSL_FLAG(double, eps, 1e-8, "AdamW's epsilon.");
ABSL_FLAG(double, clip, 1.0, "Largest norm of the gradient; 0: no clipping.");
ABSL_FLAG(int64_t, seed, 1,
          "Of the initial weights, the order of the data, dropout and the sample.");

ABSL_FLAG(std::string, device, "auto", "cpu, cuda, or auto: cuda where a GPU is found.");
ABSL_FLAG(std::string, precision, "auto",
          "fp32, tf32 (fp32 whose products round their factors) or bf16 (with fp32 master weights, "
          "sums and gradients). auto: bf16 on GPUs, fp32 on the CPU.");
ABSL_FLAG(std::string, recompute, "none",
          "What the backward computes again, to save memory: none; full: each layer, of which only "
          "the input is kept; selective: the same but for attention, whose result is kept, too. "
          "Results do not depend on it.");
ABSL_FLAG(int64_t, ranks, -1,
          "Ranks: threads, on cuda each with a GPU of its own, or a launcher's processes. -1: dp "
          "times sp; without them 2 threads (cuda: 1), or as many as there are processes.");
ABSL_FLAG(int64_t, dp, -1,
          "Data parallel: groups of ranks, each with its share of the batch. -1: ranks / sp.");
ABSL_FLAG(int64_t, sp, -1,
          "Sequence parallel: ranks of a group, the ring that shares every sequence; with tp and "
          "tp+sp those that share the model. -1: ranks / dp.");
ABSL_FLAG(
    std::string, comm, "auto",
    "threads of this process; mpi (CPUs, start with mpirun); nccl (a GPU a process, start "
    "with mpirun, torchrun or srun). auto: nccl on GPUs under such a launcher, else threads.");
ABSL_FLAG(std::string, strategy, "burst",
          "How a sequence's attention is spread over its ranks: single (one rank), burst (a ring), "
          "ring (RingAttention), ulysses (all-to-all over heads) or burst+ulysses (all-to-all in "
          "groups, a ring of groups); or the whole model: tp (tensor parallel, as Megatron-LM) or "
          "tp+sp (the same, with the tokens spread between its layers).");
ABSL_FLAG(int64_t, ulysses, -1,
          "Ranks of a group of burst+ulysses, which share the heads. -1: as many as divide the "
          "ranks and the key heads.");
ABSL_FLAG(int64_t, ranks_per_node, -1,
          "A double ring, for clusters: so many neighbouring ranks of a sequence are on one node; "
          "what leaves a node crosses while blocks go around in it. 0: one flat ring. -1: what a "
          "launcher says of its hosts.");
ABSL_FLAG(std::string, layout, "zigzag",
          "How a sequence is spread over ranks: contiguous, zigzag or striped.");
ABSL_FLAG(
    std::string, backward, "auto",
    "What travels in the backward of a burst: queries (burst), keys and values (ring), or auto: "
    "what is fewer bytes.");
ABSL_FLAG(
    std::string, ring_grad_dtype, "fp32",
    "What gradients are while they travel around a ring: fp32 or, with --precision=bf16, bf16 "
    "(fewer bytes, a rounding at every hop; sums stay fp32).");
ABSL_FLAG(int64_t, threads, -1, "Threads of a rank. -1: cores / ranks.");
ABSL_FLAG(bool, deterministic, true,
          "Bitwise equal from run to run. CPU kernels always are; others may be faster without.");

ABSL_FLAG(std::string, config, "", "A JSON file with options as keys; the command line wins.");
ABSL_FLAG(std::string, out, "",
          "Folder for metrics.jsonl, config.json, checkpoint.safetensors and loss.svg. Without it: "
          "runs/<model>-<number>.");
ABSL_FLAG(bool, resume, false,
          "Go on with the run in --out, with its configuration and what is given here.");
ABSL_FLAG(int64_t, eval_every, 200, "Steps between evaluations; 0: none.");
ABSL_FLAG(int64_t, eval_batches, 16,
          "Batches of an evaluation, spread evenly over the validation data; 0: all of it.");
ABSL_FLAG(int64_t, checkpoint_every, 200, "Steps between checkpoints; 0: one at the end.");
ABSL_FLAG(int64_t, log_every, 10, "Steps between lines when the output is not a terminal.");
ABSL_FLAG(int64_t, sample, -1,
          "Tokens to generate at the end. -1: 256 for text, none for shards (they have no "
          "tokenizer).");

namespace burst {
namespace {

const std::vector<FlagGroup>& Groups() {
  static const auto* groups = new std::vector<FlagGroup>{
      {"Data", {"data", "val_data", "tokenizer", "packed"}},
      {"Model", {"model", "dropout", "seqlen", "window"}},
      {"Optimization",
       {"batch", "accumulate", "steps", "lr", "min_lr", "warmup", "schedule", "weight_decay",
        "beta1", "beta2", "eps", "clip", "seed"}},
      {"Devices and ranks",
       {"device", "precision", "recompute", "ranks", "dp", "sp", "comm", "strategy", "ulysses",
        "ranks_per_node", "layout", "backward", "ring_grad_dtype", "threads", "deterministic"}},
      {"Output",
       {"out", "resume", "config", "eval_every", "eval_batches", "checkpoint_every", "log_every",
        "sample"}},
  };
  return *groups;
}

}  // namespace

absl::StatusOr<TrainConfig> TrainConfigFromArguments(int argc, char** argv) {
  // The command line is read once to find the files, and again to win over them.
  BURST_RETURN_IF_ERROR(ParseArguments(Groups(), argc, argv));
  const std::string out = ResolvePath(absl::GetFlag(FLAGS_out));
  const std::string config_file = ResolvePath(absl::GetFlag(FLAGS_config));
  if (absl::GetFlag(FLAGS_resume) && !out.empty()) {
    const absl::Status status = ParseConfigFile(Groups(), out + "/config.json");
    if (!status.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat("--resume: ", out, " holds no run to continue: ", status.message()));
    }
  }
  if (!config_file.empty()) {
    const absl::Status status = ParseConfigFile(Groups(), config_file);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--config: ", status.message()));
    }
  }
  BURST_RETURN_IF_ERROR(ParseArguments(Groups(), argc, argv));

  TrainConfig config;
  for (const std::string& name : OptionNames()) {
    absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    BURST_CHECK(flag != nullptr) << "no flag for the option " << name;
    BURST_RETURN_IF_ERROR(SetOption(&config, name, flag->CurrentValue()));
  }
  return config;
}

std::string TrainHelp() {
  return HelpText(
      "Trains a Transformer whose attention runs over a ring of ranks (BurstAttention).\n"
      "\n"
      "  bazel run //train                                   a small model on a book, two minutes\n"
      "  bazel run //train -- --data=my.txt --ranks=4        your text, four ranks\n"
      "  bazel run //train -- --resume --out=runs/NAME       go on\n"
      "  bazel run //train:generate -- --checkpoint=runs/NAME --prompt='In the beginning'\n"
      "\n"
      "Options, with their defaults. Relative paths start where the command is given. Ctrl-C\n"
      "finishes the step, writes a checkpoint and exits with 130.\n",
      Groups());
}

}  // namespace burst
