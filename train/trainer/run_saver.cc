#include "train/trainer/run_saver.h"

#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/print_error.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/cli/process.h"
#include "burst/tensor/tensor.h"
#include "train/checkpoint/checkpoint_set.h"
#include "train/report/run_folder.h"

namespace burst {

RunSaver::RunSaver(const TrainingSetup& setup, Communicator* world, Communicator* tensor,
                   const ParameterList& parameters, const AdamW& optimizer)
    : setup_(setup),
      config_(setup.config),
      world_(world),
      tensor_(tensor),
      parameters_(parameters),
      optimizer_(optimizer),
      saved_step_(setup.resumed.has_value() ? setup.resumed->step : 0) {
  const Mesh& mesh = config_.mesh;
  if (config_.checkpoint_files == CheckpointFiles::kRanks) {
    const int parts = mesh.tensor, rank = mesh.rank_in_stage(world->rank());
    copy_ = std::make_unique<StateCopy>(
        parameters, optimizer,
        ShareOfState(parameters, rank / parts, mesh.stage_size() / parts, rank % parts, parts));
  } else if (config_.checkpoint_files == CheckpointFiles::kOne && world->rank() == 0 &&
             tensor == nullptr && config_.zero == 0) {
    copy_ = std::make_unique<StateCopy>(parameters, optimizer, OwnState(parameters));
  }
}

absl::Status RunSaver::Open(RunReport* report) {
  report_ = report;
  return config_.checkpoint_files == CheckpointFiles::kRanks ? ShareRunPath() : absl::OkStatus();
}

void RunSaver::Reserve() {
  if (copy_ != nullptr) copy_->Reserve();
}

absl::Status RunSaver::Save(int64_t step, std::optional<double> val_loss) {
  BURST_RETURN_IF_ERROR(Await());
  const CheckpointInfo info = Info(step, val_loss);
  if (config_.checkpoint_files == CheckpointFiles::kRanks) return SaveSet(info);
  if (tensor_ != nullptr || config_.zero > 0) return SaveTogether(info);
  if (report_ == nullptr) return absl::OkStatus();
  copy_->Take();
  saved_step_ = info.step;
  writing_.Start([this, info, rows = report_->folder().metrics().rows()] {
    return Keep(info, rows,
                [&](const std::string& path) { return WriteCheckpoint(path, info, *copy_); });
  });
  return absl::OkStatus();
}

absl::Status RunSaver::SaveTogether(const CheckpointInfo& info) {
  // With --zero, all ranks save. Otherwise the first group of ranks that holds a whole model saves.
  Communicator* const group = config_.zero > 0 ? world_ : tensor_;
  if (config_.zero == 0 && world_->rank() >= config_.mesh.tensor) return absl::OkStatus();
  const WriteFile save = [&](const std::string& path) {
    return SaveCheckpoint(path, info, parameters_, optimizer_, group);
  };
  if (report_ == nullptr) return save("");
  BURST_RETURN_IF_ERROR(Keep(info, report_->folder().metrics().rows(), save));
  saved_step_ = info.step;
  report_->Saved();
  return absl::OkStatus();
}

absl::Status RunSaver::SaveForked(int64_t step, std::optional<double> val_loss) {
  const CheckpointInfo info = Info(step, val_loss);
  return Keep(info, report_->folder().metrics().rows(), [&](const std::string& path) {
    return SaveCheckpoint(path, info, parameters_, optimizer_);
  });
}

absl::Status RunSaver::SaveSet(const CheckpointInfo& info) {
  absl::StatusOr<std::string> made;
  if (report_ != nullptr) made = MakeSet(run_path_, info.step);
  absl::Status status = report_ == nullptr ? absl::OkStatus() : made.status();
  BURST_ASSIGN_OR_RETURN(const std::string name, ShareString(made.ok() ? *made : ""));
  const std::string set = (std::filesystem::path(run_path_) / name).string();
  std::error_code error;
  if (!name.empty() && !std::filesystem::is_directory(set, error)) status = NotShared(set);
  BURST_RETURN_IF_ERROR(AgreeOrWait(status, world_));
  copy_->Take();
  saved_step_ = info.step;
  set_ = {name, info, {}};
  if (report_ != nullptr) set_->rows = report_->folder().metrics().rows();
  writing_.Start([this, path = SetFilePath(set, world_->rank(), world_->world_size())] {
    return WriteSetFile(path, *copy_);
  });
  return absl::OkStatus();
}

absl::Status RunSaver::CompleteSet() {
  BURST_RETURN_IF_ERROR(AgreeOrWait(AwaitWriting(), world_));
  const Set set = *std::exchange(set_, std::nullopt);
  if (report_ == nullptr) return absl::OkStatus();
  writing_.Start([this, set, files = world_->world_size()] {
    return Keep(set.info, set.rows, [&](const std::string& path) {
      return WriteCheckpointIndex(path, set.info, set.name, files);
    });
  });
  return absl::OkStatus();
}

absl::Status RunSaver::Await() {
  if (set_.has_value()) BURST_RETURN_IF_ERROR(CompleteSet());
  return AwaitWriting();
}

absl::Status RunSaver::AwaitWriting() {
  if (!writing_.started()) return absl::OkStatus();
  const ScopedPhase phase("save");
  const ScopedWait wait("waits for the checkpoint to be written");
  return EndWriting();
}

absl::Status RunSaver::EndWritten() {
  const bool written = writing_.started() && !writing_.busy();
  return written && !set_.has_value() ? EndWriting() : absl::OkStatus();
}

void RunSaver::BeforeUpdate() {
  if (copy_ == nullptr || !copy_->in_place()) return;
  const ScopedWait wait("waits for the checkpoint to be written, before the next update");
  writing_.Finish();
}

absl::Status RunSaver::EndWriting() {
  BURST_RETURN_IF_ERROR(writing_.Wait());
  if (report_ != nullptr) report_->Saved();
  return absl::OkStatus();
}

absl::Status RunSaver::ShareRunPath() {
  std::error_code error;
  std::string own;
  if (report_ != nullptr) own = std::filesystem::absolute(report_->folder().path(), error).string();
  BURST_ASSIGN_OR_RETURN(run_path_, ShareString(own));
  // Rank 0 has just written the file that lies there.
  const std::string settings = (std::filesystem::path(run_path_) / "config.json").string();
  const bool seen = std::filesystem::exists(settings, error);
  return AgreeOrWait(seen ? absl::OkStatus() : NotShared(run_path_), world_);
}

absl::Status RunSaver::NotShared(const std::string& path) const {
  return absl::FailedPreconditionError(
      absl::StrCat("--checkpoint_files: rank ", world_->rank(), " does not see ", path,
                   ", which rank 0 made; ranks on several hosts write their shares of a checkpoint "
                   "to a file system that all of them see: give --out there, or "
                   "--checkpoint_files=one"));
}

absl::StatusOr<std::string> RunSaver::ShareString(const std::string& text) {
  std::string shared = text;
  auto bytes = static_cast<int64_t>(shared.size());
  BURST_RETURN_IF_ERROR(world_->Broadcast(&bytes, sizeof(bytes), /*root=*/0));
  shared.resize(bytes);
  BURST_RETURN_IF_ERROR(world_->Broadcast(shared.data(), bytes, /*root=*/0));
  return shared;
}

absl::Status RunSaver::Keep(const CheckpointInfo& info, const std::vector<StepMetrics>& rows,
                            const WriteFile& write) {
  RunFolder& folder = report_->folder();
  BURST_RETURN_IF_ERROR(folder.Save(info, write));
  const absl::Status plotted = folder.Plot(config_.model_name, rows);
  if (!plotted.ok()) {  // the next save draws it again
    std::fprintf(stderr, "warning: %s; the checkpoint is complete\n",
                 Printable(plotted.message()).c_str());
  }
  return absl::OkStatus();
}

CheckpointInfo RunSaver::Info(int64_t step, std::optional<double> val_loss) const {
  CheckpointInfo info;
  info.step = step;
  info.updates = optimizer_.updates();
  info.seqlen = config_.seqlen;
  info.window = config_.window;
  info.model = config_.model;
  info.tokenizer = setup_.data.tokenizer;
  info.config = config_.ToJson();
  info.data_fingerprint = setup_.data_fingerprint;
  info.val_loss = val_loss;
  return info;
}

absl::Status StopAgreement::Agree() {
  const ScopedPhase phase("agreement whether to stop");
  const Tensor sums = Tensor::FromVector<double>(
      {InterruptSignal() != 0 ? 1.0 : 0.0, saver_->busy() ? 1.0 : 0.0}, {2});
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(sums));
  stops_ = stops_ || sums.data<double>()[0] > 0;
  // Either all ranks know of a set, or none.
  if (saver_->has_set() && sums.data<double>()[1] == 0) return saver_->CompleteSet();
  return absl::OkStatus();
}

}  // namespace burst
