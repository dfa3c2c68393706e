// stuck_train RANK WAITS OPTION...: runs //train with one rank that stands still for ever. It stops
// at its wait number WAITS for messages, as if its peer never posted. watchdog_test uses it, and
// watchdog_gpu_test.sh on GPUs.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "burst/base/parallel.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/base/watchdog.h"
#include "burst/cli/process.h"
#include "burst/comm/communicator.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/mpi/mpi_communicator.h"
#include "burst/comm/tcp/tcp_communicator.h"
#include "burst/device/progress.h"
#include "train/config/config.h"
#include "train/run/launch.h"
#include "train/run/setup.h"
#include "train/trainer/trainer.h"

namespace burst {
namespace {

// Forwards every call. After some waits it stands still.
class StuckCommunicator : public Communicator {
 public:
  using Waits = std::shared_ptr<int>;  // waits that are left in all groups

  StuckCommunicator(Communicator* inner, Waits waits) : inner_(inner), waits_(std::move(waits)) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  int WorldRank(int rank) const override { return inner_->WorldRank(rank); }
  bool messages_are_kernels(int64_t bytes) const override {
    return inner_->messages_are_kernels(bytes);
  }
  void Abort(const absl::Status& reason) override { inner_->Abort(reason); }

  absl::Status Wait(Channel channel) override {
    if (--*waits_ == 0) {
      while (true) sleep(1);
    }
    return inner_->Wait(channel);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override {
    BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> group, inner_->Split(color, key));
    std::unique_ptr<Communicator> result;
    if (group == nullptr) return result;
    auto stuck = std::make_unique<StuckCommunicator>(group.get(), waits_);
    stuck->owned_ = std::move(group);
    result = std::move(stuck);
    return result;
  }
  absl::Status AllReduceSum(const Tensor& tensor) override { return inner_->AllReduceSum(tensor); }
  absl::Status PostAllReduceSum(const Tensor& tensor) override {
    return inner_->PostAllReduceSum(tensor);
  }
  absl::Status Barrier() override { return inner_->Barrier(); }

 protected:
  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override {
    return inner_->Post(channel, sends, receives);
  }

 private:
  Communicator* const inner_;
  std::unique_ptr<Communicator> owned_;
  const Waits waits_;
};

absl::Status Run(int stuck_rank, int waits, int argc, char** argv) {
  BURST_ASSIGN_OR_RETURN(const TrainConfig options, TrainConfigFromArguments(argc, argv));
  std::unique_ptr<Communicator> mpi;
  if (options.comm == CommChoice::kMpi) {
    BURST_ASSIGN_OR_RETURN(mpi, CreateMpiCommunicator());
  }
  Launch found = DetectLaunch();
  if (mpi != nullptr) found.processes = mpi->world_size();
  BURST_ASSIGN_OR_RETURN(const ResolvedConfig config, ResolveConfig(options, found));
  const Watchdog watchdog(std::chrono::seconds(config.patience));
  BURST_ASSIGN_OR_RETURN(const TrainingSetup setup, PrepareTraining(config));
  const auto train = [&](Communicator& inner) -> absl::Status {
    StuckCommunicator comm(
        &inner, std::make_shared<int>(inner.rank() == stuck_rank ? waits : 1'000'000'000));
    BURST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(setup, &comm, /*verbose=*/false));
    return trainer->Train();
  };
  if (config.comm == CommKind::kThreads) return RunRanksInProcess(config, train);

  std::unique_ptr<Communicator> comm = std::move(mpi);
  BURST_ASSIGN_OR_RETURN(const auto launch, DetectProcessLaunch(std::getenv));
  std::unique_ptr<ScopedCudaDevice> device;
  if (config.device == DeviceType::kCuda) {
    BURST_ASSIGN_OR_RETURN(const int gpu, GpuOfProcess(*launch));
    device = std::make_unique<ScopedCudaDevice>(gpu, launch->rank);
  }
  const ScopedRankProgress progress(comm == nullptr ? launch->rank : comm->rank());
  const auto marks = MarkDeviceProgress(config.device);
  if (config.device == DeviceType::kCuda) {
    BURST_ASSIGN_OR_RETURN(comm, CreateGpuCommunicator(*launch));
  } else if (comm == nullptr) {
    BURST_ASSIGN_OR_RETURN(comm, TcpCommunicator::Create(*launch, TcpOptions()));
  }
  const ScopedThreadPool pool(config.threads);
  return train(*comm);
}

int Main(int argc, char** argv) {
  if (argc < 3) return kExitBadUsage;
  const int stuck_rank = std::atoi(argv[1]), waits = std::atoi(argv[2]);
  argv[2] = argv[0];
  const absl::Status status = Run(stuck_rank, waits, argc - 2, argv + 2);
  return status.ok() ? 0 : ExitCode(status, kExitFailure);
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::Main(argc, argv); }
