// The table of options of //train. It has a row for each field of TrainConfig.
#include "absl/strings/str_cat.h"
#include "train/config/config.h"
#include "train/config/conflicts.h"

namespace burst {
namespace {

// A resumed run may change how long, how fast and on which devices it trains, and what it prints.
// With another value of any other option it would be another run.
//
// The processes of a job must have equal values, except in rows with another scope.

void AddDataOptions(TrainConfig* c, OptionTable* t) {
  t->Group("data");
  t->Add("data", &c->data)
      .Basic()
      .MayChange()
      .Of(Scope::kHost)
      .Help(
          "Train on a text, a folder, .jsonl lines, .bin shards, or a mixture, a:0.7,b:0.3. kjv: "
          "the "
          "King James Bible, built in.");
  t->Add("val_data", &c->val_data)
      .Basic()
      .MayChange()
      .Of(Scope::kHost)
      .Help("Validate on this, of the same kind. Empty: the last tenth of --data.");
  t->Add("field", &c->lines.field).MayChange().Help(kFieldHelp);
  t->Add("bad_lines", &c->lines.bad_lines, ParseBadLines).MayChange().Help(kBadLinesHelp);
  t->Add("tokenizer", &c->tokenizer)
      .Basic()
      .Of(Scope::kHost)
      .Help(
          "Make tokens by char, byte, tokenizer.model, tokenizer.json, or a folder of one. auto: "
          "the own tokenizer of --model, else char.");
  t->Add("packed", &c->packed)
      .Help(
          "End attention at documents: files of a folder, .jsonl lines, blocks between blank "
          "lines, end-of-text tokens of shards.");
  t->Add("data_cache", &c->data_cache)
      .MayChange()
      .Of(Scope::kHost)
      .Help(
          "Keep tokens of texts and scans of shards in this folder, the eight files used last. "
          "Empty: .data-cache next to the folder of the run.");
}

void AddModelOptions(TrainConfig* c, OptionTable* t) {
  t->Group("model");
  t->Add("model", &c->model)
      .Basic()
      .MayChange()
      .Of(Scope::kHost)
      .Help(
          "Train a preset (llama_tiny, nanogpt_cpu, d12, ...), a JSON file or JSON "
          "(docs/training/models.md), or start from a folder with weights.");
  t->Add("model.dropout", &c->dropout)
      .Min(0)
      .Below(1)
      .Or(-1)
      .Help("Drop activations with this probability. -1: as the model says.");
  t->Add("model.attention_dropout", &c->attention_dropout)
      .Min(0)
      .Below(1)
      .Or(-1)
      .Help("Drop weights of attention with this probability. -1: as the model says.");
  t->Add("model.attention_softcap", &c->attention_softcap)
      .Min(0)
      .Or(-1)
      .Help(
          "Cap the scores s of attention at C, as C tanh(s / C). 0: no cap. -1: as the model "
          "says.");
  t->Add("model.logits_softcap", &c->logits_softcap)
      .Min(0)
      .Or(-1)
      .Help("Cap the logits l at C, as C tanh(l / C). 0: no cap. -1: as the model says.");
  t->Add("model.attention_sinks", &c->attention_sinks)
      .Help(
          "Add a learned logit of each query head to the softmax of attention. false: as the "
          "model says.");
  t->Add("model.rope_theta", &c->rope_theta)
      .Min(1)
      .Or(-1)
      .Help("Set the base of RoPE's angles. -1: as the model says.");
  t->Add("model.yarn_factor", &c->yarn_factor)
      .Min(1)
      .Max(1e6)
      .Or(-1)
      .Help("Scale RoPE by YaRN for contexts F times as long. -1: as the model says.");
  t->Add("model.yarn_context", &c->yarn_context)
      .Min(1)
      .Or(-1)
      .Unit("tokens")
      .Help("Count --model.yarn_factor from contexts of N tokens. -1: from the model's.");
  t->Add("model.vocab", &c->vocab)
      .Min(1)
      .Or(-1)
      .Unit("tokens")
      .Help(
          "Enlarge the vocabulary of a model with weights; each new row is the mean of the old "
          "ones. -1: as the model says.");
  t->Add("ignore_fields", &c->ignore_fields)
      .MayChange()
      .Help("Read config.json of --model without these fields, separated by commas.");
  // A file of an earlier version, or a run's config.json, may name these options.
  for (const char* key : {"dropout", "attention_dropout", "attention_softcap", "attention_sinks"}) {
    t->Renamed(key, absl::StrCat("model.", key));
  }
  t->Add("seqlen", &c->seqlen)
      .Basic()
      .Min(1)
      .Unit("tokens")
      .Help("Train on sequences of N tokens; the ranks need not divide N.");
  t->Add("window", &c->window)
      .Min(-1)
      .Unit("keys")
      .Help(
          "Let each query see its last N keys, but in the model's full_layers. 0: all. -1: as the "
          "weights of --model, else all.");
}

void AddOptimizationOptions(TrainConfig* c, OptionTable* t) {
  t->Group("optimization");
  t->Add("batch", &c->batch)
      .Basic()
      .Min(1)
      .Unit("sequences")
      .Help("Put N sequences into a micro-batch, over all ranks.");
  // A larger number is a typing error.
  t->Add("accumulate", &c->accumulate)
      .Basic()
      .Min(1)
      .Max(1 << 20)
      .Unit("micro-batches")
      .Help("Accumulate the gradients of N micro-batches in a step.");
  t->Add("steps", &c->steps)
      .Basic()
      .Min(1)
      .Or(-1)
      .MayChange()
      .Help("Take N steps of the optimizer. -1: as --tokens or --epochs say, else 1,000.");
  t->Add("tokens", &c->tokens)
      .Min(0)
      .Unit("tokens")
      .MayChange()
      .Help("Train on N tokens, rounded up to a step. 0: as --steps says.");
  t->Add("epochs", &c->epochs)
      .Min(0)
      .Max(1e6)
      .MayChange()
      .Help("Visit the training data N times, rounded up to a step. 0: as --steps says.");
  t->Add("lr", &c->lr)
      .Basic()
      .Above(0)
      .Max(1e30)
      .MayChange()
      .Help("Set the highest learning rate.");
  t->Add("min_lr", &c->min_lr)
      .Min(0)
      .Or(-1)
      .MayChange()
      .Help("Set the learning rate at the end. -1: lr / 10.");
  t->Add("warmup", &c->warmup)
      .Min(-1)
      .Unit("steps")
      .MayChange()
      .Help("Raise the learning rate over N steps. -1: steps / 20, at most 100.");
  t->Add("schedule", &c->schedule, ParseLrShape)
      .MayChange()
      .Help(
          "Lower the learning rate as cosine, linear, constant, or wsd (stable, then linear over "
          "the last fifth).");
  t->Add("optimizer", &c->optimizer, kOptimizers)
      .Help(
          "Update by adamw, or the layers' matrices by muon, with AdamW's learning rate, and the "
          "rest by AdamW.");
  t->Add("muon_momentum", &c->muon_momentum)
      .Min(0)
      .Below(1)
      .Help("Set Muon's decay of the mean gradient.");
  t->Add("weight_decay", &c->weight_decay)
      .Min(0)
      .Help("Decay matrices and embeddings by AdamW's decoupled weight decay.");
  t->Add("beta1", &c->beta1).Min(0).Below(1).Help("Set AdamW's decay of the mean gradient.");
  t->Add("beta2", &c->beta2)
      .Min(0)
      .Below(1)
      .Help("Set AdamW's decay of the mean squared gradient.");
  t->Add("eps", &c->eps).Above(0).Help("Set AdamW's epsilon.");
  t->Add("clip", &c->clip).Min(0).MayChange().Help("Clip the norm of the gradient. 0: never.");
  t->Add("ema", &c->ema)
      .Min(0)
      .Below(1)
      .Help(
          "Keep an average of the weights that decays by D a step, for //train:export --ema and a "
          "validation loss of its own. 0: none.");
  t->Add("z_loss", &c->z_loss)
      .Min(0)
      .Help("Add Z times the squared logsumexp of the logits to the loss of training.");
  t->Add("seed", &c->seed)
      .Min(0)
      .Help("Seed the initial weights, the order of the data, dropout and the sample.");
}

void AddMemoryOptions(TrainConfig* c, OptionTable* t) {
  t->Group("memory");
  t->Add("recompute", &c->recompute, ParseRecompute)
      .Basic()
      .MayChange()
      .Says("; $0 recomputation in the backward pass")
      .Help(
          "Recompute layers in the backward pass: full, selective (all but attention), or "
          "sequence (attention of the first half, too). none: store everything.");
  t->Removed("recompute_every", "give --recompute_segment, or --recompute=selective");
  t->Removed("attention_fp8", "give --precision=fp8");
  t->Add("recompute_segment", &c->recompute_segment)
      .Min(1)
      .Unit("layers")
      .MayChange()
      .Says(" of $0 layers in a row")
      .Help("Store only the input of every N-th layer for --recompute.");
  t->Add("ffn_chunk", &c->ffn_chunk)
      .Min(0)
      .Unit("tokens")
      .MayChange()
      .Says("; feed-forwards of $0 tokens at a time")
      .Help(
          "Compute feed-forwards N tokens at a time and again in the backward pass; results "
          "change by roundings. 0: all at once.");
  t->Add("head_chunk", &c->head_chunk)
      .Min(0)
      .Unit("KV heads")
      .MayChange()
      .Says("; attention of $0 KV heads at a time")
      .Help(
          "Compute attention N KV heads at a time and project them again in the backward pass; "
          "results change by roundings. 0: all at once.");
  t->Add("zero", &c->zero)
      .Min(0)
      .Max(3)
      .MayChange()
      .Help(
          "Divide between ranks (ZeRO) 1: the optimizer's state, 2: gradients, too, 3: "
          "parameters, too. 0: nothing.");
  t->Add("offload", &c->offload, kOffloads)
      .MayChange()
      .Help(
          "Keep activations (what recomputed layers store), optimizer (moments and fp32 weights), "
          "or all in the memory of the host. none: on the GPU.");
}

void AddRankOptions(TrainConfig* c, OptionTable* t) {
  t->Group("devices and ranks");
  t->Add("device", &c->device, kDeviceChoices)
      .Basic()
      .MayChange()
      .Help("Train on cpu or cuda. auto: cuda where a GPU is found.");
  t->Add("precision", &c->precision, kPrecisions)
      .Basic()
      .MayChange()
      .Help(
          "Compute in fp32, tf32, bf16 (fp32 master weights and sums), or fp8 (bf16 with 8-bit "
          "linear products). auto: bf16 on GPUs, fp32 on CPUs.");
  t->Add("fp8_recipe", &c->fp8_recipe, kFp8Recipes)
      .Help(
          "Scale fp8 by tensors (tensorwise), by rows (rowwise), or by 128 numbers of a row and "
          "128 "
          "x 128 weights (blocks).");
  t->Add("bf16_layers", &c->bf16_layers)
      .Min(0)
      .Unit("layers")
      .Help("With --precision=fp8, keep the first N and the last N layers in bf16.");
  t->Add("ranks", &c->ranks)
      .Basic()
      .Min(1)
      .Max(kMaxRanks)
      .Or(-1)
      .MayChange()
      .Help(
          "Run N threads or GPUs as ranks. -1: dp times pp times sp times tp, a launcher's "
          "processes, else 2 threads or 1 GPU.");
  const struct {
    const char* name;
    int64_t* field;
    const char* help;
  } meshes[] = {
      {"dp", &c->dp, "Divide the batch over N groups of ranks. -1: ranks / (pp sp tp)."},
      {"sp", &c->sp, "Divide sequences over a ring of N ranks. -1: ranks / (dp pp tp)."},
      {"tp", &c->tp,
       "Divide weights, heads and hidden channels over N ranks (tensor parallelism). -1: 1."}};
  for (const auto& mesh : meshes) {
    t->Add(mesh.name, mesh.field)
        .Min(1)
        .Max(kMaxRanks)
        .Or(-1)
        .Unit("ranks")
        .MayChange()
        .Help(mesh.help);
  }
  t->Add("pp", &c->pp)
      .Min(1)
      .Max(kMaxRanks)
      .Unit("stages")
      .MayChange()
      .Help(
          "Divide the layers over N pipeline stages, which are idle (pp - 1) / (accumulate "
          "pp_chunks) of the time.");
  t->Add("pp_chunks", &c->pp_chunks)
      .Min(1)
      .MayChange()
      .Help(
          "Give each stage of --pp N runs of layers, which are idle for less time. 1: the "
          "schedule 1F1B.");
  t->Add("plan", &c->plan)
      .MayChange()
      .Help(
          "Refuse a run that does not fit the memory before its first step, and say what to "
          "change (//train:plan).");
  t->Add("comm", &c->comm, kCommChoices)
      .MayChange()
      .Help(
          "Connect threads, or processes of a launcher by tcp, mpi (CPUs) or nccl (GPUs). auto: "
          "threads, under a launcher nccl or tcp.");
  t->Add("threads", &c->threads)
      .Min(1)
      .Max(1024)
      .Or(-1)
      .MayChange()
      .Of(Scope::kProcess)
      .Help("Give each rank N threads of the CPU. -1: cores / ranks.");
  t->Add("patience", &c->patience)
      .Min(0)
      .Unit("seconds")
      .MayChange()
      .Of(Scope::kProcess)
      .Help(
          "End the run after N seconds without progress on any rank, and say where every rank is. "
          "0: never.");
}

absl::StatusOr<Strategy> ParseTrainStrategy(absl::string_view name) {
  if (name != "tp" && name != "tp+sp") return ParseStrategy(name);
  return absl::InvalidArgumentError(
      absl::StrCat("must be a way to spread attention; got ", name, "; give --tp=N"));
}

void AddAttentionOptions(TrainConfig* c, OptionTable* t) {
  t->Group("attention over ranks");
  t->Add("strategy", &c->strategy, ParseTrainStrategy)
      .MayChange()
      .Help(
          "Spread attention as single (one rank), burst (a ring), ring (RingAttention), ulysses or "
          "burst+ulysses.");
  t->Add("ulysses", &c->ulysses)
      .Min(1)
      .Or(-1)
      .Unit("ranks")
      .MayChange()
      .Help(
          "Share the heads among groups of N ranks. -1: as many as divide the ranks and the KV "
          "heads.");
  t->Add("ranks_per_node", &c->ranks_per_node)
      .Min(-1)
      .Unit("ranks")
      .MayChange()
      .Help(
          "Make a double ring of nodes with N ranks of a sequence each. 0: one flat ring. -1: as "
          "a launcher says.");
  t->Add("layout", &c->layout, ParseLayout)
      .MayChange()
      .Help(
          "Spread a sequence as contiguous, zigzag, striped, or, with --packed, balanced (whole "
          "documents where ranks get equal work, else zigzag).");
  t->Add("ring_backward", &c->ring_backward, ParseBackwardDirection)
      .MayChange()
      .Help(
          "Send queries (burst) or keys and values (ring) in the backward pass. auto: the fewer "
          "bytes.");
  t->Add("ring_grad_dtype", &c->ring_grad_dtype, ParseRingGradDType)
      .MayChange()
      .Help("Send gradients around the ring in bf16, rounded at every transfer, or in fp32.");
  t->Add("deterministic", &c->deterministic)
      .MayChange()
      .Help(
          "Compute the same bits in every run. false: GPU kernels may be faster, CPU kernels "
          "stay the same.");
  t->Add("exact", &c->exact)
      .Help(
          "Compute the same bits on any number of ranks, in any layout, at the cost of time and "
          "memory (docs/training/several_gpus.md).");
  t->Add("exact_chunk", &c->exact_chunk)
      .Min(0)
      .Unit("tokens")
      .Help(
          "Divide exact sums into chunks of N tokens, a multiple of 16; bits depend on it. 0: up "
          "to 8192, in 8 chunks or more.");
}

void AddOutputOptions(TrainConfig* c, OptionTable* t) {
  t->Group("output");
  t->Add("out", &c->out)
      .Basic()
      .NotSaved()
      .Of(Scope::kHost)
      .Help(
          "Write metrics.jsonl, config.json, checkpoints and loss.svg into this folder. Empty: "
          "runs/<model>-<number>.");
  t->AddSwitch("resume", &c->resume_mode, kResumes)
      .Basic()
      .NotSaved()
      .Help(
          "Continue the run in --out, with its configuration and what is given here. auto: start "
          "it if --out has no checkpoint.");
  t->Add("config", &c->config)
      .NotSaved()
      .Of(Scope::kHost)
      .Help("Read options from a JSON file; the command line wins.");
  t->Add("eval_every", &c->eval_every)
      .Min(0)
      .Unit("steps")
      .MayChange()
      .Help("Evaluate after every N steps. 0: never.");
  t->Add("eval_batches", &c->eval_batches)
      .Min(0)
      .MayChange()
      .Help("Evaluate N batches, spread evenly over the validation data. 0: all of it.");
  t->Add("checkpoint_every", &c->checkpoint_every)
      .Min(0)
      .Unit("steps")
      .MayChange()
      .Help("Save a checkpoint after every N steps. 0: at the end alone.");
  t->Add("checkpoint_files", &c->checkpoint_files, kCheckpointFiles)
      .MayChange()
      .Help(
          "Save in one file, in a file of each rank (ranks), or never (none). auto: ranks if they "
          "divide the state, else one.");
  t->Add("keep", &c->keep)
      .Min(1)
      .Unit("checkpoints")
      .MayChange()
      .Help("Keep the N newest checkpoints, and the best one by validation loss.");
  t->Add("log_every", &c->log_every)
      .Min(1)
      .Unit("steps")
      .MayChange()
      .Help("Print a line after every N steps if the output is not a terminal.");
  t->Add("tensorboard", &c->tensorboard)
      .MayChange()
      .Help("Write the metrics as an event file of TensorBoard, too.");
  t->Add("profile_steps", &c->profile_steps)
      .NotSaved()
      .Of(Scope::kProcess)
      .Help(
          "Profile steps FIRST-LAST, or one step, for `nsys profile "
          "--capture-range=cudaProfilerApi`. Empty: none.");
  t->Add("sample", &c->sample)
      .Min(-1)
      .Unit("tokens")
      .MayChange()
      .Help(
          "Generate N tokens at the end. -1: 256; none for shards without --tokenizer, with "
          "--zero=3 or --checkpoint_files=none.");
}

}  // namespace

OptionTable TrainOptions(TrainConfig* config) {
  OptionTable table;
  AddDataOptions(config, &table);
  AddModelOptions(config, &table);
  AddOptimizationOptions(config, &table);
  AddRankOptions(config, &table);
  AddMemoryOptions(config, &table);
  AddAttentionOptions(config, &table);
  AddOutputOptions(config, &table);
  AddConflictsToHelp(&table);
  return table;
}

}  // namespace burst
