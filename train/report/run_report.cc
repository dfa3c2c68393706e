#include "train/report/run_report.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/attention/strategy.h"
#include "burst/base/status.h"
#include "burst/cli/text.h"
#include "burst/device/device.h"
#include "model/transformer.h"
#include "train/huggingface/pretrained.h"
#include "train/pipeline/schedule.h"

namespace burst {
namespace {

std::string Machine(const ResolvedConfig& config, double peak_flops) {
  if (config.device == DeviceType::kCpu) {
    return absl::StrFormat("%d x %d threads, sgemm %.1f GFLOP/s measured: 100%% of MFU",
                           config.ranks, config.threads, peak_flops * 1e-9);
  }
  const char* precision = config.dtype == DType::kBFloat16 ? "bf16" : config.tf32 ? "tf32" : "fp32";
  return absl::StrFormat("%d x %s, %s GEMMs %.0f TFLOP/s measured: 100%% of MFU", config.ranks,
                         CudaDeviceName(0), precision, peak_flops * 1e-12);
}

std::string Ranks(const ResolvedConfig& config) {
  const char* kind = config.comm == CommKind::kMpi    ? "processes, MPI"
                     : config.comm == CommKind::kNccl ? "processes, NCCL"
                     : config.comm == CommKind::kTcp  ? "processes, TCP"
                                                      : "threads";
  const double bubble = PipelineBubble({config.mesh.stages, static_cast<int>(config.pp_chunks),
                                        static_cast<int>(config.accumulate)});
  const std::string stages =
      config.mesh.stages == 1
          ? ""
          : absl::StrFormat("%d pipeline stages (bubble %.3g) x ", config.mesh.stages, bubble);
  const int sequence = config.mesh.sequence, tensor = config.mesh.tensor;
  std::string groups;
  if (sequence > 1 || tensor == 1) groups = absl::StrCat(sequence, " sequence parallel");
  if (tensor > 1) {
    absl::StrAppend(&groups, groups.empty() ? "" : " x ", tensor, " tensor parallel");
  }
  return absl::StrFormat("%d = %d data parallel x %s%s; %s", config.ranks, config.mesh.data, stages,
                         groups, kind);
}

// Describes the memory that a rank keeps between steps, and which part of it ranks divide.
std::string State(const ResolvedConfig& config, const ParameterList::KeptBytes& kept) {
  const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  std::string text =
      absl::StrFormat("%.1f MiB a rank: parameters %.1f, gradients %.1f, optimizer %.1f",
                      mib(kept.values + kept.gradients + kept.optimizer), mib(kept.values),
                      mib(kept.gradients), mib(kept.optimizer));
  if (kept.optimizer_on_host > 0) {
    absl::StrAppendFormat(&text, "; in the host's memory: optimizer %.1f",
                          mib(kept.optimizer_on_host));
  }
  if (config.zero == 0) return text;
  return absl::StrFormat("%s; divided over %d ranks (ZeRO %d), which save it together", text,
                         config.state_ranks(), config.zero);
}

std::string Model(const ResolvedConfig& config) {
  const ModelConfig& m = config.model;
  const std::string weights =
      config.pretrained.has_value() ? absl::StrCat("; weights of ", config.pretrained->path,
                                                   config.pretrained->unread.empty() ? "" : "; ",
                                                   UnreadWeights(*config.pretrained))
      : !config.lost_folder.empty()
          ? absl::StrCat("; began with ", config.lost_folder, ", which is gone")
          : "";
  return absl::StrFormat("%d layers, width %d, %d heads (%d KV heads), vocabulary %d%s%s", m.layers,
                         m.width, m.heads, m.kv_heads > 0 ? m.kv_heads : m.heads, m.vocab, weights,
                         config.Sentences());
}

std::string Attention(const ResolvedConfig& config) {
  std::string text =
      absl::StrFormat("%d tokens, %s%s; %s over %d ranks, %s", config.seqlen,
                      config.window > 0 ? absl::StrCat("window of ", config.window) : "causal",
                      config.packed ? ", packed documents" : "", Name(config.layout),
                      config.mesh.sequence * config.mesh.tensor, Name(config.strategy));
  if (config.strategy == Strategy::kBurstUlysses) {
    absl::StrAppend(&text, " in groups of ", config.ulysses);
  }
  if (config.ranks_per_node > 0) {
    absl::StrAppend(&text, ", ", config.ranks_per_node, " ranks per node");
  }
  if (HasDirections(config.strategy)) {
    absl::StrAppend(&text, ", ", Name(config.ring_backward), " backward");
  }
  if (config.ring_grad_dtype != RingGradDType::kFp32) {
    absl::StrAppend(&text, ", ", Name(config.ring_grad_dtype), " gradients in transit");
  }
  const ModelConfig& model = config.model;
  if (model.attention_softcap > 0) absl::StrAppend(&text, ", softcap ", model.attention_softcap);
  if (model.attention_sinks) absl::StrAppend(&text, ", sinks");
  if (model.attention_dropout > 0) absl::StrAppend(&text, ", dropout ", model.attention_dropout);
  return text;
}

std::string OfStep(const ResolvedConfig& config, int64_t sequences_per_epoch) {
  const int64_t sequences = config.batch * config.accumulate;
  return absl::StrFormat("%d sequences x %d micro-batch%s = %s tokens; %d steps, %.2f epochs",
                         config.batch, config.accumulate, config.accumulate == 1 ? "" : "es",
                         Thousands(sequences * config.seqlen), config.steps,
                         static_cast<double>(config.steps) * static_cast<double>(sequences) /
                             static_cast<double>(sequences_per_epoch));
}

std::string Optimizer(const ResolvedConfig& config) {
  const LrSchedule& lr = config.lr;
  const bool muon = config.optimizer == OptimizerKind::kMuon;
  return absl::StrFormat("%s, lr %g to %g (%s, %d steps of warm-up), decay %g, clip %g",
                         muon ? "Muon for matrices, else AdamW" : "AdamW", lr.lr, lr.min_lr,
                         Name(lr.shape), lr.warmup, config.weight_decay, config.clip);
}

absl::StatusOr<RunFolder> OpenFolder(const TrainingSetup& setup) {
  const ResolvedConfig& config = setup.config;
  if (!setup.resumed.has_value()) return RunFolder::Make(config);
  RunLock lock;
  if (setup.lock.has_value()) {
    lock = *setup.lock;
  } else {
    BURST_ASSIGN_OR_RETURN(lock, LockRunFolder(config.out, /*wait=*/false));
  }
  return RunFolder::Continue(config, *setup.resumed, std::move(lock));
}

}  // namespace

absl::StatusOr<std::unique_ptr<RunReport>> RunReport::Open(const TrainingSetup& setup,
                                                           const Facts& facts, bool prints) {
  const ResolvedConfig& config = setup.config;
  BURST_ASSIGN_OR_RETURN(RunFolder folder, OpenFolder(setup));
  std::unique_ptr<RunReport> report(new RunReport(std::move(folder)));
  if (config.tensorboard) {
    BURST_ASSIGN_OR_RETURN(TensorBoardLog log,
                           TensorBoardLog::Create(report->folder_.path(), facts.step));
    report->tensorboard_.emplace(std::move(log));
  }
  report->facts_.flops_per_token = facts.throughput.flops_per_token.full;
  report->facts_.peak_flops = facts.throughput.peak_flops;
  report->facts_.planned = setup.plan;
  BURST_RETURN_IF_ERROR(WriteRunFacts(report->folder_.path(), report->facts_));
  if (!prints) return report;
  BURST_ASSIGN_OR_RETURN(const int64_t parameters, Transformer::CountParameters(config.model));
  report->console_ = std::make_unique<Console>(config.steps, config.log_every, facts.throughput);
  std::vector<std::pair<std::string, std::string>> rows = {
      {"data", setup.data.summary},
      {"",
       absl::StrFormat("trains on %s tokens, validates on %s", Thousands(setup.data.train.size()),
                       Thousands(setup.data.validation.size()))},
      {"model", Model(config)},
      {"attention", Attention(config)},
      {"ranks", Ranks(config)},
      {"step", OfStep(config, facts.sequences_per_epoch)},
      {"optimizer", Optimizer(config)},
      {"state", State(config, facts.kept)},
      {"machine", Machine(config, facts.throughput.peak_flops)},
      {"run folder", report->folder_.path()}};
  if (!setup.plan.empty()) rows.insert(rows.end() - 2, {"planned", setup.plan});
  report->console_->Table(absl::StrFormat("%s: %s, %s parameters", config.model_name,
                                          Name(config.model.family), Thousands(parameters)),
                          rows);
  const int64_t context = config.model.context;
  if (context > 0 && config.seqlen > context) {
    report->console_->Print(absl::StrFormat(
        "warning: --seqlen=%d is beyond the %d positions that the model was made for; an export "
        "says the longer ones",
        config.seqlen, context));
  }
  if (facts.step > 0) {
    report->console_->Print(absl::StrCat(
        "continuing after step ", facts.step,
        setup.resumed->checksums ? "" : ", from a checkpoint without checksums (an older format)"));
  }
  return report;
}

absl::Status RunReport::Record(const StepMetrics& metrics) {
  BURST_RETURN_IF_ERROR(folder_.metrics().Append(metrics));
  return tensorboard_.has_value() ? tensorboard_->Append(metrics) : absl::OkStatus();
}

absl::Status RunReport::Evaluated(const StepMetrics& row) {
  BURST_RETURN_IF_ERROR(folder_.metrics().SetLastValidation(row));
  return tensorboard_.has_value() ? tensorboard_->AppendValidation(row) : absl::OkStatus();
}

bool RunReport::LacksEvaluation(int64_t step) const {
  const std::vector<StepMetrics>& rows = folder_.metrics().rows();
  return !rows.empty() && rows.back().step == step && !rows.back().val_loss.has_value();
}

void RunReport::Print(const StepMetrics& metrics, bool saved) {
  if (console_ == nullptr) return;
  console_->Step(metrics);
  if (metrics.skipped) {
    console_->Print(
        absl::StrCat("step ", metrics.step, " skipped: its loss or gradient is not finite"));
  } else if (std::isnan(metrics.loss)) {
    console_->Print(absl::StrCat("step ", metrics.step, " has no token that counts in the loss"));
  }
  if (metrics.val_loss.has_value()) PrintEvaluation(metrics);
  if (!saved) {
    console_->Print(absl::StrCat("step ", metrics.step, " is not saved: its model is not finite"));
  }
}

void RunReport::PrintEvaluation(const StepMetrics& row) {
  if (console_ == nullptr) return;
  std::string line = absl::StrFormat("step %d: validation loss %.4f", row.step, *row.val_loss);
  if (row.val_loss_ema.has_value()) {
    absl::StrAppendFormat(&line, ", of the average %.4f", *row.val_loss_ema);
  }
  console_->Print(line);
}

void RunReport::Saved() {
  if (console_ == nullptr || folder_.checkpoints().has_links() || told_of_links_) return;
  told_of_links_ = true;
  console_->Print(
      "this file system has no hard links: of the checkpoints, only the newest is kept");
}

void RunReport::Stopped(int64_t step) {
  if (console_ == nullptr) return;
  const int64_t saved = folder_.checkpoints().newest_step();
  if (saved == 0) return console_->Print(absl::StrFormat("stopped after step %d", step));
  const std::string from = saved == step ? "" : absl::StrCat(" after step ", saved);
  console_->Print(absl::StrFormat("stopped after step %d; continue%s with --resume --out=%s", step,
                                  from, folder_.path()));
}

void RunReport::Finished(int64_t steps, double seconds, int64_t peak_bytes,
                         absl::string_view sample) {
  facts_.seconds = seconds;
  facts_.peak_bytes = peak_bytes;
  facts_.sample = std::string(sample);
  WriteRunFacts(folder_.path(), facts_).IgnoreError();  // the run is complete without it
  if (console_ == nullptr) return;
  console_->Print(absl::StrFormat("%s steps in %s; peak tensor memory %.1f MiB", Thousands(steps),
                                  ShortDuration(seconds),
                                  static_cast<double>(peak_bytes) / (1 << 20)));
  if (!sample.empty()) console_->Print(absl::StrCat("\nA sample:\n\n", sample, "\n"));
  console_->Print(absl::StrCat("The run is in ", folder_.path()));
}

}  // namespace burst
